"""Host memory that a GPU copies from and to by itself, kept from one call to the next.

Copies between a GPU and ordinary memory pass through a small buffer of the driver's, on one core: 1.3 GB/s for `.cpu()` where the
bus gives 55. Page-locked memory has no such detour, but locking takes time: 0.4 s for the GiB that `pin_memory=True` gives. Here
the pages are large ones, touched by all cores and then registered, which takes 0.04 s (measured on an H200 with 16 cores), and
the blocks are kept for the next load or save, up to `KEPT_NBYTES`.

Where locking is refused, because the system's limit is reached or there is no GPU, the memory is ordinary and everything works as
it would with locked memory, more slowly. Whoever asked finds out by `HostBlock.locked`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch

from holdfast.core.runtime import at_fork, make_fork_safe
from holdfast.engine.threads import run_all
from holdfast.stores.platform import allocate_unforked_memory, request_large_pages

BLOCK_NBYTES = 8 << 20
"""What one thread reads at a time. Every hand-over between threads takes the interpreter lock, so less is slower; and what has left
the caches by the time it is copied is fetched from memory once more, so more is slower, too (docs/design/025-floors.md)."""

KEPT_NBYTES = 1 << 30
"""Bytes of blocks that are kept for the next call."""

PAGE = 4096
TOUCH_NBYTES = 64 << 20
"""Memory that one thread touches at a time."""

PORTABLE = 1
"""cudaHostRegisterPortable: locked for every GPU of the process."""


def lock(address: int, nbytes: int) -> bool:
    """Lock pages for GPUs. False where that cannot be."""
    if not torch.cuda.is_available():
        return False
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, nbytes, PORTABLE)) == 0:
        return True
    _forget_error()
    return False


def unlock(address: int) -> None:
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostUnregister(address)) != 0:
        _forget_error()


def _forget_error() -> None:
    """Take the runtime's last failure from it: torch would take it for that of its next kernel."""
    with suppress(RuntimeError):  # this is the one that asks
        torch.empty(1, device="cuda").zero_()


class HostBlock:
    def __init__(self, nbytes: int, *, lock_nbytes: int | None = None) -> None:
        """`lock_nbytes` of it are locked, from the front; all of it where that is not said."""
        self.nbytes = nbytes
        room = max(-(-nbytes // PAGE) * PAGE, PAGE)
        # What is locked is to be in large pages whatever they cost: it is paid once, and a GPU has fewer of them to look up.
        self.array: np.ndarray = np.frombuffer(
            allocate_unforked_memory(room, large_pages=lock_nbytes != 0), np.uint8
        )
        self.tensor = torch.from_numpy(self.array)
        self.address: int = self.array.ctypes.data
        if lock_nbytes == 0:
            request_large_pages([(self.address, room)])
        self.locked_nbytes = 0
        """Bytes at the front that GPUs copy from and to by themselves."""
        wanted = room if lock_nbytes is None else min(lock_nbytes // PAGE * PAGE, room)
        if wanted:
            self._touch(wanted)
            if lock(self.address, wanted):
                self.locked_nbytes = wanted

    @property
    def locked(self) -> bool:
        return self.locked_nbytes >= self.nbytes

    def free(self) -> None:
        """Unlock. The memory itself goes with the last array over it."""
        if self.locked_nbytes:
            self.locked_nbytes = 0
            unlock(self.address)

    def __del__(self) -> None:
        if getattr(self, "locked_nbytes", 0) and torch is not None and torch.cuda.is_initialized():
            self.free()

    def _touch(self, nbytes: int) -> None:
        """Have the kernel find all pages now, on all cores: locking would do it on one."""
        array = self.array

        def task(start: int) -> Callable[[], None]:
            def run() -> None:
                array[start : min(start + TOUCH_NBYTES, nbytes) : PAGE] = 0

            return run

        tasks = [task(start) for start in range(0, nbytes, TOUCH_NBYTES)]
        run_all(tasks, min(len(tasks), os.cpu_count() or 1)) if len(tasks) > 1 else tasks[0]()


class Pool:
    """Blocks of one size that are lent to one job at a time and kept for the next one."""

    def __init__(
        self, *, kept_nbytes: int = KEPT_NBYTES, make: Callable[[int], HostBlock] = HostBlock
    ) -> None:
        self._kept_nbytes = kept_nbytes
        self._make = make
        # Of the kind that a thread may take twice: a block can come back when the collector frees what held it, at any moment.
        self._lock = make_fork_safe(threading.RLock())
        self._free: list[HostBlock] = []

    def lend(self, count: int, nbytes: int = BLOCK_NBYTES) -> list[HostBlock]:
        """Lend so many blocks. Those of another size than usual are made for this job alone."""
        taken: list[HostBlock] = []
        with self._lock:
            while nbytes == BLOCK_NBYTES and self._free and len(taken) < count:
                taken.append(self._free.pop())
        try:
            while len(taken) < count:
                taken.append(self._make(nbytes))
        except BaseException:
            self.take_back(taken)
            raise
        return taken

    def take_back(self, blocks: Sequence[HostBlock]) -> None:
        """Take blocks back that nothing is copied from or to any more."""
        for block in blocks:
            with self._lock:
                keep = (
                    block.nbytes == BLOCK_NBYTES
                    and (len(self._free) + 1) * BLOCK_NBYTES <= self._kept_nbytes
                )
                if keep:
                    self._free.append(block)
            if not keep:
                block.free()

    @property
    def kept_nbytes(self) -> int:
        with self._lock:
            return sum(block.nbytes for block in self._free)

    def free(self) -> None:
        """Free all blocks that nobody uses."""
        with self._lock:
            blocks, self._free = self._free, []
        for block in blocks:
            block.free()

    def forget(self) -> None:
        """In a fork: blocks are not mapped there (`MADV_DONTFORK`), and their locks are the parent's."""
        for block in self._free:
            block.locked_nbytes = 0
        self._free = []


POOL = Pool()

at_fork(after_in_child=POOL.forget)


def available_nbytes() -> int:
    """Memory that the system could give to a new program, as Linux counts it; 0 where that is not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 0
