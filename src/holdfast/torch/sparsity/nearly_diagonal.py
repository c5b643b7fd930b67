"""`NearlyDiagonalSparsifier`: keeps a band around the diagonal, whatever the values."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.core.sparse.encoding import matrix_shape
from holdfast.torch.sparsity.fake import fake_of
from holdfast.torch.sparsity.sparsifier import BaseSparsifier

__all__ = ["NearlyDiagonalSparsifier"]


class NearlyDiagonalSparsifier(BaseSparsifier):
    """Keeps the elements at most `nearliness // 2` off the diagonal: 1 is the diagonal alone, 3 its neighbours too.

    `nearliness` is odd, and below twice the shorter side of the weight; at zero and below nothing is kept. A weight of more than
    two dimensions is seen as a matrix, its first axis and all others as one.
    """

    def __init__(self, nearliness: int = 1) -> None:
        super().__init__({"nearliness": nearliness})

    def update_mask(  # type: ignore[override]  # torch's signature: the settings by name
        self, module: nn.Module, tensor_name: str, nearliness: int, **kwargs: object
    ) -> None:
        fake = fake_of(module, tensor_name)
        assert fake is not None
        rows, columns = matrix_shape(fake.mask.shape)
        # Asked for here and not in `prepare`: torch raises at the first step.
        if nearliness > 0 and nearliness % 2 == 0:
            raise ValueError(f"nearliness is an odd number, the same on both sides of the diagonal; found {nearliness}")
        if nearliness // 2 >= min(rows, columns):
            raise ValueError(f"nearliness {nearliness} is too large for a weight of {rows} x {columns}")
        device = fake.mask.device
        off = (torch.arange(rows, device=device)[:, None] - torch.arange(columns, device=device)).abs()
        kept = off <= nearliness // 2 if nearliness > 0 else torch.zeros_like(off, dtype=torch.bool)
        fake.mask.copy_(kept.view(fake.mask.shape))
