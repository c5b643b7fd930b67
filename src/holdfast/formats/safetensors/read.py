"""One safetensors file: eight bytes of length, a JSON header, and the tensors without holes.

Opening costs one read of the header. A file of 100,000 tensors has a header of 10 MB, so what is kept of it are columns
(`core/table.py`); a `LazyTensor` is made when it is asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import NoReturn

from msgspec import field

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Description, Source, Store
from holdfast.core.table import ODD, FilePlace, Kind, Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.errors import Corrupted, FormatError, HeaderError, LimitExceeded, Truncated, located
from holdfast.formats.recorded import restore
from holdfast.formats.safetensors.record import MANIFEST, RECORD, About, HeaderRecord, read_record, saved_offsets
from holdfast.formats.safetensors.schema import PREFIX_NBYTES, HeaderEntry, check_layout, parse_document
from holdfast.plan.files import FileStorages

SMALLEST_NBYTES = 2
"""A header of `{}`."""

LONGEST_CLAIM = 1 << 48
"""A first word above this is no length but text, a pickle, a zip: those have no two zero bytes there."""

ROWS = {row.safetensors: row for row in DTYPES.rows if row.safetensors is not None}
"""By their codes. The layout check has looked every code up."""

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


def header_table(places: Iterable[tuple[str, Header | LazyTensor]], source: Source) -> Table:
    """The tensors of checked headers: by name the header that has one whole, or a tensor that was joined from pieces."""
    names: list[str] = []
    kinds: list[Kind] = []
    positions: dict[tuple[str, tuple[int, ...]], int] = {}
    files: dict[int, tuple[int, FilePlace]] = {}
    kind, storage, file, start, nbytes, crc = array("q"), array("q"), array("q"), array("q"), array("q"), array("q")
    labels: list[str] = []
    odd: dict[int, LazyTensor] = {}
    before: Header | None = None
    number = data_start = 0
    crcs: Mapping[str, int] = {}
    for name, place in places:
        if isinstance(place, LazyTensor):
            odd[len(names)] = place
            kind.append(len(kinds))
            kinds.append(Kind.of(place))
            storage.append(ODD)
            names.append(name)
            continue
        if place is not before:
            before, data_start, crcs = place, place.data_start, place.record.crcs
            found = files.get(id(place))
            if found is None:
                found = files[id(place)] = len(files), FilePlace(source, place.key, source.store)
            number = found[0]
        entry = place.entries[name]
        like = entry.dtype, entry.shape
        position = positions.get(like)
        if position is None:
            position = positions[like] = len(kinds)
            kinds.append(Kind.plain(ROWS[entry.dtype], entry.shape))
        begin, end = entry.data_offsets
        kind.append(position)
        storage.append(len(labels))
        file.append(number)
        start.append(data_start + begin)
        nbytes.append(end - begin)
        crc.append(crcs.get(name, NO_CRC) if crcs else NO_CRC)
        names.append(name)
        labels.append(name)
    held = [place for _, place in files.values()] or [FilePlace(source, source.store.name, source.store)]
    return Table(names, kinds, kind, storage, FileStorages(held, file, start, nbytes, crc, names=labels if odd else names), odd)


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
    start = source.first(key, PREFIX_NBYTES + 1)
    if len(start) <= PREFIX_NBYTES:
        return False
    length = int.from_bytes(start[:PREFIX_NBYTES], "little")
    if start[PREFIX_NBYTES:] == b"{":
        return SMALLEST_NBYTES <= length < LONGEST_CLAIM
    # The safetensors library opens a header that begins with blanks. We refuse it, and it takes a match to say why.
    return start[PREFIX_NBYTES:].isspace() and SMALLEST_NBYTES <= length <= source.store.size(key) - PREFIX_NBYTES


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
            tensors, tree = restore(
                header_table(((name, header) for name in header.entries), source), header.record.recorded, source
            )
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
