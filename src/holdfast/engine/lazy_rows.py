"""What very many lazy tensors of one file are, asked in columns, and their bytes by few reads (`plan.rows`).

*Ordinary* is a tensor that `core.columns` calls so, which is all of its storage, shares it with none, and is nothing beyond its
elements. Its bytes are read when they are written, those of neighbours together, and compared with the checksum that the file
records. What cannot be read is read again by itself, so that the error names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from holdfast.core.chunk import c_strides
from holdfast.core.columns import NO_CRC, Columns, columns_of
from holdfast.core.crc import crc32
from holdfast.core.dtype import DType
from holdfast.core.protocols import Store
from holdfast.core.rows import RowTensor
from holdfast.core.tensor import PLAIN, LazyTensor
from holdfast.engine.readback import source_changed
from holdfast.errors import HoldfastError, located
from holdfast.plan.coalesce import MEMORY, coalesce
from holdfast.plan.rows import RowKind, TensorRows
from holdfast.plan.saves import Data

LAZY_TYPES = (LazyTensor, RowTensor)


class LazyRows:
    """The bytes of tensors in files."""

    def __init__(self, tensors: Sequence[LazyTensor], columns: Columns) -> None:
        self._tensors, self._columns = tensors, columns
        self._store: Store = tensors[0].source.store

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        """Those of these numbers."""
        columns, wanted = self._columns, np.array(numbers, np.int64)
        pieces: list[memoryview] = [memoryview(b"")] * len(wanted)
        for file in np.unique(columns.files[wanted]).tolist():
            places = np.flatnonzero(columns.files[wanted] == file)
            places = places[np.argsort(columns.starts[wanted[places]], kind="stable")]
            starts = columns.starts[wanted[places]]
            stops = starts + columns.nbytes[wanted[places]]
            heads = coalesce(starts, stops, MEMORY)
            ends = [*heads[1:].tolist(), len(places)]
            for first, last in zip(heads.tolist(), ends, strict=True):
                begin = int(starts[first])
                data = self._span(columns.keys[file], begin, int(stops[last - 1]), wanted[places[first:last]].tolist())
                rows = zip(places[first:last].tolist(), starts[first:last].tolist(), stops[first:last].tolist(), strict=True)
                for place, start, stop in rows:
                    pieces[place] = data[start - begin : stop - begin]
        self._compare(wanted.tolist(), pieces)
        return pieces

    def _span(self, key: str, start: int, stop: int, members: list[int]) -> memoryview:
        data = np.empty(stop - start, np.uint8).data
        try:
            self._store.read(key, start, data)
        except HoldfastError:
            for number in members:
                begin = int(self._columns.starts[number])
                with located(tensor=self._tensors[number].name):
                    self._store.read(key, begin, data[begin - start : begin - start + int(self._columns.nbytes[number])])
        return data

    def _compare(self, numbers: list[int], pieces: list[memoryview]) -> None:
        recorded = self._columns.crcs[np.array(numbers, np.int64)].tolist()
        for number, piece, crc in zip(numbers, pieces, recorded, strict=True):
            if crc != NO_CRC and (found := crc32(piece)) != crc:
                raise source_changed(self._tensors[number], found)

    def alone(self, number: int, label: str) -> Data:
        """Those of a long one, a block at a time."""
        return Data(self._tensors[number], label)


def ask_lazy(values: list[object]) -> TensorRows | None:
    """The rows of lazy tensors, none of them empty; None where one is not ordinary."""
    tensors = cast("list[LazyTensor]", values)
    sources = {id(tensor.source): tensor.source for tensor in tensors}
    if len(sources) != 1:
        return None
    store = tensors[0].source.store
    traits = {id(tensor.traits): tensor.traits for tensor in tensors}
    if store.requests or store.in_order or store.resident or any(one != PLAIN for one in traits.values()):
        return None
    columns = columns_of(tensors, range(len(tensors)))
    if len(columns) < len(tensors) or not columns.nbytes.all() or any(store.cost(key, 1 << 20) != 1 << 20 for key in columns.keys):
        return None
    order = np.lexsort((columns.starts, columns.files))
    starts, nbytes, files = columns.starts[order], columns.nbytes[order], columns.files[order]
    if ((starts[:-1] + nbytes[:-1] > starts[1:]) & (files[:-1] == files[1:])).any():
        return None
    positions: dict[tuple[DType, tuple[int, ...], str], int] = {}
    kinds: list[int] = []
    for tensor, length in zip(tensors, columns.nbytes.tolist(), strict=True):
        if type(tensor) is RowTensor:
            whole, location = tensor.kind.nbytes, tensor.kind.location
        else:
            storage = tensor.chunks[0].storage
            whole, location = storage.nbytes, storage.location
        if whole != length:
            return None
        kinds.append(positions.setdefault((tensor.dtype, tensor.shape, location), len(positions)))
    table = [_kind(*kind, nbytes=int(columns.nbytes[kinds.index(at)])) for kind, at in positions.items()]
    held = LazyRows(tensors, columns)
    own = np.fromiter(map(id, tensors), np.int64, len(tensors))
    return TensorRows(own, kinds, table, range(len(tensors)), columns.nbytes, None, held.read, held.alone)


def _kind(dtype: DType, shape: tuple[int, ...], location: str, *, nbytes: int) -> RowKind:
    count = nbytes * 8 // dtype.bits if dtype.storage else nbytes
    return RowKind(dtype, shape, c_strides(shape, 1), 0, count, location=location or "cpu")
