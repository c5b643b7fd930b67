"""Two trees that differ in one place are never said to be equal, and copies of a tree always are."""

import copy
import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import PurePosixPath, PureWindowsPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.errors import CannotHold
from holdfast.verbs.compare_values import compare_values

LONG = "x" * 1000

KEYS = [
    None, "None", True, 1, 1.0, np.int64(1), np.float64(1), np.float32(1), "1", b"1", 1 + 0j, False, 0, 0.0, -0.0, "0", math.nan,
    math.inf,
    "", b"", (), (1,), (1.0,), ("1",), (None,), ("None",), (1, 2), ((1, 2),), (True, 2), ("a.b",), "a.b", LONG, LONG + "y",
    (LONG, 1),
    (LONG, 2), frozenset(), frozenset({1}), frozenset({True}), frozenset({"1"}), frozenset({(LONG, 1)}), frozenset({(LONG, 2)}),
    frozenset({frozenset({1})}), Size((1,)), Device("cpu"), Device("cpu", 0), "cpu", Global("a", "b"), Global("a.b", ""), 2**70,
    -(2**70),
    PurePosixPath("a"), PureWindowsPath("a"), range(0), range(1, 1), complex(0, -0.0), np.str_("a"), np.str_("a\0"), "a",
    np.bool_(True),
    Opaque(Global("a", "b")), Opaque(Global("a", "b"), (1,)), Opaque(Global("a", "b"), state={"x": {1}}),
    Opaque(Global("a", "b"), state={"x": {1.0}}), "\ud800",
]  # fmt: skip
"""Each is another than all others, and may be a key."""

VALUES = [
    *KEYS, [], [1], [1.0], [[]], {}, {1: 2}, {1.0: 2}, {True: 2}, {"1": 2}, {None: 1}, {"None": 1}, {"a": {"b": 1}}, {"a.b": 1},
    set(), {1}, {"1"}, {(LONG, 1)}, {(LONG, 2)}, {*range(100)}, {*range(99), 100}, {*map(str, range(100))}, {LONG}, {LONG + "y"},
    {frozenset({1, 2})}, {frozenset({1, 3})}, bytearray(b"1"), bytearray(), defaultdict(int), defaultdict(list), defaultdict(),
    defaultdict(list, a=1), {"a": 1}, Counter(), Counter("a"), slice(1), slice(None, 1, 2), np.zeros(2), np.zeros(2, np.float32),
    np.zeros((2, 1)),
    np.array([0, -0.0]), np.array([1, None], object), np.array(["1", None], object), np.array([1, "None"], object),
    np.array([(LONG, 1), 0], object)[:1], np.array([(LONG, 2), 0], object)[:1], np.dtype("f4"), np.dtype([("a", "f4")]),
    np.dtype([("b", "f4")]), {(LONG, 1): 0}, {(LONG, 2): 0}, {((1, "x" * 70), 1): 0}, {((1, "x" * 70), 2): 0}, {math.nan: 1},
    Opaque(Global("a", "b"), items=[1]), Opaque(Global("a", "b"), entries=[(1, 2)]), Opaque(Global("a", "b"), entries=[("1", 2)]),
    Opaque(Global("a", "b"), kwargs={"x": 1}), Opaque(Opaque(Global("a", "b"))), Opaque(Opaque(Global("a", "c"))),
]  # fmt: skip

ANYWHERE = [
    lambda v: [v], lambda v: [0, v, "x"], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v, "1": 0, 1.5: 2},
    lambda v: {None: v, "None": 1},
    lambda v: OrderedDict(a=1, b=v), lambda v: defaultdict(int, x=v), lambda v: Opaque(Global("m", "C"), (1, v)),
    lambda v: Opaque(Global("m", "C"), state={"x": v}), lambda v: Opaque(Global("m", "C"), state=({"x": v}, {"y": 1})),
    lambda v: Opaque(Global("m", "C"), state=v), lambda v: Opaque(Global("m", "C"), items=[1, v]),
    lambda v: Opaque(Global("m", "C"), entries=[((1,), v)]),
    lambda v: {"s": [v, v]}, lambda v: {"a.b": v, "a": {"b": 0}}, lambda v: (lambda box: box.append(box) or box)([v]),
]  # fmt: skip
IN_KEYS = [
    lambda v: {v: 0}, lambda v: {v, LONG}, lambda v: {"k": {(v, 1): [2]}}, lambda v: [frozenset({v, LONG})],
    lambda v: {(LONG, v): 1},
]  # fmt: skip
HASHABLE = [
    lambda v: (v,), lambda v: (LONG, v), lambda v: frozenset({v}),
    lambda v: Opaque(Global("m", "C"), (v,)), lambda v: frozenset({(v, v), LONG}),
]  # fmt: skip


def differs(a, b):
    return bool(compare_values({"v": a}, {"v": b})[0])


@given(
    st.lists(st.sampled_from(HASHABLE), max_size=3),
    st.sampled_from(IN_KEYS),
    st.lists(st.sampled_from(ANYWHERE), max_size=3),
    st.data(),
)
def test_another_key_or_member_is_a_difference(inner, key, outer, data):
    one, other = data.draw(st.sampled_from(KEYS)), data.draw(st.sampled_from(KEYS))
    a, b, again = one, other, copy.deepcopy(one)
    for wrap in (*inner, key, *outer):
        a, b, again = wrap(a), wrap(b), wrap(again)
    assert differs(a, b) is (one is not other)
    assert not differs(a, again)


@given(st.lists(st.sampled_from(ANYWHERE), max_size=4), st.data())
def test_another_value_is_a_difference(wraps, data):
    one, other = data.draw(st.sampled_from(VALUES)), data.draw(st.sampled_from(VALUES))
    a, b, again = one, other, copy.deepcopy(one)
    for wrap in wraps:
        a, b, again = wrap(a), wrap(b), wrap(again)
    assert differs(a, b) is (one is not other)
    assert differs(b, a) is (one is not other)
    assert not differs(a, again)


def test_all_pairs():
    for i, one in enumerate(VALUES):
        for j, other in enumerate(VALUES):
            assert differs(one, other) is (i != j), (one, other)


def test_objects_that_hold_themselves_by_way_of_a_set():
    def made(last):
        whole = Opaque(Global("m", "C"))
        whole.state = {"all": {whole, last}}
        return {whole: whole, "s": {whole, (whole, whole)}}

    assert not differs(made(1), made(1))
    assert differs(made(1), made(2))


def test_tangles_cost_what_they_hold():
    """Every object holds all others in a set, and cycles of 2,000 and 2,001 links meet in each of their places."""

    def tangle(n):
        members = [Opaque(Global("m", "C"), (i,)) for i in range(n)]
        for member in members:
            member.state = {"all": [*members]}
        return members

    assert not differs(tangle(60), tangle(60))

    def ring(n):
        first = last = [0]
        for _ in range(n - 1):
            last.append([0])
            last = last[1]
        last.append(first)
        return first

    assert not differs(ring(2000), ring(2001))
    assert differs(ring(2000), [0, [0, [0, [1]]]])


def test_order_alone_is_a_note():
    changes, notes = compare_values({"m": {"a": 1, "b": 2}}, {"m": OrderedDict(b=2, a=1)})
    assert (changes, notes) == ((), ("the keys of 'm' are in a different order",))


def test_versions_of_modules_are_values():
    def state(version):
        made = OrderedDict(a=1)
        made._metadata = OrderedDict({"": {"version": version}})
        return made

    assert [(c.name, c.a, c.b) for c in compare_values(state(1), state(2))[0]] == [
        ("_metadata..version", 1, 2)
    ]
    assert compare_values(state(1), OrderedDict(a=1)) == (
        (),
        ("the whole has attributes on one side only",),
    )


@pytest.mark.parametrize(("a", "b"), [
    ({None: 1}, {"None": 1}), ({(LONG, 1): 1}, {(LONG, 2): 1}), ({"s": {(LONG, 1)}}, {"s": {(LONG, 2)}}),
    ({"d": defaultdict(int)}, {"d": defaultdict(list)}), ({1: 2}, {"1": 2}), ({"a.b": 1}, {"a": {"b": 1}}),
    ({None: np.ones(2)}, {"None": np.ones(2)}), ({1: np.ones(2)}, {"1": np.ones(2)}),
    ({"a.b": np.ones(2)}, {"a": {"b": np.ones(2)}}),
    ({None: np.ones(2), "None": np.zeros(2)}, {"None": np.ones(2), None: np.zeros(2)}),
    ({"k": {True: np.ones(1)}}, {"k": {"True": np.ones(1)}}), ({"t": (np.ones(1),)}, {"t": [np.ones(1)]}),
])  # fmt: skip
@pytest.mark.parametrize("suffix", ["a.pt", "a"])
def test_files(tmp_path, a, b, suffix):
    holdfast.save(a, tmp_path / suffix, durable=False)
    holdfast.save(b, tmp_path / "b.pt", durable=False)
    holdfast.save(a, tmp_path / "same.pt", durable=False)
    assert not holdfast.diff(tmp_path / suffix, tmp_path / "b.pt").equal
    assert not holdfast.diff(tmp_path / "b.pt", tmp_path / suffix).equal
    assert holdfast.diff(tmp_path / suffix, tmp_path / "same.pt").equal


def test_names_alone_are_enough_for_a_file_that_has_no_more(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"a.b": np.ones(2)}, tmp_path / "a.safetensors")
    holdfast.save({"a": {"b": np.ones(2)}}, tmp_path / "b.pt", durable=False)
    found = holdfast.diff(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert found.equal
    assert found.notes == ("1 tensors are nested on one side and have dotted names on the other",)


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_every_format_gives_back_what_it_takes(tmp_path, number):
    state = {"w": np.ones(2), "v": VALUES[number]}
    paths = [tmp_path / name for name in ("a.pt", "b", "c.safetensors")]
    held = []
    for path in paths:
        try:
            holdfast.save(state, path, durable=False)
            held.append(path)
        except CannotHold:
            assert not path.exists()
    for path in held[1:]:
        assert holdfast.diff(held[0], path).equal
