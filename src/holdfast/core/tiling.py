"""Whether boxes cover a tensor exactly once, whether two overlap, and which block they form.

`is_tiled_by` and its variants take time that is linear in the number of boxes. Boxes that are cut
along one dimension must form a chain. All others are checked with random numbers: for every
dimension d, let F_d be a function that assigns a random value to each coordinate. Then a box has
the weight

    w(box) = Π over d of (F_d(stop[d]) − F_d(start[d]))

Weights add up: if boxes tile a tensor, the sum of their weights is the weight of the tensor. The
sum is a polynomial in the values F_d(x), with a term for each corner of a box. It is the same
polynomial as that of the whole tensor only if every point is covered exactly once. If two
polynomials differ, they are equal at a random point of a field of p elements with a probability of
at most rank / p (Schwartz-Zippel lemma). The values are drawn anew in each call, so a hostile file
cannot be made to fit them.

A rank may hold several boxes of one tensor. If they differ in one axis only
(`find_differing_axis`), they form a block in which their lengths add up, whatever the distance
between them. Otherwise the block is the smallest box around all of them (`joined_shape`):

       [0:2, 0:3] [0:2, 3:7]      differ in axis 1      2 × 7
       [0:2, 0:3] [8:10, 0:3]     differ in axis 0      4 × 3
       [0:2, 0:3] [2:4, 3:6]      differ in both        4 × 6
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import sub
from os import urandom

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Ints
from holdfast.core.box import Box

StartAndShape = tuple[tuple[int, ...], tuple[int, ...]]
"""A box as its start and its shape."""

Residues = npt.NDArray[np.uint64]
"""Integers modulo `PRIME`."""

PRIME = (1 << 31) - 1
"""The number of elements of the field. Products of two residues fit into 64 bits."""

TRIALS = 3
"""How often weights are compared, with new random values. With the highest rank, 64, all trials
miss a wrong tiling with a probability of (64 / 2^31)^3, which is one in 10^22."""


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the positions of two boxes that share a point, or None if there are none.

    This is a sweep along the axis with the most distinct starts. Each box is compared only with
    those that started before it on this axis and have not ended.

    >>> find_overlap([Box((0,), (4,)), Box((4,), (6,)), Box((5,), (9,))])
    (1, 2)
    """
    positions = [position for position, box in enumerate(boxes) if box.count]
    if len(positions) < 2:
        return None
    rank = boxes[positions[0]].rank
    if rank == 0:
        # Boxes without dimensions all contain the same point.
        return positions[0], positions[1]

    def count_starts(axis: int) -> int:
        return len({boxes[position].start[axis] for position in positions})

    axis = max(range(rank), key=count_starts)
    positions.sort(key=lambda position: boxes[position].start[axis])

    # The boxes that the sweep has entered but not left.
    active: list[int] = []
    for position in positions:
        box = boxes[position]
        active = [earlier for earlier in active if boxes[earlier].stop[axis] > box.start[axis]]
        for earlier in active:
            if box.intersect(boxes[earlier]) is not None:
                return min(position, earlier), max(position, earlier)
        active.append(position)
    return None


def find_differing_axis(boxes: Sequence[Box]) -> int | None:
    """Return the axis in which boxes differ, or None if they do not differ in exactly one.

    Empty boxes are ignored. The result is None if fewer than two boxes remain.
    """
    boxes = [box for box in boxes if box.count]
    if len(boxes) < 2:
        return None
    differing_axes = []
    for axis in range(boxes[0].rank):
        ranges = {(box.start[axis], box.stop[axis]) for box in boxes}
        if len(ranges) > 1:
            differing_axes.append(axis)
    if len(differing_axes) != 1:
        return None
    return differing_axes[0]


def find_bounding_box(boxes: Sequence[Box]) -> Box:
    """Return the smallest box around all boxes that are not empty.

    If all boxes are empty, this is the first of them.
    """
    filled = [box for box in boxes if box.count] or boxes[:1]
    starts = zip(*(box.start for box in filled), strict=True)
    stops = zip(*(box.stop for box in filled), strict=True)
    return Box(tuple(map(min, starts)), tuple(map(max, stops)))


def joined_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the shape of the block that the boxes of one rank form together.

    If the boxes differ in one axis only, their lengths on this axis are added, even if there are
    gaps between them. Otherwise the block is the smallest box around all of them.

    >>> joined_shape([Box.from_offsets((0, 0), (2, 3)), Box.from_offsets((2, 0), (4, 3))])
    (6, 3)
    """
    shape = find_bounding_box(boxes).shape
    axis = find_differing_axis(boxes)
    if axis is None:
        return shape
    length = sum(box.shape[axis] for box in boxes if box.count)
    return (*shape[:axis], length, *shape[axis + 1 :])


def is_tiled_by(outer_box: Box, boxes: Iterable[Box]) -> bool:
    """Return whether boxes cover every point of another box exactly once, and nothing else.

    Args:
        outer_box: The box to cover.
        boxes: Boxes, which may be anywhere. Empty ones are ignored.

    >>> is_tiled_by(Box((2,), (6,)), [Box((4,), (6,)), Box((2,), (4,))])
    True
    >>> is_tiled_by(Box((2,), (6,)), [Box((2,), (5,))])
    False
    """
    filled = [box for box in boxes if box.count]
    if sum(box.count for box in filled) != outer_box.count:
        return False
    if not all(outer_box.contains(box) for box in filled):
        return False
    relative_boxes = []
    for box in filled:
        relative_start = tuple(map(sub, box.start, outer_box.start))
        relative_boxes.append((relative_start, box.shape))
    return is_shape_tiled(outer_box.shape, relative_boxes)


def is_shape_tiled(shape: tuple[int, ...], boxes: Sequence[StartAndShape]) -> bool:
    """Return whether every element of a tensor is in exactly one box.

    Args:
        shape: The shape of the tensor.
        boxes: The start and the shape of each box. Boxes must lie inside of the tensor, and must
            not be empty.

    >>> is_shape_tiled((4, 6), [((0, 0), (4, 2)), ((0, 2), (4, 4))])
    True
    >>> is_shape_tiled((4, 6), [((0, 0), (4, 2)), ((0, 3), (4, 3))])
    False
    """
    if len(boxes) < 2:
        return math.prod(shape) == sum(math.prod(box_shape) for _, box_shape in boxes)
    starts = np.array([start for start, _ in boxes], np.int64).T
    lengths = np.array([box_shape for _, box_shape in boxes], np.int64).T
    return is_shape_tiled_by_columns(shape, starts, starts + lengths)


def is_shape_tiled_by_columns(shape: tuple[int, ...], starts: Ints, stops: Ints) -> bool:
    """Return whether every element of a tensor is in exactly one of many boxes.

    Args:
        shape: The shape of the tensor.
        starts: The starts of the boxes, with a row for each dimension and a column for each box.
        stops: The stops of the boxes. Boxes must lie inside of the tensor. Empty ones are ignored.
    """
    is_filled = np.logical_and.reduce(starts < stops)
    if not is_filled.all():
        starts = starts[:, is_filled]
        stops = stops[:, is_filled]

    # Boxes that are cut along one dimension are ranges of it, which can be compared directly.
    cut_axes = []
    for axis, length in enumerate(shape):
        if starts[axis].any() or (stops[axis] != length).any():
            cut_axes.append(axis)
    if len(cut_axes) == 1:
        axis = cut_axes[0]
        return _is_chain(shape[axis], starts[axis], stops[axis])
    return _has_weight_of_shape(shape, starts, stops)


def _is_chain(length: int, starts: Ints, stops: Ints) -> bool:
    """Return whether ranges cover an axis of this length, each starting where another one stops."""
    # The boxes in a file are usually sorted already.
    is_sorted = (starts[1:] > starts[:-1]).all()
    if not is_sorted:
        order = starts.argsort()
        starts = starts[order]
        stops = stops[order]
    has_no_gaps = (starts[1:] == stops[:-1]).all()
    return bool(starts[0] == 0 and stops[-1] == length and has_no_gaps)


def _has_weight_of_shape(shape: tuple[int, ...], starts: Ints, stops: Ints) -> bool:
    """Return whether the random weights of boxes add up to the weight of the whole tensor.

    Each coordinate of an axis has a random value. The weight of a box is the product, over all
    axes, of the value of its stop minus the value of its start. The module's docstring explains why
    equal weights prove that the boxes tile the tensor. All numbers are modulo `PRIME`.
    """
    box_count = starts.shape[1]
    box_weights = np.ones((TRIALS, box_count), np.uint64)
    whole_weights = np.ones(TRIALS, np.uint64)
    for axis, length in enumerate(shape):
        # Equal coordinates must have equal values, so each distinct one is drawn once.
        coordinates = np.concatenate(([0, length], starts[axis], stops[axis]))
        distinct_coordinates, indices = np.unique(coordinates, return_inverse=True)
        random_bytes = urandom(8 * TRIALS * len(distinct_coordinates))
        random_values = np.frombuffer(random_bytes, np.uint64) % np.uint64(PRIME)
        values = random_values.reshape(TRIALS, -1)[:, indices.reshape(-1)]

        zero_values = values[:, 0]
        length_values = values[:, 1]
        start_values = values[:, 2 : 2 + box_count]
        stop_values = values[:, 2 + box_count :]
        whole_weights = whole_weights * _subtract(length_values, zero_values) % PRIME
        box_weights = box_weights * _subtract(stop_values, start_values) % PRIME
    return bool(np.all(box_weights.sum(axis=1) % PRIME == whole_weights))


def _subtract(a: Residues, b: Residues) -> Residues:
    """Subtract modulo `PRIME`, without an intermediate result below zero."""
    return (a + np.uint64(PRIME) - b) % np.uint64(PRIME)
