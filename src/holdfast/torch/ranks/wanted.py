"""What one rank asks of a checkpoint: every leaf of its state, what the checkpoint has for it, and what speaks against it.

1. The state is walked. Objects with a state (`rewrite/state`) are asked for their state dict, which is filled like any other and
   handed to them in the end; an optimizer that has not made its tensors yet gets them here (`make_state`).
2. Leaves are matched with the checkpoint as `load_into` matches the places of a module (`modules/match`).
3. A name that the checkpoint has once for each rank stands for this rank's (`ranks/per_rank`).
4. Shapes and dtypes are compared whatever else was asked for; which names nobody wanted is known when all ranks have told theirs.

An optimizer makes its moments with its first step. To load into one that was just made, tensors are made here as the checkpoint
has them: like their parameter where they have its shape, sharded as it is; else plain, and scalars on the CPU, from where
`load_state_dict` takes them to where the optimizer wants them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from msgspec import field
from torch import nn

from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.dtype import DTYPES
from holdfast.core.match import meet_boxes
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path, dotted, rebuilt, values_inside
from holdfast.core.value import Value
from holdfast.engine.arrays import Resident
from holdfast.formats.dcp.lazy import Unread
from holdfast.ranks.per_rank import marked, rank_key, size_in
from holdfast.rewrite.state import Stateful, is_stateful, stateful_keys
from holdfast.torch.modules.match import Names, Outcome, match_dense, match_tied, plain_problem, short, squeezed
from holdfast.torch.modules.wrappers import plainly_named
from holdfast.torch.ranks.shards import PLAIN, is_sharded, shards_of
from holdfast.torch.tensors.fill_rows import RowFills, apart, is_dense
from holdfast.torch.tensors.from_lazy import tensor_from_array, torch_dtype
from holdfast.torch.tensors.scratch import Fill
from holdfast.torch.tensors.to_lazy import memory_of
from holdfast.torch.tensors.tree import ABSENT, find_value, torch_tree, unbuilt

PerRank = Literal["own", "keep"]

Put = Callable[[object], None]


class Leaf(Value, frozen=True):
    """Something in the state that is a tensor or a value, and a way to replace it."""

    path: Path
    name: str
    value: object
    put: Put | None = None


class Share(NamedTuple):
    """All of a tensor, which another rank may read and hand on."""

    target: torch.Tensor
    nbytes: int


class Wanted(Outcome):
    """What one rank asks for, and what it would get."""

    rows: RowFills | None = None
    """Rows of the checkpoint that are one range each, and go to all of a tensor."""
    fills: list[Fill] = field(default_factory=list)
    """What else is filled."""
    whole: dict[str, Share] = field(default_factory=dict)
    """What is filled with all of a tensor, by the checkpoint's name for it."""
    names: list[str] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    put: list[tuple[Put, object]] = field(default_factory=list)
    """Where values of the state are replaced."""
    tuples: list[tuple[Put, tuple[object, ...], list[object]]] = field(default_factory=list)
    """Tuples that are made again where something in them was replaced, the innermost first: what they were, what is in them now."""
    stateful: list[tuple[Path, Stateful, object]] = field(default_factory=list)
    """Objects that are handed their state dict, when it is filled."""
    looked_for: list[str] = field(default_factory=list)
    """Every leaf of the state, by name."""

    def finish(self) -> None:
        """Put values in their places and hand state dicts over, the innermost first and then in an order that all ranks share."""
        for put, value in self.put:
            put(value)
        for put, old, items in self.tuples:
            put(rebuilt(old, items))
        for _, target, state in sorted(self.stateful, key=lambda found: (-len(found[0]), dotted(found[0]))):
            target.load_state_dict(state)


def match_state(state: object, names: Names, *, rank: int, size: int, cast: bool, strict: bool, per_rank: PerRank) -> Wanted:
    """Look for everything in the state, and take its names. Reads data only where tied tensors are offered two."""
    return Matching(names, rank, size, cast=cast, strict=strict, per_rank=per_rank).run(state)


class Offered(Value, frozen=True):
    """What the checkpoint has for a tensor of the state."""

    name: str
    """Without the prefix."""
    fills: list[Fill]
    """One for each part of it that this rank has."""


class Matching:
    """One rank's state against a checkpoint."""

    def __init__(self, names: Names, rank: int, size: int, *, cast: bool, strict: bool, per_rank: PerRank) -> None:
        self._names = names
        self._size, self._key = size, rank_key(rank, size)
        self._cast, self._strict, self._per_rank = cast, strict, per_rank
        self._others: dict[str, list[tuple[int, str]]] | None = None
        self._wanted = Wanted()
        self._rows = RowFills(names.table, [], [])
        self._row_numbers: list[int] = []
        """The leaf of each row."""
        self._fills: list[tuple[int, Fill]] = []
        """What else is filled, each with the number of its leaf."""

    def run(self, state: object) -> Wanted:
        wanted = self._wanted
        leaves = self._leaves(state)
        wanted.looked_for += [leaf.name for leaf in leaves]
        values = [
            number for number, leaf in enumerate(leaves) if not isinstance(leaf.value, torch.Tensor) and not is_sharded(leaf.value)
        ]
        for number in values:
            self._value(leaves[number])
        alone, others = _apart(leaves, set(values))
        more = self._matched(leaves, alone)
        for members in sorted([*others, *([number] for number in more)]):
            self._tensors([leaves[number] for number in members], members[0])
        self._settle()
        order = {name: number for number, name in enumerate(wanted.looked_for)}
        wanted.names.sort(key=order.__getitem__)
        wanted.missing.sort(key=order.__getitem__)
        return wanted

    # The state.

    def _leaves(self, state: object) -> list[Leaf]:
        """Every leaf of a nested state. Lists and tuples without tensors are leaves; an array is a tensor over its memory."""
        found: list[Leaf] = []
        self._walk(state, (), frozenset(), found=found)
        return found

    def _enter(self, value: Stateful, at: Path, above: frozenset[int], *, found: list[Leaf]) -> None:
        under = dotted((*at, ""))
        named = plainly_named(value, ask=_ask, there=lambda name: under + name in self._names)
        inner = _ask(named)
        if isinstance(value, torch.optim.Optimizer):
            make_state(value, inner, self._names.checkpoint, under=self._names.prefix + under)
        self._wanted.stateful.append((at, named, inner))
        self._walk(inner, at, above, found=found)

    def _walk(self, inner: object, at: Path, above: frozenset[int], *, found: list[Leaf], put: Put | None = None) -> None:
        inside = above | {id(inner)}
        if is_stateful(inner) and id(inner) not in above:
            self._enter(cast(Stateful, inner), at, inside, found=found)
        elif isinstance(inner, Mapping):
            others = {key: item for key, item in inner.items() if type(item) not in PLAIN}
            asked = dict.fromkeys(stateful_keys(others))
            for key in asked:
                self._walk(inner[key], (*at, _step(key)), inside, found=found)
            under = dotted((*at, ""))
            for key, item in inner.items():
                if key not in others:
                    step = _step(key)
                    found.append(Leaf((*at, step), f"{under}{step}", item))
                elif key not in asked:
                    setter = _setter(inner, key) if hasattr(inner, "__setitem__") else None
                    self._walk(item, (*at, _step(key)), inside, found=found, put=setter)
        elif isinstance(inner, list | tuple) and _entered(inner):
            items = inner if isinstance(inner, list) else list(inner)
            for i, item in enumerate(inner):
                self._walk(item, (*at, i), inside, found=found, put=_setter(items, i))
            if type(inner) is tuple and put is not None:
                self._wanted.tuples.append((put, inner, items))
        elif isinstance(inner, np.ndarray) and (tensor := _over(inner)) is not None:
            found.append(Leaf(at, dotted(at), tensor, put))
        else:
            found.append(Leaf(at, dotted(at), inner, put))

    # The checkpoint.

    def _find(self, path: Path) -> tuple[str, object]:
        """What stands at a path, or at the one of this rank; and the name of it, without the prefix."""
        for place in (path, *marked(path, self._key)):
            name = dotted(place)
            found = self._names.find(name, place)
            if found is not ABSENT and not _by_rank(found):
                return name, found
        return dotted(path), ABSENT

    def _absent(self, leaf: Leaf) -> None:
        """There is nothing for a leaf; perhaps there is for other numbers of ranks."""
        sizes = set[int]()
        for i in range(1, len(leaf.path) + 1):
            above = dotted(leaf.path[:i])
            node = self._names.value(above, leaf.path[:i])
            sizes |= {size for key in (node if isinstance(node, Mapping) else ()) if (size := size_in(key)) is not None}
            told = self._of_others().get(above, ())
            sizes |= {size for size, _ in told}
            for name in (name for size, name in told if size != self._size):
                self._names.take(name)
        sizes.discard(self._size)
        if not sizes:
            self._wanted.missing.append(leaf.name)
            return
        said = f"the checkpoint has one for each of {' or '.join(map(str, sorted(sizes)))} ranks, and these are {self._size}"
        if self._strict and self._per_rank != "keep":
            self._wanted.mismatched[leaf.name] = f"{said}; pass per_rank='keep' to keep what the state has"
        else:
            self._wanted.notes.append(f"{leaf.name}: {said}; what the state has was kept")

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
        elif any(isinstance(inner, LazyTensor | Composite) for inner in values_inside(found)):
            wanted.mismatched[leaf.name] = f"the checkpoint has tensors here, and the state a {type(leaf.value).__name__}"
            self._names.take(name)
            self._names.take_under(f"{name}.")
        elif problem := unbuilt(found := read_value(found)):
            wanted.mismatched[leaf.name] = f"{problem}; torch's own load does"
        else:
            wanted.values[leaf.name] = torch_tree(found, _no_tensor)
            if leaf.put is not None:
                wanted.put.append((leaf.put, wanted.values[leaf.name]))

    def _matched(self, leaves: list[Leaf], alone: list[int]) -> list[int]:
        """Match plain tensors that share no memory, by columns; the numbers of those that take a closer look."""
        tensors = [cast(torch.Tensor, leaves[number].value) for number in alone]
        own = [leaves[number].name for number in alone]
        found = match_dense(self._names, own, tensors)
        self._rows, self._row_numbers = found.rows, [alone[at] for at in found.taken]
        for at, part in found.parts:
            self._give(alone[at], [Fill(part, tensors[at].detach())], self._names.prefix + own[at])
        self._wanted.names += [own[at] for at in (*found.taken, *(at for at, _ in found.parts))]
        return [alone[at] for at in found.others]

    def _give(self, number: int, fills: list[Fill], whole: str | None) -> None:
        """Note what a leaf is filled with; `whole` is the checkpoint's name for all of it."""
        self._fills += [(number, one) for one in fills]
        if whole is not None:
            self._wanted.whole[whole] = Share(fills[0].target, fills[0].lazy.nbytes)

    def _settle(self) -> None:
        """What is filled by columns, and what is not: targets that share memory are filled in the order of the state."""
        rows, wanted = self._rows, self._wanted
        others = apart(rows, [one.target for _, one in self._fills])
        targets = [target.detach() for target in rows.targets] if self._size > 1 else []
        for at in np.flatnonzero(others).tolist():
            one = rows.fill(at)
            self._fills.append((self._row_numbers[at], one))
            if targets:
                # The same object: a fill whose bytes another rank hands on is known by its target.
                targets[at] = one.target
        wanted.rows = rows.only(np.flatnonzero(~others).tolist()) if others.any() else rows
        self._fills.sort(key=lambda pair: pair[0])
        wanted.fills = [one for _, one in self._fills]
        if self._size > 1:
            own = zip(rows.names, targets, rows.nbytes.tolist(), strict=True)
            wanted.whole |= {name: Share(target, nbytes) for name, target, nbytes in own}

    def _tensors(self, leaves: list[Leaf], number: int) -> None:
        """Leaves of one memory."""
        wanted = self._wanted

        def elements(offer: Offered) -> list[LazyTensor]:
            return [fill.lazy for fill in offer.fills]

        taken = match_tied(leaves, self._offered, wanted, elements=elements, absent=self._absent, strict=self._strict)
        if taken is None:
            return
        last, offered = taken
        wanted.names += [leaf.name for leaf in leaves]
        whole = len(offered.fills) == 1 and offered.fills[0].lazy.shape == _shape(last)
        self._give(number, offered.fills, self._names.prefix + offered.name if whole else None)

    def _offered(self, leaf: Leaf) -> Offered | str | None:
        """What there is for a tensor of the state; or why it cannot be filled so."""
        name, offer = self._find(leaf.path)
        if offer is ABSENT:
            return None
        self._names.take(name, offer)
        if isinstance(offer, np.ndarray) and DTYPES.numpy(offer.dtype) is not None:
            offer = Resident().array(offer)  # pickled as a value, as DCP does with it
        if isinstance(offer, Composite):
            return "sparse and quantised tensors are not loaded in place; use load_into"
        if not isinstance(offer, LazyTensor):
            return f"the checkpoint has no tensor here, but a {type(offer).__name__}"
        if offer.dtype.packed:
            return "elements that share bytes are not loaded in place; use load_into"
        shape, dtype, parts = _parts(leaf)
        problem = plain_problem(offer, shape, lambda own: self._dtype_problem(dtype, own))
        if problem is not None:
            return problem
        if any(local.is_meta for _, local in parts):
            return "a tensor on the meta device has no elements to fill; use to_empty() first"
        cut = meet_boxes(squeezed(offer, shape), [box for box, _ in parts])
        return Offered(name, [Fill(part, parts[at][1].detach()) for at, part in cut])

    def _dtype_problem(self, here: torch.dtype, own: torch.dtype) -> str | None:
        if own == here or self._cast:
            return None
        return f"{short(here)} here, {short(own)} in the checkpoint; pass cast=True to convert"


def _apart(leaves: Sequence[Leaf], values: set[int]) -> tuple[list[int], list[list[int]]]:
    """Numbers of plain, dense tensors that begin where no other does; and all others, those of one memory together.

    Tensors of one memory begin at one address. So most need not be asked for more than that.
    """
    memories: dict[int, object] = {}
    addresses: dict[int, int] = {}
    dense: list[int] = []
    for number, leaf in enumerate(leaves):
        value = leaf.value
        if number in values:
            continue
        if not isinstance(value, torch.Tensor) or is_sharded(value):
            memories[number] = _memory(leaf)
            continue
        if type(value) in PLAIN and is_dense(value):
            dense.append(number)
        else:
            memories[number] = memory = memory_of(value)
            if not isinstance(memory, tuple):
                continue
        addresses[number] = value.data_ptr()
    counts = Counter(addresses.values())
    alone = [number for number in dense if addresses[number] and counts[addresses[number]] == 1]
    tied: dict[object, list[int]] = {}
    for number in sorted({*memories, *dense}.difference(alone)):
        tied.setdefault(memories.get(number) or _memory(leaves[number]), []).append(number)
    return alone, list(tied.values())


def _parts(leaf: Leaf) -> tuple[tuple[int, ...], torch.dtype, list[tuple[Box, torch.Tensor]]]:
    """Shape and dtype of a tensor of the state, and what this rank has of it."""
    value = leaf.value
    if is_sharded(value):
        shards = shards_of(value, leaf.name)
        return shards.shape, shards.dtype, [(part.box, part.tensor) for part in shards.parts]
    tensor = cast(torch.Tensor, value)
    shape = tuple(tensor.shape)
    return shape, tensor.dtype, [(Box.whole(shape), tensor)]


def _by_rank(value: object) -> bool:
    """Whether this is nothing but something for each rank."""
    return isinstance(value, Mapping) and bool(value) and all(size_in(key) is not None for key in value)


def _ask(value: Stateful) -> object:
    """The state dict of an object, with a module's own tensors in it, so that handing it back costs nothing."""
    plain = isinstance(value, nn.Module) and "state_dict" not in vars(value) and type(value).state_dict is nn.Module.state_dict
    return value.state_dict(keep_vars=True) if plain else value.state_dict()  # type: ignore[call-arg]  # a module, as was asked


def _memory(leaf: Leaf) -> object:
    """What two tensors over the very same elements have in common."""
    value = leaf.value
    if not is_sharded(value):
        return memory_of(cast(torch.Tensor, value))
    shards = shards_of(value, leaf.name)
    if not shards.parts:
        return id(value)
    return shards.shape, tuple((part.box, memory_of(part.tensor)) for part in shards.parts)


def _over(array: np.ndarray) -> torch.Tensor | None:
    """A tensor over the memory of an array; None where it cannot be filled so."""
    dtype = DTYPES.numpy(array.dtype)
    if dtype is None or dtype.packed or not array.flags.writeable or any(step < 0 for step in array.strides):
        return None
    return tensor_from_array(array, torch_dtype(dtype))


def _shape(leaf: Leaf) -> tuple[int, ...]:
    return shards_of(leaf.value, leaf.name).shape if is_sharded(leaf.value) else tuple(cast(torch.Tensor, leaf.value).shape)


def read_value(value: object) -> object:
    """A value of a tree; those of a DCP directory that were too many to be read when it was opened are read now.

    They are leaves of the tree: what has none of them inside is not gone through, however deep it is.
    """
    if isinstance(value, Unread):
        return value.read()
    if not any(isinstance(inner, Unread) for inner in values_inside(value)):
        return value
    match value:
        case dict():
            copy = value.copy()
            copy.update({key: read_value(inner) for key, inner in value.items()})
            return copy
        case list():
            return [read_value(inner) for inner in value]
        case _:
            return value


def _no_tensor(value: LazyTensor | Composite) -> torch.Tensor:
    raise AssertionError("values with tensors in them were sorted out before")


def _setter(container: object, key: object) -> Put:
    def put(value: object) -> None:
        container[key] = value  # type: ignore[index]  # a mapping or list that has the key

    return put


def _step(key: object) -> str | int:
    return key if isinstance(key, str | int) and not isinstance(key, bool) else repr(key)[:64]


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def _entered(value: object) -> bool:
    """Whether a list or tuple is looked into: there is a tensor or an array in it, or an object with a state."""
    return isinstance(value, np.ndarray) or is_stateful(value) or _has_tensors(value) or any(map(_entered, _inside(value)))


def _has_tensors(value: object) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_tensors, _inside(value)))
    return isinstance(value, torch.Tensor | LazyTensor | Composite) or is_sharded(value)


def make_state(optimizer: torch.optim.Optimizer, state: object, checkpoint: Checkpoint, *, under: str) -> None:
    """Give the state dict of an optimizer without state what a checkpoint has for it, below a name, to be filled."""
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
    """The same of a checkpoint that has names and no tree."""
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
    match value:
        case LazyTensor():
            dtype = torch_dtype(value.dtype)
            if value.shape == tuple(parameter.shape) and value.ndim:
                return torch.empty_like(parameter.detach(), dtype=dtype)
            return torch.empty(value.shape, dtype=dtype, device=parameter.device if value.ndim else "cpu")
        case dict():
            return {key: _room(inner, parameter) for key, inner in value.items()}
        case list():
            return [_room(inner, parameter) for inner in value]
        case _:
            return None
