"""`holdfast seal`, and what `verify` and `show` say about sealed folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "step-500"
    path.mkdir()
    holdfast.save({"w": np.arange(300, dtype=np.float32)}, path / "model.safetensors")
    (path / "notes.txt").write_text("x")
    return path


def test_seal_verify_and_show(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["seal", str(folder), "--metric", "val_loss=2.1", "--metric", "odd=nan"]) == 0
    assert "step 500, val_loss 2.1, odd nan" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 0
    assert "sealed as step 500, 2 files" in capsys.readouterr().out
    assert main(["show", str(folder)]) == 0
    assert "seal      sealed as step 500, 2 files" in capsys.readouterr().out
    (folder / "notes.txt").unlink()
    assert main(["verify", str(folder)]) == 1
    assert "notes.txt: missing" in capsys.readouterr().out
    assert main(["show", str(folder)]) == 0
    assert "incomplete notes.txt: missing" in capsys.readouterr().out
    (folder / "model.safetensors").unlink()
    (folder / "notes.txt").write_text("x")
    assert main(["show", str(folder)]) == 0
    assert "model.safetensors: missing" in capsys.readouterr().out


def test_the_document(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["seal", str(folder), "--step", "7", "--metric", "odd=inf", "--json"]) == 0
    (sealed,) = json.loads(capsys.readouterr().out)["sealed"]
    assert (sealed["step"], sealed["metrics"], sealed["done"]) == (7, {"odd": "inf"}, True)
    assert [file["name"] for file in sealed["files"]] == ["model.safetensors", "notes.txt"]
    assert main(["verify", str(folder), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert found["sealed"]["step"] == 7


def test_refusals_are_in_the_words_of_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["seal", str(folder), "--dry-run"]) == 0
    assert "would seal" in capsys.readouterr().out
    assert main(["seal", str(folder), "-q"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["seal", str(folder)]) == 2
    assert "pass --overwrite" in capsys.readouterr().err
    for wrong in (
        ["--step", "-1"],
        ["--step", "x"],
        ["--metric", "a"],
        ["--metric", "a=b"],
        ["--digest", "md5"],
    ):
        assert main(["seal", str(folder), "--overwrite", *wrong]) == 2
    capsys.readouterr()
    assert main(["seal", str(folder), str(folder), "--step", "5"]) == 2
    assert "one by one" in capsys.readouterr().err
