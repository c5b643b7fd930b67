"""Saving while training goes on: the caller changes its tensors, begins another save, is killed politely, or just ends."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

import holdfast
from holdfast.engine.targets import folder as rank_folder
from holdfast.ranks import together
from holdfast.stores.files import Files
from holdfast.torch.cuda.stage import ROOM, Room
from holdfast.torch.ranks import saving
from holdfast.torch.ranks.save_sharded import async_save_sharded, save_sharded
from tests.ranks.endings import CONTENT
from tests.ranks.pool import Pool, World, failures, good
from tests.ranks.states import check, sharded, state_of
from tests.ranks.test_failures import instead
from tests.ranks.test_kills import QUIET
from tests.support import element_bytes

pytestmark = pytest.mark.timeout(120)


class Gate:
    """Holds every write until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._write = rank_folder.write_file

    def __call__(self, *args: object, **kwargs: object) -> object:
        assert self.opened.wait(30)
        return self._write(*args, **kwargs)


def change_afterwards(world: World, path: str, format: str) -> None:
    gate = Gate()
    state = state_of(world, nested=format != "safetensors")
    tensors = _tensors(state)
    with instead(rank_folder, "write_file", gate):
        handle = async_save_sharded(path, state, group=world.group, format=format, durable=False)
        assert handle.staged
        assert not handle.durable
        assert not handle.done()
        assert "being written" in repr(handle)
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            torch.tensor([], dtype=torch.uint8).set_(local.untyped_storage()).zero_()
        if format != "safetensors":
            state["optim"]["param_groups"][0]["betas"].append(5)
            state["optim"]["param_groups"].clear()
        with pytest.raises(TimeoutError):
            handle.wait(0.01)
        assert not Path(path).exists()
        gate.opened.set()
        saved = handle.wait(30)
    assert handle.durable
    assert handle.done()
    assert "durable" in repr(handle)
    assert saved.path == path
    assert Path(path).exists()


def _tensors(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    inside = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for value in inside for tensor in _tensors(value)]


def load_and_check(world: World, path: str, nested: bool) -> None:
    from holdfast.torch.ranks.load_sharded import load_sharded

    state = state_of(world, nested=nested, blank=True)
    load_sharded(path, state, group=world.group)
    check(world, state, nested=nested)


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
def test_the_caller_may_change_everything(pool: Pool, tmp_path: Path, format: str):
    for size in (1, 3):
        path = str(tmp_path / str(size))
        good(pool.run(size, change_afterwards, path, format))
        good(pool.run(2, load_and_check, path, format != "safetensors"))


def tear(world: World, path: str, kind: str) -> None:
    """On one rank a tensor changes while it is copied."""
    rows = sharded(torch.ones(6, 5), world.mesh(), (Shard(0),))
    state = {"rows": rows, "plain": torch.ones(40), "more": torch.ones(41), "most": torch.ones(42)}
    before = Room.take

    def take(self: Room, nbytes: int, **more: object) -> object:
        if world.rank == 1:
            {"sharded": rows, "local": rows.to_local(), "plain": state["plain"]}[kind].add_(1)
        return before(self, nbytes, **more)

    with instead(Room, "take", take):
        handle = async_save_sharded(path, state, group=world.group)
    handle.wait(30)


@pytest.mark.parametrize("kind", ["plain", "sharded", "local"])
def test_a_torn_snapshot_is_an_error_everywhere(pool: Pool, tmp_path: Path, kind: str):
    raised = failures(pool.run(3, tear, str(tmp_path / "step"), kind))
    assert {one.kinds[0] for one in raised} == {"RanksFailed"}
    assert len({one.text for one in raised}) == 1
    assert "rank 1" in raised[0].text
    assert "tensors were changed while they were copied" in raised[0].text
    assert list(tmp_path.iterdir()) == []


def two_saves(world: World, path: str, when_busy: str, busy_rank: int) -> str:
    """A second save while the first is held up, on one rank only."""
    gate = Gate()
    state = {f"w{i}": torch.ones(20) for i in range(3)}
    with instead(
        rank_folder, "write_file", gate if world.rank == busy_rank else rank_folder.write_file
    ):
        first = async_save_sharded(state, f"{path}1", group=world.group, durable=False)
        if when_busy == "wait":
            threading.Timer(1.4, gate.opened.set).start()
        try:
            started = time.monotonic()
            second = async_save_sharded(
                state,
                f"{path}2",
                group=world.group,
                durable=False,
                when_busy=when_busy,
                deadline=0.7,
            )
            said = f"second after {'a while' if time.monotonic() - started > 1.0 else 'no time'}"
            second.wait(30)
        except holdfast.errors.RanksFailed as error:
            said = str(error)
        gate.opened.set()
        first.wait(30)
        # Nothing stands in the way of the next, as soon as `wait` has returned.
        save_sharded(state, f"{path}3", group=world.group, durable=False, when_busy="refuse")
    return said


@pytest.mark.parametrize("busy_rank", [0, 1])
def test_the_second_save_waits(pool: Pool, tmp_path: Path, busy_rank: int):
    said = good(pool.run(2, two_saves, str(tmp_path / "step"), "wait", busy_rank))
    assert said == ["second after a while"] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step1", "step2", "step3"]


def test_the_second_save_is_refused(pool: Pool, tmp_path: Path):
    said = good(pool.run(2, two_saves, str(tmp_path / "step"), "refuse", 0))
    assert said[0] == said[1]
    assert "another save is still being written" in said[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step1", "step3"]


def collectives_meanwhile(world: World, path: str) -> float:
    """The training's own collectives on the same group go on while the save is written."""
    gate = Gate()
    with instead(rank_folder, "write_file", gate):
        handle = async_save_sharded(path, state_of(world), group=world.group, durable=False)
        total = torch.ones(1)
        for _ in range(20):
            torch.distributed.all_reduce(total, group=world.group)
        gate.opened.set()
        for _ in range(20):
            torch.distributed.all_reduce(total.fill_(1), group=world.group)
        handle.wait(30)
    return total.item()


def test_collectives_of_the_training_are_not_met(pool: Pool, tmp_path: Path):
    assert good(pool.run(3, collectives_meanwhile, str(tmp_path / "step"))) == [3.0] * 3


def reuse(world: World, path: str) -> list[int]:
    addresses = []
    for i in range(3):
        state = {"w": torch.full((1000,), float(i)), "v": torch.full((10,), float(i))}
        handle = async_save_sharded(state, f"{path}{i}", group=world.group, durable=False)
        assert handle.staged_nbytes >= 0
        handle.wait(30)
        addresses.append(ROOM.take(0, gpu=False).address)
    return addresses


def test_buffers_are_used_again(pool: Pool, tmp_path: Path):
    for addresses in good(pool.run(1, reuse, str(tmp_path / "step"))):
        assert len(set(addresses)) == 1
    for i in range(3):
        with holdfast.open(tmp_path / f"step{i}") as ckpt:
            assert set(ckpt["w"].numpy().tolist()) == {float(i)}


def fail_later(world: World, path: str) -> None:
    """The disk is full on one rank, after everybody has gone on."""

    def refuse(self: Files, descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    state = {f"w{i}": torch.ones(20) for i in range(3)}
    with instead(Files, "pwrite", refuse if world.rank == 1 else Files.pwrite):
        handle = async_save_sharded(path, state, group=world.group)
        while not handle.done():
            time.sleep(0.01)
    assert not handle.durable
    assert "failed" in repr(handle)
    handle.wait()


def test_a_failure_in_the_background(pool: Pool, tmp_path: Path):
    raised = failures(pool.run(3, fail_later, str(tmp_path / "step")))
    assert {one.kinds[0] for one in raised} == {"RanksFailed"}
    assert len({one.text for one in raised}) == 1
    assert raised[0].facts["causes"].keys() == {1}
    assert "the disk is full" in raised[0].text
    assert list(tmp_path.iterdir()) == []


def fail_to_prepare(world: World, path: str, where: str) -> None:
    """One rank cannot prepare what it is to write, after all have planned."""

    def refuse(*args: object) -> object:
        raise OSError(28, "No space left on device")

    state = {f"w{i}": torch.ones(20) for i in range(3)}
    prepare = refuse if world.rank == 1 else saving.RankOutput
    plans_first = {"plan first": lambda table: False, "copy first": lambda table: True}[where]
    with instead(saving, "RankOutput", prepare), instead(saving, "little_in_common", plans_first):
        async_save_sharded(path, state, group=world.group).wait(30)


@pytest.mark.parametrize("where", ["plan first", "copy first"])
def test_a_failure_to_prepare_reaches_all_ranks(pool: Pool, tmp_path: Path, where: str):
    raised = failures(pool.run(3, fail_to_prepare, str(tmp_path / "step"), where))
    assert {one.kinds[0] for one in raised} == {"RanksFailed"}
    assert raised[0].facts["causes"].keys() == {1}
    assert "No space left on device" in raised[0].text
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def endings(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, dict[str, list[object]]]]:
    folder = tmp_path_factory.mktemp("endings")
    command = [sys.executable, "-m", "tests.ranks.endings", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=os.environ | QUIET, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("leave", 0),
        ("leave_without_a_group", 0),
        ("leave_before_the_other_has_heard", 0),
        ("leave_with_an_error", 1),
        ("be_asked_to_end", -signal.SIGTERM),
        ("be_asked_with_a_handler", 0),
    ],
)
def test_nothing_is_lost_at_the_end(endings, name: str, status: int):
    folder, said = endings
    assert [code for code, _ in said[name].values()] == [status] * len(said[name]), said[name]
    with holdfast.open(folder / name / "step") as ckpt:
        assert {name: ckpt[name].numpy().tobytes() for name in ckpt} == {
            name: element_bytes(tensor) for name, tensor in CONTENT.items()
        }
    assert not [p for p in (folder / name).iterdir() if p.name.endswith((".tmp", ".old"))]


def test_a_failure_that_nobody_saw_is_told_at_the_end(endings):
    folder, said = endings
    code, words = said["fail_unseen"]["0"]
    assert code == 120
    assert f"the save to {folder / 'fail_unseen' / 'step'} failed" in words
    assert "the disk is full" in words
    code, words = said["fail_seen"]["0"]
    assert (code, words) == (0, "seen\n")
    for name in ("fail_unseen", "fail_seen"):
        assert not (folder / name / "step").exists()


def wait_for_nobody(world: World, path: str) -> float:
    """One rank comes late. How long the others' call takes: those whose state is cut do not wait, those with replicas do."""
    rows = sharded(torch.ones(60, 50), world.mesh(), (Shard(0),))
    if world.rank == 1:
        time.sleep(1.5)
    began = time.monotonic()
    handle = async_save_sharded(
        path, {"rows": rows, "tied": rows, "step": 3}, group=world.group, durable=False
    )
    taken = time.monotonic() - began
    handle.wait(30)
    return taken


def test_the_caller_waits_for_no_other_rank(pool: Pool, tmp_path: Path):
    taken = good(pool.run(3, wait_for_nobody, str(tmp_path / "step")))
    assert max(taken) < 1.0
    with holdfast.open(tmp_path / "step") as ckpt:
        assert ckpt["tied"].numpy().min() == 1
        assert [alias.names for alias in ckpt.aliases] == [("rows", "tied")] * 3
        assert ckpt.tree["step"] == 3


def share_first(world: World, path: str) -> int:
    """Replicas: each rank copies its share alone."""
    from holdfast.torch.ranks import staging

    state = {f"w{i}": torch.full((1000,), float(i)) for i in range(4)}
    with instead(staging, "COMMON_NBYTES", 0):
        handle = async_save_sharded(path, state, group=world.group, durable=False)
    handle.wait(30)
    return handle.staged_nbytes


def test_replicas_are_shared_out_before_they_are_copied(pool: Pool, tmp_path: Path):
    assert good(pool.run(2, share_first, str(tmp_path / "step"))) == [8000 + 32, 8000 + 32]
    with holdfast.open(tmp_path / "step") as ckpt:
        assert [float(ckpt[f"w{i}"].numpy().max()) for i in range(4)] == [0, 1, 2, 3]


def test_a_value_that_cannot_be_pickled_is_said_at_once(tmp_path: Path):
    with pytest.raises(holdfast.errors.CannotHold, match=r"pickle|lambda"):
        async_save_sharded(tmp_path / "step", {"w": torch.ones(3), "f": lambda: 0}, format="dcp")
    assert list(tmp_path.iterdir()) == []
    async_save_sharded(
        tmp_path / "step", {"w": torch.ones(3)}, format="dcp", when_busy="refuse"
    ).wait(30)


def test_the_error_of_a_background_save_has_the_frames_of_the_caller_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: object, **more: object) -> None:
        raise holdfast.NotCommitted("the disk is full")

    monkeypatch.setattr(rank_folder, "write_file", refuse)
    handle = async_save_sharded({"w": torch.ones(3)}, tmp_path / "a")
    for _ in range(2):
        with pytest.raises(holdfast.NotCommitted, match="disk is full") as caught:
            handle.wait()
        assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)] == [
            "test_the_error_of_a_background_save_has_the_frames_of_the_caller_alone"
        ]


def test_the_program_may_go_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A path is that of the moment of the call."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    gate = threading.Event()
    planned = together.put_together

    def late(*arguments: object, **words: object) -> object:
        gate.wait(60)
        return planned(*arguments, **words)

    monkeypatch.setattr(saving, "put_together", late)
    handle = async_save_sharded({"w": torch.ones(2)}, "step")
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate.set()
    assert handle.wait().path == "step"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "step"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_saves_now_and_later_are_asked_for_alike():
    now, later = (inspect.signature(save).parameters for save in (save_sharded, async_save_sharded))
    assert [str(now[name]) for name in now] == [
        str(later[name]) for name in later if name != "max_host_memory"
    ]
    assert "max_host_memory" not in now


@pytest.fixture
def by_default():
    """SIGTERM has its default, as in a program that says nothing about it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("way", ["wait", "done", "close"])
def test_sigterm_has_its_default_again(
    by_default: None, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate()
    monkeypatch.setattr(rank_folder, "write_file", gate)
    state = {"w": torch.ones(2)}
    for number in (1, 2):
        gate.opened.clear()
        with holdfast.torch.Run(tmp_path / "run") as run:
            handle = (
                run.async_save(number, state)
                if way == "close"
                else async_save_sharded(tmp_path / f"{number}", state)
            )
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            gate.opened.set()
            if way == "wait":
                handle.wait(30)
            while way == "done" and not handle.done():
                time.sleep(0.01)
        if way != "done":  # a save may be done in the moment in which it was asked for
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert handle.durable
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_default_is_back_after_the_last_of_several_saves(
    by_default: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate()
    monkeypatch.setattr(rank_folder, "write_file", gate)
    first = async_save_sharded(tmp_path / "first", {"w": torch.ones(2)})
    threading.Timer(0.2, gate.opened.set).start()
    second = async_save_sharded(tmp_path / "second", {"w": torch.ones(2)})  # waits for its turn
    first.wait(30)
    second.wait(30)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_failed_save_gives_the_default_back(
    by_default: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*given: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_folder, "write_file", refuse)
    handle = async_save_sharded(tmp_path / "step", {"w": torch.ones(2)})
    with pytest.raises(OSError, match="No space"):
        handle.wait(30)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    "set_by_user", [signal.SIG_IGN, lambda number, frame: None], ids=["ignored", "handled"]
)
def test_a_handler_that_was_set_meanwhile_stays(
    by_default: None, set_by_user: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate()
    monkeypatch.setattr(rank_folder, "write_file", gate)
    handle = async_save_sharded(tmp_path / "step", {"w": torch.ones(2)})
    signal.signal(signal.SIGTERM, set_by_user)
    gate.opened.set()
    handle.wait(30)
    assert signal.getsignal(signal.SIGTERM) is set_by_user


def test_a_handler_on_top_may_call_ours_and_lives(
    by_default: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It waits for the save, and ends nobody: their handler decides, and stays in place."""
    gate = Gate()
    monkeypatch.setattr(rank_folder, "write_file", gate)
    handle = async_save_sharded(tmp_path / "step", {"w": torch.ones(2)})
    beneath, got = signal.getsignal(signal.SIGTERM), []

    def top(number: int, frame: object) -> None:
        gate.opened.set()
        beneath(number, frame)
        got.append(handle.durable)

    signal.signal(signal.SIGTERM, top)
    signal.raise_signal(signal.SIGTERM)
    assert got == [True]
    assert signal.getsignal(signal.SIGTERM) is top


def test_ours_is_not_put_back_by_a_block_of_stopping(
    by_default: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate()
    monkeypatch.setattr(rank_folder, "write_file", gate)
    with holdfast.torch.Run(tmp_path / "run") as run:
        handle = async_save_sharded(tmp_path / "step", {"w": torch.ones(2)})
        with run.stopping():
            gate.opened.set()
            handle.wait(30)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
