"""Saving while training goes on: `async_save_sharded`.

    caller            │ describe, copy what this rank has │ trains on …
    background thread │                                   │ plan together, write, fsync, publish together │
    handle                                         staged ┘                                       durable ┘

1. What this rank has is copied (staging.py); after that the caller may change its tensors. It waits for no other rank. Only where
   much is replicated, and would be copied by all, the plan comes first, and each copies its share. The thread runs what is left of
   the chain (saving.py).
2. The thread talks to the other ranks through the store, never through a collective, so it cannot meet the training's.
3. One save at a time: the next one waits, or is refused, as asked. SIGTERM and the end of the program wait for the save that is
   under way (handles.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal

from holdfast.core.runtime import renewed
from holdfast.engine.threads import start
from holdfast.errors import NotCommitted
from holdfast.torch.ranks.handles import SaveHandle, ending, fail, forget, succeed, watch
from holdfast.torch.ranks.saving import SavedShards

__all__ = ["Course", "begin"]

_one_at_a_time = renewed(threading.Lock())


class Course:
    """One save on its way, to be brought to its end by one thread: it holds the turn, and what is open."""

    def __init__(self) -> None:
        self.open = ExitStack()
        """What is closed at the end, last what was opened first; the turn comes last of all."""
        self._turn = False
        self._claimed = threading.Lock()
        self.open.callback(self._give_back)

    def take_turn(self, when_busy: Literal["wait", "refuse"], path: str) -> None:
        """Wait until no other save of this process is under way, or refuse."""
        if not _one_at_a_time.acquire(blocking=when_busy == "wait"):
            raise NotCommitted("another save is still being written; wait for its handle, or pass when_busy='wait'", file=path)
        self._turn = True

    def claim(self) -> bool:
        """True once: for the thread that is to bring this save to its end."""
        return self._claimed.acquire(blocking=False)

    def close(self) -> None:
        """The end: give up what was not published, and the turn."""
        self.open.close()

    def _give_back(self) -> None:
        if self._turn and _one_at_a_time.locked():  # not in a fork of the one who took it
            _one_at_a_time.release()


def begin(path: str, course: Course, rest: Callable[[], SavedShards], *, staged_nbytes: int) -> SaveHandle:
    """Run the rest of a save on a thread of its own; on this one where none can start, or the program is at its end."""
    handle = SaveHandle(path, staged_nbytes)

    def run() -> None:
        if not course.claim():
            return
        saved: SavedShards | None = None
        failed: BaseException | None = None
        try:
            saved = rest()
        except BaseException as error:
            failed = error
        try:
            course.close()
        except BaseException as error:
            failed = failed or error
        # Last: whoever waits may end the process, for whose store the others may still have use, or save again.
        if saved is not None and failed is None:
            succeed(handle, saved)
        else:
            assert failed is not None
            fail(handle, failed)

    try:
        watch(handle)
        # No daemon: Python waits for it at the end of the program.
        if ending() or start(run, name="holdfast-save", daemon=False) is None:
            run()
            interrupt = handle._future.exception()
            if interrupt is not None and not isinstance(interrupt, Exception):
                raise interrupt
    except BaseException:
        # Ctrl-C while it started: either the thread has it and goes on, or nobody ever will.
        if course.claim():
            forget(handle)
            course.close()
        raise
    return handle
