"""`Side`: one of the two checkpoints of a diff, or the part of it that is to be compared, under the names that it is to have.

Where names are changed or chosen, places in the tree mean nothing any more: a `model` that one side wraps around its state is a
level of the tree. Then values are compared by their dotted names, as tensors are.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from operator import eq
from typing import cast

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.patterns import (
    Renames,
    find_rename_problems,
    find_unmatched_patterns,
    make_matcher,
    make_renamer,
)
from holdfast.core.sharing import identify_view
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import copy_dict_with_items, iterate_leaves, join_path
from holdfast.core.value import Value, replace
from holdfast.errors import CannotHold, NoSuchTensor, Unsupported

NEAR = 10_000
"""Names that are compared with a filter that means nothing."""

AnyDict = dict[object, object]


class Side(Value, frozen=True):
    path: str
    format: str
    tensors: Table
    tree: object
    metadata: Mapping[str, str] | None
    """None where it is not compared."""
    flat: bool = False
    """Whether the tree has no tensors in it: they stand at its top under their names, or only names are compared."""
    ordered: bool = False
    """Whether the order of the tensors is that of a container."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Side:
        """All of a checkpoint. Of a flat one, no lazy tensor stays."""
        tensors = checkpoint.stored
        tree: object = {} if checkpoint.is_flat else checkpoint.tree
        flat = checkpoint.is_flat or _flat(tree, tensors)
        if flat:
            tensors, tree = (
                tensors.without_lazy_tensors(),
                copy_dict_with_items(cast(AnyDict, tree), {}),
            )
        return cls(
            checkpoint.path,
            checkpoint.format,
            tensors,
            tree,
            checkpoint.metadata,
            flat,
            ordered=flat,
        )

    def made(self) -> Side:
        """The side with all tensors made, each once, and in the tree."""
        tensors = self.tensors.with_lazy_tensors()
        tree = (
            copy_dict_with_items(cast(AnyDict, self.tree), cast(AnyDict, dict(tensors)))
            if self.ordered
            else self.tree
        )
        return replace(self, tensors=tensors, tree=tree)


def same_view(one: LazyTensor | None, other: LazyTensor) -> bool:
    if one is None or one is other:
        return one is other
    # One position, under two names: nothing has to be made to tell.
    alike = one.position is not None and one.position is other.position and one.shape == other.shape
    return (alike and one.traits is other.traits and one.dtype is other.dtype) or identify_view(
        one
    ) == identify_view(other)


def _flat(tree: object, tensors: Table) -> bool:
    """Whether a dict has the tensors under their names in their order, and they are nothing but tensors."""
    if (
        type(tree) not in (dict, OrderedDict)
        or not isinstance(tree, dict)
        or len(tree) != len(tensors)
    ):
        return False
    if not all(map(eq, tree, tensors)) or not all(
        isinstance(value, LazyTensor) for value in tree.values()
    ):
        return False
    plain = all(
        kind.traits.subclass is None and kind.traits.state is None for kind in tensors.kinds
    )
    return plain and all(
        map(same_view, tree.values(), map(tensors.lazy_tensor, range(len(tensors))))
    )


def chosen_sides(
    checkpoints: Iterable[Checkpoint], *, rename: Renames | Mapping[str, str] = (), filter: str | None = None,
    tensors_only: bool = False,
) -> tuple[Side, Side]:  # fmt: skip
    """Both sides: `a` under its new names, then of both what passes the filter, or the tensors alone.

    The first checkpoint is closed before the second is opened. Raises `CannotHold` where names cannot be changed so,
    `NoSuchTensor` where nothing passes the filter.
    """
    if isinstance(rename, bool):
        raise Unsupported(
            "rename= takes pairs of globs; whether tensors that moved are found is said by find_renamed="
        )
    rename = tuple(rename.items() if isinstance(rename, Mapping) else rename)
    wanted = make_matcher("*" if filter is None else filter)
    names: list[str] = []

    def side_of(checkpoint: Checkpoint, own: Renames) -> Side:
        if not rename and filter is None:
            side = Side.of(checkpoint)
        else:
            names.extend(islice(checkpoint, NEAR))
            side = _chosen(checkpoint, _renamer(checkpoint, own), wanted)
        if not tensors_only and filter is None:
            return side
        return Side(
            side.path,
            side.format,
            side.tensors,
            {} if tensors_only else side.tree,
            None,
            tensors_only or side.flat,
        )

    first, second = map(side_of, checkpoints, (rename, ()))
    if filter is not None and not any(side.tensors or side.tree for side in (first, second)):
        near = difflib.get_close_matches(filter, names[:NEAR], n=2, cutoff=0.4)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise NoSuchTensor(f"nothing in either checkpoint is called {filter!r}{hint}")
    return first, second


def _renamer(checkpoint: Checkpoint, rename: Renames) -> Callable[[str], str]:
    problems = find_rename_problems(rename)
    if not problems and rename:
        names = [*checkpoint, *(join_path(path) for path, _ in iterate_leaves(checkpoint.tree))]
        unused = find_unmatched_patterns((old for old, _ in rename), names)
        problems = [f"{pattern!r} matches nothing in {checkpoint.path!r}" for pattern in unused]
    if problems:
        raise CannotHold("these names cannot be changed so", problems)
    return make_renamer(rename)


def _chosen(
    checkpoint: Checkpoint, new: Callable[[str], str], wanted: Callable[[str], bool]
) -> Side:
    table = checkpoint.stored
    rows: dict[str, int] = {}
    twice: dict[str, None] = {}
    for row, name in enumerate(table):
        now = new(name)
        if not wanted(now):
            continue
        if now in rows:
            twice[now] = None
        rows[now] = row
    if twice:
        raise CannotHold(
            "these names cannot be changed so",
            [f"two tensors would be called {name!r}" for name in twice],
        )
    values: dict[str, object] = {}
    for path, value in iterate_leaves(checkpoint.tree):
        name = new(join_path(path))
        if isinstance(value, LazyTensor) or not wanted(name):
            continue
        while name in values:
            name += "'"
        values[name] = value
    chosen = table.select([*rows.values()], [*rows])
    return Side(checkpoint.path, checkpoint.format, chosen, values, checkpoint.metadata, flat=True)
