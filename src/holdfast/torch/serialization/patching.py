"""`install`: from now on, programs that call `torch.save` and `torch.load` use Holdfast, without a change to them.

    torch                 save, load
    torch.serialization   every name of its `__all__` that `holdfast.torch` has

Nothing else in torch is touched. What a program took from these modules before (`from torch import load`) stays what it was.

1. Installations are counted; the last `uninstall` puts back what the first `install` found.
2. What somebody else put in our place in the meantime is theirs: it stays, and a warning says so.
"""

from __future__ import annotations

import threading
import warnings
from types import ModuleType, TracebackType

import torch

from holdfast.core.runtime import renewed
from holdfast.core.value import Value
from holdfast.errors import HoldfastWarning

TOP = ("save", "load")
"""What `torch` itself has of `torch.serialization`."""


class PatchedAttribute(Value, frozen=True):
    """One attribute of one module."""

    module: ModuleType
    name: str
    before: object
    ours: object

    def put(self) -> None:
        setattr(self.module, self.name, self.ours)

    def put_back(self) -> bool:
        """Undo `put`; False where somebody else has replaced ours."""
        if vars(self.module).get(self.name) is not self.ours:
            return False
        setattr(self.module, self.name, self.before)
        return True

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


_lock = renewed(threading.Lock())
_count = 0
_replaced: tuple[PatchedAttribute, ...] = ()


class Installation:
    """One `install()`. As a context manager, it is undone at the end of the block."""

    def __init__(self) -> None:
        self._done = False

    def uninstall(self) -> None:
        """Undo this installation, once."""
        self._undo(stacklevel=4)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo(stacklevel=4)

    def _undo(self, *, stacklevel: int) -> None:
        with _lock:
            done, self._done = self._done, True
        if not done:
            _uninstall(stacklevel=stacklevel)


def install() -> Installation:
    """Let `torch.save`, `torch.load` and the functions beside them be Holdfast's, for the whole process.

    Use it with `with` to have it undone, or call `uninstall()`. Installing again is harmless, and has to be undone as often.
    """
    global _count, _replaced
    # Imported here, and before anything is replaced: these modules take functions of torch's that are about to be ours.
    import holdfast.torch as ours

    with _lock:
        if not _count:
            _replaced = tuple(_replacements(ours))
            for each in _replaced:
                each.put()
        _count += 1
    return Installation()


def uninstall() -> None:
    """Undo one `install()`; nothing happens where there is none."""
    _uninstall(stacklevel=3)


def _uninstall(*, stacklevel: int) -> None:
    global _count, _replaced
    with _lock:
        if not _count:
            return
        _count -= 1
        if _count:
            return
        replaced, _replaced = _replaced, ()
        theirs = [str(each) for each in replaced if not each.put_back()]
    if theirs:
        warnings.warn(
            f"{', '.join(theirs)} had been replaced by somebody else after holdfast.torch.install(), and was left as it is; "
            "it may still lead to Holdfast",
            HoldfastWarning,
            stacklevel=stacklevel,
        )


def _replacements(ours: ModuleType) -> list[PatchedAttribute]:
    """What there is to replace. A name that we share with torch (a class whose identity matters) is not."""
    found = []
    places: list[tuple[ModuleType, list[str]]] = [
        (torch, [name for name in TOP if name in vars(torch)]),
        (torch.serialization, [name for name in torch.serialization.__all__ if name in vars(torch.serialization)]),
    ]
    for module, names in places:
        for name in names:
            mine, before = getattr(ours, name, None), vars(module)[name]
            # Not callable: a module of ours that has the name of the function in it.
            if callable(mine) and mine is not before:
                found.append(PatchedAttribute(module, name, before, mine))
    return found
