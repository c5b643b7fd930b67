"""What the numbers of a tensor are, a block at a time: moments, histograms (`NumberStats`), and how they are distributed.

1. Elements of one or two bytes have 256 or 65,536 patterns. How often each of them is there (`BitPatternCounts`) says all that does
   not depend on places: the least, the moments, every histogram, every quantile; exactly, and from one reading.
2. Wider ones are looked at as float64, in steps that stay in a core's cache: what is made of a step is never written to memory.
   Each step gives its count, mean and sum of squared deviations, which merge by the formula of Chan, Golub and LeVeque (`Moments`);
   it loses nothing where a mean is large beside the deviations. A histogram takes a second reading, for its ends are known then.

The distribution (`Distributed`) is exponents, signs, quantiles, tails, norms of rows and columns; one reading, and three ways:

    few        up to 65,536 elements: all of them at once, sorted. Exact
    counted    elements of one or two bytes, by their patterns. Exact
    wide       moments, and the fourth power beside them. Exponents and signs are counted by the upper 16 bits as float32, which
               have them in full and seven bits of the fraction: so they are exact, and a quantile is right to 1/128 of itself. The
               least and the largest are exact

A tensor is looked at as rows of its last dimension; the norms are those of groups of neighbouring rows, and of columns. NaN and
infinities are counted and left out of everything else. `engine/scan.py` reads the blocks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import numpy as np
from msgspec import Struct, field

from holdfast.core.arrays import Bools, Ints, inner
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value

STEP_ELEMENTS = 1 << 17
"""Elements that are looked at together: 1 MiB as float64, near a core's own cache, in calls long enough that threads do not wait
for each other's turn at the interpreter."""

COUNTED_ELEMENTS = (
    1 << 16
)  # 16-bit tensors from this size on are counted by patterns; else the table would be larger.


PAIRED_BINS = 128  # Histograms of fewer bins are drawn for two numbers at a time, by a table of at most 128 KiB.


def countable(tensor: LazyTensor) -> bool:
    """Whether the elements are numbers. The bytes of quantised blocks are none: decode them first."""
    is_number = tensor.dtype.kind in ("float", "int", "uint", "bool", "complex")
    return is_number and not tensor.traits.meta and tensor.traits.blocks is None


def counts_patterns(tensor: LazyTensor) -> bool:
    """Whether the elements are narrow enough, and as many, that their patterns are counted: then one reading tells all."""
    width = tensor.dtype.numpy.itemsize
    return not tensor.dtype.paired and (
        width == 1 or (width == 2 and tensor.size >= COUNTED_ELEMENTS)
    )


def number_type(tensor: LazyTensor) -> np.dtype[np.generic]:
    """Of a tensor's elements as they are looked at: booleans are numbers of a byte."""
    return np.dtype(np.uint8) if tensor.dtype.kind == "bool" else tensor.dtype.numpy


class Moments(Value, frozen=True):
    """What is known of some numbers; `+` is that of both together."""

    finite: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    deviations: float = 0.0  # The sum of the squares of the distances from the mean.
    squares: float = 0.0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    first_nan: int | None = None
    """The index of the first NaN in C order, counted from the beginning of the tensor."""
    first_infinity: int | None = None

    @classmethod
    def of(cls, values: np.ndarray, start: int = 0) -> Moments:
        """The moments of a 1-D array of numbers of any dtype, whose first element has the index `start`.

        >>> Moments.of(np.array([1.0, 3.0, np.nan])).mean
        2.0
        """
        total = cls()
        for wide in widened(values):
            total += cls.of_step(wide, start)
            start += wide.size
        return total

    @classmethod
    def of_step(cls, wide: np.ndarray, start: int = 0) -> Moments:
        """Of float64, which are changed: where all are finite, into their distances from the mean."""
        # NaN comes out of both, and an infinity out of one of them.
        low, high = float(wide.min()), float(wide.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            nonfinite = cls.of_nonfinite(wide, start)
            wide = wide[np.isfinite(wide)]
            return nonfinite + cls.of_step(wide) if wide.size else nonfinite
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(wide.mean())
            zeros = wide.size - int(np.count_nonzero(wide != 0))
            squares = inner(wide, wide)
            wide -= mean
            deviations = inner(wide, wide)
        return cls(wide.size, low, high, mean, deviations, squares, zeros=zeros)

    @classmethod
    def of_nonfinite(cls, wide: np.ndarray, start: int) -> Moments:
        """Count NaN and infinities and find the first of each; everything else is left out."""
        is_nan, is_infinite = np.isnan(wide), np.isinf(wide)
        return cls(
            nans=int(is_nan.sum()),
            infinities=int(is_infinite.sum()),
            first_nan=first_index(is_nan, start),
            first_infinity=first_index(is_infinite, start),
        )

    def __add__(self, other: Moments) -> Moments:
        count = self.finite + other.finite
        apart = other.mean - self.mean
        share = other.finite / count if count else 0.0
        return Moments(
            count, min(self.low, other.low), max(self.high, other.high), self.mean + apart * share,
            self.deviations + other.deviations + apart * self.finite * share * apart, self.squares + other.squares,
            self.nans + other.nans, self.infinities + other.infinities, self.zeros + other.zeros,
            earlier_index(self.first_nan, other.first_nan), earlier_index(self.first_infinity, other.first_infinity),
        )  # fmt: skip


def earlier_index(a: int | None, b: int | None) -> int | None:
    """Return the lower of two indices, either of which may be absent."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def first_index(mask: Bools, start: int) -> int | None:
    """Return the index of the first true element of a mask that begins at `start`."""
    return start + int(mask.argmax()) if mask.any() else None


def widened(values: np.ndarray) -> Iterator[np.ndarray]:
    """A 1-D array of numbers as float64, a step at a time, each in memory of its own; complex numbers by their absolute values."""
    for at in range(0, values.size, STEP_ELEMENTS):
        step = values[at : at + STEP_ELEMENTS]
        if step.dtype.names:
            yield np.hypot(step["real"].astype(np.float64), step["imag"].astype(np.float64))
            continue
        with np.errstate(invalid="ignore"):  # a signalling NaN that is widened
            wide = (
                np.abs(step).astype(np.float64)
                if step.dtype.kind == "c"
                else step.astype(np.float64)
            )
        yield wide


def histogram(values: np.ndarray, found: Moments, bins: int) -> Ints:
    """How many numbers of a 1-D array fall into bins of one width from the least to the largest of `found`, both in."""
    counts = np.zeros(bins, np.int64)
    for wide in widened(values):
        _bin(
            counts,
            wide[np.isfinite(wide)] if found.nans or found.infinities else wide,
            None,
            found=found,
        )
    return counts


def _bin(counts: Ints, wide: np.ndarray, often: Ints | None, *, found: Moments) -> None:
    """Add finite numbers, which are changed, to the bins; each counts so often."""
    bins = len(counts)
    if found.low == found.high:
        counts[bins // 2] += wide.size if often is None else int(often.sum())
        return
    low, span = found.low, found.high - found.low
    if not math.isfinite(
        span
    ):  # from the least to the largest float64 is farther than a float64 can say
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
        made += (
            both.sum(axis=0)
            + both.sum(axis=1)
            + np.bincount(places[2 * half :], minlength=len(made))
        )
    else:
        made += np.bincount(wide.astype(np.intp), minlength=bins + 1)
    counts += made[:bins]
    counts[-1] += made[bins]


class NumberStats:
    """The moments of a tensor's numbers, and their histogram where one reading is enough for it, or the moments are known."""

    def __init__(self, tensor: LazyTensor, bins: int, known: Moments | None = None) -> None:
        self._size, self._bins, self._known = tensor.size, bins, known
        self._counts = BitPatternCounts(number_type(tensor)) if counts_patterns(tensor) else None
        self._parts: dict[int, Moments] = {}
        self._drawn: dict[int, Ints] = {}

    def add(self, start: int, values: np.ndarray) -> None:
        if self._counts is not None:
            self._counts.add(values, start)
            return
        found = self._known
        if found is None:
            found = self._parts[start] = Moments.of(values, start)
        if self._bins and found.finite and (self._known is not None or values.size == self._size):
            self._drawn[start] = histogram(values, found, self._bins)

    def result(self) -> tuple[Moments, Ints | None]:
        if self._counts is None:
            found = self._known or sum(
                (self._parts[start] for start in sorted(self._parts)), Moments()
            )
            return found, np.sum([*self._drawn.values()], axis=0) if self._drawn else None
        found = self._counts.moments()
        return found, self._counts.histogram(
            found, self._bins
        ) if self._bins and found.finite else None


class BitPatternCounts:
    """How often each bit pattern of one or two bytes is there. Threads may add at once."""

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self.dtype = dtype
        self._nonfinite = Moments()
        self._lock = threading.Lock()

    @cached_property
    def there(self) -> Ints:
        """By the pattern, as an unsigned integer."""
        return np.zeros(1 << (8 * self.dtype.itemsize), np.int64)

    def add(self, values: np.ndarray, start: int = 0) -> None:
        """Count the patterns of a block whose first element has the index `start`."""
        own = np.bincount(
            values.view(f"u{self.dtype.itemsize}"), minlength=1 << (8 * self.dtype.itemsize)
        )

        # The counts say whether a block has NaN or infinities; only then is it searched for them.
        nonfinite = Moments()
        if own[nonfinite_patterns(self.dtype)].any():
            for wide in widened(values):
                nonfinite += Moments.of_nonfinite(wide, start)
                start += wide.size

        with self._lock:
            self.there += own
            self._nonfinite += nonfinite

    def values(self) -> tuple[np.ndarray, Ints]:
        """The finite numbers that are there, as float64, in the order of their patterns; and how often each is."""
        some = np.flatnonzero(self.there)
        wide, often = pattern_values(self.dtype)[some], self.there[some]
        finite = np.isfinite(wide)
        return (wide, often) if finite.all() else (wide[finite], often[finite])

    def moments(self) -> Moments:
        """Moments of all that was counted.

        >>> counts = BitPatternCounts(np.dtype(np.int8))
        >>> counts.add(np.array([1, 3, 3, 5], np.int8))
        >>> counts.moments().mean, counts.moments().deviations
        (3.0, 8.0)
        """
        wide, often = self.values()
        finite = int(often.sum())
        if not finite:
            return self._nonfinite
        mean = float((wide * often).sum()) / finite
        apart = wide - mean
        return self._nonfinite + Moments(
            finite, float(wide.min()), float(wide.max()), mean, float((apart * apart * often).sum()),
            float((wide * wide * often).sum()), zeros=int(often[wide == 0].sum()),
        )  # fmt: skip

    def histogram(self, found: Moments, bins: int) -> Ints:
        counts = np.zeros(bins, np.int64)
        _bin(counts, *self.values(), found=found)
        return counts


@lru_cache(maxsize=16)
def pattern_values(dtype: np.dtype[np.generic]) -> np.ndarray:
    """The number that each pattern of one or two bytes stands for, as float64."""
    with np.errstate(invalid="ignore"):
        return (
            np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
            .view(dtype)
            .astype(np.float64)
        )


@lru_cache(maxsize=16)
def nonfinite_patterns(dtype: np.dtype[np.generic]) -> Ints:
    """The patterns that stand for NaN or an infinity; integers have none."""
    return np.flatnonzero(~np.isfinite(pattern_values(dtype)))


QUANTILES = (0.0, 0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999, 1.0)

Floats = np.ndarray


class Distribution(Value, frozen=True):
    count: int
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
        with np.errstate(over="ignore", invalid="ignore"):
            squares = apart * apart
            return cls(inner(squares, apart), inner(squares, squares))

    def plus(self, other: Tails, a: Moments, b: Moments) -> Tails:
        """The tails of two parts together, whose moments are `a` and `b` (Pébay, 2008)."""
        count = a.finite + b.finite
        if not a.finite or not b.finite:
            return self if a.finite else other
        d, n, m = b.mean - a.mean, a.finite, b.finite
        # By multiplying: a power that is beyond float64 would be an error, and a product is infinite.
        square, cubes, fourths = d * d, self.cubes + other.cubes, self.fourths + other.fourths
        cubes += (
            square * d * n * m * (n - m) / count**2
            + 3 * d * (n * b.deviations - m * a.deviations) / count
        )
        fourths += square * square * n * m * (n * n - n * m + m * m) / count**3
        fourths += 6 * square * (n * n * b.deviations + m * m * a.deviations) / count**2
        fourths += 4 * d * (n * other.cubes - m * self.cubes) / count
        return Tails(cubes, fourths)


class BlockSummary(Struct):
    count: int = 0
    moments: Moments = field(default_factory=Moments)
    tails: Tails = field(default_factory=Tails)
    few: Floats | None = None


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
        tall = np.bincount(
            (row + np.arange(height)) * len(self.rows) // self.height,
            block.sum(axis=1),
            minlength=len(self.rows),
        )
        across = block.sum(axis=0) if height > 1 else block[0]
        first = int(np.searchsorted(self._first, column, "right")) - 1
        last = int(np.searchsorted(self._first, column + width))
        cuts = np.maximum(self._first[first:last] - column, 0)
        wide = np.add.reduceat(across, cuts)
        with self._lock:
            self.rows += tall
            self.columns[first:last] += wide


class Distributed:
    def __init__(self, tensor: LazyTensor, count: int, groups: int) -> None:
        """`count` elements of it are going to be looked at; `groups` rows and columns have norms, or none where it is 0."""
        self._few = count <= COUNTED_ELEMENTS
        # Pairs of 4-bit floats are looked at one by one.
        self._norms = (
            Norms(tensor.shape, groups)
            if groups and tensor.dtype.name != "float4_e2m1fn_x2"
            else None
        )
        self._counted = not self._few and counts_patterns(tensor)
        # Of wide numbers, the upper halves as float32.
        self._counts = BitPatternCounts(
            number_type(tensor) if self._counted else np.dtype(np.uint16)
        )
        self._parts: dict[int, BlockSummary] = {}

    def add(self, start: int, values: np.ndarray) -> None:
        self._parts[start] = self._look(start, values)

    def _look(self, start: int, values: np.ndarray) -> BlockSummary:
        if self._few:
            return self._look_at_few(start, values)
        if self._counted:
            self._counts.add(values, start)
            if self._norms is not None:
                table, patterns = (
                    pattern_squares(values.dtype),
                    values.view(f"u{values.dtype.itemsize}"),
                )
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
        if self._norms is not None:
            self._norms.add(start, _squared(wide))
        finite = np.isfinite(wide)
        if not finite.all():
            made.moments += Moments.of_nonfinite(wide, start)
            wide = wide[finite]
            if not wide.size:
                return
        with np.errstate(over="ignore", under="ignore"):
            prefixes = wide.astype(np.float32).view(np.uint32) >> 16
        self._counts.add(prefixes.astype(np.uint16))
        found = Moments.of_step(wide)  # leaves the distances from the mean
        made.tails = made.tails.plus(Tails.of(wide), made.moments, found)
        made.moments += found

    def result(self) -> Distribution:
        parts = [self._parts[start] for start in sorted(self._parts)]
        count = sum(part.count for part in parts)
        if self._counted:
            values, often = self._counts.values()
            order = np.argsort(values, kind="stable")
            return self._of_values(count, values[order], often[order], self._counts.moments())
        if self._few:
            wide = (
                np.concatenate([part.few for part in parts if part.few is not None])
                if parts
                else np.zeros(0)
            )
            values, often = np.unique(wide[np.isfinite(wide)], return_counts=True)
            moments = Moments()
            for start in sorted(self._parts):
                few = self._parts[start].few
                if few is not None:
                    moments += Moments.of(few, start)
            return self._of_values(count, values, often, moments)
        moments, tails = Moments(), Tails()
        for part in parts:
            tails = tails.plus(part.tails, moments, part.moments)
            moments += part.moments
        low, high, often = _bins(self._counts.there, moments)
        first, exponents = _exponents(np.where(low < 0, high, low) if low.size else low, often)
        negative = int(often[low < 0].sum()) / moments.finite if moments.finite else None
        quantiles = _interpolated(low, high, often, moments=moments)
        size = _kurtosis(moments, tails.fourths)
        return Distribution(
            count, moments, size, negative, first, exponents, quantiles, False, *self._sizes()
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
        places = np.searchsorted(
            ends, [math.floor(q * (int(ends[-1]) - 1)) for q in QUANTILES], "right"
        )
        quantiles = tuple(float(value) for value in values[places])
        negative = int(often[values < 0].sum()) / moments.finite
        size = _kurtosis(moments, fourths)
        return Distribution(
            count, moments, size, negative, first, exponents, quantiles, True, *self._sizes()
        )

    def _sizes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self._norms is None:
            return (), ()
        rows, columns = (
            tuple(np.sqrt(found).tolist()) for found in (self._norms.rows, self._norms.columns)
        )
        return rows if self._norms.height > 1 else (), columns if self._norms.width > 1 else ()


def _kurtosis(moments: Moments, fourths: float) -> float | None:
    square = moments.deviations * moments.deviations
    if not square or not math.isfinite(square) or not math.isfinite(fourths):
        return None
    return fourths * moments.finite / square - 3


def _squared(wide: Floats) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        squares: Floats = np.square(wide)
    if not math.isfinite(float(squares.sum())):
        squares[~np.isfinite(wide)] = 0
    return squares


@lru_cache(maxsize=16)
def pattern_squares(dtype: np.dtype[np.generic]) -> Floats:
    return _squared(pattern_values(dtype))


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
    far = np.where(
        np.isfinite(far),
        np.clip(far, moments.low, moments.high),
        np.clip(near, moments.low, moments.high),
    )
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
