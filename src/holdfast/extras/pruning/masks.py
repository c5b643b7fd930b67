"""Masks: which elements of a tensor stay.

A mask is a key and an index, a pattern along the last axis, or a bit for each block. Of any range of elements, in C order, it knows
which stay (`keep`), and sets the rest to zero (`prune`): in integers of the elements' own width where it can, since booleans are a
second array of another width. The masks are the same, element for element, as those of `holdfast.torch.sparsity.masks`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import count

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools, matrix_shape
from holdfast.core.group import ALONE, Ranks, share_out
from holdfast.core.runtime import renewed
from holdfast.core.value import Value, replace
from holdfast.engine.checksums import Progress
from holdfast.engine.scan import scan
from holdfast.engine.threads import computing, run_all
from holdfast.extras.pruning.select import BlockScores, KeySearch, Magnitudes, pieces, select
from holdfast.numeric.threshold import (
    Parted,
    RandomOrder,
    Threshold,
    lowest,
    magnitude_keys,
    pruned_count,
)

HELD_SCORES = 1 << 22
"""Scores of blocks that are held, 32 MiB; those of a tensor with more blocks are summed up again in each pass."""


def zero_out(values: np.ndarray, kept: Bools) -> int:
    """Make +0.0 of elements that are not kept, in their place, and return their number. Elements that stay keep their bits."""
    width = values.dtype.itemsize
    values.view(f"i{width}")[...] &= np.negative(kept.view(np.int8)).astype(f"i{width}", copy=False)
    return len(kept) - int(np.count_nonzero(kept))


class ThresholdMask(Value, frozen=True, eq=False):
    """Everything above a key stays, and of those equal to it what does not lie before an index."""

    keys: Magnitudes | RandomOrder
    key: int
    cut: int
    align = row = 1
    """Ranges begin at multiples of `align`, and end there or at the end; at multiples of `row` they are quicker."""

    def prepare(self) -> None:
        """Compute what is not known yet, before `keep` and `prune`. This may wait for other threads: never while `computing`."""

    def keep(self, values: np.ndarray, start: int) -> Bools:
        """Which of these elements stay, the first of which has the index `start` in C order."""
        kept = np.empty(len(values), np.bool_)
        before = min(max(self.cut - start, 0), len(values))
        self.keys.reach(values[:before], start, self.key + 1, out=kept[:before])
        self.keys.reach(values[before:], start + before, self.key, out=kept[before:])
        return kept

    def prune(self, values: np.ndarray, start: int) -> int:
        """Make +0.0 of elements that do not stay, in their place, and return their number."""
        keys = self.keys
        if (
            not isinstance(keys, Magnitudes)
            or keys.order != keys.tensor.dtype.name
            or self.key >= keys.most
        ):
            return zero_out(values, self.keep(values, start))
        before = min(max(self.cut - start, 0), len(values))
        return zero_below(values[:before], self.key + 1) + zero_below(values[before:], self.key)


def zero_below(values: np.ndarray, least: int) -> int:
    """Make +0.0, in its place, of elements with a magnitude below this one, both as integers, and return their number.

    Without a boolean: the sign of a difference, spread over the element, keeps or clears it.

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


HELD_NBYTES = 16 << 20
"""Bits of a random mask that are held; of a tensor with more elements the keys are made twice."""


class RandomMask:
    """The lowest of a random order go.

    The mask is computed when the tensor is first read, and held, a bit an element, until all of the tensor was read: so keys are
    made once, and no more is held than the tensors that are being written. A second reading makes the keys again.
    """

    align = row = 1

    def __init__(self, keys: RandomOrder, gone: int, *, threads: int = 1) -> None:
        self._keys, self._gone, self._threads = keys, gone, threads
        self._lock = renewed(threading.Lock())
        self._threshold: ThresholdMask | None = None
        self._bits: npt.NDArray[np.uint8] | None = None
        self._unread = keys.count
        self._held = keys.count <= 8 * HELD_NBYTES

    def prepare(self) -> None:
        with self._lock:
            if self._threshold is None:
                self._threshold = self._found()

    def keep(self, values: np.ndarray, start: int) -> Bools:
        bits, stop = self._bits, start + len(values)
        if bits is None:
            if self._threshold is None:
                raise ValueError("a random mask is prepared before it is used")
            return self._threshold.keep(values, start)
        kept = np.unpackbits(bits[start // 8 : -(-stop // 8)], bitorder="little")[start % 8 :][
            : len(values)
        ]
        with self._lock:
            self._unread -= len(values)
            if self._unread <= 0:
                self._bits = None
        return kept.view(np.bool_)

    def prune(self, values: np.ndarray, start: int) -> int:
        return zero_out(values, self.keep(values, start))

    def _found(self) -> ThresholdMask:
        """The threshold, from a pass over all keys in which the bits are computed as well."""
        if not self._gone:
            return ThresholdMask(self._keys, 0, 0)
        rank, keys, places = 0, np.empty(0, np.uint64), np.empty(0, np.int64)
        every: list[Parted] = []
        for tries in count():
            every = self._parted(*self._keys.around(self._gone, tries))
            rank = self._gone - sum(part.below for part in every)
            keys, places = (
                np.concatenate([part.keys for part in every]),
                np.concatenate([part.places for part in every]),
            )
            if 0 < rank <= len(keys):
                break
        order = np.argsort(keys, kind="stable")
        if self._held:
            bits, stay = np.concatenate([part.bits for part in every]), places[order[rank:]]
            np.bitwise_or.at(bits, stay >> 3, np.left_shift(1, stay & 7).astype(np.uint8))
            self._bits = bits
        last = order[rank - 1]
        return ThresholdMask(self._keys, int(keys[last]), int(places[last]) + 1)

    def _parted(self, low: int, high: int) -> list[Parted]:
        ranges = [*pieces(self._keys.count, 8)]  # pieces that fill whole bytes with their bits
        parts: dict[int, Parted] = {}

        def run(at: int) -> None:
            with computing():
                part = self._keys.part(*ranges[at], low, high=high)
            parts[at] = part if self._held else replace(part, bits=np.empty(0, np.uint8))

        run_all([partial(run, at) for at in range(len(ranges))], self._threads)
        return [parts[at] for at in range(len(ranges))]


class GroupMask(Value, frozen=True):
    """The `n` largest of every `m` neighbours along the last axis stay."""

    n: int
    m: int
    order: str

    @property
    def align(self) -> int:
        return self.m

    row = align

    def prepare(self) -> None: ...

    def keep(self, values: np.ndarray, start: int) -> Bools:
        return group_keep(magnitude_keys(values, self.order), self.m - self.n, m=self.m)

    def prune(self, values: np.ndarray, start: int) -> int:
        return zero_out(values, self.keep(values, start))


COMPARED, COMPARED_KEYS = 16, 1 << 18
"""Groups up to this size are ordered by comparing every pair, which is quicker than sorting short rows; so many keys at once."""


def group_keep(keys: np.ndarray, zeros: int, *, m: int) -> Bools:
    """All but the lowest `zeros` of each group of `m` keys, of equals the first.

    How many go before each is counted. All groups are compared at once: every key with the one that stands so far behind it, where
    that is one of its group. So numpy has long rows, and none that is not in one piece.

    >>> group_keep(np.array([3, 1, 1, 2, 0, 0, 0, 0]), 2, m=4).astype(int).tolist()
    [1, 0, 0, 1, 0, 0, 1, 1]
    """
    if m > COMPARED:
        groups = np.ones((len(keys) // m, m), np.bool_)
        np.put_along_axis(
            groups, np.argsort(keys.reshape(-1, m), axis=1, kind="stable")[:, :zeros], False, axis=1
        )
        return groups.reshape(-1)
    kept = np.empty(len(keys), np.bool_)
    step = COMPARED_KEYS // m * m
    for at in range(0, len(keys), step):
        part = keys[at : at + step]
        before = _places(m)[: len(part)].copy()
        for apart in range(1, m):
            first = np.less(part[apart:], part[:-apart])
            first &= _have_one(m, apart)[: len(first)]
            before[:-apart] += first.view(np.int8)
            before[apart:] -= first.view(np.int8)
        np.greater_equal(before, zeros, out=kept[at : at + step])
    return kept


@lru_cache(maxsize=4)
def _places(m: int) -> npt.NDArray[np.int8]:
    return np.resize(np.arange(m, dtype=np.int8), COMPARED_KEYS)


@lru_cache(maxsize=COMPARED)
def _have_one(m: int, apart: int) -> Bools:
    return np.asarray(_places(m) < m - apart)


class BlockMask(Value, frozen=True, eq=False):
    """Blocks stay or go as a whole."""

    height: int
    width: int
    columns: int
    bits: npt.NDArray[np.uint8]
    """A row for each row of blocks, a bit for each block, the first in the lowest bit; set for what stays."""
    align = 1

    @property
    def row(self) -> int:
        return self.columns

    def prepare(self) -> None: ...

    def keep(self, values: np.ndarray, start: int) -> Bools:
        stop = start + len(values)
        first, last = start // self.columns, -(-stop // self.columns)
        begin, end = (
            (start - first * self.columns, stop - first * self.columns)
            if last - first == 1
            else (0, self.columns)
        )
        top, left = first // self.height, begin // self.width // 8 * 8
        some = self.bits[
            top : (last - 1) // self.height + 1, left // 8 : -(-end // self.width // 8) + 1
        ]
        kept = np.unpackbits(some, axis=1, bitorder="little").view(np.bool_)
        wide = np.repeat(kept, self.width, axis=1)[
            :, begin - left * self.width : end - left * self.width
        ]
        rows = wide[np.arange(first, last) // self.height - top]
        at = start - first * self.columns - begin
        return rows.reshape(-1)[at : at + len(values)]

    def prune(self, values: np.ndarray, start: int) -> int:
        """Whole rows in words as wide as a row of a block, as far as there are such; the rest by elements."""
        begin = min(-start % self.columns, len(values))
        end = begin + (len(values) - begin) // self.columns * self.columns
        gone = self._prune_rows(values[begin:end], (start + begin) // self.columns)
        for part, first in ((values[:begin], start), (values[end:], start + end)):
            if part.size:
                gone += zero_out(part, self.keep(part, first))
        return gone

    def _prune_rows(self, values: np.ndarray, first: int) -> int:
        if not values.size:
            return 0
        width = values.dtype.itemsize
        word = math.gcd(self.width * width, self.columns * width, 8)
        bands = np.arange(first, first + len(values) // self.columns) // self.height
        kept = np.unpackbits(self.bits[bands[0] : bands[-1] + 1], axis=1, bitorder="little")
        marks = np.negative(kept.view(np.int8)).astype(f"i{word}")
        marks = np.repeat(marks, self.width * width // word, axis=1)[
            :, : self.columns * width // word
        ]
        marks = marks[bands - bands[0]]
        values.view(f"i{word}").reshape(marks.shape)[...] &= marks
        return len(values) - int(np.count_nonzero(marks)) * word // width


Mask = ThresholdMask | RandomMask | GroupMask | BlockMask
"""What stays of one tensor. `ThresholdMask` describes the members."""


class BlockChoice:
    """Chooses the blocks that stay: from scores that are held until all are there, or as they come, where the cut is known."""

    def __init__(self, scores: BlockScores, gone: int, known: KeySearch | None) -> None:
        self._scores, self._gone, self._known = scores, gone, known
        down, across = scores.grid
        self._held = np.empty(scores.count if known is None else 0, np.uint64)
        self._bits = np.zeros((down, -(-across // 8)), np.uint8)

    def add(self, start: int, values: np.ndarray) -> None:
        keys, first = self._scores.of(values), self._scores.place(start)
        if self._known is None:
            self._held[first : first + len(keys)] = keys
        else:
            self._mark(first, keys, self._known.key, before=self._known.before[0])

    def _mark(self, first: int, keys: np.ndarray, key: int, *, before: int) -> None:
        kept = np.where(np.arange(first, first + len(keys)) < before, keys > key, keys >= key)
        across = self._scores.grid[1]
        row, column = divmod(first, across)
        if len(keys) >= across:
            self._bits[row : row + len(keys) // across] = np.packbits(
                kept.reshape(-1, across), axis=1, bitorder="little"
            )
        else:
            packed = np.packbits(kept, bitorder="little")
            self._bits[row, column // 8 : column // 8 + len(packed)] = packed

    def result(self) -> BlockMask:
        scores, held = self._scores, self._held
        if len(held):
            found = lowest(held, self._gone) if self._gone else Threshold(0, 0)
            before = int(np.flatnonzero(held == found.key)[found.ties - 1]) + 1 if found.ties else 0
            self._mark(0, held, found.key, before=before)
        return BlockMask(
            scores.height, scores.width_of_block, matrix_shape(scores.tensor.shape)[1], self._bits
        )


def block_masks(
    scores: Sequence[BlockScores], levels: Sequence[float], *, threads: int = 1, progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> list[BlockMask]:  # fmt: skip
    """For each tensor the part `level` of the blocks goes, those of the lowest mean square. Of several ranks each finds some."""
    gone = [pruned_count(level, one.count) for one, level in zip(scores, levels, strict=True)]

    def choose(numbers: list[int]) -> list[bytes]:
        many = {
            at: KeySearch([scores[at]], gone[at])
            for at in numbers
            if scores[at].count > HELD_SCORES
        }
        select([*many.values()], threads=threads, progress=progress)
        masks = scan(
            [scores[at].tensor for at in numbers],
            lambda i: BlockChoice(scores[numbers[i]], gone[numbers[i]], many.get(numbers[i])),
            lambda i: scores[numbers[i]].blocks(), threads=threads, progress=progress,
        )  # fmt: skip
        return [mask.bits.tobytes() for mask in masks]

    made = share_out(ranks, [one.tensor.nbytes for one in scores], choose, bytes)
    return [
        BlockMask(
            one.height, one.width_of_block, matrix_shape(one.tensor.shape)[1], _block_bits(one, raw)
        )
        for one, raw in zip(scores, made, strict=True)
    ]


def _block_bits(scores: BlockScores, raw: bytes) -> npt.NDArray[np.uint8]:
    below, across = scores.grid
    return np.frombuffer(raw, np.uint8).reshape(below, -(-across // 8))
