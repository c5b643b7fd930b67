"""Submodules that load themselves: each gets its part of the checkpoint as a state dict, through its own `load_state_dict`.

Only for them tensors are in memory twice, one submodule at a time. The versions that the checkpoint records (`_metadata`) come
along, so that hooks and overrides see what they would have seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import nn

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.dtype import DType
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.errors import DoesNotFit
from holdfast.torch.modules.fit import Choice
from holdfast.torch.modules.targets import EXTRA, Slot, all_slots
from holdfast.torch.tensors.allocate import read_tensors
from holdfast.torch.tensors.fill import Progress
from holdfast.torch.tensors.tree import dict_under, lazy_tensors, opaque_inside, torch_tree

__all__ = ["Own", "Versions", "load_self"]


class Versions:
    """The versions of modules that a checkpoint records beside a state dict."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        state, self._left = dict_under(checkpoint.tree, prefix)
        recorded = vars(state).get("_metadata") if isinstance(state, OrderedDict) else None
        self._recorded: Mapping[object, object] = recorded if isinstance(recorded, Mapping) else {}

    def of(self, prefix: str) -> object:
        """The version of the module under a prefix; None where none is recorded."""
        entry = self._recorded.get((self._left + prefix).removesuffix("."))
        return entry.get("version") if isinstance(entry, Mapping) else None

    def under(self, prefix: str) -> OrderedDict[str, dict[str, object]]:
        """All that is recorded for a module and those below it, under the names that they have in it."""
        root = (self._left + prefix).removesuffix(".")
        found: OrderedDict[str, dict[str, object]] = OrderedDict()
        for key, entry in self._recorded.items():
            if isinstance(key, str) and isinstance(entry, Mapping) and (key == root or not root or key.startswith(f"{root}.")):
                found[key[len(root) :].removeprefix(".")] = {str(k): v for k, v in entry.items()}
        return found


class Own:
    """What came of a submodule that loaded itself."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.replaced: dict[int, torch.Tensor] = {}
        """By the identity of what stood there before: tied slots elsewhere take these."""
        self.nbytes = 0


def load_self(
    module: nn.Module, prefix: str, checkpoint: Checkpoint, checkpoint_prefix: str, choice: Choice, progress: Progress | None
) -> Own:
    """Let a module load its part of a checkpoint; `prefix` is its place in the target, behind the checkpoint's own prefix."""
    own = Own()
    before = list(all_slots(module))
    _refuse_wrapped(before, prefix, checkpoint)
    state = _state(checkpoint, checkpoint_prefix + prefix, own, choice, progress)
    vars(state)["_metadata"] = Versions(checkpoint, checkpoint_prefix).under(prefix)
    assign = choice.assign or any(slot.tensor.is_meta for slot in before)
    # A parent loads its children without asking for their `load_state_dict`; only the outermost may have one of its own.
    load = module.load_state_dict if not prefix else nn.Module.load_state_dict.__get__(module)
    try:
        result = load(state, strict=False, assign=True) if assign else load(state, strict=False)
    except RuntimeError as error:
        name = prefix.removesuffix(".")
        why = f"{name or 'the module'} loads itself, and does not take its part of the checkpoint: {error}; it may have changed"
        raise DoesNotFit(why, mismatched={name: str(error)}, file=checkpoint.path) from error
    own.missing = [prefix + name for name in getattr(result, "missing_keys", ())]
    own.unexpected = [checkpoint_prefix + prefix + name for name in getattr(result, "unexpected_keys", ())]
    missing = set(own.missing)
    own.names = [prefix + slot.name for slot in before if prefix + slot.name not in missing]
    for slot in before:
        _settle(slot, choice, own)
    return own


def _state(checkpoint: Checkpoint, prefix: str, own: Own, choice: Choice, progress: Progress | None) -> OrderedDict[str, object]:
    state: OrderedDict[str, object] = OrderedDict(
        (name[len(prefix) :], checkpoint[name]) for name in checkpoint if name.startswith(prefix)
    )
    values, left = dict_under(checkpoint.tree, prefix)
    for key, value in values.items():
        if not (isinstance(key, str) and key.startswith(left)) or isinstance(value, LazyTensor):
            continue
        name = key[len(left) :]
        # What a state dict may hold beside tensors: composites, packed parameters (tuples), dtypes, the state of a module.
        if isinstance(value, Composite | tuple | DType) or name.rpartition(".")[2] == EXTRA:
            if opaque_inside(value):
                raise DoesNotFit(
                    f"{key} holds objects of classes that Holdfast does not build",
                    mismatched={key: "it holds objects of classes that Holdfast does not build"},
                    file=checkpoint.path,
                )
            for part in [other for other in state if other.startswith(f"{name}.")]:
                del state[part]
            state[name] = value
    lazies = {str(id(lazy)): lazy for lazy in lazy_tensors(state)}
    own.nbytes += sum(lazy.nbytes for lazy in lazies.values())
    made = read_tensors(lazies, device=choice.device, progress=progress)

    def tensor(value: LazyTensor | Composite) -> torch.Tensor:
        return value.torch() if isinstance(value, Composite) else made[str(id(value))].detach()

    filled = torch_tree(state, tensor)
    return filled if isinstance(filled, OrderedDict) else state


def _refuse_wrapped(slots: list[Slot], prefix: str, checkpoint: Checkpoint) -> None:
    wrapped = {
        prefix + slot.name: f"it is a {type(slot.tensor).__name__}, which holds its elements in a way of its own"
        for slot in slots
        if type(slot.tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    }
    if wrapped:
        message = f"sharded and wrapped tensors are not filled here: {', '.join(map(repr, wrapped))}"
        raise DoesNotFit(message, mismatched=wrapped, file=checkpoint.path)


def _settle(slot: Slot, choice: Choice, own: Own) -> None:
    """Give what the module put in place of a tensor the dtype and device that were asked for."""
    now = getattr(slot.owner, str(slot.key), None)
    if now is slot.tensor or not isinstance(now, torch.Tensor):
        return
    if not nn.parameter.is_lazy(slot.tensor) and choice.fresh(slot.tensor):
        now.data = now.data.to(device=choice.device_for(slot.tensor), dtype=choice.dtype_for(slot.tensor, now.dtype))
    own.replaced[id(slot.tensor)] = now
