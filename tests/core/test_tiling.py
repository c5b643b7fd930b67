"""`is_shape_tiled` against counting how often each element is covered, and on large inputs."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.tiling import StartAndShape, is_shape_tiled


def make_grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list[StartAndShape]:
    """Return the boxes between cuts, which are given for each dimension."""
    ranges_by_axis = []
    for length, axis_cuts in zip(shape, cuts, strict=True):
        edges = sorted({0, length, *(cut for cut in axis_cuts if cut < length)})
        ranges_by_axis.append(list(itertools.pairwise(edges)))

    boxes = []
    for ranges in itertools.product(*ranges_by_axis):
        starts = tuple(start for start, _ in ranges)
        lengths = tuple(stop - start for start, stop in ranges)
        boxes.append((starts, lengths))
    return boxes


def draw_defect(data: st.DataObject, shape: tuple[int, ...], boxes: list[StartAndShape]) -> None:
    """Move, drop, repeat or enlarge one of the boxes. It stays inside of the shape."""
    index = data.draw(st.integers(0, len(boxes) - 1))
    start, box_shape = boxes[index]
    defect = data.draw(st.sampled_from(["move", "drop", "repeat", "enlarge"]))
    if defect == "drop" and len(boxes) > 1:
        boxes.pop(index)
    elif defect == "repeat":
        boxes.append(boxes[index])
    elif defect in ("move", "enlarge") and shape:
        axis = data.draw(st.integers(0, len(shape) - 1))
        if defect == "move":
            new_start = data.draw(st.integers(0, shape[axis] - box_shape[axis]))
            start = (*start[:axis], new_start, *start[axis + 1 :])
        else:
            new_length = shape[axis] - start[axis]
            box_shape = (*box_shape[:axis], new_length, *box_shape[axis + 1 :])
        boxes[index] = start, box_shape


@given(st.data())
def test_a_shape_is_tiled_if_every_element_is_covered_once(data):
    rank = data.draw(st.integers(0, 4))
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=rank, max_size=rank)))
    cuts = [data.draw(st.lists(st.integers(1, 5), max_size=3)) for _ in shape]
    boxes = make_grid(shape, cuts)
    for _ in range(data.draw(st.integers(0, 2))):
        draw_defect(data, shape, boxes)

    is_tiled = is_shape_tiled(shape, boxes)

    # The oracle counts how many boxes each element is in.
    cover_counts = np.zeros(shape, np.int64)
    for start, box_shape in boxes:
        slices = map(slice, start, np.add(start, box_shape).astype(int))
        cover_counts[tuple(slices)] += 1
    assert is_tiled == bool((cover_counts == 1).all())


UPPER_HALF = ((0, 0), (2, 4))
UPPER_LEFT = ((0, 0), (2, 2))
UPPER_RIGHT = ((0, 2), (2, 2))
LOWER_LEFT = ((2, 0), (2, 2))
LOWER_RIGHT = ((2, 2), (2, 2))


@pytest.mark.parametrize(
    ("boxes", "is_tiled"),
    [
        ([UPPER_HALF, LOWER_LEFT, LOWER_RIGHT], True),
        ([UPPER_HALF, LOWER_LEFT, UPPER_RIGHT], False),
        ([UPPER_LEFT, UPPER_LEFT, LOWER_RIGHT, LOWER_RIGHT], False),
    ],
)
def test_boxes_with_the_right_number_of_elements_may_be_in_the_wrong_place(boxes, is_tiled):
    assert is_shape_tiled((4, 4), boxes) == is_tiled


def test_a_tiling_need_not_be_a_grid():
    """No straight cut separates these five boxes."""
    boxes = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]

    assert is_shape_tiled((3, 3), boxes)


@pytest.mark.parametrize("shape", [(1 << 61,), (1 << 30, 1 << 31)])
def test_huge_shapes_do_not_overflow(shape):
    half_length = shape[-1] // 2
    half_shape = (*shape[:-1], half_length)
    outer_starts = (0,) * (len(shape) - 1)
    first_half = ((*outer_starts, 0), half_shape)
    second_half = ((*outer_starts, half_length), half_shape)

    assert is_shape_tiled(shape, [first_half, second_half])
    assert not is_shape_tiled(shape, [first_half, first_half])


def test_a_hundred_thousand_boxes_take_seconds_and_not_hours():
    """Comparing all pairs would take 5,000,000,000 comparisons. The limit is generous."""
    shape = (640, 640)
    boxes = make_grid(shape, [list(range(0, 640, 2))] * 2)
    random.Random(0).shuffle(boxes)
    assert len(boxes) > 100_000

    start_time = time.process_time()
    assert is_shape_tiled(shape, boxes)
    assert not is_shape_tiled(shape, boxes[:-1])
    assert time.process_time() - start_time < 5


def test_a_tensor_with_the_most_dimensions_may_be_cut_in_all_of_them():
    """Box d is the upper half of axis d, and has index 0 in all axes after it."""
    rank = 64
    boxes = []
    for axis in range(rank):
        inner_count = rank - 1 - axis
        start = (0,) * axis + (1,) + (0,) * inner_count
        boxes.append((start, (1,) * axis + (1,) + (2,) * inner_count))
    origin_corner = ((0,) * rank, (1,) * rank)
    wrong_corner = ((0,) * (rank - 1) + (1,), (1,) * rank)

    assert is_shape_tiled((2,) * rank, [*boxes, origin_corner])
    assert not is_shape_tiled((2,) * rank, [*boxes, wrong_corner])
