"""Which boxes a rank has, beside an oracle that cuts arrays of indices as `torch.chunk` cuts tensors."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.box import Box
from holdfast.core.tiling import is_tiled_by
from holdfast.extras.rank_files.placements import Cut, local_boxes


def pieces(array: np.ndarray, count: int, axis: int) -> list[np.ndarray]:
    size = -(-array.shape[axis] // count)
    index = [slice(None)] * array.ndim
    found = []
    for i in range(count):
        index[axis] = slice(i * size, (i + 1) * size)
        found.append(array[tuple(index)])
    return found


def oracle(
    indices: np.ndarray, mesh: tuple[int, ...], at: tuple[int, ...], cuts: tuple[Cut, ...]
) -> np.ndarray:
    for cut in cuts:
        each = [
            pieces(piece, mesh[cut.axis], cut.dim)[at[cut.axis]]
            for piece in pieces(indices, cut.split, cut.dim)
        ]
        indices = np.concatenate(each, cut.dim)
    return indices


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Cut, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cuts = [
        Cut(draw(st.integers(0, len(shape) - 1)), axis, draw(st.integers(1, 4)))
        for axis in draw(st.permutations(range(len(mesh))))
        if draw(st.booleans())
    ]
    return shape, mesh, tuple(cuts)


@given(placed())
def test_boxes_are_what_cutting_gives(case):
    shape, mesh, cuts = case
    indices = np.arange(math.prod(shape)).reshape(shape)
    mine = {}
    for at in itertools.product(*map(range, mesh)):
        expected = oracle(indices, mesh, at, cuts)
        boxes = local_boxes(shape, mesh, at, cuts)
        made = np.full(expected.shape, -1)
        for whole, own in boxes:
            made[own.slices] = indices[whole.slices]
        assert np.array_equal(made, expected)
        mine[tuple(sorted((whole.start, whole.stop) for whole, _ in boxes if whole.count))] = [
            whole for whole, _ in boxes
        ]
    # Ranks that differ in no cut have the same; all others together have everything once.
    assert is_tiled_by(Box.whole(shape), [box for boxes in mine.values() for box in boxes])
