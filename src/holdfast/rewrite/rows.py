"""States made of other states: other rows under the same names, or the same rows in another tree. Nothing is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.leaves import CONTAINERS, Leaves, find_leaves
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.protocols import State
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import name_tensors, rebuilt
from holdfast.core.value import replace
from holdfast.formats.tree_json.encode import is_marked
from holdfast.plan.table import table_of
from holdfast.rewrite.state import MOST_VISITS, map_tensors


def flat_state(table: Table, metadata: Mapping[str, str]) -> State:
    """A plain dict of the rows of a table. None of them is made."""
    leaves = _marked(Leaves.of_rows(table.names), table)
    return State(dict(zip(table.names, leaves.values, strict=True)), table, {}, dict(metadata), (), leaves.over(table))


def _marked(leaves: Leaves, table: Table) -> Leaves:
    leaves.marked = any(is_marked(table.kinds[kind].traits) for kind in {*table.kind})
    return leaves


def with_odd(table: Table, tensors: Mapping[int, LazyTensor]) -> Table:
    """The table with these tensors in the places of these rows."""
    if not tensors:
        return table
    kinds, kind, storage = [*table.kinds], [*table.kind], [*table.storage]
    for row, tensor in tensors.items():
        kind[row], storage[row] = len(kinds), ODD
        kinds.append(Kind.of(tensor))
    return Table(table.names, kinds, kind, storage, table.storages, {**table.odd, **tensors})


def leaves_of(state: State) -> Sequence[object]:
    """What stands in the tree of a state for each of its tensors, in their order."""
    if state.leaves is not None:
        return state.leaves.values
    return name_tensors(state.tree, DEFAULTS, MOST_VISITS, held=True).leaves


def with_table(state: State, table: Table) -> State:
    """The state with the rows of another table in the places of its own, under their names."""
    if state.leaves is not None:
        return replace(state, tensors=table, leaves=_marked(state.leaves.over(table), table))
    found = leaves_of(state)
    rows = dict(zip(map(id, found), range(len(found)), strict=True))
    made: dict[int, LazyTensor] = {}

    def change(tensor: LazyTensor) -> LazyTensor:
        # One object stays one object: torch gives it one identity.
        if id(tensor) not in made:
            made[id(tensor)] = table.view(rows[id(tensor)])
        return made[id(tensor)]

    return replace(state, tree=map_tensors(state.tree, change), tensors=table)


def with_tree(state: State, tree: object, limits: Limits | None = None) -> State:
    """The state of another tree over tensors of this one, under the names that they have there."""
    table, leaves = table_of(state), state.leaves
    if leaves is not None:
        rows = dict(zip(map(id, leaves.values), range(len(leaves.values)), strict=True))
        found = find_leaves(tree, leaves.kinds, lambda value, path: leaves.described(value), (limits or DEFAULTS).depth)
        if found is not None:
            moved = table.select([rows[id(value)] for value in found.values], found.names)
            return replace(state, tree=tree, tensors=moved, leaves=_marked(found.over(moved), moved))
        tree = _LazyTree(leaves, table).walk(tree)
    named = name_tensors(tree, limits or DEFAULTS, MOST_VISITS, held=True)
    return replace(state, tree=tree, tensors=named.tensors, paths=named.paths, leaves=None)


def lazily(state: State) -> State:
    """The state with a lazy tensor in the place of each leaf, for whoever looks at them one by one."""
    if state.leaves is None:
        return state
    tree = _LazyTree(state.leaves, table_of(state)).walk(state.tree)
    named = name_tensors(tree, DEFAULTS, MOST_VISITS, held=True)
    return replace(state, tree=tree, tensors=named.tensors, paths=named.paths, leaves=None)


class _LazyTree:
    """Makes a tree of leaves again, with their lazy tensors in their places."""

    def __init__(self, leaves: Leaves, table: Table) -> None:
        self._leaves, self._table = leaves, table
        self._rows = {id(value): row for row, value in enumerate(leaves.values)}
        self._made: dict[int, object] = {}

    def walk(self, value: object) -> object:
        made = self._made
        if id(value) not in made:
            if isinstance(value, dict | list | tuple) and type(value) in CONTAINERS:
                made[id(value)] = rebuilt(value, [*map(self.walk, value.values() if isinstance(value, dict) else value)])
            else:
                found = self._leaves.described(value)
                made[id(value)] = self._table.view(self._rows[id(found)]) if id(found) in self._rows else found
        return made[id(value)]
