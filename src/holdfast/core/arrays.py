"""Types of numpy arrays that all modules share, and small functions on arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
"""Offsets, sizes and counts, which may exceed 2^31."""

Bools = npt.NDArray[np.bool_]

AnyDType = np.dtype[np.generic]

DOT_ELEMENTS = 8192
"""The elements that BLAS multiplies and adds in one call. From 10,000 on, BLAS would start threads
of its own for each of our threads."""


def shape_columns(shapes: Sequence[tuple[int, ...]]) -> Ints:
    """Return shapes as a matrix with a row for each dimension and a column for each shape.

    Shapes with fewer dimensions than the longest one are padded with ones at the end.

    >>> shape_columns([(2, 3), (), (4,)]).tolist()
    [[2, 1, 4], [3, 1, 1]]
    """
    # A checkpoint has many tensors of few different shapes, so only these are padded.
    shape_indices = {shape: index for index, shape in enumerate(dict.fromkeys(shapes))}
    max_rank = max(map(len, shape_indices), default=0)
    padded_shapes = []
    for shape in shape_indices:
        padding = (1,) * (max_rank - len(shape))
        padded_shapes.append(shape + padding)
    columns = np.array(padded_shapes, np.int64).reshape(len(padded_shapes), max_rank).T

    indices = map(shape_indices.__getitem__, shapes)
    column_indices = np.fromiter(indices, np.int64, len(shapes))
    return columns.take(column_indices, axis=1)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a tensor seen as a matrix: the first axis by all others.

    A tensor with fewer than two axes is one row.

    >>> matrix_shape((2, 3, 4)), matrix_shape((5,))
    ((2, 12), (1, 5))
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def byte_row(array: np.ndarray) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array in C order, as an array with one axis.

    The result shares the memory of a C-ordered array. Of any other array it is a copy.

    >>> byte_row(np.array([[1, 2], [3, 4]], "<u2").T).tolist()
    [1, 0, 3, 0, 2, 0, 4, 0]
    """
    return array.reshape(-1).view(np.uint8)


def inner_product(a: np.ndarray, b: np.ndarray) -> float:
    """Return the sum of the products of two 1-D arrays of float64.

    The result is NaN or infinite if a product is, or if the sum exceeds the range of float64.

    >>> inner_product(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    11.0
    """
    # BLAS multiplies whole rows of `DOT_ELEMENTS`, in a third of the time of einsum. The remaining
    # elements are left to einsum.
    blas_count = len(a) // DOT_ELEMENTS * DOT_ELEMENTS
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.einsum("i,i->", a[blas_count:], b[blas_count:]))
        if blas_count:
            rows = a[:blas_count].reshape(-1, 1, DOT_ELEMENTS)
            columns = b[:blas_count].reshape(-1, DOT_ELEMENTS, 1)
            total += float(np.matmul(rows, columns).sum())
    return total
