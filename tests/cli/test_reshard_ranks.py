"""`holdfast reshard` of a Hugging Face folder: its config and tokenizer come along, and are no ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main


@pytest.mark.parametrize("far", [False, True], ids=["a directory", "a URL"])
def test_side_files_are_no_ranks(tmp_path: Path, far: bool, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("obstore")
    source = tmp_path / "model"
    holdfast.save(
        {"a": np.ones((4, 4), np.float32)}, source, format="safetensors", max_shard_size="1MB"
    )
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "tokenizer.json").write_text("{}")
    target = "memory://resharded/out" if far else str(tmp_path / "out")
    assert (
        main(["reshard", str(source), target, "--mesh", "dp=2,tp=2", "--rule", "*: tp=0", "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == 4
    assert len(told["files"]) > 5, "and the others are there"
    with holdfast.open(target) as checkpoint:
        assert checkpoint["a"].numpy().sum() == 16
    assert holdfast.verify(target).ok
    assert main(["reshard", str(source), f"{target}-again", "--mesh", "tp=1"]) == 0
    assert "for 1 rank" in capsys.readouterr().out
