"""Arrays in memory: as lazy tensors, and very many of them as rows of a table.

A numpy buffer is a chunk like any other, and arrays over one buffer are aliases. A plain array is a row of a table where its dtype
exists in files, and it owns its memory, has that of a tensor or a buffer, or is a view of such an array. Two arrays over foreign
memory are one storage where they begin in one place and are of one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import compress
from operator import attrgetter
from typing import cast

import numpy as np

from holdfast.core.arrays import AnyDType, byte_row
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.table import RowKind, separate_outside_rows
from holdfast.core.tensor import PLAIN_TRAITS, LazyTensor, Traits
from holdfast.engine.saves import Memory
from holdfast.engine.source import OpenSource
from holdfast.engine.table import TensorColumns
from holdfast.errors import Unsupported
from holdfast.stores.memory import MemoryStore

ARRAY_TYPES = (np.ndarray,)

DTYPE, SHAPE, STRIDES, NBYTES, BASE, FLAGS = map(
    attrgetter, ("dtype", "shape", "strides", "nbytes", "base", "flags")
)
IN_ORDER, OWNED = attrgetter("c_contiguous"), attrgetter("owndata")


class ArrayStorages:
    """The bytes of arrays, which stay where they are."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays
        self.nbytes = np.fromiter(map(NBYTES, arrays), np.int64, len(arrays))

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        arrays = self._arrays
        return [arrays[number].tobytes("A") for number in numbers]

    can_read_ranges = True

    def read_ranges(
        self, numbers: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> list[memoryview]:
        whole = {number: self._bytes(number) for number in {*numbers}}
        return [
            whole[number][start : start + count]
            for number, start, count in zip(numbers, starts, nbytes, strict=True)
        ]

    def _bytes(self, number: int) -> memoryview:
        array = self._arrays[number]
        return byte_row(array if array.flags.c_contiguous else array.T).data

    def segment(self, number: int, label: str) -> Memory | bytes:
        array = self._arrays[number]
        return Memory(self._bytes(number), label, array) if array.nbytes else b""

    def addresses(self) -> list[int]:
        return [array.__array_interface__["data"][0] for array in self._arrays]


def describe_arrays(values: list[object]) -> TensorColumns:
    """The arrays among some that are views of an array, or have memory of their own, of a tensor or of a buffer."""
    arrays = cast("list[np.ndarray]", values)
    rows: Sequence[int] = range(len(arrays))
    flags = list(map(FLAGS, arrays))
    plain = (
        {*map(id, map(BASE, arrays))} == {id(None)}
        and all(map(IN_ORDER, flags))
        and all(map(OWNED, flags))
    )
    roots = arrays
    if not plain:
        bases = [*map(BASE, arrays)]
        viewed = {kind for kind in {*map(type, bases)} if issubclass(kind, np.ndarray)}
        roots = [
            base if kind in viewed else one
            for one, base, kind in zip(arrays, bases, map(type, bases), strict=True)
        ]
        known_roots = {id(root): root for root in roots}
        good = {place for place, root in known_roots.items() if _is_root(root)}
        fine = [place in good for place in map(id, roots)]
        arrays, roots, rows = (
            [*compress(arrays, fine)],
            [*compress(roots, fine)],
            [*compress(rows, fine)],
        )
    dtypes = list(map(DTYPE, arrays))
    known = {dtype: _plain_dtype(dtype) for dtype in set(dtypes)}
    if any(row is None for row in known.values()):
        fine = [known[dtype] is not None for dtype in dtypes]
        arrays, roots, rows, dtypes = (
            [*compress(column, fine)] for column in (arrays, roots, rows, dtypes)
        )
    positions: dict[tuple[object, ...], int] = {}
    placed: dict[int, int] = {}
    if plain:
        kind = [
            positions.setdefault(one, len(positions))
            for one in zip(dtypes, map(SHAPE, arrays), strict=True)
        ]
        kinds = [RowKind.from_shape(known[dtype], shape) for dtype, shape in positions]
    else:
        starts = [root.__array_interface__["data"][0] for root in roots]
        each = zip(arrays, roots, starts, strict=True)
        offsets = [
            0 if one is root else one.__array_interface__["data"][0] - start
            for one, root, start in each
        ]
        asked = zip(
            dtypes, map(SHAPE, arrays), map(STRIDES, arrays), map(NBYTES, roots), strict=True
        )
        kind = [positions.setdefault(one, len(positions)) for one in asked]
        kinds = [_view_kind(known[dtype], *rest) for dtype, *rest in positions]  # type: ignore[arg-type]
        # What is empty lies nowhere.
        placed = {
            at: 8 * offset for at, offset in enumerate(offsets) if offset and kinds[kind[at]].nbytes
        }
        separate_outside_rows(kinds, kind, placed)
    storage: Sequence[int] = range(len(arrays))
    keys: list[object] = [*map(id, roots)]
    if not plain:
        # Two arrays may be over the memory of one tensor. What has no bytes shares them with nobody.
        places = zip(starts, map(NBYTES, roots), strict=True)
        keys = [place if place[1] else key for place, key in zip(places, keys, strict=True)]
    numbers = dict(zip(reversed(keys), reversed(storage), strict=True))
    if len(numbers) < len(roots):
        firsts = sorted(numbers.values())
        numbers = {keys[first]: number for number, first in enumerate(firsts)}
        storage, roots = [*map(numbers.__getitem__, keys)], [roots[first] for first in firsts]
    held = ArrayStorages(roots)
    return TensorColumns(rows, kinds, kind, storage, held, held.addresses, placed)


def _is_root(array: object) -> bool:
    """Whether an array is no view of another one, and all bytes from its first to its last are its own."""
    return (
        type(array) is np.ndarray
        and not isinstance(array.base, np.ndarray)
        and array.flags.forc
        and not array.dtype.hasobject
    )


def _view_kind(
    dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], nbytes: int
) -> RowKind:
    if 0 in shape:
        strides = (0,) * len(shape)
    known = tuple([8 * stride for stride in _known_strides(shape, strides)])
    return RowKind.from_strides(dtype, shape, known, storage_nbytes=nbytes)


@cache
def _plain_dtype(dtype: AnyDType) -> DType | None:
    """The dtype that a file has for one of numpy; None where it has none for the bytes as they are."""
    row = DTYPES.numpy(dtype) if dtype.isnative and not dtype.hasobject else None
    return None if row is None or row.packed else row


def _known_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes from one element to the next; not below zero where there is no next element, as a dimension of one may have it."""
    if min(strides, default=0) >= 0:
        return strides
    return tuple(
        [
            abs(stride) if length == 1 or 0 in shape else stride
            for length, stride in zip(shape, strides, strict=True)
        ]
    )


class MemoryTensors:
    """The memory of one state that is being saved. Its tensors keep every buffer alive that they point at, through their source."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, int], Storage] = {}

    @cached_property
    def store(self) -> MemoryStore:
        return MemoryStore({}, name="<memory>")

    @cached_property
    def _source(self) -> OpenSource:
        return OpenSource(self.store, mapped=True)

    def address_ranges(self) -> dict[str, tuple[int, int]]:
        return {storage.key: place for place, storage in self._storages.items() if place[1]}

    def wrap_array(self, array: np.ndarray) -> LazyTensor:
        """A numpy array as a lazy tensor over the buffer that owns its memory."""
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("="))
        dtype = DTYPES.numpy(array.dtype)
        if dtype is None:
            raise Unsupported(f"an array of {array.dtype} has no counterpart among tensors")
        if dtype.packed:
            # numpy gives each narrow element a byte of its own: keep the bytes under the dtype that has that layout.
            raise Unsupported(
                f"numpy arrays of {array.dtype} are unpacked; save them as uint8 or as a LazyTensor"
            )
        root = array
        while isinstance(root.base, np.ndarray) and root.base.flags.forc:
            root = root.base
        if not root.flags.forc or root.dtype.hasobject:
            array = root = np.ascontiguousarray(array)
        flat = byte_row(root if root.flags.c_contiguous else root.T)
        start = root.__array_interface__["data"][0]
        storage = self.add_storage(start, flat.data, owner=root)
        offset = array.__array_interface__["data"][0] - start
        return self.make_strided(
            storage, dtype, array.shape, _known_strides(array.shape, array.strides), offset
        )

    def add_storage(
        self, address: int, content: memoryview, *, owner: object, location: str = "cpu"
    ) -> Storage:
        """The storage for a range of memory; the same one for the same range."""
        found = self._storages.get((address, content.nbytes))
        if found is None:
            key = f"{address:x}+{content.nbytes:x}"
            self.store.add(key, content, owner=owner)
            found = Storage(key, 0, content.nbytes, location=location, home=self.store)
            self._storages[address, content.nbytes] = found
        return found

    def make_strided(
        self,
        storage: Storage,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        traits: Traits = PLAIN_TRAITS,
    ) -> LazyTensor:
        """A tensor over a storage; offset and strides in bytes."""
        if 0 in shape:
            strides, offset = (0,) * len(shape), 0
        chunk = Chunk(Box.whole(shape), storage, offset * 8, tuple([s * 8 for s in strides]))
        return LazyTensor("", dtype, shape, (chunk,), self._source, traits)

    def make_chunked(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        chunks: tuple[Chunk, ...],
        traits: Traits = PLAIN_TRAITS,
    ) -> LazyTensor:
        return LazyTensor("", dtype, shape, chunks, self._source, traits)

    def make_meta(self, dtype: DType, shape: tuple[int, ...], traits: Traits) -> LazyTensor:
        return LazyTensor("", dtype, shape, (), self._source, traits)
