"""Programs that fork while a save goes on: `python -m tests.crash.forks FOLDER`; `test_forks.py` judges."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import holdfast
import holdfast.torch
from holdfast.engine.commit.transactions import DirectoryTransaction, FileTransaction
from holdfast.errors import SaveError
from tests.crash.programs import begin, child, content, must_end, run, same, slowly, status, writing
from tests.sampling import random_for


def _sleep() -> None:
    time.sleep(60)


def _end(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def overwrite_while_a_child_lives(folder: Path) -> None:
    """What a worker of a data loader does to the saves that follow."""
    handle = begin(folder)
    writing(folder)
    lives = child(_sleep)
    handle.wait()
    for seed in (1, 2):
        holdfast.torch.save_sharded(folder / "step", content(seed), overwrite=True)
    assert same(folder / "step", 2)
    _end(lives)


def killed_while_a_child_lives(folder: Path) -> None:
    """What the dead parent left is cleaned by the next save, although its child is alive."""
    ours, theirs = os.pipe()

    def parent() -> None:
        begin(folder)
        writing(folder)
        lives = child(_sleep)
        os.write(theirs, f"{lives}\n".encode())
        _sleep()

    dead = child(parent)
    lives = int(os.read(ours, 100))
    _end(dead)
    assert list(folder.glob(".step.*.tmp"))
    holdfast.torch.save_sharded(folder / "step", content(), overwrite=True)
    assert same(folder / "step")
    assert not list(folder.glob(".step.*"))
    os.kill(lives, signal.SIGKILL)


def a_child_is_asked_to_end(folder: Path) -> None:
    handle = begin(folder)
    writing(folder)
    lives = child(_sleep)
    time.sleep(0.05)
    os.kill(lives, signal.SIGTERM)
    must_end(lives, -signal.SIGTERM)
    assert not handle.done()
    handle.wait()


def a_child_ends(folder: Path) -> None:
    handle = begin(folder)
    writing(folder)
    pid = os.fork()
    if not pid:
        sys.exit(7)
    must_end(pid, 7)
    handle.wait()
    assert same(folder / "step")


def a_child_looks(folder: Path) -> None:
    """Handles of its parent's: one that was over tells how, the other that it is elsewhere."""
    over = holdfast.torch.async_save_sharded(folder / "over", content())
    over.wait()
    handle = begin(folder)
    writing(folder)

    def look() -> bool:
        assert over.wait().path == str(folder / "over")
        assert not handle.durable
        try:
            handle.wait()
        except SaveError as error:
            return str(os.getppid()) in str(error) and "fork" in str(error)
        return False

    must_end(child(look))
    handle.wait()


def a_child_saves(folder: Path) -> None:
    """In every way, while its parent does; and its own children."""
    handle = begin(folder)
    writing(folder)

    def save(where: Path) -> bool:
        where.mkdir()
        holdfast.save(content(1), where / "a.pt")
        holdfast.torch.save_sharded(where / "b", content(2))
        own = holdfast.torch.async_save_sharded(where / "c", content(3))
        below = child(lambda: save(where / "below")) if where.name == "child" else None
        own.wait()
        if below is not None:
            must_end(below)
        return same(where / "a.pt", 1) and same(where / "b", 2) and same(where / "c", 3)

    must_end(child(lambda: save(folder / "child")))
    handle.wait()
    assert same(folder / "step")


def a_child_fails(folder: Path) -> None:
    """What it does in the background counts at its end, what its parent does does not."""
    handle = begin(folder / "gone")
    writing(folder / "gone")
    next((folder / "gone").glob(".step.*.tmp")).rename(folder / "moved")
    pid = os.fork()
    if not pid:
        sys.exit(0)
    must_end(pid)
    try:
        handle.wait()
    except OSError:
        return
    raise AssertionError("it was to fail")


def a_child_leaves_the_block(folder: Path) -> None:
    """Forked inside a transaction, it unwinds through its end, and must undo nothing."""
    (folder / "old").mkdir()
    with (
        FileTransaction(folder / "file") as one,
        DirectoryTransaction(folder / "old", overwrite=True) as other,
    ):
        one.file.allocate(3)
        made = other.create("part")
        pid = os.fork()
        if pid:
            must_end(pid, 5)
            one.file.write(0, b"new")
            made.allocate(1)
            made.write(0, b"x")
            one.commit()
            other.commit()
        else:
            # Numbers of descriptors that were the transaction's are now somebody else's.
            others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
            try:
                one.file.write(0, b"bad")
            except SaveError:
                pass
            else:
                sys.exit(6)
    if not pid:
        for each in others:
            os.fstat(each)
        os._exit(5)
    assert (folder / "file").read_bytes() == b"new"
    assert (folder / "old" / "part").read_bytes() == b"x"
    assert sorted(p.name for p in folder.iterdir()) == ["file", "old", "words"]


def a_child_reads(folder: Path) -> None:
    """What is open can be read on both sides, also where it is forked in the midst of it."""
    for name in ("a.pt", "b.safetensors", "c"):
        holdfast.save(content(), folder / name)
    holdfast.torch.save_sharded(folder / "d", content(), format="dcp")
    opened = [holdfast.open(folder / name) for name in ("a.pt", "b.safetensors", "c", "d")]
    stop = threading.Event()

    def read() -> bool:
        for checkpoint in opened:
            for i in range(4):
                assert checkpoint[f"w{i}"][5:5000].numpy().min() == i
        return True

    def keep_reading() -> None:
        while not stop.is_set():
            read()

    threads = [threading.Thread(target=keep_reading) for _ in range(2)]
    for thread in threads:
        thread.start()
    children = [child(read) for _ in range(10)]
    assert [status(pid) for pid in children] == [0] * 10
    stop.set()
    for thread in threads:
        thread.join()


def _two(_: int) -> int:
    return 2


def workers_of_a_data_loader(folder: Path) -> None:
    """Two of them, forked during a save, that stay."""
    handle = begin(folder)
    writing(folder)
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2, persistent_workers=True)
    assert sorted(int(batch) for batch in loader) == list(range(8))
    handle.wait()
    holdfast.torch.async_save_sharded(folder / "step", content(4), overwrite=True).wait()
    assert sorted(int(batch) for batch in loader) == list(range(8))
    assert same(folder / "step", 4)


def pools(folder: Path) -> None:
    """Processes of `multiprocessing`, made in every way during a save."""
    handle = begin(folder)
    writing(folder)
    for method in ("fork", "forkserver", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(_two, range(4)) == [2] * 4
            handle.wait()
            holdfast.torch.save_sharded(folder / "step", content(5), overwrite=True)
    assert same(folder / "step", 5)


def a_fork_of_a_rank(folder: Path) -> None:
    """It is nobody in the group of its parent: said in a sentence, at once. Alone, it is a group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    must_end(
        child(
            lambda: (
                holdfast.torch.save_sharded(folder / "alone", content()).path
                == str(folder / "alone")
            )
        )
    )

    def refused() -> bool:
        dist.get_world_size = lambda group=None: 2  # as if there were another rank
        try:
            holdfast.torch.save_sharded(folder / "step", content())
        except ValueError as error:
            return "fork" in str(error)
        return False

    must_end(child(refused))
    dist.destroy_process_group()


def random_moments(folder: Path) -> None:
    """Forks at any moment of a save, whose children save, end, or are asked to."""
    moments = random_for("forks during a save")

    def save(where: Path) -> Callable[[], bool]:
        def job() -> bool:
            holdfast.torch.async_save_sharded(where, content(1), durable=False).wait()
            return same(where, 1)

        return job

    for number in range(60):
        handle = holdfast.torch.async_save_sharded(
            folder / "step", content(number), overwrite=True, durable=False
        )
        time.sleep(moments.random() * 0.015)
        saves, sleeps = child(save(folder / f"child{number % 3}-{number}")), child(_sleep)
        handle.wait()
        os.kill(sleeps, signal.SIGTERM)
        must_end(saves)
        must_end(sleeps, -signal.SIGTERM)
        assert same(folder / "step", number)


def random_signals(folder: Path) -> None:
    """SIGTERM and Ctrl-C at any moment: what was begun in the background is there."""
    moments = random_for("signals during a save")
    slowly()
    for number in range(40):
        where = folder / f"step{number}"
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            holdfast.torch.async_save_sharded(where, content(number), durable=False)
            os.write(theirs, b"begun")
            if number % 3:
                time.sleep(60)
            sys.exit(0)
        os.read(ours, 5)
        time.sleep(moments.random() * 0.6)
        asked = signal.SIGTERM if number % 2 else signal.SIGINT
        os.kill(pid, asked)
        assert status(pid) in ((-asked,) if number % 3 else (0, -asked)), number
        assert same(where, number)


PROGRAMS = [
    overwrite_while_a_child_lives,
    killed_while_a_child_lives,
    a_child_is_asked_to_end,
    a_child_ends,
    a_child_looks,
    a_child_saves,
    a_child_leaves_the_block,
    a_child_reads,
    a_fork_of_a_rank,
    workers_of_a_data_loader,
]
MORE = [a_child_fails, pools, random_moments, random_signals]

if __name__ == "__main__":
    run(dict.fromkeys([*PROGRAMS, *(MORE if sys.argv[2:] else [])], ()), sys.argv[1])
