"""Cast arrays of floating-point numbers as torch casts them, and count what is lost.

What torch 2.13 does on a CPU, for every pair of its floating-point dtypes, found by trying all patterns:

- Rounding is to the nearest, ties to even. float64 is rounded to float32 first on its way to anything narrower.
- What is too large becomes infinity; NaN in the 8-bit types without one; and in float8_e4m3fn the largest number, infinity as well.
- float8_e8m0fnu holds powers of two and nothing else. The sign is dropped, zero becomes 2^-127, and halves round up.
- NaN becomes NaN. Its bits are no part of the contract: torch's own differ between its vector and scalar code.

Whatever lands in one byte goes through a table of all 65,536 patterns of a 16-bit source. A float32 gets there by rounding to odd:
its upper half, with the lowest bit set where anything below was: four bits more than any of these types has, so that the second
rounding is the only one.

float16 is widened in integers, for numpy casts them one by one, which takes five times as long. The ten bits of fraction and five
of exponent, shifted by 13, are those of a float32 that is smaller by 2^112. So every finite number comes through exactly. Where
one is not finite numpy is asked, for what becomes of the bits of a NaN is up to it; and where the processor was told to take the
smallest floats for zeros (`torch.set_flush_denormal`), which the way through them cannot bear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import ml_dtypes
import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.dtype import DType
from holdfast.core.value import Value

BLOCK_ELEMENTS = (
    1 << 17
)  # Elements at a time: they stay near a core, in calls long enough for threads.
SATURATING = "float8_e4m3fn"
POWERS = "float8_e8m0fnu"

OUTCOMES = ("saturated", "infinite", "nan", "zero", "smallest", "unsigned")
"""What can become of an element: the largest number of the type, an infinity or NaN, from a number that was none of them; zero from
what was not; the smallest number from what was less; a positive number from a negative one."""


def cast(array: np.ndarray, dtype: DType) -> np.ndarray:
    """The elements of a 1-D array of floats in another floating-point dtype, as torch gives them."""
    out = np.empty(array.shape, dtype.numpy)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, array.size, BLOCK_ELEMENTS):
            part = slice(start, start + BLOCK_ELEMENTS)
            _cast_block(array[part], out[part], dtype)
    return out


def _cast_block(array: np.ndarray, out: np.ndarray, dtype: DType) -> None:
    if array.itemsize == 8 and out.itemsize < 4:
        array = array.astype(np.float32)
    if array.itemsize == 1 or (array.itemsize == 2 and out.itemsize == 1):
        table, patterns = _table(array.dtype, dtype), array.view(f"u{array.itemsize}")
    elif out.itemsize == 1:
        table, patterns = _table(np.dtype(ml_dtypes.bfloat16), dtype), _rounded_to_odd(array)
    else:
        # numpy's own rounding, and that of ml_dtypes, are torch's here.
        if dtype.name == "float32":
            as_float32(array, out)
        else:
            out[:] = (
                as_float64(array)
                if array.dtype == np.float16 and dtype.name == "float64"
                else array
            )
        return
    # `mode` only says that no index needs to be checked: the table has every pattern.
    table.take(patterns, out=out.view(table.dtype), mode="clip")


def _rounded_to_odd(array: np.ndarray) -> np.ndarray:
    """Upper halves of float32, odd where the lower half is not zero. A NaN stays one, whose payload is in the lower half alone."""
    bits = array.view(np.uint32)
    low = (bits & np.uint32(0xFFFF)) != 0
    upper: np.ndarray = (bits >> np.uint32(16)).astype(np.uint16)
    upper |= low
    return upper


@lru_cache(maxsize=64)
def _table(source: np.dtype[np.generic], dtype: DType) -> np.ndarray:
    patterns = np.arange(1 << (8 * source.itemsize), dtype=f"u{source.itemsize}").view(source)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = patterns.astype(np.float32)
        if dtype.name == SATURATING:
            wide = np.clip(wide, -largest(dtype), largest(dtype))
        made = (np.abs(wide) if dtype.name == POWERS else wide).astype(dtype.numpy)
    bits = made.view(f"u{made.itemsize}")
    if dtype.name == POWERS:
        bits[wide == 0] = 0
    return bits


def largest(dtype: DType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy).max)  # type: ignore[no-untyped-call]  # ml_dtypes has no types for it


def count_losses(array: np.ndarray, made: np.ndarray | None, dtype: DType) -> dict[str, int]:
    """How many elements of a 1-D array came to harm in a cast, by outcome (`OUTCOMES`). Rounding to a near number is none. `made`
    is what the cast made of them, where that is at hand. It is looked at first: where nothing in it is zero, infinite or as large
    as can be, nothing was lost, and that is narrower and quicker to see than the original."""
    found = dict.fromkeys(OUTCOMES, 0)
    kinds = _kinds(array.dtype, dtype) if array.itemsize == 1 else None
    bounds = _bounds(array.dtype, dtype) if kinds is None else None
    for start in range(
        0,
        array.size if (kinds is None or kinds.any()) and (bounds is None or bounds.any) else 0,
        BLOCK_ELEMENTS,
    ):
        part = slice(start, start + BLOCK_ELEMENTS)
        if made is None or not _ordinary(made[part], dtype):
            if bounds is not None:
                _count_block(array[part], bounds, found)
            elif kinds is not None:
                _count_bytes(array[part], kinds, found)
    return {outcome: count for outcome, count in found.items() if count}


def _ordinary(made: np.ndarray, dtype: DType) -> bool:
    """Whether the results say that nothing was lost: each is between zero and the end of the type, neither of them included."""
    if dtype.name == POWERS:
        return False
    bits = made.view(f"u{made.itemsize}")
    sizes = bits & bits.dtype.type((1 << (8 * made.itemsize - 1)) - 1)
    sizes -= bits.dtype.type(1)
    return bool(np.count_nonzero(sizes < _end(dtype)) == sizes.size)


@lru_cache(maxsize=64)
def _end(dtype: DType) -> np.generic:
    """One less than the first magnitude, as an integer, that may be a loss: infinity, NaN, or the largest number."""
    most = int(np.array([largest(dtype)], dtype.numpy).view(f"u{dtype.numpy.itemsize}")[0])
    kind: type[np.generic] = np.dtype(f"u{dtype.numpy.itemsize}").type
    return kind(most - 1 if dtype.name == SATURATING else most)


class Bounds(Value, frozen=True):
    """Of a pair of dtypes: magnitudes of the source, as the integers that their bits are, which come through."""

    low: int  # The first that does not become zero, or the smallest number.
    high: int  # The first that is too large.
    stop: int  # The first behind those that count as too large: NaN, or infinity where the target has one.
    few: str  # What becomes of those below.
    many: str  # What becomes of those above.

    @property
    def any(self) -> bool:
        return self.low > 1 or self.high < self.stop or self.few == "smallest"


@lru_cache(maxsize=64)
def _bounds(source: np.dtype[np.generic], dtype: DType) -> Bounds:
    infinity = int(np.array([np.inf], source).view(f"u{source.itemsize}")[0])
    made = _one(source, dtype, infinity)
    many = "saturated" if dtype.name == SATURATING else "infinite" if math.isinf(made) else "nan"
    high = _first(1, infinity, lambda m: not math.isfinite(_one(source, dtype, m)))
    if dtype.name == POWERS:
        smallest = int(np.array([2.0**-127], source).view(f"u{source.itemsize}")[0])
        return Bounds(max(smallest, 1), high, infinity + 1, "smallest", many)
    low = _first(1, infinity, lambda m: _one(source, dtype, m) != 0)
    return Bounds(low, high, infinity + (many != "infinite"), "zero", many)


def _first(start: int, stop: int, holds: Callable[[int], bool]) -> int:
    while start < stop:
        middle = (start + stop) // 2
        start, stop = (start, middle) if holds(middle) else (middle + 1, stop)
    return start


def _one(source: np.dtype[np.generic], dtype: DType, magnitude: int) -> float:
    """The value of one element after the cast, where nothing saturates."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = np.array([magnitude], f"u{source.itemsize}").view(source)
        if dtype.numpy.itemsize < 4:
            value = value.astype(np.float32)
        return float(value.astype(dtype.numpy)[0])


def _count_block(array: np.ndarray, bounds: Bounds, found: dict[str, int]) -> None:
    bits = array.view(f"u{array.itemsize}")
    kind = bits.dtype.type
    sizes = bits & kind((1 << (8 * array.itemsize - 1)) - 1)
    # One comparison tells that all is well, as it mostly is: what is less than `low` wraps around to the top.
    if (
        bounds.few == "smallest"
        or np.count_nonzero((sizes - kind(bounds.low)) < kind(bounds.high - bounds.low))
        < sizes.size
    ):
        for outcome, lost in _lost_in(bits, bounds):
            found[outcome] += int(np.count_nonzero(lost))


def _lost_in(bits: np.ndarray, bounds: Bounds) -> Iterator[tuple[str, Bools]]:
    """Which elements came to harm, by outcome; given as the integers that their bits are."""
    kind = bits.dtype.type
    sign = 1 << (8 * bits.itemsize - 1)
    sizes = bits & kind(sign - 1)
    zero = 1 if bounds.few == "zero" else 0  # a zero that stays one is no loss
    yield bounds.few, (sizes - kind(zero)) < kind(bounds.low - zero)
    yield bounds.many, (sizes - kind(bounds.high)) < kind(bounds.stop - bounds.high)
    if bounds.few == "smallest":
        yield "unsigned", (bits > kind(sign)) & (sizes < kind(bounds.stop))


def count_losses_each(
    array: np.ndarray, made: np.ndarray, dtype: DType, starts: Ints
) -> dict[str, Ints]:
    """`count_losses` of each of the parts that begin there and follow each other, none of which is empty."""
    if not count_losses(array, made, dtype):
        return {}
    if array.itemsize == 1:
        kinds = _kinds(array.dtype, dtype)
        patterns = kinds.take(array.view(np.uint8))
        lost = [
            (outcome, (patterns >> at & 1).astype(np.bool_))
            for at, outcome in enumerate(OUTCOMES)
            if (kinds >> at & 1).any()
        ]
    else:
        lost = [*_lost_in(array.view(f"u{array.itemsize}"), _bounds(array.dtype, dtype))]
    return {
        outcome: np.add.reduceat(mask, starts, dtype=np.int64)
        for outcome, mask in lost
        if mask.any()
    }


def _count_bytes(array: np.ndarray, kinds: np.ndarray, found: dict[str, int]) -> None:
    counts = np.bincount(kinds.take(array.view(np.uint8)), minlength=1 << len(OUTCOMES))
    for at, outcome in enumerate(OUTCOMES):
        found[outcome] += sum(int(count) for number, count in enumerate(counts) if number >> at & 1)


@lru_cache(maxsize=64)
def _kinds(source: np.dtype[np.generic], dtype: DType) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        wide = np.arange(256, dtype=np.uint8).view(source).astype(np.float32)
    kinds = np.zeros(256, np.uint8)
    for pattern in range(256):
        found = dict.fromkeys(OUTCOMES, 0)
        _count_block(wide[pattern : pattern + 1], _bounds(wide.dtype, dtype), found)
        kinds[pattern] = sum(1 << at for at, outcome in enumerate(OUTCOMES) if found[outcome])
    return kinds


MISSING_EXPONENT = np.float32(
    2.0**112
)  # Between the least normal float16 and the least normal float32.
LEAST = np.array([1 << 13], np.int32).view(
    np.float32
)  # The least float16 on its way: no normal float32.

PLACES = np.int32(0x8FFF_E000 - (1 << 32))
"""Of a float16 that was widened with its sign and shifted: the sign, five bits of exponent, ten of fraction."""


def as_float32(values: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """A 1-D array of real numbers as float32, in memory of its own or in `out`.

    >>> as_float32(np.array([1.5, -0.0, 6e-8], np.float16)).tolist()
    [1.5, -0.0, 5.960464477539063e-08]
    """
    out = np.empty(values.shape, np.float32) if out is None else out
    if values.dtype == np.float16 and _may_shift(values):
        _shift(values, out)
    else:
        np.copyto(out, values, casting="unsafe")
    return out


def as_float64(values: np.ndarray) -> np.ndarray:
    """A 1-D array of real numbers as float64, in memory of its own."""
    if values.dtype == np.float16 and _may_shift(values):
        values = _shift(values, np.empty(values.shape, np.float32))
    return values.astype(np.float64)


def _shift(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    bits = out.view(np.int32)
    np.copyto(bits, values.view(np.int16))
    np.left_shift(bits, np.int32(13), out=bits)
    np.bitwise_and(bits, PLACES, out=bits)
    np.multiply(out, MISSING_EXPONENT, out=out)
    return out


def _may_shift(values: np.ndarray) -> bool:
    """Of float16: all are finite, and the least survive. What is not finite is the largest of its sign, as integers."""
    bits = values.view(np.uint16)
    return bool(
        LEAST[0] * MISSING_EXPONENT
        and bits.max(initial=0) < 0xFC00
        and bits.view(np.int16).max(initial=0) < 0x7C00
    )
