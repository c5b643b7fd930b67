"""Chunks and storages whose place in their item is found when they are read.

The metadata has the box and the length of an item. The start, the strides and the checksum of the elements stand in the item
itself. To read 10,000 items when a directory is opened would take 10,000 reads, so a storage reads its own item, once, when a field
needs it. Slicing, planning, checking and comparing see an ordinary storage; home, equality, hash and length need no item.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import asdict

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DType
from holdfast.core.opaque import Global, Opaque
from holdfast.core.protocols import Foreign
from holdfast.core.table import IRREGULAR, RowKind, StoredFile, Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import replace_as_base
from holdfast.engine.files import NO_FILES, FileStorages
from holdfast.formats.dcp.index import SavedChunk
from holdfast.formats.dcp.inflate import virtual_key
from holdfast.formats.dcp.item import ItemPlace, Items
from holdfast.formats.dcp.schema import Item


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

    def with_home(self, home: object) -> ItemStorage:
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

    def with_storage(self, storage: Storage) -> Chunk:
        return (
            ItemChunk(self.box, storage, 0, ())
            if isinstance(storage, ItemStorage)
            else Chunk.with_storage(self, storage)
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
    """The tensors of a directory. The place of a tensor in its item is found when it is read: until then all rows are irregular."""

    def __init__(self, tensors: Mapping[str, LazyTensor], items: Items) -> None:
        lazies = list(tensors.values())
        kinds: list[RowKind] = []
        positions: dict[object, int] = {}
        kind: list[int] = []
        for tensor in lazies:
            key = id(tensor.dtype), tensor.shape, id(tensor.traits)
            found = positions.get(key)
            if found is None:
                found = positions[key] = len(kinds)
                kinds.append(RowKind(tensor.dtype, tensor.shape, tensor.traits, tensor.nbytes))
            kind.append(found)
        super().__init__(
            list(tensors),
            kinds,
            kind,
            [IRREGULAR] * len(lazies),
            NO_FILES,
            dict(enumerate(lazies)),
            lazy_tensors=lazies,
        )
        self._items = items

    def locate_rows(self, rows: Sequence[int]) -> Table:
        """Return this table with file ranges for those of `rows` that are all of one item, which is not compressed."""
        storages: dict[int, ItemStorage] = {}
        for row in rows:
            tensor = self.irregular[row]
            chunk = tensor.chunks[0] if len(tensor.chunks) == 1 else None
            if not isinstance(chunk, ItemChunk) or chunk.shape != tensor.shape:
                continue
            if not chunk.storage.item.transforms:
                storages[row] = chunk.storage
        self._items.find_all(storages.values())

        kinds, kind, storage_numbers = [*self.kinds], [*self.kind_indices], [*self.storage_indices]
        kind_positions: dict[object, int] = {}
        files: dict[str, int] = {}
        columns: list[tuple[int, int, int, int]] = []
        names: list[str] = []
        irregular = dict(self.irregular)
        for row, storage in storages.items():
            place = storage.found
            assert place is not None  # `find_all` raises otherwise
            key = kind[row], place.strides, place.byteorder, place.location
            if key not in kind_positions:
                known = kinds[kind[row]]
                kind_positions[key] = len(kinds)
                kinds.append(
                    RowKind.from_strides(
                        known.dtype, known.shape, place.strides, storage_nbytes=storage.nbytes, traits=known.traits,
                        byteorder=place.byteorder, location=place.location,
                    )
                )  # fmt: skip
            if not kinds[kind_positions[key]].is_whole:
                continue
            kind[row], storage_numbers[row] = kind_positions[key], len(columns)
            del irregular[row]
            crc = NO_CRC if place.crc32 is None else place.crc32
            file = files.setdefault(storage.key, len(files))
            columns.append((file, place.start, storage.nbytes, crc))
            names.append(self.names[row])
        source = self._items.source
        file_storages = FileStorages(
            [StoredFile(source, key, source.store) for key in files],
            *np.array(columns, np.int64).reshape(-1, 4).T,
            names=names,
            labels=[storages[row].label for row in storages if row not in irregular],
        )
        return Table(self.names, kinds, kind, storage_numbers, file_storages, irregular)


_box_at = lru_cache(1024)(Box.from_offsets)
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
