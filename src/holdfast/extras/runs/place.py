"""`RunPlace`: what a run needs of the place that its steps are in. `directory` and `bucket` are the two kinds.

Rules, retention and `Run` know nothing of either. What a run writes down beside its steps (`record`) is the same in both; each
kind only says how a document is read and changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Protocol

from holdfast.core.documents import DocumentKind
from holdfast.errors import HeaderError, NoSuchStep
from holdfast.extras.runs import record
from holdfast.extras.runs.lock import Holder, RunLock
from holdfast.extras.runs.record import (
    D,
    Doubts,
    Pin,
    Pins,
    RunRules,
    marked_steps,
    parse_rules,
    pins_by_step,
    receipts_of,
    record_of,
)
from holdfast.extras.runs.steps import FoundStep, Step
from holdfast.stores.remote.url import Stamps
from holdfast.verbs.seals.document import Stamp
from holdfast.verbs.shared.planned import Planned, Saved

Sizes = dict[Hashable, int]
"""The length of each file, by its identity: two names of one file are one entry."""

Choose = Callable[[Mapping[int, Pin]], Sequence[Step]]
"""Which steps are to be deleted, from the pins."""

Change = Callable[[D | None], D | None]
"""From the document that is there to the one that replaces it; None leaves it."""

Closing = RunLock | ExitStack
"""What is held as long as a run is open for writing."""


class RunPlace(Protocol):
    """Where the steps of a run are. Every question is a new look."""

    path: str

    def newest(self, *, below: int | None = None) -> Step | None:
        """The whole step with the highest number, or with the highest below another; None where there is none."""

    def get(self, step: int) -> Step | None:
        """The step of this number, if it is whole."""

    def steps(self) -> list[Step]:
        """All whole steps, the newest last."""

    def survey(self) -> list[FoundStep]:
        """Whatever is a step, or would be one, by number; what is wrong with each that is none."""

    def unsealed(self) -> list[str]:
        """Names of checkpoints that other trainers wrote and nobody sealed: no steps, as they are."""
        return []

    def exists(self) -> bool:
        """Whether there is such a place. In a bucket every prefix is one."""
        return True

    # Room.

    def free(self) -> int | None:
        """Bytes that are free there; None where there is no limit."""
        return None

    def sizes(self, step: Step) -> Sizes: ...

    def writer(self) -> Holder | None:
        """Who has the run open, as far as the place knows."""
        return None

    # Documents. Reading one raises `HeaderError` where it cannot be understood.

    def read_record(self, kind: DocumentKind[D]) -> D | None:
        """A document of the run; None where there is none."""

    def change_record(self, kind: DocumentKind[D], change: Change[D], *, durable: bool) -> None:
        """Replace a document by what `change` makes of it, while nobody else does. A damaged one counts as none, but for pins."""

    def kept(self) -> RunRules | None:
        """The rules that a run wrote down."""
        found = self.read_record(record.RECORD)
        return None if found is None else parse_rules(found)

    def write_rules(self, kept: RunRules, *, durable: bool) -> None:
        """Write the rules of a run down, where others or none stand there."""

        def write(found: record.RunRecord | None) -> record.RunRecord | None:
            with suppress(HeaderError):
                if found is not None and parse_rules(found) == kept:
                    return None
            return record_of(kept)

        self.change_record(record.RECORD, write, durable=durable)

    def pins(self) -> Mapping[int, Pin]:
        return pins_by_step(self.read_record(record.PINS))

    def pin(self, step: int, why: str, *, durable: bool = True) -> Pin:
        """Keep a step, whatever the rules say. Raises `NoSuchStep` where there is no whole one of this number."""
        pin = Pin(step, why, time.time())

        def add(found: Pins | None) -> Pins:
            if step in marked_steps(found):
                raise NoSuchStep(
                    f"step {step} is being deleted; ask again in a minute",
                    file=self.path,
                    found=step,
                )
            if self.get(step) is None:
                raise NoSuchStep(
                    f"there is no whole step {step} to pin; `holdfast runs` lists them",
                    file=self.path,
                    found=step,
                )
            return self.with_pins(found, {**pins_by_step(found), step: pin})

        self.change_record(record.PINS, add, durable=durable)
        return pin

    def unpin(self, step: int, *, durable: bool = True) -> Pin:
        """Leave a step to the rules again. Raises `NoSuchStep` where it is not pinned."""
        gone: list[Pin] = []

        def drop(found: Pins | None) -> Pins:
            pins = dict(pins_by_step(found))
            if step not in pins:
                raise NoSuchStep(f"step {step} is not pinned", file=self.path, found=step)
            gone.append(pins.pop(step))
            return self.with_pins(found, pins)

        self.change_record(record.PINS, drop, durable=durable)
        return gone[-1]

    def with_pins(self, found: Pins | None, pins: Mapping[int, Pin]) -> Pins:
        """The document that says these pins, in place of another."""
        return Pins(record.PINS.format, 1, [pins[step] for step in sorted(pins)])

    def doubts(self) -> Doubts:
        """Return the steps that a run recorded as doubtful."""
        return self.read_record(record.DOUBTS) or Doubts()

    def write_doubts(self, doubts: Doubts) -> None:
        """Record the doubtful steps of a run."""
        self.change_record(record.DOUBTS, lambda _: doubts, durable=False)

    def exported(self) -> Mapping[str, Stamps]:
        """What the run exported, by target, as it was when it was published."""
        found = self.read_record(record.EXPORTS)
        return {} if found is None else found.exports

    def add_exported(self, target: str, stamps: Stamps, *, durable: bool) -> None:
        def add(found: record.Receipts | None) -> record.Receipts:
            rest = {
                name: one
                for name, one in (found.exports if found else {}).items()
                if name != target
            }
            return receipts_of({**rest, target: stamps})

        self.change_record(record.EXPORTS, add, durable=durable)

    # Changing the steps.

    def asking(self) -> AbstractContextManager[None]:
        """A block before anything of a step is published: what the place refuses there is `NotCommitted`."""
        return nullcontext()

    def begin(self, kept: RunRules, *, durable: bool) -> Closing:
        """Open the place for writing: made, locked where that can be, cleaned, and the rules written down."""

    def check(self) -> None:
        """Raise `NotCommitted` where this is not the place any more that was opened for writing: the lock is compared."""

    def locked(self) -> Closing:
        """Keep runs out while steps are deleted by hand, if the place has a lock."""
        return ExitStack()

    def replaces(self, step: int) -> bool:
        """Whether a save that replaces nothing whole may replace what is left of a step."""
        return True

    def with_stamp(
        self, metadata: Mapping[str, str] | None, stamp: Stamp
    ) -> Mapping[str, str] | None:
        """The metadata of a step, with the stamp where it has to stand there."""
        return metadata

    def sealed(self, planned: Planned[Saved], stamp: Stamp) -> Planned[Saved]:
        """A save, completed by what makes a step of it."""

    def attributes(
        self, stamp: Stamp, files: Sequence[tuple[str, int]]
    ) -> Mapping[str, str] | None:
        """What the manifest of a step with this data says of itself, where that makes a step of it; None where a seal does."""
        return None

    def published(self, planned: Planned[Saved], stamp: Stamp) -> Step:
        """The step that was just saved, as it was laid out: no look can make a failure of a save that is done."""

    def let_go(self, choose: Choose, *, durable: bool) -> tuple[list[Step], list[str]]:
        """Delete the steps that are chosen, while nobody pins. The deleted steps, and what stood in the way of others."""

    def delete(self, steps: Sequence[Step], *, durable: bool) -> None:
        """Delete steps whatever keeps them, the newest first. Raises `OSError` at the first that cannot be deleted."""
