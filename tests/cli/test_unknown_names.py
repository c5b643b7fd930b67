"""Names that no tensor has: which commands refuse them."""

from __future__ import annotations

import numpy as np
import pytest

import holdfast
import holdfast.errors
from holdfast.cli.main import main


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
