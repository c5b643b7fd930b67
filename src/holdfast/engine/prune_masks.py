"""Which elements of a tensor a rule of pruning keeps, found in passes over it that hold a few pieces at a time.

1. Every element (or block) has a key, an unsigned integer in the order in which elements go: the bits of its absolute value, which
   are in the order of the numbers. -0.0 is 0.0. All NaN are equal and come last. Random keys are SplitMix64 of seed and index.
2. `select` finds the key of the n-th lowest from histograms of 16 more bits at a time: one pass for 16-bit floats, two for float32.
   Of equal keys the lowest index goes first; one more pass finds the index where that ends, if it ends between equals.
3. What is left of that is a `Mask`: a threshold and an index, a pattern along the last axis, or a bit for each block. It says of
   any range of elements, in C order, what stays.

These are the same masks, element for element, as those of `holdfast.torch.sparsity.masks`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from holdfast.core.tensor import LazyTensor
from holdfast.engine.computed import read_flat
from holdfast.engine.execute import run_all

__all__ = [
    "PIECE",
    "BlockMask",
    "GroupMask",
    "Keys",
    "Magnitudes",
    "Mask",
    "RandomOrder",
    "ThresholdMask",
    "block_mask",
    "common_order",
    "group_keep",
    "keep_range",
    "magnitude_keys",
    "matrix_shape",
    "pieces",
    "pruned_count",
    "random_keys",
    "threshold_masks",
]

PIECE = 1 << 19
"""Elements at a time: 4 MiB of keys as 64-bit numbers, and a histogram of 65,536 counts is small beside them."""

FEW = 1 << 20
"""As many keys as are held and sorted directly."""

ORDERS: dict[str, tuple[np.dtype[Any], np.dtype[Any], int]] = {
    "float16": (np.dtype(np.float16), np.dtype(np.uint16), 0x7C00),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16), 0x7F80),
    "float32": (np.dtype(np.float32), np.dtype(np.uint32), 0x7F80_0000),
    "float64": (np.dtype(np.float64), np.dtype(np.uint64), 0x7FF0_0000_0000_0000),
}
"""Name of a float to its numpy dtype, the integers that hold its bits, and the bits of infinity."""

SHIFTS = {15: (0,), 31: (15, 0), 63: (47, 31, 15, 0)}
"""By the width of keys: the bits below those that each histogram counts by."""

GOLDEN, MIX_1, MIX_2 = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
"""SplitMix64's constants (Steele, Lea and Flood, 2014)."""

Bools = npt.NDArray[np.bool_]
Progress = Callable[[int], None]


def pruned_count(level: float, count: int) -> int:
    """How many of `count` are pruned: rounded, half to even, and never all of them unless the level is 1.

    >>> pruned_count(0.5, 5), pruned_count(0.9, 4), pruned_count(1, 4)
    (2, 3, 4)
    """
    return count if level == 1 else max(0, min(round(level * count), count - 1))


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns as which a tensor of any shape is seen: the first axis, and all others as one."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


# Keys.


def magnitude_keys(values: np.ndarray, order: str) -> np.ndarray:
    """The order of absolute values, as the bits of a float that holds them all."""
    floats, bits, infinity = ORDERS[order]
    with np.errstate(invalid="ignore"):  # a signalling NaN that is widened
        keys: np.ndarray = values.astype(floats, copy=False).view(bits) & bits.type((1 << (8 * bits.itemsize - 1)) - 1)
    np.minimum(keys, bits.type(infinity + 1), out=keys)
    return keys


def random_keys(start: int, stop: int, seed: int) -> np.ndarray:
    """The keys of elements `start` to `stop` of a random order.

    >>> random_keys(0, 2, 0).tolist()
    [8147104208329303767, 3980143261097177850]
    """
    x = np.arange(start + 1, stop + 1, dtype=np.uint64) * GOLDEN + np.uint64(seed % (1 << 64))
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return (x ^ (x >> np.uint64(31))) >> np.uint64(1)


def common_order(dtypes: Sequence[str]) -> str:
    """The narrowest float that holds every value of these."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else "float64" if "float64" in kinds else "float32"


class Keys(Protocol):
    """The keys of one tensor, made when they are asked for."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def width(self) -> int:
        """Bits of a key."""

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges that can be read at a time, in order."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """The keys of one of these ranges."""


def pieces(count: int, align: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges that cover `count` elements and begin at multiples of `align`."""
    step = max(PIECE // align, 1) * align
    return ((start, min(start + step, count)) for start in range(0, count, step))


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The keys of a tensor's elements by their absolute values."""

    tensor: LazyTensor
    order: str

    @property
    def count(self) -> int:
        return self.tensor.size

    @property
    def width(self) -> int:
        return 8 * ORDERS[self.order][1].itemsize - 1

    def pieces(self) -> Iterator[tuple[int, int]]:
        return pieces(self.count)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.of(read_flat(self.tensor, start, stop), start)

    def of(self, values: np.ndarray, start: int) -> np.ndarray:
        """The keys of values that were read."""
        return magnitude_keys(values, self.order)


@dataclass(frozen=True, slots=True)
class RandomOrder:
    """Keys that know nothing of the values."""

    count: int
    seed: int
    width = 63

    def pieces(self) -> Iterator[tuple[int, int]]:
        return pieces(self.count)

    def read(self, start: int, stop: int) -> np.ndarray:
        return random_keys(start, stop, self.seed)

    def of(self, values: np.ndarray, start: int) -> np.ndarray:
        """The keys of values that were read."""
        return random_keys(start, start + len(values), self.seed)


@dataclass(frozen=True, slots=True)
class BlockScores:
    """The keys of a tensor's blocks, by the mean square of the elements that each has, summed one after the other in float64."""

    tensor: LazyTensor
    height: int
    width_of_block: int
    width = 63

    @property
    def grid(self) -> tuple[int, int]:
        """How many blocks there are below and beside each other."""
        rows, columns = matrix_shape(self.tensor.shape)
        return -(-rows // self.height), -(-columns // self.width_of_block)

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Whole rows of blocks, or parts of one that begin at multiples of eight, so that their bits fill bytes."""
        down, across = self.grid
        size = self.height * self.width_of_block
        if not self.count:
            return
        if across * size <= PIECE:
            step = max(PIECE // (across * size), 1) * across
            yield from ((start, min(start + step, self.count)) for start in range(0, self.count, step))
            return
        step = max(PIECE // size // 8, 1) * 8
        for row in range(down):
            yield from ((row * across + at, row * across + min(at + step, across)) for at in range(0, across, step))

    def read(self, start: int, stop: int) -> np.ndarray:
        across = self.grid[1]
        rows, columns = matrix_shape(self.tensor.shape)
        top, left = divmod(start, across)
        bottom, right = (stop - 1) // across + 1, (stop - 1) % across + 1
        left, right = (left, right) if bottom - top == 1 else (0, across)
        first, last = top * self.height, min(bottom * self.height, rows)
        begin, end = left * self.width_of_block, min(right * self.width_of_block, columns)
        if (begin, end) == (0, columns):
            values = read_flat(self.tensor, first * columns, last * columns).reshape(last - first, columns)
        else:
            values = np.stack([read_flat(self.tensor, r * columns + begin, r * columns + end) for r in range(first, last)])
        sums, counts = np.zeros((bottom - top, right - left)), np.zeros((bottom - top, right - left))
        for row in range(min(self.height, values.shape[0])):
            for column in range(min(self.width_of_block, values.shape[1])):
                with np.errstate(all="ignore"):
                    part = values[row :: self.height, column :: self.width_of_block].astype(np.float64)
                    sums[: part.shape[0], : part.shape[1]] += part * part
                counts[: part.shape[0], : part.shape[1]] += 1
        return magnitude_keys((sums / counts).reshape(-1), "float64")


# The n-th lowest.


@dataclass(frozen=True, slots=True)
class Threshold:
    """What goes: every key below this one, and of those that are equal the ones before an index, which each tensor has."""

    key: int
    cuts: tuple[int, ...]


def select(sources: Sequence[Keys], count: int, *, threads: int = 1, progress: Progress | None = None) -> Threshold:
    """The threshold below which exactly `count` of all keys are. All sources have keys of one width."""
    total = sum(source.count for source in sources)
    if count <= 0:
        return Threshold(0, (0,) * len(sources))
    work = [(number, start, stop) for number, source in enumerate(sources) for start, stop in source.pieces()]

    def sweep(use: Use) -> None:
        def task(at: int) -> Callable[[], None]:
            number, start, stop = work[at]

            def run() -> None:
                use(sources[number].read(start, stop), at)
                if progress is not None:
                    progress(stop - start)

            return run

        _run([task(at) for at in range(len(work))], threads)

    key, ties, equal = _select(sweep, len(work), sources[0].width, total, count)
    if ties == equal:
        return Threshold(key, tuple(source.count for source in sources))
    found = [0] * len(work)

    def count_equal(keys: np.ndarray, at: int) -> None:
        found[at] = int(np.count_nonzero(keys == key))

    sweep(count_equal)
    return Threshold(key, _cuts(sources, work, found, key, ties))


Use = Callable[[np.ndarray, int], None]


def _select(sweep: Callable[[Use], None], parts: int, width: int, total: int, count: int) -> tuple[int, int, int]:
    """The key, how many of those equal to it go, and how many there are."""
    lock = threading.Lock()
    prefix, known = 0, width
    for shift in SHIFTS[width] if total > FEW else ():
        bins = np.zeros(1 << (known - shift), np.int64)

        def add(
            keys: np.ndarray, at: int, *, bins: np.ndarray = bins, known: int = known, shift: int = shift, prefix: int = prefix
        ) -> None:
            among = keys if known == width else keys[(keys >> keys.dtype.type(known)) == prefix]
            low = (among >> among.dtype.type(shift)).astype(np.int64) & (len(bins) - 1)
            own = np.bincount(low, minlength=len(bins))
            with lock:
                np.add(bins, own, out=bins)

        sweep(add)
        ends = bins.cumsum()
        bucket = int(np.searchsorted(ends, count))
        count -= int(ends[bucket] - bins[bucket])
        prefix, known = (prefix << (known - shift)) + bucket, shift
        if shift == 0:
            return prefix, count, int(bins[bucket])
        if int(bins[bucket]) <= FEW and width == 63:
            break
    candidates: list[np.ndarray] = [np.empty(0, np.uint64)] * parts

    def gather(keys: np.ndarray, at: int) -> None:
        candidates[at] = keys if known == width else keys[(keys >> keys.dtype.type(known)) == prefix]

    sweep(gather)
    every = np.concatenate(candidates)
    key = int(np.partition(every, count - 1)[count - 1])
    return key, count - int(np.count_nonzero(every < key)), int(np.count_nonzero(every == key))


def _cuts(
    sources: Sequence[Keys], work: Sequence[tuple[int, int, int]], found: Sequence[int], key: int, ties: int
) -> tuple[int, ...]:
    """The index in each source before which equals go."""
    for at, (number, start, stop) in enumerate(work):
        if ties <= found[at]:
            places = np.flatnonzero(sources[number].read(start, stop) == key)
            cut = start + int(places[ties - 1]) + 1 if ties else start
            whole = [source.count for source in sources[:number]]
            return (*whole, cut, *(0 for _ in sources[number + 1 :]))
        ties -= found[at]
    raise ValueError("the tensor changed while it was read")


def _run(tasks: Sequence[Callable[[], None]], threads: int) -> None:
    if threads > 1 and len(tasks) > 1:
        run_all(tasks, threads)
    else:
        for task in tasks:
            task()


# Masks.


class Mask(Protocol):
    """What stays of one tensor."""

    @property
    def align(self) -> int:
        """Ranges begin at multiples of this, and end there or at the end."""

    def keep(self, values: np.ndarray, start: int) -> Bools:
        """What stays of elements that were read, the first of which has the index `start` in C order."""


@dataclass(frozen=True, slots=True)
class ThresholdMask:
    """Everything above a key stays, and of those equal to it what does not lie before an index."""

    keys: Magnitudes | RandomOrder
    key: int
    cut: int
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
    return [ThresholdMask(source, found.key, cut) for source, cut in zip(keys, found.cuts, strict=True)]


def block_mask(
    tensor: LazyTensor, shape: tuple[int, int], level: float, *, threads: int = 1, progress: Progress | None = None
) -> BlockMask:
    """The part `level` of the blocks goes, those of the lowest mean square."""
    scores = BlockScores(tensor, *shape)
    size = math.prod(shape)
    count = pruned_count(level, scores.count)
    found = select([scores], count, threads=threads, progress=progress and (lambda n: progress(n * size)))
    down, across = scores.grid
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

    _run([task(start, stop) for start, stop in scores.pieces()], threads)
    return BlockMask(*shape, matrix_shape(tensor.shape)[1], bits)


def keep_range(tensor: LazyTensor, mask: Mask, start: int, stop: int) -> tuple[np.ndarray, Bools]:
    """The elements [start, stop) in C order, and which of them stay."""
    first = start // mask.align * mask.align
    last = min(-(-stop // mask.align) * mask.align, tensor.size)
    values = read_flat(tensor, first, last)
    kept = mask.keep(values, first)
    return values[start - first : stop - first], kept[start - first : stop - first]
