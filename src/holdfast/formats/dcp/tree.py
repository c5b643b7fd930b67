"""From names to the nested state that they were flattened from.

torch joins the path of each leaf with dots, and notes the path itself: keys of mappings as text, positions in lists as integers. So
{"opt": [{"lr": 1}]} has the name `opt.0.lr` and the path ("opt", 0, "lr"). What is lost on the way there:

- the keys of mappings that were no text: 3 became "3";
- empty mappings, which have no leaf; in a list, one leaves a hole, where torch puts None, and so does this.

A path that is none, that goes through a leaf, or whose name is not its parts joined with dots is not followed: its leaf stands at
the top, under its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core.limits import Limits
from holdfast.core.tree import dotted
from holdfast.errors import MetadataError

__all__ = ["Grown", "grow"]

ABSENT = object()

POSITIONS = 1024
"""Positions beyond the number of leaves that are taken for such: empty mappings have no leaf, and leave holes."""

HOLES = 16
"""A list may have so many holes, and one more for every element; with more than that it is left a dict of positions."""


class Branch(dict[str | int, object]):
    """A container that is being put together, so that it is not taken for a dict that is a leaf."""


@dataclass(slots=True)
class Grown:
    """A nested state, and what could not be told."""

    tree: dict[str | int, object]
    flat: list[str] = field(default_factory=list)
    """Names whose path was not followed."""
    holes: int = 0
    """Positions in lists that nothing is known of."""
    numbered: int = 0
    """Mappings whose keys are numbers, as text."""


def grow(leaves: Mapping[str, object], paths: Mapping[object, object], limits: Limits) -> Grown:
    """The nested state of named leaves; `paths` is what the planner noted, which may be anything."""
    root = Branch()
    most = len(leaves) + POSITIONS
    grown = Grown({})
    for name, leaf in leaves.items():
        path = _path(name, paths.get(name, (name,)), limits, most)
        if path is None or not _put(root, path, leaf):
            grown.flat.append(name)
    for name in grown.flat:
        if not _put(root, (name,), leaves[name]):
            raise MetadataError("two values have one name", tensor=name)
    made = _settle(root, grown)
    grown.tree = made if isinstance(made, dict) else dict(enumerate(made if isinstance(made, list) else []))
    return grown


def _path(name: str, path: object, limits: Limits, most: int) -> tuple[str | int, ...] | None:
    """A path that can be followed; None for any other."""
    if type(path) is not tuple or not 0 < len(path) <= limits.depth:
        return None
    characters = len(path) - 1
    for step in path:
        # Positions are few and near zero, so that dicts of them cannot be made to collide.
        if type(step) is str:
            characters += len(step)
        elif type(step) is not int or not 0 <= step < most:
            return None
    # Not joined where it cannot be the name: the same long text may stand in every path.
    return path if characters <= len(name) and dotted(path) == name else None


def _put(root: Branch, path: tuple[str | int, ...], leaf: object) -> bool:
    """Put a leaf at its place; not where another is in its way."""
    branch = root
    for step in path[:-1]:
        inner = branch.setdefault(step, ABSENT)
        if inner is ABSENT:
            inner = branch[step] = Branch()
        if not isinstance(inner, Branch):
            return False
        branch = inner
    if path[-1] in branch:
        return False
    branch[path[-1]] = leaf
    return True


def _settle(branch: Branch, grown: Grown) -> object:
    """A branch as the list or dict that it was. As deep as a path is long, which is limited."""
    inside: dict[str | int, object] = {
        step: _settle(value, grown) if isinstance(value, Branch) else value for step, value in branch.items()
    }
    positions = [step for step in inside if isinstance(step, int)]
    if positions and len(positions) == len(inside):
        length = max(positions) + 1
        grown.holes += length - len(positions)
        if length > 2 * len(positions) + HOLES:
            return inside
        return [inside.get(position) for position in range(length)]
    if inside and all(isinstance(step, str) and step.isdecimal() for step in inside):
        grown.numbered += 1
    return inside
