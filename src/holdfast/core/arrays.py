"""Numpy arrays of the kinds that stand everywhere, and any array as a row of its bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["AnyDType", "Bools", "Ints", "byte_row"]

Ints = npt.NDArray[np.int64]
"""Offsets, lengths, counts: whatever may pass 2^31."""

AnyDType = np.dtype[np.generic]

Bools = npt.NDArray[np.bool_]


def byte_row(array: np.ndarray) -> npt.NDArray[np.uint8]:
    """The bytes of an array in C order, as one row: the same memory where it lies in that order, a copy where it does not.

    >>> byte_row(np.array([[1, 2], [3, 4]], "<u2").T).tolist()
    [1, 0, 3, 0, 2, 0, 4, 0]
    """
    return array.reshape(-1).view(np.uint8)
