"""The description of a sharded checkpoint, to and from torch's own classes.

`metadata_to_torch` takes any value of `holdfast.metadata` and gives the value of `torch.distributed.checkpoint.metadata` that it
stands for; `metadata_from_torch` goes back. Both go through everything inside. Nothing is lost:

    metadata_from_torch(metadata_to_torch(x)) == x    and    metadata_to_torch(metadata_from_torch(y)) == y

The hint of an index is kept, though it takes no part in equality. What a planner or a writer of another kind keeps in
`planner_data` and `storage_data` is handed over as it is, but for the indexes and places in it that are known. The one
refusal: element types that torch does not have (4- and 6-bit floats of safetensors).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, overload

import torch
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from holdfast import metadata as ours
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Global
from holdfast.core.runtime import gc_paused
from holdfast.errors import Unsupported
from holdfast.torch import versions

_MEMORY_FORMATS = {
    each: cast(torch.memory_format, getattr(torch, str(each))) for each in ours.MemoryFormat
}
_LAYOUTS = {each: cast(torch.layout, getattr(torch, each.value)) for each in ours.Layout}
_OUR_MEMORY_FORMATS = {there: here for here, there in _MEMORY_FORMATS.items()}
_OUR_LAYOUTS = {there: here for here, there in _LAYOUTS.items()}


# From ours to torch's.


@overload
def metadata_to_torch(value: ours.Metadata) -> torchs.Metadata: ...
@overload
def metadata_to_torch(value: ours.TensorStorageMetadata) -> torchs.TensorStorageMetadata: ...
@overload
def metadata_to_torch(value: ours.BytesStorageMetadata) -> torchs.BytesStorageMetadata: ...
@overload
def metadata_to_torch(value: ours.ChunkStorageMetadata) -> torchs.ChunkStorageMetadata: ...
@overload
def metadata_to_torch(value: ours.TensorProperties) -> torchs.TensorProperties: ...
@overload
def metadata_to_torch(value: ours.MetadataIndex) -> torchs.MetadataIndex: ...
@overload
def metadata_to_torch(value: ours.StorageMeta) -> torchs.StorageMeta: ...
@overload
def metadata_to_torch(value: ours.StorageInfo) -> _StorageInfo: ...
@overload
def metadata_to_torch(value: ours.Layout) -> torch.layout: ...
@overload
def metadata_to_torch(value: ours.MemoryFormat) -> torch.memory_format: ...
@overload
def metadata_to_torch(value: DType | Global) -> torch.dtype: ...


def metadata_to_torch(value: object) -> object:
    """torch's value for one of ours; TypeError for anything else, `Unsupported` for an element type that torch lacks."""
    made = _to_torch(value)
    if made is value:
        raise TypeError(
            f"torch has no class for a {type(value).__name__} in its description of a checkpoint"
        )
    return made


def _to_torch(value: object) -> object:
    match value:
        case ours.Metadata():
            with gc_paused():
                made = torchs.Metadata(
                    {
                        name: metadata_to_torch(each)
                        for name, each in value.state_dict_metadata.items()
                    },
                    value.planner_data,
                    _records(value.storage_data, _to_torch),
                    None if value.storage_meta is None else metadata_to_torch(value.storage_meta),
                )
            if versions.VERSIONED:
                made.version = value.version
            return made
        case ours.TensorStorageMetadata():
            chunks = [metadata_to_torch(chunk) for chunk in value.chunks]
            return torchs.TensorStorageMetadata(
                metadata_to_torch(value.properties), torch.Size(value.size), chunks
            )
        case ours.ChunkStorageMetadata():
            return torchs.ChunkStorageMetadata(torch.Size(value.offsets), torch.Size(value.sizes))
        case ours.TensorProperties():
            return torchs.TensorProperties(
                metadata_to_torch(value.dtype),
                metadata_to_torch(value.layout),
                value.requires_grad,
                metadata_to_torch(value.memory_format),
                value.pin_memory,
                **({"strides": value.strides} if versions.STRIDES else {}),
            )
        case ours.MetadataIndex():
            return torchs.MetadataIndex(value.fqn, value.offset, value.index)
        case ours.StorageInfo():
            return _StorageInfo(
                value.relative_path, value.offset, value.length, value.transform_descriptors
            )
        case ours.StorageMeta():
            return torchs.StorageMeta(
                value.checkpoint_id, value.save_id, value.load_id, list(value.modules)
            )
        case ours.BytesStorageMetadata():
            return torchs.BytesStorageMetadata()
        case ours.MemoryFormat():
            return _MEMORY_FORMATS[value]
        case ours.Layout():
            return _LAYOUTS[value]
        case DType() | Global():
            return _torch_dtype(value)
        case _:
            return value


def _torch_dtype(dtype: DType | Global) -> torch.dtype:
    # Not `torch_dtype`, which answers a 4-bit float with torch's pair of them: that would need another size as well.
    name = (
        dtype.torch if isinstance(dtype, DType) else dtype.name if dtype.module == "torch" else None
    )
    found = versions.dtype(name) if name else None
    if found is None:
        raise Unsupported(f"torch has no dtype for {dtype}", found=str(dtype))
    return found


# From torch's to ours.


@overload
def metadata_from_torch(value: torchs.Metadata) -> ours.Metadata: ...
@overload
def metadata_from_torch(value: torchs.TensorStorageMetadata) -> ours.TensorStorageMetadata: ...
@overload
def metadata_from_torch(value: torchs.BytesStorageMetadata) -> ours.BytesStorageMetadata: ...
@overload
def metadata_from_torch(value: torchs.ChunkStorageMetadata) -> ours.ChunkStorageMetadata: ...
@overload
def metadata_from_torch(value: torchs.TensorProperties) -> ours.TensorProperties: ...
@overload
def metadata_from_torch(value: torchs.MetadataIndex) -> ours.MetadataIndex: ...
@overload
def metadata_from_torch(value: torchs.StorageMeta) -> ours.StorageMeta: ...
@overload
def metadata_from_torch(value: _StorageInfo) -> ours.StorageInfo: ...
@overload
def metadata_from_torch(value: torch.layout) -> ours.Layout: ...
@overload
def metadata_from_torch(value: torch.memory_format) -> ours.MemoryFormat: ...
@overload
def metadata_from_torch(value: torch.dtype) -> DType | Global: ...


def metadata_from_torch(value: object) -> object:
    """Our value for one of torch's; TypeError for anything else."""
    made = _from_torch(value)
    if made is value:
        raise TypeError(
            f"a {type(value).__name__} is no part of torch's description of a checkpoint"
        )
    return made


def _from_torch(value: object) -> object:
    match value:
        case torchs.Metadata():
            with gc_paused():
                return ours.Metadata(
                    {
                        name: metadata_from_torch(each)
                        for name, each in value.state_dict_metadata.items()
                    },
                    value.planner_data,
                    cast(
                        dict[ours.MetadataIndex, ours.StorageInfo] | None,
                        _records(value.storage_data, _from_torch),
                    ),
                    None if value.storage_meta is None else metadata_from_torch(value.storage_meta),
                    value.version if versions.VERSIONED else None,
                )
        case torchs.TensorStorageMetadata():
            chunks = [metadata_from_torch(chunk) for chunk in value.chunks]
            return ours.TensorStorageMetadata(
                metadata_from_torch(value.properties), value.size, chunks
            )
        case torchs.ChunkStorageMetadata():
            return ours.ChunkStorageMetadata(value.offsets, value.sizes)
        case torchs.TensorProperties():
            return ours.TensorProperties(
                metadata_from_torch(value.dtype),
                metadata_from_torch(value.layout),
                value.requires_grad,
                metadata_from_torch(value.memory_format),
                value.pin_memory,
                versions.strides_of(value),
            )
        case torchs.MetadataIndex():
            return ours.MetadataIndex(value.fqn, value.offset, value.index)
        case _StorageInfo():
            # Records that torch 2.4 and earlier wrote do not have this attribute.
            transforms = getattr(value, "transform_descriptors", None)
            return ours.StorageInfo(value.relative_path, value.offset, value.length, transforms)
        case torchs.StorageMeta():
            return ours.StorageMeta(
                value.checkpoint_id, value.save_id, value.load_id, list(value.modules)
            )
        case torchs.BytesStorageMetadata():
            return ours.BytesStorageMetadata()
        case torch.memory_format():
            return _OUR_MEMORY_FORMATS[value]
        case torch.layout():
            return _OUR_LAYOUTS[value]
        case torch.dtype():
            name = str(value).removeprefix("torch.")
            return DTYPES.torch(name) or Global("torch", name)
        case _:
            return value


def _records(data: object, convert: Callable[[object], object]) -> object:
    """What a writer records about its files: indexes and places are converted, in a dictionary of them, and nothing else is."""
    return (
        {convert(key): convert(each) for key, each in data.items()}
        if isinstance(data, dict)
        else convert(data)
    )
