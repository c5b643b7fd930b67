"""Tensors whose bits are of all kinds: also numbers that are not numbers, and zeros below zero."""

from __future__ import annotations

import torch


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return a tensor with random bits."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    highest = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, highest, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)
