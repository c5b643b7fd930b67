"""The tree of a state with very many tensors, which are rows and not objects (`plan.rows`).

    state ── find_leaves ──▶ its tensors and their names ── ask ──▶ TensorRows
    state, and those ── encode_rows ──▶ the text of the tree, as `encode_tree` has it

All but the tensors is encoded by `Encoder`, as always. A dict of tensors, of which there may be tens of thousands, is one text.
*Common* is what both ways write alike: the exact types of containers and values, keys that are text or integers, no container
with tensors in two places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from operator import is_
from typing import cast

import msgspec

from holdfast.core.tree import FREE_CHARACTERS, HELD_NBYTES, NAME_CHARACTERS_A_BYTE, Path
from holdfast.formats.strict_json import as_keys
from holdfast.formats.tree_json.encode import TAG, EncodedTree, Encoder, encoded_by
from holdfast.formats.tree_json.scalars import is_unicode

PLAIN = frozenset({type(None), bool, int, float, str})
KEYS = frozenset({str, int})
CONTAINERS = frozenset({dict, OrderedDict, list, tuple})

SAMPLED = 16
"""Values of a container that stand for all of them."""

TENSOR = msgspec.json.encode({TAG: "tensor", "name": ""}).decode().removesuffix('""}')
"""A tensor in the tree, up to its name."""


class Leaves:
    """The tensors of a state, in the order of `core.tree.name_tensors`. `kinds` are their types, `depth` that of containers."""

    def __init__(self, kinds: Collection[type], depth: int) -> None:
        self.kinds = frozenset(kinds)
        self.names: list[str] = []
        self.values: list[object] = []
        """One that stands in several places is here as often."""
        self.beyond = False
        """Whether there is anything but tensors, in dicts of texts."""
        self.nested = False
        """Whether there are containers in containers."""
        self._like: dict[tuple[type, frozenset[type], frozenset[type]], object] = {}
        """A container of each kind."""
        self._depth = depth
        self._walked: dict[int, bool] = {}
        """Containers, and whether they may be met again."""

    def through(self, value: object, prefix: str, depth: int) -> bool:
        """Whether all is common from here on."""
        kind = type(value)
        if kind in PLAIN:
            self.beyond = True
            return True
        if kind not in CONTAINERS or depth > self._depth:
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
        self.nested |= depth > 1
        self.beyond |= not isinstance(value, dict) or int in named
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
                elif not self.through(item, f"{prefix}{key}.", depth + 1):
                    return False
        self._walked[id(value)] = len(self.values) == before
        return True

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


def find_leaves(state: object, kinds: Collection[type], depth: int) -> Leaves | None:
    """The tensors of a state, of these types, under names of which none is another's; None where it is not common."""
    leaves = Leaves(kinds, depth)
    if type(state) not in CONTAINERS or not leaves.through(state, "", 1):
        return None
    # A name that two have gets a number; names that are very much longer than the keys, or no Unicode, are refused: others say so.
    every = "".join(leaves.names)
    apart = not (leaves.nested or leaves.beyond) or len({*leaves.names}) == len(leaves.names)
    room = FREE_CHARACTERS + NAME_CHARACTERS_A_BYTE * HELD_NBYTES * len(leaves.names)
    return leaves if apart and len(every) <= room and is_unicode(every) else None


def encode_rows(state: object, leaves: Leaves, traits: Sequence[str]) -> EncodedTree:
    """The tree, with a text in the place of tensors. `traits` are what is said of each of `leaves` behind its name."""
    return encoded_by(RowEncoder(leaves, traits), state)


def traits_text(*, requires_grad: bool = False, parameter: bool = False) -> str:
    """What `Encoder.traits` says of a tensor, behind its name and up to the end."""
    flags = {"requires_grad": requires_grad, "parameter": parameter}
    said = msgspec.json.encode({flag: True for flag, said in flags.items() if said}).decode()
    return said.replace("{", ",") if len(said) > len("{}") else "}"


class RowEncoder(Encoder):
    """One walk, in the order of the other."""

    def __init__(self, leaves: Leaves, traits: Sequence[str]) -> None:
        super().__init__({})
        self._leaves, self._traits = leaves, traits
        self._met = 0

    def node(self, value: object, path: Path) -> object:
        if type(value) not in self._leaves.kinds:
            return super().node(value, path)
        made = self._texts([value])
        return self.problem(path, "a tensor where tensors have no name") if made is None else msgspec.Raw(made[0].encode())

    def named(self, value: Mapping[str, object], path: Path) -> object:
        made = self._texts([*value.values()]) if self._leaves.kinds.issuperset(map(type, value.values())) else None
        if not made:
            return super().named(value, path)
        quote, keys = as_keys([*value])
        listed = ",".join([f"{quote}{key}{quote}:{text}" for key, text in zip(keys, made, strict=True)])
        return msgspec.Raw(f"{{{listed}}}".encode())

    def _texts(self, values: list[object]) -> list[str] | None:
        """The texts of tensors; None where these are not the next ones."""
        first, stop = self._met, self._met + len(values)
        if stop > len(self._leaves.values) or not all(map(is_, values, self._leaves.values[first:stop])):
            return None
        self._met = stop
        self.steps += len(values)
        quote, names = as_keys(self._leaves.names[first:stop])
        return [f"{TENSOR}{quote}{name}{quote}{trait}" for name, trait in zip(names, self._traits[first:stop], strict=True)]
