"""Turns at computing: as many as there are cores, up to four, and all of them free in a forked child."""

import subprocess
import sys
import threading
import time
from functools import cache

import pytest

from holdfast.engine import threads


@pytest.fixture
def two_cores(monkeypatch):
    """No thread has a turn yet, and there are two."""
    monkeypatch.setattr(threads, "CORES", 2)
    monkeypatch.setattr(threads, "_turns", cache(threads._turns.__wrapped__))
    monkeypatch.setattr(threads, "_own", threads._Own())


def test_no_more_threads_compute_than_there_are_cores(two_cores):
    lock, now, most = threading.Lock(), 0, 0

    def task() -> None:
        nonlocal now, most
        with threads.computing():
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.01)
            with lock:
                now -= 1

    threads.run_all([task] * 12, 6)
    assert (now, most) == (0, 2)


def test_on_many_cores_there_are_few_turns(two_cores, monkeypatch):
    monkeypatch.setattr(threads, "CORES", 64)
    assert len(threads._turns()) == threads.AT_ONCE


def test_threads_share_the_turns_evenly(two_cores):
    started = [threading.Thread(target=lambda: turns.append(threads.computing())) for _ in range(6)]
    turns: list[object] = []
    for thread in started:
        thread.start()
        thread.join()
    assert sorted(map(turns.count, turns)) == [3] * 6


def test_who_has_a_turn_has_it_again(two_cores):
    """As a handler of a signal would that saves while its thread computes."""
    with threads.computing(), threads.computing():
        pass


def test_who_fails_gives_its_turn_back(two_cores):
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), threads.computing():
            raise ZeroDivisionError


FORKED = """
import os
from holdfast.engine import threads
threads.CORES = 1
with threads.computing():
    child = os.fork()
    if not child:
        with threads.computing():
            os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_all_turns_are_free_in_a_forked_child():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "7", done.stderr
