"""The torch adapter: a drop-in for `torch.save` and `torch.load`, and more.

    from holdfast.torch import save, load          the same calls, the same bytes
    holdfast.torch.install()                       for programs that call torch.save and torch.load themselves
    holdfast.torch.load_into(model, path)          fill a model from any format, without a second copy
    holdfast.torch.open(path)                      tensors that are read when they are used, shared where the file shares them
    holdfast.torch.save_sharded(path, state)       from any number of ranks, for any other number to load (load_sharded)
    holdfast.torch.Run(folder, keep=[…])           the steps of a training run
    holdfast.torch.sparsity                        masks on models: a drop-in for torch.ao.pruning
    holdfast.torch.serialization                   what torch.serialization has beside save and load, under the same names

Nothing else in Holdfast imports torch. `versions` knows the differences between torch 2.8 and 2.15.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        "holdfast.torch needs torch, which is not installed here: pip install torch. The rest of holdfast works without it.",
        name="torch",
    )

from holdfast.torch import versions as versions  # first: it refuses a torch that is too old
from holdfast.torch.modules.load_into import load_into
from holdfast.torch.serialization.loading import load
from holdfast.torch.serialization.patching import install, uninstall
from holdfast.torch.serialization.saving import save
from holdfast.torch.tensors.open import open
from holdfast.torch.tensors.slices import slices

if TYPE_CHECKING:
    from holdfast.extras.packages.torch_programs import package_program
    from holdfast.extras.packages.torch_weights import TensorProperties as TensorProperties
    from holdfast.extras.packages.torch_weights import Weights as Weights
    from holdfast.extras.packages.torch_weights import get_complete as get_complete
    from holdfast.extras.packages.torch_weights import group_weights as group_weights
    from holdfast.extras.runs.ranks import Run
    from holdfast.torch import sparsity
    from holdfast.torch.cuda.stage import free_host_memory as free_host_memory
    from holdfast.torch.modules.load_into import Loaded as Loaded
    from holdfast.torch.ranks.background import SaveHandle as SaveHandle
    from holdfast.torch.ranks.group import group
    from holdfast.torch.ranks.load_sharded import LoadedShards as LoadedShards
    from holdfast.torch.ranks.load_sharded import load_full, load_sharded
    from holdfast.torch.ranks.local_shards import LocalShardsWrapper as LocalShardsWrapper
    from holdfast.torch.ranks.save_sharded import async_save_sharded, save_sharded
    from holdfast.torch.ranks.saving import SavedShards as SavedShards
    from holdfast.torch.ranks.sharding_metadata import metadata_from_torch as metadata_from_torch
    from holdfast.torch.ranks.sharding_metadata import metadata_to_torch as metadata_to_torch
    from holdfast.torch.tensors.from_lazy import tensor_from_composite as tensor_from_composite
    from holdfast.torch.tensors.from_lazy import tensor_from_lazy as tensor_from_lazy
    from holdfast.torch.tensors.from_lazy import torch_dtype as torch_dtype
    from holdfast.torch.tensors.open import TorchCheckpoint as TorchCheckpoint
    from holdfast.torch.tensors.slices import Slices as Slices

__all__ = [
    "Run",
    "async_save_sharded",
    "group",
    "install",
    "load",
    "load_full",
    "load_into",
    "load_sharded",
    "open",
    "package_program",
    "save",
    "save_sharded",
    "slices",
    "sparsity",
    "uninstall",
]

_NAMES = {
    "extras.packages.torch_programs": "package_program",
    "extras.packages.torch_weights": "TensorProperties Weights get_complete group_weights",
    "extras.runs.ranks": "Run",
    "torch.cuda.stage": "free_host_memory",
    "torch.modules.load_into": "Loaded",
    "torch.ranks.background": "SaveHandle",
    "torch.ranks.group": "group",
    "torch.ranks.load_sharded": "LoadedShards load_full load_sharded",
    "torch.ranks.local_shards": "LocalShardsWrapper",
    "torch.ranks.save_sharded": "async_save_sharded save_sharded",
    "torch.ranks.saving": "SavedShards",
    "torch.ranks.sharding_metadata": "metadata_from_torch metadata_to_torch",
    "torch.tensors.from_lazy": "tensor_from_composite tensor_from_lazy torch_dtype",
    "torch.tensors.open": "TorchCheckpoint",
    "torch.tensors.slices": "Slices",
}
"""Names that are imported on use, by module: some modules import `torch.distributed` or `torch.export`, which takes as long as all
other imports."""

_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name == "sparsity":
        return importlib.import_module("holdfast.torch.sparsity")
    if name not in _WHERE:
        raise AttributeError(f"module 'holdfast.torch' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"holdfast.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
