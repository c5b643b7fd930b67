"""Reads the elements of a tensor as bytes in C order, one block of limited size at a time.

Saving, hashing and comparing need a tensor as a row of bytes, whatever its strides, chunks, byte
order or file. A block is a part of the tensor whose elements are consecutive in C order.
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
    """Elements of a tensor that are consecutive in C order."""

    tensor: LazyTensor
    """The elements, as a tensor of their own."""
    start: int
    """Their first byte in the C-ordered bytes of the whole tensor."""

    @property
    def nbytes(self) -> int:
        """The size of the block."""
        return self.tensor.nbytes


def split_into_blocks(
    tensor: LazyTensor, block_nbytes: int, start: int = 0
) -> Iterator[ContiguousBlock]:
    """Split a tensor into consecutive blocks, in C order.

    Args:
        tensor: The tensor. One without elements has no blocks.
        block_nbytes: The most bytes of a block. A block is larger only if a cut would be inside of
            a byte, as in a tensor of packed elements with rows of half a byte.
        start: The `start` of the first block.
    """
    if tensor.size == 0:
        return
    if tensor.nbytes <= block_nbytes or not tensor.shape:
        yield ContiguousBlock(tensor, start)
        return
    # A row is everything at one index of the first axis.
    row_count = tensor.shape[0]
    # Rows of packed elements that end inside of a byte cannot be separated.
    if (tensor.size // row_count) * tensor.dtype.bits % 8:
        yield ContiguousBlock(tensor, start)
        return

    row_nbytes = tensor.nbytes // row_count
    # A row that is too large is split along its own axes. Small rows are put together.
    if row_nbytes > block_nbytes:
        for row in range(row_count):
            yield from split_into_blocks(tensor[row], block_nbytes, start + row * row_nbytes)
        return
    rows_per_block = block_nbytes // row_nbytes
    for row in range(0, row_count, rows_per_block):
        yield ContiguousBlock(tensor[row : row + rows_per_block], start + row * row_nbytes)


def find_contiguous_bytes(tensor: LazyTensor) -> tuple[str, int] | None:
    """Find the range of a file that has the elements of a tensor in C order, little-endian.

    Returns:
        The file and the first byte of the range, or None if the elements are not one such range.
    """
    traits = tensor.traits
    # Conjugated and negated tensors are stored with other elements than they have, and tensors of
    # the meta device have none.
    if traits.conj or traits.neg or traits.meta or len(tensor.chunks) != 1:
        return None
    (chunk,) = tensor.chunks
    dtype = tensor.dtype
    is_swapped = chunk.storage.byteorder != "little" and dtype.swap_nbytes > 1
    if chunk.shape != tensor.shape or is_swapped:
        return None
    # Packed elements may begin or end inside of a byte.
    has_whole_bytes = chunk.offset % 8 == 0 and tensor.size * dtype.bits % 8 == 0
    if not has_whole_bytes or not is_c_ordered(tensor.shape, chunk.strides, dtype.bits):
        return None
    return chunk.storage.key, chunk.storage.start + chunk.offset // 8


def find_bytes_in_memory(tensor: LazyTensor) -> memoryview | None:
    """Return the bytes of a tensor without a copy, if they are in the memory of this process.

    Returns:
        The bytes in C order, little-endian, or None if they must be read or rearranged.
    """
    store = tensor.source.store
    if not store.read_profile.is_in_memory:
        return None
    position = find_contiguous_bytes(tensor)
    if position is None:
        return None
    key, start = position
    content = store.map(key)
    if content is None:
        return None
    return content[start : start + tensor.nbytes]


def read_block(block: ContiguousBlock) -> memoryview:
    """Return the bytes of a block in C order, little-endian. Packed elements stay packed."""
    tensor = block.tensor
    content = find_bytes_in_memory(tensor)
    if content is not None:
        return content
    position = find_contiguous_bytes(tensor)
    if position is not None:
        # The bytes in the file are read unchanged, by one call.
        key, start = position
        out = np.empty(tensor.nbytes, np.uint8).data
        tensor.source.store.read(key, start, out)
        return out
    # The source puts the elements in C order, and unpacks packed ones.
    array = np.empty(tensor.shape, tensor.dtype.numpy)
    tensor.source.read([Request(tensor, array)])
    if tensor.dtype.packed:
        return memoryview(pack_elements(array, tensor.dtype))
    return byte_row(array).data


def lend_block(block: ContiguousBlock) -> AbstractContextManager[memoryview]:
    """Return a context in which the bytes of a block are in memory that its source lends."""
    return block.tensor.source.lend(block.tensor)


def choose_block_nbytes(tensor: LazyTensor, block_nbytes: int) -> int:
    """Return the size of the blocks in which a tensor is read.

    Args:
        tensor: The tensor.
        block_nbytes: The size for stores that prefer none. For a remote store, it is also the most
            that memory allows.
    """
    profile = tensor.source.store.read_profile
    if not profile.block_nbytes:
        return block_nbytes
    # Each of many requests to a remote store has a block in memory.
    is_remote = profile.request_count > 0
    if is_remote:
        return min(profile.block_nbytes, block_nbytes)
    return profile.block_nbytes


def pack_elements(array: np.ndarray, dtype: DType) -> bytes:
    """Pack elements of one byte each into `dtype.bits` bits each.

    The first element of a byte has its lowest bits. The last byte is filled with zeros.
    """
    elements = byte_row(array)
    bits = np.unpackbits(elements[:, None], axis=1, count=dtype.bits, bitorder="little")
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()
