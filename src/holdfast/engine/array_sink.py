"""A sink that carries out a read plan: it puts the ranges of reads where they belong, into arrays of any strides.

A range whose elements lie in the file as in its target is read straight into place, unless it was joined with others; everything
else is copied out of scratch memory, with its strides, its byte order and its packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.dtype import DType
from holdfast.core.protocols import Store
from holdfast.engine.checksums import Checks
from holdfast.engine.reads import (
    ChunkRead,
    FileReads,
    ReadBatch,
    ReadPlan,
    range_chunk,
    range_index,
)
from holdfast.engine.transfer import Sink, Straight, transfer

FEW_READS = 4  # Up to so many are looked at one by one: numpy would take longer to find those that belong together.


def execute(plan: ReadPlan, store: Store, threads: int, checks: Checks) -> None:
    """Carry out every fetch; `checks` sees the bytes of the storages that it wants. Raises the first error at the end."""
    transfer(
        (
            (store, file, ArraySink(batch, file, checks))
            for batch in plan.batches
            for file in batch.files
        ),
        threads,
    )


class ArraySink(Sink):
    def __init__(self, batch: ReadBatch, file: FileReads, checks: Checks) -> None:
        self._chunk_reads, self._file, self._checks = batch.reads, file, checks

    def name(self, number: int) -> str:
        return self._owner(number).tensor

    def _owner(self, number: int) -> ChunkRead:
        return self._chunk_reads[int(self._file.owners[self._file.heads[number]])]

    def straight(self, first: int, last: int) -> Straight:
        count, heads = last - first, self._file.heads[first : last + 1]
        addresses, seen = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        owners = self._file.owners[heads[:-1]]
        edges: Sequence[int] = range(1, count)
        if count > FEW_READS:
            single = np.diff(heads) == 1
            edges = (
                np.flatnonzero((owners[1:] != owners[:-1]) | (single[1:] != single[:-1])) + 1
            ).tolist()
        for low, high in pairwise([0, *edges, count]):
            read = self._chunk_reads[owners[low]]
            if read.direct and heads[high] - heads[low] == high - low:
                addresses[low:high] = (
                    _places(read, self._file.numbers[heads[low:high]])
                    if read.ranges.outer
                    else _address(read)
                )
                seen[low:high] = self._checks.wants(read.chunk.storage)
        return Straight(addresses, seen)

    def passed(self, number: int, start: int, data: memoryview) -> None:
        self._checks.add(self._owner(number).chunk.storage, start, data)

    def take(self, number: int, data: memoryview) -> None:
        start = int(self._file.starts[number])
        span = slice(*self._file.heads[number : number + 2].tolist())
        owners, numbers = self._file.owners[span], self._file.numbers[span]
        read = self._chunk_reads[int(owners[0])]
        if (
            len(owners) > 1
            and len(read.ranges.outer) == 1
            and (owners == owners[0]).all()
            and (np.diff(numbers) == 1).all()
        ):
            # Ranges side by side are one box of the read: placed together.
            (axis,) = read.ranges.outer
            rows = slice(int(numbers[0]), int(numbers[-1]) + 1)
            box, target = read.chunk.box, read.target[(*(slice(None),) * axis, rows)]
            begin, end = list(box.start), list(box.stop)
            begin[axis], end[axis] = begin[axis] + rows.start, begin[axis] + rows.stop
            place(read.chunk.narrow(Box(tuple(begin), tuple(end))), read.dtype, data, start, target)
            return
        for owner, number in zip(owners.tolist(), numbers.tolist(), strict=True):
            read = self._chunk_reads[owner]
            if read.ranges.outer:
                index = range_index(read, number)
                kept = tuple(at if isinstance(at, slice) else slice(at, at + 1) for at in index)
                place(range_chunk(read, index), read.dtype, data, start, read.target[kept])
            else:
                place(read.chunk, read.dtype, data, start, read.target)
                begin = read.chunk.storage.start + read.ranges.base // 8 - start
                self._checks.add(
                    read.chunk.storage,
                    begin + start,
                    data[begin : begin + (read.ranges.extent + 7) // 8],
                )


def _address(read: ChunkRead) -> int:
    address: int = read.target.__array_interface__["data"][0]
    return address


def _places(read: ChunkRead, numbers: Ints) -> Ints:
    places = np.full(len(numbers), _address(read), np.int64)
    for d in reversed(read.ranges.outer):
        numbers, index = np.divmod(numbers, read.chunk.shape[d])
        places += index * read.target.strides[d]
    return places


def place(chunk: Chunk, dtype: DType, fetched: memoryview, start: int, target: np.ndarray) -> None:
    """Copy the chunk's elements from `fetched`, which begins at byte `start` of the file, into `target` (same shape)."""
    offset = (chunk.storage.start - start) * 8 + chunk.offset
    if dtype.packed:
        target[...] = unpack(chunk, dtype, fetched, offset)
        return
    shape, strides = chunk.shape, tuple(s // 8 for s in chunk.strides)
    unit = dtype.swap_nbytes
    if chunk.storage.byteorder == "little" or unit == 1:
        target[...] = np.ndarray(shape, dtype.numpy, fetched, offset // 8, strides)
        return
    # Reverse the bytes of each unit. Arrays of bytes, since numpy cannot byte-swap the types of ml_dtypes.
    units = dtype.bits // 8 // unit
    # Without the dimensions of length 1: two more are added here, and numpy stops at 64.
    lengths = tuple(n for n in shape if n != 1)
    steps = tuple(s for n, s in zip(shape, strides, strict=True) if n != 1)
    swapped = np.ndarray(
        (*lengths, units, unit), np.uint8, fetched, offset // 8, (*steps, unit, 1)
    )[..., ::-1]
    target[...] = np.ascontiguousarray(swapped).reshape(-1).view(dtype.numpy).reshape(shape)


def unpack(chunk: Chunk, dtype: DType, fetched: memoryview, offset: int) -> np.ndarray:
    """Elements narrower than a byte, one byte each; the lowest bits of a byte are its first element."""
    positions = np.full(chunk.shape, offset, np.int64)
    for d, (n, s) in enumerate(zip(chunk.shape, chunk.strides, strict=True)):
        steps = np.arange(n, dtype=np.int64) * s
        positions += steps.reshape([-1 if i == d else 1 for i in range(len(chunk.shape))])
    content = np.frombuffer(fetched, np.uint8)
    low = content[positions >> 3].astype(np.uint16)
    following = np.minimum((positions >> 3) + 1, len(content) - 1)
    wide = low | (content[following].astype(np.uint16) << 8)
    values = (wide >> (positions & 7).astype(np.uint16)) & np.uint16((1 << dtype.bits) - 1)
    return np.asarray(values).astype(np.uint8).view(dtype.numpy)
