"""`Value`: a frozen msgspec struct, the base of nearly every class here. Its fields are checked when they are given.

    class Box(Value, gc=False):
        start: tuple[int, ...]
        stop: tuple[int, ...]

Making one takes 0.05 µs where a frozen dataclass takes 1; defining the class takes 0.01 ms where a dataclass takes 0.5. `repr`,
`==`, `hash`, `match`, `__post_init__` and pickles are as a dataclass has them. A class whose fields change is a plain `Struct`. A
class with an `__eq__` of its own also says `__ne__ = object.__ne__`, because a struct has its own.

**`gc=False`** hides a value from Python's collector, which makes it smaller and cheaper. A cycle through such a value is never
freed. So it is only for fields that cannot lead back to the value, whatever a file says: numbers, texts, bytes, tuples of these,
and other such values; never a store, a source, a function, a list, a dict or an `object`.

**A dataclass** is what a person gets as a result, and may give to `dataclasses.replace`, `fields` or `asdict`: reports and their
rows (`core.notebook.Shown`), rules, exports, and classes with the form of torch's (`holdfast.metadata`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

from msgspec import Struct, field
from msgspec.structs import asdict
from msgspec.structs import replace as struct_replace

V = TypeVar("V")
S = TypeVar("S", bound=Struct)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value(Struct, frozen=True):
    """The base of frozen structs. A subclass is frozen without saying so, for msgspec and for type checkers."""

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
    """A copy of a value with some fields changed, and checked; also of a dataclass."""
    made = getattr(type(value), "__replace__", None)
    if made is None:  # a dataclass, before Python 3.13
        from dataclasses import replace as replaced

        return replaced(value, **changes)  # type: ignore[type-var]  # nothing else is asked for
    return made(value, **changes)  # type: ignore[no-any-return]  # of its own class
