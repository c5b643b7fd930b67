"""Tensors that are pruned when they are read, and the masks that did it as packed bits.

As in `computed.py`, these are ordinary lazy tensors over storages that exist nowhere: reading a range of one reads the elements
behind it, a piece at a time, and applies the mask, so that writing them takes no more memory than writing anything else. What is
lost is told on the way, so that a report takes no pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.tensor import LazyTensor
from holdfast.engine.source import OpenSource
from holdfast.errors import Unsupported
from holdfast.pruning import keys as prune_keys
from holdfast.pruning.loss import Tally, loss_of
from holdfast.pruning.select_masks import Mask, keep_range
from holdfast.stores.virtual import Entry, Virtual, tensor_stamp

__all__ = ["Masked", "pruned_values"]


def pruned_values(values: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The values with +0.0 in place of what goes; what stays keeps its bits."""
    bits: np.ndarray = values.view(f"u{values.dtype.itemsize}") * kept
    return bits.view(values.dtype)


@dataclass(frozen=True, slots=True)
class Content:
    """What one storage holds."""

    tensor: LazyTensor
    mask: Mask
    tally: Tally | None
    """Told what is lost."""
    packed: bool
    """The mask itself, a bit an element; not the values."""

    @property
    def nbytes(self) -> int:
        return -(-self.tensor.size // 8) if self.packed else self.tensor.nbytes

    def read(self, start: int, out: memoryview) -> None:
        """The bytes from `start` on."""
        if self.packed:
            first, last, begin = start * 8, min((start + out.nbytes) * 8, self.tensor.size), 0
        else:
            width = self.tensor.dtype.bits // 8
            first, last, begin = start // width, -(-(start + out.nbytes) // width), start % width
        at = 0
        for made in self._elements(first, last):
            part = made[begin : begin + out.nbytes - at]
            out[at : at + len(part)] = part.data
            at, begin = at + len(part), 0

    def _elements(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """The bytes of elements [start, stop), in pieces that begin where a tensor's pieces do."""
        step = max(prune_keys.PIECE_ELEMENTS // 8, 1) * 8
        while start < stop:
            end = min((start // step + 1) * step, stop)
            values, kept = keep_range(self.tensor, self.mask, start, end)
            if self.tally is not None:
                self.tally.add(start, end, loss_of(values, kept))
            yield np.packbits(kept, bitorder="little") if self.packed else pruned_values(values, kept).view(np.uint8)
            start = end


class Masked(Virtual):
    """A store of pruned tensors and of masks, and the source that reads them."""

    def __init__(self) -> None:
        super().__init__("<pruned>")
        self._source = OpenSource(self, threads=1)

    def tensor(self, original: LazyTensor, mask: Mask, tally: Tally | None = None) -> LazyTensor:
        """The tensor with its mask applied. It shares its storage with nothing. Reading it tells the tally what is lost."""
        key = self._add(Content(original, mask, tally, packed=False))
        storage = Storage(key, 0, original.nbytes, label=original.name, home=self)
        made = LazyTensor.contiguous(original.name, original.dtype, original.shape, storage, self._source)
        return replace(made, traits=replace(original.traits, conj=False, neg=False, alias=None))

    def bits(self, name: str, original: LazyTensor, mask: Mask, tally: Tally | None = None) -> LazyTensor:
        """The mask, a bit an element in C order, the first in the lowest bit; set for what is kept."""
        row = DTYPES.name("uint8")
        if row is None:
            raise Unsupported("the table of dtypes has no uint8")
        content = Content(original, mask, tally, packed=True)
        count = content.nbytes
        return LazyTensor.contiguous(name, row, (count,), Storage(self._add(content), 0, count, home=self), self._source)

    def _add(self, content: Content) -> str:
        entry = Entry(content.nbytes, content.read, stamp=partial(tensor_stamp, content.tensor))
        return self.put(entry)
