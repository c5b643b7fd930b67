"""From wanted tensors to a list of reads: the plan that the engine executes.

1. Each chunk of each tensor is cut into pieces (`ChunkRead`) of at most one block of file, so that threads can share a large
   tensor and scratch memory stays bounded. A piece is again a chunk, with the part of the target that it fills.
2. Each piece is strided ranges: for every point of its outer dimensions one dense range of bytes. Ranges are numbers in
   arrays and not objects, because a column of a tall matrix has millions. Negative strides are folded into the offset. Dimensions
   that leave no gap, or gaps that are cheaper to read than to skip, collapse to one range; the others are enumerated.
3. All ranges of one file are sorted and joined (engine/coalesce.py) into *fetches*: a stretch of file each, and the ranges inside.

A range whose elements lie in the file just as they lie in the target is read straight into place, unless it was joined with
others; everything else passes through scratch memory. The plan says how many bytes it reads and how many were wanted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, c_strides, in_c_order
from holdfast.core.dtype import DType
from holdfast.core.protocols import Request
from holdfast.core.value import Value
from holdfast.engine.coalesce import MEMORY, Policy, Reads, coalesce


class StridedRanges(Value, frozen=True, gc=False):
    base: int  # Lowest bit that is touched, relative to the storage.
    extent: int  # Bits from the first to the last one of a range.
    outer: tuple[int, ...]  # Dimensions that are enumerated, the largest stride first.

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


def strided_ranges(chunk: Chunk, dtype: DType, tolerance: int = 0) -> StridedRanges:
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


MAX_RANGES = 1 << 18  # Ranges that are planned together: a few arrays of 2 MiB.


class ChunkRead(Value, frozen=True):
    """A piece of a chunk and the part of the target that it fills (same shape)."""

    chunk: Chunk
    dtype: DType
    target: np.ndarray
    ranges: StridedRanges
    direct: bool  # Whether a range can be read straight into the target: same order of elements, same byte order, no packing.
    tensor: str


class FileReads(Reads, frozen=True):
    owners: Ints  # The chunk read of each range.
    numbers: Ints  # The number of each range in its chunk read.


class ReadBatch(Value, frozen=True):
    reads: tuple[ChunkRead, ...]
    files: tuple[FileReads, ...]


class ReadPlan(Value, frozen=True):
    """Every read that fills the requests. `explain()` says it in words."""

    batches: tuple[ReadBatch, ...]
    wanted_nbytes: int  # Bytes that the requested elements take in the files.

    @property
    def read_nbytes(self) -> int:
        return sum(f.nbytes for b in self.batches for f in b.files)

    @property
    def fetches(self) -> int:
        return sum(len(f.starts) for b in self.batches for f in b.files)

    def explain(self) -> str:
        wanted, read = self.wanted_nbytes, self.read_nbytes
        over = (
            f", {read - wanted:,} more than wanted ({(read - wanted) / wanted:.1%})"
            if read > wanted
            else ""
        )
        return f"{self.fetches:,} reads of {read:,} bytes{over}"


def plan_reads(requests: Sequence[Request], policy: Policy | None = None) -> ReadPlan:
    policy = policy or MEMORY
    batches = tuple(
        _plan_batch(reads, policy) for reads in _batched(_chunk_reads(requests, policy))
    )
    wanted = sum(
        r.tensor.dtype.nbytes(c.box.count // _repeats(c))
        for r in requests
        for c in r.tensor.chunks
        if c.box.count
    )
    return ReadPlan(batches, wanted)


def _repeats(chunk: Chunk) -> int:
    """How many times an expanded chunk repeats each stored element."""
    return math.prod(n for n, stride in zip(chunk.shape, chunk.strides, strict=True) if not stride)


def _chunk_reads(requests: Sequence[Request], policy: Policy) -> Iterator[ChunkRead]:
    for request in requests:
        tensor = request.tensor
        for chunk in tensor.chunks:
            # Most tensors lie in the file as they will in memory: no need to look at them dimension by dimension.
            extent = _dense_bits(chunk, tensor.dtype, request.out)
            if 0 < extent <= policy.block * 8 and chunk.shape == tensor.shape:
                yield ChunkRead(
                    chunk,
                    tensor.dtype,
                    request.out,
                    StridedRanges(chunk.offset, extent, ()),
                    True,
                    tensor.name,
                )
                continue
            for part, ranges in cut(chunk, tensor.dtype, policy):
                whole = part.shape == tensor.shape
                target = request.out if whole else request.out[part.box.slices]
                direct = _direct(part, tensor.dtype, target, ranges)
                yield ChunkRead(part, tensor.dtype, target, ranges, direct, tensor.name)


def _dense_bits(chunk: Chunk, dtype: DType, out: np.ndarray) -> int:
    """Bits of a chunk whose elements lie in the file just as in the target, in C order; 0 for any other."""
    if (
        dtype.packed
        or (chunk.storage.byteorder != "little" and dtype.swap_nbytes > 1)
        or not out.flags.c_contiguous
    ):
        return 0
    return chunk.box.count * dtype.bits if in_c_order(chunk.shape, chunk.strides, dtype.bits) else 0


def cut(chunk: Chunk, dtype: DType, policy: Policy) -> Iterator[tuple[Chunk, StridedRanges]]:
    """Cut a chunk until a range is at most a block of file, and there are at most `MAX_RANGES` of them."""
    if chunk.box.count == 0:
        return
    ranges = strided_ranges(chunk, dtype, policy.free_gap)
    long = ranges.extent > policy.block * 8
    many = ranges.count(chunk) > MAX_RANGES
    # Inside a range that is too long, the dimension that makes it so; with too many ranges, the outermost one.
    inside = (
        [d for d in range(chunk.box.rank) if d not in ranges.outer and chunk.shape[d] > 1]
        if long
        else []
    )
    if inside:
        axis = max(inside, key=lambda d: abs(chunk.strides[d]) * chunk.shape[d])
        parts = -(
            -chunk.shape[axis] // max(1, policy.block * 8 // max(abs(chunk.strides[axis]), 1))
        )
    elif many:
        axis = ranges.outer[0]
        parts = -(-ranges.count(chunk) // MAX_RANGES)
    else:
        yield chunk, ranges
        return
    for box in chunk.box.split(axis, min(max(parts, 2), chunk.shape[axis])):
        yield from cut(chunk.narrow(box), dtype, policy)


def _direct(chunk: Chunk, dtype: DType, target: np.ndarray, ranges: StridedRanges) -> bool:
    if dtype.packed or (chunk.storage.byteorder != "little" and dtype.swap_nbytes > 1):
        return False
    inner = [d for d in range(chunk.box.rank) if d not in ranges.outer and chunk.shape[d] > 1]
    dense = c_strides([chunk.shape[d] for d in inner], dtype.bits)
    return all(
        chunk.strides[d] == bits and target.strides[d] * 8 == bits
        for d, bits in zip(inner, dense, strict=True)
    )


def _batched(reads: Iterable[ChunkRead]) -> Iterator[list[ChunkRead]]:
    batch: list[ChunkRead] = []
    ranges = 0
    for read in reads:
        count = read.ranges.count(read.chunk)
        if batch and ranges + count > MAX_RANGES:
            yield batch
            batch, ranges = [], 0
        batch.append(read)
        ranges += count
    if batch:
        yield batch


def _plan_batch(reads: list[ChunkRead], policy: Policy) -> ReadBatch:
    by_key: dict[str, list[int]] = {}
    for i, read in enumerate(reads):
        by_key.setdefault(read.chunk.storage.key, []).append(i)
    files: list[FileReads] = []
    for key, members in by_key.items():
        starts, stops, owners, numbers = _ranges_of(reads, members)
        order = np.argsort(starts, kind="stable")
        starts, stops, owners, numbers = starts[order], stops[order], owners[order], numbers[order]
        heads = coalesce(starts, stops, policy)
        reach = np.maximum.reduceat(stops, heads) if len(heads) else stops
        files.append(
            FileReads(key, starts[heads], reach, np.append(heads, len(starts)), owners, numbers)
        )
    return ReadBatch(tuple(reads), tuple(files))


def _ranges_of(reads: list[ChunkRead], members: list[int]) -> tuple[Ints, Ints, Ints, Ints]:
    """Columns of the ranges of one file: first byte, byte after the last, number of the chunk read, number in that."""
    single = [i for i in members if not reads[i].ranges.outer]
    begins = [reads[i].chunk.storage.start * 8 + reads[i].ranges.base for i in single]
    extents = np.array([reads[i].ranges.extent for i in single], np.int64)
    bits = np.array(begins, np.int64)
    starts, stops = [bits // 8], [(bits + extents + 7) // 8]
    owners, numbers = [np.array(single, np.int64)], [np.zeros(len(single), np.int64)]
    for i in members:
        read = reads[i]
        if read.ranges.outer:
            bits = read.ranges.starts(read.chunk) + read.chunk.storage.start * 8
            starts.append(bits // 8)
            stops.append((bits + read.ranges.extent + 7) // 8)
            owners.append(np.full(len(bits), i, np.int64))
            numbers.append(np.arange(len(bits), dtype=np.int64))
    return (
        np.concatenate(starts),
        np.concatenate(stops),
        np.concatenate(owners),
        np.concatenate(numbers),
    )


def range_index(read: ChunkRead, number: int) -> tuple[int | slice, ...]:
    index: list[int | slice] = [slice(None)] * read.chunk.box.rank
    for d in reversed(read.ranges.outer):
        number, index[d] = divmod(number, read.chunk.shape[d])
    return tuple(index)


def range_chunk(read: ChunkRead, index: tuple[int | slice, ...]) -> Chunk:
    start, stop = list(read.chunk.box.start), list(read.chunk.box.stop)
    for d, at in enumerate(index):
        if isinstance(at, int):
            start[d] += at
            stop[d] = start[d] + 1
    return read.chunk.narrow(Box(tuple(start), tuple(stop)))
