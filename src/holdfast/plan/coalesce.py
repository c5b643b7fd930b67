"""Which neighbouring reads are worth joining?

Reading through a gap costs its bytes; skipping it costs a system call. Two rules, both bounded:

1. A gap of at most `FREE_GAP_NBYTES` bytes is always read through: at memory speed it takes less time than the call that skips it.
2. Larger gaps, up to `MAX_GAP`, are read through smallest first, until together they reach 4% of the wanted bytes. Gaps of one
   size are read through all or none: a comb with some teeth joined would be neither one read nor a row of equal ones.
3. A range of `ALONE_NBYTES` bytes or more is read by itself: the call costs nothing beside it, and it goes straight into place.

So the over-read of a plan is at most 4% of what was asked for, plus gaps that are cheaper than their system calls. The
caller owns these defaults; the planner reports what they cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.core.arrays import Ints

__all__ = ["FREE_GAP_NBYTES", "Policy", "coalesce"]


FREE_GAP_NBYTES = 512
"""Bytes. A `preadv` from Python takes 1 to 2 µs, in which memory delivers some kilobytes; half a kilobyte is surely cheaper."""


ALONE_NBYTES = 256 << 10
"""Bytes. Some 50 µs of copying, beside which a call is nothing, and a second copy out of scratch memory is not."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How far reads may be joined."""

    free_gap: int = FREE_GAP_NBYTES
    """Gaps up to this many bytes never split a read."""
    max_gap: int = 1 << 20
    """Larger gaps always do: a megabyte of reading is more than any seek costs."""
    over_read: float = 0.04
    """The part of the wanted bytes that may be read in vain to save calls."""
    alone: int = ALONE_NBYTES
    """Ranges from this length on are joined with nothing."""
    block: int = 8 << 20
    """A joined read does not grow beyond this, so that threads share the work and scratch memory stays small."""


def coalesce(starts: Ints, stops: Ints, policy: Policy) -> Ints:
    """Positions where a new joined read begins, for ranges that are sorted by start. The first is 0 unless there are none."""
    if not len(starts):
        return np.zeros(0, np.int64)
    reach = np.maximum.accumulate(stops)
    gaps = np.maximum(starts[1:] - reach[:-1], 0)
    long = stops - starts >= policy.alone
    # What overlaps is joined whatever its length: its bytes are read once.
    joinable = (gaps <= policy.max_gap) & ~((long[1:] | long[:-1]) & (starts[1:] >= reach[:-1]))
    joined = joinable & (gaps <= policy.free_gap)
    candidates = np.flatnonzero(joinable & ~joined)
    if len(candidates):
        budget = int(int((stops - starts).sum()) * policy.over_read)
        cheapest = candidates[np.argsort(gaps[candidates], kind="stable")]
        sizes = gaps[cheapest]
        affordable = int(np.searchsorted(np.cumsum(sizes), budget, side="right"))
        if affordable < len(sizes):
            affordable = int(np.searchsorted(sizes, sizes[affordable]))
        joined[cheapest[:affordable]] = True
    first = np.concatenate(([True], ~joined))
    heads = np.flatnonzero(first)
    # Cut joined reads where they pass a block's boundary, counted from their own start.
    origin = starts[heads][np.cumsum(first) - 1]
    blocks = (starts - origin) // policy.block
    first[1:] |= blocks[1:] != blocks[:-1]
    return np.flatnonzero(first)
