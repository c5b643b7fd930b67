"""Reads boxes of tensors into arrays, whatever their strides, byte order and packing.

A box is read as contiguous ranges (engine/ranges.py), in three steps:

1. Each chunk of a tensor is cut into pieces of at most one block, so that scratch memory stays
   small. A piece is again a chunk, with the part of the destination that it fills.
2. The bytes of a piece are strided ranges of its file. Axes whose elements follow each other, or
   have gaps that are cheaper to read than to skip, become part of each range. Every point of the
   other axes, the outer ones, has a range of its own. A column of a tall matrix has millions of
   ranges, so they are arrays and not objects.
3. If the elements of a range lie in the file as they lie in the destination, the range is read
   straight there. The other ranges of a piece are read into scratch memory, one behind the other.
   From there, the elements are copied with their strides, byte order and packing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Chunk, c_strides
from holdfast.core.dtype import DType
from holdfast.core.protocols import Request, Store
from holdfast.core.runtime import address_of, memory_at
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value
from holdfast.engine.checksums import StorageChecks, build_damage_error
from holdfast.engine.coalesce import MEMORY, JoinPolicy, Ranges, join_ranges
from holdfast.engine.ranges import RangeReads, read_ranges
from holdfast.engine.threads import INLINE_NBYTES, run_all
from holdfast.errors import Corrupted

MAX_RANGES = 1 << 18
"""The most ranges that are read together. Each column of them takes 2 MiB."""


class StridedRanges(Value, frozen=True):
    """The byte ranges of a chunk that is not empty: one range for each point of its outer axes.

    All ranges have the same size. Positions are in bits, since packed elements share bytes.
    """

    chunk: Chunk
    """The elements that the ranges contain."""
    first_bit: int
    """The first bit of the range at index 0 of all outer axes, relative to the storage."""
    bit_count: int
    """The number of bits in a range."""
    outer_axes: tuple[int, ...]
    """The axes that are not part of each range, the largest stride first."""

    @property
    def count(self) -> int:
        """The number of ranges."""
        return math.prod(self.chunk.shape[axis] for axis in self.outer_axes)

    @property
    def inner_axes(self) -> list[int]:
        """The axes with several elements that are part of each range."""
        shape = self.chunk.shape
        return [
            axis for axis in range(len(shape)) if axis not in self.outer_axes and shape[axis] > 1
        ]

    def find_first_bits(self) -> Ints:
        """Return the first bit of each range, in C order of the outer axes."""
        shape = [self.chunk.shape[axis] for axis in self.outer_axes]
        strides = [self.chunk.strides[axis] for axis in self.outer_axes]
        return _list_grid_offsets(self.first_bit, shape, strides)


def _list_grid_offsets(origin: int, shape: Sequence[int], strides: Sequence[int]) -> Ints:
    """Return the offsets of all points of a grid in C order.

    >>> _list_grid_offsets(100, (2, 3), (10, 1)).tolist()
    [100, 101, 102, 110, 111, 112]
    """
    offsets = np.full(1, origin, np.int64)
    for length, stride in zip(shape, strides, strict=True):
        steps = np.arange(length, dtype=np.int64) * stride
        offsets = (offsets[:, None] + steps).reshape(-1)
    return offsets


def find_strided_ranges(chunk: Chunk, dtype: DType, max_gap: int = 0) -> StridedRanges:
    """Find the byte ranges that have the elements of a chunk.

    Axes are added from the smallest stride to the largest. As long as the gaps along an axis are
    small, its elements extend the range. Every point of the other axes has a range of its own.

    Args:
        chunk: The chunk. It must not be empty.
        dtype: The dtype of its elements.
        max_gap: The most bytes between two elements that are read through. If the gaps along an
            axis are larger, it becomes an outer axis.
    """
    first_bit = chunk.offset
    bit_count = dtype.bits
    outer_axes: list[int] = []
    for axis in sorted(range(chunk.box.rank), key=lambda axis: abs(chunk.strides[axis])):
        length = chunk.shape[axis]
        stride = chunk.strides[axis]
        if length == 1:
            continue
        if abs(stride) > bit_count + max_gap * 8:
            outer_axes.append(axis)
            continue
        bit_count += (length - 1) * abs(stride)
        if stride < 0:
            # The last element along this axis is the first one in the file.
            first_bit += (length - 1) * stride
    return StridedRanges(chunk, first_bit, bit_count, tuple(reversed(outer_axes)))


class BoxPiece(Value, frozen=True):
    """A piece of a chunk, and the part of the destination that it fills."""

    ranges: StridedRanges
    """The ranges of the piece in its file."""
    dtype: DType
    """The dtype of the elements."""
    destination: np.ndarray
    """An array of the same shape as the piece."""
    is_direct: bool
    """Whether the ranges can be read straight into the destination, without scratch memory."""
    tensor_name: str
    """For error messages."""

    @property
    def range_nbytes(self) -> int:
        """The size of each range. Packed elements may begin and end inside of a byte."""
        # Counted from the byte in which the range begins, and rounded up to whole bytes.
        bit_count = self.ranges.first_bit % 8 + self.ranges.bit_count
        return (bit_count + 7) // 8

    @property
    def scratch_nbytes(self) -> int:
        """The scratch memory that the piece needs."""
        if self.is_direct:
            return 0
        return self.ranges.count * self.range_nbytes

    def find_starts(self) -> Ints:
        """Return the first byte of each range in its file."""
        return self.ranges.chunk.storage.start + self.ranges.find_first_bits() // 8

    def find_addresses(self, scratch: np.ndarray | None) -> Ints:
        """Return the address that each range is read to.

        Args:
            scratch: Scratch memory for all ranges. None if they are read to the destination.
        """
        if scratch is not None:
            range_indices = np.arange(self.ranges.count, dtype=np.int64)
            return address_of(scratch) + range_indices * self.range_nbytes
        shape = [self.destination.shape[axis] for axis in self.ranges.outer_axes]
        strides = [self.destination.strides[axis] for axis in self.ranges.outer_axes]
        return _list_grid_offsets(address_of(self.destination), shape, strides)

    def copy_from_scratch(self, scratch: np.ndarray) -> None:
        """Copy the elements to the destination out of scratch memory.

        The ranges lie there one behind the other, in C order of the outer axes. So the elements are
        copied with new strides: inside of a range, they lie as in the file, and along the outer
        axes, the distance is that of ranges in scratch memory.
        """
        chunk = self.ranges.chunk
        # In scratch memory, every range starts at a whole byte. The offset of the element at index
        # 0 is in bits, as the strides are.
        offset = self.ranges.first_bit % 8
        strides = list(chunk.strides)
        for axis in self.ranges.inner_axes:
            # The first element along a reversed axis is the last one in its range.
            if strides[axis] < 0:
                offset -= (chunk.shape[axis] - 1) * strides[axis]
        # Along the last outer axis, the next element is in the next range. Along the others, it is
        # as many ranges away as the axes after them have points.
        outer_stride = self.range_nbytes * 8
        for axis in reversed(self.ranges.outer_axes):
            strides[axis] = outer_stride
            outer_stride *= chunk.shape[axis]
        copy_elements(
            scratch,
            offset,
            strides,
            self.destination,
            dtype=self.dtype,
            is_swapped=chunk.storage.byteorder != "little",
        )


def read_boxes(
    store: Store,
    requests: Sequence[Request],
    *,
    threads: int,
    policy: JoinPolicy,
    checks: StorageChecks,
) -> int:
    """Read the elements of every request into its array.

    Args:
        store: The store that has the files.
        requests: Tensors with their destinations.
        threads: The most threads that read and copy at the same time.
        policy: Which neighboring ranges are read together, and the size of a block.
        checks: Receives the bytes of storages whose checksum it compares. The caller calls its
            `finish` when everything is read.

    Returns:
        The number of bytes that were read.
    """
    total_nbytes = 0
    # Every group uses the same scratch memory. New memory would cost as much time as the reading.
    memory = np.empty(0, np.uint8)
    max_scratch_nbytes = policy.block_nbytes * threads
    for pieces in _group_pieces(_cut_requests(requests, policy), max_scratch_nbytes):
        scratch_nbytes = sum(piece.scratch_nbytes for piece in pieces)
        if scratch_nbytes > len(memory):
            memory = np.empty(scratch_nbytes, np.uint8)
        scratches = _divide_scratch(pieces, memory)
        reads = _describe_ranges(pieces, scratches)
        read_nbytes = read_ranges(store, reads, threads=threads, policy=policy)
        total_nbytes += read_nbytes

        # A piece that was read straight to its destination is finished, unless it has a checksum.
        tasks: list[Callable[[], None]] = []
        for piece, scratch in zip(pieces, scratches, strict=True):
            if scratch is not None or checks.has_storage(piece.ranges.chunk.storage):
                tasks.append(partial(_finish_piece, piece, scratch, checks))
        # Starting threads takes longer than copying a few bytes.
        copy_threads = threads if read_nbytes >= INLINE_NBYTES else 1
        run_all(tasks, copy_threads)
    return total_nbytes


def _divide_scratch(pieces: Sequence[BoxPiece], memory: np.ndarray) -> list[np.ndarray | None]:
    """Return the scratch memory of each piece. Pieces that are read directly need none."""
    scratches: list[np.ndarray | None] = []
    start = 0
    for piece in pieces:
        if piece.is_direct:
            scratches.append(None)
            continue
        stop = start + piece.scratch_nbytes
        scratches.append(memory[start:stop])
        start = stop
    return scratches


def _finish_piece(piece: BoxPiece, scratch: np.ndarray | None, checks: StorageChecks) -> None:
    """Pass the bytes of a piece to the checks, and copy its elements out of scratch memory.

    Args:
        piece: A piece whose ranges were read.
        scratch: The scratch memory with its bytes. None if they were read to the destination.
        checks: Compares the checksums of whole storages.
    """
    storage = piece.ranges.chunk.storage
    # A piece with several ranges skips bytes of its storage, so no checksum covers it.
    if not piece.ranges.outer_axes and checks.has_storage(storage):
        if scratch is not None:
            data = scratch.data
        else:
            data = memory_at(address_of(piece.destination), piece.range_nbytes)
        checks.add(storage, piece.find_starts().item(0), data)
    if scratch is not None:
        piece.copy_from_scratch(scratch)


class ReadCost(NamedTuple):
    """What it costs to read tensors."""

    read_count: int
    """The number of system calls or requests."""
    read_nbytes: int
    """The bytes that are read, including gaps between joined ranges."""
    wanted_nbytes: int
    """The bytes of the elements. Elements that an expanded tensor repeats count once."""


def estimate_read_cost(requests: Sequence[Request], policy: JoinPolicy = MEMORY) -> ReadCost:
    """Plan how requests would be read, and return the cost. Reads nothing."""
    read_count = 0
    read_nbytes = 0
    for pieces in _group_pieces(_cut_requests(requests, policy), policy.block_nbytes):
        # Nothing is read, so no piece needs scratch memory.
        reads = _describe_ranges(pieces, [None] * len(pieces))
        ranges = Ranges(
            reads.keys, np.asarray(reads.files), np.asarray(reads.starts), np.asarray(reads.nbytes)
        )
        for joined_reads in join_ranges(ranges, policy):
            read_count += len(joined_reads.starts)
            read_nbytes += joined_reads.nbytes

    wanted_nbytes = 0
    for request in requests:
        for chunk in request.tensor.chunks:
            # An axis with the stride 0 repeats the same stored elements.
            axes = zip(chunk.shape, chunk.strides, strict=True)
            stored_count = math.prod(length for length, stride in axes if stride)
            if chunk.box.count:
                wanted_nbytes += request.tensor.dtype.nbytes(stored_count)
    return ReadCost(read_count, read_nbytes, wanted_nbytes)


def _cut_requests(requests: Sequence[Request], policy: JoinPolicy) -> Iterator[BoxPiece]:
    """Cut the chunks of all requested tensors into pieces of at most one block."""
    for request in requests:
        tensor = request.tensor
        for chunk in tensor.chunks:
            if not chunk.box.count:
                continue
            for ranges in _cut_chunk(chunk, tensor.dtype, policy):
                destination = request.out
                # A tensor without dimensions cannot be sliced, and a whole one need not be.
                if ranges.chunk.shape != tensor.shape:
                    destination = request.out[ranges.chunk.box.slices]
                is_direct = _has_order_of_file(destination, ranges, tensor.dtype)
                yield BoxPiece(ranges, tensor.dtype, destination, is_direct, tensor.name)


def _cut_chunk(chunk: Chunk, dtype: DType, policy: JoinPolicy) -> Iterator[StridedRanges]:
    """Cut a chunk into pieces that have at most one block of bytes and `MAX_RANGES` ranges.

    A piece may be read into scratch memory, which must stay small.

    Yields:
        The ranges of each piece. They refer to the piece, which is a chunk itself.
    """
    ranges = find_strided_ranges(chunk, dtype, policy.free_gap)
    cut_axis, piece_count = _choose_cut(ranges, policy.block_nbytes * 8)
    if piece_count == 1:
        yield ranges
        return
    for box in chunk.box.split(cut_axis, piece_count):
        yield from _cut_chunk(chunk.narrow(box), dtype, policy)


def _choose_cut(ranges: StridedRanges, block_bits: int) -> tuple[int, int]:
    """Decide where a chunk is cut.

    Args:
        ranges: The ranges of the chunk.
        block_bits: The most bits that a piece may have.

    Returns:
        The axis to cut and the number of pieces. One piece means that no cut is needed.
    """
    shape = ranges.chunk.shape
    strides = ranges.chunk.strides
    inner_axes = ranges.inner_axes
    if ranges.bit_count > block_bits and inner_axes:
        # The ranges are too long. Cut the axis that spans the most bits.
        axis = max(inner_axes, key=lambda axis: abs(strides[axis]) * shape[axis])
        # The stride is 0 if the axis repeats one element, and may be larger than a block.
        stride = max(abs(strides[axis]), 1)
        elements_in_block = max(block_bits // stride, 1)
        # The double negation rounds up.
        piece_count = -(-shape[axis] // elements_in_block)
        return axis, min(max(piece_count, 2), shape[axis])

    for axis in ranges.outer_axes:
        if strides[axis] % 8:
            # Ranges of packed elements that start at different bits of a byte cannot lie one behind
            # the other in scratch memory. Every one of them becomes a piece.
            return axis, shape[axis]

    # There are too many ranges, or all of them together are too long. Cut the longest stride.
    total_bits = ranges.count * ranges.bit_count
    if ranges.outer_axes and (ranges.count > MAX_RANGES or total_bits > block_bits):
        axis = ranges.outer_axes[0]
        piece_count = max(-(-ranges.count // MAX_RANGES), -(-total_bits // block_bits))
        return axis, min(max(piece_count, 2), shape[axis])
    return 0, 1


def _has_order_of_file(destination: np.ndarray, ranges: StridedRanges, dtype: DType) -> bool:
    """Return whether the bytes of each range lie in the destination just as in the file."""
    chunk = ranges.chunk
    is_swapped = chunk.storage.byteorder != "little" and dtype.swap_nbytes > 1
    if dtype.packed or is_swapped:
        return False
    # Without gaps, the elements of a range have the strides of a C-contiguous array.
    inner_axes = ranges.inner_axes
    gapless_strides = c_strides([chunk.shape[axis] for axis in inner_axes], dtype.bits)
    for axis, stride in zip(inner_axes, gapless_strides, strict=True):
        if chunk.strides[axis] != stride or destination.strides[axis] * 8 != stride:
            return False
    return True


def _group_pieces(pieces: Iterable[BoxPiece], max_scratch_nbytes: int) -> Iterator[list[BoxPiece]]:
    """Group pieces that are read together, so that they fit into scratch memory.

    A group has at most `MAX_RANGES` ranges. A single piece may exceed both limits.
    """
    group: list[BoxPiece] = []
    range_count = 0
    scratch_nbytes = 0
    for piece in pieces:
        range_count += piece.ranges.count
        scratch_nbytes += piece.scratch_nbytes
        if group and (range_count > MAX_RANGES or scratch_nbytes > max_scratch_nbytes):
            yield group
            group = []
            range_count = piece.ranges.count
            scratch_nbytes = piece.scratch_nbytes
        group.append(piece)
    if group:
        yield group


def _describe_ranges(
    pieces: Sequence[BoxPiece], scratches: Sequence[np.ndarray | None]
) -> RangeReads:
    """Describe the ranges of all pieces as columns.

    Args:
        pieces: The pieces.
        scratches: The scratch memory of each piece. None if it is read to its destination.
    """
    # A file gets the next index when it occurs for the first time.
    file_indices: dict[str, int] = {}
    files: list[int] = []
    starts: list[Ints] = []
    addresses: list[Ints] = []
    for piece, scratch in zip(pieces, scratches, strict=True):
        key = piece.ranges.chunk.storage.key
        files.append(file_indices.setdefault(key, len(file_indices)))
        starts.append(piece.find_starts())
        addresses.append(piece.find_addresses(scratch))
    # The piece of each range.
    piece_indices = np.arange(len(pieces)).repeat([len(column) for column in starts])
    range_nbytes = np.array([piece.range_nbytes for piece in pieces], np.int64)

    def find_tensor_name(range_index: int) -> str:
        return pieces[piece_indices.item(range_index)].tensor_name

    def describe_damage(range_index: int, crc: int) -> Corrupted:
        piece = pieces[piece_indices.item(range_index)]
        return build_damage_error(piece.ranges.chunk.storage, piece.tensor_name, crc)

    return RangeReads(
        keys=list(file_indices),
        files=np.array(files, np.int64)[piece_indices],
        starts=np.concatenate(starts),
        nbytes=range_nbytes[piece_indices],
        addresses=np.concatenate(addresses),
        # Files record checksums of storages, not of pieces. `StorageChecks` compares them when all
        # pieces of a storage are read.
        crcs=np.full(len(piece_indices), NO_CRC, np.int64),
        find_tensor_name=find_tensor_name,
        describe_damage=describe_damage,
    )


def copy_elements(
    data: np.ndarray,
    bit_offset: int,
    bit_strides: Sequence[int],
    destination: np.ndarray,
    *,
    dtype: DType,
    is_swapped: bool,
) -> None:
    """Copy elements out of bytes into an array.

    Args:
        data: The bytes.
        bit_offset: The first bit of the element at index 0 of all axes.
        bit_strides: The bits from one element to the next, along each axis.
        destination: The array to fill.
        dtype: The dtype of the elements.
        is_swapped: Whether the bytes are in big-endian order.
    """
    shape = destination.shape
    if dtype.packed:
        destination[...] = _unpack_elements(data, bit_offset, bit_strides, shape, dtype)
        return
    # Elements that are not packed start at whole bytes.
    byte_strides = [stride // 8 for stride in bit_strides]
    swap_nbytes = dtype.swap_nbytes
    if not is_swapped or swap_nbytes == 1:
        destination[...] = np.ndarray(shape, dtype.numpy, data.data, bit_offset // 8, byte_strides)
        return

    # numpy cannot swap the types of ml_dtypes, so two axes are added: the units of an element, of
    # which a complex number has two, and the bytes of a unit, which are reversed. Axes of length 1
    # are left out, because numpy has at most 64 axes.
    long_axes = [axis for axis, length in enumerate(shape) if length != 1]
    unit_count = dtype.bits // 8 // swap_nbytes
    swapped_bytes = np.ndarray(
        (*[shape[axis] for axis in long_axes], unit_count, swap_nbytes),
        np.uint8,
        data.data,
        bit_offset // 8,
        (*[byte_strides[axis] for axis in long_axes], swap_nbytes, 1),
    )
    element_bytes = np.ascontiguousarray(swapped_bytes[..., ::-1])
    destination[...] = element_bytes.reshape(-1).view(dtype.numpy).reshape(shape)


def _unpack_elements(
    data: np.ndarray,
    bit_offset: int,
    bit_strides: Sequence[int],
    shape: tuple[int, ...],
    dtype: DType,
) -> np.ndarray:
    """Return elements that are narrower than a byte, one byte for each of them.

    The lowest bits of a byte are its first element. The arguments are those of `copy_elements`.
    """
    # The first bit of each element in `data`.
    first_bits = _list_grid_offsets(bit_offset, shape, bit_strides).reshape(shape)
    byte_indices = first_bits >> 3
    # An element may reach into the next byte, so each one is cut out of 16 bits.
    next_indices = np.minimum(byte_indices + 1, len(data) - 1)
    words = data[byte_indices].astype(np.uint16) | (data[next_indices].astype(np.uint16) << 8)
    shifts = (first_bits & 7).astype(np.uint16)
    mask = np.uint16((1 << dtype.bits) - 1)
    elements = (words >> shifts) & mask
    return np.asarray(elements).astype(np.uint8).view(dtype.numpy)
