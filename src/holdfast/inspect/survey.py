"""`survey`: what there is to say about all tensors of a checkpoint, found in one pass over them. Nothing is read.

`Checkpoint` answers the same questions one at a time, and a flat format makes its lazy tensors anew for each; for 100,000 tensors
that is the difference between one second and five.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.checkpoint import Alias, Checkpoint
from holdfast.core.dtype import DType
from holdfast.core.sharing import groups, twins
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value

__all__ = ["Survey", "survey"]


class Survey(Value, frozen=True):
    """The tensors of a checkpoint, and how they share storages."""

    tensors: Mapping[str, LazyTensor]
    aliases: tuple[Alias, ...]
    ties: Mapping[str, str]
    """For each name that shares its storage with an earlier one: `= other` (the same elements) or `in other`."""
    nbytes: int
    """Bytes of all storages, each once."""
    elements: Mapping[DType, int]
    """Elements of each dtype; what is tied counts once."""


def survey(checkpoint: Checkpoint) -> Survey:
    """Look at every tensor once."""
    tensors = _tensors(checkpoint)
    over = groups(tensors)
    aliases = tuple(Alias(tuple(names), storage) for storage, names in over.items() if len(names) > 1 and storage.nbytes)
    ties = _ties(tensors, aliases)
    elements: dict[DType, int] = {}
    for name, tensor in tensors.items():
        if name not in ties or not ties[name].startswith("="):
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.size
    return Survey(tensors, aliases, ties, sum(storage.nbytes for storage in over), elements)


def _tensors(checkpoint: Checkpoint) -> Mapping[str, LazyTensor]:
    """The tensors by name: the tree itself where that is all there is in it."""
    tree = checkpoint.tree
    if isinstance(tree, dict) and len(tree) == len(checkpoint):
        flat = {n: t for n, t in tree.items() if isinstance(t, LazyTensor) and t.name == n}
        if len(flat) == len(tree):
            return flat
    return dict(checkpoint)


def _ties(tensors: Mapping[str, LazyTensor], aliases: tuple[Alias, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for alias in aliases:
        same = twins({name: tensors[name] for name in alias.names})
        for name in alias.names:
            if name in same:
                found[name] = f"= {same[name]}"
            elif name != alias.names[0]:
                found.setdefault(name, f"in {alias.names[0]}")
    return found
