"""Pieces of a fill that fit into a block of scratch memory, and the copy of their elements from there into a tensor.

`CastLosses` counts what torch's casts lose, for a note in the report. On the CPU the engine's quick test looks at the elements in
scratch memory; only where it finds something are results compared, pair by pair. On a GPU they are compared there, and nothing
waits for the counts until all is filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.tensor import PLAIN_TRAITS, LazyTensor
from holdfast.core.value import Value, replace
from holdfast.numeric.cast import OUTCOMES, count_losses
from holdfast.torch import versions
from holdfast.torch.tensors.from_lazy import array_of, view_dtype
from holdfast.verbs.shared.transform import Losses


class Fill(Value, frozen=True, eq=False):
    """A lazy tensor, and the torch tensor of its shape that gets its elements."""

    lazy: LazyTensor
    target: torch.Tensor


class ScratchPiece(Value, frozen=True, eq=False):
    lazy: LazyTensor
    target: torch.Tensor
    conj: bool
    neg: bool


def parts_of(one: Fill, most: int) -> Iterator[ScratchPiece]:
    """Cut a fill along its chunks, and each chunk into boxes that fit into `most` bytes and are in one piece in the file."""
    traits = one.lazy.traits
    for chunk in one.lazy.chunks:
        lazy, target = in_file_order(one, chunk)
        for box in boxes(lazy.shape, most // lazy.dtype.numpy.itemsize):
            yield ScratchPiece(
                lazy[box] if box else lazy, target[box] if box else target, traits.conj, traits.neg
            )


def in_file_order(one: Fill, chunk: Chunk) -> tuple[LazyTensor, torch.Tensor]:
    """A chunk of a fill as a tensor of its own and the part of the target that it fills, dimensions as the file has them."""
    order = sorted(range(chunk.box.rank), key=lambda d: -chunk.strides[d])
    shape = tuple(chunk.shape[d] for d in order)
    moved = Chunk(
        Box.whole(shape), chunk.storage, chunk.offset, tuple(chunk.strides[d] for d in order)
    )
    lazy = replace(one.lazy, shape=shape, chunks=(moved,), traits=PLAIN_TRAITS)
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
    """A contiguous tensor in one dimension. The stride of a single element may be anything before, and is 1 here."""
    return tensor.as_strided((tensor.numel(),), (1,))


def copy_values(value: torch.Tensor, target: torch.Tensor, *, conj: bool, neg: bool) -> None:
    """Copy elements, as a file has them, into a tensor on the same device; a cast happens there."""
    value = value.conj() if conj else value
    value = value.neg() if neg else value
    if value.dtype == target.dtype and not (value.is_conj() or target.is_conj() or target.is_neg()):
        # As integers of the same width: there are dtypes that torch cannot copy.
        integers = view_dtype(target.element_size())
        target, value = target.view(integers), value.view(integers)
    target.copy_(value)


MOST_ELEMENTS = 1 << 20
"""Elements that are compared at a time, so that it takes little memory beside a full GPU."""


class CastLosses:
    """The elements that casts to each dtype could not keep."""

    def __init__(self) -> None:
        self._losses: dict[DType, Losses] = {}
        self._waiting: list[tuple[DType, str, int, torch.Tensor]] = []

    def add(self, name: str, value: torch.Tensor, target: torch.Tensor) -> None:
        """Compare elements with what a copy made of them. Other casts than to floating-point numbers are not looked at: `load_into`
        makes none.
        """
        dtype = _dtype(target)
        if (
            value.dtype == target.dtype
            or dtype is None
            or dtype.kind != "float"
            or value.is_complex()
            or not value.numel()
        ):
            return
        own = _dtype(value)
        quick = (
            value.is_cpu
            and value.is_contiguous()
            and not value.is_neg()
            and own is not None
            and own.kind == "float"
        )
        if quick and own is not None and not count_losses(array_of(value, own).reshape(-1), dtype):
            self._of(dtype).add([name], value.numel(), {})
            return
        rows = max(1, MOST_ELEMENTS * len(value) // value.numel()) if value.dim() else 1
        pairs = (
            zip(value.split(rows), target.split(rows), strict=True)
            if value.dim()
            else [(value, target)]
        )
        self._waiting += [(dtype, name, one.numel(), _compared(one, other)) for one, other in pairs]

    def notes(self) -> list[str]:
        for dtype, name, count, sums in self._waiting:
            lost = {
                outcome: np.array([many])
                for outcome, many in zip(OUTCOMES, sums.tolist(), strict=True)
            }
            self._of(dtype).add([name], count, lost)
        self._waiting.clear()
        return [note for dtype, losses in self._losses.items() for note in losses.notes(dtype)]

    def _of(self, dtype: DType) -> Losses:
        return self._losses.setdefault(dtype, Losses())


def _dtype(tensor: torch.Tensor) -> DType | None:
    return DTYPES.torch(str(tensor.dtype).removeprefix("torch."))


def _compared(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How many elements met each outcome, on their device."""
    wide = (
        torch.float64
        if torch.float64 in (value.dtype, target.dtype) or not value.is_floating_point()
        else torch.float32
    )
    was, now = value.to(wide), target.detach().to(wide)
    info = torch.finfo(target.dtype)
    # Up to half a step beyond the largest number, that is no more than rounding.
    beyond = info.max + math.ldexp(info.eps, math.frexp(info.max)[1] - 2)
    sums = (
        (was.abs() > beyond) & now.isfinite(),
        now.isinf() & was.isfinite(),
        now.isnan() & ~was.isnan(),
        (now == 0) & (was != 0),
        (was.abs() < 2.0**-127) & (now == 2.0**-127)
        if target.dtype is versions.dtype("float8_e8m0fnu")
        else was.new_zeros(1),
        (was < 0) & (now > 0),
    )
    return torch.stack([found.sum().to(torch.int64) for found in sums])
