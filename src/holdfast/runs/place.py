"""`RunPlace`: what a run needs of the place that its steps are in, be it a directory or a bucket.

`directory` and `bucket` are the two. Rules, retention and `Run` know nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from holdfast.runs.lock import Holder, RunLock
from holdfast.runs.record import Pin, Proofs, RunRules
from holdfast.runs.steps import FoundStep, Step
from holdfast.saving.planned import Planned, Saved
from holdfast.seals.document import Stamp
from holdfast.stores.remote.url import Stamps

Sizes = dict[Hashable, int]
"""The length of each file, by what tells it from others: two names of one file are one."""

Choose = Callable[[Mapping[int, Pin]], Sequence[Step]]
"""Which steps are to go, from the pins."""


Closing = RunLock | ExitStack
"""What is held as long as a run is open for writing."""


class RunPlace(Protocol):
    """Where the steps of a run are. Every question is a new look."""

    @property
    def path(self) -> str: ...

    def newest(self, *, below: int | None = None) -> Step | None:
        """The whole step with the highest number, or with the highest below another."""

    def get(self, step: int) -> Step | None:
        """The step of this number, if it is whole."""

    def before_saving(self, step: int, *, base: bool) -> tuple[Step | None, Step | None]:
        """By one look: the step of this number, if it is whole; and with `base`, the newest other one, whose files may be shared.

        Raises as `check` does.
        """

    def named(self, name: str) -> Step | None:
        """The step under a name that a Run gave it, if it is whole."""

    def steps(self) -> list[Step]:
        """All whole steps, the newest last."""

    def survey(self) -> list[FoundStep]:
        """Whatever is a step, or would be one, by number; what is wrong with each that is none."""

    def unsealed(self) -> list[str]:
        """Names of what other trainers wrote and nobody sealed: no steps, as they are."""

    def exists(self) -> bool:
        """Whether there is such a place. In a bucket every prefix is one."""

    # Room.

    def free(self) -> int | None:
        """Bytes that are free there; None where there is no end of them."""

    def sizes(self, step: Step) -> Sizes:
        """The files of a step."""

    def identities(self, step: Step) -> Mapping[str, str]:
        """The files of a step by name, and what tells each from others: a text, as `sizes` has it for this place."""

    def written(self, step: Step, names: Sequence[str]) -> Mapping[str, float]:
        """When files of a step were written, in seconds since 1970; now, where one is not there any more."""

    # What the place says of itself.

    def kept(self) -> RunRules | None:
        """The rules that a run wrote down."""

    def pins(self) -> Mapping[int, Pin]:
        """The pinned steps. Raises `HeaderError` where they cannot be read."""

    def pin(self, step: int, why: str, *, durable: bool = True) -> Pin:
        """Keep a step. Raises `NoSuchStep` where there is no whole one of this number."""

    def unpin(self, step: int, *, durable: bool = True) -> Pin:
        """Leave a step to the rules again. Raises `NoSuchStep` where it is not pinned."""

    def proofs(self) -> Proofs:
        """What a run wrote down of what it read back. Raises `HeaderError` where that cannot be read."""

    def note_proofs(self, proofs: Proofs) -> None:
        """Write that down."""

    def writer(self) -> Holder | None:
        """Who has the run open, as far as the place knows."""

    def exported(self) -> Mapping[str, Stamps]:
        """What the run exported, by target, as it was when it was published."""

    def note_exported(self, target: str, stamps: Stamps, *, durable: bool) -> None:
        """Write down what was exported."""

    # Changing it.

    def asking(self) -> AbstractContextManager[None]:
        """A block before anything of a step is published: what the place refuses there is `NotCommitted`."""

    def begin(self, kept: RunRules, *, durable: bool) -> Closing:
        """Open the place for writing: made, locked where that can be, cleaned, and the rules written down."""

    def check(self) -> None:
        """Raise `NotCommitted` where it is not the place any more that was opened for writing: the lock is compared."""

    def locked(self) -> Closing:
        """Keep runs out while steps are deleted by hand."""

    def replaces(self, step: int) -> bool:
        """Whether a save that replaces nothing whole may put itself in the place of what is left of a step."""

    def noted(self, metadata: Mapping[str, str] | None, says: Stamp) -> Mapping[str, str] | None:
        """The metadata of a step, with what has to stand there."""

    def sealed(self, planned: Planned[Saved], says: Stamp) -> Planned[Saved]:
        """The same save, with all that makes a step of it."""

    def attributes(self, says: Stamp, files: Sequence[tuple[str, int]]) -> Mapping[str, str] | None:
        """What the manifest of a step with this data says of itself, where that makes a step of it; None where a seal does."""

    def published(self, planned: Planned[Saved], says: Stamp) -> Step:
        """The step that was just saved."""

    def let_go(self, choose: Choose, *, durable: bool) -> tuple[list[Step], list[str]]:
        """Delete what is chosen, while nobody pins. What went, and what stood in the way of others."""

    def delete(self, steps: Sequence[Step], *, durable: bool) -> None:
        """Delete steps whatever keeps them, the newest first. Raises `OSError` at the first that cannot be had."""
