"""What belongs to the process: its threads, its garbage collector, its locks over a fork, its memory by address."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from operator import add
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import proxy, ref

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    import numpy as np


def start_thread(
    run: Callable[[], None], *, name: str, daemon: bool | None = None
) -> threading.Thread | None:
    """Call something on a thread of its own. None, and nothing done, where no thread can be started."""
    thread = threading.Thread(target=run, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError:
        # The limit of the system or the user (ulimit -u), or the program ends.
        return None
    return thread


def cut_traceback(error: HoldfastError) -> None:
    """Forget the frames inside of Holdfast, so that the error shows the frames of the caller alone.

    A cause that is no error of Holdfast keeps its frames: it may be a bug.
    """
    error.__traceback__ = None
    if isinstance(error.__cause__, HoldfastError):
        error.__cause__.__traceback__ = None


class gc_paused:  # noqa: N801  # a block, said as one; a generator would take as long as a small archive has for it all
    """No cyclic garbage collection meanwhile. A description of 100,000 tensors is a million objects, none of them garbage; the
    collector would walk all of them again and again, for up to half of the time."""

    __slots__ = ("_resting",)

    def __enter__(self) -> None:
        self._resting = gc.isenabled()
        gc.disable()

    def __exit__(self, *raised: object) -> None:
        if self._resting:
            gc.enable()


C = TypeVar("C", bound=Callable[..., object])


def bind_weakly(method: C) -> C:
    """Bind a method to a weak reference of its object. An object that keeps methods of its own is a cycle: it stays until the
    collector comes, which a training loop may have turned off. With methods that are kept `bind_weakly` it
    goes with its last user, who
    must hold it for as long as they are called."""
    if not isinstance(method, MethodType):
        return method
    return MethodType(method.__func__, proxy(method.__self__))  # type: ignore[return-value]  # called like the one that was given


class PortableMethod:
    """A method that is kept `bind_weakly` by an object that may travel to another process, where it is the
    method of what arrived."""

    __slots__ = ("_name", "_owner")

    def __init__(self, method: Callable[..., object]) -> None:
        self._owner = ref(method.__self__)  # type: ignore[attr-defined]  # a method has one
        self._name = method.__name__

    def __call__(self, *args: object) -> Any:  # noqa: ANN401  # whatever the method gives
        return getattr(self._owner(), self._name)(*args)

    def __reduce__(self) -> tuple[object, ...]:
        return _arrived, (self._owner(), self._name)


def _arrived(owner: object, name: str) -> PortableMethod:
    return PortableMethod(getattr(owner, name))


class _Lock(Protocol):
    def _at_fork_reinit(self) -> None: ...


L = TypeVar("L")

_locks: set[ref[_Lock]] = (
    set()
)  # Each goes with its lock. Adding and discarding are one step each: no lock is needed.


def make_fork_safe(lock: L) -> L:
    """Make a `Lock` or `RLock` free in every forked child, and return it. `fork` copies memory but only the calling thread. A lock
    that another thread held in that moment would stay taken in the child for ever. So every lock that outlives a call is made with
    `make_fork_safe`."""
    # The method has no annotation in Python's own; its logging and queues use it so.
    _locks.add(ref(lock, _locks.discard))  # type: ignore[arg-type]
    return lock


def _in_child() -> None:
    for lock in [one() for one in list(_locks)]:
        if lock is not None:
            lock._at_fork_reinit()


Call = Callable[[], None]
NOTHING: Call = lambda: None  # noqa: E731  # a default


def at_fork(
    *, before: Call = NOTHING, after_in_parent: Call = NOTHING, after_in_child: Call = NOTHING
) -> None:
    """Call these whenever this process forks. Windows has no fork, and nothing to call."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=before, after_in_parent=after_in_parent, after_in_child=after_in_child
        )


at_fork(after_in_child=_in_child)
_ends: list[Callable[[], None]] = []


def at_exit(end: Callable[[], None]) -> Callable[[], None]:
    """Call this when the program ends, after every handler of `atexit` that was registered since Holdfast was imported. Such a
    handler may read or save; what is ended here is what that needs."""
    _ends.append(end)
    return end


@atexit.register
def _at_exit() -> None:
    for end in reversed(_ends):
        end()


def copy_compactly(texts: Sequence[str]) -> list[str]:
    """Copies of texts that lie together in memory.

    Texts that a parser made hold the memory of what it made between them, half a kilobyte for each name. With the copies it is
    freed.
    >>> copy_compactly(["a", "b.c"])
    ['a', 'b.c']
    """
    copies = "\0".join(texts).split("\0")
    return copies if len(copies) == len(texts) else [*texts]


# Everything that has an address, as one row. Nothing is touched but what somebody cuts out of it. A row for each view would make
# ctypes make a class for each length, which takes longer than to read a short range.
_ALL = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")


def address_of(array: np.ndarray) -> int:
    """Return where the first element of an array lies in memory."""
    # ctypes tells it in a quarter of the time, but raises audit events, which reading must not do.
    address: int = array.__array_interface__["data"][0]
    return address


def memory_at(address: int, nbytes: int) -> memoryview:
    """A writable view of memory that somebody else owns, and keeps alive for as long as the view is used."""
    return _ALL[address : address + nbytes]


def memories_at(addresses: Sequence[int], nbytes: Sequence[int]) -> list[memoryview]:
    """Writable views of memory at many addresses, as `memory_at`: each in a quarter of the time."""
    return list(map(_ALL.__getitem__, map(slice, addresses, map(add, addresses, nbytes))))
