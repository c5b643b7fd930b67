"""How the pieces of one holder lie to each other, against brute force over points."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import points

from holdfast.core.box import Box
from holdfast.core.tiling import find_bounding_box, find_differing_axis, find_overlap, joined_shape


@st.composite
def boxes(draw):
    rank = draw(st.integers(0, 3))
    side = st.tuples(st.integers(0, 4), st.integers(0, 3))
    made = draw(st.lists(st.lists(side, min_size=rank, max_size=rank), min_size=1, max_size=5))
    return [Box.from_offsets([o for o, _ in sides], [n for _, n in sides]) for sides in made]


@given(boxes())
def test_an_overlap_is_found_where_there_is_one(given_boxes):
    filled = [points(box) for box in given_boxes]
    pairs = [
        (i, j) for i, j in itertools.combinations(range(len(filled)), 2) if filled[i] & filled[j]
    ]
    found = find_overlap(given_boxes)
    assert found in pairs if pairs else found is None


@given(boxes())
def test_the_surrounding_box_is_the_smallest(given_boxes):
    inside = set().union(*map(points, given_boxes))
    around = find_bounding_box(given_boxes)
    if inside:
        assert around.start == tuple(min(p[d] for p in inside) for d in range(around.rank))
        assert around.stop == tuple(max(p[d] for p in inside) + 1 for d in range(around.rank))
    else:
        assert around == given_boxes[0]


@given(boxes())
def test_pieces_that_tile_a_box_make_that_box(given_boxes):
    if find_overlap(given_boxes) is not None:
        return
    inside, around = set().union(*map(points, given_boxes)), find_bounding_box(given_boxes)
    if inside == points(around):
        assert joined_shape(given_boxes) == around.shape
    if find_differing_axis(given_boxes) is not None:
        assert Box.whole(joined_shape(given_boxes)).count == len(inside)


@pytest.mark.parametrize(
    ("pieces", "axis", "shape"),
    [
        ([((0, 0), (2, 3)), ((0, 3), (2, 4))], 1, (2, 7)),
        ([((0, 0), (2, 3)), ((2, 0), (4, 3))], 0, (6, 3)),
        ([((0, 0), (2, 3)), ((8, 0), (2, 3))], 0, (4, 3)),
        ([((4, 0), (2, 3)), ((0, 0), (2, 3))], 0, (4, 3)),
        ([((0, 0), (2, 3)), ((2, 3), (2, 3))], None, (4, 6)),
        ([((5, 5), (2, 3))], None, (2, 3)),
        ([((0, 0), (2, 3)), ((0, 0), (2, 0))], None, (2, 3)),
        ([((0,), (0,))], None, (0,)),
        ([((), ())], None, ()),
        ([((0, 0, 0), (2, 3, 4)), ((0, 3, 0), (2, 1, 4))], 1, (2, 4, 4)),
    ],
)
def test_shapes(pieces, axis, shape):
    made = [Box.from_offsets(*piece) for piece in pieces]
    assert (find_differing_axis(made), joined_shape(made)) == (axis, shape)
