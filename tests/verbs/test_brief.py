"""Values in a few characters, whatever they hold."""

from __future__ import annotations

import datetime
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Device, Global, Opaque
from holdfast.verbs.brief import brief, root_global


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (12, "12"),
        (1 << 4000, "<int of 4,001 bits>"),
        (0.1, "0.1"),
        (np.float64(0.25), "0.25"),
        (np.int8(3), "3"),
        ("a\x1b[31m", "'a\\x1b[31m'"),
        ("x" * 1000, f"'{'x' * 60}'… (1,000 characters)"[:60] + "…"),
        (b"\0raw", "b'\\x00raw'"),
        ((1,), "(1,)"),
        ((), "()"),
        (set(), "set()"),
        ([[[[[]]]]], "[[[…]]]"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, … 100 items]"),
        ({"a": 1}, "{'a': 1}"),
        (range(3), "range(0, 3)"),
        (slice(1, None), "slice(1, None, None)"),
        (np.zeros((2, 3)), "<array float64 [2, 3]>"),
        (np.dtype("i4"), "dtype('int32')"),
        (DTYPES.name("bfloat16"), "bfloat16"),
        (Device("cuda", 1), "device('cuda:1')"),
        (datetime.date(2020, 1, 2), "2020-01-02"),
        (pathlib.PurePosixPath("a/b"), "Path('a/b')"),
        (Global("os", "sys\ntem"), "os.sys\\ntem"),
        (Opaque(Global("os", "system"), ("ls",), {"k": 1}), "os.system('ls', k=1)"),
        (Opaque(Opaque(Global("a", "f"), (1,)), (2,)), "a.f(1)(2)"),
        (object(), "<object>"),
    ],
)
def test_brief(value, text):
    assert brief(value) == text


def test_hostile_structures_cost_nothing():
    deep: object = ()
    for _ in range(100_000):
        deep = (deep, deep)
    loop: list[object] = []
    loop.append(loop)
    chain: object = Global("a", "b")
    for _ in range(5_000):
        chain = Opaque(chain, (chain,))
    for value in (deep, loop, chain, [deep] * 1000):
        assert len(brief(value)) < 200
    assert isinstance(chain, Opaque)
    assert root_global(chain) == Global("a", "b")
    while (
        isinstance(deep, tuple) and deep
    ):  # freeing 100,000 nested tuples at once would overflow CPython's stack
        deep = deep[0]


values = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers()),
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner, inner)
    ),
)


@given(values)
def test_any_value_is_one_printable_line(value):
    text = brief(value)
    assert text.isprintable()
    assert len(text) <= 81
