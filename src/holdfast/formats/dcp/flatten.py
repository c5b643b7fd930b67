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
from holdfast.core.leaves import NO_LEAVES, PLAIN_VALUE_TYPES, Leaves
from holdfast.core.protocols import State
from holdfast.core.table import Table
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import LONE_TENSOR_NAME, Path, Unrolled, join_path, rebuild, unroll, walk


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
    root = leaves.describe(state.tree)
    if isinstance(root, Composite):
        # Only its parts have rows and names, so there is nothing to flatten.
        flat.problems.append(f"{LONE_TENSOR_NAME}: a {root.kind} tensor")
        return flat
    tree = {LONE_TENSOR_NAME: state.tree} if leaves.is_single_tensor else state.tree
    unroll(_Flattening(flat, leaves).take(tree, ()))
    if leaves is not NO_LEAVES:
        _match_rows(flat, state)
    return flat


def _match_rows(flat: FlatState, state: State) -> None:
    """Compare the flat names with the rows: list arrays that are pickled, and report what would be lost."""
    leaves, names = state.leaves, state.tensors.names
    for _, name in leaves.numbered_names:
        # The second row has a number behind its name, so a flat name may lead to the wrong row.
        flat.problems.append(f"{name}: {TWO_THINGS}")

    for row, name in enumerate(names):
        if name in flat.values:
            flat.problems.append(f"{name}: {TWO_THINGS}")
        elif name in flat.paths:
            continue
        elif isinstance(leaves.values[row], np.ndarray):
            flat.pickled.add(name)
        else:
            flat.problems.append(f"{name}: {INSIDE}")

    unknown_names = flat.paths.keys() - flat.values.keys() - {*names}
    for name in sorted(unknown_names):
        flat.problems.append(f"{name}: a tensor under a key that is neither text nor a number")


TWO_THINGS = "the name of two things"
INSIDE = "a tensor inside of a tuple or an object; make it a list or a dict"


def root_problems(state: State) -> list[str]:
    """Return why torch could not load this state as a whole: it loads a dict, and no other root."""
    root = state.leaves.describe(state.tree)
    if state.leaves.is_single_tensor or isinstance(root, Mapping | Composite):
        return []
    kind = type(root).__name__
    return [f"the state: it is of type {kind}, and torch loads only a dict; save {{'state': …}}"]


class _Flattening:
    """One walk through a described state."""

    def __init__(self, flat: FlatState, leaves: Leaves) -> None:
        self._flat, self._leaves = flat, leaves
        self._plain = not leaves.irregular_tensors and not leaves.composites()

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
            if self._all_tensors(value, path):
                return ()
            keys = [*map(str, value)]
            if len({*keys}) < len(keys):
                # Their mappings would become one: {1: {"a": …}, "1": {"b": …}}.
                self._flat.problems.append(
                    f"{join_path(path) or 'the state'}: two keys are one text"
                )
            return zip(keys, value.values(), strict=True)
        return enumerate(value) if isinstance(value, list) and self._is_entered(value) else None

    def _add(self, value: object, path: Path) -> None:
        flat, made = self._flat, self._leaves.describe(value)
        name = ".".join(map(str, path))
        if name in flat.paths:
            flat.problems.append(f"{name}: {TWO_THINGS}")
        if isinstance(made, Composite):
            flat.problems.append(f"{name}: a {made.kind} tensor")
            flat.paths |= {f"{name}.{part}": (*path, part) for part in made.parts}
            return
        flat.paths[name] = path
        if not isinstance(made, LazyTensor) and not self._leaves.is_tensor(value):
            flat.values[name] = FlatValue(value, self._described(value))

    def _all_tensors(self, value: Mapping[object, object], path: Path) -> bool:
        """Take a mapping of plain tensors as a whole; False where it is another one, and nothing is done."""
        leaves, flat = self._leaves, self._flat
        if (
            not self._plain
            or not value
            or not leaves.tensor_types.issuperset(map(type, value.values()))
        ):
            return False
        before = "".join([f"{key}." for key in path])
        names = {f"{before}{key}": (*path, str(key)) for key in value}
        if len(names) < len(value) or not flat.paths.keys().isdisjoint(names):
            return False
        flat.paths |= names
        return True

    def _described(self, value: object) -> object:
        if isinstance(value, list | tuple) and PLAIN_VALUE_TYPES.issuperset(map(type, value)):
            return value
        return rebuild(
            value,
            lambda one, _: one if isinstance(one, np.ndarray) else self._leaves.describe(one),
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
            isinstance(leaves.describe(one), LazyTensor | Composite | Mapping)
            or leaves.is_tensor(one)
            for one in inside
        )
