"""`SignalOverride` restores the handlers that it found, and passes signals on to them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from holdfast.core.signals import SignalOverride

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGUSR1")

USR1 = signal.SIGUSR1


class RecordingOverride(SignalOverride):
    """An override that records the signals that it catches while `keep` is true."""

    def __init__(self) -> None:
        super().__init__(self._record, is_wanted=lambda: self.keep)
        self.keep = True
        self.caught: list[int] = []

    def _record(self, signal_number: int, frame: FrameType | None) -> None:
        self.caught.append(signal_number)


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Install a handler for the test, and return the list of the signals that it receives."""
    signals: list[int] = []
    old_handler = signal.signal(USR1, lambda signal_number, frame: signals.append(signal_number))
    yield signals
    signal.signal(USR1, old_handler)


def test_an_override_catches_signals_until_it_is_restored(received: list[int]):
    old_handler = signal.getsignal(USR1)
    override = RecordingOverride()
    override.install(USR1)

    signal.raise_signal(USR1)

    assert override.caught == [USR1]
    assert received == []
    override.keep = False
    override.restore()
    assert signal.getsignal(USR1) is old_handler


def test_installing_an_override_twice_keeps_the_handler_before_it(received: list[int]):
    old_handler = signal.getsignal(USR1)
    override = RecordingOverride()

    override.install(USR1)
    override.install(USR1)

    override.keep = False
    override.restore()
    assert signal.getsignal(USR1) is old_handler


def test_restore_does_nothing_while_the_override_is_wanted(received: list[int]):
    override = RecordingOverride()
    override.install(USR1)

    override.restore()

    assert signal.getsignal(USR1) is override


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_handlers_of_the_system_are_restored_as_well(handler: object, received: list[int]):
    signal.signal(USR1, handler)
    override = RecordingOverride()
    override.install(USR1)

    override.keep = False
    override.restore()

    assert signal.getsignal(USR1) is handler


def test_another_thread_leaves_restoring_to_the_next_signal(received: list[int]):
    """Python allows only the main thread to install handlers, and runs all handlers there."""
    override = RecordingOverride()
    override.install(USR1)
    override.keep = False

    thread = threading.Thread(target=override.restore)
    thread.start()
    thread.join()
    assert signal.getsignal(USR1) is override

    signal.raise_signal(USR1)
    assert override.caught == []
    assert received == [USR1]
    assert signal.getsignal(USR1) is not override


@pytest.mark.parametrize("keep", [True, False])
def test_a_handler_that_was_installed_over_an_override_stays(keep: bool, received: list[int]):
    override = RecordingOverride()
    override.install(USR1)
    upper_received: list[int] = []

    def upper_handler(signal_number: int, frame: FrameType | None) -> None:
        upper_received.append(signal_number)
        override(signal_number, frame)

    signal.signal(USR1, upper_handler)
    override.keep = keep
    override.restore()
    assert signal.getsignal(USR1) is upper_handler

    signal.raise_signal(USR1)

    assert signal.getsignal(USR1) is upper_handler
    assert upper_received == [USR1]
    assert override.caught == [USR1] * keep
    assert received == [USR1] * (not keep)


def test_an_override_below_another_handler_does_not_run_the_default_action(received: list[int]):
    """The default action of SIGUSR1 ends the process, so that this test would not return."""
    signal.signal(USR1, signal.SIG_DFL)
    override = RecordingOverride()
    override.install(USR1)
    upper_received: list[int] = []

    def upper_handler(signal_number: int, frame: FrameType | None) -> None:
        upper_received.append(signal_number)
        override(signal_number, frame)

    signal.signal(USR1, upper_handler)
    override.keep = False

    signal.raise_signal(USR1)

    assert upper_received == [USR1]


def test_two_overrides_restore_the_first_handler_in_any_order(received: list[int]):
    old_handler = signal.getsignal(USR1)
    lower = RecordingOverride()
    upper = RecordingOverride()
    lower.install(USR1)
    upper.install(USR1)

    lower.keep = False
    lower.restore()
    assert signal.getsignal(USR1) is upper

    upper.keep = False
    upper.restore()
    assert signal.getsignal(USR1) is old_handler


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_the_old_handler_and_blocks_no_signals(received: list[int]):
    old_handler = signal.getsignal(USR1)
    override = RecordingOverride()
    override.install(USR1)

    child = os.fork()
    if not child:
        has_old_handler = signal.getsignal(USR1) is old_handler
        blocked_signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        os._exit(0 if has_old_handler and not blocked_signals else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert signal.getsignal(USR1) is override
    override.keep = False
    override.restore()
