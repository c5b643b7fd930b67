"""The n-th lowest of all keys of some tensors, exactly, in passes that hold a few pieces at a time.

1. Histograms close in on it (`order.narrow`). 16-bit floats are done with one.
2. Where few keys are left, the next pass takes them out and sorts them. The threshold of random keys is known well enough to take
   out keys around it at once.
3. Equal keys are counted by parts of the work, so that only one part is read again to find the index before which they go.

Which elements of a tensor a rule keeps is a `Mask`, what is left of the search for a threshold: a key and an index, a pattern
along the last axis, or a bit for each block. It says of any range of elements, in C order, what stays. These are the same masks,
element for element, as those of `holdfast.torch.sparsity.masks`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools, Ints
from holdfast.core.sparse.encoding import matrix_shape
from holdfast.core.tensor import LazyTensor
from holdfast.engine.computed import read_flat
from holdfast.engine.threads import run_all
from holdfast.errors import NotCommitted
from holdfast.pruning import order
from holdfast.pruning.keys import BlockScores, Keys, Magnitudes, RandomOrder, magnitude_keys
from holdfast.pruning.order import pruned_count

__all__ = [
    "BlockMask",
    "Counts",
    "GroupMask",
    "Held",
    "Mask",
    "Progress",
    "Threshold",
    "ThresholdMask",
    "block_mask",
    "group_keep",
    "hold",
    "keep_range",
    "select",
    "threshold_masks",
]

HISTOGRAM_PARTS = 32
"""Histograms of parts of the work: 256 KiB each."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """How often each key of 15 bits is there, and how often it goes."""

    there: Ints
    gone: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Threshold:
    """What goes: every key below this one, and of those that are equal the ones before an index, which each tensor has."""

    key: int
    cuts: tuple[int, ...]
    counts: Counts | None = None
    """Where a single histogram was enough."""


def select(sources: Sequence[Keys], count: int, *, threads: int = 1, progress: Progress | None = None) -> Threshold:
    """The threshold below which exactly `count` of all keys are. All sources have keys of one width."""
    if count <= 0:
        return Threshold(0, (0,) * len(sources))
    sweep = Sweep(sources, threads, progress)
    around = sources[0].around(count) if len(sources) == 1 else None
    found = _between(sweep, count, around) if around else None
    return found or _narrowed(sweep, count)


class Sweep:
    """Passes over the keys of several tensors, on threads."""

    def __init__(self, sources: Sequence[Keys], threads: int, progress: Progress | None) -> None:
        self.sources, self._threads, self._progress = sources, threads, progress
        self.width = sources[0].width
        self.total = sum(source.count for source in sources)
        self.work = [(number, start, stop) for number, source in enumerate(sources) for start, stop in source.pieces()]

    def read(self, at: int) -> np.ndarray:
        """The keys of one piece of the work."""
        number, start, stop = self.work[at]
        return self.sources[number].read(start, stop)

    def each(self, use: Callable[[np.ndarray, int], None]) -> None:
        """Hand the keys of every piece, with its place in the work, to a function."""

        def task(at: int) -> Callable[[], None]:
            def run() -> None:
                use(self.read(at), at)
                if self._progress is not None:
                    self._progress(self.work[at][2] - self.work[at][1])

            return run

        run_all([task(at) for at in range(len(self.work))], self._threads)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Keys that were computed once."""

    keys: npt.NDArray[np.uint64]
    ranges: Sequence[tuple[int, int]]
    width = 63

    @property
    def count(self) -> int:
        return len(self.keys)

    def pieces(self) -> Iterator[tuple[int, int]]:
        return iter(self.ranges)

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        return self.keys[start:stop]

    def around(self, count: int) -> None:
        return None


def hold(source: Keys, *, threads: int = 1, progress: Progress | None = None) -> Held:
    """All keys of a tensor, for further passes."""
    sweep = Sweep([source], threads, progress)
    held = Held(np.empty(source.count, np.uint64), [(start, stop) for _, start, stop in sweep.work])

    def put(keys: np.ndarray, at: int) -> None:
        held.keys[slice(*held.ranges[at])] = keys

    sweep.each(put)
    return held


def _narrowed(sweep: Sweep, count: int) -> Threshold:
    """From histograms of more and more bits."""
    passes: list[Ints] = []

    def histogram(prefix: int, known: int, shift: int) -> Ints:
        passes.append(_histogram(sweep, prefix, known, shift=shift))
        bins: Ints = passes[-1].sum(axis=0)
        return bins

    found = order.narrow(histogram, count, total=sweep.total, width=sweep.width)
    if found.known == 0:
        parts = passes[-1]
        bucket = found.prefix % parts.shape[1]
        threshold = _among_equals(sweep, found.prefix, found.rank, equal=parts[:, bucket].tolist())
        return threshold if passes[1:] else replace(threshold, counts=_counts(parts.sum(axis=0), bucket, found.rank))
    candidates: list[np.ndarray] = [np.empty(0, np.uint64)] * len(sweep.work)

    def gather(keys: np.ndarray, at: int) -> None:
        candidates[at] = _with_prefix(keys, found.prefix, found.known, width=sweep.width)

    sweep.each(gather)
    return _sorted(sweep, candidates, found.rank)


def _counts(bins: Ints, key: int, ties: int) -> Counts:
    gone = np.where(np.arange(len(bins)) < key, bins, 0)
    gone[key] = ties
    return Counts(bins, gone)


def _with_prefix(keys: np.ndarray, prefix: int, known: int, *, width: int) -> np.ndarray:
    """The keys that begin with these bits, all but the last `known`."""
    return keys if known == width else keys[(keys >> keys.dtype.type(known)) == prefix]


def _histogram(sweep: Sweep, prefix: int, known: int, *, shift: int) -> Ints:
    """How many keys with a prefix there are by their next bits; by parts of the work if these bits are the last."""
    parts = np.zeros((min(HISTOGRAM_PARTS, len(sweep.work)) if shift == 0 else 1, 1 << (known - shift)), np.int64)
    lock = threading.Lock()

    def add(keys: np.ndarray, at: int) -> None:
        low = _with_prefix(keys, prefix, known, width=sweep.width)
        if shift:
            low = low >> low.dtype.type(shift)
        if known < sweep.width:
            low = low & low.dtype.type(parts.shape[1] - 1)
        own = np.bincount(low.astype(np.int64), minlength=parts.shape[1])
        row = parts[at * len(parts) // len(sweep.work)]
        with lock:
            np.add(row, own, out=row)

    sweep.each(add)
    return parts


def _between(sweep: Sweep, count: int, around: tuple[int, int]) -> Threshold | None:
    """From the keys of a range [low, high) alone; None if the threshold is not there, or they are many."""
    low, high = around
    below = [0] * len(sweep.work)
    candidates: list[np.ndarray] = [np.empty(0, np.uint64)] * len(sweep.work)
    if sweep.total * (high - low) >> sweep.width > order.SORTED_KEYS:
        return None

    def gather(keys: np.ndarray, at: int) -> None:
        # One comparison for both ends: what is below wraps around.
        candidates[at] = keys[keys - np.uint64(low) < high - low]
        below[at] = int(np.count_nonzero(keys < low))

    sweep.each(gather)
    rank = count - sum(below)
    return _sorted(sweep, candidates, rank) if 0 < rank <= sum(map(len, candidates)) else None


def _sorted(sweep: Sweep, candidates: Sequence[np.ndarray], count: int) -> Threshold:
    """The `count`-th lowest of keys that were taken out of the pieces of the work."""
    every = np.concatenate(candidates)
    key = int(np.partition(every, count - 1)[count - 1])
    equal = [int(np.count_nonzero(keys == key)) for keys in candidates]
    return _among_equals(sweep, key, count - int(np.count_nonzero(every < key)), equal=equal)


def _among_equals(sweep: Sweep, key: int, ties: int, *, equal: Sequence[int]) -> Threshold:
    """Where the first `ties` of the keys equal to this one end, knowing how many each part of the work has."""
    if ties == sum(equal):
        return Threshold(key, tuple(source.count for source in sweep.sources))
    ends = np.cumsum(equal)
    part = int(np.searchsorted(ends, ties))
    ties -= int(ends[part]) - equal[part]
    for at in range(-(-part * len(sweep.work) // len(equal)), len(sweep.work)):
        places = np.flatnonzero(sweep.read(at) == key)
        if ties <= len(places):
            number, start, _ = sweep.work[at]
            whole = [source.count for source in sweep.sources[:number]]
            cut = start + int(places[ties - 1]) + 1
            return Threshold(key, (*whole, cut, *(0 for _ in sweep.sources[number + 1 :])))
        ties -= len(places)
    raise NotCommitted(
        "a tensor changed while its threshold was looked for; nothing was written: start again when nobody writes to it"
    )


HELD_SCORES = 1 << 22
"""Scores of blocks that are held, 32 MiB; those of a tensor with more blocks are summed up again in each pass."""


class Mask(Protocol):
    """What stays of one tensor."""

    @property
    def align(self) -> int:
        """Ranges begin at multiples of this, and end there or at the end."""

    def keep(self, values: np.ndarray, start: int) -> Bools:
        """What stays of elements that were read, the first of which has the index `start` in C order."""


@dataclass(frozen=True, slots=True, eq=False)
class ThresholdMask:
    """Everything above a key stays, and of those equal to it what does not lie before an index."""

    keys: Magnitudes | RandomOrder
    key: int
    cut: int
    counts: Counts | None = None
    """How often each key is there, where that is known of this tensor alone."""
    align = 1

    def keep(self, values: np.ndarray, start: int) -> Bools:
        keys = self.keys.of(values, start)
        kept: Bools = keys >= self.key
        before = min(max(self.cut - start, 0), len(keys))
        np.greater(keys[:before], self.key, out=kept[:before])
        return kept


@dataclass(frozen=True, slots=True)
class GroupMask:
    """The `n` largest of every `m` neighbours along the last axis stay."""

    n: int
    m: int
    order: str

    @property
    def align(self) -> int:
        return self.m

    def keep(self, values: np.ndarray, start: int) -> Bools:
        return group_keep(magnitude_keys(values, self.order).reshape(-1, self.m), self.m - self.n).reshape(-1)


def group_keep(keys: np.ndarray, zeros: int) -> Bools:
    """All but the lowest `zeros` of each row, of equals the first.

    >>> group_keep(np.array([[3, 1, 1, 2], [0, 0, 0, 0]]), 2).astype(int).tolist()
    [[1, 0, 0, 1], [0, 0, 1, 1]]
    """
    m = keys.shape[1]
    if m > 16:
        kept = np.ones(keys.shape, np.bool_)
        np.put_along_axis(kept, np.argsort(keys, axis=1, kind="stable")[:, :zeros], False, axis=1)
        return kept
    columns = [np.ascontiguousarray(keys[:, i]) for i in range(m)]
    # How many go before each: comparing every pair once is quicker than sorting very short rows.
    ranks = np.zeros((m, len(keys)), np.uint8)
    for i in range(m):
        for j in range(i + 1, m):
            later = columns[i] > columns[j]
            ranks[i] += later
            ranks[j] += ~later
    return np.ascontiguousarray((ranks >= zeros).T)


@dataclass(frozen=True, slots=True, eq=False)
class BlockMask:
    """Blocks stay or go as a whole."""

    height: int
    width: int
    columns: int
    bits: npt.NDArray[np.uint8]
    """A row for each row of blocks, a bit for each block, the first in the lowest bit; set for what stays."""
    align = 1

    def keep(self, values: np.ndarray, start: int) -> Bools:
        stop = start + len(values)
        first, last = start // self.columns, -(-stop // self.columns)
        begin, end = (start - first * self.columns, stop - first * self.columns) if last - first == 1 else (0, self.columns)
        top, left = first // self.height, begin // self.width // 8 * 8
        some = self.bits[top : (last - 1) // self.height + 1, left // 8 : -(-end // self.width // 8) + 1]
        kept = np.unpackbits(some, axis=1, bitorder="little").view(np.bool_)
        wide = np.repeat(kept, self.width, axis=1)[:, begin - left * self.width : end - left * self.width]
        rows = wide[np.arange(first, last) // self.height - top]
        at = start - first * self.columns - begin
        return rows.reshape(-1)[at : at + len(values)]


def threshold_masks(
    keys: Sequence[Magnitudes | RandomOrder], level: float, *, threads: int = 1, progress: Progress | None = None
) -> list[ThresholdMask]:
    """One threshold over all tensors: the part `level` of their elements goes."""
    total = sum(source.count for source in keys)
    found = select(keys, pruned_count(level, total), threads=threads, progress=progress)
    counts = found.counts if len(keys) == 1 else None
    return [ThresholdMask(source, found.key, cut, counts) for source, cut in zip(keys, found.cuts, strict=True)]


def block_mask(
    tensor: LazyTensor, shape: tuple[int, int], level: float, *, threads: int = 1, progress: Progress | None = None
) -> BlockMask:
    """The part `level` of the blocks goes, those of the lowest mean square."""
    blocks = BlockScores(tensor, *shape)
    size = math.prod(shape)
    count = pruned_count(level, blocks.count)
    told = progress and (lambda n: progress(n * size))
    scores = hold(blocks, threads=threads, progress=told) if count > 0 and blocks.count <= HELD_SCORES else blocks
    found = select([scores], count, threads=threads, progress=told)
    down, across = blocks.grid
    bits = np.zeros((down, -(-across // 8)), np.uint8)

    def task(start: int, stop: int) -> Callable[[], None]:
        def run() -> None:
            keys = scores.read(start, stop)
            kept = np.where(np.arange(start, stop) < found.cuts[0], keys > found.key, keys >= found.key)
            row, column = divmod(start, across)
            if stop - start >= across:
                bits[row : row + (stop - start) // across] = np.packbits(kept.reshape(-1, across), axis=1, bitorder="little")
            else:
                packed = np.packbits(kept, bitorder="little")
                bits[row, column // 8 : column // 8 + len(packed)] = packed
            if progress is not None:
                progress((stop - start) * size)

        return run

    run_all([task(start, stop) for start, stop in scores.pieces()], threads)
    return BlockMask(*shape, matrix_shape(tensor.shape)[1], bits)


def keep_range(tensor: LazyTensor, mask: Mask, start: int, *, stop: int) -> tuple[np.ndarray, Bools]:
    """The elements [start, stop) in C order, and which of them stay."""
    first = start // mask.align * mask.align
    last = min(-(-stop // mask.align) * mask.align, tensor.size)
    values = read_flat(tensor, first, last)
    kept = mask.keep(values, first)
    return values[start - first : stop - first], kept[start - first : stop - first]
