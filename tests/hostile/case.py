"""`Case`: one hostile input, and what must happen when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import holdfast
from holdfast import errors

__all__ = ["Case", "Check", "either", "foreign", "opens", "refused"]

Check = Callable[[holdfast.Checkpoint], object]
Make = Callable[[Path], bytes | Path]


@dataclass(frozen=True)
class Case:
    """A named input: bytes, or a path under the folder that `make` is given."""

    name: str
    make: Make
    refusals: tuple[type[errors.HoldfastError], ...]
    """The classes of which one must be raised by opening or by reading; empty where the input must open, as inert data."""
    may_open: bool = False
    """Whether opening is as good as a refusal: the bounds and the watch are what the case is about."""
    check: Check | None = None
    """What must hold for a checkpoint that opened; a false result is a failure."""

    def __str__(self) -> str:
        return self.name


def _maker(source: bytes | Make) -> Make:
    return (lambda _: source) if isinstance(source, bytes) else source


def opens(name: str, source: bytes | Make, check: Check | None = None) -> Case:
    """A case that must open as data."""
    return Case(name, _maker(source), (), check=check)


def refused(name: str, source: bytes | Make, *refusals: type[errors.HoldfastError]) -> Case:
    """A case that must be refused with one of these errors, by default any `FormatError`."""
    return Case(name, _maker(source), refusals or (errors.FormatError,))


def either(name: str, source: bytes | Make) -> Case:
    """A case that may open or be refused, within the bounds."""
    return Case(name, _maker(source), (errors.HoldfastError,), may_open=True)


def foreign(*names: str) -> Check:
    """Checks that these globals are listed as not built."""
    return lambda ckpt: {str(f.what) for f in ckpt.foreign} >= set(names)
