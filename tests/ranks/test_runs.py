"""`holdfast.torch.Run`: steps of several ranks, now and in the background; a failure on one is everybody's, and is never lost."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

import holdfast
from holdfast import Latest
from holdfast.engine.targets import folder as rank_folder
from holdfast.errors import Corrupted, HoldfastWarning, NotCommitted, RanksFailed
from holdfast.extras.runs import ranks as run_module
from holdfast.extras.runs import retention
from holdfast.extras.runs.ranks import Run
from holdfast.torch.ranks import load_sharded as load_module
from holdfast.torch.ranks import saving
from holdfast.torch.ranks.load_sharded import load_full
from tests.ranks.pool import Pool, World, failures, good
from tests.ranks.states import sharded
from tests.ranks.test_background import Gate
from tests.ranks.test_failures import instead
from tests.support import flip_bit

pytestmark = pytest.mark.timeout(120)


def state_of(world: World, number: float) -> dict[str, object]:
    rows = sharded(torch.full((7, 40), number), world.mesh(), (Shard(0),))
    return {"rows": rows, "plain": torch.full((30,), number), "step": int(number), "name": "run"}


def whole(step: holdfast.Step) -> float:
    """The number that a step is full of; it is whole to the last byte."""
    assert holdfast.verify(step.path).ok
    with step.open() as checkpoint:
        (number,) = {
            float(n) for array in checkpoint.read().values() for n in array.reshape(-1).tolist()
        }
    return number


def numbers(path: Path) -> list[int]:
    run = holdfast.Run(path)
    assert [whole(step) for step in run] == [step.step for step in run]
    return [step.step for step in run]


def save_some(world: World, path: str, steps: list[int], background: bool) -> list[int]:
    with Run(path, keep=[Latest(2)], durable=False, group=world.group, deadline=20) as run:
        for step in steps:
            save = run.async_save if background else run.save
            save(step, state_of(world, step), metrics={"loss": 1 / step})
            if background:
                assert run.wait().step == step
        assert run.summary().saves == len(steps)
        return [step.step for step in run]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("background", [False, True], ids=["now", "background"])
def test_steps_of_several_ranks(pool: Pool, tmp_path: Path, size: int, background: bool):
    seen = good(pool.run(size, save_some, str(tmp_path), [1, 2, 3, 4], background))
    assert seen[0] == [3, 4]
    assert numbers(tmp_path) == [3, 4]
    assert holdfast.Run(tmp_path).latest().metrics == {"loss": 0.25}
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(".")) == []


def resume(world: World, path: str) -> tuple[object, ...] | None:
    run, into = Run(path, group=world.group, deadline=20), state_of(world, 0)
    rows = into["rows"].to_local()
    if run.resume(into=into) is None:
        return None
    assert run.resume(into=into) is into
    values = {*rows.reshape(-1).tolist(), *into["plain"].tolist()}
    return (*values, into["step"], run.resumed.step, run.resumed.metrics["loss"])


@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2), (3, 1)])
def test_any_number_of_ranks_resumes(pool: Pool, tmp_path: Path, saved: int, loaded: int):
    assert good(pool.run(loaded, resume, str(tmp_path))) == [None] * loaded
    good(pool.run(saved, save_some, str(tmp_path), [1, 2, 3], False))
    next((tmp_path / "step-00000003").glob("data-*")).unlink()
    assert good(pool.run(loaded, resume, str(tmp_path))) == [(2.0, 2, 2, 0.5)] * loaded


def hold(path: Path) -> holdfast.Run:
    """Another run in the same directory."""
    other = holdfast.Run(path)
    other.save(1, {"w": torch.ones(2)})
    return other


def save_one(world: World, path: str, step: int, keep: str, options: dict[str, object]) -> None:
    with Run(path, keep=keep, durable=False, group=world.group, deadline=20) as run:
        run.save(step, state_of(world, step), **options)


def test_what_the_first_rank_refuses_all_ranks_raise(pool: Pool, tmp_path: Path):
    other = hold(tmp_path)
    for failure in failures(pool.run(3, save_one, str(tmp_path), 2, "latest:1", {})):
        assert failure.kinds[0] == "RanksFailed"
        assert f"process {os.getpid()}" in failure.text
    other.close()
    good(pool.run(3, save_one, str(tmp_path), 2, "latest:3", {}))
    for failure in failures(pool.run(3, save_one, str(tmp_path), 2, "latest:3", {})):
        assert "step 2 is there already" in failure.text
    good(pool.run(3, save_one, str(tmp_path), 2, "latest:3", {"overwrite": True}))
    assert holdfast.Run(tmp_path).latest().step == 2


def state_alone() -> dict[str, object]:
    """The state of `state_of` in one process."""
    return {"plain": torch.zeros(30), "rows": torch.zeros(7, 40), "step": 0, "name": ""}


def resume_one(world: World, path: str) -> object:
    run = Run(path, durable=False, group=world.group, deadline=20)
    into = state_of(world, 0)
    try:
        run.resume(into=into)
    finally:
        untouched = into["step"] == 0
        run.close()
    return untouched


def test_ranks_that_resume_a_run_of_another_job_are_refused(pool: Pool, tmp_path: Path):
    good(pool.run(2, save_some, str(tmp_path), [1, 2], False))
    other = Run(tmp_path)
    other.resume(into=state_alone(), cast=True)
    for failure in failures(pool.run(2, resume_one, str(tmp_path))):
        assert failure.kinds[0] == "RanksFailed"
        assert f"process {os.getpid()}" in failure.text
    other.close()
    assert good(pool.run(2, resume_one, str(tmp_path))) == [False] * 2
    assert not (tmp_path / ".holdfast.lock").exists()


def full_disk(world: World, path: str) -> list[str]:
    run = Run(
        path,
        keep=[Latest(2)],
        durable=False,
        group=world.group,
        deadline=20,
        budget=8_000,
        when_full="evict",
    )
    run.save(1, state_of(world, 1))
    run.save(2, state_of(world, 2))
    run.save(3, state_of(world, 3))
    run.when_full = "error"
    run.budget = 4_000
    with pytest.raises(RanksFailed) as refused:
        run.save(4, state_of(world, 4))
    assert refused.value.errno == errno.ENOSPC
    run.close()
    return [str(refused.value)]


def test_no_room_is_everybodys_failure(pool: Pool, tmp_path: Path):
    for said in good(pool.run(2, full_disk, str(tmp_path))):
        assert "budget is used up" in said[0]
    assert numbers(tmp_path) == [2, 3]


def test_one_process_raises_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk is a `NotCommitted` with its code, as in `holdfast.Run`."""

    def full(descriptor: int, *given: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Run(tmp_path) as run:
        run.save(1, {"w": torch.ones(100)})
        for call in ("reserve", "write_some"):
            monkeypatch.setattr(f"holdfast.stores.platform.{call}", full)
        with pytest.raises(NotCommitted) as refused:
            run.save(2, {"w": torch.zeros(100)})
        with pytest.raises(NotCommitted) as refused_behind:
            run.async_save(2, {"w": torch.zeros(100)}).wait()
        monkeypatch.undo()
        for error in (refused.value, refused_behind.value):
            assert type(error) is NotCommitted
            assert error.errno == errno.ENOSPC
        with pytest.raises(NotCommitted):
            run.wait()
        assert run.summary().failed == 2
        assert numbers(tmp_path) == [1]


def test_the_budget_of_one_process_is_refused_with_its_code(tmp_path: Path):
    with Run(tmp_path, budget=100) as run, pytest.raises(NotCommitted) as refused:
        run.save(1, {"w": torch.ones(100)})
    assert type(refused.value) is NotCommitted
    assert refused.value.errno == errno.ENOSPC


def test_one_process_looks_again_where_a_step_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Run(tmp_path) as run:
        for step in (1, 2):
            run.save(step, {"w": torch.full((3,), float(step))})
    load, paths = run_module.load_together, list[str]()

    def load_late(request: load_module.ShardedLoad) -> object:
        if not paths:
            shutil.rmtree(request.where)
        paths.append(request.where)
        return load(request)

    monkeypatch.setattr(run_module, "load_together", load_late)
    state = Run(tmp_path).resume(into={"w": torch.zeros(3)})
    assert state["w"].tolist() == [1.0, 1.0, 1.0]
    assert len(paths) == 2


def fail_behind(world: World, path: str, victim: int, where: str) -> list[str]:
    """A save in the background fails on one rank: the next call says so, everywhere, and the one after it works."""
    run = Run(path, keep=[Latest(1)], durable=False, group=world.group, deadline=20)
    run.save(1, state_of(world, 1))
    said = []

    def broken(*args: object, **options: object) -> object:
        raise OSError(errno.EIO, "the disk is broken")

    owner = {"write_file": rank_folder, "publish": saving, "open_together": saving}[where]
    gate = Gate()
    with instead(owner, where, broken if world.rank == victim else getattr(owner, where)):
        try:
            run.async_save(2, state_of(world, 2))
        except RanksFailed as error:
            said.append(str(error))
        handle = run._handle
        if handle is not None:
            handle._future.exception(30)
    gate.opened.set()
    if not said:
        try:
            run.async_save(3, state_of(world, 3))
        except RanksFailed as error:
            said.append(str(error))
    assert run.summary().failed == 1
    run.async_save(4, state_of(world, 4))
    assert run.wait().step == 4
    run.close()
    return said


@pytest.mark.parametrize(
    ("where", "victim"),
    [("write_file", 0), ("write_file", 2), ("publish", 0), ("open_together", 0)],
)
def test_a_failure_behind_is_reported_by_the_next_call(
    pool: Pool, tmp_path: Path, where: str, victim: int
):
    for said in good(pool.run(3, fail_behind, str(tmp_path), victim, where)):
        assert len(said) == 1
        assert (
            "the disk is broken" in said[0]
            or "Input/output" in said[0]
            or "input/output" in said[0]
        )
    assert numbers(tmp_path) == [4]


def end_at_once(world: World, path: str) -> None:
    run = Run(path, keep=[Latest(1)], durable=False, group=world.group, deadline=20)
    for step in (1, 2, 3):
        run.async_save(step, state_of(world, step))
    run.close()


def test_close_waits(pool: Pool, tmp_path: Path):
    good(pool.run(2, end_at_once, str(tmp_path)))
    assert numbers(tmp_path) == [3]


def test_one_process_without_a_group(tmp_path: Path):
    model, run = torch.nn.Linear(4, 3), Run(tmp_path, keep=Latest(1), durable=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer, "step": 7}
    assert run.resume(into=state) is None
    run.async_save(7, state, metrics={"loss": torch.tensor(0.5)})
    run.wait()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state["step"] = 0
    assert run.resume(into=state) is state
    assert state["step"] == 7
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert run.latest().metrics == {"loss": 0.5}
    assert Run(tmp_path).resume()["step"] == 7
    run.close()


def test_a_run_that_is_dropped_gives_its_lock_back(tmp_path: Path):
    run = Run(tmp_path, durable=False)
    run.async_save(1, {"w": torch.ones(3)})
    run.wait()
    del run
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        Run(tmp_path, durable=False).save(2, {"w": torch.ones(3)})


def interrupt(world: World, path: str, victim: int) -> int:
    """One rank gets a signal in the middle of its 20th step: all of them stop at the same one, and save it."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with (
            Run(path, durable=False, group=world.group, deadline=20) as run,
            run.stopping(signals=signal.SIGUSR1, grace="10s"),
        ):
            for step in range(1, 2_000):
                time.sleep(0.002)
                if step == 20 and world.rank == victim:
                    signal.raise_signal(signal.SIGUSR1)
                if run.interrupted(step, state_of(world, step), metrics={"loss": 1.0}):
                    return step
    finally:
        signal.signal(signal.SIGUSR1, before)
    raise AssertionError("it never stopped")


def warn_behind(world: World, path: str, victim: int, where: str) -> list[str]:
    """A save in the background fails on one rank: the next call warns of it, everywhere, and saves."""
    run = Run(
        path, keep=[Latest(1)], durable=False, group=world.group, deadline=20, when_failed="warn"
    )
    run.save(1, state_of(world, 1))

    def broken(*args: object, **options: object) -> object:
        raise OSError(errno.EIO, "the disk is broken")

    owner = {"write_file": rank_folder, "publish": saving, "open_together": saving}[where]
    with instead(owner, where, broken if world.rank == victim else getattr(owner, where)):
        handle = run.async_save(2, state_of(world, 2))
        assert isinstance(handle._future.exception(30), RanksFailed)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert run.wait() is None
        run.async_save(3, state_of(world, 3))
        assert run.wait().step == 3
    with pytest.raises(RanksFailed):
        handle.wait()
    assert run.summary().failed == 1
    run.close()
    return [str(one.message) for one in warned if issubclass(one.category, HoldfastWarning)]


@pytest.mark.parametrize("where", ["write_file", "publish", "open_together"])
def test_a_failure_behind_is_a_warning_on_all_ranks(pool: Pool, tmp_path: Path, where: str):
    victim = 1 if where == "write_file" else 0
    for said in good(pool.run(2, warn_behind, str(tmp_path), victim, where)):
        assert len(said) == 1
        assert "step-00000002 failed, and the next save tries again" in said[0]
        assert "the disk is broken" in said[0]
    assert numbers(tmp_path) == [3]


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_at_once_is_a_warning(tmp_path: Path, background: bool):
    with Run(tmp_path, when_failed="warn") as run:
        unsaveable = {"w": torch.ones(2), "f": lambda: 0}
        save = run.async_save if background else run.save
        with pytest.warns(HoldfastWarning, match="step-00000001 failed, and the next save"):
            saved = save(1, unsaveable)
        assert run.wait() is None
        assert not (saved.durable if background else saved)
        assert run.summary().failed == 1
        assert run.save(2, {"w": torch.ones(2)}).step == 2


def test_the_last_save_of_a_run_that_warns_is_no_failure_of_the_program(tmp_path: Path):
    code = """
import sys, torch, holdfast.torch
with holdfast.torch.Run(sys.argv[1], when_failed="warn", budget=10) as run:
    run.async_save(1, {"w": torch.ones(100)})
print(run.summary().failed)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "budget is used up" in done.stderr


@pytest.mark.parametrize(("size", "victim"), [(1, 0), (2, 1), (3, 0)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    pool: Pool, tmp_path: Path, size: int, victim: int
):
    seen = good(pool.run(size, interrupt, str(tmp_path), victim))
    (step,) = set(seen)
    assert step >= 20
    assert numbers(tmp_path) == [step]


def go_back(world: World, path: str) -> tuple[list[int], list[int], int]:
    with Run(path, keep=[Latest(9)], durable=False, group=world.group, deadline=20) as run:
        for step in range(1, 6):
            run.save(step, state_of(world, step), metrics={"loss": float("nan")})
        gone = [step.step for step in run.rewind(3)]
        run.keep = (Latest(1),)
        pruned = [step.step for step in run.prune()]
        run.resume(into=state_of(world, 0))
        return gone, pruned, run.resumed.step


def test_going_back_and_pruning_are_the_first_ranks_business(pool: Pool, tmp_path: Path):
    assert good(pool.run(3, go_back, str(tmp_path))) == [([4, 5], [1, 2], 3)] * 3
    assert numbers(tmp_path) == [3]


def share(world: World, path: str) -> None:
    frozen = sharded(torch.arange(80_000.0).reshape(80, 1000), world.mesh(), (Shard(0),))
    with Run(
        path, keep=[Latest(2)], durable=False, group=world.group, deadline=20, budget=900_000
    ) as run:
        for step in range(1, 5):
            state = {
                "frozen": frozen,
                "plain": torch.ones(20_000),
                "lora": torch.full((50,), float(step)),
            }
            (run.async_save if step % 2 else run.save)(step, state)


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_share_what_did_not_change(pool: Pool, tmp_path: Path, size: int):
    """Each step has 400,000 bytes; with a budget of 900,000 three of them find room only because they share."""
    good(pool.run(size, share, str(tmp_path)))
    run = holdfast.Run(tmp_path)
    assert [step.step for step in run] == [3, 4]
    assert all(holdfast.verify(step.path).ok for step in run)
    assert run._used() < 450_000


def overtaken(world: World, path: str, given: bool) -> tuple[object, ...]:
    """Resume while somebody replaces the step that was found by a newer one, twice, before anybody opened it."""
    run, into = Run(path, group=world.group, deadline=20), state_of(world, 0)
    real, left = load_module.ranks_of, [2]

    def late(*args: object, **named: object) -> object:
        if left[0]:
            left[0] -= 1
            if world.rank == 0:
                newest = holdfast.Run(path).latest()
                with newest.open() as checkpoint:
                    next_one = {**checkpoint.read(), "step": 5 - left[0], "name": "run"}
                # No other run may write there, since `run` has resumed.
                with holdfast.Run(f"{path}-elsewhere") as elsewhere:
                    saved = elsewhere.save(5 - left[0], next_one)
                    os.rename(saved.path, Path(path) / saved.name)
                shutil.rmtree(newest.path)
            world.barrier()
        return real(*args, **named)

    with instead(load_module, "ranks_of", late):
        if given:
            run.resume(into=into)
        else:
            with instead(
                run_module,
                "load_full",
                lambda path: (late(world.group, doing="wait", deadline=20), load_full(path))[1],
            ):
                into = run.resume()
    return into["step"], run.resumed.step


@pytest.mark.parametrize("given", [True, False])
def test_all_ranks_look_again_where_a_step_went(pool: Pool, tmp_path: Path, given: bool):
    good(pool.run(2, save_some, str(tmp_path), [1, 2, 3], False))
    assert good(pool.run(2, overtaken, str(tmp_path), given)) == [(5, 5)] * 2


def resume_damaged(world: World, path: str) -> tuple[object, ...]:
    run, into = Run(path, group=world.group, deadline=20), state_of(world, 0)
    expected = RanksFailed if world.size > 1 else Corrupted
    with pytest.raises(expected) as told:
        run.resume(into=into)
    values = {*into["rows"].to_local().reshape(-1).tolist(), *into["plain"].tolist(), into["step"]}
    with pytest.raises(expected) as whole:
        run.resume()
    run.resume(into=into, deep=True)
    return values, str(told.value), str(whole.value), into["step"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_damaged_step_changes_nothing_on_any_rank(pool: Pool, tmp_path: Path, size: int):
    good(pool.run(size, save_some, str(tmp_path), [1, 2], False))
    data = sorted((tmp_path / "step-00000002").glob("data-*"))[-1]  # of one rank
    flip_bit(data, -1)
    for values, told, whole, step in good(pool.run(size, resume_damaged, str(tmp_path))):
        assert values == {0}
        assert ("nothing was published or changed" in told) is (size > 1)
        assert "resume(deep=True) passes over" in told
        assert "resume(deep=True) passes over" in whole
        assert step == 1


def save_after_damage(world: World, path: str) -> list[bool]:
    """The first rank's read-back finds the part of the last rank damaged; every rank writes its own anew then."""
    frozen = sharded(torch.arange(8_000.0).reshape(8, 1_000), world.mesh(), (Shard(0),))
    seen, real = [], retention.verify

    def rotten(where: str) -> object:
        data = sorted(Path(where).glob("data-*"))[-1]
        flip_bit(data, -1)
        return real(where)

    with (
        Run(path, keep="latest:1", durable=False, group=world.group, deadline=20) as run,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", HoldfastWarning)
        run.save(1, {"frozen": frozen})
        with instead(retention, "verify", rotten):
            run.save(2, {"frozen": frozen})
        for step in (3, 4):
            saved = run.save(step, {"frozen": frozen})
            world.barrier()
            seen.append(holdfast.verify(saved.path).ok)
            world.barrier()
    return seen


@pytest.mark.parametrize("size", [1, 2])
def test_no_rank_links_to_a_step_that_did_not_read_back(pool: Pool, tmp_path: Path, size: int):
    assert good(pool.run(size, save_after_damage, str(tmp_path))) == [[True, True]] * size
