"""The index of a DCP directory, of torch's own classes: no other pickle is understood by torch's reader."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

from holdfast.core.dtype import DTYPES
from holdfast.ranks.files import Contents, Receipt
from holdfast.torch.tensors.from_lazy import torch_dtype

__all__ = ["dcp_index"]


def dcp_index(contents: Contents, receipts: Sequence[Receipt]) -> bytes:
    """The `.metadata` of a directory with these files."""
    state: dict[str, m.TensorStorageMetadata | m.BytesStorageMetadata] = {}
    storage: dict[m.MetadataIndex, _StorageInfo] = {}
    for receipt in receipts:
        for name, chunk in receipt.chunks:
            first, last = chunk.bytes
            info = _StorageInfo(receipt.key, first, last - first)
            if name in contents.values:
                state[name] = m.BytesStorageMetadata()
                storage[m.MetadataIndex(name)] = info
                continue
            dtype, shape = contents.tensors[name]
            row = DTYPES.name(dtype)
            assert row is not None  # the plan's catalogue has checked it
            assert chunk.start is not None  # receipts have the box of every chunk
            assert chunk.stop is not None
            known = state.get(name)
            if not isinstance(known, m.TensorStorageMetadata):
                properties = m.TensorProperties(dtype=torch_dtype(row), requires_grad=name in contents.grads)
                known = state[name] = m.TensorStorageMetadata(properties, torch.Size(shape), [])
            start, sizes = torch.Size(chunk.start), torch.Size([b - a for a, b in zip(chunk.start, chunk.stop, strict=True)])
            storage[m.MetadataIndex(name, start, len(known.chunks))] = info
            known.chunks.append(m.ChunkStorageMetadata(start, sizes))
    for alias, base in contents.aliases.items():
        # Tied tensors: the same items under another name. torch's reader loads each name by itself, and need not know.
        known = state[base]
        assert isinstance(known, m.TensorStorageMetadata)
        properties = m.TensorProperties(dtype=known.properties.dtype, requires_grad=alias in contents.grads)
        state[alias] = m.TensorStorageMetadata(properties, known.size, list(known.chunks))
        for number, item in enumerate(known.chunks):
            storage[m.MetadataIndex(alias, item.offsets, number)] = storage[m.MetadataIndex(base, item.offsets, number)]
    ordered = {name: state[name] for name in contents.paths if name in state}
    planner = dict(contents.paths)
    return pickle.dumps(m.Metadata(ordered, planner, storage, m.StorageMeta(), version="1.0.0"))
