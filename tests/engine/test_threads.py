"""Locks for computing: as many as there are cores, up to four, and all of them free in a forked child."""

import subprocess
import sys
import threading
import time
from functools import cache

import pytest

from holdfast.engine import threads


@pytest.fixture
def two_cores(monkeypatch):
    """Simulate two cores, with no lock assigned to any thread."""
    monkeypatch.setattr(threads, "CORES", 2)
    monkeypatch.setattr(threads, "_computing_locks", cache(threads._computing_locks.__wrapped__))
    monkeypatch.setattr(threads, "_assigned", threads._AssignedLock())


def test_no_more_threads_compute_than_there_are_cores(two_cores):
    lock = threading.Lock()
    running_count = 0
    max_count = 0

    def task() -> None:
        nonlocal running_count, max_count
        with threads.computing():
            with lock:
                running_count += 1
                max_count = max(max_count, running_count)
            time.sleep(0.01)
            with lock:
                running_count -= 1

    threads.run_all([task] * 12, 6)

    assert running_count == 0
    assert max_count == 2


def test_no_more_than_four_threads_compute_on_many_cores(two_cores, monkeypatch):
    monkeypatch.setattr(threads, "CORES", 64)
    assert len(threads._computing_locks()) == threads.MAX_COMPUTING_THREADS


def test_threads_share_the_locks_evenly(two_cores):
    locks: list[object] = []
    for _ in range(6):
        thread = threading.Thread(target=lambda: locks.append(threads.computing()))
        thread.start()
        thread.join()
    assert [locks.count(lock) for lock in locks] == [3] * 6


def test_a_thread_can_acquire_its_lock_twice(two_cores):
    """A signal handler may save while its thread computes."""
    with threads.computing(), threads.computing():
        pass


def test_a_lock_is_free_after_an_error(two_cores):
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
def test_all_locks_are_free_in_a_forked_child():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "7", done.stderr
