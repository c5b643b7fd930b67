"""`holdfast edit`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import holdfast


@pytest.fixture
def source(tmp_path) -> Path:
    state = {"model.w": np.ones((2, 2), np.float32), "model.b": np.zeros(2, np.float32)}
    holdfast.save(state, tmp_path / "a.safetensors", metadata={"author": "me"})
    return tmp_path / "a.safetensors"


def test_in_place(run, source, tmp_path):
    names = ["--rename", "model.*=*", "--drop", "*.b", "--dtype", "bf16"]
    code, out, err = run(
        "edit",
        source,
        "--in-place",
        *names,
        "--set",
        "licence=a=b",
        "--set",
        "note=",
        "--unset",
        "author",
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"wrote {source}  safetensors  ")
    with holdfast.open(source) as ckpt:
        assert {n: t.dtype.name for n, t in ckpt.items()} == {"w": "bfloat16"}
        assert ckpt.metadata["licence"] == "a=b"
        assert ckpt.metadata["note"] == ""
        assert "author" not in ckpt.metadata
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_beside(run, source, tmp_path):
    before = source.read_bytes()
    code, out, _ = run("edit", source, tmp_path / "b.pt", "--keep", "model.w", "--json")
    assert code == 0
    assert json.loads(out)["format"] == "torch-zip"
    assert source.read_bytes() == before
    code, out, err = run("edit", source, tmp_path / "b.pt", "--keep", "model.w")
    assert (code, out) == (2, "")
    assert "exists" in err
    assert run("edit", source, tmp_path / "b.pt", "--keep", "model.w", "--overwrite")[0] == 0


def test_dry_run(run, source):
    before = source.read_bytes()
    code, out, _ = run("edit", source, "--drop", "model.b", "--dry-run")
    assert code == 0
    assert "write" in out
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "nothing to do"),
        (["--drop", "x"], "'x' matches nothing"),
        (["--rename", "model.w=model.b"], "2 things the name 'model.b'"),
        (["--rename", "*=x"], "the same number of * on both sides"),
        (["--unset", "nobody"], "no metadata 'nobody'"),
        (["--set", "author=you", "--unset", "author"], "set and taken out"),
        (["--set", "=you"], "form"),
        (["--dtype", "f12"], "cannot cast"),
    ],
)
def test_errors(options, words, run, source, tmp_path):
    before = source.read_bytes()
    code, out, err = run("edit", source, "--in-place", *options)
    assert (code, out) == (2, "")
    assert err.startswith("holdfast: ")
    assert words in err
    assert source.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_the_target_may_come_last(run, source, tmp_path):
    assert run("edit", source, "--keep", "model.w", tmp_path / "b.pt")[0] == 0
    assert (tmp_path / "b.pt").exists()
    code, out, err = run("edit", source, "--keep", "model.w", tmp_path / "c.pt", tmp_path / "d.pt")
    assert (code, out) == (2, "")
    assert "too many arguments" in err
    code, out, err = run("edit", source, "--keep", "model.w", "hf://bucket/x")
    assert (code, out) == (2, "")
    assert "URL" in err
    assert run("compact", source, "--nothing", tmp_path / "c.pt")[0] == 2
    code, _, err = run("edit", source, "--keep", "model.w")
    assert code == 2
    assert "say where to write" in err


@pytest.mark.parametrize(
    "words", [["--dtype", "*.b=f16", "--dtype", "bf16"], ["--dtype", "bf16", "--dtype", "*.b=f16"]]
)
def test_dtypes_by_patterns(run, source, words):
    assert run("edit", source, "--in-place", *words)[0] == 0
    with holdfast.open(source) as ckpt:
        assert {n: t.dtype.name for n, t in ckpt.items()} == {
            "model.w": "bfloat16",
            "model.b": "float16",
        }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["f16", "bf16"], "given twice for all"),
        (["=f16"], "GLOB=DTYPE"),
        (["a=f16", "a=bf16"], "each GLOB once"),
        (["x=f16"], "matches no floating-point tensor"),
    ],
)
def test_dtypes_that_make_no_sense(run, source, words, told):
    code, out, err = run("edit", source, "--in-place", *(f"--dtype={word}" for word in words))
    assert (code, out) == (2, "")
    assert told in err


@pytest.mark.extras
def test_a_folder_of_a_model(run, source, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    source.rename(folder / "model.safetensors")
    (folder / "config.json").write_text('{"torch_dtype": "float32"}')
    assert run("edit", folder, "--in-place", "--dtype", "bf16")[0] == 0
    assert json.loads((folder / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    code, out, _ = run(
        "edit", folder, f"{tmp_path}/other/", "--drop", "*.b", "--format", "native", "--json"
    )
    assert (code, json.loads(out)["format"]) == (0, "native")
    assert (tmp_path / "other" / "config.json").exists()
    code, out, _ = run("convert", folder, f"{tmp_path}/bare/", "--no-copy-config")
    assert os.listdir(tmp_path / "bare") == ["model.safetensors"]
    code, out, _ = run(
        "convert", tmp_path / "bare", f"{tmp_path}/hf", "--dtype", "f32", "--copy-config", folder
    )
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]
    assert (
        "note  config.json has the new dtype of the weights: torch_dtype bfloat16 → float32" in out
    )
    code, out, _ = run(
        "prune", folder, f"{tmp_path}/pruned", "--rule", "*.w: 1:2", "--max-shard-size", "4"
    )
    assert len(list((tmp_path / "pruned").glob("model-*-of-00002.safetensors"))) == 2
    assert (tmp_path / "pruned" / "config.json").exists()
    assert run("diff", folder, tmp_path / "pruned", "--filter", "*.b")[0] == 0
