"""Masks on tensors of a model, as parametrizations: each time a module reads a weight, it is multiplied by its mask.

The mask is a buffer that `state_dict()` leaves out, so that a prepared model has the names of its weights alone, and loads its own
state dict. (torch 2.13 leaves it out of the state dict and yet asks for it.) Masks are saved with the sparsifier that makes them.

Recurrent modules of torch have a list of their weights, which would hold a product with an old mask. A hook renews the list before
each pass, as long as one of their weights has a mask.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Protocol, TypedDict

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from holdfast.core.value import Value
from holdfast.errors import NoSuchTensor
from holdfast.torch.sparsity.masks import check_maskable, is_cut


class FakeSparsity(nn.Module):
    """Multiplies a tensor by a mask of the same shape."""

    mask: torch.Tensor

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)
        self.names: tuple[str, ...] = ()
        """The module's parameters in the order before it had masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Set what the mask prunes to zero."""
        if self.mask.shape != x.shape:
            raise ValueError(
                f"mask shape {tuple(self.mask.shape)} must match the shape of the tensor, {tuple(x.shape)}"
            )
        return self.mask * x


class FakeStructuredSparsity(FakeSparsity):
    """Multiplies whole slices of a tensor: the mask has one boolean for each index of one axis, rows or output channels for 0."""

    def __init__(self, mask: torch.Tensor, dim: int = 0) -> None:
        super().__init__(mask)
        if mask.dim() != 1:
            raise ValueError(
                f"a mask of rows or channels has one dimension; found {tuple(mask.shape)}"
            )
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim >= x.dim() or self.mask.shape[0] != x.shape[self.dim]:
            raise ValueError(
                f"mask length {self.mask.shape[0]} must match axis {self.dim} of the tensor, {tuple(x.shape)}"
            )
        shape = [1] * x.dim()
        shape[self.dim] = -1
        return self.mask.view(shape) * x


def fake_of(module: nn.Module, tensor_name: str) -> FakeSparsity | None:
    if not parametrize.is_parametrized(module, tensor_name):
        return None
    return next(
        (found for found in _steps(module, tensor_name) if isinstance(found, FakeSparsity)), None
    )


def parametrized_names(module: nn.Module) -> list[str]:
    found = getattr(module, "parametrizations", None)
    return list(found) if isinstance(found, nn.ModuleDict) else []


def _steps(module: nn.Module, tensor_name: str) -> nn.ModuleList:
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    steps = parametrizations[tensor_name]
    assert isinstance(steps, nn.ModuleList)
    return steps


def put_mask(module: nn.Module, tensor_name: str, fake: FakeSparsity) -> None:
    earlier = [
        found.names
        for name in parametrized_names(module)
        if (found := fake_of(module, name)) is not None
    ]
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


def original_of(module: nn.Module, tensor_name: str) -> torch.Tensor:
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
    return any(
        isinstance(found, parametrization)
        for name in parametrized_names(module)
        for found in _steps(module, name)
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
        raise ValueError(
            f"a module on one device can be swapped; this one is on {', '.join(sorted(map(str, devices)))}"
        )
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


# Tensors of a model by name.


class ArgInfo(TypedDict):
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


def similar_names(name: str, names: Iterable[str]) -> str:
    """The end of an error message: similar names, or how many there are."""
    known = sorted(set(names))
    found = difflib.get_close_matches(name, known[:10_000], n=3, cutoff=0.5)
    if found:
        return f"; did you mean {' or '.join(map(repr, found))}?"
    return (
        f"; there are {len(known):,}: {', '.join(known[:5])}{', …' if len(known) > 5 else ''}"
        if known
        else ""
    )


class Weight(Value, eq=False):
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
            raise TypeError(
                f"tensor_fqn is the dotted name of a tensor; found a {type(fqn).__name__}"
            )
        info = get_arg_info_from_tensor_fqn(self._model, fqn)
        module, name = info["module"], info["tensor_name"]
        if isinstance(fqn_to_module(self._model, fqn), nn.Module):
            inner = (
                [known for known in self._names if known.startswith(f"{fqn}.")]
                if fqn
                else self._names
            )
            raise ValueError(
                f"{fqn!r} is a module and not a tensor{similar_names(f'{fqn}.weight', inner)}"
            )
        if module is None or not (name in _stored(module) or hasattr(module, name)):
            raise NoSuchTensor(
                f"the model has no tensor {fqn!r}{similar_names(fqn, self._names)}", tensor=fqn
            )
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
                raise ValueError(
                    f"{weight.fqn!r} has a mask already: a sparsifier was prepared with it; squash that one first"
                )
            raise ValueError(
                f"{weight.fqn!r} is parametrized: a mask on it would not be a mask of what is stored"
            )
        tensor = weight.tensor
        if is_lazy(tensor):
            raise ValueError(f"{weight.fqn!r} is not initialised yet: run the model once before")
        check_maskable(tensor, repr(weight.fqn))
        if tensor.dtype.itemsize < 2:
            raise TypeError(
                f"{weight.fqn!r} is {tensor.dtype}: masks are for weights of 16, 32 or 64-bit floating point"
            )
        others = {
            fqn
            for key in _identities(tensor)
            for place, fqn in self._sharing[key]
            if place != weight.place
        }
        if others:
            raise ValueError(
                f"{weight.fqn!r} is shared with {', '.join(sorted(others))}: a mask on one would part them"
            )


def _stored(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module itself, by the names that it reads them by."""
    own = {**module._parameters, **module._buffers}
    found = {name: tensor for name, tensor in own.items() if tensor is not None}
    for name in parametrized_names(module):
        steps = module.parametrizations[name]  # type: ignore[index]  # a ModuleDict
        # A tensor made of several has no `original`; it has a name, and is refused.
        tensor = getattr(steps, "original", None)
        found[name] = (
            tensor
            if isinstance(tensor, torch.Tensor)
            else getattr(steps, "original0", torch.empty(0))
        )
    return found


def _identities(tensor: torch.Tensor) -> list[object]:
    """Keys of which two tensors share one when they are the same: the object, or the address of the first element."""
    keys: list[object] = [("object", id(tensor))]
    if (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and not tensor.is_meta
        and tensor.layout is torch.strided
        and tensor.numel()
    ):
        keys.append(("address", tensor.device, tensor.data_ptr()))
    return keys
