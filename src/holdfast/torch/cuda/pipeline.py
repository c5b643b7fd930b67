"""Readers on threads, one thread that copies, and a fixed number of blocks that go round between them.

    readers   ── take a task, wait for a free block, read into it ──►  full
    caller    ── start the copies out of a full block, mark them  ──►  under way
                 wait for the oldest mark                         ──►  free

All copies are started by the caller's own thread: 16 threads that call into CUDA wait for each other longer than they copy. The
readers only read and sum, which needs no interpreter lock.

The first failure, of a reader or of a copy, stops all readers; whatever has been started is waited for, and then the failure is
raised. So when `pump` is left, nothing touches the blocks or the targets any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from holdfast.engine.threads import start

__all__ = ["Mark", "pump"]

Task = TypeVar("Task")
Block = TypeVar("Block")


class Mark(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Come back when all that was asked for before this point is done."""


class Failed:
    """What a reader puts in place of a full block."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def pump(
    tasks: Iterable[Task],
    blocks: Sequence[Block],
    *,
    threads: int,
    read: Callable[[Task, Block], None],
    put: Callable[[Task, Block], Mark],
) -> None:
    """Bring every task through a block: `read` on one of the threads, then `put` on this one. `put` marks what it started.

    Tasks begin in their order and may end in another. Raises the first failure when everything has come to rest.
    """
    waiting = iter(tasks)
    turn = threading.Lock()
    stop = threading.Event()
    free: SimpleQueue[Block | None] = SimpleQueue()
    full: SimpleQueue[tuple[Task, Block] | Failed | None] = SimpleQueue()
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
            full.put(Failed(error))
        finally:
            full.put(None)

    under_way: deque[tuple[Block, Mark]] = deque()
    failures: list[BaseException] = []
    readers: list[threading.Thread] = []
    ended = 0
    try:
        for number in range(threads):
            started = start(reader, name=f"holdfast-read-{number}", daemon=True)
            if started is None:
                break  # those that could start do all of it
            readers.append(started)
        if not readers:
            _alone(waiting, blocks[0], read, put)
        while ended < len(readers):
            try:
                item = full.get_nowait() if under_way else full.get()
            except Empty:
                _land(under_way, free)
                continue
            if item is None:
                ended += 1
            elif isinstance(item, Failed):
                failures.append(item.error)
            elif not stop.is_set():
                task, block = item
                try:
                    under_way.append((block, put(task, block)))
                except BaseException:
                    stop.set()
                    raise
            if stop.is_set():
                # Wakes those that wait for a block.
                free.put(None)
    finally:
        stop.set()
        for _ in range(threads):
            free.put(None)
        for thread in readers:
            thread.join()
        while under_way:
            _land(under_way, free)
    if failures:
        failure = failures[0]
        failures.clear()
        item = None
        try:
            raise failure
        finally:
            del failure


def _alone(tasks: Iterable[Task], block: Block, read: Callable[[Task, Block], None], put: Callable[[Task, Block], Mark]) -> None:
    """Where no thread can start: one task after the other."""
    for task in tasks:
        read(task, block)
        put(task, block).synchronize()


def _land(under_way: deque[tuple[Block, Mark]], free: SimpleQueue[Block | None]) -> None:
    """Wait for the oldest copies, after which their block is free again."""
    block, mark = under_way.popleft()
    mark.synchronize()
    free.put(block)
