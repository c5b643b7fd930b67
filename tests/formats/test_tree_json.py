"""Typed JSON: everything comes back as it was, everything else is named, and no document gets through that says something else."""

import contextlib
import enum
import json
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path, PurePosixPath

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.formats.slow_save import Memory, assert_same, state_of
from tests.formats.tree_strategies import trees
from tests.sampling import examples

from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.core.strict_json import is_unicode, json_limits, parse, required_nbytes
from holdfast.core.tensor import Composite, Traits
from holdfast.errors import FormatError, HeaderError, LimitExceeded, MetadataError
from holdfast.formats.tree_json.decode import decode_tree
from holdfast.formats.tree_json.encode import encode_state, encode_value

LIMITS = json_limits(Limits())


def through_json(tree, state=None):
    """Encode, write, parse, decode."""
    encoded = encode_value(tree) if state is None else encode_state(state)
    assert encoded.problems == ()
    raw = msgspec.json.encode(encoded.value)
    raw = raw.ljust(required_nbytes(raw))
    return decode_tree(
        parse(raw, LIMITS), ({} if state is None else state.tensors).__getitem__, Memory().source
    )[0]


@settings(max_examples=examples(200))
@given(trees())
def test_everything_comes_back_with_its_type(tree):
    assert_same(tree, through_json(tree))


@settings(max_examples=examples(100))
@given(st.data())
def test_trees_with_tensors_come_back(data):
    memory = Memory()
    tensor = st.builds(
        lambda n, grad, state: memory.array(np.full(n, n, np.int16), requires_grad=grad, parameter=grad, state=state),
        st.integers(0, 3), st.booleans(), st.none() | st.dictionaries(st.text("ab", max_size=2), st.integers(), max_size=2),
    )  # fmt: skip
    tree = data.draw(trees(tensor))
    state = state_of(tree)
    assume(all(map(is_unicode, state.tensors)))
    assert_same(tree, through_json(tree, state))


FORMS = [
    (None, None),
    (True, True),
    (1 << 53, 1 << 53),
    ((1 << 53) + 1, {"$": "int", "value": "9007199254740993"}),
    (1.5, 1.5),
    (-0.0, {"$": "float", "value": "-0.0"}),
    (float("inf"), {"$": "float", "value": "inf"}),
    (float("nan"), {"$": "float", "value": "nan"}),
    (complex(1, -0.0), {"$": "complex", "real": 1.0, "imag": {"$": "float", "value": "-0.0"}}),
    ("a\ud800", {"$": "str", "utf8": "Ye2ggA=="}),
    ([1, [2]], [1, [2]]),
    ({"a": {"b": 1}}, {"a": {"b": 1}}),
    ({"$a": 1}, {"$": "dict", "entries": {"$a": 1}}),
    ({1: "x"}, {"$": "dict", "items": [[1, "x"]]}),
    ((1, "a"), {"$": "tuple", "items": [1, "a"]}),
    (OrderedDict(a=1), {"$": "ordered_dict", "entries": {"a": 1}}),
    (Counter("aa"), {"$": "counter", "entries": {"a": 2}}),
    (defaultdict(list, {"a": [1]}), {"$": "defaultdict", "filler": "list", "entries": {"a": [1]}}),
    ({3, 1, 2}, {"$": "set", "items": [1, 2, 3]}),
    (frozenset("ba"), {"$": "frozenset", "items": ["a", "b"]}),
    (b"\x00\xff", {"$": "bytes", "base64": "AP8="}),
    (bytearray(b""), {"$": "bytearray", "base64": ""}),
    (range(3), {"$": "range", "start": 0, "stop": 3, "step": 1}),
    (slice(None, 2), {"$": "slice", "start": None, "stop": 2, "step": None}),
    (Size((2, 3)), {"$": "size", "lengths": [2, 3]}),
    (Device("cuda", 1), {"$": "device", "type": "cuda", "index": 1}),
    (DTYPES.name("bfloat16"), {"$": "dtype", "name": "bfloat16"}),
    (Global("torch", "sparse_coo"), {"$": "global", "module": "torch", "name": "sparse_coo"}),
    (PurePosixPath("/a/b"), {"$": "path", "flavour": "posix", "path": "/a/b"}),
    (np.float32(1), {"$": "numpy.scalar", "dtype": "<f4", "base64": "AACAPw=="}),
    (
        np.arange(2, dtype="<u2"),
        {"$": "numpy.array", "shape": [2], "dtype": "<u2", "base64": "AAABAA=="},
    ),
    (np.str_("a\0"), {"$": "numpy.str", "value": "a\0"}),
    (np.bytes_(b"\xff"), {"$": "numpy.bytes", "base64": "/w=="}),
    (np.dtype(">i4"), {"$": "numpy.dtype", "dtype": ">i4"}),
]


@pytest.mark.parametrize(("value", "form"), FORMS, ids=lambda v: None)
def test_the_documented_forms(value, form):
    encoded = encode_value(value)
    assert encoded.problems == ()
    assert msgspec.json.encode(encoded.value) == msgspec.json.encode(form)


def test_a_state_dict_keeps_its_versions():
    tree = OrderedDict({"w": 1})
    tree._metadata = OrderedDict({"": {"version": 1}})
    back = through_json(tree)
    assert type(back) is OrderedDict
    assert back._metadata == tree._metadata


def test_a_path_on_this_disk_comes_back_as_a_path():
    assert through_json(Path("/tmp/x")) == PurePosixPath("/tmp/x")


def test_keys_that_look_alike_keep_their_tensors_apart():
    memory = Memory()
    tree = {np.int64(i): memory.array(np.array([i])) for i in range(3)} | {
        "1": memory.array(np.array([7])),
        1.5: None,
    }
    state = state_of(tree)
    assert_same(tree, through_json(tree, state))


def test_a_composite_comes_back():
    memory = Memory()
    sparse = Composite(
        "sparse_coo", (3, 4), {"indices": memory.array(np.zeros((2, 1), np.int64)), "values": memory.array(np.ones(1))},
        {"coalesced": True}, Traits(requires_grad=True),
    )  # fmt: skip
    quantized = Composite(
        "quantized", (2,), {"int_repr": memory.raw("qint8", (2,))}, {"qscheme": "per_tensor_affine", "scale": 0.5, "zero_point": 3},
        Traits(),
    )  # fmt: skip
    tree = {"s": sparse, "q": quantized}
    state = state_of(tree)
    assert list(state.tensors) == ["s.indices", "s.values", "q.int_repr"]
    assert_same(tree, through_json(tree, state))


def test_all_problems_are_named_with_their_paths():
    class Colour(enum.IntEnum):
        RED = 1

    loop: list[object] = []
    loop.append({"again": loop})
    tree = {
        "a": [Opaque(Global("x", "Y"))], "b": Colour.RED, "c": namedtuple("P", "x")(1), "loop": loop, "o": np.array([object()]),
        "big": 10**5000, "f": defaultdict(lambda: 1), "e": ..., "s": {"k": slice("a")}, "ok": 1, "sub": np.ma.array([1]),
    }  # fmt: skip
    problems = encode_value(tree).problems
    assert [p.split(":")[0] for p in problems] == [
        "a.0",
        "b",
        "c",
        "loop.0.again",
        "o",
        "big",
        "f",
        "e",
        "s.k",
        "sub",
    ]
    assert "an object of class x.Y" in problems[0]
    assert "contains itself" in problems[3]


def test_nesting_is_bounded_on_both_sides():
    deep: object = 1
    for _ in range(Limits().depth):
        deep = ((deep,), {1: 2})[0]
    assert_same(deep, through_json(deep))
    for _ in range(3):
        deep = [deep]
    (problem,) = encode_value(deep).problems
    assert "depth=64" in problem
    value = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(LimitExceeded):
        decode_tree(value, {}.__getitem__, Memory().source)
    while isinstance(value, list):
        (value,) = value


def test_shared_containers_are_written_for_each_place_and_never_without_end():
    shared = [1]
    encoded = encode_value({"a": shared, "b": shared})
    assert msgspec.json.encode(encoded.value) == b'{"a":[1],"b":[1]}'
    assert encoded.notes
    bomb: object = [1]
    for _ in range(50):
        bomb = [bomb, bomb]
    began = time.process_time()
    assert encode_value(bomb).problems
    assert time.process_time() - began < 30


def test_many_small_lists_are_not_taken_for_an_attack():
    tree = {"pairs": [[] for _ in range(5000)], "t": [(1,)] * 3000}
    assert_same(tree, through_json(tree))


def tagged(tag, /, **fields):
    return {"$": tag, **fields}


HOSTILE = {
    "unknown tag": (tagged("eval", code="1"), '$["$"]'),
    "tag of another type": ({"$": 1}, '$["$"]'),
    "tag of a list": ({"$": []}, '$["$"]'),
    "tagged key in a plain dict": ({"$x": 1}, "$[\"$x\"]"),
    "missing field": ({"a": [tagged("tuple")]}, "$.a[0]"),
    "extra field": (tagged("tuple", items=[], more=1), "$.more"),
    "items that are no list": (tagged("tuple", items={}), "$.items"),
    "pair of three": (tagged("dict", items=[[1, 2, 3]]), "$.items[0]"),
    "both entries and items": (tagged("dict", entries={}, items=[]), "$"),
    "neither entries nor items": (tagged("counter"), "$.items"),
    "double key": (tagged("dict", items=[[1, 2], [1, 3]]), "$.items[1][0]"),
    "true and 1": (tagged("dict", items=[[1, 2], [True, 3]]), "$.items[1][0]"),
    "list as a key": (tagged("dict", items=[[[], 1]]), "$.items[0][0]"),
    "dict in a tuple as a key": (tagged("dict", items=[[tagged("tuple", items=[{}]), 1]]), "$.items[0][0]"),
    "list in a set": (tagged("set", items=[[]]), "$.items[0]"),
    "double member": (tagged("frozenset", items=["a", "a"]), "$.items[1]"),
    "no base64": (tagged("bytes", base64="A=A"), "$"),
    "base64 of another alphabet": (tagged("bytes", base64="____"), "$"),
    "base64 beyond ASCII": (tagged("bytes", base64="ü"), "$"),
    "float that JSON has": (tagged("float", value="1.5"), "$"),
    "NaN bits of a number": (tagged("float", value="nan:3ff0000000000000"), "$"),
    "int in hexadecimal": (tagged("int", value="0x10"), "$"),
    "int with underscores": (tagged("int", value="1_0"), "$"),
    "int of a million digits": (tagged("int", value="1" * 1_000_000), "$"),
    "int in other digits": (tagged("int", value="１"), "$"),
    "untagged large int": ([1 << 60], "$[0]"),
    "complex of ints": (tagged("complex", real=1, imag=2), "$"),
    "str that is no UTF-8": (tagged("str", utf8="/w=="), "$"),
    "range by 0": (tagged("range", start=0, stop=1, step=0), "$.step"),
    "range of text": (tagged("range", start="0", stop=1, step=1), "$.start"),
    "range of booleans": (tagged("range", start=True, stop=1, step=1), "$.start"),
    "slice of lists": (tagged("slice", start=[], stop=None, step=None), "$.start"),
    "device without a name": (tagged("device", type=None, index=None), "$.type"),
    "unknown dtype": (tagged("dtype", name="float7"), "$.name"),
    "path of another kind": (tagged("path", flavour="vms", path="x"), "$"),
    "path of a megabyte": (tagged("path", flavour="posix", path="a/" * 500_000), "$"),
    "size of text": (tagged("size", lengths=["2"]), "$.lengths"),
    "filler that could run": (tagged("defaultdict", filler="eval", entries={}), "$.filler"),
    "filler that is a list": (tagged("defaultdict", filler=[], entries={}), "$.filler"),
    "metadata that is no dict": (tagged("ordered_dict", entries={}, metadata=[1]), "$.metadata"),
    "numpy object array": (tagged("numpy.array", dtype="|O8", shape=[1], base64="AAAAAAAAAAA="), "$"),
    "numpy array of fewer bytes": (tagged("numpy.array", dtype="<f4", shape=[1 << 40], base64="AAAA"), "$"),
    "numpy array of negative shape": (tagged("numpy.array", dtype="<f4", shape=[-1, -1], base64="AAAAAA=="), "$"),
    "numpy array of rank 65": (tagged("numpy.array", dtype="|u1", shape=[1] * 65, base64="AA=="), "$"),
    "numpy shape of booleans": (tagged("numpy.array", dtype="|u1", shape=[True], base64="AA=="), "$"),
    "numpy dtype with commas": (tagged("numpy.dtype", dtype="f4,f4"), "$"),
    "numpy dtype that is none": (tagged("numpy.dtype", dtype="<f3"), "$"),
    "numpy element of no bytes": (tagged("numpy.array", dtype="<U0", shape=[1 << 62], base64=""), "$"),
    "numpy scalar of text": (tagged("numpy.scalar", dtype="<U1", base64="QQAAAA=="), "$"),
    "numpy text outside of Unicode": (tagged("numpy.array", dtype=">U1", shape=[1], base64="ABEAAA=="), "$"),
    "numpy text in a record outside of Unicode": (
        tagged("numpy.scalar", dtype={"names": ["a"], "formats": ["<U1"], "offsets": [0], "itemsize": 4}, base64="/////w=="), "$"),
    "structured field beyond the end": (
        tagged("numpy.dtype", dtype={"names": ["a"], "formats": ["<i4"], "offsets": [2], "itemsize": 4}), "$"),
    "structured with nesting": (
        tagged("numpy.dtype", dtype={"names": ["a"], "formats": [{}], "offsets": [0], "itemsize": 4}), "$"),
    "tensor that is not there": ({"w": tagged("tensor", name="x")}, "$.w.name"),
    "tensor twice": ([tagged("tensor", name="w"), tagged("tensor", name="w")], "$[1].name"),
    "tensor with a false flag": (tagged("tensor", name="w", parameter=False), "$.parameter"),
    "tensor with a number as a flag": (tagged("tensor", name="w", buffer=1), "$.buffer"),
    "tensor of a class that is text": (tagged("tensor", name="w", subclass="os.system"), "$.subclass"),
    "meta tensor without a shape": (tagged("tensor", name="m", dtype="float32"), "$.shape"),
    "meta tensor too large to count": (tagged("tensor", name="m", dtype="float32", shape=[1 << 62, 1 << 62]), "$.shape"),
    "composite of values": (tagged("composite", kind="nested", shape=[], parts={"buffer": 1}, attributes={}), "$.parts"),
    "composite of an unknown kind": (tagged("composite", kind="os", shape=[2], parts={}, attributes={}), "$"),
    "quantised floats": (
        tagged("composite", kind="quantized", shape=[2], parts={"int_repr": tagged("tensor", name="w")},
               attributes={"qscheme": "per_tensor_affine", "scale": 1.0, "zero_point": 0}), "$"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_document_that_breaks_a_rule_is_refused_at_its_place(case):
    document, place = HOSTILE[case]
    tensor = Memory().array(np.ones(2, np.float32)).renamed("w")
    with pytest.raises((HeaderError, MetadataError)) as caught:
        decode_tree(document, {"w": tensor}.__getitem__, tensor.source)
    assert caught.value.message.startswith(f"at {place}: ")


def test_keys_that_all_collide_are_refused_before_they_cost_anything():
    # Multiples of the hash modulus: every one of them lands in the same slot.
    keys = [{"$": "int", "value": str(((1 << 61) - 1) * (i + 1))} for i in range(20_000)]
    began = time.process_time()
    with pytest.raises(LimitExceeded):
        decode_tree({"$": "set", "items": keys}, {}.__getitem__, Memory().source)
    assert time.process_time() - began < 60


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["$", "items", "entries", "name", "base64", "dtype", "shape", "value", "a"]), inner | st.sampled_from(
            ["tuple", "dict", "set", "tensor", "bytes", "numpy.array", "numpy.scalar", "composite", "ordered_dict", "range", "path"]
        ), max_size=4),
    max_leaves=15,
)  # fmt: skip


@settings(max_examples=examples(500))
@given(junk)
def test_no_document_causes_any_other_error(document):
    with contextlib.suppress(FormatError, LimitExceeded):
        decode_tree(document, {}.__getitem__, Memory().source)


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1 << 60},
        {"a": 1, "b": -(1 << 60)},
        {"a": 1, "b": True},
        {"a": 2, "b": 2.0},
        {"a": 1, "b": [3]},
    ],
)
def test_dicts_that_begin_with_an_integer(value):
    """Those of short integers alone are one text for all that are alike; these are not."""
    tree = {
        "first": {"a": 1, "b": 1},
        "alike": {"a": 1, "b": 1},
        "other": value,
        "again": dict(value),
    }
    assert_same(tree, through_json(tree))


class Text(str):
    """Equal to a text, and none by its type."""


@pytest.mark.parametrize(
    "odd",
    [{"version": True}, {Text("version"): 1}, {"$version": 1}, {"version": 1 << 60}, {1: 1}, {}],
    ids=repr,
)
def test_a_dict_that_only_looks_like_a_version_is_written_as_it_is_alone(odd):
    together, alone = (encode_value(tree) for tree in ({"a": {"version": 1}, "b": odd}, {"b": odd}))
    assert together.problems == alone.problems
    assert json.loads(msgspec.json.encode(together.value)) == {
        "a": {"version": 1},
        **json.loads(msgspec.json.encode(alone.value)),
    }


def test_a_dict_of_integers_in_two_places_is_noted():
    version = {"version": 1}
    assert encode_value({"a": {"version": 1}, "b": {"version": 1}}).notes == ()
    assert encode_value({"a": version, "b": version}).notes == (
        "1 containers stand in several places; each place gets its own copy",
    )
