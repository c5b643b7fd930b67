"""Tensors that are pruned when they are read, the masks that did it as packed bits, and what was lost.

As in `computed.py`, these are ordinary lazy tensors over storages that exist nowhere: reading a range of one reads the elements
behind it, a piece at a time, and applies the mask, so that writing them takes no more memory than writing anything else. What is
lost is told on the way, so that a report takes no pass of its own.

What pruning takes away is counts and norms, over pieces that add up. A piece is weighed in steps, as float64. Whatever has read a
range tells a `Tally`; where the ranges cover a tensor, their sum in the order of elements is what the tensor lost, whichever
thread was quicker. Where the search for a threshold counted how often each value is there, no piece needs to be read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.tensor import LazyTensor
from holdfast.engine.source import Sourced
from holdfast.errors import Unsupported
from holdfast.pruning import keys as prune_keys
from holdfast.pruning.keys import ORDERS, pieces
from holdfast.pruning.order import INFINITY_BITS
from holdfast.pruning.select import Counts, Mask, keep_range
from holdfast.stores.virtual import Entry, tensor_stamp

__all__ = ["Loss", "Masked", "Tally", "loss_of", "loss_of_counts", "pruned_values", "weighing"]

STEP_ELEMENTS = 1 << 17
"""Elements that are weighed at a time: 1 MiB as float64, which a cache holds, in calls long enough that threads do not wait for
each other's turn at the interpreter."""


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


class Tally:
    """The losses of ranges of one tensor, told by any thread. A range that is told twice counts once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int], Loss] = {}

    def add(self, start: int, stop: int, loss: Loss) -> None:
        """What the elements [start, stop) lose."""
        with self._lock:
            self._parts[start, stop] = loss

    def clear(self) -> None:
        """Forget everything."""
        self._parts.clear()

    def whole(self) -> Loss | None:
        """What the tensor loses, if the ranges cover it and do not overlap."""
        reach, total = 0, Loss()
        for (start, stop), loss in sorted(self._parts.items(), key=lambda item: item[0]):
            if start != reach:
                return None
            reach, total = stop, total + loss
        return total if reach == self._size else None


def weighing(tensor: LazyTensor, mask: Mask, tally: Tally, *, progress: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Pieces of work that together tell the loss of a tensor."""

    def task(start: int, stop: int) -> Callable[[], None]:
        def run() -> None:
            tally.add(start, stop, loss_of(*keep_range(tensor, mask, start, stop=stop)))
            progress(tensor.dtype.nbytes(stop - start))

        return run

    tally.clear()
    return (task(start, stop) for start, stop in pieces(tensor.size, mask.align))


def loss_of(values: np.ndarray, kept: np.ndarray) -> Loss:
    """What these values lose.

    >>> loss_of(np.array([3.0, 0.0, 4.0, np.nan]), np.array([False, True, True, True]))
    Loss(pruned=1, zeros=2, nonfinite=1, squares=25.0, lost=9.0)
    """
    total = Loss()
    for at in range(0, len(values), STEP_ELEMENTS):
        total += _step(values[at : at + STEP_ELEMENTS], kept[at : at + STEP_ELEMENTS])
    return total


def loss_of_counts(counts: Counts, order: str) -> Loss:
    """What goes of values that were counted, each by its key."""
    (floats, bits), infinity = ORDERS[order], INFINITY_BITS[order]
    wide = np.arange(infinity, dtype=bits).view(floats).astype(np.float64)
    squares = wide * wide
    there, gone = counts.there, counts.gone
    return Loss(
        int(gone.sum()),
        int(there[0] + gone[1:].sum()),
        int(there[infinity:].sum()),
        float((squares * there[:infinity]).sum()),
        float((squares * gone[:infinity]).sum()),
    )


def _step(values: np.ndarray, kept: np.ndarray) -> Loss:
    bits = values.view(f"u{values.dtype.itemsize}")
    gone = ~kept
    with np.errstate(invalid="ignore", over="ignore"):  # a signalling NaN that is widened, a float64 whose square is none
        wide, lost = values.astype(np.float64), (bits * gone).view(values.dtype).astype(np.float64)
        nonfinite = 0
        squares = float(np.einsum("i,i->", wide, wide))
        if not math.isfinite(squares):
            finite = np.isfinite(wide)
            nonfinite = len(wide) - int(np.count_nonzero(finite))
            wide, lost = np.where(finite, wide, 0.0), np.where(finite, lost, 0.0)
            squares = float(np.einsum("i,i->", wide, wide))
        stays = (bits << bits.dtype.type(1)) != 0  # all but the sign
        np.logical_and(stays, kept, out=stays)
        return Loss(
            int(np.count_nonzero(gone)),
            len(kept) - int(np.count_nonzero(stays)),
            nonfinite,
            squares,
            float(np.einsum("i,i->", lost, lost)),
        )


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
            values, kept = keep_range(self.tensor, self.mask, start, stop=end)
            if self.tally is not None:
                self.tally.add(start, end, loss_of(values, kept))
            yield np.packbits(kept, bitorder="little") if self.packed else pruned_values(values, kept).view(np.uint8)
            start = end


class Masked(Sourced):
    """A store of pruned tensors and of masks, and the source that reads them."""

    def __init__(self) -> None:
        super().__init__("<pruned>")

    def tensor(self, original: LazyTensor, mask: Mask, tally: Tally | None = None) -> LazyTensor:
        """The tensor with its mask applied. It shares its storage with nothing. Reading it tells the tally what is lost."""
        key = self._add(Content(original, mask, tally, packed=False))
        storage = Storage(key, 0, original.nbytes, label=original.name, home=self)
        made = LazyTensor.contiguous(original.name, original.dtype, original.shape, storage, self.source)
        return replace(made, traits=replace(original.traits, conj=False, neg=False, alias=None))

    def bits(self, name: str, original: LazyTensor, mask: Mask, *, tally: Tally | None = None) -> LazyTensor:
        """The mask, a bit an element in C order, the first in the lowest bit; set for what is kept."""
        row = DTYPES.name("uint8")
        if row is None:
            raise Unsupported("the table of dtypes has no uint8")
        content = Content(original, mask, tally, packed=True)
        count = content.nbytes
        return LazyTensor.contiguous(name, row, (count,), Storage(self._add(content), 0, count, home=self), self.source)

    def _add(self, content: Content) -> str:
        entry = Entry(content.nbytes, content.read, stamp=partial(tensor_stamp, content.tensor))
        return self.put(entry)
