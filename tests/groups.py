"""A group whose ranks are threads of the test process, for tests without torch.

    results = on_ranks(3, lambda group: holdfast.verify(path, group=group))

has what each rank returned, or the exception that it raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, Queue

from holdfast.core.group import SeveralRanks
from holdfast.errors import RankLost

TIMEOUT_SECONDS = 60.0
"""How long a rank waits for a message: longer than any test, even on a busy machine."""


class Channels:
    """The queues between the ranks during one operation."""

    def __init__(self, size: int) -> None:
        self.to_first_rank: list[Queue[bytes]] = [Queue() for _ in range(size)]
        """A queue from each rank."""
        self.from_first_rank: list[Queue[bytes]] = [Queue() for _ in range(size)]
        """A queue to each rank."""
        self.progress = 0
        self.lock = threading.Lock()


class ThreadRanks(SeveralRanks):
    """The connection of a thread to the others during one operation."""

    def __init__(self, rank: int, size: int, operation: str, channels: Channels) -> None:
        super().__init__(rank, size, operation)
        self._channels = channels
        self.phase_count = 0

    def _gather(self, message: bytes) -> list[bytes] | None:
        self.phase_count += 1
        if not self.is_first:
            self._channels.to_first_rank[self.rank].put(message)
            return None
        queues = self._channels.to_first_rank
        return [self._receive(queues[rank], rank) for rank in range(1, self.size)]

    def _answer(self, answers: list[bytes] | None) -> bytes:
        if answers is None:
            return self._receive(self._channels.from_first_rank[self.rank], 0)
        for rank in range(1, self.size):
            self._channels.from_first_rank[rank].put(answers[rank])
        return answers[0]

    def count_local_ranks(self) -> int:
        return self.size

    @contextmanager
    def joint_progress(
        self, progress: Callable[[int], None] | None
    ) -> Iterator[Callable[[int], None] | None]:
        def add(nbytes: int) -> None:
            with self._channels.lock:
                self._channels.progress += nbytes

        yield add
        if self.is_first and progress is not None:
            progress(self._channels.progress)

    def _receive(self, queue: Queue[bytes], sender: int) -> bytes:
        try:
            return queue.get(timeout=TIMEOUT_SECONDS)
        except Empty:
            raise RankLost(f"no message from rank {sender}", ranks=(sender,)) from None


class ThreadGroup:
    """The group as one of its threads sees it."""

    def __init__(
        self, rank: int, size: int, all_channels: dict[int, Channels], lock: threading.Lock
    ) -> None:
        self.rank = rank
        self.size = size
        self._all_channels = all_channels
        self._lock = lock
        self._operation_count = 0

    def begin(self, operation: str) -> ThreadRanks:
        """Begin an operation. The n-th operations of all ranks have the same channels."""
        with self._lock:
            channels = self._all_channels.setdefault(self._operation_count, Channels(self.size))
        self._operation_count += 1
        return ThreadRanks(self.rank, self.size, operation, channels)


def on_ranks(size: int, job: Callable[[ThreadGroup], object]) -> list[object]:
    """Run a job on every rank, and return the result or the exception of each."""
    all_channels: dict[int, Channels] = {}
    lock = threading.Lock()
    results: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = job(ThreadGroup(rank, size, all_channels, lock))
        except Exception as error:
            results[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def raise_first_error(results: list[object]) -> list[object]:
    """Return the results of all ranks, or raise the first exception among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
