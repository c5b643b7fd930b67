"""Chunks and storages that are found when they are read.

The metadata has the box and the length of an item. The start, the strides and the checksum of the elements stand in the item
itself. To read 10,000 items when a directory is opened would take 10,000 reads, so a storage reads its own item, once, when a field
needs it. Slicing, planning, checking and comparing see an ordinary storage; home, equality, hash and length need no item.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import asdict, force_setattr

from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DType
from holdfast.core.opaque import Global, Opaque
from holdfast.core.protocols import Foreign, Source, Stamp, Store
from holdfast.core.runtime import Sent, renewed
from holdfast.core.table import ODD, FilePlace, Kind, Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import replace_as_base
from holdfast.engine.coalesce import HEADERS, REMOTE, coalesce
from holdfast.engine.files import NO_FILES, FileStorages
from holdfast.errors import FormatError, LimitExceeded, StoreError, Truncated, Unsupported, located
from holdfast.formats.dcp.index import SavedChunk, check_inside
from holdfast.formats.dcp.item import ItemFrame, ItemPlace, ItemReader, Window, end_nbytes
from holdfast.formats.dcp.schema import Item
from holdfast.stores.virtual import ContentCache, Virtual, VirtualFile

ZSTD = "stream.zstd/1"

CACHE_NBYTES = 256 << 20
"""Inflated items that stay in memory beyond the last one, so that the blocks of one item are read from one inflation."""

WINDOW_NBYTES = 8 << 20
"""How far back a stream may refer: what every decoder should support, by the zstd specification. torch's streams need 2 MiB."""


def virtual_key(item: Item) -> str:
    return f"{item.file}@{item.offset}"


def is_inflated(item: Item) -> bool:
    """Whether an item must be inflated. Raises `Unsupported` for any other transform."""
    if not item.transforms:
        return False
    if item.transforms != (ZSTD,):
        shown = ", ".join(name[:64] for name in item.transforms[:4])
        raise Unsupported(
            f"an item that was transformed by {shown}; only {ZSTD} is known",
            file=item.file,
            offset=item.offset,
        )
    return True


class InflatedStore(Virtual):
    """The store of a directory, with each compressed item as one more file, which is not listed.

        __0_0.distcp@462   the item at byte 462 of __0_0.distcp, inflated

    torch's stream extensions have one compressor, `stream.zstd/1`. Such an item cannot be read by range: it is inflated whole, and
    the last few stay in memory. The most bytes that it may have are known beforehand, and never exceeded.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(over=store)
        self._store = store
        self._cache = ContentCache(CACHE_NBYTES)

    def add(self, item: Item, most: int) -> str:
        """Add an item as a file of at most `most` bytes, and give its name."""
        nbytes, read = (
            partial(Sent(self._nbytes), item, most),
            partial(Sent(self._read), item, most),
        )
        return self.put(
            VirtualFile(nbytes, read, partial(Sent(self._stamp), item)), virtual_key(item)
        )

    def close(self) -> None:
        self._cache.clear()
        super().close()

    def _nbytes(self, item: Item, most: int) -> int:
        return self._content(item, most).nbytes

    def _read(self, item: Item, most: int, start: int, out: memoryview) -> None:
        out[:] = self._content(item, most).data[start : start + out.nbytes]

    def _stamp(self, item: Item) -> Stamp:
        return item.file, item.offset, item.length, self._store.stamp(item.file)

    def _content(self, item: Item, most: int) -> np.ndarray:
        size = self._store.size(item.file)  # raises where the directory was closed
        with self._cache.lock:
            content = self._cache.get(item)
            if content is None:
                if item.stop > size:
                    raise Truncated(
                        f"an item should end at byte {item.stop:,}", file=item.file, offset=size
                    )
                packed = bytearray(item.length)
                self._store.read(item.file, item.offset, memoryview(packed))
                content = np.frombuffer(inflate(packed, most, item), np.uint8)
                self._cache.put(item, content)
            return content


def inflate(packed: bytearray, most: int, item: Item) -> bytearray:
    """The content of a zstd stream: at most `most` bytes."""
    try:
        import zstandard
    except ImportError:
        message = "items of this checkpoint are compressed with zstd, which takes the package zstandard: pip install zstandard"
        raise Unsupported(message, file=item.file) from None
    made = bytearray()
    try:
        with zstandard.ZstdDecompressor(max_window_size=WINDOW_NBYTES).stream_reader(
            packed, read_across_frames=True
        ) as stream:
            while piece := stream.read(min(1 << 20, most + 1 - len(made))):
                made += piece
                if len(made) > most:
                    message = f"a compressed item holds more than the {most:,} bytes that it should"
                    raise LimitExceeded(message, file=item.file, offset=item.offset, expected=most)
    except zstandard.ZstdError as error:
        raise FormatError(
            f"a compressed item is damaged: {error}", file=item.file, offset=item.offset
        ) from None
    except MemoryError:
        raise StoreError(
            f"no memory for an item of {most:,} bytes, which must be inflated whole", file=item.file
        ) from None
    return made


LOCKS = 16
"""Threads that may read items at the same time. Every item has one of the locks, so that it is read once."""

INFLATED_FRAMING_NBYTES = 1 << 20
"""Bytes that an inflated item may have beside its elements: eight records, each aligned to 64 KiB at the most."""


class Items:
    def __init__(self, source: Source, *, inflate: bool = False) -> None:
        self._inflated = InflatedStore(source.store) if inflate else None
        self.source = source if self._inflated is None else source.over(self._inflated)
        """The source of the items, with compressed items as files of their own."""
        self.reader = ItemReader(self.source)
        self._locks = [renewed(threading.Lock()) for _ in range(LOCKS)]

    def __reduce__(self) -> tuple[object, ...]:
        return _arrived, (self.source, self._inflated)

    def find(self, storage: ItemStorage) -> ItemPlace:
        """The place of a storage, from its item; read once."""
        with self._locks[hash(storage.item) // 16 % LOCKS]:
            if storage.found is not None:
                return storage.found
            with located(file=storage.item.file, tensor=storage.name):
                window = self.window(storage.item, storage.name, storage.nbytes)
                found = self.reader.tensor(window, storage.dtype, storage.sizes)
            force_setattr(storage, "found", found)
            return found

    def find_all(self, storages: Iterable[ItemStorage]) -> None:
        """Find the places of many storages. The ends of neighbours are read together; equal kinds are compared, not parsed."""
        asked = [storage for storage in storages if storage.found is None]
        files: dict[str, list[ItemStorage]] = {}
        for storage in asked:
            if not storage.item.transforms:
                files.setdefault(storage.item.file, []).append(storage)
        known: dict[tuple[int, str, tuple[int, ...]], Sequence[tuple[ItemFrame, ItemPlace]]] = {}
        for file, members in files.items():
            size = self.source.store.size(file)
            members = [storage for storage in members if storage.item.stop <= size]
            for number, raw in self._ends(file, members):
                storage = members[number]
                item = storage.item
                kind = item.length, storage.dtype.name, storage.sizes
                if kind not in known:
                    self.find(storage)
                    known[kind] = self.reader.known(kind)[:1]
                for frame, first in known[kind]:
                    if storage.found is None and frame.matches(raw):
                        force_setattr(storage, "found", frame.place(raw, item.offset, first))
        for storage in asked:
            if storage.found is None:
                self.find(storage)

    def _ends(self, file: str, storages: Sequence[ItemStorage]) -> Iterator[tuple[int, bytes]]:
        """The number and both ends of each item of a file, or all of a short one, in the order of the file."""
        sizes = [
            (one.item.offset, one.item.stop, end_nbytes(one.item.length, one.nbytes))
            for one in storages
        ]
        starts, stops, ends = np.array(sizes, np.int64).reshape(-1, 3).T
        short = 2 * ends >= stops - starts
        # The first end, which is all of a short one; and the last end of the others.
        owners = np.concatenate((np.arange(len(storages)), np.flatnonzero(~short))).tolist()
        first = np.concatenate((starts, (stops - ends)[~short]))
        last = np.concatenate((np.where(short, stops, starts + ends), stops[~short]))
        heads: dict[int, bytes] = {}
        whole = short.tolist()
        for at, raw in self.read_together(file, first, last):
            number = owners[at]
            if whole[number]:
                yield number, raw
            elif number in heads:
                yield number, heads.pop(number) + raw
            else:
                heads[number] = raw

    def read_together(self, file: str, starts: Ints, stops: Ints) -> Iterator[tuple[int, bytes]]:
        """The bytes of ranges of a file, each with its number, in the order of the file. Neighbours are read by one call."""
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], stops[order]
        edges = [
            *coalesce(
                starts, stops, REMOTE if self.source.store.medium.requests else HEADERS
            ).tolist(),
            len(order),
        ]
        for low, high in pairwise(edges):
            begin = int(starts[low])
            data = self.source.bytes(file, begin, int(stops[low:high].max()))
            places = (starts[low:high] - begin).tolist(), (stops[low:high] - begin).tolist()
            for number, start, stop in zip(order[low:high].tolist(), *places, strict=True):
                yield number, data[start:stop]

    def value(
        self, item: Item, name: str, content: bytes | None = None
    ) -> tuple[object, tuple[Foreign, ...]]:
        with located(file=item.file, tensor=name):
            return self.reader.value(
                self.window(item, name, 0, content=content), f"{name[:80]!r} in {item.file}"
            )

    def window(self, item: Item, name: str, nbytes: int, *, content: bytes | None = None) -> Window:
        """An item whose elements take so many bytes."""
        check_inside(item, self.source.store.size(item.file), name)
        if self._inflated is not None and item.transforms:
            key = self._inflated.add(
                item,
                nbytes + INFLATED_FRAMING_NBYTES if nbytes else self.source.limits.pickle_nbytes,
            )
            return Window(self.source, key, (0, self._inflated.size(key)))
        return Window(
            self.source, item.file, (item.offset, item.stop), elements=nbytes, content=content
        )


def _arrived(source: Source, inflated: InflatedStore | None) -> Items:
    items = Items(source)
    items._inflated = inflated
    return items


class ItemStorage(Storage, frozen=True, kw_only=True, eq=False):
    """The elements in one item. Start, strides, byte order and checksum are read from the item once, when one is asked for."""

    dtype: DType
    item: Item
    items: Items
    name: str
    sizes: tuple[int, ...]
    found: ItemPlace | None = None

    if not TYPE_CHECKING:  # fields of a storage that only the item has
        start = property(lambda self: self.place.start)
        byteorder = property(lambda self: self.place.byteorder)
        crc32 = property(lambda self: self.place.crc32)
        location = property(lambda self: self.place.location)
        label = property(lambda self: f"the item at byte {self.item.offset}")

    @property
    def place(self) -> ItemPlace:
        return self.found or self.items.find(self)

    @property
    def ranges(self) -> tuple[tuple[str, int, int], ...]:
        return ((self.item.file, self.item.offset, self.item.stop),)

    def moved(self, home: object) -> ItemStorage:
        return ItemStorage(**{**asdict(self), "home": home})

    def __replace__(self, /, **changes: Any) -> Storage:  # noqa: ANN401  # those of a storage
        return replace_as_base(Storage, self, changes)

    def __eq__(self, other: object) -> bool:
        if (
            not isinstance(other, ItemStorage)
            or self.home is not other.home
            or self.key != other.key
        ):
            return False
        # Items of one directory do not overlap: those that begin together are one, which tied tensors share.
        return (self.item.offset, self.dtype, self.sizes) == (
            other.item.offset,
            other.dtype,
            other.sizes,
        )

    def __hash__(self) -> int:
        return hash((id(self.home), self.key, self.item.offset))

    def __repr__(self) -> str:
        return f"ItemStorage({self.key!r}, item={self.item.offset}+{self.item.length}, nbytes={self.nbytes})"


class ItemChunk(Chunk, frozen=True):
    """The box of a tensor in one item. The item has the strides."""

    if TYPE_CHECKING:
        storage: ItemStorage

    def __post_init__(self) -> None:
        """No check, which would read the item."""

    @property  # type: ignore[misc]  # no field, but read-only as one
    def strides(self) -> tuple[int, ...]:
        return self.storage.place.strides

    def over(self, storage: Storage) -> Chunk:
        return (
            ItemChunk(self.box, storage, 0, ())
            if isinstance(storage, ItemStorage)
            else Chunk.over(self, storage)
        )

    def __replace__(self, /, **changes: Any) -> Chunk:  # noqa: ANN401  # those of a chunk
        return replace_as_base(Chunk, self, changes)

    def __eq__(self, other: object) -> bool:
        if (
            not isinstance(other, ItemChunk)
            or self.box != other.box
            or self.storage != other.storage
        ):
            return False
        return self.storage.items is other.storage.items or self.strides == other.strides

    __ne__ = object.__ne__  # a struct's own would compare otherwise

    def __hash__(self) -> int:
        return hash(self.storage)

    def __repr__(self) -> str:
        return f"ItemChunk({self.box!r}, {self.storage!r})"


class ItemTable(Table):
    """The tensors of a directory. The place of a tensor in its item is found when it is read: until then all rows are odd."""

    def __init__(self, tensors: Mapping[str, LazyTensor], items: Items) -> None:
        lazies = list(tensors.values())
        kinds: list[Kind] = []
        positions: dict[object, int] = {}
        kind: list[int] = []
        for tensor in lazies:
            key = id(tensor.dtype), tensor.shape, id(tensor.traits)
            found = positions.get(key)
            if found is None:
                found = positions[key] = len(kinds)
                kinds.append(Kind(tensor.dtype, tensor.shape, tensor.traits, tensor.nbytes))
            kind.append(found)
        super().__init__(
            list(tensors),
            kinds,
            kind,
            [ODD] * len(lazies),
            NO_FILES,
            dict(enumerate(lazies)),
            views=lazies,
        )
        self._items = items

    def located(self, rows: Sequence[int]) -> Table:
        """This table with file ranges for those of `rows` that are all of one item."""
        places = [
            (row, found) for row in rows if (found := _item_storage(self.odd[row])) is not None
        ]
        self._items.find_all(storage for _, storage in places)
        kinds, kind, storage = [*self.kinds], [*self.kind], [*self.storage]
        positions: dict[object, int] = {}
        files: dict[str, int] = {}
        columns: list[tuple[int, int, int, int]] = []
        names: list[str] = []
        labels: list[str] = []
        odd = dict(self.odd)
        for row, one in places:
            place = one.found
            if place is None or row not in odd:
                continue
            key = kind[row], place.strides, place.byteorder, place.location
            if key not in positions:
                own = kinds[kind[row]]
                positions[key] = len(kinds)
                kinds.append(
                    Kind.strided(
                        own.dtype, own.shape, place.strides, storage_nbytes=one.nbytes, traits=own.traits,
                        byteorder=place.byteorder, location=place.location,
                    )
                )  # fmt: skip
            if not kinds[positions[key]].whole:
                continue
            kind[row], storage[row] = positions[key], len(columns)
            del odd[row]
            crc = NO_CRC if place.crc32 is None else place.crc32
            columns.append((files.setdefault(one.key, len(files)), place.start, one.nbytes, crc))
            names.append(self.names[row])
            labels.append(one.label)
        source = self._items.source
        made = np.array(columns, np.int64).reshape(-1, 4).T
        storages = FileStorages(
            [FilePlace(source, file, source.store) for file in files],
            *made,
            names=names,
            labels=labels,
        )
        return Table(self.names, kinds, kind, storage, storages, odd)


def _item_storage(tensor: LazyTensor) -> ItemStorage | None:
    """The storage of a tensor that is all of one item, which is not compressed; None for any other."""
    chunks = tensor.chunks
    if len(chunks) != 1 or type(chunks[0]) is not ItemChunk or chunks[0].shape != tensor.shape:
        return None
    storage = chunks[0].storage
    return None if storage.item.transforms else storage


_box_at = lru_cache(1024)(Box.at)
"""Boxes are few: of many tensors most begin at zero, and have one of a dozen shapes."""


def chunk_of(piece: SavedChunk, name: str, dtype: DType, *, items: Items) -> Chunk:
    box = _box_at(piece.offsets, piece.sizes)
    if 0 in piece.sizes:
        return Chunk(
            box,
            Storage(piece.item.file, piece.item.offset, 0, home=items.source.store),
            0,
            (0,) * len(piece.sizes),
        )
    item = piece.item
    storage = ItemStorage(
        virtual_key(item) if item.transforms else item.file,
        -1,
        dtype.nbytes(math.prod(piece.sizes)),
        home=items.source.store,
        dtype=dtype,
        item=item,
        items=items,
        name=name,
        sizes=piece.sizes,
    )
    return ItemChunk(box, storage, 0, ())


class Unread(Opaque):
    """A value that is no tensor and was not read when the directory was opened, because there are too many of them."""

    __slots__ = ("_item", "_items", "_name")

    def __init__(self, items: Items, item: Item, name: str) -> None:
        super().__init__(Global("torch.distributed.checkpoint", "bytes"))
        self._items, self._item, self._name = items, item, name

    def read(self) -> object:
        """The value: plain data, lazy tensors, and `Opaque` for what is not built."""
        return self._items.value(self._item, self._name)[0]

    def foreign(self) -> tuple[Foreign, ...]:
        return self._items.value(self._item, self._name)[1]

    def __repr__(self) -> str:
        return f"<Unread {self._name!r}: {self._item.length:,} bytes at byte {self._item.offset} of {self._item.file!r}>"
