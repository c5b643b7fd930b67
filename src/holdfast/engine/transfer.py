"""The one engine that reads: ranges of files, by threads, each to a sink.

    plan        ranges of a file, joined into reads (engine/coalesce.py)
    transfer    reads are shared out as tasks of a few megabytes; a task does its reads one after the other
    sink        says where a read goes: straight to an address, or through scratch memory into its hands

1. Short reads in a row that go straight to their places are asked of the store by one call (`Store.gather`).
2. What is summed on its way is read a cache full at a time, and summed while it is there.
3. A thread keeps one piece of scratch memory, as long as its longest read. So memory beyond the targets is `threads × block`.
4. A read that fails is told to the sink, which raises it with the name of the tensor, or records it. The first failure that is
raised
   stops the rest.

Sinks: ranges.py, checksums.py, equal.py, scan.py. What is in memory already is handed over as it lies there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise

import numpy as np
from msgspec import Struct

from holdfast.core.arrays import Bools, Ints
from holdfast.core.protocols import Store
from holdfast.core.runtime import memory_at
from holdfast.engine.coalesce import Reads
from holdfast.engine.threads import run_all
from holdfast.errors import HoldfastError, located

TASK_NBYTES = (
    8 << 20
)  # Work that one thread takes at a time: large enough to forget the hand-over, small enough to share a tensor.
TASK_READS = 2048

GATHER_READS = 16  # Reads in a row below which the store is asked for each.
GATHER_NBYTES = (
    16 << 10
)  # A read above which copying dominates, so that one call for many saves nothing.

GATHER_SPREAD = 16  # One part in so many of a stretch must be wanted, or the system would read too much around it.
CACHED_NBYTES = 1 << 20  # Bytes that stay in the cache of a core between reading and summing them.
FEW_THREADS = 4  # Above this, pieces are larger: every call waits for the interpreter lock, some 0.2 ms for 16 threads.
INLINE_NBYTES = 1 << 20  # Less than this is read at once: starting threads would take longer.


def cached_nbytes(threads: int, most: int) -> int:
    """Bytes to be read, summed or written at a time: a cache full, or `most` where so many threads want the interpreter lock."""
    return CACHED_NBYTES if threads <= FEW_THREADS else most


class Straight(Struct):
    addresses: Ints  # In memory; 0 for a read that is to be handed over.
    seen: Bools  # Whether the sink wants to see the bytes in their place.


class Sink:
    """The receiver of the reads of one file. They come from several threads, each from one."""

    def straight(self, first: int, last: int) -> Straight | None:
        """Where reads [first, last) go, or None where all of them are handed over."""
        return None

    def wants(self, number: int) -> bool:
        """Whether a read is still wanted. Asked before one that would be handed over."""
        return True

    def passed(self, number: int, start: int, data: memoryview) -> None:
        """Bytes of a read that have come to their place; they begin with byte `start` of the file."""

    def take(self, number: int, data: memoryview) -> None:
        """All bytes of a read that goes nowhere else, in memory that is not written to and holds something else afterwards."""

    def name(self, number: int) -> str:
        """A tensor whose bytes a read has, for messages."""
        raise NotImplementedError

    def failed(self, number: int, error: HoldfastError) -> None:
        with located(tensor=self.name(number)):
            raise error


class Scratch(threading.local):
    """Memory of each thread that grows to what is asked of it."""

    _memory = memoryview(b"")

    def of(self, nbytes: int) -> memoryview:
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8).data
        return self._memory[:nbytes]


def transfer(
    work: Iterable[tuple[Store, Reads, Sink]], threads: int, *, nbytes: int = TASK_NBYTES, step: int | None = None,
    others: Sequence[Callable[[], None]] = (), stores: Iterable[Store] = (),
) -> None:  # fmt: skip
    """Do all reads, in tasks of about so many bytes, and beside them `others`, which read from these stores by themselves. Raises
    the first error after all threads have stopped."""
    jobs = list(work)
    remote = any(store.medium.requests for store, _, _ in jobs)
    threads = (
        threads
        if remote or others or sum(reads.nbytes for _, reads, _ in jobs) >= INLINE_NBYTES
        else 1
    )
    # Of a remote store each read is a task: none waits for another.
    nbytes, step = (
        (1, TASK_NBYTES) if remote else (nbytes, step or cached_nbytes(threads, TASK_NBYTES))
    )
    scratch = Scratch()
    todo = (task for job in jobs for task in tasks(*job, scratch=scratch, nbytes=nbytes, step=step))
    run_reads(chain(todo, others), threads, stores=chain((store for store, _, _ in jobs), stores))


def run_reads(work: Iterable[Callable[[], None]], threads: int, *, stores: Iterable[Store]) -> None:
    """Run tasks that read from these stores: by one thread, in their order, where one of them wants to be read so."""
    ordered = [store for store in dict.fromkeys(stores) if store.medium.in_order]
    if not ordered:
        run_all(work, threads)
        return
    with ExitStack() as blocks:
        for store in ordered:
            blocks.enter_context(store.reading())
        run_all(work, 1)


def tasks(
    store: Store,
    reads: Reads,
    sink: Sink,
    *,
    scratch: Scratch,
    nbytes: int = TASK_NBYTES,
    step: int = CACHED_NBYTES,
) -> Iterator[Callable[[], None]]:
    """The reads of one file as pieces of work. What is seen by its sink in its place is read `step` bytes at a time."""
    reach = (reads.stops - reads.starts).cumsum()
    first = before = 0
    while first < len(reach):
        last = int(reach.searchsorted(before + nbytes, side="right"))
        last = min(max(last, first + 1), first + TASK_READS)
        yield ReadTask(store, reads, sink, first, last, scratch, step).run
        first, before = last, int(reach[last - 1])


class ReadTask(Struct):
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
            for number in range(self.first, self.last):
                self._hand_over(
                    number, int(self.reads.starts[number]), int(self.reads.stops[number])
                )
            return
        at = 0
        for low, high in self._short_rows(straight):
            self._one_by_one(straight, at, low)
            span = slice(self.first + low, self.first + high)
            starts, stops = self.reads.starts[span], self.reads.stops[span]
            at = low + self.store.gather(
                self.reads.key, starts, stops - starts, straight.addresses[low:high]
            )
        self._one_by_one(straight, at, self.last - self.first)

    def _short_rows(self, straight: Straight) -> Iterator[tuple[int, int]]:
        """Where many can be asked for at once: short ones, near each other, since what lies between them is mapped with them."""
        count = self.last - self.first
        if count < GATHER_READS:
            return
        starts = self.reads.starts[self.first : self.last]
        stops = self.reads.stops[self.first : self.last]
        short = (straight.addresses != 0) & ~straight.seen & (stops - starts <= GATHER_NBYTES)
        edges = np.flatnonzero(short[1:] != short[:-1]) + 1
        for low, high in pairwise([0, *edges.tolist(), count]):
            if short[low] and high - low >= GATHER_READS:
                wanted = int((stops - starts)[low:high].sum())
                if wanted * GATHER_SPREAD >= int(starts[high - 1]) - int(starts[low]):
                    yield low, high

    def _one_by_one(self, straight: Straight, low: int, high: int) -> None:
        if low == high:
            return
        span = slice(self.first + low, self.first + high)
        starts, stops = self.reads.starts[span], self.reads.stops[span]
        addresses, seen = straight.addresses[low:high], straight.seen[low:high].tolist()
        ends = (addresses + stops - starts).tolist()
        rows = zip(addresses.tolist(), ends, starts.tolist(), seen, strict=True)
        # No call and no sum that can be done before: a column that cannot be gathered is a million of these.
        memory, read, key = memory_at(0, sys.maxsize), self.store.read, self.reads.key
        for number, (address, end, start, look) in enumerate(rows, self.first + low):
            if address and not look:
                try:
                    read(key, start, memory[address:end])
                except HoldfastError as error:
                    self.sink.failed(number, error)
            elif not address:
                self._hand_over(number, start, start + end)
            else:
                for at in range(start, start + end - address, self.step):
                    piece = memory[
                        address + at - start : min(address + at - start + self.step, end)
                    ]
                    if not self._read(number, at, piece):
                        break
                    self.sink.passed(number, at, piece)

    def _hand_over(self, number: int, start: int, stop: int) -> None:
        if self.sink.wants(number):
            memory = self.store.map(self.reads.key) if self.store.medium.resident else None
            if memory is not None and stop <= memory.nbytes:
                self.sink.take(number, memory[start:stop])
                return
            data = self.scratch.of(stop - start)
            if self._read(number, start, data):
                self.sink.take(number, data)

    def _read(self, number: int, start: int, out: memoryview) -> bool:
        try:
            self.store.read(self.reads.key, start, out)
        except HoldfastError as error:
            self.sink.failed(number, error)
            return False
        return True
