"""A run of a flattened tensor as boxes, against the indices of a small array."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.box import Box, run_boxes

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(runs())
def test_the_boxes_of_a_run_are_its_elements_in_their_order(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    boxes = run_boxes(shape, start, stop)
    assert [int(n) for box in boxes for n in numbers[box.slices].reshape(-1)] == list(
        range(start, stop)
    )
    assert all(box.count for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_whole_tensor_is_one_box() -> None:
    assert run_boxes((), 0, 1) == [Box((), ())]
    assert run_boxes((1, 3, 1), 0, 3) == [Box.whole((1, 3, 1))]
    assert run_boxes((2, 0), 0, 0) == []


def test_the_size_of_a_tensor_does_not_matter() -> None:
    assert [box.shape for box in run_boxes((10**9, 10**9), 10**9 - 1, 10**18 - 1)] == [
        (1, 1),
        (10**9 - 2, 10**9),
        (1, 10**9 - 1),
    ]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 7)])
def test_elements_that_are_not_there_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="no elements"):
        run_boxes((2, 3), start, stop)
