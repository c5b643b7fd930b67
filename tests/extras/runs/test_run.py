"""`Run`: saving, resuming, keeping, room, and one writer at a time."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Best, Every, Latest
from holdfast.errors import (
    BadArgument,
    BadArgumentType,
    Closed,
    DoesNotFit,
    HoldfastWarning,
    NotCommitted,
    SaveError,
    Unsupported,
)
from holdfast.extras.runs import run as run_module
from holdfast.extras.runs.summary import SaveTimes, summarize
from holdfast.extras.runs.view import RunView
from holdfast.stores.files import Files
from tests.support import flip_bit, run_in_threads


def state(number: int, count: int = 600) -> dict[str, object]:
    return {
        "w": np.full(count, number, np.float32),
        "opt": {"m": np.arange(4.0) + number, "groups": [{"lr": 0.1 * number}]},
        "step": number,
    }


def numbers(run: holdfast.Run) -> list[int]:
    return [step.step for step in run]


def test_the_rules_apply_after_each_save(tmp_path: Path):
    run = holdfast.Run(tmp_path, keep=[Latest(2), Every(10), Best("loss")])
    for number in range(1, 16):
        saved = run.save(number, state(number), metrics={"loss": abs(number - 5)})
        assert saved.step == number
        assert run.latest() == saved
    assert numbers(run) == [5, 10, 14, 15]
    assert run.best("loss").step == 5
    assert run.best("loss", mode="max").step == 15
    assert run.plan()[0].why == "best:loss:1"
    assert run.prune() == ()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == [".holdfast.lock"]


def test_the_step_before_stays_where_the_newest_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = holdfast.Run(tmp_path, keep=Latest(1))
    run.save(1, state(1))
    real = holdfast.extras.runs.retention.verify

    def damaged(path: str) -> object:
        data = next(Path(path).glob("data-*"))
        flip_bit(data, -1)
        return real(path)

    monkeypatch.setattr("holdfast.extras.runs.retention.verify", damaged)
    with pytest.warns(HoldfastWarning, match="step 2 could not be read back, so step 1 stays"):
        run.save(2, state(2))
    assert numbers(run) == [1, 2]


def test_resume_fills_arrays_in_place(tmp_path: Path):
    run = holdfast.Run(tmp_path)
    assert run.resume(into=state(0)) is None
    run.save(7, state(7))
    into = state(0)
    array, inner = into["w"], into["opt"]["m"]
    assert run.resume(into=into) is into
    assert (array[0], inner[1], into["step"], into["opt"]["groups"]) == (7, 8, 7, [{"lr": 0.1 * 7}])
    assert run.resumed.step == 7
    fresh = run.resume()
    assert fresh["step"] == 7
    assert isinstance(fresh["w"], np.ndarray)


class Keeps:
    """What has a state dict."""

    def __init__(self) -> None:
        self.value = np.zeros(3)

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]
        self.loaded = True


def test_resume_hands_objects_their_state(tmp_path: Path):
    run, one = holdfast.Run(tmp_path), Keeps()
    one.value[:] = 5
    run.save(1, {"model": one, "pair": (np.ones(2), 3)})
    other = Keeps()
    back = run.resume(into={"model": other, "pair": (np.zeros(2), 0)})
    assert back["model"] is other
    assert other.loaded
    assert other.value.tolist() == [5, 5, 5]
    assert back["pair"][1] == 3
    assert back["pair"][0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("into", "says"),
    [
        ({"w": np.zeros(3, np.float32)}, "shape"),
        ({"w": np.zeros(600, np.float64)}, "dtype"),
        ({"v": np.zeros(600, np.float32)}, "the step does not have 'v'"),
        ({"w": {"deeper": 1}}, "a dict, and the step has a tensor"),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, into: dict[str, object], says: str):
    run = holdfast.Run(tmp_path)
    run.save(1, {"w": np.ones(600, np.float32)})
    with pytest.raises(DoesNotFit, match=says):
        run.resume(into=into)
    assert all(not value.any() for value in into.values() if isinstance(value, np.ndarray))


def test_a_step_is_not_replaced_unasked(tmp_path: Path):
    run = holdfast.Run(tmp_path)
    run.save(1, state(1))
    with pytest.raises(NotCommitted, match="step 1 is there already") as refused:
        run.save(1, state(2))
    assert refused.value.errno == errno.EEXIST
    assert run.resume()["step"] == 1
    run.save(1, state(2), overwrite=True)
    assert run.resume()["step"] == 2


@pytest.mark.parametrize("step", [-1, 1.5, "x", None, True, 1 << 63])
def test_what_is_no_step(tmp_path: Path, step: object):
    with pytest.raises(BadArgument):
        holdfast.Run(tmp_path).save(step, state(1))


@pytest.mark.parametrize(
    "metrics", [3, {"loss": "low"}, {1: 2.0}, {"loss": None}, {"loss": np.zeros(2)}]
)
def test_what_are_no_metrics(tmp_path: Path, metrics: object):
    with pytest.raises(BadArgumentType, match="metrics="):
        holdfast.Run(tmp_path).save(1, state(1), metrics=metrics)
    assert list(tmp_path.iterdir()) == []


def test_metrics_of_every_kind_come_back(tmp_path: Path):
    run = holdfast.Run(tmp_path)
    run.save(
        1, state(1), metrics={"a": np.float32(0.5), "b": 3, "c": float("nan"), "d": float("-inf")}
    )
    found = run.latest().metrics
    assert (found["a"], found["b"], found["d"]) == (0.5, 3.0, float("-inf"))
    assert found["c"] != found["c"]
    assert run.best("c") is None


def test_a_closed_run_saves_no_more_and_looks_on(tmp_path: Path):
    with holdfast.Run(tmp_path) as run:
        run.save(1, state(1))
    with pytest.raises(Closed):
        run.save(2, state(2))
    assert run.latest().step == 1
    assert not (tmp_path / ".holdfast.lock").exists()


def test_going_back_to_a_step(tmp_path: Path):
    run = holdfast.Run(tmp_path, keep=Latest(5))
    for number in range(1, 6):
        run.save(number, state(number))
    run.pin(5, "paper")
    with pytest.raises(NotCommitted, match="step 5 is pinned"):
        run.rewind(3)
    run.unpin(5)
    assert [step.step for step in run.rewind(3)] == [4, 5]
    assert run.latest().step == 3
    run.save(4, state(4))
    assert numbers(run) == [1, 2, 3, 4]
    with pytest.raises(holdfast.errors.NoSuchStep):
        run.rewind(9)
    assert sorted(name for name in os.listdir(tmp_path) if name.endswith(".tmp")) == []


# Pins.


def test_a_pinned_step_stays(tmp_path: Path):
    run = holdfast.Run(tmp_path, keep=Latest(1))
    run.save(1, state(1))
    holdfast.Run(tmp_path).pin(1, "paper")
    for number in (2, 3):
        run.save(number, state(number))
    assert numbers(run) == [1, 3]
    assert run.pins()[1].why == "paper"
    run.unpin(1)
    assert [step.step for step in run.prune()] == [1]
    with pytest.raises(holdfast.errors.NoSuchStep):
        run.pin(99)
    with pytest.raises(holdfast.errors.NoSuchStep):
        run.unpin(1)


# Room.


def test_a_budget_refuses(tmp_path: Path):
    run = holdfast.Run(tmp_path, keep=Latest(3), budget=20_000)
    run.save(1, state(1, 3000))
    with pytest.raises(NotCommitted, match="budget is used up") as refused:
        run.save(2, state(2, 3000))
    assert refused.value.errno == errno.ENOSPC
    assert numbers(run) == [1]
    assert sorted(name for name in os.listdir(tmp_path) if name.endswith(".tmp")) == []


def test_evict_applies_the_rules_early(tmp_path: Path):
    run = holdfast.Run(tmp_path, keep=Latest(2), budget=45_000, when_full="evict")
    for number in range(1, 7):
        run.save(number, state(number, 3000))
        assert sum(step.nbytes for step in run) <= 45_000
    assert numbers(run) == [5, 6]


def test_evict_never_takes_the_newest_or_what_a_rule_keeps(tmp_path: Path):
    run = holdfast.Run(tmp_path, keep=Latest(3), budget=30_000, when_full="evict")
    run.save(1, state(1, 3000))
    run.save(2, state(2, 3000))
    with pytest.raises(NotCommitted, match="budget"):
        run.save(3, state(3, 3000))
    assert numbers(run) == [1, 2]
    alone = holdfast.Run(tmp_path / "alone", keep=Latest(1), budget=20_000, when_full="evict")
    alone.save(1, state(1, 3000))
    with pytest.raises(NotCommitted, match="budget"):
        alone.save(2, state(2, 3000))
    assert numbers(alone) == [1]


def test_pause_waits_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = holdfast.Run(tmp_path, budget=20_000, when_full="pause")
    run.save(1, state(1, 3000))
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            holdfast.extras.runs.directory.hide(
                run._folder.files, "step-00000001", at=opened
            ).remove()

    opened = run._folder.files.open_directory(str(tmp_path))
    monkeypatch.setattr(run_module.time, "sleep", sleep)
    with pytest.warns(HoldfastWarning, match="waits for room: the run's budget is used up"):
        run.save(2, state(2, 3000))
    assert len(waited) == 3
    assert numbers(run) == [2]


def test_pause_does_not_wait_for_what_never_comes(tmp_path: Path):
    run = holdfast.Run(tmp_path, budget=1000, when_full="pause")
    with pytest.raises(NotCommitted, match="budget"):
        run.save(1, state(1, 3000))


def test_a_disk_that_is_full_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was free is gone when the bytes are written: evict makes room and tries again, and then gives up."""
    run = holdfast.Run(tmp_path, keep=Latest(1), when_full="evict")
    monkeypatch.setattr(
        "holdfast.extras.runs.retention.verify", lambda path: type("Report", (), {"ok": False})
    )
    run.save(1, state(1))
    with pytest.warns(HoldfastWarning, match="read back"):
        run.save(2, state(2))
    for number in (3, 4):
        holdfast.save(state(number), tmp_path / f"step-{number}")
    tries = []

    def full(descriptor: int, *given: object) -> int:
        tries.append(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    # Room is not asked for by short files: the first byte that is written says that there is none.
    for call in ("reserve", "write_some"):
        monkeypatch.setattr(f"holdfast.stores.platform.{call}", full)
    with pytest.warns(HoldfastWarning), pytest.raises(NotCommitted) as refused:
        run.save(5, state(5))
    assert refused.value.errno == errno.ENOSPC
    assert numbers(run) == [3, 4]
    assert len(tries) == 3


# One writer.

HOLD = """
import sys, time, numpy as np, holdfast
run = holdfast.Run(sys.argv[1])
run.save(1, {"w": np.ones(3)})
print("saved", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "saved\n"
        run = holdfast.Run(tmp_path, keep=Latest(1))
        assert run.latest().step == 1
        run.pin(1, "while it goes on")
        with pytest.raises(NotCommitted, match=f"process {first.pid} on ") as refused:
            run.save(2, state(2))
        assert refused.value.errno == errno.EBUSY
        with pytest.raises(NotCommitted, match="another run writes"):
            run.prune()
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (tmp_path / ".holdfast.lock").exists()
        run.save(2, state(2))
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    assert numbers(run) == [1, 2]


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every write fail as on a full disk."""

    def full(descriptor: int, *given: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in ("reserve", "write_some"):
        monkeypatch.setattr(f"holdfast.stores.platform.{call}", full)


def test_a_save_that_fails_is_a_warning_and_the_next_one_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = holdfast.Run(tmp_path, when_failed="warn")
    run.save(1, state(1))
    fill_disk(monkeypatch)
    with pytest.warns(HoldfastWarning, match=r"step-00000002 failed.*the disk is full") as warned:
        assert run.save(2, state(2)) is None
    assert [one.filename for one in warned] == [__file__]
    monkeypatch.undo()
    assert run.summary().failed == 1
    assert "1 failed" in str(run.summary())
    assert run.save(3, state(3)).step == 3
    assert numbers(run) == [1, 3]


def test_a_save_that_is_refused_is_a_warning(tmp_path: Path):
    with holdfast.Run(tmp_path, when_failed="warn", budget=10) as run:
        with pytest.warns(HoldfastWarning, match="the run's budget is used up"):
            assert run.save(1, state(1)) is None
        run.budget = None
        run.save(1, state(1))
        with pytest.warns(HoldfastWarning, match="step 1 is there already"):
            assert run.save(1, state(1)) is None
        assert run.summary().failed == 2


def test_wrong_arguments_and_a_closed_run_are_never_warnings(tmp_path: Path):
    with pytest.raises(BadArgument, match="when_failed= takes 'raise' or 'warn', not 'ignore'"):
        holdfast.Run(tmp_path, when_failed="ignore")
    run = holdfast.Run(tmp_path, when_failed="warn")
    with pytest.raises(BadArgument):
        run.save(-1, state(1))
    with pytest.raises(Unsupported, match="nonsense"):
        run.save(1, state(1), max_shard_size="nonsense")
    run.close()
    with pytest.raises(Closed):
        run.save(1, state(1))


def test_a_second_job_is_refused_when_it_resumes(tmp_path: Path):
    """It would train until its first save, and learn then that it cannot save."""
    code = """
import sys, holdfast
run = holdfast.Run(sys.argv[1])
run.resume(into={})
print("resumed", flush=True)
sys.stdin.read()
"""
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stdout.readline() == "resumed\n"
        second, into = holdfast.Run(tmp_path / "run"), state(7)
        with pytest.raises(NotCommitted, match=f"process {first.pid} on ") as refused:
            second.resume(into=into)
        assert refused.value.errno == errno.EBUSY
        assert np.array_equal(into["w"], state(7)["w"])
        # Whoever only looks is not in the way.
        assert second.resume() is None
        assert second.latest() is None
        assert RunView(tmp_path / "run").steps() == []
        first.communicate()
        assert second.resume(into=into) is None
        second.save(1, state(1))
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    assert (tmp_path / "run" / ".holdfast.lock").exists()


def test_looking_at_a_run_locks_nothing(tmp_path: Path):
    with holdfast.Run(tmp_path) as run:
        run.save(1, state(1))
    run = holdfast.Run(tmp_path)
    assert run.resume()["step"] == 1
    assert run.latest(deep=True).step == 1
    assert RunView(tmp_path)[1].step == 1
    assert not (tmp_path / ".holdfast.lock").exists()


def test_a_run_that_resumed_and_is_closed_gives_its_lock_back(tmp_path: Path):
    with holdfast.Run(tmp_path) as run:
        run.save(1, state(1))
    with holdfast.Run(tmp_path) as run:
        run.resume(into=state(0))
        assert (tmp_path / ".holdfast.lock").exists()
    assert not (tmp_path / ".holdfast.lock").exists()
    assert run.resume(into=state(0))["step"] == 1  # a closed run goes on looking, and locks nothing
    assert not (tmp_path / ".holdfast.lock").exists()


def test_a_directory_that_may_only_be_read_is_loaded_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with holdfast.Run(tmp_path) as run:
        run.save(1, state(1))

    def refuse(*given: object, **options: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Files, "create", refuse)
    run = holdfast.Run(tmp_path)
    assert run.resume(into=state(0))["step"] == 1
    with pytest.raises(NotCommitted):
        run.save(2, state(2))


def test_two_runs_of_one_process(tmp_path: Path):
    first, second = holdfast.Run(tmp_path), holdfast.Run(tmp_path)
    first.save(1, state(1))
    with pytest.raises(NotCommitted, match="this process has another Run open"):
        second.save(2, state(2))
    first.close()
    second.save(2, state(2))
    del second
    holdfast.Run(tmp_path).save(3, state(3))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_neither_holds_the_lock_nor_saves(tmp_path: Path):
    run = holdfast.Run(tmp_path)
    run.save(1, state(1))
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        said = b"saved"
        try:
            run.save(2, state(2))
        except SaveError as error:
            said = b"refused" if "fork" in str(error) and run.latest().step == 1 else b"?"
        os.write(ready[1], said)
        os.read(go[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 10) == b"refused"
        with pytest.raises(NotCommitted, match="another Run"):
            holdfast.Run(tmp_path).save(3, state(3))
        run.close()
        holdfast.Run(tmp_path).save(3, state(3))
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *go):
            os.close(end)


def test_summary(tmp_path: Path):
    run = holdfast.Run(tmp_path, keep=Latest(1))
    assert str(run.summary()) == "no step has been saved yet"
    for number in range(3):
        run.save(number, state(number))
    found = run.summary(mtbf="6h")
    assert (found.saves, found.failed, found.deleted) == (3, 0, 2)
    assert found.interval_s == pytest.approx((2 * found.stalled_s * 21600) ** 0.5)
    assert found.longest_stall_s >= found.stalled_s >= found.took_s > 0
    assert found.nbytes >= 3 * 2400
    with pytest.raises(NotCommitted):
        run.save(2, state(2))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.055, "55 ms"),
        (49, "49 s"),
        (59.7, "1 min"),
        (131, "2 min 11 s"),
        (600, "10 min"),
        (3599.8, "1 h"),
        (5400, "1 h 30 min"),
        (86400, "24 h"),
    ],
)
def test_summary_prints_durations_in_their_two_largest_units(seconds: float, text: str):
    times = [SaveTimes(step=1, stalled_s=seconds, took_s=seconds, nbytes=1)]
    printed = str(summarize(times, failed=0, deleted=0, mtbf_s=86400.0, damaged=()))
    assert f"a save stops training for {text} (at most {text}) and takes {text};" in printed
    assert "with a failure every 24 h, save every " in printed


def test_a_kill_while_steps_are_deleted_is_cleaned_by_the_next_run(tmp_path: Path):
    run = holdfast.Run(tmp_path)
    run.save(1, state(1))
    run.close()
    (tmp_path / "step-00000001").rename(tmp_path / ".deleted~step-00000001.0123456789abcdef.tmp")
    (tmp_path / ".deleted~step-00000001.0123456789abcdef.tmp" / "rng").mkdir()
    assert holdfast.Run(tmp_path).latest() is None
    holdfast.Run(tmp_path).save(2, state(2))
    assert [name for name in os.listdir(tmp_path) if name.startswith(".deleted")] == []
    assert time.time() - holdfast.Run(tmp_path).latest().saved < 3600


# What steps share.


def test_what_did_not_change_is_not_written_again(tmp_path: Path):
    frozen = np.random.default_rng(0).random(100_000)
    with holdfast.Run(tmp_path, keep=Latest(2)) as run:
        for number in (1, 2, 3, 4):
            run.save(number, {"frozen": frozen, "lora": np.full(100, number), "step": number})
        assert numbers(run) == [3, 4]
        assert run._used() < frozen.nbytes + 40_000
        for step in run:
            assert holdfast.verify(step.path).ok
        assert run.resume()["step"] == 4
        run.save(4, {"frozen": frozen, "lora": np.full(100, 9), "step": 9}, overwrite=True)
        assert run.resume()["step"] == 9
        run.save(5, {"frozen": frozen + 1, "lora": np.zeros(100), "step": 5})
        assert numbers(run) == [4, 5]
        assert all(holdfast.verify(step.path).ok for step in run)


def test_a_run_may_write_everything_anew(tmp_path: Path):
    with holdfast.Run(tmp_path, share=False) as run:
        for number in (1, 2):
            run.save(number, {"frozen": np.ones(10_000)})
        assert run._used() > 160_000


def test_room_is_needed_for_what_is_written_alone(tmp_path: Path):
    frozen = np.random.default_rng(0).random(10_000)
    with holdfast.Run(tmp_path, budget=100_000) as run:
        for number in range(4):
            run.save(number, {"frozen": frozen, "step": np.full(10, number)})
        with pytest.raises(NotCommitted, match="budget"):
            run.save(9, {"frozen": frozen + 1})


def test_a_base_that_is_gone_before_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another run deletes the step that was the newest when this one looked."""
    run = holdfast.Run(tmp_path)
    run.save(1, {"w": np.zeros(8)})
    place = run._place
    gone = str(tmp_path / "step-00000000")
    monkeypatch.setattr(
        run, "_place", lambda step, overwrite: (*place(step, overwrite=overwrite)[:2], gone)
    )
    saved = run.save(2, {"w": np.ones(8)})
    with holdfast.open(saved.path) as checkpoint:
        assert checkpoint["w"].numpy().tolist() == [1.0] * 8


def test_a_base_that_vanishes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = holdfast.Run(tmp_path)
    frozen = np.random.default_rng(0).random(10_000)
    run.save(1, {"frozen": frozen})
    real = run._make_room

    def remove(nbytes: int, coming: object) -> None:
        real(nbytes, coming)
        if (tmp_path / "step-00000001").exists():
            shutil.rmtree(tmp_path / "step-00000001")

    monkeypatch.setattr(run, "_make_room", remove)
    run.save(2, {"frozen": frozen})
    assert numbers(run) == [2]
    assert holdfast.verify(run.latest().path).ok


def test_threads_save_one_after_the_other(tmp_path: Path):
    run, failed = holdfast.Run(tmp_path, keep=Latest(3)), []

    def save(numbers: range) -> None:
        for number in numbers:
            try:
                run.save(number, state(number))
            except Exception as error:
                failed.append(error)

    run_in_threads(save, [range(first, 12, 3) for first in range(3)])
    assert failed == []
    assert run.latest().step == 11
    assert run.summary().saves == 12


@pytest.mark.parametrize("now", [-1e9, 0.0, 1e12])
def test_a_clock_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: float):
    """Before 1970, at its beginning, and in thirty thousand years: steps are saved, found and kept by number."""
    run = holdfast.Run(tmp_path, keep=["within:1h", "latest:2"])
    run.save(1, state(1))
    with monkeypatch.context() as clock:
        clock.setattr(run_module.time, "time", lambda: now)
        run.save(2, state(2))
        run.save(3, state(3))
    run.save(4, state(4))
    assert run.latest().step == 4
    assert {3, 4} <= set(numbers(run))
