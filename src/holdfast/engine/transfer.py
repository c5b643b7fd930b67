"""The one engine that reads: ranges of files, by threads, each to a sink.

    plan        ranges of a file, joined into reads (plan/coalesce.py)
    transfer    reads are shared out as tasks of a few megabytes; a task does its reads one after the other
    sink        says where a read goes: straight to an address, or through scratch memory into its hands

1. Short reads in a row that go straight to their places are asked of the store by one call (`Store.gather`).
2. What is summed on its way is read a cache full at a time, and summed while it is there.
3. A thread keeps one piece of scratch memory, as long as its longest read. So memory beyond the targets is `threads × block`.
4. A read that fails is told to the sink, which raises it with the name of the tensor, or takes note of it. The first failure that
   is raised stops the rest.

Sinks: strips.py (arrays of any strides), records.py (memory of somebody else's), checksums.py (sums alone), equal.py (the other of
two sides).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.protocols import Store
from holdfast.core.runtime import memory_at
from holdfast.engine.threads import run_all
from holdfast.errors import HoldfastError, located
from holdfast.plan.coalesce import Reads

__all__ = ["TASK_NBYTES", "Scratch", "Sink", "Straight", "cached_nbytes", "tasks", "transfer"]

TASK_NBYTES = 8 << 20
"""Work that one thread takes at a time: large enough to forget the hand-over, small enough to share a tensor."""

TASK_READS = 2048
"""Small reads that one thread takes at a time."""

GATHER_READS = 16
"""Reads in a row below which the store is asked for each."""

GATHER_NBYTES = 16 << 10
"""A read above which copying dominates, so that one call for many saves nothing."""

GATHER_SPREAD = 16
"""The part of a stretch of file that must be wanted; where less is, the system would read around each piece what nobody needs."""

CACHED_NBYTES = 1 << 20
"""What is still in the cache of a core when it has been read or summed: the next one to look at it need not wait for memory."""

FEW_THREADS = 4
"""Above this, pieces are larger: every call takes the interpreter lock again, for which 16 threads wait some 0.2 ms."""

INLINE_NBYTES = 1 << 20
"""Less than this is read at once: starting threads would take longer."""


def cached_nbytes(threads: int, most: int) -> int:
    """Bytes to be read, summed or written at a time: a cache full, or `most` where so many threads want the interpreter lock."""
    return CACHED_NBYTES if threads <= FEW_THREADS else most


@dataclass(frozen=True, slots=True)
class Straight:
    """Where reads in a row go."""

    addresses: Ints
    """In memory; 0 for a read that is to be handed over."""
    seen: Bools
    """Whether the sink wants to see the bytes in their place."""


class Sink:
    """What becomes of the reads of one file. They come from several threads, each from one."""

    def straight(self, first: int, last: int) -> Straight | None:
        """Where reads [first, last) go, or None where all of them are handed over."""
        return None

    def wants(self, number: int) -> bool:
        """Whether a read is still wanted. Asked before one that would be handed over."""
        return True

    def passed(self, number: int, start: int, data: memoryview) -> None:
        """Bytes of a read that have come to their place; they begin with byte `start` of the file."""

    def take(self, number: int, data: memoryview) -> None:
        """All bytes of a read that goes nowhere else, in memory that holds something else afterwards."""

    def name(self, number: int) -> str:
        """A tensor whose bytes a read has, for messages."""
        raise NotImplementedError

    def failed(self, number: int, error: HoldfastError) -> None:
        """A read that cannot be done."""
        with located(tensor=self.name(number)):
            raise error


class Scratch(threading.local):
    """Memory of each thread that grows to what is asked of it."""

    _memory = memoryview(b"")

    def of(self, nbytes: int) -> memoryview:
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8).data
        return self._memory[:nbytes]


def transfer(work: Iterable[tuple[Store, Reads, Sink]], threads: int, *, nbytes: int = TASK_NBYTES) -> None:
    """Do all reads, in tasks of about so many bytes. Raises the first error after all threads have stopped."""
    jobs = list(work)
    threads = threads if sum(reads.nbytes for _, reads, _ in jobs) >= INLINE_NBYTES else 1
    scratch, step = Scratch(), cached_nbytes(threads, TASK_NBYTES)
    run_all((task for job in jobs for task in tasks(*job, scratch=scratch, nbytes=nbytes, step=step)), threads)


def tasks(
    store: Store, reads: Reads, sink: Sink, *, scratch: Scratch, nbytes: int = TASK_NBYTES, step: int = CACHED_NBYTES
) -> Iterator[Callable[[], None]]:
    """The reads of one file as pieces of work. What is seen by its sink in its place is read `step` bytes at a time."""
    reach = np.cumsum(reads.stops - reads.starts)
    first = before = 0
    while first < len(reach):
        last = int(np.searchsorted(reach, before + nbytes, side="right"))
        last = min(max(last, first + 1), first + TASK_READS)
        yield Task(store, reads, sink, first, last, scratch, step).run
        first, before = last, int(reach[last - 1])


@dataclass(frozen=True, slots=True)
class Task:
    """Reads [first, last) of a file."""

    store: Store
    reads: Reads
    sink: Sink
    first: int
    last: int
    scratch: Scratch
    step: int

    def run(self) -> None:
        straight = self.sink.straight(self.first, self.last)
        if straight is None:
            self._hand_over(range(self.first, self.last))
            return
        starts = self.reads.starts[self.first : self.last]
        lengths = self.reads.stops[self.first : self.last] - starts
        at = 0
        for low, high in _short_rows(starts, lengths, straight):
            self._one_by_one(straight, at, low)
            done = self.store.gather(self.reads.key, starts[low:high], lengths[low:high], straight.addresses[low:high])
            at = low + done
        self._one_by_one(straight, at, len(starts))

    def _hand_over(self, numbers: Iterable[int]) -> None:
        """Read through scratch memory."""
        for number in numbers:
            if self.sink.wants(number):
                start = int(self.reads.starts[number])
                data = self.scratch.of(int(self.reads.stops[number]) - start)
                if self._read(number, start, data):
                    self.sink.take(number, data)

    def _one_by_one(self, straight: Straight, low: int, high: int) -> None:
        addresses, ahead = straight.addresses[low:high], self.first + low
        there = np.flatnonzero(addresses)
        if not len(there):
            self._hand_over(range(ahead, self.first + high))
            return
        starts, stops = self.reads.starts[ahead : self.first + high], self.reads.stops[ahead : self.first + high]
        # One view of all places, and of what is between them, which nobody touches: a view a read would cost as much as the read.
        origin = int(addresses[there].min())
        memory = memory_at(origin, int((addresses + stops - starts)[there].max()) - origin)
        rows = zip(addresses.tolist(), starts.tolist(), stops.tolist(), straight.seen[low:high].tolist(), strict=True)
        for number, (address, start, stop, seen) in enumerate(rows, ahead):
            if not address:
                self._hand_over((number,))
                continue
            out = memory[address - origin : address - origin + stop - start]
            if not seen:
                self._read(number, start, out)
                continue
            for at in range(0, stop - start, self.step):
                piece = out[at : at + self.step]
                if not self._read(number, start + at, piece):
                    break
                self.sink.passed(number, start + at, piece)

    def _read(self, number: int, start: int, out: memoryview) -> bool:
        try:
            self.store.read(self.reads.key, start, out)
        except HoldfastError as error:
            self.sink.failed(number, error)
            return False
        return True


def _short_rows(starts: Ints, lengths: Ints, straight: Straight) -> Iterator[tuple[int, int]]:
    """Where many reads can be asked for at once: short ones, near each other, since what lies between them is mapped with them."""
    if len(starts) < GATHER_READS:
        return
    short = (straight.addresses != 0) & ~straight.seen & (lengths <= GATHER_NBYTES)
    edges = np.flatnonzero(short[1:] != short[:-1]) + 1
    for low, high in pairwise([0, *edges.tolist(), len(short)]):
        wanted = int(lengths[low:high].sum()) * GATHER_SPREAD
        if short[low] and high - low >= GATHER_READS and wanted >= int(starts[high - 1]) - int(starts[low]):
            yield low, high
