"""`resume` beside a run that deletes, and of a step that is damaged: the newest that is there, all of it or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Best, Latest
from holdfast.errors import Corrupted, HoldfastError, StoreError
from holdfast.extras.runs import retention, steps, view
from holdfast.stores.remote.client import get_bucket
from holdfast.stores.remote.url import Url
from tests.support import flip_bit

COUNT = 40


def state(number: int) -> dict[str, object]:
    return {**{f"w{i}": np.full(300, number + i, np.float32) for i in range(COUNT)}, "step": number}


def is_state(found: object, number: int) -> bool:
    wanted = state(number)
    return isinstance(found, dict) and all(
        np.array_equal(found[name], value) for name, value in wanted.items()
    )


def damage(step: holdfast.Step) -> None:
    """Change the last byte of the data of a step."""
    if isinstance(step.path, Url):
        bucket = get_bucket(step.path)
        (key,) = [
            one.key
            for one in bucket.list_objects(step.path.key + "/", 100)
            if one.key.endswith(".safetensors")
        ]
        content = bytearray(bucket.get_object(key, 1 << 20).data)
        content[-1] ^= 1
        bucket.put(key, bytes(content))
        return
    (data,) = Path(step.path).glob("data-*")
    flip_bit(data, -1)


class Overtaken:
    """A call before whose first times another run saves the next step, and deletes the one that was found."""

    def __init__(
        self, real: Callable[..., object], writer: holdfast.Run | Hand, times: int
    ) -> None:
        self.real, self.writer, self.left = real, writer, times

    def __call__(self, *args: object, **named: object) -> object:
        if self.left:
            self.left -= 1
            newest = self.writer.latest()
            self.writer.save(newest.step + 1, state(newest.step + 1))
        return self.real(*args, **named)


@pytest.fixture
def writer(place: str) -> Iterator[holdfast.Run]:
    with holdfast.Run(place, keep=[Latest(1), Best("loss")]) as run:
        run.save(1, state(1), metrics={"loss": 1.0})
        run.save(2, state(2))
        yield run


class Hand:
    """Saves a step and deletes the one before it without a run, as a script may do it although a run is locked."""

    def __init__(self, place: str) -> None:
        self.place = place

    def latest(self) -> holdfast.Step:
        return holdfast.Run(self.place).latest()

    def save(self, step: int, state: object) -> None:
        newest = self.latest()
        with holdfast.Run(f"{self.place}-elsewhere", durable=False) as elsewhere:
            saved = elsewhere.save(step, state)
            os.rename(saved.path, Path(self.place) / saved.name)
        shutil.rmtree(newest.path)


def beside(place: str, writer: holdfast.Run) -> holdfast.Run | Hand:
    """Return who can delete steps of a run that resumes: in a directory, no other run can."""
    if isinstance(writer.path, Url):
        return writer
    writer.close()
    return Hand(place)


@pytest.mark.parametrize("given", [False, True])
def test_a_step_that_went_before_it_was_opened_is_looked_for_again(
    place: str, writer: holdfast.Run, given: bool, monkeypatch: pytest.MonkeyPatch
):
    run, other = holdfast.Run(place), beside(place, writer) if given else writer
    monkeypatch.setattr(steps, "open_checkpoint", Overtaken(steps.open_checkpoint, other, 3))
    found = run.resume(into=state(0) if given else None)
    assert run.resumed.step == 5
    assert is_state(found, 5)


def test_a_step_that_went_while_it_was_read_is_looked_for_again(
    place: str, writer: holdfast.Run, monkeypatch: pytest.MonkeyPatch
):
    run, other = holdfast.Run(place), beside(place, writer)
    monkeypatch.setattr(
        "holdfast.extras.runs.run.fill", Overtaken(holdfast.extras.runs.run.fill, other, 1)
    )
    found = run.resume(into=state(0))
    assert is_state(found, run.resumed.step)
    assert run.resumed.step in (2, 3)  # an open folder keeps its files, a bucket does not


def test_a_deep_look_does_not_take_a_step_that_went_for_a_damaged_one(
    place: str, writer: holdfast.Run, monkeypatch: pytest.MonkeyPatch
):
    run = holdfast.Run(place)
    monkeypatch.setattr(view, "read_back", Overtaken(retention.read_back, writer, 2))
    assert run.latest(deep=True).step == 4  # and not step 1, which is still there
    other = beside(place, writer)
    monkeypatch.setattr(view, "read_back", Overtaken(retention.read_back, other, 1))
    assert is_state(run.resume(into=state(0), deep=True), 5)


def test_looking_ends_where_every_step_goes_at_once(
    place: str, writer: holdfast.Run, monkeypatch: pytest.MonkeyPatch
):
    run, other = holdfast.Run(place), beside(place, writer)
    monkeypatch.setattr(steps, "open_checkpoint", Overtaken(steps.open_checkpoint, other, 10_000))
    into = state(0)
    with pytest.raises(StoreError, match="deleted"):
        run.resume(into=into)
    assert is_state(into, 0)


def test_a_step_that_was_deleted_says_so_when_it_is_opened(place: str, writer: holdfast.Run):
    found = writer[2]
    writer.save(3, state(3))
    with pytest.raises(StoreError, match="step 2 is not there any more"):
        found.open()


@pytest.mark.parametrize("look", ["newest", "steps"])
def test_the_newest_is_not_passed_over_because_the_one_before_went(
    place: str, writer: holdfast.Run, look: str, monkeypatch: pytest.MonkeyPatch
):
    """A look lists names and then looks at each: between the two the newest goes, and a newer one comes."""
    run = holdfast.Run(place)
    if isinstance(run.path, Url):
        kind, name = type(run._folder), "_examine"
    else:
        kind, name = steps.DirectoryLook, "examine"
    real = getattr(kind, name)
    overtaken = Overtaken(lambda *args: real(*args), writer, 1)
    monkeypatch.setattr(kind, name, lambda *args: overtaken(*args))
    if look == "newest":
        assert run.latest().step == 3
    else:
        assert run.steps()[-1].step in (2, 3)  # a bucket is listed at one moment
    assert run.best("loss").step == 1


def test_a_damaged_step_leaves_the_state_as_it_was_and_says_what_passes_over_it(place: str):
    with holdfast.Run(place) as run:
        run.save(1, state(1))
        damage(run.save(2, state(2)))
    run = holdfast.Run(place)
    into = state(0)
    with pytest.raises(
        Corrupted, match=r"the state is as it was.*resume\(deep=True\) passes over"
    ) as told:
        run.resume(into=into)
    assert told.value.tensor == "w9"  # the last in the file
    assert is_state(into, 0)
    assert run.resumed is None
    with pytest.raises(Corrupted, match=r"resume\(deep=True\) passes over"):
        run.resume()
    assert is_state(run.resume(into=into, deep=True), 1)


def test_a_damaged_manifest_says_what_passes_over_it(place: str):
    with holdfast.Run(place) as run:
        run.save(1, state(1))
        saved = run.save(2, state(2))
    if isinstance(saved.path, Url):
        key = saved.path.below("holdfast.json").key
        bucket = get_bucket(saved.path)
        found = bucket.head_with_attributes(key)
        content = bytes(bucket.get_object(key, 1 << 20).data).replace(b'"w1"', b'"v1"')
        bucket.put(key, content, attributes=found.attributes)
    else:
        manifest = Path(saved.path, "holdfast.json")
        manifest.write_bytes(manifest.read_bytes().replace(b'"w1"', b'"v1"'))
    run, into = holdfast.Run(place), state(0)
    with pytest.raises(HoldfastError, match=r"resume\(deep=True\) passes over"):
        run.resume(into=into)
    assert is_state(into, 0)
    assert is_state(run.resume(into=into, deep=True), 1)


def test_a_state_that_does_not_fit_is_no_damage(place: str, writer: holdfast.Run):
    with pytest.raises(holdfast.errors.DoesNotFit) as told:
        writer.resume(into={"w0": np.zeros(2)})
    assert "deep" not in str(told.value)
