"""`holdfast prune`, `holdfast stats` and `holdfast show --sparsity`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import holdfast


@pytest.fixture
def source(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    state = {
        f"layers.{i}.mlp.weight": rng.normal(size=(32, 64)).astype(np.float32) for i in range(2)
    }
    state |= {
        "lm_head.weight": np.ones((8, 8), np.float32),
        "norm": np.array([1, np.nan, 0], np.float32),
    }
    holdfast.save(state, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_prune(run, source, tmp_path):
    rules = ["--rule", "*.mlp.*: 2:4", "--rule", "lm_head.*: keep"]
    code, out, err = run("prune", source, tmp_path / "b", *rules, "--masks", "beside")
    assert (code, err) == (0, "")
    assert "layers.0.mlp.weight   50.00% zero     1,024 pruned" in out
    assert "2 tensors  50.00% zero" in out
    assert f"wrote {tmp_path / 'b'}  native" in out
    assert f"wrote {tmp_path / 'b' / 'masks.safetensors'}  masks" in out
    code, out, _ = run("show", "--sparsity", tmp_path / "b")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].endswith("4 tensors · 49.22% of 4,163 elements are zero")
    assert [line.split()[-2:] for line in lines if "mlp" in line] == [["50.00%", "2:4"]] * 2


def test_json_dry_run_and_a_file_of_rules(run, source, tmp_path):
    (tmp_path / "rules.txt").write_text(
        "# what goes\nlm_head.*: keep  # not this\n*.weight: global 0.8\n"
    )
    code, out, err = run(
        "prune", source, tmp_path / "b.pt", "--rules", tmp_path / "rules.txt", "--dry-run", "--json"
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["done"], found["kept"], len(found["tensors"])) == (False, 2, 2)
    assert sum(row["pruned"] for row in found["tensors"]) == round(0.8 * 4096)
    assert 0 < found["norm_lost"] < 1
    assert (found["format"], found["seconds"], found["notes"]) == ("torch-zip", None, [])
    assert found["write_nbytes"] > 4163 * 4
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "rules.txt"]
    code, out, err = run(
        "prune", source, tmp_path / "b.pt", "--rules", tmp_path / "rules.txt", "--dry-run"
    )
    assert (code, err) == (0, "")
    assert f"would write {tmp_path / 'b.pt'}  torch-zip" in out
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "rules.txt"]
    code, out, _ = run(
        "prune", source, tmp_path / "b.pt", "--rules", tmp_path / "rules.txt", "--json"
    )
    written = json.loads(out)
    assert (written["done"], written["tensors"]) == (True, found["tensors"])
    assert written["write_nbytes"] == (tmp_path / "b.pt").stat().st_size == found["write_nbytes"]
    code, out, _ = run(
        "prune", source, tmp_path / "b.pt", "--rules", tmp_path / "rules.txt", "-q", "--overwrite"
    )
    assert (code, out) == (0, "")
    assert (tmp_path / "b.pt").exists()


def test_problems_are_lines(run, source, tmp_path):
    code, out, err = run(
        "prune", source, tmp_path / "b.pt", "--rule", "lm_hed.weight: 0.5", "--rule", "norm: 1:2"
    )
    assert (code, out) == (2, "")
    assert "  - rule 'lm_hed.weight' matches no tensor; near: lm_head.weight" in err
    assert "  - norm: 1:2 needs a last axis of a multiple of 2 elements, and [3] has 3" in err
    assert not (tmp_path / "b.pt").exists()


def test_stats(run, source):
    code, out, err = run("stats", source, "--bins", "8")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "NaN in 1 tensor, first `norm` at [1]"
    norm = next(line for line in lines if line.startswith("norm"))
    assert "min 0  max 1  mean 0.5  std 0.5  norm 1  zeros 1  NaN 1" in norm
    assert "█" in out
    code, out, _ = run("stats", source, "-f", "norm", "--json")
    (row,) = json.loads(out)["tensors"]
    assert (row["name"], row["nans"], row["zeros"], row["min"], sum(row["histogram"])) == (
        "norm",
        1,
        1,
        0.0,
        2,
    )
    assert run("stats", source, "--bins", "-1")[0] == 2


def test_sparsity_as_json(run, source):
    code, out, _ = run("show", "--sparsity", source, "--json", "-f", "norm")
    assert code == 0
    assert json.loads(out)["tensors"][0]["zeros"] == 1
