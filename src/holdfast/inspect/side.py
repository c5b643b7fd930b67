"""`Side`: one of the two checkpoints of a diff, or the part of it that is to be compared, under the names that it is to have.

Where names are changed or chosen, places in the tree mean nothing any more: a `model` that one side wraps around its state is a
level of the tree. Then values are compared by their dotted names, as tensors are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.patterns import Renames, matcher, rename_problems, renamer, unmatched
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import dotted, leaf_paths
from holdfast.core.value import Value
from holdfast.errors import CannotHold, NoSuchTensor, Unsupported

__all__ = ["Side", "chosen_sides"]


class Side(Value, frozen=True):
    """What is compared."""

    path: str
    format: str
    tensors: Mapping[str, LazyTensor]
    tree: object
    metadata: Mapping[str, str] | None
    """None where it is not compared."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Side:
        """All of a checkpoint."""
        return cls(checkpoint.path, checkpoint.format, dict(checkpoint), checkpoint.tree, checkpoint.metadata)


def chosen_sides(
    a: Checkpoint,
    b: Checkpoint,
    *,
    rename: Renames | Mapping[str, str] = (),
    filter: str | None = None,
    tensors_only: bool = False,
) -> tuple[Side, Side]:
    """Both sides: `a` with other names, then both without what no name of the filter is, or without what is no tensor.

    Raises `CannotHold` where names cannot be changed so, `NoSuchTensor` where nothing passes the filter.
    """
    if isinstance(rename, bool):
        raise Unsupported("rename= takes pairs of globs; whether tensors that moved are found is said by find_renamed=")
    rename = tuple(rename.items() if isinstance(rename, Mapping) else rename)
    if not rename and filter is None and not tensors_only:
        return Side.of(a), Side.of(b)
    wanted = matcher("*" if filter is None else filter)
    new = _renamer(a, rename)
    sides = [_chosen(a, new, wanted), _chosen(b, str, wanted)] if rename or filter is not None else [Side.of(a), Side.of(b)]
    if filter is not None and not any(side.tensors or side.tree for side in sides):
        near = difflib.get_close_matches(filter, [*a, *b][:10_000], n=2, cutoff=0.4)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise NoSuchTensor(f"nothing in either checkpoint is called {filter!r}{hint}")
    if tensors_only or filter is not None:
        sides = [Side(s.path, s.format, s.tensors, {} if tensors_only else s.tree, None) for s in sides]
    return sides[0], sides[1]


def _renamer(checkpoint: Checkpoint, rename: Renames) -> Callable[[str], str]:
    problems = rename_problems(rename)
    if not problems and rename:
        names = [*checkpoint, *(dotted(path) for path, _ in leaf_paths(checkpoint.tree))]
        problems = [
            f"{pattern!r} matches nothing in {checkpoint.path!r}" for pattern in unmatched((old for old, _ in rename), names)
        ]
    if problems:
        raise CannotHold("these names cannot be changed so", problems)
    return renamer(rename)


def _chosen(checkpoint: Checkpoint, new: Callable[[str], str], wanted: Callable[[str], bool]) -> Side:
    tensors: dict[str, LazyTensor] = {}
    twice: dict[str, None] = {}
    for name, tensor in checkpoint.items():
        now = new(name)
        if not wanted(now):
            continue
        if now in tensors:
            twice[now] = None
        tensors[now] = tensor if now == name else tensor.renamed(now)
    if twice:
        raise CannotHold("these names cannot be changed so", [f"two tensors would be called {name!r}" for name in twice])
    values: dict[str, object] = {}
    for path, value in leaf_paths(checkpoint.tree):
        name = new(dotted(path))
        if isinstance(value, LazyTensor) or not wanted(name):
            continue
        while name in values:
            name += "'"
        values[name] = value
    return Side(checkpoint.path, checkpoint.format, tensors, values, checkpoint.metadata)
