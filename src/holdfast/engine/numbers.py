"""What the numbers of a tensor are, a block at a time: moments, counts of bit patterns, histograms.

1. Elements of one or two bytes have 256 or 65,536 patterns. How often each of them is there (`BitPatternCounts`) says all that does
   not depend on places: the least, the moments, every histogram, every quantile; exactly, and from one reading.
2. Wider ones are looked at as float64, in steps that stay in a core's cache: what is made of a step is never written to memory.
   Each step gives its count, mean and sum of squared deviations, which merge by the formula of Chan, Golub and LeVeque (`Moments`);
   it loses nothing where a mean is large beside the deviations. A histogram takes a second reading, for its ends are known then.

`walk` reads the blocks of tensors on threads, for whoever wants to look at them. NaN and infinities are counted and left out of
everything else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from holdfast.core.arrays import Ints, inner
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.checksums import Progress
from holdfast.engine.compare import blocks, elements
from holdfast.engine.threads import computing, default_threads
from holdfast.engine.transfer import run_reads
from holdfast.errors import located

T = TypeVar("T")

STEP_ELEMENTS = 1 << 17
"""Elements that are looked at together: 1 MiB as float64, near a core's own cache, in calls long enough that threads do not wait
for each other's turn at the interpreter."""

COUNTED_ELEMENTS = 1 << 16
"""Tensors of 16-bit elements from this size on are counted by patterns; of fewer, the table would be the larger one."""


PAIRED_BINS = 128
"""Histograms of fewer bins are drawn for two numbers at a time, by a table of at most 128 KiB."""


def countable(tensor: LazyTensor) -> bool:
    """Whether the elements are numbers that are there."""
    return tensor.dtype.kind in ("float", "int", "uint", "bool", "complex") and not tensor.traits.meta


def counts_patterns(tensor: LazyTensor) -> bool:
    """Whether the elements are narrow enough, and as many, that their patterns are counted: then one reading tells all."""
    width = tensor.dtype.numpy.itemsize
    return not tensor.dtype.paired and (width == 1 or (width == 2 and tensor.size >= COUNTED_ELEMENTS))


class Moments(Value, frozen=True):
    """What is known of some numbers; `+` is that of both together."""

    finite: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    deviations: float = 0.0
    """The sum of the squares of the distances from the mean."""
    squares: float = 0.0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """The moments of a 1-D array of numbers of any dtype.

        >>> Moments.of(np.array([1.0, 3.0, np.nan])).mean
        2.0
        """
        total = cls()
        for wide in widened(values):
            total += cls.of_step(wide)
        return total

    @classmethod
    def of_step(cls, wide: np.ndarray) -> Moments:
        """Of float64, which are changed: where all are finite, into their distances from the mean."""
        nans = infinities = 0
        # NaN comes out of both, and an infinity out of one of them.
        low, high = float(wide.min()), float(wide.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = np.isfinite(wide)
            nans = int(np.count_nonzero(np.isnan(wide)))
            infinities = wide.size - int(np.count_nonzero(finite)) - nans
            wide = wide[finite]
            if not wide.size:
                return cls(nans=nans, infinities=infinities)
            low, high = float(wide.min()), float(wide.max())
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(wide.mean())
            zeros = wide.size - int(np.count_nonzero(wide != 0))
            squares = inner(wide, wide)
            wide -= mean
            deviations = inner(wide, wide)
        return cls(wide.size, low, high, mean, deviations, squares, nans, infinities, zeros)

    def __add__(self, other: Moments) -> Moments:
        count = self.finite + other.finite
        apart = other.mean - self.mean
        share = other.finite / count if count else 0.0
        return Moments(
            count,
            min(self.low, other.low),
            max(self.high, other.high),
            self.mean + apart * share,
            self.deviations + other.deviations + apart * apart * self.finite * share,
            self.squares + other.squares,
            self.nans + other.nans,
            self.infinities + other.infinities,
            self.zeros + other.zeros,
        )


def widened(values: np.ndarray) -> Iterator[np.ndarray]:
    """A 1-D array of numbers as float64, a step at a time, each in memory of its own; complex numbers by their absolute values."""
    for at in range(0, values.size, STEP_ELEMENTS):
        step = values[at : at + STEP_ELEMENTS]
        if step.dtype.names:
            yield np.hypot(step["real"].astype(np.float64), step["imag"].astype(np.float64))
            continue
        with np.errstate(invalid="ignore"):  # a signalling NaN that is widened
            wide = np.abs(step).astype(np.float64) if step.dtype.kind == "c" else step.astype(np.float64)
        yield wide


def histogram(values: np.ndarray, found: Moments, bins: int) -> Ints:
    """How many numbers of a 1-D array fall into bins of one width from the least to the largest of `found`, both in."""
    counts = np.zeros(bins, np.int64)
    for wide in widened(values):
        _bin(counts, wide[np.isfinite(wide)] if found.nans or found.infinities else wide, None, found=found)
    return counts


def _bin(counts: Ints, wide: np.ndarray, often: Ints | None, *, found: Moments) -> None:
    """Add finite numbers, which are changed, to the bins; each counts so often."""
    bins = len(counts)
    if found.low == found.high:
        counts[bins // 2] += wide.size if often is None else int(often.sum())
        return
    low, span = found.low, found.high - found.low
    if not math.isfinite(span):  # from the least to the largest float64 is farther than a float64 can say
        wide /= 2
        low, span = low / 2, found.high / 2 - low / 2
    wide -= low
    wide /= span
    wide *= bins
    # The largest number comes to lie at the end of the last bin: in one of its own, which is added to the last.
    made = np.zeros(bins + 1, np.int64)
    if often is not None:
        np.add.at(made, wide.astype(np.intp), often)
    elif bins < PAIRED_BINS:
        places = wide.astype(np.int32)
        half = len(places) // 2
        # Two numbers at a time, by a table of two dimensions: to add to a bin is what takes long, the more so to the same again.
        pairs = places[:half] * np.int32(bins + 1)
        pairs += places[half : 2 * half]
        both = np.bincount(pairs, minlength=len(made) ** 2).reshape(len(made), len(made))
        made += both.sum(axis=0) + both.sum(axis=1) + np.bincount(places[2 * half :], minlength=len(made))
    else:
        made += np.bincount(wide.astype(np.intp), minlength=bins + 1)
    counts += made[:bins]
    counts[-1] += made[bins]


class BitPatternCounts:
    """How often each bit pattern of one or two bytes is there. Threads may add at once."""

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self.dtype = dtype
        self.there: Ints = np.zeros(1 << (8 * dtype.itemsize), np.int64)
        """By the pattern, as an unsigned integer."""
        self._lock = threading.Lock()

    def add(self, values: np.ndarray) -> None:
        """Count the elements of a 1-D array of this dtype."""
        own = np.bincount(values.view(f"u{self.dtype.itemsize}"), minlength=len(self.there))
        with self._lock:
            self.there += own

    def values(self) -> tuple[np.ndarray, Ints]:
        """The finite numbers that are there, as float64, in the order of their patterns; and how often each is."""
        some = np.flatnonzero(self.there)
        wide, often = pattern_values(self.dtype)[some], self.there[some]
        finite = np.isfinite(wide)
        return (wide, often) if finite.all() else (wide[finite], often[finite])

    def moments(self) -> Moments:
        """Of all that was counted.

        >>> counts = Counts(np.dtype(np.int8))
        >>> counts.add(np.array([1, 3, 3, 5], np.int8))
        >>> counts.moments().mean, counts.moments().deviations
        (3.0, 8.0)
        """
        wide, often = self.values()
        total, finite = int(self.there.sum()), int(often.sum())
        nans = int(self.there[np.isnan(pattern_values(self.dtype))].sum())
        if not finite:
            return Moments(nans=nans, infinities=total - nans)
        mean = float((wide * often).sum()) / finite
        apart = wide - mean
        return Moments(
            finite,
            float(wide.min()),
            float(wide.max()),
            mean,
            float((apart * apart * often).sum()),
            float((wide * wide * often).sum()),
            nans,
            total - finite - nans,
            int(often[wide == 0].sum()),
        )

    def histogram(self, found: Moments, bins: int) -> Ints:
        """The bins of all that was counted, whose moments are `found`."""
        counts = np.zeros(bins, np.int64)
        wide, often = self.values()
        _bin(counts, wide, often, found=found)
        return counts


@lru_cache(maxsize=16)
def pattern_values(dtype: np.dtype[np.generic]) -> np.ndarray:
    """The number that each pattern of one or two bytes stands for, as float64."""
    with np.errstate(invalid="ignore"):
        return np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype).astype(np.float64)


class TensorBlocks(Generic[T]):
    """What is made of the blocks of each tensor, until the tensor is whole."""

    def __init__(self, blocks: Sequence[int], finish: Callable[[int, list[T]], None]) -> None:
        """`blocks` is how many each tensor has."""
        self._finish = finish
        self._left = [*blocks]
        self._parts: list[dict[int, T]] = [{} for _ in blocks]
        self._lock = threading.Lock()

    def add(self, number: int, start: int, part: T) -> None:
        """What one block came to; the last one of a tensor finishes it."""
        with self._lock:
            parts = self._parts[number]
            parts[start] = part
            self._left[number] -= 1
            whole = not self._left[number]
        if whole:
            self._parts[number] = {}
            self._finish(number, [parts[at] for at in sorted(parts)])


def walk(
    tensors: Sequence[LazyTensor],
    look: Callable[[int, np.ndarray], T],
    finish: Callable[[int, list[T]], None],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Read tensors in C order, a block of their elements at a time, on threads.

    `look` is called with the number of a tensor and the elements of a block as a 1-D array, which may be changed. When all blocks
    of a tensor were looked at, `finish` is called with what that gave, in the order of elements: so nothing depends on which thread
    was quicker. Only tensors that are begun and not finished hold anything. One without elements is never looked at.
    """
    every = [[*blocks(tensor.size)] for tensor in tensors]
    walk_ranges(
        tensors, every, lambda number, start, values: look(number, values), finish=finish, threads=threads, progress=progress
    )


def walk_ranges(
    tensors: Sequence[LazyTensor],
    ranges: Sequence[Sequence[tuple[int, int]]],
    look: Callable[[int, int, np.ndarray], T],
    *,
    finish: Callable[[int, list[T]], None],
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """The same of ranges of each tensor's elements, in ascending order: `look` is told where each begins."""
    found = TensorBlocks([len(own) for own in ranges], finish)

    def task(number: int, start: int, stop: int) -> Callable[[], None]:
        tensor = tensors[number]

        def run() -> None:
            with located(tensor=tensor.name):
                values = elements(tensor, start, stop)
                with computing():
                    part = look(number, start, values)
                found.add(number, start, part)
            if progress is not None:
                progress(tensor.dtype.nbytes(stop - start))

        return run

    work = [task(number, start, stop) for number, own in enumerate(ranges) for start, stop in own]
    if work:
        run_reads(work, threads or default_threads(), stores=[tensor.source.store for tensor in tensors])
