"""From lazy tensors to torch tensors: the same bits, without a copy beyond the read.

Storages that `LazyTensor.torch()` made are remembered, weakly, while a torch tensor uses them. Another name over the same storage
of the file (a tied weight, a slice that was saved beside its base) becomes a view of what is there. The same name is read again, so
that a tensor that was changed since does not come back.

A part of a storage that comes first is read by itself, for a lazy tensor reads no more than itself. `holdfast.torch.open` knows the
whole checkpoint, and shares such storages as well.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

from holdfast.core.arguments import AnyDType
from holdfast.core.chunk import Storage, is_c_ordered
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Source
from holdfast.core.quantities import describe_value
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.errors import BadArgumentType, HoldfastError, MetadataError, Unsupported
from holdfast.formats.torch.composites import Apart
from holdfast.torch import versions
from holdfast.torch.tensors.composites import KINDS, elements_of

BYTES = next(row for row in DTYPES.rows if row.name == "uint8")


def torch_dtype(dtype: AnyDType) -> torch.dtype:
    """torch's dtype for a row of the table, or for what names one."""
    if not isinstance(dtype, DType):
        row = DTYPES.parse(dtype) if isinstance(dtype, str) else DTYPES.from_any(dtype)
        if row is None:
            raise BadArgumentType(f"there is no dtype {describe_value(dtype)}", found=dtype)
        dtype = row
    name = "float4_e2m1fn_x2" if dtype.name == "float4_e2m1fn" else dtype.torch
    found = versions.dtype(name) if name else None
    if found is None:
        raise Unsupported(f"torch has no dtype for {dtype}", found=dtype.name)
    return found


def tensor_from_lazy(lazy: LazyTensor) -> torch.Tensor:
    """The tensor's elements in a torch tensor on the CPU; memory is shared with the read (or mapped) array.

    Two names over one storage of a file are one storage in torch again, while one of them is in use.
    """
    if not isinstance(lazy, LazyTensor):
        raise BadArgumentType(
            f"tensor_from_lazy takes a lazy tensor of a checkpoint, not {describe_value(lazy)}",
            found=lazy,
        )
    if lazy.dtype.kind == "quantized":
        raise Unsupported(
            "quantised elements mean nothing without their scale: take the composite from ckpt.tree and call its torch(), "
            "or read the integers with numpy()",
            tensor=lazy.name,
        )
    dtype = torch_dtype(lazy.dtype)
    if lazy.traits.meta:
        return torch.empty(lazy.shape, dtype=dtype, device="meta")
    if lazy.dtype.name == "float4_e2m1fn":
        return _pairs(lazy.numpy(), lazy)
    if (
        lazy.source.mapped
        or len(lazy.chunks) != 1
        or not lazy.size
        or lazy.traits.conj
        or lazy.traits.neg
    ):
        # Mapped names share the mapped memory as they are.
        return tensor_from_array(lazy.numpy(), dtype)
    tensor = view_of_shared(lazy, dtype)
    if tensor is None:
        tensor = tensor_from_array(lazy.numpy(), dtype)
        remember(lazy, tensor)
    return tensor


def tensor_from_array(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The memory of an array as a torch tensor: given to torch as integers of that width, then viewed as its true dtype."""
    if any(s < 0 for s in array.strides) or not array.flags.writeable:
        # torch has neither reversed nor read-only tensors (the latter come from bytes opened with mmap=True).
        array = array.copy()
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    if array.ndim == 0:
        return tensor_from_array(array.reshape(1), dtype).reshape(())
    # torch takes no other 16 bytes from numpy, and no integers of 16 bytes.
    return torch.from_numpy(
        array.view("c16" if array.itemsize == 16 else f"i{array.itemsize}")
    ).view(dtype)


def array_of(tensor: torch.Tensor, dtype: DType) -> np.ndarray:
    """The memory of a CPU tensor as a writable array of the same shape and strides; `dtype` is the tensor's own."""
    plain = tensor.detach()
    return plain.view(view_dtype(plain.element_size())).numpy().view(dtype.numpy)


def view_dtype(nbytes: int) -> torch.dtype:
    """A torch dtype of the same width that numpy knows."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[
        nbytes
    ]


def tensor_from_composite(whole: Composite) -> torch.Tensor:
    """A sparse, quantised or nested tensor out of its parts; indices out of range are refused by torch's own checks."""
    if not isinstance(whole, Composite):
        raise BadArgumentType(
            f"tensor_from_composite takes a composite of a checkpoint's tree, not {describe_value(whole)}",
            found=whole,
        )
    kind = KINDS.get(whole.kind)
    if kind is None:
        raise Unsupported(
            f"there are no tensors of a kind {whole.kind[:32]!r} in torch", found=whole.kind
        )
    try:
        parts = {
            name: elements_of(p) if p.dtype.kind == "quantized" else p.torch()
            for name, p in whole.parts.items()
        }
        return kind.put_together(Apart(whole.shape, parts, whole.attributes))
    except HoldfastError:
        raise
    except (RuntimeError, IndexError, ValueError) as error:
        raise MetadataError(
            f"the parts of a {whole.kind} tensor do not fit: {error}", found=whole.shape
        ) from error


def _pairs(array: np.ndarray, lazy: LazyTensor) -> torch.Tensor:
    """Two 4-bit floats to the byte, the first in the low half, as torch's float4_e2m1fn_x2 has them."""
    if not array.ndim or array.shape[-1] % 2:
        raise Unsupported(
            "torch holds 4-bit floats in pairs; the last dimension is odd",
            tensor=lazy.name,
            found=lazy.shape,
        )
    nibbles = array.view(np.uint8)
    packed = np.ascontiguousarray(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4))
    return torch.from_numpy(packed).view(torch_dtype(lazy.dtype))


Place = tuple[str, int, int]
"""A storage of a source: its file, first byte and length. Not the `Storage`, which would keep the source's files open."""


class SharedStorage(weakref.ref[torch.UntypedStorage]):
    """A storage that is in use while the reference is alive, and the names that were given views of it."""

    __slots__ = ("among", "names", "place")

    names: tuple[str, ...]
    place: Place
    among: weakref.ref[SharedStorages]


class SharedStorages(dict[Place, SharedStorage]):
    __slots__ = ("__weakref__",)


def _forget(gone: weakref.ref[torch.UntypedStorage]) -> None:
    assert isinstance(gone, SharedStorage)
    known = gone.among()
    if known is not None and known.get(gone.place) is gone:
        del known[gone.place]


_shared: weakref.WeakKeyDictionary[Source, SharedStorages] = weakref.WeakKeyDictionary()


def remember(lazy: LazyTensor, tensor: torch.Tensor) -> None:
    """Remember the storage of a tensor that was just read, where it has all bytes of the file's storage."""
    chunk = lazy.chunks[0]
    storage = chunk.storage
    if (
        chunk.offset
        or storage.nbytes * 8 != lazy.size * lazy.dtype.bits
        or storage.byteorder != "little"
    ):
        return
    if not is_c_ordered(lazy.shape, chunk.strides, lazy.dtype.bits):
        return
    known = _shared.get(lazy.source)
    if known is None:
        known = _shared[lazy.source] = SharedStorages()
    made = SharedStorage(tensor.untyped_storage(), _forget)
    made.names, made.place, made.among = (lazy.name,), _place(storage), weakref.ref(known)
    known[made.place] = made


def view_of_shared(lazy: LazyTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor as a view of a storage that another name was given and that is still in use; else None."""
    known = _shared.get(lazy.source)
    if not known:
        return None
    chunk = lazy.chunks[0]
    shared = known.get(_place(chunk.storage))
    if (
        shared is None
        or lazy.name in shared.names
        or chunk.storage.byteorder != "little"
        or chunk.shape != lazy.shape
    ):
        return None
    bits, storage = lazy.dtype.bits, shared()
    if storage is None or chunk.offset % bits or any(s < 0 or s % bits for s in chunk.strides):
        return None
    lazy.source.store.size(chunk.storage.key)  # raises `Closed` as reading would
    shared.names = (*shared.names, lazy.name)
    strides = tuple(s // bits for s in chunk.strides)
    return torch.empty(0, dtype=dtype, device="cpu").set_(
        storage, chunk.offset // bits, lazy.shape, strides
    )


def _place(storage: Storage) -> Place:
    return storage.key, storage.start, storage.nbytes
