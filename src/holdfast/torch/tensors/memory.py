"""The bytes of a torch storage as Python memory, without a copy."""

from __future__ import annotations

import ctypes

import torch

from holdfast.core.runtime import memory_at
from holdfast.errors import Unsupported

__all__ = ["NOTHING", "memory_of", "storage_bytes", "storage_memory"]

NOTHING = memoryview(b"")


def storage_memory(storage: torch.UntypedStorage) -> memoryview:
    """A writable view of a CPU storage's own memory; the caller keeps the storage alive."""
    address, nbytes = _place(storage)
    return memory_at(address, nbytes) if nbytes else NOTHING


def storage_bytes(storage: torch.UntypedStorage) -> bytes:
    """A copy of a CPU storage's bytes; for small ones this costs a fifth of the view."""
    address, nbytes = _place(storage)
    return ctypes.string_at(address, nbytes) if nbytes else b""


def _place(storage: torch.UntypedStorage) -> tuple[int, int]:
    nbytes = storage.nbytes()
    address = storage.data_ptr() if nbytes else 0
    if nbytes and not address:
        raise Unsupported("a tensor without memory of its own (a fake one?) has nothing to save")
    return address, nbytes


def memory_of(tensor: torch.Tensor) -> object:
    """What two tensors over the very same elements have in common, and no others; the tensor itself where that cannot be told."""
    own_way = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    odd = tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided
    if own_way or odd or tensor.is_meta or not tensor.numel():
        return id(tensor)
    place = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return *place, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
