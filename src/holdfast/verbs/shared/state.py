"""From whatever a caller gives to `save` to a `State`: the same tree, and a table with a row for every tensor in it.

numpy arrays and torch tensors are not copied; lazy tensors of an open checkpoint are streamed later. Containers keep their types.
What is neither a tensor nor a container is left as it is: the target format knows whether it can hold it.

An object with `state_dict()` and `load_state_dict()` (`Stateful`) stands for what the former returns, wherever it is in the state:

    {"app": AppState(), "step": 3}          {"app": {"w": …, "epoch": 1}, "step": 3}
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

SHOWN = 3


def tabulate_state(
    state: object,
    *,
    metadata: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    whole: bool = False,
) -> State:
    """Describe a state without copying its data: tensors are rows of a table, and the tree is the caller's own.

    Of a checkpoint with `non_model_keys`, the model is described; `whole` takes it all.
    """
    if not isinstance(state, Checkpoint):
        return tabulate_tree(
            replace_stateful(state), metadata=metadata, limits=limits, arrays="tensors"
        )
    # What a torch file says about itself (its version, its byte order) is true of that file only.
    texts = {**(state.metadata if format_of(state.format).metadata else {}), **(metadata or {})}
    if state.is_flat:
        return make_flat_state(mark_uncopyable_rows(state.stored), texts)
    tree, left = select_model(state, whole=whole)
    made = tabulate_tree(tree, metadata=texts, limits=limits)
    return replace(made, notes=(*left, *made.notes))


def tabulate_tree(
    tree: object,
    *,
    metadata: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    arrays: Arrays = "values",
) -> State:
    """The state of a tree of usual containers. Arrays in the tree of an open checkpoint are plain values, as they were.

    Raises `CannotHold` with everything that stands in the way.
    """
    describing = _Describing(arrays)
    kinds = [kind for library in describing.libraries for kind in library.types]
    depth = (limits or DEFAULTS).depth
    leaves = find_leaves(tree, [*kinds, *LAZY_TYPES], describing.convert, depth)
    table = describing.tabulate(leaves)
    if leaves.problems:
        leaves.raise_problems()
    leaves.has_traits = has_marked_tensors(table)
    notes: tuple[str, ...] = ()
    if "torch" in sys.modules and (describing.others or leaves.converted_leaves):
        notes = _unkept_notes(leaves, table, describing.others)
    return State(tree, table, leaves, dict(metadata or {}), notes)


def select_model(checkpoint: Checkpoint, *, whole: bool) -> tuple[object, tuple[str, ...]]:
    """The tree of a checkpoint without what stands beside its model, unless `whole` takes it all; and a note about that."""
    beside, tree = () if whole else checkpoint.non_model_keys, checkpoint.tree
    if not beside or not isinstance(tree, dict):
        return tree, ()
    note = f"left out, because it is not part of the model: {', '.join(map(repr, beside))}; select it with keep="
    return {key: value for key, value in tree.items() if key not in beside}, (note,)


def _unkept_notes(leaves: Leaves, table: Table, others: Iterable[int]) -> tuple[str, ...]:
    """Sentences about what is not kept of leaves that are no plain tensors; `others` are the rows of such tensors."""
    unkept = find_hook("unkept")
    unkept_names: dict[str, list[str]] = {}
    described_rows = [(row, table.names[row], leaves.values[row]) for row in others]
    for name, value in leaves.converted_leaves:
        made = leaves.describe(value)
        first = (
            next((f"{name}.{part}" for part, _ in made.children()), name)
            if isinstance(made, Composite)
            else name
        )
        described_rows.append((table.row_indices.get(first, 0), name, value))
    seen: set[int] = set()
    for _, name, value in sorted(described_rows, key=lambda one: one[0]):
        for what in unkept(value) if id(value) not in seen else ():
            unkept_names.setdefault(what, []).append(name)
        seen.add(id(value))
    notes = []
    for what, names in unkept_names.items():
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        notes.append(
            f"{what} is not kept of {', '.join(map(repr, names[:SHOWN]))}{more}".replace(
                "its hooks is", "hooks are"
            )
        )
    return tuple(notes)


class Library(Value, frozen=True, eq=False):
    """The types of one library's tensors, and the function that describes them in columns."""

    types: tuple[type, ...]
    tabulate: Callable[[list[object]], TensorColumns]


@cache
def _torch_library() -> tuple[Library, ...]:
    tensors = find_hook("torch_tensors")
    return (Library(tensors.TYPES, tensors.tabulate_tensors),)


NUMPY = Library(ARRAY_TYPES, describe_arrays)


@cache
def _plain_types(*, torch: bool) -> frozenset[type]:
    """Types of which none keeps a state, and which hold nothing that does."""
    libraries = (NUMPY, *(_torch_library() if torch else ()))
    return frozenset(
        {
            *NO_STATEFUL,
            bool,
            *LAZY_TYPES,
            *(kind for library in libraries for kind in library.types),
        }
    )


class _Describing:
    """Describes the leaves of one state: those of each library by columns, and the others as lazy tensors."""

    def __init__(self, arrays: Arrays) -> None:
        numpy = (NUMPY,) if arrays == "tensors" else ()
        self.libraries = (*numpy, *_torch_library()) if "torch" in sys.modules else numpy
        self.others: dict[int, LazyTensor] = {}
        """Rows that no library gave in columns: a lazy tensor each."""
        self._arrays = arrays
        self._values: Sequence[object] = ()
        """The leaf of each row of the table."""
        self._storage: Sequence[int] = ()
        """The number of the storage of each row."""
        self._row_of: dict[int, int] = {}
        self._tensor_of: dict[int, LazyTensor] = {}
        """A row, and its lazy tensor, of each storage that was asked for."""

    @cached_property
    def _resident(self) -> MemoryTensors:
        return MemoryTensors()

    @cached_property
    def _convert_foreign(self) -> Leaf:
        # Only if the caller has torch can there be a torch tensor.
        if "torch" not in sys.modules:
            return lambda value, path: value
        return cast("Leaf", find_hook("torch_leaf")(self._resident))

    def convert(self, value: object, path: Path) -> object:
        """Return the lazy tensor or the composite of a leaf, or what is kept of any other value."""
        if isinstance(value, np.ndarray):
            return self._resident.wrap_array(value) if self._arrays == "tensors" else value
        value = self._convert_foreign(value, path)
        if isinstance(value, LazyTensor | Composite | np.generic | type):
            return value
        if not hasattr(value, "__array__"):
            return value
        # Of JAX, a key for random numbers or an array with parts on other machines gives no array.
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise Unsupported(f"{describe_value(value)} gives no array: {error}") from error
        return self._resident.wrap_array(array)

    def tabulate(self, leaves: Leaves) -> Table:
        """Make the table of the leaves."""
        values = leaves.values
        present = {*map(type, values)}
        if present <= {*LAZY_TYPES}:
            return make_lazy_table(leaves.names, cast("list[LazyTensor]", values))

        parts: list[TensorColumns] = []
        for library in self.libraries:
            types = present.intersection(library.types)
            if types == present:
                parts.append(library.tabulate(values))
            elif types:
                rows = [row for row, value in enumerate(values) if type(value) in types]
                part = library.tabulate([values[row] for row in rows])
                parts.append(replace(part, rows=[rows[at] for at in part.rows]))
        if sum(len(part.rows) for part in parts) < len(values):
            parts = self._describe_others(leaves, parts)
        if len(parts) != 1 or self.others:
            return self._join(leaves, parts)

        (part,) = parts
        self._values, self._storage = leaves.values, part.storage_indices
        storages = StateStorages([part.storages], self._view)
        return Table(
            leaves.names,
            part.kinds,
            part.kind_indices,
            part.storage_indices,
            storages,
            {},
            offsets=part.offsets,
        )

    def _describe_others(self, leaves: Leaves, parts: list[TensorColumns]) -> list[TensorColumns]:
        """Describe all other rows as lazy tensors. A composite is several rows, and moves those behind it."""
        made: dict[int, object] = {}
        plain = {row for part in parts for row in part.rows}
        wholes: dict[int, Composite] = {}
        for row in [row for row in range(len(leaves.values)) if row not in plain]:
            value = leaves.values[row]
            if id(value) not in made:
                try:
                    made[id(value)] = (
                        value if isinstance(value, LazyTensor) else self.convert(value, ())
                    )
                except Unsupported as error:
                    made[id(value)] = None
                    leaves.problems.append(f"{leaves.names[row]}: {error.message}")
            lazy = made[id(value)]
            if isinstance(lazy, Composite):
                wholes[row] = lazy
            elif isinstance(lazy, LazyTensor):
                self.others[row] = leaves.irregular_tensors[id(value)] = lazy
        leaves.raise_problems()
        if not wholes:
            return parts
        grown = np.ones(len(leaves.values), np.int64)
        for row, whole in wholes.items():
            grown[row] = len(whole.parts)
        place = (np.cumsum(grown) - grown).tolist()
        self.others = {place[row]: tensor for row, tensor in self.others.items()}
        for row, whole in wholes.items():
            self.others |= {
                place[row] + at: tensor for at, (_, tensor) in enumerate(whole.children())
            }
        leaves.replace_with_parts(wholes)
        return [replace(part, rows=[place[row] for row in part.rows]) for part in parts]

    def _join(self, leaves: Leaves, parts: list[TensorColumns]) -> Table:
        """Join the rows of several libraries and of lazy tensors."""
        names = leaves.names
        others = sorted(self.others)
        lazy = describe_lazy_tensors([self.others[row] for row in others])
        parts.append(replace(lazy, rows=[others[at] for at in lazy.rows]))
        kinds: list[RowKind] = []
        kind, storage = [0] * len(names), [IRREGULAR] * len(names)
        offsets: dict[int, int] = {}
        for part, numbers in zip(parts, self._numbers(parts), strict=True):
            first = len(kinds)
            kinds += part.kinds
            for row, one, number in zip(
                part.rows, part.kind_indices, part.storage_indices, strict=True
            ):
                kind[row], storage[row] = first + one, numbers[number]
            offsets |= {part.rows[at]: offset for at, offset in part.offsets.items()}
        irregular: dict[int, LazyTensor] = {}
        for row in others:
            if storage[row] == IRREGULAR:
                irregular[row], kind[row] = self.others[row].renamed(names[row]), len(kinds)
                kinds.append(RowKind.from_tensor(irregular[row]))
        self._values, self._storage = leaves.values, storage
        storages = StateStorages([part.storages for part in parts], self._view)
        return Table(names, kinds, kind, storage, storages, irregular, offsets=offsets)

    def _view(self, number: int, kind: RowKind, name: str, offset: int) -> LazyTensor:
        """Make a lazy tensor over a storage of the table."""
        if number not in self._tensor_of:
            if not self._row_of:
                self._row_of.update(zip(self._storage, range(len(self._storage)), strict=True))
            value = self._values[self._row_of[number]]
            if not isinstance(value, LazyTensor):
                value = cast("LazyTensor", self.convert(value, ()))
            self._tensor_of[number] = value
        whole = self._tensor_of[number]
        strides = kind.strides
        if 0 in kind.shape:
            offset, strides = 0, (0,) * len(kind.shape)
        chunk = Chunk(Box.whole(kind.shape), whole.chunks[0].storage, offset, strides)
        return LazyTensor(name, kind.dtype, kind.shape, (chunk,), whole.source, kind.traits)

    def _numbers(self, parts: Sequence[TensorColumns]) -> list[Sequence[int]]:
        """The numbers of each part's storages among those of all parts. One memory has one number, in whichever part it is."""
        places, known, found, before = (
            self._resident.address_ranges(),
            dict[tuple[int, int], int](),
            list[Sequence[int]](),
            0,
        )
        for part in parts:
            lengths = part.storages.nbytes.tolist()
            if isinstance(part.storages, FileStorages):
                keys = [
                    place.key if place.store is self._resident.store else ""
                    for place in part.storages.files
                ]
                own = [
                    places.get(keys[file], (0, 0)) for file in part.storages.file_indices.tolist()
                ]
            else:
                own = [*zip(part.addresses(), lengths, strict=True)]
            here = range(before, before + len(lengths))
            found.append(
                [
                    known[place] if place in known else number  # noqa: SIM401  # a call each
                    for place, number in zip(own, here, strict=True)
                ]
            )
            known |= {
                place: number
                for place, number in zip(own, found[-1], strict=True)
                if place[0] and place[1]
            }
            before += len(lengths)
        return found


NO_STATEFUL = (str, bytes, int, float, complex, type(None), type)

USUAL_TYPES = CONTAINER_TYPES | {defaultdict, Counter}


class Stateful(Protocol):
    """An object whose state is saved and loaded."""

    def state_dict(self) -> object: ...

    def load_state_dict(self, state_dict: object, /) -> object: ...


def order_state_and_path(
    state: object, path: object
) -> tuple[Stateful | Mapping[str, object], str | os.PathLike[str]]:
    """The state and the path, whichever was given first (`order_content_and_path`)."""
    state, path = order_content_and_path(state, path)
    return cast("Stateful | Mapping[str, object]", state), cast("str | os.PathLike[str]", path)


def is_stateful(value: object) -> bool:
    """Whether an object has both methods. What it only pretends to have (`__getattr__`) does not count."""
    if isinstance(value, NO_STATEFUL):
        return False
    return all(_has(value, name) for name in ("state_dict", "load_state_dict"))


def unwrap_module(value: Stateful) -> Stateful:
    """The object; for a module that DDP or `torch.compile` wraps, one that names its state as the module inside does."""
    if "torch" not in sys.modules:
        return value
    return cast("Stateful", find_hook("plainly_named")(value))


def list_stateful_keys(mapping: Mapping[object, object]) -> list[object]:
    """The keys of the objects with a state, in an order that is the same on all ranks: their methods may talk to each other."""
    return sorted((key for key, value in mapping.items() if is_stateful(value)), key=str)


def replace_stateful(state: object) -> object:
    """The state in usual containers, with a state dict in the place of every object that has one.

    What holds none stays the very same object. A mapping of another class becomes a dict, and so does a class that is made of one;
    an `OrderedDict` and a `defaultdict` stay such.
    """
    plain_types = _plain_types(torch="torch" in sys.modules)
    # Most states have nothing but usual containers and leaves that keep no state. They are looked
    # through level by level, and no function is called for a container.
    level: Collection[object] = [state]
    seen: set[int] = set()
    while not (types := {*map(type, level)}) <= plain_types:
        if not plain_types.issuperset(types - CONTAINER_TYPES):
            taking = StateDictWalk(plain_types)
            return rebuild(
                state,
                lambda value, _: value,
                get_children=taking.inside,
                make_container=taking.made,
                max_depth=MAX_CALLS,
            )
        containers: list[Any] = [value for value in level if type(value) in CONTAINER_TYPES]
        inner = dict(zip(map(id, containers), containers, strict=True))
        unseen = [inner[identity] for identity in inner.keys() - seen]
        dicts = [container for container in unseen if type(container) in DICT_TYPES]
        others = [container for container in unseen if type(container) not in DICT_TYPES]
        level = [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(others)]
        seen.update(inner)
    return state


def _has(value: object, name: str) -> bool:
    # First of its class, which nearly always has it. What does not even pretend to have it is done at once: arrays are many.
    if hasattr(type(value), name) and callable(inspect.getattr_static(type(value), name, None)):
        return True
    return name in getattr(value, "__dict__", ()) and callable(getattr(value, name))


class StateDictWalk:
    """Replaces objects by their state dicts, on one walk through a state."""

    def __init__(self, plain_types: frozenset[type]) -> None:
        self._leaves = plain_types
        self._stateful: set[int] = set()
        self._keys: dict[int, list[object]] = {}
        """The keys of mappings with such objects, in the order in which these were replaced."""

    def inside(self, value: object) -> Iterable[tuple[object, object]] | None:
        if isinstance(value, NO_STATEFUL) or type(value) in self._leaves:
            return None
        if is_stateful(value):
            self._stateful.add(id(value))
            # Called when it is entered: what contains itself is not called again.
            return ((None, unwrap_module(cast(Stateful, one)).state_dict()) for one in (value,))
        if type(value) in USUAL_TYPES and self._leaves.issuperset(map(type, get_values(value))):
            return None
        if isinstance(value, Mapping) and (first := list_stateful_keys(value)):
            self._keys[id(value)] = keys = [*dict.fromkeys(chain(first, value))]
            return ((key, value[key]) for key in keys)
        return (
            get_mapping_children(value)
            if isinstance(value, Mapping) or type(value) in (list, tuple)
            else None
        )

    def made(self, value: Any, children: list[object], _: LinkedPath) -> object:  # noqa: ANN401  # what `inside` entered
        if id(value) in self._stateful:
            return children[0]
        keys = self._keys.pop(id(value), None)
        if keys is not None:
            by_key = dict(zip(keys, children, strict=True))
            children = [by_key[key] for key in value]
        if type(value) in USUAL_TYPES or isinstance(value, defaultdict | Counter):
            return replace_children(value, children)
        inner = dict(zip(value, children, strict=True))
        if not isinstance(value, OrderedDict):
            return inner
        ordered = OrderedDict(inner)
        # torch keeps the versions of a state_dict() here.
        vars(ordered).update(vars(value))
        return ordered


def make_flat_state(table: Table, metadata: Mapping[str, str]) -> State:
    """A plain dict of the rows of a table. None of them is made."""
    leaves = Leaves((RowLeaf,), lambda value, path: value)
    leaves.names, leaves.values = [*table.names], [*map(RowLeaf, range(len(table.names)))]
    leaves.has_traits = has_marked_tensors(table)
    tree = dict(zip(table.names, leaves.values, strict=True))
    return State(tree, table, leaves.for_table(table), dict(metadata))


def has_marked_tensors(table: Table) -> bool:
    """Whether a tensor is more than its elements, so that a tree records it."""
    traits = [table.kinds[number].traits for number in {*table.kind_indices}]
    return any(one is not PLAIN_TRAITS and is_marked(one) for one in traits)


def replace_rows(table: Table, tensors: Mapping[int, LazyTensor]) -> Table:
    if not tensors:
        return table
    kinds, kind, storage = [*table.kinds], [*table.kind_indices], [*table.storage_indices]
    for row, tensor in tensors.items():
        kind[row], storage[row] = len(kinds), IRREGULAR
        kinds.append(RowKind.from_tensor(tensor))
    return Table(
        table.names,
        kinds,
        kind,
        storage,
        table.storages,
        {**table.irregular, **tensors},
        offsets=table.offsets,
    )


def replace_table(state: State, table: Table) -> State:
    """The state with the rows of another table in the places of its own, under their names."""
    leaves = state.leaves.for_table(table)
    leaves.has_traits = has_marked_tensors(table)
    return replace(state, tensors=table, leaves=leaves)


def replace_tree(state: State, tree: object, limits: Limits | None = None) -> State:
    """The state of another tree over tensors of this one, under the names that they have there."""
    leaves = state.leaves
    rows = dict(zip(map(id, leaves.values), range(len(leaves.values)), strict=True))
    found = find_leaves(
        tree,
        leaves.tensor_types,
        lambda value, path: leaves.describe(value),
        (limits or DEFAULTS).depth,
    )
    found.raise_problems()
    moved = state.tensors.select([rows[id(value)] for value in found.values], found.names)
    moved_leaves = found.for_table(moved)
    moved_leaves.has_traits = has_marked_tensors(moved)
    return replace(state, tree=tree, tensors=moved, leaves=moved_leaves)


def make_lazy_tree(state: State) -> object:
    """The tree of a state with a lazy tensor in the place of each leaf, for whoever looks at them one by one."""
    rows = {id(value): row for row, value in enumerate(state.leaves.values)}
    views: dict[int, LazyTensor] = {}

    def lazy(value: object, _: LinkedPath) -> object:
        found = state.leaves.describe(value)
        row = rows.get(id(found))
        if row is None:
            return found
        if row not in views:
            views[row] = state.tensors.lazy_tensor(row)
        return views[row]

    return rebuild(state.tree, lazy)
