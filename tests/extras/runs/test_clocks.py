"""`Within` and clocks: whatever the clock on the wall does, no step goes that is younger than the rule says.

The oracle knows the true time. A program counts from the moment in which it looked for the newest step, or first saved, to its last
save; the age of a step is what of such spans lies between its save and that of the newest. Nothing younger is ever deleted, by a
save or by a prune. Where no clock jumps, everything older is.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
import holdfast.torch
from holdfast import Within
from holdfast.extras.runs.clock import RunClock, clock_of
from tests.sampling import count_rounds

YEAR = 365 * 86400.0
WINDOW_S = 3600.0
LITTLE = {"w": np.zeros(1)}
names = itertools.count()


@dataclass
class Clocks:
    """The true time, and what the two clocks of a machine say."""

    true: float = 0.0
    wrong: float = 1.7e9
    """What the clock on the wall has more than the true time."""
    booted: float = -1000.0

    @contextmanager
    def told(self) -> Iterator[None]:
        def wall() -> float:
            return self.true + self.wrong

        def monotonic() -> float:
            return self.true - self.booted

        with mock.patch.object(time, "time", wall), mock.patch.object(time, "monotonic", monotonic):
            yield


def another_program() -> None:
    """What a program knows is gone with it."""
    clock_of.cache_clear()


def saved_with(
    tmp_path: Path, jumps: list[float], *, between: float = 10.0, window: Within | None = None
) -> list[int]:
    """Save one step after the other, and before each set the clock by so much; what is left."""
    clocks = Clocks()
    with holdfast.Run(tmp_path, keep=[window or Within(hours=1)], durable=False) as run:
        for number, jump in enumerate(jumps):
            clocks.true += between
            clocks.wrong += jump
            with clocks.told():
                run.save(number, LITTLE)
                run.prune()
    return [one.step for one in run]


@pytest.mark.parametrize(
    "jumps",
    [
        [0, 0, -20 * YEAR, 0, 20 * YEAR, 0, 0],
        [0, 0, 0, YEAR, 0, 0],
        [0, 0, 0, YEAR, 0, -YEAR, 0, 0],
        [0, 0, 0, -7200, 0, 0, 7200, 0, 0],
        [0, 7200, 7200, 7200, 7200, 7200],
        [0, 0, -60 * YEAR, 0, 0],
    ],
    ids=[
        "years back and repaired",
        "forward",
        "forward and repaired",
        "back for three steps",
        "at every save",
        "before 1970",
    ],
)
def test_steps_of_the_last_seconds_stay_whatever_the_clock_does(tmp_path: Path, jumps: list[float]):
    assert saved_with(tmp_path, jumps) == list(range(len(jumps)))


def test_a_pause_is_no_age(tmp_path: Path):
    """A week without a program: the day's steps stay until the run has gone on for a day."""
    clocks = Clocks()
    for _ in range(2):
        another_program()
        clocks.true += 7 * 86400
        clocks.booted = clocks.true - 50
        with clocks.told(), holdfast.Run(tmp_path, keep=[Within(hours=24)], durable=False) as run:
            run.resume()
            first = 0 if run.latest() is None else run.latest().step + 1
            for number in range(first, first + 3):
                clocks.true += 4 * 3600
                run.save(number, LITTLE)
    assert [one.step for one in run] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("resumes", [True, False])
def test_programs_that_save_once(tmp_path: Path, resumes: bool):
    """Each works for an hour, saves and is killed. What counts is the time since it looked for the step to go on with."""
    clocks = Clocks()
    for number in range(6):
        another_program()
        clocks.booted = clocks.true - 7
        with clocks.told(), holdfast.Run(tmp_path, keep=[Within(hours=2)], durable=False) as run:
            if resumes:
                run.resume()
            clocks.true += 3600
            run.save(number, LITTLE)
    assert [one.step for one in run] == ([3, 4, 5] if resumes else [0, 1, 2, 3, 4, 5])


def test_a_program_that_looked_on_counts_nothing_twice(tmp_path: Path):
    """It looked long ago, and another one has saved since then."""
    clocks = Clocks()
    with clocks.told():
        early = holdfast.Run(tmp_path, keep=[Within(hours=1)], durable=False)
        early.resume()
        another_program()
        with holdfast.Run(tmp_path, keep=[Within(hours=1)], durable=False) as run:
            run.save(0, LITTLE)
            clocks.true += 10 * 3600
            run.save(1, LITTLE)
            run.save(2, LITTLE)
        clocks.true += 10
        early.save(3, LITTLE)
    assert [one.step for one in early] == [1, 2, 3]


def test_what_was_saved_last_stays_whatever_the_clock_says(tmp_path: Path):
    """The run went back to an earlier number while a step is there that the clock calls the latest."""
    clocks = Clocks(wrong=1.7e9 + YEAR)
    with clocks.told(), holdfast.Run(tmp_path, keep=["latest:1"], durable=False) as run:
        run.save(100, LITTLE)
        clocks.true, clocks.wrong = 10.0, 1.7e9
        run.save(50, LITTLE)
        assert [one.step for one in run] == [50, 100]


@pytest.mark.parametrize("background", [False, True])
def test_a_torch_run(tmp_path: Path, background: bool):
    """The first rank's clock counts, also for what is saved behind the caller's back."""
    torch = pytest.importorskip("torch")
    another_program()
    clocks, left = Clocks(), {}
    for between in (10.0, 1800.0):
        with (
            clocks.told(),
            holdfast.torch.Run(tmp_path, keep=[Within(hours=1)], durable=False) as run,
        ):
            for _ in range(5):
                clocks.true += between
                clocks.wrong += YEAR
                newest = run.latest()
                number = 0 if newest is None else newest.step + 1
                (run.async_save if background else run.save)(number, {"w": torch.zeros(2)})
                if background:
                    run.wait()
        left[between] = [one.step for one in run]
    assert left == {10.0: [0, 1, 2, 3, 4], 1800.0: [7, 8, 9]}


# Random schedules.


@dataclass(frozen=True)
class Save:
    passed: float
    jump: float = 0.0
    ahead: int = 1


@dataclass(frozen=True)
class Prune:
    passed: float
    jump: float = 0.0


@dataclass(frozen=True)
class Restart:
    """Another program, perhaps on another machine."""

    pause: float
    resumes: bool
    uptime: float
    jump: float = 0.0


@dataclass(frozen=True)
class Again:
    """Another Run of the same program."""

    passed: float


@dataclass(frozen=True)
class Rewind:
    which: int


Event = Save | Prune | Restart | Again | Rewind

passing = st.sampled_from([0.0, 1.0, 60.0, 600.0, 1800.0, 3600.0, 4000.0, 86400.0])
saving = passing.filter(bool)
"""No two saves are in one moment."""
sizes = st.sampled_from(
    [1.0, 30.0, 1800.0, 3601.0, 86400.0, 30 * 86400.0, YEAR, 30 * YEAR, 1000 * YEAR]
)
jumping = st.one_of(
    st.just(0.0), st.builds(lambda size, sign: size * sign, sizes, st.sampled_from([-1, 1]))
)
events = st.one_of(
    st.builds(Save, saving, jumping),
    st.builds(Save, saving, jumping, st.integers(-3, 3)),
    st.builds(Prune, passing, jumping),
    st.builds(Restart, passing, st.booleans(), passing, jumping),
    st.builds(Again, passing),
    st.builds(Rewind, st.integers(0, 9)),
)


@dataclass(frozen=True)
class Schedule:
    events: list[Event]
    jumps: bool
    """Whether clocks jump, and the run goes back; else everything older has to go."""
    repaired: bool
    """Whether a jump is undone when the next event is over."""
    old: int
    """How many steps an older Holdfast saved in the beginning."""
    bucket: bool


schedules = st.builds(
    Schedule,
    st.lists(events, min_size=3, max_size=10),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 0, 0, 2]),
    st.booleans(),
)


def steady(event: Event) -> Event:
    """The same, with clocks that are right and numbers that grow."""
    if isinstance(event, Save):
        return replace(event, jump=0.0, ahead=max(1, event.ahead))
    if isinstance(event, Rewind):
        return Prune(
            0.0
        )  # the time of steps that are gone is counted by the program that saved them, and by no other
    return replace(event, jump=0.0) if isinstance(event, Prune | Restart) else event


@dataclass
class World:
    """A run, and the truth about it."""

    schedule: Schedule
    path: str
    clocks: Clocks = field(default_factory=Clocks)
    saved: dict[int, float] = field(default_factory=dict)
    """When each step that is there was saved."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """From when to when a program counted."""
    looked: float | None = None
    """When the program of now began to count."""
    own: set[int | None] = field(default_factory=set)
    """Steps that it saved or went on with."""
    uncounted: set[int] = field(default_factory=set)
    """Steps that do not say for how long the run had run."""
    begun: bool = False
    """Whether its Run of now has saved. One that has not looks for what to go on with."""

    def __post_init__(self) -> None:
        another_program()
        self.run = self.opened()

    def opened(self) -> holdfast.Run:
        return holdfast.Run(self.path, keep=[Within(hours=1)], durable=False, share=False)

    @property
    def counted(self) -> int | None:
        """The newest step that says for how long the run had run."""
        return max(self.saved.keys() - self.uncounted, default=None)

    def age(self, number: int, at: float) -> float:
        start = self.saved[number]
        if number in self.uncounted:
            # As old as the next one that says it.
            start = next(
                (
                    self.saved[one]
                    for one in sorted(self.saved)
                    if one > number and one not in self.uncounted
                ),
                math.inf,
            )
        return sum(max(0.0, min(stop, at) - max(begin, start)) for begin, stop in self.spans)

    def look(self) -> None:
        """Compare what is there with what was: what went is old enough, and what is old enough went."""
        left = {one.step for one in self.run}
        newest = max(self.saved)
        at = self.saved[newest]
        ages = {number: self.age(number, at) for number in self.saved}
        gone = {number: ages[number] for number in self.saved if number not in left}
        assert all(age > WINDOW_S for age in gone.values()), f"too young to go: {gone}"
        if not self.schedule.jumps:
            assert left == {
                number for number in self.saved if ages[number] <= WINDOW_S or number == newest
            }
        self.saved = {number: when for number, when in self.saved.items() if number in left}

    def happen(self, event: Event) -> None:
        match event:
            case Save():
                number = max(max(self.saved, default=0) + event.ahead, 0)
                self.clocks.true += event.passed
                newest = self.counted
                self.run.save(number, LITTLE, overwrite=True)
                now = self.clocks.true
                if not self.begun and newest not in self.own:
                    self.looked, self.own = None, {newest}
                self.begun = True
                self.own.add(number)
                self.uncounted.discard(number)
                self.looked = now if self.looked is None else self.looked
                self.spans.append((self.looked, now))
                self.looked = now
                self.saved[number] = now
                self.look()
            case Prune():
                self.clocks.true += event.passed
                self.run.prune()
                if self.saved:
                    self.look()
            case Restart():
                self.run.close()
                another_program()
                self.clocks.true += event.pause
                self.clocks.booted = self.clocks.true - event.uptime
                self.run, self.looked, self.own, self.begun = self.opened(), None, set(), False
                if event.resumes and self.saved:
                    self.run.resume()
                    if self.counted == max(self.saved):
                        self.looked, self.own = self.clocks.true, {self.counted}
            case Again():
                self.run.close()
                self.clocks.true += event.passed
                self.run, self.begun = self.opened(), False
            case Rewind() if self.saved:
                number = sorted(self.saved)[event.which % len(self.saved)]
                self.run.rewind(number)
                if self.looked is not None:
                    # The program has run since it looked, and goes on with this step now. Where it cannot know
                    # that, it counts less.
                    self.own.add(number)
                self.saved = {one: when for one, when in self.saved.items() if one <= number}


def follow(schedule: Schedule, place: str) -> None:
    world = World(schedule, place)
    happens = schedule.events if schedule.jumps else [steady(event) for event in schedule.events]
    if schedule.old:
        with world.clocks.told(), mock.patch.object(RunClock, "read", return_value=None):
            for number in range(schedule.old):
                world.clocks.true += 100.0
                world.run.save(number, LITTLE)
                world.saved[number] = world.clocks.true
                world.uncounted.add(number)
        world.begun = True
    for event in happens:
        jump = getattr(event, "jump", 0.0)
        world.clocks.wrong += jump
        with world.clocks.told():
            world.happen(event)
        if schedule.repaired:
            world.clocks.wrong -= jump
    world.run.close()


@pytest.mark.timeout(3600)
def test_random_clocks():
    count = count_rounds("random clocks", 100, total=10_000)
    root = tempfile.mkdtemp(prefix="holdfast-clocks-")

    def one(schedule: Schedule) -> None:
        name = f"{next(names)}"
        place = f"memory://clocks/{name}" if schedule.bucket else f"{root}/{name}"
        try:
            follow(schedule, place)
        finally:
            shutil.rmtree(f"{root}/{name}", ignore_errors=True)

    try:
        settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))(
            given(schedules)(one)
        )()
    finally:
        shutil.rmtree(root, ignore_errors=True)
