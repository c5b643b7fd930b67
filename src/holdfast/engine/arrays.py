"""Describes numpy arrays in memory: a single one as a lazy tensor, many of them as rows of a table.

An array over the memory of another array, a torch tensor or a buffer shares that storage, so
aliases stay aliases in a file. Two arrays over memory that no array owns have the same storage if
they begin at the same address and have the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from operator import is_not
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
        # The order "A" keeps the bytes of a Fortran-ordered array as they are in memory.
        return [self._arrays[index].tobytes("A") for index in storage_indices]

    def read_ranges(
        self, storage_indices: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> list[memoryview]:
        """Return a range of bytes of each storage. One storage may occur several times."""
        # Many rows may be views of one storage, so each storage is mapped only once.
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
    """Return the memory of an array as bytes, without a copy.

    Args:
        array: An array that is contiguous in C or Fortran order.
    """
    # The transpose of an array in Fortran order is in C order, and has the same memory.
    if not array.flags.c_contiguous:
        array = array.T
    return byte_row(array).data


def describe_arrays(values: list[object]) -> TensorColumns:
    """Describe numpy arrays as columns of a table.

    Arrays that cannot become rows are left out (see `_find_roots`). The caller describes these one
    by one, with `MemoryTensors.wrap_array`.

    Args:
        values: The arrays.

    Returns:
        The columns. Their `rows` are the indices of the arrays that became rows.
    """
    all_arrays = cast("list[np.ndarray]", values)
    roots_by_index = _find_roots(all_arrays)
    arrays = [all_arrays[index] for index in roots_by_index]
    roots = list(roots_by_index.values())

    kinds, kind_indices = _group_by_kind(arrays, roots)
    storage_indices, storage_roots = _group_by_memory(roots)
    # Arrays that are not views start where their storages start, so they have no offsets.
    offsets: dict[int, int] = {}
    has_views = any(map(is_not, arrays, roots))
    if has_views:
        offsets = _find_bit_offsets(arrays, roots, storage_indices)
        # A view may reach beyond its root. Such arrays get kinds of their own.
        separate_outside_rows(kinds, kind_indices, offsets)
    storages = ArrayStorages(storage_roots)
    return TensorColumns(
        rows=list(roots_by_index),
        kinds=kinds,
        kind_indices=kind_indices,
        storage_indices=storage_indices,
        storages=storages,
        addresses=storages.addresses,
        offsets=offsets,
    )


def _find_roots(arrays: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Find the root of each array: the array whose view it is, or the array itself.

    The memory of the root becomes a storage in the file. So it must have no gaps between elements,
    its elements must be plain numbers, and it must not be a view of another array itself. Arrays
    whose root is different are left out, and so are arrays whose dtype does not exist in files.

    Returns:
        The roots, by the index of the array. The indices are ascending.
    """
    roots: dict[int, np.ndarray] = {}
    # A state may have a million arrays, so this loop calls no function of ours for most of them.
    for index, array in enumerate(arrays):
        root = array
        if array.base is not None and isinstance(array.base, np.ndarray):
            root = array.base
            # Object arrays have no bytes to save. A view of one may nevertheless be an array of
            # numbers: one field of its records.
            if isinstance(root.base, np.ndarray) or root.dtype.hasobject:
                continue
        # A subclass such as `np.memmap` may treat its memory differently.
        if type(root) is not np.ndarray or not root.flags.forc:
            continue
        if _find_file_dtype(array.dtype) is not None:
            roots[index] = root
    return roots


def _group_by_kind(
    arrays: Sequence[np.ndarray], roots: Sequence[np.ndarray]
) -> tuple[list[RowKind], list[int]]:
    """Find the arrays of equal kind: the same dtype, shape, strides and size of the storage.

    A state may have a million arrays, but it has few kinds. So each kind is made only once.

    Args:
        arrays: Arrays whose dtype exists in files.
        roots: For each array, the array that has its memory. It may be the same array.

    Returns:
        The kinds, and for each array the index of its kind.
    """
    kinds: list[RowKind] = []
    kind_indices: list[int] = []
    known_kinds: dict[tuple[object, ...], int] = {}
    for array, root in zip(arrays, roots, strict=True):
        is_whole_root = array is root and array.flags.c_contiguous
        kind_key: tuple[object, ...]
        if is_whole_root:
            # The strides and the size follow from the dtype and the shape. A short key is faster.
            kind_key = (array.dtype, array.shape)
        else:
            kind_key = (array.dtype, array.shape, array.strides, root.nbytes)

        kind_index = known_kinds.get(kind_key)
        if kind_index is None:
            kind_index = len(kinds)
            known_kinds[kind_key] = kind_index
            dtype = cast("DType", _find_file_dtype(array.dtype))
            if is_whole_root:
                kind = RowKind.from_shape(dtype, array.shape)
            else:
                strides = _normalize_strides(array.shape, array.strides)
                bit_strides = tuple([8 * stride for stride in strides])
                kind = RowKind.from_strides(
                    dtype, array.shape, bit_strides, storage_nbytes=root.nbytes
                )
            kinds.append(kind)
        kind_indices.append(kind_index)
    return kinds, kind_indices


def _group_by_memory(roots: Sequence[np.ndarray]) -> tuple[Sequence[int], Sequence[np.ndarray]]:
    """Find the arrays that use the same memory. Each distinct range of memory is one storage.

    Args:
        roots: Arrays that are not views of other arrays. The same array may occur several times.

    Returns:
        For each array, the index of its storage, and for each storage the first of its arrays.
    """
    # Two different arrays can use the same memory only if it belongs to something else, such as a
    # torch tensor. Otherwise addresses are not needed, and finding them takes longer than all else.
    memory_keys: list[object] = list(map(id, roots))
    if not all(root.flags.owndata for root in roots):
        for index, root in enumerate(roots):
            # Empty arrays share no memory, even if their addresses are equal.
            if root.nbytes:
                memory_keys[index] = (address_of(root), root.nbytes)

    # Most states have no arrays that share memory.
    if len(set(memory_keys)) == len(roots):
        return range(len(roots)), roots

    known_storages: dict[object, int] = {}
    storage_indices: list[int] = []
    storage_roots: list[np.ndarray] = []
    for memory_key, root in zip(memory_keys, roots, strict=True):
        storage_index = known_storages.setdefault(memory_key, len(storage_roots))
        if storage_index == len(storage_roots):
            storage_roots.append(root)
        storage_indices.append(storage_index)
    return storage_indices, storage_roots


def _find_bit_offsets(
    arrays: Sequence[np.ndarray], roots: Sequence[np.ndarray], storage_indices: Sequence[int]
) -> dict[int, int]:
    """Return the offset, in bits, of each array from the start of its root array.

    Tables have all offsets in bits, because elements of some dtypes are narrower than a byte.

    Args:
        arrays: The arrays.
        roots: For each array, the array that has its memory. It may be the same array.
        storage_indices: For each array, the index of its storage. Roots with the same storage start
            at the same address.

    Returns:
        The offsets, by the index of the array. Arrays that start where their root starts are left
        out.
    """
    offsets: dict[int, int] = {}
    # The address of each storage that has views. Many arrays may be views of one root.
    storage_addresses: dict[int, int] = {}
    for index, (array, root) in enumerate(zip(arrays, roots, strict=True)):
        # An array without elements has no place in the memory of its root.
        if array is root or not array.size:
            continue
        storage_index = storage_indices[index]
        if storage_index not in storage_addresses:
            storage_addresses[storage_index] = address_of(root)
        offset = 8 * (address_of(array) - storage_addresses[storage_index])
        if offset:
            offsets[index] = offset
    return offsets


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
    """Return the strides of an array without negative ones that have no meaning.

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
        # Storages in memory have the byte order of this machine.
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
        # Views of the same root share one storage in the file.
        root = array
        while isinstance(root.base, np.ndarray) and root.base.flags.forc:
            root = root.base
        # Gaps are not saved, and object arrays have no bytes: the elements are copied out of them.
        if not root.flags.forc or root.dtype.hasobject:
            array = np.ascontiguousarray(array)
            root = array

        root_address = address_of(root)
        storage = self.add_storage(root_address, _map_array(root), owner=root)
        strides = _normalize_strides(array.shape, array.strides)
        offset = address_of(array) - root_address
        return self.make_strided(storage, dtype, array.shape, strides, offset)

    def add_storage(
        self, address: int, content: memoryview, *, owner: object, location: str = "cpu"
    ) -> Storage:
        """Return the storage of a range of memory, and add it if it is not known yet.

        Tensors over the same range get the same storage, so that they share it in the file, too. If
        the range is known, the owner and the location of the first call stay: the first owner keeps
        the memory alive, and memory belongs to one device.

        Args:
            address: The address of the first byte of the range in this process.
            content: The bytes of the range.
            owner: The object that keeps the memory alive.
            location: The device that a file records for the storage.
        """
        storage = self._storages.get((address, content.nbytes))
        if storage is None:
            key = f"{address:x}+{content.nbytes:x}"
            self.store.add(key, content, owner=owner)
            storage = Storage(
                key, start=0, nbytes=content.nbytes, location=location, home=self.store
            )
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
        """Return a tensor over a storage.

        Args:
            storage: The storage.
            dtype: The dtype of the elements.
            shape: The shape.
            strides: The bytes from one element to the next, for each axis.
            offset: The byte of the storage where the first element starts.
            traits: What else the tensor has, such as its flags.
        """
        # An empty tensor has no elements, so any offset and strides are true. Formats accept zeros.
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
