"""Names of modules and tensors inside a model.

The first three functions are torch's: they give None for what is not there. `Weights` raises, with names that are similar.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable
from typing import TypedDict

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from holdfast.core.value import Value
from holdfast.errors import NoSuchTensor
from holdfast.torch.sparsity.fake import fake_of, is_cut, original_of


class ArgInfo(TypedDict):
    """Where a tensor is in a model."""

    module_fqn: str
    module: nn.Module | None
    tensor_name: str
    tensor_fqn: str


def module_to_fqn(model: nn.Module, module: nn.Module, prefix: str = "") -> str | None:
    """The dotted name of a module inside a model, after `prefix` as it is; "" for the model itself, None where it is not inside."""
    for name, found in model.named_modules():
        if found is module:
            return prefix + name if name else ""
    return None


def fqn_to_module(model: nn.Module | None, path: str) -> nn.Module | torch.Tensor | None:
    """The module or tensor of a dotted name; the model itself for "", None for what is not there."""
    found: object = model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None) if name else None
    return found if isinstance(found, nn.Module | torch.Tensor) else None


def get_arg_info_from_tensor_fqn(model: nn.Module, tensor_fqn: str) -> ArgInfo:
    """Take a tensor's dotted name apart. The module is None where it is not there; the tensor need not be there."""
    module_fqn, _, tensor_name = tensor_fqn.rpartition(".")
    module = fqn_to_module(model, module_fqn)
    return {
        "module_fqn": module_fqn,
        "module": module if isinstance(module, nn.Module) else None,
        "tensor_name": tensor_name,
        "tensor_fqn": tensor_fqn,
    }


def near(name: str, names: Iterable[str]) -> str:
    """The end of an error message: similar names, or how many there are."""
    known = sorted(set(names))
    found = difflib.get_close_matches(name, known[:10_000], n=3, cutoff=0.5)
    if found:
        return f"; did you mean {' or '.join(map(repr, found))}?"
    return f"; there are {len(known):,}: {', '.join(known[:5])}{', …' if len(known) > 5 else ''}" if known else ""


class Weight(Value, frozen=True, eq=False):
    """A tensor of a module, where a mask may be put."""

    module: nn.Module
    module_fqn: str
    name: str
    fqn: str

    @property
    def tensor(self) -> torch.Tensor:
        return original_of(self.module, self.name)

    @property
    def place(self) -> tuple[int, str]:
        """A key that two names of one tensor of one module share."""
        return id(self.module), self.name


class Weights:
    """The tensors of a model, by name and by what shares their memory."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sharing: dict[object, list[tuple[tuple[int, str], str]]] = defaultdict(list)
        self._names: list[str] = []
        for prefix, module in model.named_modules():
            for name, tensor in _stored(module).items():
                fqn = f"{prefix}.{name}" if prefix else name
                self._names.append(fqn)
                for key in _identities(tensor):
                    self._sharing[key].append(((id(module), name), fqn))

    def find(self, fqn: str) -> Weight:
        """The tensor of that name; `NoSuchTensor` suggests others."""
        if not isinstance(fqn, str):
            raise TypeError(f"tensor_fqn is the dotted name of a tensor; found a {type(fqn).__name__}")
        info = get_arg_info_from_tensor_fqn(self._model, fqn)
        module, name = info["module"], info["tensor_name"]
        if isinstance(fqn_to_module(self._model, fqn), nn.Module):
            inner = [known for known in self._names if known.startswith(f"{fqn}.")] if fqn else self._names
            raise ValueError(f"{fqn!r} is a module and not a tensor{near(f'{fqn}.weight', inner)}")
        if module is None or not (name in _stored(module) or hasattr(module, name)):
            raise NoSuchTensor(f"the model has no tensor {fqn!r}{near(fqn, self._names)}", tensor=fqn)
        if name not in _stored(module):
            if getattr(module, name) is None:
                raise ValueError(f"{fqn!r} is None: the module was made without it")
            raise ValueError(
                f"{fqn!r} is neither a parameter nor a buffer of {type(module).__name__}: something computes it, "
                "such as torch.nn.utils.prune or weight_norm"
            )
        return Weight(module, info["module_fqn"], name, fqn)

    def check_free(self, weight: Weight) -> None:
        """Raise where a tensor cannot have a mask: it is not floating-point, shared with another place, or parametrized."""
        if parametrize.is_parametrized(weight.module, weight.name):
            if fake_of(weight.module, weight.name) is not None:
                raise ValueError(f"{weight.fqn!r} has a mask already: a sparsifier was prepared with it; squash that one first")
            raise ValueError(f"{weight.fqn!r} is parametrized: a mask on it would not be a mask of what is stored")
        tensor = weight.tensor
        if is_lazy(tensor):
            raise ValueError(f"{weight.fqn!r} is not initialised yet: run the model once before")
        if tensor.is_quantized or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            kind = "quantised" if tensor.is_quantized else str(tensor.dtype)
            raise TypeError(f"{weight.fqn!r} is {kind}: masks are for weights of 16, 32 or 64-bit floating point")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{weight.fqn!r} is {tensor.layout}: masks are for dense tensors")
        if type(tensor) is not torch.Tensor and not issubclass(type(tensor), nn.Parameter):
            # torchao's quantised weights say that they are bfloat16; a DTensor has a part of the elements on each rank.
            hint = "; prepare before fully_shard" if is_cut(tensor) else ""
            raise TypeError(f"{weight.fqn!r} is a {type(tensor).__name__}: masks are for plain tensors{hint}")
        if tensor.is_meta:
            raise ValueError(f"{weight.fqn!r} is on the meta device: give the model its weights before it is prepared")
        others = {fqn for key in _identities(tensor) for place, fqn in self._sharing[key] if place != weight.place}
        if others:
            raise ValueError(f"{weight.fqn!r} is shared with {', '.join(sorted(others))}: a mask on one would part them")


def _stored(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module itself, by the names that it reads them by."""
    own = {**module._parameters, **module._buffers}
    found = {name: tensor for name, tensor in own.items() if tensor is not None}
    if parametrize.is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        for name, steps in module.parametrizations.items():
            # A tensor made of several has no `original`; it has a name, and is refused.
            tensor = getattr(steps, "original", None)
            found[name] = tensor if isinstance(tensor, torch.Tensor) else getattr(steps, "original0", torch.empty(0))
    return found


def _identities(tensor: torch.Tensor) -> list[object]:
    """Keys of which two tensors share one when they are the same: the object, or the address of the first element."""
    keys: list[object] = [("object", id(tensor))]
    if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta and tensor.layout is torch.strided and tensor.numel():
        keys.append(("address", tensor.device, tensor.data_ptr()))
    return keys
