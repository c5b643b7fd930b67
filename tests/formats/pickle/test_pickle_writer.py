"""The pickle writer against CPython's pickler: the same bytes, and what has no form is named."""

from __future__ import annotations

import datetime
import pathlib
import pickle
from collections import Counter, OrderedDict, defaultdict, namedtuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.errors import CannotHold
from holdfast.formats.pickle.plain import DefaultDict
from holdfast.formats.pickle.writer import PickleWriter


def written(value: object) -> bytes:
    writer = PickleWriter(Limits(integer_nbytes=1 << 20))
    writer.write(value)
    assert writer.problems == []
    return writer.finish()


def problems(value: object) -> list[str]:
    writer = PickleWriter()
    writer.write(value)
    writer.finish()
    return writer.problems


def with_attributes() -> OrderedDict:
    made = OrderedDict(a=1)
    made._metadata = OrderedDict({"": {"version": 1}})
    return made


def inside_itself() -> list:
    short, long, plain = ([],), ([], 1, 2, 3, 4), []
    short[0].append(short)
    long[0].append(long)
    plain.append({"self": plain})
    return [short, long, plain]


TEXT = "text that is shared"
SHARED = with_attributes()

VALUES = [
    None, True, 0, 255, 256, 65535, 65536, -1, -128, -129, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, -(2**63),
    -(2**63) - 1, 2**100, -(2**2038), -(2**2039), 2**2039, 2**2100, 1.5, float("nan"), -0.0, "", "é\ud800€😀", [TEXT, TEXT,
    "a", "a"], b"abc", b"\xff", [b"a", b"a"], bytearray(b""), bytearray(b"x\xff"), [], [1], [1, 2], list(range(1000)),
    list(range(1001)), list(range(2001)), {}, {1: 2}, {1: 2, 3: 4}, dict.fromkeys(range(1000)), dict.fromkeys(range(1001)),
    OrderedDict(), with_attributes(), [SHARED, SHARED], OrderedDict.fromkeys(range(1000)),
    OrderedDict.fromkeys(range(1001)), OrderedDict.fromkeys(range(1002)), Counter("aab"), defaultdict(list, {1: [2]}),
    defaultdict(None), defaultdict(int, {1: 1}), defaultdict(str), defaultdict(OrderedDict), {1, 2}, set(), frozenset([1,
    2]), 1j, range(3), range(9, 1, -2), slice(1, None), (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), inside_itself(), [str(i)
    for i in range(300)] * 2, pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:/x"), pathlib.PosixPath("x"),
    np.float32(1), np.bool_(True), np.str_("ab"), np.bytes_(b"x"), np.datetime64("2024-01-01"), ml_dtypes.bfloat16(1.5),
    np.dtype("f4"), np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.arange(6)[::-2], np.zeros(()),
    [np.arange(2, dtype=">f4"), np.float64(1), np.arange(3.0)], np.zeros(2, [("a", "f4"), ("b", "i8")]), np.zeros(2,
    "M8[ns]"), np.zeros(3, ml_dtypes.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}")
def test_the_bytes_are_those_of_cpython(value: object):
    assert written(value) == pickle.dumps(value, 2)


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(min_size=1)
    | st.complex_numbers()
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
NESTED = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner, dict_class=OrderedDict)
        | st.lists(inner, max_size=5).map(tuple)
        | st.frozensets(KEYS)
    ),
    max_leaves=30,
)


@given(NESTED)
def test_nested_values_have_the_bytes_of_cpython(value: object):
    assert written(value) == pickle.dumps(value, 2)


def test_a_default_dict_of_the_reader_is_written_as_pythons():
    assert written(DefaultDict(list, {1: [2]})) == pickle.dumps(defaultdict(list, {1: [2]}), 2)


def test_empty_bytes_are_written_as_torch_loads_them():
    raw = written([b"", b""])
    assert pickle.loads(raw) == [b"", b""]
    assert b"_codecs\nencode" in raw


def test_an_empty_array_is_written_over_empty_bytes():
    assert pickle.loads(written(np.zeros((0, 3), np.float32))).shape == (0, 3)


def test_identities_of_what_the_writer_makes_are_not_taken_twice():
    # Texts, lists and tuples are made on the way; were they freed, another value could get their place and be taken for them.
    value = (
        [bytes([i % 256, i // 256]) for i in range(2000)]
        + [{i} for i in range(500)]
        + [np.float32(i) for i in range(500)]
    )
    assert written(value) == pickle.dumps(value, 2)


class Custom:
    def __reduce__(self) -> object:
        raise AssertionError("nothing of the caller's may run")


def test_every_problem_is_named_by_its_path():
    point = namedtuple("point", "x y")
    found = problems(
        {
            "fine": 1,
            "custom": Custom(),
            "list": [0, {"deep": datetime.date(2024, 1, 1)}],
            "point": point(1, 2),
            "opaque": Opaque(Global("torch.nn", "Linear")),
            "lambda": defaultdict(lambda: 0),
            "objects": np.array([None]),
            ("k", 1): object,
        }
    )
    assert [line.split(":")[0] for line in found] == [
        "custom", "list.1.deep", "point", "opaque", "lambda", "objects", "<tuple>",
    ]  # fmt: skip
    assert "torch.nn.Linear" in found[3]


def test_depth_is_limited():
    value: object = []
    for _ in range(63):
        value = [value]
    assert problems(value) == []
    (found,) = problems({"a": value})
    assert "nested deeper" in found
    for _ in range(5000):
        value = (value,)
    (found,) = problems(value)
    assert "nested deeper" in found


def test_a_counter_that_contains_itself_is_a_problem():
    counter: Counter = Counter()
    counter["a"] = counter
    (found,) = problems(counter)
    assert "inside of itself" in found


def test_an_integer_that_the_reader_refuses_is_a_problem():
    (problem,) = problems({"n": 1 << 200, "m": 1 << 120, "u": (1 << 128) - 1})
    assert problem.startswith("n: an integer of 201 bits")


def test_such_an_integer_in_a_list_of_numbers_is_named_by_its_place():
    (problem,) = problems({"n": [1, 2.5, None, 1 << 200, True]})
    assert problem.startswith("n.3: an integer of 201 bits")


def test_a_list_of_numbers_counts_as_deep_as_it_stands():
    deep: list[object] = [1, 2]
    for _ in range(Limits().depth):
        deep = [deep]
    assert problems(deep)


def nested(kind: str, levels: int, innermost: object) -> object:
    """Containers of two items in each other, so that each has a MARK."""
    value = innermost
    for _ in range(levels):
        value = {"list": [0, value], "dict": {"a": 0, "b": value}, "tuple": (0, 0, 0, value)}[kind]
    return value


LARGE_KEYS = {
    "tuple": {tuple(range(64)): 1},
    "tuples": {(tuple(range(30)), tuple(range(32))): 1},
    "frozenset": {frozenset(range(64)): 1},
    "member of a set": {tuple(range(64))},
    "second of two": {1: 1, tuple(range(64)): 1},
}


@pytest.mark.parametrize("value", LARGE_KEYS.values(), ids=LARGE_KEYS)
def test_save_refuses_a_key_that_open_refuses(tmp_path: pathlib.Path, value: object):
    state, path = {"w": np.ones(2), "t": value}, tmp_path / "a.pt"
    with pytest.raises(CannotHold, match=r"t.*: a dict key or set member .*key_nodes=64"):
        holdfast.save(state, path)
    assert not path.exists()


def test_save_accepts_the_largest_keys_that_open_accepts(tmp_path: pathlib.Path):
    keys = {tuple(range(63)): 1, (tuple(range(30)), tuple(range(31))): 2, frozenset(range(63)): 3}
    holdfast.save({"w": np.ones(2), "t": keys}, tmp_path / "a.pt")
    assert holdfast.open(tmp_path / "a.pt").tree["t"] == keys


@pytest.mark.parametrize("kind", ["list", "dict", "tuple"])
def test_save_refuses_the_nesting_that_open_refuses(tmp_path: pathlib.Path, kind: str):
    path = tmp_path / "a.pt"
    holdfast.save(nested(kind, 62, np.ones(2)), path)
    assert len(holdfast.open(path)) == 1
    holdfast.save(nested(kind, 63, 1), path)
    assert holdfast.open(path).tree is not None
    # A tensor has two MARKs of its own.
    with pytest.raises(CannotHold, match=r"Limits\(marks=64\)"):
        holdfast.save(nested(kind, 63, np.ones(2)), path)
