"""`Value`: a frozen msgspec struct, the base of nearly all classes of Holdfast.

    class Box(Value, gc=False):
        start: tuple[int, ...]
        stop: tuple[int, ...]

It is used like a frozen dataclass: with `repr`, `==`, `hash`, `match`, `__post_init__` and pickles.
But an instance takes 0.05 µs to construct instead of 1 µs, and the class 0.01 ms to define instead
of 0.5. A class whose fields change is a plain `Struct`. A class that defines `__eq__` also needs
`__ne__ = object.__ne__`, because structs inherit a `__ne__` that does not call it.

**`gc=False`** hides instances from Python's garbage collector, which makes them smaller and faster.
But a reference cycle through such an instance is never freed. So it is only for fields that cannot
lead back to the instance, whatever a file contains: numbers, texts, bytes, tuples of these, and
values with `gc=False`. Never for a store, a source, a function, a list, a dict or an `object`.

**Dataclasses** are for results that users get, because they may call `dataclasses.replace`,
`fields` or `asdict` on them: reports and their rows (`core.notebook.Shown`), rules, exports, and
classes that imitate those of torch (`holdfast.metadata`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

from msgspec import Struct, field
from msgspec.structs import asdict
from msgspec.structs import replace as struct_replace

ValueT = TypeVar("ValueT")
StructT = TypeVar("StructT", bound=Struct)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value(Struct, frozen=True):
    """The base of frozen structs. Subclasses are frozen, too."""

    def __replace__(self: StructT, /, **changes: Any) -> StructT:  # noqa: ANN401  # any field
        """Return a copy with changed fields, for `replace` and for `copy.replace`."""
        if hasattr(self, "__post_init__"):
            # The constructor is called, because `replace` of msgspec before 0.21 does not call
            # `__post_init__`, so that the new fields would not be checked.
            return type(self)(**{**asdict(self), **changes})
        return struct_replace(self, **changes)


def replace(value: ValueT, /, **changes: Any) -> ValueT:  # noqa: ANN401  # any field
    """Return a copy of a value or a dataclass with changed fields, which are checked.

    >>> from holdfast.core.box import Box
    >>> replace(Box((0,), (4,)), stop=(6,))
    Box(start=(0,), stop=(6,))
    """
    replace_method = getattr(type(value), "__replace__", None)
    if replace_method is None:
        # Before Python 3.13, dataclasses have no such method.
        import dataclasses

        return dataclasses.replace(value, **changes)  # type: ignore[type-var]  # a dataclass
    return replace_method(value, **changes)  # type: ignore[no-any-return]  # the same class


def replace_as_base(
    base_class: type[ValueT], value: ValueT, changes: Mapping[str, object]
) -> ValueT:
    """Return an instance of a base class with the fields of a value, some of them changed.

    This is for subclasses in which some fields are properties that are computed on demand. A copy
    with changed fields cannot compute them, so it becomes an instance of the base class.
    """
    fields = base_class.__struct_fields__  # type: ignore[attr-defined]  # a struct
    old_fields = {name: getattr(value, name) for name in fields if name not in changes}
    return base_class(**old_fields, **changes)
