"""Tensors that are pruned when they are read, and the masks that did it as packed bits.

As in `computed.py`, these are ordinary lazy tensors over storages that exist nowhere: reading a range of one reads the elements
behind it and applies the mask, so that writing them takes no more memory than writing anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.tensor import LazyTensor
from holdfast.engine.prune_masks import Mask, keep_range, pieces
from holdfast.engine.source import OpenSource
from holdfast.errors import StoreError, Unsupported

__all__ = ["Loss", "Masked", "measure_tasks", "pruned_values"]


def pruned_values(values: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The values with +0.0 in place of what goes; what stays keeps its bits."""
    bits: np.ndarray = values.view(f"u{values.dtype.itemsize}") * kept
    return bits.view(values.dtype)


class Masked:
    """A store of pruned tensors and of masks, and the source that reads them."""

    name = "<pruned>"

    def __init__(self) -> None:
        self._content: dict[str, tuple[LazyTensor, Mask, bool]] = {}
        self._source = OpenSource(self, threads=1)

    def tensor(self, original: LazyTensor, mask: Mask) -> LazyTensor:
        """The tensor with its mask applied. It shares its storage with nothing."""
        storage = Storage(self._add(original, mask, packed=False), 0, original.nbytes, label=original.name)
        made = LazyTensor.contiguous(original.name, original.dtype, original.shape, storage, self._source)
        return replace(made, traits=replace(original.traits, conj=False, neg=False, alias=None))

    def bits(self, name: str, original: LazyTensor, mask: Mask) -> LazyTensor:
        """The mask, a bit an element in C order, the first in the lowest bit; set for what is kept."""
        row = DTYPES.name("uint8")
        if row is None:
            raise Unsupported("the table of dtypes has no uint8")
        count = -(-original.size // 8)
        return LazyTensor.contiguous(name, row, (count,), Storage(self._add(original, mask, packed=True), 0, count), self._source)

    def list(self) -> Sequence[str]:
        return sorted(self._content)

    def size(self, key: str) -> int:
        tensor, _, packed = self._get(key)
        return -(-tensor.size // 8) if packed else tensor.nbytes

    def read(self, key: str, start: int, out: memoryview) -> None:
        tensor, mask, packed = self._get(key)
        if packed:
            _, kept = keep_range(tensor, mask, start * 8, min((start + out.nbytes) * 8, tensor.size))
            out[:] = np.packbits(kept, bitorder="little").data
            return
        width = tensor.dtype.bits // 8
        first, last = start // width, -(-(start + out.nbytes) // width)
        made = pruned_values(*keep_range(tensor, mask, first, last))
        begin = start - first * width
        out[:] = made.view(np.uint8).data[begin : begin + out.nbytes]

    def map(self, key: str) -> memoryview | None:
        return None

    def close(self) -> None:
        self._content.clear()

    def _add(self, original: LazyTensor, mask: Mask, *, packed: bool) -> str:
        key = str(len(self._content))
        self._content[key] = (original, mask, packed)
        return key

    def _get(self, key: str) -> tuple[LazyTensor, Mask, bool]:
        if key not in self._content:
            raise StoreError(f"there is no pruned tensor {key!r}")
        return self._content[key]


@dataclass(frozen=True, slots=True)
class Loss:
    """What pruning some elements takes away."""

    pruned: int = 0
    """Elements that the mask sets to zero, those included that were zero before."""
    zeros: int = 0
    """Zeros afterwards, of both signs."""
    nonfinite: int = 0
    """NaN and infinities before."""
    squares: float = 0.0
    """The sum of the squares of all that is finite."""
    lost: float = 0.0
    """The same of what goes."""

    def __add__(self, other: Loss) -> Loss:
        return Loss(
            self.pruned + other.pruned,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.squares + other.squares,
            self.lost + other.lost,
        )

    @property
    def norm_lost(self) -> float:
        """The L2 norm of what goes, relative to that of the whole: 0 to 1."""
        return math.sqrt(min(self.lost / self.squares, 1.0)) if self.squares else 0.0


def measure_tasks(tensor: LazyTensor, mask: Mask, done: Callable[[int, int, Loss], None]) -> list[Callable[[], None]]:
    """Pieces of work that tell `done` the number of a piece, its length and what it loses; from any thread."""

    def task(number: int, start: int, stop: int) -> Callable[[], None]:
        def run() -> None:
            done(number, stop - start, _loss(*keep_range(tensor, mask, start, stop)))

        return run

    return [task(number, start, stop) for number, (start, stop) in enumerate(pieces(tensor.size, mask.align))]


def _loss(values: np.ndarray, kept: np.ndarray) -> Loss:
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    nonfinite = wide.size - int(np.count_nonzero(finite))
    zeros = int(np.count_nonzero((wide == 0) | ~kept))
    if nonfinite:
        wide = np.where(finite, wide, 0.0)
    with np.errstate(over="ignore"):
        wide *= wide
        total = float(wide.sum())
        lost = float(wide[~kept].sum())
    return Loss(len(kept) - int(np.count_nonzero(kept)), zeros, nonfinite, total, lost)
