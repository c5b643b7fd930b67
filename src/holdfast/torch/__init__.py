"""The torch adapter: a drop-in for `torch.save` and `torch.load`, and more.

    from holdfast.torch import save, load          the same calls, the same bytes
    holdfast.torch.install()                       for programs that call torch.save and torch.load themselves
    holdfast.torch.load_into(model, path)          fill a model from any format, without a second copy
    holdfast.torch.open(path)                      tensors that are read when they are used, shared where the file shares them
    holdfast.torch.save_sharded(path, state)       from any number of ranks, for any other number to load (load_sharded)
    holdfast.torch.Run(folder, keep=[…])           the steps of a training run
    holdfast.torch.sparsity                        masks on models: a drop-in for torch.ao.pruning

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

from torch.serialization import LoadEndianness, SourceChangeWarning, StorageType

from holdfast.core.registry import extras_table
from holdfast.torch import versions as versions  # first: it refuses a torch that is too old
from holdfast.torch.cuda.stage import free_host_memory
from holdfast.torch.modules.load_into import Loaded, load_into
from holdfast.torch.serialization.allowed import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)
from holdfast.torch.serialization.load import load
from holdfast.torch.serialization.locations import (
    default_restore_location,
    location_tag,
    register_package,
    validate_cuda_device,
    validate_hpu_device,
)
from holdfast.torch.serialization.patching import install, uninstall
from holdfast.torch.serialization.save import save
from holdfast.torch.serialization.settings import (
    DEFAULT_PROTOCOL,
    MAGIC_NUMBER,
    PROTOCOL_VERSION,
    STORAGE_KEY_SEPARATOR,
    check_module_version_greater_or_equal,
    get_crc32_options,
    get_default_load_endianness,
    get_default_mmap_options,
    mkdtemp,
    normalize_storage_type,
    set_crc32_options,
    set_default_load_endianness,
    set_default_mmap_options,
    skip_data,
    storage_to_tensor_type,
)
from holdfast.torch.tensors.from_lazy import tensor_from_composite, tensor_from_lazy, torch_dtype
from holdfast.torch.tensors.open import TorchCheckpoint, open
from holdfast.torch.tensors.slices import Slices, slices

if TYPE_CHECKING:
    from holdfast.extras.packages.torch_programs import package_program
    from holdfast.extras.packages.torch_weights import (
        TensorProperties,
        Weights,
        get_complete,
        group_weights,
    )
    from holdfast.extras.runs.ranks import Run
    from holdfast.torch import sparsity
    from holdfast.torch.ranks.background import SaveHandle
    from holdfast.torch.ranks.group import group
    from holdfast.torch.ranks.load_sharded import LoadedShards, load_full, load_sharded
    from holdfast.torch.ranks.local_shards import LocalShardsWrapper
    from holdfast.torch.ranks.save_sharded import async_save_sharded, save_sharded
    from holdfast.torch.ranks.saving import SavedShards
    from holdfast.torch.ranks.sharding_metadata import metadata_from_torch, metadata_to_torch

__all__ = [
    "DEFAULT_PROTOCOL", "MAGIC_NUMBER", "PROTOCOL_VERSION", "STORAGE_KEY_SEPARATOR", "LoadEndianness", "Loaded", "LoadedShards",
    "LocalShardsWrapper", "Run", "SaveHandle", "SavedShards", "Slices", "SourceChangeWarning", "StorageType", "TensorProperties",
    "TorchCheckpoint", "Weights", "add_safe_globals", "async_save_sharded", "check_module_version_greater_or_equal",
    "clear_safe_globals", "default_restore_location", "free_host_memory", "get_complete", "get_crc32_options",
    "get_default_load_endianness", "get_default_mmap_options", "get_safe_globals", "get_unsafe_globals_in_checkpoint",
    "group", "group_weights", "install", "load", "load_full", "load_into", "load_sharded", "location_tag", "metadata_from_torch",
    "metadata_to_torch", "mkdtemp", "normalize_storage_type", "open", "package_program", "register_package", "safe_globals",
    "save", "save_sharded", "set_crc32_options", "set_default_load_endianness", "set_default_mmap_options", "skip_data", "slices",
    "sparsity", "storage_to_tensor_type", "tensor_from_composite", "tensor_from_lazy", "torch_dtype", "uninstall",
    "validate_cuda_device", "validate_hpu_device",
]  # fmt: skip

_WHERE = {
    "LoadedShards": "holdfast.torch.ranks.load_sharded",
    "LocalShardsWrapper": "holdfast.torch.ranks.local_shards",
    "SaveHandle": "holdfast.torch.ranks.background",
    "SavedShards": "holdfast.torch.ranks.saving",
    "async_save_sharded": "holdfast.torch.ranks.save_sharded",
    "group": "holdfast.torch.ranks.group",
    "load_full": "holdfast.torch.ranks.load_sharded",
    "load_sharded": "holdfast.torch.ranks.load_sharded",
    "metadata_from_torch": "holdfast.torch.ranks.sharding_metadata",
    "metadata_to_torch": "holdfast.torch.ranks.sharding_metadata",
    "save_sharded": "holdfast.torch.ranks.save_sharded",
}
"""Modules that import `torch.distributed` or `torch.export`, which takes as long as all other imports."""


def __getattr__(name: str) -> object:
    if name == "sparsity":
        return importlib.import_module("holdfast.torch.sparsity")
    module = _WHERE.get(name) or extras_table("TORCH_NAMES").get(name)
    if module is None:
        raise AttributeError(f"module 'holdfast.torch' has no attribute {name!r}")
    found: object = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
