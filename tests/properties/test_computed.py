"""Blocks of tensors, computed tensors and packed elements, compared with numpy."""

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
def test_run_boxes_have_the_elements_of_the_run_in_order(shape, data):
    array = np.arange(int(np.prod(shape))).reshape(shape)
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))

    boxes = run_boxes(shape, start, stop)

    elements = []
    for box in boxes:
        elements += array[box.slices].reshape(-1).tolist()
    assert elements == list(range(start, stop))


@settings(deadline=None)
@given(shapes, st.integers(1, 64), st.booleans())
def test_blocks_of_any_size_have_all_bytes_in_c_order(shape, block_nbytes, is_fortran_ordered):
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    if is_fortran_ordered:
        array = np.asfortranarray(array)
    tensor = MemoryTensors().wrap_array(array)

    content = bytearray(array.nbytes)
    for block in split_into_blocks(tensor, block_nbytes):
        content[block.start : block.start + block.nbytes] = read_block(block)

    assert bytes(content) == array.tobytes()


@settings(deadline=None)
@given(shapes, st.integers(1, 64))
def test_a_cast_tensor_has_the_elements_of_astype(shape, block_nbytes):
    array = np.linspace(-3, 3, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    tensor = ComputedTensors().make_computed_tensor(
        MemoryTensors().wrap_array(array),
        DTYPES.name("bfloat16"),
        lambda elements: elements.astype(ml_dtypes.bfloat16),
    )
    expected = array.astype(ml_dtypes.bfloat16)

    assert tensor.numpy().tobytes() == expected.tobytes()
    blocks = split_into_blocks(tensor, block_nbytes)
    assert b"".join(bytes(read_block(block)) for block in blocks) == expected.tobytes()
    if shape:
        assert tensor[-1].numpy().tobytes() == expected[-1].tobytes()


@given(st.lists(st.integers(0, 15), min_size=2, max_size=9))
def test_the_first_of_two_packed_elements_has_the_low_bits(values):
    packed = pack_elements(np.array(values, np.uint8), DTYPES.name("quint4x2"))
    unpacked = []
    for byte in packed:
        unpacked += [byte & 15, byte >> 4]
    assert unpacked[: len(values)] == values
