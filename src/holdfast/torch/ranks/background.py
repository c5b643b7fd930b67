"""Saving while training goes on: `async_save_sharded`.

    caller            │ describe, copy what this rank has │ trains on …
    background thread │                                   │ plan together, write, fsync, publish together │
    handle                                         staged ┘                                       durable ┘

The tensors of this rank are copied (staging.py); after that the caller may change them. The thread runs the rest of the chain
(saving.py). One save at a time: the next one waits, or is refused, as its caller wants.

The end of the program waits for the save, and its exit status shows a failure that nobody has seen.

1. The thread of a save is no daemon, so Python waits for it after the last line, `sys.exit`, an exception or Ctrl-C. SIGTERM waits
   where the save was begun by the main thread and nobody else has a handler. The default handler is restored when the last save is
   over and the main thread calls `wait`, `done` or `durable`; before that, our handler does what the default does.
2. A failure that nobody has seen (`SaveHandle.wait`) is a warning, and the program ends with status 120, as Python does where its
   last flush of the standard streams fails. So at the end `sys.stderr` is replaced by an object whose last flush fails. All other
   handlers of `atexit` run, before and after ours. A process of `multiprocessing` has a finalizer for it instead.
3. A fork has none of its parent's threads. In it, a handle of a save that was not over raises at once, nothing is waited for, and
   SIGTERM ends it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from multiprocessing import process, util
from types import FrameType
from typing import Literal, TextIO, cast

from holdfast.core.runtime import at_fork, cut_traceback, make_fork_safe, start_thread
from holdfast.core.signals import SignalOverride
from holdfast.errors import HoldfastError, HoldfastWarning, NotCommitted, SaveError, drop_tracebacks
from holdfast.torch.ranks.saving import SavedShards

_one_at_a_time = make_fork_safe(threading.Lock())


class Course:
    """One save under way, to be brought to its end by one thread: it holds the turn, and what is open."""

    def __init__(self) -> None:
        self.open = ExitStack()
        """Closed at the end; the turn is given back last."""
        self._turn = False
        self._claimed = threading.Lock()
        self.open.callback(self._give_back)

    def take_turn(self, when_busy: Literal["wait", "refuse"], path: str) -> None:
        """Wait until no other save of this process is under way, or refuse."""
        if not _one_at_a_time.acquire(blocking=when_busy == "wait"):
            raise NotCommitted(
                "another save is still being written; wait for its handle, or pass when_busy='wait'",
                file=path,
            )
        self._turn = True

    def claim(self) -> bool:
        """True once: for the thread that is to bring this save to its end."""
        return self._claimed.acquire(blocking=False)

    def _give_back(self) -> None:
        if self._turn and _one_at_a_time.locked():  # not in a fork of the one who took it
            _one_at_a_time.release()


def begin(
    path: str, course: Course, rest: Callable[[], SavedShards], *, staged_nbytes: int
) -> SaveHandle:
    """Run the rest of a save on a thread of its own; on this one where none can start, or the program is at its end."""
    handle = SaveHandle(path, staged_nbytes)

    def run() -> None:
        if not course.claim():
            return
        time.sleep(HEAD_START_S)
        saved: SavedShards | None = None
        failed: BaseException | None = None
        try:
            saved = rest()
        except BaseException as error:
            failed = error
        try:
            course.open.close()
        except BaseException as error:
            failed = failed or error
        # Last: whoever waits may end the process, for whose store the others may still have use, or save again.
        if failed is None:
            handle._future.set_result(cast(SavedShards, saved))
            forget(handle)
            return
        _unseen.add(handle)
        handle._future.set_exception(failed)
        forget(handle)
        if _ending:
            _report()

    try:
        watch(handle)
        # No daemon: Python waits for it at the end of the program.
        if _ending or start_thread(run, name="holdfast-save", daemon=False) is None:
            run()
            interrupt = handle._future.exception()
            if interrupt is not None and not isinstance(interrupt, Exception):
                raise interrupt
    except BaseException:
        # Ctrl-C while it started: either the thread has it and goes on, or nobody ever will.
        if course.claim():
            forget(handle)
            course.open.close()
        raise
    return handle


HEAD_START_S = 0.001
"""How long the thread waits before it works: the caller gets the interpreter lock back at once, and not after some milliseconds."""

STATUS = 120
"""The exit status of a program whose background save failed unseen."""


class SaveHandle:
    """A save that goes on in the background."""

    def __init__(self, path: str, staged_nbytes: int = 0) -> None:
        self.path = path
        self.staged_nbytes = staged_nbytes
        """Bytes that were copied before the caller went on."""
        self._future: Future[SavedShards] = Future()
        self._process = os.getpid()

    @property
    def staged(self) -> bool:
        """Whether the caller may change its tensors: always, once it has this handle.

        Those on a GPU by work of the stream that was current, or of one that waits for it: it comes behind the copies.
        """
        return True

    @property
    def durable(self) -> bool:
        """Whether the checkpoint is complete at its path."""
        return self.done() and self._future.exception() is None

    def done(self) -> bool:
        """Whether it has come to its end, good or bad."""
        _sigterm.restore()
        return self._future.done()

    def wait(self, timeout: float | None = None) -> SavedShards:
        """Come back when the checkpoint is there; raises what went wrong, and `TimeoutError` when it takes longer.

        In a fork of the process that saves there is nothing to wait for: `SaveError`, unless the save was over before.
        """
        try:
            return self._future.result(timeout)
        except BaseException as error:
            # Not where it took too long, or Ctrl-C came: then nobody has seen how it ends.
            if self._future.done() and error is self._future.exception():
                _unseen.discard(self)
            if isinstance(error, HoldfastError):
                # The frames are those of the thread that saved.
                cut_traceback(error)
            raise
        finally:
            _sigterm.restore()

    def _abandon(self) -> None:
        """In a fork: the thread that would end the save is not here."""
        self._future = Future()
        message = f"this save belongs to process {self._process}, of which this one is a fork; wait for it there"
        self._future.set_exception(SaveError(message, file=self.path))

    def __repr__(self) -> str:
        how = "durable" if self.durable else "failed" if self.done() else "being written"
        return f"<SaveHandle {self.path!r} {how}>"


def failed_save(path: str, error: BaseException) -> SaveHandle:
    """Return the handle of a save that failed before it went to the background, and whose failure somebody has seen."""
    handle = SaveHandle(path)
    handle._future.set_exception(drop_tracebacks(error))
    return handle


_running: set[SaveHandle] = set()
_unseen: set[SaveHandle] = set()
"""Saves that failed, and whose failure nobody has seen."""
_ending = False
_with_finalizer: set[int] = set()
"""Processes of `multiprocessing` that wait at their end."""


def watch(handle: SaveHandle) -> None:
    """Have the end of the program wait for this save."""
    _running.add(handle)
    # SIGTERM waits for the save only where the default handler is in place, and only from the main thread.
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _sigterm):
        _sigterm.install(signal.SIGTERM)
    if process.parent_process() is not None and os.getpid() not in _with_finalizer:
        _with_finalizer.add(os.getpid())
        util.Finalize(None, _at_end_of_child, exitpriority=0)


def forget(handle: SaveHandle) -> None:
    """Wait no more for a save that is over, or did not begin."""
    _running.discard(handle)
    _sigterm.restore()


def _own() -> list[SaveHandle]:
    """Saves of this very process: a signal may come to a fork before it has dropped those of its parent."""
    return [handle for handle in list(_running) if handle._process == os.getpid()]


def _wait() -> None:
    for handle in _own():
        handle._future.exception()


def _failures() -> list[SaveHandle]:
    """Saves that failed unseen; also those that go on, where whoever ends the program did not wait."""
    return [*_unseen, *_own()]


def _warn() -> None:
    messages = []
    for handle in _failures():
        why = handle._future.exception() if handle.done() else "it was not waited for"
        messages.append(f"the save to {handle.path} failed: {why}")
    if messages:
        warnings.warn("\n".join(messages), HoldfastWarning, stacklevel=2)


def _flush(number: int, frame: FrameType | None) -> None:
    _wait()
    _warn()
    _sigterm.pass_on(number, frame)


_sigterm = SignalOverride(
    _flush, is_wanted=lambda: any(not handle._future.done() for handle in _own())
)


class Stderr:
    """`sys.stderr` as it was, but for the very last flush, by the interpreter: it fails where a save failed unseen."""

    closed = False

    def __init__(self, before: TextIO | None) -> None:
        self._before = before

    def __getattr__(self, name: str) -> object:
        return getattr(self._before, name)

    def write(self, text: str) -> int:
        return len(text) if self._before is None else self._before.write(text)

    def flush(self) -> None:
        if self._before is not None:
            self._before.flush()
        if sys.is_finalizing() and _failures():
            raise SaveError("a save in the background failed, and nobody looked")


@atexit.register
def _at_exit() -> None:
    global _ending
    _ending = True
    try:
        _wait()
    finally:
        _report()


def _report() -> None:
    """At the end of the program: have the exit status and a warning say what failed."""
    if _failures():
        if not isinstance(sys.stderr, Stderr):
            sys.stderr = cast(TextIO, Stderr(sys.stderr))
        _warn()


def _at_end_of_child() -> None:
    """As `_at_exit`, in a process of `multiprocessing`: it ends with the status of a `SystemExit` that is raised here."""
    _wait()
    if _failures():
        _warn()
        if sys.exc_info()[1] is None:
            _unseen.clear()  # told, and once is enough
            raise SystemExit(STATUS)


def _in_child() -> None:
    global _ending
    _ending = False
    for handle in _running:
        handle._abandon()
    _running.clear()
    _unseen.clear()


at_fork(after_in_child=_in_child)
