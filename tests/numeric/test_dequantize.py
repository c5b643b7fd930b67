"""Every block type, compared with an oracle that decodes one element at a time.

The oracle is right because it indexes bytes as the loops of ggml's C code do. It shares no code
with the decoders.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from holdfast.numeric.dequantize import BLOCK_TYPES

F = np.float32
CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def half(b: bytes, at: int) -> F:
    return F(np.float16(struct.unpack_from("<e", b, at)[0]))


def nibble(b: bytes, at: int, i: int) -> int:
    """Element i of 32 in 16 bytes."""
    return b[at + i % 16] >> 4 * (i // 16) & 15


def bit(b: bytes, at: int, i: int) -> int:
    return b[at + i // 8] >> i % 8 & 1


def six_bits(b: bytes, at: int, j: int) -> tuple[int, int]:
    """Scale and minimum j of eight."""
    if j < 4:
        return b[at + j] & 63, b[at + j + 4] & 63
    return b[at + j + 4] & 15 | b[at + j - 4] >> 6 << 4, b[at + j + 4] >> 4 | b[at + j] >> 6 << 4


def q2_k(b: bytes, i: int) -> F:
    scale = b[i // 16]
    q = b[16 + i // 128 * 32 + i % 32] >> 2 * (i // 32 % 4) & 3
    return half(b, 80) * F(scale & 15) * F(q) - half(b, 82) * F(scale >> 4)


def q3_k(b: bytes, i: int) -> F:
    j = i // 16
    low = b[96 + j % 8] >> 4 * (j // 8) & 15
    scale = low | (b[104 + j % 4] >> 2 * (j // 4) & 3) << 4
    q = b[32 + i // 128 * 32 + i % 32] >> 2 * (i // 32 % 4) & 3
    third = b[i % 32] >> i // 32 & 1
    return half(b, 108) * F(scale - 32) * F(q - (0 if third else 4))


def q4_k(b: bytes, i: int) -> F:
    scale, minimum = six_bits(b, 4, i // 32)
    q = b[16 + i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15
    return half(b, 0) * F(scale) * F(q) - half(b, 2) * F(minimum)


def q5_k(b: bytes, i: int) -> F:
    scale, minimum = six_bits(b, 4, i // 32)
    q = (
        b[48 + i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15
        | (b[16 + i % 32] >> i // 32 & 1) << 4
    )
    return half(b, 0) * F(scale) * F(q) - half(b, 2) * F(minimum)


def q6_k(b: bytes, i: int) -> F:
    part, rest = i // 128, i % 128
    low = b[part * 64 + rest % 64] >> 4 * (rest // 64) & 15
    high = b[128 + part * 32 + rest % 32] >> 2 * (rest // 32) & 3
    scale = struct.unpack_from("b", b, 192 + i // 16)[0]
    return half(b, 208) * F(scale) * F((low | high << 4) - 32)


def iq4_xs(b: bytes, i: int) -> F:
    j = i // 32
    low = b[4 + j // 2] >> 4 * (j % 2) & 15
    high = struct.unpack_from("<H", b, 2)[0] >> 2 * j & 3
    return half(b, 0) * F((low | high << 4) - 32) * F(CURVE[nibble(b, 8 + 16 * j, i % 32)])


ORACLES: dict[str, Callable[[bytes, int], F]] = {
    "Q4_0": lambda b, i: half(b, 0) * F(nibble(b, 2, i) - 8),
    "Q4_1": lambda b, i: half(b, 0) * F(nibble(b, 4, i)) + half(b, 2),
    "Q5_0": lambda b, i: half(b, 0) * F((nibble(b, 6, i) | bit(b, 2, i) << 4) - 16),
    "Q5_1": lambda b, i: half(b, 0) * F(nibble(b, 8, i) | bit(b, 4, i) << 4) + half(b, 2),
    "Q8_0": lambda b, i: half(b, 0) * F(struct.unpack_from("b", b, 2 + i)[0]),
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
    "IQ4_NL": lambda b, i: half(b, 0) * F(CURVE[nibble(b, 2, i)]),
    "IQ4_XS": iq4_xs,
    "TQ2_0": lambda b, i: half(b, 64) * F((b[i // 128 * 32 + i % 32] >> 2 * (i // 32 % 4) & 3) - 1),
    "MXFP4": lambda b, i: F(2.0 ** (b[0] - 128)) * F(E2M1[nibble(b, 1, i)]),
}  # fmt: skip


def test_every_decodable_type_has_an_oracle():
    assert {name for name, row in BLOCK_TYPES.items() if row.decode is not None} == set(ORACLES)


@pytest.mark.parametrize("name", ORACLES)
def test_decode_has_the_bits_of_the_oracle(name):
    block_type, oracle = BLOCK_TYPES[name], ORACLES[name]
    raw = np.random.default_rng(7).integers(0, 256, (40, block_type.nbytes), dtype=np.uint8)
    assert block_type.decode is not None
    with np.errstate(all="ignore"):
        numbers = block_type.decode(raw)
        expected = np.array(
            [[oracle(block.tobytes(), i) for i in range(block_type.elements)] for block in raw],
            np.float32,
        )
    assert (numbers.dtype, numbers.shape) == (np.float32, (40, block_type.elements))
    unequal = (numbers.view(np.uint32) != expected.view(np.uint32)) & ~(
        np.isnan(numbers) & np.isnan(expected)
    )
    assert np.argwhere(unequal).tolist() == []


def test_decoded_shape_is_none_unless_rows_are_whole_blocks():
    assert BLOCK_TYPES["Q4_K"].decoded_shape((3, 288)) == (3, 512)
    assert BLOCK_TYPES["Q4_K"].decoded_shape((3, 100)) is None
    assert BLOCK_TYPES["Q4_0"].decoded_shape(()) is None
