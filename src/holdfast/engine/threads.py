"""Runs work on several threads, and decides how many threads and how much memory it may use.

Python's own thread pools refuse work once the program ends, but a save may still be running then.
Since Python 3.12 no thread can start at that time, and the system may refuse a thread at any time.
So there are threads of our own, with three rules:

1. The calling thread works as well. Helper threads only make the work faster: if one cannot start,
   the others do its share.
2. After the first error, no further task starts. The error is raised when all threads have stopped.
3. The caller does not return before that, even if Ctrl-C is pressed several times. So no thread
   still uses what the caller closes after the work.
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
"""The cores of this machine. They are counted once: on Linux, that takes as long as everything else
in a small load."""

MAX_DEFAULT_THREADS = 16
"""More threads only compete for the memory bus."""

DEFAULT_THREADS = min(MAX_DEFAULT_THREADS, 2 * CORES)
"""Two threads for each core, since some of them wait for a read."""

INLINE_NBYTES = 1 << 20
"""Less than this is read by the calling thread alone. Starting threads would take longer."""

CACHED_NBYTES = 1 << 20
"""How many bytes stay in the cache of a core between reading them and computing their checksum."""

FEW_THREADS = 4
"""Above this number of threads, blocks are larger. Each call waits for the interpreter lock, which
takes about 0.2 ms with 16 threads."""


def default_threads(processes: int) -> int:
    """Return the number of threads for each of several processes that share this machine."""
    return max(1, min(MAX_DEFAULT_THREADS, 2 * CORES // max(processes, 1)))


def choose_cached_nbytes(threads: int, max_nbytes: int) -> int:
    """Return how many bytes a thread should read and process at a time.

    Args:
        threads: How many threads work at the same time.
        max_nbytes: The block size for many threads. Few threads use blocks that fit into the cache.
    """
    if threads <= FEW_THREADS:
        return CACHED_NBYTES
    return max_nbytes


def run_all(work: Iterable[Callable[[], None]], threads: int) -> None:
    """Run tasks on this thread and helper threads, and wait until all of them are done.

    After the first error, no further task starts. The error is raised when all threads have
    stopped.
    """
    tasks = list(work)
    if threads <= 1 or len(tasks) <= 1:
        for task in tasks:
            task()
        return
    ThreadPool(tasks).run(min(threads, len(tasks)) - 1)


def run_reads(work: Iterable[Callable[[], None]], threads: int, *, stores: Iterable[Store]) -> None:
    """Run tasks that read from stores.

    If one of the stores must be read from front to back, as a stream, the tasks run one after the
    other on this thread. Otherwise this is `run_all`.
    """
    # Each store occurs once, although many tasks may read from it.
    distinct_stores = dict.fromkeys(stores)
    sequential_stores = [store for store in distinct_stores if store.read_profile.is_sequential]
    if not sequential_stores:
        run_all(work, threads)
        return
    with ExitStack() as open_reads:
        for store in sequential_stores:
            open_reads.enter_context(store.reading())
        run_all(work, 1)


class ThreadPool:
    """The calling thread and its helpers, which run the tasks of one `run_all`."""

    def __init__(self, tasks: list[Callable[[], None]]) -> None:
        """Prepare to run tasks. Each of them runs once, on any thread."""
        self._waiting_tasks = iter(tasks)
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        """Protects the attributes of this object."""
        self._helper_count = 0
        self._is_over = False
        """Whether no further task may start."""
        self._helpers_stopped = threading.Lock()
        """Acquired until the last helper has stopped after the end of the tasks."""
        self._helpers_stopped.acquire()

    def run(self, max_helpers: int) -> None:
        """Run all tasks, and wait until every helper has stopped.

        Args:
            max_helpers: The most helper threads. The calling thread works as well.
        """
        try:
            for _ in range(max_helpers):
                # The helpers that run may have done all tasks, or the system may refuse a thread.
                if self._is_over or start_thread(self._help, name="holdfast") is None:
                    break
            self._work()
        finally:
            # Ctrl-C raises KeyboardInterrupt at calls. There is no call outside of the inner `try`,
            # because leaving here would leave helpers running behind.
            while True:
                try:
                    with self._lock:
                        self._is_over = True
                    # The last helper releases this lock. If Ctrl-C interrupts the wait, the loop
                    # waits again.
                    while self._helper_count:
                        self._helpers_stopped.acquire()
                    break
                except BaseException as error:
                    self._stop_after(error)
        if self._errors:
            first_error = self._errors[0]
            # The traceback of an error refers to this frame. If the frame or this object still
            # referred to the error, the cycle would keep the memory that was being written.
            self._errors.clear()
            try:
                raise first_error
            finally:
                del first_error

    def _help(self) -> None:
        """Run tasks on a helper thread."""
        with self._lock:
            # A helper that starts too late must not touch anything, since the caller may be gone.
            if self._is_over:
                return
            self._helper_count += 1
        self._work()
        with self._lock:
            self._helper_count -= 1
            # Before the end, the caller is still working, and nobody waits.
            if self._is_over and not self._helper_count:
                self._helpers_stopped.release()

    def _work(self) -> None:
        """Run waiting tasks until there are none, or one of them fails."""
        try:
            while (task := self._take_task()) is not None:
                task()
        except BaseException as error:
            # The failing thread itself stops the others. Under load, the calling thread may wake up
            # hundreds of tasks later.
            self._stop_after(error)

    def _take_task(self) -> Callable[[], None] | None:
        """Return the next task, or None if no further task may start."""
        with self._lock:
            if self._is_over:
                return None
            return next(self._waiting_tasks, None)

    def _stop_after(self, error: BaseException) -> None:
        """Record an error and start no further task."""
        self._errors.append(error)
        self._is_over = True


class BackgroundCall(Generic[T]):
    """Calls a function while the caller does something else, in a `with` block.

    The function runs on a thread of its own. If no thread can start, it runs when its result is
    requested. When the block ends, the function has returned or will never be called.
    """

    def __init__(self, call: Callable[[], T], *, name: str = "holdfast") -> None:
        """Prepare to call a function without arguments on a thread with this name."""
        # Imported here because it imports the logging package, which few callers need.
        from concurrent.futures import Future

        self._call = call
        self._name = name
        self._start_lock = threading.Lock()
        """Acquired by the thread that calls the function."""
        self._future: Future[T] = Future()

    def __enter__(self) -> Self:
        """Start the thread."""
        start_thread(self._run, name=self._name)
        return self

    def result(self) -> T:
        """Return what the function returned, or raise what it raised."""
        # Usually the thread has begun to call the function, and this does nothing. If no thread
        # could start, the function is called here.
        self._run()
        return self._future.result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel the call, or wait until it has ended, even if Ctrl-C is pressed meanwhile."""
        interrupt: BaseException | None = None
        while True:
            # Ctrl-C raises KeyboardInterrupt here. It is raised again when the call has ended.
            try:
                # A call that has begun cannot be canceled. `exception` waits until it has ended.
                if not self._future.cancel():
                    self._future.exception()
                break
            except BaseException as late_error:
                interrupt = late_error
        if error is not None:
            # The error of the block may be the one of the function. It refers to the frames that
            # refer to this object, so the future is replaced to break the cycle.
            self._future = type(self._future)()
        if interrupt is not None:
            # The traceback of the error refers to this frame, so the frame must not refer to it.
            try:
                raise interrupt
            finally:
                del interrupt

    def _run(self) -> None:
        """Call the function, unless another thread has begun to, or the call was canceled."""
        # The lock is never released, so only one thread can acquire it.
        if not self._start_lock.acquire(blocking=False):
            return
        try:
            if self._future.set_running_or_notify_cancel():
                self._future.set_result(self._call())
        except BaseException as error:
            self._future.set_exception(error)
            # As in Python's own thread pools: the error refers to this frame, so the frame must not
            # refer to the error through `self`.
            del self


class Scratch(threading.local):
    """Memory that each thread uses again for every block. It grows to the largest block."""

    _memory = memoryview(b"")

    def reserve(self, nbytes: int) -> memoryview:
        """Return memory of this thread. It still has the bytes of an earlier block."""
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8).data
        return self._memory[:nbytes]


REUSED_NBYTES = 16 << 20
"""More than all arrays that one thread allocates between two steps of a computation."""

MAX_COMPUTING_THREADS = 4
"""The most threads that compute at the same time, on any number of cores. Some functions of numpy
hold the interpreter lock (`bincount`, `take`, the casts of ml_dtypes). With 16 threads they did the
work of two, and took three times the processor time (docs/design/026)."""


@cache
def _computing_locks() -> tuple[AbstractContextManager[bool], ...]:
    """Return the locks of the threads that compute. Each one lets one thread compute at a time.

    A thread may acquire its lock twice, because a signal handler may compute as well.
    """
    # This memory is freed at once and never touched. After that, glibc keeps freed memory of up to
    # twice this size for later arrays. Otherwise each array would have new pages from the system,
    # which take as long as the computation.
    np.empty(REUSED_NBYTES, np.uint8)
    lock_count = min(CORES, MAX_COMPUTING_THREADS)
    return tuple(make_fork_safe(threading.RLock()) for _ in range(lock_count))


class _AssignedLock(threading.local):
    """The lock that each thread acquires to compute."""

    lock: AbstractContextManager[bool] | None = None


_assigned = _AssignedLock()
_thread_numbers = count()


def computing() -> AbstractContextManager[bool]:
    """Limit how many threads compute with numpy at the same time. Use it in a `with` statement.

    Do not read or wait for anything in the block. Every call of numpy acquires the interpreter
    lock. A thread that gets this lock while it has no core to run on delays all others. With two
    threads for each core, that took longer than the arithmetic itself.

    There is a lock for each core and not one semaphore, because Ctrl-C can make Python's semaphore
    lose a slot for ever.
    """
    lock = _assigned.lock
    if lock is None:
        # Threads that start one after the other get different locks, as long as there are enough.
        locks = _computing_locks()
        lock = locks[next(_thread_numbers) % len(locks)]
        _assigned.lock = lock
    return lock


MIN_BLOCK_NBYTES = 64 << 10
MAX_BLOCK_NBYTES = 4 << 20

REMOTE_BLOCK_NBYTES = 1 << 20
"""The smallest block that is requested from a remote store. If memory is short, there are fewer
threads instead of smaller blocks."""

BASE_NBYTES = 64 << 20
"""The memory that the interpreter and the plan take in addition to the blocks."""

BLOCKS_PER_THREAD = 4
"""The blocks that a thread may have in memory: one that was read, one that is computed from it, one
that is written, and one that is checked."""


class MemoryBudget(Value, frozen=True):
    """How many threads may work within a limit of memory, and the size of their blocks."""

    threads: int
    """The number of threads."""
    block_nbytes: int
    """The size of a block. Each thread may have `BLOCKS_PER_THREAD` of them in memory."""
    peak_nbytes: int
    """The most memory that this takes, including the interpreter."""


def plan_memory(
    max_memory: Size,
    threads: int | None = None,
    *,
    min_block_nbytes: int = MIN_BLOCK_NBYTES,
    request_count: int = 0,
    processes: int = 1,
) -> MemoryBudget:
    """Decide how many threads work within a limit of memory, and on blocks of which size.

    If memory is short, blocks become smaller first, and then there are fewer threads.

    Args:
        max_memory: The limit for this process.
        threads: The number of threads, if the user chose it. It is never reduced.
        min_block_nbytes: The size of a block that cannot be cut.
        request_count: How many requests a remote store should receive at the same time; 0 for a
            local store. Blocks of a remote store are larger. They get half of the memory, because
            the destination may be remote as well.
        processes: How many processes share this machine.

    Raises:
        LimitExceeded: Not even the smallest blocks fit. The message says how much memory they need.
    """
    max_nbytes = parse_nbytes(max_memory)
    available_nbytes = max_nbytes - BASE_NBYTES
    preferred_nbytes = min_block_nbytes
    max_block_nbytes = max(MAX_BLOCK_NBYTES, min_block_nbytes)
    if request_count:
        available_nbytes //= 2
        preferred_nbytes = max(REMOTE_BLOCK_NBYTES, min_block_nbytes)
        max_block_nbytes = max(2 * MAX_BLOCK_NBYTES, min_block_nbytes)

    # As many threads as the user wants, or as have memory for blocks of the preferred size.
    thread_count = threads or max(default_threads(processes), request_count)
    if threads is None:
        fitting_count = available_nbytes // (BLOCKS_PER_THREAD * preferred_nbytes)
        thread_count = max(1, min(thread_count, fitting_count))

    # All blocks of all threads share the available memory.
    block_count = thread_count * BLOCKS_PER_THREAD
    block_nbytes = min(max_block_nbytes, available_nbytes // block_count)

    if block_nbytes < min_block_nbytes:
        needed_nbytes = block_count * min_block_nbytes
        # Blocks of a remote store may use only half of the memory.
        if request_count:
            needed_nbytes *= 2
        needed_nbytes += BASE_NBYTES
        if thread_count > 1:
            message = (
                f"max_memory is too small: {thread_count} threads need {needed_nbytes:,} bytes; "
                "pass at least that, or fewer threads"
            )
        else:
            message = (
                f"max_memory is too small: one thread needs {needed_nbytes:,} bytes; pass at least "
                "that"
            )
        raise LimitExceeded(message, expected=needed_nbytes, found=max_nbytes)
    return MemoryBudget(thread_count, block_nbytes, BASE_NBYTES + block_count * block_nbytes)


def count_reading_threads(
    max_memory: Size | None, threads: int | None = None, processes: int = 1
) -> int:
    """Return the number of threads for a function that only reads, in blocks of a few megabytes.

    Args:
        max_memory: The limit of memory for this process, or None.
        threads: The number of threads, if the user chose it.
        processes: How many processes share this machine.
    """
    if max_memory is None:
        return threads or default_threads(processes)
    # Such functions have a fixed block size, so only the number of threads depends on the memory.
    budget = plan_memory(
        max_memory, threads, min_block_nbytes=MAX_BLOCK_NBYTES, processes=processes
    )
    return budget.threads
