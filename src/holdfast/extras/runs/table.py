"""`look`: a run as a table for people: every step and what would be one, why it is kept, what it shares. Nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.extras.runs.lock import Holder
from holdfast.extras.runs.place import RunPlace, Sizes
from holdfast.extras.runs.retention import Fate, decide
from holdfast.extras.runs.rules import Rule
from holdfast.extras.runs.steps import FoundStep, Step


@dataclass(frozen=True, slots=True)
class RunRow:
    """One step, or a folder that would be one."""

    found: FoundStep
    fate: Fate | None
    new_nbytes: int
    """Bytes of files that no earlier step has."""
    shared_nbytes: int

    @property
    def step(self) -> Step | None:
        return self.found.whole


@dataclass(frozen=True, slots=True)
class RunTable:
    """A run as it is now."""

    path: str
    rows: Sequence[RunRow]
    rules: Sequence[Rule]
    writer: Holder | None
    now: float
    total_nbytes: int
    recorded: bool
    """Whether a Run wrote its rules down here. Where none did, another program made the steps, and may delete them."""
    unsealed: Sequence[str]
    """Checkpoints of other trainers that nobody sealed: folders `step-N`, and where no Run has been, others too."""

    @property
    def without_rules(self) -> str:
        """What it means that there are no rules."""
        return (
            "the run deletes nothing"
            if self.recorded
            else "this is not a run of Holdfast; another program may delete steps"
        )


def look(folder: RunPlace, rules: Collection[Rule], path: str, *, recorded: bool) -> RunTable:
    """What is in a run's directory now; `path` is how the caller names it."""
    every = folder.survey()
    survey = [found for found in every if found.sealed]
    steps = [found.whole for found in survey if found.whole is not None]
    pins, writer = folder.pins(), folder.writer()
    now = time.time()
    fates = {fate.step.step: fate for fate in decide(steps, rules, pins=pins)}
    seen, rows = Sizes(), []
    for found in survey:
        own = folder.sizes(found.whole) if found.whole is not None else {}
        new = sum(size for identity, size in own.items() if identity not in seen)
        seen.update(own)
        fate = fates.get(found.whole.step) if found.whole is not None else None
        rows.append(RunRow(found, fate, new, sum(own.values()) - new))
    unsealed = [
        *(found.name for found in every if not found.sealed),
        *(() if recorded else folder.unsealed()),
    ]
    return RunTable(path, rows, tuple(rules), writer, now, sum(seen.values()), recorded, unsealed)
