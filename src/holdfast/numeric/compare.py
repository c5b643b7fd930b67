"""Compares the elements of two tensors of one shape.

Blocks of elements are compared one by one. Each becomes a `Tally`, and the tallies of blocks add up
to that of the tensor, in any order and on any thread.

- Elements of one dtype are the same if their bits are. So a NaN with the same bits is unchanged,
  and -0.0 differs from 0.0. Elements of two dtypes are the same if their values are equal or NaN.
- Floats are compared as float64, which contains every value of the narrower types. Integers are
  compared exactly, across signs and widths. An integer and a float are compared as float64.
- NaN and infinities are counted if they appeared or disappeared. If one did, the relative
  difference and the cosine are undefined. NaN and infinities in the same place of both tensors are
  left out of these two.
- Squares and products are summed as float64 within a block, scaled by a power of two, and as exact
  fractions across blocks. So no magnitude overflows, and none is lost beside that of another block.

A block is compared in steps that stay in a core's cache. Most steps contain finite numbers of at
most 32 bits, for which float64 needs no scaling (`FiniteTally`). All others are compared by
`compare_step`, which handles any numbers, and which is the oracle in tests of the faster way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools, inner_product
from holdfast.core.digest import canonicalize
from holdfast.core.dtype import DType
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.numeric.statistics import FLOAT4_PAIRS, earlier_index, first_index

Words = npt.NDArray[np.uint64]

STEP_ELEMENTS = 1 << 17
"""The elements of one step: 1 MiB as float64 for each tensor. That stays in a core's cache, and
each numpy call takes long enough that threads rarely wait for the interpreter lock."""

MAX_RATIO = Fraction(2) ** 1000
"""Larger ratios are reported as infinite: fractions above 2^1024 cannot be converted to float64."""

UNSCALED_EXPONENT = 400
"""Numbers between 2^-400 and 2^400 are not scaled: sums of their squares stay within float64."""

SMALLEST_FLOAT64 = 5e-324


@dataclass(frozen=True, slots=True)
class ContentDifference:
    """How the elements of two tensors, a and b, differ."""

    changed: int
    """The number of elements that are not the same."""
    total: int
    max_abs: int | float | None
    """The largest |a − b|, exact for integers. Infinite if an infinity changed. Pairs with a NaN do
    not count. None if every pair that changed has one."""
    max_rel: float | None
    """The largest |a − b| / max(|a|, |b|): 0 to 2, or infinite if an infinity changed. None as for
    `max_abs`."""
    cosine: float | None
    """The cosine of the angle between the tensors as vectors, without the elements that are not
    finite in both. None if one tensor is all zeros, or if NaN or infinities appeared or
    disappeared."""
    nans: int
    """The number of pairs with at least one NaN."""
    relative: float | None = None
    """‖a − b‖ / ‖a‖. None if a is all zeros, or if NaN or infinities appeared or disappeared."""
    nan_appeared: int = 0
    """The number of elements that are NaN in b but not in a."""
    nan_disappeared: int = 0
    """The number of elements that are NaN in a but not in b."""
    inf_appeared: int = 0
    """The number of elements that are infinite in b but not in a."""
    inf_disappeared: int = 0
    """The number of elements that are infinite in a but not in b."""
    first_nan: int | None = None
    """The index in C order of the first element that is NaN in b but not in a."""
    first_inf: int | None = None
    """The index in C order of the first element that is infinite in b but not in a."""

    @property
    def appeared(self) -> int:
        """The number of elements that became NaN or infinite."""
        return self.nan_appeared + self.inf_appeared

    @property
    def size(self) -> float:
        """The size of the change, for sorting. Infinite if `relative` is None."""
        if not self.changed:
            return 0.0
        if self.relative is None:
            return math.inf
        return self.relative


class NonfiniteChanges(Value, frozen=True):
    """Counts of NaN and infinities, and where the first ones appeared. `+` merges two blocks."""

    pairs_with_nan: int = 0
    """The number of pairs with at least one NaN."""
    nan_appeared: int = 0
    nan_disappeared: int = 0
    inf_appeared: int = 0
    inf_disappeared: int = 0
    inf_sign_flipped: int = 0
    """The number of elements that are infinite in both tensors, with different signs."""
    first_nan: int | None = None
    """The index of the first NaN that appeared, counted from the beginning of the tensor."""
    first_inf: int | None = None
    """The index of the first infinity that appeared."""

    @classmethod
    def from_numbers(
        cls, a: np.ndarray, b: np.ndarray, is_changed: Bools, start: int
    ) -> NonfiniteChanges:
        """Count the NaN and infinities of two arrays, and those that appeared or disappeared.

        Args:
            a: Floats or complex numbers of the first tensor.
            b: Those of the second tensor.
            is_changed: Which of them are not the same.
            start: The index of the first of them in the tensors.
        """
        nan_a = np.isnan(a)
        nan_b = np.isnan(b)
        # A complex number with a NaN in it is NaN, even if its other part is infinite.
        inf_a = np.isinf(a) & ~nan_a
        inf_b = np.isinf(b) & ~nan_b
        nan_appeared = nan_b & ~nan_a
        inf_appeared = inf_b & ~inf_a
        return cls(
            pairs_with_nan=int((nan_a | nan_b).sum()),
            nan_appeared=int(nan_appeared.sum()),
            nan_disappeared=int((nan_a & ~nan_b).sum()),
            inf_appeared=int(inf_appeared.sum()),
            inf_disappeared=int((inf_a & ~inf_b).sum()),
            inf_sign_flipped=int((inf_a & inf_b & is_changed).sum()),
            first_nan=first_index(nan_appeared, start),
            first_inf=first_index(inf_appeared, start),
        )

    @property
    def has_changes(self) -> bool:
        """Whether a NaN or an infinity appeared or disappeared, or an infinity changed its sign."""
        nan_changes = self.nan_appeared + self.nan_disappeared
        inf_changes = self.inf_appeared + self.inf_disappeared + self.inf_sign_flipped
        return nan_changes + inf_changes > 0

    def __add__(self, other: NonfiniteChanges) -> NonfiniteChanges:
        """Add the counts of two blocks of the same pair of tensors, in any order.

        Of the indices at which a NaN or an infinity first appeared, keep the lower one.
        """
        return NonfiniteChanges(
            pairs_with_nan=self.pairs_with_nan + other.pairs_with_nan,
            nan_appeared=self.nan_appeared + other.nan_appeared,
            nan_disappeared=self.nan_disappeared + other.nan_disappeared,
            inf_appeared=self.inf_appeared + other.inf_appeared,
            inf_disappeared=self.inf_disappeared + other.inf_disappeared,
            inf_sign_flipped=self.inf_sign_flipped + other.inf_sign_flipped,
            first_nan=earlier_index(self.first_nan, other.first_nan),
            first_inf=earlier_index(self.first_inf, other.first_inf),
        )


class ProductSums(Value, frozen=True):
    """Sums of products of finite elements, as exact fractions. `+` merges two blocks."""

    dot: Fraction = Fraction(0)
    """The sum of a * b. For complex numbers, the real part of the inner product."""
    squares_a: Fraction = Fraction(0)
    squares_b: Fraction = Fraction(0)
    squared_distance: Fraction = Fraction(0)
    """The sum of (a - b)². If little changed, the three other sums determine only its rounding."""

    @classmethod
    def from_numbers(cls, a: np.ndarray, b: np.ndarray) -> ProductSums:
        """Compute the sums of two arrays of finite numbers."""
        # The difference of two finite numbers can exceed float64. That of their halves cannot.
        half_distances = a / 2 - b / 2
        return cls(
            dot=_sum_products(a, b),
            squares_a=_sum_squares(a),
            squares_b=_sum_squares(b),
            squared_distance=_sum_squares(half_distances) * 4,
        )

    def relative(self) -> float | None:
        """Return ‖a − b‖ / ‖a‖, or None if a is all zeros."""
        if not self.squares_a:
            return None
        ratio = self.squared_distance / self.squares_a
        if ratio >= MAX_RATIO:
            return math.inf
        return math.sqrt(ratio)

    def cosine(self) -> float | None:
        """Return the cosine of the angle between a and b, or None if one of them is all zeros."""
        if not self.squares_a or not self.squares_b:
            return None
        squared_cosine = self.dot * self.dot / (self.squares_a * self.squares_b)
        # The sums of blocks are rounded, so the ratio can exceed 1.
        magnitude = min(math.sqrt(squared_cosine), 1.0)
        if self.dot < 0:
            return -magnitude
        return magnitude

    def __add__(self, other: ProductSums) -> ProductSums:
        """Merge the sums of two blocks."""
        return ProductSums(
            dot=self.dot + other.dot,
            squares_a=self.squares_a + other.squares_a,
            squares_b=self.squares_b + other.squares_b,
            squared_distance=self.squared_distance + other.squared_distance,
        )


class Tally(Value, frozen=True):
    """The differences in a block. `+` merges two blocks."""

    changed: int = 0
    total: int = 0
    max_abs: int | float = 0
    max_rel: float = 0.0
    changed_nans: int = 0
    """The number of changed pairs with a NaN. These have no difference."""
    nonfinite: NonfiniteChanges = NonfiniteChanges()
    sums: ProductSums = ProductSums()

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            changed=self.changed + other.changed,
            total=self.total + other.total,
            max_abs=max(self.max_abs, other.max_abs),
            max_rel=max(self.max_rel, other.max_rel),
            changed_nans=self.changed_nans + other.changed_nans,
            nonfinite=self.nonfinite + other.nonfinite,
            sums=self.sums + other.sums,
        )

    def difference(self) -> ContentDifference:
        """Return the differences in the form that users see."""
        max_abs: int | float | None = self.max_abs
        max_rel: float | None = self.max_rel
        # Pairs with a NaN have no difference.
        if 0 < self.changed == self.changed_nans:
            max_abs = None
            max_rel = None

        nonfinite = self.nonfinite
        cosine: float | None = None
        relative: float | None = None
        if not nonfinite.has_changes:
            cosine = self.sums.cosine()
            relative = self.sums.relative()
        return ContentDifference(
            changed=self.changed,
            total=self.total,
            max_abs=max_abs,
            max_rel=max_rel,
            cosine=cosine,
            nans=nonfinite.pairs_with_nan,
            relative=relative,
            nan_appeared=nonfinite.nan_appeared,
            nan_disappeared=nonfinite.nan_disappeared,
            inf_appeared=nonfinite.inf_appeared,
            inf_disappeared=nonfinite.inf_disappeared,
            first_nan=nonfinite.first_nan,
            first_inf=nonfinite.first_inf,
        )


def element_dtype(tensor: LazyTensor) -> DType:
    """Return the dtype of the numbers in a tensor. In float4_e2m1fn_x2 that is float4_e2m1fn."""
    dtype, _ = canonicalize(tensor.dtype, tensor.shape)
    return dtype


def view_as_numbers(tensor: LazyTensor, array: np.ndarray) -> np.ndarray:
    """Return elements of a tensor as an array that numpy can compute with."""
    if tensor.dtype.name == FLOAT4_PAIRS:
        # The first of two numbers is in the lower half of their byte.
        nibbles = np.stack((array & 15, array >> 4), axis=1)
        float4 = element_dtype(tensor).numpy
        return nibbles.reshape(-1).view(float4)
    if array.dtype == np.bool_:
        return array.view(np.uint8)
    return array


def compare_elements(a: np.ndarray, b: np.ndarray, *, compare_bits: bool, start: int = 0) -> Tally:
    """Compare two 1-D arrays of one length, in steps that stay in a core's cache.

    Real numbers of at most 32 bits are compared by `FiniteTally`, which is faster. It refuses a
    step with a NaN or an infinity. Such a step, and all other dtypes, are left to `compare_step`.

    Args:
        a: Elements of the first tensor.
        b: Elements of the second tensor.
        compare_bits: Whether elements are the same if their bits are. Otherwise they are the same
            if their values are. Only arrays of one dtype can be compared by their bits.
        start: The index of the first elements in their tensors.
    """
    finite_tally: FiniteTally | None = None
    if _is_narrow(a) and _is_narrow(b):
        is_exact = _is_integer(a) and _is_integer(b)
        finite_tally = FiniteTally(compare_bits, is_exact=is_exact)

    tally = Tally()
    for offset in range(0, a.size, STEP_ELEMENTS):
        step_a = a[offset : offset + STEP_ELEMENTS]
        step_b = b[offset : offset + STEP_ELEMENTS]
        if finite_tally is not None and finite_tally.try_add(step_a, step_b):
            continue
        tally += compare_step(step_a, step_b, compare_bits=compare_bits, start=start + offset)
    if finite_tally is not None:
        tally += finite_tally.tally()
    return tally


def _is_narrow(array: np.ndarray) -> bool:
    """Return whether elements are real numbers of at most 32 bits.

    Neither their squares nor the sums of these exceed float64.
    """
    dtype = array.dtype
    is_complex = dtype.kind == "c" or dtype.names is not None
    return dtype.itemsize <= 4 and not is_complex


def _is_integer(array: np.ndarray) -> bool:
    return array.dtype.kind in "iu"


class FiniteTally:
    """Accumulates steps of finite numbers of at most 32 bits."""

    def __init__(self, compare_bits: bool, *, is_exact: bool) -> None:
        """Start without any steps.

        Args:
            compare_bits: Whether elements are the same if their bits are, and not their values.
            is_exact: Whether all numbers are integers.
        """
        self._compare_bits = compare_bits
        self._is_exact = is_exact
        self._changed = 0
        self._total = 0
        self._max_abs = 0.0
        self._max_rel = 0.0
        self._dot = 0.0
        self._squares_a = 0.0
        self._squares_b = 0.0
        self._squared_distance = 0.0

    def try_add(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Compare a step and add the result to this tally, if all numbers are finite.

        Args:
            a: Numbers of the first tensor.
            b: Numbers of the second tensor.

        Returns:
            Whether the step was added. If a number is NaN or infinite, nothing is counted, and the
            caller compares the step with `compare_step`.
        """
        numbers_a = _to_float64(a)
        numbers_b = _to_float64(b)
        squares_a = inner_product(numbers_a, numbers_a)
        squares_b = inner_product(numbers_b, numbers_b)
        # The sum of squares is finite if and only if all numbers are, because they are narrow.
        if not (math.isfinite(squares_a) and math.isfinite(squares_b)):
            return False

        if self._compare_bits:
            is_changed = _differ_in_bits(a, b)
        else:
            is_changed = np.asarray(numbers_a != numbers_b)
        changed = int(np.count_nonzero(is_changed))
        self._total += a.size
        self._squares_a += squares_a
        self._squares_b += squares_b
        if not changed:
            # The product of two equal numbers is their square, and their distance is 0.
            self._dot += squares_a
            return True

        self._changed += changed
        self._dot += inner_product(numbers_a, numbers_b)
        # From here on, the arrays are overwritten: to allocate new ones takes longer than the
        # arithmetic.
        differences = numbers_a - numbers_b
        self._squared_distance += inner_product(differences, differences)
        distances = np.abs(differences, out=differences)
        self._max_abs = max(self._max_abs, float(distances.max()))
        magnitudes_a = np.abs(numbers_a, out=numbers_a)
        magnitudes_b = np.abs(numbers_b, out=numbers_b)
        larger = np.maximum(magnitudes_a, magnitudes_b, out=magnitudes_a)
        # Two zeros have the distance 0. Divided by the smallest number, it remains 0.
        np.maximum(larger, SMALLEST_FLOAT64, out=larger)
        ratios = np.divide(distances, larger, out=distances)
        self._max_rel = max(self._max_rel, float(ratios.max()))
        return True

    def tally(self) -> Tally:
        """Return the differences of all steps that were added."""
        return Tally(
            changed=self._changed,
            total=self._total,
            max_abs=int(self._max_abs) if self._is_exact else self._max_abs,
            max_rel=self._max_rel,
            sums=ProductSums(
                dot=Fraction(self._dot),
                squares_a=Fraction(self._squares_a),
                squares_b=Fraction(self._squares_b),
                squared_distance=Fraction(self._squared_distance),
            ),
        )


def compare_step(a: np.ndarray, b: np.ndarray, *, compare_bits: bool, start: int = 0) -> Tally:
    """Compare any numbers, also complex ones, 64-bit integers, NaN and infinities.

    This needs memory for several copies of the step. The arguments are those of `compare_elements`.
    """
    if _is_integer(a) and _is_integer(b):
        return _compare_integers(a, b)

    numbers_a = _to_float64(a)
    if compare_bits:
        is_changed = _differ_in_bits(a, b)
        if not is_changed.any():
            return _tally_unchanged(numbers_a)
    numbers_b = _to_float64(b)
    if not compare_bits:
        is_changed = np.asarray(numbers_a != numbers_b)

    nonfinite = NonfiniteChanges()
    has_difference = is_changed
    finite_a = numbers_a
    finite_b = numbers_b
    is_finite = np.isfinite(numbers_a) & np.isfinite(numbers_b)
    if not is_finite.all():
        nan_a = np.isnan(numbers_a)
        nan_b = np.isnan(numbers_b)
        if not compare_bits:
            # A NaN differs from itself.
            is_changed &= ~(nan_a & nan_b)
        nonfinite = NonfiniteChanges.from_numbers(numbers_a, numbers_b, is_changed, start)
        has_difference = is_changed & ~(nan_a | nan_b)
        finite_a = numbers_a[is_finite]
        finite_b = numbers_b[is_finite]

    max_abs, max_rel = _find_largest(numbers_a[has_difference], numbers_b[has_difference])
    changed = int(is_changed.sum())
    return Tally(
        changed=changed,
        total=a.size,
        max_abs=max_abs,
        max_rel=max_rel,
        changed_nans=changed - int(has_difference.sum()),
        nonfinite=nonfinite,
        sums=ProductSums.from_numbers(finite_a, finite_b),
    )


def _tally_unchanged(numbers: np.ndarray) -> Tally:
    """Return the tally of a step of floats in which nothing changed."""
    is_finite = np.isfinite(numbers)
    finite_numbers = numbers if is_finite.all() else numbers[is_finite]
    squares = _sum_squares(finite_numbers)
    return Tally(
        total=numbers.size,
        nonfinite=NonfiniteChanges(pairs_with_nan=int(np.isnan(numbers).sum())),
        sums=ProductSums(dot=squares, squares_a=squares, squares_b=squares),
    )


def _differ_in_bits(a: np.ndarray, b: np.ndarray) -> Bools:
    """Return which elements of two arrays of one dtype have different bits."""
    itemsize = a.dtype.itemsize
    # numpy has no integers of 16 bytes, so a complex128 is compared as two words.
    if itemsize == 16:
        is_word_changed = a.view(np.uint64) != b.view(np.uint64)
        return np.asarray(is_word_changed.reshape(-1, 2).any(axis=1))
    patterns_a = a.view(f"u{itemsize}")
    patterns_b = b.view(f"u{itemsize}")
    return np.asarray(patterns_a != patterns_b)


def _to_float64(array: np.ndarray) -> np.ndarray:
    """Convert to float64 or complex128. Only integers beyond 2^53 are rounded."""
    if array.dtype.names:
        # Complex numbers of a dtype that numpy does not have.
        real = array["real"].astype(np.float64)
        imaginary = array["imag"].astype(np.float64)
        return real + 1j * imaginary
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return array.astype(np.float64)


def _find_largest(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Return the largest absolute and the largest relative difference of floats without NaN."""
    if not a.size:
        return 0.0, 0.0
    with np.errstate(all="ignore"):
        larger = np.maximum(np.abs(a), np.abs(b))
        distances = np.abs(a - b)
        # The distance of two large numbers can exceed float64, while its ratio to them does not.
        scaled_distances = np.abs(a / larger - b / larger)
        ratios = np.where(np.isfinite(distances), distances / larger, scaled_distances)

    # Two equal infinities, and two zeros, have the distance 0.
    ratios = np.where(larger == 0, 0.0, ratios)
    is_infinite = ~(np.isfinite(a) & np.isfinite(b))
    infinite_distances = np.where(a == b, 0.0, np.inf)
    distances = np.where(is_infinite, infinite_distances, distances)
    ratios = np.where(is_infinite, infinite_distances, ratios)
    return float(distances.max()), float(ratios.max())


def _scale(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Divide numbers by a power of two so that the largest is about 1, and return its exponent.

    Ordinary magnitudes are not scaled. A complex number becomes two real ones.
    """
    numbers = array.view(np.float64) if array.dtype.kind == "c" else array
    if not numbers.size:
        return numbers, 0
    magnitude = max(float(numbers.max()), -float(numbers.min()))
    _, exponent = math.frexp(magnitude)
    if abs(exponent) < UNSCALED_EXPONENT:
        return numbers, 0
    return np.ldexp(numbers, -exponent), exponent


def _sum_squares(array: np.ndarray) -> Fraction:
    """Return the sum of the squares of finite numbers, which may exceed float64."""
    numbers, exponent = _scale(array)
    scaled_sum = Fraction(inner_product(numbers, numbers))
    return scaled_sum * Fraction(2) ** (2 * exponent)


def _sum_products(a: np.ndarray, b: np.ndarray) -> Fraction:
    """Return the inner product of two arrays of finite numbers, which may exceed float64.

    For complex numbers, this is the real part of the inner product.
    """
    if a.dtype != b.dtype:
        a = a.astype(np.complex128)
        b = b.astype(np.complex128)
    numbers_a, exponent_a = _scale(a)
    numbers_b, exponent_b = _scale(b)
    scaled_sum = Fraction(inner_product(numbers_a, numbers_b))
    return scaled_sum * Fraction(2) ** (exponent_a + exponent_b)


# Integers are compared exactly, as a sign and a magnitude in uint64. In numpy the difference of two
# int64 can overflow, and before version 2 it compares int64 with uint64 as float64.


def _compare_integers(a: np.ndarray, b: np.ndarray) -> Tally:
    """Return the differences of a step of integers."""
    is_changed = _differ_as_integers(a, b)
    max_abs, max_rel = _find_largest_of_integers(a[is_changed], b[is_changed])
    return Tally(
        changed=int(is_changed.sum()),
        total=a.size,
        max_abs=max_abs,
        max_rel=max_rel,
        sums=ProductSums.from_numbers(a.astype(np.float64), b.astype(np.float64)),
    )


def _differ_as_integers(a: np.ndarray, b: np.ndarray) -> Bools:
    """Return which integers differ. The two arrays may have two dtypes."""
    if a.dtype == b.dtype:
        return np.asarray(a != b)
    has_other_sign = _is_negative(a) != _is_negative(b)
    has_other_word = _to_words(a) != _to_words(b)
    return np.asarray(has_other_sign | has_other_word)


def _find_largest_of_integers(a: np.ndarray, b: np.ndarray) -> tuple[int, float]:
    """Return the largest absolute difference of integers, exactly, and the largest relative one.

    Args:
        a: Integers of the first tensor.
        b: Integers of the second tensor. None is equal to that in `a`.
    """
    if not a.size:
        return 0, 0.0
    magnitudes_a = _to_magnitudes(a)
    magnitudes_b = _to_magnitudes(b)
    smaller = np.minimum(magnitudes_a, magnitudes_b)
    larger = np.maximum(magnitudes_a, magnitudes_b)

    # Magnitudes of one sign are subtracted, those of two signs are added. A sum that is smaller
    # than one of its terms has overflowed, so 2^64 is missing.
    has_same_sign = _is_negative(a) == _is_negative(b)
    sums = magnitudes_a + magnitudes_b
    distances = np.where(has_same_sign, larger - smaller, sums)
    is_overflow = ~has_same_sign & (sums < magnitudes_a)

    max_abs = int(distances.max())
    if is_overflow.any():
        max_abs = (1 << 64) + int(distances[is_overflow].max())
    float_distances = distances.astype(np.float64) + np.where(is_overflow, 2.0**64, 0.0)
    ratios = float_distances / larger.astype(np.float64)
    return max_abs, float(ratios.max())


def _is_negative(array: np.ndarray) -> Bools:
    """Return which integers are negative."""
    if array.dtype.kind == "i":
        return np.asarray(array < 0)
    return np.zeros(array.shape, np.bool_)


def _to_words(array: np.ndarray) -> Words:
    """Return integers modulo 2^64."""
    if array.dtype.kind == "i":
        return array.astype(np.int64).view(np.uint64)
    return array.astype(np.uint64)


def _to_magnitudes(array: np.ndarray) -> Words:
    """Return the absolute values of integers. That of -2^63 fits into 64 bits without a sign."""
    words = _to_words(array)
    return np.where(_is_negative(array), -words, words)
