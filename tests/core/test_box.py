"""`Box`: its constructors and the values that it refuses. tests/properties/test_box.py has the rest."""

from __future__ import annotations

import pytest

from holdfast.core.box import Box


def test_from_offsets_adds_the_sizes_to_the_offsets():
    assert Box.from_offsets((1, 2), (3, 4)) == Box((1, 2), (4, 6))


@pytest.mark.parametrize(("offsets", "sizes"), [((1, 2), (3,)), ((1,), (3, 4))])
def test_from_offsets_rejects_different_numbers_of_offsets_and_sizes(offsets, sizes):
    with pytest.raises(ValueError, match="as many offsets as sizes"):
        Box.from_offsets(offsets, sizes)


@pytest.mark.parametrize(("start", "stop"), [((-1,), (2,)), ((3,), (2,)), ((0, 4), (5, 3))])
def test_a_box_rejects_a_negative_start_and_a_stop_below_the_start(start, stop):
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        Box(start, stop)


def test_a_box_rejects_different_numbers_of_starts_and_stops():
    with pytest.raises(ValueError, match="as many starts as stops"):
        Box((0, 0), (1,))


def test_boxes_of_different_ranks_do_not_contain_each_other_and_cannot_be_intersected():
    vector = Box.whole((4,))
    matrix = Box.whole((4, 4))

    assert not vector.contains(matrix)
    assert not matrix.contains(vector)
    with pytest.raises(ValueError, match="boxes of rank 1 and 2"):
        vector.intersect(matrix)


def test_a_box_without_dimensions_has_one_element():
    assert Box((), ()).count == 1
    assert Box((), ()).intersect(Box((), ())) == Box((), ())


def test_relative_to_moves_a_box_to_another_origin():
    assert Box((4, 2), (6, 3)).relative_to((4, 0)) == Box((0, 2), (2, 3))
    with pytest.raises(ValueError, match="0 <= start"):
        Box((4, 2), (6, 3)).relative_to((5, 0))
