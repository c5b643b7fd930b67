"""Modules with masks, exchanged for modules that are made for sparse weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import nn
from torch.nn.utils import parametrize

__all__ = [
    "FromDense",
    "Mapped",
    "convert_children",
    "get_dynamic_sparse_quantized_mapping",
    "get_static_sparse_quantized_mapping",
    "module_contains_param",
    "swap_module",
]


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
