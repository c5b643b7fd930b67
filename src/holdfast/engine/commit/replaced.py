"""What a save replaced is freed behind the caller's back.

When a file loses its last name the kernel gives back its pages and its blocks, inside of the rename or the unlink: 0.2 s for a GiB,
in which the save has been done already. So a large file is held open while it loses its name, and closed by a thread. The name
changes at the same instant as ever, and nothing that a crash leaves is different: what is open goes with the process.

Until then its bytes take room on the disk. Whoever finds too little room waits for that (`wait_for_room`) and looks again.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Self

from holdfast.core.runtime import at_fork, renewed, start
from holdfast.stores.files import Files

LARGE_NBYTES = 16 << 20
"""Less is freed in 3 ms, beside which a thread is not worth it."""

MOST_HELD = 64
"""Files that are held open at once. Further ones are freed where they lose their name."""


class ReplacedFiles:
    """Files that are about to lose their names, in a block at the end of which they are let go of."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._held: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.let_go()

    def hold(self, name: str, *, at: int, nbytes: int) -> None:
        """Keep what is under a name, where it is large."""
        if nbytes >= LARGE_NBYTES and len(self._held) < MOST_HELD:
            with suppress(OSError):  # nobody misses it: the name changes all the same
                descriptor = self._files.hold(name, at=at)
                if descriptor is not None:
                    self._held.append(descriptor)

    def let_go(self) -> None:
        """Free them, on a thread of their own where one can start. The end of the program does not wait for it."""
        if not self._held:
            return
        with _lock:
            thread = start(self._close, name="holdfast-free", daemon=True)
            if thread is not None:
                _freeing[:] = [other for other in _freeing if other.is_alive()]
                _freeing.append(thread)
        if thread is None:
            self._close()

    def _close(self) -> None:
        while self._held:
            with suppress(OSError):  # also in a fork: what was inherited is closed there already
                self._files.close(self._held.pop())


_lock = renewed(threading.Lock())
_freeing: list[threading.Thread] = []
"""Threads that are at it, and perhaps some that are done."""


def wait_for_room() -> bool:
    """Come back when all that was replaced is freed. False where there was nothing to wait for."""
    with _lock:
        waiting = [thread for thread in _freeing if thread.is_alive()]
    for thread in waiting:
        thread.join()
    return bool(waiting)


at_fork(after_in_child=_freeing.clear)
