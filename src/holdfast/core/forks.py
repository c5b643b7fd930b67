"""What a forked child must not inherit: locks that are held by threads which are not in it.

`fork` copies the memory, and of the threads only the one that called it. A lock that another thread had in that moment stays taken
in the child for ever. So every lock that outlives a call is made with `renewed`, and is free again in a child.
"""

from __future__ import annotations

import os
from typing import Protocol, TypeVar
from weakref import WeakSet

__all__ = ["renewed"]


class _Lock(Protocol):
    def _at_fork_reinit(self) -> None: ...


L = TypeVar("L")

_locks: WeakSet[_Lock] = WeakSet()


def renewed(lock: L) -> L:
    """The same `Lock` or `RLock`, which from now on is free in every forked child."""
    _locks.add(lock)  # type: ignore[arg-type]  # the method has no annotation in Python's own; its logging and queues use it so
    return lock


def _in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_in_child)
