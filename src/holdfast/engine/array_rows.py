"""What very many numpy arrays are, asked in columns, and their bytes (`plan.rows`).

*Ordinary* is an array of numpy's own class that owns its memory, in C order, of a dtype that a file may have: what owns its memory
shares it with no other that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import cast

import numpy as np

from holdfast.core.arrays import AnyDType, byte_row
from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DTYPES, DType
from holdfast.plan.rows import BATCH, RowKind, TensorRows
from holdfast.plan.saves import Memory

TYPES = (np.ndarray,)

Ask = Callable[[list[object]], TensorRows | None]
"""From tensors of its types to their rows; None where one is not ordinary."""

DTYPE, SHAPE, NBYTES, BASE, FLAGS = map(attrgetter, ("dtype", "shape", "nbytes", "base", "flags"))
IN_ORDER, OWNED = attrgetter("c_contiguous"), attrgetter("owndata")


class ArrayRows:
    """The bytes of arrays."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """Copies of those of these numbers: to make a view takes longer."""
        arrays = self._arrays
        return [arrays[number].tobytes() for number in numbers]

    def alone(self, number: int, label: str) -> Memory | bytes:
        """Those of one, where they lie."""
        array = self._arrays[number]
        return Memory(byte_row(array).data, label, array) if array.nbytes else b""


def ask_arrays(values: list[object]) -> TensorRows | None:
    """The rows of arrays."""
    arrays = cast("list[np.ndarray]", values)
    known: dict[AnyDType, DType] = {}
    positions: dict[tuple[AnyDType, tuple[int, ...]], int] = {}
    kinds: list[int] = []
    for first in range(0, len(arrays), BATCH):
        some = arrays[first : first + BATCH]
        flags = list(map(FLAGS, some))
        if {*map(id, map(BASE, some))} != {id(None)} or not all(map(IN_ORDER, flags)) or not all(map(OWNED, flags)):
            return None
        dtypes = list(map(DTYPE, some))
        for dtype in set(dtypes):
            row = DTYPES.numpy(dtype) if dtype.isnative and not dtype.hasobject else None
            if row is None or row.packed:
                return None
            known[dtype] = row
        kinds += [positions.setdefault(one, len(positions)) for one in zip(dtypes, map(SHAPE, some), strict=True)]
    table = [_kind(known[dtype], shape) for dtype, shape in positions]
    nbytes = np.fromiter(map(NBYTES, arrays), np.int64, len(arrays))
    own = np.fromiter(map(id, arrays), np.int64, len(arrays))
    held = ArrayRows(arrays)
    return TensorRows(own, kinds, table, range(len(arrays)), nbytes, None, held.read, held.alone)


def ordinary_arrays(values: list[object]) -> list[bool]:
    """Whether each of some arrays is ordinary."""
    arrays = cast("list[np.ndarray]", values)
    known: dict[AnyDType, bool] = {}
    for dtype in {*map(DTYPE, arrays)}:
        row = DTYPES.numpy(dtype) if dtype.isnative and not dtype.hasobject else None
        known[dtype] = row is not None and not row.packed
    return [known[one.dtype] and one.base is None and one.flags.c_contiguous and one.flags.owndata for one in arrays]


def array_addresses(values: list[object]) -> list[int]:
    """Where the memory of each of some arrays begins."""
    return [array.__array_interface__["data"][0] for array in cast("list[np.ndarray]", values)]


def _kind(dtype: DType, shape: tuple[int, ...]) -> RowKind:
    count = 1
    for n in shape:
        count *= n
    return RowKind(dtype, shape, c_strides(shape, 1), 0, count if dtype.storage else count * dtype.bits // 8)
