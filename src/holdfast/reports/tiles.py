"""`tile`: a square of a tensor as a picture of 256 by 256 pixels: an element each, or the mean of 2^level by 2^level of them.

A tensor is looked at as rows of its last dimension, whatever it has before that. A tile reads at most `MOST` elements: of cells
that are larger than that allows, evenly spaced rows, and of very long rows a run at the beginning of each cell. A cell with a NaN
among what was read is NaN, so that one sick number is seen from far away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from holdfast.core.box import run_boxes
from holdfast.core.protocols import Request
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import BadArgument

SIDE = 256
"""Pixels of a tile, on each side."""

MOST = 1 << 22
"""Elements that are read for a tile."""

WIDEST, RUN = 1 << 14, 64
"""Elements of a row that are read for a tile; of a longer one, a run of each cell."""

DEEPEST = 40
"""Levels. 2^40 elements on a side are more than there are."""


class Tile(Value, frozen=True):
    values: np.ndarray
    """float32, rows by columns, at most `SIDE` of each."""
    whole: bool
    """Whether every element of each cell was read."""

    @property
    def ends(self) -> tuple[float, float] | None:
        """The least and the largest that is finite."""
        some = self.values[np.isfinite(self.values)]
        return (float(some.min()), float(some.max())) if some.size else None


def plane(tensor: LazyTensor) -> tuple[int, int]:
    """Rows and columns of a tensor, as it is looked at."""
    return math.prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.shape else 1


def tile(tensor: LazyTensor, row: int, column: int, *, level: int = 0) -> Tile:
    """The tile whose upper left element is there."""
    height, width = plane(tensor)
    if not 0 <= level <= DEEPEST or not 0 <= row < height or not 0 <= column < width:
        raise BadArgument(f"no tile at row {row:,}, column {column:,}, level {level} in {height:,} × {width:,}", tensor=tensor.name)
    cell = 1 << level
    rows, columns = _cells(row, height, cell), _cells(column, width, cell)
    wide = columns[-1][1] - columns[0][0]
    runs = [(columns[0][0], columns[-1][1])] if wide <= WIDEST else [(a, min(b, a + RUN)) for a, b in columns]
    across = sum(stop - start for start, stop in runs)
    # Rows of a cell that are read.
    deep = max(1, MOST // (across * len(rows)))
    picked = [start + (stop - start) * i // min(deep, stop - start) for start, stop in rows for i in range(min(deep, stop - start))]
    numbers = _read(tensor, picked, runs)
    down = np.cumsum([0, *(min(deep, stop - start) for start, stop in rows)])
    right = [stop - start for start, stop in columns] if len(runs) == 1 else [stop - start for start, stop in runs]
    made = _means(numbers, down[:-1], np.cumsum([0, *right])[:-1])
    return Tile(made, all(stop - start <= deep for start, stop in rows) and len(runs) == 1)


def _cells(start: int, size: int, cell: int) -> list[tuple[int, int]]:
    return [(at, min(at + cell, size)) for at in range(start, min(size, start + SIDE * cell), cell)]


def _read(tensor: LazyTensor, rows: Sequence[int], runs: Sequence[tuple[int, int]]) -> np.ndarray:
    """The elements of these rows in these columns, as float32; complex numbers by their absolute values."""
    whole = tensor if tensor.shape else tensor[None]
    out = np.empty((len(rows), sum(stop - start for start, stop in runs)), tensor.dtype.numpy)
    requests: list[Request] = []
    at = 0
    for first, last in _stretches(rows):
        for box in [one.slices for one in run_boxes(whole.shape[:-1], first, last)]:
            left, count = 0, math.prod(part.stop - part.start for part in box)
            for start, stop in runs:
                part = whole[(*box, slice(start, stop))]
                requests.append(Request(part, out[at : at + count, left : left + stop - start].reshape(part.shape)))
                left += stop - start
            at += count
    tensor.source.read(requests)
    with np.errstate(all="ignore"):
        if out.dtype.names:
            return np.asarray(np.hypot(out["real"].astype(np.float32), out["imag"].astype(np.float32)))
        plain: np.ndarray = np.abs(out) if out.dtype.kind == "c" else out
        return plain.astype(np.float32)


def _stretches(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Rows that follow each other, as ranges.

    >>> _stretches([0, 1, 2, 5, 7, 8])
    [(0, 3), (5, 6), (7, 9)]
    """
    made: list[tuple[int, int]] = []
    for row in rows:
        if made and made[-1][1] == row:
            made[-1] = (made[-1][0], row + 1)
        else:
            made.append((row, row + 1))
    return made


def _means(numbers: np.ndarray, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The mean of each cell; cells begin at these rows and columns."""
    if len(down) == numbers.shape[0] and len(right) == numbers.shape[1]:
        return numbers
    with np.errstate(all="ignore"):
        sums: np.ndarray = np.add.reduceat(np.add.reduceat(numbers, down, axis=0, dtype=np.float64), right, axis=1)
        counts = np.diff([*down, numbers.shape[0]])[:, None] * np.diff([*right, numbers.shape[1]])
        means: np.ndarray = sums / counts
        return means.astype(np.float32)
