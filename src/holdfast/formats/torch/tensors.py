"""What a tensor claims, checked before anything is built or allocated.

A plain tensor is a claim over a storage, checked with exact integers (`reach`, `strided_view`). Others are stored as several plain
ones: sparse, quantised, nested. The arguments of torch's functions for them are checked, and so is what their parts must satisfy,
as far as it can be known without reading them (`check_composite`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.dtype import DType
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.table import Kind, is_inside
from holdfast.core.tensor import BEYOND, PLAIN, Composite, LazyTensor, Traits
from holdfast.errors import LimitExceeded, MetadataError, PickleError
from holdfast.plan.files import FileRow

MAX_ELEMENTS = 1 << 62
"""More than any memory; products below it fit the 64-bit integers that numpy and torch count with."""


MAX_STRIDE = 1 << 55
"""Elements of 128 bits at this distance are countable in 64 bits."""


@lru_cache(maxsize=8)
def view_traits(requires_grad: bool, conj: bool, neg: bool) -> Traits:
    """The traits of a plain tensor: one object for all that are alike."""
    return Traits(requires_grad=requires_grad, conj=conj, neg=neg) if requires_grad or conj or neg else PLAIN


def checked_ints(values: object, what: str, rank: int | None = None) -> tuple[int, ...]:
    """A tuple or list of non-negative ints (no bools), of the given rank where one is given."""
    if not isinstance(values, tuple | list) or any(type(v) is not int or not 0 <= v < MAX_ELEMENTS for v in values):
        raise MetadataError(f"the {what} of a tensor must be non-negative integers", found=brief(values))
    if rank is not None and len(values) != rank:
        raise MetadataError(f"a tensor with {rank} dimensions has a {what} with {len(values)}", found=brief(values))
    return tuple(values)


def checked_shape(size: object, limits: Limits) -> tuple[int, ...]:
    """The lengths of a tensor: of a rank that is allowed, and countable in 64 bits even where one is 0, as numpy wants."""
    shape = checked_ints(size, "size")
    if len(shape) > limits.rank:
        raise LimitExceeded(f"a tensor with {len(shape)} dimensions, above Limits(rank={limits.rank})", found=len(shape))
    count = math.prod(n or 1 for n in shape)
    # 16 bytes is the widest element.
    if count >= MAX_ELEMENTS or (0 in shape and count >= MAX_ELEMENTS // 16):
        raise MetadataError(f"a tensor of {count:,} elements", found=shape)
    return shape


def reach(offset: object, size: object, stride: object, limits: Limits) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """The shape, strides and offset of a claim, and the last element that it touches: -1 where it touches none.

    The stride of a dimension of length 1 is never used and may be any number; one that does not fit 64 bits is given as 0.
    """
    if type(size) is tuple and type(stride) is tuple and len(size) == len(stride) <= limits.rank and type(offset) is int:
        # What writers write, in one pass; the rest is looked at again below, and refused for its own reason.
        last, count = offset, 1
        for n, s in zip(size, stride, strict=True):
            if type(n) is not int or type(s) is not int or n < 1 or not 0 <= s < MAX_STRIDE:
                break
            last += (n - 1) * s
            count *= n
        else:
            if 0 <= offset < MAX_ELEMENTS and count < MAX_ELEMENTS:
                return size, stride, offset, last
    shape = checked_shape(size, limits)
    steps = checked_ints(stride, "stride", len(shape))
    (begin,) = checked_ints((offset,), "storage offset")
    steps = tuple(s if n > 1 or s < MAX_STRIDE else 0 for n, s in zip(shape, steps, strict=True))
    last = -1 if 0 in shape else begin + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    return shape, steps, begin, last


def beyond(last: int, room: int) -> MetadataError:
    """The error for a tensor that touches element `last` of a storage of `room` elements."""
    return MetadataError(f"a tensor reaches element {last:,} of a storage that holds {room:,}", expected=room, found=last)


@lru_cache(maxsize=4096)
def strided_kind(
    dtype: DType,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    storage_nbytes: int,
    traits: Traits,
    byteorder: str,
    location: str,
    inside: bool = True,
) -> Kind:
    """The kind of a tensor over a storage: one object for all that are alike. Strides are in bits."""
    return Kind.strided(
        dtype, shape, strides, storage_nbytes=storage_nbytes, traits=traits, byteorder=byteorder, location=location, inside=inside
    )


def strided_view(storage: LazyTensor, dtype: DType, offset: object, *, size: object, stride: object, traits: Traits) -> LazyTensor:
    """The tensor that views a storage (itself a 1-D lazy tensor) with an offset and strides counted in elements."""
    shape, steps, begin, last = reach(offset, size, stride, storage.source.limits)
    row = storage.position if isinstance(storage.position, FileRow) else None
    chunks = storage.chunks if row is None else ()
    where = (
        (row.offset, row.kind.strides) if row is not None else (chunks[0].offset, chunks[0].strides) if len(chunks) == 1 else None
    )
    if where is None or storage.ndim != 1 or where[1] != (storage.dtype.bits,):
        # A tensor in the place of a storage: its size says nothing about the bytes that are there.
        raise MetadataError("a tensor over something that is no storage", found=type(storage).__name__)
    room = storage.size * storage.dtype.bits
    if (last + 1) * dtype.bits > room and not _fits_bytes(last, dtype, storage):
        raise beyond(last, room // dtype.bits)
    at, strides = where[0] + begin * dtype.bits, tuple(s * dtype.bits for s in steps)
    if last < 0:
        at, strides = 0, (0,) * len(shape)
    if row is not None and dtype.nbytes(math.prod(shape)) < BEYOND:
        own = row.kind
        inside = is_inside(at, dtype.nbytes(math.prod(shape)), own.storage_nbytes)
        kind = strided_kind(dtype, shape, strides, own.storage_nbytes, traits, own.byteorder, own.location, inside)
        return LazyTensor("", dtype, shape, (), storage.source, traits, FileRow(row.storages, row.number, kind, at))
    chunk = Chunk(Box.whole(shape), storage.chunks[0].storage, at, strides)
    return LazyTensor("", dtype, shape, (chunk,), storage.source, traits)


def _fits_bytes(last: int, dtype: DType, storage: LazyTensor) -> bool:
    """Packed quantised types count their storage in bytes and their elements in fractions of one (torch 2.13, quint4x2)."""
    return dtype.packed and (last + 1) * dtype.bits <= storage.size * 8


def brief(value: object) -> str:
    """A value from a file, for a message, at a cost that does not depend on it: `str` of nested containers is exponential."""
    match value:
        case str():
            return value[:64]
        case int():
            return str(value) if abs(value) < 1 << 128 else "a large integer"
        case Global():
            return str(value)[:128]
        case tuple() | list():
            inside = ", ".join(str(v) if isinstance(v, int) and abs(v) < 1 << 128 else type(v).__name__ for v in value[:8])
            return f"{type(value).__name__} of {len(value)}: {inside}"
        case _:
            return type(value).__name__


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
    elements = strided_view(storage, storage.dtype, offset, size=size, stride=stride, traits=traits)
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


PER_TENSOR = ("int_repr",)
PER_CHANNEL = ("int_repr", "scales", "zero_points")
NESTED = ("buffer", "sizes", "strides", "offsets")


def check_composite(
    kind: str, shape: tuple[int, ...], parts: Mapping[str, LazyTensor], *, attributes: Mapping[str, object]
) -> None:
    """Raise `MetadataError` where parts and attributes are not those of this kind, or do not fit each other."""
    if kind in SPARSE_PARTS:
        known = not attributes or (list(attributes) == ["coalesced"] and type(attributes["coalesced"]) is bool)
        fits = known and tuple(parts) == SPARSE_PARTS[kind]
        if fits:
            _check_sparse(kind, shape, parts)
    elif kind == "quantized":
        fits = _quantized_fits(shape, parts, attributes)
    elif kind == "jagged":
        fits = _jagged_fits(parts, attributes) and shape == (parts["offsets"].size - 1,)
    else:
        fits = kind == "nested" and tuple(parts) == NESTED and not attributes and _nested_fits(shape, parts)
    if not fits:
        raise MetadataError(f"the parts of a {kind[:32]!r} tensor do not fit each other or its shape", found=shape)


def _quantized_fits(shape: tuple[int, ...], parts: Mapping[str, LazyTensor], attributes: Mapping[str, object]) -> bool:
    scheme = attributes.get("qscheme")
    elements = parts.get("int_repr")
    if elements is None or elements.dtype.kind != "quantized" or elements.shape != shape or scheme not in QSCHEMES:
        return False
    match dict(attributes):
        case {"scale": float(), "zero_point": int(zero), "qscheme": str(), **rest} if not rest:
            return tuple(parts) == PER_TENSOR and str(scheme).startswith("per_tensor") and type(zero) is int
        case {"axis": int(axis), "qscheme": str(), **rest} if not rest and type(axis) is int:
            lengths = shape[axis : axis + 1]
            return (
                tuple(parts) == PER_CHANNEL
                and str(scheme).startswith("per_channel")
                and 0 <= axis < max(len(shape), 1)
                and parts["scales"].shape == parts["zero_points"].shape == lengths
            )
    return False


def _nested_fits(shape: tuple[int, ...], parts: Mapping[str, LazyTensor]) -> bool:
    sizes = parts["sizes"].shape
    return parts["buffer"].ndim == 1 and parts["strides"].shape == sizes and shape == ((sizes[0] if sizes else 0),)


def _jagged_fits(parts: Mapping[str, LazyTensor], attributes: Mapping[str, object]) -> bool:
    """Values, offsets (one more than there are rows) and, where rows have holes, lengths."""
    if tuple(parts) not in (("values", "offsets"), ("values", "offsets", "lengths")) or parts["offsets"].ndim != 1:
        return False
    ragged = attributes.get("ragged_idx")
    known = set(attributes) <= {"ragged_idx", "min_seqlen", "max_seqlen"}
    return (
        known
        and all(type(value) is int and value >= 0 for value in attributes.values())
        and isinstance(ragged, int)
        and 1 <= ragged <= parts["values"].ndim
        and parts["offsets"].size >= 1
    )
