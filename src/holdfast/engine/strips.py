"""Carry out a read plan: a sink that puts the teeth of strips where they belong, into arrays of any strides.

A tooth whose elements lie in the file as in its target is read straight into place, unless it was joined with others; everything
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
from holdfast.engine.checks import Checks
from holdfast.engine.reads import FileReads, ReadBatch, ReadPlan, Strip, tooth_chunk, tooth_index
from holdfast.engine.transfer import Sink, Straight, transfer

FEW_READS = 4
"""Up to so many are looked at one by one: numpy would take longer to find those that belong together."""


def execute(plan: ReadPlan, store: Store, threads: int, checks: Checks) -> None:
    """Carry out every fetch; `checks` sees the bytes of the storages that it wants. Raises the first error at the end."""
    transfer(((store, file, Strips(batch, file, checks)) for batch in plan.batches for file in batch.files), threads)


class Strips(Sink):
    """The fetches of one file, of which each has teeth of one or several strips."""

    def __init__(self, batch: ReadBatch, file: FileReads, checks: Checks) -> None:
        self._strips, self._file, self._checks = batch.strips, file, checks

    def name(self, number: int) -> str:
        return self._owner(number).tensor

    def _owner(self, number: int) -> Strip:
        return self._strips[int(self._file.owners[self._file.heads[number]])]

    def straight(self, first: int, last: int) -> Straight:
        count, heads = last - first, self._file.heads[first : last + 1]
        addresses, seen = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        owners = self._file.owners[heads[:-1]]
        edges: Sequence[int] = range(1, count)
        if count > FEW_READS:
            single = np.diff(heads) == 1
            edges = (np.flatnonzero((owners[1:] != owners[:-1]) | (single[1:] != single[:-1])) + 1).tolist()
        for low, high in pairwise([0, *edges, count]):
            strip = self._strips[owners[low]]
            if strip.direct and heads[high] - heads[low] == high - low:
                addresses[low:high] = _places(strip, self._file.numbers[heads[low:high]]) if strip.comb.outer else _address(strip)
                seen[low:high] = self._checks.wants(strip.chunk.storage)
        return Straight(addresses, seen)

    def passed(self, number: int, start: int, data: memoryview) -> None:
        self._checks.add(self._owner(number).chunk.storage, start, data)

    def take(self, number: int, data: memoryview) -> None:
        start = int(self._file.starts[number])
        span = slice(*self._file.heads[number : number + 2].tolist())
        owners, numbers = self._file.owners[span], self._file.numbers[span]
        strip = self._strips[int(owners[0])]
        if len(owners) > 1 and len(strip.comb.outer) == 1 and (owners == owners[0]).all() and (np.diff(numbers) == 1).all():
            # Teeth side by side are one box of the strip: placed together.
            (axis,) = strip.comb.outer
            rows = slice(int(numbers[0]), int(numbers[-1]) + 1)
            target = strip.target[(*(slice(None),) * axis, rows)]
            place(_slab(strip, axis, rows), strip.dtype, data, start, target)
            return
        for owner, tooth in zip(owners.tolist(), numbers.tolist(), strict=True):
            strip = self._strips[owner]
            if strip.comb.outer:
                index = tooth_index(strip, tooth)
                place(tooth_chunk(strip, index), strip.dtype, data, start, strip.target[_keep(index)])
            else:
                place(strip.chunk, strip.dtype, data, start, strip.target)
                begin = strip.chunk.storage.start + strip.comb.base // 8 - start
                self._checks.add(strip.chunk.storage, begin + start, data[begin : begin + (strip.comb.extent + 7) // 8])


def _address(strip: Strip) -> int:
    """Of the first element of the target."""
    address: int = strip.target.__array_interface__["data"][0]
    return address


def _places(strip: Strip, numbers: Ints) -> Ints:
    """The addresses of teeth that are read straight into the target."""
    places = np.full(len(numbers), _address(strip), np.int64)
    for d in reversed(strip.comb.outer):
        numbers, index = np.divmod(numbers, strip.chunk.shape[d])
        places += index * strip.target.strides[d]
    return places


def _slab(strip: Strip, axis: int, rows: slice) -> Chunk:
    """Consecutive teeth of a strip as one chunk."""
    box = strip.chunk.box
    start, stop = list(box.start), list(box.stop)
    start[axis], stop[axis] = start[axis] + rows.start, start[axis] + rows.stop
    return strip.chunk.narrow(Box(tuple(start), tuple(stop)))


def _keep(index: tuple[int | slice, ...]) -> tuple[slice, ...]:
    """The same index with every dimension kept."""
    return tuple(at if isinstance(at, slice) else slice(at, at + 1) for at in index)


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
    swapped = np.ndarray((*lengths, units, unit), np.uint8, fetched, offset // 8, (*steps, unit, 1))[..., ::-1]
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
