"""The walk through a document of typed JSON: nodes and their depth, fields of tagged objects, places for messages.

The values come from `strict_json`, so that their depth is bounded, keys are unique and numbers are what they look like. Keys of
dicts and members of sets are paid for as in the pickle reader, because a file can choose keys that collide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn

from holdfast.core.opaque import Global
from holdfast.core.protocols import Source
from holdfast.core.tensor import LazyTensor, Traits
from holdfast.errors import HeaderError, LimitExceeded, PickleError
from holdfast.formats.pickle.spending import Spending
from holdfast.formats.safetensors.layout import addressable
from holdfast.formats.safetensors.strict_json import kind, pointer, quoted
from holdfast.formats.tree_json.encode import TAG
from holdfast.formats.tree_json.scalars import SAFE_INTEGER

__all__ = ["FLAGS", "TRAITS", "At", "Decoder", "Fields", "Reader", "check_fields", "refuse", "shown"]

Fields = dict[str, object]
At = tuple["At", str | int] | None
"""Where a value is, innermost step last, as a linked list: a step costs the same at any depth."""

FLAGS = ("requires_grad", "parameter", "buffer")
TRAITS = (*FLAGS, "subclass", "state")
"""The optional fields of a tensor and of a composite."""

LEVELS_BELOW = 8
"""Levels of tagged objects that a value may take below the deepest container that `Limits.depth` allows."""


Reader = Callable[["Decoder", Fields, At, int], object]
"""What reads a tagged object: its fields, its place and its depth."""


class Decoder:
    """One document."""

    def __init__(self, readers: Mapping[str, Reader], tensor: Callable[[str], LazyTensor], source: Source) -> None:
        self.readers = readers
        self.find = tensor
        self.source = source
        self.limits = source.limits
        self.tensors: dict[str, LazyTensor] = {}
        self.spending = Spending(source.limits, 0)

    def node(self, value: object, at: At, depth: int) -> object:
        """One value and everything in it."""
        if isinstance(value, dict):
            if depth > self.limits.depth + LEVELS_BELOW:
                self.too_deep(at)
            if TAG not in value:
                for key in value:
                    if key.startswith(TAG):
                        refuse(f"a key that begins with {TAG} in a plain dict", (at, key))
                return {key: self.node(inside, (at, key), depth + 1) for key, inside in value.items()}
            read = self.readers.get(tag) if isinstance(tag := value[TAG], str) else None
            if read is None:
                refuse(f"there is no tag {kind(tag)}", (at, TAG))
            return read(self, value, at, depth)
        if isinstance(value, list):
            if depth > self.limits.depth + LEVELS_BELOW:
                self.too_deep(at)
            return [self.node(inside, (at, i), depth + 1) for i, inside in enumerate(value)]
        if type(value) is int and not -SAFE_INTEGER <= value <= SAFE_INTEGER:
            refuse("an integer that not every reader of JSON can hold, and no tag", at)
        return value

    def too_deep(self, at: At) -> NoReturn:
        raise LimitExceeded(f"at {shown(at)}: nested deeper than Limits(depth={self.limits.depth})", expected=self.limits.depth)

    def entries(self, target: dict[object, object], fields: Fields, at: At, depth: int) -> None:
        """Fill a dict from `entries`, an object, or from `items`, a list of pairs."""
        entries = fields.get("entries")
        if entries is not None:
            if "items" in fields or not isinstance(entries, dict):
                refuse("expected an object of entries or a list of items", at)
            for key, inside in entries.items():
                target[key] = self.node(inside, ((at, "entries"), key), depth + 1)
            return
        place: At = (at, "items")
        items = self.many(fields, "items", at)
        for i, pair in enumerate(items):
            if not isinstance(pair, list) or len(pair) != 2:
                refuse(f"expected a pair, found {kind(pair)}", (place, i))
            key = self.key(pair[0], len(target), ((place, i), 0), depth)
            if key in target:
                refuse("a key that was there before", ((place, i), 0))
            target[key] = self.node(pair[1], ((place, i), 1), depth + 1)

    def members(self, fields: Fields, at: At, depth: int) -> set[object]:
        made: set[object] = set()
        for i, item in enumerate(self.many(fields, "items", at)):
            member = self.key(item, len(made), ((at, "items"), i), depth)
            if member in made:
                refuse("a member that was there before", ((at, "items"), i))
            made.add(member)
        return made

    def key(self, value: object, size: int, at: At, depth: int) -> object:
        """A dict key or a set member; looked at before it is hashed."""
        key = self.node(value, at, depth + 1)
        try:
            self.spending.key(key, size)
        except PickleError as error:
            refuse(error.message, at)
        return key

    def many(self, fields: Fields, field: str, at: At) -> list[object]:
        values = fields.get(field)
        if not isinstance(values, list):
            refuse(f"expected a list, found {kind(values)}", (at, field))
        return values

    def text(self, fields: Fields, field: str, at: At) -> str:
        value = fields.get(field)
        if not isinstance(value, str):
            refuse(f"expected text, found {kind(value)}", (at, field))
        return value

    def any_text(self, fields: Fields, field: str, at: At, depth: int) -> str:
        """Text that may have been tagged because it is not Unicode."""
        value = self.node(fields.get(field), (at, field), depth + 1)
        if not isinstance(value, str):
            refuse(f"expected text, found {kind(fields.get(field))}", (at, field))
        return value

    def integer(self, fields: Fields, field: str, at: At, depth: int) -> int:
        value = self.optional_integer(fields, field, at, depth)
        if value is None:
            refuse("expected an integer, found null", (at, field))
        return value

    def optional_integer(self, fields: Fields, field: str, at: At, depth: int) -> int | None:
        value = self.node(fields.get(field), (at, field), depth + 1)
        if value is not None and type(value) is not int:
            refuse(f"expected an integer, found {kind(fields.get(field))}", (at, field))
        return value

    def shape(self, fields: Fields, at: At) -> tuple[int, ...]:
        lengths = self.many(fields, "shape", at)
        checked = tuple(n for n in lengths if type(n) is int and n >= 0)
        if len(checked) != len(lengths) or len(checked) > self.limits.rank or not addressable(checked, 8):
            refuse("expected a list of lengths", (at, "shape"))
        return checked

    def traits(self, traits: Traits, fields: Fields, at: At, depth: int) -> Traits:
        if fields.keys().isdisjoint(TRAITS):
            return traits
        for flag in FLAGS:
            if fields.get(flag, True) is not True:
                refuse(f"expected true, found {kind(fields[flag])}", (at, flag))
        subclass = self.node(fields.get("subclass"), (at, "subclass"), depth + 1)
        if "subclass" in fields and not isinstance(subclass, Global):
            refuse("expected a global", (at, "subclass"))
        return replace(
            traits,
            requires_grad="requires_grad" in fields,
            parameter="parameter" in fields,
            buffer="buffer" in fields,
            subclass=subclass if isinstance(subclass, Global) else None,
            state=self.node(fields.get("state"), (at, "state"), depth + 1),
        )


def shown(at: At) -> str:
    """A place as a JSON pointer."""
    steps: list[str | int] = []
    while at is not None:
        at, step = at
        steps.append(step)
    return pointer(*reversed(steps))


def refuse(reason: str, at: At) -> NoReturn:
    raise HeaderError(f"at {shown(at)}: {reason}")


def check_fields(fields: Fields, at: At, *expected: str, optional: tuple[str, ...] = ()) -> None:
    for field in expected:
        if field not in fields:
            refuse(f"the field {field} is missing", at)
    for field in fields:
        if field != TAG and field not in expected and field not in optional:
            refuse(f"{quoted(str(fields[TAG]))} has no such field", (at, field))
