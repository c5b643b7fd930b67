"""Many views of few buffers: what a table says of them, what is written, and what comes back, against arrays of numpy."""

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

BUFFER = 48
DTYPES = ("uint8", "float32", "int64")
FORMATS = {"native": "x", "safetensors": "x.safetensors", "pt": "x.pt"}


@st.composite
def places(draw):
    """Where a view lies: its buffer, its first element, its shape and its strides, in elements; none reaches out of the buffer."""
    buffer, rank = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    shape = draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))
    dense = [int(np.prod(shape[at + 1 :])) for at in range(rank)]
    strides = (
        dense
        if draw(st.booleans())
        else draw(st.lists(st.integers(0, 6), min_size=rank, max_size=rank))
    )
    reach = (
        sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if 0 not in shape
        else 0
    )
    return buffer, draw(st.integers(0, BUFFER - 1 - reach)), tuple(shape), tuple(strides)


@st.composite
def states(draw):
    """Views of three buffers, each array with its place; some tensors of torch, some arrays of numpy."""
    buffers = [
        torch.arange(BUFFER).to(getattr(torch, draw(st.sampled_from(DTYPES)))) + 7 * at
        for at in range(3)
    ]
    found = draw(st.lists(places(), min_size=1, max_size=8))
    tensors = [torch.as_strided(buffers[one[0]], one[2], one[3], one[1]) for one in found]
    library = draw(st.sampled_from(["torch", "numpy"]))
    values = tensors if library == "torch" else [tensor.numpy() for tensor in tensors]
    return {f"t{at}": value for at, value in enumerate(values)}, dict(
        zip((f"t{at}" for at in range(len(found))), found, strict=True)
    )


def array(value: object) -> np.ndarray:
    return value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=examples(60), deadline=None)
@given(given_state=states())
def test_what_was_saved_comes_back(format, given_state):
    state, _ = given_state
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FORMATS[format]
        holdfast.save(state, path, durable=False)
        other = Path(folder) / "converted"
        holdfast.convert(path, other, durable=False)
        for file in (path, other):
            assert holdfast.verify(file).ok
            with holdfast.open(file) as checkpoint:
                found = checkpoint.read()
                assert found.keys() == state.keys()
                for name, value in state.items():
                    assert (found[name].dtype, found[name].shape) == (
                        array(value).dtype,
                        array(value).shape,
                    )
                    assert found[name].tobytes() == array(value).tobytes()


def test_notes_of_many_views(tmp_path):
    """Each view is noted with its offset and strides, in bits."""
    big = torch.arange(3000, dtype=torch.float32).reshape(1000, 3)
    holdfast.save({f"t{at}": big[at] for at in range(1000)}, tmp_path / "x", durable=False)
    (group,) = json.loads((tmp_path / "x" / "holdfast.json").read_bytes())["views"]
    assert group == {"nbytes": 12_000, "names": {f"t{at}": [96 * at, [32]] for at in range(1000)}}


def test_a_part_that_is_gone_is_named(tmp_path):
    """A source that ends too early: the error says which view it was."""
    big = torch.arange(256, dtype=torch.float32).reshape(64, 4)
    torch.save({f"t{at}": big[at] for at in range(64)}, tmp_path / "x.pt")
    with holdfast.open(tmp_path / "x.pt") as checkpoint:
        table = tabulate_state(checkpoint).tensors
        (tmp_path / "x.pt").write_bytes(b"")
        with pytest.raises(holdfast.HoldfastError) as caught:
            table.read_bytes(range(64))
    assert "t" in (caught.value.tensor or "")
