"""What `holdfast diff` prints, and its exit codes, which are those of diff(1)."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from holdfast.cli.diff import diff_document, diff_lines
from holdfast.cli.text import plain
from holdfast.numeric.compare import ContentDifference
from holdfast.verbs.compare_values import ValueChange
from holdfast.verbs.diff import ABSENT, Diff, Rename, TensorChange
from holdfast.verbs.save import save


def test_the_same(run, golden_dir):
    files = golden_dir / "files"
    assert run("diff", files / "plain.pt", files / "plain.pt")[:2] == (
        0,
        "13 tensors the same (10 by checksum)\n",
    )
    assert run("diff", files / "plain.pt", files / "plain.pt", "--exact")[:2] == (
        0,
        "13 tensors the same\n",
    )
    code, out, err = run("diff", files / "plain.pt", files / "missing.pt")
    assert (code, out) == (2, "")
    assert err.startswith("holdfast: no such file")


def test_different(run, tmp_path):
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    changed = w.copy()
    changed[1, 2] = 7
    old = {"w": w, "old.bias": np.ones(4), "gone": np.zeros(2), "half": w.copy(), "lr": 0.1}
    save(old, a, durable=False)
    save(
        {
            "w": changed,
            "new.bias": np.ones(4),
            "came": np.zeros(3),
            "half": w.astype(np.float16),
            "lr": 0.25,
        },
        b,
        durable=False,
    )
    code, out, err = run("diff", a, b)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        f"--- {a}",
        f"+++ {b}",
        "- gone      float64  [2]",
        "+ came      float64  [3]",
        "> old.bias  →  new.bias",
        "~ w         float32            [2, 3]  relative 0.2697          cosine 0.986094  max abs 2  1 of 6",
        "~ half      float32 → float16  [2, 3]  every value is the same",
        "~ lr        0.1  →  0.25",
        "1 removed · 1 added · 1 renamed · 2 changed · 1 value differs · 0 tensors the same",
    ]
    code, out, _ = run("diff", a, b, "--json")
    assert code == 1
    document = json.loads(out)
    assert document["equal"] is False
    assert document["renamed"] == [{"a": "old.bias", "b": "new.bias"}]
    assert document["changed"][0]["content"]["max_abs"] == 2
    assert document["values"] == [{"path": ["lr"], "a": "0.1", "b": "0.25"}]


def test_hostile_text_is_escaped_and_long_lists_are_cut(made):
    nasty = "x\x1b[2J\u202e\n"
    content = ContentDifference(1, 2, math.inf, math.nan, None, 3)
    changes = tuple(
        TensorChange(f"{nasty}{i}", ("int8", "int8"), ((2,), (2,)), content) for i in range(60)
    )
    values = (ValueChange((nasty,), nasty, ABSENT), ValueChange((), ABSENT, nasty))
    found = Diff(
        nasty, nasty, (nasty,), (), (Rename(nasty, nasty),), changes, values, 0, 0, (nasty,)
    )
    sides = made.checkpoint({nasty: made.zeros(3)})
    lines = [plain(line) for line in diff_lines(found, sides, sides)]
    assert all(line.isprintable() for line in lines)
    assert any("10 more" in line for line in lines)
    assert len(list(diff_lines(found, sides, sides, everything=True))) == len(lines) + 9
    assert (
        json.loads(json.dumps(diff_document(found), allow_nan=False))["changed"][0]["content"][
            "max_abs"
        ]
        == "inf"
    )


def test_a_part_under_other_names(run, tmp_path):
    a, b = tmp_path / "a.pt", tmp_path / "b.safetensors"
    w = np.arange(6, dtype=np.float32)
    save({"model": {"w": w, "b": w}, "step": 3}, a, durable=False)
    save({"w": w, "b": w + 1}, b, durable=False)
    words = ["--rename", "model.*=*", "--tensors-only"]
    code, out, _ = run("diff", a, b, *words)
    assert (code, [line.split()[:2] for line in out.splitlines()[2:3]]) == (1, [["~", "b"]])
    assert run("diff", a, b, *words, "--filter", "w")[:2] == (
        0,
        "1 tensor the same (1 by checksum)\n",
    )
    code, out, _ = run("diff", a, b, "--rename", "model.w=w", "--filter", "*.b", "--json")
    assert json.loads(out)["removed"] == ["model.b"]
    code, out, err = run("diff", a, b, "--filter", "x")
    assert (code, out) == (2, "")
    assert "nothing in either checkpoint" in err


def test_what_became_nan_has_no_largest_difference(run, tmp_path):
    w = np.arange(1, 5, dtype=np.float32)
    save({"some": w, "all": w}, tmp_path / "a.pt", durable=False)
    save(
        {"some": np.array([1, 2, 3.5, np.nan], np.float32), "all": w * np.nan},
        tmp_path / "b.pt",
        durable=False,
    )
    code, out, _ = run("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 1
    assert [" ".join(line.split()) for line in out.splitlines()[2:4]] == [
        "! all float32 [4] 4 became NaN (first at [0]) relative - cosine - max abs - 4 of 4",
        "! some float32 [4] 1 became NaN (first at [3]) relative - cosine - max abs 0.5 2 of 4",
    ]
    _, out, _ = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    found = {change["name"]: change["content"] for change in json.loads(out)["changed"]}
    assert (found["all"]["max_abs"], found["all"]["max_rel"]) == (None, None)
    assert (found["some"]["max_abs"], found["some"]["max_rel"]) == (0.5, pytest.approx(1 / 7))
