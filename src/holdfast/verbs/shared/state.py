"""Describe whatever a caller saves as a `State`: the same tree, and a table with a row for each tensor.

numpy arrays and torch tensors are not copied. Lazy tensors of an open checkpoint are read later, in
blocks. Containers keep their types. Values that are neither tensors nor containers stay as they are,
since only the target format decides whether it can store them.

An object with `state_dict()` and `load_state_dict()` (`Stateful`) is replaced by what the former
returns, wherever it is in the state:

    {"app": AppState(), "step": 3}          {"app": {"w": …, "epoch": 1}, "step": 3}
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal, Protocol, cast

import numpy as np

from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk
from holdfast.core.leaves import CONTAINER_TYPES, DICT_TYPES, Leaves, find_leaves
from holdfast.core.leaves import RowLeaf as RowLeaf
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.protocols import State
from holdfast.core.quantities import describe_value
from holdfast.core.registry import find_hook
from holdfast.core.table import IRREGULAR, RowKind, Table
from holdfast.core.tensor import PLAIN_TRAITS, Composite, LazyTensor
from holdfast.core.tree import (
    MAX_CALLS,
    LinkedPath,
    Path,
    get_mapping_children,
    get_values,
    rebuild,
    replace_children,
)
from holdfast.core.value import Value, replace
from holdfast.engine.arrays import ARRAY_TYPES, MemoryTensors, describe_arrays
from holdfast.engine.files import FileStorages
from holdfast.engine.table import (
    StateStorages,
    TensorColumns,
    describe_lazy_tensors,
    make_lazy_table,
    mark_uncopyable_rows,
)
from holdfast.errors import Unsupported
from holdfast.formats import format_of
from holdfast.formats.tree_json.encode import is_marked
from holdfast.stores.paths import order_content_and_path

LAZY_TYPES = (LazyTensor,)

Arrays = Literal["tensors", "values"]
Leaf = Callable[[object, Path], object]

MAX_LISTED_NAMES = 3
"""The most names in a note."""


def tabulate_state(
    state: object,
    *,
    metadata: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    whole: bool = False,
) -> State:
    """Describe a state without copying its data.

    Args:
        state: An open checkpoint, or a nested object of the caller, which stays the tree.
        metadata: Texts to save with it.
        limits: The limit for the depth of the tree.
        whole: Whether to take everything of a checkpoint. By default only the model of a
            checkpoint with `non_model_keys` is taken.
    """
    if not isinstance(state, Checkpoint):
        return tabulate_tree(
            replace_stateful(state), metadata=metadata, limits=limits, arrays="tensors"
        )
    texts = {**(metadata or {})}
    # What a torch file says about itself (its version, its byte order) is only true of that file.
    if format_of(state.format).metadata:
        texts = {**state.metadata, **texts}
    if state.is_flat:
        return make_flat_state(mark_uncopyable_rows(state.stored), texts)
    tree, notes = select_model(state, whole=whole)
    tree_state = tabulate_tree(tree, metadata=texts, limits=limits)
    return replace(tree_state, notes=(*notes, *tree_state.notes))


def tabulate_tree(
    tree: object,
    *,
    metadata: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    arrays: Arrays = "values",
) -> State:
    """Describe a tree of usual containers.

    Args:
        tree: The tree, without `Stateful` objects.
        metadata: Texts to save with it.
        limits: The limit for its depth.
        arrays: Whether numpy arrays are tensors, as in the state of a caller, or plain values, as
            in the tree of an open checkpoint, whose tensors are lazy.

    Raises:
        CannotHold: The tree cannot be saved. The error lists every problem.
    """
    describing = _Describing(arrays)
    tensor_types: list[type] = []
    for library in describing.libraries:
        tensor_types += library.types
    tensor_types += LAZY_TYPES
    depth = (limits or DEFAULTS).depth
    leaves = find_leaves(tree, tensor_types, describing.convert, depth)
    table = describing.tabulate(leaves)
    if leaves.problems:
        leaves.raise_problems()
    leaves.has_traits = has_marked_tensors(table)
    notes: tuple[str, ...] = ()
    if "torch" in sys.modules and (describing.others or leaves.converted_leaves):
        notes = _describe_lost_attributes(leaves, table, describing.others)
    return State(tree, table, leaves, dict(metadata or {}), notes)


def select_model(checkpoint: Checkpoint, *, whole: bool) -> tuple[object, tuple[str, ...]]:
    """Return the tree of a checkpoint without the keys beside its model, and a note about them.

    With `whole`, the tree stays as it is.
    """
    tree = checkpoint.tree
    left_out_keys = () if whole else checkpoint.non_model_keys
    if not left_out_keys or not isinstance(tree, dict):
        return tree, ()
    keys_text = ", ".join(map(repr, left_out_keys))
    note = f"left out, because it is not part of the model: {keys_text}; select it with keep="
    model = {key: value for key, value in tree.items() if key not in left_out_keys}
    return model, (note,)


def _describe_lost_attributes(
    leaves: Leaves, table: Table, other_rows: Iterable[int]
) -> tuple[str, ...]:
    """Return notes about attributes of torch tensors that no format stores, such as hooks.

    Args:
        leaves: The leaves of a state.
        table: Their table.
        other_rows: The rows of tensors that are not plain.
    """
    find_lost = find_hook("unkept")
    ordered_leaves = [(row, table.names[row], leaves.values[row]) for row in other_rows]
    for name, value in leaves.converted_leaves:
        description = leaves.describe(value)
        first_name = name
        if isinstance(description, Composite):
            # The rows of a composite are its parts. The first one tells where it is in the order.
            for part_name, _ in description.children():
                first_name = f"{name}.{part_name}"
                break
        ordered_leaves.append((table.row_indices.get(first_name, 0), name, value))
    ordered_leaves.sort(key=lambda leaf: leaf[0])

    names_by_attribute: dict[str, list[str]] = {}
    seen: set[int] = set()
    for _, name, value in ordered_leaves:
        if id(value) in seen:
            continue
        seen.add(id(value))
        for attribute in find_lost(value):
            names_by_attribute.setdefault(attribute, []).append(name)

    notes = []
    for attribute, names in names_by_attribute.items():
        listed = ", ".join(map(repr, names[:MAX_LISTED_NAMES]))
        if len(names) > MAX_LISTED_NAMES:
            listed += f" and {len(names) - MAX_LISTED_NAMES:,} more"
        note = f"{attribute} is not kept of {listed}"
        notes.append(note.replace("its hooks is", "hooks are"))
    return tuple(notes)


class Library(Value, frozen=True, eq=False):
    """The tensor types of one library, and the function that describes them in columns."""

    types: tuple[type, ...]
    tabulate: Callable[[list[object]], TensorColumns]


NUMPY = Library(ARRAY_TYPES, describe_arrays)


@cache
def _torch_library() -> tuple[Library, ...]:
    tensors = find_hook("torch_tensors")
    return (Library(tensors.TYPES, tensors.tabulate_tensors),)


@cache
def _plain_types(*, torch: bool) -> frozenset[type]:
    """Return types of leaves that have no `state_dict`, with or without torch's tensors."""
    types: set[type] = {*NO_STATEFUL, bool, *LAZY_TYPES, *NUMPY.types}
    if torch:
        for library in _torch_library():
            types.update(library.types)
    return frozenset(types)


class _Describing:
    """Describes the leaves of one state.

    Each library describes all of its plain tensors at once, in columns. The other leaves become lazy
    tensors, one by one.
    """

    def __init__(self, arrays: Arrays) -> None:
        libraries: tuple[Library, ...] = (NUMPY,) if arrays == "tensors" else ()
        if "torch" in sys.modules:
            libraries = (*libraries, *_torch_library())
        self.libraries = libraries
        self.others: dict[int, LazyTensor] = {}
        """The rows that no library described in columns, each as a lazy tensor."""
        self._arrays = arrays
        self._values: Sequence[object] = ()
        """The leaf of each row of the table."""
        self._storage_indices: Sequence[int] = ()
        """The storage of each row of the table."""
        self._row_by_storage: dict[int, int] = {}
        """A row of each storage. Made when a lazy tensor is asked for first."""
        self._tensor_by_storage: dict[int, LazyTensor] = {}
        """A lazy tensor of each storage that one was asked for."""

    @cached_property
    def _memory(self) -> MemoryTensors:
        return MemoryTensors()

    @cached_property
    def _convert_foreign(self) -> Leaf:
        # Only if the caller has torch can there be a torch tensor.
        if "torch" not in sys.modules:
            return lambda value, path: value
        return cast("Leaf", find_hook("torch_leaf")(self._memory))

    def convert(self, value: object, path: Path) -> object:
        """Return the lazy tensor or the composite of a leaf, or what is kept of any other value."""
        if isinstance(value, np.ndarray):
            return self._memory.wrap_array(value) if self._arrays == "tensors" else value
        value = self._convert_foreign(value, path)
        if isinstance(value, LazyTensor | Composite | np.generic | type):
            return value
        if not hasattr(value, "__array__"):
            return value
        # JAX's keys for random numbers, and arrays with shards on other machines, give no array.
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise Unsupported(f"{describe_value(value)} gives no array: {error}") from error
        return self._memory.wrap_array(array)

    def tabulate(self, leaves: Leaves) -> Table:
        """Return the table of the leaves. Problems of single leaves are added to the leaves."""
        values = leaves.values
        present_types = {*map(type, values)}
        if present_types <= {*LAZY_TYPES}:
            return make_lazy_table(leaves.names, cast("list[LazyTensor]", values))

        columns_list: list[TensorColumns] = []
        for library in self.libraries:
            types = present_types.intersection(library.types)
            if types == present_types:
                columns_list.append(library.tabulate(values))
            elif types:
                rows = [row for row, value in enumerate(values) if type(value) in types]
                columns = library.tabulate([values[row] for row in rows])
                columns_list.append(replace(columns, rows=[rows[i] for i in columns.rows]))
        if sum(len(columns.rows) for columns in columns_list) < len(values):
            columns_list = self._describe_others(leaves, columns_list)
        if len(columns_list) != 1 or self.others:
            return self._join(leaves, columns_list)

        (columns,) = columns_list
        self._values = leaves.values
        self._storage_indices = columns.storage_indices
        return Table(
            leaves.names,
            columns.kinds,
            columns.kind_indices,
            columns.storage_indices,
            StateStorages([columns.storages], self._make_lazy_tensor),
            {},
            offsets=columns.offsets,
        )

    def _describe_others(
        self, leaves: Leaves, columns_list: list[TensorColumns]
    ) -> list[TensorColumns]:
        """Describe all rows that are in no columns as lazy tensors.

        A composite, such as a sparse tensor, becomes several rows and moves the rows behind it.

        Returns:
            The columns with their new rows.
        """
        described_rows = {row for columns in columns_list for row in columns.rows}
        descriptions: dict[int, object] = {}
        composites: dict[int, Composite] = {}
        for row, value in enumerate(leaves.values):
            if row in described_rows:
                continue
            if id(value) not in descriptions:
                descriptions[id(value)] = self._describe_leaf(leaves, row)
            description = descriptions[id(value)]
            if isinstance(description, Composite):
                composites[row] = description
            elif isinstance(description, LazyTensor):
                self.others[row] = description
                leaves.irregular_tensors[id(value)] = description
        leaves.raise_problems()
        if not composites:
            return columns_list

        row_counts = np.ones(len(leaves.values), np.int64)
        for row, composite in composites.items():
            row_counts[row] = len(composite.parts)
        new_rows = (np.cumsum(row_counts) - row_counts).tolist()
        self.others = {new_rows[row]: tensor for row, tensor in self.others.items()}
        for row, composite in composites.items():
            for index, (_, tensor) in enumerate(composite.children()):
                self.others[new_rows[row] + index] = tensor
        leaves.replace_with_parts(composites)
        return [
            replace(columns, rows=[new_rows[row] for row in columns.rows])
            for columns in columns_list
        ]

    def _describe_leaf(self, leaves: Leaves, row: int) -> object:
        """Describe one leaf. If that is not possible, add a problem and return None."""
        value = leaves.values[row]
        if isinstance(value, LazyTensor):
            return value
        try:
            return self.convert(value, ())
        except Unsupported as error:
            leaves.problems.append(f"{leaves.names[row]}: {error.message}")
            return None

    def _join(self, leaves: Leaves, columns_list: list[TensorColumns]) -> Table:
        """Return one table of the columns of several libraries and of the lazy tensors."""
        names = leaves.names
        other_rows = sorted(self.others)
        lazy_columns = describe_lazy_tensors([self.others[row] for row in other_rows])
        rows = [other_rows[index] for index in lazy_columns.rows]
        columns_list.append(replace(lazy_columns, rows=rows))

        kinds: list[RowKind] = []
        kind_indices = [0] * len(names)
        storage_indices = [IRREGULAR] * len(names)
        offsets: dict[int, int] = {}
        joint_indices = self._number_storages(columns_list)
        for columns, joint_storages in zip(columns_list, joint_indices, strict=True):
            first_kind = len(kinds)
            kinds += columns.kinds
            column_rows = zip(
                columns.rows, columns.kind_indices, columns.storage_indices, strict=True
            )
            for row, kind_index, storage_index in column_rows:
                kind_indices[row] = first_kind + kind_index
                storage_indices[row] = joint_storages[storage_index]
            offsets |= {columns.rows[index]: offset for index, offset in columns.offsets.items()}

        irregular: dict[int, LazyTensor] = {}
        for row in other_rows:
            if storage_indices[row] == IRREGULAR:
                irregular[row] = self.others[row].renamed(names[row])
                kind_indices[row] = len(kinds)
                kinds.append(RowKind.from_tensor(irregular[row]))
        self._values = leaves.values
        self._storage_indices = storage_indices
        storages = StateStorages(
            [columns.storages for columns in columns_list], self._make_lazy_tensor
        )
        return Table(
            names, kinds, kind_indices, storage_indices, storages, irregular, offsets=offsets
        )

    def _make_lazy_tensor(
        self, storage_index: int, kind: RowKind, name: str, offset: int
    ) -> LazyTensor:
        """Make a lazy tensor over a storage of the table. `offset` is in bits."""
        if storage_index not in self._tensor_by_storage:
            if not self._row_by_storage:
                rows = range(len(self._storage_indices))
                self._row_by_storage.update(zip(self._storage_indices, rows, strict=True))
            value = self._values[self._row_by_storage[storage_index]]
            if not isinstance(value, LazyTensor):
                value = cast("LazyTensor", self.convert(value, ()))
            self._tensor_by_storage[storage_index] = value
        stored_tensor = self._tensor_by_storage[storage_index]

        strides = kind.strides
        if 0 in kind.shape:
            # The offset of a tensor without elements may lie outside of its storage.
            offset = 0
            strides = (0,) * len(kind.shape)
        storage = stored_tensor.chunks[0].storage
        chunk = Chunk(Box.whole(kind.shape), storage, offset, strides)
        return LazyTensor(name, kind.dtype, kind.shape, (chunk,), stored_tensor.source, kind.traits)

    def _number_storages(self, columns_list: Sequence[TensorColumns]) -> list[Sequence[int]]:
        """Number the storages of all columns together.

        Tensors of several libraries may share memory, such as `torch.from_numpy(array)` and the
        array. One range of memory has one number.

        Returns:
            For each of the columns, the joint number of each of its storages.
        """
        address_ranges = self._memory.address_ranges()
        index_by_range: dict[tuple[int, int], int] = {}
        joint_indices: list[Sequence[int]] = []
        storage_count = 0
        for columns in columns_list:
            nbytes = columns.storages.nbytes.tolist()
            if isinstance(columns.storages, FileStorages):
                # Arrays that were wrapped one by one are files of the store in memory.
                file_ranges = [(0, 0)] * len(columns.storages.files)
                for file_index, file in enumerate(columns.storages.files):
                    if file.store is self._memory.store:
                        file_ranges[file_index] = address_ranges.get(file.key, (0, 0))
                ranges = [file_ranges[index] for index in columns.storages.file_indices.tolist()]
            else:
                ranges = [*zip(columns.addresses(), nbytes, strict=True)]

            indices: list[int] = []
            for index, address_range in enumerate(ranges, storage_count):
                indices.append(index_by_range.get(address_range, index))
            # Only memory has an address. An empty storage shares its bytes with nobody.
            index_by_range |= {
                address_range: index
                for address_range, index in zip(ranges, indices, strict=True)
                if address_range[0] and address_range[1]
            }
            joint_indices.append(indices)
            storage_count += len(nbytes)
        return joint_indices


NO_STATEFUL = (str, bytes, int, float, complex, type(None), type)

USUAL_TYPES = CONTAINER_TYPES | {defaultdict, Counter}


class Stateful(Protocol):
    """An object whose state is saved and loaded."""

    def state_dict(self) -> object: ...

    def load_state_dict(self, state_dict: object, /) -> object: ...


def order_state_and_path(
    state: object, path: object
) -> tuple[Stateful | Mapping[str, object], str | os.PathLike[str]]:
    """Return the state and the path, in whichever order the caller gave them."""
    state, path = order_content_and_path(state, path)
    return cast("Stateful | Mapping[str, object]", state), cast("str | os.PathLike[str]", path)


def is_stateful(value: object) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`.

    Methods that only `__getattr__` makes up do not count.
    """
    if isinstance(value, NO_STATEFUL):
        return False
    return all(_has_method(value, name) for name in ("state_dict", "load_state_dict"))


def unwrap_module(value: Stateful) -> Stateful:
    """Return an object whose state has the names of the module inside of a wrapper.

    DDP and `torch.compile` wrap modules and change their names. Other objects stay as they are.
    """
    if "torch" not in sys.modules:
        return value
    return cast("Stateful", find_hook("plainly_named")(value))


def list_stateful_keys(mapping: Mapping[object, object]) -> list[object]:
    """Return the keys of objects with a state, in an order that is the same on all ranks.

    The `state_dict` methods of several ranks may communicate, so all ranks call them in one order.
    """
    return sorted((key for key, value in mapping.items() if is_stateful(value)), key=str)


def replace_stateful(state: object) -> object:
    """Return a state with a state dict in the place of every object that has one.

    Containers without such an object stay the very same objects. A mapping of another class becomes
    a dict; an `OrderedDict` and a `defaultdict` stay what they are.
    """
    plain_types = _plain_types(torch="torch" in sys.modules)
    # Most states have nothing but usual containers and leaves without a state. They are searched
    # level by level, without a function call for each container.
    level: Collection[object] = [state]
    seen: set[int] = set()
    while True:
        types = {*map(type, level)}
        if types <= plain_types:
            return state
        if not plain_types.issuperset(types - CONTAINER_TYPES):
            walk = StateDictWalk(plain_types)
            return rebuild(
                state,
                lambda value, _: value,
                get_children=walk.get_children,
                make_container=walk.make_container,
                max_depth=MAX_CALLS,
            )
        containers: list[Any] = [value for value in level if type(value) in CONTAINER_TYPES]
        containers_by_id = dict(zip(map(id, containers), containers, strict=True))
        unseen = [containers_by_id[identity] for identity in containers_by_id.keys() - seen]
        dicts = [container for container in unseen if type(container) in DICT_TYPES]
        sequences = [container for container in unseen if type(container) not in DICT_TYPES]
        level = [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(sequences)]
        seen.update(containers_by_id)


def _has_method(value: object, name: str) -> bool:
    # The class is checked first: nearly always the method is there. `hasattr` is fast for arrays,
    # of which there may be many, and which do not even claim to have it.
    value_type = type(value)
    if hasattr(value_type, name) and callable(inspect.getattr_static(value_type, name, None)):
        return True
    return name in getattr(value, "__dict__", ()) and callable(getattr(value, name))


class StateDictWalk:
    """Replaces objects by their state dicts, on one walk through a state (`core.tree.rebuild`)."""

    def __init__(self, plain_types: frozenset[type]) -> None:
        self._leaf_types = plain_types
        self._stateful: set[int] = set()
        """The identities of objects that were replaced."""
        self._keys: dict[int, list[object]] = {}
        """The keys of mappings with such objects, in the order in which these were replaced."""

    def get_children(self, value: object) -> Iterable[tuple[object, object]] | None:
        """Return the children of a value by their keys, or None for a leaf."""
        if isinstance(value, NO_STATEFUL) or type(value) in self._leaf_types:
            return None
        if is_stateful(value):
            self._stateful.add(id(value))
            return self._iterate_state_dict(cast(Stateful, value))
        if type(value) in USUAL_TYPES and self._leaf_types.issuperset(map(type, get_values(value))):
            return None
        if isinstance(value, Mapping):
            stateful_keys = list_stateful_keys(value)
            if stateful_keys:
                keys = [*dict.fromkeys(chain(stateful_keys, value))]
                self._keys[id(value)] = keys
                return ((key, value[key]) for key in keys)
            return get_mapping_children(value)
        if type(value) in (list, tuple):
            return get_mapping_children(value)
        return None

    def _iterate_state_dict(self, value: Stateful) -> Iterator[tuple[object, object]]:
        # A generator, so that the method is only called when the walk enters the object. An object
        # that contains itself is not entered again.
        yield None, unwrap_module(value).state_dict()

    def make_container(self, value: Any, children: list[object], _: LinkedPath) -> object:  # noqa: ANN401  # any container
        """Return a container with new children, or the state dict of an object."""
        if id(value) in self._stateful:
            return children[0]
        keys = self._keys.pop(id(value), None)
        if keys is not None:
            by_key = dict(zip(keys, children, strict=True))
            children = [by_key[key] for key in value]
        if type(value) in USUAL_TYPES or isinstance(value, defaultdict | Counter):
            return replace_children(value, children)
        items = dict(zip(value, children, strict=True))
        if not isinstance(value, OrderedDict):
            return items
        ordered = OrderedDict(items)
        # torch keeps the versions of a state_dict() in the attributes of the dict.
        vars(ordered).update(vars(value))
        return ordered


def make_flat_state(table: Table, metadata: Mapping[str, str]) -> State:
    """Return a state that is a plain dict of the rows of a table, without making lazy tensors."""
    leaves = Leaves((RowLeaf,), lambda value, path: value)
    leaves.names = [*table.names]
    leaves.values = [*map(RowLeaf, range(len(table.names)))]
    leaves.has_traits = has_marked_tensors(table)
    tree = dict(zip(table.names, leaves.values, strict=True))
    return State(tree, table, leaves.for_table(table), dict(metadata))


def has_marked_tensors(table: Table) -> bool:
    """Return whether a tensor is more than its elements, so that a stored tree records it."""
    used_traits = [table.kinds[kind_index].traits for kind_index in {*table.kind_indices}]
    return any(traits is not PLAIN_TRAITS and is_marked(traits) for traits in used_traits)


def replace_rows(table: Table, tensors: Mapping[int, LazyTensor]) -> Table:
    """Return a table in which some rows are these lazy tensors. The names stay."""
    if not tensors:
        return table
    kinds = [*table.kinds]
    kind_indices = [*table.kind_indices]
    storage_indices = [*table.storage_indices]
    for row, tensor in tensors.items():
        kind_indices[row] = len(kinds)
        storage_indices[row] = IRREGULAR
        kinds.append(RowKind.from_tensor(tensor))
    return Table(
        table.names,
        kinds,
        kind_indices,
        storage_indices,
        table.storages,
        {**table.irregular, **tensors},
        offsets=table.offsets,
    )


def replace_table(state: State, table: Table) -> State:
    """Return the state with another table, whose rows replace its own under the same names."""
    leaves = state.leaves.for_table(table)
    leaves.has_traits = has_marked_tensors(table)
    return replace(state, tensors=table, leaves=leaves)


def replace_tree(state: State, tree: object, limits: Limits | None = None) -> State:
    """Return a state with another tree over the same tensors.

    The tensors of the tree must be leaves of the state. They get the names that they have in the
    new tree.
    """
    old_leaves = state.leaves
    rows = {id(value): row for row, value in enumerate(old_leaves.values)}
    new_leaves = find_leaves(
        tree,
        old_leaves.tensor_types,
        lambda value, path: old_leaves.describe(value),
        (limits or DEFAULTS).depth,
    )
    new_leaves.raise_problems()
    selected_rows = [rows[id(value)] for value in new_leaves.values]
    table = state.tensors.select(selected_rows, new_leaves.names)
    leaves = new_leaves.for_table(table)
    leaves.has_traits = has_marked_tensors(table)
    return replace(state, tree=tree, tensors=table, leaves=leaves)


def make_lazy_tree(state: State) -> object:
    """Return the tree of a state with a lazy tensor in the place of each tensor."""
    rows = {id(value): row for row, value in enumerate(state.leaves.values)}
    lazy_tensors: dict[int, LazyTensor] = {}

    def replace_leaf(value: object, _: LinkedPath) -> object:
        description = state.leaves.describe(value)
        row = rows.get(id(description))
        if row is None:
            return description
        if row not in lazy_tensors:
            lazy_tensors[row] = state.tensors.lazy_tensor(row)
        return lazy_tensors[row]

    return rebuild(state.tree, replace_leaf)
