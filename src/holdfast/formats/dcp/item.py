"""One item: a complete torch zip inside of a larger file, read by the strict zip reader and the closed interpreter.

    offset                                                                                           offset + length
    │ data.pkl  .format_version  .storage_alignment  byteorder │ data/0: the elements │ version  serialization id  directory │
    └──────────────────── head ────────────────────────────────┘                      └──────────────── tail ────────────────┘

The metadata has the length of the elements, so that everything else lies in `length - elements` bytes at either end: two reads of
about 1.5 KiB, or one for a small item. Items of one kind are compared, not parsed (`ItemFrame`).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import cast

from holdfast.core.chunk import Storage
from holdfast.core.crc import crc32
from holdfast.core.dtype import DType
from holdfast.core.protocols import Foreign, Source
from holdfast.core.runtime import renewed, weakly
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.value import Value, replace
from holdfast.errors import FormatError, MetadataError, PickleError, Unsupported, ZipError
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.torch.storages import FoundStorages, StorageId
from holdfast.formats.torch.table import TorchTable
from holdfast.formats.torch.tensors import brief
from holdfast.formats.torch.zip import PickleReader
from holdfast.formats.zip.layout import Archive
from holdfast.formats.zip.reader import read_archive, record_bytes

STORAGES = "data/"

END_NBYTES = 22
ENTRY_NBYTES = 46
DESCRIPTOR = b"PK\7\x08"
ENTRY = b"PK\1\2"
SATURATED = 0xFFFFFFFF
"""Stands for an offset that needs 64 bits. Such large items are few, and are parsed each time."""


class ItemFrame(Value, frozen=True):
    """What all items of one kind have in common.

    A checkpoint of 10,000 items has a few dozen kinds. Two items of one kind are the same archive, byte for byte, except for the
    contents of records and their checksums:

        │ header, data.pkl, … header │ elements │ descriptor │ … │ serialization id │ … │ directory, end │
                                       (not compared)    ^crc          ^free, and crc       ^crcs

    The strict zip reader and the pickle interpreter read the first item of a kind, and an `ItemFrame` has its fixed bytes. They
    would accept every item with equal fixed bytes and consistent checksums, with the same geometry. All other items are parsed.

    Places count in the two ends of an item, one after the other.
    """

    nbytes: int
    fixed: tuple[tuple[int, bytes], ...]
    """Bytes that all items share, with their places."""
    free: tuple[tuple[str, slice, slice, slice], ...]
    """Small records whose content may differ: name, content, and the two places of its checksum."""
    storage: tuple[slice, slice] | None
    """The two places of the checksum of the elements, which is compared when they are read."""

    def matches(self, ends: bytes) -> bool:
        if len(ends) != self.nbytes:
            return False
        for start, content in self.fixed:
            if not ends.startswith(content, start):
                return False
        for _, content_at, first, second in self.free:
            if ends[first] != ends[second]:
                return False
            crc = int.from_bytes(ends[first], "little")
            if (
                crc and crc32(ends[content_at]) != crc
            ):  # torch writes 0 where checksums are turned off
                return False
        return self.storage is None or ends[self.storage[0]] == ends[self.storage[1]]

    def content(self, ends: bytes, name: str) -> bytes | None:
        return next((ends[content] for free, content, _, _ in self.free if free == name), None)

    def place(self, ends: bytes, start: int, first: ItemPlace) -> ItemPlace:
        """The place of the elements in a matching item that begins at byte `start`; `first` counts from the start of an item."""
        crc = (
            None
            if self.storage is None
            else int.from_bytes(ends[self.storage[0]], "little") or None
        )
        return ItemPlace(
            start + first.start,
            first.strides,
            first.byteorder,
            crc,
            first.location,
            first.conj,
            first.whole,
        )


def frame_of(item: Window, archive: Archive, *, free: Container[str]) -> ItemFrame | None:
    """The frame of an accepted item, where `free` records may differ; None if torch would write it in another way."""
    entries = dict(_entries(item))
    holes: list[tuple[int, int]] = []
    summed: list[tuple[str, slice, slice, slice]] = []
    storage: tuple[slice, slice] | None = None
    for name, record in archive.records.items():
        short = name[len(archive.prefix) + 1 :]
        if not record.nbytes or (short not in free and not short.startswith(STORAGES)):
            continue
        at, stop = record.start - item.start, record.stop - item.start
        if name not in entries or item.part(stop, stop + 4) != DESCRIPTOR:
            return None
        entry = entries[name] + 16
        holes += [(at, stop), (stop + 4, stop + 8), (entry, entry + 4)]
        sums = item.at(stop + 4, stop + 8), item.at(entry, entry + 4)
        if short in free:
            summed.append((short, item.at(at, stop), *sums))
        elif storage is None:
            storage = sums
        else:
            return None
    fixed = []
    before = 0
    for hole_start, hole_stop in [*sorted(holes), (item.nbytes, item.nbytes)]:
        content = item.part(before, hole_start)
        if content is None:
            return None
        fixed.append((item.at(before, hole_start).start, content))
        before = hole_stop
    return ItemFrame(len(item.ends), tuple(fixed), tuple(summed), storage)


def _entries(item: Window) -> Iterator[tuple[str, int]]:
    """The place of each entry in the central directory of an accepted archive; nothing where the directory was not read."""
    end = item.part(item.nbytes - END_NBYTES, item.nbytes)
    if end is None:
        return
    count, directory = struct.unpack_from("<H", end, 10)[0], struct.unpack_from("<I", end, 16)[0]
    raw = item.part(directory, item.nbytes) if directory < SATURATED else None
    at = 0
    for _ in range(count if raw is not None else 0):
        if raw is None or raw[at : at + 4] != ENTRY:
            return
        name, extra, comment = struct.unpack_from("<3H", raw, at + 28)
        yield raw[at + ENTRY_NBYTES : at + ENTRY_NBYTES + name].decode("utf-8"), directory + at
        at += ENTRY_NBYTES + name + extra + comment


WHOLE_NBYTES = 4 << 10
"""An item up to this length is read by one call."""

END_READ_NBYTES = 16 << 10
"""The most bytes that are read at either end. Only storages aligned to kilobytes have longer ends."""

PICKLE = "data.pkl"
SERIALIZATION_ID = ".data/serialization_id"

KEPT_FRAMES = 512
"""Kinds of items that are remembered: about 1.5 KiB each. A model has a few dozen shapes of shards."""

TRIED_FRAMES = 32
"""Frames under one key that are compared before an item is parsed."""


def end_nbytes(nbytes: int, elements: int) -> int:
    """Bytes to read at either end of an item. In almost all items they have everything except the elements."""
    return nbytes if nbytes <= WHOLE_NBYTES else min(nbytes - elements, END_READ_NBYTES)


class Window:
    """One item as a source of its own. Its ends are read at once, other bytes when they are asked for."""

    def __init__(
        self,
        source: Source,
        key: str,
        place: tuple[int, int],
        *,
        elements: int = 0,
        content: bytes | None = None,
    ) -> None:
        self.start, self.stop = place
        self.key = key
        self.nbytes = self.stop - self.start
        self._source = source
        ends = end_nbytes(self.nbytes, elements)
        self._skipped = 0 if content is not None else max(self.nbytes - 2 * ends, 0)
        self._behind = ends if self._skipped else self.nbytes
        if self._skipped:
            content = source.bytes(key, self.start, self.start + ends) + source.bytes(
                key, self.stop - ends, self.stop
            )
        self.ends: bytes = source.bytes(key, self.start, self.stop) if content is None else content
        """Both ends, one after the other: the whole item where they meet."""

    def part(self, start: int, stop: int) -> bytes | None:
        """Bytes of the item, counted from its start; None where they were not read with its ends."""
        found = stop <= self._behind or self._behind + self._skipped <= start <= stop <= self.nbytes
        return self.ends[self.at(start, stop)] if found else None

    def at(self, start: int, stop: int) -> slice:
        skipped = 0 if stop <= self._behind else self._skipped
        return slice(start - skipped, stop - skipped)

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        found = self.part(start - self.start, stop - self.start) if start >= self.start else None
        return self._source.bytes(key, start, stop) if found is None else found

    @property
    def source(self) -> Source:
        """The item as a source. Apart from `bytes`, everything comes from the source of the directory."""
        return cast("Source", self)

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)


class ItemPlace(Value, frozen=True):
    start: int
    strides: tuple[int, ...]
    """Strides in bits. torch keeps the strides of a tensor that fills its storage: a transposed one is saved as it lies."""
    byteorder: str
    crc32: int | None
    location: str
    conj: bool
    whole: bool
    """Whether the item's storage holds these elements and nothing else."""


class ItemReader:
    """Reads the items of one directory; from several threads, which take turns at the interpreter."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = renewed(threading.Lock())
        self._storages: FoundStorages | None = None
        self._table = TorchTable(source, weakly(self._persistent))
        self._frames: dict[object, list[tuple[ItemFrame, ItemPlace | None]]] = {}

    def _persistent(self, pid: object) -> object:
        if self._storages is None:
            raise PickleError("a storage outside of any item")
        return self._storages.persistent(pid)

    def tensor(self, window: Window, dtype: DType, sizes: tuple[int, ...]) -> ItemPlace:
        """The place of the elements of a tensor. Raises `FormatError` for an item that holds anything else."""
        kind = (window.nbytes, dtype.name, sizes)
        for frame, found in self._frames.get(kind, ()):
            if found is not None and frame.matches(window.ends):
                return frame.place(window.ends, window.start, found)
        archive = self._archive(window)
        value, foreign = self._value(window, archive, PICKLE)
        if foreign:
            raise PickleError(
                f"the item of a tensor asks for {foreign[0].what}; torch writes a plain tensor there"
            )
        found = _plain(value, dtype, sizes)
        if found.whole:
            common = frame_of(window, archive, free=(SERIALIZATION_ID,))
            self._remember(kind, common, replace(found, start=found.start - window.start))
        return found

    def known(
        self, kind: tuple[int, str, tuple[int, ...]]
    ) -> Sequence[tuple[ItemFrame, ItemPlace]]:
        """The frames of a length, a dtype and sizes, each with the place of the elements, counted from the start of an item."""
        return [(frame, place) for frame, place in self._frames.get(kind, ()) if place is not None]

    def value(self, window: Window, stream: str) -> tuple[object, tuple[Foreign, ...]]:
        kind = window.nbytes
        for frame, _ in self._frames.get(kind, ()):
            if frame.matches(window.ends):
                pickled = frame.content(window.ends, PICKLE)
                if pickled is not None:
                    return self._interpret(pickled, _nowhere, stream)
        archive = self._archive(window)
        made = self._value(window, archive, stream)
        if not any(f"/{STORAGES}" in name for name in archive.records):
            common = frame_of(window, archive, free=(PICKLE, SERIALIZATION_ID))
            self._remember(kind, common, None)
        return made

    def _remember(self, kind: object, frame: ItemFrame | None, found: ItemPlace | None) -> None:
        known = self._frames.get(kind, [])
        if frame is not None and len(known) < TRIED_FRAMES and len(self._frames) < KEPT_FRAMES:
            self._frames[kind] = [*known, (frame, found)]

    def _archive(self, window: Window) -> Archive:
        archive = read_archive(window.source, window.key, start=window.start, stop=window.stop)
        if not archive.prefix:
            raise ZipError(
                "the records of an item lie in one top folder; these do not",
                file=window.key,
                offset=window.start,
            )
        if archive.get(PICKLE) is None or archive.get("constants.pkl") is not None:
            raise FormatError(
                "an item that torch.save did not write: it has no data.pkl, or is a TorchScript archive"
            )
        return archive

    def _value(
        self, window: Window, archive: Archive, stream: str
    ) -> tuple[object, tuple[Foreign, ...]]:
        byteorder = PickleReader(window.source, window.key, archive).byteorder
        record = archive.get(PICKLE)
        if record is None:
            raise FormatError(f"an item without {PICKLE}")
        content = record_bytes(window.source, window.key, record, self._source.limits.pickle_nbytes)

        def find(asked: StorageId) -> Storage:
            stored = archive.get(STORAGES + asked.key)
            if stored is None:
                raise MetadataError(
                    f"the pickle points at {STORAGES}{asked.key[:64]}, which is not in the item"
                )
            if not stored.stored:
                raise ZipError(f"the storage {stored.name!r} is compressed", offset=stored.header)
            label = f"{stored.name} at byte {window.start}"
            place = window.key, stored.start, stored.nbytes
            return Storage(
                *place, byteorder, stored.crc32, asked.location, label, home=self._source.store
            )

        return self._interpret(content, find, stream)

    def _interpret(
        self, content: bytes, find: Callable[[StorageId], Storage], stream: str
    ) -> tuple[object, tuple[Foreign, ...]]:
        with self._lock:
            self._storages = FoundStorages(self._source, find)
            try:
                done = interpret_whole(
                    content, self._table, limits=self._source.limits, stream=stream
                )
            finally:
                self._storages = None
        return done.value, done.foreign


def _nowhere(asked: StorageId) -> Storage:
    raise MetadataError(
        f"the pickle points at {STORAGES}{asked.key[:64]}, which is not in the item"
    )


def _plain(value: object, dtype: DType, sizes: tuple[int, ...]) -> ItemPlace:
    if not isinstance(value, LazyTensor) or value.traits.meta or value.traits.subclass is not None:
        what = value.kind + " tensor" if isinstance(value, Composite) else brief(value)
        raise MetadataError(
            f"the item of a tensor holds something else: {what}", expected="Tensor", found=what
        )
    if value.dtype is not dtype or value.shape != sizes:
        message = f"the metadata says {dtype} {list(sizes)}, the item holds {value.dtype} {list(value.shape)}"
        raise MetadataError(
            message, expected=(dtype.name, sizes), found=(value.dtype.name, value.shape)
        )
    if value.traits.neg:
        raise Unsupported("a tensor that was saved lazily negated; load it with torch")
    (chunk,) = value.chunks
    storage, nbytes = chunk.storage, value.nbytes
    low, high = chunk.extent(dtype)
    if high - low != nbytes:
        raise Unsupported(
            "a tensor that was saved as a view with gaps or repetitions; torch packs it before",
            expected=nbytes,
        )
    start = storage.start + chunk.offset // 8
    whole = storage.nbytes == nbytes
    crc = storage.crc32 if whole else None
    return ItemPlace(
        start, chunk.strides, storage.byteorder, crc, storage.location, value.traits.conj, whole
    )
