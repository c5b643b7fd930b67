"""`survey`: what there is to say about all tensors of a checkpoint, found in one pass over them. Nothing is read.

`Checkpoint` answers the same questions one at a time. Of very many tensors almost all are alone in their storages and look like
thousands of others. Of those none is made: where they lie is columns (`storage_rows.py`), and one stands for all of its kind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from holdfast.core.checkpoint import Alias, Checkpoint
from holdfast.core.chunk import Storage
from holdfast.core.dtype import DType
from holdfast.core.sharing import groups, twins
from holdfast.core.table import Table, outlines
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.inspect.storage_rows import among, storage_rows


class Survey(Value, frozen=True):
    """The tensors of a checkpoint, and how they share storages."""

    tensors: Mapping[str, LazyTensor]
    """All of them. A flat format makes each when it is asked for, every time."""
    apart: Mapping[str, LazyTensor]
    """Those that may share a storage, or are split or packed."""
    aliases: tuple[Alias, ...]
    ties: Mapping[str, str]
    """For each name that shares its storage with an earlier one: `= other` (the same elements) or `in other`."""
    nbytes: int
    """Bytes of all storages, each once."""
    elements: Mapping[DType, int]
    """Elements of each dtype; what is tied counts once."""


def survey(checkpoint: Checkpoint) -> Survey:
    """Look at every tensor once."""
    tensors, names = checkpoint.stored, list(checkpoint)
    rows = storage_rows(tensors, names, checkpoint.source)
    while True:
        left = np.ones(len(names), np.bool_)
        left[rows.positions] = False
        apart = {names[position]: tensors[names[position]] for position in np.flatnonzero(left).tolist()}
        over = groups(apart)
        shared = among(rows.ranges, {(one.key, one.start, one.nbytes) for one in over if type(one) is Storage})
        if not shared.any():
            break
        rows = rows.some(~shared)
    aliases = tuple(Alias(tuple(names), storage) for storage, names in over.items() if len(names) > 1 and storage.nbytes)
    ties = _ties(apart, aliases)
    kinds = Counter(outlines(tensors, names))
    kinds.subtract(outlines(tensors, [name for name, tie in ties.items() if tie.startswith("=")]))
    elements: dict[DType, int] = {}
    for (dtype, shape), count in kinds.items():
        elements[dtype] = elements.get(dtype, 0) + count * math.prod(shape)
    nbytes = sum(storage.nbytes for storage in over) + int(rows.ranges.nbytes.sum())
    return Survey(tensors, apart, aliases, ties, nbytes, elements)


class LookAlikes(Mapping[str, LazyTensor]):
    """The tensors of a flat checkpoint, each as one that looks the same: of its dtype and shape, and stored as plainly."""

    def __init__(self, found: Survey) -> None:
        self._tensors, self._apart = found.tensors, found.apart
        self._outline = found.tensors.outline if isinstance(found.tensors, Table) else None
        self._kinds: dict[tuple[DType, tuple[int, ...]], LazyTensor] = {}

    def __getitem__(self, name: str) -> LazyTensor:
        if name in self._apart or self._outline is None:
            return self._apart[name] if name in self._apart else self._tensors[name]
        kind = self._outline(name)
        tensor = self._kinds.get(kind)
        if tensor is None:
            tensor = self._kinds[kind] = self._tensors[name]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


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
