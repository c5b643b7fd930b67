"""What the saves of a run cost, and how often to save: `Run.summary`.

A save stops the training for a while (C). A failure costs what was done since the last save, half an interval on average. Young and
Daly: both together are least where the interval is √(2·C·MTBF), MTBF being the mean time between two failures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MTBF_S = 24 * 3600.0
"""One failure a day, where the caller does not say."""


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """The times of one save."""

    step: int
    stalled_s: float
    """How long the caller waited."""
    took_s: float
    """Until the step was published."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What the saves of this Run cost so far."""

    saves: int
    failed: int
    nbytes: int
    """Bytes of all steps that were saved."""
    stalled_s: float
    """How long a save stops the caller: the mean."""
    longest_stall_s: float
    took_s: float
    """How long until a step is published: the mean."""
    deleted: int
    """Steps that retention deleted."""
    mtbf_s: float
    """The mean time between failures that is assumed."""
    interval_s: float | None
    """How often to save, by what was measured; None before the first save."""
    damaged: tuple[str, ...] = ()
    """What did not read back, in words."""

    def __str__(self) -> str:
        if not self.saves:
            return "no step has been saved yet"
        counts = f"{self.saves} saved, {self.deleted} deleted" + (
            f", {self.failed} failed" if self.failed else ""
        )
        stall = f"{_time(self.stalled_s)} (at most {_time(self.longest_stall_s)})"
        times = f"a save stops training for {stall} and takes {_time(self.took_s)}"
        every = (
            f"with a failure every {_time(self.mtbf_s)}, save every {_time(self.interval_s or 0)}"
        )
        damages = "".join(f"; damaged: {damage}" for damage in self.damaged)
        return f"{counts}; {times}; {every}{damages}"


def summarize(
    times: Sequence[SaveTimes],
    failed: int,
    deleted: int,
    *,
    mtbf_s: float,
    damaged: tuple[str, ...],
) -> Summary:
    """Summarize the saves of a run, of which `failed` more failed."""
    stalls = [save.stalled_s for save in times]
    stalled = sum(stalls) / max(len(times), 1)
    return Summary(
        saves=len(times),
        failed=failed,
        nbytes=sum(save.nbytes for save in times),
        stalled_s=stalled,
        longest_stall_s=max(stalls, default=0.0),
        took_s=sum(save.took_s for save in times) / max(len(times), 1),
        deleted=deleted,
        mtbf_s=mtbf_s,
        interval_s=math.sqrt(2 * stalled * mtbf_s) if times else None,
        damaged=damaged,
    )


def _time(seconds: float) -> str:
    """Return a duration for people, in the two largest units that are not zero.

    >>> _time(0.25), _time(49), _time(131), _time(86400), _time(5400)
    ('250 ms', '49 s', '2 min 11 s', '24 h', '1 h 30 min')
    """
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    is_long = round(seconds) >= 3600
    whole, rest = divmod(round(seconds / 60 if is_long else seconds), 60)
    large_unit, small_unit = ("h", "min") if is_long else ("min", "s")
    amounts = ((whole, large_unit), (rest, small_unit))
    return " ".join(f"{amount} {unit}" for amount, unit in amounts if amount)
