"""`TensorRows`: very many small tensors on their way to a file, as rows and not as objects.

Fifty thousand tensors are of a few kinds: a dtype, a shape, what they are beyond their elements. A row is a kind and a storage. The
bytes stay where they are until they are written; then they are asked for, many together.

Whoever has tensors makes rows of them: of torch's `torch/tensors/rows.py`, of numpy's `engine/array_rows.py`. `joined` makes one of
two. A memory of another kind, a device, offers the same `read`: it is asked for a few megabytes at a time, by several threads,
and may answer with views of one block that it filled by one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32_each
from holdfast.core.dtype import DType
from holdfast.core.protocols import Store
from holdfast.core.table import Kind, Piece
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.plan.saves import Data, Gathered, Memory, Segment

SMALL_NBYTES = 64 << 10
"""What is longer is written from where it lies, by itself."""

BLOCK_NBYTES = 4 << 20
"""Of a file, what is made at a time."""

BATCH = 1 << 13
"""Tensors that are asked, or written as text, at a time: what is made of each on the way is gone when the next ones come."""


class RowKind(Value, frozen=True):
    """What many tensors have in common."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    offset: int
    """In elements, from the begin of the storage."""
    count: int
    """Elements of the storage; bytes, for dtypes whose storage has none."""
    requires_grad: bool = False
    parameter: bool = False
    location: str = "cpu"


class TensorRows(Value, frozen=True, eq=False):
    """Tensors of one state in the order in which they are met, each once; and their storages."""

    identities: Ints
    """Of the tensors, as `id` gives them."""
    kinds: Sequence[int]
    """Of each tensor, as a position in `table`."""
    table: Sequence[RowKind]
    records: Sequence[int]
    """The storage of each tensor. New storages have the next number."""
    nbytes: Ints
    """Of each storage."""
    addresses: Ints | None
    """Where each storage lies in this process, where somebody knows."""
    read: Callable[[Sequence[int]], Sequence[Piece]]
    """The bytes of storages of these numbers, all of them together."""
    alone: Callable[[int, str], bytes | Data | Memory]
    """The bytes of one storage under a label, where they lie."""

    def __len__(self) -> int:
        return len(self.kinds)


class RowStorages:
    """The storages of several `TensorRows`, one behind the other, as those of a table."""

    def __init__(self, parts: Sequence[TensorRows], view: Callable[[int], LazyTensor]) -> None:
        self._parts, self._view = parts, view
        self._edges = np.cumsum([0, *(len(part.nbytes) for part in parts)])
        self.nbytes: Ints = (
            parts[0].nbytes if len(parts) == 1 else np.concatenate([part.nbytes for part in parts] or [self._edges[:0]])
        )
        self.stores: tuple[Store, ...] = ()

    def read(self, numbers: Sequence[int]) -> Sequence[Piece]:
        if len(self._parts) == 1:
            return self._parts[0].read(numbers)
        wanted = np.array(numbers, np.int64)
        sides = np.searchsorted(self._edges, wanted, side="right") - 1
        pieces: list[Piece] = [b""] * len(numbers)
        for side in np.unique(sides).tolist():
            here = np.flatnonzero(sides == side)
            found = self._parts[side].read((wanted[here] - self._edges[side]).tolist())
            for place, piece in zip(here.tolist(), found, strict=True):
                pieces[place] = piece
        return pieces

    def alone(self, number: int, label: str) -> bytes | Data | Memory:
        side = int(np.searchsorted(self._edges, number, side="right")) - 1
        return self._parts[side].alone(number - int(self._edges[side]), label)

    def view(self, number: int, kind: Kind, name: str) -> LazyTensor:
        return self._view(number).renamed(name)


def joined(parts: Sequence[TensorRows], order: Sequence[int]) -> TensorRows:
    """One of several, none of whose storages is shared. `order` says of each tensor which part is next."""
    if len(parts) == 1:
        return parts[0]
    sides = np.array(order, np.int64)
    within = np.empty(len(sides), np.int64)
    nbytes = np.empty(len(sides), np.int64)
    identities, kinds = np.empty(len(sides), np.int64), np.empty(len(sides), np.int64)
    first = 0
    for side, part in enumerate(parts):
        here = sides == side
        within[here] = np.arange(len(part))
        nbytes[here] = part.nbytes
        identities[here] = part.identities
        kinds[here] = np.array(part.kinds, np.int64) + first
        first += len(part.table)

    def read(numbers: Sequence[int]) -> Sequence[Piece]:
        some = np.array(numbers, np.int64)
        pieces: list[Piece] = [b""] * len(some)
        for side, part in enumerate(parts):
            here = np.flatnonzero(sides[some] == side)
            for place, piece in zip(here.tolist(), part.read(within[some[here]].tolist()), strict=True):
                pieces[place] = piece
        return pieces

    def alone(number: int, label: str) -> bytes | Data | Memory:
        return parts[order[number]].alone(int(within[number]), label)

    table = list(chain.from_iterable(part.table for part in parts))
    return TensorRows(identities, kinds.tolist(), table, range(len(sides)), nbytes, None, read, alone)


def runs(nbytes: Ints, stops: Ints) -> Iterator[tuple[int, int, bool]]:
    """What is made together of rows that follow each other in a file and end there: ranges of small ones, and each long one."""
    first = 0
    for large in [*np.flatnonzero(nbytes > SMALL_NBYTES).tolist(), len(nbytes)]:
        while first < large:
            # Up to the first one that passes the size, and with it.
            begin = int(stops[first - 1]) if first else int(stops[0] - nbytes[0])
            stop = min(int(np.searchsorted(stops, begin + BLOCK_NBYTES)) + 1, large)
            yield first, stop, True
            first = stop
        if large < len(nbytes):
            yield large, large + 1, False
            first = large + 1


def packed_segments(rows: TensorRows, order: Sequence[int], labels: Sequence[str]) -> list[Segment]:
    """Storages that follow each other in this order, without anything between them."""
    nbytes = rows.nbytes[np.array(order, np.int64)] if len(order) else np.zeros(0, np.int64)
    segments: list[Segment] = []
    for first, stop, small in runs(nbytes, np.cumsum(nbytes)):
        if not small:
            alone = rows.alone(order[first], labels[first])
            if not isinstance(alone, bytes):
                segments.append(alone)
            continue
        here = list(order[first:stop])
        named = list(labels[first:stop])
        segments.append(_packed(rows, here, named, nbytes[first:stop]))
    return segments


def _packed(rows: TensorRows, numbers: list[int], labels: list[str], nbytes: Ints) -> Gathered:
    filled = labels if nbytes.all() else [label for label, length in zip(labels, nbytes.tolist(), strict=True) if length]

    def make() -> tuple[bytes, dict[str, int]]:
        pieces = rows.read(numbers)
        crcs = crc32_each(pieces)
        if len(filled) < len(crcs):
            crcs = [crc for crc, piece in zip(crcs, pieces, strict=True) if len(piece)]
        return b"".join(pieces), dict(zip(filled, crcs, strict=True))

    return Gathered(int(nbytes.sum()), filled, make)
