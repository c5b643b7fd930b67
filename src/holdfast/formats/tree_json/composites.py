"""What the parts of a sparse, quantised or nested tensor must satisfy, as far as it can be known without reading them."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.tensor import LazyTensor
from holdfast.errors import MetadataError
from holdfast.formats.torch.composites import QSCHEMES, SPARSE_PARTS

__all__ = ["check_composite"]

PER_TENSOR = ("int_repr",)
PER_CHANNEL = ("int_repr", "scales", "zero_points")
NESTED = ("buffer", "sizes", "strides", "offsets")


def check_composite(kind: str, shape: tuple[int, ...], parts: Mapping[str, LazyTensor], attributes: Mapping[str, object]) -> None:
    """Raise `MetadataError` where parts and attributes are not those of this kind, or do not fit each other."""
    if kind in SPARSE_PARTS:
        fits = tuple(parts) == SPARSE_PARTS[kind] and _sparse_fits(kind, shape, parts, attributes)
    elif kind == "quantized":
        fits = _quantized_fits(shape, parts, attributes)
    elif kind == "jagged":
        fits = _jagged_fits(parts, attributes) and shape == (parts["offsets"].size - 1,)
    else:
        fits = kind == "nested" and tuple(parts) == NESTED and not attributes and _nested_fits(shape, parts)
    if not fits:
        raise MetadataError(f"the parts of a {kind[:32]!r} tensor do not fit each other or its shape", found=shape)


def _sparse_fits(kind: str, shape: tuple[int, ...], parts: Mapping[str, LazyTensor], attributes: Mapping[str, object]) -> bool:
    if attributes and (list(attributes) != ["coalesced"] or type(attributes["coalesced"]) is not bool):
        return False
    values = parts["values"].shape
    if kind == "sparse_coo":
        indices = parts["indices"].shape
        return len(indices) == 2 and indices[0] <= len(shape) and values[:1] == indices[1:] and values[1:] == shape[indices[0] :]
    compressed, plain = (part.shape for name, part in parts.items() if name != "values")
    last = len(plain) - 1
    return len(shape) >= 2 and bool(compressed) and last >= 0 and plain[last:] == values[last : last + 1]


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
