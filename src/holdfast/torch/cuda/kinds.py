"""As what the bytes of many tensors of a kind are copied on a device, and how they are cut out of a row of bytes.

Bytes are copied as integers, which any bits survive: torch might take elements for numbers on the way, and change those that are
none. Where integers are as wide as the elements they have the shape of the tensor as well, so that nothing is left to be done
with a copy but to name its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
import torch

from holdfast.core.arrays import Ints
from holdfast.core.chunk import c_strides
from holdfast.torch.tensors.scratch import flat

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers, by their width."""


class Kind(NamedTuple):
    """What many tensors have in common, and as what their bytes are copied."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    carrier: torch.dtype
    carried: tuple[int, ...]
    """The shape of so many integers: that of the tensor where they are as wide as its elements."""

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...], *, octets: bool = False) -> Kind:
        """Tensors of a dtype and a shape. `octets`: what does not begin at a multiple of its width is copied as bytes."""
        width = 1 if octets else min(dtype.itemsize, 8)
        whole = shape if width == dtype.itemsize else (math.prod(shape) * dtype.itemsize // width,)
        return cls(dtype, shape, CARRIERS[width], whole)

    def typed(self, made: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Integers as the tensors that they stand for."""
        if self.dtype is not self.carrier:
            made = map(torch.Tensor.view, made, repeat(self.dtype))
        return made if self.carried == self.shape else map(torch.Tensor.view, made, repeat(self.shape))

    def integers(self, target: torch.Tensor) -> torch.Tensor:
        """A tensor of this kind, contiguous, as integers."""
        row = target if self.carried == self.shape else flat(target)
        return row if row.dtype is self.carrier else row.view(self.carrier)


def views(row: torch.Tensor, starts: Ints, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Views of a shape that begin at these elements of a row: by one call for those that are equally far from each other.

    >>> [view.tolist() for view in views(torch.arange(9), np.array([0, 3, 6, 7]), (2,))]
    [[0, 1], [3, 4], [6, 7], [7, 8]]
    """
    strides = c_strides(shape, 1)
    steps = np.diff(starts)
    found: list[torch.Tensor] = []
    for first, last in pairwise([0, *(np.flatnonzero(np.diff(steps)) + 2).tolist(), len(starts)]):
        start = int(starts[first])
        if last - first == 1:
            found.append(row.as_strided(shape, strides, start))
        else:
            found += row.as_strided((last - first, *shape), (int(steps[first]), *strides), start).unbind()
    return found
