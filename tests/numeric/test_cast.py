"""float16 made wider, against numpy's own casts: every pattern of bits, with and without what is not finite."""

import numpy as np
import pytest

from holdfast.core.dtype import DTYPES
from holdfast.numeric.cast import cast

EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FLOAT32 = DTYPES.name("float32")


@pytest.mark.parametrize(
    "values",
    [
        EVERY,
        EVERY[np.isfinite(EVERY)],
        EVERY[:0],
        EVERY[:0x7C00],
        EVERY[0x8000:0xFC00],
        EVERY[0xFBFF:0xFC01],
    ],
)
def test_every_pattern_as_numpy_has_it(values):
    with np.errstate(invalid="ignore"):
        assert cast(values, FLOAT32).tobytes() == values.astype(np.float32).tobytes()


def test_where_the_least_floats_are_taken_for_zeros():
    """A program may tell the processor so, and numpy casts float16 in integers all the same."""
    torch = pytest.importorskip("torch")
    expected = EVERY[:0x7C00].astype(np.float32).tobytes()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        assert cast(EVERY[:0x7C00], FLOAT32).tobytes() == expected
    finally:
        torch.set_flush_denormal(False)
