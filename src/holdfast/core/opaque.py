"""Values in the tree of a checkpoint that stand for others.

Globals and objects that a pickle mentions become inert records: they are never imported, built or
called. A size and a device of torch are values of our own, which need no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from holdfast.core.value import Value

AnyValue = Any
"""The type of a loaded value. It is `Any`, as for `torch.load` and `json.load`: with `object`, every
line that uses one needs a cast."""

MAX_KEY_CHARACTERS = 64
"""The length at which keys of an object are cut in a `repr`."""

MAX_LISTED_KEYS = 4
"""The most keys of a state that a `repr` lists."""


class Size(tuple[int, ...]):
    """A `torch.Size`: a tuple of lengths that keeps its type when it is saved."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Size({list(self)})"


class Device(Value, frozen=True, gc=False):
    """A `torch.device`: the type of a device and its number, if it has one."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        if self.index is None:
            return self.type
        return f"{self.type}:{self.index}"


class Global(Value, frozen=True, gc=False):
    """The name of a class or a function that a pickle mentions. Nothing is imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Opaque:
    """An object that a pickle describes and that was not built.

    It records what a program that loads the pickle would call, and with which values. Objects are
    compared by identity, so that a hostile file cannot make a comparison expensive. This is not a
    struct, because the interpreter of the pickle changes it, and because it has subclasses.

    Attributes:
        what: The class or function: a `Global`, or another `Opaque` if the pickle computes it.
        args: The positional arguments of the call or of `__new__`.
        kwargs: The keyword arguments, if there are any.
        state: What `__setstate__` would receive, or what would become `__dict__`.
        items: The values that would be appended or added.
        entries: The pairs of keys and values that would be set.
    """

    __slots__ = ("args", "entries", "items", "kwargs", "state", "what")

    def __init__(
        self,
        what: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
        *,
        state: object = None,
        items: list[object] | None = None,
        entries: list[tuple[object, object]] | None = None,
    ) -> None:
        """Record an object. The class describes the parameters."""
        self.what = what
        self.args = args
        self.kwargs = kwargs
        self.state = state
        # The interpreter of the pickle appends to these lists.
        self.items: list[object] = []
        if items is not None:
            self.items = items
        self.entries: list[tuple[object, object]] = []
        if entries is not None:
            self.entries = entries

    @property
    def module(self) -> str:
        """The module of the class or function; empty if it is neither."""
        return self.what.module if isinstance(self.what, Global | Opaque) else ""

    @property
    def name(self) -> str:
        """The name of the class or function; empty if it is neither."""
        return self.what.name if isinstance(self.what, Global | Opaque) else ""

    def state_dicts(self) -> tuple[dict[object, object], ...]:
        """Return the dicts that would become attributes.

        A pickle stores the attributes of an object as a dict, or as a pair: a dict, and another one
        with the values of its `__slots__`. Either dict of a pair may be missing. The dicts are not
        copied. Many objects may share one, so code that walks through them must count it once.
        """
        possible_dicts: tuple[object, ...] = (self.state,)
        if isinstance(self.state, tuple) and len(self.state) == 2:
            possible_dicts = self.state
        dicts = [value for value in possible_dicts if isinstance(value, dict)]
        # A hostile pickle may have the same dict twice, which must not be walked twice.
        if len(dicts) == 2 and dicts[0] is dicts[1]:
            dicts.pop()
        return tuple(dicts)

    def attribute(self, name: str) -> AnyValue:
        """Return an attribute, or None if the object does not have it."""
        # The values of slots are set last, so they replace attributes of the same name.
        for attributes in reversed(self.state_dicts()):
            if name in attributes:
                return attributes[name]
        return None

    def attributes(self) -> dict[str, AnyValue]:
        """Return the attributes by their names. The dict is a copy."""
        attributes: dict[str, AnyValue] = {}
        for state in self.state_dicts():
            attributes |= {name: value for name, value in state.items() if isinstance(name, str)}
        return attributes

    def iterate_other_contents(self) -> Iterator[tuple[object, object]]:
        """Yield everything in the object but its attributes, each with a key.

        The keys of entries may be of any type.
        """
        if self.state is not None and not self.state_dicts():
            yield "state", self.state
        if self.args:
            yield "args", self.args
        if self.kwargs:
            yield "kwargs", self.kwargs
        yield from enumerate(self.items)
        yield from self.entries

    def __repr__(self) -> str:
        """Return the class, how many arguments and items there are, and some names of attributes.

        The text has a limited length and does not show values, which may be large, cyclic or
        hostile.
        """
        facts: list[str] = []
        if self.args:
            facts.append(f"{len(self.args)} args")
        if self.state is not None:
            # One key more than is listed shows whether there are more.
            keys = islice(chain(*self.state_dicts()), MAX_LISTED_KEYS + 1)
            names = [key[:MAX_KEY_CHARACTERS] for key in keys if isinstance(key, str)]
            if len(names) > MAX_LISTED_KEYS:
                names[MAX_LISTED_KEYS] = "…"
            if names:
                facts.append(f"state: {', '.join(names)}")
            else:
                facts.append("state")
        if self.items:
            facts.append(f"{len(self.items)} items")
        if self.entries:
            facts.append(f"{len(self.entries)} entries")

        content = ""
        if facts:
            content = f" ({'; '.join(facts)})"
        return f"<Opaque {self.module}.{self.name}{content}>"
