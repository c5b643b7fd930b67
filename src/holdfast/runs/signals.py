"""A signal that asks the program to end waits until the state is saved: `Run.stopping` and `Run.interrupted`.

    with run.stopping(grace="60s"):
        for step in range(first, last):
            train()
            if run.interrupted(step, state):     saved by now, if it was worth it
                break

1. The handler notes that the signal came, and when. It saves nothing: it may have come in the middle of an optimizer's step, and a
   state that is half of one step and half of the next is worse than an older one.
2. The loop asks where its state is consistent. A step is saved if the last one is older than a save takes, and if the grace time is
   enough for it.
3. At the end of the block whoever had the signal before has it again, and it is sent to them now: the program ends as it would
   have, with the same status, or another library's handler requeues the job.
4. A second signal is somebody who does not want to wait, and goes to them at once. A fork, such as a loader's worker, has nothing
   to save, and ends as if nothing had been installed.

Handlers are Python's, so this is for the main thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self
from weakref import WeakSet

from holdfast.core.quantities import shown, whole_number
from holdfast.core.runtime import at_fork
from holdfast.errors import BadArgument, SaveError

__all__ = ["SignalGuard", "read_signals"]

Before = Callable[[int, FrameType | None], object] | int | None


def read_signals(given: object) -> tuple[signal.Signals, ...]:
    """What `signals=` takes: one, or any number of them."""
    several = given if isinstance(given, Iterable) and not isinstance(given, str | bytes) else (given,)
    found = []
    for one in several:
        try:
            found.append(signal.Signals[one] if isinstance(one, str) else signal.Signals(whole_number(one, "signals=")))
        except (ValueError, KeyError):  # what is no number is a ValueError, too
            raise BadArgument(f"signals= takes signals, such as signal.SIGTERM, not {shown(one)}", found=one) from None
    return tuple(dict.fromkeys(found))


class SignalGuard:
    """Holds signals back for as long as the block lasts."""

    def __init__(self, signals: tuple[signal.Signals, ...], grace_s: float, *, last: Callable[[], None]) -> None:
        """`last` is called at the end of the block, before a signal that was held back is sent on."""
        self.grace_s = grace_s
        self.came_s: float | None = None
        """When the first one came, by `time.monotonic`."""
        self._signals = signals
        self._last = last
        self._number: int | None = None
        self._before: dict[int, Before] = {}
        self._process = os.getpid()

    @property
    def left_s(self) -> float:
        """What is left of the grace time."""
        return self.grace_s if self.came_s is None else self.came_s + self.grace_s - time.monotonic()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise SaveError("signals are handled by the main thread; use `stopping` there")
        for number in self._signals:
            before = signal.getsignal(number)
            if before is None:
                raise SaveError(f"{number.name} has a handler that is not Python's, which could not be given back; leave it out")
            self._before[number] = before
            signal.signal(number, self._note)
        _guards.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()
        if error is None:
            self._last()
            if self._number is not None:
                signal.raise_signal(self._number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid() or self.came_s is not None:
            self._give_back()
            signal.raise_signal(number)
            return
        self.came_s = time.monotonic()
        self._number = number

    def _give_back(self) -> None:
        """Restore the handlers, where nobody has put theirs over ours."""
        _guards.discard(self)
        before, self._before = self._before, {}
        for number, handler in before.items():
            # An interpreter that is not the main one has no signals.
            with suppress(ValueError):
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)


_guards: WeakSet[SignalGuard] = WeakSet()


def _in_child() -> None:
    for guard in list(_guards):
        guard._give_back()


at_fork(after_in_child=_in_child)
