"""`Leaves`: the tensors of a nested state, found by one walk, with their names; the containers stay as they are.

What was opened (`name_tensors`) and what is to be saved (`find_leaves`) go through one loop. A `Policy` says what differs.

1. There are dicts, lists, tuples, pickled objects (`Opaque`), and plain values. Whoever wants it says which types are tensors, and
   what becomes of any other leaf (`convert`). No function is called for a tensor, and few for a container.
2. The state may be hostile: containers may be shared a million times, contain themselves, or nest without end. Each is gone through
   where it is met first, in the order in which a person would read it.
3. A container that is met again is gone through again (the same state dict under two keys has two sets of names), as long as a
   budget of extra steps lasts. After that it is left out. What an object holds is stored in dicts that other objects may hold as
   well: `core.tree.contents` says which, and these are counted like any container.
4. A container that contains itself is not entered again on its own path.
5. A name is made where a tensor is: what it begins with is joined for a container that has tensors, not for each above it. Names
   that take many times the bytes they are made from are refused, before they are made.
6. Of tensors that would have one name, the second gets a number, and so do those behind it.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from holdfast.core.limits import Limits
from holdfast.core.opaque import Opaque
from holdfast.core.tensor import Composite, LazyTensor, set_tensor_name
from holdfast.core.tree import (
    FREE_CHARACTERS,
    LONE_TENSOR_NAME,
    NAME_CHARACTERS_A_BYTE,
    ContainerContents,
    Path,
    get_inner_containers,
    join_path,
    list_contents,
    to_path_key,
    walk,
)
from holdfast.core.value import Value, replace
from holdfast.errors import CannotHold, LimitExceeded, Unsupported

if TYPE_CHECKING:
    from holdfast.core.table import Table

PLAIN = frozenset({type(None), bool, int, float, str})
TEXT = frozenset({str})
KEYS = frozenset({str, int})
DICTS = frozenset({dict, OrderedDict})
CONTAINERS = DICTS | {list, tuple}
INTEGER = frozenset({int})

AGAIN = 100_000  # Of a state in memory: steps through containers that stand in several places, beyond the first of each.
FREE_STEPS = 10_000  # Such steps that are allowed however small a file is: the same few dicts under several keys.
HELD_NBYTES = 64  # What a child of a container takes in memory, at the least: its object, and the two references to it and its key.

Convert = Callable[[object, Path], object]
"""From a leaf to a lazy tensor, a composite, or whatever is to be kept of it. Raises `Unsupported` where it cannot be kept."""


Room = Callable[[int, int], int]
"""How many characters names may take together, where so many are taken by so many names. Raises `LimitExceeded` for too many."""


class WalkPolicy(Value, frozen=True, eq=False):
    """What differs between going through a state that was opened and through one that is to be saved."""

    depth: int
    """Containers nest less than so deep."""
    again: int
    """Steps through containers that were met before."""
    room: Room
    """Is asked when names take more than `FREE_CHARACTERS`."""
    entered: tuple[type, ...] = (Opaque,)
    """What is entered besides dicts, plain lists and plain tuples."""
    refuses: bool = True
    """Whether what contains itself or is too deep stands in the way of a save, and is collected. Else the former is passed over,
    and the latter raises `LimitExceeded`."""
    paths: Container[int] = ()
    """Numbers of tensors whose paths are kept."""


class RowLeaf(Value, frozen=True, eq=False, gc=False):
    """A tensor in the tree of a state that nobody has made: a row of its table."""

    row: int


class Leaves:
    """The tensors of a state, in the order in which a person would read it."""

    def __init__(self, kinds: Collection[type], convert: Convert | None) -> None:
        self.tensor_types = frozenset(kinds)
        self.names: list[str] = []
        self.values: list[object] = []
        """The tensor of each name: as it stands in the state, or the lazy tensor that was made of a leaf of another type."""
        self.has_other_values = False  # Whether there is anything but tensors in dicts of texts.
        self.is_nested = False
        self.is_single_tensor = False  # Whether the state is one tensor, with nothing around it.
        self.has_traits = False
        """Whether a tensor is more than its elements: a Parameter, one that wants a gradient. Said by whoever has asked."""
        self.conversions: dict[
            int, tuple[object, object]
        ] = {}  # By identity: leaves of other types, and what was made of them.
        self.irregular_tensors: dict[
            int, LazyTensor
        ] = {}  # By identity: the lazy tensors of those whose rows are irregular.
        self.converted_leaves: list[
            tuple[str, object]
        ] = []  # Those that became tensors, with their names.
        self.problems: list[str] = []  # What stands in the way of a save, by its path.
        self.paths: dict[
            int, Path
        ] = {}  # Of the tensors of these numbers, where they were asked for.
        self.numbered_names: list[
            tuple[int, str]
        ] = []  # Tensors whose names got a number, and what these were before.
        self.skipped_count = 0  # References to containers that were gone through too often already.
        self._convert = convert

    @property
    def is_flat(self) -> bool:
        """Whether the state is a plain dict of plain tensors under their own names."""
        return not (self.is_nested or self.has_other_values or self.has_traits)

    def is_tensor(self, value: object) -> bool:
        """Whether a value of the state is a tensor of a type that was asked for."""
        return type(value) in self.tensor_types and id(value) not in self.conversions

    def replace_with_parts(self, wholes: Mapping[int, Composite]) -> None:
        """Put the parts of composites in the places of the tensors of these numbers, which only look like plain ones."""
        names: list[str] = []
        values: list[object] = []
        done = 0
        for number, whole in sorted(wholes.items()):
            name, value = self.names[number], self.values[number]
            self.conversions[id(value)] = value, whole
            names += (
                *self.names[done:number],
                *[part if self.is_single_tensor else f"{name}.{part}" for part in whole.parts],
            )
            values += (*self.values[done:number], *whole.parts.values())
            done = number + 1
        self.names, self.values, self.is_nested = (
            [*names, *self.names[done:]],
            [*values, *self.values[done:]],
            True,
        )

    def for_table(self, table: Table) -> Leaves:
        """The leaves as rows of another table, which has a row for each of them, in their order."""
        made = copy.copy(self)
        wholes = [
            (key, value, one)
            for key, (value, one) in self.conversions.items()
            if isinstance(one, Composite)
        ]
        if wholes:
            rows = dict(zip(map(id, self.values), range(len(self.values)), strict=True))
            views = {
                id(part): table.lazy_tensor(rows[id(part)])
                for _, _, one in wholes
                for part in one.parts.values()
            }
            made.values = [views.get(id(value), value) for value in self.values]
            made.conversions = dict(self.conversions)
            for key, value, one in wholes:
                made.conversions[key] = (
                    value,
                    replace(one, parts={name: views[id(part)] for name, part in one.parts.items()}),
                )
        apart: set[int] = set()
        for number, kind in enumerate(table.kinds):
            traits = kind.traits
            # Of such a tensor a tree says more than its name: it has more than its elements and a few marks.
            is_more = not (traits.subclass is traits.state is traits.blocks is None)
            if is_more or not (kind.is_whole and kind.nbytes):
                apart.add(number)
        rows_apart = (
            [
                row
                for row, kind in enumerate(table.kind_indices)
                if kind in apart or row in table.irregular
            ]
            if apart or table.irregular
            else []
        )
        made.irregular_tensors = {
            id(made.values[row]): table.lazy_tensor(row) for row in rows_apart
        }
        return made

    def describe(self, value: object) -> object:
        """What was made of a leaf of another type, or of an irregular tensor; any other value as it is."""
        found = self.conversions.get(id(value))
        return self.irregular_tensors.get(id(value), value) if found is None else found[1]

    def raise_problems(self) -> None:
        if self.problems:
            raise CannotHold("this state cannot be saved", self.problems)

    def find(self, state: object, policy: WalkPolicy) -> None:
        """Go through a state, and give each tensor in it a name of its own."""
        self.has_other_values = type(state) is not dict
        characters, names = self._go_through(state, policy), self.names
        self.is_single_tensor = names == [""] and not isinstance(
            state, dict | list | tuple | Opaque
        )
        if self.is_single_tensor:
            names[0], self.paths = LONE_TENSOR_NAME, dict.fromkeys(self.paths, ())
        if len({*names}) < len(names):
            self._number_names()
            characters += sum(len(names[row]) - len(base) for row, base in self.numbered_names)
        if characters > FREE_CHARACTERS:
            policy.room(characters, len(names))

    def _go_through(self, state: object, policy: WalkPolicy) -> int:
        kinds, entered, refuses, depth, paths = (
            self.tensor_types,
            policy.entered,
            policy.refuses,
            policy.depth,
            policy.paths,
        )
        names, values = self.names, self.values
        spare, characters, room = policy.again, 0, FREE_CHARACTERS
        is_tensor = kinds.__contains__
        walked: dict[int, bool] = {}  # Containers, and whether there may be tensors in them.
        on_path: set[int] = set()
        pending: list[
            tuple[Iterator[tuple[str | int, object]], str | None, object, Sequence[int], int]
        ] = []
        """Containers that are entered: what is left around each, what names around it begin with, itself, the identities of what it
        is stored in, and how much was found before it."""
        level = 0
        passed = 0  # Containers that were passed over, and may have tensors in them.
        path: list[str | int] = []
        inside: Iterator[tuple[str | int, Any]] = iter([("", state)])
        prefix: str | None = (
            ""  # What names in the container at work begin with; None where nobody asked for it yet.
        )
        owners: Sequence[int]
        keys: Any
        content: Any
        while True:
            for key, item in inside:
                kind = type(item)
                if kind in kinds:
                    if prefix == "" and type(key) is str:
                        # The key itself, since a copy for each of a million tensors takes 80 MB.
                        name = key
                    else:
                        name = f"{prefix}{key!s}"
                    characters += len(name)
                    names += (name,)
                    values += (item,)
                    if paths and len(values) - 1 in paths:
                        self.paths[len(values) - 1] = (*path, key)
                    continue
                if kind in PLAIN:
                    continue
                ident = id(item)
                held: ContainerContents | None = None
                if kind not in CONTAINERS and not isinstance(item, dict):
                    if not isinstance(item, entered):
                        if self._convert is not None:
                            before = len(names)
                            self._leaf(item, f"{prefix}{key!s}", (*path, key) if pending else ())
                            characters += sum(map(len, names[before:]))
                            if characters > room:
                                room = policy.room(characters, len(names))
                        continue
                    held = list_contents(item) or []
                    owners = [id(owner) for owner, _ in held]
                    if ident not in walked and not walked.keys().isdisjoint(owners):
                        walked[ident] = True
                again = ident in walked
                if again:
                    if not on_path.isdisjoint((ident,) if held is None else owners):
                        # An object may hold what holds it.
                        if refuses and not any(
                            isinstance(one, Opaque) for one in (item, *[one[2] for one in pending])
                        ):
                            self._problem(
                                (*path, key) if pending else (),
                                f"a {kind.__name__} that contains itself",
                            )
                        else:
                            passed += 1
                        continue
                    # What was opened is gone through all the same: it may nest deeper here than where it was met first.
                    if refuses and not walked[ident]:
                        continue
                if held is not None:
                    pairs = (
                        [pair for _, inner in held for pair in inner]
                        if spare >= 0 or not again
                        else []
                    )
                    keys, content = [one for one, _ in pairs], [one for _, one in pairs]
                elif kind is list or kind is tuple:
                    keys, content = range(len(item)), item
                else:
                    keys, content = item, item.values()
                if again:
                    spare -= 1 + len(content)
                    if spare < 0:
                        self.skipped_count += 1
                        passed += 1
                        continue
                if level >= depth:
                    if not refuses:
                        raise LimitExceeded(
                            f"the state nests deeper than Limits(depth={depth})",
                            expected=depth,
                            found=depth + 1,
                        )
                    self.problems.append(
                        f"{join_path((*path, key)[:4])}…: nested deeper than Limits(depth={depth})"
                    )
                    continue
                key_types = INTEGER if type(keys) is range else {*map(type, keys)}
                types = {*map(type, content)}
                self.has_other_values |= (
                    kind is not dict or not key_types <= TEXT or not PLAIN.isdisjoint(types)
                )
                if not key_types <= KEYS:
                    keys = [*map(to_path_key, keys)]
                if pending:
                    self.is_nested = True
                if held is not None:
                    walked |= dict.fromkeys(owners, True)
                walked[ident] = not types <= PLAIN
                if types <= PLAIN:
                    continue
                below = ""
                has_names = not types <= CONTAINERS | PLAIN
                if has_names:
                    if pending:
                        if prefix is None:
                            prefix = f"{join_path(path)}."
                        below = f"{prefix}{key!s}."
                    # Before they are made: a long path may stand before each of very many keys.
                    if characters + len(below) * len(content) > room:
                        count = sum(map(is_tensor, map(type, content)))
                        room = policy.room(characters + len(below) * count, len(names) + count)
                if pending:
                    path.append(key)
                owners = (ident,) if held is None else owners
                on_path.update(owners)
                pending.append((inside, prefix, item, owners, len(values) + passed))
                level += 1
                inside, prefix = (
                    zip(keys, content, strict=True),
                    below if has_names or not path else None,
                )
                break
            else:
                if not pending:
                    return characters
                inside, prefix, _, owners, before = pending.pop()
                level -= 1
                on_path.difference_update(owners)
                walked[owners[0]] = len(values) + passed > before
                if pending:
                    path.pop()

    def _number_names(self) -> None:
        seen: set[str] = set()
        doubles: dict[str, int] = {}
        for row, base in enumerate(self.names):
            name, count = base, doubles.get(base, 1)
            while name in seen:
                count += 1
                name = f"{base}#{count}"
            if count > 1:
                doubles[base] = count
                self.numbered_names.append((row, base))
            seen.add(name)
            self.names[row] = name

    def _problem(self, path: Path, what: str) -> None:
        self.problems.append(f"{join_path(path) or 'the state'}: {what}")

    def _leaf(self, value: object, name: str, path: Path) -> None:
        found = self.conversions.get(id(value))
        try:
            made = cast(Convert, self._convert)(value, path) if found is None else found[1]
        except Unsupported as error:
            self._problem(path, error.message)
            made = value
        self.conversions[id(value)] = value, made
        if found is None and isinstance(made, LazyTensor | Composite):
            self.converted_leaves.append((name, value))
        if isinstance(made, LazyTensor):
            self.names.append(name)
            self.values.append(made)
        elif isinstance(made, Composite):
            self.is_nested = True
            for part, tensor in made.children():
                self.names.append(f"{name}.{part}" if path else part)
                self.values.append(tensor)
        else:
            self.has_other_values = True

    def composites(self) -> list[Composite]:
        return [made for _, made in self.conversions.values() if isinstance(made, Composite)]


NO_LEAVES = Leaves((), lambda value, path: value)


def find_leaves(state: object, kinds: Collection[type], convert: Convert, depth: int) -> Leaves:
    """The tensors of a state that is to be saved, of these types, under names of which none is another's. Names may take many times
    what the state has in memory, where a key is counted once however many containers have it. Raises `LimitExceeded` for longer
    ones."""
    leaves = Leaves(kinds, convert)

    def room(characters: int, count: int) -> int:
        most = FREE_CHARACTERS + NAME_CHARACTERS_A_BYTE * HELD_NBYTES * count
        return most if characters <= most else _room(characters, _held_nbytes(state))

    leaves.find(state, WalkPolicy(depth, AGAIN, room))
    return leaves


class NamedTensors(Value, frozen=True, eq=False):
    """The tensors of a state that was opened, by name, and what is to be said of them."""

    tensors: dict[str, LazyTensor]
    notes: list[str]


def name_tensors(tree: object, limits: Limits, stored: int) -> NamedTensors:
    """Give every tensor of a tree that was opened a dotted name. `stored` is how many bytes the tree took where it was stored."""
    leaves = _opened(tree, limits, stored)
    tensors = cast("dict[str, LazyTensor]", dict(zip(leaves.names, leaves.values, strict=True)))
    for name, tensor in tensors.items():
        own = tensor.name
        if not own:
            # Fresh from a format and seen by nobody yet: named where it is, so that the leaf of the tree knows its name too.
            set_tensor_name(tensor, name)
        elif own != name:
            tensors[name] = tensor.renamed(name)
    paths = (
        _opened(tree, limits, stored, {row for row, _ in leaves.numbered_names}).paths
        if leaves.numbered_names
        else {}
    )
    notes = [
        f"two tensors are called {base!r}; the one at path {paths[row]!r} is listed as {leaves.names[row]!r}"
        for row, base in leaves.numbered_names
    ]
    if leaves.skipped_count:
        notes.append(
            f"{leaves.skipped_count:,} further references to shared containers were not listed by name; they are in the tree"
        )
    return NamedTensors(tensors, notes)


def find_tensor_paths(tree: object, limits: Limits, stored: int) -> dict[str, Path]:
    """The path of each tensor, by the name that `name_tensors` gives it."""
    leaves = _opened(tree, limits, stored, range(sys.maxsize))
    return dict(zip(leaves.names, leaves.paths.values(), strict=True))


def _opened(tree: object, limits: Limits, stored: int, paths: Container[int] = ()) -> Leaves:
    leaves, entered = Leaves((LazyTensor,), None), (list, tuple, Opaque, Composite)
    leaves.find(
        tree,
        WalkPolicy(
            limits.depth,
            stored + FREE_STEPS,
            lambda found, _: _room(found, stored),
            entered,
            False,
            paths,
        ),
    )
    return leaves


def _room(characters: int, stored: int) -> int:
    room = FREE_CHARACTERS + NAME_CHARACTERS_A_BYTE * stored
    if characters > room:
        times = f"{NAME_CHARACTERS_A_BYTE} times what is stored"
        message = f"the names of the tensors take more than {room:,} characters together, {times}"
        raise LimitExceeded(message, expected=room, found=characters)
    return room


def _held_nbytes(state: object) -> int:
    containers = [
        value
        for _, value in walk(state, get_inner_containers)
        if isinstance(value, dict | list | tuple)
    ]
    keys = {
        id(key): len(key)
        for value in containers
        if isinstance(value, dict)
        for key in value
        if isinstance(key, str)
    }
    return sum(keys.values()) + HELD_NBYTES * sum(map(len, containers))
