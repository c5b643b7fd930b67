"""Distributions, compared with numpy functions on all elements at once.

The comparison is right because numpy sees the whole array as float64: no blocks, no merging, and no
counting of patterns.
"""

from __future__ import annotations

import doctest
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

import holdfast
from holdfast.extras.reports.measures import measure
from holdfast.numeric import statistics
from holdfast.numeric.statistics import QUANTILES, SquareSums


def test_the_examples_of_docstrings_are_right():
    assert doctest.testmod(statistics).failed == 0


def measure_array(array: np.ndarray, tmp_path, groups: int = 8):
    holdfast.save({"w": array}, tmp_path / "w.pt")
    with holdfast.open(tmp_path / "w.pt") as checkpoint:
        (distribution,) = measure([checkpoint["w"]], groups=groups)
    return distribution


def compute_group_norms(squares: np.ndarray, groups: int) -> np.ndarray:
    """Row i of n is in group i * groups // n."""
    row_groups = np.arange(len(squares)) * groups // len(squares)
    return np.sqrt(np.bincount(row_groups, squares, minlength=groups))


MAKE_ARRAY = {
    "float32": lambda rng, shape: rng.standard_normal(shape).astype(np.float32),
    "float64": lambda rng, shape: rng.standard_normal(shape) * 1e3,
    "float16": lambda rng, shape: rng.standard_normal(shape).astype(np.float16),
    "bfloat16": lambda rng, shape: rng.standard_normal(shape).astype(ml_dtypes.bfloat16),
    "float8_e4m3fn": lambda rng, shape: rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn),
    "int8": lambda rng, shape: rng.integers(-100, 100, shape).astype(np.int8),
    "int64": lambda rng, shape: rng.integers(-(10**6), 10**6, shape),
    "bool": lambda rng, shape: rng.integers(0, 2, shape).astype(np.bool_),
}


@pytest.mark.parametrize(
    "shape", [(6,), (40, 30), (3, 5, 7), (700, 500), (3, 200_000), (1, 1), (90_001,)], ids=str
)
@pytest.mark.parametrize("kind", MAKE_ARRAY)
def test_against_numpy(kind, shape, tmp_path):
    array = MAKE_ARRAY[kind](np.random.default_rng(7), shape)
    if kind.startswith("float") and array.size > 4:
        array.reshape(-1)[:2] = [np.nan, 0]
    distribution = measure_array(array, tmp_path)
    wide = array.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    assert distribution.count == wide.size
    assert distribution.moments.nans == np.isnan(wide).sum()
    assert distribution.moments.zeros == (finite == 0).sum()
    assert distribution.moments.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9)
    assert distribution.moments.deviations == pytest.approx(
        ((finite - finite.mean()) ** 2).sum(), rel=1e-9
    )
    if finite.var():
        assert distribution.kurtosis == pytest.approx(
            ((finite - finite.mean()) ** 4).mean() / finite.var() ** 2 - 3, rel=1e-6, abs=1e-6
        )
    assert distribution.negative == pytest.approx((finite < 0).mean())
    exponents = np.floor(np.log2(np.abs(finite[finite != 0]))).astype(int)
    assert sum(distribution.exponents) == exponents.size
    if exponents.size:
        assert distribution.first_exponent == exponents.min()
        assert list(distribution.exponents) == np.bincount(exponents - exponents.min()).tolist()
    expected = np.quantile(finite, QUANTILES, method="lower")
    if distribution.exact:
        assert list(distribution.quantiles) == expected.tolist()
    else:
        assert np.allclose(
            distribution.quantiles, expected, rtol=1 / 64, atol=1e-3 * np.abs(finite).max()
        )
        assert (distribution.quantiles[0], distribution.quantiles[-1]) == (
            finite.min(),
            finite.max(),
        )
    squares = np.where(np.isfinite(wide), wide, 0).reshape(-1, shape[-1]) ** 2
    rows, columns = squares.sum(axis=1), squares.sum(axis=0)
    if len(rows) > 1:
        assert np.allclose(distribution.rows, compute_group_norms(rows, min(8, len(rows))))
    if len(columns) > 1:
        cuts = -(-np.arange(min(8, len(columns))) * len(columns) // min(8, len(columns)))
        assert np.allclose(distribution.columns, np.sqrt(np.add.reduceat(columns, cuts)))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.data())
@settings(max_examples=examples(60))
def test_norms_do_not_depend_on_the_cuts(height, width, groups, data):
    squares = np.arange(height * width, dtype=np.float64)
    whole, cut = SquareSums((height, width), groups), SquareSums((height, width), groups)
    whole.add(0, squares)
    edges = sorted(
        {0, squares.size, *data.draw(st.lists(st.integers(0, squares.size), max_size=5))}
    )
    for start, stop in itertools.pairwise(edges):
        cut.add(start, squares[start:stop])
    assert np.allclose(whole.rows, cut.rows)
    assert np.allclose(whole.columns, cut.columns)
    assert math.isclose(whole.rows.sum(), squares.sum())
    assert math.isclose(whole.columns.sum(), squares.sum())


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_equal_or_nonfinite_numbers_have_no_kurtosis_and_no_exponents(value, tmp_path):
    for size in (10, 300_000):
        distribution = measure_array(np.full(size, value, np.float32), tmp_path)
        assert distribution.kurtosis is None
        assert distribution.moments.finite == (size if value == 0 else 0)
        assert distribution.exponents == ()
        assert len(distribution.quantiles) == (9 if value == 0 else 0)


def test_quantiles_and_exponents_cover_numbers_beyond_float32(tmp_path):
    distribution = measure_array(np.array([1e300, -1e300, 1.0] * 40_000), tmp_path)
    assert (distribution.quantiles[0], distribution.quantiles[-1]) == (-1e300, 1e300)
    assert sum(distribution.exponents) == 120_000


def test_a_tensor_without_elements_has_no_distribution(tmp_path):
    assert measure_array(np.zeros((0, 3), np.float32), tmp_path) is None
