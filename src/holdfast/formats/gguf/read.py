"""Describes a GGUF file, or a folder with the files of a split model, as a checkpoint.

Tensors of quantization blocks are described as arrays of bytes. `holdfast.dequantize` decodes them.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence

from holdfast.core.chunk import c_strides
from holdfast.core.protocols import Description, Source
from holdfast.core.table import RowKind, StoredFile, Table
from holdfast.core.tensor import NO_CRC, PLAIN_TRAITS, Traits
from holdfast.engine.files import FileStorages
from holdfast.errors import HeaderError, StoreError
from holdfast.formats.gguf.header import MAGIC, GgufHeader, TensorLocation, read_gguf_header

SPLIT_FILE_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")

SPLIT_NO = "split.no"
"""The index of a file in its model, counted from 0. The number in the file name starts at 1."""
SPLIT_COUNT = "split.count"
SPLIT_TENSORS_COUNT = "split.tensors.count"
"""The number of tensors in all files. Only the first file has to have it."""


def describe_gguf(source: Source) -> Description:
    """Describe a single file. It may be one of a split model, which a note then says."""
    (key,) = source.store.list()
    header = read_gguf_header(source, key)
    tensors = _tabulate_tensors([header], source)

    notes: list[str] = []
    file_count = header.metadata.integer(SPLIT_COUNT) or 0
    if file_count > 1:
        file_number = (header.metadata.integer(SPLIT_NO) or 0) + 1
        notes.append(
            f"this is file {file_number:,} of {file_count:,} of a split model;"
            " open the folder to see the tensors of all files"
        )
    return Description(
        "gguf",
        tensors,
        tensors,
        notes=tuple(notes),
        notes_on_blocks=_describe_blocks([header]),
        metadata=header.metadata,
    )


def is_directory(source: Source) -> bool:
    """Return whether a folder has several files of split models."""
    keys = _list_split_files(source.store.list())
    return len(keys) > 1 and all(source.read_head(key, len(MAGIC)) == MAGIC for key in keys)


def describe_directory(source: Source) -> Description:
    """Describe a folder that has all files of one split model.

    Raises:
        StoreError: Files of the model are missing.
        HeaderError: The folder has files of several models, or the files contradict each other.
    """
    keys = _list_split_files(source.store.list())
    _check_split_file_names(keys, source.store.name)
    headers = [read_gguf_header(source, key) for key in keys]
    for file_index, header in enumerate(headers):
        stated = header.metadata.integer(SPLIT_NO), header.metadata.integer(SPLIT_COUNT)
        expected = file_index, len(headers)
        if stated != expected:
            message = (
                f"the file name says {SPLIT_NO} and {SPLIT_COUNT} are {expected},"
                f" but the metadata says {stated}"
            )
            raise HeaderError(message, file=header.key, expected=expected, found=stated)

    tensors = _tabulate_tensors(headers, source)
    metadata = headers[0].metadata
    stated_tensor_count = metadata.integer(SPLIT_TENSORS_COUNT)
    if stated_tensor_count not in (None, len(tensors)):
        raise HeaderError(
            f"the first file states {stated_tensor_count:,} tensors, but all files together have {len(tensors):,}",
            file=keys[0],
            expected=stated_tensor_count,
            found=len(tensors),
        )
    return Description(
        "gguf-dir", tensors, tensors, notes_on_blocks=_describe_blocks(headers), metadata=metadata
    )


def _list_split_files(keys: Sequence[str]) -> list[str]:
    return sorted(key for key in keys if "/" not in key and SPLIT_FILE_NAME.fullmatch(key))


def _check_split_file_names(keys: Sequence[str], folder: str) -> None:
    """Check that the files belong to one model, and that none is missing."""
    models: set[tuple[str, str]] = set()
    for key in keys:
        match = SPLIT_FILE_NAME.fullmatch(key)
        assert match is not None  # `keys` were selected by this pattern
        models.add((match[1], match[3]))
    if len(models) > 1:
        stems = ", ".join(repr(stem) for stem, _ in sorted(models)[:3])
        message = (
            f"the folder has files of several models ({stems}); put each model into its own folder"
        )
        raise HeaderError(message, file=folder)

    ((stem, count_digits),) = models
    file_count = int(count_digits)
    if len(keys) > file_count:
        message = (
            f"the folder has {len(keys):,} files of a model that has {file_count:,} by their names"
        )
        raise HeaderError(message, file=folder, expected=file_count, found=len(keys))

    # A name can state 99,999 files. The first missing one is among the first len(keys) + 1.
    for file_number in range(1, min(file_count, len(keys) + 1) + 1):
        expected_key = f"{stem}-{file_number:05}-of-{count_digits}.gguf"
        if expected_key not in keys:
            missing_count = file_count - len(keys)
            message = f"{missing_count:,} of {file_count:,} files are missing; the first is {expected_key!r}"
            raise StoreError(message, file=folder, found=(expected_key,))


def _tabulate_tensors(headers: Sequence[GgufHeader], source: Source) -> Table:
    """Make a table of the tensors of all files.

    Raises:
        HeaderError: Two files have a tensor with the same name.
    """
    row_indices: dict[str, int] = {}
    kinds: list[RowKind] = []
    kind_indices_by_properties: dict[tuple[object, ...], int] = {}
    kind_indices, file_indices, starts, sizes = array("q"), array("q"), array("q"), array("q")
    for file_index, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if name in row_indices:
                other_key = headers[file_indices[row_indices[name]]].key
                message = f"the tensor is also in {other_key!r}"
                raise HeaderError(message, file=header.key, tensor=name)
            row_indices[name] = len(row_indices)

            # Models repeat a few kinds of tensors in every layer, so rows share these objects.
            properties = (tensor.dtype.name, tensor.shape, header.byteorder, tensor.block_type)
            kind_index = kind_indices_by_properties.setdefault(properties, len(kinds))
            if kind_index == len(kinds):
                kinds.append(_make_kind(tensor, header.byteorder))
            kind_indices.append(kind_index)
            file_indices.append(file_index)
            starts.append(tensor.start)
            sizes.append(tensor.nbytes)

    names = [*row_indices]
    files = [StoredFile(source, header.key, source.store) for header in headers]
    checksums = array("q", [NO_CRC]) * len(names)
    storages = FileStorages(files, file_indices, starts, sizes, checksums, names=names)
    return Table(names, kinds, kind_indices, range(len(names)), storages, {})


def _make_kind(tensor: TensorLocation, byteorder: str) -> RowKind:
    traits = PLAIN_TRAITS
    if tensor.block_type is not None:
        traits = Traits(blocks=tensor.block_type)
    return RowKind.from_strides(
        tensor.dtype,
        tensor.shape,
        c_strides(tensor.shape, tensor.dtype.bits),
        storage_nbytes=tensor.nbytes,
        traits=traits,
        byteorder=byteorder,
    )


def _describe_blocks(headers: Sequence[GgufHeader]) -> tuple[str, ...]:
    """Return a note on the tensors of quantization blocks, or nothing if there are none."""
    counts: Counter[str] = Counter()
    for header in headers:
        for tensor in header.tensors.values():
            if tensor.block_type is not None:
                counts[tensor.block_type] += 1
    if not counts:
        return ()
    listed = ", ".join(f"{count:,} {block_type}" for block_type, count in counts.most_common())
    return (
        f"{counts.total():,} tensors are quantized: {listed};"
        " to decode them, convert with dequantize=True, or call `holdfast.dequantize`",
    )
