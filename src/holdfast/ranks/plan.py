"""`plan_ranks`: which rank writes which box of which tensor. Step 3 of a sharded save.

1. Merge the catalogues; settle who writes which value, and which names are one tensor on all ranks (ranks/merge.py).
2. Find the boxes that several ranks have, and check that those of each tensor tile it (ranks/survey.py).
3. Deal the boxes that have more than one holder, evenly by bytes (`deal_classes`).
4. Sort by writer. The boxes of a rank stay in the order of the catalogue and then in C order of their starts.

Every problem of every tensor is found before anything is said, and with a problem there is no plan. Everything is a column of
integers, and the loops are over ranks, tensors or sets of holders, never over boxes. The same states give the same plan, always.

Step 3 sees to it that every rank writes about as many bytes. Boxes with the same holders are a *class*. Classes are dealt one after
the other, those with the fewest holders first, each onto the loads that its holders have by then; boxes with one holder are the
beginning. A class is dealt in two steps:

1. Its largest boxes, a few for each holder: largest first, each to the holder with the least load.
2. All others at once, in their own order. Pour their bytes onto the loads of the holders as water onto an uneven floor. The room of
   a holder is what is between its load and the level of the water. The rooms in a row are a line as long as all the bytes, and so
   are the boxes; each box goes to the holder in whose room its middle is. A holder thus gets neighbours, and they stand
   over its room by less than half a box at either end.

        rooms    ├── rank 0 ──┼─ rank 1 ─┼────── rank 2 ───────┤
        boxes    ├───┼──┼──────┼──┼────┼────────┼───┼─────┼────┤
        writers    0   0    0    1   1      2     2    2    2

The bound. Let M be the mean of all bytes that lie on the holders S of a class once it is dealt. The least load never exceeds M, and
the level is M rounded up at the most. So a rank ends with what it holds alone, or with at most M + the largest box of the class
that it took from last. Where any two sets of holders are nested or disjoint (plain replicas, HSDP, some tensors
replicated besides), everything on S by then is held by ranks of S alone. No plan can then avoid the load M on some rank, and

    max load  ≤  least possible max load  +  largest box that has more than one holder

Sets may also cross, as the rows and the columns of a mesh do; then what a row has got might better have lain elsewhere. So all
classes are dealt again, each onto what the others left, and again while that lowers the greatest load. For them the bound is not
proved. In 24,000 random families of crossing sets on 2 to 6 ranks the excess was 0.83 of the largest box at the most; dealt only
once, it was above one box in one family of 75.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Ints
from holdfast.core.group import assign_evenly
from holdfast.core.value import Value
from holdfast.ranks.merge import Merged, agreed_aliases, hold, merge, share_values
from holdfast.ranks.state import BITS, Catalogue, RankState
from holdfast.ranks.survey import BoxBatch, Int32s, survey

MAX_NBYTES = 1 << 60
"""The largest checkpoint: an exbibyte. Sums of bytes then fit 64 bits."""


class RankWrites(Value, frozen=True, eq=False):
    """What one rank writes: boxes in the order in which they are written, and values."""

    boxes: Ints
    """The number of each box in the columns of the rank's own `RankState`."""
    tensors: Ints
    """The tensor of each box, as a place in the catalogue of the plan."""
    offsets: Ints
    """Lowest corners, a row for each dimension, as in `RankState`; dimensions beyond those that the rank knows are left out."""
    sizes: Ints
    values: tuple[str, ...]
    nbytes: int
    """Bytes of tensors. What values take is not known to the plan."""


class RankPlan(Value, frozen=True, eq=False):
    """A whole sharded save, or the reasons why there can be none."""

    catalogue: Catalogue
    """Every tensor of every rank. Those in `aliases`, and those without elements, are written by nobody."""
    writes: tuple[RankWrites, ...]
    aliases: tuple[tuple[str, str], ...]
    """Pairs (name, base): the content of the name is that of the base."""
    problems: tuple[str, ...] = ()
    """All problems; each names its tensor or value and the ranks."""
    notes: tuple[str, ...] = ()
    """Names that share memory on some ranks only, and are stored twice."""
    disputed: frozenset[str] = frozenset()
    """Names under which ranks have tensors of other dtypes or shapes; each is a problem."""


def plan_ranks(states: Sequence[RankState]) -> RankPlan:
    """Plan the save of the states of all ranks, in order. A box that several have is written by one; all write about as much."""
    if len(states) == 1:
        (state,) = states
        positions = np.arange(len(state.catalogue.names))
        has_whole_tensors = (
            np.array_equal(state.tensors, positions)
            and np.array_equal(state.sizes, state.catalogue.extents)
            and not np.count_nonzero(state.offsets)
        )
        if has_whole_tensors:
            return _plan_alone(state)
    merged = merge(states)
    catalogue = merged.catalogue
    held = [hold(state, places) for state, places in zip(states, merged.places, strict=True)]
    aliases, notes = agreed_aliases(held, merged)
    values, value_problems = share_values(states, merged)
    left_out = np.zeros(len(catalogue), np.bool_)
    left_out[[*merged.conflicts, *(catalogue.positions[name] for name, _ in aliases)]] = True
    found = _Written(len(states))
    for batch in survey(held, catalogue, left_out):
        found.add(batch)
    of_tensors = sorted(
        [*merged.conflicts.items(), *found.problems], key=lambda problem: problem[0]
    )
    problems = [text for _, text in of_tensors] + value_problems + _too_large(catalogue)
    if problems:
        disputed = frozenset(catalogue.names[place] for place in merged.conflicts)
        return RankPlan(catalogue, (), aliases, tuple(problems), notes, disputed)
    found.settle()
    return RankPlan(
        catalogue, tuple(_writes(states, merged, found, values=values)), aliases, (), notes
    )


def _plan_alone(state: RankState) -> RankPlan:
    """Plan the save of a process that is alone and has each tensor whole."""
    catalogue = state.catalogue
    problems = _too_large(catalogue)
    if problems:
        return RankPlan(catalogue, (), state.aliases, tuple(problems))
    is_written = np.logical_and.reduce(catalogue.extents)
    is_written[[catalogue.positions[name] for name, _ in state.aliases]] = False
    boxes = is_written.nonzero()[0]
    offsets, sizes = state.offsets.take(boxes, axis=1), state.sizes.take(boxes, axis=1)
    bits = np.array([BITS[catalogue.dtypes[box]] for box in boxes.tolist()], np.int64)
    nbytes = int(((bits * np.multiply.reduce(sizes) + 7) >> 3).sum())
    writes = RankWrites(boxes, boxes, offsets, sizes, tuple(state.values), nbytes)
    return RankPlan(catalogue, (writes,), state.aliases)


class _Written:
    """The different boxes of all batches, one after the other, and who writes them."""

    def __init__(self, ranks: int) -> None:
        self.problems: list[tuple[int, str]] = []
        self.loads = np.zeros(ranks, np.int64)
        self.writers: list[Int32s] = []
        """Of each batch, for each different box the lowest rank that has it; after `assign_evenly`, the rank that writes it."""
        self.boxes: list[Int32s] = []
        """The number of the box on that rank."""
        self.shared: dict[int, _Shared] = {}
        """By the number of a batch: the boxes that have several holders, where there are some."""
        self.classes: dict[tuple[int, int], int] = {}
        """Sets of holders, by their key and how many they are, in the order in which they first occur."""
        self.holders: list[Ints] = []

    def add(self, batch: BoxBatch) -> None:
        self.problems.extend(batch.problems)
        if self.problems:
            return
        heads = batch.heads[:-1]
        counts = batch.heads[1:] - heads
        self.writers.append(batch.ranks[heads])
        self.boxes.append(batch.boxes[heads])
        alone = counts == 1
        np.add.at(self.loads, self.writers[-1][alone], batch.nbytes[alone])
        several = (~alone).nonzero()[0]
        if len(several):
            self.shared[len(self.writers) - 1] = self._share(batch, several, counts)

    def _share(self, batch: BoxBatch, numbers: Ints, counts: Ints) -> _Shared:
        several = (counts > 1).repeat(counts)
        ranks, boxes = batch.ranks[several], batch.boxes[several]
        counts = counts[numbers]
        heads = counts.cumsum() - counts
        classes = np.empty(len(numbers), np.int64)
        keys = np.add.reduceat(_marks(len(self.loads))[ranks], heads) + counts.astype(np.uint64)
        order = keys.argsort()
        begins = np.concatenate(([True], keys[order[1:]] != keys[order[:-1]])).nonzero()[0]
        firsts = np.minimum.reduceat(order, begins)
        ids = np.zeros(len(begins), np.int64)
        for i in firsts.argsort().tolist():
            first = int(firsts[i])
            count, begin = int(counts[first]), int(heads[first])
            ids[i] = self.classes.setdefault((int(keys[first]), count), len(self.holders))
            if ids[i] == len(self.holders):
                self.holders.append(ranks[begin : begin + count].astype(np.int64))
        classes[order] = ids.repeat(np.diff(np.append(begins, len(order))))
        return _Shared(numbers, heads, counts, classes, batch.nbytes[numbers], ranks, boxes)

    def deal(self) -> None:
        """Choose the writers of the boxes that have several holders, so that all ranks write about as much."""
        every = [*self.shared.items()]
        classes = [shared.classes for _, shared in every]
        stops = np.sum(
            [np.bincount(c, minlength=len(self.holders)) for c in classes], axis=0, dtype=np.int64
        ).cumsum()
        nbytes = np.empty(int(stops[-1]), np.int64)
        for (_, shared), (order, places) in zip(every, _grouped(classes, stops), strict=True):
            nbytes[places] = shared.nbytes[order]
        picks = np.concatenate(
            deal_classes(
                list(zip(self.holders, np.split(nbytes, stops[:-1]), strict=True)), self.loads
            )
        )
        for (i, shared), (order, places) in zip(every, _grouped(classes, stops), strict=True):
            # A holder of this very box: should two sets ever have one key, only the balance would suffer.
            chosen = shared.heads[order] + np.minimum(picks[places], shared.counts[order] - 1)
            numbers = shared.numbers[order]
            self.writers[i][numbers], self.boxes[i][numbers] = (
                shared.ranks[chosen],
                shared.boxes[chosen],
            )

    def settle(self) -> None:
        """Fix the writers of all boxes, and with them the loads."""
        if self.holders:
            self.deal()
        for i, shared in self.shared.items():
            np.add.at(self.loads, self.writers[i][shared.numbers], shared.nbytes)
        self.shared.clear()

    def by_rank(self) -> list[Ints]:
        """For each rank the boxes that it writes, by its own numbers and in the order of the batches."""
        if not self.writers or not len(self.loads):
            return [np.zeros(0, np.int64) for _ in self.loads]
        stops = np.bincount(np.concatenate(self.writers), minlength=len(self.loads)).cumsum()
        sorted_boxes = np.empty(int(stops[-1]), np.int64)
        for boxes, (order, places) in zip(self.boxes, _grouped(self.writers, stops), strict=True):
            sorted_boxes[places] = boxes[order]
        return [sorted_boxes[first:last] for first, last in pairwise([0, *stops.tolist()])]


class _Shared(Value, frozen=True):
    """The boxes of one batch that have several holders."""

    numbers: Ints
    """Places of the boxes among the different boxes of the batch."""
    heads: Ints
    """Where the holders of each box begin."""
    counts: Ints
    classes: Ints
    """The set of holders of each box."""
    nbytes: Ints
    ranks: Int32s
    boxes: Int32s


def _grouped(parts: Sequence[Ints | Int32s], stops: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Sort numbers, stably, that come in parts: the order of each part, and the places of what is so ordered among all.

    `stops` is where each number ends among all. Part by part, because a sort that fits the processor's cache is several times
    as fast.
    """
    next_places = np.concatenate(([0], stops[:-1]))
    for numbers in parts:
        counts = np.bincount(numbers, minlength=len(stops))
        # numpy sorts 16-bit numbers in linear time.
        order = (numbers.astype(np.uint16) if len(stops) <= 1 << 16 else numbers).argsort(
            kind="stable"
        )
        yield (
            order,
            np.arange(len(numbers)) + (next_places - (counts.cumsum() - counts)).repeat(counts),
        )
        next_places += counts


def _marks(ranks: int) -> npt.NDArray[np.uint64]:
    """A number for each rank, such that sums over different sets are different: 64 well-mixed bits (splitmix64)."""
    x = np.arange(1, ranks + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _writes(
    states: Sequence[RankState], merged: Merged, found: _Written, *, values: list[tuple[str, ...]]
) -> Iterator[RankWrites]:
    for rank, (state, own) in enumerate(zip(states, found.by_rank(), strict=True)):
        # A rank that writes all it has, in the order in which it has it, needs no copy.
        all_of_it = len(own) == state.count and bool((own[1:] > own[:-1]).all())
        tensors, offsets, sizes = (
            c if all_of_it else c[..., own] for c in (state.tensors, state.offsets, state.sizes)
        )
        places = merged.places[rank]
        tensors = tensors if places is None else places[tensors]
        yield RankWrites(own, tensors, offsets, sizes, values[rank], int(found.loads[rank]))


def _too_large(catalogue: Catalogue) -> list[str]:
    every = [*zip(catalogue.dtypes, catalogue.shapes, strict=True)]
    nbytes = {
        (dtype, shape): (math.prod(shape) * BITS[dtype] + 7) // 8 for dtype, shape in {*every}
    }
    total = sum(map(nbytes.__getitem__, every))
    return (
        [f"the tensors take {total:,} bytes, more than {MAX_NBYTES:,}"]
        if total > MAX_NBYTES
        else []
    )


ROUNDS = 8
"""How often classes with crossing holders are dealt at the most. Most of the gain is in the second time."""


def deal_classes(classes: Sequence[tuple[Ints, Ints]], loads: Ints) -> list[Ints]:
    """For each class (holders, bytes of its boxes) the holder that writes each box. `loads` is what each rank writes already."""
    # Python sorts stably, so that equal numbers of holders keep the order of the classes.
    order = sorted(range(len(classes)), key=lambda i: len(classes[i][0]))
    loads = loads.copy()
    picks: list[Ints] = [np.zeros(0, np.int64)] * len(classes)
    for i in order:
        holders, nbytes = classes[i]
        picks[i] = assign_evenly(nbytes, loads[holders])
        loads[holders] += _sums(picks[i], nbytes, len(holders))
    if not _cross([classes[i][0] for i in order], len(loads)):
        return picks
    for _ in range(ROUNDS - 1):
        again, after = list(picks), loads.copy()
        for i in order:
            holders, nbytes = classes[i]
            after[holders] -= _sums(again[i], nbytes, len(holders))
            again[i] = assign_evenly(nbytes, after[holders])
            after[holders] += _sums(again[i], nbytes, len(holders))
        if after.max() >= loads.max():
            break
        picks, loads = again, after
    return picks


def _sums(picks: Ints, nbytes: Ints, holders: int) -> Ints:
    sums = np.zeros(holders, np.int64)
    np.add.at(sums, picks, nbytes)
    return sums


def _cross(sets: Sequence[Ints], ranks: int) -> bool:
    """Whether two sets, given smallest first, share some ranks while neither holds the other.

    A rank remembers the last set that it was in. As long as nothing crosses, the sets of a rank are a chain, and the last one holds
    the others; so it is enough that a new set holds the whole of every set that its ranks remember.
    """
    last = np.full(ranks, -1, np.int64)
    for number, members in enumerate(sets):
        remembered, counts = np.unique(last[members], return_counts=True)
        for before, count in zip(remembered.tolist(), counts.tolist(), strict=True):
            if before >= 0 and count < len(sets[before]):
                return True
        last[members] = number
    return False
