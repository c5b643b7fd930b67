"""The tiling of many tensors at once, against arrays that are painted box by box."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.box import Box
from holdfast.ranks import survey as tiling
from holdfast.ranks.survey import Defect, defects


def painted(shape, boxes):
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices] += 1
    return counts


def first_defect(shape, boxes):
    """The first point in C order that is not in exactly one box, and whether any box has it."""
    counts = painted(shape, boxes)
    for point in itertools.product(*map(range, shape)):
        if counts[point] != 1:
            return point, bool(counts[point])
    return None


def found(tensors):
    """What `defects` says about shapes with their boxes: for each tensor None or (point, whether boxes overlap there)."""
    dims = max((len(shape) for shape, _ in tensors), default=0)
    extents = np.ones((dims, len(tensors)), np.int64)
    rows = []
    for t, (shape, boxes) in enumerate(tensors):
        extents[: len(shape), t] = shape
        more = dims - len(shape)
        rows += [
            (t, *b.start, *[0] * more, *b.shape, *[1] * more)
            for b in sorted(set(boxes), key=lambda b: b.start)
        ]
    columns = np.array(rows, np.int64).reshape(len(rows), 1 + 2 * dims).T
    said = [None] * len(tensors)
    for defect in defects(
        extents, columns[0], starts=columns[1 : 1 + dims], sizes=columns[1 + dims :]
    ):
        shape = tensors[defect.tensor][0]
        if defect.boxes is not None:
            for i in defect.boxes:
                assert columns[0, i] == defect.tensor
                start, size = columns[1 : 1 + dims, i], columns[1 + dims :, i]
                assert ((start <= defect.point) & (defect.point < start + size)).all()
            assert defect.boxes[0] != defect.boxes[1]
        said[defect.tensor] = (defect.point[: len(shape)], defect.boxes is not None)
    return said


@st.composite
def tilings(draw, max_rank=3):
    """A shape and boxes that tile it, by cutting again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=max_rank)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        i = draw(st.integers(0, len(boxes) - 1))
        boxes[i : i + 1] = boxes[i].split(
            draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
        )
    return shape, boxes


@st.composite
def attempts(draw):
    """A tiling from which boxes were taken, and to which others were added."""
    shape, boxes = draw(tilings())
    boxes = [box for box in boxes if draw(st.integers(0, 7))]
    for _ in range(draw(st.integers(0, 2))):
        sides = [sorted((draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1)))) for n in shape]
        boxes.append(Box(tuple(a for a, _ in sides), tuple(b + 1 for _, b in sides)))
    return shape, list(dict.fromkeys(boxes))


@given(st.lists(tilings(), max_size=5))
def test_what_tiles_has_no_defect(tensors):
    assert found(tensors) == [None] * len(tensors)


@given(st.lists(attempts(), max_size=5))
def test_the_first_defect_is_that_of_a_painted_array(tensors):
    assert found(tensors) == [first_defect(shape, boxes) for shape, boxes in tensors]


@given(st.lists(attempts(), max_size=5))
def test_few_corners_at_a_time_make_no_difference(tensors):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "MAX_CORNERS", 16)
        said = found_or_not(tensors)
    assert said == [first_defect(shape, boxes) is None for shape, boxes in tensors]


def found_or_not(tensors):
    try:
        return [defect is None for defect in found(tensors)]
    except TypeError:
        # Too many corners for one tensor: it has a defect, but no place.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                tiling,
                "Defect",
                lambda tensor, point, boxes: Defect(tensor, point or (0,) * 9, None),
            )
            return [defect is None for defect in found(tensors)]


@given(st.lists(attempts(), max_size=3))
def test_the_slow_way_agrees(tensors):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "MAX_CUT", 0)
        said = found_or_not(tensors)
    assert said == [first_defect(shape, boxes) is None for shape, boxes in tensors]


def test_a_pinwheel_tiles():
    boxes = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 3)),
        Box((2, 1), (3, 3)),
        Box((1, 0), (3, 1)),
        Box((1, 1), (2, 2)),
    ]
    assert found([((3, 3), boxes)]) == [None]
    assert found([((3, 3), boxes[:-1])]) == [((1, 1), False)]


def test_two_cuts_that_look_like_a_chain():
    # Half of the elements before each second box, as if one dimension were cut; but they overlap, and a corner is free.
    assert found([((2, 2), [Box((0, 0), (1, 2)), Box((0, 1), (2, 2))])]) == [((0, 1), True)]
    assert found([((2, 2), [Box((0, 0), (2, 1)), Box((1, 0), (2, 2))])]) == [((0, 1), False)]


def test_more_corners_than_allowed_in_one_tensor():
    quarters = [Box((i, j), (i + 1, j + 1)) for i in range(2) for j in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "MAX_CORNERS", 8)
        assert found_or_not([((2, 2), quarters), ((2, 2), quarters[1:]), ((2, 2), quarters)]) == [
            True,
            False,
            True,
        ]


def test_no_boxes_at_all():
    assert found([((2, 2), []), ((0, 5), []), ((), [])]) == [((0, 0), False), None, ((), False)]


def test_lengths_near_the_limit():
    n = 1 << 24
    quarters = [
        Box((i * n // 2, j * n // 2), ((i + 1) * n // 2, (j + 1) * n // 2))
        for i in range(2)
        for j in range(2)
    ]
    assert found([((n, n), quarters)]) == [None]
    assert found([((n, n), [*quarters[:3], Box((n // 2, n // 2), (n, n - 1))])]) == [
        ((n // 2, n - 1), False)
    ]
