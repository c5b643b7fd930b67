"""Integers of any two of numpy's integer types, compared exactly.

numpy before 2 compares int64 with uint64 as float64, and subtracting them overflows in every version. Here everything is said as
a sign and a magnitude in uint64. Of one sign, magnitudes subtract; of two, they add, and a sum that is smaller than its parts has
carried into bit 64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["greatest", "int_changes"]

Words = npt.NDArray[np.uint64]


def int_changes(a: np.ndarray, b: np.ndarray) -> npt.NDArray[np.bool_]:
    """Which elements are not equal."""
    if a.dtype == b.dtype:
        return np.asarray(a != b)
    return np.asarray((_negative(a) != _negative(b)) | (_words(a) != _words(b)))


def greatest(a: np.ndarray, b: np.ndarray) -> tuple[int, float]:
    """The largest absolute difference, exactly, and the largest relative one, of elements that are not equal."""
    if not a.size:
        return 0, 0.0
    below_a, below_b = _negative(a), _negative(b)
    words_a, words_b = _words(a), _words(b)
    size_a, size_b = np.where(below_a, -words_a, words_a), np.where(below_b, -words_b, words_b)
    same_sign = below_a == below_b
    # Of one sign, the magnitudes differ by less than 2^64; of two, they add up, perhaps to more.
    apart = np.where(same_sign, np.maximum(size_a, size_b) - np.minimum(size_a, size_b), size_a + size_b)
    carried = ~same_sign & (apart < size_a)
    most = (1 << 64) + int(apart[carried].max()) if carried.any() else int(apart.max())
    larger = np.maximum(size_a, size_b).astype(np.float64)
    ratio = (apart.astype(np.float64) + np.where(carried, 2.0**64, 0.0)) / larger
    return most, float(ratio.max())


def _negative(array: np.ndarray) -> npt.NDArray[np.bool_]:
    return np.asarray(array < 0) if array.dtype.kind == "i" else np.zeros(array.shape, np.bool_)


def _words(array: np.ndarray) -> Words:
    """Modulo 2^64."""
    return array.astype(np.int64).view(np.uint64) if array.dtype.kind == "i" else array.astype(np.uint64)
