"""Masks as they are stored: one bit for each element.

    {"bits": uint8 tensor, "shape": (rows, columns)}

Element i, in row-major order, is bit i % 8 of byte i // 8, counted from the lowest (numpy's `packbits` with little bit order). The
last byte is filled with zeros. A mask with other values than 0 and 1 cannot be stored in this way and stays a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

__all__ = ["is_binary", "pack_mask", "unpack_mask"]


def is_binary(mask: torch.Tensor) -> bool:
    """Whether a mask keeps and prunes, and does nothing in between."""
    return mask.dtype is torch.bool or bool(((mask == 0) | (mask == 1)).all())


def pack_mask(mask: torch.Tensor) -> dict[str, object] | torch.Tensor:
    """A mask for storage: its bits and shape, or a copy of it where bits cannot hold it.

    >>> pack_mask(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    {'bits': tensor([13], dtype=torch.uint8), 'shape': (2, 2)}
    """
    if not is_binary(mask):
        return mask.detach().clone()
    kept = (mask.detach() != 0).cpu().reshape(-1).numpy()
    return {"bits": torch.from_numpy(np.packbits(kept, bitorder="little")), "shape": tuple(mask.shape)}


def unpack_mask(stored: object) -> torch.Tensor:
    """A mask from storage, of booleans; one that was stored as a tensor, as torch does it, comes back as it is."""
    if isinstance(stored, torch.Tensor):
        return stored.detach().clone()
    if not isinstance(stored, Mapping) or not {"bits", "shape"} <= stored.keys():
        raise ValueError(f"a mask is stored as a tensor, or as a dict of bits and shape; found a {type(stored).__name__}")
    bits, shape = stored["bits"], stored["shape"]
    if not isinstance(shape, tuple | list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"a mask's shape is a list of whole numbers; found {shape!r}")
    count = math.prod(shape)
    if not isinstance(bits, torch.Tensor) or bits.dtype is not torch.uint8 or bits.shape != (-(-count // 8),):
        found = f"{bits.dtype} {tuple(bits.shape)}" if isinstance(bits, torch.Tensor) else type(bits).__name__
        raise ValueError(f"a mask of shape {tuple(shape)} has {-(-count // 8)} bytes of bits; found {found}")
    kept = np.unpackbits(bits.cpu().numpy(), count=count, bitorder="little").view(np.bool_)
    return torch.from_numpy(kept).view(tuple(shape))
