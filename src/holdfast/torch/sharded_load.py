"""`load_sharded`: fill the tensors of a state, whatever part of each this rank has, from any checkpoint that `open` knows.

1. Every rank opens the checkpoint and matches names: what is missing, unexpected, or of another shape or dtype is collected, all
   of it, and shared. If anything does not fit anywhere, no rank has changed anything.
2. Every rank reads exactly the byte runs of its own boxes, straight into its tensors, in one batch. Which ranks wrote the file, how
   many and along which axis, does not matter: a box is a box. What all of them want whole is read by one and handed to the others,
   where that is cheaper (replicas.py).
3. Whether that went well is shared as well: all ranks return, or all raise the same error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from holdfast.api.open import open as open_checkpoint
from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.composite import Composite
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import dotted
from holdfast.engine.source import OpenSource
from holdfast.errors import DoesNotFit, HoldfastError
from holdfast.formats.dcp.lazy import Unread
from holdfast.stores.paths import local_path
from holdfast.torch.fill import Fill, fill
from holdfast.torch.group import DEADLINE, ranks_of
from holdfast.torch.replicas import Replicated, Share, hand_on, offers, spread
from holdfast.torch.shards import is_sharded, shards_of
from holdfast.torch.tensors import torch_dtype
from holdfast.torch.tree import torch_tree

__all__ = ["LoadedShards", "load_full", "load_sharded"]

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class LoadedShards:
    """What a load did on this rank."""

    path: str
    names: tuple[str, ...]
    """What was filled."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    needed_nbytes: int
    """Bytes of the elements that this rank needed."""
    read_nbytes: int
    """Bytes that were read for them."""
    values: Mapping[str, object]
    """What the checkpoint holds for the leaves that are no tensors. They are in the state as well, where it can change."""
    notes: tuple[str, ...] = ()
    """What a person should know."""

    def __str__(self) -> str:
        over = self.read_nbytes / self.needed_nbytes if self.needed_nbytes else 1.0
        lines = [f"{len(self.names):,} tensors, {self.needed_nbytes:,} bytes from {self.path} ({over:.2f} × read)"]
        lines += [f"missing: {name}" for name in self.missing[:20]]
        lines += [f"unexpected: {name}" for name in self.unexpected[:20]]
        return "\n".join(lines)


@dataclass(slots=True)
class Wanted:
    """What one rank asks of a checkpoint."""

    fills: list[Fill] = field(default_factory=list)
    whole: dict[str, Fill] = field(default_factory=dict)
    """Those of the fills that are all of a tensor, by its name."""
    names: list[str] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    put: list[tuple[Callable[[object], None], object]] = field(default_factory=list)
    """Where values of the state are replaced."""
    missing: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


def load_sharded(
    path: str | os.PathLike[str],
    state: nn.Module | Mapping[str, object],
    *,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    replicated: Replicated = "auto",
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
    max_host_memory: int | None = None,
    deadline: float = DEADLINE,
) -> LoadedShards:
    """Fill the tensors of `state` in place from a checkpoint, on every rank of a group, whatever ranks wrote it.

    `state` is a module or a nested mapping: plain tensors get all of their elements, DTensors and their like the part that this
    rank has. Values that are no tensors are replaced by those of the checkpoint. With `strict`, names that are missing or left over
    are an error; another shape always is, and another dtype is unless `cast=True`. Raises `RanksFailed` with the same causes on
    every rank; before anything was changed, where something does not fit.

    What all ranks want whole is read by each of them (`replicated="read"`), or by one and then sent to the others with the group's
    own collectives (`"broadcast"`); by default the latter where they are on several machines or the tensors on GPUs. Tensors on a
    GPU are read through at most `max_host_memory` bytes of page-locked memory (1 GiB unless said otherwise).
    """
    where = local_path(path)
    if replicated not in get_args(Replicated):
        raise ValueError(f"replicated must be one of {', '.join(get_args(Replicated))}, not {replicated!r}")
    ranks = ranks_of(group, doing=f"load (replicated={replicated})", deadline=deadline)
    checkpoint: Checkpoint | None = None
    try:
        wanted = Wanted()
        mapping: Mapping[str, object] = {}
        unexpected: list[str] = []
        problem: BaseException | None = None
        try:
            checkpoint = open_checkpoint(path, verify=verify, threads=threads or ranks.threads())
            mapping = _mapping(state)
            _match(mapping, checkpoint, wanted, cast=cast)
            unexpected = [name for name in checkpoint if name not in wanted.used]
            _check(wanted, unexpected, where, strict=strict)
        except Exception as error:
            problem = error
        local = offers(wanted.whole, group) if problem is None else problem
        answer = ranks.agree(local, lambda told: [spread(told, replicated, machines=ranks.apart())] * ranks.size)
        shares = msgspec.msgpack.decode(answer, type=list[Share])
        assert checkpoint is not None
        needed = read = 0
        notes: list[str] = []
        otherwise = "the load failed, and some tensors have been changed"
        try:
            needed = sum(one.lazy.nbytes for one in wanted.fills)
            elsewhere = {id(wanted.whole[share.name]) for share in shares if share.owner != ranks.rank}
            mine = [one for one in wanted.fills if id(one) not in elsewhere]
            notes = fill(mine, progress, max_host_memory=max_host_memory)
            read = _read_nbytes(mine)
        except Exception as error:
            problem = error
        if shares:
            # Nobody enters a broadcast that somebody else will not come to.
            ranks.agree(problem or b"", lambda _: [b""] * ranks.size, otherwise=otherwise)
        try:
            hand_on(shares, wanted.whole, group)
            for put, value in wanted.put:
                put(value)
            for name, module in _extras(state):
                if name in mapping:
                    module.set_extra_state(mapping[name])
        except Exception as error:
            problem = problem or error
        ranks.agree(problem or b"", lambda _: [b""] * ranks.size, otherwise=otherwise)
    finally:
        ranks.close()
        if checkpoint is not None:
            checkpoint.close()
    return LoadedShards(
        where,
        tuple(wanted.names),
        tuple(wanted.missing),
        tuple(unexpected),
        needed,
        read,
        dict(wanted.values),
        tuple(notes),
    )


def load_full(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> object:
    """The whole state of a checkpoint in one process: its tree, with every tensor in one piece."""
    from holdfast.torch.open import open as open_torch

    with open_torch(path) as checkpoint:
        return checkpoint.tree(device=device)


def _mapping(state: nn.Module | Mapping[str, object]) -> Mapping[str, object]:
    return state.state_dict(keep_vars=True) if isinstance(state, nn.Module) else state


def _read_nbytes(fills: list[Fill]) -> int:
    """Bytes that were read from the files of a checkpoint that was opened for these fills alone."""
    sources = {id(one.lazy.source): one.lazy.source for one in fills}
    return sum(source.read_nbytes for source in sources.values() if isinstance(source, OpenSource))


def _match(state: Mapping[str, object], checkpoint: Checkpoint, wanted: Wanted, *, cast: bool) -> None:
    for path, value, put in _leaves(state):
        name = dotted(path)
        if isinstance(value, torch.Tensor) or is_sharded(value):
            _match_tensor(name, value, checkpoint, wanted, cast=cast)
            continue
        found = _at(checkpoint.tree, path)
        if found is ABSENT:
            wanted.missing.append(name)
        elif _has_tensors(found):
            wanted.mismatched[name] = f"the checkpoint has tensors here, and the state a {type(value).__name__}"
            wanted.used.update(n for n in checkpoint if n == name or n.startswith(f"{name}."))
        elif _foreign(found := _read(found)):
            wanted.mismatched[name] = f"an object that Holdfast does not build ({found!r:.80}); torch's own load does"
        else:
            wanted.values[name] = torch_tree(found, _no_tensor)
            if put is not None:
                wanted.put.append((put, wanted.values[name]))


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


def _extras(state: nn.Module | Mapping[str, object]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that keep state of their own making, and the names under which it stands."""
    if isinstance(state, nn.Module):
        for prefix, module in state.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{prefix}._extra_state" if prefix else "_extra_state", module


def _match_tensor(name: str, value: object, checkpoint: Checkpoint, wanted: Wanted, *, cast: bool) -> None:
    offer = checkpoint.get(name)
    if offer is None:
        wanted.missing.append(name)
        return
    wanted.used.add(name)
    if isinstance(offer, Composite):
        wanted.mismatched[name] = "sparse and quantised tensors are not loaded in place; use load_into"
        return
    if is_sharded(value):
        shards = shards_of(value)
        shape, dtype = shards.shape, shards.dtype
        parts = [(part.box, part.tensor) for part in shards.parts]
    else:
        tensor = value
        assert isinstance(tensor, torch.Tensor)
        shape, dtype = tuple(tensor.shape), tensor.dtype
        parts = [(Box.whole(shape), tensor)]
    if tuple(offer.shape) != shape:
        wanted.mismatched[name] = f"the checkpoint has {list(offer.shape)}, the state {list(shape)}"
        return
    try:
        stored = torch_dtype(offer.dtype)
    except HoldfastError as error:
        wanted.mismatched[name] = str(error)
        return
    if stored != dtype and not cast:
        wanted.mismatched[name] = f"the checkpoint has {stored}, the state {dtype}; pass cast=True to convert"
        return
    if offer.traits.meta or any(local.is_meta for _, local in parts):
        wanted.mismatched[name] = "a tensor on the meta device has no elements to fill; use to_empty() first"
        return
    wanted.names.append(name)
    for box, local in parts:
        if box.count:
            slices = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            wanted.fills.append(Fill(offer[slices], local.detach()))
            if box.shape == shape:
                wanted.whole[name] = wanted.fills[-1]


def _check(wanted: Wanted, unexpected: list[str], path: str, *, strict: bool) -> None:
    missing = wanted.missing if strict else []
    left = unexpected if strict else []
    if not (missing or left or wanted.mismatched):
        return
    lines = [f"{path} does not fit the state:"]
    lines += [f"  {name}: {reason}" for name, reason in wanted.mismatched.items()]
    lines += [f"  missing in the checkpoint: {name}" for name in missing]
    lines += [f"  not in the state: {name}" for name in left]
    if len(lines) > 61:
        lines = [*lines[:60], f"  and {len(lines) - 60} more"]
    raise DoesNotFit(
        "\n".join(lines), missing=tuple(missing), unexpected=tuple(left), mismatched=dict(wanted.mismatched), file=path
    )


Put = Callable[[object], None]


def _leaves(state: object) -> list[tuple[Path, object, Put | None]]:
    """Every leaf of a nested state, with its path and a way to replace it. Lists and tuples without tensors are leaves."""
    found: list[tuple[Path, object, Put | None]] = []

    def walk(inner: object, at: Path, put: Put | None) -> None:
        if isinstance(inner, Mapping):
            for key, item in inner.items():
                walk(item, (*at, _step(key)), _setter(inner, key) if hasattr(inner, "__setitem__") else None)
        elif isinstance(inner, list | tuple) and _has_tensors(inner):
            for i, item in enumerate(inner):
                walk(item, (*at, i), _setter(inner, i) if isinstance(inner, list) else None)
        else:
            found.append((at, inner, put))

    walk(state, (), None)
    return found


def _setter(container: object, key: object) -> Put:
    def put(value: object) -> None:
        container[key] = value  # type: ignore[index]  # a mapping or list that has the key

    return put


def _step(key: object) -> str | int:
    return key if isinstance(key, str | int) and not isinstance(key, bool) else repr(key)[:64]


def _has_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor | LazyTensor | Composite) or is_sharded(value)


ABSENT = object()


def _at(tree: object, path: Path) -> object:
    """What a checkpoint's tree has at a path. Integer keys of dicts are text in some formats, so either will do."""
    for step in path:
        if isinstance(tree, Mapping):
            other: str | int = str(step) if isinstance(step, int) else int(step) if step.isdecimal() else step
            tree = tree[step] if step in tree else tree.get(other, ABSENT)
        elif isinstance(tree, list | tuple) and isinstance(step, int) and 0 <= step < len(tree):
            tree = tree[step]
        else:
            return ABSENT
    return tree
