"""Covering a tensor exactly once: against counting every element, on grids, and on a great many boxes."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.tiling import is_shape_tiled

StartAndSize = tuple[tuple[int, ...], tuple[int, ...]]


def grid(size: tuple[int, ...], cuts: list[list[int]]) -> list[StartAndSize]:
    """The boxes between cuts in every dimension."""
    edges = [sorted({0, n, *(c for c in cut if c < n)}) for n, cut in zip(size, cuts, strict=True)]
    ranges = [list(itertools.pairwise(edge)) for edge in edges]
    return [
        (tuple(a for a, _ in box), tuple(b - a for a, b in box))
        for box in itertools.product(*ranges)
    ]


@given(st.data())
def test_as_counting_says(data):
    rank = data.draw(st.integers(0, 4))
    size = tuple(data.draw(st.lists(st.integers(1, 6), min_size=rank, max_size=rank)))
    boxes = grid(size, [data.draw(st.lists(st.integers(1, 5), max_size=3)) for _ in size])
    for _ in range(data.draw(st.integers(0, 2))):
        i = data.draw(st.integers(0, len(boxes) - 1))
        match data.draw(st.sampled_from(["move", "drop", "double", "grow"])):
            case "drop" if len(boxes) > 1:
                boxes.pop(i)
            case "double":
                boxes.append(boxes[i])
            case "move" if rank:
                d = data.draw(st.integers(0, rank - 1))
                offsets, sizes = boxes[i]
                at = data.draw(st.integers(0, size[d] - sizes[d]))
                boxes[i] = (*offsets[:d], at, *offsets[d + 1 :]), sizes
            case "grow" if rank:
                d = data.draw(st.integers(0, rank - 1))
                offsets, sizes = boxes[i]
                boxes[i] = offsets, (*sizes[:d], size[d] - offsets[d], *sizes[d + 1 :])
    held = np.zeros(size, np.int64)
    for offsets, sizes in boxes:
        held[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))] += 1
    assert is_shape_tiled(size, boxes) == bool((held == 1).all())


def test_the_same_volume_in_another_place():
    assert is_shape_tiled((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))])
    assert not is_shape_tiled((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((0, 2), (2, 2))])
    assert not is_shape_tiled(
        (4, 4), [((0, 0), (2, 2)), ((0, 0), (2, 2)), ((2, 2), (2, 2)), ((2, 2), (2, 2))]
    )


def test_bricks():
    """No line goes through: a tiling that is no grid."""
    assert is_shape_tiled(
        (3, 3),
        [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))],
    )


@pytest.mark.parametrize("size", [(1 << 61,), (1 << 30, 1 << 31)])
def test_large_numbers(size):
    half = size[-1] // 2
    boxes = [((*(0,) * (len(size) - 1), at), (*size[:-1], half)) for at in (0, half)]
    assert is_shape_tiled(size, boxes)
    assert not is_shape_tiled(size, [boxes[0], boxes[0]])


def test_a_hundred_thousand_boxes_take_a_second_at_the_most():
    side = 320
    boxes = grid((side * 2, side * 2), [list(range(0, side * 2, 2))] * 2)
    random.Random(0).shuffle(boxes)
    before = time.process_time()
    assert len(boxes) > 100_000
    assert is_shape_tiled((side * 2, side * 2), boxes)
    assert not is_shape_tiled((side * 2, side * 2), boxes[:-1])
    assert time.process_time() - before < 5


def test_64_dimensions_cut_in_all_of_them():
    size = (2,) * 64
    rest = [
        ((0,) * d + (1,) + (0,) * (63 - d), (1,) * d + (1,) + (2,) * (63 - d)) for d in range(64)
    ]
    assert is_shape_tiled(size, [*rest, ((0,) * 64, (1,) * 64)])
    assert not is_shape_tiled(size, [*rest, ((0,) * 63 + (1,), (1,) * 64)])
