"""Reads boxes of tensors of any strides, byte order and packing into arrays: made of ranges (engine/ranges.py).

1. Each chunk of each tensor is cut into pieces of at most one block of file, so that scratch memory stays bounded. A piece is again
   a chunk, with the part of the target that it fills.
2. Each piece is strided ranges: for every point of its outer dimensions one contiguous range of bytes. Ranges are numbers in
   arrays and not objects, because a column of a tall matrix has millions. Negative strides are folded into the offset. Dimensions
   that leave no gap, or gaps that are cheaper to read than to skip, collapse to one range; the others are enumerated.
3. The destination of a range is its place in the target, if its elements lie in the file just as they lie there. All other ranges
   of a piece go next to each other into scratch memory, and from there to the target, with their strides, their byte order and
   their packing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Chunk, c_strides, is_c_ordered
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
"""Ranges that are read together: a few arrays of 2 MiB."""


class StridedRanges(Value, frozen=True, gc=False):
    """The byte ranges of a chunk: one for each point of its outer dimensions."""

    base: int
    """Lowest bit that is touched, relative to the storage."""
    extent: int
    """Bits from the first to the last one of a range."""
    outer: tuple[int, ...]
    """Dimensions that are enumerated, the largest stride first."""

    def count(self, chunk: Chunk) -> int:
        return math.prod(chunk.shape[d] for d in self.outer)

    def starts(self, chunk: Chunk) -> Ints:
        """The first bit of each range, in C order of the outer dimensions' coordinates."""
        starts = np.zeros(1, np.int64)
        for d in self.outer:
            n, s = chunk.shape[d], chunk.strides[d]
            steps = np.arange(n, dtype=np.int64) * s
            if s < 0:
                steps -= (n - 1) * s
            starts = (starts[:, None] + steps[None, :]).reshape(-1)
        return starts + self.base


def find_strided_ranges(chunk: Chunk, dtype: DType, tolerance: int = 0) -> StridedRanges:
    """Collapse the dimensions that leave gaps of at most `tolerance` bytes. The chunk must not be empty."""
    base, extent = chunk.offset, dtype.bits
    order = sorted(range(chunk.box.rank), key=lambda d: abs(chunk.strides[d]))
    outer: list[int] = []
    for d in order:
        n, s = chunk.shape[d], chunk.strides[d]
        if s < 0:
            base += (n - 1) * s
        if n == 1:
            continue
        if abs(s) <= extent + tolerance * 8:
            extent += (n - 1) * abs(s)
        else:
            outer.append(d)
    return StridedRanges(base, extent, tuple(reversed(outer)))


class BoxPiece(Value, frozen=True):
    """A piece of a chunk and the part of the target that it fills (same shape)."""

    chunk: Chunk
    dtype: DType
    target: np.ndarray
    ranges: StridedRanges
    is_direct: bool
    """Whether its ranges can be read straight into the target: same order of elements, same byte order, no packing."""
    tensor: str

    @property
    def range_nbytes(self) -> int:
        """The length of each of its ranges. All of them begin at the same bit of a byte."""
        return (self.ranges.base % 8 + self.ranges.extent + 7) // 8

    @property
    def scratch_nbytes(self) -> int:
        return 0 if self.is_direct else self.ranges.count(self.chunk) * self.range_nbytes

    def starts(self) -> Ints:
        """The first byte of each range in its file."""
        return self.chunk.storage.start + self.ranges.starts(self.chunk) // 8

    def addresses(self, scratch: np.ndarray | None) -> Ints:
        """The destination of each range: in the target, or one behind the other in scratch memory."""
        if scratch is not None:
            count = self.ranges.count(self.chunk)
            return address_of(scratch) + np.arange(count, dtype=np.int64) * self.range_nbytes
        addresses = np.full(1, address_of(self.target), np.int64)
        for d in self.ranges.outer:
            steps = np.arange(self.chunk.shape[d], dtype=np.int64) * self.target.strides[d]
            addresses = (addresses[:, None] + steps[None, :]).reshape(-1)
        return addresses

    def arrange(self, scratch: np.ndarray) -> None:
        """Copy the elements out of scratch memory into the target."""
        offset = self.ranges.base % 8
        strides = [*self.chunk.strides]
        for d, (n, stride) in enumerate(zip(self.chunk.shape, strides, strict=True)):
            if stride < 0 and d not in self.ranges.outer:
                offset -= (n - 1) * stride
        step = self.range_nbytes * 8
        for d in reversed(self.ranges.outer):
            strides[d] = step
            step *= self.chunk.shape[d]
        is_swapped = self.chunk.storage.byteorder != "little"
        copy_elements(
            scratch, offset, strides, self.target, dtype=self.dtype, is_swapped=is_swapped
        )


def read_boxes(
    store: Store,
    requests: Sequence[Request],
    *,
    threads: int,
    policy: JoinPolicy,
    checks: StorageChecks,
) -> int:
    """Fill every request and return how many bytes were read.

    `checks` receives the bytes of the storages that it wants; the caller finishes them.
    """
    total_nbytes = 0
    # One piece of memory for all batches: fresh memory would cost as much as the reading.
    memory = np.empty(0, np.uint8)
    for pieces in _batches(_cut_requests(requests, policy), policy.block_nbytes * threads):
        ends = [*accumulate((piece.scratch_nbytes for piece in pieces), initial=0)]
        if ends[-1] > len(memory):
            memory = np.empty(ends[-1], np.uint8)
        scratch = [
            None if piece.is_direct else memory[start:end]
            for piece, (start, end) in zip(pieces, pairwise(ends), strict=True)
        ]
        reads = _piece_ranges(pieces, scratch)
        read_nbytes = read_ranges(store, reads, threads=threads, policy=policy)
        tasks = [
            partial(_finish_piece, piece, data, checks)
            for piece, data in zip(pieces, scratch, strict=True)
            if data is not None or checks.wants(piece.chunk.storage)
        ]
        run_all(tasks, threads if read_nbytes >= INLINE_NBYTES else 1)
        total_nbytes += read_nbytes
    return total_nbytes


def estimate_read_cost(
    requests: Sequence[Request], policy: JoinPolicy = MEMORY
) -> tuple[int, int, int]:
    """Return how many reads, and of how many bytes, would fill requests, and how many bytes are wanted. Nothing is read."""
    read_count = read_nbytes = 0
    for pieces in _batches(_cut_requests(requests, policy), policy.block_nbytes):
        reads = _piece_ranges(pieces, [None] * len(pieces))
        columns = (np.asarray(one, np.int64) for one in (reads.files, reads.starts, reads.nbytes))
        for joined in join_ranges(Ranges(reads.keys, *columns), policy):
            read_count += len(joined.starts)
            read_nbytes += joined.nbytes
    wanted_nbytes = sum(
        request.tensor.dtype.nbytes(chunk.box.count // _repeats(chunk))
        for request in requests
        for chunk in request.tensor.chunks
        if chunk.box.count
    )
    return read_count, read_nbytes, wanted_nbytes


def _repeats(chunk: Chunk) -> int:
    """How many times an expanded chunk repeats each stored element."""
    return math.prod(n for n, stride in zip(chunk.shape, chunk.strides, strict=True) if not stride)


def _finish_piece(piece: BoxPiece, scratch: np.ndarray | None, checks: StorageChecks) -> None:
    storage = piece.chunk.storage
    if not piece.ranges.outer and checks.wants(storage):
        data = (
            memory_at(address_of(piece.target), piece.range_nbytes)
            if scratch is None
            else scratch.data
        )
        checks.add(storage, int(piece.starts()[0]), data)
    if scratch is not None:
        piece.arrange(scratch)


def _cut_requests(requests: Sequence[Request], policy: JoinPolicy) -> Iterator[BoxPiece]:
    for request in requests:
        tensor = request.tensor
        for chunk in tensor.chunks:
            # Most chunks lie in the file as they will in memory: no need to look at them dimension by dimension.
            extent = _contiguous_bits(chunk, tensor.dtype, request.out)
            if 0 < extent <= policy.block_nbytes * 8 and chunk.shape == tensor.shape:
                ranges = StridedRanges(chunk.offset, extent, ())
                yield BoxPiece(chunk, tensor.dtype, request.out, ranges, True, tensor.name)
                continue
            for part, ranges in cut(chunk, tensor.dtype, policy):
                is_whole = part.shape == tensor.shape
                target = request.out if is_whole else request.out[part.box.slices]
                is_direct = _is_direct(part, tensor.dtype, target, ranges)
                yield BoxPiece(part, tensor.dtype, target, ranges, is_direct, tensor.name)


def _contiguous_bits(chunk: Chunk, dtype: DType, out: np.ndarray) -> int:
    """Bits of a chunk whose elements lie in the file just as in the target, in C order; 0 for any other."""
    if (
        dtype.packed
        or (chunk.storage.byteorder != "little" and dtype.swap_nbytes > 1)
        or not out.flags.c_contiguous
    ):
        return 0
    return (
        chunk.box.count * dtype.bits if is_c_ordered(chunk.shape, chunk.strides, dtype.bits) else 0
    )


def cut(chunk: Chunk, dtype: DType, policy: JoinPolicy) -> Iterator[tuple[Chunk, StridedRanges]]:
    """Cut a chunk until its ranges have at most a block of bytes, and there are at most `MAX_RANGES` of them."""
    if chunk.box.count == 0:
        return
    ranges = find_strided_ranges(chunk, dtype, policy.free_gap)
    block_bits = policy.block_nbytes * 8
    count = ranges.count(chunk)
    inner = [d for d in range(chunk.box.rank) if d not in ranges.outer and chunk.shape[d] > 1]
    # Ranges of packed elements that begin at several bits of a byte cannot stand side by side in scratch memory.
    has_odd_starts = any(chunk.strides[d] % 8 for d in ranges.outer)
    if ranges.extent > block_bits and inner:
        # The dimension that makes the ranges too long.
        axis = max(inner, key=lambda d: abs(chunk.strides[d]) * chunk.shape[d])
        part_count = -(-chunk.shape[axis] // max(1, block_bits // max(abs(chunk.strides[axis]), 1)))
    elif has_odd_starts:
        axis = next(d for d in ranges.outer if chunk.strides[d] % 8)
        part_count = chunk.shape[axis]
    elif count > 1 and (count > MAX_RANGES or count * ranges.extent > block_bits):
        axis = ranges.outer[0]
        part_count = max(-(-count // MAX_RANGES), -(-count * ranges.extent // block_bits))
    else:
        yield chunk, ranges
        return
    for box in chunk.box.split(axis, min(max(part_count, 2), chunk.shape[axis])):
        yield from cut(chunk.narrow(box), dtype, policy)


def _is_direct(chunk: Chunk, dtype: DType, target: np.ndarray, ranges: StridedRanges) -> bool:
    if dtype.packed or (chunk.storage.byteorder != "little" and dtype.swap_nbytes > 1):
        return False
    inner = [d for d in range(chunk.box.rank) if d not in ranges.outer and chunk.shape[d] > 1]
    contiguous = c_strides([chunk.shape[d] for d in inner], dtype.bits)
    return all(
        chunk.strides[d] == bits and target.strides[d] * 8 == bits
        for d, bits in zip(inner, contiguous, strict=True)
    )


def _batches(pieces: Iterable[BoxPiece], scratch_limit: int) -> Iterator[list[BoxPiece]]:
    """Group pieces so that the scratch memory and the number of ranges of a group are bounded."""
    batch: list[BoxPiece] = []
    range_count = scratch_nbytes = 0
    for piece in pieces:
        count, nbytes = piece.ranges.count(piece.chunk), piece.scratch_nbytes
        if batch and (range_count + count > MAX_RANGES or scratch_nbytes + nbytes > scratch_limit):
            yield batch
            batch, range_count, scratch_nbytes = [], 0, 0
        batch.append(piece)
        range_count += count
        scratch_nbytes += nbytes
    if batch:
        yield batch


def _piece_ranges(pieces: Sequence[BoxPiece], scratch: Sequence[np.ndarray | None]) -> RangeReads:
    """The ranges of all pieces as columns."""
    keys: dict[str, int] = {}
    files = [keys.setdefault(piece.chunk.storage.key, len(keys)) for piece in pieces]
    counts = np.array([piece.ranges.count(piece.chunk) for piece in pieces], np.int64)
    owners = np.arange(len(pieces)).repeat(counts)
    starts = [piece.starts() for piece in pieces]
    addresses = [piece.addresses(memory) for piece, memory in zip(pieces, scratch, strict=True)]
    nbytes = np.array([piece.range_nbytes for piece in pieces], np.int64)

    def name(number: int) -> str:
        return pieces[owners.item(number)].tensor

    def damaged(number: int, crc: int) -> Corrupted:
        return build_damage_error(pieces[owners.item(number)].chunk.storage, name(number), crc)

    return RangeReads(
        keys=[*keys],
        files=np.array(files, np.int64)[owners],
        starts=np.concatenate(starts),
        nbytes=nbytes[owners],
        addresses=np.concatenate(addresses),
        # The checksum of a storage is compared when all of its pieces are there: by `StorageChecks`.
        crcs=np.full(len(owners), NO_CRC, np.int64),
        find_tensor_name=name,
        describe_damage=damaged,
    )


def copy_elements(
    data: np.ndarray, offset: int, strides: Sequence[int], target: np.ndarray, *, dtype: DType,
    is_swapped: bool,
) -> None:  # fmt: skip
    """Copy elements out of bytes into an array. The first of them begins at bit `offset`; strides are in bits."""
    if dtype.packed:
        target[...] = _unpack(data, offset, strides, target.shape, dtype)
        return
    shape, steps = target.shape, tuple(stride // 8 for stride in strides)
    unit = dtype.swap_nbytes
    if not is_swapped or unit == 1:
        target[...] = np.ndarray(shape, dtype.numpy, data.data, offset // 8, steps)
        return
    # Reverse the bytes of each unit. Arrays of bytes, since numpy cannot byte-swap the types of ml_dtypes.
    units = dtype.bits // 8 // unit
    # Without the dimensions of length 1: two more are added here, and numpy stops at 64.
    lengths = tuple(n for n in shape if n != 1)
    steps = tuple(s for n, s in zip(shape, steps, strict=True) if n != 1)
    swapped = np.ndarray(
        (*lengths, units, unit), np.uint8, data.data, offset // 8, (*steps, unit, 1)
    )[..., ::-1]
    target[...] = np.ascontiguousarray(swapped).reshape(-1).view(dtype.numpy).reshape(shape)


def _unpack(
    data: np.ndarray, offset: int, strides: Sequence[int], shape: tuple[int, ...], dtype: DType
) -> np.ndarray:
    """Elements narrower than a byte, one byte each; the lowest bits of a byte are its first element."""
    positions = np.full(shape, offset, np.int64)
    for d, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = np.arange(n, dtype=np.int64) * stride
        positions += steps.reshape([-1 if i == d else 1 for i in range(len(shape))])
    low = data[positions >> 3].astype(np.uint16)
    following = np.minimum((positions >> 3) + 1, len(data) - 1)
    wide = low | (data[following].astype(np.uint16) << 8)
    values = (wide >> (positions & 7).astype(np.uint16)) & np.uint16((1 << dtype.bits) - 1)
    return np.asarray(values).astype(np.uint8).view(dtype.numpy)
