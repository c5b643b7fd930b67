"""Parts of a tensor read by one call, against the way with a plan: the same elements, counts and errors."""

import os

import numpy as np
import pytest

import holdfast
from holdfast.engine import computed
from holdfast.engine.computed import read_flat
from holdfast.errors import HoldfastError

RANGES = [(0, 1), (0, 59), (1, 60), (7, 8), (13, 41), (0, 60), (20, 20)]


@pytest.fixture(params=["a.safetensors", "a.pt", "a"])
def path(request, tmp_path):
    state = {name: np.arange(60).astype(name).reshape(3, 4, 5) for name in ("float32", "int8", "uint16", "complex64")}
    holdfast.save(state | {"turned": state["float32"].T}, tmp_path / request.param)
    return tmp_path / request.param


def test_the_same_elements_are_read_and_counted(path, monkeypatch):
    with holdfast.open(path) as checkpoint:
        for name in checkpoint:
            tensor = checkpoint[name]
            whole, counts = tensor.numpy().reshape(-1), []
            for quick in (True, False):
                with monkeypatch.context() as patch:
                    if not quick:
                        patch.setattr(computed, "_read_row", lambda *_: False)
                    before = checkpoint.source.read_nbytes
                    for start, stop in RANGES:
                        assert read_flat(tensor, start, stop).tobytes() == whole[start:stop].tobytes()
                    counts.append(checkpoint.source.read_nbytes - before)
            assert counts[0] == counts[1]


def test_what_cannot_be_read_is_said_as_with_a_plan(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    holdfast.save({"w": np.arange(6000, dtype=np.float32)}, path)
    with holdfast.open(path) as checkpoint:
        os.truncate(path, 4000)
        said = []
        for quick in (True, False):
            if not quick:
                monkeypatch.setattr(computed, "_read_row", lambda *_: False)
            with pytest.raises(HoldfastError) as caught:
                read_flat(checkpoint["w"], 10, 5000)
            said.append((type(caught.value), str(caught.value)))
        assert said[0] == said[1]
