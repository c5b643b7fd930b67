"""Which elements of a tensor a rule of pruning keeps.

A `Mask` is what is left of the search for a threshold (`select.py`): a key and an index, a pattern along the last axis, or a
bit for each block. It says of any range of elements, in C order, what stays. These are the same masks, element for element, as
those of `holdfast.torch.sparsity.masks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools
from holdfast.core.sparse.encoding import matrix_shape
from holdfast.core.tensor import LazyTensor
from holdfast.engine.computed import read_flat
from holdfast.engine.execute import run_all
from holdfast.pruning.keys import BlockScores, Magnitudes, RandomOrder, magnitude_keys
from holdfast.pruning.order import pruned_count
from holdfast.pruning.select import Counts, Progress, hold, select

__all__ = [
    "BlockMask",
    "GroupMask",
    "Mask",
    "ThresholdMask",
    "block_mask",
    "group_keep",
    "keep_range",
    "threshold_masks",
]


HELD_SCORES = 1 << 22
"""Scores of blocks that are held, 32 MiB; those of a tensor with more blocks are summed up again in each pass."""


class Mask(Protocol):
    """What stays of one tensor."""

    @property
    def align(self) -> int:
        """Ranges begin at multiples of this, and end there or at the end."""

    def keep(self, values: np.ndarray, start: int) -> Bools:
        """What stays of elements that were read, the first of which has the index `start` in C order."""


@dataclass(frozen=True, slots=True, eq=False)
class ThresholdMask:
    """Everything above a key stays, and of those equal to it what does not lie before an index."""

    keys: Magnitudes | RandomOrder
    key: int
    cut: int
    counts: Counts | None = None
    """How often each key is there, where that is known of this tensor alone."""
    align = 1

    def keep(self, values: np.ndarray, start: int) -> Bools:
        keys = self.keys.of(values, start)
        kept: Bools = keys >= self.key
        before = min(max(self.cut - start, 0), len(keys))
        np.greater(keys[:before], self.key, out=kept[:before])
        return kept


@dataclass(frozen=True, slots=True)
class GroupMask:
    """The `n` largest of every `m` neighbours along the last axis stay."""

    n: int
    m: int
    order: str

    @property
    def align(self) -> int:
        return self.m

    def keep(self, values: np.ndarray, start: int) -> Bools:
        return group_keep(magnitude_keys(values, self.order).reshape(-1, self.m), self.m - self.n).reshape(-1)


def group_keep(keys: np.ndarray, zeros: int) -> Bools:
    """All but the lowest `zeros` of each row, of equals the first.

    >>> group_keep(np.array([[3, 1, 1, 2], [0, 0, 0, 0]]), 2).astype(int).tolist()
    [[1, 0, 0, 1], [0, 0, 1, 1]]
    """
    m = keys.shape[1]
    if m > 16:
        kept = np.ones(keys.shape, np.bool_)
        np.put_along_axis(kept, np.argsort(keys, axis=1, kind="stable")[:, :zeros], False, axis=1)
        return kept
    columns = [np.ascontiguousarray(keys[:, i]) for i in range(m)]
    # How many go before each: comparing every pair once is quicker than sorting very short rows.
    ranks = np.zeros((m, len(keys)), np.uint8)
    for i in range(m):
        for j in range(i + 1, m):
            later = columns[i] > columns[j]
            ranks[i] += later
            ranks[j] += ~later
    return np.ascontiguousarray((ranks >= zeros).T)


@dataclass(frozen=True, slots=True, eq=False)
class BlockMask:
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
        begin, end = (start - first * self.columns, stop - first * self.columns) if last - first == 1 else (0, self.columns)
        top, left = first // self.height, begin // self.width // 8 * 8
        some = self.bits[top : (last - 1) // self.height + 1, left // 8 : -(-end // self.width // 8) + 1]
        kept = np.unpackbits(some, axis=1, bitorder="little").view(np.bool_)
        wide = np.repeat(kept, self.width, axis=1)[:, begin - left * self.width : end - left * self.width]
        rows = wide[np.arange(first, last) // self.height - top]
        at = start - first * self.columns - begin
        return rows.reshape(-1)[at : at + len(values)]


def threshold_masks(
    keys: Sequence[Magnitudes | RandomOrder], level: float, *, threads: int = 1, progress: Progress | None = None
) -> list[ThresholdMask]:
    """One threshold over all tensors: the part `level` of their elements goes."""
    total = sum(source.count for source in keys)
    found = select(keys, pruned_count(level, total), threads=threads, progress=progress)
    counts = found.counts if len(keys) == 1 else None
    return [ThresholdMask(source, found.key, cut, counts) for source, cut in zip(keys, found.cuts, strict=True)]


def block_mask(
    tensor: LazyTensor, shape: tuple[int, int], level: float, *, threads: int = 1, progress: Progress | None = None
) -> BlockMask:
    """The part `level` of the blocks goes, those of the lowest mean square."""
    blocks = BlockScores(tensor, *shape)
    size = math.prod(shape)
    count = pruned_count(level, blocks.count)
    told = progress and (lambda n: progress(n * size))
    scores = hold(blocks, threads=threads, progress=told) if count > 0 and blocks.count <= HELD_SCORES else blocks
    found = select([scores], count, threads=threads, progress=told)
    down, across = blocks.grid
    bits = np.zeros((down, -(-across // 8)), np.uint8)

    def task(start: int, stop: int) -> Callable[[], None]:
        def run() -> None:
            keys = scores.read(start, stop)
            kept = np.where(np.arange(start, stop) < found.cuts[0], keys > found.key, keys >= found.key)
            row, column = divmod(start, across)
            if stop - start >= across:
                bits[row : row + (stop - start) // across] = np.packbits(kept.reshape(-1, across), axis=1, bitorder="little")
            else:
                packed = np.packbits(kept, bitorder="little")
                bits[row, column // 8 : column // 8 + len(packed)] = packed
            if progress is not None:
                progress((stop - start) * size)

        return run

    run_all([task(start, stop) for start, stop in scores.pieces()], threads)
    return BlockMask(*shape, matrix_shape(tensor.shape)[1], bits)


def keep_range(tensor: LazyTensor, mask: Mask, start: int, stop: int) -> tuple[np.ndarray, Bools]:
    """The elements [start, stop) in C order, and which of them stay."""
    first = start // mask.align * mask.align
    last = min(-(-stop // mask.align) * mask.align, tensor.size)
    values = read_flat(tensor, first, last)
    kept = mask.keep(values, first)
    return values[start - first : stop - first], kept[start - first : stop - first]
