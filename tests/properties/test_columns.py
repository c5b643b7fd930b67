"""Reading by columns against reading by objects, which is the oracle: the same arrays, in the same order, and the same errors."""

import io
import os
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core import columns
from holdfast.core.columns import FEW
from holdfast.core.limits import Limits
from holdfast.engine.columns import SMALL_NBYTES
from holdfast.engine.source import OpenSource
from holdfast.errors import HoldfastError
from tests.properties.test_reading import index_for

KINDS = [np.bool_, np.uint8, np.int16, np.float32, np.float64, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]
FORMATS = {"safetensors": "a.safetensors", "native": "a", "torch": "a.pt"}


@contextmanager
def by_objects():
    with mock.patch.object(columns, "FEW", 1 << 60), mock.patch.object(OpenSource, "fetch", return_value=None):
        yield


def outcome(read):
    """What a read gives: names, arrays bit for bit; or what it raises, with all that the error carries."""
    try:
        found = read()
    except HoldfastError as error:
        return type(error), str(error), error.tensor, error.offset, error.expected, error.found
    pairs = found.items() if isinstance(found, dict) else enumerate(found)
    return [
        (name, a.shape, a.dtype, a.tobytes(), a.flags.owndata, a.flags.writeable, a.flags.c_contiguous, a.flags.aligned)
        for name, a in pairs
    ]


def assert_same(read):
    with by_objects():
        slow = outcome(read)
    assert outcome(read) == slow
    return slow


@st.composite
def states(draw):
    """Many small arrays: of all kinds and shapes, empty ones and single numbers, ties, views, odd orders, and a long one."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=FEW - 2, max_size=FEW + 12))
    state = {}
    for number, shape in enumerate(shapes):
        kind = np.dtype(draw(st.sampled_from(KINDS)))
        array = np.frombuffer(random.bytes(int(np.prod(shape, dtype=int)) * kind.itemsize), np.uint8).copy()
        array = (array & 1 if kind == np.bool_ else array).view(kind).reshape(shape)
        state[f"t.{number}"] = draw(st.sampled_from([array, array, array, array.T, array[..., ::-1] if shape else array]))
    if draw(st.booleans()):
        state["long"] = np.frombuffer(random.bytes(SMALL_NBYTES + 8), np.int64)
    if draw(st.booleans()):
        state["tied"] = state["t.0"]
        state["half"] = state["t.1"][:1] if state["t.1"].ndim else state["t.1"]
    return state


@settings(max_examples=25, deadline=None)
@given(st.data(), states(), st.sampled_from(sorted(FORMATS)), st.booleans())
def test_columns_read_what_objects_read(tmp_path_factory, data, state, format, mapped):
    path = tmp_path_factory.mktemp("columns") / FORMATS[format]
    holdfast.save(state, path)
    names = data.draw(st.lists(st.sampled_from([*state, "nowhere"] if data.draw(st.booleans()) else [*state]), max_size=2 * FEW))
    with holdfast.open(path, mmap=mapped) as ckpt:
        read = assert_same(ckpt.read)
        assert [name for name, *_ in read] == list(ckpt)
        assert_same(lambda: ckpt.read(names))
        assert_same(lambda: holdfast.read(ckpt.values()))
        assert_same(lambda: [tensor.read() for tensor in ckpt.values()])
        slices = [t[data.draw(index_for(t.shape))] if t.size else t for t in ckpt.values()]
        assert_same(lambda: holdfast.read(slices))


def damaged(data, path, checkpoint):
    """Change a byte of the data of some tensor, or cut the file off."""
    storage = data.draw(st.sampled_from([s for t in checkpoint.values() for s in t.storages if s.nbytes]))
    file = path / storage.key if path.is_dir() else path
    at = storage.start + data.draw(st.integers(0, storage.nbytes - 1))
    if data.draw(st.booleans()):
        with file.open("r+b") as f:
            f.seek(at)
            byte = f.read(1)
            f.seek(at)
            f.write(bytes([byte[0] ^ 1 << data.draw(st.integers(0, 7))]))
    else:
        os.truncate(file, at)


@settings(max_examples=25, deadline=None)
@given(st.data(), states(), st.sampled_from(sorted(FORMATS)), st.booleans())
def test_damage_is_told_as_objects_tell_it(tmp_path_factory, data, state, format, verify):
    state["one"] = np.ones(3)
    path = Path(tmp_path_factory.mktemp("columns")) / FORMATS[format]
    holdfast.save(state, path)
    with holdfast.open(path, verify=verify) as ckpt:
        damaged(data, path, ckpt)
        assert_same(ckpt.read)
        assert_same(lambda: holdfast.read([*ckpt.values()][::-1]))
        for tensor in ckpt.values():
            assert_same(lambda tensor=tensor: [tensor.read()])
            assert_same(lambda tensor=tensor: [tensor[-1:].read()] if tensor.shape else [])


@settings(max_examples=12, deadline=None)
@given(st.data(), st.sampled_from(["float32", "uint8", "int64", "bool"]), st.sampled_from(sorted(FORMATS)), st.booleans())
def test_rows_of_one_tensor(tmp_path_factory, data, dtype, format, cut):
    """Slices by the dozen, of which most are like the one before, some of another tensor, and some single elements."""
    path = Path(tmp_path_factory.mktemp("rows")) / FORMATS[format]
    height, width = data.draw(st.sampled_from([(300, 40), (16, 16)]))
    holdfast.save({"w": np.arange(height * width).reshape(height, width).astype(dtype), "v": np.arange(9.0)}, path)
    taken = data.draw(st.integers(1, min(width, height) - 1))
    places = st.tuples(st.integers(-height, height - 1), st.integers(0, width - taken - 1))
    with holdfast.open(path) as ckpt:
        whole, other = ckpt["w"], ckpt["v"]
        rows = [whole[row, first : first + taken] for row, first in data.draw(st.lists(places, min_size=2 * FEW, max_size=3 * FEW))]
        # Some with one element more, some columns of as many, and some of another tensor between them.
        others = [whole[3, : taken + 1], whole[:taken, 2], whole[1:3], whole[::2, 1], other[3:5], other[3 : 3 + taken]]
        for at in data.draw(st.lists(st.integers(0, 2 * FEW - 1), min_size=4, max_size=8)):
            rows[at] = data.draw(st.sampled_from(others))
        if cut:
            (storage,) = whole.storages
            file = path / storage.key if path.is_dir() else path
            os.truncate(file, storage.start + data.draw(st.integers(0, whole.nbytes - 1)))
        assert_same(lambda: holdfast.read(rows))
        assert_same(lambda: [row.read() for row in rows])
        elements = [row[(0,) * len(row.shape)] for row in rows if row.size]
        assert_same(lambda: holdfast.read(elements))


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
        error = assert_same(ckpt.read)
        assert error[0] is holdfast.errors.Corrupted
        assert error[2] == "t.4999"


def test_few_reads_and_nothing_that_was_not_asked_for(many, monkeypatch):
    calls = []
    with holdfast.open(many) as ckpt:
        read = type(ckpt.source.store).read
        monkeypatch.setattr(type(ckpt.source.store), "read", lambda *a: (calls.append(a[3].nbytes), read(*a))[1])
        ckpt.read()
        assert calls == [5000 * 32]
        assert ckpt.source.read_nbytes == 5000 * 32


def test_an_array_keeps_nothing_else_alive(many):
    with holdfast.open(many) as ckpt:
        assert all(array.base is None for array in ckpt.read().values())


@pytest.mark.parametrize("given", [io.BytesIO, bytes])
def test_other_places_of_bytes(many, given):
    assert_same(holdfast.open(given(many.read_bytes())).read)


def test_closed_is_closed(many):
    ckpt = holdfast.open(many)
    tensors = list(ckpt.values())
    ckpt.close()
    assert assert_same(ckpt.read)[0] is holdfast.errors.Closed
    assert assert_same(lambda: holdfast.read(tensors))[0] is holdfast.errors.Closed
    assert assert_same(lambda: [tensors[0].read()])[0] is holdfast.errors.Closed


def test_limits_hold(many):
    nothing = Limits(expansion=0, expansion_floor_nbytes=0)
    assert assert_same(holdfast.open(many, limits=nothing).read)[0] is holdfast.errors.LimitExceeded
    assert assert_same(lambda: [holdfast.open(many, limits=nothing)["t.1"].read()])[0] is holdfast.errors.LimitExceeded


def test_conjugates_negatives_and_expanded_views(tmp_path):
    row = torch.arange(8) + 1j
    negated = (torch.arange(8) + 2j).conj().imag
    state = {f"t.{n}": [row.conj(), negated, row[:1].expand(9), row][n % 4] for n in range(4 * FEW)}
    torch.save(state, tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as ckpt:
        assert_same(ckpt.read)
        assert_same(lambda: holdfast.read([t[1:2] for t in ckpt.values()]))
        assert_same(lambda: [t.read() for t in ckpt.values()])


@pytest.mark.parametrize("verify", [True, False])
def test_more_than_a_block_by_several_threads(tmp_path, verify):
    path = tmp_path / "a.safetensors"
    holdfast.save({f"t.{n}": np.full(2048, n, "i4") for n in range(2500)}, path)
    with holdfast.open(path, verify=verify, threads=4) as ckpt:
        for name, array in ckpt.read().items():
            assert (array == int(name[2:])).all()
