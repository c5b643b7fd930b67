"""Many views of few buffers: they are saved, described and read back as the arrays that they are."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
import holdfast.torch
from holdfast.verbs.shared.state import tabulate_state
from tests.sampling import examples

BUFFER_ELEMENTS = 48
DTYPES = ("uint8", "float32", "int64")
FORMATS = {"native": "x", "safetensors": "x.safetensors", "pt": "x.pt"}


@st.composite
def views(draw, buffers):
    """Draw a view of one of these buffers, with any strides."""
    buffer = draw(st.sampled_from(buffers))
    rank = draw(st.integers(0, 2))
    shape = draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))
    if draw(st.booleans()):
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(rank)]
    else:
        strides = draw(st.lists(st.integers(0, 6), min_size=rank, max_size=rank))
    last_offset = 0
    if 0 not in shape:
        last_offset = sum(
            (length - 1) * stride for length, stride in zip(shape, strides, strict=True)
        )
    first_element = draw(st.integers(0, BUFFER_ELEMENTS - 1 - last_offset))
    return torch.as_strided(buffer, shape, strides, first_element)


@st.composite
def states(draw):
    """Draw a state of views of three buffers, as tensors of torch or as arrays of numpy."""
    buffers = []
    for index in range(3):
        dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
        buffers.append(torch.arange(BUFFER_ELEMENTS).to(dtype) + 7 * index)
    tensors = draw(st.lists(views(buffers), min_size=1, max_size=8))
    if draw(st.booleans()):
        return {f"t{index}": tensor for index, tensor in enumerate(tensors)}
    return {f"t{index}": tensor.numpy() for index, tensor in enumerate(tensors)}


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=examples(60), deadline=None)
@given(state=states())
def test_views_come_back_as_the_arrays_that_they_are(format, state):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FORMATS[format]
        holdfast.save(state, path, durable=False)
        converted_path = Path(folder) / "converted"
        holdfast.convert(path, converted_path, durable=False)
        for saved_path in (path, converted_path):
            assert holdfast.verify(saved_path).ok
            with holdfast.open(saved_path) as checkpoint:
                arrays = checkpoint.read()
            assert arrays.keys() == state.keys()
            for name, value in state.items():
                expected = np.asarray(value)
                assert arrays[name].dtype == expected.dtype
                assert arrays[name].shape == expected.shape
                assert arrays[name].tobytes() == expected.tobytes()


def test_the_offset_and_strides_of_each_view_are_recorded_in_bits(tmp_path):
    matrix = torch.arange(3000, dtype=torch.float32).reshape(1000, 3)
    holdfast.save({f"t{row}": matrix[row] for row in range(1000)}, tmp_path / "x", durable=False)
    (group,) = json.loads((tmp_path / "x" / "holdfast.json").read_bytes())["views"]
    assert group["nbytes"] == 12_000
    assert group["names"] == {f"t{row}": [96 * row, [32]] for row in range(1000)}


def test_an_error_names_a_view_of_a_file_that_ends_too_early(tmp_path):
    matrix = torch.arange(256, dtype=torch.float32).reshape(64, 4)
    torch.save({f"t{row}": matrix[row] for row in range(64)}, tmp_path / "x.pt")
    with holdfast.open(tmp_path / "x.pt") as checkpoint:
        table = tabulate_state(checkpoint).tensors
        (tmp_path / "x.pt").write_bytes(b"")
        with pytest.raises(holdfast.HoldfastError) as caught:
            table.read_bytes(range(64))
    assert caught.value.tensor in table.names
