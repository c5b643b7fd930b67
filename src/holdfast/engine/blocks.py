"""Walk a tensor's elements in C order, a bounded number of bytes at a time.

Saving, digesting and comparing all want the same thing: the tensor as a row of bytes, whatever its strides, chunks, byte order or
file. A *piece* is a box of it whose elements are consecutive in C order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np

from holdfast.core.arrays import byte_row
from holdfast.core.chunk import is_c_ordered
from holdfast.core.dtype import DType
from holdfast.core.protocols import Request
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value


class ContiguousBlock(Value, frozen=True):
    tensor: LazyTensor  # The part, as a tensor of its own.
    start: int  # Its first byte in the C-ordered bytes of the whole.

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


def split_into_blocks(tensor: LazyTensor, block: int, start: int = 0) -> Iterator[ContiguousBlock]:
    """Cut a tensor into split_into_blocks of at most `block` bytes, in order. Packed types are not cut inside a byte."""
    if tensor.size == 0:
        return
    within = bool(tensor.shape) and (tensor.size // tensor.shape[0]) * tensor.dtype.bits % 8 != 0
    if tensor.nbytes <= block or not tensor.shape or within:
        yield ContiguousBlock(tensor, start)
        return
    row = tensor.nbytes // tensor.shape[0]
    if row > block:
        for i in range(tensor.shape[0]):
            yield from split_into_blocks(tensor[i], block, start + i * row)
        return
    rows = block // row
    for i in range(0, tensor.shape[0], rows):
        yield ContiguousBlock(tensor[i : i + rows], start + i * row)


def find_contiguous_bytes(tensor: LazyTensor) -> tuple[str, int] | None:
    """Where the tensor's C-ordered little-endian bytes lie in one piece of one file: key and first byte; else None."""
    if len(tensor.chunks) != 1 or tensor.traits.conj or tensor.traits.neg or tensor.traits.meta:
        return None
    (chunk,) = tensor.chunks
    dtype = tensor.dtype
    if chunk.shape != tensor.shape or (
        chunk.storage.byteorder != "little" and dtype.swap_nbytes > 1
    ):
        return None
    if (
        not is_c_ordered(tensor.shape, chunk.strides, dtype.bits)
        or chunk.offset % 8
        or (tensor.size * dtype.bits) % 8
    ):
        return None
    return chunk.storage.key, chunk.storage.start + chunk.offset // 8


def find_bytes_in_memory(tensor: LazyTensor) -> memoryview | None:
    """The tensor's bytes as memory that is there already, for tensors that live in this process; else None."""
    place = find_contiguous_bytes(tensor)
    if place is None or not tensor.source.store.read_profile.is_in_memory:
        return None
    memory = tensor.source.store.map(place[0])
    return None if memory is None else memory[place[1] : place[1] + tensor.nbytes]


def read_block(piece: ContiguousBlock) -> memoryview:
    """The bytes of a piece: C order, little-endian, packed types packed."""
    tensor = piece.tensor
    memory = find_bytes_in_memory(tensor)
    if memory is not None:
        return memory
    place = find_contiguous_bytes(tensor)
    if place is not None:
        out = np.empty(tensor.nbytes, np.uint8).data
        tensor.source.store.read(place[0], place[1], out)
        return out
    array = np.empty(tensor.shape, tensor.dtype.numpy)
    tensor.source.read([Request(tensor, array)])
    if tensor.dtype.packed:
        return memoryview(pack_elements(array, tensor.dtype))
    return byte_row(array).data


def lend_block(piece: ContiguousBlock) -> AbstractContextManager[memoryview]:
    """The bytes of a piece for a while, in memory that its source lends."""
    return piece.tensor.source.lend(piece.tensor)


def choose_block_nbytes(tensor: LazyTensor, block: int) -> int:
    """Bytes of a piece: what the store would rather have than `block`, where it has a preference. Of a remote store it is
    what one request fetches at the most, and `block` may be what memory allows."""
    store = tensor.source.store
    wished = store.read_profile.block_nbytes or block
    return min(wished, block) if store.read_profile.request_count else wished


def pack_elements(array: np.ndarray, dtype: DType) -> bytes:
    """Pack elements of one byte each to `dtype.bits` bits each, the first in the lowest bits."""
    values = byte_row(array)
    bits = np.unpackbits(values[:, None], axis=1, count=dtype.bits, bitorder="little")
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()
