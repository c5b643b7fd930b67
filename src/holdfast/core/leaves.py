"""`Leaves`: the tensors of a nested state, found by one walk, with their names; the containers stay as they are.

A container is looked at as a whole: the types of its keys, the types of its values. No function is called for a tensor, and few for
a container. The walk knows dicts, lists, tuples and pickled objects (`Opaque`), and plain values. Whoever wants it says which types
are tensors, and what becomes of any other leaf (`convert`).

Names are those of `core.tree.name_tensors`: a container that stands in two places is walked in both, and of two tensors that would
have one name the second gets a number. A container in very many places is walked in some of them.

What cannot be saved is collected (`Leaves.problems`): a container inside of itself, great depth, a leaf that `convert` refuses.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, cast

from holdfast.core.opaque import Opaque
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.core.tree import (
    FREE_CHARACTERS,
    LONE_TENSOR_NAME,
    NAME_CHARACTERS_A_BYTE,
    Path,
    contents,
    dotted,
    refilled,
    step,
    too_long_names,
    values_inside,
)
from holdfast.core.value import Value, replace
from holdfast.errors import CannotHold, Unsupported

if TYPE_CHECKING:
    from holdfast.core.table import Table

PLAIN = frozenset({type(None), bool, int, float, str})
TEXT = frozenset({str})
KEYS = frozenset({str, int})
DICTS = frozenset({dict, OrderedDict})
CONTAINERS = DICTS | {list, tuple}

AGAIN = 100_000
"""Steps through containers with tensors that stand in several places, beyond the first of each."""

HELD_NBYTES = 64
"""What a child of a container takes in memory, at the least: its object, and the two references to it and its key."""

SAMPLED = 16
"""Values of a container that stand for all of them."""

Convert = Callable[[object, Path], object]
"""From a leaf to a lazy tensor, a composite, or whatever is to be kept of it. Raises `Unsupported` where it cannot be kept."""


class Leaf(Value, frozen=True, eq=False, gc=False):
    """A tensor in the tree of a state that nobody has made: a row of its table."""

    row: int


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
        self.alone = False
        """Whether the state is one tensor, with nothing around it."""
        self.marked = False
        """Whether a tensor is more than its elements: a Parameter, one that wants a gradient. Said by whoever has asked."""
        self.converted: dict[int, tuple[object, object]] = {}
        """By identity: leaves of other types, and what was made of them."""
        self.odd: dict[int, LazyTensor] = {}
        """By identity: the lazy tensors of those whose rows are odd."""
        self.places: list[tuple[str, object]] = []
        """Those that became tensors, with their names."""
        self.problems: list[str] = []
        """What stands in the way of a save, by its path."""
        self._convert = convert
        self._like: dict[tuple[type, frozenset[type], frozenset[type]], object] = {}
        """A container of each kind."""

    @classmethod
    def of_rows(cls, names: Sequence[str]) -> Leaves:
        """The rows of a table under their names, as leaves of a plain dict."""
        leaves = cls((Leaf,), lambda value, path: value)
        leaves.names, leaves.values = [*names], [*map(Leaf, range(len(names)))]
        leaves._like[dict, frozenset({str}), frozenset({Leaf})] = {}
        return leaves

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
        done = 0
        for number, whole in sorted(wholes.items()):
            name, value = self.names[number], self.values[number]
            self.converted[id(value)] = value, whole
            names += (*self.names[done:number], *[part if self.alone else f"{name}.{part}" for part in whole.parts])
            values += (*self.values[done:number], *whole.parts.values())
            done = number + 1
        self.names, self.values, self.nested = [*names, *self.names[done:]], [*values, *self.values[done:]], True

    def over(self, table: Table) -> Leaves:
        """The same leaves as rows of another table, which has a row for each of them, in their order."""
        made = copy.copy(self)
        wholes = [(key, value, one) for key, (value, one) in self.converted.items() if isinstance(one, Composite)]
        if wholes:
            rows = dict(zip(map(id, self.values), range(len(self.values)), strict=True))
            views = {id(part): table.view(rows[id(part)]) for _, _, one in wholes for part in one.parts.values()}
            made.values = [views.get(id(value), value) for value in self.values]
            made.converted = dict(self.converted)
            for key, value, one in wholes:
                made.converted[key] = value, replace(one, parts={name: views[id(part)] for name, part in one.parts.items()})
        apart = {number for number, kind in enumerate(table.kinds) if not (kind.whole and kind.nbytes) or _is_more(kind.traits)}
        rows_apart = [row for row, kind in enumerate(table.kind) if kind in apart or row in table.odd] if apart or table.odd else []
        made.odd = {id(made.values[row]): table.view(row) for row in rows_apart}
        return made

    def described(self, value: object) -> object:
        """What was made of a leaf of another type, or of an odd tensor; any other value as it is."""
        found = self.converted.get(id(value))
        return self.odd.get(id(value), value) if found is None else found[1]

    def refuse(self) -> None:
        """Raise `CannotHold` where something stands in the way."""
        if self.problems:
            raise CannotHold("this state cannot be saved", self.problems)

    def walk(self, state: object, depth: int) -> None:
        """Walk through a state of containers that nest less than so deep."""
        self.beyond = type(state) is not dict
        kinds, simple = self.kinds, self.kinds | PLAIN
        names, values, like = self.names, self.values, self._like
        walked: dict[int, bool] = {}
        """Containers, and whether there are tensors in them."""
        pending: list[tuple[Iterator[tuple[object, object]], str, object, int, int]] = []
        """Those that are entered: what is left around each, the name of what is around it, its key there, its identity, and how
        many tensors came before it."""
        level = again = objects = 0
        inside: Iterator[tuple[object, object]] = iter([("", state)])
        prefix = ""
        keys: Collection[object]
        content: Collection[object]
        while True:
            for key, item in inside:
                kind = type(item)
                if kind in kinds:
                    names += (f"{prefix}{key}",)
                    values += (item,)
                    continue
                if kind in PLAIN:
                    continue
                ident = id(item)
                if kind in DICTS:
                    keys, content = item, item.values()  # type: ignore[assignment, attr-defined]  # a cast is a call
                elif kind in CONTAINERS:
                    content = item  # type: ignore[assignment]
                    keys = range(len(content))
                elif isinstance(item, dict):
                    keys, content = item, item.values()
                elif isinstance(item, Opaque):
                    held = contents(item) or []
                    pairs = [pair for _, inner in held for pair in inner]
                    keys, content = [one for one, _ in pairs], [one for _, one in pairs]
                    if ident not in walked and any(id(owner) in walked for owner, _ in held):
                        walked[ident] = True
                    walked |= {id(owner): True for owner, _ in held[1:]}
                else:
                    self._leaf(item, f"{prefix}{key}", _path(pending, key))
                    continue
                if ident in walked:
                    if not walked[ident]:
                        continue
                    again += 1 + len(content)
                    if any(ident == one[3] for one in pending):
                        # An object may hold what holds it.
                        if not objects and kind is not Opaque:
                            self._problem(_path(pending, key), f"a {kind.__name__} that contains itself")
                        continue
                    if again > AGAIN:
                        continue
                if level >= depth:
                    self.problems.append(f"{dotted(_path(pending, key)[:4])}…: nested deeper than Limits(depth={depth})")
                    continue
                named, types = {*map(type, keys)}, {*map(type, content)}
                if not named <= KEYS:
                    keys = [str(step(one)) for one in keys]
                self.nested |= level > 0
                self.beyond |= kind is not dict or not named <= TEXT or bool(types & PLAIN)
                sort = kind, frozenset(named), frozenset(types)
                if sort not in like and kind is not Opaque:
                    like[sort] = item
                below = f"{prefix}{key}." if level else ""
                if types <= kinds:
                    walked[ident] = bool(types)
                    names += [f"{below}{one}" for one in keys] if below else map(str, keys) if int in named else keys  # type: ignore[arg-type]
                    values += content
                elif types <= simple:
                    walked[ident] = bool(types & kinds)
                    for one, value in zip(keys, content, strict=True) if walked[ident] else ():
                        if type(value) in kinds:
                            names += (f"{below}{one}",)
                            values += (value,)
                else:
                    walked[ident] = True
                    pending.append((inside, prefix, key, ident, len(values) if kind is not Opaque else -1))
                    objects += kind is Opaque
                    inside, prefix = zip(keys, content, strict=True), below
                    level += 1
                    break
            else:
                if not pending:
                    break
                inside, prefix, _, ident, before = pending.pop()
                walked[ident] = len(values) > before
                objects -= before < 0
                level -= 1
        self.alone = names == [""] and not isinstance(state, dict | list | tuple | Opaque)
        if self.alone:
            names[0] = LONE_TENSOR_NAME

    def number_names(self) -> None:
        """Give a number to the second tensor of a name, and to those behind it."""
        seen: set[str] = set()
        doubles: dict[str, int] = {}
        for row, base in enumerate(self.names):
            name, count = base, doubles.get(base, 1)
            while name in seen:
                count += 1
                name = f"{base}#{count}"
            if count > 1:
                doubles[base] = count
            seen.add(name)
            self.names[row] = name

    def _problem(self, path: Path, what: str) -> None:
        self.problems.append(f"{dotted(path) or 'the state'}: {what}")

    def _leaf(self, value: object, name: str, path: Path) -> None:
        found = self.converted.get(id(value))
        try:
            made = self._convert(value, path) if found is None else found[1]
        except Unsupported as error:
            self._problem(path, error.message)
            made = value
        self.converted[id(value)] = value, made
        if found is None and isinstance(made, LazyTensor | Composite):
            self.places.append((name, value))
        if isinstance(made, LazyTensor):
            self.names.append(name)
            self.values.append(made)
        elif isinstance(made, Composite):
            self.nested = True
            for part, tensor in made.children():
                self.names.append(f"{name}.{part}" if path else part)
                self.values.append(tensor)
        else:
            self.beyond = True

    def others(self) -> list[object]:
        """Leaves that are neither tensors nor plain values."""
        return [value for value, made in self.converted.values() if not isinstance(made, LazyTensor | Composite)]

    def composites(self) -> list[Composite]:
        """Tensors that are several rows each."""
        return [made for _, made in self.converted.values() if isinstance(made, Composite)]

    def samples(self) -> list[object]:
        """A container of each kind, with some of its plain values."""
        return [_sample(container, plain=not types.isdisjoint(PLAIN)) for (_, _, types), container in self._like.items()]


NO_LEAVES = Leaves((), lambda value, path: value)


def _path(pending: Sequence[tuple[object, str, object, int, int]], key: object) -> Path:
    """Where a value is that is met under a key, in the containers that are entered."""
    return tuple(map(step, (*[one[2] for one in pending[1:]], key))) if pending else ()


def _is_more(traits: Traits) -> bool:
    """Whether a tensor is more than its elements and a few marks, so that a tree says more of it than its name."""
    return traits.subclass is not None or traits.state is not None or traits.blocks is not None


def _sample(container: object, *, plain: bool) -> object:
    """The same with some of its `plain` values, and some of what it says of versions."""
    if not isinstance(container, dict):
        inside = cast("list[object] | tuple[object, ...]", container) if plain else ()
        return type(container)(islice((value for value in inside if type(value) in PLAIN), SAMPLED))  # type: ignore[call-arg]  # both take one
    some = ((key, value) for key, value in (container.items() if plain else ()) if type(value) in PLAIN)
    made = refilled(container, dict(islice(some, SAMPLED)))
    versions = getattr(container, "_metadata", None)
    if isinstance(versions, dict):
        vars(made)["_metadata"] = type(versions)(islice(versions.items(), SAMPLED))
    return made


def find_leaves(state: object, kinds: Collection[type], convert: Convert, depth: int) -> Leaves:
    """The tensors of a state, of these types, under names of which none is another's.

    Names may take many times what the state has in memory, where a key is counted once however many containers have it. Raises
    `LimitExceeded` for longer ones.
    """
    leaves = Leaves(kinds, convert)
    leaves.walk(state, depth)
    if not leaves.flat and len({*leaves.names}) < len(leaves.names):
        leaves.number_names()
    characters = len("".join(leaves.names))
    if characters > FREE_CHARACTERS + NAME_CHARACTERS_A_BYTE * HELD_NBYTES * len(leaves.names):
        room = FREE_CHARACTERS + NAME_CHARACTERS_A_BYTE * _held_nbytes(state)
        if characters > room:
            raise too_long_names(room, characters)
    return leaves


def _held_nbytes(state: object) -> int:
    """What the containers of a state take in memory, at the least, and its keys, each once."""
    containers = [value for value in values_inside(state) if isinstance(value, dict | list | tuple)]
    keys = {id(key): len(key) for value in containers if isinstance(value, dict) for key in value if isinstance(key, str)}
    return sum(keys.values()) + HELD_NBYTES * sum(map(len, containers))
