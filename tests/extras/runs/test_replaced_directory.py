"""A run's directory is renamed away, and another run makes it anew: the first one touches nothing there."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
import holdfast.torch
from holdfast import Export, Latest
from holdfast.errors import HoldfastError, HoldfastWarning, NotCommitted
from holdfast.extras.runs.commands.runs import prune
from holdfast.extras.runs.directory import RunDirectory

torch = pytest.importorskip("torch")


def state(number: int) -> dict[str, object]:
    return {"w": np.full(64, number, np.float32)}


def tensors(number: int) -> dict[str, object]:
    return {"w": torch.full((64,), float(number))}


def taken_over(path: Path) -> holdfast.Run:
    """Another run in the place of the one that is open there."""
    os.rename(path, f"{path}.away")
    other = holdfast.Run(path)
    for number in (1, 2, 3):
        other.save(number, state(100 + number))
    return other


def is_untouched(path: Path) -> bool:
    """Whether all is there that the other run saved, and no more."""
    here = holdfast.Run(path)
    steps = {one.step: float(one.open()["w"].numpy()[0]) for one in here}
    return (
        steps == {1: 101.0, 2: 102.0, 3: 103.0}
        and not here.pins()
        and "within" not in (path / "holdfast.run.json").read_text()
    )


def background(run: holdfast.torch.Run) -> None:
    run.async_save(9, tensors(9))
    run.wait()


VERBS: dict[str, Callable[[holdfast.Run], object]] = {
    "save": lambda run: run.save(9, state(9)),
    "overwrite": lambda run: run.save(2, state(9), overwrite=True),
    "prune": lambda run: run.prune(),
    "rewind": lambda run: run.rewind(1),
    "pin": lambda run: run.pin(2, "mine"),
    "unpin": lambda run: run.unpin(2),
}


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_of_the_other_run_is_touched(tmp_path: Path, verb: str):
    path = tmp_path / "run"
    run = holdfast.Run(path, keep=[Latest(1)])
    for number in (1, 2):
        run.save(number, state(number))
    other = taken_over(path)
    with pytest.raises(NotCommitted, match="renamed or removed") as refused:
        VERBS[verb](run)
    assert refused.value.errno == errno.EBUSY
    assert "make a new Run" in str(refused.value)
    assert is_untouched(path)
    run.close()
    other.save(4, state(104))  # it still has its lock
    assert sorted(os.listdir(f"{path}.away")) == ["holdfast.run.json", "step-00000002"]


def test_a_lock_that_was_removed_is_no_lock(tmp_path: Path):
    """Without it a second run could begin at any time, or has."""
    run = holdfast.Run(tmp_path)
    run.save(1, state(1))
    os.unlink(tmp_path / ".holdfast.lock")
    with pytest.raises(NotCommitted, match="lock"):
        run.save(2, state(2))
    with holdfast.Run(tmp_path) as other:
        other.save(2, state(2))
        with pytest.raises(NotCommitted, match="another run"):
            run.save(3, state(3))
    assert [one.step for one in holdfast.Run(tmp_path)] == [1, 2]


def test_a_directory_that_was_removed(tmp_path: Path):
    path = tmp_path / "run"
    run = holdfast.Run(path)
    run.save(1, state(1))
    shutil.rmtree(path)
    with pytest.raises(NotCommitted, match="renamed or removed"):
        run.save(2, state(2))
    assert not path.exists()


@pytest.mark.parametrize(
    ("open_run", "make_state", "error"),
    [(holdfast.Run, state, NotCommitted), (holdfast.torch.Run, tensors, HoldfastError)],
    ids=["run", "torch run"],
)
def test_it_is_compared_when_all_is_written(tmp_path: Path, open_run, make_state, error):
    """The last look is behind the last byte."""
    path = tmp_path / "run"
    run = open_run(path, keep=[Latest(1)])
    run.save(1, make_state(1))
    others: list[holdfast.Run] = []

    def progress(nbytes: int) -> None:
        if not others:
            others.append(taken_over(path))

    with pytest.raises(error, match="renamed or removed"):
        run.save(9, make_state(9), progress=progress)
    assert is_untouched(path)
    assert [one.step for one in holdfast.Run(f"{path}.away")] == [1]


def test_it_is_compared_when_steps_lose_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The directory is another's when retention has looked at it and is about to delete."""
    path = tmp_path / "run"
    run = holdfast.Run(path)
    for number in (1, 2, 3):
        run.save(number, state(number))
    run.keep = (Latest(1),)
    real = RunDirectory.let_go

    def let_go(self: RunDirectory, *given: object, **named: object) -> object:
        monkeypatch.setattr(RunDirectory, "let_go", real)
        taken_over(path)
        return real(self, *given, **named)

    monkeypatch.setattr(RunDirectory, "let_go", let_go)
    with pytest.raises(NotCommitted, match="renamed or removed"):
        run.prune()
    assert is_untouched(path)


def test_the_command_line_deletes_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "run"
    with holdfast.Run(path) as run:
        for number in (1, 2, 3):
            run.save(number, state(number))
    real = RunDirectory.steps

    def steps(self: RunDirectory) -> object:
        monkeypatch.setattr(RunDirectory, "steps", real)
        found = real(self)
        taken_over(path)
        return found

    monkeypatch.setattr(RunDirectory, "steps", steps)
    with pytest.raises(HoldfastError, match="renamed or removed"):
        prune(RunDirectory(str(path)), [Latest(2)])
    assert is_untouched(path)


def test_an_export_is_of_this_runs_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, out = tmp_path / "run", tmp_path / "out"
    go = threading.Event()
    run = holdfast.Run(path, export=Export(out))
    real = run._exports._work

    def work() -> None:
        go.wait()
        real()

    monkeypatch.setattr(run._exports, "_work", work)
    run.save(1, state(1))
    taken_over(path)
    go.set()
    with pytest.warns(HoldfastWarning, match="could not be exported"):
        run.close()
    assert not out.exists()


@pytest.mark.parametrize(
    "save", [lambda run: run.save(9, tensors(9)), background], ids=["save", "async_save"]
)
def test_a_torch_run(tmp_path: Path, save: Callable[[holdfast.torch.Run], object]):
    path = tmp_path / "run"
    run = holdfast.torch.Run(path, keep=[Latest(1)])
    run.save(1, tensors(1))
    taken_over(path)
    with pytest.raises(HoldfastError, match="renamed or removed"):
        save(run)
    assert is_untouched(path)
