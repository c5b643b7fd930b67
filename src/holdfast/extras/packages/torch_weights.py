"""Weights of several models that share storage: which belong together, and which of them covers all of it.

The calls of `torch.export.pt2_archive` (and of `torch._inductor` before), by which a package of weights stores each storage once:

    weights = {"base": Weights({"emb": (emb, TensorProperties(emb)), "head": (head, TensorProperties(head))})}
    for group in group_weights(weights):            [("base", "emb"), ("base", "head")]: one storage, one dtype
        get_complete(group, weights)                ("base", "emb"): the first that covers the storage
        get_complete_tensor(group, weights)         its tensor; where none covers the storage, one is made that does

A tensor covers its storage ("is complete") when it is contiguous and begins and ends where the storage does. A fake tensor counts
as complete. `TensorProperties` here is not the one of `holdfast.metadata`. `holdfast.alias_graph` does the same without torch, and
for files.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from holdfast.errors import Refused
from holdfast.torch import versions

if TYPE_CHECKING:
    from torch.utils._ordered_set import OrderedSet
else:
    OrderedSet = versions.ordered_set()

Member = tuple[str, str]

Group = OrderedSet[Member]
"""Weights over one storage, in the order in which they were met."""

NONE_COMPLETE = (
    "No complete tensor found in the group! Returning the first one. "
    "This may cause issues when your weights are not on CPU."
)
"""torch's words, so that filters on them keep working."""


class TensorProperties:
    """Where a tensor lies in memory. A tensor without storage (sparse, mkldnn) raises what torch raises for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.is_fake = versions.is_fake(tensor)
        self.is_contiguous: bool = tensor.is_contiguous()
        self.storage_ptr: int | None = None
        """Address of the storage; None for a fake tensor."""
        self.storage_size: int | None = None
        """Bytes of the storage. This and what follows is None for a tensor that is fake or not contiguous."""
        self.start: int | None = None
        """Address of the first element."""
        self.end: int | None = None
        """The address behind the last one."""
        if not self.is_fake:
            storage = tensor.untyped_storage()
            self.storage_ptr = storage.data_ptr()
            if self.is_contiguous:
                self.storage_size = storage.nbytes()
                # torch gives an empty tensor the address 0, wherever in a storage it lies.
                self.start = tensor.data_ptr()
                self.end = self.start + tensor.nbytes
        self.shape: torch.Size = tensor.shape
        self.stride: tuple[int, ...] = tensor.stride()
        self.offset: int | torch.SymInt = tensor.storage_offset()

    def is_complete(self) -> bool:
        """Whether it covers its whole storage."""
        if self.is_fake:
            return True
        if self.storage_ptr is None or self.storage_size is None:
            return False
        return self.start == self.storage_ptr and self.end == self.storage_ptr + self.storage_size


class Weights(dict[str, tuple[torch.Tensor, TensorProperties]]):
    """The weights of one model: name → (tensor, properties).

    The tensor may be a copy of the one that the properties are of; it is the properties that say what belongs together.
    """

    def __init__(self, weight_dict: Mapping[str, tuple[torch.Tensor, TensorProperties]]) -> None:
        super().__init__(weight_dict)

    def get_weight(self, name: str) -> tuple[torch.Tensor, TensorProperties]:
        """The tensor and its properties."""
        return self[name]

    def get_weight_properties(self, name: str) -> TensorProperties:
        """How the tensor of this name lies in its storage."""
        return self[name][1]


def group_weights(all_weights: Mapping[str, Weights]) -> list[Group]:
    """Weights of all models that lie in one storage and have one dtype, each group and the groups in the order of the models.

    Fake tensors have no storage to tell them apart: those of one dtype are one group.
    """
    versions.PT2_ARCHIVE.require("group_weights")
    groups: dict[tuple[int | None, torch.dtype], Group] = {}
    for model, weights in all_weights.items():
        for name, (tensor, properties) in weights.items():
            groups.setdefault((properties.storage_ptr, tensor.dtype), OrderedSet()).add(
                (model, name)
            )
    return list(groups.values())


def get_complete(group: Collection[Member], models_weights: Mapping[str, Weights]) -> Member:
    """The first of a group that covers the storage; warns where none does, and gives the first (before torch 2.13)."""
    complete = _first_complete(group, models_weights)
    if complete is not None:
        return complete
    warnings.warn(NONE_COMPLETE, stacklevel=2)
    return next(iter(group))


def get_complete_tensor(
    group: Collection[Member], models_weights: Mapping[str, Weights]
) -> torch.Tensor:
    """The tensor of the first of a group that covers the storage (torch 2.13).

    Where none does, it warns and gives a 1-D tensor of the first one's dtype from the start of the storage to the end of the
    contiguous member that ends last; or the first tensor, where no member is contiguous.
    """
    complete = _first_complete(group, models_weights)
    if complete is not None:
        return models_weights[complete[0]][complete[1]][0]
    warnings.warn(NONE_COMPLETE, stacklevel=2)
    members = [models_weights[model][name] for model, name in group]
    first, properties = members[0]
    ends = [p.end for _, p in members if p.end]
    if not ends or properties.storage_ptr is None:
        return first
    storage, nbytes, width = (
        first.untyped_storage(),
        max(ends) - properties.storage_ptr,
        first.element_size(),
    )
    if nbytes % width:
        raise AssertionError(
            f"Total size ({nbytes} bytes) is not aligned with element size ({width} bytes): the members have several dtypes"
        )
    if storage.data_ptr() != properties.storage_ptr or storage.nbytes() < nbytes:
        # torch 2.13 counts from the copy's address to the original's end, and gives memory that belongs to neither.
        raise Refused(
            "the tensors of this group are copies of parts of a storage that none of them covers: there is nothing to make it from",
            found=sorted(group)[:3],
        )
    with torch.no_grad():
        return torch.empty(0, dtype=first.dtype, device=first.device).set_(
            storage, 0, (nbytes // width,), (1,)
        )


def _first_complete(
    group: Collection[Member], models_weights: Mapping[str, Weights]
) -> Member | None:
    if not group:
        raise AssertionError("group cannot be empty")
    return next(
        (
            (model, name)
            for model, name in group
            if models_weights[model].get_weight_properties(name).is_complete()
        ),
        None,
    )
