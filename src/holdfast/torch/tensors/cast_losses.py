"""Count what torch's own casts lose while tensors are filled, for a note in the report.

On the CPU the elements are looked at where they lie in scratch memory, by the engine's quick test; only where that finds something
are results compared, pair by pair. On a GPU they are compared there, and nothing waits for the numbers until all is filled.
"""

from __future__ import annotations

import math

import torch

from holdfast.core.dtype import DTYPES, DType
from holdfast.engine.casting import OUTCOMES, count_losses
from holdfast.rewrite.cast import Losses
from holdfast.torch.tensors.from_lazy import array_of

__all__ = ["CastLosses"]


MOST_ELEMENTS = 1 << 20
"""Compared at a time, so that it takes little memory beside a full GPU."""


class CastLosses:
    """What casts to each dtype did to the elements that they could not keep."""

    def __init__(self) -> None:
        self._losses: dict[DType, Losses] = {}
        self._waiting: list[tuple[DType, str, int, torch.Tensor]] = []

    def add(self, name: str, value: torch.Tensor, target: torch.Tensor) -> None:
        """Look at elements, and at what a copy made of them. Casts to anything but floating-point numbers lose no magnitude here:
        `load_into` does not make them."""
        dtype = _dtype(target)
        if value.dtype == target.dtype or dtype is None or dtype.kind != "float" or value.is_complex() or not value.numel():
            return
        own = _dtype(value)
        quick = value.is_cpu and value.is_contiguous() and not value.is_neg() and own is not None and own.kind == "float"
        if quick and own is not None and not count_losses(array_of(value, own).reshape(-1), None, dtype):
            self._of(dtype).add(name, value.numel(), {})
            return
        rows = max(1, MOST_ELEMENTS * len(value) // value.numel()) if value.dim() else 1
        pairs = zip(value.split(rows), target.split(rows), strict=True) if value.dim() else [(value, target)]
        self._waiting += [(dtype, name, one.numel(), _compared(one, other)) for one, other in pairs]

    def notes(self) -> list[str]:
        """A sentence for each way in which elements were lost."""
        for dtype, name, count, sums in self._waiting:
            found = dict(zip(OUTCOMES, sums.tolist(), strict=True))
            self._of(dtype).add(name, count, {outcome: lost for outcome, lost in found.items() if lost})
        self._waiting.clear()
        return [note for dtype, losses in self._losses.items() for note in losses.notes(dtype)]

    def _of(self, dtype: DType) -> Losses:
        return self._losses.setdefault(dtype, Losses())


def _dtype(tensor: torch.Tensor) -> DType | None:
    return DTYPES.torch(str(tensor.dtype).removeprefix("torch."))


def _compared(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How many elements met each outcome, on their device."""
    wide = torch.float64 if torch.float64 in (value.dtype, target.dtype) or not value.is_floating_point() else torch.float32
    was, now = value.to(wide), target.detach().to(wide)
    info = torch.finfo(target.dtype)
    # Up to half a step beyond the largest number, that is no more than rounding.
    beyond = info.max + math.ldexp(info.eps, math.frexp(info.max)[1] - 2)
    sums = (
        (was.abs() > beyond) & now.isfinite(),
        now.isinf() & was.isfinite(),
        now.isnan() & ~was.isnan(),
        (now == 0) & (was != 0),
        (was.abs() < 2.0**-127) & (now == 2.0**-127) if target.dtype is torch.float8_e8m0fnu else was.new_zeros(1),
        (was < 0) & (now > 0),
    )
    return torch.stack([found.sum().to(torch.int64) for found in sums])
