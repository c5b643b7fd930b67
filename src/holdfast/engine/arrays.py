"""Arrays in memory as lazy tensors: a numpy buffer is a chunk like any other, and arrays over one buffer are aliases."""

from __future__ import annotations

import numpy as np

from holdfast.core.arrays import byte_row
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.tensor import PLAIN, LazyTensor, Traits
from holdfast.engine.source import OpenSource
from holdfast.errors import Unsupported
from holdfast.stores.memory import MemoryStore


class Resident:
    """The memory of one state that is being saved. Its tensors keep every buffer alive that they point at, through their source."""

    def __init__(self) -> None:
        self._store = MemoryStore({}, name="<memory>")
        self._source = OpenSource(self._store, mapped=True)
        self._storages: dict[tuple[int, int], Storage] = {}

    def addresses(self) -> set[int]:
        """Where the memory of each storage begins that has any."""
        return {address for address, nbytes in self._storages if nbytes}

    def array(self, array: np.ndarray) -> LazyTensor:
        """A numpy array as a lazy tensor over the buffer that owns its memory."""
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("="))
        dtype = DTYPES.numpy(array.dtype)
        if dtype is None:
            raise Unsupported(f"an array of {array.dtype} has no counterpart among tensors")
        if dtype.packed:
            # numpy gives each narrow element a byte of its own: keep the bytes under the dtype that has that layout.
            raise Unsupported(f"numpy arrays of {array.dtype} are unpacked; save them as uint8 or as a LazyTensor")
        root = array
        while isinstance(root.base, np.ndarray) and root.base.flags.forc:
            root = root.base
        if not root.flags.forc or root.dtype.hasobject:
            array = root = np.ascontiguousarray(array)
        flat = byte_row(root if root.flags.c_contiguous else root.T)
        start = root.__array_interface__["data"][0]
        storage = self.memory(start, flat.data, owner=root)
        offset = array.__array_interface__["data"][0] - start
        return self.strided(storage, dtype, array.shape, array.strides, offset)

    def memory(self, address: int, content: memoryview, *, owner: object, location: str = "cpu") -> Storage:
        """The storage for a range of memory; the same one for the same range."""
        found = self._storages.get((address, content.nbytes))
        if found is None:
            key = f"{address:x}+{content.nbytes:x}"
            self._store.add(key, content, owner=owner)
            found = Storage(key, 0, content.nbytes, location=location, home=self._store)
            self._storages[address, content.nbytes] = found
        return found

    def strided(
        self, storage: Storage, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, traits: Traits = PLAIN
    ) -> LazyTensor:
        """A tensor over a storage; offset and strides in bytes."""
        if 0 in shape:
            strides, offset = (0,) * len(shape), 0
        chunk = Chunk(Box.whole(shape), storage, offset * 8, tuple([s * 8 for s in strides]))
        return LazyTensor("", dtype, shape, (chunk,), self._source, traits)

    def parts(self, dtype: DType, shape: tuple[int, ...], chunks: tuple[Chunk, ...], traits: Traits = PLAIN) -> LazyTensor:
        """A tensor of which only some boxes are here."""
        return LazyTensor("", dtype, shape, chunks, self._source, traits)

    def meta(self, dtype: DType, shape: tuple[int, ...], traits: Traits) -> LazyTensor:
        """A tensor with a shape and no data."""
        return LazyTensor("", dtype, shape, (), self._source, traits)
