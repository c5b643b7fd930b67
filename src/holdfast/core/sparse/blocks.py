"""A bit a block of a matrix, and the blocks that are not all zeros.

    the tensor as a matrix, its first axis by all others; blocks of 2 × 2

    a b │ 0 0 │ e        where      0b101 for this band of blocks, padded to whole bytes behind each group of bands
    c d │ 0 0 │ 0        values     a b c d  e 0 0 0        each block in C order; what lies beyond the edge is zero

The bits behind the last block of a group are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from holdfast.core.sparse.elements import Elements, Octets, are_set, marks_of, unequal
from holdfast.errors import MetadataError

__all__ = ["BAND_ELEMENTS", "Blocks", "group_rows"]

GROUP_ELEMENTS = 1 << 17
"""Elements that a group of bands has if it can."""

BAND_ELEMENTS = 1 << 20
"""Elements of the largest band: what has to be unpacked for one of its elements."""

GROUP_ROWS = 64
"""Rows that a group has at the least, as long as they fit: blocks up to this height then have groups of one size."""


def group_rows(columns: int) -> int:
    """Rows of a group, before it is made a multiple of the block's height: a power of two, or 0 where rows are too long."""
    rows = max(GROUP_ELEMENTS // columns, min(GROUP_ROWS, BAND_ELEMENTS // columns))
    return 1 << (rows.bit_length() - 1) if rows else 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """The encoding of a matrix by blocks of `height` × `width`."""

    rows: int
    columns: int
    height: int
    width: int

    name: ClassVar[str] = "block"
    counted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (1 <= self.height <= self.rows and 1 <= self.width <= self.columns) or self.height * self.columns > BAND_ELEMENTS:
            shape = f"{self.rows:,} × {self.columns:,}"
            raise MetadataError(f"blocks of {self.height:,} × {self.width:,} do not fit a matrix of {shape}")

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.height, self.width)

    @property
    def count(self) -> int:
        return self.rows * self.columns

    @property
    def unit(self) -> int:
        return self.height * self.width

    @property
    def group(self) -> int:
        return max(group_rows(self.columns) // self.height, 1) * self.height * self.columns

    def where_nbytes(self, count: int) -> int:
        return (self._bits(count) + 7) // 8

    def most(self, count: int) -> int:
        return self._bits(count) * self.unit

    def mark(self, dense: Elements) -> Octets:
        return np.packbits(self._marked(self._blocks(self._padded(dense))), bitorder="little")

    def take(self, dense: Elements) -> Elements:
        blocks = self._blocks(self._padded(dense))
        return np.asarray(blocks[self._marked(blocks)]).reshape(-1)

    def count_values(self, dense: Elements) -> int:
        return int(np.count_nonzero(self._marked(self._blocks(self._padded(dense))))) * self.unit

    def unpack(self, where: Octets, values: Elements, out: Elements) -> None:
        bits = self._bits(len(out))
        bands = bits // self._across
        marked = marks_of(where, bits).reshape(bands, self._across)
        wanted = int(np.count_nonzero(marked)) * self.unit
        if wanted != len(values):
            raise unequal(wanted, len(values))
        even = len(out) == bits * self.unit
        grid = out if even else np.empty(bits * self.unit, out.dtype)
        grid.view(np.uint8)[:] = 0
        self._blocks(grid.reshape(bands * self.height, -1))[marked] = values.reshape(-1, self.height, self.width)
        if not even:
            placed = out.reshape(-1, self.columns)
            placed[...] = grid.reshape(bands * self.height, -1)[: len(placed), : self.columns]

    @property
    def _across(self) -> int:
        """Blocks side by side."""
        return -(-self.columns // self.width)

    def _bits(self, count: int) -> int:
        """Blocks of so many whole rows."""
        return -(-count // (self.columns * self.height)) * self._across

    def _padded(self, dense: Elements) -> np.ndarray:
        """Whole rows as a matrix of whole blocks."""
        matrix = dense.reshape(-1, self.columns)
        height, width = -len(matrix) % self.height, -self.columns % self.width
        if not height and not width:
            return matrix
        padded = np.zeros((len(matrix) + height, self.columns + width), matrix.dtype)
        padded[: len(matrix), : self.columns] = matrix
        return padded

    def _blocks(self, matrix: np.ndarray) -> np.ndarray:
        """A matrix of whole blocks as a band of them a row: four dimensions over the same memory."""
        bands = len(matrix) // self.height
        return matrix.reshape(bands, self.height, self._across, self.width).transpose(0, 2, 1, 3)

    def _marked(self, blocks: np.ndarray) -> np.ndarray:
        """Which blocks are not all zeros. Rows of a block are looked at in the widest words that divide them."""
        rows = blocks.transpose(0, 2, 1, 3)
        nbytes = self.width * rows.dtype.itemsize
        wide = next(word for word in (8, 4, 2, 1) if nbytes % word == 0)
        words = rows.reshape(-1).view(f"<u{wide}").reshape(*rows.shape[:3], nbytes // wide)
        joined = np.bitwise_or.reduce(np.bitwise_or.reduce(words, axis=1), axis=-1)
        return are_set(joined.reshape(-1)).reshape(joined.shape)
