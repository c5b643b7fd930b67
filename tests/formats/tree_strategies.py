"""Nested state of every kind that the typed JSON tree can say."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import PurePosixPath, PureWindowsPath

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Device, Global, Size
from holdfast.formats.pickle.plain import DefaultDict

texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "$", "$ref", "a.b", "__metadata__", "\x00", '"\\', "ü\U0001f600"]),
    st.sampled_from(["\ud800", "\udfff\ud800", "\ud83d\ude00"]),
)
integers = (
    st.integers(-(1 << 54), 1 << 54)
    | st.integers()
    | st.sampled_from([1 << 53, (1 << 53) + 1, -(1 << 64), 10**300])
)
floats = st.floats() | st.sampled_from([-0.0, 5e-324, 1.7976931348623157e308, 1e16, 1e22, 0.1])
numbers = integers | floats | st.booleans() | st.none() | st.complex_numbers()

numpy_dtypes = st.sampled_from([
    np.dtype(code)
    for code in ("<f4", ">f8", "<i8", "|u1", "|b1", "<c16", "<U3", "|S5", "<M8[ns]", "<m8[3D]", "|V6", ">u2")
] + [np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype([("a", "<i4"), ("b", ">f2")])])  # fmt: skip


@st.composite
def arrays(draw):
    dtype = draw(numpy_dtypes)
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    if dtype.kind == "U":
        return np.full(shape, draw(st.text("ab\U0001f600", max_size=3)), dtype)
    count = int(np.prod(shape))
    return np.frombuffer(
        draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)), dtype
    ).reshape(shape)


@st.composite
def scalars(draw):
    array = draw(arrays().filter(lambda a: a.size))
    return array.reshape(-1)[0]


paths = st.one_of(
    st.builds(PurePosixPath, st.text("ab/. ü", max_size=8)),
    st.builds(PureWindowsPath, st.text("aC:\\/. ", max_size=8)),
).filter(lambda path: type(path)(str(path)) == path)

# Written with `composite` and not with `recursive`: Hypothesis spends seconds on the representation of the latter.


@st.composite
def hashables(draw):
    integer = draw(integers)
    made = draw(st.integers(0, 8))
    match made:
        case 0 | 1:
            return draw(texts)
        case 2:
            return draw(numbers.filter(lambda x: x == x))
        case 3:
            return draw(st.binary(max_size=4))
        case 4:
            return draw(st.sampled_from(DTYPES.rows))
        case 5:
            return Global(draw(texts), draw(texts))
        case 6:
            return Device(draw(texts), draw(st.none() | integers))
        case 7:
            return draw(paths)
        case _:
            return draw(st.sampled_from([range(integer, 3, integer or 1), Size((2, abs(integer)))]))


@st.composite
def keys(draw, depth=2):
    kind = draw(st.integers(0, 5)) if depth else 0
    if kind == 4:
        return tuple(draw(st.lists(keys(depth - 1), max_size=3)))
    if kind == 5:
        return draw(st.frozensets(keys(depth - 1), max_size=3))
    return draw(hashables())


@st.composite
def leaves(draw):
    return draw(st.one_of(
        hashables(), numbers, st.binary(max_size=5).map(bytearray), arrays(), scalars(), st.sets(keys(), max_size=3),
        st.frozensets(keys(), max_size=3), numpy_dtypes,
        st.sampled_from([np.str_(""), np.str_("a\0"), np.str_("\ud800"), np.bytes_(b""), np.bytes_(b"\0")]),
        st.builds(slice, *[st.none() | integers] * 3),
    ))  # fmt: skip


FILLERS = (None, list, dict, int, float, str, bool, tuple, set, OrderedDict)


@st.composite
def trees(draw, leaf=None, depth=3):
    """A nested state; `leaf` is what it holds, everything that has a form unless that is given."""
    kind = draw(st.integers(0, 9)) if depth else 9
    inner = trees(leaf, depth - 1)
    match kind:
        case 0:
            return draw(st.lists(inner, max_size=3))
        case 1:
            return tuple(draw(st.lists(inner, max_size=3)))
        case 2 | 3:
            return draw(st.dictionaries(texts, inner, max_size=3))
        case 4:
            return draw(st.dictionaries(keys(), inner, max_size=2))
        case 5:
            made = OrderedDict(
                draw(st.lists(st.tuples(draw(st.sampled_from([texts, keys()])), inner), max_size=2))
            )
            if draw(st.booleans()):
                made._metadata = draw(st.dictionaries(texts, integers, max_size=2))
            return made
        case 6:
            return Counter(draw(st.dictionaries(keys(), integers, max_size=3)))
        case 7:
            return DefaultDict(
                draw(st.sampled_from(FILLERS)), draw(st.lists(st.tuples(keys(), inner), max_size=2))
            )
        case _:
            return draw(leaves() if leaf is None else leaf)
