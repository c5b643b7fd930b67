"""Threads of our own: work is shared out among them and the caller, and is done by the caller alone where none can start.

Python's own pools refuse work from the moment the program ends, and a save may go on then. Since Python 3.12 no thread can start
at all by that time; at any time the system may refuse one more. So:

1. The caller is one of those who work. Helpers only make it faster, and a helper that cannot start is not missed.
2. The first failure, in time, keeps all that has not begun from beginning. It is raised when everybody has come to rest.
3. Nobody leaves before: not on Ctrl-C, and not on a second one. What is closed after the work is used by no thread any more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from itertools import count
from types import TracebackType
from typing import Generic, Self, TypeVar

import numpy as np

from holdfast.core.protocols import Store
from holdfast.core.quantities import Size, parse_nbytes
from holdfast.core.runtime import make_fork_safe, start_thread
from holdfast.core.value import Value
from holdfast.errors import LimitExceeded

T = TypeVar("T")


CORES = os.cpu_count() or 1
"""Linux reads this from a file, which takes as long as everything else that a small load does."""

DEFAULT_THREADS = min(16, 2 * CORES)
"""Threads that keep the memory bus busy and some reads waiting. More threads only contend."""


def default_threads(processes: int) -> int:
    """Return the threads of each of several processes that share the machine."""
    return max(1, min(16, 2 * CORES // max(processes, 1)))


def run_all(work: Iterable[Callable[[], None]], threads: int) -> None:
    """Run callables on this thread and others; the first failure keeps all others from beginning and is raised at the end."""
    tasks = list(work)
    if threads <= 1 or len(tasks) <= 1:
        for task in tasks:
            task()
        return
    ThreadPool(tasks).run(min(threads, len(tasks)) - 1)


INLINE_NBYTES = 1 << 20
"""Less than this is read by the caller alone: starting threads would take longer."""

CACHED_NBYTES = 1 << 20
"""Bytes that stay in the cache of a core between reading and summing them."""

FEW_THREADS = 4
"""Above this, pieces are larger: every call waits for the interpreter lock, some 0.2 ms for 16 threads."""


def choose_cached_nbytes(threads: int, most: int) -> int:
    """Return the bytes to be summed or written at a time: a cache full, or `most` for many threads."""
    return CACHED_NBYTES if threads <= FEW_THREADS else most


def run_reads(work: Iterable[Callable[[], None]], threads: int, *, stores: Iterable[Store]) -> None:
    """Run tasks that read from these stores: in order on this thread if one of the stores needs that."""
    ordered = [store for store in dict.fromkeys(stores) if store.read_profile.is_sequential]
    if not ordered:
        run_all(work, threads)
        return
    with ExitStack() as blocks:
        for store in ordered:
            blocks.enter_context(store.reading())
        run_all(work, 1)


KEPT_NBYTES = 16 << 20  # More than the arrays between two calls take together, of one thread.


AT_ONCE = 4
"""Threads that compute, of however many cores. A part of numpy holds the interpreter's lock (`bincount`, `take`, the casts of
ml_dtypes): sixteen threads did the work of two, at three times the processor time (026)."""


@cache
def _turns() -> tuple[AbstractContextManager[bool], ...]:
    """As many as there are cores, up to `AT_ONCE`. A thread may have its own twice: a handler of a signal may compute meanwhile."""
    # Memory of this length is freed at once, untouched. After that the C library keeps what is freed, up to twice the length,
    # instead of giving it back: arrays between two calls would be fresh pages each time, which cost as much as all that is
    # computed. (glibc's thresholds grow with what is freed; other libraries have other rules.)
    np.empty(KEPT_NBYTES, np.uint8)
    return tuple(make_fork_safe(threading.RLock()) for _ in range(min(CORES, AT_ONCE)))


class _Own(threading.local):
    turn: AbstractContextManager[bool] | None = None


_own, _numbers = _Own(), count()


def computing() -> AbstractContextManager[bool]:
    """To compute with numpy, in a `with`; who has it neither reads nor waits for anything meanwhile. Every call of numpy takes the
    interpreter's lock again. Threads that have no core wait for it too, and who gets it without a core to run on keeps all others
    from theirs: with two threads a core, that took more time than the arithmetic. A plain lock and no semaphore: Python's own may
    lose a turn for ever where Ctrl-C arrives."""
    turn = _own.turn
    if turn is None:
        # Threads that start one after the other have different ones, as far as there are.
        turn = _own.turn = _turns()[next(_numbers) % len(_turns())]
    return turn


class ThreadPool:
    """The caller and its helpers, who do the tasks of one `run_all`."""

    def __init__(self, tasks: list[Callable[[], None]]) -> None:
        self._left = iter(tasks)
        self._failures: list[BaseException] = []
        self._turn = threading.Lock()
        self._helpers = 0
        self._over = False
        self._rested = (
            threading.Lock()
        )  # Taken, until the last helper has come to rest after the end.
        self._rested.acquire()

    def run(self, helpers: int) -> None:
        try:
            for _ in range(helpers):
                if self._over or start_thread(self._help, name="holdfast") is None:
                    break
            self._work()
        finally:
            # No call before the inner `try`: an interrupt arrives at calls, and whoever left now would leave helpers behind.
            while True:
                try:
                    with self._turn:
                        self._over = True
                    while self._helpers:
                        self._rested.acquire()
                    break
                except BaseException as error:
                    self._fail(error)
        if self._failures:
            failure = self._failures[0]
            # Who raises an error that is kept, or that a variable has, is kept by it: with the memory that was being written.
            self._failures.clear()
            try:
                raise failure
            finally:
                del failure

    def _help(self) -> None:
        with self._turn:
            # One that comes too late must touch nothing: the caller may be gone.
            if self._over:
                return
            self._helpers += 1
        self._work()
        with self._turn:
            self._helpers -= 1
            if self._over and not self._helpers:
                self._rested.release()

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                task()
        except BaseException as error:
            # Here and not by whoever waits: under load that thread wakes when hundreds of further tasks have run.
            self._fail(error)

    def _next(self) -> Callable[[], None] | None:
        with self._turn:
            return None if self._over else next(self._left, None)

    def _fail(self, error: BaseException) -> None:
        self._failures.append(error)
        self._over = True


class BackgroundCall(Generic[T]):
    """One call beside what the caller does: on a thread of its own or, where none can start, when its result is asked for. Used in
    a `with`; at its end the call is over, or will never begin."""

    def __init__(self, call: Callable[[], T], *, name: str = "holdfast") -> None:
        self._call = call
        self._begun = threading.Lock()
        from concurrent.futures import Future  # for those who need it: it imports logging

        self._future: Future[T] = Future()
        self._name = name

    def __enter__(self) -> Self:
        start_thread(self._run, name=self._name)
        return self

    def result(self) -> T:
        """What the call came to; raises what it raised."""
        self._run()
        return self._future.result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                if not self._future.cancel():
                    self._future.exception()
                break
            except BaseException as late:
                interrupt = late
        if error is not None:
            # What was raised may be what the call came to, and holds the frames of those who have this: it is not kept twice.
            self._future = type(self._future)()
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            if self._future.set_running_or_notify_cancel():
                self._future.set_result(self._call())
        except BaseException as error:
            self._future.set_exception(error)
            # As Python's own pools do: the error holds this frame, and the frame would hold the error.
            del self


class Scratch(threading.local):
    """Memory of each thread that grows to what is asked of it."""

    _memory = memoryview(b"")

    def reserve(self, nbytes: int) -> memoryview:
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8).data
        return self._memory[:nbytes]


SMALLEST_BLOCK_NBYTES = 64 << 10
LARGEST_BLOCK_NBYTES = 4 << 20

REMOTE_BLOCK_NBYTES = (
    1 << 20
)  # A remote store is not asked for smaller pieces: there are fewer threads instead.
BASE_NBYTES = (
    64 << 20
)  # What the plan and the interpreter take beside the blocks, counted against the budget.
COPIES = 4  # Blocks that one thread may hold: what was read, what is computed from it, what is written, what is checked.


class MemoryBudget(Value, frozen=True):
    """How many threads may work within so much memory, and on blocks of which size.

    The block shrinks first, and then there are fewer threads. A budget that not even one smallest block fits into is refused.
    """

    threads: int
    block_nbytes: int
    peak_nbytes: int


def plan_memory(
    max_memory: Size,
    threads: int | None = None,
    *,
    smallest: int = SMALLEST_BLOCK_NBYTES,
    requests: int = 0,
    processes: int = 1,
) -> MemoryBudget:
    """What fits into so many bytes. `smallest` is the block that cannot be cut: all threads get it, or fewer threads do. `requests`
    is how many reads a remote source wants under way at once; its blocks are larger, and it takes half of the memory, since the
    target may be remote as well. `processes` share the machine. Raises `LimitExceeded` where not even that fits, and says what
    would. Threads that the caller asked for are never taken away."""
    room, workers = (
        parse_nbytes(max_memory) - BASE_NBYTES,
        threads or max(default_threads(processes), requests),
    )
    least, most = (
        (REMOTE_BLOCK_NBYTES, 2 * LARGEST_BLOCK_NBYTES)
        if requests
        else (smallest, LARGEST_BLOCK_NBYTES)
    )
    room = room // 2 if requests else room
    if threads is None:
        workers = max(1, min(workers, room // (COPIES * max(least, smallest))))
    block = min(max(most, smallest), room // (workers * COPIES))
    if block < smallest:
        least = BASE_NBYTES + workers * COPIES * smallest * (2 if requests else 1)
        users = "one thread needs" if workers == 1 else f"{workers} threads need"
        message = f"max_memory is too small: {users} {least:,} bytes; pass at least that"
        if workers > 1:
            message += ", or fewer threads"
        raise LimitExceeded(message, expected=least, found=parse_nbytes(max_memory))
    return MemoryBudget(workers, block, BASE_NBYTES + workers * COPIES * block)


def count_reading_threads(
    max_memory: Size | None, threads: int | None = None, processes: int = 1
) -> int:
    """Threads for a verb that reads in blocks of its own, a few megabytes each: as many as were asked for, or as fit. The machine
    is shared by so many processes."""
    if max_memory is None:
        return threads or default_threads(processes)
    return plan_memory(
        max_memory, threads, smallest=LARGEST_BLOCK_NBYTES, processes=processes
    ).threads
