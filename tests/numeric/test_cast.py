"""float16 made wider, against numpy's own casts: every pattern of bits, with and without what is not finite."""

import numpy as np
import pytest

from holdfast.numeric.cast import as_float32, as_float64

EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


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
        for made, wide in ((as_float32(values), np.float32), (as_float64(values), np.float64)):
            assert made.dtype == wide
            assert made.tobytes() == values.astype(wide).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, np.uint8])
def test_other_numbers_are_cast_by_numpy(dtype):
    values = np.array([0, 1, 100], dtype)
    assert as_float32(values).tolist() == as_float64(values).tolist() == [0.0, 1.0, 100.0]
    assert not np.shares_memory(as_float64(values), values)


def test_where_the_least_floats_are_taken_for_zeros():
    """A program may tell the processor so, and numpy casts float16 in integers all the same."""
    torch = pytest.importorskip("torch")
    expected = EVERY[:0x7C00].astype(np.float32).tobytes()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        assert as_float32(EVERY[:0x7C00]).tobytes() == expected
    finally:
        torch.set_flush_denormal(False)
