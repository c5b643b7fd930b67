"""Values in a checkpoint's tree that stand for others: inert records of globals and of objects that a pickle asked for and did not
get, and the small values of torch that need no torch, a size and a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from holdfast.core.value import Value

AnyValue = Any
"""The type of a loaded value. It is `Any`, as for `torch.load` and `json.load`: with `object`, every line that uses one needs a
cast."""


class Size(tuple[int, ...]):
    """A `torch.Size`: a tuple of lengths that remembers what it was."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Size({list(self)})"


class Device(Value, frozen=True, gc=False):
    """A `torch.device`: a kind of device and, where one was given, its number."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Global(Value, frozen=True, gc=False):
    """A name that a pickle mentioned (`module.name`). It is text; nothing was imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Opaque:
    """An object that a pickle wanted to build and that was not built: what would have been called, with what. Equality and hash are
    by identity, so that a hostile file cannot make comparing two of them expensive. No struct, since it changes while the stream
    goes on, and since others begin with one."""

    __slots__ = ("args", "entries", "items", "kwargs", "state", "what")

    def __init__(
        self, what: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None, *, state: object = None,
        items: list[object] | None = None, entries: list[tuple[object, object]] | None = None,
    ) -> None:  # fmt: skip
        self.what = what  # The callable or class: a `Global`, or another `Opaque` when the pickle computed it.
        self.args = args  # Positional arguments of the call or of `__new__`.
        self.kwargs = kwargs  # Keyword arguments (NEWOBJ_EX), if there were any.
        self.state = (
            state  # What `__setstate__` would have received, or what would have become `__dict__`.
        )
        self.items: list[object] = (
            [] if items is None else items
        )  # Elements that would have been appended or added.
        self.entries: list[tuple[object, object]] = (
            [] if entries is None else entries
        )  # Key/value pairs that would have been set.

    @property
    def module(self) -> str:
        return self.what.module if isinstance(self.what, Global | Opaque) else ""

    @property
    def name(self) -> str:
        return self.what.name if isinstance(self.what, Global | Opaque) else ""

    def state_dicts(self) -> tuple[dict[object, object], ...]:
        """The dicts that would have become attributes: the state, or the parts of a (dict, slots) pair. They are the stream's own,
        which many objects may share: whoever walks them counts each once."""
        parts = (
            self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        )
        dicts = tuple(part for part in parts if isinstance(part, dict))
        return dicts[:1] if len(dicts) == 2 and dicts[0] is dicts[1] else dicts

    def attribute(self, name: str) -> AnyValue:
        """One attribute, or None; costs the same however many there are."""
        return next((state[name] for state in reversed(self.state_dicts()) if name in state), None)

    def attributes(self) -> dict[str, AnyValue]:
        """A copy of the state as attribute names and values, where it has that form."""
        return {
            k: v for state in self.state_dicts() for k, v in state.items() if isinstance(k, str)
        }

    def iterate_other_contents(self) -> Iterator[tuple[str | int, object]]:
        """Everything inside but the attributes, with the path element that leads to it."""
        if self.state is not None and not self.state_dicts():
            yield "state", self.state
        if self.args:
            yield "args", self.args
        if self.kwargs:
            yield "kwargs", self.kwargs
        yield from enumerate(self.items)
        for key, value in self.entries:
            yield (key if isinstance(key, str | int) else _label(key)), value

    def __repr__(self) -> str:
        # Bounded on purpose: the content may be large, cyclic or hostile.
        inside = []
        if self.args:
            inside.append(f"{len(self.args)} args")
        if self.state is not None:
            some = [
                key
                for key in itertools.islice(itertools.chain(*self.state_dicts()), 5)
                if isinstance(key, str)
            ]
            shown = ", ".join(key[:64] for key in some[:4]) + (", …" if len(some) > 4 else "")
            inside.append(f"state: {shown}" if some else "state")
        if self.items:
            inside.append(f"{len(self.items)} items")
        if self.entries:
            inside.append(f"{len(self.entries)} entries")
        return (
            f"<Opaque {self.module}.{self.name}{' (' + '; '.join(inside) + ')' if inside else ''}>"
        )


def _label(key: object) -> str:
    if isinstance(key, float | bool | complex | bytes) or key is None:
        return repr(key[:64] if isinstance(key, bytes) else key)[:64]
    return f"<{type(key).__name__}>"
