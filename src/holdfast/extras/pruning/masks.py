"""Masks: which elements of a tensor stay.

A mask is a key and an index, a pattern along the last axis, or a bit for each block. `keep` says which
elements of any range stay, in C order. The masks are the same, element for element, as those of
`holdfast.torch.sparsity.masks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools, matrix_shape
from holdfast.core.group import ALONE, Ranks, divide_work
from holdfast.core.value import Value
from holdfast.engine.checksums import Progress
from holdfast.engine.scan import scan
from holdfast.extras.pruning.select import BlockScores, KeySearch, Magnitudes, RandomKeys
from holdfast.numeric.threshold import (
    magnitude_keys,
)


def zero_out(values: np.ndarray, kept: Bools) -> None:
    """Make +0.0 of elements that are not kept, in their place. Elements that stay keep their bits."""
    width = values.dtype.itemsize
    values.view(f"i{width}")[...] &= np.negative(kept.view(np.int8)).astype(f"i{width}", copy=False)


class ThresholdMask(Value, eq=False):
    """Everything above a key stays, and of the elements equal to it those from an index on."""

    keys: Magnitudes | RandomKeys
    key: int
    cut: int
    align = 1
    """Ranges begin at multiples of `align`, and end there or at the end of the tensor."""

    def keep(self, values: np.ndarray, start: int) -> Bools:
        """Return which of these elements stay; the first one has the index `start` in C order."""
        keys = self.keys.of(values, start)
        kept = np.empty(len(keys), np.bool_)
        cut = max(self.cut - start, 0)
        np.greater(keys[:cut], self.key, out=kept[:cut])
        np.greater_equal(keys[cut:], self.key, out=kept[cut:])
        return kept


class GroupMask(Value):
    """The `n` largest of every `m` neighbours along the last axis stay."""

    n: int
    m: int
    order: str

    @property
    def align(self) -> int:
        return self.m

    def keep(self, values: np.ndarray, start: int) -> Bools:
        return group_keep(magnitude_keys(values, self.order), self.m - self.n, m=self.m)


MOST_COMPARED = 16
"""Groups up to this size are ordered by comparing every pair, which is quicker than to sort short rows."""


def group_keep(keys: np.ndarray, zeros: int, *, m: int) -> Bools:
    """Keep all but the lowest `zeros` of each group of `m` keys; of equal keys the first goes.

    >>> group_keep(np.array([3, 1, 1, 2, 0, 0, 0, 0]), 2, m=4).astype(int).tolist()
    [1, 0, 0, 1, 0, 0, 1, 1]
    """
    if m > MOST_COMPARED:
        kept = np.ones((len(keys) // m, m), np.bool_)
        lowest = np.argsort(keys.reshape(-1, m), axis=1, kind="stable")[:, :zeros]
        np.put_along_axis(kept, lowest, False, axis=1)
        return kept.reshape(-1)

    # A row for each place in a group, and how many keys of its group go before each key.
    rows = np.ascontiguousarray(keys.reshape(-1, m).T)
    before = np.zeros(rows.shape, np.int8)
    for second in range(m):
        for first in range(second):
            is_first_lower = rows[first] <= rows[second]
            before[second] += is_first_lower
            before[first] += ~is_first_lower
    return np.asarray((before >= zeros).T).reshape(-1)


class BlockMask(Value, eq=False):
    """Blocks stay or go as a whole."""

    height: int
    width: int
    columns: int
    bits: npt.NDArray[np.uint8]
    """A row for each row of blocks, a bit for each block, the first in the lowest bit; set for what stays."""
    align = 1

    def keep(self, values: np.ndarray, start: int) -> Bools:
        stop = start + len(values)
        first, last = start // self.columns, -(-stop // self.columns)
        begin, end = 0, self.columns
        if last - first == 1:
            # A part of one row, which may be very long.
            begin, end = start - first * self.columns, stop - first * self.columns
        top, left = first // self.height, begin // self.width // 8 * 8
        bottom = (last - 1) // self.height + 1
        blocks = self.bits[top:bottom, left // 8 : -(-end // self.width // 8) + 1]
        kept = np.unpackbits(blocks, axis=1, bitorder="little").view(np.bool_)
        wide = np.repeat(kept, self.width, axis=1)
        wide = wide[:, begin - left * self.width : end - left * self.width]
        rows = wide[np.arange(first, last) // self.height - top]
        skipped = start - first * self.columns - begin
        return rows.reshape(-1)[skipped : skipped + len(values)]


Mask = ThresholdMask | GroupMask | BlockMask
"""What stays of one tensor. `ThresholdMask` describes the members."""


class BlockChoice:
    """Marks the blocks that stay, in the bits of a `BlockMask`."""

    def __init__(self, scores: BlockScores, found: KeySearch) -> None:
        self._scores, self._key, self._cut = scores, found.key, found.before[0]
        down, across = scores.grid
        self._bits = np.zeros((down, -(-across // 8)), np.uint8)

    def add(self, start: int, values: np.ndarray) -> None:
        keys, first = self._scores.of(values), self._scores.place(start)
        indices = np.arange(first, first + len(keys))
        kept = (keys > self._key) | ((keys == self._key) & (indices >= self._cut))
        across = self._scores.grid[1]
        row, column = divmod(first, across)
        packed = np.packbits(kept.reshape(-1, min(across, len(kept))), axis=1, bitorder="little")
        down, nbytes = packed.shape
        self._bits[row : row + down, column // 8 : column // 8 + nbytes] = packed

    def result(self) -> bytes:
        return self._bits.tobytes()


def block_masks(
    searched: Sequence[tuple[BlockScores, KeySearch]],
    *,
    threads: int = 1,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> list[BlockMask]:
    """Return the masks of tensors whose blocks have been searched. Of several ranks each makes some."""

    def choose(numbers: list[int]) -> list[bytes]:
        own = [searched[number] for number in numbers]
        return scan(
            [scores.tensor for scores, _ in own],
            lambda i: BlockChoice(*own[i]),
            lambda i: own[i][0].blocks(),
            threads=threads,
            progress=progress,
        )

    masks = []
    contents = divide_work(ranks, [scores.tensor.nbytes for scores, _ in searched], choose, bytes)
    for (scores, _), content in zip(searched, contents, strict=True):
        bits = np.frombuffer(content, np.uint8).reshape(scores.grid[0], -1)
        columns = matrix_shape(scores.tensor.shape)[1]
        masks.append(BlockMask(scores.height, scores.width_of_block, columns, bits))
    return masks
