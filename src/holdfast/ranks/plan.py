"""`plan_ranks`: which rank writes which box of which tensor. Step 3 of a sharded save.

1. Merge the catalogues; settle who writes which value, and which names are one tensor on all ranks (ranks/merge.py).
2. Find the boxes that several ranks have, and check that those of each tensor tile it (ranks/survey.py, ranks/defects.py).
3. Deal the boxes that have more than one holder, evenly by bytes (ranks/balance.py).
4. Sort by writer. The boxes of a rank stay in the order of the catalogue and then in C order of their starts.

Every problem of every tensor is found before anything is said, and with a problem there is no plan. Everything is a column of
integers, and the loops are over ranks, tensors or sets of holders, never over boxes. The same states give the same plan, always.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.dtype import DTYPES
from holdfast.ranks.balance import deal_classes
from holdfast.ranks.merge import Merged, agreed_aliases, hold, merge, share_values
from holdfast.ranks.state import Catalogue, RankState
from holdfast.ranks.survey import Slab, survey

__all__ = ["RankPlan", "RankWrites", "plan_ranks"]

Int32s = npt.NDArray[np.int32]

MAX_NBYTES = 1 << 60
"""Of a whole checkpoint: an exbibyte. Sums of bytes then fit 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class RankWrites:
    """What one rank writes: boxes in the order in which they are written, and values."""

    boxes: Ints
    """The number of each box in the columns of the rank's own `RankState`."""
    tensors: Ints
    """Its tensor, as a place in the catalogue of the plan."""
    offsets: Ints
    """Lowest corners, a row for each dimension, as in `RankState`; dimensions beyond those that the rank knows are left out."""
    sizes: Ints
    values: tuple[str, ...]
    nbytes: int
    """Bytes of tensors. What values take is not known to the plan."""


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """A whole sharded save, or the reasons why there can be none."""

    catalogue: Catalogue
    """Every tensor of every rank. Those in `aliases`, and those without elements, are written by nobody."""
    writes: tuple[RankWrites, ...]
    """What each rank writes. Empty where there are problems."""
    aliases: tuple[tuple[str, str], ...]
    """Pairs (name, base): the content of the name is that of the base."""
    problems: tuple[str, ...] = ()
    """All of them; each names its tensor or value and the ranks."""
    notes: tuple[str, ...] = ()
    """What a person should know: names that share memory on some ranks only, and are stored twice."""

    @property
    def nbytes(self) -> Ints:
        """Bytes of tensors that each rank writes."""
        return np.array([w.nbytes for w in self.writes], np.int64)

    def boxes(self, rank: int) -> list[tuple[str, Box]]:
        """The name and box of everything that one rank writes, in order."""
        writes, catalogue = self.writes[rank], self.catalogue
        named = []
        for i, t in enumerate(writes.tensors.tolist()):
            dims = len(catalogue.shapes[t])
            named.append((catalogue.names[t], Box.at(writes.offsets[:dims, i].tolist(), writes.sizes[:dims, i].tolist())))
        return named


def plan_ranks(states: Sequence[RankState]) -> RankPlan:
    """Plan the save of what all ranks have; `states[r]` is what rank r has.

    Where several ranks have the same box, one writes it: chosen so that all write about as much.
    """
    merged = merge(states)
    catalogue = merged.catalogue
    held = [hold(state, places) for state, places in zip(states, merged.places, strict=True)]
    aliases, notes = agreed_aliases(held, merged)
    values, value_problems = share_values(states, merged)
    left_out = np.zeros(len(catalogue), np.bool_)
    left_out[[*merged.conflicts, *(catalogue.positions[name] for name, _ in aliases)]] = True
    found = _Written(len(states))
    for slab in survey(held, catalogue, left_out):
        found.add(slab)
    of_tensors = sorted([*merged.conflicts.items(), *found.problems], key=lambda problem: problem[0])
    problems = [text for _, text in of_tensors] + value_problems + _too_large(catalogue)
    if problems:
        return RankPlan(catalogue, (), aliases, tuple(problems), notes)
    found.settle()
    return RankPlan(catalogue, tuple(_writes(states, merged, found, values)), aliases, (), notes)


class _Written:
    """The different boxes of all slabs, one after the other, and who writes them."""

    def __init__(self, ranks: int) -> None:
        self.problems: list[tuple[int, str]] = []
        self.loads = np.zeros(ranks, np.int64)
        """Bytes that each rank writes."""
        self.writers: list[Int32s] = []
        """Of each slab, for each different box the lowest rank that has it; after `deal`, the rank that writes it."""
        self.boxes: list[Int32s] = []
        """What that rank calls it."""
        self.shared: list[_Shared] = []
        """Of each slab, the boxes that have several holders."""
        self.classes: dict[tuple[int, int], int] = {}
        """Sets of holders, by their key and how many they are, in the order in which they first occur."""
        self.holders: list[Ints] = []
        """The ranks of each set."""
        self.marks = _marks(ranks)

    def add(self, slab: Slab) -> None:
        self.problems.extend(slab.problems)
        if self.problems:
            return
        heads, counts = slab.heads[:-1], np.diff(slab.heads)
        self.writers.append(slab.ranks[heads])
        self.boxes.append(slab.boxes[heads])
        alone = counts == 1
        np.add.at(self.loads, self.writers[-1][alone], slab.nbytes[alone])
        self.shared.append(self._share(slab, np.flatnonzero(~alone), counts))

    def _share(self, slab: Slab, numbers: Ints, counts: Ints) -> _Shared:
        several = np.repeat(counts > 1, counts)
        ranks, boxes = slab.ranks[several], slab.boxes[several]
        counts = counts[numbers]
        heads = np.cumsum(counts) - counts
        classes = np.zeros(len(numbers), np.int64)
        if len(numbers):
            keys = np.add.reduceat(self.marks[ranks], heads) + counts.astype(np.uint64)
            order = np.argsort(keys)
            begins = np.flatnonzero(np.concatenate(([True], keys[order[1:]] != keys[order[:-1]])))
            firsts = np.minimum.reduceat(order, begins)
            ids = np.zeros(len(begins), np.int64)
            for i in np.argsort(firsts).tolist():
                first = int(firsts[i])
                count, begin = int(counts[first]), int(heads[first])
                ids[i] = self.classes.setdefault((int(keys[first]), count), len(self.holders))
                if ids[i] == len(self.holders):
                    self.holders.append(ranks[begin : begin + count].astype(np.int64))
            classes[order] = np.repeat(ids, np.diff(np.append(begins, len(order))))
        return _Shared(numbers, heads, counts, classes, slab.nbytes[numbers], ranks, boxes)

    def deal(self) -> None:
        """Choose the writers of the boxes that have several holders, so that all ranks write about as much."""
        classes = [shared.classes for shared in self.shared]
        stops = np.cumsum(np.sum([np.bincount(c, minlength=len(self.holders)) for c in classes], axis=0, dtype=np.int64))
        nbytes = np.empty(int(stops[-1]), np.int64)
        for shared, (order, places) in zip(self.shared, _grouped(classes, stops), strict=True):
            nbytes[places] = shared.nbytes[order]
        picks = np.concatenate(deal_classes(list(zip(self.holders, np.split(nbytes, stops[:-1]), strict=True)), self.loads))
        for i, (order, places) in enumerate(_grouped(classes, stops)):
            shared = self.shared[i]
            # A holder of this very box: should two sets ever have one key, only the balance would suffer.
            chosen = shared.heads[order] + np.minimum(picks[places], shared.counts[order] - 1)
            numbers = shared.numbers[order]
            self.writers[i][numbers], self.boxes[i][numbers] = shared.ranks[chosen], shared.boxes[chosen]

    def settle(self) -> None:
        """Fix the writers of all boxes, and with them the loads."""
        if self.holders:
            self.deal()
        for writers, shared in zip(self.writers, self.shared, strict=True):
            np.add.at(self.loads, writers[shared.numbers], shared.nbytes)
        self.shared.clear()

    def by_rank(self) -> list[Ints]:
        """For each rank the boxes that it writes, as it calls them and in the order of the slabs."""
        if not self.writers or not len(self.loads):
            return [np.zeros(0, np.int64) for _ in self.loads]
        stops = np.cumsum(np.sum([np.bincount(w, minlength=len(self.loads)) for w in self.writers], axis=0, dtype=np.int64))
        sorted_boxes = np.empty(int(stops[-1]), np.int64)
        for boxes, (order, places) in zip(self.boxes, _grouped(self.writers, stops), strict=True):
            sorted_boxes[places] = boxes[order]
        return np.split(sorted_boxes, stops[:-1])


@dataclass(frozen=True, slots=True)
class _Shared:
    """The boxes of one slab that have several holders."""

    numbers: Ints
    """Their places among the different boxes of the slab."""
    heads: Ints
    """Where their holders begin."""
    counts: Ints
    """How many holders they have."""
    classes: Ints
    """Which set of holders that is."""
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
        order = np.argsort(numbers.astype(np.uint16) if len(stops) <= 1 << 16 else numbers, kind="stable")
        yield order, np.arange(len(numbers)) + np.repeat(next_places - (np.cumsum(counts) - counts), counts)
        next_places += counts


def _marks(ranks: int) -> npt.NDArray[np.uint64]:
    """A number for each rank, such that sums over different sets are different: 64 well-mixed bits (splitmix64)."""
    x = np.arange(1, ranks + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _writes(states: Sequence[RankState], merged: Merged, found: _Written, values: list[tuple[str, ...]]) -> Iterator[RankWrites]:
    for rank, (state, own) in enumerate(zip(states, found.by_rank(), strict=True)):
        # A rank that writes all it has, in the order in which it has it, needs no copy.
        all_of_it = len(own) == state.count and bool((own[1:] > own[:-1]).all())
        tensors, offsets, sizes = (c if all_of_it else c[..., own] for c in (state.tensors, state.offsets, state.sizes))
        places = merged.places[rank]
        tensors = tensors if places is None else places[tensors]
        yield RankWrites(own, tensors, offsets, sizes, values[rank], int(found.loads[rank]))


def _too_large(catalogue: Catalogue) -> list[str]:
    rows = zip(map(DTYPES.name, catalogue.dtypes), catalogue.extents.prod(axis=0).tolist(), strict=True)
    total = sum(row.nbytes(count) for row, count in rows if row is not None)
    return [f"the tensors take {total:,} bytes, more than {MAX_NBYTES:,}"] if total > MAX_NBYTES else []
