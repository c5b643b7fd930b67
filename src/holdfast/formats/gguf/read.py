"""A GGUF file: its tensors as they are stored, and its values as text.

Quantised tensors are the bytes of their blocks (`numeric/dequantize.py`); `holdfast.dequantize` gives the numbers.
llama.cpp splits large models into several files, with their number and count in the values. A folder of all files opens as one.

    model-00001-of-00003.gguf     split.no 0, split.count 3, split.tensors.count 291
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
from holdfast.formats.gguf.schema import MAGIC, GgufHeader, read_gguf_header

PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def _table(headers: Sequence[GgufHeader], source: Source) -> Table:
    rows: dict[str, int] = {}
    kinds: list[RowKind] = []
    positions: dict[tuple[object, ...], int] = {}
    kind, file, start, nbytes = array("q"), array("q"), array("q"), array("q")
    traits = {
        blocks: Traits(blocks=blocks)
        for header in headers
        for blocks in {one.blocks for one in header.places.values()}
    }
    for number, header in enumerate(headers):
        for name, place in header.places.items():
            if name in rows:
                other = headers[file[rows[name]]].key
                raise HeaderError(
                    f"the tensor is in {other!r} as well", file=header.key, tensor=name
                )
            like = id(place.dtype), place.shape, place.nbytes, header.byteorder, place.blocks
            position = positions.get(like)
            if position is None:
                position = positions[like] = len(kinds)
                strides, own = (
                    c_strides(place.shape, place.dtype.bits),
                    PLAIN_TRAITS if place.blocks is None else traits[place.blocks],
                )
                order = header.byteorder
                kinds.append(
                    RowKind.from_strides(
                        place.dtype,
                        place.shape,
                        strides,
                        storage_nbytes=place.nbytes,
                        traits=own,
                        byteorder=order,
                    )
                )
            rows[name] = len(rows)
            kind.append(position)
            file.append(number)
            start.append(place.start)
            nbytes.append(place.nbytes)
    names = [*rows]
    places = [StoredFile(source, header.key, source.store) for header in headers]
    storages = FileStorages(
        places, file, start, nbytes, array("q", [NO_CRC]) * len(names), names=names
    )
    return Table(names, kinds, kind, range(len(names)), storages, {})


def describe_gguf(source: Source) -> Description:
    (key,) = source.store.list()
    header = read_gguf_header(source, key)
    notes: list[str] = []
    count = header.values.number(COUNT) or 0
    if count > 1:
        number = (header.values.number(NUMBER) or 0) + 1
        notes.append(
            f"file {number:,} of {count:,}; what is in the others is not seen here: open their folder"
        )
    tensors = _table([header], source)
    return Description(
        "gguf",
        tensors,
        tensors,
        notes=tuple(notes),
        notes_on_blocks=_notes([header]),
        metadata=header.values,
    )


def is_directory(source: Source) -> bool:
    parts = _parts(source.store.list())
    return len(parts) > 1 and all(source.read_head(key, len(MAGIC)) == MAGIC for key in parts)


def describe_directory(source: Source) -> Description:
    parts = _parts(source.store.list())
    models = {(found[1], found[3]) for found in map(PART.fullmatch, parts) if found is not None}
    if len(models) > 1:
        names = ", ".join(repr(stem) for stem, _ in sorted(models)[:3])
        raise HeaderError(
            f"files of several models in one folder ({names}); give each a folder",
            file=source.store.name,
        )
    ((stem, count),) = models
    expected = [f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)][
        : len(parts) + 1
    ]
    missing = [key for key in expected if key not in parts]
    if missing or len(parts) != int(count):
        message = f"{int(count) - len(parts):,} of {int(count):,} files are not here: {missing[0]!r} is missing"
        raise StoreError(message, file=source.store.name, found=tuple(missing))
    headers = [read_gguf_header(source, key) for key in parts]
    for number, header in enumerate(headers):
        stated = header.values.number(NUMBER), header.values.number(COUNT)
        if stated != (number, len(headers)):
            message = f"by its name it is file {number + 1:,} of {len(headers):,}, and its values ({NUMBER}, {COUNT}) say {stated}"
            raise HeaderError(
                message, file=header.key, expected=(number, len(headers)), found=stated
            )
    tensors = _table(headers, source)
    total = headers[0].values.number(TENSORS)
    if total is not None and total != len(tensors):
        message = f"the first file says {total:,} tensors, and all of them have {len(tensors):,}"
        raise HeaderError(message, file=parts[0], expected=total, found=len(tensors))
    return Description(
        "gguf-dir", tensors, tensors, notes_on_blocks=_notes(headers), metadata=headers[0].values
    )


def _parts(keys: Sequence[str]) -> list[str]:
    return sorted(key for key in keys if "/" not in key and PART.fullmatch(key))


def _notes(headers: Sequence[GgufHeader]) -> tuple[str, ...]:
    """Say how many tensors are in blocks of which type, and how to get their numbers."""
    found = Counter(
        place.blocks
        for header in headers
        for place in header.places.values()
        if place.blocks is not None
    )
    if not found:
        return ()
    listed = ", ".join(f"{count:,} {name}" for name, count in found.most_common())
    how = "to decode them, convert with dequantize=True, or call `holdfast.dequantize`"
    return (f"{found.total():,} tensors are quantized: {listed}; {how}",)
