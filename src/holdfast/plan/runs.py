"""Which bytes of a storage does a chunk touch? A comb: for every point of some dimensions, one dense stretch.

On dimensions sorted by |stride|:

1. A reversed dimension (negative stride) touches the same bytes as its mirror image, so signs are folded into the offset.
2. Growing outwards from one element, a dimension whose stride is at most the extent so far leaves no gap: it only makes the
   extent longer. These dimensions collapse to one tooth without being enumerated. With a tolerance, gaps that are cheaper to read
   than to skip collapse as well.
3. The remaining dimensions are enumerated, one start a combination. Teeth may still touch, and whoever joins them finds out
   (plan/coalesce.py): strides 2 and 3 over single bytes touch 0, 2, 3, 5, and 2 and 3 are one run.
"""

from __future__ import annotations

import math

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Chunk
from holdfast.core.dtype import DType
from holdfast.core.value import Value


class Comb(Value, frozen=True, gc=False):
    """A chunk as teeth of equal length: for every point of the outer dimensions, one dense stretch of bits."""

    base: int
    """Lowest bit that is touched, relative to the storage."""
    extent: int
    """Bits from the first to the last one of a tooth."""
    outer: tuple[int, ...]
    """Dimensions that are enumerated, the largest stride first."""

    def count(self, chunk: Chunk) -> int:
        """How many teeth there are."""
        return math.prod(chunk.shape[d] for d in self.outer)

    def starts(self, chunk: Chunk) -> Ints:
        """The first bit of each tooth, in C order of the outer dimensions' coordinates."""
        starts = np.zeros(1, np.int64)
        for d in self.outer:
            n, s = chunk.shape[d], chunk.strides[d]
            steps = np.arange(n, dtype=np.int64) * s
            if s < 0:
                steps -= (n - 1) * s
            starts = (starts[:, None] + steps[None, :]).reshape(-1)
        return starts + self.base


def comb(chunk: Chunk, dtype: DType, tolerance: int = 0) -> Comb:
    """Collapse the dimensions that leave gaps of at most `tolerance` bytes. The chunk must not be empty."""
    base, extent = chunk.offset, dtype.bits
    order = sorted(range(chunk.box.rank), key=lambda d: abs(chunk.strides[d]))
    outer: list[int] = []
    for d in order:
        n, s = chunk.shape[d], chunk.strides[d]
        if s < 0:
            base += (n - 1) * s
        if n == 1:
            continue
        if abs(s) <= extent + tolerance * 8:
            extent += (n - 1) * abs(s)
        else:
            outer.append(d)
    return Comb(base, extent, tuple(reversed(outer)))
