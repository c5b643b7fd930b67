"""Flat ranges and computed tensors against numpy."""

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.box import run_boxes
from holdfast.core.dtype import DTYPES
from holdfast.engine.arrays import MemoryTensors
from holdfast.engine.blocks import pack_elements, read_block, split_into_blocks
from holdfast.engine.computed import ComputedTensors

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_run_boxes_are_the_range(shape, data):
    array = np.arange(int(np.prod(shape))).reshape(shape)
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    parts = [array[box.slices].reshape(-1) for box in run_boxes(shape, start, stop)]
    assert np.concatenate([np.empty(0, int), *parts]).tolist() == list(range(start, stop))


@settings(deadline=None)
@given(shapes, st.integers(1, 64), st.booleans())
def test_slabs_of_any_size_are_the_bytes(shape, block, transposed):
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    array = np.asfortranarray(array) if transposed else array
    tensor = MemoryTensors().wrap_array(array)
    found = bytearray(array.nbytes)
    for piece in split_into_blocks(tensor, block):
        found[piece.start : piece.start + piece.nbytes] = read_block(piece)
    assert bytes(found) == array.tobytes()


@settings(deadline=None)
@given(shapes, st.integers(1, 64))
def test_a_cast_reads_like_astype(shape, block):
    array = np.linspace(-3, 3, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    half = ComputedTensors().make_tensor(
        MemoryTensors().wrap_array(array),
        DTYPES.name("bfloat16"),
        lambda a: a.astype(ml_dtypes.bfloat16),
    )
    expected = array.astype(ml_dtypes.bfloat16)
    assert half.numpy().tobytes() == expected.tobytes()
    assert (
        b"".join(bytes(read_block(s)) for s in split_into_blocks(half, block)) == expected.tobytes()
    )
    if shape:
        assert half[-1].numpy().tobytes() == expected[-1].tobytes()


@given(st.lists(st.integers(0, 15), min_size=2, max_size=9))
def test_pack_four_bits(values):
    packed = pack_elements(np.array(values, np.uint8), DTYPES.name("quint4x2"))
    assert [packed[i // 2] >> 4 * (i % 2) & 15 for i in range(len(values))] == values
