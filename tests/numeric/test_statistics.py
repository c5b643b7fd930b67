"""Distributions, compared with numpy functions on all elements at once.

The comparison is right because numpy sees the whole array as float64: no blocks, no merging, and no
counting of patterns.
"""

from __future__ import annotations

import doctest
import itertools
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

import holdfast
from holdfast.extras.reports.measures import measure
from holdfast.numeric import statistics
from holdfast.numeric.statistics import QUANTILES, Distribution, Moments, SquareSums


def test_the_examples_of_docstrings_are_right():
    assert doctest.testmod(statistics).failed == 0


def measure_array(array: np.ndarray, folder: Path, groups: int = 8) -> Distribution | None:
    """Save an array, and return the distribution of its elements."""
    holdfast.save({"w": array}, folder / "w.pt")
    with holdfast.open(folder / "w.pt") as checkpoint:
        (distribution,) = measure([checkpoint["w"]], groups=groups)
    return distribution


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

SHAPES = [(6,), (40, 30), (3, 5, 7), (700, 500), (3, 200_000), (1, 1), (90_001,)]


class Sample:
    """An array, and the distribution of its elements."""

    def __init__(self, array: np.ndarray, folder: Path) -> None:
        self.array = array
        self.numbers = array.astype(np.float64).reshape(-1)
        self.finite_numbers = self.numbers[np.isfinite(self.numbers)]
        self.distribution = measure_array(array, folder)


@pytest.fixture(scope="module", params=itertools.product(MAKE_ARRAY, SHAPES), ids=str)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """An array of each dtype and shape. Floats have a NaN and a zero."""
    dtype, shape = request.param
    array = MAKE_ARRAY[dtype](np.random.default_rng(7), shape)
    if dtype.startswith("float") and array.size > 4:
        array.reshape(-1)[:2] = [np.nan, 0]
    return Sample(array, tmp_path_factory.mktemp("sample"))


def test_moments_are_those_of_numpy(sample):
    moments = sample.distribution.moments
    finite_numbers = sample.finite_numbers
    mean = finite_numbers.mean()
    assert sample.distribution.count == sample.numbers.size
    assert moments.nans == np.isnan(sample.numbers).sum()
    assert moments.zeros == (finite_numbers == 0).sum()
    assert moments.mean == pytest.approx(mean, rel=1e-9, abs=1e-9)
    assert moments.deviations == pytest.approx(((finite_numbers - mean) ** 2).sum(), rel=1e-9)
    assert sample.distribution.negative == pytest.approx((finite_numbers < 0).mean())


def test_kurtosis_is_that_of_numpy(sample):
    finite_numbers = sample.finite_numbers
    variance = finite_numbers.var()
    if not variance:
        pytest.skip("equal numbers have no kurtosis")
    fourth_moment = ((finite_numbers - finite_numbers.mean()) ** 4).mean()
    expected = fourth_moment / variance**2 - 3
    assert sample.distribution.kurtosis == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_exponents_are_those_of_numpy(sample):
    distribution = sample.distribution
    nonzero_numbers = sample.finite_numbers[sample.finite_numbers != 0]
    exponents = np.floor(np.log2(np.abs(nonzero_numbers))).astype(int)
    assert sum(distribution.exponents) == exponents.size
    if exponents.size:
        assert distribution.first_exponent == exponents.min()
        expected_counts = np.bincount(exponents - exponents.min())
        assert list(distribution.exponents) == expected_counts.tolist()


def test_quantiles_are_those_of_numpy(sample):
    distribution = sample.distribution
    finite_numbers = sample.finite_numbers
    expected = np.quantile(finite_numbers, QUANTILES, method="lower")
    if distribution.exact:
        assert list(distribution.quantiles) == expected.tolist()
        return
    tolerance = 1e-3 * np.abs(finite_numbers).max()
    assert np.allclose(distribution.quantiles, expected, rtol=1 / 64, atol=tolerance)
    assert distribution.quantiles[0] == finite_numbers.min()
    assert distribution.quantiles[-1] == finite_numbers.max()


def find_group_starts(count: int, group_count: int) -> np.ndarray:
    """Return the first index of each group. Index i of n is in group i * group_count // n."""
    groups = np.arange(count) * group_count // count
    return np.searchsorted(groups, np.arange(group_count))


def test_norms_are_those_of_numpy(sample):
    finite_or_zero = np.where(np.isfinite(sample.numbers), sample.numbers, 0)
    squares = finite_or_zero.reshape(-1, sample.array.shape[-1]) ** 2
    row_sums = squares.sum(axis=1)
    column_sums = squares.sum(axis=0)
    norms = (sample.distribution.rows, sample.distribution.columns)
    for sums, group_norms in zip((row_sums, column_sums), norms, strict=True):
        if len(sums) > 1:
            starts = find_group_starts(len(sums), min(8, len(sums)))
            assert np.allclose(group_norms, np.sqrt(np.add.reduceat(sums, starts)))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.data())
@settings(max_examples=examples(60))
def test_norms_do_not_depend_on_where_blocks_are_cut(height, width, groups, data):
    squares = np.arange(height * width, dtype=np.float64)
    cuts = data.draw(st.lists(st.integers(0, squares.size), max_size=5))
    whole_sums = SquareSums((height, width), groups)
    whole_sums.add(0, squares)
    block_sums = SquareSums((height, width), groups)
    for start, stop in itertools.pairwise(sorted({0, squares.size, *cuts})):
        block_sums.add(start, squares[start:stop])

    assert np.allclose(whole_sums.rows, block_sums.rows)
    assert np.allclose(whole_sums.columns, block_sums.columns)
    assert math.isclose(whole_sums.rows.sum(), squares.sum())
    assert math.isclose(whole_sums.columns.sum(), squares.sum())


@pytest.mark.parametrize("size", [10, 300_000])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_have_no_quantiles(value, size, tmp_path):
    distribution = measure_array(np.full(size, value, np.float32), tmp_path)
    assert distribution.moments.finite == 0
    assert distribution.kurtosis is None
    assert distribution.exponents == ()
    assert distribution.quantiles == ()


@pytest.mark.parametrize("size", [10, 300_000])
def test_zeros_have_quantiles_and_neither_kurtosis_nor_exponents(size, tmp_path):
    distribution = measure_array(np.zeros(size, np.float32), tmp_path)
    assert distribution.moments.finite == size
    assert distribution.kurtosis is None
    assert distribution.exponents == ()
    assert len(distribution.quantiles) == len(QUANTILES)


def test_quantiles_and_exponents_cover_numbers_beyond_float32(tmp_path):
    distribution = measure_array(np.array([1e300, -1e300, 1.0] * 40_000), tmp_path)
    assert distribution.quantiles[0] == -1e300
    assert distribution.quantiles[-1] == 1e300
    assert sum(distribution.exponents) == 120_000


def test_a_tensor_without_elements_has_no_distribution(tmp_path):
    assert measure_array(np.zeros((0, 3), np.float32), tmp_path) is None


def test_the_range_of_numbers_beyond_float32_begins_where_float32_ends(tmp_path):
    array = np.array([1e39, 1e40] * 40_000 + [-1e39, 1e300])
    distribution = measure_array(array, tmp_path)
    assert distribution.first_exponent == 128
    assert distribution.exponents == (80_002,)
    assert distribution.quantiles == tuple(sorted(distribution.quantiles))
    assert distribution.quantiles[1] < distribution.quantiles[-1]


def test_negative_zeros_are_not_negative_numbers(tmp_path):
    array = np.array([-1.0, -0.0, -0.0, 1.0] * 40_000, np.float32)
    assert measure_array(array, tmp_path).negative == 0.25


def test_the_absolute_value_of_a_complex64_may_exceed_float32():
    moments = Moments.from_values(np.array([3e38 + 3e38j], np.complex64))
    assert moments.infinities == 0
    assert moments.high == pytest.approx(math.sqrt(2) * 3e38)
