"""`install`: programs that call `torch.save` and `torch.load` use Holdfast, without a change to them.

    torch                 save, load
    torch.serialization   every name of its `__all__` that `holdfast.torch.serialization` has

Nothing else in torch is changed. What a program took from these modules before (`from torch import load`) stays what it was.
The last `uninstall` restores what the first `install` found. What others replaced in the meantime stays, with a warning.
"""

from __future__ import annotations

import threading
import warnings
from types import ModuleType, TracebackType

import torch

from holdfast.core.runtime import make_fork_safe
from holdfast.errors import HoldfastWarning

_lock = make_fork_safe(threading.Lock())
_count = 0
_replaced: list[tuple[ModuleType, str, object, object]] = []
"""Module, name, torch's object and ours."""


class Installation:
    """One `install()`. As a context manager, it is undone at the end of the block."""

    def __init__(self) -> None:
        self._done = False

    def uninstall(self) -> None:
        """Undo this installation, once."""
        self._undo()

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo()

    def _undo(self) -> None:
        with _lock:
            done, self._done = self._done, True
        if not done:
            _uninstall(stacklevel=4)


def install() -> Installation:
    """Let `torch.save`, `torch.load` and the functions beside them be Holdfast's, for the whole process.

    Use it with `with` to have it undone, or call `uninstall()`. Installing again is harmless, and has to be undone as often.
    """
    global _count, _replaced
    # Imported here, and before anything is replaced: these modules take functions of torch's that are about to be ours.
    import holdfast.torch.serialization as ours

    with _lock:
        if not _count:
            _replaced = _replacements(ours)
            for module, name, _, mine in _replaced:
                setattr(module, name, mine)
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
        theirs = []
        for module, name, before, mine in _replaced:
            if vars(module).get(name) is mine:
                setattr(module, name, before)
            else:
                theirs.append(f"{module.__name__}.{name}")
        _replaced = []
    if theirs:
        warnings.warn(
            f"{', '.join(theirs)} had been replaced by somebody else after holdfast.torch.install(), and was left as it is; "
            "it may still lead to Holdfast",
            HoldfastWarning,
            stacklevel=stacklevel,
        )


def _replacements(ours: ModuleType) -> list[tuple[ModuleType, str, object, object]]:
    """The attributes to replace. A class that we share with torch, because its identity matters, is none of them."""
    names = [
        *((torch, name) for name in ("save", "load")),
        *((torch.serialization, name) for name in torch.serialization.__all__),
    ]
    found = [
        (module, name, vars(module)[name], getattr(ours, name, None))
        for module, name in names
        if name in vars(module)
    ]
    # Not callable: a module of ours that has the name of the function in it.
    return [each for each in found if callable(each[3]) and each[3] is not each[2]]
