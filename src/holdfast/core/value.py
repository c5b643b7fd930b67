"""`Value`: what nearly every class here is. Fields that are checked when they are given, and never change afterwards.

    class Box(Value, frozen=True, gc=False):
        start: tuple[int, ...]
        stop: tuple[int, ...]

It is a struct of msgspec, made by one call into C: in 0.05 µs where a frozen dataclass takes 1, an `object.__setattr__` a field. To
define the class takes 0.01 ms where a dataclass takes 0.5, and a program that shows a small file defines a hundred. `repr`, `==`,
`hash`, `match`, `__post_init__` and pickles are as a dataclass has them. What has fields that do change is a plain `Struct`. A
class that says itself what is equal says `__ne__ = object.__ne__` as well: a struct has one of its own.

**`gc=False`** leaves a value out of what Python's collector walks: it is smaller, and many of them are cheaper. But a cycle that it
is part of is never found, and nothing on it is ever freed. So it is only for values whose fields cannot lead back to them, whatever
a file says: numbers, texts, bytes, tuples of these, and other such values. Not with a store or a source in a field (a `Storage` has
its home, and a store may know its storages); not with a function, a list, a dict or an `object`.

**A dataclass** is what a person gets as a result, and may give to `dataclasses.replace`, `fields` or `asdict`: the reports of the
verbs and their rows (`core.notebook.Shown`), the rules and exports that a run is given; what has the form of a class of torch's
(`holdfast.metadata`); and the few that compute a field which nobody gives (`field(init=False)`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict
from msgspec.structs import replace as struct_replace

V = TypeVar("V")
S = TypeVar("S", bound=Struct)


class Value(Struct, frozen=True):
    """Fields that never change."""

    def __replace__(self: S, /, **changes: Any) -> S:  # noqa: ANN401  # those of the class
        if hasattr(self, "__post_init__"):
            # Not msgspec's own, which does not check what is made before 0.21.
            return type(self)(**{**asdict(self), **changes})
        return struct_replace(self, **changes)


def replace_as_base(kind: type[V], value: V, changes: Mapping[str, object]) -> V:
    """What is made of a value that finds some fields when they are asked for: one of its base class, which has them all."""
    fields = kind.__struct_fields__  # type: ignore[attr-defined]  # a struct
    return kind(**{name: getattr(value, name) for name in fields if name not in changes}, **changes)


def replace(value: V, /, **changes: Any) -> V:  # noqa: ANN401  # those of the class
    """The same value with some other fields, checked; of a result for people, which is a dataclass, as well."""
    made = getattr(type(value), "__replace__", None)
    if made is None:  # a dataclass, before Python 3.13
        from dataclasses import replace as replaced

        return replaced(value, **changes)  # type: ignore[type-var]  # nothing else is asked for
    return made(value, **changes)  # type: ignore[no-any-return]  # of its own class
