"""From lazy tensors to torch tensors: the same bits, without a copy beyond the read."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.core.dtype import DType
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.errors import HoldfastError, MetadataError, Unsupported
from holdfast.torch.tensors.live_storages import keep, view_of_kept

__all__ = ["array_of", "carrier_dtype", "tensor_from_array", "tensor_from_composite", "tensor_from_lazy", "torch_dtype"]


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's dtype for a row of the table."""
    if dtype.name == "float4_e2m1fn":
        return torch.float4_e2m1fn_x2
    found = getattr(torch, dtype.torch, None) if dtype.torch else None
    if not isinstance(found, torch.dtype):
        raise Unsupported(f"torch has no dtype for {dtype}", found=dtype.name)
    return found


def tensor_from_lazy(lazy: LazyTensor) -> torch.Tensor:
    """The tensor's elements in a torch tensor on the CPU; memory is shared with the read (or mapped) array.

    Two names over one storage of a file are one storage in torch again: see `kept.py` for when.
    """
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
    if lazy.source.mapped or len(lazy.chunks) != 1 or not lazy.size or lazy.traits.conj or lazy.traits.neg:
        # Mapped names share the mapped memory as they are.
        return tensor_from_array(lazy.numpy(), dtype)
    tensor = view_of_kept(lazy, dtype)
    if tensor is None:
        tensor = tensor_from_array(lazy.numpy(), dtype)
        keep(lazy, tensor)
    return tensor


def tensor_from_array(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The same memory as a torch tensor: handed over as integers of the same width, then named by its true dtype."""
    if any(s < 0 for s in array.strides) or not array.flags.writeable:
        # torch has neither reversed nor read-only tensors (the latter come from bytes opened with mmap=True).
        array = array.copy()
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    if array.ndim == 0:
        return tensor_from_array(array.reshape(1), dtype).reshape(())
    return torch.from_numpy(array.view(_carrier(array.dtype))).view(dtype)


def array_of(tensor: torch.Tensor, dtype: DType) -> np.ndarray:
    """The memory of a CPU tensor as a writable array of the same shape and strides; `dtype` is the tensor's own."""
    plain = tensor.detach()
    return plain.view(carrier_dtype(plain.element_size())).numpy().view(dtype.numpy)


def carrier_dtype(nbytes: int) -> torch.dtype:
    """A torch dtype of the same width that numpy knows."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[nbytes]


def tensor_from_composite(whole: Composite) -> torch.Tensor:
    """A sparse, quantised or nested tensor out of its parts; indices out of range are refused by torch's own checks."""
    parts = whole.parts
    try:
        if whole.kind == "quantized":
            return _quantized(whole)
        if whole.kind == "nested":
            pieces = [parts[n].torch() for n in ("buffer", "sizes", "strides", "offsets")]
            return torch._nested_view_from_buffer(*pieces)
        if whole.kind == "jagged":
            return _jagged(whole)
        tensors = [part.torch() for part in parts.values()]
        if whole.kind == "sparse_coo":
            coalesced = whole.attributes.get("coalesced")
            return torch.sparse_coo_tensor(
                tensors[0],
                tensors[1],
                whole.shape,
                check_invariants=True,
                is_coalesced=coalesced if isinstance(coalesced, bool) else None,
            )
        layout = getattr(torch, whole.kind)
        compressed, plain, values = tensors
        return torch.sparse_compressed_tensor(
            compressed_indices=compressed,
            plain_indices=plain,
            values=values,
            size=whole.shape,
            layout=layout,
            check_invariants=True,
        )
    except HoldfastError:
        raise
    except (RuntimeError, IndexError, ValueError) as error:
        raise MetadataError(f"the parts of a {whole.kind} tensor do not fit: {error}", found=whole.shape) from error


def _jagged(whole: Composite) -> torch.Tensor:
    """Rows of several lengths along one dimension; torch trusts the offsets, so they are checked here."""
    values, offsets = whole.parts["values"].torch(), whole.parts["offsets"].torch()
    lengths = whole.parts["lengths"].torch() if "lengths" in whole.parts else None
    known = {name: value for name, value in whole.attributes.items() if isinstance(value, int)}
    starts, stops = offsets[:-1], offsets[1:]
    ends = stops if lengths is None else starts + lengths
    if int(offsets[0]) < 0 or bool((stops < starts).any()) or bool((ends < starts).any()) or bool((ends > stops).any()):
        raise MetadataError("the offsets of a jagged tensor do not rise, or its lengths do not fit between them")
    room = values.shape[known["ragged_idx"] - 1]
    if int(offsets[-1]) > room:
        raise MetadataError("a jagged tensor reaches past its values", expected=room, found=int(offsets[-1]))
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, known["ragged_idx"], known.get("min_seqlen"), known.get("max_seqlen")
    )


def _quantized(whole: Composite) -> torch.Tensor:
    elements = whole.parts["int_repr"]
    carrier = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}.get(elements.dtype.name)
    array = elements.numpy()
    match whole.attributes:
        case {"scale": float(scale), "zero_point": int(zero)}:
            if carrier is not None:
                return torch._make_per_tensor_quantized_tensor(tensor_from_array(array, carrier), scale, zero)
            made = torch._empty_affine_quantized(elements.shape, scale=scale, zero_point=zero, dtype=torch_dtype(elements.dtype))
        case {"axis": int(axis)}:
            scales, zeros = whole.parts["scales"].torch(), whole.parts["zero_points"].torch()
            if carrier is not None:
                return torch._make_per_channel_quantized_tensor(tensor_from_array(array, carrier), scales, zeros, axis)
            made = torch._empty_per_channel_affine_quantized(
                elements.shape, scales=scales, zero_points=zeros, axis=axis, dtype=torch_dtype(elements.dtype)
            )
        case _:
            raise MetadataError("a quantised tensor without its scale")
    return _packed(made, array, elements.dtype.bits)


def _packed(made: torch.Tensor, array: np.ndarray, bits: int) -> torch.Tensor:
    """Fill a quantised tensor of a packed type, which torch builds from nothing but its storage; lowest bits first."""
    each = np.unpackbits(array.reshape(-1, 1), axis=1, bitorder="little")[:, :bits]
    packed = np.packbits(each.reshape(-1), bitorder="little")
    storage = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
    storage.zero_()
    storage[: len(packed)] = torch.from_numpy(packed)
    return made


def _carrier(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """A numpy dtype of the same width that torch takes."""
    carriers: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
    return np.dtype(carriers[dtype.itemsize])


def _pairs(array: np.ndarray, lazy: LazyTensor) -> torch.Tensor:
    """Two 4-bit floats to the byte, the first in the low half, as torch's float4_e2m1fn_x2 has them."""
    if not array.ndim or array.shape[-1] % 2:
        raise Unsupported("torch holds 4-bit floats in pairs; the last dimension is odd", tensor=lazy.name, found=lazy.shape)
    nibbles = array.view(np.uint8)
    packed = np.ascontiguousarray(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4))
    return torch.from_numpy(packed).view(torch.float4_e2m1fn_x2)
