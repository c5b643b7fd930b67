"""`holdfast convert --sparse`, and how `show` tells what is stored packed."""

from __future__ import annotations

import json

import numpy as np
import pytest

import holdfast
import holdfast.errors
from holdfast.cli.main import main


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    half = rng.integers(1, 9, (64, 64), np.int16) * rng.integers(0, 2, (64, 64), np.int16)
    layers = {f"layers.{i}.w": half + np.int16(0) for i in range(4)}
    holdfast.save(
        {**layers, "full": rng.integers(1, 9, (64, 64), np.int16)}, tmp_path / "a.safetensors"
    )
    return tmp_path / "a.safetensors"


def test_convert_and_show(run, source, tmp_path):
    code, _, err = run("convert", source, tmp_path / "b", "--sparse", "auto")
    assert (code, err) == (0, "")
    assert holdfast.diff(source, tmp_path / "b").equal
    code, out, err = run("show", tmp_path / "b")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert [line.split("KiB")[1].strip() for line in lines[1:3]] == ["", "stored as bitmap"]
    assert lines[3].startswith("packed    4 tensors  ")
    assert lines[3].endswith(" KiB in place of 32.0 KiB (56%)")
    _, out, _ = run("show", tmp_path / "b", "--all")
    assert out.count("stored as bitmap 56%") == 4


def test_json_has_the_parts(run, source, tmp_path):
    run("convert", source, tmp_path / "b", "--sparse", "2:4", "-q")
    run("convert", source, tmp_path / "c", "--sparse", "bitmap", "-q")
    told = {name: json.loads(run("show", tmp_path / name, "--json")[1])["tensors"] for name in "bc"}
    assert all("encoding" not in tensor["chunks"][0] for tensor in told["b"])
    chunk = next(tensor for tensor in told["c"] if tensor["name"] == "layers.0.w")["chunks"][0]
    assert (chunk["encoding"], chunk["sizes"], chunk["storage_nbytes"]) == ("bitmap", [], 8192)
    assert [part["label"] for part in chunk["parts"]] == [
        f"layers.0.w.sparse.{name}" for name in ("values", "where", "starts")
    ]
    assert sum(part["nbytes"] for part in chunk["parts"]) == chunk["stored_nbytes"] < 8192
    assert {part["file"] for part in chunk["parts"]} == {"data-00001-of-00001.safetensors"}


@pytest.mark.parametrize(("target", "how"), [("b", "sometimes"), ("b.pt", "auto")])
def test_refused(run, source, tmp_path, target, how):
    code, out, err = run("convert", source, tmp_path / target, "--sparse", how)
    assert (code, out) == (2, "")
    assert err.startswith("holdfast: ")
    assert not (tmp_path / target).exists()


def test_names_that_are_not_there_are_refused(tmp_path, capsys):
    """As `diff` and `report` do. What has no tensors at all is no such case."""
    path, empty = tmp_path / "a.safetensors", tmp_path / "empty.safetensors"
    holdfast.save({"w": np.ones(2, np.float32)}, path)
    holdfast.save({}, empty)
    for words in (["stats", str(path)], ["show", str(path), "--sparsity"]):
        assert main([*words, "--filter", "typo*"]) == 2, words
        assert "no tensor in the checkpoint is called 'typo*'" in capsys.readouterr().err
        assert main([*words, "--filter", "w"]) == 0
    assert main(["stats", str(empty)]) == 0
    with pytest.raises(holdfast.errors.NoSuchTensor):
        holdfast.stats(path, "typo*")
