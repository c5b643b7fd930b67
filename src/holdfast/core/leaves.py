"""`Leaves`: the tensors of a nested state and their names, found by one walk.

A state that was opened (`name_tensors`) and one that will be saved (`find_leaves`) are walked by the
same code. A `WalkPolicy` has the differences.

1. A state has dicts, lists, tuples, pickled objects (`Opaque`), tensors and other values. The caller
   passes the types that are tensors, and a function that converts other leaves. No function is
   called for a tensor, because there may be a million of them.
2. A state may be hostile: containers may occur a million times, contain themselves, or nest without
   end. Each is walked where it occurs first, in the order in which a person would read it.
3. A container that occurs again is walked again, because its tensors have other names there (the
   same state dict under two keys). This is limited by a budget of steps. When it is spent, further
   occurrences are skipped. What an object contains is stored in dicts that other objects may
   contain as well; they count like any container (`core.tree.list_contents`).
4. A container that contains itself is not entered again on its own path.
5. Names that take many times the bytes that they are made of are refused before they are made. Ten
   keys of a megabyte, nested in each other, could otherwise stand before a million tensors.
6. If two tensors would have the same name, the second one gets a number, and so on.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

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

PLAIN_VALUE_TYPES = frozenset({type(None), bool, int, float, str})
"""The types of leaves that are never tensors, and need no conversion."""

DICT_TYPES = frozenset({dict, OrderedDict})
CONTAINER_TYPES = DICT_TYPES | {list, tuple}
KEY_TYPES = frozenset({str, int})
"""The types of keys that stand in a path as they are."""

MAX_REPEATED_STEPS = 100_000
"""The steps through containers that occur again, for a state in memory."""

FREE_STEPS = 10_000
"""Such steps that are allowed for every file, however small: a few dicts under several keys."""

CHILD_NBYTES = 64
"""The least memory that a child of a container takes: its object and the references to it and to
its key."""

Convert = Callable[[object, Path], object]
"""Converts a leaf to a lazy tensor, to a composite, or to the value that is saved in its place.
Raises Unsupported if the leaf cannot be saved."""

AllowCharacters = Callable[[int, int], int]
"""Receives how many characters all names have, and how many names there are. Returns how many
characters they may have. Raises LimitExceeded if they have more."""


class WalkPolicy(Value, frozen=True, eq=False):
    """The differences between the walk of an opened state and that of one that will be saved."""

    max_depth: int
    """How many containers may be nested in each other."""
    max_repeated_steps: int
    """How many steps may lead through containers that were walked before."""
    allow_characters: AllowCharacters
    """Is called when names have more than `FREE_CHARACTERS`."""
    entered_types: tuple[type, ...] = (Opaque,)
    """The types that are entered besides dicts, plain lists and plain tuples."""
    collects_problems: bool = True
    """Whether containers that contain themselves or are nested too deep become problems of the
    save. Otherwise the former are skipped, and the latter raise LimitExceeded."""
    records_paths: bool = False
    """Whether the path of each tensor is recorded."""


class RowLeaf(Value, frozen=True, eq=False, gc=False):
    """A leaf that stands for a row of a table, in a state that was made of a table."""

    row: int


class Leaves:
    """The tensors of a state and their names, in the order in which a person would read it."""

    def __init__(self, tensor_types: Collection[type], convert: Convert | None) -> None:
        """Start without tensors. `find` adds those of a state.

        Args:
            tensor_types: The types of values that are tensors.
            convert: Converts other leaves, if it is not None.
        """
        self.tensor_types = frozenset(tensor_types)
        self.convert = convert
        self.names: list[str] = []
        """The name of each tensor."""
        self.values: list[object] = []
        """Each tensor: a value of the state, or the lazy tensor that a leaf was converted to."""
        self.has_other_values = False
        """Whether there is anything but tensors in dicts with text keys."""
        self.is_nested = False
        """Whether there is a container in the state, or a composite."""
        self.is_single_tensor = False
        """Whether the state is one tensor, without a container."""
        self.has_traits = False
        """Whether a tensor is more than its elements, such as a parameter. The caller sets it."""
        self.conversions: dict[int, tuple[object, object]] = {}
        """By identity, the leaves that were converted, each with its replacement."""
        self.irregular_tensors: dict[int, LazyTensor] = {}
        """By identity, the lazy tensors of the leaves that are irregular rows."""
        self.converted_leaves: list[tuple[str, object]] = []
        """The leaves that were converted to tensors, with their names."""
        self.problems: list[str] = []
        """Why the state cannot be saved: sentences that start with a path."""
        self.paths: list[Path] = []
        """The path of each tensor, if paths are recorded."""
        self.numbered_names: list[tuple[int, str]] = []
        """The indices of tensors whose names got a number, with the names before."""
        self.skipped_count = 0
        """The references that were skipped because the budget of steps was spent."""

    @property
    def is_flat(self) -> bool:
        """Whether the state is a plain dict of plain tensors under their own names."""
        return not (self.is_nested or self.has_other_values or self.has_traits)

    def is_tensor(self, value: object) -> bool:
        """Return whether a value of the state is a tensor that was not converted."""
        return type(value) in self.tensor_types and id(value) not in self.conversions

    def replace_with_parts(self, composites: Mapping[int, Composite]) -> None:
        """Replace some tensors by the parts that they are stored as, each with a name of its own.

        Args:
            composites: By the index of a tensor, the composite that it is stored as.
        """
        names: list[str] = []
        values: list[object] = []
        for index, (name, value) in enumerate(zip(self.names, self.values, strict=True)):
            composite = composites.get(index)
            if composite is None:
                names.append(name)
                values.append(value)
                continue
            # The value is stored with its composite, so that no other object gets its identity.
            self.conversions[id(value)] = value, composite
            # A state that is one tensor has no name of its own.
            name_prefix = "" if self.is_single_tensor else f"{name}."
            for part_name, part in composite.children():
                names.append(name_prefix + part_name)
                values.append(part)
        self.names = names
        self.values = values
        # Parts are stored as a dict in the place of the tensor.
        self.is_nested = True

    def for_table(self, table: Table) -> Leaves:
        """Return these leaves with the tensors of another table, which may replace some of them.

        Args:
            table: A table that has a row for each of these tensors, in their order.
        """
        leaves = copy.copy(self)
        if any(isinstance(part, Composite) for _, part in self.conversions.values()):
            leaves._replace_composite_parts(table)

        # The tree has only the name of most tensors. It describes the others by their lazy tensors:
        # those with a class, attributes or quantization blocks, and those that are not all of a
        # storage.
        special_kinds: set[int] = set()
        for kind_index, kind in enumerate(table.kinds):
            traits = kind.traits
            has_attributes = not (traits.subclass is traits.state is traits.blocks is None)
            if has_attributes or not kind.is_whole or not kind.nbytes:
                special_kinds.add(kind_index)

        leaves.irregular_tensors = {}
        if special_kinds or table.irregular:
            for row, kind_index in enumerate(table.kind_indices):
                if kind_index in special_kinds or row in table.irregular:
                    leaves.irregular_tensors[id(leaves.values[row])] = table.lazy_tensor(row)
        return leaves

    def _replace_composite_parts(self, table: Table) -> None:
        """Replace the parts of composites, such as the indices of a sparse tensor, by rows of a table.

        The table has a row for each tensor of these leaves, in their order.
        """
        # Parts are found by identity, because a tensor cannot be a key.
        row_by_id = {id(value): row for row, value in enumerate(self.values)}
        # These leaves are a shallow copy of others, which must not change.
        self.values = [*self.values]
        self.conversions = dict(self.conversions)
        for value_id, (value, conversion) in self.conversions.items():
            if not isinstance(conversion, Composite):
                continue
            new_parts: dict[str, LazyTensor] = {}
            for name, part in conversion.children():
                row = row_by_id[id(part)]
                new_parts[name] = table.lazy_tensor(row)
                self.values[row] = new_parts[name]
            self.conversions[value_id] = value, replace(conversion, parts=new_parts)

    def describe(self, value: object) -> object:
        """Return what is saved for a value: its conversion, its lazy tensor, or the value itself."""
        conversion = self.conversions.get(id(value))
        if conversion is not None:
            return conversion[1]
        return self.irregular_tensors.get(id(value), value)

    def raise_problems(self) -> None:
        """Raise CannotHold with all problems, if there are any."""
        if self.problems:
            raise CannotHold("this state cannot be saved", self.problems)

    def find(self, state: object, policy: WalkPolicy) -> None:
        """Walk through a state, and give each tensor in it a name of its own.

        Raises:
            LimitExceeded: The names are too long, or containers are nested too deep.
        """
        self.has_other_values = type(state) is not dict
        _Walk(self, policy, steps_left=policy.max_repeated_steps).run(state)

        # A tensor without a container has the name "". So has a tensor in a dict with the key "".
        is_container = isinstance(state, dict | list | tuple | Opaque)
        self.is_single_tensor = self.names == [""] and not is_container
        if self.is_single_tensor:
            self.names[0] = LONE_TENSOR_NAME
        if len({*self.names}) < len(self.names):
            self._number_names()
        # The walk checks names before it makes them. This counts their numbers as well.
        character_count = sum(map(len, self.names))
        if character_count > FREE_CHARACTERS:
            policy.allow_characters(character_count, len(self.names))

    def _number_names(self) -> None:
        """Append a number to each name that an earlier tensor has: `w`, `w#2`, `w#3`."""
        used_names: set[str] = set()
        # The search for a free number goes on behind the last one. Otherwise very many equal names
        # would take quadratic time.
        last_numbers: dict[str, int] = {}
        for index, base_name in enumerate(self.names):
            name = base_name
            number = last_numbers.get(base_name, 1)
            # A numbered name may be used as well: a tensor of the state may be called `w#2`.
            while name in used_names:
                number += 1
                name = f"{base_name}#{number}"
            if number > 1:
                last_numbers[base_name] = number
                self.numbered_names.append((index, base_name))
            used_names.add(name)
            self.names[index] = name

    def composites(self) -> list[Composite]:
        """Return the composites that leaves were converted to."""
        return [
            conversion
            for _, conversion in self.conversions.values()
            if isinstance(conversion, Composite)
        ]


class _Frame(Struct):
    """A container that is walked: what is left of it, and what to do at its end."""

    container: object
    items: Iterator[tuple[str | int, Any]]
    """Its keys and values that were not walked yet."""
    name_prefix: str
    """The start of the names of its tensors."""
    owner_ids: Sequence[int]
    """The identities of the containers that it is stored in, itself first. An object has several:
    itself and the dicts of its attributes."""
    count_before: int
    """How many tensors were found, and containers skipped, before it. If there are no more at its
    end, it has no tensors."""


class _Walk(Struct):
    """A walk through a state, which adds its tensors to `Leaves`. It does not recurse."""

    leaves: Leaves
    policy: WalkPolicy
    steps_left: int
    """How many steps may still lead through containers that were walked before."""
    has_tensors: dict[int, bool] = {}
    """Whether a container that was walked may have tensors, by its identity."""
    ids_on_path: set[int] = set()
    """The identities of the containers around the current value."""
    frames: list[_Frame] = []
    """The containers around the current one. The first one is that of `run`."""
    path: list[str | int] = []
    """The path of the current container."""
    skipped_count: int = 0
    """The containers that were skipped, and may have tensors."""
    max_name_characters: int = FREE_CHARACTERS
    """How many characters all names may have, before `policy.allow_characters` is called again."""
    name_character_count: int = 0
    """How many characters all names have."""

    def run(self, state: object) -> None:
        """Add all tensors of a state, container by container.

        The inner loop takes the next values of the current container. It ends at a value that is
        another container, which becomes the current one. At the end of a container, the walk goes
        on in the container around it.
        """
        tensor_types = self.leaves.tensor_types
        names = self.leaves.names
        values = self.leaves.values
        frame = _Frame(None, iter([("", state)]), "", (), 0)
        while True:
            for key, value in frame.items:
                value_type = type(value)
                if value_type in tensor_types:
                    if self.policy.records_paths:
                        self.leaves.paths.append(self._get_path(key))
                    # The same as `_add_tensor`. No function is called for a tensor. Adding an empty
                    # prefix does not copy the key, which saves 80 MB for a million tensors.
                    name = frame.name_prefix + str(key)
                    names.append(name)
                    values.append(value)
                    self.name_character_count += len(name)
                elif value_type not in PLAIN_VALUE_TYPES:
                    inner_frame = self._enter(frame, key, value)
                    if inner_frame is not None:
                        self.frames.append(frame)
                        frame = inner_frame
                        break
            else:
                # The current container has no values left.
                if not self.frames:
                    return
                # A skipped container may have tensors, so it counts as one.
                has_tensors = len(values) + self.skipped_count > frame.count_before
                self.has_tensors[id(frame.container)] = has_tensors
                self.ids_on_path.difference_update(frame.owner_ids)
                frame = self.frames.pop()
                if self.path:
                    self.path.pop()

    def _get_path(self, key: str | int) -> Path:
        """Return the path of a value in the current container."""
        return (*self.path, key) if self.frames else ()

    def _enter(self, frame: _Frame, key: str | int, value: Any) -> _Frame | None:  # noqa: ANN401  # any container
        """Convert a leaf, or start to walk through a container.

        Args:
            frame: The container that has the value.
            key: The key of the value.
            value: The leaf or container.

        Returns:
            The frame for walking through the value. None if the value is a leaf, or a container
            that is skipped: it contains itself, is nested too deep, has no tensors, or occurs again
            when the budget of steps is spent.
        """
        contents: ContainerContents | None = None
        owner_ids: Sequence[int] = (id(value),)
        is_repeated = id(value) in self.has_tensors
        if type(value) not in CONTAINER_TYPES and not isinstance(value, dict):
            if not isinstance(value, self.policy.entered_types):
                if self.leaves.convert is not None:
                    name = f"{frame.name_prefix}{key!s}"
                    self._convert_leaf(self.leaves.convert, name, key, value)
                return None
            contents = list_contents(value)
            assert contents is not None  # All entered types have contents.
            owner_ids = [id(owner) for owner, _ in contents]
            # Objects may share a dict of attributes. It must count against the budget for each.
            is_repeated = not self.has_tensors.keys().isdisjoint(owner_ids)

        if is_repeated:
            if not self.ids_on_path.isdisjoint(owner_ids):
                self._skip_cycle(frame, key, value)
                return None
            # A state that will be saved has nothing to add here if the container has no tensors. An
            # opened state is walked all the same, because it may be nested too deep at this place.
            if self.policy.collects_problems and not self.has_tensors.get(id(value), True):
                return None
            # Listing the children of an object takes time, so an earlier overrun ends here.
            if self.steps_left < 0:
                self._skip_repeated_container()
                return None

        keys, values = _list_children(value, contents)
        if is_repeated:
            # A step leads to the container, and one to each of its children.
            self.steps_left -= 1 + len(values)
            if self.steps_left < 0:
                self._skip_repeated_container()
                return None
        if len(self.frames) >= self.policy.max_depth:
            self._refuse_depth(key)
            return None
        return self._start_container(key, value, keys, values, owner_ids)

    def _skip_repeated_container(self) -> None:
        """Skip a container that was walked before, because the budget of steps is spent."""
        self.leaves.skipped_count += 1
        self.skipped_count += 1

    def _skip_cycle(self, frame: _Frame, key: str | int, value: object) -> None:
        """Skip a container that contains itself. In a state that will be saved it is a problem.

        Args:
            frame: The container that has the value.
            key: The key of the value.
            value: A container that is on the current path already.
        """
        containers = [value, frame.container, *[outer.container for outer in self.frames]]
        # It is no problem in a pickled object: objects often refer to their owner.
        has_object = any(isinstance(container, Opaque) for container in containers)
        if self.policy.collects_problems and not has_object:
            self._add_problem(self._get_path(key), f"a {type(value).__name__} that contains itself")
        else:
            self.skipped_count += 1

    def _refuse_depth(self, key: str | int) -> None:
        """Refuse a container that is nested too deep: raise, or record a problem of the save."""
        max_depth = self.policy.max_depth
        if not self.policy.collects_problems:
            raise LimitExceeded(
                f"the state nests deeper than Limits(depth={max_depth})",
                expected=max_depth,
                found=max_depth + 1,
            )
        # The path may have a million keys. Its start is enough to find the place.
        path_start = join_path((*self.path, key)[:4])
        self.leaves.problems.append(f"{path_start}…: nested deeper than Limits(depth={max_depth})")

    def _start_container(
        self,
        key: str | int,
        container: object,
        keys: Iterable[Any],
        values: Collection[object],
        owner_ids: Sequence[int],
    ) -> _Frame | None:
        """Record a container, and return the frame for walking through it.

        Args:
            key: The key of the container.
            container: The container.
            keys: The keys of its values, of any type.
            values: Its values.
            owner_ids: The identities of the containers that it is stored in, itself first.

        Returns:
            The frame. None if all values are plain, such as numbers and texts, so that there is
            nothing to walk.
        """
        # A container may have a million values of a few types. So the types are examined.
        leaves = self.leaves
        key_types = {*map(type, keys)}
        value_types = {*map(type, values)}
        has_text_keys = key_types <= {str}
        if type(container) is not dict or not has_text_keys or value_types & PLAIN_VALUE_TYPES:
            leaves.has_other_values = True
        # Without frames, this container is the state itself.
        is_inside_container = bool(self.frames)
        if is_inside_container:
            leaves.is_nested = True

        # Until its end is reached, the container may have tensors. Entries for all owners let
        # `_enter` see that it occurs again.
        self.has_tensors.update(dict.fromkeys(owner_ids, True))
        if value_types <= PLAIN_VALUE_TYPES:
            self.has_tensors[id(container)] = False
            return None

        if is_inside_container:
            self.path.append(key)
        # Joining the path takes time, and a deep state has very many containers. So it is done only
        # if a value may be a tensor.
        name_prefix = ""
        if self.path and not value_types <= CONTAINER_TYPES | PLAIN_VALUE_TYPES:
            name_prefix = f"{join_path(self.path)}."
            self._reserve_name_characters(name_prefix, values)

        self.ids_on_path.update(owner_ids)
        if not key_types <= KEY_TYPES:
            keys = map(to_path_key, keys)
        items = zip(keys, values, strict=True)
        count_before = len(leaves.values) + self.skipped_count
        return _Frame(container, items, name_prefix, owner_ids, count_before)

    def _reserve_name_characters(self, name_prefix: str, values: Collection[object]) -> None:
        """Make sure that the names of the tensors in a container may be made.

        This runs before any of them is made, because a hostile state can ask for names that fill
        the memory.

        Args:
            name_prefix: The start of the name of each tensor in the container.
            values: The values of the container, tensors and others.

        Raises:
            LimitExceeded: All names together would have too many characters.
        """
        # If all values were tensors, their prefixes would fit. So the tensors are not counted.
        max_prefix_characters = len(name_prefix) * len(values)
        if self.name_character_count + max_prefix_characters <= self.max_name_characters:
            return

        # More names may have more characters. So the limit is asked for again, and may rise.
        tensor_count = sum(type(value) in self.leaves.tensor_types for value in values)
        self.max_name_characters = self.policy.allow_characters(
            self.name_character_count + len(name_prefix) * tensor_count,
            len(self.leaves.names) + tensor_count,
        )

    def _add_tensor(self, name: str, tensor: object) -> None:
        self.leaves.names.append(name)
        self.leaves.values.append(tensor)
        self.name_character_count += len(name)

    def _add_problem(self, path: Path, reason: str) -> None:
        self.leaves.problems.append(f"{join_path(path) or 'the state'}: {reason}")

    def _convert_leaf(self, convert: Convert, name: str, key: str | int, value: object) -> None:
        """Convert a leaf, and add the tensors that it becomes.

        Args:
            convert: Converts the leaf.
            name: The name that a tensor at this place has.
            key: The key of the leaf in the current container.
            value: The leaf.
        """
        leaves = self.leaves
        path = self._get_path(key)
        # A leaf that occurs again is not converted again. The leaf is stored with its conversion, so
        # that no other object gets its identity.
        if id(value) not in leaves.conversions:
            try:
                conversion = convert(value, path)
            except Unsupported as error:
                # The problem is reported with all others, after the walk.
                self._add_problem(path, error.message)
                conversion = value
            leaves.conversions[id(value)] = value, conversion
            if isinstance(conversion, LazyTensor | Composite):
                leaves.converted_leaves.append((name, value))

        _, conversion = leaves.conversions[id(value)]
        if isinstance(conversion, LazyTensor):
            self._add_tensor(name, conversion)
        elif isinstance(conversion, Composite):
            leaves.is_nested = True
            for part_name, part in conversion.children():
                tensor_name = part_name
                # A composite that is the whole state has an empty path and no name.
                if path:
                    tensor_name = f"{name}.{part_name}"
                self._add_tensor(tensor_name, part)
        else:
            leaves.has_other_values = True
        # Names without a new container are counted as well.
        self._reserve_name_characters("", ())


def _list_children(
    container: Any,  # noqa: ANN401  # any container
    contents: ContainerContents | None,
) -> tuple[Iterable[Any], Collection[object]]:
    """Return the keys and the values of a container.

    Args:
        container: A dict, a list, a tuple, or an object.
        contents: The containers that an object is stored in, with their children. None for dicts,
            lists and tuples.
    """
    if contents is not None:
        keys: list[str | int] = []
        values: list[object] = []
        for _, children in contents:
            for key, value in children:
                keys.append(key)
                values.append(value)
        return keys, values
    # Nothing is copied here, because a dict may have a million tensors.
    if isinstance(container, dict):
        return container, container.values()
    return range(len(container)), container


NO_LEAVES = Leaves((), None)
"""The leaves of a state without tensors."""


def find_leaves(
    state: object, tensor_types: Collection[type], convert: Convert, max_depth: int
) -> Leaves:
    """Find the tensors of a state that will be saved, and give each a name of its own.

    Args:
        state: The state.
        tensor_types: The types of values that are tensors.
        convert: Converts all other leaves.
        max_depth: How many containers may be nested in each other.

    Raises:
        LimitExceeded: The names are too long.
    """
    leaves = Leaves(tensor_types, convert)

    def allow_characters(character_count: int, name_count: int) -> int:
        """Return how many characters all names may have. The walk asks before it makes more names."""
        # The limit is a multiple of the size of the state in memory, so that a small state cannot
        # produce huge names. The number of names gives a lower bound of that size, which is enough
        # for most states.
        allowed_count = FREE_CHARACTERS + NAME_CHARACTERS_A_BYTE * CHILD_NBYTES * name_count
        if character_count <= allowed_count:
            return allowed_count
        # The lower bound is not enough. Measure all containers, which takes a walk through the state.
        return _check_name_characters(character_count, _measure_state(state))

    leaves.find(state, WalkPolicy(max_depth, MAX_REPEATED_STEPS, allow_characters))
    return leaves


class NamedTensors(Value, frozen=True, eq=False):
    """The tensors of a state that was opened, by name."""

    tensors: dict[str, LazyTensor]
    notes: list[str]
    """Sentences about names that are not the paths of their tensors."""


def name_tensors(tree: object, limits: Limits, stored_nbytes: int) -> NamedTensors:
    """Give every tensor of an opened tree a name.

    Args:
        tree: The nested state of a file. Its tensors without a name receive one.
        limits: How deep the tree may be nested.
        stored_nbytes: The size of the tree in its file.

    Raises:
        LimitExceeded: The names are too long, or the tree is nested too deep.
    """
    leaves = _find_opened_leaves(tree, limits, stored_nbytes)
    tensors = cast("dict[str, LazyTensor]", dict(zip(leaves.names, leaves.values, strict=True)))
    for name, tensor in tensors.items():
        if not tensor.name:
            # The format has just made this tensor, and nobody else has it. It is changed in place,
            # so that the leaf of the tree has the name as well.
            set_tensor_name(tensor, name)
        elif tensor.name != name:
            # The tensor has a name already, such as that of another place where it occurs.
            tensors[name] = tensor.renamed(name)

    # Only notes need paths, and they take memory. So a second walk records them if there are notes.
    paths: list[Path] = []
    if leaves.numbered_names:
        paths = _find_opened_leaves(tree, limits, stored_nbytes, records_paths=True).paths
    notes: list[str] = []
    for index, base_name in leaves.numbered_names:
        notes.append(
            f"two tensors are called {base_name!r}; "
            f"the one at path {paths[index]!r} is listed as {leaves.names[index]!r}"
        )
    if leaves.skipped_count:
        notes.append(
            f"{leaves.skipped_count:,} further references to shared containers were not listed by "
            "name; they are in the tree"
        )
    return NamedTensors(tensors, notes)


def find_tensor_paths(tree: object, limits: Limits, stored_nbytes: int) -> dict[str, Path]:
    """Return the path of each tensor, by the name that `name_tensors` gives it."""
    leaves = _find_opened_leaves(tree, limits, stored_nbytes, records_paths=True)
    return dict(zip(leaves.names, leaves.paths, strict=True))


def _find_opened_leaves(
    tree: object, limits: Limits, stored_nbytes: int, *, records_paths: bool = False
) -> Leaves:
    """Find the tensors of a tree that was opened.

    Args:
        tree: The tree.
        limits: How deep the tree may be nested.
        stored_nbytes: The size of the tree in its file.
        records_paths: Whether the path of each tensor is recorded.
    """
    leaves = Leaves((LazyTensor,), None)
    policy = WalkPolicy(
        max_depth=limits.depth,
        max_repeated_steps=stored_nbytes + FREE_STEPS,
        allow_characters=lambda count, _: _check_name_characters(count, stored_nbytes),
        entered_types=(list, tuple, Opaque, Composite),
        collects_problems=False,
        records_paths=records_paths,
    )
    leaves.find(tree, policy)
    return leaves


def _check_name_characters(character_count: int, stored_nbytes: int) -> int:
    """Return how many characters the names of a state may have. Raise if they have more.

    Args:
        character_count: How many characters the names have.
        stored_nbytes: The size of the state, which the names are made of.
    """
    allowed_count = FREE_CHARACTERS + NAME_CHARACTERS_A_BYTE * stored_nbytes
    if character_count > allowed_count:
        raise LimitExceeded(
            f"the names of the tensors take more than {allowed_count:,} characters together, "
            f"{NAME_CHARACTERS_A_BYTE} times what is stored",
            expected=allowed_count,
            found=character_count,
        )
    return allowed_count


def _measure_state(state: object) -> int:
    """Return the least memory that the containers of a state and their text keys take, in bytes.

    Names are made of keys. This measures what a state has really stored for them.
    """
    container_nbytes = 0
    nbytes_by_key_id: dict[int, int] = {}
    # A container counts once, however often it occurs.
    for _, container in walk(state, get_inner_containers):
        if isinstance(container, dict | list | tuple):
            container_nbytes += CHILD_NBYTES * len(container)
        if isinstance(container, dict):
            for key in container:
                # A text counts once as well. It may be a key of many containers.
                if isinstance(key, str):
                    nbytes_by_key_id[id(key)] = len(key)
    return container_nbytes + sum(nbytes_by_key_id.values())
