"""Counts, moments and histograms against the whole array as float64, for every pattern of bits."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine import scan
from holdfast.engine.arrays import MemoryTensors
from holdfast.numeric import statistics as numbers
from holdfast.verbs.stats import measure, reading_nbytes
from tests.sampling import examples

NARROW = [
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
    np.int16,
    np.uint8,
]
WIDE = [np.float32, np.float64, np.int32, np.uint64, np.complex64]


def expected(array: np.ndarray, bins: int) -> dict[str, object]:
    """All at once, by definition."""
    with np.errstate(all="ignore"):
        wide = (
            np.abs(array).astype(np.float64)
            if array.dtype.kind == "c"
            else array.astype(np.float64)
        )
        finite = wide[np.isfinite(wide)]
        found: dict[str, object] = {
            "nans": int(np.isnan(wide).sum()), "infinities": int(np.isinf(wide).sum()), "zeros": int((finite == 0).sum()),
            "norm": float(np.sqrt(np.sum(finite * finite))) if finite.size or not wide.size else None,
        }  # fmt: skip
        if not finite.size:
            return {**found, "histogram": ()}
        low, high = finite.min(), finite.max()
        if low == high:
            counts = np.zeros(bins, int)
            counts[bins // 2] = finite.size
        else:
            places = (finite / 2 - low / 2) / (high / 2 - low / 2) * bins
            counts = np.bincount(np.minimum(places.astype(int), bins - 1), minlength=bins)
        found |= {"minimum": low, "maximum": high, "mean": finite.mean(), "std": finite.std()}
        return {**found, "histogram": tuple(counts.tolist())}


def check(array: np.ndarray, bins: int) -> None:
    seen: list[int] = []
    tensor = MemoryTensors().wrap_array(array)
    (row,) = measure([tensor], bins=bins, threads=2, progress=seen.append)
    close = ("norm", "mean", "std")
    for name, value in expected(array, bins).items():
        found = getattr(row, name)
        measured = name in close and value is not None
        assert found == (pytest.approx(value, rel=1e-9, nan_ok=True) if measured else value), name
    if row.minimum is not None:  # of nothing, no histogram is drawn
        assert sum(seen) == reading_nbytes([tensor], bins=bins)


@settings(deadline=None, max_examples=examples(60))
@given(
    st.sampled_from([*NARROW, *WIDE]),
    st.binary(max_size=800),
    st.integers(1, 9),
    st.sampled_from([8, 64, 1 << 18]),
)
def test_any_bits_as_by_definition(dtype, content, bins, block):
    width = np.dtype(dtype).itemsize
    array = np.frombuffer(content[: len(content) // width * width], dtype).copy()
    if array.dtype in (
        np.float64,
        np.uint64,
    ):  # their sums round, as those of the definition do: to no bits at all in the worst case
        array = (array.view(np.uint64) >> np.uint64(40)).astype(array.dtype)
    with pytest.MonkeyPatch.context() as patch:
        whole = scan.cut_elements
        patch.setattr(scan, "cut_elements", lambda count: whole(count, block))
        patch.setattr(numbers, "STEP_ELEMENTS", 24)
        patch.setattr(numbers, "SMALL_ELEMENTS", 32)
        patch.setattr("holdfast.verbs.stats.BLOCK_ELEMENTS", block)
        check(array, bins)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_pattern(dtype):
    width = np.dtype(dtype).itemsize
    array = (
        np.arange(1 << 17, dtype=f"u{width}" if width == 2 else np.uint32)
        .astype(f"u{width}")
        .view(dtype)
    )
    check(array, 32)
