"""`RunPlace`: what a run needs of the place that its steps are in, a directory or a bucket.

Rules, retention and `Run` do not depend on the kind of the place. The documents beside the steps
(`record`) are the same in both kinds, which only differ in how a document is read and changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

from holdfast.core.documents import DocumentType
from holdfast.errors import NoSuchStep
from holdfast.extras.runs.lock import Holder, RunLock
from holdfast.extras.runs.record import (
    EXPORTS,
    MOST_RECEIPTS,
    NO_PINS,
    PINS,
    RECORD,
    D,
    Pin,
    Pins,
    Receipts,
    RunRecord,
)
from holdfast.extras.runs.steps import FoundStep, Step
from holdfast.stores.remote.url import Stamps
from holdfast.verbs.seals.document import Stamp
from holdfast.verbs.shared.planned import Planned, Saved

Sizes = dict[Hashable, int]
"""The size of each file, by its identity: two names of one file are one entry."""

Choose = Callable[[Mapping[int, Pin]], Sequence[Step]]
"""Returns the steps to delete, from the pins."""

Change = Callable[[D | None], D | None]
"""From the document that exists to the one that replaces it. None leaves the document as it is."""

Closing = RunLock | ExitStack
"""What is held as long as a run is open for writing."""


class RunPlace(Protocol):
    """The place of the steps of a run. Every method looks at the place anew."""

    path: str

    def newest(self, *, below: int | None = None) -> Step | None:
        """Return the whole step with the highest number, if given below another number."""

    def get(self, step: int) -> Step | None:
        """Return the step of this number, if it is whole."""

    def steps(self) -> list[Step]:
        """Return all whole steps, the newest last."""
        return [found.whole for found in self.survey() if found.whole is not None]

    def survey(self) -> list[FoundStep]:
        """Return everything that is a step or would be one, by number, with what is wrong with it."""

    def unsealed(self) -> list[str]:
        """Return the names of checkpoints that other trainers wrote and that nobody sealed."""
        return []

    def exists(self) -> bool:
        """Return whether the place exists. In a bucket every prefix does."""
        return True

    # Room.

    def free(self) -> int | None:
        """Return the number of free bytes; None if there is no limit."""
        return None

    def sizes(self, step: Step) -> Sizes: ...

    def writer(self) -> Holder | None:
        """Return who has the run open, if the place knows."""
        return None

    # Documents. Reading one raises `HeaderError` if it cannot be understood.

    def read_record(self, kind: DocumentType[D]) -> D | None:
        """Return a document of the run; None if it does not exist."""

    def change_record(self, kind: DocumentType[D], change: Change[D], *, durable: bool) -> None:
        """Replace a document by what `change` makes of it, while nobody else does.

        A damaged document counts as none, except pins: without them, steps would be deleted.
        """

    def write_rules(self, record: RunRecord, *, durable: bool) -> None:
        """Store the rules and the budget of a run, unless they are stored already."""

        def write(found: RunRecord | None) -> RunRecord | None:
            is_known = found and (found.keep, found.budget) == (record.keep, record.budget)
            return None if is_known else record

        self.change_record(RECORD, write, durable=durable)

    def pins(self) -> Mapping[int, Pin]:
        """Return the pins, by the numbers of their steps."""
        return (self.read_record(PINS) or NO_PINS).by_step()

    def pin(self, step: int, why: str, *, durable: bool = True) -> Pin:
        """Keep a step whatever the rules say. Raises `NoSuchStep` if no whole step has this number."""
        pin = Pin(step, why, time.time())

        def add(found: Pins | None) -> Pins:
            pins = found or NO_PINS
            problem = None
            if step in pins.marked():
                problem = f"step {step} is being deleted; ask again in a minute"
            elif self.get(step) is None:
                problem = f"there is no whole step {step} to pin; `holdfast runs` lists them"
            if problem is not None:
                raise NoSuchStep(problem, file=self.path, found=step)
            return pins.with_pins({**pins.by_step(), step: pin})

        self.change_record(PINS, add, durable=durable)
        return pin

    def unpin(self, step: int, *, durable: bool = True) -> Pin:
        """Leave a step to the rules again. Raises `NoSuchStep` if it is not pinned."""
        removed: list[Pin] = []

        def drop(found: Pins | None) -> Pins:
            document = found or NO_PINS
            pins = document.by_step()
            if step not in pins:
                raise NoSuchStep(f"step {step} is not pinned", file=self.path, found=step)
            removed.append(pins.pop(step))
            return document.with_pins(pins)

        self.change_record(PINS, drop, durable=durable)
        return removed[-1]

    def exported(self) -> Mapping[str, Stamps]:
        """Return what the run exported, by target, as it was when it was published."""
        receipts = self.read_record(EXPORTS)
        return {} if receipts is None else receipts.exports

    def add_exported(self, target: str, stamps: Stamps, *, durable: bool) -> None:
        """Record that an export was published at a target. The latest export is the last one."""

        def add(found: Receipts | None) -> Receipts:
            exports = dict(found.exports) if found is not None else {}
            exports.pop(target, None)
            latest = [*exports.items(), (target, stamps)][-MOST_RECEIPTS:]
            return Receipts(exports=dict(latest))

        self.change_record(EXPORTS, add, durable=durable)

    # Changing the steps.

    def asking(self) -> AbstractContextManager[None]:
        """Hold a block before a step is published. Its errors of the place become `NotCommitted`."""
        return nullcontext()

    def begin(self, record: RunRecord, *, durable: bool) -> Closing:
        """Open the place for writing: make it, lock it if possible, clean it, and store the rules."""

    def check(self) -> None:
        """Raise `NotCommitted` if this is no longer the place that was opened for writing."""

    def locked(self) -> Closing:
        """Keep runs out while a person deletes steps, if the place has a lock."""
        return ExitStack()

    def replaces(self, step: int) -> bool:
        """Return whether a save without `overwrite` may replace what is left of a broken step."""
        return True

    def with_stamp(
        self, metadata: Mapping[str, str] | None, stamp: Stamp
    ) -> Mapping[str, str] | None:
        """Return the metadata of a step, with the stamp if the place has no seals."""
        return metadata

    def sealed(self, planned: Planned[Saved], stamp: Stamp) -> Planned[Saved]:
        """Complete a planned save by what makes a step of it."""

    def attributes(
        self, stamp: Stamp, files: Sequence[tuple[str, int]]
    ) -> Mapping[str, str] | None:
        """Return the attributes of the manifest of a step with these files; None if it has a seal."""
        return None

    def published(self, planned: Planned[Saved], stamp: Stamp) -> Step:
        """Return the step that was just saved, from its plan.

        The place is not looked at: a failure of that would look like a failure of the save.
        """

    def let_go(self, choose: Choose, *, durable: bool) -> tuple[list[Step], list[str]]:
        """Delete the chosen steps while nobody pins. Return them, and notes on what was hindered."""

    def delete(self, steps: Sequence[Step], *, durable: bool) -> None:
        """Delete steps whatever keeps them, the newest first. Raises `OSError` at the first failure."""
