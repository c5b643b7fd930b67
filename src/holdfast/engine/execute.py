"""Run a read plan: threads, a budget of scratch memory, and the first failure stops the rest.

Fetches are grouped into tasks of about one block each. A task owns one scratch buffer, taken from a small pool, so that memory
beyond the targets is `threads × block` at the most. `preadv` releases the interpreter lock, so threads copy in parallel.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from holdfast.core.protocols import Store
from holdfast.engine.checks import Checks
from holdfast.engine.place import place
from holdfast.errors import HoldfastError
from holdfast.plan.reads import Batch, Fetch, FileReads, ReadPlan, Strip, tooth_chunk, tooth_index

__all__ = ["default_threads", "execute", "run_all"]

TASK_NBYTES = 8 << 20
"""Work that one thread takes at a time: large enough to forget the hand-over, small enough to share a tensor."""

TASK_FETCHES = 512
"""Small reads that one thread takes at a time."""

INLINE_NBYTES = 1 << 20
"""A plan that reads less than this is done at once: starting threads would take longer."""


def default_threads() -> int:
    """Enough to keep the memory bus busy and some reads waiting; more only contend."""
    return min(16, 2 * (os.cpu_count() or 1))


def execute(plan: ReadPlan, store: Store, threads: int, checks: Checks) -> None:
    """Carry out every fetch. Raises the first error after all threads have stopped."""
    work = list(_tasks(plan, store, checks))
    if threads <= 1 or len(work) == 1 or plan.read_nbytes < INLINE_NBYTES:
        for task in work:
            task()
        return
    run_all(work, threads)


def run_all(work: Iterable[Callable[[], None]], threads: int) -> None:
    """Run callables on threads; the first failure, in time, keeps all others from beginning and is raised at the end."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        if stop.is_set():
            return
        try:
            task()
        except BaseException as error:
            # Here and not by whoever waits: under load that thread wakes when hundreds of further tasks have run.
            failures.append(error)
            stop.set()

    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="holdfast") as pool:
        futures: list[Future[None]] = [pool.submit(guarded, task) for task in work]
        try:
            wait(futures)
        except BaseException:
            stop.set()
            raise
    if failures:
        raise failures[0]


def _tasks(plan: ReadPlan, store: Store, checks: Checks) -> Iterator[Callable[[], None]]:
    for batch in plan.batches:
        for file in batch.files:
            first = nbytes = 0
            for i, size in enumerate((file.stops - file.starts).tolist()):
                if i > first and (nbytes + size > TASK_NBYTES or i - first >= TASK_FETCHES):
                    yield _task(batch, file, range(first, i), store, checks)
                    first, nbytes = i, 0
                nbytes += size
            if len(file.starts):
                yield _task(batch, file, range(first, len(file.starts)), store, checks)


def _task(batch: Batch, file: FileReads, numbers: range, store: Store, checks: Checks) -> Callable[[], None]:
    def run() -> None:
        scratch = memoryview(b"")
        for fetch in map(file.fetch, numbers):
            if len(fetch.teeth) == 1:
                number, tooth = fetch.teeth[0]
                strip = batch.strips[number]
                if strip.direct:
                    out = _flat(strip, tooth)
                    _read(store, fetch, out, strip)
                    checks.add(strip.chunk.storage, fetch.start, out)
                    continue
            need = fetch.stop - fetch.start
            if scratch.nbytes < need:
                scratch = np.empty(need, np.uint8).data
            fetched = scratch[:need]
            _read(store, fetch, fetched, batch.strips[fetch.teeth[0][0]])
            for number, tooth in fetch.teeth:
                strip = batch.strips[number]
                if strip.comb.outer:
                    index = tooth_index(strip, tooth)
                    place(tooth_chunk(strip, index), strip.dtype, fetched, fetch.start, strip.target[_keep(index)])
                else:
                    place(strip.chunk, strip.dtype, fetched, fetch.start, strip.target)
                    begin = strip.chunk.storage.start + strip.comb.base // 8
                    end = begin + (strip.comb.extent + 7) // 8
                    checks.add(strip.chunk.storage, begin, fetched[begin - fetch.start : end - fetch.start])

    return run


def _read(store: Store, fetch: Fetch, out: memoryview, strip: Strip) -> None:
    try:
        store.read(fetch.key, fetch.start, out)
    except HoldfastError as error:
        if error.tensor is None:
            error.tensor = strip.tensor
        raise


def _flat(strip: Strip, tooth: int) -> memoryview:
    """The target of one direct tooth as plain bytes."""
    target = strip.target[(*tooth_index(strip, tooth), ...)] if strip.comb.outer else strip.target
    # Dimensions of length 1 may carry any stride; dropping them leaves memory that is contiguous by construction.
    flat = (target if target.flags.c_contiguous else target.squeeze()).reshape(-1)
    return memoryview(flat.view(np.uint8).data)


def _keep(index: tuple[int | slice, ...]) -> tuple[slice, ...]:
    """The same index with every dimension kept."""
    return tuple(at if isinstance(at, slice) else slice(at, at + 1) for at in index)
