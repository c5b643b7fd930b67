"""Computes statistics of a tensor's numbers from its blocks, which arrive in any order.

There are two accumulators. `NumberStats` computes moments and a histogram. `DistributionBuilder`
computes a `Distribution`: moments, exponents, quantiles, kurtosis, and norms of rows and columns.
Both depend on the width and the number of the elements:

- Elements of one or two bytes have 256 or 65,536 bit patterns. The count of each pattern
  (`BitPatternCounts`) determines everything that does not depend on the order of the elements: the
  moments, every histogram and every quantile are exact, after one reading.
- Wider elements are converted to float64, in steps that stay in a core's cache. Each step has a
  mean and a sum of squared deviations, and steps are merged by the formula of Chan, Golub and
  LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979). It
  stays precise if the mean is large compared with the deviations. A histogram needs a second
  reading, because its range is known only after the first.
- For a distribution, up to 65,536 elements are held and sorted, which is exact. If there are more,
  wide elements are rounded to float32 and counted by the upper 16 bits of that: sign, exponent and
  seven bits of the fraction. So exponents are exact, and quantiles are within 1/128 of their value,
  except for numbers that float32 rounds to infinity: these share one range on either side.

NaN and infinities are counted, and left out of everything else. A complex number counts as its
absolute value, computed in float64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from holdfast.core.arrays import AnyDType, Bools, Ints, inner_product
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value

Floats = npt.NDArray[np.float64]

STEP_ELEMENTS = 1 << 17
"""The elements of one step: 1 MiB as float64. That stays in a core's cache, and each numpy call
takes long enough that threads rarely wait for the interpreter lock."""

SMALL_ELEMENTS = 1 << 16
"""Up to this many elements are sorted, and counting 16-bit patterns would need a larger table."""

MAX_PAIRED_BINS = 127
"""The most bins of a histogram that is counted by pairs of numbers. The table of pairs then has at
most 128 KiB."""

FLOAT4_PAIRS = "float4_e2m1fn_x2"
"""The dtype whose elements are bytes with two 4-bit floats each. numpy has no type for it, so such
a tensor is read as bytes, and its shape counts bytes instead of numbers."""

FLOAT32_LIMIT = 2.0**128
"""The first power of two beyond float32. Rounding to float32 makes infinity of it."""

QUANTILES = (0.0, 0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999, 1.0)
"""The quantiles of a `Distribution`."""


def has_numbers(tensor: LazyTensor) -> bool:
    """Return whether the elements are numbers. The bytes of quantised blocks are not."""
    is_number = tensor.dtype.kind in ("float", "int", "uint", "bool", "complex")
    return is_number and not tensor.traits.meta and tensor.traits.blocks is None


def is_counted_by_pattern(tensor: LazyTensor) -> bool:
    """Return whether the bit patterns of the elements are counted, so that one reading suffices."""
    if tensor.dtype.paired:
        return False
    itemsize = tensor.dtype.numpy.itemsize
    is_large = tensor.size >= SMALL_ELEMENTS
    return itemsize == 1 or (itemsize == 2 and is_large)


def _number_dtype(tensor: LazyTensor) -> AnyDType:
    """Return the dtype of the elements. Booleans are numbers of one byte."""
    if tensor.dtype.kind == "bool":
        return np.dtype(np.uint8)
    return tensor.dtype.numpy


class Moments(Value, frozen=True):
    """Moments of some numbers. `a + b` are the moments of the numbers of both."""

    finite: int = 0
    """The number of finite elements. Everything up to `squares` describes these."""
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    deviations: float = 0.0
    """The sum of the squared distances from the mean."""
    squares: float = 0.0
    """The sum of the squares."""
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    first_nan: int | None = None
    """The index of the first NaN in C order, counted from the beginning of the tensor."""
    first_infinity: int | None = None

    @classmethod
    def from_values(cls, values: np.ndarray, start: int = 0) -> Moments:
        """Compute the moments of a 1-D array of numbers of any dtype.

        Args:
            values: The numbers.
            start: The index of the first of them in the tensor.

        >>> Moments.from_values(np.array([1.0, 3.0, np.nan])).mean
        2.0
        """
        moments = cls()
        for numbers in iterate_as_float64(values):
            moments += cls.center_in_place(numbers, start)
            start += numbers.size
        return moments

    @classmethod
    def center_in_place(cls, numbers: Floats, start: int = 0) -> Moments:
        """Return the moments of some numbers, which become their distances from the mean.

        The sum of squared deviations is computed from these distances, and callers can use them for
        higher moments. If a number is not finite, the array stays as it is.

        Args:
            numbers: The numbers, at least one.
            start: The index of the first of them in the tensor.
        """
        # If a number is NaN, its minimum and maximum are NaN. If one is infinite, one of both is.
        low = float(numbers.min())
        high = float(numbers.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            nonfinite = cls.from_nonfinite(numbers, start)
            finite_numbers = numbers[np.isfinite(numbers)]
            if not finite_numbers.size:
                return nonfinite
            return nonfinite + cls.center_in_place(finite_numbers)

        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(numbers.mean())
            nonzeros = int(np.count_nonzero(numbers != 0))
            squares = inner_product(numbers, numbers)
            numbers -= mean
            deviations = inner_product(numbers, numbers)
        return cls(
            finite=numbers.size,
            low=low,
            high=high,
            mean=mean,
            deviations=deviations,
            squares=squares,
            zeros=numbers.size - nonzeros,
        )

    @classmethod
    def from_nonfinite(cls, numbers: Floats, start: int) -> Moments:
        """Count NaN and infinities, and find the first of each. Leave out everything else."""
        is_nan = np.isnan(numbers)
        is_infinite = np.isinf(numbers)
        return cls(
            nans=int(is_nan.sum()),
            infinities=int(is_infinite.sum()),
            first_nan=first_index(is_nan, start),
            first_infinity=first_index(is_infinite, start),
        )

    def __add__(self, other: Moments) -> Moments:
        """Merge the moments of two sets of numbers (Chan, Golub and LeVeque, 1979).

        The squared distance between the two means adds to the sum of squared deviations.
        """
        finite = self.finite + other.finite
        # The share of the other numbers among all finite numbers.
        other_fraction = other.finite / finite if finite else 0.0
        mean_distance = other.mean - self.mean
        between_deviations = mean_distance * self.finite * other_fraction * mean_distance
        return Moments(
            finite=finite,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            mean=self.mean + mean_distance * other_fraction,
            deviations=self.deviations + other.deviations + between_deviations,
            squares=self.squares + other.squares,
            nans=self.nans + other.nans,
            infinities=self.infinities + other.infinities,
            zeros=self.zeros + other.zeros,
            first_nan=earlier_index(self.first_nan, other.first_nan),
            first_infinity=earlier_index(self.first_infinity, other.first_infinity),
        )


def earlier_index(a: int | None, b: int | None) -> int | None:
    """Return the lower of two indices, either of which may be absent."""
    if a is None:
        return b
    if b is None:
        return a
    return min(a, b)


def first_index(mask: Bools, start: int) -> int | None:
    """Return the index of the first true element of a mask that begins at `start`."""
    if not mask.any():
        return None
    return start + int(mask.argmax())


def iterate_as_float64(values: np.ndarray) -> Iterator[Floats]:
    """Yield the numbers of a 1-D array in chunks of `STEP_ELEMENTS`, as new arrays of float64.

    A complex number becomes its absolute value. The caller may overwrite the chunks.
    """
    for start in range(0, values.size, STEP_ELEMENTS):
        chunk = values[start : start + STEP_ELEMENTS]
        # Converting a signalling NaN raises the flag for invalid operations, and the absolute value
        # of two huge float64 becomes infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            if chunk.dtype.names:
                # A complex dtype that numpy does not have is read as a pair of fields.
                real = chunk["real"].astype(np.float64)
                imaginary = chunk["imag"].astype(np.float64)
                numbers = np.hypot(real, imaginary)
            elif chunk.dtype.kind == "c":
                # The absolute value of a finite complex64 can exceed float32.
                numbers = np.abs(chunk.astype(np.complex128))
            else:
                numbers = chunk.astype(np.float64)
        yield numbers


def compute_histogram(values: np.ndarray, moments: Moments, bins: int) -> Ints:
    """Count the finite numbers of a 1-D array in bins of equal width.

    Args:
        values: The numbers.
        moments: The moments of the whole tensor. The bins cover the range from its lowest to its
            highest number, both inclusive.
        bins: The number of bins.
    """
    counts = np.zeros(bins, np.int64)
    for numbers in iterate_as_float64(values):
        if moments.nans or moments.infinities:
            numbers = numbers[np.isfinite(numbers)]
        _add_to_bins(counts, numbers, None, moments)
    return counts


def _add_to_bins(counts: Ints, numbers: Floats, weights: Ints | None, moments: Moments) -> None:
    """Add finite numbers to the counts of a histogram. The numbers are overwritten.

    Args:
        counts: The count of each bin, to which the numbers are added. All bins have the same width.
        numbers: The numbers to count.
        weights: How often each number counts. None if each counts once.
        moments: The moments of the whole tensor. Its lowest number is the start of the first bin,
            and its highest number the end of the last bin.
    """
    bins = len(counts)
    low = moments.low
    high = moments.high
    # If all numbers are equal, they belong to the bin in the middle.
    if low == high:
        counts[bins // 2] += numbers.size if weights is None else int(weights.sum())
        return

    # The difference of two float64 values can overflow.
    if not math.isfinite(high - low):
        numbers /= 2
        low /= 2
        high /= 2
    # The position of a number, counted in bins. Its integer part is the index of the bin. It is
    # computed in place, without temporary arrays.
    numbers -= low
    numbers /= high - low
    numbers *= bins
    positions = numbers

    # The highest number lies at the end of the last bin. It gets a bin of its own, which is added
    # to the last one.
    bin_counts = np.zeros(bins + 1, np.int64)
    if weights is not None:
        bin_indices = positions.astype(np.intp)
        np.add.at(bin_counts, bin_indices, weights)
    elif bins <= MAX_PAIRED_BINS:
        # The table of all pairs of bins is small enough (`MAX_PAIRED_BINS`).
        narrow_indices = positions.astype(np.int32)
        bin_counts += _count_in_pairs(narrow_indices, bins + 1)
    else:
        bin_indices = positions.astype(np.intp)
        bin_counts += np.bincount(bin_indices, minlength=bins + 1)
    counts += bin_counts[:bins]
    counts[-1] += bin_counts[bins]


def _count_in_pairs(indices: npt.NDArray[np.int32], bins: int) -> Ints:
    """Count how often each bin occurs, by counting pairs of bins.

    Most time goes into adding to a counter, and even more if the same counter was just added to.
    Pairs halve the additions and spread them over the square of the counters.

    Args:
        indices: The bin of each number.
        bins: The number of bins.
    """
    pair_count = len(indices) // 2
    first_indices = indices[:pair_count]
    second_indices = indices[pair_count : 2 * pair_count]
    unpaired_indices = indices[2 * pair_count :]

    pairs = first_indices * np.int32(bins)
    pairs += second_indices
    pair_counts = np.bincount(pairs, minlength=bins**2).reshape(bins, bins)
    first_counts = pair_counts.sum(axis=1)
    second_counts = pair_counts.sum(axis=0)
    unpaired_counts = np.bincount(unpaired_indices, minlength=bins)
    return np.asarray(first_counts + second_counts + unpaired_counts)


class NumberStats:
    """Accumulates the moments of a tensor and, if one reading is enough for it, its histogram."""

    def __init__(self, tensor: LazyTensor, bins: int, known_moments: Moments | None = None) -> None:
        """Start without any blocks. How elements are counted depends on the dtype of the tensor.

        Args:
            tensor: The tensor whose blocks are going to be added.
            bins: The number of bins of the histogram, 0 for none.
            known_moments: The moments from a first reading of the tensor, if this is the second
                reading, which computes the histogram.
        """
        self._size = tensor.size
        self._bins = bins
        self._known_moments = known_moments
        self._pattern_counts: BitPatternCounts | None = None
        if is_counted_by_pattern(tensor):
            self._pattern_counts = BitPatternCounts(_number_dtype(tensor))
        # By the start of each block: the result must not depend on the order of the threads.
        self._moments: dict[int, Moments] = {}
        self._histograms: dict[int, Ints] = {}

    def add(self, start: int, values: np.ndarray) -> None:
        """Add a block of elements to the moments, and to the histogram if its range is known.

        Args:
            start: The index of the first element in the tensor.
            values: The elements.
        """
        if self._pattern_counts is not None:
            self._pattern_counts.add(values, start)
            return

        moments = self._known_moments
        if moments is None:
            moments = Moments.from_values(values, start)
            self._moments[start] = moments
        # A block knows the range of the histogram after a first reading, or if it is the only one.
        is_range_known = self._known_moments is not None or values.size == self._size
        if self._bins and moments.finite and is_range_known:
            self._histograms[start] = compute_histogram(values, moments, self._bins)

    def result(self) -> tuple[Moments, Ints | None]:
        """Return the moments of the tensor and its histogram.

        The histogram is None if it is not wanted, if no number is finite, or if its range was not
        known yet: then a second reading is needed.
        """
        if self._pattern_counts is not None:
            moments = self._pattern_counts.moments()
            if not (self._bins and moments.finite):
                return moments, None
            return moments, self._pattern_counts.histogram(moments, self._bins)

        if self._known_moments is not None:
            moments = self._known_moments
        else:
            # Sums depend on the order, and the order of the blocks on the threads.
            block_moments = [self._moments[start] for start in sorted(self._moments)]
            moments = sum(block_moments, Moments())
        if not self._histograms:
            return moments, None
        histograms = list(self._histograms.values())
        return moments, np.sum(histograms, axis=0)


class BitPatternCounts:
    """Counts the bit patterns of elements of one or two bytes. Threads may add at the same time."""

    def __init__(self, dtype: AnyDType) -> None:
        self.dtype = dtype
        self._nonfinite = Moments()
        self._lock = threading.Lock()

    @cached_property
    def counts(self) -> Ints:
        """How often each pattern occurs, by the pattern as an unsigned integer."""
        pattern_count = 1 << (8 * self.dtype.itemsize)
        return np.zeros(pattern_count, np.int64)

    def add(self, values: np.ndarray, start: int = 0) -> None:
        """Count the bit patterns of a block.

        Args:
            values: The elements of the block, of one or two bytes each.
            start: The index of the first element in the tensor.
        """
        patterns = values.view(f"u{self.dtype.itemsize}")
        pattern_count = 1 << (8 * self.dtype.itemsize)
        block_counts = np.bincount(patterns, minlength=pattern_count)

        # The counts tell whether a block has NaN or infinities. Only then it is searched for them.
        nonfinite = Moments()
        if block_counts[nonfinite_patterns(self.dtype)].any():
            for numbers in iterate_as_float64(values):
                nonfinite += Moments.from_nonfinite(numbers, start)
                start += numbers.size

        with self._lock:
            self.counts += block_counts
            self._nonfinite += nonfinite

    def finite_numbers(self) -> tuple[Floats, Ints]:
        """Return each finite number that occurs, and how often, in the order of the patterns."""
        patterns = np.flatnonzero(self.counts)
        numbers = pattern_numbers(self.dtype)[patterns]
        is_finite = np.isfinite(numbers)
        return numbers[is_finite], self.counts[patterns][is_finite]

    def moments(self) -> Moments:
        """Return the moments of all elements.

        >>> counts = BitPatternCounts(np.dtype(np.int8))
        >>> counts.add(np.array([1, 3, 3, 5], np.int8))
        >>> counts.moments().mean, counts.moments().deviations
        (3.0, 8.0)
        """
        numbers, counts = self.finite_numbers()
        finite = int(counts.sum())
        if not finite:
            return self._nonfinite

        total = float((numbers * counts).sum())
        mean = total / finite
        distances = numbers - mean
        return self._nonfinite + Moments(
            finite=finite,
            low=float(numbers.min()),
            high=float(numbers.max()),
            mean=mean,
            deviations=float((distances * distances * counts).sum()),
            squares=float((numbers * numbers * counts).sum()),
            zeros=int(counts[numbers == 0].sum()),
        )

    def histogram(self, moments: Moments, bins: int) -> Ints:
        """Return the histogram of all elements, whose moments are given."""
        histogram = np.zeros(bins, np.int64)
        _add_to_bins(histogram, *self.finite_numbers(), moments)
        return histogram


@lru_cache(maxsize=16)
def pattern_numbers(dtype: AnyDType) -> Floats:
    """Return the number of each bit pattern of a dtype of one or two bytes."""
    pattern_count = 1 << (8 * dtype.itemsize)
    patterns = np.arange(pattern_count, dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        return patterns.view(dtype).astype(np.float64)


@lru_cache(maxsize=16)
def nonfinite_patterns(dtype: AnyDType) -> Ints:
    """Return the bit patterns of NaN and infinities. Integers have none."""
    is_finite = np.isfinite(pattern_numbers(dtype))
    return np.flatnonzero(~is_finite)


@lru_cache(maxsize=16)
def _pattern_squares(dtype: AnyDType) -> Floats:
    """Return the square of the number of each bit pattern, and 0 for NaN and infinities."""
    return _square_finite(pattern_numbers(dtype))


class Distribution(Value, frozen=True):
    """How the numbers of a tensor, or of a sample of it, are distributed."""

    count: int
    """The number of elements."""
    moments: Moments
    kurtosis: float | None
    """The excess kurtosis: the fourth central moment divided by the squared variance, minus 3. It
    is 0 for a normal distribution, and large if a few numbers are far from the mean."""
    negative: float | None
    """The share of the finite numbers that are below zero."""
    first_exponent: int
    """The lowest binary exponent of a number that is not zero."""
    exponents: tuple[int, ...]
    """How many numbers have each binary exponent, from the first one on."""
    quantiles: tuple[float, ...]
    """The values at `QUANTILES`. Empty if no number is finite."""
    exact: bool
    """Whether the quantiles are exact. Otherwise they are interpolated."""
    rows: tuple[float, ...] = ()
    """The L2 norm of each group of consecutive rows. Empty if there are less than two rows."""
    columns: tuple[float, ...] = ()
    """The L2 norm of each group of consecutive columns, in the same way."""


class HigherMoments(Value, frozen=True):
    """Sums of the third and the fourth powers of the distances from the mean, beside `Moments`."""

    cubes: float = 0.0
    fourths: float = 0.0

    @classmethod
    def from_distances(cls, distances: Floats) -> HigherMoments:
        """Compute the sums from the distances of numbers from their mean."""
        with np.errstate(over="ignore", invalid="ignore"):
            squares = distances * distances
            return cls(
                cubes=inner_product(squares, distances), fourths=inner_product(squares, squares)
            )

    def merge(self, other: HigherMoments, a: Moments, b: Moments) -> HigherMoments:
        """Return the sums for the numbers of two sets together.

        The formulas are those of Pébay ("Formulas for robust, one-pass parallel computation of
        covariances and arbitrary-order statistical moments", 2008), with his names.

        Args:
            other: The sums of the other set.
            a: The moments of the numbers of `self`.
            b: The moments of the numbers of the other set.
        """
        if not b.finite:
            return self
        if not a.finite:
            return other
        n_a = a.finite
        n_b = b.finite
        n = n_a + n_b
        delta = b.mean - a.mean
        # A power that exceeds float64 would raise an error. A product becomes infinite.
        delta_2 = delta * delta

        cubes = self.cubes + other.cubes
        cubes += delta_2 * delta * n_a * n_b * (n_a - n_b) / n**2
        cubes += 3 * delta * (n_a * b.deviations - n_b * a.deviations) / n

        count_factor = n_a * n_a - n_a * n_b + n_b * n_b
        weighted_deviations = n_a * n_a * b.deviations + n_b * n_b * a.deviations
        weighted_cubes = n_a * other.cubes - n_b * self.cubes
        fourths = self.fourths + other.fourths
        fourths += delta_2 * delta_2 * n_a * n_b * count_factor / n**3
        fourths += 6 * delta_2 * weighted_deviations / n**2
        fourths += 4 * delta * weighted_cubes / n
        return HigherMoments(cubes, fourths)


class SquareSums:
    """Sums the squares in groups of rows and groups of columns. Threads may add at the same time.

    Rows are those of the last axis. Row i of n belongs to group i * groups // n, and so do columns.
    """

    def __init__(self, shape: Sequence[int], groups: int) -> None:
        """Start with sums of zero, and find the first column of each group of columns.

        Args:
            shape: The shape of the tensor. One without axes has a single row and column.
            groups: The largest number of groups of rows, and of columns.
        """
        self._column_count = shape[-1] if shape else 1
        self._row_count = math.prod(shape[:-1])
        self.rows = np.zeros(min(groups, self._row_count))
        self.columns = np.zeros(min(groups, self._column_count))

        # The first column of each group. Dividing negative numbers rounds up.
        group_count = len(self.columns)
        negative_offsets = -np.arange(group_count) * self._column_count
        self._first_columns = -(negative_offsets // max(group_count, 1))
        self._lock = threading.Lock()

    def add(self, start: int, squares: Floats) -> None:
        """Add the squares of consecutive elements to the sums of their rows and columns.

        Args:
            start: The index of the first element in C order.
            squares: The square of each element.
        """
        width = self._column_count
        offset = 0
        while offset < squares.size:
            row, column = divmod(start + offset, width)
            remaining_count = squares.size - offset
            whole_row_count = remaining_count // width
            if column or not whole_row_count:
                # Only a part of this row was passed, or is left.
                stop = offset + min(remaining_count, width - column)
                rectangle = squares[offset:stop].reshape(1, -1)
            else:
                stop = offset + whole_row_count * width
                rectangle = squares[offset:stop].reshape(whole_row_count, width)
            self._add_rectangle(row, column, rectangle)
            offset = stop

    def _add_rectangle(self, row: int, column: int, squares: Floats) -> None:
        """Add the squares of a rectangle, whose first element is at this row and column."""
        height, width = squares.shape
        row_indices = row + np.arange(height)
        row_groups = row_indices * len(self.rows) // self._row_count
        row_sums = np.bincount(row_groups, squares.sum(axis=1), minlength=len(self.rows))

        # The groups of columns that the rectangle touches, and where each starts in the rectangle.
        first_group = int(np.searchsorted(self._first_columns, column, "right")) - 1
        stop_group = int(np.searchsorted(self._first_columns, column + width))
        groups = slice(first_group, stop_group)
        group_starts = np.maximum(self._first_columns[groups] - column, 0)
        column_sums = squares.sum(axis=0) if height > 1 else squares[0]
        group_sums = np.add.reduceat(column_sums, group_starts)
        with self._lock:
            self.rows += row_sums
            self.columns[groups] += group_sums

    def norms(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the L2 norms of the groups of rows, and of columns, if there are at least two."""
        row_norms: tuple[float, ...] = ()
        column_norms: tuple[float, ...] = ()
        if self._row_count > 1:
            row_norms = tuple(np.sqrt(self.rows).tolist())
        if self._column_count > 1:
            column_norms = tuple(np.sqrt(self.columns).tolist())
        return row_norms, column_norms


def _square_finite(numbers: Floats) -> Floats:
    """Return the square of every number, and 0 for NaN and infinities."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares: Floats = np.square(numbers)
    if not math.isfinite(float(squares.sum())):
        squares[~np.isfinite(numbers)] = 0
    return squares


class BlockSummary(Struct):
    """What a `DistributionBuilder` keeps of a block, apart from the counts of all blocks."""

    count: int
    """The number of elements in the block."""
    moments: Moments = field(default_factory=Moments)
    higher_moments: HigherMoments = field(default_factory=HigherMoments)
    numbers: Floats | None = None
    """All elements, if the tensor is small."""


class NumberRanges(Value, frozen=True, eq=False):
    """The numbers of a tensor in ascending ranges, as columns. Exact numbers have lows == highs."""

    lows: Floats
    highs: Floats
    counts: Ints
    """How many numbers are in each range."""


class DistributionBuilder:
    """Accumulates the `Distribution` of a tensor from its blocks."""

    def __init__(self, tensor: LazyTensor, element_count: int, groups: int) -> None:
        """Choose how the elements of a tensor are counted, and start without any blocks.

        Few elements are kept and sorted. Many narrow elements are counted by their bit patterns,
        and many wide ones by the upper halves of their bits as float32.

        Args:
            tensor: The tensor.
            element_count: How many of its elements are going to be added.
            groups: The number of groups of rows, and of columns, that have norms. 0 for none.
        """
        self._is_small = element_count <= SMALL_ELEMENTS
        self._counts_elements = not self._is_small and is_counted_by_pattern(tensor)
        # The upper half of a float32 is a pattern of 16 bits.
        pattern_dtype: AnyDType = np.dtype(np.uint16)
        if self._counts_elements:
            pattern_dtype = _number_dtype(tensor)
        self._pattern_counts = BitPatternCounts(pattern_dtype)
        self._square_sums: SquareSums | None = None
        # The shape of a tensor of such pairs counts bytes, so it does not tell the row of a number.
        if groups and tensor.dtype.name != FLOAT4_PAIRS:
            self._square_sums = SquareSums(tensor.shape, groups)
        self._blocks: dict[int, BlockSummary] = {}
        """The summary of each block by the index of its first element."""

    def add(self, start: int, values: np.ndarray) -> None:
        """Add a block of elements. Threads may add at the same time.

        Args:
            start: The index of the first element in the tensor.
            values: The elements.
        """
        if self._is_small:
            self._blocks[start] = self._summarize_small(start, values)
        elif self._counts_elements:
            self._blocks[start] = self._count_patterns(start, values)
        else:
            self._blocks[start] = self._summarize_wide(start, values)

    def _summarize_small(self, start: int, values: np.ndarray) -> BlockSummary:
        """Summarize a block of a small tensor, whose numbers are kept and sorted at the end."""
        steps = list(iterate_as_float64(values))
        numbers = np.concatenate([np.zeros(0), *steps])
        if self._square_sums is not None:
            self._square_sums.add(start, _square_finite(numbers))
        moments = Moments.from_values(numbers, start)
        return BlockSummary(values.size, moments, numbers=numbers)

    def _count_patterns(self, start: int, values: np.ndarray) -> BlockSummary:
        """Count the bit patterns of a block of narrow elements.

        Args:
            start: The index of the first element in the tensor.
            values: The elements, of one or two bytes each.
        """
        self._pattern_counts.add(values, start)
        if self._square_sums is not None:
            squares = _pattern_squares(values.dtype)
            patterns = values.view(f"u{values.dtype.itemsize}")
            for offset in range(0, values.size, STEP_ELEMENTS):
                step = patterns[offset : offset + STEP_ELEMENTS]
                self._square_sums.add(start + offset, squares.take(step))
        return BlockSummary(values.size)

    def _summarize_wide(self, start: int, values: np.ndarray) -> BlockSummary:
        """Summarize a block of wide elements, step by step."""
        summary = BlockSummary(values.size)
        for numbers in iterate_as_float64(values):
            self._add_step(summary, start, numbers)
            start += numbers.size
        return summary

    def _add_step(self, summary: BlockSummary, start: int, numbers: Floats) -> None:
        """Add the numbers of one step to the summary of its block.

        The array of numbers may be overwritten.

        Args:
            summary: The summary of the block.
            start: The index of the first number in the tensor.
            numbers: The numbers.
        """
        if self._square_sums is not None:
            self._square_sums.add(start, _square_finite(numbers))

        is_finite = np.isfinite(numbers)
        if not is_finite.all():
            summary.moments += Moments.from_nonfinite(numbers, start)
            numbers = numbers[is_finite]
            if not numbers.size:
                return

        self._pattern_counts.add(_take_upper_halves(numbers))
        step_moments = Moments.center_in_place(numbers)
        # The numbers are their distances from the mean now.
        step_higher_moments = HigherMoments.from_distances(numbers)
        # Merge the higher moments first: this needs the moments from before this step.
        summary.higher_moments = summary.higher_moments.merge(
            step_higher_moments, summary.moments, step_moments
        )
        summary.moments += step_moments

    def result(self) -> Distribution:
        """Return the distribution of all blocks together."""
        # Sums depend on the order, and the order of the blocks on the threads.
        blocks = [self._blocks[start] for start in sorted(self._blocks)]
        moments = Moments()
        higher_moments = HigherMoments()
        for block in blocks:
            higher_moments = higher_moments.merge(block.higher_moments, moments, block.moments)
            moments += block.moments
        if self._counts_elements:
            moments = self._pattern_counts.moments()
        ranges = self._collect_ranges(blocks, moments)
        is_exact = self._is_small or self._counts_elements
        fourths = _sum_fourths(ranges, moments) if is_exact else higher_moments.fourths

        rows: tuple[float, ...] = ()
        columns: tuple[float, ...] = ()
        if self._square_sums is not None:
            rows, columns = self._square_sums.norms()
        negative_count = int(ranges.counts[ranges.lows < 0].sum())
        near_ends = np.where(ranges.lows < 0, ranges.highs, ranges.lows)
        first_exponent, exponents = _count_exponents(near_ends, ranges.counts)
        return Distribution(
            count=sum(block.count for block in blocks),
            moments=moments,
            kurtosis=_compute_kurtosis(moments, fourths),
            negative=negative_count / moments.finite if moments.finite else None,
            first_exponent=first_exponent,
            exponents=exponents,
            quantiles=_interpolate_quantiles(ranges, moments),
            exact=is_exact,
            rows=rows,
            columns=columns,
        )

    def _collect_ranges(self, blocks: Sequence[BlockSummary], moments: Moments) -> NumberRanges:
        """Return the finite numbers of all blocks in ascending order."""
        if self._counts_elements:
            numbers, counts = self._pattern_counts.finite_numbers()
            order = np.argsort(numbers, kind="stable")
            sorted_numbers = numbers[order]
            return NumberRanges(sorted_numbers, sorted_numbers, counts[order])
        if self._is_small:
            block_numbers = [block.numbers for block in blocks if block.numbers is not None]
            numbers = np.concatenate([np.zeros(0), *block_numbers])
            finite_numbers = numbers[np.isfinite(numbers)]
            distinct_numbers, counts = np.unique(finite_numbers, return_counts=True)
            return NumberRanges(distinct_numbers, distinct_numbers, counts)
        return _find_ranges(self._pattern_counts.counts, moments)


def _sum_fourths(exact_numbers: NumberRanges, moments: Moments) -> float:
    """Return the sum of the fourth powers of the distances from the mean."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(exact_numbers.lows - moments.mean)
        fourths = squares * squares * exact_numbers.counts
        return float(fourths.sum())


def _compute_kurtosis(moments: Moments, fourths: float) -> float | None:
    """Return the excess kurtosis. None if all numbers are equal or the sums exceed float64."""
    square = moments.deviations * moments.deviations
    if not square or not math.isfinite(square) or not math.isfinite(fourths):
        return None
    return fourths * moments.finite / square - 3


def _count_exponents(numbers: Floats, counts: Ints) -> tuple[int, tuple[int, ...]]:
    """Return the lowest binary exponent, and how often it and each following one occurs.

    Zeros have no exponent.

    Args:
        numbers: Finite numbers.
        counts: How often each of them occurs.

    >>> _count_exponents(np.array([0.0, 0.5, -0.6, 3.0]), np.array([9, 1, 2, 4]))
    (-1, (3, 0, 4))
    """
    is_nonzero = numbers != 0
    _, raised_exponents = np.frexp(numbers[is_nonzero])
    # `frexp` returns fractions below 1, so its exponents are larger by 1.
    exponents = raised_exponents - 1
    if not exponents.size:
        return 0, ()

    first_exponent = int(exponents.min())
    last_exponent = int(exponents.max())
    exponent_counts = np.zeros(last_exponent - first_exponent + 1, np.int64)
    np.add.at(exponent_counts, exponents - first_exponent, counts[is_nonzero])
    return first_exponent, tuple(exponent_counts.tolist())


def _take_upper_halves(numbers: Floats) -> npt.NDArray[np.uint16]:
    """Round numbers to float32, and return the upper 16 bits of each: its bin in a histogram.

    The histogram has a fixed size of 65,536 bins, whatever the numbers are. So it can be made
    before their range is known, and histograms of blocks can be added. The 16 bits are the sign,
    the exponent and seven bits of the fraction, so a bin is at most 1/128 of its numbers wide.
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded_numbers = numbers.astype(np.float32)
    # -0.0 becomes 0.0. Its bin is that of small negative numbers, and zero is not negative.
    rounded_numbers += np.float32(0)
    upper_halves = rounded_numbers.view(np.uint32) >> 16
    return upper_halves.astype(np.uint16)


def _find_ranges(upper_half_counts: Ints, moments: Moments) -> NumberRanges:
    """Turn the histogram of `_take_upper_halves` into ranges of numbers, in ascending order.

    Numbers were rounded to float32 before they were counted, so a number next to the end of a range
    can have been counted in it although it lies slightly outside.

    Args:
        upper_half_counts: How many numbers are in each bin, by the upper half as an integer.
        moments: The moments of the numbers. No range exceeds their lowest and highest number.
    """
    upper_halves = np.flatnonzero(upper_half_counts)
    counts = upper_half_counts[upper_halves]
    near_ends, far_ends = _find_bin_ends(upper_halves)
    near_ends = np.clip(near_ends, moments.low, moments.high)
    far_ends = np.clip(far_ends, moments.low, moments.high)

    # The far end of a negative range is its lower end.
    lows = np.minimum(near_ends, far_ends)
    highs = np.maximum(near_ends, far_ends)
    order = np.argsort(lows, kind="stable")
    return NumberRanges(lows[order], highs[order], counts[order])


def _find_bin_ends(upper_halves: Ints) -> tuple[Floats, Floats]:
    """Return the end of each bin that is nearer to zero, and the end that is farther from zero.

    Args:
        upper_halves: The upper 16 bits of a float32 for each bin, never those of a NaN.
    """
    # The lower 16 bits are all 0 at the near end of a bin, and all 1 at its far end.
    near_bits = upper_halves.astype(np.uint32) << 16
    far_bits = near_bits | 0xFFFF
    near_ends = near_bits.view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        far_ends = far_bits.view(np.float32).astype(np.float64)

    # The bin of infinity holds the finite float64 that float32 rounds to infinity. Its far end
    # would be NaN, but these numbers have no upper limit.
    far_ends = np.where(np.isnan(far_ends), near_ends, far_ends)
    near_ends = np.clip(near_ends, -FLOAT32_LIMIT, FLOAT32_LIMIT)
    return near_ends, far_ends


def _interpolate_quantiles(ranges: NumberRanges, moments: Moments) -> tuple[float, ...]:
    """Return the quantiles, as if the numbers of each range were evenly spaced in it."""
    if not ranges.counts.size:
        return ()
    stop_ranks = np.cumsum(ranges.counts)
    last_rank = int(stop_ranks[-1]) - 1
    quantiles: list[float] = []
    for quantile in QUANTILES:
        # The rank of a number is its position among all numbers in ascending order.
        rank = quantile * last_rank
        range_index = int(np.searchsorted(stop_ranks, math.floor(rank), "right"))
        range_index = min(range_index, len(stop_ranks) - 1)

        count = float(ranges.counts[range_index])
        start_rank = float(stop_ranks[range_index]) - count
        fraction = (rank - start_rank + 0.5) / count
        fraction = min(max(fraction, 0.0), 1.0)
        low = ranges.lows[range_index]
        high = ranges.highs[range_index]
        quantiles.append(float(low + (high - low) * fraction))
    # The lowest and the highest number are known exactly.
    return (moments.low, *quantiles[1:-1], moments.high)
