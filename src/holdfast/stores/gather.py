"""Many short ranges of one file, to as many places in memory, with one system call for a thousand of them.

A column of a matrix is thousands of reads of a few kilobytes. Each `preadv` from Python takes 2 to 6 µs, most of it on the way to
the kernel. Here the stretch of file is mapped, and `process_vm_readv` of our own process copies out of the mapping.

Not by touching the mapping: where the file shrinks meanwhile, that would end the process (SIGBUS). The call comes back short
instead, and the caller reads in the ordinary way and finds out what is wrong. Where a sandbox forbids the call, it does so as well.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Protocol, cast

import numpy as np

from holdfast.core.arrays import Ints

__all__ = ["Ints", "gather"]


WINDOW_NBYTES = 8 << 20
"""File that is mapped at a time: what is mapped counts as memory of the process, although nobody else has to do without it."""

VECTORS = 1024
"""The most ranges that Linux takes in one call (IOV_MAX)."""


class ProcessRead(Protocol):
    """`process_vm_readv` of the C library."""

    def __call__(self, pid: int, local: int, locals: int, remote: int, remotes: int, flags: int, /) -> int: ...


@cache
def _process_vm_readv() -> ProcessRead | None:
    try:
        found = ctypes.CDLL(None).process_vm_readv
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.c_ssize_t
    found.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return cast(ProcessRead, found)


def gather(descriptor: int, starts: Ints, nbytes: Ints, places: Ints) -> int:
    """Copy ranges of a file (first byte, length), sorted and inside of it, to addresses in memory.

    How many were copied: the first so many of them. It is up to the caller to read the others.
    """
    call = _process_vm_readv()
    first = 0
    while call is not None and first < len(starts):
        last = max(int(np.searchsorted(starts, starts[first] + WINDOW_NBYTES)), first + 1)
        first += _copy(call, descriptor, starts[first:last], nbytes[first:last], places[first:last])
        if first < last:
            break
    return first


def _copy(call: ProcessRead, descriptor: int, starts: Ints, nbytes: Ints, places: Ints) -> int:
    """The ranges of one window."""
    low = int(starts[0]) & -mmap.ALLOCATIONGRANULARITY
    try:
        area = mmap.mmap(descriptor, int((starts + nbytes).max()) - low, mmap.MAP_SHARED, mmap.PROT_READ, offset=low)
    except (OSError, ValueError):
        return 0
    with area:
        mapped = np.frombuffer(area, np.uint8)
        origin = mapped.__array_interface__["data"][0] - low
        del mapped
        remote = np.stack((starts + origin, nbytes), axis=1)
        local = np.stack((places, nbytes), axis=1)
        for first in range(0, len(starts), VECTORS):
            count = min(VECTORS, len(starts) - first)
            at = 16 * first
            got = call(os.getpid(), local.ctypes.data + at, count, remote.ctypes.data + at, count, 0)
            if got != int(nbytes[first : first + count].sum()):
                return first
    return len(starts)
