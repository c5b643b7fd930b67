"""Count the zeros of a tensor: all of them, by groups of m neighbours, and by blocks, rows and columns.

A tensor is seen as a matrix, its first axis by all others. Which elements are something becomes booleans, and those become bits,
eight elements of a row a byte; blocks are unions of bits, larger ones of smaller ones (`MarkedBlocks`). Blocks have sides up to 64,
and whoever cuts a tensor cuts it at multiples of 64 rows and columns, so that none of them is cut.

Zero is the number, of either sign.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from holdfast.core.arrays import Bools, matrix_shape

ByteArray = np.ndarray

GROUP_SIZES = (2, 4, 8, 16)
"""The m of the N:M patterns that are looked for."""

Shape = tuple[int, int]


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
        return int(_translate(rows, POPULATION).sum(dtype=np.int64))
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
        # Groups lie along the last axis and have to fill it.
        group_sizes = [m for m in GROUP_SIZES if shape and shape[-1] % m == 0]
        self.most = dict.fromkeys(group_sizes, 0)
        """By group size: the largest number of non-zero elements in a group."""
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
            most = {m: _largest_group_count(flat, packed, m) for m in most}
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


def _largest_group_count(marked: Bools, packed: ByteArray, m: int) -> int:
    """Return the largest number of booleans that are set in a group of `m`; `packed` has them as bits."""
    if len(marked) % 16:
        # Sums of columns: rows of m elements are too short for numpy.
        counts = marked[::m].astype(np.uint8)
        for k in range(1, m):
            counts += marked[k::m]
        return int(counts.max(initial=0))
    counts = _translate(packed, _byte_counts(min(m, 8)))
    if m == 16:
        counts = counts[::2] + counts[1::2]
    return int(counts.max(initial=0))


@lru_cache(maxsize=3)
def _byte_counts(m: int) -> bytes:
    """For each byte, the largest number of bits in one of its groups of `m`."""
    mask = (1 << m) - 1
    return bytes(
        max((byte >> shift & mask).bit_count() for shift in range(0, 8, m)) for byte in range(256)
    )


POPULATION = bytes(byte.bit_count() for byte in range(256))
"""For each byte, the number of its bits."""


def _translate(values: ByteArray, table: bytes) -> ByteArray:
    return np.frombuffer(values.tobytes().translate(table), np.uint8)
