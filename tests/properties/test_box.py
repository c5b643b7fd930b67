"""Boxes against the sets of their points, which Python's set operations handle correctly."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.box import Box
from holdfast.core.tiling import is_tiled_by
from tests.support import points


def boxes(rank):
    """Return a strategy for boxes of a rank, some of them empty."""
    start_and_stop = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)
    sides = st.lists(start_and_stop, min_size=rank, max_size=rank)
    return sides.map(
        lambda sides: Box(tuple(start for start, _ in sides), tuple(stop for _, stop in sides))
    )


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank))))
def test_an_intersection_has_the_common_points(pair):
    a, b = pair

    intersection = a.intersect(b)

    common_points = points(a) & points(b)
    if intersection is None:
        assert common_points == set()
    else:
        assert points(intersection) == common_points


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank))))
def test_a_box_contains_another_if_it_has_all_of_its_points(pair):
    a, b = pair

    assert a.contains(b) == (points(b) <= points(a))


@given(
    st.integers(0, 2).flatmap(
        lambda rank: st.tuples(boxes(rank), st.lists(boxes(rank), max_size=5))
    )
)
def test_boxes_tile_another_if_each_point_of_it_is_in_exactly_one(case):
    outer_box, inner_boxes = case
    covered_points = []
    for box in inner_boxes:
        covered_points += points(box)

    is_covered_once = sorted(covered_points) == sorted(points(outer_box))

    assert is_tiled_by(outer_box, inner_boxes) == is_covered_once


@given(boxes(2), st.integers(0, 1), st.integers(1, 9), st.integers(1, 4))
def test_the_boxes_of_a_split_tile_the_box(outer_box, axis, count, second_count):
    split_boxes = []
    for box in outer_box.split(axis, count):
        split_boxes += box.split(1 - axis, second_count)

    assert is_tiled_by(outer_box, split_boxes)
    if split_boxes:
        assert not is_tiled_by(outer_box, split_boxes[1:])
