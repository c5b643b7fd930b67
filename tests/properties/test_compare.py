"""`compare_elements` against `compare_step`, for any bits of any two dtypes.

`compare_step` is a good oracle because it makes no assumption about the numbers.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.numeric import compare
from tests.sampling import examples

DTYPES = [
    np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu,
    np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.complex64,
]  # fmt: skip


@st.composite
def arrays(draw):
    """Two arrays of one length: of any bits, or of one dtype with some bits changed."""
    first, second = (np.dtype(draw(st.sampled_from(DTYPES))) for _ in range(2))
    count = draw(st.integers(0, 60))
    bits = draw(st.binary(min_size=count * first.itemsize, max_size=count * first.itemsize))
    a = np.frombuffer(bits, first).copy()
    if draw(st.booleans()):
        b = a.copy()
        for at in draw(st.lists(st.integers(0, max(a.nbytes - 1, 0)), max_size=3)) if count else []:
            b.view(np.uint8)[at] ^= draw(st.integers(0, 255))
        return a, b
    other = draw(st.binary(min_size=count * second.itemsize, max_size=count * second.itemsize))
    return a, np.frombuffer(other, second).copy()


@settings(deadline=None, max_examples=examples(150))
@given(arrays(), st.sampled_from([5, 16, 1 << 15]))
def test_compare_elements_agrees_with_compare_step(pair, step):
    a, b = pair
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "STEP_ELEMENTS", step)
        found = compare.compare_elements(a, b, compare_bits=a.dtype == b.dtype)
        expected = (
            compare.compare_step(a, b, compare_bits=a.dtype == b.dtype)
            if a.size
            else compare.Tally()
        )
    for name in ("changed", "total", "max_abs", "max_rel", "changed_nans", "nonfinite"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.max_abs == 0 or type(found.max_abs) is type(expected.max_abs)
    scale = (
        float(expected.sums.squares_a * expected.sums.squares_b) ** 0.5
        if max(expected.sums.squares_a, expected.sums.squares_b) < 1e150
        else None
    )
    assert float(
        found.sums.squares_a / expected.sums.squares_a
        if expected.sums.squares_a
        else found.sums.squares_a + 1
    ) == pytest.approx(1)
    assert float(
        found.sums.squares_b / expected.sums.squares_b
        if expected.sums.squares_b
        else found.sums.squares_b + 1
    ) == pytest.approx(1)
    if scale is not None:
        assert float(found.sums.dot) == pytest.approx(
            float(expected.sums.dot), rel=1e-9, abs=1e-12 * scale
        )
