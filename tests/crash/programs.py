"""Small programs that end, each for real: `python -m tests.crash.exits FOLDER`, `python -m tests.crash.forks FOLDER`.

One process imports torch once, and every program is a fork of it that ends as programs do. Exit status and last words of all of
them are printed as JSON, for the tests to judge.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import holdfast
import holdfast.torch
from holdfast.stores.files import Files

__all__ = [
    "Program",
    "begin",
    "child",
    "content",
    "must_end",
    "outcomes",
    "refuse",
    "refuse_threads",
    "run",
    "same",
    "slowly",
    "status",
    "writing",
]

Program = Callable[[Path], None]

SLOW = 0.4
"""Seconds that creating a file takes, so that the program has ended, or forked, before a save shares out its work."""

PATIENCE = 100
"""Seconds after which a program hangs."""

TOGETHER = 4
"""Programs at a time: most of them sleep most of the time."""


def content(seed: int = 0) -> dict[str, torch.Tensor]:
    """Four tensors of 1 MB: enough for several threads."""
    return {f"w{i}": torch.full((1 << 18,), float(seed + i)) for i in range(4)}


def same(path: Path, seed: int = 0) -> bool:
    """Whether a whole checkpoint of `content(seed)` is there, and verifies."""
    with holdfast.open(path) as checkpoint:
        found = {name: checkpoint[name].numpy() for name in checkpoint}
    whole = [
        found.keys() == content().keys(),
        *((found[f"w{i}"] == seed + i).all() for i in range(len(found))),
    ]
    return all(whole) and holdfast.verify(path).ok


def slowly() -> None:
    """Let every file take its time to be made, in this process."""
    create, here = Files.create, os.getpid()

    def slow(self: Files, name: str, *, dir_fd: int, private: bool = False) -> int:
        time.sleep(SLOW if os.getpid() == here else 0)
        return create(self, name, dir_fd=dir_fd, private=private)

    Files.create = slow  # type: ignore[method-assign]


def begin(folder: Path, **more: object) -> object:
    """Begin a save that takes its time, and be done with it."""
    slowly()
    return holdfast.torch.async_save_sharded(folder / "step", content(), **more)


def writing(folder: Path) -> None:
    """Come back when a save to `step` has its temporary, locked, and is at work."""
    while not list(folder.glob(".step.*.tmp")):
        time.sleep(0.001)
    time.sleep(0.05)


def refuse() -> None:
    """Let no byte be written from now on."""

    def full(self: Files, descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    Files.pwrite = full  # type: ignore[method-assign]


def refuse_threads() -> None:
    """Let no thread start from now on, as under a limit or, since Python 3.12, when the program ends."""

    def none(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    for name in ("_start_new_thread", "_start_joinable_thread"):
        if hasattr(threading, name):
            setattr(threading, name, none)


def run(programs: Mapping[Program, tuple[int, ...]], where: str) -> None:
    """Run all of them. Those with signals get them one after the other when they have made the file `ready`."""
    _import_all(Path(where))
    gc.collect()
    gc.freeze()  # what is imported is not looked through again at the end of every program
    waiting = list(programs)
    running: dict[int, tuple[Program, list[int], float]] = {}
    found: dict[str, tuple[int, str]] = {}
    while waiting or running:
        while waiting and len(running) < TOGETHER:
            program = waiting.pop(0)
            running[_started(program, Path(where) / program.__name__)] = (
                program,
                list(programs[program]),
                time.monotonic(),
            )
        for pid, (program, signals, began) in running.items():
            if signals and (Path(where) / program.__name__ / "ready").exists():
                os.kill(pid, signals.pop(0))
                time.sleep(0.05)
            if time.monotonic() - began > PATIENCE:
                os.kill(pid, signal.SIGKILL)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.01)
            continue
        program = running.pop(pid)[0]
        found[program.__name__] = (
            os.waitstatus_to_exitcode(status),
            (Path(where) / program.__name__ / "words").read_text(),
        )
    print(json.dumps(found))


def _started(program: Program, folder: Path) -> int:
    folder.mkdir()
    pid = os.fork()
    if pid:
        return pid
    words = os.open(folder / "words", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(words, 1)
    os.dup2(words, 2)
    program(folder)
    sys.exit(0)


def _import_all(folder: Path) -> None:
    """Save a little in every way, so that the programs need not import what that needs; no thread is started for so little."""
    torch.set_num_threads(1)
    for format in ("native", "dcp", "safetensors"):
        holdfast.torch.save_sharded(
            folder / f"warm.{format}", {"w": torch.ones(3)}, format=format, durable=False
        )
        holdfast.torch.load_full(folder / f"warm.{format}")


def child(job: Callable[[], object]) -> int:
    """Fork. The child does its job, and ends with 0 where that gives True, with 1 where it does not, and 2 on an error."""
    pid = os.fork()
    if pid:
        return pid
    status = 2
    try:
        status = 0 if job() is True else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def status(pid: int, patience: float = 60) -> int | str:
    """How a child ended; one that does not is killed."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        ended, how = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(how)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "it hangs"


def must_end(pid: int, expected: int = 0) -> None:
    """A child of ours ends in time, and so."""
    found = status(pid)
    assert found == expected, f"the child ended with {found}, not {expected}"


def outcomes(module: str, folder: Path, *more: str) -> dict[str, tuple[int, str]]:
    """Run the programs of a module; how each ended."""
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", module, str(folder), *more]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=2.5 * PATIENCE,
        env=os.environ | quiet,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
