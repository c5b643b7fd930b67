"""What a distribution is, against numpy over all elements at once."""

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
from holdfast.numeric import statistics as distribution
from holdfast.numeric.statistics import QUANTILES, Norms


def test_the_examples():
    assert doctest.testmod(distribution).failed == 0


def found_of(array: np.ndarray, tmp_path, groups: int = 8):
    holdfast.save({"w": array}, tmp_path / "w.pt")
    with holdfast.open(tmp_path / "w.pt") as checkpoint:
        (found,) = measure([checkpoint["w"]], groups=groups)
    return found


def grouped(squares: np.ndarray, groups: int) -> np.ndarray:
    """Row i of n is in group i * groups // n, as for rows; columns begin where their number times the width is reached."""
    own = np.arange(len(squares)) * groups // len(squares)
    return np.sqrt(np.bincount(own, squares, minlength=groups))


KINDS = {
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
@pytest.mark.parametrize("kind", KINDS)
def test_against_numpy(kind, shape, tmp_path):
    array = KINDS[kind](np.random.default_rng(7), shape)
    if kind.startswith("float") and array.size > 4:
        array.reshape(-1)[:2] = [np.nan, 0]
    found = found_of(array, tmp_path)
    wide = array.astype(np.float64).reshape(-1)
    some = wide[np.isfinite(wide)]
    assert found.count == wide.size
    assert found.moments.nans == np.isnan(wide).sum()
    assert found.moments.zeros == (some == 0).sum()
    assert found.moments.mean == pytest.approx(some.mean(), rel=1e-9, abs=1e-9)
    assert found.moments.deviations == pytest.approx(((some - some.mean()) ** 2).sum(), rel=1e-9)
    if some.var():
        assert found.kurtosis == pytest.approx(
            ((some - some.mean()) ** 4).mean() / some.var() ** 2 - 3, rel=1e-6, abs=1e-6
        )
    assert found.negative == pytest.approx((some < 0).mean())
    exponents = np.floor(np.log2(np.abs(some[some != 0]))).astype(int)
    assert sum(found.exponents) == exponents.size
    if exponents.size:
        assert found.first_exponent == exponents.min()
        assert list(found.exponents) == np.bincount(exponents - exponents.min()).tolist()
    wanted = np.quantile(some, QUANTILES, method="lower")
    if found.exact:
        assert list(found.quantiles) == wanted.tolist()
    else:
        assert np.allclose(found.quantiles, wanted, rtol=1 / 64, atol=1e-3 * np.abs(some).max())
        assert (found.quantiles[0], found.quantiles[-1]) == (some.min(), some.max())
    squares = np.where(np.isfinite(wide), wide, 0).reshape(-1, shape[-1]) ** 2
    rows, columns = squares.sum(axis=1), squares.sum(axis=0)
    if len(rows) > 1:
        assert np.allclose(found.rows, grouped(rows, min(8, len(rows))))
    if len(columns) > 1:
        cuts = -(-np.arange(min(8, len(columns))) * len(columns) // min(8, len(columns)))
        assert np.allclose(found.columns, np.sqrt(np.add.reduceat(columns, cuts)))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.data())
@settings(max_examples=examples(60))
def test_norms_do_not_depend_on_the_cuts(height, width, groups, data):
    squares = np.arange(height * width, dtype=np.float64)
    whole, cut = Norms((height, width), groups), Norms((height, width), groups)
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
def test_all_of_one_kind(value, tmp_path):
    for size in (10, 300_000):
        found = found_of(np.full(size, value, np.float32), tmp_path)
        assert found.kurtosis is None
        assert found.moments.finite == (size if value == 0 else 0)
        assert found.exponents == ()
        assert len(found.quantiles) == (9 if value == 0 else 0)


def test_numbers_beyond_float32(tmp_path):
    found = found_of(np.array([1e300, -1e300, 1.0] * 40_000), tmp_path)
    assert (found.quantiles[0], found.quantiles[-1]) == (-1e300, 1e300)
    assert sum(found.exponents) == 120_000


def test_nothing(tmp_path):
    assert found_of(np.zeros((0, 3), np.float32), tmp_path) is None
