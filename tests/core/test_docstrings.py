"""The examples in the docstrings of `holdfast.core` do what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest

import holdfast
import holdfast.core

FOLDER = Path(holdfast.core.__path__[0])

MODULES = sorted(
    path.stem for path in FOLDER.glob("*.py") if ">>>" in path.read_text(encoding="utf-8")
)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """The checkpoint that the examples use, in the current folder."""
    state = {
        "layers.0.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
        "layers.0.bias": np.zeros(3, np.float32),
    }
    holdfast.save(state, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    with holdfast.open("model.safetensors") as checkpoint:
        yield checkpoint


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_work(name, checkpoint):
    module = importlib.import_module(f"holdfast.core.{name}")
    results = doctest.testmod(module, extraglobs={"checkpoint": checkpoint})
    assert results.attempted > 0
    assert results.failed == 0
