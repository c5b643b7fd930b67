"""Tensors in pieces: what torch's Hugging Face writer notes about them, and how they go together again.

torch 2.8 and later (`HuggingFaceStorageWriter`) write each rank's pieces as plain safetensors and put into
`__metadata__`

    DCP_SHARDING_INFO    {"model.w": {"saved_offsets": [0, 256]}, …}      as JSON text

which says where in the whole tensor the piece of this file begins. Nothing says how large the whole is: it is the
smallest shape that holds all the pieces, so a lost last piece would go unnoticed by shape alone; the pieces must tile
it exactly.

torch has pairs of 4-bit floats, and counts them in the offsets; the header counts the floats themselves (F4), so that the
last offset of such a piece is to be doubled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, c_strides
from holdfast.core.limits import Limits
from holdfast.core.protocols import Source
from holdfast.core.tensor import LazyTensor
from holdfast.core.tiling import tiles
from holdfast.errors import HeaderError, MetadataError, located
from holdfast.formats.safetensors.layout import ADDRESSABLE, addressable
from holdfast.formats.safetensors.strict_json import kind, parse, pointer, quoted

if TYPE_CHECKING:
    from holdfast.formats.safetensors.read import Header

__all__ = ["SHARDING_INFO", "join", "saved_offsets"]

SHARDING_INFO = "DCP_SHARDING_INFO"
"""The key in `__metadata__`."""

PAIRED = "F4"
"""The dtype that torch counts in pairs."""

OFFSETS = "saved_offsets"
"""The only field of an entry that torch writes or reads; others are left alone."""


def saved_offsets(header: Header, limits: Limits) -> dict[str, tuple[int, ...]]:
    """Where each piece of a file begins in its whole tensor; empty where the file says nothing about that.

    Raises `HeaderError` for text that is not of that form, `MetadataError` where it does not fit the file's tensors.
    """
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        return {}
    key = header.key
    with located(file=key):
        try:
            info = parse(text.encode("utf-8"), limits)
        except HeaderError as error:
            raise HeaderError(f"in __metadata__.{SHARDING_INFO}: {error.message}", file=key) from None
    if not isinstance(info, dict):
        raise HeaderError(f"in __metadata__.{SHARDING_INFO}: expected an object, found {kind(info)}", file=key)
    return {name: _offsets(header, name, value) for name, value in info.items()}


def join(name: str, pieces: Sequence[tuple[Header, tuple[int, ...]]], source: Source) -> LazyTensor:
    """One tensor out of its pieces: pairs of a header and the place where that file's piece begins.

    Raises `MetadataError` where the pieces differ in dtype or rank, or do not cover a box exactly once.
    """
    first, _ = pieces[0]
    dtype = first.dtype(name)
    rank = len(first.entries[name].shape)
    if dtype.safetensors == PAIRED and rank and any(offsets[-1] for _, offsets in pieces):
        pieces = [(header, (*offsets[:-1], 2 * offsets[-1])) for header, offsets in pieces]
    chunks = []
    for header, offsets in pieces:
        shape = header.entries[name].shape
        if header.dtype(name) is not dtype or len(shape) != rank:
            raise MetadataError(
                f"the pieces in {first.key!r} and {header.key!r} do not go together: {dtype} of rank {rank} and "
                f"{header.dtype(name)} of rank {len(shape)}",
                file=header.key,
                tensor=name,
            )
        chunks.append(Chunk(Box.at(offsets, shape), header.storage(name, source.store), 0, c_strides(shape, dtype.bits)))
    whole = Box.whole([max(chunk.box.stop[d] for chunk in chunks) for d in range(rank)])
    if not addressable(whole.shape, dtype.bits) or not tiles(whole, (chunk.box for chunk in chunks)):
        stored = sum(chunk.box.count for chunk in chunks)
        raise MetadataError(
            f"{len(chunks):,} pieces with {stored:,} elements do not cover {list(whole.shape)} exactly once; "
            "a file is missing, or two hold the same part",
            file=first.key,
            tensor=name,
            expected=whole.shape,
            found=tuple(chunk.box for chunk in chunks[:16]),
        )
    return LazyTensor(name, dtype, whole.shape, tuple(chunks), source)


def _offsets(header: Header, name: str, value: object) -> tuple[int, ...]:
    place = f"in __metadata__.{SHARDING_INFO} at {pointer(name)}"
    entry = header.entries.get(name)
    if entry is None:
        raise MetadataError(f"{place}: the file has no tensor {quoted(name)}", file=header.key, tensor=name)
    offsets = value.get(OFFSETS) if isinstance(value, dict) else None
    if not isinstance(offsets, list):
        found = kind(value)
        raise HeaderError(f"{place}: expected an object with {OFFSETS}, found {found}", file=header.key, tensor=name)
    for i, offset in enumerate(offsets):
        if type(offset) is not int or not 0 <= offset <= ADDRESSABLE:
            place = f"in __metadata__.{SHARDING_INFO} at {pointer(name, OFFSETS, i)}"
            raise HeaderError(f"{place}: expected a place, found {kind(offset)}", file=header.key, tensor=name)
    if len(offsets) != len(entry.shape):
        raise MetadataError(
            f"{place}: {len(offsets)} offsets for a tensor of rank {len(entry.shape)}", file=header.key, tensor=name
        )
    return tuple(offsets)
