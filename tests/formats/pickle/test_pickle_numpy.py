"""Arrays, scalars and dtypes of numpy, against what numpy itself unpickles."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
from tests.support import unpickled

from holdfast.core.opaque import Opaque
from holdfast.errors import PickleError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
CODES = ["?", "i1", "<i2", ">i2", "<i4", ">i4", "<i8", "u1", "<u2", "<u4", ">u8", "<f2", "<f4", ">f4", "<f8", "c8", ">c16",
         "S3", "<U4", ">U2", "V5", "<M8[ns]", ">m8[3D]", "M8"]  # fmt: skip
STRUCTURED = [
    np.dtype([("a", "<f4"), ("b", ">i2")]),
    np.dtype({"names": ["x", "y"], "formats": ["i1", "f8"], "offsets": [0, 8], "itemsize": 24}),
]
ML = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
DTYPES = [*map(np.dtype, CODES), *STRUCTURED, *map(np.dtype, ML)]


def filled(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    if dtype.kind == "U":
        return np.array([f"é{i}" for i in range(count)], dtype).reshape(shape)
    # Small numbers in every byte: valid for booleans and dates alike.
    raw = bytes(i % 2 for i in range(count * dtype.itemsize))
    return np.ndarray(shape, dtype, raw)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays(dtype, protocol):
    base = filled(dtype, (2, 3, 4))
    arrays = [
        base,
        np.asfortranarray(base),
        base.transpose(1, 2, 0),
        base[:, ::2],
        base[0, 0, 0:0],
        np.array(base[0, 0, 0], dtype),
    ]
    for array in arrays:
        stream = pickle.dumps(array, protocol)
        ours, theirs = unpickled(stream), pickle.loads(stream)
        assert type(ours) is np.ndarray
        # numpy swaps the bytes of some arrays when it unpickles them; ours are always views of the stream.
        assert ours.dtype == array.dtype
        assert ours.dtype.newbyteorder("=") == theirs.dtype.newbyteorder("=")
        assert ours.shape == theirs.shape
        # The padding between fields is nobody's.
        assert ours.tobytes() == array.tobytes() or dtype.names
        assert str(ours.tolist()) == str(theirs.tolist())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scalars_and_dtypes(dtype, protocol):
    value = filled(dtype, (1,))[0]
    stream = pickle.dumps([value, value.dtype, value], protocol)
    ours, theirs = unpickled(stream), pickle.loads(stream)
    assert [type(x) for x in ours] == [type(x) for x in theirs]
    assert ours[0].tobytes() == theirs[0].tobytes()
    assert ours[1] == theirs[1]
    assert ours[0] is ours[2]


def test_the_memo_holds_the_finished_array():
    array = np.arange(3)
    ours = unpickled(pickle.dumps({"a": array, "b": [array, array.dtype, array.dtype]}, 2))
    assert ours["a"] is ours["b"][0]
    assert ours["b"][1] is ours["b"][2]
    assert ours["b"][1] == np.dtype(int)


def test_empty_text_scalars():
    ours = unpickled(
        pickle.dumps([np.str_(""), np.bytes_(b""), {np.str_("k"): 1, np.int64(5): 2}], 2)
    )
    assert ours == ["", b"", {"k": 1, 5: 2}]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        np.array([1, "a", None], dtype=object),
        np.zeros(2, np.dtype([("a", "f4", (2,))])),
        np.zeros(2, np.dtype([("a", [("b", "i1")])])),
        np.zeros(2).view(np.recarray),
        np.ma.masked_array([1, 2], [0, 1]),
        np.dtype("O"),
        np.ndarray((2,), "V0", b""),
    ],
    ids=["object", "subarray", "nested", "recarray", "masked", "dtype O", "no bytes"],
)
def test_the_rest_stays_opaque(value, protocol):
    ours = unpickled(pickle.dumps(value, protocol))
    assert isinstance(ours, Opaque)


def test_an_object_array_keeps_its_content():
    ours = unpickled(pickle.dumps(np.array([1, "a", None], dtype=object), 2))
    assert ours.name == "_reconstruct"
    assert ours.state[-1] == [1, "a", None]


def test_random_states_keep_their_arrays():
    ours = unpickled(pickle.dumps(np.random.RandomState(3).get_state(), 2))
    assert ours[0] == "MT19937"
    assert ours[1].shape == (624,)


DTYPE = b"cnumpy\ndtype\nX\x02\x00\x00\x00f4\x89\x88\x87R(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


ARRAY_HEAD = (
    b"\x80\x03cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01"
)
"""The begin of an array's pickle. Its shape, dtype, order and elements follow."""


@pytest.mark.parametrize(
    ("name", "shape", "data"),
    [
        ("too many elements", b"K\x03\x85", b"C\x08aaaabbbb"),
        ("too few", b"K\x01\x85", b"C\x08aaaabbbb"),
        ("huge", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85", b"C\x08aaaabbbb"),
        ("wraps to 8 bytes", b"\x8a\x09\x02\x00\x00\x00\x00\x00\x00\x40\x00\x85", b"C\x08aaaabbbb"),
        ("negative", b"J\xfe\xff\xff\xffJ\xff\xff\xff\xff\x86", b"C\x08aaaabbbb"),
        ("a boolean", b"\x88K\x02\x86", b"C\x08aaaabbbb"),
        ("text", b"X\x01\x00\x00\x002\x85", b"C\x08aaaabbbb"),
        ("rank 65", b"(" + b"K\x01" * 65 + b"t", b"C\x04aaaa"),
        ("data that is a list", b"K\x02\x85", b"N"),
        ("zero times huge", b"K\x00\x8a\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x00\x86", b"C\x00"),
    ],
)
def test_lies_about_arrays(name, shape, data):
    with pytest.raises(PickleError) as caught:
        unpickled(ARRAY_HEAD + shape + DTYPE + b"\x89" + data + b"tb.")
    assert caught.value.offset is not None


def test_an_order_that_is_neither_of_numpys_is_refused():
    with pytest.raises(PickleError, match="neither of numpy's two"):
        unpickled(ARRAY_HEAD + b"K\x01\x85" + DTYPE + b"X\x01\x00\x00\x00F" + b"C\x04aaaa" + b"tb.")


@pytest.mark.parametrize("code", ["<U1", ">U2"])
def test_text_that_is_no_unicode_is_refused(code):
    """numpy hands out such an element as a SystemError, or as text that breaks whoever touches it."""
    bad = np.array(["a"], code)
    stream = pickle.dumps(bad, 5).replace(bad.tobytes(), b"\xff" * bad.nbytes)
    with pytest.raises(PickleError, match="Unicode"):
        unpickled(stream)
