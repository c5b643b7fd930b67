"""The parametrizations that carry a mask: each time a module reads a weight, it is multiplied by its mask.

The mask is a buffer that `state_dict()` leaves out, so that a prepared model has the names of its weights alone, and loads its own
state dict. (torch 2.13 leaves it out of the state dict and yet asks for it.) Masks are saved with the sparsifier that makes them.

Recurrent modules of torch have a list of their weights, which would hold a product with an old mask. A hook renews the list before
each pass, as long as one of their weights has a mask.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn
from torch.nn.utils import parametrize


class FakeSparsity(nn.Module):
    """Multiplies a tensor by a mask of the same shape."""

    mask: torch.Tensor

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)
        self.names: tuple[str, ...] = ()
        """The module's parameters in the order before it had masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask.shape != x.shape:
            raise ValueError(f"mask shape {tuple(self.mask.shape)} must match the shape of the tensor, {tuple(x.shape)}")
        return self.mask * x


class FakeStructuredSparsity(FakeSparsity):
    """Multiplies whole slices of a tensor: the mask has one boolean for each index of one axis, rows or output channels for 0."""

    def __init__(self, mask: torch.Tensor, dim: int = 0) -> None:
        super().__init__(mask)
        if mask.dim() != 1:
            raise ValueError(f"a mask of rows or channels has one dimension; found {tuple(mask.shape)}")
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim >= x.dim() or self.mask.shape[0] != x.shape[self.dim]:
            raise ValueError(f"mask length {self.mask.shape[0]} must match axis {self.dim} of the tensor, {tuple(x.shape)}")
        shape = [1] * x.dim()
        shape[self.dim] = -1
        return self.mask.view(shape) * x


def fake_of(module: nn.Module, tensor_name: str) -> FakeSparsity | None:
    """The mask that a module's tensor has."""
    if not parametrize.is_parametrized(module, tensor_name):
        return None
    return next((found for found in _steps(module, tensor_name) if isinstance(found, FakeSparsity)), None)


def _parametrized(module: nn.Module) -> list[str]:
    found = getattr(module, "parametrizations", None)
    return list(found) if isinstance(found, nn.ModuleDict) else []


def _steps(module: nn.Module, tensor_name: str) -> nn.ModuleList:
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    steps = parametrizations[tensor_name]
    assert isinstance(steps, nn.ModuleList)
    return steps


def put_mask(module: nn.Module, tensor_name: str, fake: FakeSparsity) -> None:
    earlier = [found.names for name in _parametrized(module) if (found := fake_of(module, name)) is not None]
    fake.names = earlier[0] if earlier else tuple(module._parameters)
    parametrize.register_parametrization(module, tensor_name, fake)
    if isinstance(module, nn.RNNBase) and _list_weights not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_list_weights)


def take_mask_off(module: nn.Module, tensor_name: str, *, apply: bool) -> None:
    """Make a tensor a plain one again: with the mask applied for good, or as if there had been none.

    What the mask prunes becomes 0.0. A product would be -0.0 where the weight was negative, and NaN where it was not finite.
    """
    fake = fake_of(module, tensor_name)
    parametrize.remove_parametrizations(module, tensor_name, leave_parametrized=apply)
    if apply and fake is not None:
        tensor = getattr(module, tensor_name)
        with torch.no_grad():
            tensor.masked_fill_(fake(torch.ones_like(tensor)) == 0, 0.0)
    if fake is not None:
        # torch puts it at the end; a saved optimizer knows parameters by their place.
        order = {name: i for i, name in enumerate(fake.names)}
        for name in sorted(module._parameters, key=lambda name: order.get(name, len(order))):
            module._parameters[name] = module._parameters.pop(name)
    if isinstance(module, nn.RNNBase) and not parametrize.is_parametrized(module):
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _list_weights:
                del module._forward_pre_hooks[key]
        _list_weights(module, ())


def _list_weights(module: nn.Module, inputs: object) -> None:
    assert isinstance(module, nn.RNNBase)
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def whole_of(module: nn.Module, tensor_name: str) -> torch.Tensor:
    """A tensor without its masks, gathered if it is cut over ranks; all of them have to call this together."""
    found = original_of(module, tensor_name)
    if not is_cut(found):
        return found
    whole = found.full_tensor()  # type: ignore[attr-defined]  # a DTensor
    assert isinstance(whole, torch.Tensor)
    return whole


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether each rank has a part of a tensor, as with FSDP2. DTensor, which takes a second to import, is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def original_of(module: nn.Module, tensor_name: str) -> torch.Tensor:
    """A tensor without the masks that it has."""
    if not parametrize.is_parametrized(module, tensor_name):
        found = getattr(module, tensor_name)
    else:
        found = _steps(module, tensor_name).original
    assert isinstance(found, torch.Tensor)
    return found


class FromDense(Protocol):
    """A class of modules that can be made of dense ones."""

    def from_dense(self, mod: nn.Module, /) -> nn.Module:
        """A module with the weights of a dense one."""
        ...


Mapped = Mapping[type[nn.Module], FromDense]


def module_contains_param(module: nn.Module, parametrization: type[nn.Module]) -> bool:
    """Whether any of the module's tensors carries a parametrization of that class."""
    if not parametrize.is_parametrized(module):
        return False
    assert isinstance(module.parametrizations, nn.ModuleDict)
    return any(
        isinstance(found, parametrization)
        for steps in module.parametrizations.values()
        if isinstance(steps, nn.ModuleList)
        for found in steps
    )


def swap_module(mod: nn.Module, mapping: Mapped) -> nn.Module:
    """The module that the mapping makes of this one, on the same device and with the same forward hooks; or this one itself.

    A parametrized module is looked up by the class that it had before. Raises ValueError for a module on several devices.
    """
    target = mapping.get(parametrize.type_before_parametrizations(mod))
    if target is None:
        return mod
    devices = {tensor.device for tensor in (*mod.parameters(), *mod.buffers())}
    if len(devices) > 1:
        raise ValueError(f"a module on one device can be swapped; this one is on {', '.join(sorted(map(str, devices)))}")
    made = target.from_dense(mod)
    for hook in mod._forward_pre_hooks.values():
        made.register_forward_pre_hook(hook)
    for after in mod._forward_hooks.values():
        made.register_forward_hook(after)
    return made.to(device) if (device := next(iter(devices), None)) is not None else made


def convert_children(module: nn.Module, mapping: Mapped, parametrization: type[nn.Module]) -> None:
    """Swap every module below this one that carries the parametrization, in place."""
    for name, child in list(module.named_children()):
        if module_contains_param(child, parametrization):
            setattr(module, name, swap_module(child, mapping))
        else:
            convert_children(child, mapping, parametrization)


def get_static_sparse_quantized_mapping() -> dict[type[nn.Module], type[nn.Module]]:
    """What torch's quantisation makes of modules with sparse weights when activations are quantised too."""
    from torch.ao.nn.sparse import quantized  # not before it is asked for: it is slow to import

    return {nn.Linear: quantized.Linear}


def get_dynamic_sparse_quantized_mapping() -> dict[type[nn.Module], type[nn.Module]]:
    """What torch's quantisation makes of modules with sparse weights when activations are quantised as they come."""
    from torch.ao.nn.sparse.quantized import dynamic

    return {nn.Linear: dynamic.Linear}
