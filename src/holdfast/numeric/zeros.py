"""Where the zeros of a tensor are: how many, how many of every m neighbours at the most, in which blocks, rows and columns.

A tensor is seen as a matrix, its first axis by all others. Which elements are something becomes booleans, and those become bits,
eight elements of a row a byte; blocks are unions of bits, larger ones of smaller ones (`MarkedBlocks`). Blocks have sides up to 64,
and whoever cuts a tensor cuts it at multiples of 64 rows and columns, so that none of them is cut.

What zero is depends on who asks: `sparsity` means the number (`ZeroPlaces`), packing the pattern without a bit, so that minus zero
comes back (`BitCounts`, `BlockCounts`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from holdfast.core.arrays import Bools
from holdfast.core.tensor import LazyTensor
from holdfast.numeric.pack import (
    ByteArray,
    are_set,
    as_bits,
    count_set,
    group_rows,
    matrix_shape,
    most_set,
    set_bits,
)

PATTERNS = (2, 4, 8, 16)

Shape = tuple[int, int]


SIDES, LENGTHS = (
    (4, 8, 16, 32, 64),
    (8, 16, 32, 64),
)  # Sides of square blocks, and lengths of blocks of one row or column.
SHAPES: tuple[Shape, ...] = (
    *((1, n) for n in LENGTHS),
    *((n, 1) for n in LENGTHS),
    *((n, n) for n in SIDES),
)


def whole_patterns(shape: Sequence[int], wanted: Collection[int] = PATTERNS) -> list[int]:
    """The `m` whose groups fill the last axis."""
    return [m for m in wanted if shape and shape[-1] % m == 0]


class MarkedBlocks:
    """Which blocks of a matrix of booleans have any that is set; their sides are powers of two up to 64."""

    def __init__(self, marked: Bools) -> None:
        self.shape = marked.shape
        packed = np.packbits(marked, axis=1, bitorder="little")
        # Rows of whole words of 64 bits.
        padded = np.zeros((len(packed), -(-packed.shape[1] // 8) * 8), np.uint8)
        padded[:, : packed.shape[1]] = packed
        self._tall = {1: padded}

    def rows(self) -> Bools:
        return np.asarray(self._tall[1].any(axis=1))

    def columns(self) -> Bools:
        any_row: ByteArray = np.bitwise_or.reduce(self._tall[1], axis=0)
        return np.unpackbits(any_row, count=self.shape[1], bitorder="little").view(np.bool_)

    def count(self, height: int, width: int) -> int:
        """Blocks with anything in them; those at the lower and right edge are smaller."""
        return _count(self._rows(height), width)

    def area(self, height: int, width: int) -> int:
        rows, last = self._rows(height), self.shape[1] - 1
        found = _count(rows, width) * height * width
        below, right = -self.shape[0] % height, -self.shape[1] % width
        if below:
            found -= below * width * _count(rows[-1:], width)
        if right:
            # The blocks of the last column: whole words, or bits of a byte.
            edge = _words(rows, width)[:, last // max(width, 8)]
            edge = edge & np.uint8(_narrow(width)[last % 8 // width]) if width < 8 else edge
            found -= right * height * int(np.count_nonzero(edge))
            found += below * right * bool(edge[-1])
        return found

    def _rows(self, height: int) -> ByteArray:
        """So many rows as one, that has what any of them has."""
        if height not in self._tall:
            half = self._rows(height // 2)
            whole = half[::2].copy()
            whole[: len(half) // 2] |= half[1::2]
            self._tall[height] = whole
        return self._tall[height]


def _count(rows: ByteArray, width: int) -> int:
    """Groups of so many bits, in rows of them, that have one."""
    if width == 1:
        return set_bits(rows)
    if width >= 8:
        return int(np.count_nonzero(_words(rows, width)))
    return sum(int(np.count_nonzero(rows & np.uint8(mask))) for mask in _narrow(width))


def _words(rows: ByteArray, width: int) -> np.ndarray:
    return rows.view(f"u{max(width // 8, 1)}")


def _narrow(width: int) -> list[int]:
    """The groups of so many bits in a byte.

    >>> _narrow(4)
    [15, 240]
    """
    return [((1 << width) - 1) << at for at in range(0, 8, width)]


class ZeroPlaces:
    """Where a tensor has the number zero, of either sign. Blocks are whole rows, or rectangles."""

    def __init__(self, shape: Sequence[int], blocks: Sequence[Shape]) -> None:
        self._matrix = rows, columns = matrix_shape(shape)
        self.zeros = 0
        self.most = dict.fromkeys(whole_patterns(shape), 0)
        """By `m`: how many of a group along the last axis are not zero, at the most."""
        self.explained = {block: 0 for block in blocks if block[0] <= rows and block[1] <= columns}
        """By the shape of blocks: zeros in blocks that are all zeros."""
        self.dead = 0, 0
        """Rows, and columns, with nothing but zeros."""
        # A vector has no rows that could be dead. Neither has a tensor without elements, and a file
        # of a few bytes can say that one has 2**40 rows.
        has_rows = len(shape) > 1 and rows * columns > 0
        self._rows, self._columns = (
            np.zeros(count if has_rows else 0, np.bool_) for count in self._matrix
        )
        self._lock = threading.Lock()

    def add(self, start: int, values: np.ndarray) -> None:
        height, width = self._matrix
        if values.ndim == 1:
            values = values.reshape(-1, width) if height > 1 else values.reshape(1, -1)
        marked = np.asarray(values != 0)
        zeros, flat = values.size - int(np.count_nonzero(marked)), marked.reshape(-1)
        most, explained = {m: m for m in self.most}, dict.fromkeys(self.explained, 0)
        rows: Bools | bool = True
        columns: Bools | bool = True
        if zeros:
            found, packed = MarkedBlocks(marked), np.packbits(flat, bitorder="little")
            most = {m: most_set(flat, packed, m) for m in most}
            explained = {block: values.size - found.area(*block) for block in explained}
            rows, columns = found.rows(), found.columns()
        top, left = divmod(start, width)
        with self._lock:
            self.zeros += zeros
            self.most = {m: max(n, most[m]) for m, n in self.most.items()}
            self.explained = {block: n + explained[block] for block, n in self.explained.items()}
            if self._columns.size:
                self._rows[top : top + len(values)] |= rows
                self._columns[left : left + values.shape[1]] |= columns

    def result(self) -> ZeroPlaces:
        # The results of all tensors are kept, so they go without a byte for each row and column.
        dead_rows = int(np.count_nonzero(~self._rows))
        self.dead = dead_rows, int(np.count_nonzero(~self._columns))
        del self._rows, self._columns
        return self


class BitCounts:
    """How many elements have a bit. Blocks begin at multiples of every `m`."""

    def __init__(self, useful: Mapping[int, int]) -> None:
        """`useful` has for each `m` that is looked at how many of a group may have a bit: with more nobody looks on."""
        self._useful = useful
        self.filled = 0
        self.most = dict.fromkeys(useful, 1)
        """By `m`: how many of a group have one, at the most; where that is more than is useful, there may be groups with more."""
        self._lock = threading.Lock()

    def add(self, start: int, values: np.ndarray) -> None:
        values = as_bits(values)
        filled = count_set(values)
        # What other threads have found out by now is a bonus.
        alive = [m for m, most in self.most.items() if most <= self._useful[m]]
        found: dict[int, int] = {}
        if alive:
            marked = are_set(values)
            packed = np.packbits(marked, bitorder="little")
            found = {m: most_set(marked, packed, m) for m in alive}
        with self._lock:
            self.filled += filled
            self.most.update({m: max(self.most[m], most) for m, most in found.items()})

    def result(self) -> BitCounts:
        return self


class BlockCounts:
    """How many blocks of each shape have a bit in them. Blocks of elements are whole rows."""

    def __init__(self, tensor: LazyTensor) -> None:
        rows, self._columns = matrix_shape(tensor.shape)
        high = min(group_rows(self._columns), rows)
        self.elements = 0
        self.counts = {
            shape: 0 for shape in SHAPES if shape[0] <= high and shape[1] <= self._columns
        }
        self._lock = threading.Lock()

    def add(self, start: int, values: np.ndarray) -> None:
        found = MarkedBlocks(are_set(as_bits(values)).reshape(-1, self._columns))
        counts = {block: found.count(*block) for block in self.counts}
        with self._lock:
            self.elements += values.size
            self.counts = {block: n + counts[block] for block, n in self.counts.items()}

    def result(self) -> BlockCounts:
        return self
