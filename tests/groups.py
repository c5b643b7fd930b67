"""A group whose ranks are threads of the test process, for tests of what ranks do together without torch.

found = on_ranks(3, lambda group: holdfast.verify(path, group=group))        what each rank returned, or raised
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, Queue

from holdfast.core.group import SeveralRanks
from holdfast.errors import RankLost

PATIENCE = 60.0
"""Seconds until a rank that waits is ended: longer than any test of this kind, even on a busy machine."""


class Wires:
    """The queues between the ranks of one thing that they do."""

    def __init__(self, size: int) -> None:
        self.up: list[Queue[bytes]] = [Queue() for _ in range(size)]
        self.down: list[Queue[bytes]] = [Queue() for _ in range(size)]
        self.done = 0
        self.lock = threading.Lock()


class ThreadRanks(SeveralRanks):
    def __init__(self, rank: int, size: int, doing: str, wires: Wires) -> None:
        super().__init__(rank, size, doing)
        self._wires = wires
        self.steps = 0

    def _gather(self, message: bytes) -> list[bytes] | None:
        self.steps += 1
        if not self.is_first:
            self._wires.up[self.rank].put(message)
            return None
        return [self._take(self._wires.up[rank], rank) for rank in range(1, self.size)]

    def _answer(self, answers: list[bytes] | None) -> bytes:
        if answers is None:
            return self._take(self._wires.down[self.rank], 0)
        for rank in range(1, self.size):
            self._wires.down[rank].put(answers[rank])
        return answers[0]

    def count_local_ranks(self) -> int:
        return self.size

    @contextmanager
    def joint_progress(
        self, progress: Callable[[int], None] | None
    ) -> Iterator[Callable[[int], None] | None]:
        def add(nbytes: int) -> None:
            with self._wires.lock:
                self._wires.done += nbytes

        yield add
        if self.is_first and progress is not None:
            progress(self._wires.done)

    def _take(self, queue: Queue[bytes], rank: int) -> bytes:
        try:
            return queue.get(timeout=PATIENCE)
        except Empty:
            raise RankLost(f"no message from rank {rank}", ranks=(rank,)) from None


class ThreadGroup:
    """One rank's view of the group."""

    def __init__(
        self, rank: int, size: int, all_wires: dict[int, Wires], lock: threading.Lock
    ) -> None:
        self.rank, self.size = rank, size
        self._wires, self._lock, self._count = all_wires, lock, 0

    def begin(self, doing: str) -> ThreadRanks:
        with self._lock:
            wires = self._wires.setdefault(self._count, Wires(self.size))
        self._count += 1
        return ThreadRanks(self.rank, self.size, doing, wires)


def on_ranks(size: int, job: Callable[[ThreadGroup], object]) -> list[object]:
    """What the job returned on each rank, or the exception that it raised."""
    wires: dict[int, Wires] = {}
    lock = threading.Lock()
    found: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = job(ThreadGroup(rank, size, wires, lock))
        except Exception as error:
            found[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def good(found: list[object]) -> list[object]:
    """What all ranks returned; raises what one of them raised."""
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found
