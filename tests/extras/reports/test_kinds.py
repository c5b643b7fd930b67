"""Statistics, differences and runs on a page."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.extras.reports.measures import sample_ranges
from tests.extras.reports.pages import data_of, names_of
from tests.extras.reports.test_report import FILES


def column(document, key):
    return next(measure["values"] for measure in document["measures"] if measure["key"] == key)


def row(document, name):
    return names_of(document).index(name)


@pytest.fixture
def model(tmp_path) -> Path:
    rng = np.random.default_rng(3)
    sick = rng.standard_normal((4, 4)).astype(np.float32)
    sick[1, 2] = np.nan
    state = {
        "layers.0.w": rng.standard_normal((6, 4)).astype(np.float32),
        "layers.1.w": sick,
        "layers.2.w": np.zeros((2, 8), np.float16),
        "half": (rng.standard_normal((300, 300)) * 3).astype(ml_dtypes.bfloat16),
        "scalar": np.array(5.0),
        "none": np.zeros((0, 4), np.float32),
    }
    holdfast.save(state, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def test_the_measures_are_those_of_stats(model):
    document = holdfast.report(model, stats=True).document
    assert document["stats"]
    assert document["sampled"] is None
    rows = {found.name: found for found in holdfast.stats(model)}
    for at, name in enumerate(names_of(document)):
        found = rows[name]
        values = {
            key: column(document, key)[at]
            for key in ("rms", "absmax", "zeros", "nonfinite", "mean", "std")
        }
        if not found.size:
            assert set(values.values()) == {None}
            continue
        finite = found.size - found.nans - found.infinities
        assert values["rms"] == pytest.approx(found.norm / math.sqrt(finite), rel=1e-3)
        assert values["absmax"] == pytest.approx(
            max(abs(found.minimum), abs(found.maximum)), rel=1e-3
        )
        assert values["zeros"] == pytest.approx(found.zeros / found.size, rel=1e-3)
        assert values["nonfinite"] == found.nans + found.infinities
        assert values["mean"] == pytest.approx(found.mean, rel=1e-3, abs=1e-12)
        assert values["std"] == pytest.approx(found.std, rel=1e-3, abs=1e-12)


def test_the_details(model):
    document = holdfast.report(model, stats=True).document
    details, at = document["details"], row(document, "half")
    assert {len(values) for values in details.values() if values is not None} == {
        document["tensors"]["count"]
    }
    low, bars = details["exponents"][at]
    assert max(bars) == 255
    assert min(bars) >= 0
    assert low < 0 < low + len(bars)
    assert details["negative"][at] == pytest.approx(0.5, abs=0.02)
    assert details["quantiles"][at] == sorted(details["quantiles"][at])
    assert len(details["rows"][at]) == len(details["columns"][at]) == 64
    assert details["rows"][row(document, "scalar")] is None
    assert details["exponents"][row(document, "none")] is None
    with holdfast.open(model) as checkpoint:
        whole = np.linalg.norm(checkpoint["half"].numpy().astype(np.float64))
    assert math.sqrt(sum(value**2 for value in details["rows"][at])) == pytest.approx(
        whole, rel=1e-2
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_numbers_of_every_format(path):
    document = holdfast.report(path, stats=True).document
    for measure in document["measures"]:
        assert len(measure["values"]) == document["tensors"]["count"]


def test_a_sample_says_so(tmp_path):
    rng = np.random.default_rng(0)
    holdfast.save(
        {"w": rng.standard_normal((1000, 1000)).astype(np.float32), "b": np.ones(4)},
        tmp_path / "m.safetensors",
    )
    read = []
    made = holdfast.report(tmp_path / "m.safetensors", sample="5%", progress=read.append)
    assert sum(read) < 0.1 * 4_000_000
    document = made.document
    assert document["stats"]
    assert document["sampled"]["share"] == 0.05
    assert "5%" in document["sampled"]["text"]
    assert column(document, "rms")[row(document, "w")] == pytest.approx(1, rel=0.02)
    assert document["details"]["rows"][row(document, "w")] is None
    whole = holdfast.report(tmp_path / "m.safetensors", sample=1.0).document
    assert whole["details"]["rows"][row(whole, "w")] is not None


@pytest.mark.parametrize("size", [0, 1, 16_384, 16_385, 100_000, 1_000_003])
@pytest.mark.parametrize("share", [None, 0.001, 0.3, 0.99, 1.0])
def test_the_blocks_of_a_sample(size, share):
    ranges = sample_ranges(size, share)
    covered = sum(stop - start for start, stop in ranges)
    assert all(0 <= start < stop <= size for start, stop in ranges)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert covered >= (size if share is None else share * size)
    assert not ranges or ranges[-1][1] == size


@pytest.mark.parametrize("sample", ["0%", "101%", 0, 2, -1, "x", float("nan")])
def test_shares_that_are_none(model, sample):
    with pytest.raises(holdfast.errors.BadArgument):
        holdfast.report(model, sample=sample)


@pytest.fixture
def two(tmp_path) -> tuple[Path, Path]:
    rng = np.random.default_rng(5)
    a = {
        name: rng.standard_normal((8, 8)).astype(np.float32)
        for name in ("same", "tuned", "gone", "old.name", "shape")
    }
    b = {
        **{name: a[name].copy() for name in ("same", "tuned")},
        "new.name": a["old.name"],
        "come": np.ones(3),
        "shape": np.ones(5),
    }
    b["tuned"][0] += np.float32(0.01)
    holdfast.save(a, tmp_path / "a.safetensors")
    holdfast.save(b, tmp_path / "b.pt")
    return tmp_path / "a.safetensors", tmp_path / "b.pt"


def test_a_difference(two):
    document = holdfast.report(*two).document
    assert document["kind"] == "diff"
    states = dict(zip(names_of(document), document["tensors"]["state"], strict=True))
    assert states == {"same": 0, "tuned": 1, "come": 2, "gone": 3, "new.name": 4, "shape": 5}
    was = document["tensors"]["was"]
    assert [
        (names_of(document)[at], old) for at, old in zip(was["at"], was["names"], strict=True)
    ] == [("new.name", "old.name")]
    with holdfast.open(two[0]) as a, holdfast.open(two[1]) as b:
        x, y = (one["tuned"].numpy().astype(np.float64).reshape(-1) for one in (a, b))
    at = row(document, "tuned")
    assert column(document, "change")[at] == pytest.approx(
        np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-3
    )
    assert column(document, "cosine")[at] == pytest.approx(
        x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-3
    )
    assert column(document, "changed")[at] == 8 / 64
    assert [
        column(document, key)[row(document, "same")] for key in ("change", "cosine", "changed")
    ] == [0, 1, 0]
    assert column(document, "change")[row(document, "gone")] is None
    assert "1 changed" in document["sentence"] or "2 changed" in document["sentence"]


def test_a_difference_with_numbers_of_a_part(two, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", *map(str, two), "-o", str(out), "--stats", "-f", "tuned"]) == 0
    document = data_of(out.read_text())
    assert names_of(document) == ["tuned"]
    assert {measure["key"] for measure in document["measures"]} >= {"change", "rms"}
    assert "differ" in capsys.readouterr().out


def test_a_tiny_change_is_not_lost_in_rounding(tmp_path):
    a = np.random.default_rng(0).standard_normal(100_000)
    b = a.copy()
    b[7] += 1e-9
    for name, array in (("a", a), ("b", b)):
        holdfast.save({"w": array}, tmp_path / f"{name}.safetensors")
    (found,) = holdfast.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").changed
    assert found.content.relative == pytest.approx(abs(b[7] - a[7]) / np.linalg.norm(a), rel=1e-9)


@pytest.fixture
def steps(tmp_path) -> Path:
    with holdfast.Run(tmp_path / "run", keep=["latest:3"]) as run:
        for step in (1, 2, 3, 4):
            run.save(
                step,
                {"w": np.full(1000, step, np.float32)},
                metrics={"val_loss": 3.0 / step, "grad_norm": float(step)},
            )
    return tmp_path / "run"


def test_a_run(steps):
    document = holdfast.report(steps).document
    assert document["kind"] == "run"
    run = document["run"]
    assert [one["step"] for one in run["steps"]] == [
        one.step for one in holdfast.Run(steps, keep=["latest:3"])
    ]
    last = run["steps"][-1]
    assert (last["step"], last["loss"], last["norm"], last["state"], last["kept"]) == (
        4,
        0.75,
        4,
        "whole",
        True,
    )
    assert names_of(document) == ["w"]
    assert document == holdfast.report(steps).document


def test_a_run_with_a_torn_step_and_one_without_steps(steps, tmp_path):
    (newest,) = (path for path in steps.iterdir() if path.name.endswith("4"))
    next(path for path in newest.iterdir() if path.suffix == ".safetensors").unlink()
    states = [one["state"] for one in holdfast.report(steps).document["run"]["steps"]]
    assert states[-1] == "torn"
    (tmp_path / "empty").mkdir()
    shutil.copy(steps / "holdfast.run.json", tmp_path / "empty")
    document = holdfast.report(tmp_path / "empty").document
    assert document["tensors"]["count"] == 0
    assert data_of(holdfast.report(tmp_path / "empty").html()) == document


def test_a_folder_that_is_nothing(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("x")
    with pytest.raises(holdfast.errors.HoldfastError):
        holdfast.report(tmp_path / "x")
