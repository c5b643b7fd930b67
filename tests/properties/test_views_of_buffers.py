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
from holdfast.core.table import Kind, is_inside, with_outside
from holdfast.engine.files import BYTES
from holdfast.saving.state import tabulate_state
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


@settings(max_examples=examples(150), deadline=None)
@given(given_state=states())
def test_a_table_says_where_each_view_lies(given_state):
    state, expected = given_state
    table = tabulate_state(dict(state)).tensors
    together = [row for row in range(len(table)) if row not in table.single]
    for row, (buffer, first, shape, strides) in enumerate(expected.values()):
        value, kind = state[table.names[row]], table.kind_of(row)
        assert kind.shape == shape
        if isinstance(value, torch.Tensor) and 0 not in shape:
            width = kind.dtype.bits
            assert (table.offset_of(row), kind.strides) == (
                width * first,
                tuple(width * step for step in strides),
            )
            assert kind.dense == array(value).flags.c_contiguous == (row in together)
            here = [
                at
                for at, place in enumerate(expected.values())
                if 0 not in place[2] and place[0] == buffer
            ]
            assert {table.storage[at] for at in here} == {table.storage[row]}
    pieces = table.read(together)
    for row, piece in zip(together, pieces, strict=True):
        assert bytes(piece) == array(state[table.names[row]]).tobytes()


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


@settings(max_examples=examples(60), deadline=None)
@given(given_state=states())
def test_torch_reads_what_was_written_as_it_reads_its_own(given_state):
    state = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in given_state[0].items()
    }
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "x.pt", Path(folder) / "theirs" / "x.pt"
        theirs.parent.mkdir()
        holdfast.torch.save(state, ours)
        torch.save(state, theirs)
        assert ours.read_bytes() == theirs.read_bytes()
        with holdfast.open(theirs) as checkpoint:
            found = checkpoint.read()
            for name, value in state.items():
                assert found[name].tobytes() == value.numpy().tobytes()


def test_notes_of_many_views(tmp_path):
    """Each view is noted with its offset and strides, in bits."""
    big = torch.arange(3000, dtype=torch.float32).reshape(1000, 3)
    holdfast.save({f"t{at}": big[at] for at in range(1000)}, tmp_path / "x", durable=False)
    (group,) = json.loads((tmp_path / "x" / "holdfast.json").read_bytes())["views"]
    assert group == {"nbytes": 12_000, "names": {f"t{at}": [96 * at, [32]] for at in range(1000)}}


@given(offsets=st.lists(st.integers(-80, 200), max_size=12))
def test_rows_that_reach_out_of_their_storage_have_a_kind_of_their_own(offsets):
    kinds = [Kind.strided(BYTES, (4,), (8,), storage_nbytes=16)]
    kind = [0] * len(offsets)
    with_outside(kinds, kind, dict(enumerate(offsets)))
    for one, offset in zip(kind, offsets, strict=True):
        assert (
            kinds[one].dense
            == is_inside(offset, 4, 16)
            == (offset in {8 * byte for byte in range(13)})
        )


def test_a_part_that_is_gone_is_named(tmp_path):
    """A source that ends too early: the error says which view it was."""
    big = torch.arange(256, dtype=torch.float32).reshape(64, 4)
    torch.save({f"t{at}": big[at] for at in range(64)}, tmp_path / "x.pt")
    with holdfast.open(tmp_path / "x.pt") as checkpoint:
        table = tabulate_state(checkpoint).tensors
        (tmp_path / "x.pt").write_bytes(b"")
        with pytest.raises(holdfast.HoldfastError) as caught:
            table.read(range(64))
    assert "t" in (caught.value.tensor or "")
