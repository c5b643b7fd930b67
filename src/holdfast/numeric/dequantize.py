"""Weights that are quantised in blocks, as GGUF has them: what a block of each type is made of, and the numbers that it stands for.

A row of a weight is cut into blocks of 32 or 256 elements. A block is a few bytes: scales, and the low bits of each element. There
is no dtype for that, so a tensor in blocks is one of bytes, its last axis the bytes of a row, and `Traits.blocks` names the type:

    float32 [4096, 4096] in Q4_K    is    uint8 [4096, 2304], blocks "Q4_K"

Every type has a size; those that most models are published in can be decoded, to float32, in the order of operations of ggml.
In the layouts below `d` and `m` are 16-bit floats, `q` are the elements.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from holdfast.core.value import Value

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class BlockType(Value, frozen=True):
    """One way to store a row of elements; elements and bytes are those of a block."""

    name: str
    elements: int
    nbytes: int
    decode: Callable[[Bytes], Floats] | None

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape that bytes of this shape stand for; None where the last axis is no row of blocks."""
        if not stored or stored[-1] % self.nbytes:
            return None
        return (*stored[:-1], stored[-1] // self.nbytes * self.elements)


def _float(blocks: Bytes, at: int) -> Floats:
    """The 16-bit float at a place of every block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _shifted(packed: Bytes, shifts: tuple[int, ...], mask: int, *, run: int) -> Bytes:
    """Fields of several bits: each run of bytes once for each shift, in the order of the elements."""
    by = np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    spread = packed.reshape(len(packed), -1, 1, run) >> by & np.uint8(mask)
    return spread.reshape(len(packed), -1)


def _bits(packed: Bytes) -> Bytes:
    """Single bits, the lowest of the first byte first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")


def _halves(packed: Bytes) -> Bytes:
    """16 bytes as 32 elements of four bits: the low halves, then the high ones."""
    return _shifted(packed, (0, 4), 15, run=16)


def _q4_0(blocks: Bytes) -> Floats:
    """d, 16 bytes of q: d·(q − 8)."""
    return _float(blocks, 0) * (_halves(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    """d, m, 16 bytes of q: d·q + m."""
    return _float(blocks, 0) * _halves(blocks[:, 4:]) + _float(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    """d, 32 fifth bits, 16 bytes of q: d·(q − 16)."""
    q = _halves(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _float(blocks, 0) * (q.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    """d, m, 32 fifth bits, 16 bytes of q: d·q + m."""
    q = _halves(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _float(blocks, 0) * q + _float(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    """d, 32 signed bytes: d·q."""
    return _float(blocks, 0) * blocks[:, 2:].view(np.int8)


def _scaled(scale: Floats, q: npt.NDArray[np.generic], minimum: Floats | None = None) -> Floats:
    """scale·q − minimum, a scale and a minimum for each group."""
    made = scale[:, :, None] * q.reshape(*scale.shape, -1).astype(np.float32)
    if minimum is not None:
        made -= minimum[:, :, None]
    return made.reshape(len(q), -1)


def _q2_k(blocks: Bytes) -> Floats:
    """16 scales (low half) and minima (high half), 64 bytes of q, d, m."""
    scales = blocks[:, :16]
    q = _shifted(blocks[:, 16:80], (0, 2, 4, 6), 3, run=32)
    return _scaled(_float(blocks, 80) * (scales & 15), q, _float(blocks, 82) * (scales >> 4))


def _q3_k(blocks: Bytes) -> Floats:
    """32 bytes of third bits, 64 bytes of q, 12 bytes of scales, d. A third bit that is not set takes four away. The scales have
    six bits: eight bytes with the low four of two scales each, four with the high two of four each."""
    third = _shifted(blocks[:, :32], tuple(range(8)), 1, run=32)
    q = _shifted(blocks[:, 32:96], (0, 2, 4, 6), 3, run=32).astype(np.int8) - (
        np.int8(4) - 4 * third.astype(np.int8)
    )
    low = _shifted(blocks[:, 96:104], (0, 4), 15, run=8)
    high = _shifted(blocks[:, 104:108], (0, 2, 4, 6), 3, run=4)
    scales = (low | high << 4).astype(np.float32) - 32
    return _scaled(_float(blocks, 108) * scales, q)


def _eight_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of six bits, in twelve bytes. byte 0 … 3 low six bits: scale 0 … 3; high two: those of scale 4
    … 7 byte 4 … 7 low six bits: minimum 0 … 3; high two: those of minimum 4 … 7 byte 8 … 11 low half: scale 4 … 7; high half:
    minimum 4 … 7"""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return scales, minima


def _q4_k(blocks: Bytes) -> Floats:
    """d, m, 12 bytes of scales and minima, 128 bytes of q."""
    scales, minima = _eight_scales(blocks[:, 4:16])
    q = _shifted(blocks[:, 16:], (0, 4), 15, run=32)
    return _scaled(_float(blocks, 0) * scales, q, _float(blocks, 2) * minima)


def _q5_k(blocks: Bytes) -> Floats:
    """d, m, 12 bytes of scales and minima, 32 bytes of fifth bits, 128 bytes of q."""
    scales, minima = _eight_scales(blocks[:, 4:16])
    fifth = _shifted(blocks[:, 16:48], tuple(range(8)), 1, run=32)
    q = _shifted(blocks[:, 48:], (0, 4), 15, run=32) | fifth << 4
    return _scaled(_float(blocks, 0) * scales, q, _float(blocks, 2) * minima)


def _q6_k(blocks: Bytes) -> Floats:
    """128 bytes of low halves, 64 bytes of high bits, 16 signed scales, d: q − 32."""
    q = (
        _shifted(blocks[:, :128], (0, 4), 15, run=64)
        | _shifted(blocks[:, 128:192], (0, 2, 4, 6), 3, run=32) << 4
    )
    scales = _float(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return _scaled(scales, q.astype(np.int8) - 32)


def _tq2_0(blocks: Bytes) -> Floats:
    """64 bytes of q, d: q − 1."""
    return _float(blocks, 64) * (
        _shifted(blocks[:, :64], (0, 2, 4, 6), 3, run=32).astype(np.float32) - 1
    )


CURVE = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""What the sixteen values of IQ4 stand for."""


def _iq4_nl(blocks: Bytes) -> Floats:
    """d, 16 bytes of places on the curve."""
    return _float(blocks, 0) * CURVE[_halves(blocks[:, 2:])]


def _iq4_xs(blocks: Bytes) -> Floats:
    """d, 8 times two high bits of a scale, 8 times four low ones, 128 bytes of places on the curve."""
    high = _shifted(blocks[:, 2:4], (0, 2, 4, 6), 3, run=1)
    low = _shifted(blocks[:, 4:8], (0, 4), 15, run=1)
    scales = (low | high << 4).astype(np.float32) - 32
    return _scaled(_float(blocks, 0) * scales, CURVE[_shifted(blocks[:, 8:], (0, 4), 15, run=16)])


E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice what four bits of float4_e2m1fn stand for; ggml has no negative zero."""


def _mxfp4(blocks: Bytes) -> Floats:
    """An exponent of 8 bits, 16 bytes of q."""
    half = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return half * E2M1[_halves(blocks[:, 1:])]


BLOCKS: dict[str, BlockType] = {name: BlockType(name, elements, nbytes, decode) for name, elements, nbytes, decode in (
    ("Q4_0", 32, 18, _q4_0), ("Q4_1", 32, 20, _q4_1), ("Q5_0", 32, 22, _q5_0), ("Q5_1", 32, 24, _q5_1), ("Q8_0", 32, 34, _q8_0),
    ("Q8_1", 32, 40, None), ("Q2_K", 256, 84, _q2_k), ("Q3_K", 256, 110, _q3_k), ("Q4_K", 256, 144, _q4_k),
    ("Q5_K", 256, 176, _q5_k), ("Q6_K", 256, 210, _q6_k), ("Q8_K", 256, 292, None), ("IQ2_XXS", 256, 66, None),
    ("IQ2_XS", 256, 74, None), ("IQ3_XXS", 256, 98, None), ("IQ1_S", 256, 50, None), ("IQ4_NL", 32, 18, _iq4_nl),
    ("IQ3_S", 256, 110, None), ("IQ2_S", 256, 82, None), ("IQ4_XS", 256, 136, _iq4_xs), ("IQ1_M", 256, 56, None),
    ("TQ1_0", 256, 54, None), ("TQ2_0", 256, 66, _tq2_0), ("MXFP4", 32, 17, _mxfp4), ("NVFP4", 64, 36, None),
    ("Q1_0", 128, 18, None),
)}  # fmt: skip


def number_shape(shape: tuple[int, ...], blocks: str | None) -> tuple[int, ...]:
    """Return the shape of the numbers that stored elements stand for.

    Of quantised blocks that is the shape in the header of the file: the last axis counts elements,
    and not bytes. `blocks` is the type of the blocks, None for elements that are in none.

    >>> number_shape((4096, 2304), "Q4_K"), number_shape((4096, 4096), None)
    ((4096, 4096), (4096, 4096))
    """
    block_type = BLOCKS.get(blocks or "")
    counted = None if block_type is None else block_type.shape(shape)
    return shape if counted is None else counted
