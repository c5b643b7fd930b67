"""The calls of torch's pickles that build a tensor out of several: sparse, quantised, nested; and wrapper subclasses.

torch trusts the indices, offsets and scales of such tensors, and an index that lies reaches into memory that is not the tensor's.
So their elements are looked at before anything is built: storages are filled first, and what is looked at is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nested._internal.nested_tensor import NestedTensor
from torch.storage import UntypedStorage

from holdfast.errors import LimitExceeded, MetadataError, PickleError
from holdfast.formats.torch.tensors import Args, arity, beyond, brief, checked_shape, reach
from holdfast.torch.serialization.rebuild import (
    TORCH_SAYS_NO,
    PlainTensors,
    checked_dtype,
    dtype_of,
    flag,
    located_by_caller,
    no,
    storage_of,
)
from holdfast.torch.serialization.storages import QUANTIZED

LAYOUTS: dict[str, torch.layout] = {
    f"torch.{name}": getattr(torch, name)
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
}

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

INSPECTED_NBYTES = 4 << 30
"""What may be looked at in all, each tensor counted as often as it is used: two seconds. Masks shared by a few layers are usual."""

PER_TENSOR = (torch.per_tensor_affine,)
PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
"""Schemes that torch writes and reads; the symmetric ones exist as names only (2.13)."""


class CompositeTensors:
    """Rows for tensors that are made of other tensors."""

    def __init__(self, plain: PlainTensors) -> None:
        self._plain = plain
        self._inspected = 0

    def begin(self) -> None:
        """Get ready for a stream."""
        self._inspected = 0

    def _part(self, value: object, what: str) -> torch.Tensor:
        """A plain tensor whose elements may be looked at."""
        plain = self._plain
        if not isinstance(value, torch.Tensor) or not (type(value) is torch.Tensor or plain.fake):
            raise PickleError(f"the {what} of a tensor must be a plain tensor", found=type(value).__name__)
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            raise PickleError(f"the {what} of a tensor must be a plain tensor", found=str(value.layout))
        limits = plain.limits
        nbytes = value.numel() * value.element_size()
        if nbytes > max(limits.expansion_floor_nbytes, limits.expansion * value.untyped_storage().nbytes()):
            raise LimitExceeded(
                f"the {what} of a tensor repeat one number {value.numel():,} times (Limits.expansion)", found=nbytes
            )
        self._inspected += nbytes
        if self._inspected > INSPECTED_NBYTES:
            raise LimitExceeded("the same numbers are used as indices over and over; no writer does that", found=self._inspected)
        return value

    def _readable(self, *parts: torch.Tensor) -> bool:
        """Fill the storages; whether there are elements to look at."""
        self._plain.storages.fill()
        return not self._plain.fake and all(not part.is_meta for part in parts)

    def _device(self, values: torch.Tensor) -> torch.device | None:
        """Said, lest `torch.set_default_device` decides; not for a fake tensor, whose device need not exist."""
        return None if self._plain.fake else values.device

    # Sparse.

    def sparse(self, args: Args) -> torch.Tensor:
        """(layout, (indices, values, size[, is_coalesced])) or (layout, (compressed, plain, values, size))"""
        layout, data = arity(args, 2, 2, "_rebuild_sparse_tensor")
        if type(layout) is not torch.layout or not isinstance(data, tuple):
            raise PickleError("a sparse tensor with an unknown layout", found=type(layout).__name__)
        if layout is torch.sparse_coo and 3 <= len(data) <= 4:
            return self._coo(data[0], data[1], size=data[2], coalesced=flag(data[3], "is_coalesced") if len(data) == 4 else None)
        if layout in COMPRESSED and len(data) == 4:
            return self._compressed(layout, data)
        raise PickleError(f"a sparse tensor of layout {layout} with {len(data)} parts", found=len(data))

    def legacy_sparse(self, kind: type, args: Args) -> torch.Tensor:
        """`torch.sparse.FloatTensor(indices, values, size)`"""
        indices, values, size = arity(args, 3, 3, "a sparse tensor class")
        if not isinstance(values, torch.Tensor) or values.dtype is not getattr(kind, "dtype", None):
            raise PickleError("a sparse tensor class with values of another type", found=type(values).__name__)
        return self._coo(indices, values, size=size, coalesced=None)

    def _coo(self, first: object, second: object, *, size: object, coalesced: bool | None) -> torch.Tensor:
        shape = checked_shape(size, self._plain.limits)
        indices, values = self._part(first, "indices"), self._part(second, "values")
        if indices.dtype is not torch.int64:
            raise MetadataError("the indices of a sparse tensor must be integers of 64 bits", found=str(indices.dtype))
        readable = self._readable(indices, values)
        try:
            return torch.sparse_coo_tensor(
                indices, values, shape, device=self._device(values), check_invariants=readable, is_coalesced=coalesced
            )
        except TORCH_SAYS_NO as error:
            raise no("a sparse tensor", error) from error

    def _compressed(self, layout: torch.layout, data: Args) -> torch.Tensor:
        first, second, third, size = data
        shape = checked_shape(size, self._plain.limits)
        compressed, plain = self._part(first, "compressed indices"), self._part(second, "plain indices")
        values = self._part(third, "values")
        readable = self._readable(compressed, plain, values)
        try:
            return torch.sparse_compressed_tensor(
                compressed, plain, values, shape, layout=layout, device=self._device(values), check_invariants=readable
            )
        except TORCH_SAYS_NO as error:
            raise no("a sparse tensor", error) from error

    # Quantised.

    def quantized(self, args: Args) -> torch.Tensor:
        """(storage, offset, size, stride, quantiser, requires_grad, hooks)"""
        storage, offset, size, stride, quantizer, grad = arity(args, 6, 7, "_rebuild_qtensor")[:6]
        dtype, untyped = dtype_of(storage), storage_of(storage)
        if dtype not in QUANTIZED:
            raise MetadataError(f"a quantised tensor of {dtype}", found=str(dtype))
        if not isinstance(quantizer, tuple) or not quantizer or type(quantizer[0]) is not torch.qscheme:
            raise PickleError("a quantised tensor without a scheme", found=type(quantizer).__name__)
        shape, steps, begin, last = reach(offset, size, stride, self._plain.limits)
        self._check_room(untyped, dtype, shape=shape, last=last)
        scheme, *rest = quantizer
        if scheme in PER_TENSOR and len(rest) == 2:
            made = self._per_tensor(dtype, untyped, rest)
        elif scheme in PER_CHANNEL and len(rest) == 3:
            made = self._per_channel(dtype, untyped, rest, shape=shape)
        else:
            raise PickleError(f"a quantised tensor of scheme {scheme} with {len(rest)} parameters", found=len(rest))
        wanted = flag(grad, "requires_grad")
        try:
            made.set_(untyped, begin, shape, steps)
            made.requires_grad = wanted
        except TORCH_SAYS_NO as error:
            raise no("a quantised tensor", error) from error
        return made

    def _check_room(self, untyped: UntypedStorage, dtype: torch.dtype, *, shape: tuple[int, ...], last: int) -> None:
        """Packed types put several elements in a byte, and begin every row with a new one."""
        bits = QUANTIZED[dtype]
        needed = (last + 1) * bits
        if bits < 8 and shape and last >= 0:
            needed = max(needed, math.prod(shape[:-1]) * ((shape[-1] * bits + 7) // 8) * 8)
        if needed > untyped.nbytes() * 8:
            raise beyond(last, untyped.nbytes() * 8 // bits)

    def _per_tensor(self, dtype: torch.dtype, untyped: UntypedStorage, parameters: Sequence[object]) -> torch.Tensor:
        scale, zero = parameters
        if not isinstance(scale, float | int) or type(zero) is not int:
            raise PickleError("a per-tensor quantiser needs a scale and a zero point", found=type(scale).__name__)
        try:
            return torch._empty_affine_quantized((0,), scale=scale, zero_point=zero, dtype=dtype, device=untyped.device)
        except TORCH_SAYS_NO as error:
            raise no("a quantised tensor", error) from error

    def _per_channel(
        self, dtype: torch.dtype, untyped: UntypedStorage, parameters: Sequence[object], *, shape: tuple[int, ...]
    ) -> torch.Tensor:
        first, second, axis = parameters
        scales, zeros = self._part(first, "scales"), self._part(second, "zero points")
        if type(axis) is not int or not 0 <= axis < len(shape):
            raise MetadataError("a per-channel quantiser's axis is not one of the tensor's", found=brief(axis))
        if not scales.shape == zeros.shape == shape[axis : axis + 1]:
            found = tuple(scales.shape)
            raise MetadataError("a per-channel quantiser needs a scale and a zero point for each channel", found=found)
        self._plain.storages.fill()
        # torch compares the scales with the size, and allocates it: so it is the true one along the axis, and 0 elsewhere.
        blank = [n if i == axis else 0 for i, n in enumerate(shape)]
        try:
            return torch._empty_per_channel_affine_quantized(
                blank, scales=scales, zero_points=zeros, axis=axis, dtype=dtype, device=untyped.device
            )
        except TORCH_SAYS_NO as error:
            raise no("a quantised tensor", error) from error

    # Nested.

    def nested(self, args: Args) -> torch.Tensor:
        """(buffer, sizes, strides, offsets): a row of sizes, a row of strides and an offset for each tensor inside"""
        given = arity(args, 4, 4, "_rebuild_nested_tensor")
        names = ("buffer", "sizes", "strides", "offsets")
        buffer, sizes, strides, offsets = (self._part(v, name) for v, name in zip(given, names, strict=True))
        if any(part.dtype is not torch.int64 for part in (sizes, strides, offsets)):
            raise MetadataError("the sizes, strides and offsets of a nested tensor must be integers of 64 bits")
        fitting = sizes.shape == strides.shape and offsets.shape == sizes.shape[:1]
        if buffer.dim() != 1 or not buffer.is_contiguous() or sizes.dim() != 2 or not fitting:
            raise MetadataError("the parts of a nested tensor do not fit each other", found=tuple(sizes.shape))
        if self._readable(buffer, sizes, strides, offsets):
            room = buffer.numel()
            for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
                *_, last = reach(offset, tuple(size), tuple(stride), self._plain.limits)
                if last >= room:
                    raise beyond(last, room)
        try:
            return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)
        except TORCH_SAYS_NO as error:
            raise no("a nested tensor", error) from error

    def check_jagged(self, made: NestedTensor) -> None:
        """Refuse a nested tensor of the jagged layout whose rows are not all inside of its values."""
        values, offsets, given, axis = (getattr(made, f"_{name}", None) for name in ("values", "offsets", "lengths", "ragged_idx"))
        values, offsets = self._part(values, "values"), self._part(offsets, "offsets")
        lengths = None if given is None else self._part(given, "lengths")
        if type(axis) is not int or not 1 <= axis <= values.dim() or offsets.dim() != 1 or not offsets.numel():
            raise MetadataError("a jagged tensor's offsets or ragged dimension cannot be true", found=brief(axis))
        if lengths is not None and lengths.numel() != offsets.numel() - 1:
            raise MetadataError("a jagged tensor needs a length for each row", found=lengths.numel())
        if offsets.is_floating_point() or (lengths is not None and lengths.is_floating_point()):
            raise MetadataError("the offsets and lengths of a jagged tensor must be integers", found=str(offsets.dtype))
        if not self._readable(values, offsets):
            return
        room = values.shape[axis - 1]
        starts, stops = offsets[:-1], offsets[1:]
        ends = stops if lengths is None else starts + lengths
        # Bounds before sums: two numbers within them cannot overflow.
        inside = [offsets, *([] if lengths is None else [lengths])]
        if any(part.numel() and (int(part.min()) < 0 or int(part.max()) > room) for part in inside):
            raise MetadataError("a jagged tensor reaches past its values", expected=room)
        if bool((stops < starts).any()) or bool((ends > stops).any()):
            raise MetadataError("the offsets of a jagged tensor do not rise, or its lengths do not fit between them")

    # Wrapper subclasses.

    def wrapper(self, args: Args) -> torch.Tensor:
        """(class, dtype, size, stride, offset, layout, device, requires_grad): an outside; the tensors inside come as its state.

        Whoever calls this has made sure that the class is allowed.
        """
        kind, dtype, size, stride, offset, layout, device, grad = arity(args, 8, 8, "_rebuild_wrapper_subclass")
        if not isinstance(kind, type) or not issubclass(kind, torch.Tensor):
            raise PickleError("a wrapper of a class that is no tensor", found=type(kind).__name__)
        if type(layout) is not torch.layout:
            raise PickleError("a wrapper without a layout", found=type(layout).__name__)
        shape, steps, begin, _ = reach(offset, size, stride, self._plain.limits)
        wanted, where = flag(grad, "requires_grad"), located_by_caller(device)
        try:
            return torch.Tensor._make_wrapper_subclass(
                kind,
                shape,
                strides=steps,
                storage_offset=begin,
                layout=layout,
                dtype=checked_dtype(dtype),
                device=torch.device(where),
                requires_grad=wanted,
            )
        except TORCH_SAYS_NO as error:
            raise no(f"a wrapper of {kind.__name__}", error) from error
