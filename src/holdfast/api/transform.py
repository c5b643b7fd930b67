"""Keep, drop, rename and cast: what `convert` and `edit` do to a state before it is saved. Nothing is read.

Patterns are globs on dotted names (`model.layers.*.bias`). They apply to every leaf of the tree, tensors and plain values alike, so
that `keep=["model.*"]` leaves the model and nothing of the optimizer. A rename is a pair of globs with as many stars on both sides
(`model.*` → `*`): each star of the new name stands for what the star of the old one matched.
"""

from __future__ import annotations

import difflib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.core.composite import Composite
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import Path, dotted, name_tensors
from holdfast.engine.computed import Computed
from holdfast.errors import CannotHold, Unsupported

__all__ = ["Edits", "dtype_named", "transform"]

SHORT = {"f16": "float16", "half": "float16", "fp16": "float16", "bf16": "bfloat16", "f32": "float32", "fp32": "float32",
         "float": "float32", "f64": "float64", "double": "float64", "fp8": "float8_e4m3fn"}  # fmt: skip
"""How people abbreviate the dtypes that they cast to."""


@dataclass(frozen=True, slots=True)
class Edits:
    """What to change."""

    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    dtype: DType | None = None
    """Floating-point tensors are cast to this; integers, booleans and quantised ones stay as they are."""
    tensors_only: bool = False
    """Keep the tensors under their dotted names in a flat mapping and leave everything else out."""

    def __bool__(self) -> bool:
        return bool(self.keep or self.drop or self.rename or self.dtype or self.tensors_only)


def dtype_named(name: str) -> DType:
    """A floating-point dtype by its name or a usual abbreviation."""
    found = DTYPES.name(SHORT.get(name, name))
    if found is None or found.kind != "float" or found.packed:
        known = [row.name for row in DTYPES.rows if row.kind == "float" and not row.packed]
        near = difflib.get_close_matches(name, [*known, *SHORT], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise Unsupported(f"cannot cast to {name!r}; {hint}", found=name)
    return found


def transform(state: State, edits: Edits, limits: Limits | None = None) -> State:
    """The state with the edits applied. Raises `CannotHold` with every problem when they do not fit it."""
    if not edits:
        return state
    problems: list[str] = []
    tree: object = dict(state.tensors) if edits.tensors_only else state.tree
    if edits.keep or edits.drop or edits.rename:
        tree = _reshape(tree, edits, problems)
    if edits.dtype is not None:
        tree = _map_tensors(tree, _cast(edits.dtype))
    if problems:
        raise CannotHold("these edits do not fit the checkpoint", problems)
    named = name_tensors(tree, limits or Limits(), 1 << 40)
    return State(tree, named.tensors, named.paths, state.metadata)


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    compiled = [_regex(p) for p in patterns]
    return lambda name: any(r.fullmatch(name) for r in compiled)


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)


def _reshape(tree: object, edits: Edits, problems: list[str]) -> object:
    """Drop and rename leaves. Containers that end up empty because of it go as well."""
    leaves = [(path, dotted(path)) for path in _leaf_paths(tree, ())]
    names = [name for _, name in leaves]
    for pattern in (*edits.keep, *edits.drop, *(old for old, _ in edits.rename)):
        if not any(_regex(pattern).fullmatch(name) for name in names):
            near = difflib.get_close_matches(pattern, names[:10_000], n=2, cutoff=0.5)
            problems.append(f"{pattern!r} matches nothing" + (f"; near: {', '.join(near)}" if near else ""))
    kept, dropped = _matcher(edits.keep), _matcher(edits.drop)
    moves: dict[Path, str | None] = {}
    for path, name in leaves:
        if (edits.keep and not kept(name)) or dropped(name):
            moves[path] = None
        else:
            new = _renamed(name, edits.rename, problems)
            if new != name:
                moves[path] = new
    if not moves or problems:
        return tree
    if not isinstance(tree, dict):
        problems.append(f"the top of this checkpoint is a {type(tree).__name__}; only a dict can be edited")
        return tree
    hoisted: dict[str, object] = {}
    made = _rebuild(tree, (), moves, hoisted, problems)
    if not isinstance(made, dict):
        made = {}
    staying = set(names) - {dotted(p) for p in moves}
    for name, value in hoisted.items():
        if name in made or name in staying:
            problems.append(f"renaming gives two things the name {name!r}")
        made[name] = value
    return made


def _renamed(name: str, rename: Sequence[tuple[str, str]], problems: list[str]) -> str:
    for old, new in rename:
        if old.count("*") != new.count("*"):
            problems.append(f"the rename {old!r} → {new!r} needs as many * on both sides")
            return name
        found = _regex(old).fullmatch(name)
        if found:
            pieces = new.split("*")
            return pieces[0] + "".join(g + p for g, p in zip(found.groups(), pieces[1:], strict=True))
    return name


GONE = object()


def _rebuild(
    value: object, path: Path, moves: Mapping[Path, str | None], hoisted: dict[str, object], problems: list[str]
) -> object:
    if path in moves:
        new = moves[path]
        if new is None:
            return GONE
        parent = dotted(path[:-1])
        if not parent or not new.startswith(parent + "."):
            hoisted[new] = value
            return GONE
        return value
    if isinstance(value, dict):
        items: dict[object, object] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, inner in value.items():
            at = (*path, key if isinstance(key, str | int) else str(key))
            made = _rebuild(inner, at, moves, hoisted, problems)
            if made is GONE:
                continue
            target = moves.get(at)
            name: object = target[len(dotted(path)) + 1 :] if target is not None and path else target if target is not None else key
            if name in items:
                problems.append(f"renaming gives two things the name {dotted((*path, str(name)))!r}")
            items[name] = made
        if isinstance(value, OrderedDict) and isinstance(items, OrderedDict):
            vars(items).update(vars(value))
        return items if items or not value else GONE
    if isinstance(value, list | tuple):
        inside = [_rebuild(v, (*path, i), moves, hoisted, problems) for i, v in enumerate(value)]
        if any(v is GONE for v in inside):
            if all(v is GONE for v in inside):
                return GONE
            problems.append(f"{dotted(path)}: an element of a {type(value).__name__} cannot be taken out without moving the others")
        return inside if isinstance(value, list) else tuple(inside)
    return value


def _leaf_paths(value: object, path: Path) -> Iterable[Path]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaf_paths(inner, (*path, key if isinstance(key, str | int) else str(key)))
    elif isinstance(value, list | tuple) and value:
        for i, inner in enumerate(value):
            yield from _leaf_paths(inner, (*path, i))
    else:
        yield path


def _cast(dtype: DType) -> Callable[[LazyTensor], LazyTensor]:
    computed = Computed()

    def cast(tensor: LazyTensor) -> LazyTensor:
        if tensor.dtype.kind != "float" or tensor.dtype is dtype:
            return tensor
        if tensor.traits.meta:
            return replace(tensor, dtype=dtype)
        return computed.tensor(tensor, dtype, lambda array: _converted(array, dtype))

    return cast


def _converted(array: np.ndarray, dtype: DType) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype.numpy)


def _map_tensors(value: object, change: Callable[[LazyTensor], LazyTensor]) -> object:
    """The same tree with every tensor changed. Tied tensors stay one: a tensor that was changed before is looked up."""
    memo: dict[object, LazyTensor] = {}

    def once(tensor: LazyTensor) -> LazyTensor:
        key = (id(tensor.source), tensor.dtype.name, tensor.chunks)
        if key not in memo:
            memo[key] = change(tensor)
        return memo[key]

    def walk(inner: object) -> object:
        if isinstance(inner, LazyTensor):
            return once(inner)
        if isinstance(inner, Composite):
            return inner if inner.kind == "quantized" else replace(inner, parts={n: once(p) for n, p in inner.parts.items()})
        if isinstance(inner, OrderedDict):
            made: OrderedDict[object, object] = OrderedDict((k, walk(v)) for k, v in inner.items())
            vars(made).update(vars(inner))
            return made
        if isinstance(inner, dict):
            return {k: walk(v) for k, v in inner.items()}
        if isinstance(inner, list | tuple) and type(inner) in (list, tuple):
            return type(inner)(walk(v) for v in inner)
        return inner

    return walk(value)
