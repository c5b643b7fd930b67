"""Reading many tensors together against bytes that are cut out of the files by hand; and errors that name the tensor."""

import io
import os
from pathlib import Path

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
from holdfast.errors import HoldfastError
from tests.properties.test_reading import index_for
from tests.sampling import examples

FEW = 16
KINDS = [
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


def plainly(tensor: LazyTensor) -> np.ndarray:
    """The elements of a tensor, cut out of its files by hand."""
    out = np.zeros(tensor.shape, tensor.dtype.numpy)
    for chunk in tensor.chunks:
        if chunk.box.count:
            content = tensor.source.store.map(chunk.storage.key)
            if content is None:
                content = bytearray(tensor.source.store.size(chunk.storage.key))
                tensor.source.store.read(chunk.storage.key, 0, memoryview(content))
            place, steps = (
                chunk.storage.start + chunk.offset // 8,
                tuple(stride // 8 for stride in chunk.strides),
            )
            out[chunk.box.slices] = np.ndarray(
                chunk.shape, tensor.dtype.numpy, content, place, steps
            )
    out = out.conj() if tensor.traits.conj else out
    return -out if tensor.traits.neg else out


def bits(arrays):
    """Arrays bit for bit, and of which kind they are."""
    return [
        (
            a.shape,
            a.dtype,
            a.tobytes(),
            a.flags.owndata,
            a.flags.writeable,
            a.flags.c_contiguous,
            a.flags.aligned,
        )
        for a in arrays
    ]


def assert_read(read, tensors):
    """That a read gives just what lies in the files."""
    assert bits(read()) == bits([plainly(tensor) for tensor in tensors])


def is_refused(read, kind, names, offsets=()):
    """That a read raises for one of these tensors, and says where it lies."""
    with pytest.raises(kind) as caught:
        read()
    assert caught.value.tensor in names
    if isinstance(caught.value, holdfast.errors.Corrupted) and not isinstance(
        caught.value, holdfast.errors.Truncated
    ):
        assert caught.value.offset in offsets
        assert (caught.value.expected, caught.value.file) != (None, None)


@st.composite
def states(draw):
    """Many small arrays: of all kinds and shapes, empty ones and single numbers, ties, views, odd orders, and a long one."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shapes = draw(
        st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=FEW - 2, max_size=FEW + 12)
    )
    state = {}
    for number, shape in enumerate(shapes):
        kind = np.dtype(draw(st.sampled_from(KINDS)))
        array = np.frombuffer(
            random.bytes(int(np.prod(shape, dtype=int)) * kind.itemsize), np.uint8
        ).copy()
        array = (array & 1 if kind == np.bool_ else array).view(kind).reshape(shape)
        state[f"t.{number}"] = draw(
            st.sampled_from([array, array, array, array.T, array[..., ::-1] if shape else array])
        )
    if draw(st.booleans()):
        state["long"] = np.frombuffer(random.bytes(MEMORY.separate_nbytes + 8), np.int64)
    if draw(st.booleans()):
        state["tied"] = state["t.0"]
        state["half"] = state["t.1"][:1] if state["t.1"].ndim else state["t.1"]
    return state


@settings(max_examples=examples(25), deadline=None)
@given(st.data(), states(), st.sampled_from(sorted(FORMATS)), st.booleans())
def test_many_are_read_as_they_lie_there(tmp_path_factory, data, state, format, mapped):
    path = tmp_path_factory.mktemp("columns") / FORMATS[format]
    holdfast.save(state, path)
    names = data.draw(
        st.lists(
            st.sampled_from([*state, "nowhere"] if data.draw(st.booleans()) else [*state]),
            max_size=2 * FEW,
        )
    )
    with holdfast.open(path, mmap=mapped) as ckpt:
        assert list(ckpt.read()) == list(ckpt)
        assert_read(lambda: ckpt.read().values(), ckpt.values())
        if "nowhere" in names:
            with pytest.raises(holdfast.errors.NoSuchTensor):
                ckpt.read(names)
        elif names:
            assert_read(
                lambda: ckpt.read(names).values(), [ckpt[name] for name in dict.fromkeys(names)]
            )
        assert_read(lambda: holdfast.read(ckpt.values()), ckpt.values())
        assert_read(lambda: [tensor.read() for tensor in ckpt.values()], ckpt.values())
        slices = [t[data.draw(index_for(t.shape))] if t.size else t for t in ckpt.values()]
        assert_read(lambda: holdfast.read(slices), slices)


def damaged(data, path, checkpoint):
    """Change a byte of the data of some tensor, or cut the file off."""
    storage = data.draw(
        st.sampled_from([s for t in checkpoint.values() for s in t.storages if s.nbytes])
    )
    file = path / storage.key if path.is_dir() else path
    at = storage.start + data.draw(st.integers(0, storage.nbytes - 1))
    cut = data.draw(st.booleans())
    if not cut:
        with file.open("r+b") as f:
            f.seek(at)
            byte = f.read(1)
            f.seek(at)
            f.write(bytes([byte[0] ^ 1 << data.draw(st.integers(0, 7))]))
    else:
        os.truncate(file, at)
    low = 0 if cut else 1
    reached = [
        (t, s)
        for t in checkpoint.values()
        for s in t.storages
        if s.key == storage.key and s.start + s.nbytes > at >= s.start * low
    ]
    return cut, {t.name for t, _ in reached if t.nbytes}, {s.start for _, s in reached}


@settings(max_examples=examples(25), deadline=None)
@given(st.data(), states(), st.sampled_from(sorted(FORMATS)), st.booleans())
def test_damage_is_told_with_its_tensor(tmp_path_factory, data, state, format, verify):
    state["one"] = np.ones(3)
    path = Path(tmp_path_factory.mktemp("columns")) / FORMATS[format]
    holdfast.save(state, path)
    with holdfast.open(path, verify=verify) as ckpt:
        cut, names, offsets = damaged(data, path, ckpt)
        whole = {t.name for t in ckpt.values() if t.nbytes == sum(one.nbytes for one in t.storages)}
        kind = HoldfastError if cut else holdfast.errors.Corrupted
        if cut or (verify and names & whole):
            is_refused(ckpt.read, kind, names, offsets)
            is_refused(lambda: holdfast.read([*ckpt.values()][::-1]), kind, names, offsets)
        for tensor in ckpt.values():
            if tensor.name not in names:
                assert tensor.read().shape == tensor.shape
            elif verify and not cut and tensor.name in whole:
                is_refused(tensor.read, kind, [tensor.name], offsets)
            elif not cut:
                assert_read(lambda tensor=tensor: [tensor.read()], [tensor])
                assert_read(
                    lambda tensor=tensor: [tensor[-1:].read()] if tensor.shape else [],
                    [tensor[-1:]] if tensor.shape else [],
                )


@settings(max_examples=examples(12), deadline=None)
@given(
    st.data(),
    st.sampled_from(["float32", "uint8", "int64", "bool"]),
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
)
def test_rows_of_one_tensor(tmp_path_factory, data, dtype, format, cut):
    """Slices by the dozen, of which most are like the one before, some of another tensor, and some single elements."""
    path = Path(tmp_path_factory.mktemp("rows")) / FORMATS[format]
    height, width = data.draw(st.sampled_from([(300, 40), (16, 16)]))
    holdfast.save(
        {"w": np.arange(height * width).reshape(height, width).astype(dtype), "v": np.arange(9.0)},
        path,
    )
    taken = data.draw(st.integers(1, min(width, height) - 1))
    places = st.tuples(st.integers(-height, height - 1), st.integers(0, width - taken - 1))
    with holdfast.open(path) as ckpt:
        whole, other = ckpt["w"], ckpt["v"]
        rows = [
            whole[row, first : first + taken]
            for row, first in data.draw(st.lists(places, min_size=2 * FEW, max_size=3 * FEW))
        ]
        # Some with one element more, some columns of as many, and some of another tensor between them.
        others = [
            whole[3, : taken + 1],
            whole[:taken, 2],
            whole[1:3],
            whole[::2, 1],
            other[3:5],
            other[3 : 3 + taken],
        ]
        for at in data.draw(st.lists(st.integers(0, 2 * FEW - 1), min_size=4, max_size=8)):
            rows[at] = data.draw(st.sampled_from(others))
        if cut:
            (storage,) = whole.storages
            file = path / storage.key if path.is_dir() else path
            os.truncate(file, storage.start + data.draw(st.integers(0, whole.nbytes - 1)))
        elements = [row[(0,) * len(row.shape)] for row in rows if row.size]
        if cut:
            end = os.path.getsize(file)
            for given in (rows, elements):
                gone = {
                    t.name
                    for t in given
                    for c in t.chunks
                    if c.storage.start + c.byte_range(t.dtype)[1] > end
                }
                if gone:
                    is_refused(lambda given=given: holdfast.read(given), HoldfastError, gone)
            return
        assert_read(lambda: holdfast.read(rows), rows)
        assert_read(lambda: [row.read() for row in rows], rows)
        assert_read(lambda: holdfast.read(elements), elements)


@pytest.fixture
def many(tmp_path):
    path = tmp_path / "many.safetensors"
    holdfast.save({f"t.{n}": np.arange(n, n + 4) for n in range(5000)}, path)
    return path


def test_the_last_of_many_lies(many):
    with holdfast.open(many) as ckpt, many.open("r+b") as file:
        last = ckpt["t.4999"].storages[0]
        file.seek(last.start + 3)
        file.write(b"\xff")
        file.flush()
        is_refused(ckpt.read, holdfast.errors.Corrupted, ["t.4999"], [last.start])


def test_an_array_keeps_nothing_else_alive(many):
    with holdfast.open(many) as ckpt:
        assert all(array.base is None for array in ckpt.read().values())


@pytest.mark.parametrize("given", [io.BytesIO, bytes])
def test_other_places_of_bytes(many, given):
    ckpt = holdfast.open(given(many.read_bytes()))
    assert_read(lambda: ckpt.read().values(), ckpt.values())


def test_closed_is_closed(many):
    ckpt = holdfast.open(many)
    tensors = list(ckpt.values())
    ckpt.close()
    for read in (ckpt.read, lambda: holdfast.read(tensors), tensors[0].read):
        with pytest.raises(holdfast.errors.Closed):
            read()


def test_limits_hold(many):
    nothing = Limits(expansion=0, expansion_floor_nbytes=0)
    for read in (
        holdfast.open(many, limits=nothing).read,
        holdfast.open(many, limits=nothing)["t.1"].read,
    ):
        with pytest.raises(holdfast.errors.LimitExceeded):
            read()


def test_conjugates_negatives_and_expanded_views(tmp_path):
    row = torch.arange(8) + 1j
    negated = (torch.arange(8) + 2j).conj().imag
    state = {f"t.{n}": [row.conj(), negated, row[:1].expand(9), row][n % 4] for n in range(4 * FEW)}
    torch.save(state, tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as ckpt:
        assert_read(lambda: ckpt.read().values(), ckpt.values())
        assert_read(
            lambda: holdfast.read([t[1:2] for t in ckpt.values()]), [t[1:2] for t in ckpt.values()]
        )
        assert_read(lambda: [t.read() for t in ckpt.values()], ckpt.values())


@pytest.mark.parametrize("verify", [True, False])
def test_more_than_a_block_by_several_threads(tmp_path, verify):
    path = tmp_path / "a.safetensors"
    holdfast.save({f"t.{n}": np.full(2048, n, "i4") for n in range(2500)}, path)
    with holdfast.open(path, verify=verify, threads=4) as ckpt:
        for name, array in ckpt.read().items():
            assert (array == int(name[2:])).all()
