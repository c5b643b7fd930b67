"""CPython's own pickle is the oracle: whatever plain data it writes, we read as the same values, types and sharing."""

from __future__ import annotations

import collections
import pathlib
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.core.limits import Limits
from holdfast.formats.pickle.machine import interpret, interpret_whole
from holdfast.formats.pickle.plain import PlainTable

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
LIMITS, TABLE = Limits(), PlainTable()

any_text = st.text(st.characters(exclude_categories=()), max_size=12)
integers = st.integers(1 - 2**128, 2**128 - 1) | st.integers(-70000, 70000)
keys = st.recursive(
    st.none()
    | st.booleans()
    | integers
    | st.floats(allow_nan=False)
    | any_text
    | st.binary(max_size=6),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
leaves = (
    keys
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | st.binary(max_size=40).map(bytearray)
    | st.sets(keys, max_size=4)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(st.tuples(keys, inner), max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


def read(stream: bytes) -> object:
    return interpret_whole(stream, TABLE, limits=LIMITS).value


def assert_same(ours: object, theirs: object) -> None:
    """The same values and types, and the same sharing of everything that can be changed. Cycles are fine."""
    twins: dict[int, int] = {}
    waiting = [(ours, theirs)]
    while waiting:
        a, b = waiting.pop()
        assert type(a) is type(b)
        if isinstance(b, list | dict | set | bytearray):
            if id(a) in twins:
                assert twins[id(a)] == id(b)
                continue
            assert id(b) not in twins.values()
            twins[id(a)] = id(b)
        if isinstance(b, list | tuple):
            assert len(a) == len(b)
            waiting += zip(a, b, strict=True)
        elif isinstance(b, dict):
            assert len(a) == len(b)
            waiting += zip(a, b, strict=True)
            waiting += zip(a.values(), b.values(), strict=True)
        elif isinstance(b, set | frozenset):
            assert a == b
            assert sorted(map(repr, a)) == sorted(map(repr, b)) or any(
                isinstance(x, frozenset) for x in flat(b)
            )
        elif isinstance(b, float):
            assert struct.pack("<d", a) == struct.pack("<d", b)
        elif isinstance(b, complex):
            assert repr(a) == repr(b)
        else:
            assert a == b


def flat(members):
    for m in members:
        yield m
        if isinstance(m, tuple | frozenset):
            yield from flat(m)


@settings(max_examples=examples(120), deadline=None)
@given(trees)
def test_plain_data_at_every_protocol(tree):
    for protocol in PROTOCOLS:
        stream = pickle.dumps(tree, protocol)
        assert_same(read(stream), pickle.loads(stream))


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_sharing_and_cycles(data):
    count = data.draw(st.integers(1, 6))
    nodes = [
        data.draw(st.sampled_from([list, dict, collections.OrderedDict]))() for _ in range(count)
    ]
    for a, b in data.draw(
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=14)
    ):
        target, value = (
            nodes[a],
            data.draw(st.sampled_from([nodes[b], (nodes[b],), (nodes[b], [nodes[a]])])),
        )
        if isinstance(target, list):
            target.append(value)
        else:
            target[data.draw(keys)] = value
    for protocol in PROTOCOLS:
        stream = pickle.dumps(nodes, protocol)
        assert_same(read(stream), pickle.loads(stream))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        {f"layer.{i}.weight": i for i in range(2500)},
        list(range(3000)),
        [b"x" * 300_000, bytearray(b"y" * 100_000), "z" * 200_000, "é" * 90_000],
        [float("nan"), float("inf"), -0.0, 5e-324],
        ["a\\b\nc\rd\0e\x1a", "\ud800", "\U0001f300", "'\"", "\\u0041"],
        collections.Counter("abracadabra"),
        range(2, 40, 3),
        slice(1, None, -1),
        [b"", b"\xff\x00", bytearray(), (), set(), frozenset(), {}],
    ],
    ids=lambda v: type(v).__name__,
)
def test_particular_values(value, protocol):
    stream = pickle.dumps(value, protocol)
    assert_same(read(stream), pickle.loads(stream))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_default_dicts_and_paths(protocol):
    value = collections.defaultdict(list, {"a": [1]})
    ours = read(pickle.dumps(value, protocol))
    assert isinstance(ours, collections.defaultdict)
    assert ours == value
    assert ours.default_factory is list
    assert ours["new"] == []
    for path in (
        pathlib.PurePosixPath("/a/b"),
        pathlib.PureWindowsPath("C:/x/y"),
        pathlib.Path("q/w"),
    ):
        found = read(pickle.dumps(path, protocol))
        assert str(found) == str(path)
        assert isinstance(found, pathlib.PurePath)
        assert not isinstance(found, pathlib.Path)


def test_python_3_13_spelling_of_paths():
    stream = b"\x80\x04\x8c\x0epathlib._local\x8c\x09PosixPath\x93\x8c\x01/\x8c\x01a\x86R."
    assert read(stream) == pathlib.PurePosixPath("/a")


@pytest.mark.parametrize(
    ("stream", "value"),
    [
        (b"(dp1\nS'a'\np2\nI1\ns.", {"a": 1}),  # Python 2.7, protocol 0: the memo counts from 1
        (b"}q\x01U\x01aq\x02K\x01s.", {"a": 1}),  # Python 2.7 cPickle, protocol 1
        (b"S'\\xff\\x00\\n\\'\\\\'\n.", b"\xff\x00\n'\\"),
        (b"S'caf\\xc3\\xa9'\n.", "café"),
        (b"T\x02\x00\x00\x00\xc3\xa9.", "é"),
        (b"U\x02\xff\xfe.", b"\xff\xfe"),
        (b"I01\n.", True),
        (b"L12L\n.", 12),
        (b"(I1\nI2\n\x91.", frozenset({1, 2})),
        (b"ccollections\nOrderedDict\n((lp1\n(lp2\nS'k'\naI5\naatR.", collections.OrderedDict(k=5)),
        (b"(I1\n(I2\nt0t.", (1,)),
        (b"(I1\n1I3\n.", 3),
    ],
)
def test_old_writers(stream, value):
    ours = read(stream)
    assert ours == value
    assert type(ours) is type(value)


def test_streams_back_to_back():
    table = PlainTable()
    stream = b"junk" + pickle.dumps([1], 2) + pickle.dumps({"a": 2}, 4) + b"tail"
    first = interpret(stream, table, limits=LIMITS, start=4)
    second = interpret(stream, table, limits=LIMITS, start=first.stop)
    assert (first.value, second.value) == ([1], {"a": 2})
    assert stream[second.stop :] == b"tail"
    assert first.opcodes == 6


def test_state_dict_metadata_is_kept():
    state = collections.OrderedDict(w=1)
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    for protocol in PROTOCOLS:
        ours = read(pickle.dumps(state, protocol))
        assert type(ours) is collections.OrderedDict
        assert ours == state
        assert ours._metadata == state._metadata
        assert set(vars(ours)) == {"_metadata"}
    state.other = 3
    ours = read(pickle.dumps(state, 2))
    assert not hasattr(ours, "other")
    assert ours._attributes["other"] == 3
