"""`RunView`: looking at the steps of a run, and pinning them. Nothing is locked, nothing but pins is changed.

Every question is a new look at the directory, so what another process saves or deletes is seen by the next one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Literal

from holdfast.core.notebook import render_card, render_table
from holdfast.core.quantities import parse_count
from holdfast.core.text import format_nbytes
from holdfast.errors import NoSuchStep, StoreError
from holdfast.extras.runs.clock import clock_of
from holdfast.extras.runs.directory import place_for
from holdfast.extras.runs.doubts import DoubtfulSteps
from holdfast.extras.runs.record import Pin
from holdfast.extras.runs.retention import Fate, decide, read_back
from holdfast.extras.runs.rules import Best, Rule
from holdfast.extras.runs.steps import Step
from holdfast.stores.paths import place_of
from holdfast.verbs.seals.document import LARGEST

MOST_METRICS = 6
"""Columns of metrics in a notebook."""

LOOKS = 20
"""How often a step is looked for again that was deleted before it could be read. Each time a newer one was there."""


def read_step(value: object, name: str = "step=") -> int:
    """Check the number of a step."""
    return parse_count(value, name, minimum=0, maximum=LARGEST)


class RunView:
    """The steps in a run's directory, or below a prefix of a bucket."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: tuple[Rule, ...] = (),
        *,
        durable: bool = True,
        store: object | None = None,
    ) -> None:
        self.path = place_of(path, store)
        self.keep = keep
        self.durable = durable
        self._folder = place_for(self.path)
        self._doubts = DoubtfulSteps(self._folder)
        self._clock = clock_of(self._folder.path)
        self._sure: set[int] = set()
        """Steps that have been read back."""

    def latest(self, *, deep: bool = False) -> Step | None:
        """The newest step that is whole; None where there is none. With `deep`, one whose every byte has its checksum."""
        below, looks = None, self._looks()
        while (
            (found := self._folder.newest(below=below)) is not None
            and deep
            and not read_back(found, require=True)
        ):
            if self._is_gone(found):
                next(looks)
                below = None
            else:
                if not read_back(found):  # and not merely without checksums to compare
                    self._doubts.mark_damaged(found, "its bytes do not have their checksums")
                below = found.step
        if deep and found is not None:
            self._doubts.mark_good(found)
        if found is not None and found.ran is not None:
            self._clock.go_on(found.ran)
        return found

    def _looks(self) -> Iterator[None]:
        yield from repeat(None, LOOKS)
        raise StoreError(
            "each step was deleted before it could be read: the run keeps too few; try again",
            file=self.path,
        )

    def _is_gone(self, step: Step) -> bool:
        """Whether a step was deleted after it was looked for, or another one is in its place."""
        now = self._folder.get(step.step)
        return now is None or (now.path, now.saved) != (step.path, step.saved)

    def best(self, metric: str, *, mode: Literal["min", "max"] = "min") -> Step | None:
        """The whole step with the least value of a metric, or the largest; of equal ones the later. NaN is never best."""
        steps = self._folder.steps()
        rule = Best(metric, 1, mode)
        kept = decide(steps, [rule])
        return next((fate.step for fate in kept if fate.rules), None)

    def steps(self) -> list[Step]:
        """All whole steps, the newest last."""
        return self._folder.steps()

    def __iter__(self) -> Iterator[Step]:
        return iter(self._folder.steps())

    def __len__(self) -> int:
        return len(self._folder.steps())

    def __bool__(self) -> bool:
        """True, as of any object: a run without steps is a run."""
        return True

    def __getitem__(self, step: int) -> Step:
        number = read_step(step)
        found = self._folder.get(number)
        if found is None:
            newest = self._folder.newest()
            near = "it has none yet" if newest is None else f"the newest is {newest.step}"
            raise NoSuchStep(
                f"this run has no whole step {number}; {near}", file=self.path, found=number
            )
        return found

    def __contains__(self, step: object) -> bool:
        return (
            isinstance(step, int)
            and not isinstance(step, bool)
            and self._folder.get(step) is not None
        )

    def plan(self) -> list[Fate]:
        """What the rules would do now: for every whole step why it is kept, or that it goes. Nothing is deleted."""
        steps = self._folder.steps()
        return decide(steps, self.keep, pins=self.pins(), sure=self._sure, busy=self._busy())

    def _repr_html_(self) -> str:
        """The card of a notebook: a row for each whole step, the newest first."""
        fates = RunView.plan(self)[::-1]
        metrics = [*dict.fromkeys(name for fate in fates for name in fate.step.metrics)][
            :MOST_METRICS
        ]
        rows = [
            (
                str(fate.step.step), time.strftime("%Y-%m-%d %H:%M", time.localtime(fate.step.saved)),
                format_nbytes(fate.step.nbytes),
                *(f"{fate.step.metrics[name]:.4g}" if name in fate.step.metrics else "" for name in metrics), fate.why,
            )
            for fate in fates
        ]  # fmt: skip
        shown = (
            render_table(("step", "saved", "size", *metrics, "kept by"), rows, len(rows))
            if rows
            else ""
        )
        return render_card(
            "Run", [("path", self.path), ("steps", f"{len(fates):,}")], tables=[shown]
        )

    def pins(self) -> Mapping[int, Pin]:
        """The pinned steps."""
        return self._folder.pins()

    def pin(self, step: int, why: str = "") -> Pin:
        """Keep a step whatever the rules say, and note why. Any process may, while the run goes on."""
        return self._folder.pin(read_step(step), why, durable=self.durable)

    def unpin(self, step: int) -> Pin:
        """Leave a step to the rules again."""
        return self._folder.unpin(read_step(step), durable=self.durable)

    def _busy(self) -> Mapping[int, str]:
        return {}
