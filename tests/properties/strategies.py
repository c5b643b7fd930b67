"""Hypothesis strategies for chunks and tensors over random bytes, and the slow obvious ways to read them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES

WIDTHS = [
    DTYPES.name(n)
    for n in (
        "quint2x4",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "uint8",
        "int16",
        "float32",
        "complex64",
    )
]


def element_bits(chunk):
    """The first bit of every element, by its position in the box."""
    for p in itertools.product(*map(range, chunk.shape)):
        yield p, chunk.offset + sum(i * s for i, s in zip(p, chunk.strides, strict=True))


def bytes_touched(chunk, dtype):
    """Byte by byte: every byte that holds a bit of an element."""
    return {
        bit // 8 for _, start in element_bits(chunk) for bit in range(start, start + dtype.bits)
    }


@st.composite
def chunks(draw, dtype=None, max_rank=3, max_length=5, start=0, byteorder="little"):
    """A strided chunk, with overlapping, reversed and repeated elements among them, that lies inside its storage."""
    dtype = dtype or draw(st.sampled_from(WIDTHS))
    unit = 1 if dtype.packed else 8
    shape = tuple(draw(st.lists(st.integers(0, max_length), max_size=max_rank)))
    step = st.integers(-40 * dtype.bits // unit, 40 * dtype.bits // unit)
    strides = tuple(draw(step) * unit for _ in shape)
    low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0 and n > 0)
    high = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0 and n > 0)
    offset = draw(st.integers(0, 40)) * unit - low
    nbytes = (offset + high + dtype.bits + 7) // 8 + draw(st.integers(0, 9))
    return Chunk(
        Box.whole(shape), Storage("f", start, nbytes, byteorder, home=None), offset, strides
    ), dtype


def read_slowly(chunk, dtype, content: bytes) -> np.ndarray:
    """Element by element, bit by bit."""
    bits = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")
    out = np.zeros(chunk.shape, dtype.numpy)
    for p, start in element_bits(chunk):
        at = chunk.storage.start * 8 + start
        if dtype.packed:
            value = sum(int(b) << i for i, b in enumerate(bits[at : at + dtype.bits]))
            out[p] = np.array([value], np.uint8).view(dtype.numpy)[0]
            continue
        raw = content[at // 8 : (at + dtype.bits) // 8]
        if chunk.storage.byteorder == "big":
            u = dtype.swap_nbytes
            raw = b"".join(raw[i : i + u][::-1] for i in range(0, len(raw), u))
        out[p] = np.frombuffer(raw, dtype.numpy)[0]
    return out
