"""Room for the state of an optimizer that has not taken a step: its `state_dict()` is empty, and there is nothing to be filled.

An optimizer makes its moments with its first step. To load into one that was just made, tensors are made here as the checkpoint
has them: like their parameter where they have its shape, sharded as it is; else plain, and scalars on the CPU, from where
`load_state_dict` takes them to where the optimizer wants them.
"""

from __future__ import annotations

import torch

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.tensor import LazyTensor
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.tree import find_value

__all__ = ["make_state"]


def make_state(optimizer: torch.optim.Optimizer, state: object, checkpoint: Checkpoint, under: str) -> None:
    """Give the state dict of an optimizer without state what a checkpoint has for it, below a name, to be filled."""
    if not isinstance(state, dict) or state.get("state") != {}:
        return
    numbered: dict[object, torch.Tensor] = {}
    for group, packed in zip(optimizer.param_groups, state["param_groups"], strict=True):
        numbered |= zip(packed["params"], group["params"], strict=True)
    stored = find_value(checkpoint.tree, f"{under}state")
    if not isinstance(stored, dict):
        stored = _by_names(checkpoint, f"{under}state.")
    for key, inner in stored.items():
        number = int(key) if isinstance(key, str) and key.isdecimal() else key
        if number in numbered and isinstance(inner, dict):
            state["state"][number] = _room(inner, numbered[number])


def _by_names(checkpoint: Checkpoint, under: str) -> dict[object, object]:
    """The same of a checkpoint that has names and no tree."""
    found: dict[object, object] = {}
    for name in checkpoint:
        number, dot, key = name[len(under) :].partition(".")
        if name.startswith(under) and dot:
            inner = found.setdefault(number, {})
            assert isinstance(inner, dict)
            inner[key] = checkpoint[name]
    return found


def _room(value: object, parameter: torch.Tensor) -> object:
    """A nested state of the same form, with tensors that are not filled and None for all values."""
    match value:
        case LazyTensor():
            dtype = torch_dtype(value.dtype)
            if value.shape == tuple(parameter.shape) and value.ndim:
                return torch.empty_like(parameter.detach(), dtype=dtype)
            return torch.empty(value.shape, dtype=dtype, device=parameter.device if value.ndim else "cpu")
        case dict():
            return {key: _room(inner, parameter) for key, inner in value.items()}
        case list():
            return [_room(inner, parameter) for inner in value]
        case _:
            return None
