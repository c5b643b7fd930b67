"""Decodes weights that are quantised in blocks, as GGUF files contain them.

A row of a weight is cut into blocks of 32 to 256 elements. A block is a few bytes: scales, and the
low bits of each element. No dtype can describe that, so a quantised tensor is a tensor of bytes
whose last axis counts the bytes of a row, and `Traits.blocks` names the block type:

    float32 [4096, 4096] in Q4_K    is    uint8 [4096, 2304], blocks "Q4_K"

All block types have a size. Those in which most models are published can be decoded to float32. The
operations are those of ggml in the same order, so the results have the same bits.

The docstrings of the decoders list the fields of a block in the order of its bytes. In these, `d`
is the scale and `m` the minimum of the block, both float16, and `q` are the bits of its elements.
In the "K" types a block of 256 elements has groups, each with a scale (and a minimum) of its own,
which are small integers in units of `d` (and `m`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from holdfast.core.value import Value

Bytes = npt.NDArray[np.uint8]
"""Blocks as rows of bytes, or the bytes of a field of each block."""

Floats = npt.NDArray[np.float32]

IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""The value of each 4-bit code of the IQ4 types. The steps grow with the distance from zero."""

DOUBLED_E2M1_VALUES = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32
)
"""The value of each code of float4_e2m1fn, times two. ggml has no negative zero."""


class BlockType(Value, frozen=True):
    """A way to quantise the elements of a row."""

    name: str
    elements: int
    """The number of elements in a block."""
    nbytes: int
    """The size of a block."""
    decode: Callable[[Bytes], Floats] | None
    """Decodes blocks, given as rows of bytes, to rows of numbers. None if that is not supported."""

    def decoded_shape(self, stored_shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the decoded numbers, or None if rows are not whole blocks."""
        if not stored_shape or stored_shape[-1] % self.nbytes:
            return None
        return (*stored_shape[:-1], stored_shape[-1] // self.nbytes * self.elements)


def _read_float16(blocks: Bytes, offset: int) -> Floats:
    """Return the float16 at an offset of every block, as a column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _unpack_fields(packed: Bytes, *, bits: int, run: int) -> Bytes:
    """Split bytes into fields of a few bits.

    The bytes come in runs. The elements of a run are first the lowest field of each of its bytes,
    then the next field of each byte, and so on.

    Args:
        packed: Bytes of each block.
        bits: The width of a field: 1, 2 or 4.
        run: The number of bytes in a run.

    Returns:
        The fields of each block, in the order of the elements.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    runs = packed.reshape(len(packed), -1, 1, run)
    fields = runs >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _unpack_32_nibbles(packed: Bytes) -> Bytes:
    """Split 16 bytes into 32 elements: the lower halves of all bytes, then the upper halves."""
    return _unpack_fields(packed, bits=4, run=16)


def _unpack_bits(packed: Bytes) -> Bytes:
    """Split bytes into bits, the lowest bit of the first byte first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")


def _decode_q4_0(blocks: Bytes) -> Floats:
    """d (2 bytes), q (16): d * (q - 8)."""
    q = _unpack_32_nibbles(blocks[:, 2:])
    return _read_float16(blocks, 0) * (q.astype(np.float32) - 8)


def _decode_q4_1(blocks: Bytes) -> Floats:
    """d (2 bytes), m (2), q (16): d * q + m."""
    q = _unpack_32_nibbles(blocks[:, 4:])
    return _read_float16(blocks, 0) * q + _read_float16(blocks, 2)


def _decode_q5_0(blocks: Bytes) -> Floats:
    """d (2 bytes), the fifth bits of q (4), its low bits (16): d * (q - 16)."""
    fifth_bits = _unpack_bits(blocks[:, 2:6])
    q = _unpack_32_nibbles(blocks[:, 6:]) | fifth_bits << 4
    return _read_float16(blocks, 0) * (q.astype(np.float32) - 16)


def _decode_q5_1(blocks: Bytes) -> Floats:
    """d (2 bytes), m (2), the fifth bits of q (4), its low bits (16): d * q + m."""
    fifth_bits = _unpack_bits(blocks[:, 4:8])
    q = _unpack_32_nibbles(blocks[:, 8:]) | fifth_bits << 4
    return _read_float16(blocks, 0) * q + _read_float16(blocks, 2)


def _decode_q8_0(blocks: Bytes) -> Floats:
    """d (2 bytes), q as signed bytes (32): d * q."""
    return _read_float16(blocks, 0) * blocks[:, 2:].view(np.int8)


def _scale_groups(
    scales: Floats, q: npt.NDArray[np.generic], minima: Floats | None = None
) -> Floats:
    """Return scale * q - minimum.

    Args:
        scales: A row for each block, with the scale of each group.
        q: A row for each block. All groups of a block have the same length.
        minima: The minimum of each group, as `scales`. They are not subtracted if there are none.
    """
    numbers = scales[:, :, None] * q.reshape(*scales.shape, -1).astype(np.float32)
    if minima is not None:
        numbers -= minima[:, :, None]
    return numbers.reshape(len(q), -1)


def _decode_q2_k(blocks: Bytes) -> Floats:
    """16 bytes with a scale (lower half) and a minimum (upper half), q (64 bytes), d (2), m (2)."""
    scales = _read_float16(blocks, 80) * (blocks[:, :16] & 15)
    minima = _read_float16(blocks, 82) * (blocks[:, :16] >> 4)
    q = _unpack_fields(blocks[:, 16:80], bits=2, run=32)
    return _scale_groups(scales, q, minima)


def _decode_q3_k(blocks: Bytes) -> Floats:
    """The inverted third bits of q (32 bytes), its low bits (64), 16 scales (12), d (2).

    A third bit that is not set subtracts 4. The scales have six bits and are stored plus 32: eight
    bytes with the low four bits of two scales each, four with the high two bits of four each.
    """
    third_bits = _unpack_fields(blocks[:, :32], bits=1, run=32).astype(np.int8)
    low_bits = _unpack_fields(blocks[:, 32:96], bits=2, run=32).astype(np.int8)
    q = low_bits - (np.int8(4) - 4 * third_bits)

    low_scale_bits = _unpack_fields(blocks[:, 96:104], bits=4, run=8)
    high_scale_bits = _unpack_fields(blocks[:, 104:108], bits=2, run=4)
    scales = (low_scale_bits | high_scale_bits << 4).astype(np.float32) - 32
    return _scale_groups(_read_float16(blocks, 108) * scales, q)


def _unpack_eight_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return the eight scales and the eight minima of six bits that are packed into 12 bytes.

    | bytes | low six bits | high two bits |
    | --- | --- | --- |
    | 0 to 3 | scales 0 to 3 | the high bits of scales 4 to 7 |
    | 4 to 7 | minima 0 to 3 | the high bits of minima 4 to 7 |

    Bytes 8 to 11 have the low four bits of scales 4 to 7 in their lower halves, and those of minima
    4 to 7 in their upper halves.
    """
    scale_bytes = packed[:, :4]
    minimum_bytes = packed[:, 4:8]
    low_bits = packed[:, 8:]
    # The high two bits of a byte become bits 4 and 5.
    last_scales = low_bits & 15 | scale_bytes >> 2 & 48
    last_minima = low_bits >> 4 | minimum_bytes >> 2 & 48
    scales = np.concatenate([scale_bytes & 63, last_scales], axis=1)
    minima = np.concatenate([minimum_bytes & 63, last_minima], axis=1)
    return scales, minima


def _decode_q4_k(blocks: Bytes) -> Floats:
    """d (2 bytes), m (2), eight scales and minima (12), q (128)."""
    scales, minima = _unpack_eight_scales(blocks[:, 4:16])
    q = _unpack_fields(blocks[:, 16:], bits=4, run=32)
    return _scale_groups(_read_float16(blocks, 0) * scales, q, _read_float16(blocks, 2) * minima)


def _decode_q5_k(blocks: Bytes) -> Floats:
    """d (2 bytes), m (2), eight scales and minima (12), fifth bits of q (32), low bits (128)."""
    scales, minima = _unpack_eight_scales(blocks[:, 4:16])
    fifth_bits = _unpack_fields(blocks[:, 16:48], bits=1, run=32)
    q = _unpack_fields(blocks[:, 48:], bits=4, run=32) | fifth_bits << 4
    return _scale_groups(_read_float16(blocks, 0) * scales, q, _read_float16(blocks, 2) * minima)


def _decode_q6_k(blocks: Bytes) -> Floats:
    """The low four bits of q (128 bytes), its high two bits (64), 16 signed scales (16), d (2).

    A number is scale * (q - 32).
    """
    low_bits = _unpack_fields(blocks[:, :128], bits=4, run=64)
    high_bits = _unpack_fields(blocks[:, 128:192], bits=2, run=32)
    q = (low_bits | high_bits << 4).astype(np.int8) - 32
    scales = _read_float16(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return _scale_groups(scales, q)


def _decode_tq2_0(blocks: Bytes) -> Floats:
    """q (64 bytes), d (2): d * (q - 1)."""
    q = _unpack_fields(blocks[:, :64], bits=2, run=32)
    return _read_float16(blocks, 64) * (q.astype(np.float32) - 1)


def _decode_iq4_nl(blocks: Bytes) -> Floats:
    """d (2 bytes), codes of `IQ4_VALUES` (16)."""
    return _read_float16(blocks, 0) * IQ4_VALUES[_unpack_32_nibbles(blocks[:, 2:])]


def _decode_iq4_xs(blocks: Bytes) -> Floats:
    """d (2 bytes), the high two bits of eight scales (2), their low four bits (4), codes (128)."""
    high_scale_bits = _unpack_fields(blocks[:, 2:4], bits=2, run=1)
    low_scale_bits = _unpack_fields(blocks[:, 4:8], bits=4, run=1)
    scales = (low_scale_bits | high_scale_bits << 4).astype(np.float32) - 32
    codes = _unpack_fields(blocks[:, 8:], bits=4, run=16)
    return _scale_groups(_read_float16(blocks, 0) * scales, IQ4_VALUES[codes])


def _decode_mxfp4(blocks: Bytes) -> Floats:
    """The biased exponent of the scale (1 byte), codes of float4_e2m1fn (16)."""
    # The bias is 127. Subtracting 128 halves the scale, because the values are doubled.
    half_scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return half_scale * DOUBLED_E2M1_VALUES[_unpack_32_nibbles(blocks[:, 1:])]


BLOCK_TYPES = {
    block_type.name: block_type
    for block_type in (
        BlockType("Q4_0", 32, 18, _decode_q4_0),
        BlockType("Q4_1", 32, 20, _decode_q4_1),
        BlockType("Q5_0", 32, 22, _decode_q5_0),
        BlockType("Q5_1", 32, 24, _decode_q5_1),
        BlockType("Q8_0", 32, 34, _decode_q8_0),
        BlockType("Q8_1", 32, 40, None),
        BlockType("Q2_K", 256, 84, _decode_q2_k),
        BlockType("Q3_K", 256, 110, _decode_q3_k),
        BlockType("Q4_K", 256, 144, _decode_q4_k),
        BlockType("Q5_K", 256, 176, _decode_q5_k),
        BlockType("Q6_K", 256, 210, _decode_q6_k),
        BlockType("Q8_K", 256, 292, None),
        BlockType("IQ2_XXS", 256, 66, None),
        BlockType("IQ2_XS", 256, 74, None),
        BlockType("IQ3_XXS", 256, 98, None),
        BlockType("IQ1_S", 256, 50, None),
        BlockType("IQ4_NL", 32, 18, _decode_iq4_nl),
        BlockType("IQ3_S", 256, 110, None),
        BlockType("IQ2_S", 256, 82, None),
        BlockType("IQ4_XS", 256, 136, _decode_iq4_xs),
        BlockType("IQ1_M", 256, 56, None),
        BlockType("TQ1_0", 256, 54, None),
        BlockType("TQ2_0", 256, 66, _decode_tq2_0),
        BlockType("MXFP4", 32, 17, _decode_mxfp4),
        BlockType("NVFP4", 64, 36, None),
        BlockType("Q1_0", 128, 18, None),
    )
}
"""The block types of ggml by their names."""


def number_shape(shape: tuple[int, ...], blocks: str | None) -> tuple[int, ...]:
    """Return the shape of the numbers that stored elements stand for.

    For quantised blocks that is the shape in the header of the file: its last axis counts numbers,
    not bytes.

    Args:
        shape: The shape of the tensor as it is stored.
        blocks: The name of its block type. None if its elements are not quantised in blocks.

    >>> number_shape((4096, 2304), "Q4_K"), number_shape((4096, 4096), None)
    ((4096, 4096), (4096, 4096))
    """
    block_type = BLOCK_TYPES.get(blocks or "")
    decoded_shape = None if block_type is None else block_type.decoded_shape(shape)
    return shape if decoded_shape is None else decoded_shape
