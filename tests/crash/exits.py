"""Programs that end while a save goes on: `python -m tests.crash.exits FOLDER`; `test_exits.py` judges."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGTERM

EARLY: list[Callable[[], object]] = []
atexit.register(
    lambda: [each() for each in EARLY]
)  # before Holdfast is imported: these run after its own

import torch  # noqa: E402

import holdfast  # noqa: E402
import holdfast.torch  # noqa: E402
from tests.crash.programs import begin, content, refuse, refuse_threads, run, slowly, writing  # noqa: E402


def last_line(folder: Path) -> None:
    begin(folder)


def last_line_dcp(folder: Path) -> None:
    begin(folder, format="dcp")


def last_line_safetensors(folder: Path) -> None:
    begin(folder, format="safetensors")


def exit_0(folder: Path) -> None:
    begin(folder)
    sys.exit(0)


def exit_3(folder: Path) -> None:
    begin(folder)
    sys.exit(3)


def exception(folder: Path) -> None:
    begin(folder)
    raise RuntimeError("the training failed")


def interrupted(folder: Path) -> None:
    begin(folder)
    (folder / "ready").touch()
    time.sleep(60)


def interrupted_twice(folder: Path) -> None:
    begin(folder)
    (folder / "ready").touch()
    time.sleep(60)


def asked_to_end(folder: Path) -> None:
    begin(folder)
    (folder / "ready").touch()
    time.sleep(60)


def asked_while_it_ends(folder: Path) -> None:
    begin(folder)
    (folder / "ready").touch()


def two_saves(folder: Path) -> None:
    slowly()
    holdfast.torch.async_save_sharded(folder / "first", content(7))
    holdfast.torch.async_save_sharded(folder / "step", content())


def no_thread_at_the_end(folder: Path) -> None:
    """As since Python 3.12."""
    threading._register_atexit(refuse_threads)  # type: ignore[attr-defined]
    begin(folder)


def no_thread_at_all(folder: Path) -> None:
    refuse_threads()
    handle = begin(folder)
    assert handle.durable


def _everything(folder: Path) -> None:
    time.sleep(0.3)  # the program has ended
    state = content()
    holdfast.save(state, folder / "step")
    holdfast.save(state, folder / "one.safetensors")
    holdfast.save(state, folder / "one.pt")
    holdfast.convert(folder / "one.pt", folder / "two.safetensors")
    with open(folder / "stream.pt", "wb") as file:
        holdfast.torch.save({"big": torch.ones(9 << 20)}, file)
    into = {name: torch.zeros(1 << 18, dtype=torch.float64) for name in state}
    holdfast.torch.load_into(into, folder / "one.pt")
    assert all(torch.equal(into[name], state[name].double()) for name in state)
    (folder / "all").touch()


def in_a_thread(folder: Path) -> None:
    threading.Thread(target=_everything, args=(folder,)).start()


def in_a_thread_without_others(folder: Path) -> None:
    """As since Python 3.12."""
    threading._register_atexit(refuse_threads)  # type: ignore[attr-defined]
    in_a_thread(folder)


def from_a_late_handler(folder: Path) -> None:
    """It begins when all have been waited for."""
    EARLY.append(lambda: begin(folder))


def fails(folder: Path) -> None:
    EARLY.append(lambda: (folder / "ran").touch())
    refuse()
    begin(folder)


def fails_and_exits(folder: Path) -> None:
    refuse()
    begin(folder)
    sys.exit(3)


def fails_and_raises(folder: Path) -> None:
    refuse()
    begin(folder)
    raise RuntimeError("the training failed")


def fails_before_the_end(folder: Path) -> None:
    """One that failed long ago; one that was waited for too briefly counts as unseen."""
    refuse()
    handle = begin(folder)
    with contextlib.suppress(TimeoutError):
        handle.wait(0.01)
    while not handle.done():
        time.sleep(0.01)


def fails_without_a_folder(folder: Path) -> None:
    """Somebody removes the folder that it writes to."""
    handle = begin(folder / "gone")
    writing(folder / "gone")
    next((folder / "gone").glob(".step.*.tmp")).rename(folder / "moved")
    assert not handle.done()


def fails_from_a_late_handler(folder: Path) -> None:
    refuse()
    EARLY.append(lambda: begin(folder))


def fails_without_stderr(folder: Path) -> None:
    refuse()
    begin(folder)
    sys.stderr = None  # type: ignore[assignment]


def fails_and_a_handler_looks(folder: Path) -> None:
    refuse()
    _look(begin(folder), atexit.register)


def fails_and_a_late_handler_looks(folder: Path) -> None:
    refuse()
    _look(begin(folder), EARLY.append)


def _look(handle: object, register: Callable[[Callable[[], object]], object]) -> None:
    def look() -> None:
        try:
            handle.wait()  # type: ignore[attr-defined]
        except OSError:
            print("seen", flush=True)

    register(look)


def a_handler_waits(folder: Path) -> None:
    handle = begin(folder)
    atexit.register(handle.wait)


def _in_process(folder: Path, job: Callable[[Path], None]) -> None:
    process = multiprocessing.get_context("fork").Process(target=job, args=(folder,))
    process.start()
    process.join(30)
    print("process ended with", process.exitcode, flush=True)


def process_saves(folder: Path) -> None:
    _in_process(folder, last_line)


def process_fails(folder: Path) -> None:
    _in_process(folder, fails)


def process_fails_and_raises(folder: Path) -> None:
    _in_process(folder, fails_and_raises)


def spawned_saves(folder: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=last_line, args=(folder,))
    process.start()
    process.join(40)
    print("process ended with", process.exitcode, flush=True)


def spawned_fails(folder: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=fails, args=(folder,))
    process.start()
    process.join(40)
    print("process ended with", process.exitcode, flush=True)


SAVES = {
    last_line: 0,
    exit_3: 3,
    exception: 1,
    interrupted_twice: -SIGINT,
    asked_to_end: -SIGTERM,
    no_thread_at_the_end: 0,
    no_thread_at_all: 0,
    in_a_thread: 0,
    in_a_thread_without_others: 0,
    from_a_late_handler: 0,
}
"""Programs after which the checkpoint is there, with their exit status."""

MORE_SAVES = {
    last_line_dcp: 0,
    last_line_safetensors: 0,
    exit_0: 0,
    interrupted: -SIGINT,
    asked_while_it_ends: -SIGTERM,
    two_saves: 0,
    a_handler_waits: 0,
    process_saves: 0,
    spawned_saves: 0,
}

FAILS = {fails: 120, fails_and_a_late_handler_looks: 0, process_fails: 0}
"""Programs whose save fails, with their exit status."""

MORE_FAILS = {
    fails_and_exits: 120,
    fails_and_raises: 120,
    fails_before_the_end: 120,
    fails_without_a_folder: 120,
    fails_from_a_late_handler: 120,
    fails_and_a_handler_looks: 0,
    process_fails_and_raises: 0,
    spawned_fails: 0,
    fails_without_stderr: 120,
}

SIGNALS = {
    interrupted: (SIGINT,),
    interrupted_twice: (SIGINT, SIGINT),
    asked_to_end: (SIGTERM,),
    asked_while_it_ends: (SIGTERM,),
}

if __name__ == "__main__":
    chosen = [*SAVES, *FAILS, *([*MORE_SAVES, *MORE_FAILS] if sys.argv[2:] else [])]
    run({program: SIGNALS.get(program, ()) for program in chosen}, sys.argv[1])
