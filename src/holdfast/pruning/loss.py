"""What pruning takes away: counts and norms, over pieces that add up.

A piece is weighed in steps, as float64. Whatever has read a range tells a `Tally`; where the
ranges cover a tensor, their sum in the order of elements is what the tensor lost, whichever thread was quicker. Where the search
for a threshold counted how often each value is there, no piece needs to be read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.core.tensor import LazyTensor
from holdfast.pruning.keys import ORDERS, pieces
from holdfast.pruning.order import INFINITY_BITS
from holdfast.pruning.select import Counts
from holdfast.pruning.select_masks import Mask, keep_range

__all__ = ["Loss", "Tally", "loss_of", "loss_of_counts", "weighing"]

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


def weighing(tensor: LazyTensor, mask: Mask, tally: Tally, progress: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Pieces of work that together tell the loss of a tensor."""

    def task(start: int, stop: int) -> Callable[[], None]:
        def run() -> None:
            tally.add(start, stop, loss_of(*keep_range(tensor, mask, start, stop)))
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
