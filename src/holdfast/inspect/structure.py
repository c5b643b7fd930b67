"""The structure of a value: what kind of thing it is, what is in it, and a token by which two of them are the same.

One description serves every comparison. A value is a leaf, with a token, or a container, with a label and edges: what leads to
each thing inside (its token), and the thing. Two values are the same when their tokens are, or their labels and all that their
edges lead to. Types count: True is not 1, 1 is not 1.0, -0.0 is not 0.0, bytes are no bytearray. Any NaN is as good as another. A
dict and an OrderedDict are of one kind, since most formats know only one; what fills a defaultdict counts.

Keys of dicts and members of sets have tokens, too, whatever they are made of: a digest of their structure where they are
containers. Nothing is ever decided on how a value prints, and no method of a foreign type is called. The walk over a key is a loop:
keys may nest, share what they hold, and hold themselves by way of an object.
"""

from __future__ import annotations

import datetime
import hashlib
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from pathlib import PurePath, PurePosixPath
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from holdfast.core.dtype import DType
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import step
from holdfast.core.value import Value
from holdfast.errors import LimitExceeded
from holdfast.inspect.brief import brief

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
            return ContainerKind(f"defaultdict({_filler(value)})")
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


def _filler(value: defaultdict[object, object]) -> str:
    made = value.default_factory
    return "" if made is None else f"{made.__module__}.{made.__qualname__}" if isinstance(made, type) else hex(id(made))


def edges(value: object, spent: Spent) -> list[Edge]:
    """Everything in a container; keys of other kinds than text are looked into, at the cost of `spent`."""
    match value:
        case dict():
            found = list(_entries(value.items(), spent))
            if isinstance(value, OrderedDict):
                found += [Edge(("attribute", name), name, None, inside) for name, inside in vars(value).items()]
            return found
        case list() | tuple():
            return [Edge(i, i, i, inside) for i, inside in enumerate(value)]
        case Opaque():
            return [*_object(value, spent)]
        case Composite():
            parts = [Edge(("part", name), name, name, part) for name, part in value.parts.items()]
            return [Edge(("attribute", name), name, name, inside) for name, inside in value.attributes.items()] + parts
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
        yield Edge((found, number), shown, step(key), inside)


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
    yield from (Edge(("entry", e.token), e.shown, e.named, e.value) for e in _entries(value.entries, spent))


def same_leaf(a: object, b: object, spent: Spent) -> bool:
    """Whether two leaves are of one type and equal."""
    if a is b:
        return True
    if type(a) is type(b) and type(a) in QUICK:
        return bool(a == b)
    return token(a, spent) == token(b, spent)


QUICK = frozenset({str, int, bool, bytes, bytearray})


def token(value: object, spent: Spent) -> Hashable:
    """A value that is equal for two values if and only if they are the same."""
    return leaf_token(value, spent) or ("#", _digest(value, spent))


def leaf_token(value: object, spent: Spent) -> tuple[str, bytes] | None:
    """The token of a value that holds no others; None for one that does."""
    match value:
        case None:
            return "none", b""
        case np.str_():
            return "numpy.str", "".join(value).encode("utf-8", "surrogatepass")  # its array loses NUL characters at its end
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
            return "global", f"{len(value.module)} {value.module} {value.name}".encode("utf-8", "surrogatepass")
        case PurePath():
            flavour = "posix" if isinstance(value, PurePosixPath) else "windows"
            return f"path.{flavour}", str(value).encode("utf-8", "surrogatepass")
        case np.dtype():
            return "numpy.dtype", _dtype_bytes(value)
        case np.ndarray() if not value.dtype.hasobject:
            return f"array.{type(value).__name__}", _array_bytes(value)
        case datetime.timedelta() if type(value) is datetime.timedelta:
            return "timedelta", b"%x %x %x" % (value.days, value.seconds, value.microseconds)
        case datetime.datetime() | datetime.time() if type(value) in (datetime.datetime, datetime.time):
            return type(value).__name__, f"{value.isoformat()} {value.fold}".encode()
        case datetime.date() if type(value) is datetime.date:
            return "date", value.isoformat().encode()
        case LazyTensor():
            return "tensor", _tensor(value)
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
    parts = [b"%s %s %d" % (dtype.name.encode(), dtype.byteorder.replace("=", "<").encode(), dtype.itemsize)]
    if dtype.subdtype is not None:
        parts += [_dtype_bytes(dtype.subdtype[0]), b"%r" % (dtype.subdtype[1],)]
    for name in dtype.names or ():
        inner, offset = dtype.fields[name][:2] if dtype.fields is not None else (dtype, 0)
        parts += [name.encode("utf-8", "surrogatepass"), b"%d" % offset, _dtype_bytes(inner)]
    return b"".join(b"%d:%s" % (len(part), part) for part in parts)


def _array_bytes(array: np.ndarray) -> bytes:
    return b"%s %r %s" % (_dtype_bytes(array.dtype), array.shape, array.tobytes())


def _tensor(tensor: LazyTensor) -> bytes:
    """The content of a tensor in a key or a set, which has no name, so it is read here; there is hardly ever one."""
    if tensor.traits.meta:
        return f"meta {tensor.dtype} {tensor.shape}".encode()
    return f"{tensor.dtype} {tensor.shape} ".encode() + hashlib.blake2b(np.ascontiguousarray(tensor.numpy()).tobytes()).digest()


class Spent(Struct):
    """What looking into keys and members has cost, and digests that need not be made again."""

    steps: int = STEPS
    entered: set[int] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    alive: list[object] = field(default_factory=list)
    """Values whose identity is remembered, so that no other can take it."""


class OpenContainer(Struct):
    """A container whose digest is being made."""

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
            made = _hashed(frame.label.encode("utf-8", "surrogatepass"), frame.parts if frame.ordered else sorted(frame.parts))
            frames.pop()
            del around[id(frame.value)]
            if frame.lowest >= frame.depth:
                spent.digests[id(frame.value)] = made
            if not frames:
                return made
            frames[-1].lowest = min(frames[-1].lowest, frame.lowest if frame.lowest < frame.depth else 1 << 60)
            frames[-1].parts.append(frames[-1].prefix + made)
            continue
        spent.steps -= frame.again
        if spent.steps < 0:
            raise LimitExceeded("the keys and sets of these checkpoints hold too much to be compared", expected=STEPS)
        frame.prefix, inside = found
        leaf = leaf_token(inside, spent)
        if leaf is not None:
            frame.parts.append(frame.prefix + _hashed(b"leaf", [leaf[0].encode(), leaf[1]]))
        elif id(inside) in spent.digests:
            frame.parts.append(frame.prefix + spent.digests[id(inside)])
        elif id(inside) in around:
            frame.lowest = min(frame.lowest, around[id(inside)])
            frame.parts.append(frame.prefix + _hashed(b"around", [b"%d" % (len(frames) - around[id(inside)])]))
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
    return name, ((_prefix(edge.token), edge.value) for edge in edges(value, spent)), True


def _prefix(token: Hashable) -> bytes:
    return _hashed(b"edge", [repr(token).encode("utf-8", "surrogatepass")])  # positions and names of attributes, never keys


def _hashed(name: bytes, parts: Iterable[bytes]) -> bytes:
    made = hashlib.blake2b(digest_size=32)
    for part in (name, *parts):
        made.update(b"%d:" % len(part))
        made.update(part)
    return made.digest()
