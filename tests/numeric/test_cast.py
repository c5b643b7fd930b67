"""Casts from float16 to float32, compared with numpy's own casts of all bit patterns."""

import numpy as np
import pytest

from holdfast.core.dtype import DTYPES
from holdfast.numeric.cast import cast

ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
NONNEGATIVE_FINITE = ALL_PATTERNS[:0x7C00]
NEGATIVE_FINITE = ALL_PATTERNS[0x8000:0xFC00]
LARGEST_AND_INFINITY = ALL_PATTERNS[0xFBFF:0xFC01]
FLOAT32 = DTYPES.name("float32")


@pytest.mark.parametrize(
    "values",
    [
        ALL_PATTERNS,
        ALL_PATTERNS[np.isfinite(ALL_PATTERNS)],
        ALL_PATTERNS[:0],
        NONNEGATIVE_FINITE,
        NEGATIVE_FINITE,
        LARGEST_AND_INFINITY,
    ],
)
def test_float16_to_float32_has_the_bits_of_numpy(values):
    with np.errstate(invalid="ignore"):
        expected = values.astype(np.float32)
        assert cast(values, FLOAT32).tobytes() == expected.tobytes()


def test_float16_to_float32_keeps_subnormals_when_the_processor_flushes_them():
    torch = pytest.importorskip("torch")
    expected = NONNEGATIVE_FINITE.astype(np.float32).tobytes()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        assert cast(NONNEGATIVE_FINITE, FLOAT32).tobytes() == expected
    finally:
        torch.set_flush_denormal(False)
