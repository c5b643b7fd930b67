"""Casts arrays of floating-point numbers as torch does, and counts the elements that are lost.

These are the rules of torch 2.13 on a CPU, for every pair of its floating-point dtypes. They were
found by trying all bit patterns.

- Numbers are rounded to the nearest value, ties to even. On its way to a type narrower than
  float32, a float64 is rounded to float32 first, so it is rounded twice.
- Numbers that are too large become infinity, or NaN in the 8-bit types that have no infinity. Only
  in float8_e4m3fn they become the largest number, and so does infinity.
- float8_e8m0fnu contains the powers of two from 2^-127 on, and NaN. The sign is dropped, zero
  becomes 2^-127, and a number halfway between two powers becomes the larger one.
- NaN becomes NaN. Which of its bit patterns results is not part of the contract, because the vector
  and the scalar code of torch disagree on it.

A cast to an 8-bit type looks up each element in a table of all bit patterns of the source. A
float32 has too many patterns for that, so it is first narrowed to its upper 16 bits by rounding to
odd (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008): the lowest bit is
set if any dropped bit was set. Those 16 bits have at least four more bits of fraction than an 8-bit
type, so the second rounding gives the same result as rounding once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache

import ml_dtypes
import numpy as np

from holdfast.core.arrays import AnyDType, Bools, Ints
from holdfast.core.dtype import DType
from holdfast.core.value import Value

BLOCK_ELEMENTS = 1 << 17
"""The elements of one step. They stay in a core's cache, and each numpy call takes long enough that
threads rarely wait for the interpreter lock."""

SATURATING_TYPE = "float8_e4m3fn"
"""The type in which numbers that are too large become the largest number."""

POWERS_OF_TWO_TYPE = "float8_e8m0fnu"
"""The type that contains only powers of two: it has neither a sign nor a zero."""

OUTCOMES = ("saturated", "infinite", "nan", "zero", "smallest", "unsigned")
"""What a lost element becomes, in the order of the names: the largest number of the type, infinity,
or NaN, because it was too large; zero, or the smallest number, because it was too small; a positive
number, because the type has no sign."""

FLOAT16_INFINITY_BITS = 0x7C00

FLOAT16_BIAS_FACTOR = np.float32(2.0**112)
"""The smallest normal float16 divided by the smallest normal float32."""

SHIFTED_FLOAT16_BITS = np.int32(0x8FFF_E000 - (1 << 32))
"""The sign, the 5 bits of exponent and the 10 bits of fraction of a float16, shifted left by 13."""

SMALLEST_SHIFTED_FLOAT16 = np.array(1 << 13, np.int32).view(np.float32)
"""The bits of the smallest float16, shifted left by 13, as a float32. It is a subnormal number."""


def cast(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Cast a 1-D array of floats to another floating-point dtype, with the results of torch.

    Args:
        array: The elements, of any floating-point dtype.
        dtype: The dtype of the result.

    Returns:
        A new array.
    """
    result = np.empty(array.shape, dtype.numpy)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, array.size, BLOCK_ELEMENTS):
            block = slice(start, start + BLOCK_ELEMENTS)
            _cast_block(array[block], result[block], dtype)
    return result


def _cast_block(values: np.ndarray, result: np.ndarray, dtype: DType) -> None:
    """Cast a block of elements into `result`, in the way that is fastest for this pair of dtypes.

    The results are those of torch. The module's docstring has its rules.
    """
    # torch rounds a float64 twice on its way to a narrower type.
    if values.itemsize == 8 and result.itemsize < 4:
        values = values.astype(np.float32)

    if values.itemsize == 1 or (values.itemsize == 2 and result.itemsize == 1):
        patterns = values.view(f"u{values.itemsize}")
        _look_up(patterns, _make_cast_table(values.dtype, dtype), result)
    elif result.itemsize == 1:
        table = _make_cast_table(np.dtype(ml_dtypes.bfloat16), dtype)
        _look_up(_round_to_odd(values), table, result)
    elif values.dtype == np.float16 and dtype.name == "float32":
        _widen_float16(values, result)
    else:
        # In all other cases numpy and ml_dtypes round as torch does.
        result[:] = values


def _look_up(patterns: np.ndarray, table: np.ndarray, result: np.ndarray) -> None:
    """Store the table's entry for each bit pattern in `result`."""
    result_patterns = result.view(table.dtype)
    # With "clip", numpy does not check the indices. None is out of bounds: the table has an entry
    # for every bit pattern.
    table.take(patterns, out=result_patterns, mode="clip")


def _widen_float16(values: np.ndarray, result: np.ndarray) -> None:
    """Cast float16 to float32 with integer operations and one multiplication.

    numpy casts one element at a time, which takes 17 times as long. Shifted by 13, the exponent and
    the fraction of a float16 are those of a float32 that is smaller by the factor 2^112. The
    multiplication by that factor is exact for every finite number, also for subnormal ones (Giesen,
    "Half to float done quic", 2012).
    """
    magnitudes = values.view(np.uint16) & np.uint16(0x7FFF)
    is_finite = magnitudes.max(initial=0) < FLOAT16_INFINITY_BITS
    # A program can make the processor treat subnormal numbers as zeros
    # (`torch.set_flush_denormal`), which the multiplication would do as well. numpy does not.
    keeps_subnormals = SMALLEST_SHIFTED_FLOAT16 * FLOAT16_BIAS_FACTOR != 0
    if not (is_finite and keeps_subnormals):
        result[:] = values
        return

    bits = result.view(np.int32)
    # Copying sign-extends each element, so that the shift moves a sign bit into the highest bit.
    np.copyto(bits, values.view(np.int16))
    np.left_shift(bits, np.int32(13), out=bits)
    np.bitwise_and(bits, SHIFTED_FLOAT16_BITS, out=bits)
    np.multiply(result, FLOAT16_BIAS_FACTOR, out=result)


def _round_to_odd(values: np.ndarray) -> np.ndarray:
    """Return the upper 16 bits of each float32, with the lowest bit set if a lower bit was set.

    NaN remains NaN, even if its payload is only in the lower bits.
    """
    bits = values.view(np.uint32)
    has_lower_bits = (bits & np.uint32(0xFFFF)) != 0
    upper_bits: np.ndarray = (bits >> np.uint32(16)).astype(np.uint16)
    upper_bits |= has_lower_bits
    return upper_bits


@lru_cache(maxsize=64)
def _make_cast_table(source: AnyDType, dtype: DType) -> np.ndarray:
    """Return a table for casts from an 8-bit or 16-bit type, with an entry for every bit pattern.

    The entry is the bit pattern of the result in the other dtype.
    """
    patterns = np.arange(1 << (8 * source.itemsize), dtype=f"u{source.itemsize}")
    with np.errstate(over="ignore", invalid="ignore"):
        values = patterns.view(source).astype(np.float32)
        is_zero = values == 0
        if dtype.name == SATURATING_TYPE:
            largest = largest_number(dtype)
            values = np.clip(values, -largest, largest)
        if dtype.name == POWERS_OF_TWO_TYPE:
            values = np.abs(values)
        results = values.astype(dtype.numpy)

    result_patterns = results.view(f"u{results.itemsize}")
    if dtype.name == POWERS_OF_TWO_TYPE:
        # ml_dtypes makes NaN of zero, torch makes 2^-127 of it.
        result_patterns[is_zero] = 0
    return result_patterns


def largest_number(dtype: DType) -> float:
    """Return the largest finite number of a floating-point dtype."""
    # ml_dtypes has no type annotations.
    limits = ml_dtypes.finfo(dtype.numpy)  # type: ignore[no-untyped-call]
    return float(limits.max)


def count_losses(array: np.ndarray, dtype: DType) -> dict[str, int]:
    """Count the elements that a cast would lose. Rounding to a near number is not a loss.

    Args:
        array: The elements before the cast, a 1-D array of floats.
        dtype: The dtype of the cast.

    Returns:
        The count of each outcome (`OUTCOMES`) that occurs.
    """
    counts: dict[str, int] = {}
    for start in range(0, array.size, BLOCK_ELEMENTS):
        block = array[start : start + BLOCK_ELEMENTS]
        if _keeps_all(block, dtype):
            continue
        for outcome, is_lost in _find_losses(block, dtype):
            count = int(np.count_nonzero(is_lost))
            if count:
                counts[outcome] = counts.get(outcome, 0) + count
    return counts


def count_losses_by_part(array: np.ndarray, dtype: DType, starts: Ints) -> dict[str, Ints]:
    """Count the elements that a cast would lose in each part of an array.

    Args:
        array: The elements before the cast, a 1-D array of floats.
        dtype: The dtype of the cast.
        starts: The first element of each part, in ascending order from 0. No part is empty.

    Returns:
        For each outcome (`OUTCOMES`) that occurs, its count in each part.
    """
    # Most casts lose nothing, and `count_losses` finds that out within the cache.
    if not count_losses(array, dtype):
        return {}
    counts: dict[str, Ints] = {}
    for outcome, is_lost in _find_losses(array, dtype):
        if is_lost.any():
            counts[outcome] = np.add.reduceat(is_lost, starts, dtype=np.int64)
    return counts


class SurvivingRange(Value, frozen=True):
    """The magnitudes of a source dtype that survive a cast to another dtype.

    A magnitude is the bit pattern of an absolute value, as an integer. These integers are in the
    order of the numbers, with infinity and NaN at the end.
    """

    start: int
    """The first magnitude that is not too small."""
    stop: int
    """The first magnitude that is too large."""
    too_large_stop: int
    """The magnitude after the last one that is lost because it is too large. NaN is not lost, nor
    is infinity if the target has one."""
    too_small_outcome: str
    too_large_outcome: str


@lru_cache(maxsize=64)
def _find_surviving_range(source: AnyDType, dtype: DType) -> SurvivingRange:
    """Find which magnitudes of a source dtype survive a cast, by casting single magnitudes.

    Magnitudes are in the order of the numbers, so a binary search finds each bound.
    """

    def is_too_large(magnitude: int) -> bool:
        return not math.isfinite(_cast_one(magnitude, source, dtype))

    def is_nonzero(magnitude: int) -> bool:
        return _cast_one(magnitude, source, dtype) != 0

    infinity = _magnitude_of(math.inf, source)
    magnitudes = range(1, infinity)
    stop = 1 + bisect_left(magnitudes, True, key=is_too_large)

    too_large_stop = infinity + 1
    too_large_outcome = "nan"
    if dtype.name == SATURATING_TYPE:
        too_large_outcome = "saturated"
    elif math.isinf(_cast_one(infinity, source, dtype)):
        too_large_outcome = "infinite"
        # An infinity stays what it is.
        too_large_stop = infinity

    if dtype.name == POWERS_OF_TWO_TYPE:
        start = max(_magnitude_of(2.0**-127, source), 1)
        too_small_outcome = "smallest"
    else:
        start = 1 + bisect_left(magnitudes, True, key=is_nonzero)
        too_small_outcome = "zero"
    return SurvivingRange(
        start=start,
        stop=stop,
        too_large_stop=too_large_stop,
        too_small_outcome=too_small_outcome,
        too_large_outcome=too_large_outcome,
    )


def _magnitude_of(value: float, dtype: AnyDType) -> int:
    """Return the bit pattern of a number as an integer."""
    patterns = np.array([value], dtype).view(f"u{dtype.itemsize}")
    return int(patterns[0])


def _cast_one(magnitude: int, source: AnyDType, dtype: DType) -> float:
    """Return the value of a magnitude after a cast that does not saturate."""
    patterns = np.array([magnitude], f"u{source.itemsize}")
    values = patterns.view(source)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.numpy.itemsize < 4:
            values = values.astype(np.float32)
        results = values.astype(dtype.numpy)
        return float(results[0])


def _keeps_all(array: np.ndarray, dtype: DType) -> bool:
    """Return whether a cast surely loses no element. One comparison decides it for most blocks.

    If it returns False, the elements that are lost are counted, which takes longer.
    """
    # Bytes are looked up. In a type without a sign every negative number is lost.
    if array.itemsize == 1 or dtype.name == POWERS_OF_TWO_TYPE:
        return False
    surviving = _find_surviving_range(array.dtype, dtype)
    magnitudes = _magnitudes_of(array)
    survives = _is_between(magnitudes, surviving.start, surviving.stop)
    return bool(survives.all())


def _find_losses(array: np.ndarray, dtype: DType) -> Iterator[tuple[str, Bools]]:
    """Find the elements that a cast would lose.

    Yields:
        An outcome that is possible (`OUTCOMES`), and which elements have it.
    """
    if array.itemsize == 1:
        patterns = array.view(np.uint8)
        for outcome, is_lost_pattern in _find_lost_bytes(array.dtype, dtype).items():
            yield outcome, is_lost_pattern.take(patterns)
        return

    surviving = _find_surviving_range(array.dtype, dtype)
    magnitudes = _magnitudes_of(array)
    # A zero that becomes zero is not lost. One that becomes the smallest number is.
    too_small_start = int(surviving.too_small_outcome == "zero")
    yield surviving.too_small_outcome, _is_between(magnitudes, too_small_start, surviving.start)
    is_too_large = _is_between(magnitudes, surviving.stop, surviving.too_large_stop)
    yield surviving.too_large_outcome, is_too_large
    if dtype.name == POWERS_OF_TWO_TYPE:
        patterns = array.view(magnitudes.dtype)
        unsigned = patterns.dtype.type
        # As unsigned integers, the patterns of all negative numbers are above that of -0.0.
        negative_zero = unsigned(1 << (8 * array.itemsize - 1))
        is_nan = magnitudes >= unsigned(surviving.too_large_stop)
        yield "unsigned", (patterns > negative_zero) & ~is_nan


@lru_cache(maxsize=64)
def _find_lost_bytes(source: AnyDType, dtype: DType) -> dict[str, Bools]:
    """Return, for each outcome that occurs, which bit patterns of an 8-bit type have it."""
    patterns = np.arange(256, dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        values = patterns.view(source).astype(np.float32)

    losses = _find_losses(values, dtype)
    return {outcome: is_lost for outcome, is_lost in losses if is_lost.any()}


def _magnitudes_of(array: np.ndarray) -> np.ndarray:
    """Return the bit patterns of absolute values, which are in the order of the numbers."""
    patterns = array.view(f"u{array.itemsize}")
    sign_bit = 1 << (8 * array.itemsize - 1)
    magnitude_mask = patterns.dtype.type(sign_bit - 1)
    return np.asarray(patterns & magnitude_mask)


def _is_between(integers: np.ndarray, start: int, stop: int) -> Bools:
    """Return which unsigned integers are in [start, stop), with a single comparison.

    An integer below `start` wraps around to a huge one (Warren, "Hacker's Delight", 4-1).
    """
    unsigned = integers.dtype.type
    distances = integers - unsigned(start)
    return np.asarray(distances < unsigned(stop - start))
