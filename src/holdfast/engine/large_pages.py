"""Memory that is about to be filled, in large pages where they are quick to have.

The kernel finds memory a page at a time, when it is first touched. A gigabyte is 262,144 faults of 4 KiB, which take longer than to
read it; in pages of 2 MiB they are 512, and take a quarter of the processor time. Linux has large pages for who asks (`madvise`,
the usual setting). numpy asks for every large array. torch does not, so it is done here for what a load fills.

It is no gain everywhere: where memory is in pieces, or the host of a virtual machine has taken it back, a large page takes twenty
times as long. So of every few pages one is touched at once, and the clock is looked at; where it took long, large pages are given
up for a while, and then for longer.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterable, Iterator
from functools import cache

from holdfast.stores.platform import c_function

LARGE_NBYTES = 8 << 20  # Less memory has too few pages to matter. Of as much one page is tried.
PAGE_NBYTES = 2 << 20  # A large page, of x86 and of most others.

SLOW_NS, LATE_NS = 800_000, 6_400_000
"""By the clock of the processor and by that on the wall, on which other programs have their part. A page that is there takes
200,000: it is only made zero."""

PAUSE_NBYTES = (
    128 << 20
)  # Memory left in small pages after a large one that was slow; it doubles each time.
SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


def wanted_in_large_pages(places: Iterable[tuple[int, int]]) -> None:
    """Addresses and lengths of memory that nobody has touched yet, and that will be written to from end to end. A hint, and never
    an error."""
    left, pause = 0, PAUSE_NBYTES
    for begin, end in _stretches(places) if _needs_madvise() else ():
        if left > 0:
            left -= end - begin
        elif _advise(begin, end, "MADV_HUGEPAGE") and _is_slow(begin):
            _advise(begin + PAGE_NBYTES, end, "MADV_NOHUGEPAGE")
            left, pause = pause, 2 * pause


def _stretches(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for address, nbytes in places:
        if nbytes >= LARGE_NBYTES:
            end = (address + nbytes) // PAGE_NBYTES * PAGE_NBYTES
            for begin in range(-(-address // PAGE_NBYTES) * PAGE_NBYTES, end, LARGE_NBYTES):
                yield begin, min(begin + LARGE_NBYTES, end)


def _is_slow(address: int) -> bool:
    used, now = time.thread_time_ns(), time.perf_counter_ns()
    ctypes.memset(address, 0, 1)
    return time.thread_time_ns() - used > SLOW_NS or time.perf_counter_ns() - now > LATE_NS


@cache
def _needs_madvise() -> bool:
    """Whether this is a system that gives large pages to who asks. Where everybody has them (`always`) there is nothing to ask."""
    try:
        with open(SETTING, encoding="ascii") as setting:
            return "[madvise]" in setting.read()
    except OSError:
        return False


def _advise(begin: int, end: int, advice: str) -> bool:
    call, number = c_function("madvise"), getattr(mmap, advice, None)
    if call is None or number is None or end <= begin:
        return False
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(call(begin, end - begin, number) == 0)
