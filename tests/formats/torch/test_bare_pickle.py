"""Files of `pickle.dump`: arrays of numpy and state dicts of torch, as those libraries write them."""

from __future__ import annotations

import collections
import os
import pickle
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.hostile.cases_bare import bytes8
from tests.hostile.cases_resources import array
from tests.hostile.craft_pickle import integer, stream, text, tuple_of

import holdfast
from holdfast.core.limits import Limits
from holdfast.core.opaque import Opaque
from holdfast.errors import FormatError, LimitExceeded, Truncated, UnknownFormat

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
BIG = np.arange(60_000, dtype=np.float32).reshape(200, 300)

ARRAYS = {
    "big": BIG,
    "transposed": BIG.T,
    "fortran": np.asfortranarray(BIG),
    "turned": np.arange(24_000, dtype=np.int64).reshape(20, 30, 40).transpose(2, 0, 1),
    "steps": BIG[::2, ::3],
    "small": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "one": np.array(7, np.int16),
    "nothing": np.zeros((0, 3)),
    "big_endian": np.arange(20_000, dtype=">f8"),
    "bool": np.array([True, False, True]),
    "complex": np.arange(3, dtype=np.complex64),
    "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
}


def open_dump(tmp_path, value: object, protocol: int) -> holdfast.Checkpoint:
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(value, protocol))
    return holdfast.open(path)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_are_tensors(tmp_path, protocol):
    with open_dump(tmp_path, {"model": ARRAYS, "__author__": "a", "n": 3}, protocol) as checkpoint:
        assert checkpoint.format == "pickle"
        assert list(checkpoint) == [f"model.{name}" for name in ARRAYS]
        for name, expected in ARRAYS.items():
            tensor = checkpoint[f"model.{name}"]
            assert tensor.shape == expected.shape
            assert tensor.dtype == expected.dtype.newbyteorder("=")
            np.testing.assert_array_equal(tensor.numpy(), expected)
        np.testing.assert_array_equal(
            checkpoint["model.turned"][3:9, 2].numpy(), ARRAYS["turned"][3:9, 2]
        )
        assert checkpoint.tree["__author__"] == "a"
        assert checkpoint.tree["n"] == 3
        assert checkpoint.foreign == ()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_state_dict_of_torch_opens(tmp_path, protocol):
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(4))
    state = model.state_dict()
    state["transposed"] = state["0.weight"].t()
    state["half"] = torch.arange(5).to(torch.bfloat16)
    state["uint16"] = torch.arange(5).to(torch.uint16)
    state["parameter"] = torch.nn.Parameter(torch.ones(2))
    with open_dump(tmp_path, state, protocol) as checkpoint:
        assert list(checkpoint) == list(state)
        for name, expected in state.items():
            found = checkpoint[name].torch()
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected.detach())
        assert isinstance(checkpoint.tree, collections.OrderedDict)
        assert checkpoint["parameter"].traits.parameter
        assert checkpoint.foreign == ()


def test_a_lone_storage_is_no_file_of_torch_save(tmp_path):
    storage = torch.arange(10.0).storage()
    with open_dump(tmp_path, storage, 4) as checkpoint:
        assert checkpoint.format == "pickle"
        assert checkpoint["tensor"].numpy().tolist() == [*range(10)]


def test_what_python_2_wrote_opens(tmp_path):
    # As Python 2 writes `pickle.dumps({"w": array}, 2)`: elements are a BINSTRING, names are SHORT_BINSTRING.
    raw = BIG.tobytes()
    data = b"T" + len(raw).to_bytes(4, "little") + raw
    kind = b"cnumpy\ndtype\nU\x02f4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    shape = b"K\xc8M,\x01\x86"
    content = b"\x80\x02}U\x01w" + made + b"(K\x01" + shape + kind + b"\x89" + data + b"tbs."
    assert np.array_equal(pickle.loads(content, encoding="latin1")["w"], BIG)
    path = tmp_path / "model.pkl"
    path.write_bytes(content)
    with holdfast.open(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"].numpy(), BIG)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_verb_reads_it(tmp_path, protocol):
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(ARRAYS, protocol))
    assert holdfast.verify(path).ok
    assert holdfast.scan(path).verdict() == "clean"
    holdfast.convert(path, tmp_path / "model.safetensors")
    assert holdfast.diff(path, tmp_path / "model.safetensors", tensors_only=True).equal
    again = pickle.loads(pickle.dumps(holdfast.open(path)))
    np.testing.assert_array_equal(again["fortran"].numpy(), ARRAYS["fortran"])


def test_arrays_of_text_records_and_objects_are_values(tmp_path):
    others = {
        "text": np.array(["a", "bc"]),
        "long_text": np.array(["x" * 40_000]),
        "record": np.zeros(2, [("a", "i4"), ("b", "f4")]),
        "object": np.array([None, {}], dtype=object),
        "date": np.array(["2026-01-01"], "M8[D]"),
    }
    with open_dump(tmp_path, {**others, "w": BIG}, 4) as checkpoint:
        assert list(checkpoint) == ["w"]
        assert checkpoint.tree["text"].tolist() == ["a", "bc"]
        assert isinstance(checkpoint.tree["object"], Opaque)


def test_the_elements_of_an_array_are_not_read_when_it_is_opened(tmp_path):
    """A file of 1 GiB, most of it a hole, opens in little memory; its last element is read by itself."""
    count = 1 << 30
    head = stream(text("x"), array(tuple_of(integer(count)), bytes8(b"", count)))
    head = head.replace(text("x"), b"")
    begin, end = head[:-3], head[-3:]
    path = tmp_path / "model.pkl"
    with open(path, "wb") as file:
        file.write(begin)
        file.seek(count - 1, os.SEEK_CUR)
        file.write(b"\x07" + end)
    tracemalloc.start()
    try:
        with holdfast.open(path) as checkpoint:
            assert checkpoint["tensor"].shape == (count,)
            assert checkpoint["tensor"][-2:].numpy().tolist() == [0, 7]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < count // 50


def test_opcodes_count_and_arrays_do_not(tmp_path):
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps({"w": BIG}))
    assert list(holdfast.open(path, limits=Limits(pickle_nbytes=1000))) == ["w"]
    path.write_bytes(pickle.dumps({"w": [1.5] * 1000}))
    with pytest.raises(LimitExceeded, match="pickle_nbytes"):
        holdfast.open(path, limits=Limits(pickle_nbytes=1000))


def test_errors_name_the_byte_of_the_file(tmp_path):
    content = pickle.dumps([BIG, 1])[:-2] + b"\xff."
    path = tmp_path / "model.pkl"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        holdfast.open(path)
    assert caught.value.offset == len(content) - 2


def test_a_file_that_is_cut_is_truncated(tmp_path):
    content = pickle.dumps({"w": BIG})
    path = tmp_path / "model.pkl"
    for stop in (10, 1000, len(content) - 1):
        path.write_bytes(content[:stop])
        with pytest.raises(Truncated):
            holdfast.open(path)


def test_a_second_pickle_in_the_file_is_refused(tmp_path):
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(ARRAYS) + pickle.dumps(3))
    with pytest.raises(FormatError, match="save each to a file of its own"):
        holdfast.open(path)


@pytest.mark.parametrize("content", [b"(a list of things)\n" * 50, b"config = 3\n" * 50, b"}{]["])
def test_text_is_no_pickle(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(UnknownFormat):
        holdfast.open(path)


def test_a_file_of_joblib_is_named(tmp_path):
    joblib = pytest.importorskip("joblib")
    path = tmp_path / "model.pkl"
    joblib.dump({"w": BIG}, path)
    with pytest.raises(UnknownFormat, match="joblib"):
        holdfast.open(path)


def test_a_scan_of_a_pickle_that_only_opening_refuses_has_no_error(tmp_path):
    path = tmp_path / "odd.pkl"
    path.write_bytes(stream(array(tuple_of(integer(3)), bytes8(b"ab"))))
    with pytest.raises(FormatError):
        holdfast.open(path)
    (report,) = holdfast.scan(path).reports
    assert (report.format, report.error, report.verdict()) == ("pickle", None, "clean")
