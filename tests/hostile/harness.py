"""Open a hostile input and look at everything in it, under watch.

1. An audit hook, which stays silent unless `watching`, notes every event by which Python imports, compiles, executes,
   writes, connects or starts something, and stops it.
2. Warnings are errors: a warning is printed by default, and the library never prints.
3. `survey` does what a person would do with an open checkpoint: lists it, walks its tree, reads its tensors.

Costs are bounded by lines in the input's size; each number says where it comes from.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import holdfast
from holdfast import errors
from holdfast.core.tensor import Composite
from holdfast.formats import FORMATS, load_function

from .case import Case

__all__ = [
    "MEMORY_FLOOR",
    "MEMORY_PER_BYTE",
    "SECONDS_FLOOR",
    "SECONDS_PER_BYTE",
    "Outcome",
    "run",
    "survey",
    "warm_up",
]

MEMORY_PER_BYTE = 320
"""One opcode of one byte (EMPTY_SET) makes an object of 216 bytes and a slot on the stack; five bytes (two references
and REDUCE) make a `LazyTensor` of 1.4 kB, with its name. Anything above that is not linear in the input."""

MEMORY_FLOOR = 16 << 20
"""Fixed: an expanded view of up to 1 MiB is read without asking (`Limits.expansion_floor_nbytes`), packed elements pass
through 64-bit positions on their way, and the zip reader checks in batches of 4 MiB."""

SECONDS_PER_BYTE = 20e-6
"""About 0.1 to 1 µs an opcode is usual; a colliding dict key may cost more."""

SECONDS_FLOOR = 2.5
"""Fixed: `spending.PROBES` allows under two seconds of collisions however small the input."""

DEADLINE = 60
"""Seconds of processor time after which a case is broken off as endless; ten times that on the clock, for one that waits."""

MAX_LISTED = 20_000
"""In a checkpoint with more tensors than this, most are listed by name only: making them is what takes the time."""

MAX_READS = 64
"""Tensors of one case that are read; the rest is listed only."""

FORBIDDEN = (
    "import", "exec", "compile", "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
    "os.startfile", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown",
    "os.truncate", "os.putenv", "os.kill", "pty.", "ctypes.", "shutil.", "tempfile.", "webbrowser.", "urllib.", "ftplib.",
    "http.", "smtplib.", "pickle.", "marshal.", "code.", "cpython.run", "builtins.input", "sys.addaudithook", "sqlite3.",
)  # fmt: skip

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Executed(BaseException):
    """Something happened that opening a file must never cause. No `except Exception` swallows it."""


class Watch:
    """The hook's state: one for the process, since a hook cannot be taken out."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        self.installed = False
        self.allowed: tuple[str, ...] = ()
        """Beginnings of events that are our own doing in what is watched."""

    def hook(self, event: str, args: tuple[object, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            _, mode, flags = (*args, None, None, None)[:3]
            writes = (isinstance(flags, int) and flags & WRITING) or (
                isinstance(mode, str) and set(mode) & set("wax+")
            )
            if not writes:
                return
        elif not event.startswith(FORBIDDEN) or (self.allowed and event.startswith(self.allowed)):
            return
        self.seen.append(f"{event} {str(args[:2])[:200]}")
        raise Executed(self.seen[-1])

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self.installed:
            sys.addaudithook(self.hook)
            self.installed = True
        self.seen.clear()
        self.on = True
        try:
            yield
        finally:
            self.on = False
        assert not self.seen, self.seen


WATCH = Watch()


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Break off what takes far too long, where this is the main thread, so that an endless case fails by itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(*_: object) -> None:
        raise Executed(f"not done after {seconds} seconds")

    timers = {
        signal.ITIMER_PROF: (seconds, signal.signal(signal.SIGPROF, expired)),
        signal.ITIMER_REAL: (10 * seconds, signal.signal(signal.SIGALRM, expired)),
    }
    for timer, (after, _) in timers.items():
        signal.setitimer(timer, after)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        signal.signal(signal.SIGPROF, timers[signal.ITIMER_PROF][1])
        signal.signal(signal.SIGALRM, timers[signal.ITIMER_REAL][1])


class Outcome:
    """What came out of one case."""

    def __init__(self) -> None:
        self.error: errors.HoldfastError | None = None
        self.checked: object = True
        self.seconds = 0.0
        self.peak = 0
        self.nbytes = 0


def survey(ckpt: holdfast.Checkpoint) -> None:
    """List, describe and read everything in a checkpoint, as the CLI would. Raises only what Holdfast raises."""
    for i, name in enumerate(ckpt):
        if i < MAX_READS:
            repr(ckpt[name])
            read(ckpt[name])
    if len(ckpt) > MAX_LISTED:
        return
    for value in nodes(ckpt.tree):
        if isinstance(value, holdfast.Opaque | holdfast.LazyTensor | Composite):
            repr(value)
        if isinstance(value, holdfast.Opaque):
            str((value.module, value.name))
    for alias in ckpt.aliases[:MAX_READS]:
        str(alias.names)
    str((ckpt.nbytes, len(ckpt.foreign), ckpt.notes[:MAX_READS], ckpt.metadata, repr(ckpt)))


def read(tensor: holdfast.LazyTensor) -> np.ndarray | None:
    """The elements; None for an expansion that is not read without asking, or a tensor without data."""
    try:
        return tensor.numpy()
    except (errors.LimitExceeded, errors.Unsupported):
        return None


def nodes(tree: object) -> Iterator[object]:
    """Every value in a tree once, without recursion."""
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        match value:
            case dict():
                waiting += [*value, *value.values()]
            case list() | tuple() | set() | frozenset():
                waiting += value
            case holdfast.Opaque():
                waiting += [
                    value.what,
                    value.args,
                    value.kwargs,
                    value.state,
                    value.items,
                    value.entries,
                ]
            case Composite():
                waiting += [value.parts, value.attributes]


def run(case: Case, folder: Path, *, memory: bool = False) -> Outcome:
    """Make the input of a case, open and survey it. Raises what is no Holdfast error."""
    source = case.make(folder)
    outcome = Outcome()
    outcome.nbytes = (
        len(source)
        if isinstance(source, bytes)
        else sum(p.stat().st_size for p in plain_files(source))
    )
    with deadline(DEADLINE), warnings.catch_warnings():
        warnings.simplefilter("error")
        if memory:
            tracemalloc.start()
        before = time.process_time()
        try:
            with WATCH.watching():
                _open(case, source, outcome)
            outcome.seconds = time.process_time() - before
            outcome.peak = tracemalloc.get_traced_memory()[1] if memory else 0
        finally:
            if memory:
                tracemalloc.stop()
    return outcome


def _open(case: Case, source: bytes | Path, outcome: Outcome) -> None:
    try:
        with holdfast.open(source) as ckpt:
            survey(ckpt)
            outcome.checked = case.check is None or case.check(ckpt)
    except errors.HoldfastError as error:
        # Not the error itself: its traceback keeps everything alive that was built.
        outcome.error = type(error)(
            error.message, file=error.file, tensor=error.tensor, offset=error.offset
        )
        str(error), repr(error)


def plain_files(path: Path) -> list[Path]:
    """The files of an input; none where its path is itself a lie."""
    try:
        return [p for p in (path, *path.rglob("*")) if p.is_file() and not p.is_symlink()]
    except (OSError, ValueError):
        return []


def warm_up(makers: list[Callable[[], bytes | Path]]) -> None:
    """Import everything that opening may need before the watch, so that the watch sees only what a file causes.

    Honest files and a broken one are opened, for what Python and numpy import on first use. They do
    not reach every format: detection asks only the formats that may be it, and stops at the first.
    """
    for format in FORMATS:
        for function in (format.known_by, format.read_by):
            if function:
                load_function(function)
    for make in makers:
        with holdfast.open(make()) as ckpt:
            survey(ckpt)
    try:
        holdfast.open(b"\x80")
    except errors.HoldfastError as error:
        str(error)
