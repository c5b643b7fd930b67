"""The pieces of memory that a rank's state is made of, so that each can be copied once before anybody knows who writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.tensor import LazyTensor, Traits

__all__ = ["Piece", "little_in_common", "made_of", "pieces_of"]

Piece = tuple[str, Traits, Chunk]
"""A dtype, what is to be known beside it, and elements in memory."""

COMMON_NBYTES, COMMON_SHARE = 64 << 20, 0.1
"""Bytes of tensors that a rank has whole, in all and as a part of what it has, up to which it copies them before it is planned who
writes them: training then goes on without waiting for any other rank. Beyond that every rank would copy what one of them writes."""


def little_in_common(tensors: Mapping[str, LazyTensor]) -> bool:
    """Whether a rank has little that the others may have as well: tensors of which it has all."""
    sizes = [(tensor.nbytes, _nbytes_here(tensor)) for tensor in tensors.values()]
    whole = sum(nbytes for nbytes, here in sizes if here == nbytes)
    return whole <= max(COMMON_NBYTES, COMMON_SHARE * sum(here for _, here in sizes))


def _nbytes_here(tensor: LazyTensor) -> int:
    return sum(tensor.dtype.nbytes(chunk.box.count) for chunk in tensor.chunks)


def pieces_of(tensors: Mapping[str, LazyTensor]) -> dict[Piece, LazyTensor]:
    """Every piece of memory once, however many tensors it is in, as a tensor of its own."""
    found: dict[Piece, LazyTensor] = {}
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            key = _piece(tensor, chunk)
            found.setdefault(key, replace(tensor, shape=chunk.shape, chunks=(key[2],)))
    return found


def made_of(tensors: Mapping[str, LazyTensor], copies: Mapping[Piece, LazyTensor]) -> dict[str, LazyTensor]:
    """The same tensors, made of copies of their pieces. Whoever copied has resolved what was lazily conjugated or negated."""
    made = {}
    for name, tensor in tensors.items():
        found = [(chunk.box, copies[_piece(tensor, chunk)]) for chunk in tensor.chunks]
        chunks = tuple(replace(copy.chunks[0], box=box) for box, copy in found)
        source = found[0][1].source if found else tensor.source
        made[name] = replace(tensor, chunks=chunks, source=source, traits=replace(tensor.traits, conj=False, neg=False))
    return made


def _piece(tensor: LazyTensor, chunk: Chunk) -> Piece:
    return tensor.dtype.name, tensor.traits, Chunk(Box.whole(chunk.shape), chunk.storage, chunk.offset, chunk.strides)
