"""`SignalOverride`: a handler of signals that is put over another one, and leaves what it found.

1. Only the main thread gives it back, as Python asks for. Until then it is transparent: a signal goes to what was there before.
2. A handler that somebody has put over it stays, and ours beneath is transparent, also where somebody puts ours back later.
3. In a fork it is given back at once. A signal that comes during the fork waits until then: Python would forget it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from weakref import WeakSet

from holdfast.core.runtime import at_fork

Before = Callable[[int, FrameType | None], object] | int


class SignalOverride:
    """A handler for as long as it is `wanted`. It calls `catch`, which may `pass_on` the signal."""

    def __init__(
        self, catch: Callable[[int, FrameType | None], None], *, wanted: Callable[[], bool]
    ) -> None:
        self._catch = catch
        self._wanted = wanted
        self._before: dict[int, Before] = {}
        self._process = os.getpid()

    @property
    def wanted(self) -> bool:
        return self._process == os.getpid() and self._wanted()

    def install(self, number: int) -> None:
        """Put it in place, on the main thread. What is there has to be Python's: nothing else could be given back."""
        before = signal.getsignal(number)
        assert before is not None, "the caller has looked"
        self._process = os.getpid()
        if before is not self:
            self._before[number] = before
            signal.signal(number, self)
            _overrides.add(self)

    def restore(self) -> None:
        """Restore what was there, where that is due, possible, and nobody has put theirs over ours."""
        if self.wanted or threading.current_thread() is not threading.main_thread():
            return
        for number in self._before:
            before = self._found(number)
            if signal.getsignal(number) is self:
                with suppress(ValueError):  # an interpreter that is not the main one has no signals
                    signal.signal(number, before)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Hand the signal to what was there before. A default is for whoever is on top, and is left to them if that is not ours."""
        before = self._found(number)
        if signal.getsignal(number) is self:
            signal.signal(number, before)
            signal.raise_signal(number)
        elif callable(before):
            before(number, frame)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            self._catch(number, frame)
        else:
            self.pass_on(number, frame)

    def _found(self, number: int) -> Before:
        """What was there before, without those of ours that are over."""
        before = self._before[number]
        while isinstance(before, SignalOverride) and not before.wanted:
            before = before._before[number]
        return before


_overrides: WeakSet[SignalOverride] = WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    _forking.mask = None
    if sys.platform != "win32":
        ours = {
            number
            for override in list(_overrides)
            for number in override._before
            if signal.getsignal(number) is override
        }
        if ours:
            _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ours)


def _after_fork() -> None:
    mask, _forking.mask = _forking.mask, None
    if sys.platform != "win32" and mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    for override in list(_overrides):
        override.restore()
    _after_fork()


at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
