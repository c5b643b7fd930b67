"""Retention: which steps are deleted, and why the others stay.

`decide` is pure: whole steps, rules and pins in; for every step the reasons to keep it. A step without a reason is deleted.

    a rule             the union of what each rule keeps
    pinned             `holdfast pin`
    the newest         is never deleted by a rule; nor is the one that was saved last, where a run went back to an earlier step
    the one before     not until the newest has been read back, byte by byte
    in use             an export reads it

Without rules nothing is deleted. `retain` runs after a step was published, and never before. Steps that are not whole are not
counted, and stay: what a crash may leave of our own is hidden and cleaned, so they are somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.errors import HoldfastError
from holdfast.extras.runs.place import RunPlace
from holdfast.extras.runs.record import Pin
from holdfast.extras.runs.rules import Facts, Rule, kept_by
from holdfast.extras.runs.steps import Step
from holdfast.verbs.verify import verify

NO_PINS: Mapping[int, Pin] = {}

ReadBack = Callable[[Step], bool]
"""Whether every byte of a step is as it was written."""


@dataclass(frozen=True, slots=True)
class Fate:
    """Whether one step stays, and why."""

    step: Step
    rules: tuple[Rule, ...] = ()
    others: tuple[str, ...] = ()
    """Other reasons to keep it, in words."""

    @property
    def goes(self) -> bool:
        """Whether it is to be deleted."""
        return not self.rules and not self.others

    @property
    def why(self) -> str:
        """Why it stays, or that nothing keeps it."""
        return ", ".join([*map(str, self.rules), *self.others]) or "no rule keeps it"


@dataclass(frozen=True, slots=True)
class Deleted:
    """The outcome of retention."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    """What kept other steps from being deleted."""
    read_back: tuple[Step, bool] | None = None
    """The step that was read back for it, and whether that went well."""


def read_back(step: Step, *, require: bool = False) -> bool:
    """Whether no byte of a step is another than was written, by its checksums; with `require`, each has to have one."""
    found = verify(step.path)
    return found.ok and (not require or found.verdict == "ok")


def decide(
    steps: Sequence[Step],
    rules: Collection[Rule],
    *,
    pins: Mapping[int, Pin] = NO_PINS,
    sure: Collection[int] = (),
    busy: Mapping[int, str] | None = None,
    coming: Facts | None = None,
) -> list[Fate]:
    """The fate of each of these whole steps, which come in the order of their numbers."""
    if not steps:
        return []
    counted: dict[int, Facts] = {step.step: step for step in steps}
    if coming is not None:
        counted.setdefault(coming.step, coming)
    kept = kept_by(rules, [*counted.values()])
    newest = steps[-1]
    last = {max(steps, key=lambda one: (one.saved, one.step)).step}
    ran = [(one.ran, one.step) for one in steps if one.ran is not None]
    if ran and max(ran) != ran[-1]:
        last.add(max(ran)[1])  # the run went back, whatever the clock on the wall says
    fates = []
    for at, one in enumerate(steps):
        others = []
        if not rules:
            others.append("no rules are set")
        if one.step in pins:
            others.append(f"pinned: {pins[one.step].why}" if pins[one.step].why else "pinned")
        if one is newest:
            others.append("the newest")
        elif one.step in last:
            others.append("saved last")
        if at == len(steps) - 2 and newest.step not in sure:
            others.append(f"until step {newest.step} has been read back")
        if busy and one.step in busy:
            others.append(busy[one.step])
        fates.append(Fate(one, kept[one.step], tuple(others)))
    return fates


def retain(
    place: RunPlace,
    rules: Collection[Rule],
    *,
    sure: set[int] | None = None,
    busy: Callable[[], Mapping[int, str]] = dict,
    check: ReadBack = read_back,
    coming: Facts | None = None,
    most: int | None = None,
    durable: bool = True,
) -> Deleted:
    """Delete what the rules do not keep, the oldest first, at most `most` steps.

    The newest step is read back first, if the step before it goes once that is done. `sure` are
    steps that have been read back before, and this one is added. Raises `HoldfastError` if the pins
    cannot be read. If the place refuses to delete a step, a note says so, and the others go.
    """
    if not rules:
        return Deleted(())
    sure = set() if sure is None else sure
    steps = place.steps()
    notes: list[str] = []
    checked = None
    if len(steps) > 1 and steps[-1].step not in sure:
        before, newest = steps[-2:]
        fates = decide(steps, rules, sure={newest.step}, coming=coming)
        if fates[-2].goes and before.step not in place.pins():
            try:
                is_good = check(newest)
            except HoldfastError as error:
                is_good = False
                notes.append(error.message)
            checked = newest, is_good
            if is_good:
                sure.add(newest.step)
            else:
                notes.append(
                    f"step {newest.step} could not be read back, so step {before.step} stays, and no step is linked to it; "
                    f"verify it: {newest.path}"
                )

    def choose(pins: Mapping[int, Pin]) -> list[Step]:
        fates = decide(steps, rules, pins=pins, sure=sure, busy=busy(), coming=coming)
        return [fate.step for fate in fates if fate.goes][:most]

    deleted, hindered = place.let_go(choose, durable=durable)
    return Deleted(tuple(deleted), (*notes, *hindered), checked)
