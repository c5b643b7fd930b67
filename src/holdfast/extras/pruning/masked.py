"""Tensors that are pruned when they are read, the masks that did it as packed bits, and what was lost.

As in `computed.py`, these are ordinary lazy tensors over storages that exist nowhere: reading a range of one reads the elements
behind it, a piece at a time, and applies the mask, so that writing them takes no more memory than writing anything else. Losses are
measured on the way, so that a report takes no pass of its own.

A loss is counts and norms, over pieces that add up. A piece is weighed in steps, as float64, and added to a `Tally`; where the
pieces cover a tensor, their sum in the order of elements is the loss of the tensor, whichever thread was quicker. Where the search
for a threshold counted how often each value is there, no piece needs to be read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from operator import add

import numpy as np
from msgspec.structs import astuple

from holdfast.core.arrays import Bools, Ints, inner
from holdfast.core.chunk import Storage
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.computed import read_flat
from holdfast.engine.files import BYTES
from holdfast.engine.source import Sourced
from holdfast.engine.threads import computing
from holdfast.extras.pruning import select
from holdfast.extras.pruning.masks import Mask, zero_out
from holdfast.numeric.cast import as_float64
from holdfast.numeric.threshold import INFINITY_BITS, ORDERS
from holdfast.stores.virtual import VirtualFile, tensor_stamp

STEP_ELEMENTS = 1 << 18
"""Elements that are pruned and weighed at a time: near what a core's cache holds, in calls long enough that threads do not wait for
each other's turn at the interpreter."""


class Loss(Value, frozen=True):
    """The counts and norms of elements that are pruned."""

    pruned: int = 0
    """Elements that the mask sets to zero, those included that were zero before."""
    zeros: int = 0
    """Zeros afterwards, of both signs."""
    nonfinite: int = 0
    squares: float = 0.0
    """The sum of the squares of all that is finite."""
    lost: float = 0.0
    """The sum of the squares of what is pruned."""

    def __add__(self, other: Loss) -> Loss:
        return Loss(*map(add, astuple(self), astuple(other)))

    @property
    def norm_lost(self) -> float:
        """The L2 norm of what goes, relative to that of the whole: 0 to 1; NaN where nothing is finite."""
        if not self.squares:
            return math.nan if self.nonfinite else 0.0
        return math.sqrt(min(self.lost / self.squares, 1.0))


TallyPart = tuple[int, int, Loss]  # A range, and its loss.


class Tally:
    """The losses of ranges of one tensor, added by any thread. A range that is added twice counts once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int], Loss] = {}

    def add(self, start: int, stop: int, loss: Loss) -> None:
        with self._lock:
            self._parts[start, stop] = loss

    def clear(self) -> None:
        self._parts.clear()

    def parts(self) -> list[TallyPart]:
        """What was added, as it is sent to other ranks."""
        return [(start, stop, loss) for (start, stop), loss in self._parts.items()]

    def put(self, parts: Iterable[TallyPart]) -> None:
        for part in parts:
            self.add(*part)

    def whole(self) -> Loss | None:
        """The loss of the tensor, if the ranges cover it and do not overlap."""
        reach, total = 0, Loss()
        for (start, stop), loss in sorted(self._parts.items(), key=lambda item: item[0]):
            if start != reach:
                return None
            reach, total = stop, total + loss
        return total if reach == self._size else None


class Weighed:
    """Adds the losses of a mask to a tally. Blocks begin at multiples of the mask's `align`."""

    def __init__(self, mask: Mask, tally: Tally) -> None:
        mask.prepare()
        self._mask, self._tally = mask, tally

    def add(self, start: int, values: np.ndarray) -> None:
        self._tally.add(
            start, start + len(values), prune_values(values.copy(), self._mask, start, weigh=True)
        )

    def result(self) -> None: ...


def loss_of(values: np.ndarray, kept: np.ndarray) -> Loss:
    """The loss of these values.

    >>> loss_of(np.array([3.0, 0.0, 4.0, np.nan]), np.array([False, True, True, True]))
    Loss(pruned=1, zeros=2, nonfinite=1, squares=25.0, lost=9.0)
    """
    total = Loss()
    for at in range(0, len(values), STEP_ELEMENTS):
        before = values[at : at + STEP_ELEMENTS]
        after = before.copy()
        total += _lost(before, after, zero_out(after, kept[at : at + STEP_ELEMENTS]))
    return total


def prune_values(values: np.ndarray, mask: Mask, start: int, *, weigh: bool) -> Loss:
    """Apply a mask to values in their place, the first of which has this index, a multiple of `mask.align`; what they lose."""
    unit = mask.row if mask.row <= STEP_ELEMENTS else mask.align
    total = Loss()
    for low, high in _cut(start, start + len(values), max(STEP_ELEMENTS // unit, 1) * unit):
        part = values[low - start : high - start]
        before = part.copy() if weigh else None
        gone = mask.prune(part, low)
        if before is not None:
            total += _lost(before, part, gone)
    return total


def _cut(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = min((start // step + 1) * step, stop)
        yield start, end
        start = end


def loss_of_counts(there: Ints, gone: Ints, order: str) -> Loss:
    """The loss of values that were counted, each by its key."""
    (floats, bits), infinity = ORDERS[order], INFINITY_BITS[order]
    wide = np.arange(infinity, dtype=bits).view(floats).astype(np.float64)
    squares = wide * wide
    return Loss(
        int(gone.sum()), int(there[0] + gone[1:].sum()), int(there[infinity:].sum()), float((squares * there[:infinity]).sum()),
        float((squares * gone[:infinity]).sum()),
    )  # fmt: skip


def _lost(before: np.ndarray, after: np.ndarray, gone: int) -> Loss:
    kind = f"u{before.dtype.itemsize}"
    bits = after.view(kind)
    with np.errstate(
        invalid="ignore", over="ignore"
    ):  # a signalling NaN that is widened, a float64 whose square is none
        wide = as_float64(before)
        lost = as_float64((before.view(kind) ^ bits).view(before.dtype))
        nonfinite = 0
        squares = inner(wide, wide)
        if not math.isfinite(squares):
            finite = np.isfinite(wide)
            nonfinite = len(wide) - int(np.count_nonzero(finite))
            wide, lost = np.where(finite, wide, 0.0), np.where(finite, lost, 0.0)
            squares = inner(wide, wide)
        stays = np.count_nonzero(bits << bits.dtype.type(1))  # all but the sign
        return Loss(gone, len(bits) - int(stays), nonfinite, squares, inner(lost, lost))


class Content(Value, frozen=True):
    tensor: LazyTensor
    mask: Mask
    tally: Tally | None
    packed: bool
    """Whether it is the mask itself, a bit an element, and not the values."""

    @property
    def nbytes(self) -> int:
        return -(-self.tensor.size // 8) if self.packed else self.tensor.nbytes

    def read(self, start: int, out: memoryview) -> None:
        width = self.tensor.dtype.bits // 8
        if self.packed:
            first, last, begin = start * 8, min((start + out.nbytes) * 8, self.tensor.size), 0
        elif start % width or out.nbytes % width:
            first, last, begin = start // width, -(-(start + out.nbytes) // width), start % width
        else:
            self._fill(
                start // width, np.ndarray(out.nbytes // width, self.tensor.dtype.numpy, out)
            )
            return
        at = 0
        for low, high in self._pieces(first, last):
            values, kept = self._kept(low, high)
            if not self.packed:
                zero_out(values, kept)
            made = np.packbits(kept, bitorder="little") if self.packed else values.view(np.uint8)
            part = made[begin : begin + out.nbytes - at]
            out[at : at + len(part)] = part.data
            at, begin = at + len(part), 0

    def _fill(self, start: int, out: np.ndarray) -> None:
        """The elements from `start` on: read into their place, and pruned there."""
        for low, high in self._pieces(start, start + len(out)):
            part = out[low - start : high - start]
            if low % self.mask.align or (high % self.mask.align and high != self.tensor.size):
                part[:], kept = self._kept(low, high)
                zero_out(part, kept)
                continue
            read_flat(self.tensor, low, high, out=part)
            self.mask.prepare()
            with computing():
                loss = prune_values(part, self.mask, low, weigh=self.tally is not None)
            if self.tally is not None:
                self.tally.add(low, high, loss)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Elements [start, stop), in pieces that begin where a tensor's pieces do."""
        return _cut(start, stop, max(select.PIECE_ELEMENTS // 8, 1) * 8)

    def _kept(self, start: int, stop: int) -> tuple[np.ndarray, Bools]:
        """The elements [start, stop) in C order, and which of them stay."""
        align = self.mask.align
        first, last = start // align * align, min(-(-stop // align) * align, self.tensor.size)
        values = read_flat(self.tensor, first, last)
        self.mask.prepare()
        with computing():
            kept = self.mask.keep(values, first)[start - first : stop - first]
        values = values[start - first : stop - first]
        if self.tally is not None:
            self.tally.add(start, stop, loss_of(values, kept))
        return values, kept


class Masked(Sourced):
    """A store of pruned tensors and of masks, and the source that reads them."""

    def __init__(self) -> None:
        super().__init__("<pruned>")

    def tensor(self, original: LazyTensor, mask: Mask, tally: Tally | None = None) -> LazyTensor:
        """The tensor with its mask applied. It shares its storage with nothing. Reading it adds the losses to the tally."""
        key = self._add(Content(original, mask, tally, packed=False))
        storage = Storage(key, 0, original.nbytes, label=original.name, home=self)
        made = LazyTensor.contiguous(
            original.name, original.dtype, original.shape, storage, self.source
        )
        return replace(made, traits=replace(original.traits, conj=False, neg=False, alias=None))

    def bits(
        self, name: str, original: LazyTensor, mask: Mask, *, tally: Tally | None = None
    ) -> LazyTensor:
        """The mask, a bit an element in C order, the first in the lowest bit; set for what is kept."""
        content = Content(original, mask, tally, packed=True)
        count = content.nbytes
        return LazyTensor.contiguous(
            name, BYTES, (count,), Storage(self._add(content), 0, count, home=self), self.source
        )

    def _add(self, content: Content) -> str:
        return self.put(
            VirtualFile(content.nbytes, content.read, stamp=partial(tensor_stamp, content.tensor))
        )
