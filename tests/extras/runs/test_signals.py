"""SIGTERM waits for a save that is worth it, and then does what it would have done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import BadArgument, Closed, SaveError
from holdfast.extras.runs.signals import read_signals

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="signals are sent to processes here"
)

STATE = {"w": np.ones(100)}

LOOP = """
import sys, time, numpy as np, holdfast
run = holdfast.Run(sys.argv[1])
first = run.latest().step if run.latest() else 0
with run.stopping(grace="20s"):
    print("training", flush=True)
    for step in range(first + 1, 100_000):
        state = {"w": np.full(100, step)}
        time.sleep(0.01)
        if run.interrupted(step, state, metrics={"loss": 1.0}):
            print("saved", run.latest().step, flush=True)
            break
print("never printed")
"""


def end_training(code: str, path: Path) -> holdfast.Step:
    """Ask a program that trains to end, and return the step that it saved then."""
    program = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout.readline() == "training\n"
        time.sleep(0.1)
        program.send_signal(signal.SIGTERM)
        out, _ = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == -signal.SIGTERM
    newest = holdfast.Run(path).latest()
    assert out == f"saved {newest.step}\n"
    return newest


def test_a_program_that_is_asked_to_end_saves_and_ends_so(tmp_path: Path):
    seen = 0
    for _ in range(2):
        newest = end_training(LOOP, tmp_path)
        assert newest.step > seen
        with newest.open() as checkpoint:
            assert checkpoint["w"].numpy()[0] == newest.step
        seen = newest.step


WITHIN = """
import sys, time, numpy as np, holdfast{more}
with {run}(sys.argv[1], signals=True, grace="20s") as run:
    print("training", flush=True)
    for step in range(1, 100_000):
        time.sleep(0.01)
        if run.interrupted(step, {{"w": np.full(100, step)}}):
            print("saved", run.latest().step, flush=True)
            break
print("never printed")
"""


@pytest.mark.parametrize("run", ["holdfast.Run", "holdfast.torch.Run"])
def test_a_run_with_signals_saves_when_it_is_asked_to_end(tmp_path: Path, run: str):
    code = WITHIN.format(run=run, more=", holdfast.torch" if "torch" in run else "")
    end_training(code, tmp_path)


@pytest.fixture
def caught() -> list[int]:
    """A handler that was there before."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def test_a_handler_that_was_there_is_called_after_the_block(tmp_path: Path, caught: list[int]):
    mine = signal.getsignal(signal.SIGTERM)
    with holdfast.Run(tmp_path) as run:
        with run.stopping():
            assert not run.interrupted(1, STATE)
            signal.raise_signal(signal.SIGTERM)
            assert caught == []
            assert run.interrupted(1, STATE)
            assert run.interrupted(1, STATE)
        assert caught == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
        assert [step.step for step in run] == [1]
        with run.stopping():
            pass
    assert caught == [signal.SIGTERM]


def test_a_second_signal_is_not_held_back(tmp_path: Path, caught: list[int]):
    with holdfast.Run(tmp_path) as run, run.stopping():
        signal.raise_signal(signal.SIGTERM)
        assert caught == []
        signal.raise_signal(signal.SIGTERM)
        assert caught == [signal.SIGTERM]


def test_a_handler_that_is_put_back_after_the_block_holds_nothing_back(
    tmp_path: Path, caught: list[int]
):
    """Somebody took ours for what was there before theirs."""
    with holdfast.Run(tmp_path) as run:
        with run.stopping():
            ours = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, ours)
        signal.raise_signal(signal.SIGTERM)
    assert caught == [signal.SIGTERM]


def test_a_second_signal_goes_through_a_handler_on_top(tmp_path: Path, caught: list[int]):
    with holdfast.Run(tmp_path) as run, run.stopping():
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
        signal.raise_signal(signal.SIGTERM)
        assert caught == []
        signal.raise_signal(signal.SIGTERM)
        assert caught == [signal.SIGTERM]
        run.interrupted(1, STATE)


def test_an_error_in_the_block_is_the_error(tmp_path: Path, caught: list[int]):
    def fail() -> None:
        with holdfast.Run(tmp_path) as run, run.stopping():
            signal.raise_signal(signal.SIGTERM)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert caught == []


def test_a_step_that_is_younger_than_a_save_takes_is_enough(
    tmp_path: Path, caught: list[int], monkeypatch: pytest.MonkeyPatch
):
    with holdfast.Run(tmp_path) as run, run.stopping(grace=1000):
        run.save(1, STATE)
        monkeypatch.setattr(
            run, "_times", [holdfast.extras.runs.summary.SaveTimes(1, 500.0, 500.0, 1)]
        )
        signal.raise_signal(signal.SIGTERM)
        assert run.interrupted(2, STATE)
        assert [step.step for step in run] == [1]
        run._last_s -= 600
        assert run.interrupted(2, STATE)
        assert [step.step for step in run] == [1, 2]


def test_a_grace_time_that_is_too_short(
    tmp_path: Path, caught: list[int], monkeypatch: pytest.MonkeyPatch
):
    with holdfast.Run(tmp_path) as run, run.stopping(grace=100):
        monkeypatch.setattr(
            run, "_times", [holdfast.extras.runs.summary.SaveTimes(1, 500.0, 500.0, 1)]
        )
        signal.raise_signal(signal.SIGTERM)
        assert run.interrupted(2, STATE)
        assert run.latest() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_ends_at_once(tmp_path: Path):
    """A worker of a loader is ended by SIGTERM, and must not wait for anybody."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with holdfast.Run(tmp_path) as run, run.stopping():
            child = os.fork()
            if not child:
                signal.raise_signal(signal.SIGTERM)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status)
            assert not run.interrupted(1, STATE)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_have_no_signals(tmp_path: Path):
    said: list[str] = []

    def enter() -> None:
        try:
            with holdfast.Run(tmp_path).stopping():
                said.append("?")
        except SaveError as error:
            said.append(str(error))
        try:
            with holdfast.Run(tmp_path, signals=True):
                said.append("?")
        except SaveError as error:
            said.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in said[0]
    assert said[1] == said[0]


def test_signals_of_a_run_are_held_back_in_its_block(tmp_path: Path, caught: list[int]):
    mine = signal.getsignal(signal.SIGTERM)
    run = holdfast.Run(tmp_path, signals=[signal.SIGTERM, signal.SIGUSR1], grace=60)
    assert signal.getsignal(signal.SIGTERM) is mine
    assert run.resume() is None  # looking needs no block
    with run:
        assert not run.interrupted(1, STATE)
        signal.raise_signal(signal.SIGTERM)
        assert caught == []
        assert run.interrupted(1, STATE)
        assert [step.step for step in run] == [1]
    assert caught == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is mine
    with pytest.raises(Closed):
        run.save(2, STATE)


def test_a_handler_that_raises_still_closes_the_run(tmp_path: Path):
    def leave(number: int, frame: object) -> None:
        raise SystemExit(7)

    def train() -> None:
        with holdfast.Run(tmp_path, signals=True) as run:
            run.save(1, STATE)
            signal.raise_signal(signal.SIGTERM)
            assert run.interrupted(2, STATE)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit) as left:
            train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == 7
    with holdfast.Run(tmp_path) as other:  # which is refused while the first one has its lock
        other.save(3, STATE)


@pytest.mark.parametrize(
    "call", [lambda run: run.save(1, STATE), lambda run: run.interrupted(1, STATE)]
)
def test_signals_without_the_block_of_the_run_are_refused(
    tmp_path: Path, call: Callable[[holdfast.Run], object]
):
    with pytest.raises(SaveError, match=r"signals= .*`with`"):
        call(holdfast.Run(tmp_path, signals=True))
    assert list(tmp_path.iterdir()) == []


def test_signals_are_held_back_once(tmp_path: Path):
    with (
        holdfast.Run(tmp_path, signals=True) as run,
        pytest.raises(SaveError, match="holds signals back already"),
    ):
        run.stopping()


def test_what_a_run_takes_as_signals(tmp_path: Path):
    for off in (False, None, ()):
        with holdfast.Run(tmp_path, signals=off) as run, run.stopping():
            assert not run.interrupted(1, STATE)
    with pytest.raises(BadArgument, match=r"signals= takes True, or signals.*'now'"):
        holdfast.Run(tmp_path, signals="now")
    with pytest.raises(BadArgument, match=r"grace= goes with signals="):
        holdfast.Run(tmp_path, grace="60s")


def test_what_signals_are():
    assert read_signals(signal.SIGTERM) == (signal.SIGTERM,)
    assert read_signals(["SIGTERM", signal.SIGUSR1, 15]) == (signal.SIGTERM, signal.SIGUSR1)
    for wrong in ("TERM", 12345, None, [None]):
        with pytest.raises(BadArgument, match="signals="):
            read_signals(wrong)
