"""States that Hypothesis makes up, saved by the real writers: the tree, its types, every tensor and any slice of it."""

from __future__ import annotations

import io
from collections import OrderedDict

import numpy as np
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from tests.golden.expect import short
from tests.parity.compare import assert_same_file, assert_same_tree, elements, named_tensors
from tests.parity.test_torch_files import PLAIN, UNTYPED, filled
from tests.sampling import examples
from tests.support import torch_bytes

PRINTABLE = [d for d in [*PLAIN, *UNTYPED] if not short(d).startswith(("bits", "float4"))]
"""Hypothesis prints what it draws, and torch cannot print the others."""

few = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def pools(draw: st.DrawFn, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """A few 1-D tensors; views of the same one share its storage."""
    made = draw(
        st.lists(st.tuples(st.sampled_from(dtypes), st.integers(1, 40)), min_size=1, max_size=3)
    )
    return [filled(dtype, count) for dtype, count in made]


@st.composite
def views(draw: st.DrawFn, pool: list[torch.Tensor]) -> torch.Tensor:
    """Any strides and offset that stay inside the storage: gaps, overlaps, repeats, turned dimensions, nothing at all."""
    base = draw(st.sampled_from(pool))
    room = base.numel() - 1
    shape, strides = [], []
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.sampled_from([0, 1, 1, 2, 3, 4, 7]))
        most = min(room // step + 1, 6) if step else 4
        count = draw(st.integers(0, most))
        room -= max(count - 1, 0) * step
        shape.append(count)
        strides.append(step)
    return base.as_strided(shape, strides, draw(st.integers(0, room)))


plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False, allow_infinity=False)
    | st.builds(lambda s: torch.Size(s), st.lists(st.integers(0, 9), max_size=3))
    | st.sampled_from(
        [torch.float32, torch.int8, torch.float8_e4m3fn, torch.complex32, torch.uint4]
    )
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")])
    | st.builds(lambda v: np.float32(v), st.floats(width=32, allow_nan=False))
    | st.builds(lambda v: np.arange(v, dtype=np.int16).reshape(1, -1), st.integers(0, 5))
)


def states(pool: list[torch.Tensor]) -> st.SearchStrategy[object]:
    """Nested dicts, ordered dicts, lists and tuples with views of the pool and plain values in them."""
    leaf = views(pool) | plain
    # Names with a letter first, so that no text key looks like a position or like another key's path.
    keys = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True)

    def nest(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
        flat = st.dictionaries(keys, inner, max_size=4)
        return (
            flat
            | st.builds(OrderedDict, flat)
            | st.lists(inner, max_size=3)
            | st.builds(tuple, st.lists(inner, max_size=3))
            | st.dictionaries(st.integers(0, 50), inner, max_size=3)
        )

    return st.dictionaries(keys, st.recursive(leaf, nest, max_leaves=10), max_size=4)


def indices(shape: tuple[int, ...]) -> st.SearchStrategy[object]:
    """What numpy takes as a basic index of this shape."""
    one = [st.slices(n) | (st.integers(-n, n - 1) if n else st.nothing()) for n in shape]
    return st.integers(0, len(shape)).flatmap(
        lambda k: st.tuples(*one[:k]).flatmap(
            lambda t: st.sampled_from([t, (*t, ...), (None, *t), (*t, ..., None)])
        )
    )


def check_slices(
    data: st.DataObject, ckpt: holdfast.Checkpoint, tensors: dict[str, torch.Tensor]
) -> None:
    for name, tensor in tensors.items():
        whole = np.frombuffer(elements(tensor), ckpt[name].dtype.numpy).reshape(tuple(tensor.shape))
        index = data.draw(indices(whole.shape), label=name)
        part = ckpt[name][index].numpy()
        assert part.shape == whole[index].shape
        assert part.tobytes() == whole[index].tobytes()


@few
@given(st.data())
def test_zip(data):
    state = data.draw(pools(PRINTABLE).flatmap(states))
    saved_bytes = torch_bytes(state, pickle_protocol=data.draw(st.sampled_from([2, 2, 3, 4, 5])))
    loaded = torch.load(io.BytesIO(saved_bytes), weights_only=False)
    assert_same_file(
        saved_bytes,
        loaded,
        mmap=data.draw(st.booleans()),
        threads=data.draw(st.sampled_from([None, 1])),
    )
    with holdfast.open(saved_bytes) as ckpt:
        assert_same_tree(ckpt.tree, loaded)
        check_slices(data, ckpt, dict(named_tensors(loaded)))


@few
@given(st.data())
def test_legacy(data):
    state = data.draw(pools(PLAIN).flatmap(states))
    saved_bytes = torch_bytes(
        state, zipped=False, pickle_protocol=data.draw(st.sampled_from([2, 2, 4]))
    )
    loaded = torch.load(io.BytesIO(saved_bytes), weights_only=False)
    assert_same_file(saved_bytes, loaded)
    with holdfast.open(saved_bytes) as ckpt:
        assert_same_tree(ckpt.tree, loaded)
        check_slices(data, ckpt, dict(named_tensors(loaded)))


SAFE = [d for d in PRINTABLE if holdfast.DTYPES.name(short(d)).safetensors]


@few
@given(st.data())
def test_safetensors(data):
    shapes = st.lists(st.integers(0, 5), max_size=4)
    drawn = st.dictionaries(
        st.text(min_size=1, max_size=6), st.tuples(st.sampled_from(SAFE), shapes), max_size=5
    )
    state = {
        name: filled(dtype, *shape) if shape else filled(dtype, 1)[0].clone()
        for name, (dtype, shape) in data.draw(drawn).items()
        if name != "__metadata__"
    }
    saved_bytes = safetensors.torch.save(state)
    with holdfast.open(saved_bytes) as ckpt:
        assert set(ckpt) == set(state)
        for name, tensor in state.items():
            assert ckpt[name].dtype.name == short(tensor.dtype)
            assert ckpt[name].shape == tuple(tensor.shape)
            assert ckpt[name].numpy().tobytes() == elements(tensor) == elements(ckpt[name].torch())
        check_slices(data, ckpt, state)
