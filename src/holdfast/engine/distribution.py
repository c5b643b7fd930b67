"""How the numbers of a tensor are distributed: exponents, signs, quantiles, tails, norms of rows and columns. One reading.

Three ways, by what is there:

    few        up to 65,536 elements: all of them at once, sorted. Exact
    counted    elements of one or two bytes: how often each bit pattern is there (`numbers.Counts`). Exact
    wide       moments as float64 in steps, as `numbers.Moments` has them, and the fourth power beside them. Exponents and signs
               are counted by the upper 16 bits as float32, which have them in full and seven bits of the fraction: so they are
               exact, and a quantile is right to 1/128 of itself. The least and the largest are exact

A tensor is looked at as rows of its last dimension; the norms are those of groups of neighbouring rows, and of columns. What is not
finite is counted and left out of everything else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from msgspec import Struct, field

from holdfast.core.arrays import Ints, inner
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.numbers import (
    COUNTED_ELEMENTS,
    STEP_ELEMENTS,
    BitPatternCounts,
    Moments,
    counts_patterns,
    pattern_values,
    widened,
)

QUANTILES = (0.0, 0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999, 1.0)

Floats = np.ndarray


class Distribution(Value, frozen=True):
    """What is known of the numbers of one tensor, or of a sample of them."""

    count: int
    """Elements that were looked at."""
    moments: Moments
    kurtosis: float | None
    """The fourth moment over the square of the second, less three: 0 for a bell curve, large where a few numbers are far out."""
    negative: float | None
    """The share of the finite numbers that are below zero."""
    first_exponent: int
    exponents: tuple[int, ...]
    """How many numbers have each binary exponent, from the first on; zeros have none."""
    quantiles: tuple[float, ...]
    """At `QUANTILES`; empty where nothing is finite."""
    exact: bool
    """Whether the quantiles are numbers that are there."""
    rows: tuple[float, ...] = ()
    columns: tuple[float, ...] = ()


class Tails(Value, frozen=True):
    """Sums of the third and the fourth powers of the distances from the mean, beside `Moments`; `plus` is that of both together."""

    cubes: float = 0.0
    fourths: float = 0.0

    @classmethod
    def of(cls, apart: Floats) -> Tails:
        """Of distances from the mean."""
        with np.errstate(over="ignore", invalid="ignore"):
            squares = apart * apart
            return cls(inner(squares, apart), inner(squares, squares))

    def plus(self, other: Tails, a: Moments, b: Moments) -> Tails:
        """Those of two parts whose moments are `a` and `b` (Pébay, 2008)."""
        count = a.finite + b.finite
        if not a.finite or not b.finite:
            return self if a.finite else other
        d, n, m = b.mean - a.mean, a.finite, b.finite
        # By multiplying: a power that is beyond float64 would be an error, and a product is infinite.
        square, cubes, fourths = d * d, self.cubes + other.cubes, self.fourths + other.fourths
        cubes += square * d * n * m * (n - m) / count**2 + 3 * d * (n * b.deviations - m * a.deviations) / count
        fourths += square * square * n * m * (n * n - n * m + m * m) / count**3
        fourths += 6 * square * (n * n * b.deviations + m * m * a.deviations) / count**2
        fourths += 4 * d * (n * other.cubes - m * self.cubes) / count
        return Tails(cubes, fourths)


class BlockSummary(Struct):
    """What one block of elements came to."""

    count: int = 0
    moments: Moments = field(default_factory=Moments)
    tails: Tails = field(default_factory=Tails)
    few: Floats | None = None
    """All elements, where they are few."""


class Norms:
    """Sums of squares of groups of rows and of columns. Threads may add at once."""

    def __init__(self, shape: Sequence[int], groups: int) -> None:
        self.width = shape[-1] if shape else 1
        self.height = math.prod(shape[:-1])
        self.rows = np.zeros(min(groups, self.height))
        self.columns = np.zeros(min(groups, self.width))
        # The first column of each group.
        self._first = -(-np.arange(len(self.columns)) * self.width // max(len(self.columns), 1))
        self._lock = threading.Lock()

    def add(self, start: int, squares: Floats) -> None:
        """Add the squares of elements from `start` on."""
        at = 0
        while at < squares.size:
            row, column = divmod(start + at, self.width)
            whole = (squares.size - at) // self.width if not column else 0
            if whole:
                self._add(row, 0, squares[at : at + whole * self.width].reshape(whole, self.width))
                at += whole * self.width
            else:
                stop = min(squares.size, at + self.width - column)
                self._add(row, column, squares[at:stop].reshape(1, -1))
                at = stop

    def _add(self, row: int, column: int, block: Floats) -> None:
        height, width = block.shape
        tall = np.bincount((row + np.arange(height)) * len(self.rows) // self.height, block.sum(axis=1), minlength=len(self.rows))
        across = block.sum(axis=0) if height > 1 else block[0]
        first = int(np.searchsorted(self._first, column, "right")) - 1
        last = int(np.searchsorted(self._first, column + width))
        cuts = np.maximum(self._first[first:last] - column, 0)
        wide = np.add.reduceat(across, cuts)
        with self._lock:
            self.rows += tall
            self.columns[first:last] += wide


class Gathering:
    """One tensor while its blocks are looked at, in any order and on any threads; `finish` says what they come to."""

    def __init__(self, tensor: LazyTensor, count: int, groups: int) -> None:
        """`count` elements of it are going to be looked at; `groups` rows and columns have norms, or none where it is 0."""
        self._few = count <= COUNTED_ELEMENTS
        # Pairs of 4-bit floats are looked at one by one.
        self._norms = Norms(tensor.shape, groups) if groups and tensor.dtype.name != "float4_e2m1fn_x2" else None
        self._counted = not self._few and counts_patterns(tensor)
        self._counts: BitPatternCounts | None = None
        self._lock = threading.Lock()

    def look(self, start: int, values: np.ndarray) -> BlockSummary:
        """Look at the elements from `start` on, in C order."""
        if self._few:
            return self._look_at_few(start, values)
        if self._counted:
            self._tally(values.dtype).add(values)
            if self._norms is not None:
                table, patterns = pattern_squares(values.dtype), values.view(f"u{values.dtype.itemsize}")
                for at in range(0, values.size, STEP_ELEMENTS):
                    self._norms.add(start + at, table.take(patterns[at : at + STEP_ELEMENTS]))
            return BlockSummary(values.size)
        made = BlockSummary(values.size)
        for number, wide in enumerate(widened(values)):
            self._look_at_step(made, start + number * STEP_ELEMENTS, wide)
        return made

    def _look_at_few(self, start: int, values: np.ndarray) -> BlockSummary:
        every = [*widened(values)]
        wide = np.concatenate(every) if every else np.zeros(0)
        if self._norms is not None:
            self._norms.add(start, _squared(wide))
        return BlockSummary(values.size, few=wide)

    def _look_at_step(self, made: BlockSummary, start: int, wide: Floats) -> None:
        """The numbers as float64, which are changed."""
        if self._norms is not None:
            self._norms.add(start, _squared(wide))
        finite = np.isfinite(wide)
        if not finite.all():
            nans = int(np.count_nonzero(np.isnan(wide)))
            odd = Moments(nans=nans, infinities=wide.size - int(np.count_nonzero(finite)) - nans)
            made.moments += odd
            wide = wide[finite]
            if not wide.size:
                return
        with np.errstate(over="ignore", under="ignore"):
            prefixes = wide.astype(np.float32).view(np.uint32) >> 16
        self._tally(np.dtype(np.uint16)).add(prefixes.astype(np.uint16))
        found = Moments.of_step(wide)  # leaves the distances from the mean
        made.tails = made.tails.plus(Tails.of(wide), made.moments, found)
        made.moments += found

    def _tally(self, dtype: np.dtype[np.generic]) -> BitPatternCounts:
        with self._lock:
            if self._counts is None:
                self._counts = BitPatternCounts(dtype)
            return self._counts

    def finish(self, parts: Sequence[BlockSummary]) -> Distribution:
        """What all blocks come to, given in the order of elements."""
        count = sum(part.count for part in parts)
        if self._counted and self._counts is not None:
            return self._of_values(count, *_in_order(*self._counts.values()), self._counts.moments())
        if self._few:
            wide = np.concatenate([part.few for part in parts if part.few is not None]) if parts else np.zeros(0)
            values, often = np.unique(wide[np.isfinite(wide)], return_counts=True)
            return self._of_values(count, values, often, Moments.of(wide) if wide.size else Moments())
        moments, tails = Moments(), Tails()
        for part in parts:
            tails = tails.plus(part.tails, moments, part.moments)
            moments += part.moments
        prefixes = self._counts.there if self._counts is not None else np.zeros(1 << 16, np.int64)
        low, high, often = _bins(prefixes, moments)
        first, exponents = _exponents(np.where(low < 0, high, low) if low.size else low, often)
        negative = int(often[low < 0].sum()) / moments.finite if moments.finite else None
        quantiles = _interpolated(low, high, often, moments=moments)
        return Distribution(
            count, moments, _kurtosis(moments, tails.fourths), negative, first, exponents, quantiles, False, *self._sizes()
        )

    def _of_values(self, count: int, values: Floats, often: Ints, moments: Moments) -> Distribution:
        """Of numbers in ascending order, and how often each is there."""
        if not values.size:
            return Distribution(count, moments, None, None, 0, (), (), True, *self._sizes())
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.square(values - moments.mean)
            fourths = float((squares * squares * often).sum())
        first, exponents = _exponents(values, often)
        ends = np.cumsum(often)
        places = np.searchsorted(ends, [math.floor(q * (int(ends[-1]) - 1)) for q in QUANTILES], "right")
        quantiles = tuple(float(value) for value in values[places])
        negative = int(often[values < 0].sum()) / moments.finite
        return Distribution(
            count, moments, _kurtosis(moments, fourths), negative, first, exponents, quantiles, True, *self._sizes()
        )

    def _sizes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The norms of the rows and of the columns."""
        if self._norms is None:
            return (), ()
        rows, columns = (tuple(np.sqrt(found).tolist()) for found in (self._norms.rows, self._norms.columns))
        return rows if self._norms.height > 1 else (), columns if self._norms.width > 1 else ()


def _kurtosis(moments: Moments, fourths: float) -> float | None:
    square = moments.deviations * moments.deviations
    if not square or not math.isfinite(square) or not math.isfinite(fourths):
        return None
    return fourths * moments.finite / square - 3


def _squared(wide: Floats) -> Floats:
    """Squares, of what is not finite none."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares: Floats = np.square(wide)
    if not math.isfinite(float(squares.sum())):
        squares[~np.isfinite(wide)] = 0
    return squares


@lru_cache(maxsize=16)
def pattern_squares(dtype: np.dtype[np.generic]) -> Floats:
    """The square of the number that each pattern of one or two bytes stands for."""
    return _squared(pattern_values(dtype))


def _in_order(values: Floats, often: Ints) -> tuple[Floats, Ints]:
    order = np.argsort(values, kind="stable")
    return values[order], often[order]


def _exponents(values: Floats, often: Ints) -> tuple[int, tuple[int, ...]]:
    """The least binary exponent of numbers other than zero, and how many have it and each one above it.

    >>> _exponents(np.array([0.0, 0.5, -0.6, 3.0]), np.array([9, 1, 2, 4]))
    (-1, (3, 0, 4))
    """
    some = values != 0
    exponents = np.frexp(values[some])[1] - 1
    if not exponents.size:
        return 0, ()
    first = int(exponents.min())
    counts = np.zeros(int(exponents.max()) - first + 1, np.int64)
    np.add.at(counts, exponents - first, often[some])
    return first, tuple(counts.tolist())


def _bins(prefixes: Ints, moments: Moments) -> tuple[Floats, Floats, Ints]:
    """The ranges of numbers that have each upper half of a float32, in ascending order, and how many are in each."""
    some = np.flatnonzero(prefixes)
    near = (some.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):  # an infinity with a fraction is a NaN
        far = ((some.astype(np.uint32) << 16) | 0xFFFF).view(np.float32).astype(np.float64)
    # What is beyond float32 came to be infinite on the way; it lies between the largest float32 and the largest that is there.
    near = np.clip(near, moments.low, moments.high)
    far = np.where(np.isfinite(far), np.clip(far, moments.low, moments.high), np.clip(near, moments.low, moments.high))
    low, high = np.minimum(near, far), np.maximum(near, far)
    order = np.argsort(low, kind="stable")
    return low[order], high[order], prefixes[some][order]


def _interpolated(low: Floats, high: Floats, often: Ints, *, moments: Moments) -> tuple[float, ...]:
    """Quantiles from numbers that are known to lie in ranges, as if they lay evenly in each."""
    if not often.size:
        return ()
    ends = np.cumsum(often)
    total, made = int(ends[-1]), []
    for q in QUANTILES:
        rank = q * (total - 1)
        at = min(int(np.searchsorted(ends, math.floor(rank), "right")), len(ends) - 1)
        inside = (rank - float(ends[at] - often[at]) + 0.5) / float(often[at])
        made.append(float(low[at] + (high[at] - low[at]) * min(max(inside, 0.0), 1.0)))
    return (moments.low, *made[1:-1], moments.high)
