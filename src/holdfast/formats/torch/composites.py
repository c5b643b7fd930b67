"""Sparse, quantised, nested and jagged tensors are one call over their plain parts:

sparse      torch._utils._rebuild_sparse_tensor(layout, (indices…, values, Size[, is_coalesced]))
quantised   torch._utils._rebuild_qtensor(storage, offset, size, stride, quantiser, requires_grad, OrderedDict())
                quantiser: (scheme, scale, zero point), or (scheme, scales, zero points, axis)
nested      torch._utils._rebuild_nested_tensor(buffer, sizes, strides, offsets)
jagged      torch._tensor._rebuild_from_type_v2(_rebuild_njt, NestedTensor, ({values, offsets, …},), None)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.core.opaque import Size
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.formats.pickle.writer import TUPLES
from holdfast.formats.torch.tensors import SPARSE_PARTS

if TYPE_CHECKING:
    from holdfast.formats.torch.writer import TorchPickle

NESTED = "torch.nested._internal.nested_tensor"


def write_sparse(writer: TorchPickle, whole: Composite) -> None:
    writer.name("torch._utils", "_rebuild_sparse_tensor")
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


def write_quantized(writer: TorchPickle, whole: Composite) -> None:
    told, parts = whole.attributes, whole.parts
    writer.name("torch._utils", "_rebuild_qtensor")
    writer.out.append(b"(")
    writer.view(parts["int_repr"])
    # torch says per_channel_affine for both kinds, and knows them by the dtype of the zero points (2.13).
    scheme = str(told["qscheme"]).removesuffix("_float_qparams")
    if "scale" in told:
        writer.name("torch", scheme)
        writer.write(told["scale"])
        writer.write(told["zero_point"])
        writer.out.append(TUPLES[3])
    else:
        writer.out.append(b"(")
        writer.name("torch", scheme)
        writer.tensor(parts["scales"])
        writer.tensor(parts["zero_points"])
        writer.write(told["axis"])
        writer.out.append(b"t")
    writer.put()
    writer.write(whole.traits.requires_grad and not whole.traits.parameter)
    writer.hooks()
    writer.end_call(b"t")


def write_nested(writer: TorchPickle, whole: Composite) -> None:
    writer.name("torch._utils", "_rebuild_nested_tensor")
    writer.out.append(b"(")
    for part in ("buffer", "sizes", "strides", "offsets"):
        writer.tensor(whole.parts[part])
    writer.end_call(b"t")


def write_jagged(writer: TorchPickle, whole: Composite) -> None:
    values, told = whole.parts["values"], whole.attributes
    # torch keeps the shortest and the longest length as the shape of a tensor without elements.
    cached = {
        name: LazyTensor("", values.dtype, (length, 0), (), values.source)
        for name in ("min_seqlen", "max_seqlen")
        if isinstance(length := told.get(name), int)
    }
    given = {
        "values": values,
        "offsets": whole.parts["offsets"],
        "lengths": whole.parts.get("lengths"),
        "_ragged_idx": told["ragged_idx"],
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


COMPOSITES: dict[str, Callable[[TorchPickle, Composite], None]] = {
    **dict.fromkeys(SPARSE_PARTS, write_sparse),
    "quantized": write_quantized,
    "nested": write_nested,
    "jagged": write_jagged,
}
"""By the kind of the composite."""
