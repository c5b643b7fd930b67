"""`Leaves`: the tensors of a nested state, found by one walk, with their names; the containers stay as they are.

A dict of fifty thousand tensors is looked at as a whole: the types of its values, its keys, its values. The walk knows the usual
containers (dicts, lists and tuples of exactly these classes), keys that are text or integers, and plain values. Whoever wants it
says which types are tensors, and what becomes of any other leaf (`convert`).

Some states are left to the walk that knows everything (`rewrite.state.StateWalk`), which rebuilds them: other kinds of containers,
tensors in a container that stands in two places, two tensors of one name, names of immense length, great depth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import cast

from holdfast.core.opaque import Opaque
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import FREE_CHARACTERS, HELD_NBYTES, NAME_CHARACTERS_A_BYTE, Path
from holdfast.errors import Unsupported

PLAIN = frozenset({type(None), bool, int, float, str})
KEYS = frozenset({str, int})
CONTAINERS = frozenset({dict, OrderedDict, list, tuple})

DEPTH = 16
"""Of containers that this walk enters."""

SAMPLED = 16
"""Values of a container that stand for all of them."""

Convert = Callable[[object, Path], object]
"""From a leaf to a lazy tensor, a composite, or whatever is to be kept of it. Raises `Unsupported` where it cannot be kept."""


class Leaves:
    """The tensors of a state, in the order of `core.tree.name_tensors`."""

    def __init__(self, kinds: Collection[type], convert: Convert) -> None:
        self.kinds = frozenset(kinds)
        """The types of tensors."""
        self.names: list[str] = []
        self.values: list[object] = []
        """The tensor of each name: as it stands in the state, or the lazy tensor that was made of a leaf of another type."""
        self.beyond = False
        """Whether there is anything but tensors in dicts of texts."""
        self.nested = False
        """Whether there are containers in containers."""
        self.marked = False
        """Whether a tensor is more than its elements: a Parameter, one that wants a gradient. Said by whoever has asked."""
        self.converted: dict[int, tuple[object, object]] = {}
        """By identity: leaves of other types, and what was made of them."""
        self.odd: dict[int, LazyTensor] = {}
        """By identity: the lazy tensors of those whose rows are odd."""
        self.places: list[tuple[str, object]] = []
        """Those that became tensors, with their names."""
        self._convert = convert
        self._like: dict[tuple[type, frozenset[type], frozenset[type]], object] = {}
        """A container of each kind."""
        self._walked: dict[int, bool] = {}
        """Containers, and whether they may be met again."""

    @property
    def flat(self) -> bool:
        """Whether the state is a plain dict of plain tensors under their own names."""
        return not (self.nested or self.beyond or self.marked)

    def is_tensor(self, value: object) -> bool:
        """Whether a value of the state is a tensor of a type that was asked for."""
        return type(value) in self.kinds and id(value) not in self.converted

    def take_apart(self, wholes: Mapping[int, Composite]) -> None:
        """Put the parts of composites in the places of the tensors of these numbers, which only look like plain ones."""
        names: list[str] = []
        values: list[object] = []
        for number, (name, value) in enumerate(zip(self.names, self.values, strict=True)):
            whole = wholes.get(number)
            if whole is None:
                names.append(name)
                values.append(value)
                continue
            self.converted[id(value)] = value, whole
            for part, tensor in whole.children():
                names.append(f"{name}.{part}")
                values.append(tensor)
        self.names, self.values, self.nested = names, values, True

    def described(self, value: object) -> object:
        """What was made of a leaf of another type, or of an odd tensor; any other value as it is."""
        found = self.converted.get(id(value))
        return self.odd.get(id(value), value) if found is None else found[1]

    def through(self, value: object, prefix: str, path: Path) -> bool:
        """Walk on from here. False where the state is for the other walk."""
        kind = type(value)
        if kind in PLAIN:
            self.beyond = True
            return True
        if kind not in CONTAINERS:
            return self._leaf(value, prefix, path)
        if len(path) >= DEPTH:
            return False
        if id(value) in self._walked:
            return self._walked[id(value)]
        self._walked[id(value)] = False
        before = len(self.values)
        keys: Collection[object]
        inside: Collection[object]
        if isinstance(value, dict):
            keys, inside = value, value.values()
        else:
            inside = cast("list[object] | tuple[object, ...]", value)
            keys = range(len(inside))
        named = {*map(type, keys)}
        if not named <= KEYS:
            return False
        types = {*map(type, inside)}
        self.nested |= bool(path)
        self.beyond |= kind is not dict or int in named
        self._like.setdefault((kind, frozenset(named), frozenset(types)), value)
        if types and types <= self.kinds:
            self.names += map(str, keys) if not prefix else [f"{prefix}{key}" for key in keys]
            self.values += inside
        elif types <= PLAIN:
            self.beyond |= bool(types)
        else:
            for key, item in zip(keys, inside, strict=True):
                if type(item) in self.kinds:
                    self.names.append(f"{prefix}{key}")
                    self.values.append(item)
                elif not self.through(item, f"{prefix}{key}.", (*path, cast("str | int", key))):
                    return False
        self._walked[id(value)] = len(self.values) == before
        return True

    def _leaf(self, value: object, prefix: str, path: Path) -> bool:
        if isinstance(value, Mapping | Opaque):
            return False
        found = self.converted.get(id(value))
        if found is not None and isinstance(found[1], LazyTensor | Composite):
            # In two places: the other walk gives each a name.
            return False
        try:
            made = self._convert(value, path)
        except Unsupported:
            return False
        self.converted[id(value)] = value, made
        name = prefix[:-1]
        if isinstance(made, LazyTensor):
            self.names.append(name)
            self.values.append(made)
            self.places.append((name, value))
        elif isinstance(made, Composite):
            self.nested = True
            self.places.append((name, value))
            for part, tensor in made.children():
                self.names.append(f"{prefix}{part}")
                self.values.append(tensor)
        else:
            self.beyond = True
        return True

    def others(self) -> list[object]:
        """Leaves that are neither tensors nor plain values."""
        return [value for value, made in self.converted.values() if not isinstance(made, LazyTensor | Composite)]

    def samples(self) -> list[object]:
        """A container of each kind, with some of its plain values."""
        return [_sample(container, plain=not types.isdisjoint(PLAIN)) for (_, _, types), container in self._like.items()]


def _sample(container: object, *, plain: bool) -> object:
    """The same with some of its `plain` values, and some of what it says of versions."""
    if not isinstance(container, dict):
        inside = cast("list[object] | tuple[object, ...]", container) if plain else ()
        return type(container)(islice((value for value in inside if type(value) in PLAIN), SAMPLED))  # type: ignore[call-arg]  # both take one
    some = ((key, value) for key, value in (container.items() if plain else ()) if type(value) in PLAIN)
    made = type(container)(islice(some, SAMPLED))
    versions = getattr(container, "_metadata", None)
    if isinstance(versions, dict):
        vars(made)["_metadata"] = type(versions)(islice(versions.items(), SAMPLED))
    return made


def find_leaves(state: object, kinds: Collection[type], convert: Convert) -> Leaves | None:
    """The tensors of a state, of these types, under names of which none is another's; None where it is for the other walk."""
    leaves = Leaves(kinds, convert)
    if type(state) not in CONTAINERS or not leaves.through(state, "", ()):
        return None
    # A name that two have gets a number; names that are no Unicode, or very much longer than the keys, are refused: by the other
    # walk.
    apart = leaves.flat or len({*leaves.names}) == len(leaves.names)
    room = FREE_CHARACTERS + NAME_CHARACTERS_A_BYTE * HELD_NBYTES * len(leaves.names)
    every = "".join(leaves.names)
    return leaves if apart and len(every) <= room and _is_unicode(every) else None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
