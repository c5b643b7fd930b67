"""Boxes against sets of points."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.box import Box
from holdfast.core.tiling import is_tiled_by
from tests.support import points


def boxes(rank):
    side = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)
    return st.lists(side, min_size=rank, max_size=rank).map(
        lambda sides: Box(tuple(s[0] for s in sides), tuple(s[1] for s in sides))
    )


@given(st.integers(0, 3).flatmap(lambda r: st.tuples(boxes(r), boxes(r))))
def test_intersection_is_the_common_points(pair):
    a, b = pair
    both = a.intersect(b)
    assert (points(both) if both is not None else set()) == points(a) & points(b)
    assert a.contains(b) == (points(b) <= points(a))


@given(st.integers(0, 2).flatmap(lambda r: st.tuples(boxes(r), st.lists(boxes(r), max_size=5))))
def test_tiles_means_every_point_once(drawn):
    whole, parts = drawn
    counted = [p for part in parts for p in points(part)]
    assert is_tiled_by(whole, parts) == (sorted(counted) == sorted(points(whole)))


@given(boxes(2), st.integers(0, 1), st.integers(1, 9), st.integers(1, 4))
def test_a_split_tiles(whole, axis, parts, again):
    pieces = [q for p in whole.split(axis, parts) for q in p.split(1 - axis, again)]
    assert is_tiled_by(whole, pieces)
    assert not pieces or not is_tiled_by(whole, pieces[1:])
