"""The places in a module, or in a nested mapping, that a checkpoint fills: what `state_dict()` would list, and where each stands.

A module that has its own way of loading (an overridden `_load_from_state_dict`, hooks that run before it) is not looked into: it is
handed its part of the checkpoint as a state dict, so that nothing it does there is left out. Those of `torch.nn` that only bring
old state dicts up to date are looked into as long as what they would be handed is up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

import torch
from torch import nn

from holdfast.core.tree import Path, dotted, step

__all__ = ["EXTRA", "Slot", "Targets", "all_slots", "find_targets", "module_slots"]

EXTRA = "_extra_state"
"""What `state_dict()` calls the value of `get_extra_state()`."""

OWN = "torch.nn.modules."
"""Where overrides of `_load_from_state_dict` live that only bring old state dicts up to date: batch and instance norm."""

IsCurrent = Callable[[str, nn.Module], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A tensor under its dotted name, and the container that holds it."""

    name: str
    tensor: torch.Tensor
    owner: object
    key: object

    @property
    def open(self) -> bool:
        """Whether another tensor can be put there."""
        return isinstance(self.owner, nn.Module | MutableMapping | list)

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor in its place."""
        match self.owner:
            case nn.Module():
                # Not into `_parameters`: recurrent modules keep lists of their weights and hear of it this way.
                setattr(self.owner, str(self.key), tensor)
            case MutableMapping():
                self.owner[self.key] = tensor
            case list() if isinstance(self.key, int):
                self.owner[self.key] = tensor


@dataclass(slots=True)
class Targets:
    """Everything that there is to fill."""

    slots: list[Slot] = field(default_factory=list)
    extras: dict[str, nn.Module] = field(default_factory=dict)
    """Modules with a state beside their tensors, by the name of that state."""
    selves: dict[str, nn.Module] = field(default_factory=dict)
    """Modules that load themselves, by prefix."""
    listeners: list[nn.Module] = field(default_factory=list)
    """Modules with hooks that run after loading, children first."""
    doubles: list[str] = field(default_factory=list)
    """Names that two tensors have."""


def find_targets(into: nn.Module | Mapping[str, object], is_current: IsCurrent) -> Targets:
    """List what is to be filled. `is_current(prefix, module)` says whether a versioned module of torch's needs no update."""
    targets = Targets()
    if isinstance(into, nn.Module):
        if type(into).load_state_dict is not nn.Module.load_state_dict:
            targets.selves[""] = into
        else:
            _walk_module(into, "", targets, is_current)
    elif isinstance(into, Mapping):
        targets.slots += _walk_values(into, (), frozenset())
    else:
        raise TypeError(f"expected an nn.Module or a mapping of tensors, not {type(into).__name__}")
    seen: set[str] = set()
    for slot in targets.slots:
        if slot.name in seen:
            targets.doubles.append(slot.name)
        seen.add(slot.name)
    return targets


def module_slots(module: nn.Module, prefix: str) -> Iterator[Slot]:
    """The parameters and persistent buffers of a module, without those of its children."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Slot(prefix + name, parameter, module, name)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield Slot(prefix + name, buffer, module, name)


def all_slots(module: nn.Module) -> Iterator[Slot]:
    """The same, with those of its children, however they load."""
    for name, child in module.named_modules(remove_duplicate=False):
        yield from module_slots(child, f"{name}." if name else "")


def _walk_module(module: nn.Module, prefix: str, targets: Targets, is_current: IsCurrent) -> None:
    if _loads_itself(module, prefix, is_current):
        targets.selves[prefix] = module
        return
    targets.slots += module_slots(module, prefix)
    if type(module).set_extra_state is not nn.Module.set_extra_state:
        targets.extras[prefix + EXTRA] = module
    for name, child in module._modules.items():
        if child is not None:
            _walk_module(child, f"{prefix}{name}.", targets, is_current)
    if module._load_state_dict_post_hooks:
        targets.listeners.append(module)


def _loads_itself(module: nn.Module, prefix: str, is_current: IsCurrent) -> bool:
    if module._load_state_dict_pre_hooks:
        return True
    own = type(module)._load_from_state_dict
    if own is nn.Module._load_from_state_dict:
        return False
    return not (own.__module__.startswith(OWN) and is_current(prefix, module))


def _walk_values(value: object, path: Path, above: frozenset[int]) -> Iterator[Slot]:
    if id(value) in above:
        raise ValueError(f"{dotted(path)} contains itself")
    children: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    for key, inner in children:
        place = (*path, step(key))
        if isinstance(inner, torch.Tensor):
            yield Slot(dotted(place), inner, value, key)
        else:
            yield from _walk_values(inner, place, above | {id(value)})
