"""`run_boxes` against the indices of a small array."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.box import Box, run_boxes

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def shapes_with_run(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Draw a shape, and the start and the stop of a run of its elements."""
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    stop = draw(st.integers(start, math.prod(shape)))
    return shape, start, stop


@given(shapes_with_run())
def test_boxes_have_the_elements_of_the_run_in_order(case: tuple[tuple[int, ...], int, int]):
    shape, start, stop = case
    element_indices = np.arange(math.prod(shape)).reshape(shape)

    boxes = run_boxes(shape, start, stop)

    elements: list[int] = []
    for box in boxes:
        elements += element_indices[box.slices].reshape(-1).tolist()
    assert elements == list(range(start, stop))
    assert all(box.count for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", [(), (1, 3, 1), (2, 3)])
def test_a_run_of_all_elements_is_one_box(shape):
    assert run_boxes(shape, 0, math.prod(shape)) == [Box.whole(shape)]


def test_an_empty_run_has_no_boxes():
    assert run_boxes((2, 0), 0, 0) == []
    assert run_boxes((2, 3), 4, 4) == []


def test_the_number_of_boxes_does_not_depend_on_the_size_of_the_tensor():
    boxes = run_boxes((10**9, 10**9), 10**9 - 1, 10**18 - 1)

    assert [box.shape for box in boxes] == [(1, 1), (10**9 - 2, 10**9), (1, 10**9 - 1)]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 7)])
def test_elements_that_the_tensor_does_not_have_are_refused(start: int, stop: int):
    with pytest.raises(ValueError, match="no elements"):
        run_boxes((2, 3), start, stop)
