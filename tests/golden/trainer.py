"""Somebody's training code: the classes that the golden checkpoints were saved with, and that no reader has.

`make.py` imports this as the module `trainer`, so the golden files mention `trainer.Config` and so on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch
from torch import nn


class Phase(enum.Enum):
    WARM = "warm"
    MAIN = "main"


@dataclass
class Layer:
    width: int
    act: str = "relu"


@dataclass
class Config:
    name: str
    layers: list[Layer] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)


class Slotted:
    """State as torch and pickle write it for slots: the pair (dict or None, slots)."""

    __slots__ = ("scale", "table")

    def __init__(self, scale: float, table: torch.Tensor) -> None:
        self.scale = scale
        self.table = table


class TaggedTensor(torch.Tensor):
    """A tensor subclass with an attribute."""


class Net(nn.Module):
    """Parameters, buffers of both kinds, submodules, a tied weight and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_parameter("absent", None)
        self.config = Config("net", [Layer(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = torch.relu(block(y))
        return self.head(self.norm(y) * self.scale)


class Tiny(nn.Module):
    """A module of one class, so that a legacy stream records the source of nobody but ours."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))
        self.inner = TinyInner()


class TinyInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class Scripted(nn.Module):
    """Small enough for a TorchScript archive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))
        self.bias = nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(2))
        self.inner = ScriptedInner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) @ self.weight.t() + self.bias + self.inner(x)


class ScriptedInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sum(dim=1, keepdim=True)
