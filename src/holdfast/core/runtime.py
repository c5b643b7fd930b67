"""What belongs to the whole process: threads, the garbage collector, locks in forks, raw memory."""

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
    """Call a function on a new thread.

    Returns:
        The thread, or None if no thread can be started. Then the function is not called.
    """
    thread = threading.Thread(target=run, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError:
        # The system or the user has too many threads (`ulimit -u`), or the program is ending.
        return None
    return thread


def cut_traceback(error: HoldfastError) -> None:
    """Remove the frames inside of Holdfast from an error, so that users see only their own code.

    The cause of the error is treated in the same way if it is an error of Holdfast. Any other cause
    keeps its frames, because it may be a bug.
    """
    error.__traceback__ = None
    if isinstance(error.__cause__, HoldfastError):
        error.__cause__.__traceback__ = None


# Not a generator with `contextmanager`: entering one takes as long as opening a small archive.
class gc_paused:  # noqa: N801  # used like a function
    """Turn off the cyclic garbage collector inside of a `with` block.

    Opening 100,000 tensors makes a million objects, and none of them is garbage. The collector
    would visit all of them again and again, which takes up to half of the time.
    """

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *exception: object) -> None:
        if self._was_enabled:
            gc.enable()


MethodT = TypeVar("MethodT", bound=Callable[..., object])


def bind_weakly(method: MethodT) -> MethodT:
    """Return a method that holds only a weak reference to its object.

    An object that stores its own methods is a reference cycle. Only the garbage collector frees it,
    and a training loop may have turned that off. If the methods are bound weakly, the object is
    freed with the last reference to it. Whoever calls the methods must hold such a reference.
    """
    if not isinstance(method, MethodType):
        return method
    weak_object = proxy(method.__self__)
    return MethodType(method.__func__, weak_object)  # type: ignore[return-value]  # same signature


class PortableMethod:
    """A method with a weak reference to its object, which can be pickled together with the object.

    After unpickling, it is the method of the unpickled object.
    """

    __slots__ = ("_name", "_owner")

    def __init__(self, method: Callable[..., object]) -> None:
        self._owner = ref(method.__self__)  # type: ignore[attr-defined]  # a bound method
        self._name = method.__name__

    def __call__(self, *args: object) -> Any:  # noqa: ANN401  # the result of the method
        return getattr(self._owner(), self._name)(*args)

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_method, (self._owner(), self._name)


def _restore_method(owner: object, name: str) -> PortableMethod:
    return PortableMethod(getattr(owner, name))


class _Lock(Protocol):
    def _at_fork_reinit(self) -> None: ...


LockT = TypeVar("LockT")

_locks: set[ref[_Lock]] = set()
"""The locks to release in forked children. Adding and discarding are atomic, and need no lock."""


def make_fork_safe(lock: LockT) -> LockT:
    """Release a `Lock` or `RLock` in every forked child, and return it.

    `fork` copies the memory of a process, but of its threads only the one that calls it. A lock
    that another thread holds at that moment would stay locked in the child for ever. So every lock
    that outlives a call must be registered here.

    >>> with make_fork_safe(threading.Lock()):
    ...     pass
    """
    # The type of a lock does not declare `_at_fork_reinit`. Python's logging and queues use it for
    # the same purpose.
    _locks.add(ref(lock, _locks.discard))  # type: ignore[arg-type]
    return lock


def _release_locks() -> None:
    for lock_ref in list(_locks):
        lock = lock_ref()
        if lock is not None:
            lock._at_fork_reinit()


def _do_nothing() -> None: ...


def at_fork(
    *,
    before: Callable[[], None] = _do_nothing,
    after_in_parent: Callable[[], None] = _do_nothing,
    after_in_child: Callable[[], None] = _do_nothing,
) -> None:
    """Register functions to call whenever this process forks. On Windows, which has no fork, do
    nothing.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=before, after_in_parent=after_in_parent, after_in_child=after_in_child
        )


at_fork(after_in_child=_release_locks)

_exit_functions: list[Callable[[], None]] = []


def at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Register a function to call when the program ends, and return it.

    It is called after all handlers of `atexit` that were registered since Holdfast was imported.
    These may still read or save checkpoints, which needs what the function shuts down.
    """
    _exit_functions.append(function)
    return function


@atexit.register
def _call_exit_functions() -> None:
    for function in reversed(_exit_functions):
        function()


def copy_compactly(texts: Sequence[str]) -> list[str]:
    """Copy texts so that the copies lie together in memory.

    A parser makes names and other objects in turns. If only the names are kept, they keep the
    allocator's blocks between them in use, half a kilobyte for each name.

    >>> copy_compactly(["a", "b.c"])
    ['a', 'b.c']
    """
    copies = "\0".join(texts).split("\0")
    # A hostile name may contain the separator.
    if len(copies) != len(texts):
        return [*texts]
    return copies


def compact_in_place(texts: list[str]) -> None:
    """Store the texts of a list next to each other in memory, if nobody else holds them.

    Python frees memory in arenas of a megabyte. After a large pickle was read, a name is left in
    nearly every arena. With the names together, these arenas are free: 0.9 kB for each of 200,000
    tensors of a `.pt` file.

    >>> names = ["a", "b.c"]
    >>> compact_in_place(names)
    >>> names
    ['a', 'b.c']
    """
    joined = "\0".join(texts)
    if joined.count("\0") == len(texts) - 1:
        # The old texts go first, so that the new ones do not fill the gaps between them.
        texts.clear()
        texts += joined.split("\0")


# The whole address space as one buffer, of which only slices are accessed. A buffer for each view
# would make ctypes create a class for each length, which takes longer than reading a short range.
_ADDRESS_SPACE = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")


def address_of(array: np.ndarray) -> int:
    """Return the memory address of the first element of an array."""
    # `array.ctypes` takes a quarter of the time, but raises audit events, which reading must not
    # do.
    address: int = array.__array_interface__["data"][0]
    return address


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return a writable view of memory. The caller keeps its owner alive while it uses the view."""
    return _ADDRESS_SPACE[address : address + nbytes]


def memories_at(addresses: Sequence[int], nbytes: Sequence[int]) -> list[memoryview]:
    """Return writable views of memory at many addresses, as `memory_at` does for one.

    This takes a quarter of the time of one call for each address.
    """
    slices = map(slice, addresses, map(add, addresses, nbytes))
    return list(map(_ADDRESS_SPACE.__getitem__, slices))
