"""Composite tensors in torch, taken apart and put together: the other half of formats/torch/composites.py.

torch trusts the indices, offsets and scales of such tensors, and a wrong index reaches into memory that is not the tensor's. So
elements are checked before anything is built (`put_together`), where there are any: parts on the meta device and fake ones have
none. Callers have compared the shapes of the parts, and limit how much is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch.nested._internal.nested_tensor import NestedTensor, _rebuild_njt

from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import DEFAULTS
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import MetadataError, Unsupported
from holdfast.formats.pickle.table import Name
from holdfast.formats.torch import reducers
from holdfast.formats.torch.composites import LENGTHS, NESTED, SPARSE_PARTS, Apart, CompositeKind
from holdfast.formats.torch.tensors import beyond, reach


class Elements(Value, frozen=True, eq=False):
    """The integers of a quantised tensor. torch has no tensors of them without a scale."""

    storage: torch.UntypedStorage
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)


class TorchKind(Value, frozen=True, eq=False):
    is_kind: Callable[[torch.Tensor], bool]
    take_apart: Callable[[torch.Tensor], Apart]
    put_together: Callable[[Apart], torch.Tensor]
    """Raises `MetadataError`, or what torch raises, where the parts cannot be true."""
    functions: Mapping[Name, object] = {}
    """Functions of torch that rebuild this kind, which a user has to allow."""


def is_readable(*parts: torch.Tensor) -> bool:
    return all(type(part) is torch.Tensor and not part.is_meta for part in parts)


def device_of(values: torch.Tensor) -> torch.device | None:
    """The device, so that `torch.set_default_device` does not decide; not of a fake tensor, whose device need not exist."""
    return values.device if type(values) is torch.Tensor else None


def sparse_apart(layout: torch.layout, tensor: torch.Tensor) -> Apart:
    coo = layout is torch.sparse_coo
    # The private ones of a COO tensor also give what is not coalesced.
    parts = {
        name: getattr(tensor, f"_{name}" if coo else name)()
        for name in SPARSE_PARTS[str(layout)[6:]]
    }
    return Apart(tuple(tensor.shape), parts, {"coalesced": tensor.is_coalesced()} if coo else {})


def sparse_together(layout: torch.layout, whole: Apart) -> torch.Tensor:
    shape, parts, attributes = whole
    *indices, values = parts.values()
    device, readable = device_of(values), is_readable(*parts.values())
    if layout is torch.sparse_coo:
        if indices[0].dtype is not torch.int64:
            raise MetadataError(
                "the indices of a sparse tensor must be integers of 64 bits",
                found=str(indices[0].dtype),
            )
        coalesced = attributes.get("coalesced")
        known = coalesced if isinstance(coalesced, bool) else None
        return torch.sparse_coo_tensor(
            indices[0], values, shape, device=device, check_invariants=readable, is_coalesced=known
        )
    compressed, plain = indices
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, device=device, check_invariants=readable
    )


def quantized_apart(tensor: torch.Tensor) -> Apart:
    dtype = DTYPES.from_any(tensor.dtype)
    if dtype is None or dtype.packed:
        raise Unsupported(
            f"a {tensor.dtype} tensor does not give its integers; it can be kept by converting the file"
        )
    ints = tensor.int_repr()
    shape = tuple(tensor.shape)
    parts: dict[str, object] = {
        "int_repr": Elements(ints.untyped_storage(), dtype, shape, ints.stride())
    }
    scheme = str(tensor.qscheme()).removeprefix("torch.")
    if scheme.startswith("per_tensor"):
        return Apart(
            shape,
            parts,
            {"qscheme": scheme, "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()},
        )
    parts |= {
        "scales": tensor.q_per_channel_scales(),
        "zero_points": tensor.q_per_channel_zero_points(),
    }
    return Apart(shape, parts, {"qscheme": scheme, "axis": tensor.q_per_channel_axis()})


def quantized_together(whole: Apart) -> torch.Tensor:
    shape, parts, attributes = whole
    elements: Elements = parts["int_repr"]
    dtype, device = getattr(torch, elements.dtype.name), elements.storage.device
    scheme = attributes["qscheme"]
    if scheme == "per_tensor_affine":
        scale, zero = attributes["scale"], attributes["zero_point"]
        made = torch._empty_affine_quantized(
            (0,), scale=scale, zero_point=zero, dtype=dtype, device=device
        )
    elif scheme in ("per_channel_affine", "per_channel_affine_float_qparams"):
        scales, zeros, axis = parts["scales"], parts["zero_points"], attributes["axis"]
        # torch compares the scales with the size, and allocates it: so it is the true one along the axis, and 0 elsewhere.
        blank = [n if i == axis else 0 for i, n in enumerate(shape)]
        made = torch._empty_per_channel_affine_quantized(
            blank, scales=scales, zero_points=zeros, axis=axis, dtype=dtype, device=device
        )
    else:
        # Other schemes exist as names only (2.13).
        raise MetadataError(f"torch has no tensors of the scheme {scheme}", found=scheme)
    return made.set_(elements.storage, elements.offset, shape, elements.strides)


def elements_of(lazy: LazyTensor) -> Elements:
    """The integers of a quantised tensor of a checkpoint, read."""
    array, bits = lazy.numpy(), lazy.dtype.bits
    if lazy.dtype.packed:
        # Lowest bits first.
        each = np.unpackbits(array.reshape(-1, 1), axis=1, bitorder="little")[:, :bits]
        array = np.packbits(each.reshape(-1), bitorder="little")
    nbytes = check_room(lazy.dtype, lazy.shape, lazy.size - 1)
    storage = torch.zeros(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
    if array.size:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)[: len(flat)] = (
            torch.from_numpy(flat.copy())
        )
    return Elements(storage, lazy.dtype, lazy.shape, c_strides(lazy.shape, 1))


def check_room(dtype: DType, shape: tuple[int, ...], last: int) -> int:
    """Bytes that a quantised tensor needs up to its last element.

    Packed types put several elements in a byte, and begin every row with a new one.
    """
    needed = (last + 1) * dtype.bits
    if dtype.bits < 8 and shape and last >= 0:
        needed = max(needed, math.prod(shape[:-1]) * ((shape[-1] * dtype.bits + 7) // 8) * 8)
    return (needed + 7) // 8


def nested_apart(tensor: torch.Tensor) -> Apart:
    sizes = tensor._nested_tensor_size()
    strides, offsets = tensor._nested_tensor_strides(), tensor._nested_tensor_storage_offsets()
    return Apart(
        (len(sizes),),
        {"buffer": tensor.values(), "sizes": sizes, "strides": strides, "offsets": offsets},
    )


def nested_together(whole: Apart) -> torch.Tensor:
    buffer, sizes, strides, offsets = parts = tuple(whole.parts.values())
    if any(part.dtype is not torch.int64 for part in (sizes, strides, offsets)):
        raise MetadataError(
            "the sizes, strides and offsets of a nested tensor must be integers of 64 bits"
        )
    if not buffer.is_contiguous() or sizes.dim() != 2 or offsets.shape != sizes.shape[:1]:
        raise MetadataError(
            "the parts of a nested tensor do not fit each other", found=tuple(sizes.shape)
        )
    if is_readable(*parts):
        room = buffer.numel()
        for size, stride, offset in zip(
            sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True
        ):
            *_, last = reach(offset, tuple(size), tuple(stride), DEFAULTS)
            if last >= room:
                raise beyond(last, room)
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def jagged_apart(tensor: torch.Tensor) -> Apart:
    assert isinstance(tensor, NestedTensor)
    given = {"values": tensor._values, "offsets": tensor._offsets, "lengths": tensor._lengths}
    parts = {name: part.detach() for name, part in given.items() if part is not None}
    # torch keeps the shortest and the longest length as the shape of a tensor without elements.
    cache = tensor._metadata_cache
    lengths: dict[str, object] = {name: cache[name].shape[0] for name in LENGTHS if name in cache}
    return Apart(
        (tensor._offsets.numel() - 1,), parts, {"ragged_idx": tensor._ragged_idx, **lengths}
    )


def jagged_together(whole: Apart) -> torch.Tensor:
    _, parts, attributes = whole
    values, offsets, lengths = parts["values"], parts["offsets"], parts.get("lengths")
    ragged = attributes["ragged_idx"]
    check_rows(values, offsets, lengths, axis=ragged)
    known_names = [name for name in LENGTHS if name in attributes]
    cache = {name: torch.zeros(attributes[name], 0, device="cpu") for name in known_names}
    return NestedTensor(values, offsets, lengths=lengths, _ragged_idx=ragged, _metadata_cache=cache)


def check_rows(
    values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, *, axis: object
) -> None:
    """Refuse a jagged tensor whose rows are not all inside of its values."""
    if (
        type(axis) is not int
        or not 1 <= axis <= values.dim()
        or offsets.dim() != 1
        or not offsets.numel()
    ):
        raise MetadataError(
            "a jagged tensor's offsets or ragged dimension cannot be true",
            found=type(axis).__name__,
        )
    if lengths is not None and lengths.numel() != offsets.numel() - 1:
        raise MetadataError("a jagged tensor needs a length for each row", found=lengths.numel())
    if offsets.is_floating_point() or (lengths is not None and lengths.is_floating_point()):
        raise MetadataError(
            "the offsets and lengths of a jagged tensor must be integers", found=str(offsets.dtype)
        )
    if not is_readable(values, offsets):
        return
    room = values.shape[axis - 1]
    starts, stops = offsets[:-1], offsets[1:]
    ends = stops if lengths is None else starts + lengths
    # Bounds before sums: two numbers within them cannot overflow.
    inside = [offsets, *([] if lengths is None else [lengths])]
    if any(part.numel() and (int(part.min()) < 0 or int(part.max()) > room) for part in inside):
        raise MetadataError("a jagged tensor reaches past its values", expected=room)
    if bool((stops < starts).any()) or bool((ends > stops).any()):
        raise MetadataError(
            "the offsets of a jagged tensor do not rise, or its lengths do not fit between them"
        )


def _sparse(layout: torch.layout) -> TorchKind:
    return TorchKind(
        lambda tensor: tensor.layout is layout,
        partial(sparse_apart, layout),
        partial(sparse_together, layout),
    )


KINDS = {
    **{name: _sparse(getattr(torch, name)) for name in SPARSE_PARTS},
    "quantized": TorchKind(lambda tensor: tensor.is_quantized, quantized_apart, quantized_together),
    "jagged": TorchKind(
        lambda tensor: isinstance(tensor, NestedTensor),
        jagged_apart,
        jagged_together,
        {(NESTED, "_rebuild_njt"): _rebuild_njt},
    ),
    "nested": TorchKind(lambda tensor: tensor.is_nested, nested_apart, nested_together),
}
"""By the name that a `Composite` has. Where a tensor is of two kinds, the first counts."""


def add_kind(kind: CompositeKind, how: TorchKind) -> None:
    """Add a kind of tensors, to be read, saved, converted and shown like the others."""
    KINDS[kind.name] = how
    reducers.add_kind(kind)


def kind_of(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor that is made of others; None for a plain one."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if plain and not tensor.is_quantized and not tensor.is_nested:
        return None
    return next((name for name, kind in KINDS.items() if kind.is_kind(tensor)), None)


def function_name(what: object) -> Name | None:
    """The name of the reducer for a function of some kind."""
    return next(
        (name for kind in KINDS.values() for name, each in kind.functions.items() if each is what),
        None,
    )
