"""Tensors that two checkpoints have under one name, of one dtype and shape, as columns: a million of them without making one.

Whatever else there is about two tensors (other kinds, strides, pieces, nothing that says where they lie) is for objects. So is what
turns out to be different: of this here it is only found that it is not the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.dense import DenseRows, dense_rows
from holdfast.core.protocols import Source, Store
from holdfast.core.table import Table, outlines
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.engine.checksums import Progress
from holdfast.engine.equal import Located, same_ranges
from holdfast.plan.coalesce import Ranges

Tensors = Mapping[str, LazyTensor]


class Alike(Value, frozen=True, eq=False):
    """Pairs of tensors that lie in one piece in C order on both sides, of the same dtype and shape."""

    names: Sequence[str]
    """All that both sides have."""
    numbers: Ints
    """Which of those these are, ascending."""
    a: Ranges
    b: Ranges
    stores: tuple[Store, Store]
    crcs: tuple[Ints, Ints]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        """Of both sides."""
        return 2 * int(self.a.nbytes.sum())

    def recorded_same(self) -> Bools:
        """Of which both files record the same checksum; what has no bytes has that of nothing."""
        a, b = self.crcs
        return np.asarray(((a == b) & (a != NO_CRC)) | (self.a.nbytes == 0))

    def some(self, wanted: Bools) -> Alike:
        crcs = self.crcs[0][wanted], self.crcs[1][wanted]
        return Alike(self.names, self.numbers[wanted], self.a.some(wanted), self.b.some(wanted), self.stores, crcs)

    def different(self, progress: Progress | None, *, threads: int | None) -> list[str]:
        """The names of those that are not the same byte for byte. Reads all; progress is told of those that are."""

        def name(number: int) -> str:
            return self.names[self.numbers.item(number)]

        a, b = (Located(store, ranges, name) for store, ranges in zip(self.stores, (self.a, self.b), strict=True))
        same = same_ranges(a, b, progress, threads=threads)
        return [self.names[number] for number in self.numbers[~same].tolist()]


def find_alike(a: Tensors, b: Tensors, names: Sequence[str]) -> Alike | None:
    """Those of these names, which both sides have; None where one of the sides has to make tensors to tell."""
    first, second = _dense(a, names), _dense(b, names)
    if first is None or second is None:
        return None
    alike = np.fromiter((x == y for x, y in zip(outlines(a, names), outlines(b, names), strict=True)), np.bool_, len(names))
    for _, columns in (first, second):
        ordinary = np.zeros(len(names), np.bool_)
        ordinary[np.array(columns.numbers, np.int64)] = True
        alike &= ordinary
    (left, crcs), (right, others) = _chosen(first[1], alike), _chosen(second[1], alike)
    return Alike(names, np.flatnonzero(alike), left, right, (first[0].store, second[0].store), (crcs, others))


def _dense(tensors: Tensors, names: Sequence[str]) -> tuple[Source, DenseRows] | None:
    """The dense ones of these names, and what reads them; None where no one source does."""
    if isinstance(tensors, Table):
        return tensors.dense([tensors.rows[name] for name in names])
    chosen = [tensors[name] for name in names]
    sources = {id(tensor.source): tensor.source for tensor in chosen}
    return (chosen[0].source, dense_rows(chosen, range(len(chosen)))) if len(sources) == 1 else None


def _chosen(columns: DenseRows, wanted: Bools) -> tuple[Ranges, Ints]:
    rows = wanted[np.array(columns.numbers, np.int64)]
    return Ranges(columns.keys, columns.files, columns.starts, columns.nbytes).some(rows), columns.crcs[rows]
