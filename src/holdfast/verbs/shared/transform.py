"""Keep, drop, rename, dequantize and cast: what `convert` and `edit` do to a state before it is saved. Nothing is read.

Patterns are globs on dotted names (`core/patterns.py`). They apply to every leaf of the tree, tensors and plain values alike, so
that `keep=["model.*"]` leaves the model and nothing of the optimizer. A rename is a pair of globs with as many stars on both sides
(`model.*` → `*`): each star of the new name stands for what the star of the old one matched.

What shares a storage still does after a cast. Where all tensors over one storage are of one dtype, the storage is cast as a row of
elements, and each tensor becomes the same view of the new one: tied weights stay tied, slices stay slices, also of views that a
file only records (`Traits.alias`). Where a storage has several dtypes, or is to have them, each tensor is cast by itself.

Several dtypes go by patterns, too (`norm*` → float32, all else → bfloat16): the first that matches the name which a tensor had in
the source decides. Names of one and the same tensor must agree.
"""

from __future__ import annotations

import difflib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import cast as typed

import numpy as np

from holdfast.core.arguments import AnyDType
from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.dtype import ABBREVIATIONS, DTYPES, DType
from holdfast.core.leaves import RowLeaf
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.order import natural_sort_key
from holdfast.core.patterns import (
    find_rename_problems,
    find_unmatched_patterns,
    make_matcher,
    match_names,
    rename_names,
)
from holdfast.core.protocols import State
from holdfast.core.sharing import ViewIdentity, find_ties, identify_view
from holdfast.core.table import IRREGULAR, RowKind, Table, is_range_inside
from holdfast.core.tensor import AliasView, Composite, LazyTensor
from holdfast.core.tree import (
    MAX_LEAVES,
    LinkedPath,
    copy_dict_with_items,
    expand_path,
    get_inner_containers,
    get_leaf_children,
    get_values,
    have_named_children,
    iterate_leaves,
    join_linked_path,
    join_path,
    rebuild,
    replace_children,
    to_path_key,
    walk,
)
from holdfast.core.value import Value, replace
from holdfast.engine.computed import (
    ComputedStorages,
    DequantizedTensors,
    ElementwiseComputation,
    dequantize,
)
from holdfast.engine.targets.plan_save import Findings
from holdfast.errors import CannotHold, Unsupported
from holdfast.numeric.cast import OUTCOMES, cast, count_losses_by_part, largest_number
from holdfast.verbs.brief import root_global
from holdfast.verbs.shared.state import make_flat_state, replace_rows, replace_table, replace_tree

SHOWN, SHOWN_CHARACTERS = 3, 80
"""Tensors that a note names, and characters of a name."""


class Losses:
    """Counts elements that casts could not keep, while they are computed.

    Each element counts once, however often it is read. Elements between those of a view that is read with its gaps count as well.
    """

    def __init__(self) -> None:
        self.elements = 0
        self.counts: dict[str, dict[str, int]] = {outcome: {} for outcome in OUTCOMES}
        """Lost elements by outcome and tensor."""
        self._lock = threading.Lock()

    def add(self, names: Sequence[str], elements: int, lost: Mapping[str, Ints]) -> None:
        """Count elements of these tensors; `lost` has by outcome how many of each."""
        with self._lock:
            self.elements += elements
            for outcome, counts in lost.items():
                own = self.counts[outcome]
                for at in np.flatnonzero(counts).tolist():
                    own[names[at]] = own.get(names[at], 0) + int(counts[at])

    def notes(self, dtype: DType) -> tuple[str, ...]:
        return tuple(self._note(outcome, own, dtype) for outcome, own in self.counts.items() if own)

    def _note(self, outcome: str, own: Mapping[str, int], dtype: DType) -> str:
        most = f"±{largest_number(dtype):g}"
        how = {
            "saturated": f"beyond {most} became that",
            "infinite": f"beyond {most} became infinite",
            "nan": f"beyond {most} became NaN, for there is no infinity",
            "zero": "too small became zero",
            "smallest": "of zero, or too small, became 2^-127, the smallest number",
            "unsigned": "below zero lost their sign",
        }[outcome]
        worst = sorted(own, key=lambda name: (-own[name], natural_sort_key(name)))
        names = ", ".join(f"{name!r} ({own[name]:,})" for name in worst[:SHOWN])
        more = f" and {len(worst) - SHOWN:,} more tensors" if len(worst) > SHOWN else ""
        return f"cast to {dtype}: {sum(own.values()):,} of {self.elements:,} values {how}: {names}{more}"


LOST = message_type("list of what casts lost", dict[str, tuple[int, dict[str, dict[str, int]]]])


class LossFindings(Findings):
    """What casts lost on all ranks, by dtype."""

    def __init__(self, losses: dict[DType, Losses]) -> None:
        self._losses = losses

    def encode(self) -> bytes:
        return write_document(
            LOST, {dtype.name: (one.elements, one.counts) for dtype, one in self._losses.items()}
        )

    def merge(self, found: Sequence[bytes]) -> None:
        every = [read_document(LOST, one) for one in found]
        for dtype, own in self._losses.items():
            parts = [part[dtype.name] for part in every if dtype.name in part]
            own.elements = sum(elements for elements, _ in parts)
            for outcome in own.counts:
                total: Counter[str] = Counter()
                for _, lost in parts:
                    total.update(lost.get(outcome, {}))
                own.counts[outcome] = dict(total)


Casts = tuple[tuple[str, DType | None], ...]
"""Patterns of names and the dtype that floating-point tensors of these names are cast to, None to leave them; the first decides."""


class Edits(Value, frozen=True):
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    casts: Casts = ()
    """The dtypes of floating-point tensors; integers, booleans and quantised ones stay as they are."""
    tensors_only: bool = False
    """Keep the tensors under their dotted names in a flat mapping and leave everything else out."""
    dequantize: bool = False
    """Whether quantised blocks become the numbers that they stand for; casts come after that."""

    @property
    def renames(self) -> bool:
        return bool(self.keep or self.drop or self.rename)


NO_EDITS = Edits()


def parse_float_dtype(name: AnyDType) -> DType:
    """A floating-point dtype, by its name or a usual abbreviation."""
    found = DTYPES.parse(name) if isinstance(name, str) else DTYPES.from_any(name)
    if found is None or found.kind != "float" or found.packed:
        known = [row.name for row in DTYPES.rows if row.kind == "float" and not row.packed]
        near = difflib.get_close_matches(str(name), [*known, *ABBREVIATIONS], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise Unsupported(f"cannot cast to {str(name)!r}; {hint}", found=name)
    return found


KEEP, ALL = "keep", "*"
"""The word for the dtype of the source, and the pattern of a dtype that is given without one."""


def parse_casts(dtype: AnyDType | Mapping[str, AnyDType] | None) -> Casts:
    """The casts that a caller wants: of all tensors, or by patterns; "keep" leaves the dtype.

    >>> [(pattern, str(to)) for pattern, to in parse_casts({"norm*": "f32", "*": "bf16"})]
    [('norm*', 'float32'), ('*', 'bfloat16')]
    """
    if dtype is None or dtype == "":
        return ()
    wanted = dtype if isinstance(dtype, Mapping) else {ALL: dtype}
    return tuple(
        (pattern, None if name == KEEP else parse_float_dtype(name))
        for pattern, name in wanted.items()
    )


def transform(
    state: State,
    edits: Edits,
    limits: Limits | None = None,
    *,
    losses: dict[DType, Losses] | None = None,
) -> State:
    """The state with the edits applied. Raises `CannotHold` with every problem when they do not fit it.

    What casts lose is added to `losses`, by dtype, while the tensors are read.
    """
    if edits.dequantize:
        state = _dequantized(state)
    unfit: list[str] = []
    made = state
    if edits.casts:
        table = _cast_rows(state, edits, unfit, {} if losses is None else losses)
        made = state if unfit else replace_table(state, table)
    if edits.tensors_only:
        made = make_flat_state(made.tensors, made.metadata)
    problems: list[str] = []
    tree = _reshape(made.tree, edits, problems) if edits.renames else made.tree
    if problems or unfit:
        raise CannotHold("these edits do not fit the checkpoint", [*problems, *unfit])
    if tree is not made.tree:
        made = replace_tree(made, tree, limits)
    if edits.dequantize:
        _refuse_blocks(made.tensors)
    return made


def describe_left_out(tree: object, edits: Edits) -> list[str]:
    """Sentences about what `tensors_only` leaves out of a tree: values, objects, what tensors in parts are together.

    `keep` and `drop` leave things out by their names, so these are not repeated.
    """
    kept, dropped = _matcher(edits.keep), _matcher(edits.drop)
    values: list[str] = []
    objects: list[str] = []
    parts: list[str] = []
    for path, value in iterate_leaves(tree, once=True):
        name = join_path(path)
        # Of an object its tensors are named, and not itself.
        below = name if not isinstance(value, Opaque) else f"{name}."
        if (
            isinstance(value, LazyTensor | RowLeaf)
            or not path
            or (edits.keep and not kept(name) and not kept(below))
            or dropped(name)
        ):
            continue
        if isinstance(value, Composite):
            parts.append(f"{name[:SHOWN_CHARACTERS]!r} ({value.kind})")
        elif isinstance(value, Opaque | Global):
            what = value if isinstance(value, Global) else root_global(value)
            objects.append(f"{name[:SHOWN_CHARACTERS]!r} ({str(what)[:SHOWN_CHARACTERS]})")
        else:
            values.append(repr(name[:SHOWN_CHARACTERS]))
    versions = any(
        isinstance(value, OrderedDict) and vars(value)
        for _, value in walk(tree, get_inner_containers)
    )
    notes = [f"only tensors are kept; left out: {_counted(values, 'value')}"] if values else []
    notes += (
        [f"only tensors are kept; left out: {_counted(objects, 'foreign object')}"]
        if objects
        else []
    )
    notes += [f"only tensors are kept; taken apart: {_counted(parts, 'tensor')}"] if parts else []
    notes += (
        ["only tensors are kept; left out: what state dicts record of their modules (_metadata)"]
        if versions
        else []
    )
    return notes


def _counted(names: Sequence[str], what: str) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"{len(names):,} {what}{'s' if len(names) > 1 else ''}: {', '.join(names[:SHOWN])}{more}"


def _dequantized(state: State) -> State:
    """The state with the numbers that quantised blocks stand for. Blocks that cannot be decoded stay: they may be dropped yet."""
    decoded, table = DequantizedTensors(), state.tensors
    found = {row: decoded.decode_if_known(table.lazy_tensor(row)) for row in _in_blocks(table)}
    return replace_table(state, replace_rows(table, found))


def _in_blocks(table: Table) -> list[int]:
    kinds = {number for number, kind in enumerate(table.kinds) if kind.traits.blocks is not None}
    return [row for row, kind in enumerate(table.kind_indices) if kind in kinds] if kinds else []


def _refuse_blocks(table: Table) -> None:
    """Raise `CannotHold` for blocks that cannot be decoded."""
    problems = []
    for row in _in_blocks(table):
        try:
            dequantize(table.lazy_tensor(row))
        except Unsupported as error:
            problems.append(f"{table.names[row]}: {error.message}")
    if problems:
        raise CannotHold(
            "not all of this checkpoint can be dequantized; drop what cannot, or leave it as it is",
            problems,
        )


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    matchers = [make_matcher(pattern) for pattern in patterns]
    return lambda name: any(means(name) for means in matchers)


def _reshape(tree: object, edits: Edits, problems: list[str]) -> object:
    """Drop and rename leaves. Containers that end up empty because of it go as well; those without a change stay themselves."""
    problems += find_rename_problems(edits.rename)
    if problems:
        return tree
    names = [join_path(path) for path, _ in iterate_leaves(tree)]
    for pattern in find_unmatched_patterns(
        (*edits.keep, *edits.drop, *(old for old, _ in edits.rename)), names
    ):
        near = difflib.get_close_matches(pattern, names[:10_000], n=2, cutoff=0.5)
        problems.append(
            f"{pattern!r} matches nothing" + (f"; near: {', '.join(near)}" if near else "")
        )
    new = _new_names(names, edits)
    _check_names(names, new, problems)
    if names == new or problems:
        return tree
    if not isinstance(tree, dict):
        problems.append(
            f"the top of this checkpoint is a {type(tree).__name__}; only a dict can be edited"
        )
        return tree
    rebuilding = Rebuilding(names, new, problems)
    made = rebuilding.rebuild(tree)
    top: dict[object, object] = made if isinstance(made, dict) else {}
    for name, value in rebuilding.hoisted.items():
        if name in top:
            problems.append(f"renaming gives two things the name {name!r}")
        top[name] = value
    return top


def _new_names(names: Sequence[str], edits: Edits) -> list[str | None]:
    new: list[str | None] = [*rename_names(edits.rename, names)] if edits.rename else [*names]
    if edits.keep:
        new = [
            name if kept else None
            for name, kept in zip(new, match_names(edits.keep, names), strict=True)
        ]
    if edits.drop:
        new = [
            None if dropped else name
            for name, dropped in zip(new, match_names(edits.drop, names), strict=True)
        ]
    return new


def _check_names(names: Sequence[str], new: Sequence[str | None], problems: list[str]) -> None:
    """Add a problem where two things would have one name that they had not before, or a name would be empty."""
    given = dict.fromkeys(
        now for name, now in zip(names, new, strict=True) if now != name and now is not None
    )
    taken = Counter(new) if len({*new}) < len(new) else {}
    problems += [
        f"renaming gives {taken[name]:,} things the name {name!r}"
        for name in given
        if taken and taken[name] > 1
    ]
    if "" in given:
        problems.append("renaming leaves nothing of a name")


GONE = object()


def _inside(value: object) -> Iterable[tuple[object, object]] | None:
    """The content of a container; none where there are nothing but leaves: they are taken as a whole."""
    inside = get_leaf_children(value)
    return (
        None if inside is None else inside if True in have_named_children(get_values(value)) else ()
    )


class Rebuilding:
    """Makes a tree again with some of its leaves elsewhere or nowhere; `names` are theirs in the order of `iterate_leaves`."""

    def __init__(
        self, names: Sequence[str], new: Sequence[str | None], problems: list[str]
    ) -> None:
        self._names, self._new, self._problems = names, new, problems
        self._at = 0
        """Leaves that came before."""
        self.hoisted: dict[str, object] = {}
        """Leaves whose new names begin with another container's, for the top of the tree."""

    def rebuild(self, tree: object) -> object:
        return rebuild(
            tree,
            lambda value, way: self._next(1)[0],
            get_children=_inside,
            make_container=self._made,
            max_values=MAX_LEAVES + 1,
        )

    def _next(self, count: int) -> range:
        self._at += count
        return range(self._at - count, self._at)

    def _made(
        self,
        value: dict[object, object] | list[object] | tuple[object, ...],
        children: list[object],
        way: LinkedPath,
    ) -> object:
        """A container with something in it, or `GONE`. In the places of its leaves, `children` has their numbers."""
        made = children or self._next(len(value))
        if isinstance(value, dict):
            return self._dict(value, made, way)
        inside = [
            self._leaf(*one)
            for one in zip(range(len(value)), value, have_named_children(value), made, strict=True)
        ]
        if all(made is GONE for _, made in inside):
            return GONE
        what = f"an element of a {type(value).__name__}"
        if any(made is GONE for _, made in inside):
            self._problems.append(
                f"{join_linked_path(way)}: {what} cannot be taken out without moving the others"
            )
        elif any(name != number for number, (name, _) in enumerate(inside)):
            self._problems.append(
                f"{join_linked_path(way)}: {what} has no name that could be changed"
            )
        return replace_children(value, [made for _, made in inside])

    def _dict(
        self, value: dict[object, object], children: Sequence[object], way: LinkedPath
    ) -> object:
        inside = get_values(value)
        items: dict[object, object] = {}
        for one in zip(value, inside, have_named_children(inside), children, strict=True):
            name, made = self._leaf(*one)
            if made is not GONE:
                if name in items:
                    self._problems.append(
                        f"renaming gives two things the name {join_path((*expand_path(way), str(name)))!r}"
                    )
                items[name] = made
        same = (
            len(items) == len(value)
            and all(map(is_, items, value))
            and all(map(is_, items.values(), inside))
        )
        return value if same else copy_dict_with_items(value, items) if items else GONE

    def _leaf(self, key: object, value: object, below: bool, made: object) -> tuple[object, object]:
        """The new key of a value, and what stands there now."""
        if below:
            return key, made
        old, new = self._names[typed(int, made)], self._new[typed(int, made)]
        if new == old:
            return key, value
        prefix = old.removesuffix(str(to_path_key(key)))
        if new is not None and new.startswith(prefix):
            return new[len(prefix) :], value
        if new is not None:
            self.hoisted[new] = value
        return key, GONE


def _cast_rows(
    state: State, edits: Edits, problems: list[str], losses: dict[DType, Losses]
) -> Table:
    """The rows of a state, cast as the first pattern says that matches their names."""
    table, casts = state.tensors, edits.casts
    floats = [kind.dtype.kind == "float" for kind in table.kinds]
    rows = [row for row, kind in enumerate(table.kind_indices) if floats[kind]]
    names = [table.names[row] for row in rows]
    chosen: list[int | None] = [0 if casts[0][0] == ALL else None] * len(rows)
    for number in range(len(casts)) if casts[0][0] != ALL else ():
        found = match_names([casts[number][0]], names)
        chosen = [
            number if known is None and own else known
            for known, own in zip(chosen, found, strict=True)
        ]
    _check_casts(casts, names, {*chosen}, problems)
    if len({*chosen}) > 1:
        wanted = {
            row: None if number is None else casts[number][1]
            for row, number in zip(rows, chosen, strict=True)
        }
        for row, first in find_ties(table).items():
            # Names of one tensor must agree in what it is to be.
            if row in wanted and wanted[row] is not wanted[first]:
                both = [
                    "is to stay as it is" if one is None else f"is to be {one}"
                    for one in (wanted[first], wanted[row])
                ]
                how = f"under one name it {', the other '.join(both)}"
                problems.append(
                    f"{table.names[first]} and {table.names[row]} are one tensor, and {how}"
                )
    # Quantised tensors stay as they are: their parts mean nothing in another dtype.
    whole = (
        []
        if edits.tensors_only
        else [one for one in state.leaves.composites() if one.kind == "quantized"]
    )
    parts = {id(part) for one in whole for part in one.parts.values()}
    stay = (
        {row for row, leaf in enumerate(state.leaves.values) if id(leaf) in parts}
        if parts
        else set()
    )
    new_dtypes: dict[int, DType] = {}
    for row, chosen_number in zip(rows, chosen, strict=True):
        is_cast = chosen_number is not None and row not in stay
        dtype = casts[chosen_number or 0][1] if is_cast else None
        if dtype is not None and dtype is not table.row_kind(row).dtype:
            new_dtypes[row] = dtype
    return cast_table(table, new_dtypes, losses) if new_dtypes else table


def cast_table(table: Table, new_dtypes: Mapping[int, DType], losses: dict[DType, Losses]) -> Table:
    """Cast rows of a table, each to its new dtype.

    All that is cast lies in computed storages afterwards (engine/computed). A storage whose rows are
    cast alike is cast as a row of elements, and its rows are the same views of the result. Any other
    row has a storage of its own.
    """
    casts: dict[tuple[DType, DType], int] = {}
    originals: list[LazyTensor] = []
    cast_numbers: list[int] = []
    kinds, kind, storage = [*table.kinds], [*table.kind_indices], [*table.storage_indices]
    offsets, irregular = dict(table.offsets), dict(table.irregular)
    storage_of: dict[tuple[Storage | ViewIdentity, DType], int] = {}
    kind_numbers: dict[RowKind, int] = {}

    # A million tensors are made twice rather than kept.
    beside = (
        (table.lazy_tensor(row), new_dtypes.get(row)) for row in _rows_beside(table, new_dtypes)
    )
    mixed = _find_mixed_storages(beside)
    for row, dtype in new_dtypes.items():
        tensor = table.lazy_tensor(row)
        traits = tensor.traits
        if traits.alias is not None:
            is_kept = mixed.isdisjoint(tensor.shared_storages)
            alias = _cast_alias(traits.alias, tensor.dtype, dtype) if is_kept else None
            traits = replace(traits, alias=alias)
        losses.setdefault(dtype, Losses())
        if traits.meta:
            irregular[row] = replace(tensor, dtype=dtype, traits=traits)
            new_kind = RowKind.from_tensor(irregular[row])
        else:
            key, original, (offset, *strides) = _origin(tensor, mixed)
            if original is tensor:
                # The flags for conjugated and negated elements are resolved by reading it.
                traits = replace(traits, conj=False, neg=False)
            if (key, dtype) not in storage_of:
                storage_of[key, dtype] = len(table.storages.nbytes) + len(originals)
                originals.append(original)
                cast_numbers.append(casts.setdefault((tensor.dtype, dtype), len(casts)))
            offset, nbytes = offset * dtype.bits, dtype.nbytes(original.size)
            new_kind = RowKind.from_strides(
                dtype,
                tensor.shape,
                tuple([stride * dtype.bits for stride in strides]),
                storage_nbytes=nbytes,
                traits=traits,
                is_inside=is_range_inside(offset, dtype.nbytes(tensor.size), nbytes),
            )
            storage[row] = storage_of[key, dtype]
            irregular.pop(row, None)
            offsets.pop(row, None)
            if offset:
                offsets[row] = offset
        if new_kind not in kind_numbers:
            kind_numbers[new_kind] = len(kinds)
            kinds.append(new_kind)
        kind[row] = kind_numbers[new_kind]

    elementwise = [_make_cast(*dtypes, losses) for dtypes in casts]
    storages = ComputedStorages(table.storages, elementwise, cast_numbers, originals)
    return Table(table.names, kinds, kind, storage, storages, irregular, offsets=offsets)


def _rows_beside(table: Table, rows: Iterable[int]) -> list[int]:
    """Return these rows, those of the same storages, and irregular rows, which may lie in these storages as well."""
    numbers = np.array(table.storage_indices, np.int64)
    is_touched = np.zeros(len(table.storages.nbytes) + 1, np.bool_)
    is_touched[numbers[[*rows]]] = True
    is_touched[IRREGULAR] = True  # the last one, which no storage has
    return np.flatnonzero(is_touched[numbers]).tolist()


def _find_mixed_storages(
    tensors: Iterable[tuple[LazyTensor, DType | None]],
) -> set[Storage]:
    """Return the storages whose tensors do not all have one dtype, and get one."""
    casts: dict[Storage, tuple[DType, DType | None]] = {}
    mixed: set[Storage] = set()
    known: dict[object, tuple[DType, DType | None]] = {}
    for tensor, dtype in tensors:
        # One tuple for all storages that are cast alike: there may be a million.
        cast = known.setdefault((tensor.dtype, dtype), (tensor.dtype, dtype))
        for storage in (*tensor.storages, *tensor.shared_storages):
            if casts.setdefault(storage, cast) is not cast:
                mixed.add(storage)
    return mixed


def _make_cast(
    origin: DType, dtype: DType, losses: Mapping[DType, Losses]
) -> ElementwiseComputation:
    """Return the cast of elements, which counts what is lost."""

    def observe(names: Sequence[str], starts: Ints, elements: np.ndarray, made: np.ndarray) -> None:
        lost = count_losses_by_part(elements, dtype, starts)
        losses[dtype].add(names, elements.size, lost)

    return ElementwiseComputation(origin, dtype, lambda elements: cast(elements, dtype), observe)


@lru_cache(1024)
def _flat_layout(count: int, bits: int) -> tuple[Box, tuple[int, ...]]:
    """Return the box and the strides of so many elements. A million tensors share them."""
    return Box((0,), (count,)), (bits,)


def _origin(
    tensor: LazyTensor, mixed: Collection[Storage]
) -> tuple[Storage | ViewIdentity, LazyTensor, tuple[int, ...]]:
    """The origin of a cast tensor: its storage as a row of elements, where all rows over that are cast alike; else the tensor.

    First comes a key of the origin, and last where the tensor lies in it: offset and strides, in elements.
    """
    dtype, chunks = tensor.dtype, tensor.chunks
    if len(chunks) == 1 and chunks[0].shape == tensor.shape:
        storage, places = chunks[0].storage, (chunks[0].offset, *chunks[0].strides)
        if (
            storage.nbytes
            and storage not in mixed
            and not any(place % dtype.bits for place in places)
        ):
            box, strides = _flat_layout(storage.nbytes * 8 // dtype.bits, dtype.bits)
            every = Chunk(box, storage, 0, strides)
            elements = LazyTensor(tensor.name, dtype, box.stop, (every,), tensor.source)
            return storage, elements, tuple([place // dtype.bits for place in places])
    return identify_view(tensor), tensor, (0, *c_strides(tensor.shape, 1))


def _cast_alias(view: AliasView, old: DType, new: DType) -> AliasView | None:
    """The alias of a tensor after a cast of its whole storage; None where it was no view of a row of elements."""
    if any(place % old.bits for place in (view.offset, *view.strides)):
        return None
    nbytes, offset, *strides = _scaled((view.nbytes * 8, view.offset, *view.strides), old, new)
    return AliasView(view.group, nbytes // 8, offset, tuple(strides))


def _scaled(places: tuple[int, ...], old: DType, new: DType) -> tuple[int, ...]:
    """Places counted in bits, scaled for elements of another width."""
    return tuple([place // old.bits * new.bits for place in places])


def _check_casts(
    casts: Casts, names: Sequence[str], deciding: set[int | None], problems: list[str]
) -> None:
    """Add a problem for each pattern that casts nothing, unless there is nothing to cast at all."""
    for number, (pattern, _) in enumerate(casts):
        if pattern == ALL and number == len(casts) - 1:
            continue
        if find_unmatched_patterns([pattern], names):
            near = difflib.get_close_matches(pattern, names[:10_000], n=2, cutoff=0.5)
            hint = f"; near: {', '.join(near)}" if near else ""
            problems.append(f"the dtype of {pattern!r}: it matches no floating-point tensor{hint}")
        elif number not in deciding:
            problems.append(
                f"the dtype of {pattern!r} decides nothing: patterns before it match all of its names"
            )
