"""Decodes weights that are quantised in blocks, as GGUF files contain them.

A row of a weight is cut into blocks of 32 to 256 elements. A block is a few bytes: scales, and the
low bits of each element. No dtype can describe that, so a quantised tensor is a tensor of bytes
whose last axis counts the bytes of a row, and `Traits.blocks` names the block type:

    float32 [4096, 4096] in Q4_K    is    uint8 [4096, 2304], blocks "Q4_K"

All block types have a size. Those in which most models are published can be decoded to float32. The
operations are those of ggml in the same order, so the results have the same bits.

Words of the decoders: a code is the integer of a few bits that a block has for an element, and its
number is `scale * code`, plus or minus a minimum. In the "K" types, a block of 256 elements has
groups. The scale and the minimum of a group are small integers, which count in units of a scale
and a minimum of the block. The last two are float16.
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
        if not stored_shape:
            return None
        *outer_lengths, row_nbytes = stored_shape
        if row_nbytes % self.nbytes:
            return None
        blocks_per_row = row_nbytes // self.nbytes
        return (*outer_lengths, blocks_per_row * self.elements)


def _read_float16(blocks: Bytes, offset: int) -> Floats:
    """Return the float16 at an offset of every block, as a column of float32."""
    field_bytes = np.ascontiguousarray(blocks[:, offset : offset + 2])
    return field_bytes.view("<f2").astype(np.float32)


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
    block_count = len(packed)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    field_mask = np.uint8((1 << bits) - 1)
    # The axes are block, run, position of the field in its byte, and byte in its run.
    runs = packed.reshape(block_count, -1, 1, run)
    fields = (runs >> shifts[:, None]) & field_mask
    return fields.reshape(block_count, -1)


def _unpack_32_nibbles(packed: Bytes) -> Bytes:
    """Split 16 bytes into 32 elements: the lower halves of all bytes, then the upper halves."""
    return _unpack_fields(packed, bits=4, run=16)


def _unpack_bits(packed: Bytes) -> Bytes:
    """Split bytes into bits, the lowest bit of the first byte first."""
    contiguous = np.ascontiguousarray(packed)
    return np.unpackbits(contiguous, axis=1, bitorder="little")


def _decode_q4_0(blocks: Bytes) -> Floats:
    """Decode Q4_0. A number is scale * (code - 8).

    Fields of a block, in the order of its bytes:
        2 bytes: scale
        16 bytes: 32 codes of 4 bits
    """
    scales = _read_float16(blocks, 0)
    codes = _unpack_32_nibbles(blocks[:, 2:])
    return scales * (codes.astype(np.float32) - 8)


def _decode_q4_1(blocks: Bytes) -> Floats:
    """Decode Q4_1. A number is scale * code + minimum.

    Fields of a block, in the order of its bytes:
        2 bytes: scale
        2 bytes: minimum
        16 bytes: 32 codes of 4 bits
    """
    scales = _read_float16(blocks, 0)
    minima = _read_float16(blocks, 2)
    codes = _unpack_32_nibbles(blocks[:, 4:])
    return scales * codes + minima


def _decode_q5_0(blocks: Bytes) -> Floats:
    """Decode Q5_0. A number is scale * (code - 16).

    Fields of a block, in the order of its bytes:
        2 bytes: scale
        4 bytes: the fifth bits of 32 codes
        16 bytes: their low four bits
    """
    scales = _read_float16(blocks, 0)
    fifth_bits = _unpack_bits(blocks[:, 2:6])
    low_bits = _unpack_32_nibbles(blocks[:, 6:])
    codes = low_bits | fifth_bits << 4
    return scales * (codes.astype(np.float32) - 16)


def _decode_q5_1(blocks: Bytes) -> Floats:
    """Decode Q5_1. A number is scale * code + minimum.

    Fields of a block, in the order of its bytes:
        2 bytes: scale
        2 bytes: minimum
        4 bytes: the fifth bits of 32 codes
        16 bytes: their low four bits
    """
    scales = _read_float16(blocks, 0)
    minima = _read_float16(blocks, 2)
    fifth_bits = _unpack_bits(blocks[:, 4:8])
    low_bits = _unpack_32_nibbles(blocks[:, 8:])
    codes = low_bits | fifth_bits << 4
    return scales * codes + minima


def _decode_q8_0(blocks: Bytes) -> Floats:
    """Decode Q8_0. A number is scale * code.

    Fields of a block, in the order of its bytes:
        2 bytes: scale
        32 bytes: 32 signed codes
    """
    scales = _read_float16(blocks, 0)
    codes = blocks[:, 2:].view(np.int8)
    return scales * codes


def _scale_groups(
    scales: Floats, codes: npt.NDArray[np.generic], minima: Floats | None = None
) -> Floats:
    """Return the numbers of blocks with groups: scale * code - minimum.

    Args:
        scales: A row for each block, with the scale of each group.
        codes: A row for each block. All groups of a block have the same length.
        minima: The minimum of each group, as `scales`. They are not subtracted if there are none.
    """
    block_count, group_count = scales.shape
    grouped_codes = codes.reshape(block_count, group_count, -1)
    numbers = scales[:, :, None] * grouped_codes.astype(np.float32)
    if minima is not None:
        numbers -= minima[:, :, None]
    return numbers.reshape(block_count, -1)


def _decode_q2_k(blocks: Bytes) -> Floats:
    """Decode Q2_K: 16 groups of 16 elements.

    Fields of a block, in the order of its bytes:
        16 bytes: scale (lower half) and minimum (upper half) of each group
        64 bytes: 256 codes of 2 bits
        2 bytes: scale of the block
        2 bytes: minimum of the block
    """
    group_bytes = blocks[:, :16]
    codes = _unpack_fields(blocks[:, 16:80], bits=2, run=32)
    scales = _read_float16(blocks, 80) * (group_bytes & 15)
    minima = _read_float16(blocks, 82) * (group_bytes >> 4)
    return _scale_groups(scales, codes, minima)


def _decode_q3_k(blocks: Bytes) -> Floats:
    """Decode Q3_K: 16 groups of 16 elements.

    Fields of a block, in the order of its bytes:
        32 bytes: the inverted third bits of 256 codes
        64 bytes: their low two bits
        8 bytes: the low four bits of the scales of 16 groups
        4 bytes: their high two bits
        2 bytes: scale of the block

    A third bit that is not set subtracts 4 from its code. The scale of a group is stored plus 32.
    """
    third_bits = _unpack_fields(blocks[:, :32], bits=1, run=32).astype(np.int8)
    low_bits = _unpack_fields(blocks[:, 32:96], bits=2, run=32).astype(np.int8)
    subtracted = np.int8(4) - 4 * third_bits
    codes = low_bits - subtracted

    low_scale_bits = _unpack_fields(blocks[:, 96:104], bits=4, run=8)
    high_scale_bits = _unpack_fields(blocks[:, 104:108], bits=2, run=4)
    stored_scales = low_scale_bits | high_scale_bits << 4
    group_scales = stored_scales.astype(np.float32) - 32
    block_scales = _read_float16(blocks, 108)
    return _scale_groups(block_scales * group_scales, codes)


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
    last_scales = (low_bits & 15) | (scale_bytes >> 2 & 48)
    last_minima = (low_bits >> 4) | (minimum_bytes >> 2 & 48)
    scales = np.concatenate([scale_bytes & 63, last_scales], axis=1)
    minima = np.concatenate([minimum_bytes & 63, last_minima], axis=1)
    return scales, minima


def _decode_q4_k(blocks: Bytes) -> Floats:
    """Decode Q4_K: 8 groups of 32 elements.

    Fields of a block, in the order of its bytes:
        2 bytes: scale of the block
        2 bytes: minimum of the block
        12 bytes: scales and minima of the groups
        128 bytes: 256 codes of 4 bits
    """
    group_scales, group_minima = _unpack_eight_scales(blocks[:, 4:16])
    scales = _read_float16(blocks, 0) * group_scales
    minima = _read_float16(blocks, 2) * group_minima
    codes = _unpack_fields(blocks[:, 16:], bits=4, run=32)
    return _scale_groups(scales, codes, minima)


def _decode_q5_k(blocks: Bytes) -> Floats:
    """Decode Q5_K: 8 groups of 32 elements.

    Fields of a block, in the order of its bytes:
        2 bytes: scale of the block
        2 bytes: minimum of the block
        12 bytes: scales and minima of the groups
        32 bytes: the fifth bits of 256 codes
        128 bytes: their low four bits
    """
    group_scales, group_minima = _unpack_eight_scales(blocks[:, 4:16])
    scales = _read_float16(blocks, 0) * group_scales
    minima = _read_float16(blocks, 2) * group_minima
    fifth_bits = _unpack_fields(blocks[:, 16:48], bits=1, run=32)
    low_bits = _unpack_fields(blocks[:, 48:], bits=4, run=32)
    codes = low_bits | fifth_bits << 4
    return _scale_groups(scales, codes, minima)


def _decode_q6_k(blocks: Bytes) -> Floats:
    """Decode Q6_K: 16 groups of 16 elements. A number is scale * (code - 32).

    Fields of a block, in the order of its bytes:
        128 bytes: the low four bits of 256 codes
        64 bytes: their high two bits
        16 bytes: the signed scales of the groups
        2 bytes: scale of the block
    """
    low_bits = _unpack_fields(blocks[:, :128], bits=4, run=64)
    high_bits = _unpack_fields(blocks[:, 128:192], bits=2, run=32)
    codes = low_bits | high_bits << 4
    group_scales = blocks[:, 192:208].view(np.int8)
    scales = _read_float16(blocks, 208) * group_scales
    return _scale_groups(scales, codes.astype(np.int8) - 32)


def _decode_tq2_0(blocks: Bytes) -> Floats:
    """Decode TQ2_0. A number is scale * (code - 1).

    Fields of a block, in the order of its bytes:
        64 bytes: 256 codes of 2 bits
        2 bytes: scale
    """
    codes = _unpack_fields(blocks[:, :64], bits=2, run=32)
    scales = _read_float16(blocks, 64)
    return scales * (codes.astype(np.float32) - 1)


def _decode_iq4_nl(blocks: Bytes) -> Floats:
    """Decode IQ4_NL. `IQ4_VALUES` has the values of the codes.

    Fields of a block, in the order of its bytes:
        2 bytes: scale
        16 bytes: 32 codes of 4 bits
    """
    scales = _read_float16(blocks, 0)
    codes = _unpack_32_nibbles(blocks[:, 2:])
    return scales * IQ4_VALUES[codes]


def _decode_iq4_xs(blocks: Bytes) -> Floats:
    """Decode IQ4_XS: 8 groups of 32 elements. `IQ4_VALUES` has the values of the codes.

    Fields of a block, in the order of its bytes:
        2 bytes: scale of the block
        2 bytes: the high two bits of the scales of 8 groups
        4 bytes: their low four bits
        128 bytes: 256 codes of 4 bits

    The scale of a group is stored plus 32.
    """
    high_scale_bits = _unpack_fields(blocks[:, 2:4], bits=2, run=1)
    low_scale_bits = _unpack_fields(blocks[:, 4:8], bits=4, run=1)
    stored_scales = low_scale_bits | high_scale_bits << 4
    group_scales = stored_scales.astype(np.float32) - 32
    scales = _read_float16(blocks, 0) * group_scales
    codes = _unpack_fields(blocks[:, 8:], bits=4, run=16)
    return _scale_groups(scales, IQ4_VALUES[codes])


def _decode_mxfp4(blocks: Bytes) -> Floats:
    """Decode MXFP4. The scale is a power of two.

    Fields of a block, in the order of its bytes:
        1 byte: the exponent of the scale, plus 127
        16 bytes: 32 codes of float4_e2m1fn
    """
    # Subtracting 128 instead of 127 halves the scale, because the values are doubled.
    exponents = blocks[:, :1].astype(np.int32) - 128
    half_scales = np.ldexp(np.float32(1), exponents)
    codes = _unpack_32_nibbles(blocks[:, 1:])
    return half_scales * DOUBLED_E2M1_VALUES[codes]


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
    if block_type is None:
        return shape
    return block_type.decoded_shape(shape) or shape
