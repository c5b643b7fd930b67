"""`stats` and `sparsity`: against plain numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import holdfast
from holdfast.engine import scan
from holdfast.numeric import statistics as module
from holdfast.numeric.statistics import Moments
from holdfast.verbs import sparsity as zeros_module
from holdfast.verbs.sparsity import sparsity
from holdfast.verbs.stats import stats


@pytest.fixture(params=["whole", "blocks"])
def small_blocks(request, monkeypatch):
    if request.param == "blocks":
        whole = scan.cut_elements
        monkeypatch.setattr(scan, "cut_elements", lambda count: whole(count, 104))
        monkeypatch.setattr(module, "STEP_ELEMENTS", 40)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "dtype",
    [
        np.float16,
        ml_dtypes.bfloat16,
        np.float32,
        np.float64,
        ml_dtypes.float8_e4m3fn,
        np.int8,
        np.int64,
        np.bool_,
        np.complex64,
    ],
)
def test_the_same_as_numpy(tmp_path, dtype):
    rng = np.random.default_rng(0)
    array = (rng.normal(size=(37, 29)) * 5).astype(dtype)
    holdfast.save({"w": array, "empty": array[:0].copy()}, tmp_path / "a.pt")
    empty, row = sorted(stats(tmp_path / "a.pt", bins=16), key=lambda r: r.size)
    wide = np.abs(array).astype(np.float64) if array.dtype.kind == "c" else array.astype(np.float64)
    assert (row.minimum, row.maximum, row.zeros) == (wide.min(), wide.max(), int((wide == 0).sum()))
    assert row.mean == pytest.approx(wide.mean(), abs=1e-12)
    assert row.std == pytest.approx(wide.std())
    assert row.norm == pytest.approx(np.linalg.norm(wide))
    assert sum(row.histogram) == wide.size
    exact = np.histogram(wide, bins=16)[0]
    assert (
        np.abs(np.array(row.histogram) - exact).sum() <= 4
    )  # a value on an edge may fall to either side of it
    assert (empty.mean, empty.norm, empty.histogram) == (None, 0.0, ())


@pytest.mark.usefixtures("small_blocks")
def test_what_is_not_finite_is_counted_and_left_out(tmp_path):
    array = np.arange(300, dtype=np.float32)
    array[[0, 150, 299]] = [np.nan, np.inf, -np.inf]
    holdfast.save({"w": array, "v": np.full(3, np.nan, np.float32)}, tmp_path / "a.safetensors")
    nothing, row = sorted(stats(tmp_path / "a.safetensors"), key=lambda r: r.size)
    left = array[np.isfinite(array)].astype(np.float64)
    assert (row.nans, row.infinities, row.minimum, row.maximum) == (1, 2, 1, 298)
    assert row.std == pytest.approx(left.std())
    assert (nothing.nans, nothing.minimum, nothing.std, nothing.histogram) == (3, None, None, ())


def test_a_large_mean_does_not_drown_the_deviations():
    values = 1e9 + np.random.default_rng(0).normal(size=10_000)
    parts = sum(
        (Moments.from_values(values[i : i + 999]) for i in range(0, 10_000, 999)), Moments()
    )
    assert (parts.deviations / parts.finite) ** 0.5 == pytest.approx(values.std(), rel=1e-6)


def test_extreme_numbers(tmp_path):
    array = np.array([-1.7e308, 1.7e308, 5.0, 0.0])
    holdfast.save({"w": array, "c": np.full(5, 2.0)}, tmp_path / "a.safetensors")
    constant, row = sorted(stats(tmp_path / "a.safetensors", bins=4), key=lambda r: -r.size)
    assert row.histogram == (1, 0, 2, 1)
    assert constant.histogram == (0, 0, 5, 0)
    assert (constant.mean, constant.std) == (2.0, 0.0)


def test_only_what_matches(tmp_path):
    holdfast.save(
        {"a.w": np.ones(2, np.float32), "b.w": np.ones(2, np.float32)}, tmp_path / "a.safetensors"
    )
    assert [row.name for row in stats(tmp_path / "a.safetensors", "b.*", bins=0)] == ["b.w"]
    with pytest.raises(ValueError, match="bins= takes a number from 0 on, not -1"):
        stats(tmp_path / "a.safetensors", bins=-1)


# Sparsity.


@pytest.fixture(params=["whole", "tiles"])
def small_tiles(request, monkeypatch):
    if request.param == "tiles":
        monkeypatch.setattr(zeros_module, "TILE_COLUMNS", 64)


def look(tmp_path, **arrays: np.ndarray):
    holdfast.save(arrays, tmp_path / "a.safetensors")
    with holdfast.open(tmp_path / "a.safetensors") as source:
        return {row.name: row for row in sparsity(source)}


@pytest.mark.usefixtures("small_tiles")
def test_patterns_blocks_and_dead_rows_are_found(tmp_path):
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(256, 192)).astype(np.float32) + 10
    holdfast.save({name: dense + i for i, name in enumerate("abcdef")}, tmp_path / "d.safetensors")
    rules = ["a: 2:4", "b: 1:4", "c: 4:8", "d: block 16x16 0.5", "e: 0.9", "f: keep"]
    holdfast.prune(tmp_path / "d.safetensors", tmp_path / "p.safetensors", rules)
    with holdfast.open(tmp_path / "p.safetensors") as source:
        found = {row.name: row for row in sparsity(source)}
    patterns = {"a": (2, 4), "b": (1, 4), "c": (4, 8), **dict.fromkeys("def")}
    assert {name: row.pattern for name, row in found.items()} == patterns
    assert {name: row.block for name, row in found.items()} == {
        **dict.fromkeys("abcef"),
        "d": (16, 16),
    }
    assert [found[name].zeros for name in "abcdef"] == [
        dense.size // 2,
        dense.size * 3 // 4,
        dense.size // 2,
        24576,
        44237,
        0,
    ]
    dead = dense.copy()
    dead[3:5] = 0
    dead[:, 7] = -0.0
    row = look(
        tmp_path,
        w=dead,
        v=np.zeros(5, np.float32),
        s=np.zeros((), np.int64),
        n=np.zeros((0, 4), np.float32),
    )
    assert (row["w"].dead_rows, row["w"].dead_columns, row["w"].zeros) == (2, 1, 2 * 192 + 254)
    assert (row["v"].zeros, row["v"].block, row["v"].dead_rows, row["s"].zeros, row["n"].zeros) == (
        5,
        None,
        0,
        1,
        0,
    )


@pytest.mark.usefixtures("small_tiles")
def test_blocks_at_the_edge_count_as_what_they_are(tmp_path):
    array = np.ones((100, 90), np.float32)
    array[64:, 64:] = 0
    array[:32, :32] = 0
    assert look(tmp_path, w=array)["w"].block == (32, 32)


@pytest.mark.parametrize("shape", [(0, 2**40), (2**40, 0), (2**20, 0, 2**20)])
def test_sparsity_of_a_tensor_without_elements_ignores_its_other_lengths(tmp_path, shape):
    np.save(tmp_path / "empty.npy", np.empty(shape, np.float32))
    (row,) = sparsity(tmp_path / "empty.npy")
    assert (row.zeros, row.dead_rows, row.dead_columns) == (0, 0, 0)
