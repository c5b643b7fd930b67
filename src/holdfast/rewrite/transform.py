"""Keep, drop, rename, dequantize and cast: what `convert` and `edit` do to a state before it is saved. Nothing is read.

Patterns are globs on dotted names (`core/patterns.py`). They apply to every leaf of the tree, tensors and plain values alike, so
that `keep=["model.*"]` leaves the model and nothing of the optimizer. A rename is a pair of globs with as many stars on both sides
(`model.*` → `*`): each star of the new name stands for what the star of the old one matched.

What shares a storage still does after a cast. Where all tensors over one storage are of one dtype, the storage is cast as a row of
elements, and each tensor becomes the same view of the new one: tied weights stay tied, slices stay slices. The same holds for
views that a file only remembers (`Traits.alias`). Where a storage has several dtypes, or is to have them, each tensor is cast by
itself.

Several dtypes go by patterns, too (`norm*` → float32, all else → bfloat16): the first that matches the name which a tensor had in
the source decides. Names of one and the same tensor must agree.
"""

from __future__ import annotations

import difflib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from holdfast.core.arguments import AnyDType
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES, SHORT, DType
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.order import natural
from holdfast.core.patterns import matcher, rename_problems, renamer, unmatched
from holdfast.core.protocols import Source, State
from holdfast.core.sharing import View, identity
from holdfast.core.tensor import AliasView, Composite, LazyTensor
from holdfast.core.tree import Path, dotted, leaf_paths, name_tensors, refilled, step, values_inside
from holdfast.core.value import Value, replace
from holdfast.engine.casting import OUTCOMES, cast, count_losses, largest
from holdfast.engine.computed import Computed, Observe
from holdfast.engine.dequantize import Dequantized, dequantize
from holdfast.errors import CannotHold, Unsupported
from holdfast.inspect.brief import root_global
from holdfast.rewrite.state import MOST_VISITS, map_tensors

SHOWN = 3
"""Tensors that a note names."""

SHOWN_CHARACTERS = 80
"""Of a name in a note."""


class Losses:
    """What casts did to elements that they could not keep: counted while they are computed, said when they are done.

    Each element counts once, however often it is read. Elements between those of a view that is read with its gaps count as well.
    """

    def __init__(self) -> None:
        self.elements = 0
        """How many were cast."""
        self.counts: dict[str, dict[str, int]] = {outcome: {} for outcome in OUTCOMES}
        """By outcome and tensor."""
        self._lock = threading.Lock()

    def add(self, name: str, elements: int, lost: Mapping[str, int]) -> None:
        with self._lock:
            self.elements += elements
            for outcome, count in lost.items():
                own = self.counts[outcome]
                own[name] = own.get(name, 0) + count

    def notes(self, dtype: DType) -> tuple[str, ...]:
        """A sentence for each way in which elements were lost."""
        return tuple(self._note(outcome, own, dtype) for outcome, own in self.counts.items() if own)

    def _note(self, outcome: str, own: Mapping[str, int], dtype: DType) -> str:
        most = f"±{largest(dtype):g}"
        said = {
            "saturated": f"beyond {most} became that",
            "infinite": f"beyond {most} became infinite",
            "nan": f"beyond {most} became NaN, for there is no infinity",
            "zero": "too small became zero",
            "smallest": "of zero, or too small, became 2^-127, the smallest number",
            "unsigned": "below zero lost their sign",
        }[outcome]
        worst = sorted(own, key=lambda name: (-own[name], natural(name)))
        names = ", ".join(f"{name!r} ({own[name]:,})" for name in worst[:SHOWN])
        more = f" and {len(worst) - SHOWN:,} more tensors" if len(worst) > SHOWN else ""
        total = sum(own.values())
        return f"cast to {dtype}: {total:,} of {self.elements:,} values {said}: {names}{more}"


Casts = tuple[tuple[str, DType | None], ...]
"""Patterns of names and the dtype that floating-point tensors of these names are cast to, None to leave them; the first decides."""

Kinds = dict[Storage, set[tuple[DType, DType | None]]]
"""What the tensors over each storage are, and what they shall be."""


class Cast:
    """Call it with a tensor to have it cast; integers, booleans and quantised ones come back as they are. Nothing is read.

    `kinds` is about all tensors of the state. A storage of one kind is cast as a whole, so that its views stay views.
    """

    def __init__(self, dtype: DType, kinds: Kinds, *, losses: Losses) -> None:
        self._dtype = dtype
        self._losses = losses
        self._kinds = kinds
        self._computed: dict[Source, Computed] = {}
        self._storages: dict[Storage | View, LazyTensor] = {}
        self._made: dict[int, tuple[LazyTensor, LazyTensor]] = {}

    def __call__(self, tensor: LazyTensor) -> LazyTensor:
        if tensor.dtype.kind != "float" or tensor.dtype is self._dtype:
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, self._cast(tensor))
        return self._made[id(tensor)][1]

    def _cast(self, tensor: LazyTensor) -> LazyTensor:
        tensor = replace(tensor, traits=replace(tensor.traits, alias=self._alias(tensor)))
        if tensor.traits.meta:
            return replace(tensor, dtype=self._dtype)
        computed = self._computed.setdefault(tensor.source, Computed())
        if len(tensor.chunks) == 1:
            (chunk,) = tensor.chunks
            moved = self._scaled(tensor.dtype, (chunk.offset, *chunk.strides))
            uniform = len(self._kinds.get(chunk.storage, ())) < 2
            if moved is not None and uniform and chunk.storage.nbytes:
                flat = self._storage(tensor, chunk.storage, computed)
                view = Chunk(chunk.box, flat.chunks[0].storage, moved[0], moved[1:])
                return replace(tensor, dtype=self._dtype, chunks=(view,), source=flat.source)
        return self._once(identity(tensor), tensor, computed)

    def _storage(self, tensor: LazyTensor, storage: Storage, computed: Computed) -> LazyTensor:
        """A whole storage as a row of elements, cast."""
        count = storage.nbytes * 8 // tensor.dtype.bits
        row = Chunk(Box((0,), (count,)), storage, 0, (tensor.dtype.bits,))
        flat = LazyTensor(tensor.name, tensor.dtype, (count,), (row,), tensor.source)
        return self._once(storage, flat, computed)

    def _once(self, key: Storage | View, tensor: LazyTensor, computed: Computed) -> LazyTensor:
        if key not in self._storages:
            self._storages[key] = computed.tensor(tensor, self._dtype, self._compute, observe=self._observer(tensor.name))
        return replace(self._storages[key], name=tensor.name, traits=replace(tensor.traits, conj=False, neg=False))

    def _compute(self, array: np.ndarray) -> np.ndarray:
        return cast(array, self._dtype)

    def _observer(self, name: str) -> Observe:
        def observe(array: np.ndarray, made: np.ndarray) -> None:
            self._losses.add(name, array.size, count_losses(array, made, self._dtype))

        return observe

    def _alias(self, tensor: LazyTensor) -> AliasView | None:
        """Where the tensor lay in a storage of old, had that been cast."""
        view = tensor.traits.alias
        if view is None or any(len(self._kinds.get(storage, ())) > 1 for storage in tensor.shared_storages):
            return None
        moved = self._scaled(tensor.dtype, (view.nbytes * 8, view.offset, *view.strides))
        return None if moved is None else AliasView(view.group, moved[0] // 8, moved[1], moved[2:])

    def _scaled(self, dtype: DType, places: tuple[int, ...]) -> tuple[int, ...] | None:
        """Places counted in bits, for elements of the new width; None where they are no places of elements."""
        if any(place % dtype.bits for place in places[1:]):
            return None
        return tuple(place // dtype.bits * self._dtype.bits for place in places)


class Edits(Value, frozen=True):
    """What to change."""

    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    casts: Casts = ()
    """What floating-point tensors are cast to; integers, booleans and quantised ones stay as they are."""
    tensors_only: bool = False
    """Keep the tensors under their dotted names in a flat mapping and leave everything else out."""
    dequantize: bool = False
    """Write what quantised blocks stand for; casts come after it."""

    def __bool__(self) -> bool:
        return bool(self.keep or self.drop or self.rename or self.casts or self.tensors_only or self.dequantize)


def dtype_named(name: AnyDType) -> DType:
    """A floating-point dtype, by its name or a usual abbreviation."""
    found = DTYPES.said(name) if isinstance(name, str) else DTYPES.given(name)
    if found is None or found.kind != "float" or found.packed:
        known = [row.name for row in DTYPES.rows if row.kind == "float" and not row.packed]
        near = difflib.get_close_matches(str(name), [*known, *SHORT], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise Unsupported(f"cannot cast to {str(name)!r}; {hint}", found=name)
    return found


KEEP = "keep"
"""In the place of a dtype: that of the source."""

ALL = "*"
"""The pattern of a dtype that is given without one."""


def casts_of(dtype: AnyDType | Mapping[str, AnyDType] | None) -> Casts:
    """What a caller wants cast: all, by one dtype, or by patterns; "keep" leaves what it has.

    >>> [(pattern, str(to)) for pattern, to in casts_of({"norm*": "f32", "*": "bf16"})]
    [('norm*', 'float32'), ('*', 'bfloat16')]
    """
    if dtype is None or dtype == "":
        return ()
    wanted = dtype if isinstance(dtype, Mapping) else {ALL: dtype}
    return tuple((pattern, None if name == KEEP else dtype_named(name)) for pattern, name in wanted.items())


def transform(state: State, edits: Edits, limits: Limits | None = None, *, losses: dict[DType, Losses] | None = None) -> State:
    """The state with the edits applied. Raises `CannotHold` with every problem when they do not fit it.

    What casts lose is added to `losses`, by dtype, while the tensors are read.
    """
    if not edits:
        return state
    problems: list[str] = []
    if edits.dequantize:
        state = _dequantized(state, limits)
    tree: object = dict(state.tensors) if edits.tensors_only else state.tree
    if edits.keep or edits.drop or edits.rename:
        tree = _reshape(tree, edits, problems)
    cast = _casting(state, edits.casts, problems, {} if losses is None else losses) if edits.casts else None
    if problems:
        raise CannotHold("these edits do not fit the checkpoint", problems)
    if cast is not None:
        # Quantised tensors stay as they are: their parts mean nothing in another dtype.
        tree = map_tensors(tree, cast, skip=lambda whole: whole.kind == "quantized")
    named = name_tensors(tree, limits or Limits(), MOST_VISITS, held=True)
    if edits.dequantize:
        _refuse_blocks(named.tensors)
    return State(tree, named.tensors, named.paths, state.metadata)


def left_out(tree: object, edits: Edits) -> list[str]:
    """What `tensors_only` leaves out of a tree, in sentences: values, objects, what tensors in parts are together.

    What `keep` and `drop` leave out was asked for by its name, and is not told again.
    """
    if not edits.tensors_only:
        return []
    kept, dropped = _matcher(edits.keep), _matcher(edits.drop)
    values: list[str] = []
    objects: list[str] = []
    parts: list[str] = []
    for path, value in leaf_paths(tree, once=True):
        name = dotted(path)
        # Of an object its tensors are named, and not itself.
        below = name if not isinstance(value, Opaque) else f"{name}."
        if isinstance(value, LazyTensor) or not path or (edits.keep and not kept(name) and not kept(below)) or dropped(name):
            continue
        if isinstance(value, Composite):
            parts.append(f"{name[:SHOWN_CHARACTERS]!r} ({value.kind})")
        elif isinstance(value, Opaque | Global):
            what = value if isinstance(value, Global) else root_global(value)
            objects.append(f"{name[:SHOWN_CHARACTERS]!r} ({str(what)[:SHOWN_CHARACTERS]})")
        else:
            values.append(repr(name[:SHOWN_CHARACTERS]))
    versions = any(isinstance(value, OrderedDict) and vars(value) for value in values_inside(tree))
    notes = [f"only tensors are kept; left out: {_counted(values, 'value')}"] if values else []
    notes += [f"only tensors are kept; left out: {_counted(objects, 'foreign object')}"] if objects else []
    notes += [f"only tensors are kept; taken apart: {_counted(parts, 'tensor')}"] if parts else []
    notes += ["only tensors are kept; left out: what state dicts note of their modules (_metadata)"] if versions else []
    return notes


def _counted(names: Sequence[str], what: str) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"{len(names):,} {what}{'s' if len(names) > 1 else ''}: {', '.join(names[:SHOWN])}{more}"


def _dequantized(state: State, limits: Limits | None) -> State:
    """The state with the numbers that quantised blocks stand for. Blocks that nobody can decode stay: they may be dropped yet."""
    decoded, made = Dequantized(), dict[View, LazyTensor]()

    def change(tensor: LazyTensor) -> LazyTensor:
        if tensor.traits.blocks is None:
            return tensor
        key = identity(tensor)
        if key not in made:
            try:
                made[key] = decoded.tensor(tensor)
            except Unsupported:
                return tensor
        return replace(made[key], name=tensor.name)

    tree = map_tensors(state.tree, change)
    named = name_tensors(tree, limits or Limits(), MOST_VISITS, held=True)
    return State(tree, named.tensors, named.paths, state.metadata)


def _refuse_blocks(tensors: Mapping[str, LazyTensor]) -> None:
    """Raise for what was to be decoded and was not."""
    problems = []
    for name, tensor in tensors.items():
        try:
            dequantize(tensor)
        except Unsupported as error:
            problems.append(f"{name}: {error.message}")
    if problems:
        raise CannotHold("not all of this checkpoint can be dequantized; drop what cannot, or leave it as it is", problems)


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    meant = [matcher(pattern) for pattern in patterns]
    return lambda name: any(means(name) for means in meant)


def _reshape(tree: object, edits: Edits, problems: list[str]) -> object:
    """Drop and rename leaves. Containers that end up empty because of it go as well; those without a change stay themselves."""
    problems += rename_problems(edits.rename)
    if problems:
        return tree
    leaves = [(path, dotted(path)) for path, _ in leaf_paths(tree)]
    _check_patterns(edits, [name for _, name in leaves], problems)
    moves = _moves(leaves, edits)
    _check_names(leaves, moves, problems)
    if not moves or problems:
        return tree
    if not isinstance(tree, dict):
        problems.append(f"the top of this checkpoint is a {type(tree).__name__}; only a dict can be edited")
        return tree
    rebuilding = Rebuilding(moves, problems)
    made = rebuilding.rebuild(tree, ())
    top: dict[object, object] = made if isinstance(made, dict) else {}
    for name, value in rebuilding.hoisted.items():
        if name in top:
            problems.append(f"renaming gives two things the name {name!r}")
        top[name] = value
    return top


def _check_patterns(edits: Edits, names: Sequence[str], problems: list[str]) -> None:
    """A pattern that matches nothing is a mistake."""
    for pattern in unmatched((*edits.keep, *edits.drop, *(old for old, _ in edits.rename)), names):
        near = difflib.get_close_matches(pattern, names[:10_000], n=2, cutoff=0.5)
        problems.append(f"{pattern!r} matches nothing" + (f"; near: {', '.join(near)}" if near else ""))


def _moves(leaves: Iterable[tuple[Path, str]], edits: Edits) -> dict[Path, str | None]:
    """The leaves that change: their new names, or None where they go."""
    kept, dropped = _matcher(edits.keep), _matcher(edits.drop)
    rename = renamer(edits.rename)
    moves: dict[Path, str | None] = {}
    for path, name in leaves:
        if (edits.keep and not kept(name)) or dropped(name):
            moves[path] = None
            continue
        new = rename(name)
        if new != name:
            moves[path] = new
    return moves


def _check_names(leaves: Iterable[tuple[Path, str]], moves: Mapping[Path, str | None], problems: list[str]) -> None:
    """No two things may have one name, unless they had it before. No name may be empty."""
    taken: dict[str, int] = {}
    for path, name in leaves:
        now = moves.get(path, name)
        if now is not None:
            taken[now] = taken.get(now, 0) + 1
    given = dict.fromkeys(new for new in moves.values() if new is not None)
    problems += [f"renaming gives {taken[new]:,} things the name {new!r}" for new in given if taken[new] > 1]
    if "" in given:
        problems.append("renaming leaves nothing of a name")


GONE = object()


class Rebuilding:
    """Makes a tree again with some of its leaves elsewhere or nowhere."""

    def __init__(self, moves: Mapping[Path, str | None], problems: list[str]) -> None:
        self._moves = moves
        self._touched = {path[:n] for path in moves for n in range(len(path))}
        self._problems = problems
        self.hoisted: dict[str, object] = {}
        """Leaves whose new names begin with another container's, for the top of the tree."""

    def rebuild(self, value: object, path: Path) -> object:
        """The value in its place, or `GONE`."""
        if path in self._moves:
            new, parent = self._moves[path], dotted(path[:-1])
            if new is None:
                return GONE
            if path[:-1] and not new.startswith(parent + "."):
                self.hoisted[new] = value
                return GONE
            return value
        if path not in self._touched:
            return value
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, list | tuple):
            return self._row(value, path)
        return value

    def _dict(self, value: dict[object, object], path: Path) -> object:
        items: dict[object, object] = {}
        for key, inner in value.items():
            at = (*path, step(key))
            made = self.rebuild(inner, at)
            if made is GONE:
                continue
            new = self._moves.get(at)
            name = key if new is None else new[len(dotted(path)) + 1 :] if path else new
            if name in items:
                self._problems.append(f"renaming gives two things the name {dotted((*path, str(name)))!r}")
            items[name] = made
        if not items:
            return GONE
        return refilled(value, items)

    def _row(self, value: list[object] | tuple[object, ...], path: Path) -> object:
        inside = [self.rebuild(v, (*path, i)) for i, v in enumerate(value)]
        if all(v is GONE for v in inside):
            return GONE
        if any(v is GONE for v in inside):
            what = type(value).__name__
            self._problems.append(f"{dotted(path)}: an element of a {what} cannot be taken out without moving the others")
        elif any((*path, i) in self._moves for i in range(len(value))):
            self._problems.append(f"{dotted(path)}: an element of a {type(value).__name__} has no name that could be changed")
        return inside if isinstance(value, list) else tuple(inside)


def _casting(state: State, casts: Casts, problems: list[str], losses: dict[DType, Losses]) -> Callable[[LazyTensor], LazyTensor]:
    """What casts each tensor as the first pattern that matches one of its names says."""
    patterns = [matcher(pattern) for pattern, _ in casts]

    def first(name: str) -> int | None:
        return next((i for i, means in enumerate(patterns) if means(name)), None)

    floats = {name: tensor for name, tensor in state.tensors.items() if tensor.dtype.kind == "float"}
    chosen = dict.fromkeys(floats, 0) if casts[0][0] == ALL else {name: first(name) for name in floats}
    _check_casts(casts, list(floats), set(chosen.values()), problems)
    wanted: dict[View, tuple[str, DType | None]] = {}
    kinds: Kinds = {}
    for name, tensor in state.tensors.items():
        number = chosen.get(name)
        dtype = None if number is None else casts[number][1]
        for storage in (*tensor.storages, *tensor.shared_storages):
            kinds.setdefault(storage, set()).add((tensor.dtype, dtype))
        if number is None and name not in floats:
            continue
        other, before = wanted.setdefault(identity(tensor), (name, dtype))
        if before is not dtype and tensor.chunks:
            wants = ", the other ".join("is to stay as it is" if one is None else f"is to be {one}" for one in (before, dtype))
            problems.append(f"{other} and {name} are one tensor, and under one name it {wants}")
    made: dict[DType, Cast] = {}

    def cast(tensor: LazyTensor) -> LazyTensor:
        number = first(tensor.name) if not tensor.chunks else None
        known = wanted.get(identity(tensor))
        dtype = casts[number][1] if number is not None else known[1] if known is not None else None
        if dtype is None:
            return tensor
        if dtype not in made:
            made[dtype] = Cast(dtype, kinds, losses=losses.setdefault(dtype, Losses()))
        return made[dtype](tensor)

    return cast


def _check_casts(casts: Casts, names: Sequence[str], deciding: set[int | None], problems: list[str]) -> None:
    """A pattern that casts nothing is a mistake; that there is nothing to cast at all is none."""
    for number, (pattern, _) in enumerate(casts):
        if pattern == ALL and number == len(casts) - 1:
            continue
        if unmatched([pattern], names):
            near = difflib.get_close_matches(pattern, names[:10_000], n=2, cutoff=0.5)
            hint = f"; near: {', '.join(near)}" if near else ""
            problems.append(f"the dtype of {pattern!r}: it matches no floating-point tensor{hint}")
        elif number not in deciding:
            problems.append(f"the dtype of {pattern!r} decides nothing: patterns before it match all of its names")
