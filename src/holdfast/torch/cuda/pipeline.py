"""Readers on threads, one thread that copies, and a fixed number of blocks that go round between them.

    readers   ── take a task, wait for a free block, read into it    ──►  full
    caller    ── start the copies out of some full blocks, mark them ──►  under way
                 wait for the oldest mark, where no block is free    ──►  free

All copies are started by the caller's own thread: 16 threads that call into CUDA wait for each other longer than they copy. The
readers only read and sum, which needs no interpreter lock. But every call into torch gives it away, and to have it again among so
many readers takes long. So the caller takes all blocks that are full by then, and starts their copies by as few calls as it can.

The first failure, of a reader or of a copy, stops all readers; whatever has been started is waited for, and then the failure is
raised. So when `run_pipeline` is left, nothing touches the blocks or the targets any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from holdfast.core.runtime import start_thread

T = TypeVar("T")
Task = TypeVar("Task")
Block = TypeVar("Block")


class CopyEvent(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Wait until all work before this point is done."""

    def query(self) -> bool:
        """Whether all work before this point is done."""


MOST_BLOCKS = 4
"""Blocks that are copied together. They are free together as well, when the last of them is copied."""


Put = Callable[[Sequence[tuple[Task, Block]]], CopyEvent]
"""Starts the copies out of full blocks."""

Started = deque[tuple[list[Block], CopyEvent]]
"""Copies that are under way, the oldest first."""


LEADERS = 3
"""Readers that are started by the caller, and start the others."""


def run_pipeline(
    tasks: Iterable[Task],
    blocks: Sequence[Block],
    *,
    threads: int,
    read: Callable[[Task, Block], None],
    put: Put[Task, Block],
) -> None:
    """Bring every task through a block: `read` on one of the threads, then `put` on this one, several together. `put` marks what it
    started.

    Tasks begin in their order and may end in another. Raises the first failure when everything has come to rest.
    """
    waiting = iter(tasks)
    turn = threading.Lock()
    stop = threading.Event()
    free: SimpleQueue[Block | None] = SimpleQueue()
    full: SimpleQueue[tuple[Task, Block] | BaseException | None] = SimpleQueue()
    for block in blocks:
        free.put(block)

    def next_task() -> Task | None:
        with turn:
            return None if stop.is_set() else next(waiting, None)

    def reader() -> None:
        try:
            while (task := next_task()) is not None:
                block = free.get()
                if block is None or stop.is_set():
                    return
                read(task, block)
                full.put((task, block))
        except BaseException as error:
            stop.set()
            full.put(error)
        finally:
            full.put(None)

    begun: list[int] = []
    """One entry for each reader that was to be started, and so will report its end."""
    readers: list[threading.Thread] = []

    def begin(run: Callable[[], None]) -> None:
        if stop.is_set():
            return
        begun.append(len(begun))
        started = start_thread(run, name=f"holdfast-read-{begun[-1]}", daemon=True)
        if started is None:
            full.put(None)  # those that could start do all of it
        else:
            readers.append(started)

    def lead(others: int) -> None:
        try:
            for _ in range(others):
                begin(reader)
        finally:
            reader()

    under_way: Started[Block] = deque()
    failures: list[BaseException] = []
    ended = 0
    try:
        # To start a thread takes as long as to have the interpreter lock twice. So the caller starts a few, and those the others.
        for number in range(min(LEADERS, threads)):
            begin(partial(lead, len(range(number + LEADERS, threads, LEADERS))))
        if not readers:
            _alone(waiting, blocks[0], read, put)
        while ended < len(begun):
            items = _taken(full)
            while under_way and under_way[0][1].query():
                _land(under_way, free)
            if not items and under_way and free.empty():
                _land(under_way, free)
                continue
            # Somebody reads, or has read by now.
            items = items or [full.get()]
            ended += items.count(None)
            failures += [item for item in items if isinstance(item, BaseException)]
            filled = [item for item in items if isinstance(item, tuple)]
            if filled and not stop.is_set():
                try:
                    under_way.append(([block for _, block in filled], put(filled)))
                except BaseException:
                    stop.set()
                    raise
            if stop.is_set():
                # Wakes those that wait for a block.
                for _ in items:
                    free.put(None)
            # Not kept while the next ones are waited for, nor by whoever raises.
            del items, filled
    finally:
        stop.set()
        for _ in range(threads):
            free.put(None)
        # Whoever started others has noted them by its end.
        while readers:
            readers.pop().join()
        while under_way:
            _land(under_way, free)
    if failures:
        failure = failures[0]
        failures.clear()
        try:
            raise failure
        finally:
            del failure


def _taken(full: SimpleQueue[T]) -> list[T]:
    found: list[T] = []
    with suppress(Empty):
        while len(found) < MOST_BLOCKS:
            found.append(full.get_nowait())
    return found


def _alone(
    tasks: Iterable[Task], block: Block, read: Callable[[Task, Block], None], put: Put[Task, Block]
) -> None:
    """Run one task after the other, where no thread can start."""
    for task in tasks:
        read(task, block)
        put([(task, block)]).synchronize()


def _land(under_way: Started[Block], free: SimpleQueue[Block | None]) -> None:
    """Wait for the oldest copies, after which their blocks are free again."""
    blocks, mark = under_way.popleft()
    mark.synchronize()
    for block in blocks:
        free.put(block)
