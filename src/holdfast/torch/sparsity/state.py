"""What a sparsifier remembers of its tensors, and the plain form in which it is saved.

    {"state": {"linear1.weight": {"mask": {"bits": …, "shape": …}, …}},
     "groups": [{"tensor_fqn": "linear1.weight", "sparsity_level": 0.5, …}]}

Dicts, lists, numbers and tensors alone, so that a `weights_only` load takes it, and copies of all of them. torch saves the same two
keys, with masks as dense tensors; both kinds are read.

A mask is stored with one bit for each element. Element i, in row-major order, is bit i % 8 of byte i // 8, counted from the lowest
(numpy's `packbits` with little bit order). The last byte is filled with zeros. A mask with other values than 0 and 1 cannot be
stored in this way and stays a tensor.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.core.tree import MOST_LEAVES, Way, mapped_children, plainly, rebuild

Group = dict[str, Any]
"""The settings of one tensor. Any, for it holds a module, names and whatever a sparsifier is set by, as torch's does."""

PLACE = ("module", "module_fqn", "tensor_name", "parametrization")
"""What of a group follows from the model and `tensor_fqn`, and is not saved."""


class Remembered(dict[str, object]):
    """What is known of one tensor: its mask, and what a sparsifier adds. Two are equal when their tensors have equal elements."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict):
            return NotImplemented
        return self.keys() == other.keys() and all(_equal(value, other[key]) for key, value in self.items())

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    __hash__ = None  # as dict has it


State = defaultdict[str, Remembered]


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.device == b.device and bool((a == b).all())
    return bool(a == b)


def plain(value: object) -> object:
    """A copy of a value, with dicts of all kinds as plain ones. Raises `LimitExceeded` for one that contains itself."""
    return rebuild(value, _copied, inside=_entered, make=plainly, most=MOST_LEAVES)


def _copied(value: object, _: Way) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _entered(value: object) -> Iterable[tuple[object, object]] | None:
    if isinstance(value, Mapping) or type(value) in (list, tuple):
        return mapped_children(value)
    return enumerate(value) if type(value) is set else None


def plain_state(state: Mapping[str, Mapping[str, object]], *, packed: bool) -> dict[str, dict[str, object]]:
    """A state as it is saved; with `packed`, masks are bits."""
    saved: dict[str, dict[str, object]] = {}
    for fqn, known in state.items():
        saved[fqn] = {
            key: pack_mask(value) if packed and key == "mask" and isinstance(value, torch.Tensor) else plain(value)
            for key, value in known.items()
        }
    return saved


def plain_group(group: Mapping[str, object]) -> dict[str, object]:
    return {key: plain(value) for key, value in group.items() if key not in PLACE}


def check_saved(saved: object) -> tuple[Mapping[str, Mapping[str, object]], list[Mapping[str, object]]]:
    """The state and the groups of what `state_dict()` gave."""
    if not isinstance(saved, Mapping) or not {"state", "groups"} <= saved.keys():
        found = f"a dict of {sorted(map(str, saved))[:5]}" if isinstance(saved, Mapping) else f"a {type(saved).__name__}"
        raise ValueError(f"a sparsifier's state dict has 'state' and 'groups'; found {found}")
    state, groups = saved["state"], saved["groups"]
    if not isinstance(state, Mapping) or not all(isinstance(known, Mapping) for known in state.values()):
        raise ValueError("'state' of a sparsifier's state dict is a dict of dicts, by tensor name")
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) and "tensor_fqn" in group for group in groups):
        raise ValueError("'groups' of a sparsifier's state dict is a list of dicts with 'tensor_fqn'")
    return state, list(groups)


def read_state(saved: Mapping[str, Mapping[str, object]]) -> State:
    """A state from its saved form, with masks as tensors."""
    state: State = defaultdict(Remembered)
    for fqn, known in saved.items():
        state[fqn] = Remembered({key: unpack_mask(value) if key == "mask" else plain(value) for key, value in known.items()})
    return state


def read_group(saved: Mapping[str, object]) -> Group:
    """A group from its saved form: not yet in a model. torch saves the mask that a config began with; the state has its own."""
    return {str(key): plain(value) for key, value in saved.items() if key not in (*PLACE, "mask")}


def is_binary(mask: torch.Tensor) -> bool:
    """Whether a mask keeps and prunes, and does nothing in between."""
    return mask.dtype is torch.bool or bool(((mask == 0) | (mask == 1)).all())


def pack_mask(mask: torch.Tensor) -> dict[str, object] | torch.Tensor:
    """A mask for storage: its bits and shape, or a copy of it where bits cannot hold it.

    >>> pack_mask(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    {'bits': tensor([13], dtype=torch.uint8), 'shape': (2, 2)}
    """
    if not is_binary(mask):
        return mask.detach().clone()
    kept = (mask.detach() != 0).cpu().reshape(-1).numpy()
    return {"bits": torch.from_numpy(np.packbits(kept, bitorder="little")), "shape": tuple(mask.shape)}


def unpack_mask(stored: object) -> torch.Tensor:
    """A mask from storage, of booleans; one that was stored as a tensor, as torch does it, comes back as it is."""
    if isinstance(stored, torch.Tensor):
        return stored.detach().clone()
    if not isinstance(stored, Mapping) or not {"bits", "shape"} <= stored.keys():
        raise ValueError(f"a mask is stored as a tensor, or as a dict of bits and shape; found a {type(stored).__name__}")
    bits, shape = stored["bits"], stored["shape"]
    if not isinstance(shape, tuple | list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"a mask's shape is a list of whole numbers; found {shape!r}")
    count = math.prod(shape)
    if not isinstance(bits, torch.Tensor) or bits.dtype is not torch.uint8 or bits.shape != (-(-count // 8),):
        found = f"{bits.dtype} {tuple(bits.shape)}" if isinstance(bits, torch.Tensor) else type(bits).__name__
        raise ValueError(f"a mask of shape {tuple(shape)} has {-(-count // 8)} bytes of bits; found {found}")
    kept = np.unpackbits(bits.cpu().numpy(), count=count, bitorder="little").view(np.bool_)
    return torch.from_numpy(kept).view(tuple(shape))
