"""What differs between two trees besides their tensors: plain values, containers, objects that were not built.

Both trees are walked together, from pair to pair: what stands under one key on both sides is compared, what only one side has is
listed. The trees may be hostile: shared a million times, cyclic, deep. So the walk is a loop, and containers that were compared are
taken as one from then on (a union-find): each pair that could say something new is looked at once, and there are no more of them
than containers. What two places share and where both differ from the other side is therefore said at the first of them.

What is the same is decided by structure (structure.py), never by how a value prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from msgspec import Struct, field

from holdfast.core.opaque import Global
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import Path, Unrolled, Way, dotted, unroll
from holdfast.core.value import Value
from holdfast.inspect.structure import ContainerKind, Edge, Spent, edges, label, same_leaf

SHOWN = 3
"""Places that a note names."""


class Absent(Enum):
    ABSENT = "absent"

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = Absent.ABSENT


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A plain value that is not the same in both, or is in one of them only."""

    path: Path
    """Keys and positions; a key that is neither text nor an integer stands in brackets."""
    a: object
    """The value, or `ABSENT`. A container is shown by its kind."""
    b: object

    @property
    def name(self) -> str:
        return dotted(self.path)


def path_of(place: Way) -> Path:
    """The path of a place, a way of edges. It is written out only where something is said."""
    return tuple(edge.shown for edge in _edges(place) if edge.shown is not None)


def _edges(place: Way) -> list[Edge]:
    found: list[Any] = []
    while place is not None:
        place, edge = place
        found.append(edge)
    return found[::-1]


class TreeTensor(Value, frozen=True, eq=False):
    place: Way
    tensor: LazyTensor

    @property
    def path(self) -> Path:
        return path_of(self.place)

    @property
    def name(self) -> str:
        """The dotted name at its place."""
        return dotted(tuple(edge.named for edge in _edges(self.place) if edge.named is not None))


class Compared(Struct):
    """The outcome of a walk."""

    changes: list[ValueChange] = field(default_factory=list)
    pairs: list[tuple[TreeTensor, TreeTensor]] = field(default_factory=list)
    alone: tuple[list[TreeTensor], list[TreeTensor]] = field(default_factory=lambda: ([], []))
    """Tensors at places that only one side has."""
    reordered: list[Path] = field(default_factory=list)
    """Mappings with the same keys in another order."""
    attributes: list[Path] = field(default_factory=list)
    """What one format keeps beside a mapping or a tensor, and the other does not have: versions of modules, a subclass."""

    def notes(self) -> tuple[str, ...]:
        """Sentences about what is no difference, and yet worth one."""
        texts = (self.reordered, "the keys of {} are in another order"), (self.attributes, "{} has attributes on one side only")
        return tuple(text.format(_places(paths)) for paths, text in texts if paths)


def _places(paths: Sequence[Path]) -> str:
    named = ", ".join(repr(dotted(path)) if path else "the whole" for path in paths[:SHOWN])
    return named + (f" and {len(paths) - SHOWN:,} more" if len(paths) > SHOWN else "")


def compare_values(a: object, b: object) -> tuple[tuple[ValueChange, ...], tuple[str, ...]]:
    """Everything that differs but tensors, in the order of `a`, then of what only `b` has; and sentences for people."""
    found = compare_trees(a, b)
    return tuple(found.changes), found.notes()


def compare_trees(a: object, b: object, *, settled: Settled | None = None) -> Compared:
    """Walk two trees together. Reads nothing but tensors in keys and sets, which have no names.

    Tensors at one place that are `settled` are not among the pairs.
    """
    comparison = ValueComparison(settled)
    # A walk makes many small things that live until it ends; a collector that walks through them each time costs more than it.
    with gc_paused():
        unroll(comparison.compare([(None, a, b)]))
    return comparison.found


Settled = Callable[[LazyTensor, LazyTensor], bool]

Pair = tuple[Way, object, object]
"""A place, and what both sides have there."""

SEQUENCES = frozenset({"list", "tuple", "Size"})


class ValueComparison:
    def __init__(self, settled: Settled | None) -> None:
        self.found = Compared()
        self._settled = settled
        self._spent = Spent()
        self._same: dict[int, int] = {}
        self._listed: tuple[set[int], set[int]] = (set(), set())
        self._alive: list[object] = []
        """Edges that were made for the walk, so that no other value takes the identity of one."""

    def compare(self, pairs: Iterable[Pair]) -> Unrolled[None]:
        """Compare one pair after the other, each with all that is in it."""
        for pair in pairs:
            inside = self._pair(*pair)
            if inside:
                yield self.compare(inside)

    def _pair(self, place: Way, a: object, b: object) -> Sequence[Pair]:
        """Compare two values; the pairs of what is in them."""
        if isinstance(a, Absent) or isinstance(b, Absent):
            self._alone(place, *((b, 1) if isinstance(a, Absent) else (a, 0)))
            return ()
        if isinstance(a, LazyTensor) and isinstance(b, LazyTensor):
            return [*self._tensors(place, a, b)]
        if isinstance(a, LazyTensor) or isinstance(b, LazyTensor):
            self._alone(place, a, 0)
            self._alone(place, b, 1)
            return ()
        kinds = label(a), label(b)
        if kinds[0] is None or kinds[1] is None:
            if kinds != (None, None) or not same_leaf(a, b, self._spent):
                self._change(place, kinds[0] or a, kinds[1] or b)
            return ()
        if not self._join(a, b):
            return ()
        if kinds[0] != kinds[1]:
            self._change(place, *kinds)
            if type(kinds[0]) is not type(kinds[1]) or (_is_row(kinds[0]) != _is_row(kinds[1])):
                return ()
        return [*self._inside(place, a, b)]

    def _inside(self, place: Way, a: object, b: object) -> Iterator[Pair]:
        mine, theirs = edges(a, self._spent), {edge.token: edge for edge in edges(b, self._spent)}
        if not isinstance(a, dict | list | tuple):
            self._alive.append((mine, [*theirs.values()]))
        both = [edge for edge in mine if edge.token in theirs]
        if isinstance(a, dict) and len(both) > 1:
            keys = {edge.token for edge in both}
            if [e.token for e in both] != [token for token in theirs if token in keys]:
                self.found.reordered.append(path_of(place))
        for edge in mine:
            here: Way = (place, edge)
            if edge.token in theirs:
                yield here, edge.value, theirs.pop(edge.token).value
            elif isinstance(a, dict) and _is_attribute(edge):
                self.found.attributes.append(path_of(place))
            else:
                yield here, edge.value, ABSENT
        for edge in theirs.values():
            if isinstance(b, dict) and _is_attribute(edge):
                self.found.attributes.append(path_of(place))
            else:
                yield (place, edge), ABSENT, edge.value

    def _tensors(self, place: Way, a: LazyTensor, b: LazyTensor) -> Iterator[Pair]:
        if self._settled is None or not self._settled(a, b):
            self.found.pairs.append((TreeTensor(place, a), TreeTensor(place, b)))
        parts = ("<class>", a.traits.subclass, b.traits.subclass), ("<attributes>", a.traits.state, b.traits.state)
        for name, one, other in parts:
            if one is not None and other is not None:
                yield (place, Edge(name, name, name, None)), one, other
            elif one is not other:
                self.found.attributes.append(path_of(place))

    def _alone(self, place: Way, value: object, side: int) -> None:
        before = self._count(side)
        unroll(self._list([(place, value)], side))
        if self._count(side) == before:
            self._only(place, label(value) or value, side)  # a loop, or something that is listed elsewhere

    def _list(self, values: Iterable[tuple[Way, object]], side: int) -> Unrolled[None]:
        for here, value in values:
            if isinstance(value, LazyTensor):
                self.found.alone[side].append(TreeTensor(here, value))
            elif (kind := label(value)) is None:
                self._only(here, value, side)
            elif id(value) not in self._listed[side]:
                self._listed[side].add(id(value))
                inside = edges(value, self._spent)
                self._alive.append(inside)
                if isinstance(kind, Global):
                    self._only(here, kind, side)
                elif not inside:
                    self._only(here, value, side)
                yield self._list([((here, edge), edge.value) for edge in inside], side)

    def _count(self, side: int) -> int:
        return len(self.found.changes) + len(self.found.alone[side])

    def _only(self, place: Way, value: object, side: int) -> None:
        self._change(place, *((value, ABSENT) if side == 0 else (ABSENT, value)))

    def _change(self, place: Way, a: object, b: object) -> None:
        self.found.changes.append(ValueChange(path_of(place), a, b))

    def _join(self, a: object, b: object) -> bool:
        """Take two containers as one from now on; False where they are already."""
        first, second = self._root(id(a)), self._root(id(b))
        if a is b or first == second:
            # One container is the same as itself; its tensors are, too, whatever they are called on the two sides.
            return False
        self._same[first] = second
        return True

    def _root(self, number: int) -> int:
        while (above := self._same.get(number, number)) != number:
            # Halving the way keeps all ways short.
            self._same[number] = number = self._same.get(above, above)
        return number


def _is_row(kind: object) -> bool:
    return isinstance(kind, ContainerKind) and kind.name in SEQUENCES


def _is_attribute(edge: Edge) -> bool:
    return isinstance(edge.token, tuple) and edge.token[0] == "attribute"


def compare_metadata(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[ValueChange, ...]:
    """The text that two files carry about themselves."""
    differing = [key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)]
    return tuple(ValueChange(("__metadata__", key), a.get(key, ABSENT), b.get(key, ABSENT)) for key in differing)
