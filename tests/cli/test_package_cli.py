"""`holdfast package`, `tie` and `compact`, and what `show` says of several models."""

from __future__ import annotations

import os

import numpy as np
import pytest

import holdfast


@pytest.fixture
def files(tmp_path):
    base = {"emb": np.arange(5000.0), "mid": np.ones(3)}
    holdfast.save(tmp_path / "base.pt", base)
    holdfast.save(tmp_path / "adapter.safetensors", {**base, "lora": np.zeros(4)})
    return tmp_path


def test_a_package_of_files(run, files):
    code, out, err = run("package", f"a={files / 'base.pt'}", f"b={files / 'adapter.safetensors'}", "-o", files / "p.pt2")
    assert (code, err) == (0, "")
    assert out.startswith(f"wrote {files / 'p.pt2'}  pt2  ")
    assert (files / "p.pt2").stat().st_size > 80_000
    code, out, _ = run(
        "package", f"a={files / 'base.pt'}", f"b={files / 'adapter.safetensors'}", "--content", "-o", files / "q.pt2", "-q"
    )
    assert (code, out) == (0, "")
    assert (files / "q.pt2").stat().st_size < 45_000
    code, out, _ = run("show", files / "q.pt2")
    assert "shared    a + b  39.1 KiB in 2 storages, which saves 39.1 KiB" in out
    _, out, _ = run("show", files / "p.pt2")
    assert "shared" not in out


def test_a_native_package(run, files):
    code, out, _ = run("package", f"a={files / 'base.pt'}", f"b={files / 'base.pt'}", "-o", files / "bundle")
    assert code == 0
    assert "  native  " in out
    with holdfast.open(files / "bundle") as ckpt:
        assert list(ckpt) == ["a.emb", "a.mid", "b.emb", "b.mid"]
    assert "shared    a + b" in run("show", files / "bundle")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("base.pt", "-o", "p.pt2"), "NAME=PATH"),
        (("a=base.pt", "a=adapter.safetensors", "-o", "p.pt2"), "one name"),
        (("a=base.pt",), "say where"),
        (("a=nothing.pt", "-o", "p.pt2"), "no such file"),
        (("a=base.pt", "b=base.pt", "--replace", "base.pt"), "one checkpoint"),
        (("a=base.pt", "--content", "--replace", "base.pt"), "leave out"),
    ],
)
def test_wrong_calls(run, files, monkeypatch, arguments, words):
    monkeypatch.chdir(files)
    before = sorted(os.listdir(files))
    code, out, err = run("package", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert sorted(os.listdir(files)) == before


def test_other_weights(run, files):
    run("package", f"a={files / 'base.pt'}", f"b={files / 'base.pt'}", "-o", files / "p.pt2")
    holdfast.save(files / "tuned.pt", {"emb": np.zeros(5000), "mid": np.full(3, 5.0)})
    code, out, err = run("package", "--replace", files / "p.pt2", f"b={files / 'tuned.pt'}", "-o", files / "q.pt2")
    assert (code, err) == (0, "")
    assert out.startswith("wrote ")
    with holdfast.open(files / "q.pt2") as ckpt:
        assert ckpt["b.mid"].numpy().tolist() == [5, 5, 5]
        assert ckpt["a.mid"].numpy().tolist() == [1, 1, 1]
    code, _, err = run("package", "--replace", files / "p.pt2", f"b={files / 'adapter.safetensors'}", "-o", files / "r.pt2")
    assert code == 2
    assert "b.lora: the program has no such weight" in err
    assert not (files / "r.pt2").exists()


def test_tie(run, tmp_path):
    holdfast.save(tmp_path / "a.pt", {"x": np.arange(1000.0), "y": np.arange(1000.0)})
    before = (tmp_path / "a.pt").read_bytes()
    code, out, err = run("tie", tmp_path / "a.pt")
    assert (code, err) == (0, "")
    assert "8,000 of 16,000 bytes could be saved" in out
    assert '"x" = "y"' in out
    assert (tmp_path / "a.pt").read_bytes() == before
    code, out, _ = run("tie", tmp_path / "a.pt", "-o", tmp_path / "b.safetensors")
    assert code == 0
    assert "wrote" in out
    assert (tmp_path / "b.safetensors").stat().st_size < 10_000
    assert run("tie", tmp_path / "a.pt", "--in-place", "-q")[:2] == (0, "")
    assert (tmp_path / "a.pt").stat().st_size < 10_000
    assert run("tie", tmp_path / "a.pt", "--in-place", "-o", tmp_path / "c.pt")[0] == 2


def test_compact(run, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"rows": torch.zeros(100_000)[10:20]}, tmp_path / "a.pt")
    code, out, _ = run("compact", tmp_path / "a.pt", "-o", tmp_path / "b.pt")
    assert code == 0
    assert "KiB less" in out
    assert (tmp_path / "b.pt").stat().st_size < 2000
    assert run("compact", tmp_path / "a.pt", "-q")[:2] == (0, "")
    assert (tmp_path / "a.pt").stat().st_size < 2000
