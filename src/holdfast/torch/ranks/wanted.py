"""What one rank wants of a checkpoint: every leaf of its state, what the checkpoint has for it, and what does not fit.

1. The state is walked. The state dict of an object (`saving/state`) is filled like any other and handed to the object in the end.
2. Leaves are matched with the checkpoint as `load_into` matches the places of a module (`modules/match`).
3. A name that the checkpoint has once for each rank stands for this rank's (`ranks/per_rank`).
4. Shapes and dtypes are always compared. Which names no rank wants is known when all ranks have sent theirs.

An optimizer makes its moments with its first step. For one that was just made, tensors are made here as the checkpoint has them
(`make_state`): like their parameter where they have its shape, sharded as it is; else plain, and scalars on the CPU, from where
`load_state_dict` takes them to where the optimizer wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Literal, cast

import numpy as np
import torch
from msgspec import field
from torch import nn

from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.dtype import DTYPES
from holdfast.core.table import RowKind
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import (
    LinkedPath,
    Path,
    Unrolled,
    find_name_ends,
    get_children,
    get_mapping_children,
    iterate_values,
    join_path,
    make_plain_container,
    rebuild,
    replace_children,
    unroll,
)
from holdfast.core.value import Value
from holdfast.engine.arrays import MemoryTensors
from holdfast.formats.dcp.lazy import Unread
from holdfast.ranks.per_rank import marked, rank_key, size_in
from holdfast.torch.modules.match import (
    Names,
    Outcome,
    PlaceKind,
    match_places,
    meet_places,
    plain_problem,
    short,
)
from holdfast.torch.modules.wrappers import plainly_named
from holdfast.torch.ranks.replicas import PieceKey
from holdfast.torch.ranks.shards import PLAIN, Shards, is_sharded, shards_of
from holdfast.torch.tensors.fill import NO_FILLS, Fills, is_dense
from holdfast.torch.tensors.from_lazy import tensor_from_array, torch_dtype
from holdfast.torch.tensors.to_lazy import memory_of
from holdfast.torch.tensors.tree import ABSENT, find_value, torch_tree, unbuilt
from holdfast.verbs.shared.state import Stateful, is_stateful, list_stateful_keys

PerRank = Literal["own", "keep"]

Put = Callable[[object], None]


class Leaf(Value, frozen=True):
    """A tensor or a value in the state, and a way to replace it."""

    path: Path
    name: str
    tensor: torch.Tensor
    """The leaf, if it is a tensor; `value` is the same object for all leaves."""
    put: Put | None = None
    shards: Shards | None = None
    """The parts that this rank has of a sharded tensor."""

    @property
    def value(self) -> object:
        return self.tensor


class Wanted(Outcome):
    """The outcome of matching, and what is read to where."""

    fills: Fills = NO_FILLS
    keys: list[PieceKey] = field(default_factory=list)
    """What each fill is to other ranks, where there are some."""
    names: list[str] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    put: list[tuple[Put, object]] = field(default_factory=list)
    """Values of the state that are replaced."""
    tuples: list[tuple[Put, tuple[object, ...], list[object]]] = field(default_factory=list)
    """Tuples that are made again where something in them was replaced, the innermost first: before, and their items now."""
    stateful: list[tuple[Path, Stateful, object]] = field(default_factory=list)
    """Objects that are handed their state dict, when it is filled."""
    looked_for: list[str] = field(default_factory=list)

    def finish(self) -> None:
        """Put values in their places and hand state dicts over, the innermost first and then in an order that all ranks share."""
        for put, value in self.put:
            put(value)
        for put, old, items in self.tuples:
            put(replace_children(old, items))
        for _, target, state in sorted(
            self.stateful, key=lambda found: (-len(found[0]), join_path(found[0]))
        ):
            target.load_state_dict(state)


class Matching:
    """One rank's state against a checkpoint. Reads data only where tied tensors are offered two."""

    def __init__(
        self, names: Names, *, rank: int, size: int, cast: bool, strict: bool, per_rank: PerRank
    ) -> None:
        self._names = names
        self._rank, self._size = rank, size
        self._cast, self._strict, self._per_rank = cast, strict, per_rank
        self._others: dict[str, list[tuple[int, str]]] | None = None
        self._wanted = Wanted()
        self._held: dict[int, tuple[object, bool]] = {}
        """By identity: containers, and whether there are tensors in them."""
        self._request: set[int] = set()
        self._around: set[int] = set()
        """Objects with a state, and containers, around the value at work."""

    def run(self, state: object) -> Wanted:
        """Look for everything in the state, and take its names."""
        wanted, names, tensors = self._wanted, self._names, list[Leaf]()
        unroll(self._walk(state, (), found=(leaves := list[Leaf]())))
        wanted.looked_for += [leaf.name for leaf in leaves]
        for leaf in leaves:
            if leaf.shards is not None or isinstance(leaf.tensor, torch.Tensor):
                tensors.append(leaf)
            else:
                self._value(leaf)
        matches = match_places(tensors, names, self, wanted, strict=self._strict)
        wanted.fills, met = meet_places(names, matches, self)
        if self._size > 1:
            cut = {
                pair: [box for box, _ in self.parts(one.places[0])]
                for pair, one in enumerate(matches)
                if not one.exact
            }
            boxes = [
                cut[pair][number] if pair in cut else None
                for pair, number in zip(met.pair_indices, met.box_indices, strict=True)
            ]
            shapes = [tuple(target.shape) for target in wanted.fills.targets]
            corners = [
                ((0,) * len(s), s) if box is None else (box.start, box.stop)
                for box, s in zip(boxes, shapes, strict=True)
            ]
            wanted.keys = [
                (names.prefix + matches[pair].name, *ends)
                for pair, ends in zip(met.pair_indices, corners, strict=True)
            ]
        wanted.names += [leaf.name for one in matches for leaf in one.places]
        order = {name: number for number, name in enumerate(wanted.looked_for)}
        wanted.names.sort(key=order.__getitem__)
        wanted.missing.sort(key=order.__getitem__)
        return wanted

    # The state: every leaf. Lists and tuples without tensors are leaves; an array is a tensor over its memory.

    def _enter(self, value: Stateful, at: Path, *, found: list[Leaf]) -> Unrolled[None]:
        under = join_path((*at, ""))
        named = plainly_named(
            value, ask=_state_dict, there=lambda name: under + name in self._names
        )
        inner = _state_dict(named)
        if isinstance(value, torch.optim.Optimizer):
            make_state(value, inner, self._names.checkpoint, under=self._names.prefix + under)
        self._wanted.stateful.append((at, named, inner))
        return self._walk(inner, at, found=found)

    def _walk(
        self, inner: object, at: Path, *, found: list[Leaf], put: Put | None = None
    ) -> Unrolled[None]:
        if is_stateful(inner) and id(inner) not in self._request:
            self._request.add(id(inner))
            yield self._enter(cast(Stateful, inner), at, found=found)
            self._request.remove(id(inner))
        elif id(inner) in self._around:
            raise ValueError(f"{join_path(at)} contains itself")
        elif isinstance(inner, Mapping):
            self._around.add(id(inner))
            others = {key: item for key, item in inner.items() if type(item) not in PLAIN}
            steps: dict[object, str | int] = {}
            for key in inner:
                is_name = isinstance(key, str | int) and not isinstance(key, bool)
                steps[key] = key if is_name else repr(key)[:64]
            objects = dict.fromkeys(list_stateful_keys(others))
            for key in objects:
                yield self._walk(inner[key], (*at, steps[key]), found=found)
            under = join_path((*at, "")) if len(others) < len(inner) else ""
            for key, item in inner.items():
                if key not in others:
                    step = steps[key]
                    name = f"{under}{step}"
                    parts = shards_of(item, name) if is_sharded(item) else None
                    found.append(Leaf((*at, step), name, item, None, parts))
                elif key not in objects:
                    setter = _setter(inner, key) if hasattr(inner, "__setitem__") else None
                    yield self._walk(item, (*at, steps[key]), found=found, put=setter)
            self._around.remove(id(inner))
        elif isinstance(inner, list | tuple) and self._has_tensors(inner):
            self._around.add(id(inner))
            items = inner if isinstance(inner, list) else list(inner)
            for i, item in enumerate(inner):
                yield self._walk(item, (*at, i), found=found, put=_setter(items, i))
            if type(inner) is tuple and put is not None:
                self._wanted.tuples.append((put, inner, items))
            self._around.remove(id(inner))
        elif isinstance(inner, np.ndarray) and (tensor := _over(inner)) is not None:
            found.append(Leaf(at, join_path(at), tensor, put))
        else:
            parts = shards_of(inner, join_path(at)) if is_sharded(inner) else None
            found.append(Leaf(at, join_path(at), cast(torch.Tensor, inner), put, parts))

    def _has_tensors(self, value: object) -> bool:
        """Whether a list or tuple holds a tensor, an array or an object with a state. Each container is looked at once."""
        tensors = (np.ndarray, torch.Tensor, LazyTensor, Composite)

        def made(container: object, children: list[object], _: LinkedPath) -> bool:
            self._held[id(container)] = container, any(children)
            return any(children)

        if id(value) not in self._held:
            rebuild(
                value,
                lambda one, _: isinstance(one, tensors) or is_sharded(one) or is_stateful(one),
                get_children=lambda one: None if is_stateful(one) else get_mapping_children(one),
                make_container=made,
            )
        return self._held[id(value)][1]

    # The checkpoint.

    def _find(self, path: Path) -> tuple[str, object]:
        """The value at a path, or at the path of this rank; behind its name, without the prefix."""
        key = rank_key(self._rank, self._size)
        for name, place in chain([(join_path(path), path)], marked(path, key)):
            found = self._names.find(name, place)
            if found is not ABSENT and not _by_rank(found):
                return name, found
        return join_path(path), ABSENT

    def absent(self, leaves: Sequence[Leaf]) -> None:
        for leaf in leaves:
            self._absent(leaf)

    def _absent(self, leaf: Leaf) -> None:
        """Report a leaf that the checkpoint lacks; perhaps it is there for other numbers of ranks."""
        sizes = set[int]()
        for i, end in enumerate(find_name_ends(leaf.path), 1):
            above = leaf.name[:end]
            node = self._names.value(above, leaf.path[:i])
            sizes |= {
                size
                for key in (node if isinstance(node, Mapping) else ())
                if (size := size_in(key)) is not None
            }
            others = self._of_others().get(above, ())
            sizes |= {size for size, _ in others}
            for name in (name for size, name in others if size != self._size):
                self._names.take(name)
        sizes.discard(self._size)
        if not sizes:
            self._wanted.missing.append(leaf.name)
            return
        message = f"the checkpoint has one for each of {' or '.join(map(str, sorted(sizes)))} ranks, and these are {self._size}"
        if self._strict and self._per_rank != "keep":
            self._wanted.mismatched[leaf.name] = (
                f"{message}; pass per_rank='keep' to keep what the state has"
            )
        else:
            self._wanted.notes.append(f"{leaf.name}: {message}; what the state has was kept")

    def _of_others(self) -> dict[str, list[tuple[int, str]]]:
        """The tensors that the checkpoint has once for each rank: by what comes before the rank, how many ranks, and the name."""
        if self._others is None:
            self._others = {}
            for name in self._names:
                parts = name.split(".") if "rank-" in name else []
                for i, part in enumerate(parts):
                    if (size := size_in(part)) is not None:
                        self._others.setdefault(".".join(parts[:i]), []).append((size, name))
        return self._others

    # Both.

    def _value(self, leaf: Leaf) -> None:
        wanted = self._wanted
        name, found = self._find(leaf.path)
        if found is ABSENT:
            self._absent(leaf)
        elif any(isinstance(inner, LazyTensor | Composite) for inner in iterate_values(found)):
            wanted.mismatched[leaf.name] = (
                f"the checkpoint has tensors here, and the state a {type(leaf.value).__name__}"
            )
            self._names.take(name)
            self._names.take_under(f"{name}.")
        elif problem := unbuilt(found := read_value(found)):
            wanted.mismatched[leaf.name] = f"{problem}; torch's own load does"
        else:
            wanted.values[leaf.name] = torch_tree(found, _no_tensor)
            if leaf.put is not None:
                wanted.put.append((leaf.put, wanted.values[leaf.name]))

    def kind(self, leaf: Leaf) -> PlaceKind:
        if leaf.shards is not None:
            return (
                leaf.shards.dtype,
                leaf.shards.shape,
                False,
                any(part.tensor.is_meta for part in leaf.shards.parts),
            )
        tensor = leaf.tensor
        return (
            tensor.dtype,
            tensor.shape,
            type(tensor) in PLAIN and is_dense(tensor),
            tensor.is_meta,
        )

    def problem(self, leaf: Leaf, kind: RowKind) -> str | None:
        dtype, shape, _, meta = self.kind(leaf)
        if kind.dtype.packed:
            return "elements that share bytes are not loaded in place; use load_into"

        def describe_dtypes(stored_dtype: torch.dtype) -> str | None:
            if stored_dtype == dtype or self._cast:
                return None
            return f"{short(dtype)} here, {short(stored_dtype)} in the checkpoint; pass cast=True to convert"

        problem = plain_problem(kind, tuple(shape), describe_dtypes)
        if problem is None and meta:
            return "a tensor on the meta device has no elements to fill; use to_empty() first"
        return problem

    def look(self, leaf: Leaf) -> tuple[str, LazyTensor] | str | None:
        name, offer = self._find(leaf.path)
        if offer is ABSENT:
            return None
        self._names.take(name, offer)
        if isinstance(offer, np.ndarray) and DTYPES.numpy(offer.dtype) is not None:
            offer = MemoryTensors().wrap_array(offer)  # pickled as a value, as DCP does with it
        if isinstance(offer, Composite):
            return "sparse and quantised tensors are not loaded in place; use load_into"
        if not isinstance(offer, LazyTensor):
            return f"the checkpoint has no tensor here, but a {type(offer).__name__}"
        return self.problem(leaf, RowKind.from_tensor(offer)) or (name, offer)

    def memory(self, leaf: Leaf) -> object:
        if leaf.shards is None:
            return memory_of(leaf.tensor)
        parts = tuple((part.box, memory_of(part.tensor)) for part in leaf.shards.parts)
        return (leaf.shards.shape, parts) if parts else id(leaf.value)

    def parts(self, leaf: Leaf) -> list[tuple[Box, torch.Tensor]]:
        if leaf.shards is None:
            return [(Box.whole(tuple(leaf.tensor.shape)), leaf.tensor)]
        return [(part.box, part.tensor) for part in leaf.shards.parts]


def _by_rank(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(size_in(key) is not None for key in value)
    )


def _state_dict(value: Stateful) -> object:
    """The state dict of an object, with a module's own tensors in it, so that handing it back costs nothing."""
    plain = (
        isinstance(value, nn.Module)
        and "state_dict" not in vars(value)
        and type(value).state_dict is nn.Module.state_dict
    )
    return value.state_dict(keep_vars=True) if plain else value.state_dict()  # type: ignore[call-arg]  # a module, as was asked


def _over(array: np.ndarray) -> torch.Tensor | None:
    """A tensor over the memory of an array; None where the array cannot be filled so."""
    dtype = DTYPES.numpy(array.dtype)
    if (
        dtype is None
        or dtype.packed
        or not array.flags.writeable
        or any(step < 0 for step in array.strides)
    ):
        return None
    return tensor_from_array(array, torch_dtype(dtype))


def read_value(value: object) -> object:
    """A value of a tree. DCP values that were too many to be read at opening are read now."""
    return rebuild(value, lambda inner, _: inner.read() if isinstance(inner, Unread) else inner)


def _no_tensor(value: LazyTensor | Composite) -> torch.Tensor:
    raise AssertionError("values with tensors in them were sorted out before")


def _setter(container: object, key: object) -> Put:
    def put(value: object) -> None:
        container[key] = value  # type: ignore[index]  # a mapping or list that has the key

    return put


def make_state(
    optimizer: torch.optim.Optimizer, state: object, checkpoint: Checkpoint, *, under: str
) -> None:
    """Give the empty state dict of an optimizer tensors to be filled, as the checkpoint has them below a name."""
    if not isinstance(state, dict) or state.get("state") != {}:
        return
    numbered: dict[object, torch.Tensor] = {}
    for group, packed in zip(optimizer.param_groups, state["param_groups"], strict=True):
        numbered |= zip(packed["params"], group["params"], strict=True)
    stored = find_value(checkpoint.tree, f"{under}state")
    if not isinstance(stored, dict):
        stored = _by_names(checkpoint, f"{under}state.")
    for key, inner in stored.items():
        number = int(key) if isinstance(key, str) and key.isdecimal() else key
        if number in numbered and isinstance(inner, dict):
            state["state"][number] = _room(inner, numbered[number])


def _by_names(checkpoint: Checkpoint, under: str) -> dict[object, object]:
    """The state of an optimizer by number, of a checkpoint that has names and no tree."""
    found: dict[object, object] = {}
    for name in checkpoint:
        number, dot, key = name[len(under) :].partition(".")
        if name.startswith(under) and dot:
            inner = found.setdefault(number, {})
            assert isinstance(inner, dict)
            inner[key] = checkpoint[name]
    return found


def _room(value: object, parameter: torch.Tensor) -> object:
    """A nested state of the same form, with tensors that are not filled and None for all values."""

    def empty(inner: object, _: LinkedPath) -> torch.Tensor | None:
        if not isinstance(inner, LazyTensor):
            return None
        dtype = torch_dtype(inner.dtype)
        if inner.shape == tuple(parameter.shape) and inner.ndim:
            return torch.empty_like(parameter.detach(), dtype=dtype)
        return torch.empty(
            inner.shape, dtype=dtype, device=parameter.device if inner.ndim else "cpu"
        )

    return rebuild(
        value,
        empty,
        get_children=lambda inner: get_children(inner) if isinstance(inner, dict | list) else None,
        make_container=make_plain_container,
    )
