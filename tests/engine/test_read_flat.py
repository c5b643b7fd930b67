"""`read_flat_elements`: the right elements, no unwanted bytes, and errors that name the tensor."""

import os

import numpy as np
import pytest

import holdfast
from holdfast.engine.computed import read_flat_elements
from holdfast.errors import HoldfastError

RANGES = [(0, 1), (0, 59), (1, 60), (7, 8), (13, 41), (0, 60), (20, 20)]


@pytest.fixture(params=["a.safetensors", "a.pt", "a"])
def path(request, tmp_path):
    state = {}
    for name in ("float32", "int8", "uint16", "complex64"):
        state[name] = np.arange(60).astype(name).reshape(3, 4, 5)
    state["transposed"] = state["float32"].T
    holdfast.save(state, tmp_path / request.param)
    return tmp_path / request.param


def test_ranges_have_the_elements_of_the_tensor_and_are_counted(path):
    with holdfast.open(path) as checkpoint:
        for name in checkpoint:
            tensor = checkpoint[name]
            elements = tensor.numpy().reshape(-1)
            nbytes_before = checkpoint.source.read_nbytes

            for start, stop in RANGES:
                read_elements = read_flat_elements(tensor, start, stop)
                assert read_elements.tobytes() == elements[start:stop].tobytes()

            read_nbytes = checkpoint.source.read_nbytes - nbytes_before
            wanted_nbytes = sum(stop - start for start, stop in RANGES) * elements.itemsize
            if name == "transposed":
                # What lies between the elements is read as well.
                assert read_nbytes >= wanted_nbytes
            else:
                assert read_nbytes == wanted_nbytes


def test_an_error_is_the_one_of_a_slice_and_names_the_tensor(tmp_path):
    path = tmp_path / "a.safetensors"
    holdfast.save({"w": np.arange(6000, dtype=np.float32)}, path)
    with holdfast.open(path) as checkpoint:
        os.truncate(path, 4000)
        tensor = checkpoint["w"]
        with pytest.raises(HoldfastError) as flat_error:
            read_flat_elements(tensor, 10, 5000)
        with pytest.raises(HoldfastError) as slice_error:
            tensor[10:5000].numpy()

    assert flat_error.value.tensor == "w"
    assert type(flat_error.value) is type(slice_error.value)
    assert str(flat_error.value) == str(slice_error.value)
