"""`survey`: what there is to say about all tensors of a checkpoint, found in one pass over them. Nothing is read.

`Checkpoint` answers the same questions one at a time. Here all of it is asked of columns: which rows share a range of a file
(`plan/stored.py`), and how many rows there are of each kind. Tensors are made of the rows of an alias, and of one row of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping

import numpy as np

from holdfast.core.checkpoint import Alias, Checkpoint
from holdfast.core.chunk import Storage
from holdfast.core.dtype import DType
from holdfast.core.sharing import identity
from holdfast.core.table import ODD, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.plan.files import tabulated
from holdfast.plan.stored import StoredRanges, store_of, stored_ranges


class Survey(Value, frozen=True):
    """The tensors of a checkpoint, and how they share storages."""

    tensors: Table
    """All of them. A flat format makes each when it is asked for, every time."""
    aliases: tuple[Alias, ...]
    ties: Mapping[str, str]
    """For each name that shares its storage with an earlier one: `= other` (the same elements) or `in other`."""
    nbytes: int
    """Bytes of all storages, each once."""
    elements: Mapping[DType, int]
    """Elements of each dtype; what is tied counts once."""


def survey(checkpoint: Checkpoint) -> Survey:
    """Look at every tensor once."""
    table = tabulated(checkpoint.stored)
    every = [(row, tensor, storage) for row, tensor in table.odd.items() for storage in tensor.storages]
    # By its exact class: a storage of another kind may not know its place before it is asked, or is computed.
    pieces = ((row, storage, store_of(tensor.source, storage.key)) for row, tensor, storage in every if type(storage) is Storage)
    stored = stored_ranges(table, pieces)
    others: dict[Storage, list[int]] = {}
    for row, _, storage in every:
        if type(storage) is not Storage:
            others.setdefault(storage, []).append(row)
    shared = [
        (stored.rows_of(number), _storage(table, stored, number)) for number in np.flatnonzero(np.diff(stored.heads) > 1).tolist()
    ]
    shared += [(rows, storage) for storage, rows in others.items() if len(rows) > 1 and storage.nbytes]
    shared.sort(key=lambda one: one[0][0])
    same, ties = _ties(table, [rows for rows, _ in shared])
    counts = np.bincount(np.asarray(table.kind, np.int64), minlength=len(table.kinds)).tolist()
    elements: dict[DType, int] = {kind.dtype: 0 for kind, count in zip(table.kinds, counts, strict=True) if count}
    for row in same:
        counts[table.kind[row]] -= 1
    for kind, count in zip(table.kinds, counts, strict=True):
        if count:
            elements[kind.dtype] += count * math.prod(kind.shape)
    nbytes = int(stored.ranges.nbytes.sum()) + sum(storage.nbytes for storage in others)
    aliases = tuple(Alias(tuple([table.names[row] for row in rows]), storage) for rows, storage in shared)
    return Survey(table, aliases, ties, nbytes, elements)


def _storage(table: Table, stored: StoredRanges, number: int) -> Storage:
    """The storage that is a range, as the first of its tensors has it."""
    place = stored.ranges.place(number)
    storages = table.view(stored.rows_of(number)[0]).storages
    return next(one for one in storages if type(one) is Storage and (one.key, one.start, one.nbytes) == place)


class LookAlikes(Mapping[str, LazyTensor]):
    """The tensors of a flat checkpoint, each as one of its kind; odd ones as they are."""

    def __init__(self, found: Survey) -> None:
        self._table = found.tensors
        self._kinds: dict[int, LazyTensor] = {}

    def __getitem__(self, name: str) -> LazyTensor:
        table = self._table
        row = table.rows[name]
        kind = table.kind[row]
        if table.storage[row] == ODD:
            return table.view(row)
        tensor = self._kinds.get(kind)
        if tensor is None:
            tensor = self._kinds[kind] = table.view(row)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def _ties(table: Table, groups: list[list[int]]) -> tuple[set[int], dict[str, str]]:
    """The rows that are the same view as an earlier one; and what is to be said of each row that shares its storage."""
    same: set[int] = set()
    found: dict[str, str] = {}
    names, kinds = table.names, table.kinds
    for rows in groups:
        firsts: dict[Hashable, int] = {}
        for row in rows:
            view: Hashable
            if table.storage[row] == ODD:
                view = identity(table.odd[row])
            else:
                kind = kinds[table.kind[row]]
                view = id(kind.dtype), kind.shape, kind.offset, kind.strides, kind.traits.conj, kind.traits.neg
            first = firsts.setdefault(view, row)
            if first != row:
                same.add(row)
                found[names[row]] = f"= {names[first]}"
            elif row != rows[0]:
                found.setdefault(names[row], f"in {names[rows[0]]}")
    return same, found
