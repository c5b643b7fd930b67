"""How the elements of two tensors of one shape differ.

A block of elements becomes a handful of numbers (`Tally`), which add up to those of the tensor, in any order, on any thread.

- Elements of one dtype are the same when their bits are: a NaN with the same bits is unchanged, and -0.0 in place of 0.0 is not.
  Elements of two dtypes are the same when their values are (any NaN is as good as another).
- Floats are compared as float64, which holds every value of the narrower ones. Integers are compared exactly, across signs
  and widths; an integer and a float as float64.
- NaN and infinities are counted where they appear and where they go. Where one did, neither the relative difference nor the cosine
  is a number. Those that stay are left out of both. Where a NaN is in every pair that changed, there is no largest difference.
- Squares and products are summed per block as float64, scaled by a power of two, and across blocks as exact fractions: no
  magnitude overflows, and none is lost beside a larger one of another block.

A block is compared in steps that stay in a core's cache. Numbers of at most 32 bits cannot overflow on the way, nor be lost, so
that a step of them in which all is finite needs no scales and no choice of elements (`_Plain`). The general way is the oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from operator import add

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools, inner
from holdfast.core.digest import canonical
from holdfast.core.dtype import DType
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.numeric.statistics import earlier_index, first_index

PAIRS = "float4_e2m1fn_x2"  # Two elements in a byte, which numpy has no type for.

STEP_ELEMENTS = 1 << 17
"""Elements that are compared together: 1 MiB as float64 of each side, near a core's own cache, in calls long enough that threads do
not wait for each other's turn at the interpreter."""

BEYOND = Fraction(2) ** 1000  # About where a fraction is no float64 any more.
PLAIN_EXPONENT = 400  # Numbers below 2^400 and above 2^-400 can be squared, and a block of the squares added up, within float64.


@dataclass(frozen=True, slots=True)
class Content:
    """How the elements of two tensors differ."""

    changed: int
    """Elements that are not the same."""
    total: int
    max_abs: int | float | None
    """The largest |a − b|, exact for integers; infinite where an infinity met something else. Pairs with a NaN do not count; None
    where each pair that changed has one."""
    max_rel: float | None
    """The largest |a − b| / max(|a|, |b|): 0 to 2, or infinite where an infinity met something else; None as above."""
    cosine: float | None
    """The cosine of the angle between the two as vectors; None where either is all zeros, or where something that is not finite
    appeared or went. What is not finite in both is left out."""
    nans: int
    """Pairs of which at least one is NaN."""
    relative: float | None = None
    """‖a − b‖ / ‖a‖; None where the first is all zeros, and as for the cosine."""
    nan_appeared: int = 0
    """Elements that are NaN in the second, and not in the first."""
    nan_went: int = 0
    inf_appeared: int = 0
    """Elements that are infinite in the second, and not in the first."""
    inf_went: int = 0
    first_nan: int | None = None
    """The index in C order of the first element that is NaN in the second, and not in the first."""
    first_inf: int | None = None
    """The same of infinities."""

    @property
    def appeared(self) -> int:
        """Elements that became NaN or infinite."""
        return self.nan_appeared + self.inf_appeared

    @property
    def size(self) -> float:
        """How large the change is, to put changes in order: infinite where there is no number for it. Something became NaN or
        infinite, or ceased to be, or came where all was zero."""
        return 0.0 if not self.changed else math.inf if self.relative is None else self.relative


NONE: tuple[int, ...] = (0, 0, 0, 0, 0)


class Tally(Value, frozen=True):
    changed: int = 0
    total: int = 0
    max_abs: int | float = 0
    max_rel: float = 0.0
    nans: int = 0
    dot: Fraction = Fraction(0)
    squares_a: Fraction = Fraction(0)
    squares_b: Fraction = Fraction(0)
    apart: Fraction = Fraction(0)
    """Of the differences: what is left of the three above would be their rounding, where little changed."""
    odd: tuple[int, ...] = NONE
    """NaN that appeared and went, infinities that did, and that changed their sign."""
    beyond: int = 0
    """Elements that changed, and are NaN on one side or both: their difference is no number."""
    first_nan: int | None = None
    """The index of the first NaN that appeared, counted from the beginning of the tensor."""
    first_inf: int | None = None

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.changed + other.changed, self.total + other.total, max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel), self.nans + other.nans, self.dot + other.dot, self.squares_a + other.squares_a,
            self.squares_b + other.squares_b, self.apart + other.apart, tuple(map(add, self.odd, other.odd)),
            self.beyond + other.beyond, earlier_index(self.first_nan, other.first_nan),
            earlier_index(self.first_inf, other.first_inf),
        )  # fmt: skip

    def content(self) -> Content:
        most, ratio = (
            (None, None) if 0 < self.changed == self.beyond else (self.max_abs, self.max_rel)
        )
        nan_appeared, nan_went, inf_appeared, inf_went = self.odd[:4]
        return Content(
            self.changed,
            self.total,
            most,
            ratio,
            self._cosine(),
            self.nans,
            self._relative(),
            nan_appeared,
            nan_went,
            inf_appeared,
            inf_went,
            self.first_nan,
            self.first_inf,
        )

    def _relative(self) -> float | None:
        if not self.squares_a or any(self.odd):
            return None
        ratio = self.apart / self.squares_a
        return math.sqrt(ratio) if ratio < BEYOND else math.inf

    def _cosine(self) -> float | None:
        if not self.squares_a or not self.squares_b or any(self.odd):
            return None
        # Of one vector with itself, exactly 1; rounding in the sums of blocks must not lead beyond it.
        size = min(math.sqrt(self.dot * self.dot / (self.squares_a * self.squares_b)), 1.0)
        return size if self.dot >= 0 else -size


def computable(tensor: LazyTensor, array: np.ndarray) -> np.ndarray:
    """Elements of a tensor as something that numpy can compute with."""
    if tensor.dtype.name == PAIRS:
        return (
            np.stack((array & 15, array >> 4), axis=1)
            .reshape(-1)
            .view(compared_dtype(tensor).numpy)
        )
    return array.view(np.uint8) if array.dtype == np.bool_ else array


def compared_dtype(tensor: LazyTensor) -> DType:
    """The dtype whose elements are compared: of packed pairs, that of one of them."""
    return canonical(tensor.dtype, tensor.shape)[0]


def tally(a: np.ndarray, b: np.ndarray, *, same_bits: bool, start: int = 0) -> Tally:
    """Compare two 1-D arrays of one length. With `same_bits`, they have one dtype, and the bits decide what is the same. `start` is
    the index of their first elements in their tensors."""
    plain = (
        _Plain(same_bits, exact=_is_integer(a) and _is_integer(b))
        if _is_narrow(a) and _is_narrow(b)
        else None
    )
    total = Tally()
    for at in range(0, a.size, STEP_ELEMENTS):
        left, right = a[at : at + STEP_ELEMENTS], b[at : at + STEP_ELEMENTS]
        if plain is None or not plain.add(left, right):
            total += tally_step(left, right, same_bits=same_bits, start=start + at)
    return total if plain is None else total + plain.tally()


def _is_narrow(array: np.ndarray) -> bool:
    """Whether elements are real numbers of at most 32 bits: neither their squares nor the sums of them leave float64."""
    return array.dtype.itemsize <= 4 and array.dtype.kind != "c" and not array.dtype.names


def _is_integer(array: np.ndarray) -> bool:
    return array.dtype.kind in "iu"


class _Plain:
    """The tally of steps in which every number is finite, and of at most 32 bits."""

    def __init__(self, same_bits: bool, *, exact: bool) -> None:
        self._same_bits, self._exact = same_bits, exact
        self._changed = self._total = 0
        self._max_abs = self._max_rel = 0.0
        self._dot = self._squares_a = self._squares_b = self._apart = 0.0

    def add(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Compare some elements. False, and nothing is counted, where one of them is not finite."""
        wide_a, wide_b = _wide(a), _wide(b)
        squares_a, squares_b = inner(wide_a, wide_a), inner(wide_b, wide_b)
        # What is not finite stays so in the sum of squares, and no finite number of 32 bits makes it so.
        if not (math.isfinite(squares_a) and math.isfinite(squares_b)):
            return False
        changed = int(
            np.count_nonzero(_differing_bits(a, b) if self._same_bits else wide_a != wide_b)
        )
        self._total += a.size
        self._squares_a += squares_a
        self._squares_b += squares_b
        self._dot += inner(wide_a, wide_b) if changed else squares_a
        if changed:
            self._changed += changed
            apart = wide_a - wide_b
            self._apart += inner(apart, apart)
            np.abs(apart, out=apart)
            self._max_abs = max(self._max_abs, float(apart.max()))
            np.abs(wide_a, out=wide_a)
            np.abs(wide_b, out=wide_b)
            np.maximum(wide_a, wide_b, out=wide_a)
            # Of two zeros nothing is apart: over the least that there is, that is 0.
            np.maximum(wide_a, LEAST, out=wide_a)
            np.divide(apart, wide_a, out=apart)
            self._max_rel = max(self._max_rel, float(apart.max()))
        return True

    def tally(self) -> Tally:
        most = int(self._max_abs) if self._exact else self._max_abs
        dot, squares_a, squares_b, apart = (
            Fraction(x) for x in (self._dot, self._squares_a, self._squares_b, self._apart)
        )
        return Tally(
            self._changed, self._total, most, self._max_rel, 0, dot, squares_a, squares_b, apart
        )


LEAST = 5e-324


def tally_step(a: np.ndarray, b: np.ndarray, *, same_bits: bool, start: int = 0) -> Tally:
    """The tally of any numbers, in memory for several copies of them."""
    if _is_integer(a) and _is_integer(b):
        return _tally_integers(a, b)
    changed = _differing_bits(a, b) if same_bits else None
    if changed is not None and not changed.any():
        wide = _wide(a)
        usable = np.isfinite(wide)
        nans = int(np.isnan(wide).sum())
        squares = _squares(wide if usable.all() else wide[usable])
        return Tally(0, a.size, 0.0, 0.0, nans, squares, squares, squares)
    left, right = wide_a, wide_b = _wide(a), _wide(b)
    usable = np.isfinite(wide_a) & np.isfinite(wide_b)
    nans, odd = 0, NONE
    first_nan = first_inf = None
    if usable.all():
        changed = wide_a != wide_b if changed is None else changed
        countable = changed
    else:
        nan_a, nan_b = np.isnan(wide_a), np.isnan(wide_b)
        changed = (wide_a != wide_b) & ~(nan_a & nan_b) if changed is None else changed
        countable = changed & ~(nan_a | nan_b)
        nans = int((nan_a | nan_b).sum())
        # A complex number with a NaN in it is that, whatever the other part.
        inf_a, inf_b = np.isinf(wide_a) & ~nan_a, np.isinf(wide_b) & ~nan_b
        counts = (
            nan_b & ~nan_a,
            nan_a & ~nan_b,
            inf_b & ~inf_a,
            inf_a & ~inf_b,
            inf_a & inf_b & changed,
        )
        odd = tuple(int(count.sum()) for count in counts)
        first_nan, first_inf = first_index(counts[0], start), first_index(counts[2], start)
        left, right = wide_a[usable], wide_b[usable]
    max_abs, max_rel = _largest(wide_a[countable], wide_b[countable])
    sums = _dot(left, right), _squares(left), _squares(right), _apart(left, right)
    many = int(changed.sum())
    beyond = many - int(countable.sum())
    return Tally(many, a.size, max_abs, max_rel, nans, *sums, odd, beyond, first_nan, first_inf)


def _tally_integers(a: np.ndarray, b: np.ndarray) -> Tally:
    changed = _int_changes(a, b)
    max_abs, max_rel = _greatest(a[changed], b[changed])
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    sums = _dot(wide_a, wide_b), _squares(wide_a), _squares(wide_b), _apart(wide_a, wide_b)
    return Tally(int(changed.sum()), a.size, max_abs, max_rel, 0, *sums)


def _differing_bits(a: np.ndarray, b: np.ndarray) -> Bools:
    width = a.dtype.itemsize
    if width == 16:
        return np.asarray((a.view(np.uint64) != b.view(np.uint64)).reshape(-1, 2).any(axis=1))
    return np.asarray(a.view(f"u{width}") != b.view(f"u{width}"))


def _wide(array: np.ndarray) -> np.ndarray:
    """As float64 or complex128, without loss but for integers beyond 2^53."""
    if array.dtype.names:
        return array["real"].astype(np.float64) + 1j * array["imag"].astype(np.float64)
    return array.astype(np.complex128) if array.dtype.kind == "c" else array.astype(np.float64)


def _largest(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """The largest absolute and relative difference of pairs without NaN, none of them equal in bits."""
    if not a.size:
        return 0.0, 0.0
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(a), np.abs(b))
        apart = np.abs(a - b)
        # The difference of two large numbers of two signs may be beyond float64, where their ratio is not.
        ratio = np.where(np.isfinite(apart), apart / size, np.abs(a / size - b / size))
    infinite = ~(np.isfinite(a) & np.isfinite(b))
    # inf − inf of one sign differs in nothing, and a zero from the other zero neither.
    apart = np.where(infinite, np.where(a == b, 0.0, np.inf), apart)
    ratio = np.where(infinite, apart, np.where(size == 0, 0.0, ratio))
    return float(apart.max()), float(ratio.max())


def _scaled(array: np.ndarray) -> tuple[np.ndarray, int]:
    """The array as floats of about one, and the power of two by which it was divided; ordinary magnitudes are left as they are."""
    flat = array.view(np.float64) if array.dtype.kind == "c" else array
    exponent = math.frexp(max(float(flat.max()), -float(flat.min())))[1] if flat.size else 0
    return (flat, 0) if abs(exponent) < PLAIN_EXPONENT else (np.ldexp(flat, -exponent), exponent)


def _squares(array: np.ndarray) -> Fraction:
    flat, exponent = _scaled(array)
    return Fraction(inner(flat, flat)) * Fraction(2) ** (2 * exponent)


def _apart(a: np.ndarray, b: np.ndarray) -> Fraction:
    """The squares of the differences: of halves, for that of two finite numbers may be beyond float64."""
    return _squares(a / 2 - b / 2) * 4


def _dot(a: np.ndarray, b: np.ndarray) -> Fraction:
    """The real part of the inner product: complex vectors count as real ones of twice the length."""
    if a.dtype != b.dtype:
        a, b = a.astype(np.complex128), b.astype(np.complex128)
    (left, first), (right, second) = _scaled(a), _scaled(b)
    return Fraction(inner(left, right)) * Fraction(2) ** (first + second)


# Integers of any two of numpy's integer types, exactly. numpy before 2 compares int64 with uint64 as float64, and subtracting them
# overflows in every version. So everything is said as a sign and a magnitude in uint64. Of one sign, magnitudes subtract; of two,
# they add, and a sum that is smaller than its parts has carried into bit 64.


def _int_changes(a: np.ndarray, b: np.ndarray) -> Bools:
    if a.dtype == b.dtype:
        return np.asarray(a != b)
    return np.asarray((_negative(a) != _negative(b)) | (_words(a) != _words(b)))


def _greatest(a: np.ndarray, b: np.ndarray) -> tuple[int, float]:
    """The largest absolute difference, exactly, and the largest relative one, of elements that are not equal."""
    if not a.size:
        return 0, 0.0
    below_a, below_b = _negative(a), _negative(b)
    words_a, words_b = _words(a), _words(b)
    size_a, size_b = np.where(below_a, -words_a, words_a), np.where(below_b, -words_b, words_b)
    same_sign = below_a == below_b
    # Of one sign, the magnitudes differ by less than 2^64; of two, they add up, perhaps to more.
    apart = np.where(
        same_sign, np.maximum(size_a, size_b) - np.minimum(size_a, size_b), size_a + size_b
    )
    carried = ~same_sign & (apart < size_a)
    most = (1 << 64) + int(apart[carried].max()) if carried.any() else int(apart.max())
    larger = np.maximum(size_a, size_b).astype(np.float64)
    ratio = (apart.astype(np.float64) + np.where(carried, 2.0**64, 0.0)) / larger
    return most, float(ratio.max())


def _negative(array: np.ndarray) -> Bools:
    return np.asarray(array < 0) if array.dtype.kind == "i" else np.zeros(array.shape, np.bool_)


def _words(array: np.ndarray) -> npt.NDArray[np.uint64]:
    """Modulo 2^64."""
    return (
        array.astype(np.int64).view(np.uint64)
        if array.dtype.kind == "i"
        else array.astype(np.uint64)
    )
