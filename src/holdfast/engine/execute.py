"""Run a read plan: threads, a budget of scratch memory, and the first failure stops the rest.

Fetches are grouped into tasks of about one block each. A task owns one scratch buffer, taken from a small pool, so that memory
beyond the targets is `threads × block` at the most. `preadv` releases the interpreter lock, so threads copy in parallel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from holdfast.core.arrays import byte_row
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.protocols import Store
from holdfast.core.runtime import memory_at
from holdfast.engine.checks import Checks
from holdfast.engine.scatter import place
from holdfast.engine.threads import run_all
from holdfast.errors import HoldfastError
from holdfast.plan.reads import Batch, Fetch, FileReads, Ints, ReadPlan, Strip, tooth_chunk, tooth_index

__all__ = ["cached_nbytes", "default_threads", "execute", "run_all"]

TASK_NBYTES = 8 << 20
"""Work that one thread takes at a time: large enough to forget the hand-over, small enough to share a tensor."""

TASK_FETCHES = 2048
"""Small reads that one thread takes at a time."""

GATHER_FETCHES = 16
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
"""A plan that reads less than this is done at once: starting threads would take longer."""


def default_threads(processes: int = 1) -> int:
    """Enough to keep the memory bus busy and some reads waiting; more only contend. Of as many processes as share the machine."""
    return max(1, min(16, 2 * (os.cpu_count() or 1) // max(processes, 1)))


def execute(plan: ReadPlan, store: Store, threads: int, checks: Checks) -> None:
    """Carry out every fetch. Raises the first error after all threads have stopped."""
    threads = threads if plan.read_nbytes >= INLINE_NBYTES else 1
    run_all(_tasks(plan, Reader(store, checks, cached_nbytes(threads, TASK_NBYTES))), threads)


def cached_nbytes(threads: int, most: int) -> int:
    """Bytes to be read, summed or written at a time: a cache full, or `most` where so many threads want the interpreter lock."""
    return CACHED_NBYTES if threads <= FEW_THREADS else most


@dataclass(frozen=True, slots=True)
class Reader:
    """What carries out the fetches of a plan."""

    store: Store
    checks: Checks
    step: int
    """Bytes that are read before they are summed."""


def _tasks(plan: ReadPlan, reader: Reader) -> Iterator[Callable[[], None]]:
    for batch in plan.batches:
        for file in batch.files:
            reach = np.cumsum(file.stops - file.starts)
            first = before = 0
            while first < len(reach):
                last = int(np.searchsorted(reach, before + TASK_NBYTES, side="right"))
                last = min(max(last, first + 1), first + TASK_FETCHES)
                yield _task(batch, file, range(first, last), reader)
                first, before = last, int(reach[last - 1])


def _task(batch: Batch, file: FileReads, numbers: range, reader: Reader) -> Callable[[], None]:
    def run() -> None:
        scratch = memoryview(b"")
        at = numbers.start
        for first, last in _rows(batch, file, numbers):
            for i in range(at, first):
                scratch = _fetch(batch, file.fetch(i), reader, scratch)
            _read_row(batch, file, range(first, last), reader)
            at = last
        for i in range(at, numbers.stop):
            scratch = _fetch(batch, file.fetch(i), reader, scratch)

    return run


def _rows(batch: Batch, file: FileReads, numbers: range) -> Iterator[tuple[int, int]]:
    """Where several fetches in a row are teeth of one strip that go straight to their places: a column of a matrix, say."""
    if len(numbers) < 4:
        return
    heads = file.heads[numbers.start : numbers.stop + 1]
    owners = file.owners[heads[:-1]]
    single = np.diff(heads) == 1
    edges = np.flatnonzero((owners[1:] != owners[:-1]) | (single[1:] != single[:-1])) + 1
    for first, last in pairwise([0, *edges.tolist(), len(owners)]):
        if last - first >= 4 and single[first]:
            strip = batch.strips[int(owners[first])]
            if strip.direct and strip.comb.outer:
                yield numbers.start + first, numbers.start + last


def _read_row(batch: Batch, file: FileReads, numbers: range, reader: Reader) -> None:
    """Read many teeth of one strip, each straight to its place. The places are computed together."""
    heads = file.heads[numbers.start : numbers.stop]
    strip = batch.strips[int(file.owners[heads[0]])]
    target = strip.target
    left, places = file.numbers[heads], np.zeros(len(heads), np.int64)
    for d in reversed(strip.comb.outer):
        left, index = np.divmod(left, strip.chunk.shape[d])
        places += index * target.strides[d]
    low = int(places.min())
    starts = file.starts[numbers.start : numbers.stop]
    lengths = file.stops[numbers.start : numbers.stop] - starts
    origin = target.__array_interface__["data"][0]
    store, checks, key, storage = reader.store, reader.checks, file.key, strip.chunk.storage
    tracked = checks.wants(storage)
    done = 0
    if not tracked and _gathered(starts, lengths):
        done = store.gather(key, starts, lengths, places + origin)
    if done == len(starts):
        return
    memory = memory_at(origin + low, int((places + lengths).max()) - low)
    rest = zip(starts[done:].tolist(), (places[done:] - low).tolist(), lengths[done:].tolist(), strict=True)
    try:
        for start, place, nbytes in rest:
            out = memory[place : place + nbytes]
            store.read(key, start, out)
            if tracked:
                checks.add(storage, start, out)
    except HoldfastError as error:
        if error.tensor is None:
            error.tensor = strip.tensor
        raise


def _gathered(starts: Ints, lengths: Ints) -> bool:
    """Whether to ask for many reads at once: short ones, near each other, since what lies between them is mapped with them."""
    if len(starts) < GATHER_FETCHES or int(lengths.max()) > GATHER_NBYTES:
        return False
    return int(lengths.sum()) * GATHER_SPREAD >= int(starts[-1]) - int(starts[0])


def _fetch(batch: Batch, fetch: Fetch, reader: Reader, scratch: memoryview) -> memoryview:
    """Read one range and put its teeth where they belong. Gives back the scratch memory, which may have grown."""
    if len(fetch.teeth) == 1:
        number, tooth = fetch.teeth[0]
        strip = batch.strips[number]
        if strip.direct:
            _read_summed(fetch, _flat(strip, tooth), strip, reader)
            return scratch
    need = fetch.stop - fetch.start
    if scratch.nbytes < need:
        scratch = np.empty(need, np.uint8).data
    fetched = scratch[:need]
    _read(reader.store, fetch.key, fetch.start, fetched, batch.strips[fetch.teeth[0][0]])
    first, last = fetch.teeth[0], fetch.teeth[-1]
    strip = batch.strips[first[0]]
    if len(fetch.teeth) > 1 and len(strip.comb.outer) == 1 and _neighbours(fetch.teeth):
        # Teeth side by side are one box of the strip: placed together.
        (axis,) = strip.comb.outer
        rows = slice(first[1], last[1] + 1)
        target = strip.target[(*(slice(None),) * axis, rows)]
        place(_slab(strip, axis, rows), strip.dtype, fetched, fetch.start, target)
        return scratch
    for number, tooth in fetch.teeth:
        strip = batch.strips[number]
        if strip.comb.outer:
            index = tooth_index(strip, tooth)
            place(tooth_chunk(strip, index), strip.dtype, fetched, fetch.start, strip.target[_keep(index)])
        else:
            place(strip.chunk, strip.dtype, fetched, fetch.start, strip.target)
            begin = strip.chunk.storage.start + strip.comb.base // 8
            end = begin + (strip.comb.extent + 7) // 8
            reader.checks.add(strip.chunk.storage, begin, fetched[begin - fetch.start : end - fetch.start])
    return scratch


def _read_summed(fetch: Fetch, out: memoryview, strip: Strip, reader: Reader) -> None:
    """Read a range straight into place; where it is summed, piece by piece."""
    storage = strip.chunk.storage
    step = reader.step if reader.checks.wants(storage) else out.nbytes
    for at in range(0, out.nbytes, step):
        piece = out[at : at + step]
        _read(reader.store, fetch.key, fetch.start + at, piece, strip)
        reader.checks.add(storage, fetch.start + at, piece)


def _neighbours(teeth: tuple[tuple[int, int], ...]) -> bool:
    """Whether these are consecutive teeth of one strip."""
    owner, number = teeth[0]
    return all(tooth == (owner, number + i) for i, tooth in enumerate(teeth))


def _slab(strip: Strip, axis: int, rows: slice) -> Chunk:
    """Consecutive teeth of a strip as one chunk."""
    box = strip.chunk.box
    start, stop = list(box.start), list(box.stop)
    start[axis], stop[axis] = start[axis] + rows.start, start[axis] + rows.stop
    return strip.chunk.narrow(Box(tuple(start), tuple(stop)))


def _read(store: Store, key: str, start: int, out: memoryview, strip: Strip) -> None:
    try:
        store.read(key, start, out)
    except HoldfastError as error:
        if error.tensor is None:
            error.tensor = strip.tensor
        raise


def _flat(strip: Strip, tooth: int) -> memoryview:
    """The target of one direct tooth as plain bytes."""
    target = strip.target[(*tooth_index(strip, tooth), ...)] if strip.comb.outer else strip.target
    # Dimensions of length 1 may carry any stride; dropping them leaves memory that is contiguous by construction.
    return byte_row(target if target.flags.c_contiguous else target.squeeze()).data


def _keep(index: tuple[int | slice, ...]) -> tuple[slice, ...]:
    """The same index with every dimension kept."""
    return tuple(at if isinstance(at, slice) else slice(at, at + 1) for at in index)
