"""Which elements of a tensor stay: masks, what is left of the search for a threshold.

A mask is a key and an index, a pattern along the last axis, or a bit for each block. It says of any range of elements, in C order,
what stays (`keep`), and sets the rest to zero (`prune`): in integers of the elements' own width where it can, since booleans are a
second array of another width. These are the same masks, element for element, as those of `holdfast.torch.sparsity.masks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools
from holdfast.core.sparse.encoding import matrix_shape
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.computed import read_flat
from holdfast.engine.threads import run_all
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
    "zero_out",
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

    def prune(self, values: np.ndarray, start: int) -> int:
        """Make +0.0 of what goes, in its place; how many elements that is. `keep` says the same of each."""


def zero_out(values: np.ndarray, kept: Bools) -> int:
    """Make +0.0 of what is not kept, in its place; how many elements that is. What stays keeps its bits."""
    width = values.dtype.itemsize
    values.view(f"i{width}")[...] &= np.negative(kept.view(np.int8)).astype(f"i{width}", copy=False)
    return len(kept) - int(np.count_nonzero(kept))


class ThresholdMask(Value, frozen=True, eq=False):
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

    def prune(self, values: np.ndarray, start: int) -> int:
        keys = self.keys
        if not isinstance(keys, Magnitudes) or keys.order != keys.tensor.dtype.name or self.key >= keys.most:
            return zero_out(values, self.keep(values, start))
        before = min(max(self.cut - start, 0), len(values))
        return zero_below(values[:before], self.key + 1) + zero_below(values[before:], self.key)


def zero_below(values: np.ndarray, least: int) -> int:
    """Make +0.0, in its place, of what has a magnitude below this one, both as integers; how many elements that is.

    Without a boolean: what is kept is the sign of a difference, spread over the element.

    >>> values = np.array([1.0, -2.0, 3.0, -0.0], np.float32)
    >>> zero_below(values, int(np.float32(2).view(np.int32))), values.tolist()
    (2, [0.0, -2.0, 3.0, 0.0])
    """
    if least <= 0:
        return 0
    width = values.dtype.itemsize
    bits = values.view(f"i{width}")
    kind, signs = bits.dtype.type, 8 * width - 1
    apart = bits & kind((1 << signs) - 1)
    np.subtract(kind(least - 1), apart, out=apart)
    apart >>= kind(signs)
    bits &= apart
    # Whatever is kept has a magnitude, so that it has a bit.
    return len(bits) - int(np.count_nonzero(bits))


class GroupMask(Value, frozen=True):
    """The `n` largest of every `m` neighbours along the last axis stay."""

    n: int
    m: int
    order: str

    @property
    def align(self) -> int:
        return self.m

    def keep(self, values: np.ndarray, start: int) -> Bools:
        return group_keep(magnitude_keys(values, self.order).reshape(-1, self.m), self.m - self.n).reshape(-1)

    def prune(self, values: np.ndarray, start: int) -> int:
        if self.m > PAIRED:
            return zero_out(values, self.keep(values, start))
        zero_in_groups(magnitude_keys(values, self.order), values, self.m - self.n, m=self.m)
        return len(values) // self.m * (self.m - self.n)


PAIRED = 16
"""Groups up to this size are ordered by comparing every pair: quicker than to sort very short rows."""


def zero_in_groups(keys: np.ndarray, values: np.ndarray, zeros: int, *, m: int) -> None:
    """Make +0.0, in its place, of the lowest `zeros` of each group of `m`, of equals of the first. Keys leave the highest bit free.

    As in `group_keep`, how many go before each is counted; here below zero, and in integers of the width of the elements, whose
    sign is the mask.
    """
    width = values.dtype.itemsize
    bits, kind, signs = values.view(f"i{width}").reshape(-1, m), np.dtype(f"i{width}").type, 8 * width - 1
    columns = [np.ascontiguousarray(column) for column in keys.view(f"i{width}").reshape(-1, m).T]
    ranks = [np.full(len(bits), zeros - 1 - i, kind) for i in range(m)]
    later = np.empty(len(bits), kind)
    for i in range(m):
        for j in range(i + 1, m):
            np.subtract(columns[j], columns[i], out=later)
            np.right_shift(later, kind(signs), out=later)
            ranks[i] += later
            ranks[j] -= later
    kept = np.empty(bits.shape, kind)
    for i, rank in enumerate(ranks):
        np.right_shift(rank, kind(signs), out=kept[:, i])
    bits &= kept


def group_keep(keys: np.ndarray, zeros: int) -> Bools:
    """All but the lowest `zeros` of each row, of equals the first.

    >>> group_keep(np.array([[3, 1, 1, 2], [0, 0, 0, 0]]), 2).astype(int).tolist()
    [[1, 0, 0, 1], [0, 0, 1, 1]]
    """
    m = keys.shape[1]
    if m > PAIRED:
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


class BlockMask(Value, frozen=True, eq=False):
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

    def prune(self, values: np.ndarray, start: int) -> int:
        return zero_out(values, self.keep(values, start))


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


def keep_range(tensor: LazyTensor, mask: Mask, start: int, *, stop: int) -> tuple[np.ndarray, Bools]:
    """The elements [start, stop) in C order, and which of them stay."""
    first = start // mask.align * mask.align
    last = min(-(-stop // mask.align) * mask.align, tensor.size)
    values = read_flat(tensor, first, last)
    kept = mask.keep(values, first)
    return values[start - first : stop - first], kept[start - first : stop - first]
