"""`singular_values`: the largest singular values of a tensor, as a matrix of its rows, from a random projection, under a budget.

A matrix A of n columns is multiplied by a few random vectors, and the span of what comes out holds most of what A does (Halko,
Martinsson and Tropp, 2011). One power iteration sharpens it:

    Y = A · random        m × k     one reading
    Z = Aᵀ · orth(Y)      n × k     one more
    T = A · orth(Z)       m × k     and one more; the singular values of T are those of A, nearly: never larger

Rows are read in blocks, so memory holds the two thin matrices and a block. The random numbers begin with one seed: the same tensor
gives the same values. Where there are no more rows or columns than vectors, the values are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from holdfast.core.tensor import LazyTensor
from holdfast.engine.checksums import Progress
from holdfast.engine.scan import elements
from holdfast.numeric.statistics import countable
from holdfast.reports.tiles import plane

VALUES, BESIDE = 32, 8
"""Singular values that are given, and vectors beyond them that make the last of them right."""

READINGS = 3

BLOCK_ELEMENTS = 1 << 20

BUDGET_NBYTES = 256 << 20
"""For the thin matrices, where no other budget is given."""


def spectral(tensor: LazyTensor, budget: int = BUDGET_NBYTES) -> bool:
    """Whether a tensor is a matrix of real numbers whose thin matrices fit into the budget."""
    height, width = plane(tensor)
    thin = 8 * (VALUES + BESIDE) * 2 * (height + width)
    return countable(tensor) and tensor.dtype.kind != "complex" and min(height, width) > 1 and thin + 16 * width <= budget


def reading_nbytes(tensor: LazyTensor, budget: int = BUDGET_NBYTES) -> int:
    return READINGS * tensor.nbytes if spectral(tensor, budget) else 0


def singular_values(
    tensor: LazyTensor, *, budget: int = BUDGET_NBYTES, progress: Progress | None = None
) -> tuple[float, ...] | None:
    """The largest singular values, largest first; None of what has none, does not fit, or holds something that is not finite."""
    if not spectral(tensor, budget):
        return None
    height, width = plane(tensor)
    vectors = min(VALUES + BESIDE, height, width)
    right = np.random.default_rng(0).standard_normal((width, vectors))
    left = np.empty((height, vectors))
    for start, block in _blocks(tensor, progress):
        left[start : start + len(block)] = block @ right
    if not np.isfinite(left).all():
        return None
    left = np.linalg.qr(left)[0]
    right = np.zeros((width, vectors))
    for start, block in _blocks(tensor, progress):
        right += block.T @ left[start : start + len(block)]
    right = np.linalg.qr(right)[0]
    for start, block in _blocks(tensor, progress):
        left[start : start + len(block)] = block @ right
    values = np.linalg.svd(left, compute_uv=False)
    return tuple(values[:VALUES].tolist()) if np.isfinite(values).all() else None


def _blocks(tensor: LazyTensor, progress: Progress | None) -> Iterator[tuple[int, np.ndarray]]:
    """Whole rows as float64, and the number of the first of them."""
    height, width = plane(tensor)
    step = max(1, BLOCK_ELEMENTS // width)
    for start in range(0, height, step):
        stop = min(start + step, height)
        values = elements(tensor, start * width, stop * width)
        with np.errstate(invalid="ignore"):
            yield start, values.astype(np.float64).reshape(stop - start, width)
        if progress is not None:
            progress(tensor.dtype.nbytes(math.prod((stop - start, width))))
