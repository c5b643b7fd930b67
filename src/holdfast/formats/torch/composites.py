"""Tensors that torch stores as several plain ones: sparse, quantised, nested. The arguments of their rebuild functions, checked."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.composite import Composite
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.tensor import LazyTensor, Traits
from holdfast.errors import MetadataError, PickleError
from holdfast.formats.torch.geometry import brief, checked_shape, strided_view

__all__ = ["QSCHEMES", "SPARSE_PARTS", "arity", "jagged", "nested", "quantized", "sparse"]

Args = tuple[object, ...]

QSCHEMES = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)


def arity(args: Args, low: int, high: int, what: str) -> Args:
    """The arguments, if there are as many as the function takes."""
    if not low <= len(args) <= high:
        raise PickleError(f"{what} was given {len(args)} arguments, not {low} to {high}", found=len(args))
    return args


SPARSE_PARTS = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


def sparse(args: Args) -> object:
    """(layout, (indices…, values, size[, is_coalesced]))"""
    layout, data = arity(args, 2, 2, "_rebuild_sparse_tensor")
    names = SPARSE_PARTS.get(layout.name) if isinstance(layout, Global) else None
    if names is None or not isinstance(layout, Global) or not isinstance(data, tuple):
        raise PickleError("a sparse tensor with an unknown layout", found=brief(layout))
    parts, rest = data[: len(names)], data[len(names) :]
    if len(parts) != len(names) or not all(isinstance(p, LazyTensor) for p in parts) or not 1 <= len(rest) <= 2:
        raise PickleError(f"a {layout.name} tensor needs {', '.join(names)} and a size", found=len(data))
    first = parts[0]
    shape = checked_shape(rest[0], first.source.limits if isinstance(first, LazyTensor) else Limits())
    tensors = {n: p for n, p in zip(names, parts, strict=True) if isinstance(p, LazyTensor)}
    _check_sparse(layout.name, shape, tensors)
    coalesced = {"coalesced": rest[1] is True} if len(rest) == 2 else {}
    return Composite(layout.name, shape, tensors, coalesced, Traits())


def _check_sparse(kind: str, shape: tuple[int, ...], parts: Mapping[str, LazyTensor]) -> None:
    """What can be known without reading: ranks and counts that agree. Index values are checked when it is materialised."""
    values = parts["values"]
    if kind == "sparse_coo":
        indices = parts["indices"]
        if indices.ndim != 2 or not values.ndim or indices.shape[1] != values.shape[0] or indices.shape[0] > len(shape):
            raise MetadataError("the indices and values of a sparse tensor do not fit each other", found=indices.shape)
        if values.shape[1:] != shape[indices.shape[0] :]:
            raise MetadataError("the values of a sparse tensor do not fit its size", found=values.shape, expected=shape)
        return
    compressed, plain = (p for n, p in parts.items() if n != "values")
    last = plain.ndim - 1
    if len(shape) < 2 or not compressed.ndim or last < 0 or plain.shape[last:] != values.shape[last : last + 1]:
        raise MetadataError("the indices and values of a compressed sparse tensor do not fit each other", found=shape)


def quantized(args: Args) -> object:
    """(storage, offset, size, stride, quantizer, requires_grad, hooks)"""
    storage, offset, size, stride, quantizer, grad = arity(args, 6, 7, "_rebuild_qtensor")[:6]
    if not isinstance(storage, LazyTensor) or not isinstance(quantizer, tuple) or not quantizer:
        raise PickleError("a quantised tensor needs a storage and a quantiser", found=type(quantizer).__name__)
    traits = Traits(requires_grad=grad is True)
    elements = strided_view(storage, storage.dtype, offset, size, stride, traits)
    scheme, *rest = quantizer
    if not isinstance(scheme, Global) or scheme.name not in QSCHEMES:
        raise PickleError("a quantised tensor with an unknown scheme", found=brief(scheme))
    if scheme.name.startswith("per_tensor"):
        if len(rest) != 2 or not isinstance(rest[0], float | int) or type(rest[1]) is not int:
            raise PickleError("a per-tensor quantiser needs a scale and a zero point", found=len(rest))
        attributes: dict[str, object] = {"qscheme": scheme.name, "scale": float(rest[0]), "zero_point": rest[1]}
        return Composite("quantized", elements.shape, {"int_repr": elements}, attributes, traits)
    if len(rest) != 3 or not isinstance(rest[0], LazyTensor) or not isinstance(rest[1], LazyTensor):
        raise PickleError("a per-channel quantiser needs scales, zero points and an axis", found=len(rest))
    scales, zeros, axis = rest
    if type(axis) is not int or not 0 <= axis < max(elements.ndim, 1):
        raise MetadataError("a per-channel quantiser's axis is not one of the tensor's", found=brief(axis))
    if not scales.shape == zeros.shape == elements.shape[axis : axis + 1]:
        raise MetadataError("a per-channel quantiser needs a scale and a zero point for each channel", found=scales.shape)
    parts = {"int_repr": elements, "scales": scales, "zero_points": zeros}
    # torch writes per_channel_affine for both kinds and tells them apart by the dtype of the zero points (2.13).
    floating = scheme.name == "per_channel_affine" and zeros.dtype.kind == "float"
    name = "per_channel_affine_float_qparams" if floating else scheme.name
    return Composite("quantized", elements.shape, parts, {"qscheme": name, "axis": axis}, traits)


def nested(args: Args) -> object:
    """(buffer, sizes, strides, offsets)"""
    names = ("buffer", "sizes", "strides", "offsets")
    arity(args, 4, 4, "_rebuild_nested_tensor")
    parts = {n: p for n, p in zip(names, args, strict=True) if isinstance(p, LazyTensor)}
    if len(parts) != 4 or parts["buffer"].ndim != 1 or parts["sizes"].shape != parts["strides"].shape:
        raise PickleError("a nested tensor needs a flat buffer, sizes, strides and offsets", found=len(parts))
    count = parts["sizes"].shape[0] if parts["sizes"].shape else 0
    return Composite("nested", (count,), parts, {}, Traits())


def jagged(args: Args) -> object:
    """({values, offsets, lengths, _ragged_idx, _metadata_cache, requires_grad},): a nested tensor with the jagged layout."""
    (given,) = arity(args, 1, 1, "_rebuild_njt")
    if not isinstance(given, dict):
        raise PickleError("a jagged tensor needs its values and offsets by name", found=type(given).__name__)
    parts = {n: p for n in ("values", "offsets", "lengths") if isinstance(p := given.get(n), LazyTensor)}
    ragged = given.get("_ragged_idx", 1)
    if "values" not in parts or "offsets" not in parts or parts["offsets"].ndim != 1 or not parts["offsets"].size:
        raise MetadataError("a jagged tensor needs values and a row of offsets", found=tuple(parts))
    if type(ragged) is not int or not 1 <= ragged <= parts["values"].ndim:
        raise MetadataError("a jagged tensor's ragged dimension is not one of its own", found=brief(ragged))
    attributes: dict[str, object] = {"ragged_idx": ragged}
    cache = given.get("_metadata_cache")
    for name in ("min_seqlen", "max_seqlen"):
        # torch hides the number in the shape of a tensor without elements (nested_tensor.py, _store_val_in_tensor).
        held = cache.get(name) if isinstance(cache, dict) else None
        if isinstance(held, LazyTensor) and held.ndim == 2:
            attributes[name] = held.shape[0]
    count = parts["offsets"].shape[0] - 1
    return Composite("jagged", (count,), parts, attributes, Traits(requires_grad=given.get("requires_grad") is True))
