"""The parsed metadata of a directory in the public vocabulary (`holdfast.metadata`), as torch's own classes would hold it."""

from __future__ import annotations

import os

from holdfast.core.dtype import DType
from holdfast.errors import Unsupported
from holdfast.formats.dcp.schema import (
    Item,
    ItemIndex,
    Metadata,
    StorageNote,
    StoredBox,
    StoredBytes,
    StoredTensor,
)
from holdfast.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Layout,
    MemoryFormat,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.metadata import Metadata as Described

__all__ = ["to_metadata"]


def to_metadata(parsed: Metadata) -> Described:
    """What `.metadata` says, as it says it: its chunks, items and paths are those of the file, unchecked.

    Raises `Unsupported` for an entry that is neither a tensor nor bytes.
    """
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, stored in parsed.tensors.items():
        match stored:
            case StoredTensor():
                tensors[str(name)] = _tensor(stored)
            case StoredBytes():
                tensors[str(name)] = BytesStorageMetadata()
            case _:
                raise Unsupported(
                    "an entry that is neither a tensor nor bytes",
                    tensor=str(name),
                    found=type(stored).__name__,
                )
    items = {
        MetadataIndex(place.name, place.offset, place.index): StorageInfo(
            item.file, item.offset, item.length, list(item.transforms) or None
        )
        for place, item in parsed.items.items()
        if isinstance(place, ItemIndex) and isinstance(item, Item)
    }
    version = parsed.version if isinstance(parsed.version, str) else None
    return Described(
        tensors,
        _paths(parsed.planner),
        items,
        None if parsed.note is None else _note(parsed.note),
        version,
    )


def _tensor(stored: StoredTensor) -> TensorStorageMetadata:
    properties = stored.properties
    if not isinstance(properties.dtype, DType):
        raise Unsupported("a tensor without a dtype")
    described = TensorProperties(
        properties.dtype,
        Layout(properties.layout.name),
        properties.requires_grad,
        MemoryFormat.from_name(properties.memory_format),
        properties.pin_memory,
    )
    chunks = [
        ChunkStorageMetadata(box.offsets, box.sizes)
        for box in stored.boxes
        if isinstance(box, StoredBox)
    ]
    return TensorStorageMetadata(described, stored.size, chunks)


def _paths(planner: object) -> dict[str, tuple[str | int, ...]] | None:
    if not isinstance(planner, dict):
        return None
    return {str(name): path for name, path in planner.items() if isinstance(path, tuple)}


def _note(note: StorageNote) -> StorageMeta:
    place, modules = note.checkpoint_id, note.modules
    return StorageMeta(
        place if isinstance(place, str | os.PathLike) else None,
        note.save_id if isinstance(note.save_id, str) else None,
        note.load_id if isinstance(note.load_id, str) else None,
        [name for name in modules if isinstance(name, str)] if isinstance(modules, list) else [],
    )
