"""The claims of a plain tensor over its storage, checked with exact integers before anything is built or allocated."""

from __future__ import annotations

import math
from functools import lru_cache

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.dtype import DType
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.table import RowKind, is_range_inside
from holdfast.core.tensor import MAX_FILE_OFFSET, PLAIN_TRAITS, LazyTensor, Traits
from holdfast.engine.files import FileRow
from holdfast.errors import LimitExceeded, MetadataError, PickleError
from holdfast.formats.pickle.table import Args

MAX_ELEMENTS = 1 << 62
"""More than any memory; products below it fit the 64-bit integers that numpy and torch count with."""

MAX_STRIDE = 1 << 55
"""Elements of 128 bits at this distance are countable in 64 bits."""

TENSOR_CLASSES = tuple(
    f"{kind}Tensor"
    for kind in (
        "BFloat16",
        "Bool",
        "Byte",
        "Char",
        "Double",
        "Float",
        "Half",
        "Int",
        "Long",
        "Short",
    )
)


@lru_cache(maxsize=8)
def view_traits(requires_grad: bool, conj: bool, neg: bool) -> Traits:
    """The traits of a plain tensor: one object for all that are alike."""
    return (
        Traits(requires_grad=requires_grad, conj=conj, neg=neg)
        if requires_grad or conj or neg
        else PLAIN_TRAITS
    )


def checked_ints(values: object, what: str, rank: int | None = None) -> tuple[int, ...]:
    """A tuple or list of non-negative ints (no bools), of the given rank, if any."""
    if not isinstance(values, tuple | list) or any(
        type(v) is not int or not 0 <= v < MAX_ELEMENTS for v in values
    ):
        raise MetadataError(
            f"the {what} of a tensor must be non-negative integers", found=brief(values)
        )
    if rank is not None and len(values) != rank:
        raise MetadataError(
            f"a tensor with {rank} dimensions has a {what} with {len(values)}", found=brief(values)
        )
    return tuple(values)


def checked_shape(size: object, limits: Limits) -> tuple[int, ...]:
    """The lengths of a tensor: of a rank that is allowed, and countable in 64 bits even where one is 0, as numpy wants."""
    shape = checked_ints(size, "size")
    if len(shape) > limits.rank:
        raise LimitExceeded(
            f"a tensor with {len(shape)} dimensions, above Limits(rank={limits.rank})",
            found=len(shape),
        )
    count = math.prod(n or 1 for n in shape)
    # 16 bytes is the widest element.
    if count >= MAX_ELEMENTS or (0 in shape and count >= MAX_ELEMENTS // 16):
        raise MetadataError(f"a tensor of {count:,} elements", found=shape)
    return shape


def reach(
    offset: object, size: object, stride: object, limits: Limits
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """The shape, strides and offset of a claim, and the last element that it touches: -1 where it touches none.

    The stride of a dimension of length 1 is never used and may be any number; one that does not fit 64 bits is given as 0.
    """
    if (
        type(size) is tuple
        and type(stride) is tuple
        and len(size) == len(stride) <= limits.rank
        and type(offset) is int
    ):
        # What writers write, in one pass; the rest is looked at again below, and refused for its own reason.
        last, count = offset, 1
        for n, s in zip(size, stride):  # noqa: B905  # of one length, and `strict=` takes as long as the rest
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
    return MetadataError(
        f"a tensor reaches element {last:,} of a storage that holds {room:,}",
        expected=room,
        found=last,
    )


@lru_cache(maxsize=4096)
def strided_kind(
    dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], storage_nbytes: int, traits: Traits, byteorder: str,
    location: str, inside: bool = True,
) -> RowKind:  # fmt: skip
    """The kind of a tensor over a storage: one object for all that are alike. Strides are in bits."""
    return RowKind.from_strides(
        dtype,
        shape,
        strides,
        storage_nbytes=storage_nbytes,
        traits=traits,
        byteorder=byteorder,
        location=location,
        is_inside=inside,
    )


def strided_view(
    storage: LazyTensor,
    dtype: DType | None,
    claim: tuple[object, object, object],
    traits: Traits,
) -> LazyTensor:
    """The tensor that views a storage (itself a 1-D lazy tensor), as elements of a dtype; None: of the storage's own.

    A claim is an offset, a size, and strides, counted in elements.
    """
    dtype = dtype or storage.dtype
    shape, steps, begin, last = reach(*claim, storage.source.limits)
    row = storage.position if isinstance(storage.position, FileRow) else None
    chunks = storage.chunks if row is None else ()
    place = None if row is None else (row.offset, row.kind.strides)
    if len(chunks) == 1:
        place = chunks[0].offset, chunks[0].strides
    if place is None or len(storage.shape) != 1 or place[1] != (storage.dtype.bits,):
        # A tensor in the place of a storage: its size says nothing about the bytes that are there.
        raise MetadataError(
            "a tensor over something that is no storage", found=type(storage).__name__
        )

    (element_count,) = storage.shape
    stored_bits, needed_bits = element_count * storage.dtype.bits, (last + 1) * dtype.bits
    # Packed quantised types count their storage in bytes and their elements in fractions of one (torch 2.13, quint4x2).
    if needed_bits > stored_bits and not (dtype.packed and needed_bits <= element_count * 8):
        raise beyond(last, stored_bits // dtype.bits)

    first_bit = place[0] + begin * dtype.bits
    strides = tuple([step * dtype.bits for step in steps])
    if last < 0:
        first_bit, strides = 0, (0,) * len(shape)
    nbytes = dtype.nbytes(math.prod(shape))
    if row is None or nbytes >= MAX_FILE_OFFSET:
        chunk = Chunk(Box.whole(shape), storage.chunks[0].storage, first_bit, strides)
        return LazyTensor("", dtype, shape, (chunk,), storage.source, traits)

    whole = row.kind
    inside = is_range_inside(first_bit, nbytes, whole.storage_nbytes)
    kind = strided_kind(
        dtype, shape, strides, whole.storage_nbytes, traits, whole.byteorder, whole.location, inside
    )
    position = FileRow(row.storages, row.storage_index, kind, first_bit)
    return LazyTensor("", dtype, shape, (), storage.source, traits, position)


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
            inside = ", ".join(
                str(v) if isinstance(v, int) and abs(v) < 1 << 128 else type(v).__name__
                for v in value[:8]
            )
            return f"{type(value).__name__} of {len(value)}: {inside}"
        case _:
            return type(value).__name__


def arity(args: Args, low: int, high: int, what: str) -> Args:
    """The arguments, if there are as many as the function takes."""
    if not low <= len(args) <= high:
        raise PickleError(
            f"{what} was given {len(args)} arguments, not {low} to {high}", found=len(args)
        )
    return args


def flag(value: object, what: str) -> bool:
    """A bool, and nothing that only counts as one."""
    if type(value) is not bool:
        raise PickleError(f"{what} must be true or false", found=type(value).__name__)
    return value
