"""Small models, and what their masks are."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from holdfast.torch.sparsity import FakeSparsity


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 12), nn.ReLU(), nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 6, bias=False))
    )


def mixed() -> nn.ModuleDict:
    """A convolution, an embedding, a norm and a linear module."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 5, 3),
            "embed": nn.Embedding(10, 7),
            "norm": nn.LayerNorm(7),
            "out": nn.Linear(7, 9),
        }
    )


def quantised(*shape: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will take them away some day
        return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)


def mask_of(module: nn.Module, name: str = "weight") -> torch.Tensor:
    fake = module.parametrizations[name][0]
    assert isinstance(fake, FakeSparsity)
    return fake.mask


def level_of(tensor: torch.Tensor) -> float:
    """The part of a tensor that is zero."""
    return float((tensor == 0).double().mean())
