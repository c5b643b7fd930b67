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
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
from msgspec import structs

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Storage
from holdfast.core.crc import crc32
from holdfast.core.dtype import DType
from holdfast.core.protocols import Foreign, Source
from holdfast.core.runtime import make_fork_safe
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.value import Value
from holdfast.engine.coalesce import HEADERS, REMOTE, coalesce
from holdfast.errors import (
    FormatError,
    MetadataError,
    PickleError,
    Unsupported,
    ZipError,
    error_context,
)
from holdfast.formats.dcp.index import cut_short
from holdfast.formats.dcp.inflate import InflatedStore
from holdfast.formats.dcp.schema import Item
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.torch.storages import FoundStorages, StorageId
from holdfast.formats.torch.table import TorchTable
from holdfast.formats.torch.tensors import brief
from holdfast.formats.torch.zip import PickleReader
from holdfast.formats.zip.layout import Archive
from holdfast.formats.zip.reader import read_archive, record_bytes

if TYPE_CHECKING:
    from holdfast.formats.dcp.lazy import ItemStorage

STORAGES = "data/"

END_NBYTES = 22
ENTRY_NBYTES = 46
DESCRIPTOR = b"PK\7\x08"
ENTRY = b"PK\1\2"


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
    entries = _find_entries(item)
    holes: list[tuple[int, int]] = []
    checked_records: list[tuple[str, slice, slice, slice]] = []
    storage: tuple[slice, slice] | None = None
    for name, record in archive.records.items():
        short_name = name[len(archive.prefix) + 1 :]
        is_storage = short_name.startswith(STORAGES)
        if not record.nbytes or not (short_name in free or is_storage):
            continue
        start, stop = record.start - item.start, record.stop - item.start
        descriptor = item.locate(stop, stop + 8)
        if name not in entries or descriptor is None:
            return None
        if item.ends[descriptor][:4] != DESCRIPTOR:
            return None
        entry = entries[name] + 16
        holes += [(start, stop), (stop + 4, stop + 8), (entry, entry + 4)]
        content = item.locate(start, stop)
        first = slice(descriptor.start + 4, descriptor.stop)
        second = item.locate(entry, entry + 4)
        assert second is not None  # the directory was read
        if is_storage and storage is None:
            storage = first, second
        elif is_storage or content is None:
            return None
        else:
            checked_records.append((short_name, content, first, second))

    fixed: list[tuple[int, bytes]] = []
    done = 0
    for hole_start, hole_stop in [*sorted(holes), (item.nbytes, item.nbytes)]:
        place = item.locate(done, hole_start)
        if place is None:
            return None
        fixed.append((place.start, item.ends[place]))
        done = hole_stop
    return ItemFrame(len(item.ends), tuple(fixed), tuple(checked_records), storage)


def _find_entries(item: Window) -> dict[str, int]:
    """Find each entry in the central directory of an accepted archive.

    Returns nothing where the directory was not read with the ends, or lies behind 4 GiB. Such items
    are few, and are parsed each time.
    """
    end = item.ends[-END_NBYTES:]
    (count,), (directory,) = struct.unpack_from("<H", end, 10), struct.unpack_from("<I", end, 16)
    place = item.locate(directory, item.nbytes)
    raw = b"" if place is None else item.ends[place]
    entries: dict[str, int] = {}
    start = 0
    for _ in range(count):
        if raw[start : start + 4] != ENTRY:
            break
        name, extra, comment = struct.unpack_from("<3H", raw, start + 28)
        name_start = start + ENTRY_NBYTES
        entries[raw[name_start : name_start + name].decode("utf-8")] = directory + start
        start = name_start + name + extra + comment
    return entries


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
    """The source of the records of one item. Its ends are read at once, other bytes when they are asked for."""

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
        self.store, self.limits = source.store, source.limits
        ends = end_nbytes(self.nbytes, elements)
        self._skipped = 0 if content is not None else max(self.nbytes - 2 * ends, 0)
        self._behind = ends if self._skipped else self.nbytes
        if self._skipped:
            content = source.bytes(key, self.start, self.start + ends) + source.bytes(
                key, self.stop - ends, self.stop
            )
        self.ends: bytes = source.bytes(key, self.start, self.stop) if content is None else content
        """Both ends, one after the other: the whole item where they meet."""

    def locate(self, start: int, stop: int) -> slice | None:
        """Find bytes of the item in `ends`. None if they were not read."""
        if stop <= self._behind:
            return slice(start, stop)
        if self._behind + self._skipped <= start <= stop <= self.nbytes:
            return slice(start - self._skipped, stop - self._skipped)
        return None

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        place = self.locate(start - self.start, stop - self.start) if start >= self.start else None
        return self._source.bytes(key, start, stop) if place is None else self.ends[place]


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


LOCKS = 16
"""Threads that may read items at the same time. Every item has one of the locks, so that it is read once."""

INFLATED_FRAMING_NBYTES = 1 << 20
"""Bytes that an inflated item may have beside its elements: eight records, each aligned to 64 KiB at the most."""


class Items:
    """Reads the items of one directory, also from several threads."""

    def __init__(self, source: Source, *, inflate: bool = False) -> None:
        self._inflated = InflatedStore(source.store) if inflate else None
        self.source = source if self._inflated is None else source.with_store(self._inflated)
        """The source of the items, with compressed items as files of their own."""
        self._locks = [make_fork_safe(threading.Lock()) for _ in range(LOCKS)]
        self._frames: dict[object, list[tuple[ItemFrame, ItemPlace | None]]] = {}
        """By what tells kinds of items apart: the frames of such items, with the place of a tensor's elements, counted from the
        start of the item."""

    def __reduce__(self) -> tuple[object, ...]:
        return _arrived, (self.source, self._inflated)

    def find(self, storage: ItemStorage) -> ItemPlace:
        """Return the place of a storage, from its item, which is read once."""
        with self._locks[hash(storage.item) // 16 % LOCKS]:
            if storage.found is None:
                with error_context(file=storage.item.file, tensor=storage.name):
                    window = self._open(storage.item, storage.name, storage.nbytes)
                    place = self.find_elements(window, storage.dtype, storage.sizes)
                structs.force_setattr(storage, "found", place)
                return place
            return storage.found

    def find_elements(self, window: Window, dtype: DType, sizes: tuple[int, ...]) -> ItemPlace:
        """Return the place of the elements of a tensor. Raises `FormatError` for an item that holds anything else."""
        kind = (window.nbytes, dtype.name, sizes)
        for frame, known_place in self._frames.get(kind, ()):
            if known_place is not None and frame.matches(window.ends):
                return frame.place(window.ends, window.start, known_place)
        archive, value, foreign = self._read(window, PICKLE)
        if foreign:
            raise PickleError(
                f"the item of a tensor asks for {foreign[0].what}; torch writes a plain tensor there"
            )
        place = _plain(value, dtype, sizes)
        if place.whole:
            frame_or_none = frame_of(window, archive, free=(SERIALIZATION_ID,))
            start_in_item = place.start - window.start
            self._remember(kind, frame_or_none, structs.replace(place, start=start_in_item))
        return place

    def find_all(self, storages: Iterable[ItemStorage]) -> None:
        """Find the places of many storages. The ends of neighbours are read together; equal kinds are compared, not parsed."""
        waiting = [storage for storage in storages if storage.found is None]
        files: dict[str, list[ItemStorage]] = {}
        for storage in waiting:
            if not storage.item.transforms:
                files.setdefault(storage.item.file, []).append(storage)
        for file, members in files.items():
            for number, ends in self._read_ends(file, members):
                storage = members[number]
                kind = storage.item.length, storage.dtype.name, storage.sizes
                if kind not in self._frames:
                    self.find(storage)
                for frame, first in self._frames.get(kind, ())[:1]:
                    if storage.found is None and first is not None and frame.matches(ends):
                        place = frame.place(ends, storage.item.offset, first)
                        structs.force_setattr(storage, "found", place)
        for storage in waiting:
            if storage.found is None:
                self.find(storage)

    def _read_ends(self, file: str, storages: Sequence[ItemStorage]) -> Iterator[tuple[int, bytes]]:
        """Yield the number and both ends of each item of a file, or all of a short one, in the order of the file.

        Yields nothing if the file ends before one of the items.
        """
        sizes = [
            (
                storage.item.offset,
                storage.item.length,
                end_nbytes(storage.item.length, storage.nbytes),
            )
            for storage in storages
        ]
        starts, lengths, ends = np.array(sizes, np.int64).reshape(-1, 3).T
        stops = starts + lengths
        is_inside = stops.max(initial=0) <= self.source.store.size(file)
        if not is_inside:
            return  # each item is read by itself, and the error names it
        is_short = 2 * ends >= stops - starts
        # The first end, which is all of a short one; and the last end of the others.
        owners = np.concatenate((np.arange(len(storages)), np.flatnonzero(~is_short))).tolist()
        range_starts = np.concatenate((starts, (stops - ends)[~is_short]))
        range_stops = np.concatenate((np.where(is_short, stops, starts + ends), stops[~is_short]))
        heads: dict[int, bytes] = {}
        is_whole = is_short.tolist()
        for range_number, raw in self.read_together(file, range_starts, range_stops):
            number = owners[range_number]
            if is_whole[number]:
                yield number, raw
            elif number in heads:
                yield number, heads.pop(number) + raw
            else:
                heads[number] = raw

    def read_together(self, file: str, starts: Ints, stops: Ints) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the bytes of each range, in the order of the file. Neighbours are read by one call."""
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        joining = REMOTE if self.source.store.read_profile.request_count else HEADERS
        edges = [*coalesce(starts, stops, joining).tolist(), len(order)]
        for low, high in pairwise(edges):
            begin = int(starts[low])
            data = self.source.bytes(file, begin, int(stops[low:high].max()))
            places = (starts[low:high] - begin).tolist(), (stops[low:high] - begin).tolist()
            for number, start, stop in zip(order[low:high].tolist(), *places, strict=True):
                yield number, data[start:stop]

    def value(
        self, item: Item, name: str, content: bytes | None = None
    ) -> tuple[object, tuple[Foreign, ...]]:
        """Return the value of an item that is not a tensor, and the globals that were not built.

        Args:
            item: The item.
            name: The name of the value.
            content: The bytes of the item, if they are known.
        """
        with error_context(file=item.file, tensor=name):
            window = self._open(item, name, 0, content=content)
            stream = f"{name[:80]!r} in {item.file}"
            for frame, _ in self._frames.get(window.nbytes, ()):
                pickled = frame.content(window.ends, PICKLE)
                if pickled is not None and frame.matches(window.ends):
                    return self._interpret(pickled, _nowhere, stream)
            archive, value, foreign = self._read(window, stream)
            if not any(f"/{STORAGES}" in record for record in archive.records):
                frame_or_none = frame_of(window, archive, free=(PICKLE, SERIALIZATION_ID))
                self._remember(window.nbytes, frame_or_none, None)
            return value, foreign

    def _open(self, item: Item, name: str, nbytes: int, *, content: bytes | None = None) -> Window:
        """Open an item whose elements take so many bytes."""
        size, stop = self.source.store.size(item.file), item.offset + item.length
        if stop > size:
            raise cut_short(item, size, name)
        if self._inflated is not None and item.transforms:
            most = nbytes + INFLATED_FRAMING_NBYTES if nbytes else self.source.limits.pickle_nbytes
            key = self._inflated.add(item, most)
            return Window(self.source, key, (0, self._inflated.size(key)))
        place = item.offset, stop
        return Window(self.source, item.file, place, elements=nbytes, content=content)

    def _remember(self, kind: object, frame: ItemFrame | None, place: ItemPlace | None) -> None:
        known = self._frames.get(kind, [])
        if frame is not None and len(known) < TRIED_FRAMES and len(self._frames) < KEPT_FRAMES:
            self._frames[kind] = [*known, (frame, place)]

    def _read(self, window: Window, stream: str) -> tuple[Archive, object, tuple[Foreign, ...]]:
        """Read an item: its archive, its value, and the globals that were not built."""
        source = cast("Source", window)  # apart from `bytes`, everything is that of the directory
        archive = read_archive(source, window.key, start=window.start, stop=window.stop)
        if not archive.prefix:
            raise ZipError(
                "the records of an item lie in one top folder; these do not",
                file=window.key,
                offset=window.start,
            )
        record = archive.get(PICKLE)
        if record is None or archive.get("constants.pkl") is not None:
            raise FormatError(
                "an item that torch.save did not write: it has no data.pkl, or is a TorchScript archive"
            )
        byteorder = PickleReader(source, window.key, archive).byteorder
        content = record_bytes(source, window.key, record, self.source.limits.pickle_nbytes)

        def find(storage_id: StorageId) -> Storage:
            stored = archive.get(STORAGES + storage_id.key)
            if stored is None:
                return _nowhere(storage_id)
            if not stored.stored:
                raise ZipError(f"the storage {stored.name!r} is compressed", offset=stored.header)
            label = f"{stored.name} at byte {window.start}"
            place = window.key, stored.start, stored.nbytes
            return Storage(
                *place, byteorder, stored.crc32, storage_id.location, label, home=self.source.store
            )

        return archive, *self._interpret(content, find, stream)

    def _interpret(
        self, content: bytes, find: Callable[[StorageId], Storage], stream: str
    ) -> tuple[object, tuple[Foreign, ...]]:
        table = TorchTable(self.source, FoundStorages(self.source, find).persistent)
        done = interpret_whole(content, table, limits=self.source.limits, stream=stream)
        return done.value, done.foreign


def _arrived(source: Source, inflated: InflatedStore | None) -> Items:
    items = Items(source)
    items._inflated = inflated
    return items


def _nowhere(storage_id: StorageId) -> Storage:
    raise MetadataError(
        f"the pickle points at {STORAGES}{storage_id.key[:64]}, which is not in the item"
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
    low, high = chunk.byte_range(dtype)
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
