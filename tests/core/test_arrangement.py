"""Overlaps, bounding boxes and joined shapes of several boxes, against sets of points.

A box is small enough here to list all of its points (`points`), so that set operations of Python
are the oracle.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import points

from holdfast.core.box import Box
from holdfast.core.tiling import find_bounding_box, find_differing_axis, find_overlap, joined_shape


@st.composite
def lists_of_boxes(draw):
    """Draw one to five boxes of the same rank. Some may be empty, and some may overlap."""
    rank = draw(st.integers(0, 3))
    offset_and_size = st.tuples(st.integers(0, 4), st.integers(0, 3))
    sides = st.lists(offset_and_size, min_size=rank, max_size=rank)
    boxes = []
    for offsets_and_sizes in draw(st.lists(sides, min_size=1, max_size=5)):
        offsets = [offset for offset, _ in offsets_and_sizes]
        sizes = [size for _, size in offsets_and_sizes]
        boxes.append(Box.from_offsets(offsets, sizes))
    return boxes


def all_points(boxes):
    return set().union(*map(points, boxes))


@given(lists_of_boxes())
def test_find_overlap_returns_two_boxes_with_a_common_point_if_there_are_any(boxes):
    overlapping_pairs = [
        (first, second)
        for first, second in itertools.combinations(range(len(boxes)), 2)
        if points(boxes[first]) & points(boxes[second])
    ]

    overlap = find_overlap(boxes)

    if overlapping_pairs:
        assert overlap in overlapping_pairs
    else:
        assert overlap is None


@given(lists_of_boxes())
def test_the_bounding_box_ends_at_the_outermost_points(boxes):
    bounding_box = find_bounding_box(boxes)

    inside = all_points(boxes)
    if not inside:
        assert bounding_box == boxes[0]
        return
    for axis in range(bounding_box.rank):
        coordinates = [point[axis] for point in inside]
        assert bounding_box.start[axis] == min(coordinates)
        assert bounding_box.stop[axis] == max(coordinates) + 1


@given(lists_of_boxes())
def test_boxes_that_tile_a_box_have_its_shape_when_joined(boxes):
    bounding_box = find_bounding_box(boxes)
    if find_overlap(boxes) is None and all_points(boxes) == points(bounding_box):
        assert joined_shape(boxes) == bounding_box.shape


@given(lists_of_boxes())
def test_boxes_that_differ_in_one_axis_have_as_many_elements_when_joined(boxes):
    if find_overlap(boxes) is None and find_differing_axis(boxes) is not None:
        assert Box.whole(joined_shape(boxes)).count == len(all_points(boxes))


@pytest.mark.parametrize(
    ("offsets_and_sizes", "axis", "shape"),
    [
        pytest.param([((0, 0), (2, 3)), ((0, 3), (2, 4))], 1, (2, 7), id="side by side"),
        pytest.param([((0, 0), (2, 3)), ((2, 0), (4, 3))], 0, (6, 3), id="one below the other"),
        pytest.param([((0, 0), (2, 3)), ((8, 0), (2, 3))], 0, (4, 3), id="with a gap"),
        pytest.param([((4, 0), (2, 3)), ((0, 0), (2, 3))], 0, (4, 3), id="in reverse order"),
        pytest.param([((0, 0), (2, 3)), ((2, 3), (2, 3))], None, (4, 6), id="on a diagonal"),
        pytest.param([((5, 5), (2, 3))], None, (2, 3), id="one box"),
        pytest.param([((0, 0), (2, 3)), ((0, 0), (2, 0))], None, (2, 3), id="an empty box"),
        pytest.param([((0,), (0,))], None, (0,), id="only an empty box"),
        pytest.param([((), ())], None, (), id="no dimensions"),
        pytest.param([((0, 0, 0), (2, 3, 4)), ((0, 3, 0), (2, 1, 4))], 1, (2, 4, 4), id="rank 3"),
    ],
)
def test_joined_shape_adds_lengths_only_on_the_axis_in_which_boxes_differ(
    offsets_and_sizes, axis, shape
):
    boxes = [Box.from_offsets(offsets, sizes) for offsets, sizes in offsets_and_sizes]

    assert find_differing_axis(boxes) == axis
    assert joined_shape(boxes) == shape
