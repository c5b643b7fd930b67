"""Programs that use an object store and end: `python tests/remote/exits.py KIND URL FOLDER`; `test_exits.py` judges.

Nothing of the tests is imported, and no torch: any Python that has the light package and obstore runs them.
"""

from __future__ import annotations

import asyncio.selector_events
import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGTERM, default_int_handler, signal

EARLY: list[Callable[[], object]] = []
atexit.register(
    lambda: [each() for each in EARLY]
)  # before Holdfast is imported: these run after its own

import numpy as np  # noqa: E402

import holdfast  # noqa: E402

STATE = {"w": np.arange(1 << 12, dtype=np.float32).reshape(64, 64)}
BIG = {"w": np.zeros((40, 1 << 20), np.uint8)}


def read(url: str) -> None:
    with holdfast.open(url) as checkpoint:
        assert (checkpoint["w"][3:9].numpy() == STATE["w"][3:9]).all()


def ready(folder: Path) -> None:
    (folder / "ready").touch()


def opens(url: str, folder: Path) -> None:
    assert holdfast.open(url)["w"].numpy().sum() == STATE["w"].sum()


def saves(url: str, folder: Path) -> None:
    holdfast.save(STATE, f"{url}-{folder.name}")


def runs(url: str, folder: Path) -> None:
    with holdfast.Run(f"{url}-{folder.name}") as run:
        run.save(1, STATE)
        run.save(2, STATE)


def copies(url: str, folder: Path) -> None:
    from holdfast.cli.main import main

    sys.exit(main(["cp", url, str(folder / "copy")]))


def raises(url: str, folder: Path) -> None:
    read(url)
    raise RuntimeError("the program failed")


def exits(url: str, folder: Path) -> None:
    read(url)
    sys.exit(3)


def thread(url: str, folder: Path) -> None:
    """One that is waited for; since Python 3.12 it can start no other by then, and this is its first request."""

    def work() -> None:
        time.sleep(0.1)
        for _ in range(5):
            read(url)
        holdfast.save(STATE, f"{url}-{folder.name}")

    threading.Thread(target=work).start()


def daemons(url: str, folder: Path) -> None:
    """Threads that nobody waits for, in the middle of requests and of an upload."""

    def reads() -> None:
        while True:
            read(url)

    def uploads() -> None:
        while True:
            holdfast.save(BIG, f"{url}-{folder.name}", overwrite=True)

    read(url)
    for work in (reads, reads, uploads):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)


def late(url: str, folder: Path) -> None:
    """A handler that runs when all is over."""
    read(url)
    EARLY.append(lambda: (read(url), holdfast.save(BIG, f"{url}-{folder.name}"), ready(folder)))


def slow(url: str, folder: Path) -> None:
    """The thread that answers takes its time in the interpreter, and so does the interpreter's end."""
    write = asyncio.selector_events.BaseSelectorEventLoop._write_to_self  # type: ignore[attr-defined]

    def slowly(loop: object) -> None:
        write(loop)
        time.sleep(0.1)

    class End:
        def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
            sleep(0.5)

    asyncio.selector_events.BaseSelectorEventLoop._write_to_self = slowly  # type: ignore[attr-defined]
    sys.end = End()  # type: ignore[attr-defined]
    read(url)


def interrupted(url: str, folder: Path) -> None:
    ready(folder)
    while True:
        read(url)


def asked_to_end(url: str, folder: Path) -> None:
    ready(folder)
    while True:
        read(url)


def forks(url: str, folder: Path) -> None:
    """A child that ends as programs do, while its parent has requests under way."""
    read(url)
    child = os.fork()
    if child == 0:
        sys.exit(7)
    read(url)
    _, status = os.waitpid(child, 0)
    read(url)
    sys.exit(os.waitstatus_to_exitcode(status))


def silent(url: str, folder: Path) -> None:
    """A server that has the requests, and says nothing; the folder has where it is."""
    os.environ["AWS_ENDPOINT_URL"] = (folder / "silent").read_text()
    for work in (lambda: holdfast.open(url), lambda: holdfast.save(BIG, f"{url}.safetensors")):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.3)


KINDS = {opens: 0, saves: 0, runs: 0, copies: 0, raises: 1, exits: 3, thread: 0, daemons: 0}
"""Programs, and the status with which each ends."""

MORE = {late: 0, slow: 0, interrupted: -SIGINT, asked_to_end: -SIGTERM, forks: 7, silent: 0}
"""The same, of rarer ends."""

SIGNALS = {interrupted: SIGINT, asked_to_end: SIGTERM}

if __name__ == "__main__":
    signal(
        SIGINT, default_int_handler
    )  # a shell starts what runs in its background with SIGINT ignored
    {kind.__name__: kind for kind in (*KINDS, *MORE)}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
