"""Counts the zeros of a tensor: all of them, and how they are arranged in groups, blocks and lines.

A tensor is read as a matrix, its first axis by all others. "Zero" is the number, of either sign.

- Groups: every `m` consecutive elements of a row. In an N:M pattern at most `n` are nonzero.
- Blocks: rectangles that tile the matrix. A block is dead if all of its elements are zero.
- Lines: rows and columns. A line is dead if all of its elements are zero.

The matrix arrives in tiles, which are cut at multiples of 64 rows and columns. So a tile contains
whole groups of up to 16 elements, and whole blocks with sides of up to 64. A tile is reduced to one
bit for each element, packed eight to a byte. Groups and blocks are counted by operations on whole
bytes and words of these bits (SWAR, "SIMD within a register": Fisher and Dietz, 1998).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools, matrix_shape
from holdfast.core.value import Value

ByteArray = npt.NDArray[np.uint8]

BlockShape = tuple[int, int]
"""Height and width of a block. Both are powers of two up to 64."""

GROUP_SIZES = (2, 4, 8, 16)
"""The `m` of the N:M patterns that are looked for."""

BIT_COUNTS = bytes(byte.bit_count() for byte in range(256))
"""The number of bits in each byte."""


class ZeroCounts(Value, frozen=True):
    """How many zeros a tensor has, and how they are arranged."""

    zeros: int
    max_group_nonzeros: dict[int, int]
    """For each group size, the largest number of nonzero elements in a group. A size by which the
    last axis is not divisible is missing."""
    zeros_in_dead_blocks: dict[BlockShape, int]
    """For each block shape that fits into the tensor, the zeros that lie in dead blocks."""
    dead_rows: int
    dead_columns: int


class TileSummary(Value, frozen=True, eq=False):
    """The zeros of one tile. The words are those of `ZeroCounter`."""

    zeros: int
    max_group_nonzeros: dict[int, int]
    """The largest number of nonzero elements in a group, by the size of the group."""
    zeros_in_dead_blocks: dict[BlockShape, int]
    is_row_alive: Bools
    is_column_alive: Bools


class ZeroCounter:
    """Accumulates the zero counts of a tensor from its tiles. Threads may add at the same time.

    A group is a run of 2, 4, 8 or 16 consecutive elements of a row. A block is a rectangle of the
    matrix, and is dead if all of its elements are zero. A line is a row or a column, and is alive
    if at least one of its elements is nonzero.
    """

    def __init__(self, shape: Sequence[int], block_shapes: Sequence[BlockShape]) -> None:
        """Start with no zeros, and with lines that are dead until a tile shows a nonzero element.

        Args:
            shape: The shape of the tensor.
            block_shapes: The shapes of blocks to count. Those that do not fit are left out.
        """
        row_count, column_count = matrix_shape(shape)
        self._matrix_shape = row_count, column_count
        self._zeros = 0
        # A group does not cross the end of a row of the last axis.
        group_sizes = [size for size in GROUP_SIZES if shape and shape[-1] % size == 0]
        self._max_group_nonzeros = dict.fromkeys(group_sizes, 0)
        self._zeros_in_dead_blocks: dict[BlockShape, int] = {}
        for height, width in block_shapes:
            if height <= row_count and width <= column_count:
                self._zeros_in_dead_blocks[height, width] = 0

        # A vector has no lines that could be dead. Neither has a tensor without elements, and the
        # header of a tiny file can claim that one has 2**40 rows.
        self._has_lines = len(shape) > 1 and row_count * column_count > 0
        if not self._has_lines:
            row_count = column_count = 0
        self._is_row_alive = np.zeros(row_count, np.bool_)
        self._is_column_alive = np.zeros(column_count, np.bool_)
        self._lock = threading.Lock()

    def add(self, start: int, values: np.ndarray) -> None:
        """Count the zeros of a tile, and add them to those of the tensor.

        Args:
            start: The index of the tile's first element in C order.
            values: The tile as a matrix. A tile that spans all columns can also be passed as a 1-D
                array of its whole rows, and a tile of a matrix with one row as any part of it.
        """
        row_count, column_count = self._matrix_shape
        if values.ndim == 1:
            tile_width = column_count if row_count > 1 else values.size
            values = values.reshape(-1, max(tile_width, 1))
        summary = self._summarize_tile(np.asarray(values != 0))
        top_row, left_column = divmod(start, column_count)
        with self._lock:
            self._merge(summary, top_row, left_column)

    def _summarize_tile(self, is_nonzero: Bools) -> TileSummary:
        """Count the zeros of a tile, and find out how they are arranged.

        Args:
            is_nonzero: Which elements of the tile, a matrix, are nonzero.
        """
        # Most tiles have no zeros. Then all groups are full, no block is dead, and every line is
        # alive.
        zeros = is_nonzero.size - int(np.count_nonzero(is_nonzero))
        if not zeros:
            height, width = is_nonzero.shape
            return TileSummary(
                zeros=0,
                max_group_nonzeros={size: size for size in self._max_group_nonzeros},
                zeros_in_dead_blocks={},
                is_row_alive=np.ones(height, np.bool_),
                is_column_alive=np.ones(width, np.bool_),
            )

        # Groups do not cross the end of a row, so the rows can be packed one after the other.
        group_bits = np.packbits(is_nonzero.reshape(-1), bitorder="little")
        max_group_nonzeros: dict[int, int] = {}
        for size in self._max_group_nonzeros:
            max_group_nonzeros[size] = _count_fullest_group(group_bits, size)

        # Every element of a dead block is a zero, so its zeros are the area that is not alive.
        tile_bits = TileBits(is_nonzero)
        zeros_in_dead_blocks: dict[BlockShape, int] = {}
        for block_shape in self._zeros_in_dead_blocks:
            live_area = tile_bits.measure_live_area(*block_shape)
            zeros_in_dead_blocks[block_shape] = is_nonzero.size - live_area
        return TileSummary(
            zeros=zeros,
            max_group_nonzeros=max_group_nonzeros,
            zeros_in_dead_blocks=zeros_in_dead_blocks,
            is_row_alive=tile_bits.find_live_rows(),
            is_column_alive=tile_bits.find_live_columns(),
        )

    def _merge(self, summary: TileSummary, top_row: int, left_column: int) -> None:
        """Add the zeros of a tile to those of the tensor. The caller holds the lock.

        Args:
            summary: The zeros of the tile.
            top_row: The row of the tensor in which the tile begins.
            left_column: The column of the tensor in which the tile begins.
        """
        self._zeros += summary.zeros
        for size, nonzeros in summary.max_group_nonzeros.items():
            self._max_group_nonzeros[size] = max(self._max_group_nonzeros[size], nonzeros)
        for block_shape, block_zeros in summary.zeros_in_dead_blocks.items():
            self._zeros_in_dead_blocks[block_shape] += block_zeros

        # A row crosses several tiles. It is alive if it is alive in one of them.
        if self._has_lines:
            bottom_row = top_row + len(summary.is_row_alive)
            right_column = left_column + len(summary.is_column_alive)
            self._is_row_alive[top_row:bottom_row] |= summary.is_row_alive
            self._is_column_alive[left_column:right_column] |= summary.is_column_alive

    def result(self) -> ZeroCounts:
        """Return the counts of all tiles together."""
        return ZeroCounts(
            zeros=self._zeros,
            max_group_nonzeros=self._max_group_nonzeros,
            zeros_in_dead_blocks=self._zeros_in_dead_blocks,
            dead_rows=int(np.count_nonzero(~self._is_row_alive)),
            dead_columns=int(np.count_nonzero(~self._is_column_alive)),
        )


class TileBits:
    """Which elements of a tile are nonzero, as bits. Answers which blocks and lines are alive."""

    def __init__(self, is_nonzero: Bools) -> None:
        """Pack a tile into rows of bits, the first element into the lowest bit of the first byte.

        Args:
            is_nonzero: Which elements of the tile, a matrix, are nonzero.
        """
        self.shape = is_nonzero.shape
        packed = np.packbits(is_nonzero, axis=1, bitorder="little")
        # Fill up each row to whole words of 64 bits, so that blocks of any width can be read as
        # words.
        row_count, packed_nbytes = packed.shape
        word_count = -(-packed_nbytes // 8)
        padded = np.zeros((row_count, word_count * 8), np.uint8)
        padded[:, :packed_nbytes] = packed
        self._row_unions_by_height = {1: padded}
        """Maps a height to packed bits, one row per `height` rows of the tile. A bit is set if any
        of these rows has a nonzero element there."""

    def find_live_rows(self) -> Bools:
        """Return which rows have a nonzero element."""
        row_bits = self._row_unions_by_height[1]
        return np.asarray(row_bits.any(axis=1))

    def find_live_columns(self) -> Bools:
        """Return which columns have a nonzero element."""
        union: ByteArray = np.bitwise_or.reduce(self._row_unions_by_height[1], axis=0)
        column_bits = np.unpackbits(union, count=self.shape[1], bitorder="little")
        return column_bits.view(np.bool_)

    def measure_live_area(self, height: int, width: int) -> int:
        """Return the number of elements in blocks with at least one nonzero element.

        Args:
            height: The height of a block, a power of two.
            width: The width of a block, a power of two.
        """
        union = self._unite_rows(height)
        area = _count_live_blocks(union, width) * height * width

        # Blocks at the lower and the right edge reach beyond the tile by this many rows and
        # columns. Subtract that part of each live one. The two parts overlap in the block at the
        # corner, so add the overlap again.
        excess_height = -self.shape[0] % height
        excess_width = -self.shape[1] % width
        if excess_height:
            area -= _count_live_blocks(union[-1:], width) * excess_height * width
        if excess_width:
            last_blocks = _select_block_column(union, width, self.shape[1] - 1)
            area -= int(np.count_nonzero(last_blocks)) * excess_width * height
            area += bool(last_blocks[-1]) * excess_height * excess_width
        return area

    def _unite_rows(self, height: int) -> ByteArray:
        """Return the bits of every `height` rows, united by "or" into one row.

        They are made from those of half the height, and kept for the other widths of that height.

        Args:
            height: The number of rows to unite, a power of two.
        """
        if height not in self._row_unions_by_height:
            halves = self._unite_rows(height // 2)
            union = halves[::2].copy()
            # The last row has no partner if the number of rows is odd, and stays as it is.
            union[: len(halves) // 2] |= halves[1::2]
            self._row_unions_by_height[height] = union
        return self._row_unions_by_height[height]


def _count_live_blocks(union: ByteArray, width: int) -> int:
    """Count the blocks that have at least one bit set.

    Args:
        union: For each row of blocks, the bits of its columns, in rows of whole 64-bit words.
        width: The width of a block in bits, a power of two up to 64.
    """
    if width == 1:
        bit_counts = _translate(union, BIT_COUNTS)
        return int(bit_counts.sum(dtype=np.int64))
    if width >= 8:
        words = _view_as_words(union, width)
        return int(np.count_nonzero(words))

    # Narrower blocks share a byte. Count those at each position in the byte by themselves.
    live_count = 0
    for mask in _group_masks(width):
        live_count += int(np.count_nonzero(union & np.uint8(mask)))
    return live_count


def _select_block_column(union: ByteArray, width: int, column: int) -> np.ndarray:
    """Return the bits of the blocks that contain a column, one integer for each row of blocks.

    The integer is 0 if the block is dead. Its other values have no meaning to a caller, because a
    narrow block stays at its position in a byte.

    Args:
        union: For each row of blocks, the bits of its columns, in rows of whole 64-bit words.
        width: The width of a block in bits, a power of two up to 64.
        column: The index of the column in the tile.
    """
    # Blocks of 8 or more columns are whole bytes, so each can be read as one word.
    if width >= 8:
        words = _view_as_words(union, width)
        return words[:, column // width]

    # Narrower blocks share a byte, so the other blocks' bits are masked out.
    byte_index, bit_index = divmod(column, 8)
    mask = _group_masks(width)[bit_index // width]
    return union[:, byte_index] & np.uint8(mask)


def _view_as_words(union: ByteArray, width: int) -> np.ndarray:
    """Return rows of bits as integers of `width` bits, one for each block of that width.

    Args:
        union: Rows of whole 64-bit words, so that each row is divided without a remainder.
        width: The width of a block: 8, 16, 32 or 64.
    """
    return union.view(f"u{width // 8}")


def _group_masks(width: int) -> list[int]:
    """Return the masks of the groups of `width` bits in a byte. The width is 1, 2, 4 or 8.

    >>> _group_masks(4)
    [15, 240]
    """
    lowest_mask = (1 << width) - 1
    return [lowest_mask << shift for shift in range(0, 8, width)]


def _count_fullest_group(group_bits: ByteArray, size: int) -> int:
    """Return the largest number of bits that are set in a group of `size` consecutive bits."""
    # Bits that fill up the last byte are not set, so they add nothing.
    byte_counts = _fullest_group_counts(min(size, 8))
    counts = _translate(group_bits, byte_counts)
    # A group of 16 elements has two bytes.
    if size == 16:
        counts = counts[::2] + counts[1::2]
    return int(counts.max(initial=0))


@lru_cache(maxsize=3)
def _fullest_group_counts(size: int) -> bytes:
    """Return, for each byte, the largest number of bits in one of its groups of `size` bits."""
    masks = _group_masks(size)
    fullest_counts = bytearray()
    for byte in range(256):
        group_counts = [(byte & mask).bit_count() for mask in masks]
        fullest_counts.append(max(group_counts))
    return bytes(fullest_counts)


def _translate(octets: ByteArray, table: bytes) -> ByteArray:
    """Look up every byte in a table of 256. `bytes.translate` is faster than indexing in numpy."""
    translated = octets.tobytes().translate(table)
    return np.frombuffer(translated, np.uint8)
