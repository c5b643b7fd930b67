"""What very many lazy tensors of one file are, asked in columns, and their bytes by few reads (`plan.rows`).

*Ordinary* is a tensor that `core.columns` calls so, which is all of its storage, shares it with none, and is nothing beyond its
elements. Its bytes are read when they are written, those of neighbours together, and compared with the checksum that the file
records. What cannot be read is read again by itself, so that the error names it.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from holdfast.core.chunk import c_strides
from holdfast.core.columns import columns_of
from holdfast.core.dtype import DType
from holdfast.core.rows import RowTensor
from holdfast.core.tensor import PLAIN, LazyTensor
from holdfast.plan.files import FilePlace, FileStorages
from holdfast.plan.rows import RowKind, TensorRows

LAZY_TYPES = (LazyTensor, RowTensor)


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
    places = [FilePlace(tensors[0].source, key, store) for key in columns.keys]
    names = [tensor.name for tensor in tensors]
    held = FileStorages(places, columns.files, columns.starts, columns.nbytes, columns.crcs, names=names)
    own = np.fromiter(map(id, tensors), np.int64, len(tensors))
    return TensorRows(own, kinds, table, range(len(tensors)), columns.nbytes, None, held.read, held.alone)


def _kind(dtype: DType, shape: tuple[int, ...], location: str, *, nbytes: int) -> RowKind:
    count = nbytes * 8 // dtype.bits if dtype.storage else nbytes
    return RowKind(dtype, shape, c_strides(shape, 1), 0, count, location=location or "cpu")
