"""Parts of a tensor as a row of elements: those of the whole, as many bytes as they take, and errors with its name."""

import os

import numpy as np
import pytest

import holdfast
from holdfast.engine.computed import read_flat_elements
from holdfast.errors import HoldfastError

RANGES = [(0, 1), (0, 59), (1, 60), (7, 8), (13, 41), (0, 60), (20, 20)]


@pytest.fixture(params=["a.safetensors", "a.pt", "a"])
def path(request, tmp_path):
    state = {
        name: np.arange(60).astype(name).reshape(3, 4, 5)
        for name in ("float32", "int8", "uint16", "complex64")
    }
    holdfast.save(state | {"turned": state["float32"].T}, tmp_path / request.param)
    return tmp_path / request.param


def test_parts_are_the_elements_of_the_whole_and_are_counted(path):
    with holdfast.open(path) as checkpoint:
        for name in checkpoint:
            tensor = checkpoint[name]
            whole, before = tensor.numpy().reshape(-1), checkpoint.source.read_nbytes
            for start, stop in RANGES:
                assert (
                    read_flat_elements(tensor, start, stop).tobytes() == whole[start:stop].tobytes()
                )
            width = whole.dtype.itemsize
            least = sum(stop - start for start, stop in RANGES) * width
            assert least <= checkpoint.source.read_nbytes - before
            # Of a tensor that is turned what lies between elements is read as well.
            assert name == "turned" or checkpoint.source.read_nbytes - before == least


def test_what_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    holdfast.save({"w": np.arange(6000, dtype=np.float32)}, path)
    with holdfast.open(path) as checkpoint:
        os.truncate(path, 4000)
        said = []
        for read in (lambda w: read_flat_elements(w, 10, 5000), lambda w: w[10:5000].numpy()):
            with pytest.raises(HoldfastError, match="w") as caught:
                read(checkpoint["w"])
            said.append((type(caught.value), caught.value.tensor, str(caught.value)))
        assert said[0] == said[1]
        assert said[0][1] == "w"
