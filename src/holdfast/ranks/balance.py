"""Which of the ranks that hold the same boxes writes which? So that every rank writes about as many bytes.

Boxes with the same holders are a *class*. Classes are dealt one after the other, those with the fewest holders first, each onto
the loads that its holders have by then; boxes with one holder are the beginning. A class is dealt in two steps:

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

from collections.abc import Sequence

import numpy as np

from holdfast.core.arrays import Ints

__all__ = ["deal", "deal_classes"]


LARGEST = 4
"""Boxes for each holder that are dealt one by one. The rest is then small beside what is there, and the Python loop short."""

ROUNDS = 8
"""How often classes with crossing holders are dealt at the most. Most of the gain is in the second time."""


def deal_classes(classes: Sequence[tuple[Ints, Ints]], loads: Ints) -> list[Ints]:
    """For each class (its holders, the bytes of its boxes) the number of the holder that writes each box.

    `loads` is what each rank writes already. No two classes have the same holders.
    """
    # Python sorts stably, so that equal numbers of holders keep the order of the classes.
    order = sorted(range(len(classes)), key=lambda i: len(classes[i][0]))
    loads = loads.copy()
    picks: list[Ints] = [np.zeros(0, np.int64)] * len(classes)
    for i in order:
        holders, nbytes = classes[i]
        picks[i] = deal(nbytes, loads[holders])
        loads[holders] += _sums(picks[i], nbytes, len(holders))
    if not _cross([classes[i][0] for i in order], len(loads)):
        return picks
    for _ in range(ROUNDS - 1):
        again, after = list(picks), loads.copy()
        for i in order:
            holders, nbytes = classes[i]
            after[holders] -= _sums(again[i], nbytes, len(holders))
            again[i] = deal(nbytes, after[holders])
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


def deal(nbytes: Ints, loads: Ints) -> Ints:
    """For each box of a class, the number of the holder that writes it; `loads` is what each holder has to write already.

    >>> deal(np.array([5, 1, 9, 3]), np.array([0, 6])).tolist()
    [1, 1, 0, 0]
    """
    picks = np.zeros(len(nbytes), np.int64)
    if len(loads) < 2:
        return picks
    heights = loads.copy()
    order = np.argsort(-nbytes, kind="stable")
    for box in order[: LARGEST * len(loads)].tolist():
        lowest = int(heights.argmin())
        picks[box] = lowest
        heights[lowest] += nbytes[box]
    rest = np.sort(order[LARGEST * len(loads) :])
    if len(rest):
        picks[rest] = _pour(nbytes[rest], heights)
    return picks


def _pour(nbytes: Ints, loads: Ints) -> Ints:
    ends = np.cumsum(nbytes)
    total = int(ends[-1])
    floor = np.sort(loads)
    # The level if only the n lowest holders got any, for each n; the true n is the last whose floor is under its level.
    levels = -(-(np.cumsum(floor) + total) // np.arange(1, len(loads) + 1))
    level = levels[np.flatnonzero(floor <= levels)[-1]]
    rooms = np.cumsum(np.maximum(level - loads, 0))
    return np.searchsorted(rooms, ends - nbytes + nbytes // 2, side="right").astype(np.int64)
