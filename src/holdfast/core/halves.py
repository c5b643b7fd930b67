"""float16 as wider floats, in integers: numpy casts them one by one, which takes five times as long.

The ten bits of fraction and five of exponent, shifted by 13, are those of a float32 that is smaller by 2^112. So every finite
number comes through exactly. Where one is not finite numpy is asked, for what becomes of the bits of a NaN is up to it; and where
the processor was told to take the smallest floats for zeros (`torch.set_flush_denormal`), which the way through them cannot bear.
"""

from __future__ import annotations

import numpy as np

MISSING_EXPONENT = np.float32(2.0**112)
"""Between the least normal float16 and the least normal float32."""

LEAST = np.array([1 << 13], np.int32).view(np.float32)
"""The least float16 on its way: no normal float32."""

PLACES = np.int32(0x8FFF_E000 - (1 << 32))
"""Of a float16 that was widened with its sign and shifted: the sign, five bits of exponent, ten of fraction."""


def as_float32(values: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """A 1-D array of real numbers as float32, in memory of its own or in `out`.

    >>> as_float32(np.array([1.5, -0.0, 6e-8], np.float16)).tolist()
    [1.5, -0.0, 5.960464477539063e-08]
    """
    out = np.empty(values.shape, np.float32) if out is None else out
    if values.dtype == np.float16 and _may_shift(values):
        _shift(values, out)
    else:
        np.copyto(out, values, casting="unsafe")
    return out


def as_float64(values: np.ndarray) -> np.ndarray:
    """A 1-D array of real numbers as float64, in memory of its own."""
    if values.dtype == np.float16 and _may_shift(values):
        values = _shift(values, np.empty(values.shape, np.float32))
    return values.astype(np.float64)


def _shift(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Finite float16 as float32."""
    bits = out.view(np.int32)
    np.copyto(bits, values.view(np.int16))
    np.left_shift(bits, np.int32(13), out=bits)
    np.bitwise_and(bits, PLACES, out=bits)
    np.multiply(out, MISSING_EXPONENT, out=out)
    return out


def _may_shift(values: np.ndarray) -> bool:
    """Of float16: all are finite, and the least survive. What is not finite is the largest of its sign, as integers."""
    bits = values.view(np.uint16)
    return bool(LEAST[0] * MISSING_EXPONENT and bits.max(initial=0) < 0xFC00 and bits.view(np.int16).max(initial=0) < 0x7C00)
