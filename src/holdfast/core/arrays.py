"""Kinds of numpy arrays that stand everywhere, and small helpers on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]  # Offsets, lengths, counts: whatever may pass 2^31.
AnyDType = np.dtype[np.generic]
Bools = npt.NDArray[np.bool_]

DOT_ELEMENTS = 8192  # Of a row that BLAS multiplies by itself: from 10,000 on it would start threads of its own, for each of ours.


def shape_columns(shapes: Sequence[tuple[int, ...]]) -> Ints:
    """Shapes as columns: a row for each dimension of the one that has the most, filled up with ones.

    >>> shape_columns([(2, 3), (), (4,)]).tolist()
    [[2, 1, 4], [3, 1, 1]]
    """
    different = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
    most = max(map(len, different), default=0)
    rows = np.array(
        [(*shape, *[1] * (most - len(shape))) for shape in different], np.int64
    ).reshape(len(different), most)
    return rows.T.take(
        np.fromiter(map(different.__getitem__, shapes), np.int64, len(shapes)), axis=1
    )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a tensor seen as a matrix: the first axis by all others.

    >>> matrix_shape((2, 3, 4)), matrix_shape((5,))
    ((2, 12), (1, 5))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def byte_row(array: np.ndarray) -> npt.NDArray[np.uint8]:
    """The bytes of an array in C order, as one row: the same memory where it lies in that order, a copy where it does not.

    >>> byte_row(np.array([[1, 2], [3, 4]], "<u2").T).tolist()
    [1, 0, 3, 0, 2, 0, 4, 0]
    """
    return array.reshape(-1).view(np.uint8)


def inner_product(a: np.ndarray, b: np.ndarray) -> float:
    """The sum of the products of two rows of float64; NaN or infinite where one of them is, or where it is beyond float64.

    >>> inner_product(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    11.0
    """
    whole = len(a) // DOT_ELEMENTS * DOT_ELEMENTS
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.einsum("i,i->", a[whole:], b[whole:]))
        if whole:  # a third of einsum's time
            rows = np.matmul(
                a[:whole].reshape(-1, 1, DOT_ELEMENTS), b[:whole].reshape(-1, DOT_ELEMENTS, 1)
            )
            total += float(rows.sum())
    return total
