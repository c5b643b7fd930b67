"""Cast arrays of floating-point numbers as torch casts them, and count what is lost.

What torch 2.13 does on a CPU, for every pair of its floating-point dtypes, found by trying all patterns:

- Rounding is to the nearest, ties to even. float64 is rounded to float32 first on its way to anything narrower.
- What is too large becomes infinity; NaN in the 8-bit types without one; and in float8_e4m3fn the largest number, infinity as well.
- float8_e8m0fnu holds powers of two and nothing else. The sign is dropped, zero becomes 2^-127, and halves round up.
- NaN becomes NaN. Its bits are no part of the contract: torch's own differ between its vector and scalar code.

Whatever lands in one byte goes through a table of all 65,536 patterns of a 16-bit source. A float32 gets there by rounding to odd:
its upper half, with the lowest bit set where anything below was: four bits more than any of these types has, so that the second
rounding is the only one.
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
        if array.dtype == np.float16 and dtype.name == "float32":
            _widen_float16(array, out)
        else:
            out[:] = array
        return
    # `mode` only says that no index needs to be checked: the table has every pattern.
    table.take(patterns, out=out.view(table.dtype), mode="clip")


def _widen_float16(array: np.ndarray, out: np.ndarray) -> None:
    """Cast to float32 in integers. numpy casts one element at a time, which takes 17 times as long.

    The ten bits of fraction and five of exponent, shifted by 13, are those of a float32 that is
    smaller by 2^112. That is exact for every finite number. numpy casts the blocks with others, and
    all blocks if the processor takes the smallest floats for zeros (`torch.set_flush_denormal`).
    """
    magnitudes = array.view(np.uint16) & np.uint16(0x7FFF)
    if not SMALLEST_SHIFTED * MISSING_EXPONENT or magnitudes.max(initial=0) >= FLOAT16_INFINITY:
        out[:] = array
        return
    bits = out.view(np.int32)
    np.copyto(bits, array.view(np.int16))
    np.left_shift(bits, np.int32(13), out=bits)
    np.bitwise_and(bits, SHIFTED_BITS, out=bits)
    np.multiply(out, MISSING_EXPONENT, out=out)


FLOAT16_INFINITY = 0x7C00

MISSING_EXPONENT = np.float32(2.0**112)
"""The smallest normal float16 over the smallest normal float32."""

SMALLEST_SHIFTED = np.array(1 << 13, np.int32).view(np.float32)
"""The smallest float16 after the shift: not a normal float32."""

SHIFTED_BITS = np.int32(0x8FFF_E000 - (1 << 32))
"""The sign, five bits of exponent and ten of fraction, after the shift."""


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


def count_losses(array: np.ndarray, dtype: DType) -> dict[str, int]:
    """Count the elements of a 1-D array that come to harm in a cast, by outcome (`OUTCOMES`).

    Rounding to a near number is no harm.
    """
    counts = dict.fromkeys(OUTCOMES, 0)
    for start in range(0, array.size, BLOCK_ELEMENTS):
        block = array[start : start + BLOCK_ELEMENTS]
        if array.itemsize == 1:
            _count_bytes(block, _kinds(array.dtype, dtype), counts)
        else:
            _count_block(block, _bounds(array.dtype, dtype), counts)
    return {outcome: count for outcome, count in counts.items() if count}


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


def count_losses_each(array: np.ndarray, dtype: DType, starts: Ints) -> dict[str, Ints]:
    """`count_losses` of each of the parts that begin there and follow each other, none of which is empty."""
    if not count_losses(array, dtype):
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
