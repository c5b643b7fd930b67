"""A handler that is put over another leaves what it found, and nothing else."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from holdfast.core.signals import SignalOverride

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="SIGUSR1 is sent here")

USR1 = signal.SIGUSR1


class Caught:
    """An override that notes what it catches, for as long as `wanted` is set."""

    def __init__(self) -> None:
        self.wanted = True
        self.numbers: list[int] = []
        self.override = SignalOverride(
            lambda number, frame: self.numbers.append(number), is_wanted=lambda: self.wanted
        )


@pytest.fixture
def before() -> Iterator[list[int]]:
    """What the handler that was there got."""
    got: list[int] = []
    was = signal.signal(USR1, lambda number, frame: got.append(number))
    yield got
    signal.signal(USR1, was)


def test_what_was_there_is_there_again(before: list[int]):
    mine = signal.getsignal(USR1)
    ours = Caught()
    ours.override.install(USR1)
    ours.override.install(USR1)
    signal.raise_signal(USR1)
    ours.override.restore()
    assert signal.getsignal(USR1) is ours.override  # it has something to do
    ours.wanted = False
    ours.override.restore()
    assert signal.getsignal(USR1) is mine
    assert (ours.numbers, before) == ([USR1], [])


@pytest.mark.parametrize("default", [signal.SIG_IGN, signal.default_int_handler])
def test_any_kind_of_handler_is_given_back(default: object, before: list[int]):
    signal.signal(USR1, default)
    ours = Caught()
    ours.override.install(USR1)
    ours.wanted = False
    ours.override.restore()
    assert signal.getsignal(USR1) is default


def test_another_thread_leaves_it_to_the_main_one(before: list[int]):
    ours = Caught()
    ours.override.install(USR1)
    ours.wanted = False
    thread = threading.Thread(target=ours.override.restore)
    thread.start()
    thread.join()
    assert signal.getsignal(USR1) is ours.override
    signal.raise_signal(USR1)  # nothing is wanted of it: it is transparent, and gone after that
    assert (ours.numbers, before) == ([], [USR1])
    assert signal.getsignal(USR1) is not ours.override


@pytest.mark.parametrize("wanted", [True, False])
def test_a_handler_on_top_stays_there(wanted: bool, before: list[int]):
    ours = Caught()
    ours.override.install(USR1)
    theirs: list[int] = []
    beneath = signal.getsignal(USR1)

    def top(number: int, frame: FrameType | None) -> None:
        theirs.append(number)
        beneath(number, frame)

    signal.signal(USR1, top)
    ours.wanted = wanted
    ours.override.restore()
    assert signal.getsignal(USR1) is top
    signal.raise_signal(USR1)
    assert signal.getsignal(USR1) is top
    assert (theirs, ours.numbers, before) == ([USR1], [USR1] * wanted, [USR1] * (not wanted))


def test_a_default_beneath_a_handler_on_top_does_nothing(before: list[int]):
    """What was there would not have been called by them, and ends nobody now."""
    signal.signal(USR1, signal.SIG_DFL)
    ours = Caught()
    ours.override.install(USR1)
    beneath = signal.getsignal(USR1)
    theirs: list[int] = []
    signal.signal(USR1, lambda number, frame: (theirs.append(number), beneath(number, frame)))
    ours.wanted = False
    signal.raise_signal(USR1)
    assert theirs == [USR1]


def test_two_of_ours_that_end_in_either_order(before: list[int]):
    mine = signal.getsignal(USR1)
    lower, upper = Caught(), Caught()
    lower.override.install(USR1)
    upper.override.install(USR1)
    lower.wanted = False
    lower.override.restore()
    assert signal.getsignal(USR1) is upper.override
    upper.wanted = False
    upper.override.restore()
    assert signal.getsignal(USR1) is mine


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_has_what_was_there(before: list[int]):
    mine = signal.getsignal(USR1)
    ours = Caught()
    ours.override.install(USR1)
    child = os.fork()
    if not child:
        os._exit(
            signal.getsignal(USR1) is not mine or bool(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        )
    assert os.waitpid(child, 0)[1] == 0
    assert signal.getsignal(USR1) is ours.override
    ours.wanted = False
    ours.override.restore()
