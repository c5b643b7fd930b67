"""What one rank asks of a checkpoint: every leaf of its state, what the checkpoint has for it, and what speaks against it.

1. The state is walked. Objects with a state (`rewrite/stateful`) are asked for their state dict, which is filled like any other and
   handed to them in the end; an optimizer that has not made its tensors yet gets them here (fresh_optimizer.py).
2. Tensors over the same memory (tied weights) need only one name between them, as with `load_into`.
3. A name that the checkpoint has once for each rank stands for this rank's (per_rank.py).
4. Shapes and dtypes are compared whatever else was asked for; which names nobody wanted is known when all ranks have told theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import nn

from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.composite import Composite
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import Path, dotted
from holdfast.errors import DoesNotFit, HoldfastError
from holdfast.formats.dcp.lazy import Unread
from holdfast.ranks.per_rank import marked, rank_key, size_in
from holdfast.rewrite.stateful import Stateful, is_stateful, stateful_keys
from holdfast.torch.modules.match import different
from holdfast.torch.ranks.fresh_optimizer import make_state
from holdfast.torch.ranks.shards import is_sharded, shards_of
from holdfast.torch.tensors.fill import Fill
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.memory import memory_of
from holdfast.torch.tensors.tree import ABSENT, find_value, torch_tree

__all__ = ["PerRank", "Wanted", "match"]

PerRank = Literal["own", "keep"]

LISTED = 60
"""Lines of a message."""

Put = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Something in the state that is a tensor or a value, and a way to replace it."""

    path: Path
    value: object
    put: Put | None

    @property
    def name(self) -> str:
        return dotted(self.path)


@dataclass(slots=True)
class Wanted:
    """What one rank asks for, and what it would get."""

    fills: list[Fill] = field(default_factory=list)
    whole: dict[str, Fill] = field(default_factory=dict)
    """Those of the fills that are all of a tensor, by the checkpoint's name for it."""
    names: list[str] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    put: list[tuple[Put, object]] = field(default_factory=list)
    """Where values of the state are replaced."""
    stateful: list[tuple[Path, Stateful, object]] = field(default_factory=list)
    """Objects that are handed their state dict, when it is filled."""
    missing: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    """The checkpoint's names that were asked for."""
    notes: list[str] = field(default_factory=list)

    def finish(self) -> None:
        """Put values in their places and hand state dicts over, the innermost first and then in an order that all ranks share."""
        for put, value in self.put:
            put(value)
        for _, target, state in sorted(self.stateful, key=lambda found: (-len(found[0]), dotted(found[0]))):
            target.load_state_dict(state)

    def check(self, unexpected: list[str], path: str, *, strict: bool) -> None:
        """Raise `DoesNotFit` with all that is wrong on this rank. `unexpected` is what no rank asked for."""
        missing = self.missing if strict else []
        left = unexpected if strict else []
        if not (missing or left or self.mismatched):
            return
        lines = [f"{path} does not fit the state:"]
        lines += [f"  {name}: {reason}" for name, reason in self.mismatched.items()]
        lines += [f"  missing in the checkpoint: {name}" for name in missing]
        lines += [f"  not in the state: {name}" for name in left]
        if len(lines) > LISTED + 1:
            lines = [*lines[:LISTED], f"  and {len(lines) - LISTED} more"]
        raise DoesNotFit(
            "\n".join(lines), missing=tuple(missing), unexpected=tuple(left), mismatched=dict(self.mismatched), file=path
        )


def match(
    state: object,
    checkpoint: Checkpoint,
    *,
    prefix: str,
    rank: int,
    size: int,
    cast: bool,
    strict: bool,
    per_rank: PerRank,
) -> Wanted:
    """Look for everything in the state. Reads data only where tied tensors are offered two."""
    return Matching(checkpoint, prefix, rank, size, cast=cast, strict=strict, per_rank=per_rank).run(state)


class Matching:
    """One rank's state against a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, rank: int, size: int, *, cast: bool, strict: bool, per_rank: PerRank
    ) -> None:
        self._checkpoint, self._prefix = checkpoint, prefix
        self._size, self._key = size, rank_key(rank, size)
        self._cast, self._strict, self._per_rank = cast, strict, per_rank
        self._others: dict[str, list[tuple[int, str]]] | None = None
        self._order: list[str] = []
        self._wanted = Wanted()

    def run(self, state: object) -> Wanted:
        tied: dict[object, list[Leaf]] = {}
        for leaf in self._leaves(state):
            if isinstance(leaf.value, torch.Tensor) or is_sharded(leaf.value):
                tied.setdefault(_memory(leaf.value), []).append(leaf)
            else:
                self._value(leaf)
        for leaves in tied.values():
            self._tensors(leaves)
        order = {name: number for number, name in enumerate(self._order)}
        self._wanted.names.sort(key=order.__getitem__)
        self._wanted.missing.sort(key=order.__getitem__)
        return self._wanted

    # The state.

    def _leaves(self, state: object) -> list[Leaf]:
        """Every leaf of a nested state. Lists and tuples without tensors are leaves."""
        found: list[Leaf] = []

        def enter(value: Stateful, at: Path, above: frozenset[int]) -> None:
            inner = _ask(value)
            if isinstance(value, torch.optim.Optimizer):
                make_state(value, inner, self._checkpoint, self._prefix + dotted((*at, "")))
            self._wanted.stateful.append((at, value, inner))
            walk(inner, at, None, above)

        def walk(inner: object, at: Path, put: Put | None, above: frozenset[int]) -> None:
            inside = above | {id(inner)}
            if is_stateful(inner) and id(inner) not in above:
                enter(cast(Stateful, inner), at, inside)
            elif isinstance(inner, Mapping):
                asked = dict.fromkeys(stateful_keys(inner))
                for key in asked:
                    walk(inner[key], (*at, _step(key)), None, inside)
                for key, item in inner.items():
                    if key not in asked:
                        walk(item, (*at, _step(key)), _setter(inner, key) if hasattr(inner, "__setitem__") else None, inside)
            elif isinstance(inner, list | tuple) and _entered(inner):
                for i, item in enumerate(inner):
                    walk(item, (*at, i), _setter(inner, i) if isinstance(inner, list) else None, inside)
            else:
                found.append(Leaf(at, inner, put))

        walk(state, (), None, frozenset())
        self._order = [leaf.name for leaf in found]
        return found

    # The checkpoint.

    def _find(self, path: Path) -> tuple[str, object]:
        """What stands at a path, or at the one of this rank; the checkpoint's name of it."""
        for place in (path, *marked(path, self._key)):
            name = self._prefix + dotted(place)
            if name in self._checkpoint:
                return name, self._checkpoint[name]
            found = self._at(place)
            if found is not ABSENT and not _by_rank(found):
                return name, found
        return self._prefix + dotted(path), ABSENT

    def _at(self, path: Path) -> object:
        """What the tree has at a path. Integer keys of dicts are text in some formats, so either will do."""
        if self._prefix:
            return find_value(self._checkpoint.tree, self._prefix + dotted(path))
        tree: object = self._checkpoint.tree
        for step in path:
            if isinstance(tree, Mapping):
                other: str | int = str(step) if isinstance(step, int) else int(step) if step.isdecimal() else step
                tree = tree[step] if step in tree else tree.get(other, ABSENT)
            elif isinstance(tree, list | tuple) and isinstance(step, int) and 0 <= step < len(tree):
                tree = tree[step]
            else:
                return ABSENT
        return tree

    def _absent(self, leaf: Leaf) -> None:
        """There is nothing for a leaf; perhaps there is for other numbers of ranks."""
        sizes = set[int]()
        for i in range(1, len(leaf.path) + 1):
            node = self._at(leaf.path[:i])
            sizes |= {size for key in (node if isinstance(node, Mapping) else ()) if (size := size_in(key)) is not None}
            told = self._of_others().get(self._prefix + dotted(leaf.path[:i]), ())
            sizes |= {size for size, _ in told}
            self._wanted.used.update(name for size, name in told if size != self._size)
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
            for name in self._checkpoint:
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
        elif _has_tensors(found):
            wanted.mismatched[leaf.name] = f"the checkpoint has tensors here, and the state a {type(leaf.value).__name__}"
            wanted.used.update(n for n in self._checkpoint if n == name or n.startswith(f"{name}."))
        elif _foreign(found := _read(found)):
            wanted.mismatched[leaf.name] = f"an object that Holdfast does not build ({found!r:.80}); torch's own load does"
        else:
            wanted.values[leaf.name] = torch_tree(found, _no_tensor)
            if leaf.put is not None:
                wanted.put.append((leaf.put, wanted.values[leaf.name]))

    def _tensors(self, leaves: list[Leaf]) -> None:
        """Leaves of one memory: the last name that is there gives its elements, as it would with `load_state_dict`."""
        wanted = self._wanted
        offers: list[tuple[Leaf, str, list[Fill]]] = []
        absent, wrong = [], False
        for leaf in leaves:
            name, found = self._find(leaf.path)
            if found is ABSENT:
                absent.append(leaf)
                continue
            if isinstance(found, Composite):
                wanted.used.update(f"{name}.{part}" for part in found.parts)
            wanted.used.add(name)
            fills = self._fit(leaf.value, found)
            if isinstance(fills, str):
                wanted.mismatched[leaf.name] = fills
                wrong = True
            else:
                offers.append((leaf, name, fills))
        if not offers:
            for leaf in absent if not wrong else ():
                self._absent(leaf)
            return
        last, name, fills = offers[-1]
        for leaf, _, others in offers[:-1]:
            if any(different(one.lazy, other.lazy) for one, other in zip(fills, others, strict=True)):
                why = f"it is tied to {last.name!r} here, and the checkpoint has other elements for that"
                if self._strict:
                    wanted.mismatched[leaf.name] = why
                else:
                    wanted.notes.append(f"{leaf.name!r}: {why}; those were taken")
        if absent:
            names = ", ".join(repr(leaf.name) for leaf in absent)
            wanted.notes.append(f"not in the checkpoint, and tied to {last.name!r}: {names}")
        wanted.names += [leaf.name for leaf in leaves]
        wanted.fills += fills
        if len(fills) == 1 and fills[0].lazy.shape == _shape(last.value):
            wanted.whole[name] = fills[0]

    def _fit(self, value: object, offer: object) -> list[Fill] | str:
        """How a tensor of the state is filled; or why it is not."""
        if isinstance(offer, Composite):
            return "sparse and quantised tensors are not loaded in place; use load_into"
        if not isinstance(offer, LazyTensor):
            return f"the checkpoint has no tensor here, but a {type(offer).__name__}"
        if is_sharded(value):
            shards = shards_of(value)
            shape, dtype = shards.shape, shards.dtype
            parts = [(part.box, part.tensor) for part in shards.parts]
        else:
            tensor = cast(torch.Tensor, value)
            shape, dtype = tuple(tensor.shape), tensor.dtype
            parts = [(Box.whole(shape), tensor)]
        if tuple(offer.shape) != shape:
            return f"the checkpoint has {list(offer.shape)}, the state {list(shape)}"
        try:
            stored = torch_dtype(offer.dtype)
        except HoldfastError as error:
            return str(error)
        if stored != dtype and not self._cast:
            return f"the checkpoint has {stored}, the state {dtype}; pass cast=True to convert"
        if offer.traits.meta or any(local.is_meta for _, local in parts):
            return "a tensor on the meta device has no elements to fill; use to_empty() first"
        return [Fill(offer[box.slices], local.detach()) for box, local in parts if box.count]


def _by_rank(value: object) -> bool:
    """Whether this is nothing but something for each rank."""
    return isinstance(value, Mapping) and bool(value) and all(size_in(key) is not None for key in value)


def _ask(value: Stateful) -> object:
    """The state dict of an object, with a module's own tensors in it, so that handing it back costs nothing."""
    plain = isinstance(value, nn.Module) and "state_dict" not in vars(value) and type(value).state_dict is nn.Module.state_dict
    return value.state_dict(keep_vars=True) if plain else value.state_dict()  # type: ignore[call-arg]  # a module, as was asked


def _memory(value: object) -> object:
    """What two tensors over the very same elements have in common."""
    if not is_sharded(value):
        return memory_of(cast(torch.Tensor, value))
    shards = shards_of(value)
    if not shards.parts:
        return id(value)
    return shards.shape, tuple((part.box, memory_of(part.tensor)) for part in shards.parts)


def _shape(value: object) -> tuple[int, ...]:
    return shards_of(value).shape if is_sharded(value) else tuple(cast(torch.Tensor, value).shape)


def _read(value: object) -> object:
    """A value of a tree; those of a DCP directory that were too many to be read when it was opened are read now."""
    match value:
        case Unread():
            return value.read()
        case dict():
            copy = value.copy()
            copy.update({key: _read(inner) for key, inner in value.items()})
            return copy
        case list():
            return [_read(inner) for inner in value]
        case _:
            return value


def _foreign(value: object) -> bool:
    """Whether there is a class in a value, or an object of one, that was not imported."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set | frozenset) else ()
    return isinstance(value, Opaque | Global) or any(map(_foreign, inside))


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
    """Whether a list or tuple is looked into: there is a tensor in it, or an object with a state."""
    return is_stateful(value) or _has_tensors(value) or any(map(_entered, _inside(value)))


def _has_tensors(value: object) -> bool:
    if isinstance(value, Mapping | list | tuple):
        return any(map(_has_tensors, _inside(value)))
    return isinstance(value, torch.Tensor | LazyTensor | Composite) or is_sharded(value)
