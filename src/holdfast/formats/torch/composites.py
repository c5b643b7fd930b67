"""Tensors that are made of plain ones: sparse, quantised, nested and jagged.

A `CompositeKind` is all that is known of one kind without torch: the calls in a pickle that make it, what its parts must satisfy,
and how it is written. How torch joins the parts, and takes a tensor apart, is in torch/tensors/composites.py, under the same name.

    sparse      torch._utils._rebuild_sparse_tensor(layout, (indices…, values, Size[, is_coalesced]))
    quantised   torch._utils._rebuild_qtensor(storage, offset, size, stride, quantiser, requires_grad, OrderedDict())
                    quantiser: (scheme, scale, zero point), or (scheme, scales, zero points, axis)
    nested      torch._utils._rebuild_nested_tensor(buffer, sizes, strides, offsets)
    jagged      torch._tensor._rebuild_from_type_v2(_rebuild_njt, NestedTensor, ({values, offsets, …},), None)

Parts are lazy tensors or torch's: both have a shape. What is compared here can be known without reading; index values
are looked at when torch puts the parts together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Size
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.value import Value
from holdfast.errors import MetadataError, PickleError
from holdfast.formats.pickle.table import Args, Name, Row
from holdfast.formats.pickle.writer import TUPLES
from holdfast.formats.torch.tensors import TENSOR_CLASSES, arity, brief, checked_shape, flag

if TYPE_CHECKING:
    from holdfast.formats.torch.reducers import BuildingTable
    from holdfast.formats.torch.writer import TorchPickle

NESTED = "torch.nested._internal.nested_tensor"
UTILS = "torch._utils"

QSCHEMES = (
    "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric", "per_channel_affine_float_qparams",
)  # fmt: skip

Parts = Mapping[str, Any]
"""Plain tensors by their names: all lazy, or all torch's."""


class Apart(NamedTuple):
    """The parts of a composite tensor."""

    shape: tuple[int, ...]
    parts: Parts
    attributes: Mapping[str, Any] = {}


class CompositeKind(Value, frozen=True, eq=False):
    """All that is known of a kind of composite tensors without torch."""

    name: str
    title: str
    reducers: Mapping[Name, Row]
    """The calls in pickles that make such a tensor, through `Builder.composite`."""
    check: Callable[[Apart], None]
    """Raises `MetadataError` where parts and attributes are not those of this kind, or do not fit each other."""
    write: Callable[[TorchPickle, Composite], None]
    keeps_grad: bool = False
    """Whether the call that is written has a place for `requires_grad`."""


def misfit(kind: str, whole: Apart) -> MetadataError:
    return MetadataError(
        f"the parts of a {kind!r} tensor do not fit each other or its shape", found=whole.shape
    )


def tensors(table: BuildingTable, given: Parts, what: str) -> Parts:
    """The parts, if all of them are tensors."""
    if not all(isinstance(part, table.builder.tensor_class) for part in given.values()):
        raise PickleError(
            f"{what} needs {', '.join(given)} that are tensors", found=brief([*given.values()])
        )
    return given


# Sparse.

SPARSE_PARTS = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


def sparse(table: BuildingTable, args: Args) -> object:
    """(layout, (indices…, values, size[, is_coalesced]))"""
    layout, data = arity(args, 2, 2, "_rebuild_sparse_tensor")
    kind = table.builder.named(layout)
    names = SPARSE_PARTS.get(kind or "")
    if kind is None or names is None or not isinstance(data, tuple):
        raise PickleError("a sparse tensor with an unknown layout", found=brief(layout))
    rest = data[len(names) :]
    if not 1 <= len(rest) <= (2 if kind == "sparse_coo" else 1):
        raise PickleError(f"a {kind} tensor needs {', '.join(names)} and a size", found=len(data))
    parts = tensors(table, dict(zip(names, data, strict=False)), f"a {kind} tensor")
    attributes = {"coalesced": flag(rest[1], "is_coalesced")} if len(rest) == 2 else {}
    return table.builder.composite(
        kind, Apart(checked_shape(rest[0], table.limits), parts, attributes)
    )


def sparse_class(name: str) -> Row:
    """`torch.sparse.FloatTensor(indices, values, size)`, as torch before 1.0 wrote it."""
    row = DTYPES.storage(f"{name.removesuffix('Tensor')}Storage")

    def reduce(table: BuildingTable, args: Args) -> object:
        indices, values, size = arity(args, 3, 3, "a sparse tensor class")
        parts = tensors(table, {"indices": indices, "values": values}, "a sparse tensor")
        if DTYPES.from_any(parts["values"].dtype) is not row:
            raise PickleError(
                "a sparse tensor class with values of another type", found=type(values).__name__
            )
        return table.builder.composite(
            "sparse_coo", Apart(checked_shape(size, table.limits), parts)
        )

    return reduce


def check_sparse(kind: str, whole: Apart) -> None:
    shape, parts, attributes = whole
    known = not attributes or (
        list(attributes) == ["coalesced"] and type(attributes["coalesced"]) is bool
    )
    if not known or tuple(parts) != SPARSE_PARTS[kind]:
        raise misfit(kind, whole)
    values = parts["values"]
    if kind == "sparse_coo":
        indices = parts["indices"]
        if (
            indices.ndim != 2
            or not values.ndim
            or indices.shape[1] != values.shape[0]
            or indices.shape[0] > len(shape)
        ):
            raise MetadataError(
                "the indices and values of a sparse tensor do not fit each other",
                found=tuple(indices.shape),
            )
        if values.shape[1:] != shape[indices.shape[0] :]:
            raise MetadataError(
                "the values of a sparse tensor do not fit its size",
                found=tuple(values.shape),
                expected=shape,
            )
        return
    compressed, plain = (p for n, p in parts.items() if n != "values")
    last = plain.ndim - 1
    if (
        len(shape) < 2
        or not compressed.ndim
        or last < 0
        or plain.shape[last:] != values.shape[last : last + 1]
    ):
        raise MetadataError(
            "the indices and values of a compressed sparse tensor do not fit each other",
            found=shape,
        )


def write_sparse(writer: TorchPickle, whole: Composite) -> None:
    writer.name(UTILS, "_rebuild_sparse_tensor")
    writer.layout(whole.kind)
    writer.out.append(b"(")
    for part in SPARSE_PARTS[whole.kind]:
        writer.tensor(whole.parts[part])
    size = Size(whole.shape)
    writer.keep(size)
    writer.size(size)
    coalesced = whole.attributes.get("coalesced")
    if isinstance(coalesced, bool):
        writer.write(coalesced)
    writer.out.append(b"t")
    writer.put()
    writer.end_call(TUPLES[2])


# Quantised.

PER_CHANNEL = ("int_repr", "scales", "zero_points")


def quantized(table: BuildingTable, args: Args) -> object:
    """(storage, offset, size, stride, quantiser, requires_grad, hooks)"""
    storage, offset, size, stride, quantizer, grad = arity(args, 6, 7, "_rebuild_qtensor")[:6]
    if (
        not isinstance(storage, table.builder.storage_class)
        or not isinstance(quantizer, tuple)
        or not quantizer
    ):
        raise PickleError(
            "a quantised tensor needs a storage and a quantiser", found=type(quantizer).__name__
        )
    scheme, rest = table.builder.named(quantizer[0]), quantizer[1:]
    if scheme not in QSCHEMES:
        raise PickleError("a quantised tensor with an unknown scheme", found=brief(quantizer[0]))
    elements = table.builder.elements(storage, (offset, size, stride))
    parts: dict[str, Any] = {"int_repr": elements}
    attributes: dict[str, object]
    if scheme.startswith("per_tensor"):
        if (
            len(rest) != 2
            or not isinstance(rest[0], float | int)
            or type(rest[1]) is not int
            or abs(rest[0]) >= 1 << 1023
        ):
            raise PickleError(
                "a per-tensor quantiser needs a scale and a zero point", found=len(rest)
            )
        attributes = {"qscheme": scheme, "scale": float(rest[0]), "zero_point": rest[1]}
    elif len(rest) != 3:
        raise PickleError(
            "a per-channel quantiser needs scales, zero points and an axis", found=len(rest)
        )
    else:
        parts |= tensors(
            table, {"scales": rest[0], "zero_points": rest[1]}, "a per-channel quantiser"
        )
        zeros = DTYPES.from_any(parts["zero_points"].dtype)
        # torch writes per_channel_affine for both kinds. The dtype of the zero points makes the difference (2.13).
        floating = scheme == "per_channel_affine" and zeros is not None and zeros.kind == "float"
        attributes = {
            "qscheme": "per_channel_affine_float_qparams" if floating else scheme,
            "axis": rest[2],
        }
    whole = Apart(parts["int_repr"].shape, parts, attributes)
    return table.builder.composite("quantized", whole, grad=flag(grad, "requires_grad"))


def check_quantized(whole: Apart) -> None:
    shape, parts, attributes = whole
    elements, scheme = parts.get("int_repr"), str(attributes.get("qscheme"))
    if (
        elements is None
        or elements.dtype.kind != "quantized"
        or elements.shape != shape
        or scheme not in QSCHEMES
    ):
        raise misfit("quantized", whole)
    if "scale" in attributes:
        numbers = (
            type(attributes["scale"]) is float
            and type(attributes.get("zero_point")) is int
            and len(attributes) == 3
        )
        if not numbers or len(parts) != 1 or not scheme.startswith("per_tensor"):
            raise misfit("quantized", whole)
        return
    if (
        tuple(parts) != PER_CHANNEL
        or attributes.keys() != {"qscheme", "axis"}
        or not scheme.startswith("per_channel")
    ):
        raise misfit("quantized", whole)
    axis, scales = attributes["axis"], tuple(parts["scales"].shape)
    if type(axis) is not int or not 0 <= axis < len(shape):
        raise MetadataError(
            "a per-channel quantiser's axis is not one of the tensor's", found=brief(axis)
        )
    if not scales == parts["zero_points"].shape == shape[axis : axis + 1]:
        raise MetadataError(
            "a per-channel quantiser needs a scale and a zero point for each channel", found=scales
        )


def write_quantized(writer: TorchPickle, whole: Composite) -> None:
    attributes, parts = whole.attributes, whole.parts
    writer.name(UTILS, "_rebuild_qtensor")
    writer.out.append(b"(")
    writer.view(parts["int_repr"])
    # torch writes per_channel_affine for both kinds. The dtype of the zero points makes the difference (2.13).
    scheme = str(attributes["qscheme"]).removesuffix("_float_qparams")
    if "scale" in attributes:
        writer.name("torch", scheme)
        writer.write(attributes["scale"])
        writer.write(attributes["zero_point"])
        writer.out.append(TUPLES[3])
    else:
        writer.out.append(b"(")
        writer.name("torch", scheme)
        writer.tensor(parts["scales"])
        writer.tensor(parts["zero_points"])
        writer.write(attributes["axis"])
        writer.out.append(b"t")
    writer.put()
    writer.write(whole.traits.requires_grad and not whole.traits.parameter)
    writer.hooks()
    writer.end_call(b"t")


# Nested and jagged.

NESTED_PARTS = ("buffer", "sizes", "strides", "offsets")


def nested(table: BuildingTable, args: Args) -> object:
    """(buffer, sizes, strides, offsets): a row of sizes, a row of strides and an offset for each tensor inside"""
    given = dict(zip(NESTED_PARTS, arity(args, 4, 4, "_rebuild_nested_tensor"), strict=True))
    parts = tensors(table, given, "a nested tensor")
    if parts["buffer"].ndim != 1 or parts["sizes"].shape != parts["strides"].shape:
        raise PickleError(
            "a nested tensor needs a flat buffer, sizes, strides and offsets", found=len(parts)
        )
    return table.builder.composite("nested", Apart(tuple(parts["sizes"].shape[:1]) or (0,), parts))


def check_nested(whole: Apart) -> None:
    shape, parts, attributes = whole
    if tuple(parts) != NESTED_PARTS or attributes:
        raise misfit("nested", whole)
    sizes = parts["sizes"].shape
    if (
        parts["buffer"].ndim != 1
        or parts["strides"].shape != sizes
        or shape != ((sizes[0] if sizes else 0),)
    ):
        raise misfit("nested", whole)


def write_nested(writer: TorchPickle, whole: Composite) -> None:
    writer.name(UTILS, "_rebuild_nested_tensor")
    writer.out.append(b"(")
    for part in NESTED_PARTS:
        writer.tensor(whole.parts[part])
    writer.end_call(b"t")


LENGTHS = ("min_seqlen", "max_seqlen")


def jagged(table: BuildingTable, args: Args) -> object:
    """({values, offsets, lengths, _ragged_idx, _metadata_cache, requires_grad},): a nested tensor with the jagged layout"""
    (given,) = arity(args, 1, 1, "_rebuild_njt")
    if not isinstance(given, dict):
        raise PickleError(
            "a jagged tensor needs its values and offsets by name", found=type(given).__name__
        )
    names = ("values", "offsets", *(("lengths",) if given.get("lengths") is not None else ()))
    parts = tensors(table, {name: given.get(name) for name in names}, "a jagged tensor")
    attributes: dict[str, object] = {"ragged_idx": given.get("_ragged_idx", 1)}
    cache = given.get("_metadata_cache")
    for name in LENGTHS:
        # torch hides the number in the shape of a tensor without elements (nested_tensor.py, _store_val_in_tensor).
        held = cache.get(name) if isinstance(cache, dict) else None
        shape: tuple[int, ...] = (
            getattr(held, "shape", ()) if isinstance(held, table.builder.tensor_class) else ()
        )
        if len(shape) == 2:
            attributes[name] = shape[0]
    # Of 0 dimensions or none: for `check` to refuse.
    count = parts["offsets"].shape[0] - 1 if parts["offsets"].ndim else 0
    return table.builder.composite(
        "jagged", Apart((count,), parts, attributes), grad=given.get("requires_grad") is True
    )


def check_jagged(whole: Apart) -> None:
    shape, parts, attributes = whole
    if tuple(parts) not in (("values", "offsets"), ("values", "offsets", "lengths")):
        raise misfit("jagged", whole)
    values, offsets, ragged = parts["values"], parts["offsets"], attributes.get("ragged_idx")
    if offsets.ndim != 1 or not offsets.shape[0] or shape != (offsets.shape[0] - 1,):
        raise MetadataError("a jagged tensor needs values and a row of offsets", found=tuple(parts))
    if "lengths" in parts and parts["lengths"].shape != shape:
        raise MetadataError(
            "a jagged tensor needs a length for each row", found=tuple(parts["lengths"].shape)
        )
    if type(ragged) is not int or not 1 <= ragged <= values.ndim:
        raise MetadataError(
            "a jagged tensor's ragged dimension is not one of its own", found=brief(ragged)
        )
    if not set(attributes) <= {"ragged_idx", *LENGTHS} or not all(
        type(v) is int and v >= 0 for v in attributes.values()
    ):
        raise misfit("jagged", whole)


def write_jagged(writer: TorchPickle, whole: Composite) -> None:
    values, attributes = whole.parts["values"], whole.attributes
    lengths = {name: length for name in LENGTHS if isinstance(length := attributes.get(name), int)}
    # torch stores the shortest and the longest length as the shape of a tensor without elements.
    cached = {
        name: LazyTensor("", values.dtype, (length, 0), (), values.source)
        for name, length in lengths.items()
    }
    given = {
        "values": values,
        "offsets": whole.parts["offsets"],
        "lengths": whole.parts.get("lengths"),
        "_ragged_idx": attributes["ragged_idx"],
        "_metadata_cache": cached,
        "requires_grad": whole.traits.requires_grad,
    }
    writer.keep(given)
    writer.name("torch._tensor", "_rebuild_from_type_v2")
    writer.out.append(b"(")
    writer.name(NESTED, "_rebuild_njt")
    writer.name(NESTED, "NestedTensor")
    writer.fresh_tuple((given,))
    writer.write(None)
    writer.end_call(b"t")


SPARSE_CLASSES = {
    (m, name): sparse_class(name)
    for m in ("torch.sparse", "torch.cuda.sparse")
    for name in TENSOR_CLASSES
}
SPARSE = {
    (UTILS, "_rebuild_sparse_tensor"): sparse,
    (UTILS, "_rebuild_sparse_csr_tensor"): sparse,
    **SPARSE_CLASSES,
}


QUANTIZED: dict[Name, Row] = {(UTILS, "_rebuild_qtensor"): quantized}
JAGGED: dict[Name, Row] = {(NESTED, "_rebuild_njt"): jagged}
KNOWN = [
    *(
        CompositeKind(name, "a sparse tensor", SPARSE, partial(check_sparse, name), write_sparse)
        for name in SPARSE_PARTS
    ),
    CompositeKind(
        "quantized",
        "a quantised tensor",
        QUANTIZED,
        check_quantized,
        write_quantized,
        keeps_grad=True,
    ),
    CompositeKind(
        "nested",
        "a nested tensor",
        {(UTILS, "_rebuild_nested_tensor"): nested},
        check_nested,
        write_nested,
    ),
    CompositeKind("jagged", "a jagged tensor", JAGGED, check_jagged, write_jagged, keeps_grad=True),
]
KINDS = {kind.name: kind for kind in KNOWN}


def check_composite(kind: str, whole: Apart) -> None:
    """Raise `MetadataError` where parts and attributes are not those of a kind, or do not fit each other."""
    if kind not in KINDS:
        raise MetadataError(f"there are no tensors of a kind {kind[:32]!r}", found=whole.shape)
    KINDS[kind].check(whole)
