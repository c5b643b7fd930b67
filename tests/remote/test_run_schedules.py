"""Random schedules of saves, kills, pins, damage and sweeps of a run in a bucket, against a small model of what must be there.

A kill is before or after any request; from then on the process does nothing any more. After each event the steps that are found are
those of the model: the same where nothing was killed; else those of before or those with the new one, less some that the rules
let go. At the end a sweep leaves what manifests name, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import obstore
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

import holdfast
from holdfast import Latest
from holdfast.extras.runs.sweep import sweep
from holdfast.stores.remote.client import Bucket, Upload
from tests.remote.test_runs import keys, later, loads, state
from tests.sampling import examples


class Death(BaseException):
    """A process that is killed."""


@contextmanager
def killed(at: int, answered: bool) -> Iterator[None]:
    """A process that is killed before its n-th request, or after that was done; there is no request after it."""
    count, run, uploading = 0, Bucket._run, Bucket.open_upload

    def asks() -> bool:
        nonlocal count
        count += 1
        if count > at or (count == at and not answered):
            raise Death
        return count == at

    def asked(
        self: Bucket, ask: Callable[[], object], key: str, doing: str, **more: bool
    ) -> object:
        last = asks()
        found = run(self, ask, key, doing, **more)  # type: ignore[arg-type]
        if last:
            raise Death
        return found

    @contextmanager
    def uploads(self: Bucket, key: str, nbytes: int, **more: object) -> Iterator[Upload]:
        last = asks()
        with uploading(self, key, nbytes, **more) as upload:  # type: ignore[arg-type]
            yield upload
        if last:
            raise Death

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "_run", asked)
        patch.setattr(Bucket, "open_upload", uploads)
        yield


@dataclass(frozen=True)
class Save:
    ahead: int
    kill: tuple[int, bool] | None = None


@dataclass(frozen=True)
class Pin:
    which: int


@dataclass(frozen=True)
class Damage:
    which: int


@dataclass(frozen=True)
class Sweep:
    hours: float
    kill: tuple[int, bool] | None = None


kills = st.tuples(st.integers(1, 24), st.booleans())
events = st.one_of(
    st.builds(Save, st.integers(1, 3), st.none()),
    st.builds(Save, st.integers(1, 3), kills),
    st.builds(Pin, st.integers(0, 9)),
    st.builds(Damage, st.integers(0, 9)),
    st.builds(Sweep, st.sampled_from([0.0, 25.0]), st.none() | kills),
)


class World:
    """A bucket, and what must be in it."""

    def __init__(self, keep: int) -> None:
        self.store, self.keep = MemoryStore(), keep
        self.whole: set[int] = set()
        self.torn: set[int] = set()
        self.pins: set[int] = set()

    def run(self) -> holdfast.Run:
        """A run of a new process."""
        return holdfast.Run("run", keep=Latest(self.keep), store=self.store)

    def happens(self, event: Save | Pin | Damage | Sweep) -> None:
        match event:
            case Save():
                self.save(max(self.whole | self.torn, default=0) + event.ahead, event.kill)
            case Pin() if self.whole:
                step = sorted(self.whole)[event.which % len(self.whole)]
                # Marks of a deletion that died count for a while: the pin is refused, and that is said.
                if step not in self.marked():
                    self.run().pin(step, "random")
                    self.pins.add(step)
            case Damage() if self.whole:
                step = sorted(self.whole)[event.which % len(self.whole)]
                data = [
                    key
                    for key in keys(self.store, f"run/step-{step:08d}")
                    if key.startswith("data")
                ]
                obstore.delete(self.store, [f"run/step-{step:08d}/{key}" for key in data])
                self.whole.remove(step)
                self.torn.add(step)
            case Sweep():
                before = self.whole
                with later(event.hours), self.dying(event.kill):
                    sweep("run", store=self.store)
                assert self.found() == before

    def save(self, number: int, kill: tuple[int, bool] | None) -> bool:
        """Whether it came to its end."""
        before, done = self.whole, False
        with self.dying(kill):
            self.run().save(number, state(number))
            done = True
        now = self.found()
        after = before | {number}
        kept = set(sorted(after)[-self.keep :]) | self.pins & after
        if done:
            assert now == kept, "the rules, to the letter"
        else:
            assert now == before or kept <= now <= after
        self.whole = now
        return done

    def marked(self) -> set[int]:
        from holdfast.extras.runs.record import NO_PINS, PINS

        return (self.run()._folder.read_record(PINS) or NO_PINS).marked()

    def dying(self, kill: tuple[int, bool] | None) -> AbstractContextManager[None]:
        return _die(kill)

    def found(self) -> set[int]:
        run = self.run()
        steps = run.steps()
        assert all(map(loads, steps))
        newest = run.latest()
        assert (newest and newest.step) == max((step.step for step in steps), default=None)
        assert sorted(run.pins()) == sorted(self.pins)
        return {step.step for step in steps}

    def ends(self) -> None:
        """Nothing is left that no manifest names."""
        with later(25):
            sweep("run", store=self.store)
        for key in keys(self.store):
            folder, _, name = key.partition("/")
            if name and name != "holdfast.json":
                raw = bytes(obstore.get(self.store, f"run/{folder}/holdfast.json").bytes())
                assert name.encode() in raw
            elif not name:
                assert folder in ("holdfast.run.json", "holdfast.pins.json")
        assert self.found() == self.whole


@contextmanager
def _die(kill: tuple[int, bool] | None) -> Iterator[None]:
    if kill is None:
        yield
        return
    try:
        with killed(*kill):
            yield
    except Death:
        pass


@given(st.integers(1, 3), st.lists(events, min_size=2, max_size=8))
@settings(deadline=None, max_examples=examples(12), suppress_health_check=list(HealthCheck))
def test_schedules(keep: int, happening: list[Save | Pin | Damage | Sweep]):
    world = World(keep)
    for event in happening:
        world.happens(event)
    world.ends()


@pytest.mark.parametrize("answered", [False, True])
def test_a_kill_at_every_request(answered: bool):
    """Of a save with a deletion, in turn."""
    ends = set()
    for at in range(1, 50):
        world = World(1)
        for number in (1, 2):
            world.save(number, None)
        if world.save(3, (at, answered)):
            break
        ends.add(frozenset(world.whole))
        world.save(4, None)
        assert world.whole == {4}
        world.ends()
    assert ends == {frozenset({2}), frozenset({2, 3}), frozenset({3})}


def test_the_proof_sees_data_that_goes_before_its_manifest(monkeypatch: pytest.MonkeyPatch):
    from holdfast.extras.runs.bucket import RunBucket

    def unpublish(self: RunBucket, step: holdfast.extras.runs.Step) -> None:
        self.bucket.delete([self.key(step.name, name) for name in step.files])
        self.bucket.delete([self.key(step.name, "holdfast.json")])

    monkeypatch.setattr(RunBucket, "_unpublish", unpublish)
    torn = False
    for at in range(1, 50):
        world = World(1)
        world.save(1, None)
        over = world.save(2, (at, False))
        torn = torn or any(not row.whole for row in world.run()._folder.survey())
        if over:
            break
    assert torn
