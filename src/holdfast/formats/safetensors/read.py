"""One safetensors file: eight bytes of length, a JSON header, and the tensors without holes.

Opening costs one read of the header. A file of 100,000 tensors has a header of 10 MB, so what is kept of it is one
small record a tensor; a `LazyTensor` is made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
from msgspec import field

from holdfast.core.arrays import AnyDType
from holdfast.core.chunk import Storage
from holdfast.core.columns import NO_CRC, Columns
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Description, Source, Store
from holdfast.core.rows import RowKind
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import Corrupted, FormatError, HeaderError, LimitExceeded, Truncated, located
from holdfast.formats.recorded import restore
from holdfast.formats.safetensors.record import MANIFEST, RECORD, About, HeaderRecord, read_record, saved_offsets
from holdfast.formats.safetensors.schema import PREFIX_NBYTES, HeaderEntry, check_layout, parse_document

SMALLEST_NBYTES = 2
"""A header of `{}`."""

LONGEST_CLAIM = 1 << 48
"""A first word above this is no length but text, a pickle, a zip: those have no two zero bytes there."""

ROWS = {row.safetensors: row for row in DTYPES.rows if row.safetensors is not None}
"""By their codes. The layout check has looked every code up."""

WHOLE = {row.safetensors: row.numpy for row in DTYPES.rows if row.safetensors is not None and not row.packed}
"""What an element is in memory, by its code; of those that fill whole bytes, which lie in a file as in memory."""

LFS_POINTER = b"version https://git-lfs"
"""How the stand-in begins that Git leaves in place of a large file that was not fetched."""


class Header(Value, frozen=True):
    """The checked header of one file."""

    key: str
    """The file."""

    data_start: int
    """The byte of the file that data offsets count from."""

    entries: dict[str, HeaderEntry]
    """Every tensor, in the order of the header."""

    metadata: dict[str, str]
    """The file's `__metadata__`, without the record."""

    record: HeaderRecord = field(default_factory=HeaderRecord)
    """What Holdfast noted in this file when it wrote it."""

    def dtype(self, name: str) -> DType:
        dtype = DTYPES.safetensors(self.entries[name].dtype)
        if dtype is None:  # the layout check has looked every code up
            raise HeaderError("a dtype that is not in the table", file=self.key, tensor=name)
        return dtype

    def storage(self, name: str, home: Store) -> Storage:
        """Where the bytes of a tensor lie in the store that the header was read from."""
        begin, end = self.entries[name].data_offsets
        return Storage(self.key, self.data_start + begin, end - begin, crc32=self.record.crcs.get(name), label=name, home=home)

    def tensor(self, name: str, source: Source) -> LazyTensor:
        """A tensor as it lies in this file."""
        return LazyTensor.contiguous(name, self.dtype(name), self.entries[name].shape, self.storage(name, source.store), source)

    def columns(self, names: Sequence[str]) -> Columns | None:
        """Where tensors lie; None where one is not there. The layout was checked: all are ordinary that fill whole bytes."""
        try:
            entries = [self.entries[name] for name in names]
        except (KeyError, TypeError):
            return None
        numbers: Sequence[int] = range(len(entries))
        rows: list[AnyDType | None] = [WHOLE.get(entry.dtype) for entry in entries]
        if None in rows:
            numbers = [number for number in numbers if rows[number] is not None]
            entries = [entries[number] for number in numbers]
        dtypes = [dtype for dtype in rows if dtype is not None]
        begins, ends = np.array([entry.data_offsets for entry in entries], np.int64).reshape(-1, 2).T
        crcs = np.full(len(entries), NO_CRC)
        if self.record.crcs:
            known = self.record.crcs
            crcs = np.fromiter((known.get(names[number], NO_CRC) for number in numbers), np.int64, len(entries))
        shapes, files = [entry.shape for entry in entries], np.zeros(len(entries), np.int64)
        return Columns(numbers, dtypes, shapes, [self.key], files, begins + self.data_start, ends - begins, crcs)


class HeaderTensors(Mapping[str, LazyTensor]):
    """The tensors of one file. Each is made when it is asked for; iterating over names makes none."""

    def __init__(self, header: Header, source: Source) -> None:
        self._header = header
        self._source = source
        self._kinds: dict[tuple[str, tuple[int, ...]], RowKind] = {}
        """What makes tensors of a dtype and a shape."""

    def __getitem__(self, name: str) -> LazyTensor:
        header = self._header
        entry = header.entries[name]
        if entry.dtype not in WHOLE:
            return header.tensor(name, self._source)
        kind = self._kinds.get((entry.dtype, entry.shape))
        if kind is None:
            kind = RowKind.plain(ROWS[entry.dtype], entry.shape, self._source, key=header.key)
            self._kinds[entry.dtype, entry.shape] = kind
        return kind.tensor(header.data_start + entry.data_offsets[0], header.record.crcs.get(name), name, name)

    def outline(self, name: str) -> tuple[DType, tuple[int, ...]]:
        entry = self._header.entries[name]
        return ROWS[entry.dtype], entry.shape

    def columns(self, names: Sequence[str]) -> tuple[Source, Columns] | None:
        found = self._header.columns(names)
        return None if found is None else (self._source, found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._header.entries)

    def __len__(self) -> int:
        return len(self._header.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._header.entries

    def __repr__(self) -> str:
        return f"<{len(self):,} tensors of {self._header.key!r}>"


def read_header(source: Source, key: str) -> Header:
    """Read and check the header of one file; no tensor data is read.

    Raises `HeaderError`, `Truncated` where the file is shorter than it says, or `LimitExceeded`.
    """
    size = source.store.size(key)
    if size < PREFIX_NBYTES:
        raise Truncated(f"a safetensors file begins with 8 bytes of length, this one has {size}", file=key, offset=size)
    length = int.from_bytes(source.bytes(key, 0, PREFIX_NBYTES), "little")
    if length < SMALLEST_NBYTES:
        raise HeaderError(f"a header of {length} bytes cannot be", file=key, offset=0, found=length)
    if length > size - PREFIX_NBYTES:
        _refuse_length(source, key, length, size=size)
    if length > source.limits.header_nbytes:
        raise LimitExceeded(
            f"a header of {length:,} bytes is more than Limits(header_nbytes={source.limits.header_nbytes:,})",
            file=key,
            offset=0,
            expected=source.limits.header_nbytes,
            found=length,
        )
    data_start = PREFIX_NBYTES + length
    document = parse_document(source.bytes(key, PREFIX_NBYTES, data_start), source.limits, file=key)
    check_layout(document.entries, size - data_start, source.limits, file=key)
    metadata = {name: text for name, text in document.metadata.items() if name != RECORD}
    with located(file=key):
        about = About(document.entries, metadata, document.entries)
        record = read_record(document.metadata.get(RECORD), about, source.limits)
        if record.changed is not None:
            record.changed.file = key
    return Header(key, data_start, document.entries, metadata, record)


def begins_like_safetensors(source: Source, key: str) -> bool:
    """Whether a file begins with a believable length and something that could be a JSON object."""
    size = source.store.size(key)
    if size <= PREFIX_NBYTES:
        return False
    start = source.bytes(key, 0, PREFIX_NBYTES + 1)
    length = int.from_bytes(start[:PREFIX_NBYTES], "little")
    if start[PREFIX_NBYTES:] == b"{":
        return SMALLEST_NBYTES <= length < LONGEST_CLAIM
    # The safetensors library opens a header that begins with blanks. We refuse it, and it takes a match to say why.
    return start[PREFIX_NBYTES:].isspace() and SMALLEST_NBYTES <= length <= size - PREFIX_NBYTES


class SafetensorsFile:
    """The format of a single file."""

    name = "safetensors"

    def matches(self, source: Source) -> bool:
        """Whether exactly one file was opened and it begins like safetensors, whatever it is called."""
        key = source.store.single
        try:
            return key is not None and begins_like_safetensors(source, key)
        except FormatError:
            return False

    def describe(self, source: Source) -> Description:
        """Read the header and check everything that it says."""
        keys = source.store.list()
        if len(keys) != 1:
            raise HeaderError(f"one safetensors file was expected, {len(keys):,} files are there", file=source.store.name)
        header = read_header(source, keys[0])
        if source.store.folder:
            refuse_orphans([header])
        pieces = sum(any(offsets) for offsets in saved_offsets(header, source.limits).values())
        notes = [*header.record.notes]
        if pieces:
            notes.append(f"{pieces:,} tensors are pieces of larger ones, as they lie in this file; open its directory")
        with located(file=header.key):
            tensors, tree = restore(HeaderTensors(header, source), header.record.recorded, source)
        changed = () if header.record.changed is None else (header.record.changed,)
        return Description(self.name, tensors, tree, notes=tuple(notes), metadata=header.metadata, changed=changed)


def refuse_orphans(headers: Iterable[Header]) -> None:
    """Raise for files of a folder that say that they belong to a native directory, whose manifest is then missing."""
    for header in headers:
        if header.record.rest == MANIFEST:
            raise Corrupted(
                f"a data file of a native checkpoint, and its manifest {MANIFEST} is not in the folder: values and second names "
                "are lost without it. Get the manifest again; the tensors are in the data files, which open one by one",
                file=header.key,
                expected=MANIFEST,
            )


def _refuse_length(source: Source, key: str, length: int, *, size: int) -> NoReturn:
    """Raise for a header that would end after the file does."""
    if source.bytes(key, 0, min(size, len(LFS_POINTER))) == LFS_POINTER:
        raise HeaderError("this is a Git LFS pointer in place of the file: run `git lfs pull`", file=key, offset=0)
    raise Truncated(
        f"the header would take {length:,} bytes, but the file ends after {size:,}",
        file=key,
        offset=0,
        expected=PREFIX_NBYTES + length,
        found=size,
    )
