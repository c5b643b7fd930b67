"""Where in a tree the foreign objects are, and with what they would have been called.

A walk over everything that a pickle left behind, attributes and arguments included, each object once, without
recursion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.core.composite import Composite
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tensor import LazyTensor
from holdfast.inspect.brief import brief, root_global

__all__ = ["Evidence", "gather"]

KEPT = 3
"""Calls and places of one global that are kept: enough to see what it does."""


@dataclass(slots=True)
class Evidence:
    """What the tree says about one global."""

    calls: list[str] = field(default_factory=list)
    """`os.system('echo hi')`: objects that would have come out of a call, in short."""
    arguments: bool = False
    """Whether any of these has arguments."""
    paths: list[str] = field(default_factory=list)
    nested: list[bytes] = field(default_factory=list)
    """Arguments of bytes: streams inside the stream, for the loaders that take one."""


@dataclass(slots=True)
class Place:
    """A step of a path, linked to the one before it; text is made only for the few that are shown."""

    key: str
    before: Place | None

    def text(self) -> str:
        parts: list[str] = []
        step: Place | None = self
        while step is not None and len(parts) < 100:
            if step.key:
                parts.append(step.key)
            step = step.before
        return ".".join(reversed(parts))


def gather(tree: object) -> dict[Global, Evidence]:
    """The evidence for every global in a tree."""
    found: dict[Global, Evidence] = {}
    seen: set[int] = set()
    # Values stay referenced by the tree while this runs, so an id belongs to one of them.
    waiting: list[tuple[object, Place]] = [(tree, Place("", None))]
    while waiting:
        value, place = waiting.pop()
        if isinstance(value, Global):
            _note(found.setdefault(value, Evidence()), place)
            continue
        if not isinstance(value, dict | list | tuple | set | frozenset | Opaque | Composite | LazyTensor) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Opaque):
            _note_object(found, value, place)
        waiting += reversed([(inside, Place(key, place)) for key, inside in _inside(value)])
    return found


def _note(evidence: Evidence, place: Place) -> None:
    if len(evidence.paths) < KEPT:
        text = place.text()
        if text and text not in evidence.paths:
            evidence.paths.append(text)


def _note_object(found: dict[Global, Evidence], value: Opaque, place: Place) -> None:
    root = root_global(value)
    if root is None:
        return
    evidence = found.setdefault(root, Evidence())
    _note(evidence, place)
    evidence.arguments = evidence.arguments or bool(value.args or value.kwargs)
    evidence.nested += [a for a in value.args if isinstance(a, bytes)]
    if len(evidence.calls) < KEPT:
        call = brief(value, 80)
        if call not in evidence.calls:
            evidence.calls.append(call)


def _inside(value: object) -> Iterator[tuple[str, object]]:
    """Everything in a value, with a short key for each."""
    match value:
        case dict():
            # An OrderedDict keeps what a BUILD gave it (`_metadata`, and anything else) among its attributes.
            yield from getattr(value, "__dict__", {}).items()
            for key, item in value.items():
                yield brief(key, 40) if not isinstance(key, str) else key, item
                if not isinstance(key, str | int):
                    yield "<key>", key
        case list() | tuple() | set() | frozenset():
            for position, item in enumerate(value):
                yield str(position), item
        case Opaque():
            yield from _inside_object(value)
        case Composite():
            yield from value.parts.items()
            yield from value.attributes.items()
            yield "", value.traits.state
        case LazyTensor():
            yield "", value.traits.state


def _inside_object(value: Opaque) -> Iterator[tuple[str, object]]:
    yield "", value.state
    if isinstance(value.what, Opaque):
        yield "<function>", value.what
    yield "args", value.args
    yield "kwargs", value.kwargs
    for position, item in enumerate(value.items):
        yield str(position), item
    for key, item in value.entries:
        yield brief(key, 40) if not isinstance(key, str) else key, item
        yield "<key>", key
