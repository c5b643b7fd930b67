"""Pieces of a fill that fit into a block of scratch, and the way of their elements from there into a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.tensor import PLAIN, LazyTensor
from holdfast.torch.tensors.from_lazy import carrier_dtype

__all__ = ["Fill", "Part", "boxes", "copy_values", "flat", "in_file_order", "parts_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """A lazy tensor, and the torch tensor of its shape that shall have its elements."""

    lazy: LazyTensor
    target: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A piece of a fill that fits into a block of scratch."""

    lazy: LazyTensor
    target: torch.Tensor
    conj: bool
    neg: bool


def parts_of(one: Fill, most: int) -> Iterator[Part]:
    """Cut a fill along its chunks, and each chunk into boxes that fit into `most` bytes and are in one piece in the file."""
    traits = one.lazy.traits
    for chunk in one.lazy.chunks:
        lazy, target = in_file_order(one, chunk)
        for box in boxes(lazy.shape, most // lazy.dtype.numpy.itemsize):
            yield Part(lazy[box] if box else lazy, target[box] if box else target, traits.conj, traits.neg)


def in_file_order(one: Fill, chunk: Chunk) -> tuple[LazyTensor, torch.Tensor]:
    """A chunk of a fill as a tensor of its own and the part of the target that it fills, dimensions as the file has them."""
    order = sorted(range(chunk.box.rank), key=lambda d: -chunk.strides[d])
    shape = tuple(chunk.shape[d] for d in order)
    moved = Chunk(Box.whole(shape), chunk.storage, chunk.offset, tuple(chunk.strides[d] for d in order))
    lazy = replace(one.lazy, shape=shape, chunks=(moved,), traits=PLAIN)
    return lazy, (one.target[chunk.box.slices] if chunk.box.rank else one.target).permute(order)


def boxes(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most `most` elements, in C order, that make up a shape.

    >>> list(boxes((2, 3), 4))
    [(slice(0, 1, None), slice(0, 3, None)), (slice(1, 2, None), slice(0, 3, None))]
    """
    if math.prod(shape) <= most:
        yield tuple(slice(0, n) for n in shape)
        return
    row = math.prod(shape[1:])
    rows = max(1, most // row)
    for start in range(0, shape[0], rows):
        outer = slice(start, min(start + rows, shape[0]))
        if row <= most:
            yield (outer, *(slice(0, n) for n in shape[1:]))
        else:
            yield from ((outer, *inner) for inner in boxes(shape[1:], most))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor in a row; a single one may have any stride, and no longer has."""
    return tensor.as_strided((tensor.numel(),), (1,))


def copy_values(value: torch.Tensor, target: torch.Tensor, *, conj: bool, neg: bool) -> None:
    """Copy elements, as a file has them, into a tensor on the same device; a cast happens there."""
    value = value.conj() if conj else value
    value = value.neg() if neg else value
    if value.dtype == target.dtype and not (value.is_conj() or target.is_conj() or target.is_neg()):
        # As integers of the same width: there are dtypes that torch cannot copy.
        carrier = carrier_dtype(target.element_size())
        target, value = target.view(carrier), value.view(carrier)
    target.copy_(value)
