"""The bytes of a rank's state: they come back as they were, and no others are taken."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.box import Box
from holdfast.core.dtype import DTYPES
from holdfast.errors import HeaderError, MetadataError
from holdfast.ranks.state import Catalogue, RankState, decode, encode
from tests.ranks.columns import rank_state

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def states(draw):
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    shapes = [tuple(draw(st.lists(st.integers(0, 9), max_size=4))) for _ in names]
    dtypes = [draw(st.sampled_from(DTYPES.rows)).name for _ in names]
    boxes = []
    for shape in shapes:
        sides = st.tuples(*(st.tuples(st.integers(0, 1 << 40), st.integers(0, n)) for n in shape))
        boxes.append(
            [
                Box.from_offsets([o for o, _ in s], [n for _, n in s])
                for s in draw(st.lists(sides, max_size=3))
            ]
        )
    others = [name for name in draw(st.lists(NAMES, unique=True, max_size=4)) if name not in names]
    values = {name: draw(st.binary(max_size=16)) for name in others}
    aliases = [
        (name, names[0])
        for name, s, d in zip(names, shapes, dtypes, strict=True)
        if (s, d) == (shapes[0], dtypes[0])
    ][1:]
    return rank_state(
        zip(names, dtypes, shapes, boxes, strict=True), values=values, aliases=aliases
    )


def parts(state):
    columns = [c.tolist() for c in (state.tensors, state.offsets, state.sizes)]
    c = state.catalogue
    return c.names, c.dtypes, c.shapes, columns, list(state.values.items()), state.aliases


@given(states())
def test_a_state_comes_back(state):
    data = encode(state)
    again = decode(data)
    assert parts(again) == parts(state)
    assert again.catalogue == state.catalogue
    assert encode(again) == data


@given(states(), st.data())
def test_damaged_bytes_are_refused_or_are_another_state(state, data):
    good = encode(state)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    try:
        taken = decode(bytes(bad))
    except (HeaderError, MetadataError):
        return
    # There is one form for each state, so whatever is taken is exactly what was sent.
    assert encode(taken) == bytes(bad)


@given(states(), st.data())
def test_cut_or_longer_bytes_are_refused(state, data):
    good = encode(state)
    with pytest.raises((HeaderError, MetadataError)):
        decode(good[: data.draw(st.integers(0, len(good) - 1))])
    with pytest.raises(HeaderError):
        decode(good + data.draw(st.binary(min_size=1, max_size=9)))


def test_equal_catalogues_are_one_object():
    def state(rank):
        return rank_state([("w", "float32", (4, 2), [Box((rank, 0), (rank + 1, 2))])])

    known = dict[bytes, Catalogue]()
    one, two = (decode(encode(state(rank)), known) for rank in range(2))
    assert one.catalogue is two.catalogue
    assert (one.offsets.tolist(), two.offsets.tolist()) == ([[0], [0]], [[1], [0]])


def raw(catalogue, header, columns=b""):
    """Bytes with these two documents and columns."""
    a, b = (
        d if isinstance(d, bytes) else json.dumps(d, separators=(",", ":")).encode()
        for d in (catalogue, header)
    )
    b += b" " * (-(24 + len(a) + len(b)) % 8)
    return (
        b"hf-rank\x02"
        + len(a).to_bytes(8, "little")
        + len(b).to_bytes(8, "little")
        + a
        + b
        + columns
    )


def ints(*numbers):
    return np.array(numbers, "<i8").tobytes()


CATALOGUE = {"names": ["w"], "dtypes": ["float32"], "shapes": [[4]]}
HEADER = {"boxes": 1, "values": [], "aliases": []}


def test_the_bytes_by_hand():
    assert parts(decode(raw(CATALOGUE, HEADER, ints(0, 1, 3))))[:4] == (
        ("w",),
        ("float32",),
        ((4,),),
        [[0], [[1]], [[3]]],
    )


@pytest.mark.parametrize(
    ("catalogue", "header", "columns"),
    [
        (CATALOGUE, HEADER, ints(1, 0, 4)),
        (CATALOGUE, HEADER, ints(-1, 0, 4)),
        (CATALOGUE, HEADER, ints(0, -1, 4)),
        (CATALOGUE, HEADER, ints(0, 0, -4)),
        (CATALOGUE, HEADER, ints(0, 0)),
        (CATALOGUE, HEADER, ints(0, 0, 4, 0)),
        (CATALOGUE, HEADER | {"boxes": -1}, b""),
        (CATALOGUE, HEADER | {"boxes": 1 << 70}, ints(0, 0, 4)),
        (CATALOGUE, HEADER | {"boxes": "1"}, ints(0, 0, 4)),
        (CATALOGUE, HEADER | {"more": 1}, ints(0, 0, 4)),
        (CATALOGUE, HEADER | {"values": [["v", "0g"]]}, ints(0, 0, 4)),
        (CATALOGUE, HEADER | {"values": [["v", "0 0"]]}, ints(0, 0, 4)),
        (CATALOGUE, HEADER | {"values": [["v", "AA"]]}, ints(0, 0, 4)),
        (CATALOGUE, HEADER | {"values": [["v", "00" * 65]]}, ints(0, 0, 4)),
        (CATALOGUE, HEADER | {"values": [["v", "00"], ["v", "00"]]}, ints(0, 0, 4)),
        (CATALOGUE, HEADER | {"values": [["w", "00"]]}, ints(0, 0, 4)),
        (CATALOGUE, HEADER | {"aliases": [["w", "w"]]}, ints(0, 0, 4)),
        (CATALOGUE, HEADER | {"aliases": [["w", "x"]]}, ints(0, 0, 4)),
        (CATALOGUE | {"dtypes": ["float33"]}, HEADER, ints(0, 0, 4)),
        (CATALOGUE | {"dtypes": []}, HEADER, ints(0, 0, 4)),
        (CATALOGUE | {"shapes": [[-4]]}, HEADER, ints(0, 0, 4)),
        (CATALOGUE | {"shapes": [[4.0]]}, HEADER, ints(0, 0, 4)),
        (CATALOGUE | {"shapes": [[1 << 49]]}, HEADER, ints(0, 0, 4)),
        (CATALOGUE | {"shapes": [[0, 1 << 63]]}, HEADER, ints(0, 0, 0, 0, 1)),
        (CATALOGUE | {"shapes": [[1] * 65]}, HEADER, ints(0, *[0] * 65, *[1] * 65)),
        ({"names": ["w", "w"], "dtypes": ["int8"] * 2, "shapes": [[4]] * 2}, HEADER, ints(0, 0, 4)),
        # The second tensor has one dimension; its box has an extent in the other.
        (
            {"names": ["w", "v"], "dtypes": ["int8"] * 2, "shapes": [[4, 4], [4]]},
            HEADER,
            ints(1, 0, 0, 4, 4),
        ),
        (
            {"names": ["w", "v"], "dtypes": ["int8"] * 2, "shapes": [[4, 4], [4]]},
            HEADER,
            ints(1, 0, 1, 4, 1),
        ),
        (b'{"names":["w"],"names":["w"],"dtypes":["int8"],"shapes":[[4]]}', HEADER, ints(0, 0, 4)),
        (b'{"names":["\\u0077"],"dtypes":["int8"],"shapes":[[4]]}', HEADER, ints(0, 0, 4)),
        (b'{"names":["\\ud800"],"dtypes":["int8"],"shapes":[[4]]}', HEADER, ints(0, 0, 4)),
        (b'{"names":["\xff"],"dtypes":["int8"],"shapes":[[4]]}', HEADER, ints(0, 0, 4)),
        (b"[" * 100_000, HEADER, ints(0, 0, 4)),
        (CATALOGUE, b'{"boxes":1,"boxes":1,"values":[],"aliases":[]}', ints(0, 0, 4)),
        (CATALOGUE, b'{"boxes":1,"values":[],"aliases":[]}        ', ints(0, 0, 4)),
    ],
)
def test_what_cannot_be_is_refused(catalogue, header, columns):
    with pytest.raises((HeaderError, MetadataError)):
        decode(raw(catalogue, header, columns))


def test_columns_that_are_not_aligned_are_refused():
    good = raw(CATALOGUE, HEADER, ints(0, 1, 3))
    spaces = len(good) - 24 - len(good[:-24].rstrip(b" "))
    assert 0 < spaces < 8
    length = int.from_bytes(good[16:24], "little") - spaces
    with pytest.raises(HeaderError):
        decode(good[:16] + length.to_bytes(8, "little") + good[24 : -24 - spaces] + good[-24:])


def test_half_a_surrogate_is_refused_before_it_travels():
    with pytest.raises(MetadataError):
        encode(rank_state([("\ud800", "int8", (1,), [Box((0,), (1,))])]))
    with pytest.raises(MetadataError):
        encode(rank_state([], values={"\ud800": b""}))


def test_aliases_must_be_alike_and_flat():
    def with_aliases(*aliases, dtypes=("int8",) * 3):
        return rank_state(
            [(n, d, (4,), [Box((0,), (4,))]) for n, d in zip("abc", dtypes, strict=True)],
            aliases=aliases,
        )

    assert with_aliases(("b", "a"), ("c", "a")).aliases == (("b", "a"), ("c", "a"))
    for wrong in ([("b", "a"), ("c", "b")], [("b", "a"), ("b", "c")], [("a", "b"), ("b", "a")]):
        with pytest.raises(MetadataError):
            with_aliases(*wrong)
    with pytest.raises(MetadataError):
        with_aliases(("b", "a"), dtypes=("int8", "uint8", "int8"))


def test_boxes_must_have_the_rank_of_their_tensor():
    catalogue, column, rows = (
        Catalogue(("w",), ("int8",), ((4,),)),
        np.zeros(1, np.int64),
        np.zeros((1, 1), np.int64),
    )
    assert RankState(catalogue, column, rows, rows).count == 1
    for wrong in (
        (column.astype(np.int32), rows, rows),
        (column, column, rows),
        (column, rows, rows[:0]),
        (rows, rows, rows),
    ):
        with pytest.raises(MetadataError):
            RankState(catalogue, *wrong)
