"""How long a run has run: seconds that are counted from step to step, by a clock that nobody can set.

The clock on the wall jumps. So a step also says for how long the run had run when it was saved (`Step.ran`), and the age of a step
for `Within` is what the newest has more.

1. A program looks for the newest step: `latest`, `resume`, or its first save. It goes on with what that step says.
2. From then on `time.monotonic` counts, for all Runs of this program in one place. Its steps say how far it has come.
3. Where another program has saved meanwhile, the time until then is that one's, and is not counted twice.

The count is never more than the time that has passed. It is less by the pauses between programs, and by what a program did between
its last save and its end.
"""

from __future__ import annotations

import time
from functools import lru_cache

from holdfast.extras.runs.place import RunPlace


class RunClock:
    """The time that one program counts of one run."""

    def __init__(self) -> None:
        self._ahead = 0.0
        """Seconds that the run has more than `time.monotonic` says."""
        self._known: set[float | None] = set()
        """The counts that this program went on with, and those of its own steps."""

    def go_on(self, ran: float | None) -> None:
        """Count from here, unless `ran`, what the newest step says, is known already. None: no step says anything."""
        if ran not in self._known:
            self._ahead, self._known = (ran or 0.0) - time.monotonic(), {ran}

    def look(self, place: RunPlace) -> None:
        """Go on with the newest step there that has a count. Steps of an older Holdfast, or of other trainers, have none."""
        newest = place.newest()
        if newest is not None and newest.ran is None:
            newest = next((one for one in reversed(place.steps()) if one.ran is not None), None)
        self.go_on(None if newest is None else newest.ran)

    def read(self) -> float | None:
        """For how many seconds the run has run, for the step that is saved now."""
        ran = max(self._ahead + time.monotonic(), 0.0)
        self._known.add(ran)
        return ran


@lru_cache(256)
def clock_of(path: str) -> RunClock:
    return RunClock()
