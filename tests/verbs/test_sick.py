"""NaN and infinities that appear: the first thing that a difference says, and never "no change"."""

import json
import math
import re

import ml_dtypes
import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from tests.extras.reports.pages import names_of

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
    assert (
        found.nan_appeared,
        found.nan_disappeared,
        found.inf_appeared,
        found.inf_disappeared,
    ) == counts
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
    assert "1 became Inf (first at [1, 1])" in out[3]
    assert out[-1].startswith(
        "NaN or Inf appeared in 2 tensors, first `layers.7.w` at [0, 0] · 1 removed"
    )


def test_json_says_it(sick, capsys):
    assert main(["diff", *map(str, sick), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["nonfinite"] == ["layers.7.w", "layers.10.w"]
    content = next(
        change["content"] for change in found["changed"] if change["name"] == "layers.7.w"
    )
    assert (content["nan_appeared"], content["relative"], content["cosine"]) == (16, None, None)
    places = {c["name"]: (c["first_nan"], c["first_infinity"]) for c in found["changed"]}
    assert places["layers.7.w"] == ([0, 0], None)
    assert places["layers.10.w"] == (None, [1, 1])
    assert places["layers.2.w"] == (None, None)


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
    assert document["facts"][0] == [
        "NaN or Inf appeared",
        "2 tensors, first `layers.7.w` at [0, 0]",
    ]
    names = names_of(document)
    appeared = document["tensors"]["appeared"]
    assert [names[row] for row in appeared["at"]] == ["layers.10.w", "layers.7.w"]
    assert (appeared["nan"], appeared["inf"]) == ([None, [0, 0]], [[1, 1], None])


def test_a_notebook_shows_it_first(sick):
    shown = holdfast.diff(*sick)._repr_html_()
    assert "NaN or Inf appeared in 2 tensors, first `layers.7.w` at [0, 0]" in shown
    table = shown[shown.index("<table") :]
    assert re.findall(r"layers\.\d+\.w", table)[:3] == ["layers.7.w", "layers.10.w", "layers.2.w"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.complex64])
@pytest.mark.parametrize("size", [(3, 50), (700, 1000)])
def test_the_first_nan_and_the_first_infinity_have_a_place(dtype, size, two):
    before = np.ones(size, dtype)
    after = before.copy()
    after[1, 40:43] = NAN
    after[-1, -2:] = INF
    a, b = two({"w": before}, {"w": after})

    (row,) = holdfast.stats(b)
    (change,) = holdfast.diff(a, b).changed

    last = size[0] - 1, size[1] - 2
    assert (row.nans, row.first_nan) == (3, (1, 40))
    assert (row.infinities, row.first_infinity) == (2, last)
    assert (change.first_nan, change.first_infinity) == ((1, 40), last)
    assert change.first_appeared == (1, 40)


def test_what_was_nan_before_is_not_the_first_that_appeared(two):
    a, b = two({"w": np.array([NAN, 1, 2])}, {"w": np.array([NAN, 1, NAN])})
    found = holdfast.diff(a, b)
    assert found.changed[0].first_nan == (2,)
    assert "first `w` at [2]" in found.nonfinite_summary


@pytest.fixture
def large(tmp_path):
    """More tensors than a list shows, with NaN in the last layers."""
    state = {f"layers.{n}.mlp.weight": np.ones((4, 8), np.float32) for n in range(250)}
    state["layers.240.mlp.weight"] = state["layers.240.mlp.weight"].copy()
    state["layers.240.mlp.weight"][3, 5:] = NAN
    state["layers.245.mlp.weight"] = np.full((4, 8), -INF, np.float16)
    path = tmp_path / "large.safetensors"
    holdfast.save(state, path, durable=False)
    return path


LINE = (
    "NaN in 1 tensor, first `layers.240.mlp.weight` at [3, 5]; "
    "Inf in 1 tensor, first `layers.245.mlp.weight` at [0, 0]"
)


def test_stats_lists_tensors_with_nan_first_and_ends_with_the_total(large, capsys):
    assert main(["stats", str(large), "--bins", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("layers.240.mlp.weight ")
    assert lines[1].endswith("NaN 3, first at [3, 5]")
    assert lines[2].startswith("layers.245.mlp.weight ")
    assert lines[-2].startswith("… 50 more")
    assert lines[-1] == LINE


def test_stats_says_that_there_is_no_nan(two, capsys):
    path, _ = two({"w": np.ones(3), "n": np.arange(3)}, {})
    assert main(["stats", str(path), "--fail-on", "nan", "--fail-on", "inf"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no NaN or Inf in 2 tensors"


def test_stats_names_no_place_in_a_scalar(two, capsys):
    path, _ = two({"scale": np.array(NAN)}, {})
    assert main(["stats", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "NaN in 1 tensor, first `scale`"


@pytest.mark.parametrize(
    ("flags", "code"), [([], 0), (["nan"], 1), (["inf"], 0), (["inf", "nan"], 1)]
)
def test_fail_on_sets_the_exit_status(flags, code, two, capsys):
    path, _ = two({"w": np.array([1, NAN])}, {})
    words = [word for flag in flags for word in ("--fail-on", flag)]
    assert main(["stats", str(path), *words]) == code
    assert main(["stats", str(path), "--json", *words]) == code


def test_stats_json_has_the_total_and_the_places(large, capsys):
    assert main(["stats", str(large), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["nonfinite"] == {"text": LINE, "nan_tensors": 1, "inf_tensors": 1}
    rows = {row["name"]: row for row in document["tensors"]}
    assert next(iter(rows)) == "layers.0.mlp.weight", "JSON stays in the order of the checkpoint"
    assert rows["layers.240.mlp.weight"]["first_nan"] == [3, 5]
    assert rows["layers.240.mlp.weight"]["first_infinity"] is None


def test_the_notebook_table_of_stats_begins_with_nan(large):
    report = holdfast.stats(large, bins=0)
    shown = report._repr_html_()
    assert [row.name for row in report.nonfinite] == [
        "layers.240.mlp.weight",
        "layers.245.mlp.weight",
    ]
    assert report.nonfinite_summary == LINE
    assert LINE[:50] in shown
    table = shown[shown.index("<table") :]
    assert re.findall(r"layers\.\d+", table)[:3] == ["layers.240", "layers.245", "layers.0"]
    assert "[3, 5]" in table


@pytest.mark.parametrize("words", [["--stats"], ["--sample", "1%"]])
@pytest.mark.extras
def test_report_prints_the_line_of_stats(words, large, tmp_path, capsys):
    assert main(["report", str(large), "-o", str(tmp_path / "page.html"), *words]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(LINE)
    assert last.endswith("(of what was read)") == ("--sample" in words)


def test_the_document_of_report_has_the_places(large):
    document = holdfast.report(large, stats=True).document
    names, nonfinite = names_of(document), document["nonfinite"]
    assert [names[row] for row in nonfinite["at"]] == [
        "layers.240.mlp.weight",
        "layers.245.mlp.weight",
    ]
    assert (nonfinite["nan"], nonfinite["inf"]) == ([[3, 5], None], [None, [0, 0]])
    assert document["facts"][0] == ["NaN and Inf", LINE]
    assert holdfast.report(large).document["nonfinite"] is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_sample_says_where_in_the_tensor_it_met_a_nan(dtype, two):
    array = np.ones((2, 300_000), dtype)
    array[1, -3] = NAN
    path, _ = two({"w": array}, {})
    document = holdfast.report(path, sample="10%").document
    assert document["nonfinite"]["nan"] == [[1, 299_997]]


@pytest.mark.extras
def test_report_of_a_difference_says_it_of_both_sides(sick, tmp_path, capsys):
    words = ["report", *map(str, sick), "-o", str(tmp_path / "page.html"), "--stats"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "first: no NaN or Inf in 13 tensors; "
        "second: NaN in 1 tensor, first `layers.7.w` at [0, 0]; "
        "Inf in 1 tensor, first `layers.10.w` at [1, 1]"
    )


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
