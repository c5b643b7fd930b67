"""Tensors that are pruned when they are read, the masks that did it as packed bits, and what was lost.

As in `computed.py`, these are ordinary lazy tensors over storages that exist nowhere: reading a range of one reads the elements
behind it, a piece at a time, and applies the mask, so that writing them takes no more memory than writing anything else. Losses are
measured on the way, so that a report takes no pass of its own.

A loss is counts and norms, over pieces that add up. A piece is weighed in steps, as float64, and added to a `Tally`. If the
pieces cover a tensor, their sum in the order of elements is the loss of the tensor, whichever thread was quicker.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from functools import partial
from operator import add

import numpy as np
from msgspec.structs import astuple

from holdfast.core.arrays import Bools, inner_product
from holdfast.core.chunk import Storage
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.computed import SourcedStore, read_flat_elements
from holdfast.engine.files import UINT8
from holdfast.engine.threads import computing
from holdfast.extras.pruning import select
from holdfast.extras.pruning.masks import Mask, zero_out
from holdfast.stores.virtual import VirtualFile, tensor_stamp

STEP_ELEMENTS = 1 << 18
"""Elements that are weighed at a time: near what a core's cache holds, in calls long enough that threads do not wait for each
other's turn at the interpreter."""


class Loss(Value):
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
        self._mask, self._tally = mask, tally

    def add(self, start: int, values: np.ndarray) -> None:
        loss = loss_of(values, self._mask.keep(values, start))
        self._tally.add(start, start + len(values), loss)

    def result(self) -> None: ...


def loss_of(values: np.ndarray, kept: Bools) -> Loss:
    """Return the loss of these values.

    >>> loss_of(np.array([3.0, 0.0, 4.0, np.nan]), np.array([False, True, True, True]))
    Loss(pruned=1, zeros=2, nonfinite=1, squares=25.0, lost=9.0)
    """
    total = Loss()
    for at in range(0, len(values), STEP_ELEMENTS):
        stays = kept[at : at + STEP_ELEMENTS]
        # Signalling NaN may be widened here.
        with np.errstate(invalid="ignore"):
            wide = values[at : at + STEP_ELEMENTS].astype(np.float64)
        zero_count = np.count_nonzero(~stays | (wide == 0))
        squares, nonfinite_count = inner_product(wide, wide), 0
        if not math.isfinite(squares):
            is_finite = np.isfinite(wide)
            nonfinite_count = len(wide) - int(np.count_nonzero(is_finite))
            wide = np.where(is_finite, wide, 0.0)
            squares = inner_product(wide, wide)
        # A product, since `np.where` takes ten times as long for an irregular mask.
        lost = wide * ~stays
        total += Loss(
            pruned=len(stays) - int(np.count_nonzero(stays)),
            zeros=int(zero_count),
            nonfinite=nonfinite_count,
            squares=squares,
            lost=inner_product(lost, lost),
        )
    return total


class Content(Value):
    """The bytes of a pruned tensor, or of its mask."""

    tensor: LazyTensor
    mask: Mask
    tally: Tally | None
    packed: bool
    """Whether it is the mask itself, a bit an element, and not the values."""

    @property
    def nbytes(self) -> int:
        return -(-self.tensor.size // 8) if self.packed else self.tensor.nbytes

    def read(self, start: int, out: memoryview) -> None:
        """Compute the bytes from `start` on."""
        stop = start + out.nbytes
        if self.packed:
            first, last, skipped = start * 8, min(stop * 8, self.tensor.size), 0
        else:
            width = self.tensor.dtype.bits // 8
            first, last, skipped = start // width, -(-stop // width), start % width
        filled = 0
        # Pieces of whole bytes of a mask, which begin where those of the tensor do.
        step = max(select.PIECE_ELEMENTS // 8, 1) * 8
        while first < last:
            piece_end = min((first // step + 1) * step, last)
            content = self._content(first, piece_end)
            part = content[skipped : skipped + out.nbytes - filled]
            out[filled : filled + len(part)] = part.data
            first, skipped, filled = piece_end, 0, filled + len(part)

    def _content(self, start: int, stop: int) -> np.ndarray:
        """Return the bytes of elements [start, stop) in C order."""
        align = self.mask.align
        first, last = start // align * align, min(-(-stop // align) * align, self.tensor.size)
        wanted = slice(start - first, stop - first)
        values = read_flat_elements(self.tensor, first, last)
        with computing():
            kept = self.mask.keep(values, first)[wanted]
            values = values[wanted]
            if self.tally is not None:
                self.tally.add(start, stop, loss_of(values, kept))
            if self.packed:
                return np.packbits(kept, bitorder="little")
            zero_out(values, kept)
            return values.view(np.uint8)


class Masked(SourcedStore):
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
            name, UINT8, (count,), Storage(self._add(content), 0, count, home=self), self.source
        )

    def _add(self, content: Content) -> str:
        return self.put(
            VirtualFile(content.nbytes, content.read, stamp=partial(tensor_stamp, content.tensor))
        )
