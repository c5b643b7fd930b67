"""`--slice`: what numpy would take, and nothing that is evaluated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.read import parse_slice
from holdfast.errors import BadIndex

GOOD = {
    "0": (0,),
    "-1": (-1,),
    "+3": (3,),
    "0:2, ::2, -1": (slice(0, 2), slice(None, None, 2), -1),
    "[1:3]": (slice(1, 3),),
    "[...]": (...,),
    "..., None, newaxis": (..., None, None),
    ":, 1,": (slice(None), 1),
    "::-1": (slice(None, None, -1),),
    " 1 : 2 : 3 ": (slice(1, 2, 3),),
    "": (),
}


@pytest.mark.parametrize("text", GOOD)
def test_good(text):
    assert parse_slice(text) == GOOD[text]


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "1.5",
        "1:2:3:4",
        "::0",
        "1,,2",
        "0x10",
        "1_000",
        "__import__('os')",
        "[1",
        "1]",
        "1 2",
        "True",
        "9" * 30,
        "١",
    ],
)
def test_bad(text):
    with pytest.raises(BadIndex, match="slice"):
        parse_slice(text)


bounds = st.one_of(st.none(), st.integers(-6, 6))
items = st.one_of(
    st.integers(-3, 2),
    st.builds(slice, bounds, bounds, bounds.filter(lambda s: s != 0)),
    st.just(...),
    st.none(),
)


def said(item: object) -> str:
    if isinstance(item, slice):
        return ":".join("" if b is None else str(b) for b in (item.start, item.stop, item.step))
    return "..." if item is ... else str(item)


@given(st.lists(items, max_size=4).filter(lambda i: sum(x is ... for x in i) < 2))
def test_same_elements_as_numpy(index):
    array = np.arange(3**4).reshape(3, 3, 3, 3)
    np.testing.assert_array_equal(
        array[parse_slice(", ".join(map(said, index)))], array[tuple(index)]
    )


@given(st.text(max_size=30))
def test_any_text_gives_an_index_or_bad_index(text):
    try:
        result = parse_slice(text)
    except BadIndex:
        return
    assert all(i is None or i is ... or isinstance(i, int | slice) for i in result)
