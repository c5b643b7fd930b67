"""Room for a step, before its first byte is written: what is free on the disk, and what the run's budget leaves.

Files that several steps share (hard links) count once. A plan knows how many bytes it has, so a save that has no room fails,
waits or makes room while every old step is intact. In a bucket there is the budget alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from holdfast.engine.commit.temporaries import wait_for_room
from holdfast.runs.place import RunPlace, Sizes
from holdfast.runs.steps import Step


class Space(Struct):
    """How much a run may have."""

    place: RunPlace
    budget: int | None = None
    _known: dict[tuple[str, float], Sizes] = field(default_factory=dict)
    """Of steps that were looked at before: they do not change."""

    def lacking(self, nbytes: int) -> str:
        """Why there is no room for so many bytes more; empty where there is."""
        free = self.place.free()
        if free is not None and free < nbytes and wait_for_room():
            free = self.place.free()
        if free is not None and free < nbytes:
            return f"the disk is full: {nbytes:,} bytes are to be written and {free:,} are free"
        if self.budget is None:
            return ""
        used = self.used(self.place.steps())
        if used + nbytes <= self.budget:
            return ""
        return f"the run's budget is used up: {used:,} of {self.budget:,} bytes, and {nbytes:,} more are to be written"

    def hopeless(self, nbytes: int) -> bool:
        """Whether no deleting and no waiting makes room."""
        return self.budget is not None and nbytes > self.budget

    def used(self, steps: Sequence[Step]) -> int:
        """Bytes of all files of these steps, each counted once."""
        before, self._known = self._known, {}
        for one in steps:
            key = (one.name, one.saved)
            self._known[key] = before[key] if key in before else self.sizes(one)
        every: Sizes = {}
        for sizes in self._known.values():
            every.update(sizes)
        return sum(every.values())

    def sizes(self, step: Step) -> Sizes:
        """The files of a step."""
        return self.place.sizes(step)
