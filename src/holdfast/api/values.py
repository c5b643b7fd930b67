"""What differs between two trees besides their tensors: plain values, containers, objects that were not built.

The trees may be hostile: shared a million times, cyclic, deep. So each is laid out flat first, path by path, with an explicit
stack and a budget for what is met again; then paths that both have are compared, leaf by leaf, at a cost that the leaf's size
bounds. No method of a foreign type is ever called.

Leaves are scalars, arrays, sets, and containers without anything in them. The kind of a container (list, tuple, dict) and the class
of an object are leaves of their own at its path; a dict and an OrderedDict are of one kind, since most formats know only one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from holdfast.api.brief import brief, scalar
from holdfast.core.composite import Composite
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import Path, dotted, step

__all__ = ["ABSENT", "Absent", "ValueChange", "compare_metadata", "compare_values"]

SPARE_STEPS = 100_000
"""Values that are looked at again because their container stands in several places; each is looked at once in any case."""

DEEPEST = 256
"""Containers inside containers that are entered. `open` refuses more than `Limits.depth`, which is 64, in the first place."""

SHOWN = 400
"""Characters to which a value of no known type, or a member of a set, is cut before it is compared as text."""


class Absent(Enum):
    """The one value that stands for no value."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = Absent.ABSENT


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A plain value that is not the same in both, or is in one of them only."""

    path: Path
    a: object
    """The value, or `ABSENT`."""
    b: object

    @property
    def name(self) -> str:
        """The dotted path."""
        return dotted(self.path)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a container is, as a value that can be compared and shown."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class Level:
    """A container that is being walked."""

    children: Iterator[tuple[str | int, object]]
    owner: int
    """Its identity."""
    path: Path
    again: bool
    """Whether it, or one around it, was walked before."""


def compare_values(a: object, b: object) -> tuple[tuple[ValueChange, ...], tuple[str, ...]]:
    """Everything that differs, in the order of `a` and then of `b`; and sentences about what was not looked at."""
    notes: list[str] = []
    left, right = _flat(a, "first", notes), _flat(b, "second", notes)
    changes = []
    for path, value in left.items():
        other = right.get(path, ABSENT)
        if isinstance(other, Absent) and isinstance(value, Kind):
            continue  # what is in the container says so
        if isinstance(other, Absent) or not same_value(value, other):
            changes.append(ValueChange(path, value, other))
    changes += [ValueChange(p, ABSENT, v) for p, v in right.items() if p not in left and not isinstance(v, Kind)]
    return tuple(changes), tuple(notes)


def _flat(tree: object, which: str, notes: list[str]) -> dict[Path, object]:
    """The leaves of a tree by their paths, in order."""
    found: dict[Path, object] = {}
    levels: list[Level] = [Level(iter([("", tree)]), 0, (), False)]
    on_path: set[int] = set()
    seen: set[int] = set()
    spare = SPARE_STEPS
    left_out = False
    while levels:
        level = levels[-1]
        spare -= level.again
        item = next(level.children, None) if spare >= 0 or not level.again else None
        if item is None:
            levels.pop()
            on_path.discard(level.owner)
            continue
        key, value = item
        path = (*level.path, key) if len(levels) > 1 else ()
        if isinstance(value, LazyTensor) or id(value) in on_path:
            continue
        inside = _inside(value)
        if inside is None:
            _enter(found, path, value)
            continue
        again = level.again or id(value) in seen
        if len(levels) > DEEPEST or (again and spare <= 0):
            left_out = True
            continue
        described = _described(value)
        if described is not None:
            _enter(found, path, described)
        seen.add(id(value))
        on_path.add(id(value))
        levels.append(Level(iter(inside), id(value), path, again))
    if left_out or spare < 0:
        notes.append(f"the {which} tree is too deep, or shares its containers too often, for all of it to be compared")
    return found


def _enter(found: dict[Path, object], path: Path, value: object) -> None:
    count, at = 1, path
    while at in found:  # keys that are written alike: two objects, say
        count += 1
        at = (*path[:-1], f"{path[-1] if path else ''}#{count}")
    found[at] = value


def _inside(value: object) -> Iterable[tuple[str | int, object]] | None:
    """What is in a container that has something in it; None for a leaf."""
    match value:
        case dict() if value:
            return ((step(k), v) for k, v in value.items())
        case list() | tuple() if value:
            return enumerate(value)
        case Opaque():
            return value.children()
        case Composite():
            return value.attributes.items()
        case _:
            return None


def _described(value: object) -> object:
    """The leaf that stands for a container itself; None where its content says enough."""
    match value:
        case dict():
            return Kind("dict")
        case list():
            return Kind("list")
        case tuple():
            return Kind("tuple")
        case Opaque():
            return value.what if isinstance(value.what, Global) else brief(value.what, SHOWN)
        case Composite():
            return Kind(f"{value.kind} tensor {list(value.shape)}")
        case _:
            return None


def same_value(a: object, b: object) -> bool:
    """Whether two leaves are of one type and equal; NaN is the same as NaN, and 0.0 is not the same as -0.0."""
    if isinstance(a, dict) and isinstance(b, dict):
        return not a and not b
    if type(a) is not type(b):
        return False
    match a, b:
        case float(), float():
            return _float_bits(a) == _float_bits(b)
        case complex(), complex():
            return (_float_bits(a.real), _float_bits(a.imag)) == (_float_bits(b.real), _float_bits(b.imag))
        case np.generic(), np.generic():
            return same_array(np.asarray(a), np.asarray(b))
        case np.ndarray(), np.ndarray():
            return same_array(a, b)
        case (set(), set()) | (frozenset(), frozenset()):
            return _members(a) == _members(b)
        case Kind(), Kind():
            return a == b
    if scalar(a):
        return bool(a == b)
    return brief(a, SHOWN) == brief(b, SHOWN)


def _float_bits(value: float) -> bytes:
    return b"nan" if value != value else struct.pack("<d", value)


def same_array(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.hasobject:
        return [brief(v, SHOWN) for v in a.reshape(-1)] == [brief(v, SHOWN) for v in b.reshape(-1)]
    return a.tobytes() == b.tobytes()


def _members(values: object) -> list[tuple[str, str]]:
    """Members of a set in an order, without hashing or comparing what a file made."""
    return sorted((type(v).__name__, brief(v, SHOWN)) for v in values) if isinstance(values, set | frozenset) else []


def compare_metadata(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[ValueChange, ...]:
    """The text that two files carry about themselves."""
    differing = [key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)]
    return tuple(ValueChange(("__metadata__", key), a.get(key, ABSENT), b.get(key, ABSENT)) for key in differing)
