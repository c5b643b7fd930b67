"""Programs that end while a save goes on in the background: `python -m tests.ranks.endings FOLDER`.

This process imports torch once; every ending is a fork of it, so that the program's end is a real one. What each left behind is for
`test_background.py` to judge.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed._shard.sharded_tensor import api as _api  # noqa: F401  (imported before the forks, like all that they use)

from holdfast.stores.files import Files
from holdfast.torch.ranks import group
from holdfast.torch.ranks.save_sharded import async_save_sharded, save_sharded
from holdfast.torch.tensors import to_lazy as _state  # noqa: F401

__all__ = ["CONTENT", "main"]

CONTENT = {f"w{i}": torch.arange(50.0) + i for i in range(4)}
SLOW = 0.2
"""Seconds that a write takes, so that the program ends before the save does."""


def _slowly() -> None:
    pwrite = Files.pwrite

    def slow(self: Files, descriptor: int, data: memoryview, offset: int) -> int:
        time.sleep(SLOW)
        return pwrite(self, descriptor, data, offset)

    Files.pwrite = slow  # type: ignore[method-assign]


def _join(folder: Path, rank: int, size: int, *, tcp: bool = False) -> None:
    timeout = timedelta(seconds=30)
    if not tcp:
        store: dist.Store = dist.FileStore(str(folder / "store"), size)
    elif rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        (folder / "port.part").write_text(str(store.port))
        (folder / "port.part").rename(folder / "port")
    else:
        while not (folder / "port").exists():
            time.sleep(0.01)
        store = dist.TCPStore(
            "127.0.0.1", int((folder / "port").read_text()), is_master=False, timeout=timeout
        )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _begin(folder: Path, rank: int) -> None:
    """Begin a save, and change everything at once."""
    _slowly()
    state = {name: tensor.clone() for name, tensor in CONTENT.items()}
    handle = async_save_sharded(folder / "step", state)
    assert not handle.durable
    for tensor in state.values():
        tensor.zero_()
    (folder / f"begun{rank}").touch()


def leave(folder: Path, rank: int) -> None:
    """The program just ends."""
    _join(folder, rank, 2)
    _begin(folder, rank)


def leave_without_a_group(folder: Path, rank: int) -> None:
    """It gives up the group, whose store it hosts, and ends."""
    _join(folder, rank, 2, tcp=True)
    _begin(folder, rank)
    dist.destroy_process_group()


def leave_before_the_other_has_heard(folder: Path, rank: int) -> None:
    """It hosts the store and ends as soon as it can; the other one takes its time to read that all is well."""
    _join(folder, rank, 2, tcp=True)
    if rank == 1:
        take = group._take

        def slow(store: dist.Store, key: str) -> bytes:
            time.sleep(1.5 if "/2/" in key else 0)
            return take(store, key)

        group._take = slow
    save_sharded(folder / "step", dict(CONTENT))


def leave_with_an_error(folder: Path, rank: int) -> None:
    _begin(folder, rank)
    raise RuntimeError("the training failed")


def be_asked_to_end(folder: Path, rank: int) -> None:
    """SIGTERM, while the program is busy with something else."""
    _join(folder, rank, 2, tcp=True)
    _begin(folder, rank)
    time.sleep(60)


def be_asked_with_a_handler(folder: Path, rank: int) -> None:
    """The program has a handler of its own, which decides."""
    signal.signal(signal.SIGTERM, lambda number, frame: (folder / "asked").touch())
    _begin(folder, rank)
    while not (folder / "asked").exists():
        time.sleep(0.01)


def fail_unseen(folder: Path, rank: int) -> None:
    """The save fails, and nobody looks."""

    def refuse(self: Files, descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    Files.pwrite = refuse  # type: ignore[method-assign]
    async_save_sharded(folder / "step", dict(CONTENT))


def fail_seen(folder: Path, rank: int) -> None:
    """The same, and somebody did."""

    def refuse(self: Files, descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    Files.pwrite = refuse  # type: ignore[method-assign]
    handle = async_save_sharded(folder / "step", dict(CONTENT))
    try:
        handle.wait()
    except OSError:
        print("seen")


ENDINGS: dict[Callable[[Path, int], None], tuple[int, bool]] = {
    leave: (2, False),
    leave_without_a_group: (2, False),
    leave_before_the_other_has_heard: (2, False),
    leave_with_an_error: (1, False),
    be_asked_to_end: (2, True),
    be_asked_with_a_handler: (1, True),
    fail_unseen: (1, False),
    fail_seen: (1, False),
}
"""How many ranks each has, and whether they get SIGTERM when they have begun."""


def main(where: str) -> dict[str, object]:
    """All endings at once; the exit status and the last words of every process."""
    pids: dict[int, tuple[str, int, Path]] = {}
    for ending, (size, _) in ENDINGS.items():
        folder = Path(where) / ending.__name__
        folder.mkdir()
        for rank in range(size):
            pid = os.fork()
            if not pid:
                words = os.open(folder / f"words{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(words, 1)
                os.dup2(words, 2)
                torch.set_num_threads(1)
                ending(folder, rank)
                sys.exit(0)
            pids[pid] = ending.__name__, rank, folder
    asked = {ending.__name__ for ending, (_, signalled) in ENDINGS.items() if signalled}
    found: dict[str, dict[str, object]] = {ending.__name__: {} for ending in ENDINGS}
    end = time.monotonic() + 40
    while pids:
        for pid, (name, rank, folder) in list(pids.items()):
            if name in asked and (folder / f"begun{rank}").exists():
                os.kill(pid, signal.SIGTERM)
                (folder / f"begun{rank}").unlink()
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.01)
            continue
        name, rank, folder = pids.pop(pid)
        found[name][str(rank)] = [
            os.waitstatus_to_exitcode(status),
            (folder / f"words{rank}").read_text(),
        ]
    return found


if __name__ == "__main__":
    said = main(sys.argv[1])
    print(json.dumps(said))
