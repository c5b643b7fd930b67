"""Describes numpy arrays in memory: a single one as a lazy tensor, many of them as rows of a table.

An array over the memory of another array, a torch tensor or a buffer shares that storage, so
aliases stay aliases in a file. Two arrays over memory that no array owns have the same storage if
they begin at the same address and have the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import cast

import numpy as np

from holdfast.core.arrays import AnyDType, byte_row
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.runtime import address_of
from holdfast.core.table import RowKind, separate_outside_rows
from holdfast.core.tensor import PLAIN_TRAITS, LazyTensor, Traits
from holdfast.engine.saves import Memory
from holdfast.engine.source import OpenSource
from holdfast.engine.table import TensorColumns
from holdfast.errors import Unsupported
from holdfast.stores.memory import MemoryStore

ARRAY_TYPES = (np.ndarray,)


class ArrayStorages:
    """The memory of numpy arrays, as the storages of a table. It is copied only when it is read."""

    can_read_ranges = True

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        """Make a storage of each array, which must be contiguous in C or Fortran order."""
        self._arrays = arrays
        self.nbytes = np.array([array.nbytes for array in arrays], np.int64)

    def read(self, storage_indices: Sequence[int]) -> list[bytes]:
        """Return the bytes of whole storages."""
        return [self._arrays[index].tobytes("A") for index in storage_indices]

    def read_ranges(
        self, storage_indices: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> list[memoryview]:
        """Return a range of bytes of each storage. One storage may occur several times."""
        contents = {index: _map_array(self._arrays[index]) for index in set(storage_indices)}
        ranges: list[memoryview] = []
        for index, start, count in zip(storage_indices, starts, nbytes, strict=True):
            ranges.append(contents[index][start : start + count])
        return ranges

    def segment(self, storage_index: int, label: str) -> Memory | bytes:
        """Return a storage as a segment of a planned file, or `b""` if it is empty."""
        array = self._arrays[storage_index]
        if not array.nbytes:
            return b""
        return Memory(_map_array(array), label, array)

    def addresses(self) -> list[int]:
        """Return the address of each storage."""
        return list(map(address_of, self._arrays))


def _map_array(array: np.ndarray) -> memoryview:
    """Return the memory of an array as bytes, without a copy. It is in C or Fortran order."""
    if not array.flags.c_contiguous:
        array = array.T
    return byte_row(array).data


def describe_arrays(values: list[object]) -> TensorColumns:
    """Describe numpy arrays as columns of a table.

    The root of an array is the array whose view it is, or the array itself. An array becomes a row
    if its dtype exists in files, and if its root is not a view and has no gaps between elements.
    All other arrays are left out; the caller describes them one by one.

    Args:
        values: The arrays.

    Returns:
        The columns, with the indices of the arrays that became rows.
    """
    rows: list[int] = []
    arrays: list[np.ndarray] = []
    roots: list[np.ndarray] = []
    kinds: list[RowKind] = []
    kind_indices: list[int] = []
    known_kinds: dict[tuple[object, ...], int | None] = {}
    for row, array in enumerate(cast("list[np.ndarray]", values)):
        root = array
        if isinstance(array.base, np.ndarray):
            root = array.base
        if not _is_root(root):
            continue
        # There are few kinds, so everything that depends on the kind alone is done once for each.
        kind_key = (array.dtype, array.shape, array.strides, root.nbytes)
        if kind_key not in known_kinds:
            dtype = _find_file_dtype(array.dtype)
            known_kinds[kind_key] = None
            if dtype is not None:
                known_kinds[kind_key] = len(kinds)
                kinds.append(_make_kind(dtype, array, root))
        kind_index = known_kinds[kind_key]
        if kind_index is None:
            continue
        rows.append(row)
        arrays.append(array)
        roots.append(root)
        kind_indices.append(kind_index)

    storage_indices, storage_roots = _group_by_memory(roots)
    offsets = _find_bit_offsets(arrays, roots)
    if offsets:
        separate_outside_rows(kinds, kind_indices, offsets)
    storages = ArrayStorages(storage_roots)
    return TensorColumns(
        rows, kinds, kind_indices, storage_indices, storages, storages.addresses, offsets
    )


def _find_bit_offsets(arrays: Sequence[np.ndarray], roots: Sequence[np.ndarray]) -> dict[int, int]:
    """Return the bit of its root where each array starts, by the index of the array.

    Arrays that start where their root starts are left out.
    """
    offsets: dict[int, int] = {}
    for index, (array, root) in enumerate(zip(arrays, roots, strict=True)):
        # An array without elements has no place in the memory of its root.
        if array is not root and array.size:
            offset = 8 * (address_of(array) - address_of(root))
            if offset:
                offsets[index] = offset
    return offsets


def _is_root(array: np.ndarray) -> bool:
    """Return whether an array is not a view of another array, and has no gaps between elements."""
    is_view = array.base is not None and isinstance(array.base, np.ndarray)
    is_plain = type(array) is np.ndarray and not array.dtype.hasobject
    return is_plain and array.flags.forc and not is_view


def _group_by_memory(roots: Sequence[np.ndarray]) -> tuple[list[int], list[np.ndarray]]:
    """Find the arrays that use the same memory.

    Args:
        roots: Arrays that are not views of other arrays.

    Returns:
        For each array, the index of its storage, and for each storage the first of its arrays.
    """
    # To find an address takes longer than everything else here. It is not needed if every array
    # owns its memory: then only the same array has the same memory.
    needs_addresses = not all(root.flags.owndata for root in roots)
    known_storages: dict[object, int] = {}
    storage_indices: list[int] = []
    storage_roots: list[np.ndarray] = []
    for root in roots:
        memory_key: object = id(root)
        # Empty arrays share no memory, whatever their addresses.
        if needs_addresses and root.nbytes:
            memory_key = (address_of(root), root.nbytes)
        storage_index = known_storages.setdefault(memory_key, len(storage_roots))
        if storage_index == len(storage_roots):
            storage_roots.append(root)
        storage_indices.append(storage_index)
    return storage_indices, storage_roots


def _make_kind(dtype: DType, array: np.ndarray, root: np.ndarray) -> RowKind:
    """Return the kind of an array, given the array that owns its memory. It may be the same one."""
    if array is root and array.flags.c_contiguous:
        return RowKind.from_shape(dtype, array.shape)
    strides = _normalize_strides(array.shape, array.strides)
    bit_strides = tuple([8 * stride for stride in strides])
    return RowKind.from_strides(dtype, array.shape, bit_strides, storage_nbytes=root.nbytes)


@cache
def _find_file_dtype(dtype: AnyDType) -> DType | None:
    """Return the dtype in files whose elements have the same bytes, or None if there is none."""
    if dtype.hasobject or not dtype.isnative:
        return None
    file_dtype = DTYPES.numpy(dtype)
    # numpy stores packed elements in one byte each, and files store several in a byte.
    if file_dtype is None or file_dtype.packed:
        return None
    return file_dtype


def _normalize_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of which those that have no meaning are not negative.

    An axis of length 1 has no next element, and an empty array has no elements. So numpy may give
    them any strides, but a file format may refuse negative ones.
    """
    if 0 in shape:
        return (0,) * len(shape)
    normalized_strides: list[int] = []
    for length, stride in zip(shape, strides, strict=True):
        if length == 1:
            stride = abs(stride)
        normalized_strides.append(stride)
    return tuple(normalized_strides)


class MemoryTensors:
    """Makes lazy tensors over the memory of a state that is being saved.

    The tensors keep the buffers alive that they use.
    """

    def __init__(self) -> None:
        """Start without storages."""
        self._storages: dict[tuple[int, int], Storage] = {}
        """The storages by address and size."""

    @cached_property
    def store(self) -> MemoryStore:
        """The store that has all storages."""
        return MemoryStore({}, name="<memory>")

    @cached_property
    def _source(self) -> OpenSource:
        """The source of all tensors."""
        return OpenSource(self.store, mapped=True)

    def address_ranges(self) -> dict[str, tuple[int, int]]:
        """Return the address and the size of each storage that is not empty, by its key."""
        ranges: dict[str, tuple[int, int]] = {}
        for address_range, storage in self._storages.items():
            if storage.nbytes:
                ranges[storage.key] = address_range
        return ranges

    def wrap_array(self, array: np.ndarray) -> LazyTensor:
        """Return a numpy array as a lazy tensor over the memory that the array uses.

        Big-endian arrays are copied, and so are arrays with gaps that are not views of a contiguous
        array.

        Raises:
            Unsupported: The dtype does not exist in files.
        """
        # A numpy scalar is copied, because it has no memory that stays at one address.
        array = np.asarray(array)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("="))
        dtype = DTYPES.numpy(array.dtype)
        if dtype is None:
            raise Unsupported(f"cannot save an array of {array.dtype}: there is no such tensor")
        if dtype.packed:
            # numpy stores packed elements in one byte each, and files store several in a byte.
            raise Unsupported(
                f"numpy arrays of {array.dtype} are unpacked; save them as uint8 or as a LazyTensor"
            )
        # The root is the array without gaps that has the memory of this one and of other views.
        root = array
        while isinstance(root.base, np.ndarray) and root.base.flags.forc:
            root = root.base
        if not root.flags.forc or root.dtype.hasobject:
            array = np.ascontiguousarray(array)
            root = array
        start = address_of(root)
        storage = self.add_storage(start, _map_array(root), owner=root)
        strides = _normalize_strides(array.shape, array.strides)
        return self.make_strided(storage, dtype, array.shape, strides, address_of(array) - start)

    def add_storage(
        self, address: int, content: memoryview, *, owner: object, location: str = "cpu"
    ) -> Storage:
        """Return the storage of a range of memory. The same range has the same storage.

        Args:
            address: Where the range begins in the memory of this process.
            content: The bytes.
            owner: The object that keeps the memory alive.
            location: The device that a file records for the storage.
        """
        storage = self._storages.get((address, content.nbytes))
        if storage is None:
            key = f"{address:x}+{content.nbytes:x}"
            self.store.add(key, content, owner=owner)
            storage = Storage(key, 0, content.nbytes, location=location, home=self.store)
            self._storages[address, content.nbytes] = storage
        return storage

    def make_strided(
        self,
        storage: Storage,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        traits: Traits = PLAIN_TRAITS,
    ) -> LazyTensor:
        """Return a tensor over a storage. Its offset and strides are in bytes."""
        if 0 in shape:
            strides = (0,) * len(shape)
            offset = 0
        bit_strides = tuple([8 * stride for stride in strides])
        chunk = Chunk(Box.whole(shape), storage, 8 * offset, bit_strides)
        return self.make_chunked(dtype, shape, (chunk,), traits)

    def make_chunked(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        chunks: tuple[Chunk, ...],
        traits: Traits = PLAIN_TRAITS,
    ) -> LazyTensor:
        """Return a tensor whose elements are in chunks over storages of this object."""
        return LazyTensor("", dtype, shape, chunks, self._source, traits)

    def make_meta(self, dtype: DType, shape: tuple[int, ...], traits: Traits) -> LazyTensor:
        """Return a tensor of the meta device, which has no elements."""
        return self.make_chunked(dtype, shape, (), traits)
