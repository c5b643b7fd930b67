"""What the recipes share: the registry that they enter, the values that they save, and somebody's training code."""

from __future__ import annotations

import collections
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).resolve().parent

Recipe = Callable[[Path], object]
RECIPES: dict[str, tuple[str, str, Recipe]] = {}


def golden(name: str, form: str, purpose: str) -> Callable[[Recipe], Recipe]:
    """Register a recipe. It writes the file and returns the state, or None to have torch load it."""

    def register(recipe: Recipe) -> Recipe:
        RECIPES[name] = (form, purpose, recipe)
        return recipe

    return register


def import_trainer() -> types.ModuleType:
    """Import `trainer.py` under a relative file name: torch writes the names of source files into what it saves."""
    module = types.ModuleType("trainer")
    module.__file__ = "trainer.py"
    sys.modules["trainer"] = module
    exec(compile((HERE / "trainer.py").read_text(), "trainer.py", "exec"), module.__dict__)
    return module


os.chdir(HERE)
trainer = import_trainer()


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: float = 0.0) -> torch.Tensor:
    """0, ½, 1, 1½ … from `start`: exact in every float that holds them."""
    count = int(np.prod(shape, dtype=np.int64))
    return (torch.arange(count, dtype=torch.float64) / 2 + start).reshape(shape).to(dtype)


def fill(module: nn.Module) -> nn.Module:
    """Give every parameter and buffer known values."""
    with torch.no_grad():
        for i, tensor in enumerate(module.state_dict().values()):
            tensor.copy_(numbers(*tensor.shape, start=i))
    return module


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    """Twelve elements of any dtype that is not quantised, of many bit patterns."""
    if dtype == torch.bool:
        return (torch.arange(12) % 3 == 0).reshape(3, 4)
    raw = (
        (torch.arange(12 * dtype.itemsize, dtype=torch.int64) * 37 + 11)
        .remainder(256)
        .to(torch.uint8)
    )
    return raw.view(dtype).reshape(3, 4)


def plain_dtypes() -> list[torch.dtype]:
    """Every dtype of an ordinary tensor, by name."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((d for d in found if not str(d).startswith(("torch.q",))), key=str)


def plain_state() -> dict[str, torch.Tensor]:
    base = numbers(4, 6)
    tied = numbers(3, 2, start=100)
    return collections.OrderedDict(
        [
            ("embed.weight", tied),
            ("head.weight", tied),
            ("base", base),
            ("base_t", base.t()),
            ("base_window", base[1:3, ::2]),
            ("bias", numbers(5, start=-1)),
            ("scalar", torch.tensor(7.5)),
            ("empty", torch.empty(0, 3)),
            ("row_expanded", numbers(3, start=40).expand(2, 3)),
            ("ids", torch.arange(6).reshape(2, 3)),
            ("half", numbers(8, dtype=torch.float16)),
            ("brain", numbers(8, dtype=torch.bfloat16)),
            ("mask", torch.tensor([True, False, True])),
        ]
    )
