"""A nested state as torch's distributed checkpoint flattens it: every leaf under one flat name.

    {"optim": {3: {"lr": 0.1}}, "list": [tensor, {}]}     "optim.3.lr"   ("optim", "3", "lr")     a value
                                                          "list.0"       ("list", 0)              a tensor
                                                          "list.1"       ("list", 1)              a value: an empty mapping

Mappings are entered, and their keys become text; lists are entered where a tensor or a mapping is in them; tuples never (torch
2.13, `_traverse.py`). torch drops empty mappings; here they are values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from msgspec import Struct, field

from holdfast.core import value as values
from holdfast.core.leaves import PLAIN, Leaves
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import State
from holdfast.core.table import Table
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path, Unrolled, dotted, rebuild, unroll, values_inside, walk
from holdfast.formats.tree_json.scalars import NO_UNICODE, is_unicode


class FlatValue(values.Value, frozen=True):
    """A leaf that is no tensor."""

    raw: object
    described: object
    """The object without torch's classes."""


class FlatState(Struct):
    """A state by flat names."""

    values: dict[str, FlatValue] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    pickled: set[str] = field(default_factory=set)
    """Arrays in tuples: they are pickled with the tuple, as torch does it, and are no tensors there."""
    problems: list[str] = field(default_factory=list)
    """What DCP has no form for."""

    def kept(self, table: Table) -> Table:
        """The rows that are stored as tensors."""
        if not self.pickled:
            return table
        return table.with_entries(
            [row for row, name in enumerate(table.names) if name not in self.pickled], {}
        )


def flatten(state: State) -> FlatState:
    """Flatten a described state. A tensor by itself has its name."""
    flat, leaves = FlatState(), state.leaves
    tree = dict(zip(leaves.names, [state.tree], strict=True)) if leaves.alone else state.tree
    unroll(_Flattening(flat, leaves).take(tree, ()))
    for name in [name for name in state.tensors if name not in flat.paths]:
        path = tuple(name.split("."))
        above = (flat.values.get(dotted(path[:i])) for i in range(len(path)))
        holder = next(filter(None, above), None)
        if holder is not None and not any(
            _is_tensor(inner, leaves) for inner in values_inside(holder.raw)
        ):
            flat.pickled.add(name)
        else:
            flat.problems.append(f"{name}: a tensor inside of a tuple; make it a list")
    return flat


def _is_tensor(value: object, leaves: Leaves) -> bool:
    """Whether a value is a tensor and no array."""
    if isinstance(value, np.ndarray):
        return False
    return leaves.is_tensor(value) or isinstance(leaves.described(value), LazyTensor | Composite)


def common_problems(table: Table, flat: FlatState) -> list[str]:
    """Problems with a state that no message between ranks, or no format, could hold."""
    problems: list[str] = []
    most = DEFAULTS.rank
    wrong = {
        k: kind for k, kind in enumerate(table.kinds) if kind.traits.meta or len(kind.shape) > most
    }
    for name, kind in zip(table.names, table.kind, strict=True) if wrong else ():
        if kind in wrong and wrong[kind].traits.meta:
            problems.append(f"{name}: it is on the meta device, without data")
        if kind in wrong and len(wrong[kind].shape) > most:
            problems.append(
                f"{name}: {len(wrong[kind].shape)} dimensions are more than Limits(rank={most})"
            )
    if is_unicode("".join(table.names)) and is_unicode("".join(flat.paths)):
        return problems
    names = dict.fromkeys([*table.names, *flat.paths])
    return problems + [f"{name}: {NO_UNICODE}" for name in names if not is_unicode(name)]


class _Flattening:
    """One walk through a described state."""

    def __init__(self, flat: FlatState, leaves: Leaves) -> None:
        self._flat, self._leaves = flat, leaves
        self._plain = not leaves.odd and not leaves.composites()

    def take(self, value: object, path: Path) -> Unrolled[None]:
        inside = self._children(value, path)
        if inside is None:
            self._add(value, path)
        for key, inner in inside or ():
            if isinstance(inner, Mapping | list):
                yield self.take(inner, (*path, key))
            else:
                self._add(inner, (*path, key))

    def _children(self, value: object, path: Path) -> Iterable[tuple[str | int, object]] | None:
        """The children of a mapping or a list that is entered; None for a leaf."""
        if isinstance(value, Mapping) and (value or not path):
            return (
                ()
                if self._all_tensors(value, path)
                else zip(map(str, value), value.values(), strict=True)
            )
        return enumerate(value) if isinstance(value, list) and self._is_entered(value) else None

    def _add(self, value: object, path: Path) -> None:
        flat, made = self._flat, self._leaves.described(value)
        name = ".".join(map(str, path))
        if name in flat.paths:
            flat.problems.append(f"{name}: the name of two things")
        flat.paths[name] = path
        if isinstance(made, Composite):
            flat.problems.append(f"{name}: a {made.kind} tensor")
            flat.paths |= {f"{name}.{part}": (*path, part) for part in made.parts}
        elif not isinstance(made, LazyTensor) and not self._leaves.is_tensor(value):
            flat.values[name] = FlatValue(value, self._described(value))

    def _all_tensors(self, value: Mapping[object, object], path: Path) -> bool:
        """Take a mapping of plain tensors as a whole; False where it is another one, and nothing is done."""
        leaves, flat = self._leaves, self._flat
        if not self._plain or not value or not leaves.kinds.issuperset(map(type, value.values())):
            return False
        before = "".join([f"{key}." for key in path])
        names = {f"{before}{key}": (*path, str(key)) for key in value}
        if len(names) < len(value) or not flat.paths.keys().isdisjoint(names):
            return False
        flat.paths |= names
        return True

    def _described(self, value: object) -> object:
        if isinstance(value, list | tuple) and PLAIN.issuperset(map(type, value)):
            return value
        return rebuild(
            value,
            lambda one, _: one if isinstance(one, np.ndarray) else self._leaves.described(one),
        )

    def _is_entered(self, value: object) -> bool:
        leaves = self._leaves
        inside = (
            inner
            for _, inner in walk(
                value, lambda one: enumerate(one) if isinstance(one, list) else None
            )
        )
        return any(
            isinstance(leaves.described(one), LazyTensor | Composite | Mapping)
            or leaves.is_tensor(one)
            for one in inside
        )
