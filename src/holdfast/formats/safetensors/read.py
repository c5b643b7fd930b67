"""Reads one safetensors file.

To open a file takes one read, that of its header. With 100,000 tensors the header has 10 MB. It
becomes columns (`core/table.py`), and a lazy tensor is made when somebody asks for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain

from holdfast.core.chunk import Storage
from holdfast.core.protocols import Description, Source, Store
from holdfast.core.runtime import copy_compactly
from holdfast.core.table import RowKind, StoredFile, Table
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value
from holdfast.engine.files import FileStorages
from holdfast.errors import (
    Corrupted,
    HeaderError,
    HoldfastError,
    LimitExceeded,
    Truncated,
    error_context,
)
from holdfast.formats.index_file import some
from holdfast.formats.safetensors.schema import (
    DTYPE_OF_CODE,
    MANIFEST,
    NO_RECORD,
    PREFIX_NBYTES,
    RECORD,
    RECORD_START,
    SHARDING_INFO,
    HeaderColumns,
    HeaderEntry,
    HeaderRecord,
    check_layout,
    parse_exact,
    parse_fast,
)

MIN_HEADER_NBYTES = 2
"""The length of the header `{}`."""

MAX_CLAIMED_NBYTES = 1 << 48
"""A file whose first eight bytes are a larger number begins with something else than a length.
Text, pickles and zip files have no two zero bytes there."""

LFS_POINTER = b"version https://git-lfs"
"""The first bytes of the file that Git puts in the place of a large file."""


class Header(Value, frozen=True, dict=True):
    """The checked header of a file."""

    key: str
    """The name of the file."""
    data_start: int
    """The byte of the file that data offsets count from."""
    names: Sequence[str]
    metadata: dict[str, str]
    """The `__metadata__` of the file, without the record."""
    columns: HeaderColumns
    record: HeaderRecord
    unknown_fields: Sequence[str]
    """Fields of its entries that the format does not define, each once."""

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of each tensor in the columns, by name."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def entry(self, name: str) -> HeaderEntry:
        """Return the entry of a tensor, as the header has it."""
        columns = self.columns
        position = self.positions[name]
        dtype_code, shape = columns.kinds[columns.kind_indices[position]]
        start = columns.starts[position] - self.data_start
        return HeaderEntry(dtype_code, shape, (start, start + columns.nbytes[position]))

    def storage(self, name: str, store: Store) -> Storage:
        """Return the bytes of a tensor as a storage of this store."""
        columns = self.columns
        position = self.positions[name]
        crc32 = self.record.crcs[position] if self.record.crcs else None
        return Storage(
            self.key,
            columns.starts[position],
            columns.nbytes[position],
            crc32=crc32,
            label=name,
            home=store,
        )


def read_header(source: Source, key: str) -> Header:
    """Read and check the header of a file.

    Raises:
        HeaderError: The header is not valid.
        Truncated: The file ends before the last tensor does.
        LimitExceeded: The header is larger than the limits of the source allow.
    """
    file_nbytes = source.store.size(key)
    if file_nbytes < PREFIX_NBYTES:
        message = f"a safetensors file begins with 8 bytes of length, this one has {file_nbytes}"
        raise Truncated(message, file=key, offset=file_nbytes)
    # The length is compared before any memory is allocated for a header of this length.
    header_nbytes = int.from_bytes(source.read_head(key, PREFIX_NBYTES), "little")
    max_nbytes = min(file_nbytes - PREFIX_NBYTES, source.limits.header_nbytes)
    if not MIN_HEADER_NBYTES <= header_nbytes <= max_nbytes:
        raise _find_length_error(source, key, header_nbytes, file_nbytes)

    data_start = PREFIX_NBYTES + header_nbytes
    raw = source.bytes(key, PREFIX_NBYTES, data_start)
    document = parse_fast(raw) or parse_exact(raw, source.limits, file=key)
    data = range(data_start, file_nbytes)
    columns = check_layout(document.entries, data, source.limits, file=key)

    texts = document.metadata
    metadata = {name: text for name, text in texts.items() if name != RECORD}
    record = NO_RECORD
    # If a record has another name, its name is damaged, and `read_record` raises an error.
    if RECORD in texts or any(text.startswith(RECORD_START) for text in texts.values()):
        from holdfast.formats.safetensors.record import read_record  # most files have none

        try:
            record = read_record(
                texts.get(RECORD), document.entries, metadata, header=True, limits=source.limits
            )
        except HoldfastError as error:
            error.file = error.file or key
            raise
        if record.mismatch is not None:
            record.mismatch.file = key
    names = copy_compactly([*document.entries])
    return Header(key, data_start, names, metadata, columns, record, document.unknown_fields)


def _find_length_error(
    source: Source, key: str, header_nbytes: int, file_nbytes: int
) -> HoldfastError:
    """Return the error for a header whose length is not possible or not allowed."""
    if header_nbytes < MIN_HEADER_NBYTES:
        message = f"a header of {header_nbytes} bytes is too short: the shortest one is {{}}"
        return HeaderError(message, file=key, offset=0, found=header_nbytes)
    if header_nbytes > file_nbytes - PREFIX_NBYTES:
        # The first bytes of a pointer are a huge number.
        if source.bytes(key, 0, min(file_nbytes, len(LFS_POINTER))) == LFS_POINTER:
            message = "this is a Git LFS pointer in place of the file: run `git lfs pull`"
            return HeaderError(message, file=key, offset=0)
        return Truncated(
            f"the header would take {header_nbytes:,} bytes, but the file ends after "
            f"{file_nbytes:,}",
            file=key,
            offset=0,
            expected=PREFIX_NBYTES + header_nbytes,
            found=file_nbytes,
        )
    max_nbytes = source.limits.header_nbytes
    return LimitExceeded(
        f"a header of {header_nbytes:,} bytes is more than Limits(header_nbytes={max_nbytes:,})",
        file=key,
        offset=0,
        expected=max_nbytes,
        found=header_nbytes,
    )


def has_safetensors_start(source: Source, key: str) -> bool:
    """Return whether a file begins with a possible length and the start of a JSON object."""
    head = source.read_head(key, PREFIX_NBYTES + 1)
    if len(head) <= PREFIX_NBYTES:
        return False
    header_nbytes = int.from_bytes(head[:PREFIX_NBYTES], "little")
    first_character = head[PREFIX_NBYTES:]
    if first_character == b"{":
        return MIN_HEADER_NBYTES <= header_nbytes < MAX_CLAIMED_NBYTES
    # The safetensors library opens a header with blanks in front. `read_header` refuses it, and
    # says why. For that the file must be detected, so here its length is compared as well.
    max_nbytes = source.store.size(key) - PREFIX_NBYTES
    return first_character.isspace() and MIN_HEADER_NBYTES <= header_nbytes <= max_nbytes


def describe(source: Source) -> Description:
    """Describe a source that has one file. Only its header is read.

    Raises:
        HeaderError: The source has several files, or the header is not valid.
    """
    key = source.store.single_key
    if key is None:
        raise HeaderError("the folder must hold one safetensors file", file=source.store.name)
    header = read_header(source, key)
    record = header.record
    if source.store.is_folder:
        refuse_orphans([header])

    notes = list(record.notes)
    if header.unknown_fields:
        notes.append(describe_unknown_fields(header.unknown_fields))
    if SHARDING_INFO in header.metadata:
        notes += _describe_shards(header, source)

    columns = header.columns
    kinds = [RowKind.from_shape(DTYPE_OF_CODE[code], shape) for code, shape in columns.kinds]
    storages = collect_storages([header], source)
    storage_indices = range(len(header.names))
    tensors = Table(header.names, kinds, columns.kind_indices, storage_indices, storages, {})
    tree: object = tensors
    if record.recorded:
        from holdfast.formats.recorded import restore  # for files with a record

        with error_context(file=header.key):
            tensors, tree = restore(tensors, record.recorded, source)
    changed = () if record.mismatch is None else (record.mismatch,)
    return Description(
        "safetensors", tensors, tree, notes=tuple(notes), metadata=header.metadata, changed=changed
    )


def collect_storages(headers: Sequence[Header], source: Source) -> FileStorages:
    """Return the bytes of all tensors of headers as storages, in the order of the headers."""
    file_indices = array("q")
    starts = array("q")
    nbytes = array("q")
    crcs = array("q")
    for file_index, header in enumerate(headers):
        tensor_count = len(header.names)
        file_indices += array("q", [file_index]) * tensor_count
        starts += header.columns.starts
        nbytes += header.columns.nbytes
        crcs.extend(header.record.crcs or array("q", [NO_CRC]) * tensor_count)

    # The names of a single header are used as they are, without a copy.
    names = headers[0].names
    if len(headers) > 1:
        names = [*chain.from_iterable(header.names for header in headers)]
    files = [StoredFile(source, header.key, source.store) for header in headers]
    return FileStorages(files, file_indices, starts, nbytes, crcs, names=names)


def describe_unknown_fields(fields: Iterable[str]) -> str:
    """Return the note about fields that the format does not define."""
    return (
        f"tensors in the header have fields that safetensors does not define: {some([*fields])}. "
        "They are ignored, and copies of the file do not have them"
    )


def _describe_shards(header: Header, source: Source) -> list[str]:
    """Return a note if the file has shards of tensors, which torch's ranks have saved."""
    from holdfast.formats.safetensors.record import read_saved_offsets  # for files of ranks

    offsets_by_name = read_saved_offsets(header, source.limits)
    shard_count = sum(any(offsets) for offsets in offsets_by_name.values())
    if not shard_count:
        return []
    return [f"{shard_count:,} tensors are shards of larger ones; open the directory to join them"]


def refuse_orphans(headers: Iterable[Header]) -> None:
    """Raise an error for files of a native directory whose manifest is missing.

    Args:
        headers: The headers of all files in a folder.

    Raises:
        Corrupted: A header refers to a manifest. The native reader would have read the folder if
            the manifest were there.
    """
    for header in headers:
        if header.record.metadata_file == MANIFEST:
            raise Corrupted(
                f"a data file of a native checkpoint, and its manifest {MANIFEST} is not in the "
                "folder: values and second names are lost without it. Get the manifest again; the "
                "tensors are in the data files, which open one by one",
                file=header.key,
                expected=MANIFEST,
            )
