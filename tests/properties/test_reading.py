"""Reading compared with oracles that look at every bit. Blocks are so small that everything is cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import Request
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import replace
from holdfast.engine.coalesce import JoinPolicy
from holdfast.engine.source import OpenSource
from holdfast.errors import BadIndex
from holdfast.stores.memory import MemoryStore
from tests.properties.strategies import chunks, read_slowly
from tests.sampling import examples

policies = st.builds(
    JoinPolicy,
    free_gap=st.integers(0, 9),
    max_gap=st.integers(0, 64),
    over_read=st.sampled_from([0.0, 0.1, 2.0]),
    block_nbytes=st.integers(1, 64),
)


def are_identical(a, b):
    """Return whether two arrays have the same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@settings(max_examples=examples(300), deadline=None)
@given(
    chunks(start=3),
    policies,
    st.randoms(use_true_random=False),
    st.sampled_from(["little", "big"]),
    st.booleans(),
)
def test_any_chunk_is_read_as_by_the_oracle(drawn, policy, random, byteorder, is_transposed):
    chunk, dtype = drawn
    storage = Storage("f", 3, chunk.storage.nbytes, byteorder, home=None)
    chunk = Chunk(chunk.box, storage, chunk.offset, chunk.strides)
    content = random.randbytes(3 + chunk.storage.nbytes)
    source = OpenSource(MemoryStore({"f": content}), policy=policy, threads=1)
    tensor = LazyTensor("t", dtype, chunk.shape, (chunk,), source)
    out = np.zeros(chunk.shape, dtype.numpy)
    if is_transposed:
        out = np.zeros(chunk.shape[::-1], dtype.numpy).T

    source.read([Request(tensor, out)])

    assert are_identical(out, read_slowly(chunk, dtype, content))


@st.composite
def tiled_tensors(draw):
    """Draw an int16 array, the content of a file with its chunks, and the chunks.

    Each chunk has its own order of axes in the file.
    """
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    axis = draw(st.integers(0, len(shape) - 1))
    boxes = list(Box.whole(shape).split(axis, draw(st.integers(1, 4))))
    content = b""
    tile_chunks = []
    for box in boxes:
        order = draw(st.permutations(range(len(shape))))
        stored_array = np.ascontiguousarray(array[box.slices].transpose(order))
        stride_of_axis = dict(zip(order, c_strides(stored_array.shape, 16), strict=True))
        strides = tuple(stride_of_axis[axis] for axis in range(len(shape)))
        storage = Storage("f", len(content), stored_array.nbytes, home=None)
        tile_chunks.append(Chunk(box, storage, 0, strides))
        content += stored_array.tobytes()
    return array, content, tuple(tile_chunks)


def axis_indices(length):
    """Return a strategy for what may stand in an index for one axis."""
    bounds = st.none() | st.integers(-9, 9)
    steps = st.sampled_from([1, 2, 3, -1, -2, None])
    return st.one_of(
        st.integers(-length, length - 1),
        st.slices(length),
        st.builds(slice, bounds, bounds, steps),
    )


@st.composite
def index_for(draw, shape):
    """Draw an index for an array of this shape, also with an ellipsis and a new axis."""
    axis_count = draw(st.integers(0, len(shape)))
    index = tuple(draw(axis_indices(length)) for length in shape[:axis_count])
    return draw(st.sampled_from([index, (*index, ...), (None, *index), (*index, ..., None)]))


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), tiled_tensors(), policies)
def test_slicing_a_tensor_of_chunks_is_slicing_the_array(data, drawn, policy):
    array, content, tile_chunks = drawn
    source = OpenSource(MemoryStore({"f": content}), policy=policy, threads=2)
    tensor = LazyTensor("t", DTYPES.name("int16"), array.shape, tile_chunks, source)

    index = data.draw(index_for(array.shape))
    expected = array[index]
    tensor = tensor[index]
    if expected.ndim and all(expected.shape):
        second_index = data.draw(index_for(expected.shape))
        expected = expected[second_index]
        tensor = tensor[second_index]

    assert tensor.shape == expected.shape
    assert are_identical(tensor.read(), np.asarray(expected))
    assert are_identical(tensor.T.numpy(), np.asarray(expected).T)


def element_bits_of(shape, tensor_chunks):
    """Return the first bit of each element in its storage; -1 for an element that no chunk has."""
    first_bits = np.full(shape, -1, object)
    for chunk in tensor_chunks:
        chunk_bits = np.full(chunk.shape, chunk.offset, object)
        for axis, stride in enumerate(chunk.strides):
            steps = np.arange(chunk.shape[axis], dtype=object) * stride
            axis_shape = [1] * len(chunk.shape)
            axis_shape[axis] = -1
            chunk_bits = chunk_bits + steps.reshape(axis_shape)
        first_bits[chunk.box.slices] = chunk_bits
    return first_bits


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), chunks(start=3), st.booleans(), st.booleans())
def test_an_index_takes_the_elements_that_numpy_takes(data, drawn, is_shifted, is_bare):
    """The only chunk of the tensor may begin behind its first element."""
    chunk, _ = drawn
    if is_shifted:
        box = Box.from_offsets((1,) * chunk.box.rank, chunk.shape)
        chunk = Chunk(box, chunk.storage, chunk.offset, chunk.strides)
    shape = tuple(chunk.box.stop)
    index = slice(None)
    if 0 not in shape:
        index = data.draw(index_for(shape))
        if len(index) == 1 and is_bare:
            index = index[0]
    tensor = LazyTensor("t", DTYPES.name("uint8"), shape, (chunk,), OpenSource(MemoryStore({})))
    if not shape and isinstance(index, slice):
        with pytest.raises(BadIndex, match="too many"):
            tensor[index]
        return

    tensor_slice = tensor[index]

    expected = np.asarray(element_bits_of(shape, [chunk])[index], object)
    assert tensor_slice.shape == expected.shape
    first_bits = element_bits_of(tensor_slice.shape, tensor_slice.chunks)
    assert first_bits.tolist() == expected.tolist()
    assert all(slice_chunk.box.count for slice_chunk in tensor_slice.chunks)
    assert replace(tensor_slice, name="other").chunks == tensor_slice.chunks
