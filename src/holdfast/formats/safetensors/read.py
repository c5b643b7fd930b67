"""One safetensors file: eight bytes of length, a JSON header, and the tensors without holes.

Opening costs one read of the header. A file of 100,000 tensors has a header of 10 MB, so what is kept of it are columns
(`core/table.py`); a `LazyTensor` is made when it is asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NoReturn

from holdfast.core.chunk import Storage
from holdfast.core.protocols import Description, Source, Store
from holdfast.core.runtime import copied_together
from holdfast.core.table import ODD, FilePlace, Kind, Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.engine.files import FileStorages
from holdfast.errors import Corrupted, HeaderError, LimitExceeded, Truncated, located
from holdfast.formats.recorded import restore
from holdfast.formats.safetensors.record import MANIFEST, RECORD, HeaderRecord, read_record, saved_offsets
from holdfast.formats.safetensors.schema import (
    PREFIX_NBYTES,
    ROWS,
    HeaderColumns,
    HeaderEntry,
    Outline,
    check_layout,
    parse_document,
)

SMALLEST_NBYTES = 2
"""A header of `{}`."""

LONGEST_CLAIM = 1 << 48
"""A first word above this is not a length but text, a pickle or a zip, which have no two zero bytes there."""

LFS_POINTER = b"version https://git-lfs"
"""The first bytes of the file that Git leaves in place of a large file."""


class Header(Value, frozen=True, dict=True):
    """The checked header of one file."""

    key: str
    data_start: int
    """The byte of the file that data offsets count from."""
    names: Sequence[str]
    """Every tensor, in the order of the header."""
    metadata: dict[str, str]
    """The file's `__metadata__`, without the record."""
    columns: HeaderColumns
    record: HeaderRecord

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of each tensor in the columns, for lookups one by one."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def entry(self, name: str) -> HeaderEntry:
        at, columns = self.positions[name], self.columns
        begin = columns.starts[at] - self.data_start
        return HeaderEntry(*columns.outlines[columns.outline[at]], (begin, begin + columns.nbytes[at]))

    def storage(self, name: str, home: Store) -> Storage:
        """The bytes of a tensor in the store that the header was read from."""
        at, columns = self.positions[name], self.columns
        crc32 = self.record.crcs[at] if self.record.crcs else None
        return Storage(self.key, columns.starts[at], columns.nbytes[at], crc32=crc32, label=name, home=home)


def header_table(headers: Sequence[Header], source: Source, places: Mapping[str, int | LazyTensor] | None = None) -> Table:
    """The tensors of checked headers: all of one file, or those in `places`.

    A place is the number of a tensor that is whole, counted through all headers, or a tensor that was joined from pieces.
    """
    positions: dict[Outline, int] = {}
    kind = array("q")
    for header in headers:
        own = [positions.setdefault(outline, len(positions)) for outline in header.columns.outlines]
        # Those of the first file count alike.
        outline = header.columns.outline
        kind += array("q", outline if own == [*range(len(own))] else [*map(own.__getitem__, outline)])
    kinds = [Kind.plain(ROWS[code], shape) for code, shape in positions]
    storages = _storages(headers, source)
    if places is None:
        return Table(storages.names, kinds, kind, range(len(storages)), storages, {})
    storage = array("q", [ODD if isinstance(place, LazyTensor) else place for place in places.values()])
    odd = {row: place for row, place in enumerate(places.values()) if isinstance(place, LazyTensor)}
    chosen = array("q", [kind[number] for number in storage]) if kind else array("q", bytes(8 * len(storage)))
    for row, place in odd.items():
        chosen[row] = len(kinds)
        kinds.append(Kind.of(place))
    return Table([*places], kinds, chosen, storage, storages, odd)


def _storages(headers: Sequence[Header], source: Source) -> FileStorages:
    names: Sequence[str] = headers[0].names if len(headers) == 1 else [name for header in headers for name in header.names]
    file, start, nbytes, crcs = array("q"), array("q"), array("q"), array("q")
    for number, header in enumerate(headers):
        columns, count = header.columns, len(header.names)
        file += array("q", [number]) * count
        start += columns.starts
        nbytes += columns.nbytes
        crcs.extend(header.record.crcs or array("q", [NO_CRC]) * count)
    return FileStorages([FilePlace(source, one.key, source.store) for one in headers], file, start, nbytes, crcs, names=names)


def read_header(source: Source, key: str) -> Header:
    """Read and check the header of one file; no tensor data is read.

    Raises `HeaderError`, `Truncated` where the file is shorter than it says, or `LimitExceeded`.
    """
    size = source.store.size(key)
    if size < PREFIX_NBYTES:
        raise Truncated(f"a safetensors file begins with 8 bytes of length, this one has {size}", file=key, offset=size)
    length = int.from_bytes(source.first(key, PREFIX_NBYTES), "little")
    if length < SMALLEST_NBYTES:
        raise HeaderError(f"a header of {length} bytes cannot be", file=key, offset=0, found=length)
    if length > size - PREFIX_NBYTES:
        _refuse_length(source, key, length, size=size)
    if length > source.limits.header_nbytes:
        message = f"a header of {length:,} bytes is more than Limits(header_nbytes={source.limits.header_nbytes:,})"
        raise LimitExceeded(message, file=key, offset=0, expected=source.limits.header_nbytes, found=length)
    data_start = PREFIX_NBYTES + length
    document = parse_document(source.bytes(key, PREFIX_NBYTES, data_start), source.limits, file=key)
    columns = check_layout(document.entries, range(data_start, size), source.limits, file=key)
    metadata = {name: text for name, text in document.metadata.items() if name != RECORD}
    with located(file=key):
        record = read_record(document.metadata.get(RECORD), document.entries, metadata, header=True, limits=source.limits)
        if record.changed is not None:
            record.changed.file = key
    return Header(key, data_start, copied_together([*document.entries]), metadata, columns, record)


def begins_like_safetensors(source: Source, key: str) -> bool:
    """Whether a file begins with a believable length and something that could be a JSON object."""
    start = source.first(key, PREFIX_NBYTES + 1)
    if len(start) <= PREFIX_NBYTES:
        return False
    length = int.from_bytes(start[:PREFIX_NBYTES], "little")
    if start[PREFIX_NBYTES:] == b"{":
        return SMALLEST_NBYTES <= length < LONGEST_CLAIM
    # The safetensors library opens a header that begins with blanks. We refuse it, and it takes a match to say why.
    return start[PREFIX_NBYTES:].isspace() and SMALLEST_NBYTES <= length <= source.store.size(key) - PREFIX_NBYTES


def describe(source: Source) -> Description:
    """Read and check the header."""
    keys = source.store.list()
    if len(keys) != 1:
        raise HeaderError(f"one safetensors file was expected, {len(keys):,} files are there", file=source.store.name)
    header = read_header(source, keys[0])
    if source.store.folder:
        refuse_orphans([header])
    pieces = sum([any(offsets) for offsets in saved_offsets(header, source.limits).values()])
    notes = [*header.record.notes]
    if pieces:
        notes.append(f"{pieces:,} tensors are pieces of larger ones, as they lie in this file; open its directory")
    with located(file=header.key):
        tensors, tree = restore(header_table([header], source), header.record.recorded, source)
    changed = () if header.record.changed is None else (header.record.changed,)
    return Description("safetensors", tensors, tree, notes=tuple(notes), metadata=header.metadata, changed=changed)


def refuse_orphans(headers: Iterable[Header]) -> None:
    """Raise for files of a native directory whose manifest is missing."""
    for header in headers:
        if header.record.rest == MANIFEST:
            message = (
                f"a data file of a native checkpoint, and its manifest {MANIFEST} is not in the folder: values and second names "
                "are lost without it. Get the manifest again; the tensors are in the data files, which open one by one"
            )
            raise Corrupted(message, file=header.key, expected=MANIFEST)


def _refuse_length(source: Source, key: str, length: int, *, size: int) -> NoReturn:
    if source.bytes(key, 0, min(size, len(LFS_POINTER))) == LFS_POINTER:
        raise HeaderError("this is a Git LFS pointer in place of the file: run `git lfs pull`", file=key, offset=0)
    message = f"the header would take {length:,} bytes, but the file ends after {size:,}"
    raise Truncated(message, file=key, offset=0, expected=PREFIX_NBYTES + length, found=size)
