"""Objects that keep a state: whatever has `state_dict()` and `load_state_dict()` stands for what the former returns.

    {"app": AppState(), "step": 3}          {"app": {"w": …, "epoch": 1}, "step": 3}

That is how torch's distributed checkpoint takes modules, optimizers, schedulers and classes of users at the top of a state. Here
they are taken wherever they stand, a state dict that holds more of them included. Nothing is asked about torch: the methods tell.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Protocol, cast

from holdfast.core.tree import rebuilt

__all__ = ["Stateful", "is_stateful", "state_dicts", "stateful_keys"]

PLAIN = (str, bytes, int, float, complex, type(None), type)

DEPTH = 128
"""Beyond this a walk goes no deeper. No state of that depth can be saved; whoever describes it says so."""


class Stateful(Protocol):
    """What is asked, and told."""

    def state_dict(self) -> object: ...

    def load_state_dict(self, state_dict: object, /) -> object: ...


def is_stateful(value: object) -> bool:
    """Whether an object has both methods. What it only pretends to have (`__getattr__`) does not count."""
    if isinstance(value, PLAIN):
        return False
    return all(_has(value, name) for name in ("state_dict", "load_state_dict"))


def stateful_keys(mapping: Mapping[object, object]) -> list[object]:
    """The keys of the objects with a state, in an order that is the same on all ranks: their methods may talk to each other."""
    return sorted((key for key, value in mapping.items() if is_stateful(value)), key=str)


def state_dicts(state: object) -> object:
    """The state with a state dict in the place of every object that has one. What holds none stays the very same object."""
    return Taking().take(state, frozenset())


def _has(value: object, name: str) -> bool:
    # First of its class, which is how it nearly always is, and quick.
    if callable(inspect.getattr_static(type(value), name, None)):
        return True
    return name in getattr(value, "__dict__", ()) and callable(getattr(value, name))


class Taking:
    """One walk through a state. Containers that stand in many places are looked at once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[object, object]] = {}
        """By identity: what was met, which is kept so that its number stays its own, and what stands for it."""

    def take(self, value: object, above: frozenset[int]) -> object:
        if isinstance(value, PLAIN) or id(value) in above or len(above) > DEPTH:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, self._take(value, above | {id(value)})
        return self._made[id(value)][1]

    def _take(self, value: object, inside: frozenset[int]) -> object:
        if is_stateful(value):
            return self.take(cast(Stateful, value).state_dict(), inside)
        if isinstance(value, Mapping):
            asked = {key: self.take(value[key], inside) for key in stateful_keys(value)}
            inner = {key: asked[key] if key in asked else self.take(item, inside) for key, item in value.items()}
            if isinstance(value, dict):
                return rebuilt(value, list(inner.values()))
            return value if all(inner[key] is item for key, item in value.items()) else inner
        if type(value) is list or type(value) is tuple:
            return rebuilt(value, [self.take(item, inside) for item in value])
        return value
