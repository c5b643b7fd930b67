"""States made of other states: other rows under the same names, or the same rows in another tree. Nothing is read."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.leaves import Leaves, find_leaves
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.protocols import State
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.tensor import PLAIN, LazyTensor
from holdfast.core.tree import Way, rebuild
from holdfast.core.value import replace
from holdfast.formats.tree_json.encode import is_marked


def flat_state(table: Table, metadata: Mapping[str, str]) -> State:
    """A plain dict of the rows of a table. None of them is made."""
    leaves = _marked(Leaves.of_rows(table.names), table)
    return State(
        dict(zip(table.names, leaves.values, strict=True)),
        table,
        leaves.over(table),
        dict(metadata),
    )


def _marked(leaves: Leaves, table: Table) -> Leaves:
    traits = [table.kinds[kind].traits for kind in {*table.kind}]
    leaves.marked = any(one is not PLAIN and is_marked(one) for one in traits)
    return leaves


def with_odd(table: Table, tensors: Mapping[int, LazyTensor]) -> Table:
    if not tensors:
        return table
    kinds, kind, storage = [*table.kinds], [*table.kind], [*table.storage]
    for row, tensor in tensors.items():
        kind[row], storage[row] = len(kinds), ODD
        kinds.append(Kind.of(tensor))
    return Table(
        table.names,
        kinds,
        kind,
        storage,
        table.storages,
        {**table.odd, **tensors},
        offsets=table.offsets,
    )


def with_table(state: State, table: Table) -> State:
    """The state with the rows of another table in the places of its own, under their names."""
    return replace(state, tensors=table, leaves=_marked(state.leaves.over(table), table))


def with_tree(state: State, tree: object, limits: Limits | None = None) -> State:
    """The state of another tree over tensors of this one, under the names that they have there."""
    leaves = state.leaves
    rows = dict(zip(map(id, leaves.values), range(len(leaves.values)), strict=True))
    found = find_leaves(
        tree, leaves.kinds, lambda value, path: leaves.described(value), (limits or DEFAULTS).depth
    )
    found.refuse()
    moved = state.tensors.select([rows[id(value)] for value in found.values], found.names)
    return replace(state, tree=tree, tensors=moved, leaves=_marked(found.over(moved), moved))


def lazy_tree(state: State) -> object:
    """The tree of a state with a lazy tensor in the place of each leaf, for whoever looks at them one by one."""
    rows = {id(value): row for row, value in enumerate(state.leaves.values)}
    views: dict[int, LazyTensor] = {}

    def lazy(value: object, _: Way) -> object:
        found = state.leaves.described(value)
        row = rows.get(id(found))
        if row is None:
            return found
        if row not in views:
            views[row] = state.tensors.view(row)
        return views[row]

    return rebuild(state.tree, lazy)
