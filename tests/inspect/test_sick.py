"""NaN and infinities that appear: the first thing that a difference says, and never "no change"."""

import json
import math
import re

import ml_dtypes
import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from tests.reports.pages import names_of

NAN, INF = math.nan, math.inf

CASES = {
    "all became NaN": (np.float32, [1, 2, 3], [NAN, NAN, NAN], (3, 0, 0, 0)),
    "one became NaN": (np.float32, [1, 2, 3], [1, NAN, 3], (1, 0, 0, 0)),
    "NaN went": (np.float64, [1, NAN, 3], [1, 2, 3], (0, 1, 0, 0)),
    "became Inf": (np.float16, [1, 2, 3], [INF, 2, -INF], (0, 0, 2, 0)),
    "Inf went": (np.float32, [INF, 2, 3], [1, 2, 3], (0, 0, 0, 1)),
    "Inf became NaN": (np.float32, [INF, 2, 3], [NAN, 2, 3], (1, 0, 0, 1)),
    "fp8": (ml_dtypes.float8_e4m3fn, [1, 2, 3], [1, NAN, 3], (1, 0, 0, 0)),
    "fp8 with infinities": (ml_dtypes.float8_e5m2, [1, 2, 3], [1, NAN, INF], (1, 0, 1, 0)),
    "bfloat16": (ml_dtypes.bfloat16, [1, 2, 3], [NAN, 2, 3], (1, 0, 0, 0)),
    "complex": (
        np.complex64,
        [1, 2j, 3],
        [complex(0, NAN), complex(INF, NAN), complex(INF, 1)],
        (2, 0, 1, 0),
    ),
}


@pytest.fixture
def two(tmp_path):
    def made(first, second):
        paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
        for path, state in zip(paths, (first, second), strict=True):
            holdfast.save(state, path, durable=False, overwrite=True)
        return paths

    return made


@pytest.mark.parametrize("case", CASES)
def test_what_appears_and_goes_is_counted(case, two):
    dtype, before, after, counts = CASES[case]
    a, b = two({"w": np.array(before).astype(dtype)}, {"w": np.array(after).astype(dtype)})
    (change,) = holdfast.diff(a, b).changed
    found = change.content
    assert (found.nan_appeared, found.nan_went, found.inf_appeared, found.inf_went) == counts
    assert found.appeared == counts[0] + counts[2]
    assert (found.relative, found.cosine) == (None, None), "no number is that of a change to NaN"
    assert change.size == math.inf


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_stays_is_left_out(bad, two):
    a, b = two({"w": np.array([bad, 3, 4])}, {"w": np.array([bad, 3, 4.5])})
    found = holdfast.diff(a, b)
    assert found.changed[0].content.relative == pytest.approx(0.1)
    assert found.changed[0].content.appeared == 0
    assert found.nonfinite == ()


def test_an_infinity_of_the_other_sign_is_no_small_change(two):
    a, b = two({"w": np.array([INF, 3.0, 4.0])}, {"w": np.array([-INF, 3.0, 4.0])})
    (change,) = holdfast.diff(a, b).changed
    assert (change.content.relative, change.content.cosine, change.content.appeared) == (
        None,
        None,
        0,
    )


def test_numbers_that_are_far_apart_still_have_a_difference(two):
    a, b = two({"w": np.array([1e308, 1.0])}, {"w": np.array([-1e308, 1.0])})
    assert holdfast.diff(a, b).changed[0].content.relative == pytest.approx(2)


def test_integers_have_none_of_it(two):
    a, b = two({"w": np.array([1, 2, 3])}, {"w": np.array([1, 2, 4])})
    assert holdfast.diff(a, b).changed[0].content.appeared == 0


@pytest.fixture
def sick(two):
    rng = np.random.default_rng(3)
    before = {f"layers.{n}.w": rng.standard_normal((4, 4)).astype(np.float32) for n in range(12)}
    after = {name: array + np.float32(0.01) for name, array in before.items()}
    after["layers.7.w"] = np.full((4, 4), NAN, np.float32)
    after["layers.10.w"] = before["layers.10.w"].copy()
    after["layers.10.w"][1, 1] = INF
    after["layers.2.w"] = before["layers.2.w"] * 5
    return two({**before, "gone": np.ones(2)}, after)


def test_text_says_it_first(sick, capsys):
    assert main(["diff", *map(str, sick)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[2].split()[:2] == ["!", "layers.7.w"]
    assert "16 became NaN" in out[2]
    assert "relative -" in out[2]
    assert out[3].split()[:2] == ["!", "layers.10.w"]
    assert "1 became Inf" in out[3]
    assert out[-1].startswith("NaN or Inf appeared in 2 tensors · 1 removed")


def test_json_says_it(sick, capsys):
    assert main(["diff", *map(str, sick), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["nonfinite"] == ["layers.7.w", "layers.10.w"]
    content = next(
        change["content"] for change in found["changed"] if change["name"] == "layers.7.w"
    )
    assert (content["nan_appeared"], content["relative"], content["cosine"]) == (16, None, None)


def test_the_page_says_it(sick):
    document = holdfast.report(*sick).document
    measures = {measure["key"]: measure["values"] for measure in document["measures"]}
    at = names_of(document).index("layers.7.w")
    assert (measures["appeared"][at], measures["change"][at], measures["cosine"][at]) == (
        16,
        None,
        None,
    )
    assert measures["appeared"][names_of(document).index("layers.3.w")] == 0
    assert "NaN or Inf appeared in 2 tensors" in document["sentence"]
    assert document["facts"][0] == ["NaN or Inf appeared", "2 tensors"]


def test_a_notebook_shows_it_first(sick):
    shown = holdfast.diff(*sick)._repr_html_()
    assert re.findall(r"layers\.\d+\.w", shown)[:3] == ["layers.7.w", "layers.10.w", "layers.2.w"]


def test_the_numbers_of_nothing_but_nan(tmp_path, capsys):
    path = tmp_path / "m.safetensors"
    holdfast.save(
        {"w": np.full(4, NAN, np.float32), "empty": np.zeros(0, np.float32)}, path, durable=False
    )
    rows = {row.name: row for row in holdfast.stats(path)}
    assert (rows["w"].norm, rows["w"].nans) == (None, 4)
    assert rows["empty"].norm == 0
    done = holdfast.prune(path, tmp_path / "out.safetensors", ["w: 0.5"], durable=False)
    assert math.isnan(done.norm_lost)
    assert any("4 elements of 1 tensor are NaN or infinite" in note for note in done.notes)
    assert main(["stats", str(path)]) == 0
    assert "norm -" in capsys.readouterr().out


def test_a_step_with_a_nan_has_no_norm(tmp_path):
    with holdfast.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.full(4, 2, np.float32)})
        run.save(2, {"w": np.array([2, 2, NAN, 2], np.float32)})
    document = holdfast.report(tmp_path / "run", stats=True).document
    assert [step["norm"] for step in document["run"]["steps"]] == [4, None]
    assert any("NaN or Inf" in note and ": 2." in note for note in document["notes"])
