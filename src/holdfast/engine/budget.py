"""A budget of memory: how many threads may work within it, and on blocks of which size.

The block shrinks first, and then there are fewer threads. A budget that not even one smallest block fits into is refused.
"""

from __future__ import annotations

from holdfast.core.quantities import Size, byte_count
from holdfast.core.value import Value
from holdfast.engine.threads import default_threads
from holdfast.errors import LimitExceeded

SMALLEST_BLOCK_NBYTES = 64 << 10
LARGEST_BLOCK_NBYTES = 4 << 20

REMOTE_BLOCK_NBYTES = (
    1 << 20
)  # A remote store is not asked for smaller pieces: there are fewer threads instead.
BASE_NBYTES = (
    64 << 20
)  # What the plan and the interpreter take beside the blocks, counted against the budget.
COPIES = 4  # Blocks that one thread may hold: what was read, what is computed from it, what is written, what is checked.


class Budget(Value, frozen=True):
    threads: int
    block: int

    @property
    def peak_nbytes(self) -> int:
        return BASE_NBYTES + self.threads * COPIES * self.block


def budget(
    max_memory: Size,
    threads: int | None = None,
    *,
    smallest: int = SMALLEST_BLOCK_NBYTES,
    requests: int = 0,
    processes: int = 1,
) -> Budget:
    """What fits into so many bytes. `smallest` is the block that cannot be cut: all threads get it, or fewer threads do. `requests`
    is how many reads a remote source wants under way at once; its blocks are larger, and it takes half of the memory, since the
    target may be remote as well. `processes` share the machine. Raises `LimitExceeded` where not even that fits, and says what
    would. Threads that the caller asked for are never taken away."""
    room, workers = (
        byte_count(max_memory) - BASE_NBYTES,
        threads or max(default_threads(processes), requests),
    )
    least, most = (
        (REMOTE_BLOCK_NBYTES, 2 * LARGEST_BLOCK_NBYTES)
        if requests
        else (smallest, LARGEST_BLOCK_NBYTES)
    )
    room = room // 2 if requests else room
    if threads is None:
        workers = max(1, min(workers, room // (COPIES * max(least, smallest))))
    block = min(max(most, smallest), room // (workers * COPIES))
    if block < smallest:
        least = BASE_NBYTES + workers * COPIES * smallest * (2 if requests else 1)
        users = "one thread needs" if workers == 1 else f"{workers} threads need"
        message = f"max_memory is too small: {users} {least:,} bytes; pass at least that"
        if workers > 1:
            message += ", or fewer threads"
        raise LimitExceeded(message, expected=least, found=byte_count(max_memory))
    return Budget(workers, block)


def reading_threads(max_memory: Size | None, threads: int | None = None, processes: int = 1) -> int:
    """Threads for a verb that reads in blocks of its own, a few megabytes each: as many as were asked for, or as fit. The machine
    is shared by so many processes."""
    if max_memory is None:
        return threads or default_threads(processes)
    return budget(max_memory, threads, smallest=LARGEST_BLOCK_NBYTES, processes=processes).threads
