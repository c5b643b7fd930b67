"""`holdfast package`, `tie` and `compact`, and what `show` says of several models."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

import holdfast
from tests.support import nbytes_on_disk


@pytest.fixture
def files(tmp_path):
    base = {"emb": np.arange(5000.0), "mid": np.ones(3)}
    holdfast.save(base, tmp_path / "base.pt")
    holdfast.save({**base, "lora": np.zeros(4)}, tmp_path / "adapter.safetensors")
    return tmp_path


def test_a_package_of_files(run, files):
    code, out, err = run(
        "package", f"a={files / 'base.pt'}", f"b={files / 'adapter.safetensors'}", files / "p.pt2"
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"wrote {files / 'p.pt2'}  pt2  ")
    assert (files / "p.pt2").stat().st_size > 80_000
    code, out, _ = run(
        "package",
        f"a={files / 'base.pt'}",
        f"b={files / 'adapter.safetensors'}",
        "--content",
        files / "q.pt2",
        "-q",
    )
    assert (code, out) == (0, "")
    assert (files / "q.pt2").stat().st_size < 45_000
    code, out, _ = run("show", files / "q.pt2")
    assert "shared    a + b  39.1 KiB in 2 storages, which saves 39.1 KiB" in out
    _, out, _ = run("show", files / "p.pt2")
    assert "shared" not in out


def test_a_native_package(run, files):
    code, out, _ = run(
        "package", f"a={files / 'base.pt'}", f"b={files / 'base.pt'}", files / "bundle"
    )
    assert code == 0
    assert "  native  " in out
    with holdfast.open(files / "bundle") as ckpt:
        assert list(ckpt) == ["a.emb", "a.mid", "b.emb", "b.mid"]
    assert "shared    a + b" in run("show", files / "bundle")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("base.pt", "p.pt2"), "NAME=PATH"),
        (("a=base.pt", "a=adapter.safetensors", "p.pt2"), "the same name"),
        (("a=base.pt",), "no target"),
        (("a=nothing.pt", "p.pt2"), "no such file"),
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
    run("package", f"a={files / 'base.pt'}", f"b={files / 'base.pt'}", files / "p.pt2")
    holdfast.save({"emb": np.zeros(5000), "mid": np.full(3, 5.0)}, files / "tuned.pt")
    code, out, err = run(
        "package", "--replace", files / "p.pt2", f"b={files / 'tuned.pt'}", files / "q.pt2"
    )
    assert (code, err) == (0, "")
    assert out.startswith("wrote ")
    with holdfast.open(files / "q.pt2") as ckpt:
        assert ckpt["b.mid"].numpy().tolist() == [5, 5, 5]
        assert ckpt["a.mid"].numpy().tolist() == [1, 1, 1]
    code, _, err = run(
        "package",
        "--replace",
        files / "p.pt2",
        f"b={files / 'adapter.safetensors'}",
        files / "r.pt2",
    )
    assert code == 2
    assert "b.lora: the program has no such weight" in err
    assert not (files / "r.pt2").exists()


def test_tie(run, tmp_path):
    holdfast.save({"x": np.arange(1000.0), "y": np.arange(1000.0)}, tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    code, out, err = run("tie", tmp_path / "a.pt", "--dry-run")
    assert (code, err) == (0, "")
    assert "8,000 of 16,000 bytes could be saved" in out
    assert '"x" = "y"' in out
    assert (tmp_path / "a.pt").read_bytes() == before
    code, out, _ = run("tie", tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert code == 0
    assert "wrote" in out
    assert (tmp_path / "b.safetensors").stat().st_size < 10_000
    assert run("tie", tmp_path / "a.pt", "--in-place", "-q")[:2] == (0, "")
    assert (tmp_path / "a.pt").stat().st_size < 10_000
    assert run("tie", tmp_path / "a.pt", "--in-place", tmp_path / "c.pt")[0] == 2


def test_compact(run, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"rows": torch.zeros(100_000)[10:20]}, tmp_path / "a.pt")
    code, out, _ = run("compact", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 0
    assert "KiB less" in out
    assert (tmp_path / "b.pt").stat().st_size < 2000
    assert run("compact", tmp_path / "a.pt", "--in-place", "-q")[:2] == (0, "")
    assert (tmp_path / "a.pt").stat().st_size < 2000


WRITTEN = {
    "schema",
    "target",
    "folder",
    "format",
    "done",
    "write_nbytes",
    "files",
    "free_nbytes",
    "notes",
    "seconds",
}
"""What the documents of all three verbs have."""


def documents(run, *arguments):
    """What a verb says it would do, and what it says it did; nothing may be there in between."""
    target = arguments[-1]
    code, out, err = run(*arguments, "--json", "--dry-run")
    assert (code, err) == (0, "")
    assert not target.exists()
    code, again, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    planned, done = json.loads(out), json.loads(again)
    assert (planned["done"], planned["seconds"], done["done"]) == (False, None, True)
    assert set(planned) == set(done) >= WRITTEN
    assert {k: v for k, v in planned.items() if k not in ("done", "seconds", "free_nbytes")} == {
        k: v for k, v in done.items() if k not in ("done", "seconds", "free_nbytes")
    }
    assert (
        done["write_nbytes"]
        == sum(file["nbytes"] for file in done["files"])
        == nbytes_on_disk(target)
    )
    return done


@pytest.mark.parametrize(("name", "format"), [("p.pt2", "pt2"), ("p", "native")])
def test_a_package_as_json(run, files, name, format):
    models = {"a": str(files / "base.pt"), "b": str(files / "adapter.safetensors")}
    done = documents(
        run, "package", *(f"{n}={p}" for n, p in models.items()), "--content", files / name
    )
    assert (done["models"], done["format"], done["target"]) == (models, format, str(files / name))


def test_other_weights_as_json(run, files):
    run("package", f"a={files / 'base.pt'}", files / "p.pt2", "-q")
    done = documents(
        run, "package", "--replace", files / "p.pt2", files / "base.pt", files / "q.pt2"
    )
    assert (done["source"], done["weights"], done["model"]) == (
        str(files / "p.pt2"),
        str(files / "base.pt"),
        None,
    )


def test_ties_as_json(run, tmp_path):
    holdfast.save(
        {"x": np.arange(1000.0), "y": np.arange(1000.0), "z": np.ones(3)}, tmp_path / "a.pt"
    )
    group = {
        "names": ["x", "y"],
        "dtype": "float64",
        "shape": [1000],
        "storages": 2,
        "savable_nbytes": 8000,
    }
    code, out, _ = run("tie", tmp_path / "a.pt", "--dry-run", "--json")
    assert code == 0
    told = json.loads(out)
    assert {key: value for key, value in told.items() if key not in WRITTEN or key in ("schema", "done", "notes")} == {
        "schema": 1, "source": str(tmp_path / "a.pt"), "nbytes": 16024, "savable_nbytes": 8000, "groups": [group], "done": False,
        "notes": [],
    }  # fmt: skip
    done = documents(run, "tie", tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert (done["groups"], done["savable_nbytes"]) == ([group], 8000)


def test_what_could_not_be_tied_is_in_the_notes(run, tmp_path):
    torch = pytest.importorskip("torch")
    whole, other = torch.arange(1000.0), torch.arange(1000.0)
    torch.save(
        {"a": whole[:500], "b": whole[250:], "c": other[:500], "d": other[250:]}, tmp_path / "a.pt"
    )
    done = documents(run, "tie", tmp_path / "a.pt", tmp_path / "b.pt")
    assert any("left where other views of their storages are" in note for note in done["notes"])


def test_compact_as_json(run, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"rows": torch.zeros(100_000)[10:20]}, tmp_path / "a.pt")
    done = documents(run, "compact", tmp_path / "a.pt", tmp_path / "b.pt")
    assert done["before_nbytes"] == nbytes_on_disk(tmp_path / "a.pt")
    assert (
        done["dropped_nbytes"]
        == nbytes_on_disk(tmp_path / "a.pt") - nbytes_on_disk(tmp_path / "b.pt")
        > 390_000
    )


def test_dry_runs_in_words(run, files, tmp_path):
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    code, out, _ = run("package", f"a={files / 'base.pt'}", files / "p.pt2", "-n")
    assert code == 0
    assert out.startswith(f"→ {files / 'p.pt2'} (pt2)")
    assert "bytes in 1 file" in out
    code, out, _ = run("compact", files / "base.pt", "-n")
    assert code == 0
    assert "bytes would go" in out
    code, out, _ = run("tie", files / "base.pt", "--in-place", "--dry-run")
    assert code == 0
    assert "0 of 40,024 bytes could be saved" in out
    assert f"→ {files / 'base.pt'} (torch-zip)" in out
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before


@pytest.mark.parametrize("verb", ["tie", "compact"])
def test_a_folder_that_is_not_there(run, files, verb):
    code, _, err = run(verb, files / "base.pt", files / "nowhere" / "b.pt", "-n")
    assert code == 2
    assert "cannot be used" in err
