"""Reading many tensors together gives the bytes that lie in the files, or errors that name the tensor."""

import io
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.limits import Limits
from holdfast.core.tensor import LazyTensor
from holdfast.engine.coalesce import MEMORY
from holdfast.errors import Corrupted, HoldfastError, Truncated
from tests.properties.test_reading import index_for
from tests.sampling import examples

FEW = 16
"""Drawn states have about this many tensors or more."""

ARRAY_DTYPES = [
    np.bool_,
    np.uint8,
    np.int16,
    np.float32,
    np.float64,
    np.complex64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e5m2,
]
FORMATS = {"safetensors": "a.safetensors", "native": "a", "torch": "a.pt"}


def read_by_hand(tensor: LazyTensor) -> np.ndarray:
    """Return the elements of a tensor as they lie in its files, without the engine."""
    array = np.zeros(tensor.shape, tensor.dtype.numpy)
    for chunk in tensor.chunks:
        if not chunk.box.count:
            continue
        store = tensor.source.store
        content = store.map(chunk.storage.key)
        if content is None:
            content = bytearray(store.size(chunk.storage.key))
            store.read(chunk.storage.key, 0, memoryview(content))
        offset = chunk.storage.start + chunk.offset // 8
        strides = tuple(stride // 8 for stride in chunk.strides)
        array[chunk.box.slices] = np.ndarray(
            chunk.shape, tensor.dtype.numpy, content, offset, strides
        )
    if tensor.traits.conj:
        array = array.conj()
    if tensor.traits.neg:
        array = -array
    return array


def describe_array(array: np.ndarray) -> tuple[object, ...]:
    """Return everything that must be equal in two arrays: shape, dtype, bits and kind of memory."""
    flags = array.flags
    memory = (flags.owndata, flags.writeable, flags.c_contiguous, flags.aligned)
    return array.shape, array.dtype, array.tobytes(), memory


def assert_reads(read, tensors):
    """Check that a call returns exactly what lies in the files."""
    expected_arrays = [read_by_hand(tensor) for tensor in tensors]
    assert list(map(describe_array, read())) == list(map(describe_array, expected_arrays))


def assert_refuses(read, error_type, names, offsets=()):
    """Check that a call raises an error for one of these tensors, and says where its bytes lie."""
    with pytest.raises(error_type) as caught:
        read()
    error = caught.value
    assert error.tensor in names
    if isinstance(error, Corrupted) and not isinstance(error, Truncated):
        assert error.offset in offsets
        assert error.expected is not None
        assert error.file is not None


@st.composite
def states(draw):
    """Draw a state of many small arrays, with empty ones, scalars, ties, views and perhaps a long one."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    drawn_shapes = st.lists(st.integers(0, 4), max_size=3)
    shapes = draw(st.lists(drawn_shapes, min_size=FEW - 2, max_size=FEW + 12))
    state = {}
    for index, shape in enumerate(shapes):
        dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
        nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
        content = np.frombuffer(random.bytes(nbytes), np.uint8).copy()
        if dtype == np.bool_:
            content &= 1
        array = content.view(dtype).reshape(shape)
        order = draw(st.sampled_from(["C", "C", "C", "transposed", "reversed"]))
        if order == "transposed":
            array = array.T
        elif order == "reversed" and shape:
            array = array[..., ::-1]
        state[f"t.{index}"] = array
    if draw(st.booleans()):
        state["long"] = np.frombuffer(random.bytes(MEMORY.separate_nbytes + 8), np.int64)
    if draw(st.booleans()):
        state["tied"] = state["t.0"]
        state["half"] = state["t.1"]
        if state["t.1"].ndim:
            state["half"] = state["t.1"][:1]
    return state


@settings(max_examples=examples(25), deadline=None)
@given(st.data(), states(), st.sampled_from(sorted(FORMATS)), st.booleans(), st.booleans())
def test_every_way_to_read_many_tensors_gives_the_bytes_of_the_file(
    tmp_path_factory, data, state, format, mapped, asks_for_missing
):
    path = tmp_path_factory.mktemp("columns") / FORMATS[format]
    holdfast.save(state, path)
    known_names = [*state, "missing"] if asks_for_missing else [*state]
    names = data.draw(st.lists(st.sampled_from(known_names), max_size=2 * FEW))
    with holdfast.open(path, mmap=mapped) as checkpoint:
        tensors = list(checkpoint.values())
        slices = []
        for tensor in tensors:
            if tensor.size:
                tensor = tensor[data.draw(index_for(tensor.shape))]
            slices.append(tensor)

        assert list(checkpoint.read()) == list(checkpoint)
        assert_reads(lambda: checkpoint.read().values(), tensors)
        if "missing" in names:
            with pytest.raises(holdfast.errors.NoSuchTensor):
                checkpoint.read(names)
        elif names:
            named_tensors = [checkpoint[name] for name in dict.fromkeys(names)]
            assert_reads(lambda: checkpoint.read(names).values(), named_tensors)
        assert_reads(lambda: holdfast.read(tensors), tensors)
        assert_reads(lambda: [tensor.read() for tensor in tensors], tensors)
        assert_reads(lambda: holdfast.read(slices), slices)


class Damage(NamedTuple):
    """What was done to a file, and which tensors it concerns."""

    is_truncated: bool
    names: set[str]
    """The tensors with damaged or missing bytes."""
    offsets: set[int]
    """The starts of their storages."""


def damage_file(data, path, checkpoint) -> Damage:
    """Change a byte of the data of some tensor, or cut the file off there."""
    storages = [storage for tensor in checkpoint.values() for storage in tensor.storages]
    storage = data.draw(st.sampled_from([storage for storage in storages if storage.nbytes]))
    file_path = path / storage.key if path.is_dir() else path
    offset = storage.start + data.draw(st.integers(0, storage.nbytes - 1))
    is_truncated = data.draw(st.booleans())
    if is_truncated:
        os.truncate(file_path, offset)
    else:
        with file_path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << data.draw(st.integers(0, 7))]))

    names = set()
    offsets = set()
    for tensor in checkpoint.values():
        for other in tensor.storages:
            is_reached = other.key == storage.key and other.start + other.nbytes > offset
            if is_reached and (is_truncated or other.start <= offset):
                offsets.add(other.start)
                if tensor.nbytes:
                    names.add(tensor.name)
    return Damage(is_truncated, names, offsets)


@settings(max_examples=examples(25), deadline=None)
@given(st.data(), states(), st.sampled_from(sorted(FORMATS)), st.booleans())
def test_damage_is_reported_with_its_tensor(tmp_path_factory, data, state, format, verify):
    state["one"] = np.ones(3)
    path = Path(tmp_path_factory.mktemp("columns")) / FORMATS[format]
    holdfast.save(state, path)
    with holdfast.open(path, verify=verify) as checkpoint:
        is_truncated, names, offsets = damage_file(data, path, checkpoint)
        # Checksums are compared only for tensors that are read completely with their storages.
        whole_names = set()
        for tensor in checkpoint.values():
            if tensor.nbytes == sum(storage.nbytes for storage in tensor.storages):
                whole_names.add(tensor.name)
        error_type = HoldfastError if is_truncated else Corrupted

        if is_truncated or (verify and names & whole_names):
            reversed_tensors = list(checkpoint.values())[::-1]
            assert_refuses(checkpoint.read, error_type, names, offsets)
            assert_refuses(lambda: holdfast.read(reversed_tensors), error_type, names, offsets)
        for tensor in checkpoint.values():
            if tensor.name not in names:
                assert tensor.read().shape == tensor.shape
            elif is_truncated:
                continue
            elif verify and tensor.name in whole_names:
                assert_refuses(tensor.read, error_type, [tensor.name], offsets)
            else:
                assert_reads(lambda tensor=tensor: [tensor.read()], [tensor])
                if tensor.shape:
                    last_row = tensor[-1:]
                    assert_reads(lambda last_row=last_row: [last_row.read()], [last_row])


@st.composite
def row_slices(draw, matrix, vector):
    """Draw many slices of rows of a matrix that look alike, and some that do not, of it and a vector."""
    height, width = matrix.shape
    length = draw(st.integers(1, min(width, height) - 1))
    positions = st.tuples(st.integers(-height, height - 1), st.integers(0, width - length - 1))
    slices = []
    for row, start in draw(st.lists(positions, min_size=2 * FEW, max_size=3 * FEW)):
        slices.append(matrix[row, start : start + length])
    other_slices = [
        matrix[3, : length + 1],
        matrix[:length, 2],
        matrix[1:3],
        matrix[::2, 1],
        vector[3:5],
        vector[3 : 3 + length],
    ]
    for index in draw(st.lists(st.integers(0, 2 * FEW - 1), min_size=4, max_size=8)):
        slices[index] = draw(st.sampled_from(other_slices))
    return slices


@settings(max_examples=examples(12), deadline=None)
@given(
    st.data(),
    st.sampled_from(["float32", "uint8", "int64", "bool"]),
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
)
def test_slices_of_one_tensor_are_read_together(
    tmp_path_factory, data, dtype, format, is_truncated
):
    path = Path(tmp_path_factory.mktemp("rows")) / FORMATS[format]
    shape = data.draw(st.sampled_from([(300, 40), (16, 16)]))
    matrix = np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)
    holdfast.save({"w": matrix, "v": np.arange(9.0)}, path)
    with holdfast.open(path) as checkpoint:
        tensor = checkpoint["w"]
        slices = data.draw(row_slices(tensor, checkpoint["v"]))
        elements = [row[(0,) * len(row.shape)] for row in slices if row.size]
        if not is_truncated:
            assert_reads(lambda: holdfast.read(slices), slices)
            assert_reads(lambda: [row.read() for row in slices], slices)
            assert_reads(lambda: holdfast.read(elements), elements)
            return

        (storage,) = tensor.storages
        file_path = path / storage.key if path.is_dir() else path
        file_nbytes = storage.start + data.draw(st.integers(0, tensor.nbytes - 1))
        os.truncate(file_path, file_nbytes)
        for requested in (slices, elements):
            missing_names = set()
            for part in requested:
                for chunk in part.chunks:
                    if chunk.storage.start + chunk.byte_range(part.dtype)[1] > file_nbytes:
                        missing_names.add(part.name)
            if missing_names:
                read = partial(holdfast.read, requested)
                assert_refuses(read, HoldfastError, missing_names)


@pytest.fixture
def many(tmp_path):
    """A file with 5,000 small tensors."""
    path = tmp_path / "many.safetensors"
    holdfast.save({f"t.{index}": np.arange(index, index + 4) for index in range(5000)}, path)
    return path


def test_damage_in_the_last_of_many_tensors_is_found(many):
    with holdfast.open(many) as checkpoint, many.open("r+b") as file:
        storage = checkpoint["t.4999"].storages[0]
        file.seek(storage.start + 3)
        file.write(b"\xff")
        file.flush()
        assert_refuses(checkpoint.read, Corrupted, ["t.4999"], [storage.start])


def test_an_array_keeps_nothing_else_alive(many):
    with holdfast.open(many) as checkpoint:
        assert all(array.base is None for array in checkpoint.read().values())


@pytest.mark.parametrize("open_content", [io.BytesIO, bytes])
def test_content_in_memory_is_read_like_a_file(many, open_content):
    checkpoint = holdfast.open(open_content(many.read_bytes()))
    assert_reads(lambda: checkpoint.read().values(), checkpoint.values())


def test_a_closed_checkpoint_reads_nothing(many):
    checkpoint = holdfast.open(many)
    tensors = list(checkpoint.values())
    checkpoint.close()
    for read in (checkpoint.read, lambda: holdfast.read(tensors), tensors[0].read):
        with pytest.raises(holdfast.errors.Closed):
            read()


def test_limits_apply_to_one_tensor_and_to_many(many):
    checkpoint = holdfast.open(many, limits=Limits(expansion=0, expansion_floor_nbytes=0))
    for read in (checkpoint.read, checkpoint["t.1"].read):
        with pytest.raises(holdfast.errors.LimitExceeded):
            read()


def test_conjugated_negated_and_expanded_tensors_are_read_together(tmp_path):
    row = torch.arange(8) + 1j
    negated = (torch.arange(8) + 2j).conj().imag
    tensors = [row.conj(), negated, row[:1].expand(9), row]
    torch.save({f"t.{n}": tensors[n % 4] for n in range(4 * FEW)}, tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as checkpoint:
        slices = [tensor[1:2] for tensor in checkpoint.values()]
        assert_reads(lambda: checkpoint.read().values(), checkpoint.values())
        assert_reads(lambda: holdfast.read(slices), slices)
        assert_reads(lambda: [tensor.read() for tensor in checkpoint.values()], checkpoint.values())


@pytest.mark.parametrize("verify", [True, False])
def test_several_threads_read_more_than_a_block(tmp_path, verify):
    path = tmp_path / "a.safetensors"
    holdfast.save({f"t.{n}": np.full(2048, n, "i4") for n in range(2500)}, path)
    with holdfast.open(path, verify=verify, threads=4) as checkpoint:
        for name, array in checkpoint.read().items():
            assert (array == int(name.removeprefix("t."))).all()
