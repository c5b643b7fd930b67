"""`SignalOverride`: a signal handler that cooperates with other handlers of the program.

1. It can be removed on the main thread only, because Python allows that nowhere else. As long as it
   is not wanted but installed, it is transparent: it passes a signal to the previous handler.
2. If another handler was installed over it, that one stays. The override below is transparent, also
   if the other handler later restores it.
3. A forked child removes it at once. A signal that arrives during a fork would be forgotten by
   Python, so it is blocked until the handler is removed.
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

PreviousHandler = Callable[[int, FrameType | None], object] | int


class SignalOverride:
    """A handler that takes the place of others for as long as it is wanted.

    Args:
        catch: Called with a signal and a frame if the handler is wanted. It may call `pass_on`.
        is_wanted: Returns whether the handler is still wanted.
    """

    def __init__(
        self,
        catch: Callable[[int, FrameType | None], None],
        *,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._catch = catch
        self._is_wanted = is_wanted
        self._previous_handlers: dict[int, PreviousHandler] = {}
        self._process_id = os.getpid()

    @property
    def is_wanted(self) -> bool:
        """Whether the handler is wanted. In a forked child it never is."""
        return self._process_id == os.getpid() and self._is_wanted()

    def install(self, signal_number: int) -> None:
        """Install the handler for a signal. Must be called on the main thread.

        The current handler must be one that Python installed: no other could be restored.
        """
        current_handler = signal.getsignal(signal_number)
        assert current_handler is not None, "the caller checks that Python installed the handler"
        self._process_id = os.getpid()
        if current_handler is not self:
            self._previous_handlers[signal_number] = current_handler
            signal.signal(signal_number, self)
            _overrides.add(self)

    def restore(self) -> None:
        """Restore the previous handlers.

        Do nothing if the handler is still wanted, on other threads than the main one, and for
        signals for which another handler was installed over this one.
        """
        if self.is_wanted or threading.current_thread() is not threading.main_thread():
            return
        for signal_number in self._previous_handlers:
            previous_handler = self._find_previous_handler(signal_number)
            if signal.getsignal(signal_number) is self:
                # A subinterpreter cannot install handlers.
                with suppress(ValueError):
                    signal.signal(signal_number, previous_handler)

    def pass_on(self, signal_number: int, frame: FrameType | None) -> None:
        """Pass a signal to the previous handler.

        If another handler was installed over this one, it called this one, and decides about the
        default action of the system itself.
        """
        previous_handler = self._find_previous_handler(signal_number)
        if signal.getsignal(signal_number) is self:
            signal.signal(signal_number, previous_handler)
            signal.raise_signal(signal_number)
        elif callable(previous_handler):
            previous_handler(signal_number, frame)

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        if self.is_wanted:
            self._catch(signal_number, frame)
        else:
            self.pass_on(signal_number, frame)

    def _find_previous_handler(self, signal_number: int) -> PreviousHandler:
        """Return the previous handler, and skip overrides that are no longer wanted."""
        handler = self._previous_handlers[signal_number]
        while isinstance(handler, SignalOverride) and not handler.is_wanted:
            handler = handler._previous_handlers[signal_number]
        return handler


_overrides: WeakSet[SignalOverride] = WeakSet()
"""All overrides that were ever installed."""

_fork_state = threading.local()
"""Has `blocked_before`: the signals that the forking thread blocked before the fork, or None."""


def _block_signals_before_fork() -> None:
    _fork_state.blocked_before = None
    if sys.platform != "win32":
        installed_signals: set[int] = set()
        for override in list(_overrides):
            for signal_number in override._previous_handlers:
                if signal.getsignal(signal_number) is override:
                    installed_signals.add(signal_number)
        if installed_signals:
            _fork_state.blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, installed_signals)


def _unblock_signals_after_fork() -> None:
    blocked_before = _fork_state.blocked_before
    _fork_state.blocked_before = None
    if sys.platform != "win32" and blocked_before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


def _remove_overrides_in_child() -> None:
    for override in list(_overrides):
        override.restore()
    _unblock_signals_after_fork()


at_fork(
    before=_block_signals_before_fork,
    after_in_parent=_unblock_signals_after_fork,
    after_in_child=_remove_overrides_in_child,
)
