"""DTensor, its placements and FSDP, wherever this torch has them (holdfast.torch.versions)."""

from __future__ import annotations

import importlib

from holdfast.torch import versions

__all__ = [
    "DTensor",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "distribute_tensor",
    "fully_shard",
    "init_device_mesh",
    "placement_types",
]

_there = versions.dtensor_module()
DTensor, distribute_tensor, init_device_mesh = (
    _there.DTensor,
    _there.distribute_tensor,
    _there.init_device_mesh,
)
Partial, Placement, Replicate, Shard = (
    _there.Partial,
    _there.Placement,
    _there.Replicate,
    _there.Shard,
)
placement_types = importlib.import_module(f"{_there.__name__}.placement_types")

_fsdp = importlib.import_module(
    "torch.distributed.fsdp" if versions.FULLY_SHARD else "torch.distributed._composable.fsdp"
)
fully_shard = _fsdp.fully_shard
