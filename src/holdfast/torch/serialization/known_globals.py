"""The names that torch allows in every `weights_only` load (2.13: 144 of them), each with what it stands for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch

from holdfast.core.dtype import DTYPES
from holdfast.formats.torch.table import TENSOR_CLASSES
from holdfast.formats.torch.tensors import QSCHEMES
from holdfast.torch.serialization.unpickling import StorageClass

__all__ = ["default_globals"]

REBUILDS = (
    "parameter", "parameter_with_state", "qtensor", "tensor", "tensor_v2", "tensor_v3", "sparse_tensor", "meta_tensor_no_storage",
    "nested_tensor", "wrapper_subclass", "device_tensor_from_numpy", "device_tensor_from_cpu_tensor",
)  # fmt: skip

SINGLE = (
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode", "builtins.bytearray", "builtins.set", "builtins.complex"),
    *("torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter", "torch.serialization._get_layout"),
    *("torch.storage.TypedStorage", "torch.storage.UntypedStorage", "torch._tensor._rebuild_from_type_v2"),
)
"""Names that are no part of a family (FORMATS 3.2). Each stands for what Python has under it."""


def _named(full: str) -> object:
    """What a name of ours stands for; never one that a file gave."""
    module, _, name = full.rpartition(".")
    return getattr(importlib.import_module(module), name)


@cache
def default_globals() -> Mapping[str, object]:
    """The names that a `weights_only` load knows without being told, each with what it stands for."""
    found = {name: _named(name) for name in SINGLE}
    found |= {f"torch._utils._rebuild_{name}": getattr(torch._utils, f"_rebuild_{name}") for name in REBUILDS}
    found |= {f"torch.{name}": getattr(torch, name) for name in QSCHEMES}
    for row in DTYPES.rows:
        if row.torch is not None:
            found[f"torch.{row.torch}"] = getattr(torch, row.torch)
        if row.storage is not None:
            found[f"torch.{row.storage}"] = StorageClass(row.storage)
            if row.kind != "quantized":
                found[f"torch.cuda.{row.storage}"] = StorageClass(row.storage)
    for module in (torch, torch.cuda, torch.sparse, torch.cuda.sparse):
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in TENSOR_CLASSES if hasattr(module, name)}
    return MappingProxyType(found)
