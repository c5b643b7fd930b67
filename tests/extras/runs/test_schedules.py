"""Random schedules of saves, crashes, damage, pins and clock jumps, against a small model of what must be there afterwards.

The file system is that of the crash model. A crash is a kill after some call, or a power cut that leaves any of the states that it
may leave. After each event the steps that a reader finds are what the model says: the same set where nothing crashed; and where
something did, the steps of before, or those with the new one, less some that the rules let go.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.extras.runs.directory import RunDirectory, open_for_writing
from holdfast.extras.runs.record import RunRecord
from holdfast.extras.runs.retention import retain
from holdfast.extras.runs.rules import Best, Every, Latest, Rule, Within
from holdfast.extras.runs.steps import step_name
from holdfast.stores.files import Files
from holdfast.verbs.seals.document import Stamp, with_seal
from holdfast.verbs.shared.planned import Writing, write_plan
from tests.crash.model import ROOT, Model, Tree, temporaries
from tests.crash.proof import Death, Mortal
from tests.crash.writers import plan_of
from tests.sampling import count_rounds

RULES: list[tuple[Rule, ...]] = [
    (Latest(1),),
    (Latest(2), Every(5)),
    (Best("loss", 2), Latest(1)),
    (Within(hours=1),),
    (Every(4), Best("loss", 1, "max")),
    (),
]


@dataclass(frozen=True)
class Save:
    ahead: int
    """How far the number is ahead of the newest; below zero: the run went back."""
    loss: float
    crash: int | None = None
    """After which call it is killed."""
    power: int | None = None
    """Which of the states of a power cut is left, where it is killed."""


@dataclass(frozen=True)
class Damage:
    which: int
    how: str


@dataclass(frozen=True)
class Pin:
    which: int


@dataclass(frozen=True)
class Clock:
    seconds: float
    runs: bool
    """Whether that time passed; else somebody set the clock."""


losses = st.sampled_from([0.5, 1.0, 2.0, math.nan, math.inf])
events = st.one_of(
    st.builds(Save, st.integers(1, 3), losses),
    st.builds(Save, st.integers(1, 3), losses, st.integers(1, 150)),
    st.builds(Save, st.integers(1, 3), losses, st.integers(1, 150), st.integers(0, 40)),
    st.builds(Save, st.integers(-4, -1), losses),
    st.builds(Damage, st.integers(0, 9), st.sampled_from(["cut", "remove", "rename", "seal"])),
    st.builds(Pin, st.integers(0, 9)),
    st.builds(Clock, st.sampled_from([60.0, 5000.0, -1e5, 1e9]), st.booleans()),
)
schedules = st.tuples(
    st.sampled_from(RULES), st.booleans(), st.lists(events, min_size=2, max_size=7)
)


def publish(files: Files, number: int, saved: float, loss: float, ran: float) -> None:
    path = f"{ROOT}/{step_name(number)}"
    plan = with_seal(
        plan_of(path, number, "native", None), Stamp(number, saved, {"loss": loss}, ran)
    )
    write_plan(plan, path, Writing(overwrite=True, threads=1), files=files)


@lru_cache(maxsize=4096)
def files_of(number: int, saved: float, loss: str, ran: float) -> Tree:
    model = Model()
    publish(model, number, saved, float(loss), ran)
    return model.live()[step_name(number)]


@dataclass
class Known:
    """What the reference model knows of a step."""

    saved: float
    loss: float
    ran: float


@dataclass
class World:
    """The directory, and what must be in it."""

    rules: tuple[Rule, ...]
    exchange: bool
    model: Model = field(init=False)
    whole: dict[int, Known] = field(default_factory=dict)
    pins: set[int] = field(default_factory=set)
    """Numbers: a pin outlives a step that was damaged, and holds for the one that is saved in its place."""
    unsure: set[int] = field(default_factory=set)
    """Steps whose save was killed, perhaps between its rename and the fsync after it: a power cut may undo the rename."""
    clock: float = 1e6
    ran: float = 0.0
    """For how long the run has run, whatever the clock says."""

    def __post_init__(self) -> None:
        self.model = Model(exchange=self.exchange, noreplace=self.exchange)

    @property
    def folder(self) -> RunDirectory:
        return RunDirectory(ROOT, self.model)

    def found(self) -> set[int]:
        """The whole steps, each to the last byte what was saved."""
        tree = self.model.live()
        steps = self.folder.steps()
        for step in steps:
            known = self.whole[step.step]
            assert tree[step.name] == files_of(step.step, known.saved, repr(known.loss), known.ran)
        newest = self.folder.newest()
        assert (newest and newest.step) == max((step.step for step in steps), default=None)
        return {step.step for step in steps}

    def turn(self, files: Files, number: int, known: Known) -> None:
        folder = RunDirectory(ROOT, files)
        lock = open_for_writing(folder, RunRecord(keep=[*map(str, self.rules)]), durable=True)
        publish(files, number, known.saved, known.loss, known.ran)
        retain(folder, self.rules, check=lambda step: True)
        lock.close()

    def kept(self, whole: dict[int, Known]) -> set[int]:
        """What the rules keep of these, by the book."""
        if not self.rules:
            return set(whole)
        newest = max(whole)
        last = max(whole, key=lambda number: (whole[number].saved, number))
        behind = max(whole, key=lambda number: (whole[number].ran, number))
        kept = {newest, last, behind} | self.pins & set(whole)
        for rule in self.rules:
            match rule:
                case Latest():
                    kept |= set(sorted(whole)[-rule.count :])
                case Every():
                    kept |= {number for number in whole if number % rule.steps == 0}
                case Best():
                    good = [number for number in whole if not math.isnan(whole[number].loss)]
                    good.sort(
                        key=lambda n: (whole[n].loss if rule.mode == "min" else -whole[n].loss, -n)
                    )
                    kept |= set(good[: rule.count])
                case Within():
                    end = whole[newest]
                    kept |= {
                        n
                        for n, one in whole.items()
                        if min(end.saved - one.saved, end.ran - one.ran) <= 3600
                    }
        return kept

    def save(self, event: Save) -> None:
        self.clock += 100
        self.ran += 100
        number = max(max(self.whole, default=0) + event.ahead, 0)
        if number in self.whole:
            return
        known, before = Known(self.clock, event.loss, self.ran), dict(self.whole)
        after = {**self.whole, number: known}
        if event.crash is None:
            self.turn(self.model, number, known)
            self.unsure.clear()
            self.whole = {n: one for n, one in after.items() if n in self.kept(after)}
            assert self.found() == set(self.whole)
            # What a power cut brought back of a replaced step stays as long as the step does, damaged
            # or not, and no longer. A damaged step that a killed save had set aside is the step
            # itself, under the name where readers look for it, and damaged steps are not deleted.
            tree = self.model.live()
            set_aside = [name for name in tree if name.endswith(".old")]
            steps = Counter(name[1:].split(".")[0] for name in set_aside)
            beside = {
                name
                for name in set_aside
                if (step := name[1:].split(".")[0]) in tree or steps[step] == 1
            }
            assert {*temporaries(tree)} <= beside
            return
        unsure = set(self.unsure)
        try:
            self.turn(Mortal(self.model, event.crash), number, known)
        except Death:
            self.model.revive()
            self.unsure.add(number)
        else:
            self.model.revive()
        if event.power is not None:
            self.unsure.clear()
            states = list(itertools.islice(self.model.crashes(step_name(number)), event.power + 1))
            self.model = Model(exchange=self.exchange, noreplace=self.exchange, tree=states[-1])
        self.whole = after
        found = self.found()
        if event.power is None:
            unsure.clear()
        if number in found:
            assert self.kept(after) - unsure <= found <= set(after)
        else:
            assert set(before) - unsure <= found <= set(before), (
                "steps went before the new one was published"
            )
        self.whole = {n: one for n, one in after.items() if n in found}

    def damage(self, event: Damage) -> None:
        if not self.whole:
            return
        number = sorted(self.whole)[event.which % len(self.whole)]
        del self.whole[number]
        tree = self.model.live()
        step = tree[step_name(number)]
        data = next(name for name in step if name.startswith("data-"))
        match event.how:
            case "cut":
                step[data] = step[data][:-1]
            case "remove":
                del step[data]
            case "seal":
                step["holdfast.seal.json"] = step["holdfast.seal.json"][:-5]
            case "rename":
                tree[step_name(number + 1000)] = tree.pop(step_name(number))
        self.model = Model(exchange=self.exchange, noreplace=self.exchange, tree=tree)
        assert self.found() == set(self.whole)

    def pin(self, event: Pin) -> None:
        if self.whole:
            number = sorted(self.whole)[event.which % len(self.whole)]
            self.folder.pin(number, "random")
            self.pins.add(number)


def follow(schedule: tuple[tuple[Rule, ...], bool, list[object]]) -> None:
    rules, exchange, happens = schedule
    world = World(rules, exchange)
    for event in happens:
        match event:
            case Save():
                world.save(event)
            case Damage():
                world.damage(event)
            case Pin():
                world.pin(event)
            case Clock():
                world.clock = max(world.clock + event.seconds, 1.0)
                world.ran += event.seconds if event.runs and event.seconds > 0 else 0
    # Whatever happened: the next turn works, and nothing of ours is left over.
    world.save(Save(1, 1.0))
    assert world.found() == set(world.whole)


def test_random_schedules():
    count = count_rounds("random schedules of a run", 60, total=1_000)
    quick = settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    quick(given(schedules)(follow))()
