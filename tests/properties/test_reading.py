"""Reading through the planner and the engine against a bit-by-bit oracle, with blocks so small that everything is cut."""

import itertools

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
from holdfast.engine.coalesce import JoinPolicy, coalesce
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


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@settings(max_examples=examples(300), deadline=None)
@given(
    chunks(start=3),
    policies,
    st.randoms(use_true_random=False),
    st.sampled_from(["little", "big"]),
    st.booleans(),
)
def test_any_chunk_reads_as_the_oracle_does(drawn, policy, random, byteorder, strided_out):
    chunk, dtype = drawn
    chunk = Chunk(
        chunk.box,
        Storage("f", 3, chunk.storage.nbytes, byteorder, home=None),
        chunk.offset,
        chunk.strides,
    )
    content = random.randbytes(3 + chunk.storage.nbytes)
    source = OpenSource(MemoryStore({"f": content}), policy=policy, threads=1)
    tensor = LazyTensor("t", dtype, chunk.shape, (chunk,), source)
    out = (
        np.zeros(chunk.shape[::-1], dtype.numpy).T
        if strided_out
        else np.zeros(chunk.shape, dtype.numpy)
    )
    source.read([Request(tensor, out)])
    assert same_bits(out, read_slowly(chunk, dtype, content))


@st.composite
def tiled_tensors(draw):
    """An int16 tensor in several chunks, each with its own order of elements in the file, and the array it stands for."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    axis = draw(st.integers(0, len(shape) - 1))
    boxes = list(Box.whole(shape).split(axis, draw(st.integers(1, 4))))
    content, parts = b"", []
    for box in boxes:
        order = draw(st.permutations(range(len(shape))))
        piece = np.ascontiguousarray(array[box.slices].transpose(order))
        strides = dict(zip(order, c_strides(piece.shape, 16), strict=True))
        parts.append(
            Chunk(
                box,
                Storage("f", len(content), piece.nbytes, home=None),
                0,
                tuple(strides[d] for d in range(len(shape))),
            )
        )
        content += piece.tobytes()
    return array, content, tuple(parts)


def index_for(shape):
    one = lambda n: st.one_of(  # noqa: E731
        st.integers(-n, n - 1),
        st.slices(n),
        st.builds(
            slice,
            st.none() | st.integers(-9, 9),
            st.none() | st.integers(-9, 9),
            st.sampled_from([1, 2, 3, -1, -2, None]),
        ),
    )
    return (
        st.integers(0, len(shape))
        .flatmap(lambda k: st.tuples(*(one(n) for n in shape[:k])))
        .flatmap(lambda t: st.sampled_from([t, (*t, ...), (None, *t), (*t, ..., None)]))
    )


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), tiled_tensors(), policies)
def test_slicing_a_tensor_of_chunks_is_slicing_the_array(data, drawn, policy):
    array, content, parts = drawn
    source = OpenSource(MemoryStore({"f": content}), policy=policy, threads=2)
    tensor = LazyTensor("t", DTYPES.name("int16"), array.shape, parts, source)
    first = data.draw(index_for(array.shape))
    expected, lazy = array[first], tensor[first]
    if expected.ndim and all(expected.shape):
        second = data.draw(index_for(expected.shape))
        expected, lazy = expected[second], lazy[second]
    assert lazy.shape == expected.shape
    assert same_bits(lazy.read(), np.asarray(expected))
    assert same_bits(lazy.T.numpy(), np.asarray(expected).T)


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 40)), min_size=1, max_size=30),
    policies,
)
def test_joined_reads_cover_everything_and_over_read_is_bounded(ranges, policy):
    ordered = sorted((a, a + n) for a, n in ranges)
    starts, stops = (np.array(x, np.int64) for x in zip(*ordered, strict=True))
    heads = coalesce(starts, stops, policy).tolist()
    assert heads[0] == 0
    assert heads == sorted(set(heads))
    groups = [(a, b) for a, b in itertools.pairwise([*heads, len(starts)])]
    wasted = 0
    # A byte that another range wants is no gap, even where a cut at a block's boundary makes it be read twice.
    covered = set().union(*(range(s, e) for s, e in ordered))
    for a, b in groups:
        gaps = sorted(set(range(int(starts[a]), int(stops[a:b].max()))) - covered)
        # Runs of consecutive missing bytes: the free ones cost nothing by the rule.
        for _, run in itertools.groupby(enumerate(gaps), lambda p: p[1] - p[0]):
            length = len(list(run))
            assert length <= max(policy.free_gap, policy.max_gap)
            wasted += length if length > policy.free_gap else 0
        assert int(starts[b - 1]) - int(starts[a]) < policy.block_nbytes or b - a == 1
    assert wasted <= int((stops - starts).sum()) * policy.over_read


def element_places(shape, parts):
    """Of each element the bit of its storage; -1 for one that no chunk has."""
    places = np.full(shape, -1, object)
    for chunk in parts:
        own = np.full(chunk.shape, chunk.offset, object)
        for d, stride in enumerate(chunk.strides):
            own = own + (np.arange(chunk.shape[d], dtype=object) * stride).reshape(
                [-1 if e == d else 1 for e in range(own.ndim)]
            )
        places[chunk.box.slices] = own
    return places


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), chunks(start=3))
def test_an_index_takes_the_elements_that_numpy_takes(data, drawn):
    """Of a tensor in one piece, and of one whose only chunk does not begin at its first element."""
    chunk, _ = drawn
    moved = data.draw(st.booleans())
    chunk = (
        Chunk(
            Box.from_offsets((1,) * chunk.box.rank, chunk.shape),
            chunk.storage,
            chunk.offset,
            chunk.strides,
        )
        if moved
        else chunk
    )
    shape = tuple(chunk.box.stop)
    index = data.draw(index_for(shape) if 0 not in shape else st.just(slice(None)))
    index = (
        index[0]
        if isinstance(index, tuple) and len(index) == 1 and data.draw(st.booleans())
        else index
    )
    tensor = LazyTensor("t", DTYPES.name("uint8"), shape, (chunk,), OpenSource(MemoryStore({})))
    if not shape and isinstance(index, slice):
        with pytest.raises(BadIndex, match="too many"):
            tensor[index]
        return
    expected = np.asarray(element_places(shape, [chunk])[index], object)
    part = tensor[index]
    assert part.shape == expected.shape
    assert element_places(part.shape, part.chunks).tolist() == expected.tolist()
    assert all(piece.box.count for piece in part.chunks)
    assert replace(part, name="other").chunks == part.chunks
