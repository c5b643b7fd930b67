"""What differs between two trees besides their tensors: plain values, containers, objects that were not built.

Both trees are walked together, from pair to pair: what stands under one key on both sides is compared, what only one side has is
listed. The trees may be hostile: shared a million times, cyclic, deep. So the walk is a loop, and containers that were compared are
taken as one from then on (a union-find): each pair that could say something new is looked at once, and there are no more of them
than containers. What two places share and where both differ from the other side is therefore said at the first of them.

A value is a leaf, with a token, or a container, with a label and edges: what leads to each thing inside (its token), and the
thing. Two values are the same when their tokens are, or their labels and all that their edges lead to. Types count: True is not
1, 1 is not 1.0, -0.0 is not 0.0, bytes are no bytearray. Any NaN is as good as another. A dict and an OrderedDict are of one
kind, since most formats know only one; what fills a defaultdict counts.

Keys of dicts and members of sets have tokens, too, whatever they are made of: a digest of their structure where they are
containers. Nothing is ever decided on how a value prints, and no method of a foreign type is called. The walk over a key is a loop:
keys may nest, share what they hold, and hold themselves by way of an object.
"""

from __future__ import annotations

import datetime
import hashlib
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct, field

from holdfast.core.dtype import DType
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import LinkedPath, Path, Unrolled, join_path, to_path_key, unroll
from holdfast.core.value import Value
from holdfast.errors import LimitExceeded
from holdfast.verbs.brief import brief

STEPS = 1_000_000
"""Things inside keys and members that are looked at again, because a container that leads back out of itself is met again."""


class ContainerKind(Value, frozen=True):
    """The type of a container, as a value that can be compared and shown."""

    name: str

    def __repr__(self) -> str:
        return self.name


class Edge(NamedTuple):
    """What leads from a container to something in it."""

    token: Hashable
    shown: str | int | None
    """The step of a path; None where the path does not grow: the attributes of an object are its own."""
    named: str | int | None
    """The part of a tensor's name."""
    value: object


def label(value: object) -> ContainerKind | Global | None:
    """The type of a container; None for a leaf."""
    match value:
        case defaultdict():
            made = value.default_factory
            name = (
                f"{made.__module__}.{made.__qualname__}"
                if isinstance(made, type)
                else ""
                if made is None
                else hex(id(made))
            )
            return ContainerKind(f"defaultdict({name})")
        case Counter():
            return ContainerKind("Counter")
        case dict():
            return ContainerKind("dict")
        case list():
            return ContainerKind("list")
        case Size():
            return ContainerKind("Size")
        case tuple():
            return ContainerKind("tuple" if type(value) is tuple else type(value).__name__)
        case Opaque():
            return value.what if isinstance(value.what, Global) else ContainerKind("object")
        case Composite():
            return ContainerKind(f"{value.kind} tensor {list(value.shape)}")
        case np.ndarray() if value.dtype.hasobject:
            return ContainerKind(f"array {value.dtype} {list(value.shape)}")
        case _:
            return None


def edges(value: object, spent: Spent) -> list[Edge]:
    """Everything in a container; keys of other kinds than text are looked into, at the cost of `spent`."""
    match value:
        case dict():
            found = list(_entries(value.items(), spent))
            if isinstance(value, OrderedDict):
                found += [
                    Edge(("attribute", name), name, None, inside)
                    for name, inside in vars(value).items()
                ]
            return found
        case list() | tuple():
            return [Edge(i, i, i, inside) for i, inside in enumerate(value)]
        case Opaque():
            return [*_object(value, spent)]
        case Composite():
            parts = [Edge(("part", name), name, name, part) for name, part in value.parts.items()]
            return [
                Edge(("attribute", name), name, name, inside)
                for name, inside in value.attributes.items()
            ] + parts
        case np.ndarray():
            return [Edge(i, i, i, inside) for i, inside in enumerate(value.reshape(-1).tolist())]
        case _:
            return []


def _entries(items: Iterable[tuple[object, object]], spent: Spent) -> Iterator[Edge]:
    seen: dict[Hashable, int] = {}
    for key, inside in items:
        if type(key) is str:
            yield Edge(key, key, key, inside)
            continue
        found = token(key, spent)
        # Two keys of one structure: NaN twice, or objects, which are told apart by who they are.
        number = seen[found] = seen.get(found, 0) + 1
        shown = key if type(key) is int else f"[{brief(key, 60)}]"
        yield Edge((found, number), shown, to_path_key(key), inside)


def _object(value: Opaque, spent: Spent) -> Iterator[Edge]:
    if not isinstance(value.what, Global):
        yield Edge("what", "what", None, value.what)
    pair = value.state if isinstance(value.state, tuple) and len(value.state) == 2 else None
    if pair is not None:
        yield from (Edge(("state", i), None, None, inside) for i, inside in enumerate(pair))
    elif value.state is not None:
        yield Edge("state", None if isinstance(value.state, dict) else "state", None, value.state)
    if value.args:
        yield Edge("args", "args", "args", value.args)
    if value.kwargs:
        yield Edge("kwargs", "kwargs", "kwargs", value.kwargs)
    yield from (Edge(("item", i), i, i, inside) for i, inside in enumerate(value.items))
    yield from (
        Edge(("entry", e.token), e.shown, e.named, e.value) for e in _entries(value.entries, spent)
    )


def token(value: object, spent: Spent) -> Hashable:
    """Return a short value that is equal for two values if and only if they are the same."""
    if id(value) in spent.long_tokens:
        return spent.long_tokens[id(value)]
    leaf = leaf_token(value, spent)
    if leaf is None:
        return "#", _digest(value, spent)
    kind, content = leaf
    if len(content) <= SHORT_NBYTES:
        return leaf
    # Very many dicts may share one long key, such as an array, and each of them has a token of it.
    long_token = f"#{kind}", hashlib.blake2b(content).digest()
    if len(content) > LONG_NBYTES:
        spent.alive.append(value)
        spent.long_tokens[id(value)] = long_token
    return long_token


SHORT_NBYTES = 64
"""The most bytes of a value that stand in its token as they are."""

LONG_NBYTES = 4096
"""A value with more bytes is hashed once, however many containers share it."""


def leaf_token(value: object, spent: Spent) -> tuple[str, bytes] | None:
    """The token of a value that holds no others; None for one that does."""
    match value:
        case None:
            return "none", b""
        case np.str_():
            return "numpy.str", "".join(value).encode(
                "utf-8", "surrogatepass"
            )  # its array loses NUL characters at its end
        case np.bytes_():
            return "numpy.bytes", bytes(value)
        case np.generic():
            return f"numpy.{type(value).__name__}", _array_bytes(np.asarray(value))
        case bool() if type(value) is bool:
            return "bool", bytes([value])
        case int() if type(value) is int:
            return "int", b"%x" % value
        case float() if type(value) is float:
            return "float", _float(value)
        case complex() if type(value) is complex:
            return "complex", _float(value.real) + _float(value.imag)
        case str() if type(value) is str:
            return "str", value.encode("utf-8", "surrogatepass")
        case bytes() | bytearray() if type(value) in (bytes, bytearray):
            return type(value).__name__, bytes(value)
        case range():
            return "range", b"%x %x %x" % (value.start, value.stop, value.step)
        case DType():
            return "dtype", value.name.encode()
        case Device():
            return "device", f"{value.index} {value.type}".encode("utf-8", "surrogatepass")
        case Global():
            return "global", f"{len(value.module)} {value.module} {value.name}".encode(
                "utf-8", "surrogatepass"
            )
        case PurePath():
            flavour = "posix" if isinstance(value, PurePosixPath) else "windows"
            return f"path.{flavour}", str(value).encode("utf-8", "surrogatepass")
        case np.dtype():
            return "numpy.dtype", _dtype_bytes(value)
        case np.ndarray() if not value.dtype.hasobject:
            return f"array.{type(value).__name__}", _array_bytes(value)
        case datetime.timedelta() if type(value) is datetime.timedelta:
            return "timedelta", b"%x %x %x" % (value.days, value.seconds, value.microseconds)
        case datetime.datetime() | datetime.time() if type(value) in (
            datetime.datetime,
            datetime.time,
        ):
            return type(value).__name__, f"{value.isoformat()} {value.fold}".encode()
        case datetime.date() if type(value) is datetime.date:
            return "date", value.isoformat().encode()
        case LazyTensor():
            # A tensor in a key or a set has no name, so it is read here; there is hardly ever one.
            content = b"meta" if value.traits.meta else value.numpy().tobytes()
            digest = hashlib.blake2b(content).digest()
            return "tensor", f"{value.dtype} {value.shape} ".encode() + digest
        case set() | frozenset() | slice():
            return None
        case _ if label(value) is not None:
            return None
        case _:
            # Nothing that a file brings. It is the same as itself, and nothing else is.
            spent.alive.append(value)
            return f"object.{type(value).__name__}", b"%x" % id(value)


def _float(value: float) -> bytes:
    return b"nan" if value != value else struct.pack("<d", value)


def _dtype_bytes(dtype: np.dtype[np.generic]) -> bytes:
    parts = [
        b"%s %s %d"
        % (dtype.name.encode(), dtype.byteorder.replace("=", "<").encode(), dtype.itemsize)
    ]
    if dtype.subdtype is not None:
        parts += [_dtype_bytes(dtype.subdtype[0]), b"%r" % (dtype.subdtype[1],)]
    for name in dtype.names or ():
        inner, offset = dtype.fields[name][:2] if dtype.fields is not None else (dtype, 0)
        parts += [name.encode("utf-8", "surrogatepass"), b"%d" % offset, _dtype_bytes(inner)]
    return b"".join(b"%d:%s" % (len(part), part) for part in parts)


def _array_bytes(array: np.ndarray) -> bytes:
    return b"%s %r %s" % (_dtype_bytes(array.dtype), array.shape, array.tobytes())


class Spent(Struct):
    """What looking into keys and members has cost, and digests that need not be made again."""

    steps: int = STEPS
    entered: set[int] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    long_tokens: dict[int, Hashable] = field(default_factory=dict)
    """The tokens of values with more than `LONG_NBYTES`, by identity."""
    alive: list[object] = field(default_factory=list)
    """Values whose identity is remembered, so that no other can take it."""


class OpenContainer(Struct):
    value: object
    label: str
    inside: Iterator[tuple[bytes, object]]
    ordered: bool
    depth: int
    again: bool
    parts: list[bytes] = field(default_factory=list)
    prefix: bytes = b""
    lowest: int = 1 << 60
    """The outermost container that something inside leads back to."""


def _digest(value: object, spent: Spent) -> bytes:
    """A digest of the structure of a container. What leads back to a container around it is said by how far out that is."""
    frames = [_frame(value, [], spent)]
    around = {id(value): 0}
    while True:
        frame = frames[-1]
        found = next(frame.inside, None)
        if found is None:
            made = _hashed(
                frame.label.encode("utf-8", "surrogatepass"),
                frame.parts if frame.ordered else sorted(frame.parts),
            )
            frames.pop()
            del around[id(frame.value)]
            if frame.lowest >= frame.depth:
                spent.digests[id(frame.value)] = made
            if not frames:
                return made
            frames[-1].lowest = min(
                frames[-1].lowest, frame.lowest if frame.lowest < frame.depth else 1 << 60
            )
            frames[-1].parts.append(frames[-1].prefix + made)
            continue
        spent.steps -= frame.again
        if spent.steps < 0:
            raise LimitExceeded(
                "the keys and sets of these checkpoints hold too much to be compared",
                expected=STEPS,
            )
        frame.prefix, inside = found
        if id(inside) in spent.digests:
            frame.parts.append(frame.prefix + spent.digests[id(inside)])
        elif (leaf := leaf_token(inside, spent)) is not None:
            digest = _hashed(b"leaf", [leaf[0].encode(), leaf[1]])
            if len(leaf[1]) > LONG_NBYTES:
                spent.alive.append(inside)
                spent.digests[id(inside)] = digest
            frame.parts.append(frame.prefix + digest)
        elif id(inside) in around:
            frame.lowest = min(frame.lowest, around[id(inside)])
            frame.parts.append(
                frame.prefix + _hashed(b"around", [b"%d" % (len(frames) - around[id(inside)])])
            )
        else:
            around[id(inside)] = len(frames)
            frames.append(_frame(inside, frames, spent))


def _frame(value: object, around: list[OpenContainer], spent: Spent) -> OpenContainer:
    name, inside, ordered = _content(value, spent)
    again = id(value) in spent.entered or (bool(around) and around[-1].again)
    spent.entered.add(id(value))
    spent.alive.append(value)
    return OpenContainer(value, name, inside, ordered, len(around), again)


def _content(value: object, spent: Spent) -> tuple[str, Iterator[tuple[bytes, object]], bool]:
    """The type of a container, what is in it with what leads there, and whether that has an order."""
    if isinstance(value, set | frozenset):
        return type(value).__name__, ((b"", member) for member in value), False
    if isinstance(value, slice):
        return "slice", ((b"", part) for part in (value.start, value.stop, value.step)), True
    known = label(value)
    name = f"{type(known).__name__} {known!r}"
    if isinstance(value, dict):
        # Keys are things inside, like any: a loop through a key is found as any loop is.
        return name, ((b"", pair) for pair in value.items()), False
    if isinstance(value, Opaque):
        fields = (value.what, value.args, value.kwargs, value.state, value.items, value.entries)
        return name, ((b"", part) for part in fields), True
    # Tokens are positions and names of attributes here, never keys.
    tokens = (
        (repr(edge.token).encode("utf-8", "surrogatepass"), edge.value)
        for edge in edges(value, spent)
    )
    return name, ((_hashed(b"edge", [token]), inside) for token, inside in tokens), True


def _hashed(name: bytes, parts: Iterable[bytes]) -> bytes:
    made = hashlib.blake2b(digest_size=32)
    for part in (name, *parts):
        made.update(b"%d:" % len(part))
        made.update(part)
    return made.digest()


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
        return join_path(self.path)


def path_of(place: LinkedPath) -> Path:
    """The path of a place, a way of edges. It is written out only where something is said."""
    return tuple(edge.shown for edge in _edges(place) if edge.shown is not None)


def _edges(place: LinkedPath) -> list[Edge]:
    found: list[Any] = []
    while place is not None:
        place, edge = place
        found.append(edge)
    return found[::-1]


class TreeTensor(Value, frozen=True, eq=False):
    place: LinkedPath
    tensor: LazyTensor

    @property
    def path(self) -> Path:
        return path_of(self.place)

    @property
    def name(self) -> str:
        """The dotted name at its place."""
        return join_path(tuple(edge.named for edge in _edges(self.place) if edge.named is not None))


class Compared(Struct):
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
        texts = (
            (self.reordered, "the keys of {} are in a different order"),
            (self.attributes, "{} has attributes on one side only"),
        )

        def places(paths: Sequence[Path]) -> str:
            named = ", ".join(
                repr(join_path(path)) if path else "the whole" for path in paths[:SHOWN]
            )
            return named + (f" and {len(paths) - SHOWN:,} more" if len(paths) > SHOWN else "")

        return tuple(text.format(places(paths)) for paths, text in texts if paths)


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

Pair = tuple[LinkedPath, object, object]
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
        for pair in pairs:
            inside = self._pair(*pair)
            if inside:
                yield self.compare(inside)

    def _pair(self, place: LinkedPath, a: object, b: object) -> Sequence[Pair]:
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
            spent = self._spent
            if kinds != (None, None) or (a is not b and token(a, spent) != token(b, spent)):
                self._change(place, kinds[0] or a, kinds[1] or b)
            return ()
        if not self._join(a, b):
            return ()
        if kinds[0] != kinds[1]:
            self._change(place, *kinds)
            if type(kinds[0]) is not type(kinds[1]) or (_is_row(kinds[0]) != _is_row(kinds[1])):
                return ()
        return [*self._inside(place, a, b)]

    def _inside(self, place: LinkedPath, a: object, b: object) -> Iterator[Pair]:
        mine, theirs = edges(a, self._spent), {edge.token: edge for edge in edges(b, self._spent)}
        if not isinstance(a, dict | list | tuple):
            self._alive.append((mine, [*theirs.values()]))
        both = [edge for edge in mine if edge.token in theirs]
        if isinstance(a, dict) and len(both) > 1:
            keys = {edge.token for edge in both}
            if [e.token for e in both] != [token for token in theirs if token in keys]:
                self.found.reordered.append(path_of(place))
        for edge in mine:
            here: LinkedPath = (place, edge)
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

    def _tensors(self, place: LinkedPath, a: LazyTensor, b: LazyTensor) -> Iterator[Pair]:
        if self._settled is None or not self._settled(a, b):
            self.found.pairs.append((TreeTensor(place, a), TreeTensor(place, b)))
        parts = (
            ("<class>", a.traits.subclass, b.traits.subclass),
            ("<attributes>", a.traits.state, b.traits.state),
        )
        for name, one, other in parts:
            if one is not None and other is not None:
                yield (place, Edge(name, name, name, None)), one, other
            elif one is not other:
                self.found.attributes.append(path_of(place))

    def _alone(self, place: LinkedPath, value: object, side: int) -> None:
        before = self._count(side)
        unroll(self._list([(place, value)], side))
        if self._count(side) == before:
            self._only(
                place, label(value) or value, side
            )  # a loop, or something that is listed elsewhere

    def _list(self, values: Iterable[tuple[LinkedPath, object]], side: int) -> Unrolled[None]:
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

    def _only(self, place: LinkedPath, value: object, side: int) -> None:
        self._change(place, *((value, ABSENT) if side == 0 else (ABSENT, value)))

    def _change(self, place: LinkedPath, a: object, b: object) -> None:
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
    differing = [key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)]
    return tuple(
        ValueChange(("__metadata__", key), a.get(key, ABSENT), b.get(key, ABSENT))
        for key in differing
    )
