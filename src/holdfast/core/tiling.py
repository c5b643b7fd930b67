"""How boxes lie to each other: do they cover a tensor exactly once, do two overlap, what block do they make?

`is_tiled_by` and `is_shape_tiled` answer the first in time that is linear in the number of boxes. Boxes that
are cut along one dimension must be
a chain. For any others, take for every dimension d a function F_d of its coordinates, with random values. A box then has the weight

    w(box) = Π over d of (F_d(stop[d]) − F_d(start[d]))

which is additive: the weights of boxes that tile a whole sum to that of the whole. The sum is a polynomial in the values F_d(x)
with a term for each corner. It is the polynomial of the whole if and only if every point is covered once. A polynomial that is not
zero is zero at a random point of a field of p elements with a probability of rank / p at the most (Schwartz and Zippel). The
values are drawn anew each time, so no file can be made to fit them.

A rank may hold several boxes of one tensor. Boxes that differ in one axis alone (`find_differing_axis`) make
a block in which their lengths
add up, however far apart they are; for others it is the smallest box around all of them (`joined_shape`):

       [0:2, 0:3] [0:2, 3:7]      axis 1    2 × 7
       [0:2, 0:3] [8:10, 0:3]     axis 0    4 × 3
       [0:2, 0:3] [2:4, 3:6]      none      4 × 6

Empty boxes take no part where there is any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from os import urandom

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Ints
from holdfast.core.box import Box


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The positions of two boxes that share a point, or None. A sweep along the axis with the most distinct starts.

    >>> find_overlap([Box((0,), (4,)), Box((4,), (6,)), Box((5,), (9,))])
    (1, 2)
    """
    filled = [i for i, box in enumerate(boxes) if box.count]
    if len(filled) < 2:
        return None
    rank = boxes[filled[0]].rank
    if rank == 0:
        return filled[0], filled[1]
    axis = max(range(rank), key=lambda d: len({boxes[i].start[d] for i in filled}))
    reaching: list[int] = []
    for i in sorted(filled, key=lambda i: boxes[i].start[axis]):
        reaching = [j for j in reaching if boxes[j].stop[axis] > boxes[i].start[axis]]
        for j in reaching:
            if boxes[i].intersect(boxes[j]) is not None:
                return min(i, j), max(i, j)
        reaching.append(i)
    return None


def find_differing_axis(boxes: Sequence[Box]) -> int | None:
    """The one axis in which the boxes differ, or None: they differ in several, or there are not two that are not empty."""
    filled = [box for box in boxes if box.count]
    if len(filled) < 2:
        return None
    sides = [{(box.start[d], box.stop[d]) for box in filled} for d in range(filled[0].rank)]
    differing = [d for d, side in enumerate(sides) if len(side) > 1]
    return differing[0] if len(differing) == 1 else None


def find_bounding_box(boxes: Sequence[Box]) -> Box:
    """The smallest box around all that are not empty; the first box where all are."""
    filled = [box for box in boxes if box.count] or boxes[:1]
    return Box(
        tuple(map(min, *(box.start for box in filled))) if filled[1:] else filled[0].start,
        tuple(map(max, *(box.stop for box in filled))) if filled[1:] else filled[0].stop,
    )


def joined_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """The shape of the block that the boxes, of which there is at least one, make together.

    >>> joined_shape([Box.from_offsets((0, 0), (2, 3)), Box.from_offsets((2, 0), (4, 3))])
    (6, 3)
    """
    around, axis = find_bounding_box(boxes).shape, find_differing_axis(boxes)
    if axis is None:
        return around
    length = sum(box.shape[axis] for box in boxes if box.count)
    return (*around[:axis], length, *around[axis + 1 :])


StartAndSize = tuple[tuple[int, ...], tuple[int, ...]]

PRIME = (1 << 31) - 1  # Products of two residues fit 64 bits.
TRIALS = 3  # (64 / 2^31)^3 is one in 10^22.


def is_tiled_by(whole: Box, parts: Iterable[Box]) -> bool:
    """Whether the parts cover every point of `whole` exactly once and nothing else. Empty parts do not matter.

    >>> is_tiled_by(Box((2,), (6,)), [Box((4,), (6,)), Box((2,), (4,))]), is_tiled_by(Box((2,), (6,)), [Box((2,), (5,))])
    (True, False)
    """
    boxes = [box for box in parts if box.count]
    if sum(box.count for box in boxes) != whole.count or not all(
        whole.contains(box) for box in boxes
    ):
        return False
    origin = whole.start
    return is_shape_tiled(
        whole.shape,
        [(tuple(a - o for a, o in zip(b.start, origin, strict=True)), b.shape) for b in boxes],
    )


def is_shape_tiled(size: tuple[int, ...], boxes: Sequence[StartAndSize]) -> bool:
    """Whether every element of a tensor is in exactly one of the boxes, which are not empty and lie inside of it.

    >>> is_shape_tiled((4, 6), [((0, 0), (4, 2)), ((0, 2), (4, 4))]), is_shape_tiled((4, 6), [((0, 0), (4, 2)), ((0, 3), (4, 3))])
    (True, False)
    """
    if len(boxes) < 2:
        return math.prod(size) == sum(math.prod(sizes) for _, sizes in boxes)
    starts, sizes = (np.array([box[side] for box in boxes], np.int64).T for side in (0, 1))
    return is_shape_tiled_by_columns(size, starts, starts + sizes)


def is_shape_tiled_by_columns(size: tuple[int, ...], starts: Ints, stops: Ints) -> bool:
    """`is_shape_tiled`, of boxes as columns, a row for each dimension. They lie inside of the tensor; empty ones do not matter."""
    filled = np.logical_and.reduce(starts < stops)
    if not filled.all():
        starts, stops = starts[:, filled], stops[:, filled]
    cut = [d for d, n in enumerate(size) if starts[d].any() or (stops[d] != n).any()]
    if len(cut) != 1:
        return _weights_agree(size, starts, stops)
    start, stop = starts[cut[0]], stops[cut[0]]
    if not (start[1:] > start[:-1]).all():
        order = start.argsort()
        start, stop = start[order], stop[order]
    return bool(start[0] == 0 and stop[-1] == size[cut[0]] and (start[1:] == stop[:-1]).all())


def _weights_agree(size: tuple[int, ...], starts: Ints, stops: Ints) -> bool:
    count = starts.shape[1]
    weights = np.ones((TRIALS, count), np.uint64)
    whole = np.ones(TRIALS, np.uint64)
    for d, n in enumerate(size):
        coordinates = np.concatenate(([0, n], starts[d], stops[d]))
        distinct, numbers = np.unique(coordinates, return_inverse=True)
        raw = np.frombuffer(urandom(8 * TRIALS * len(distinct)), np.uint64) % np.uint64(PRIME)
        values = raw.reshape(TRIALS, -1)[:, numbers.reshape(-1)]
        whole = whole * _minus(values[:, 1], values[:, 0]) % PRIME
        weights = weights * _minus(values[:, 2 + count :], values[:, 2 : 2 + count]) % PRIME
    return bool(np.all(weights.sum(axis=1) % PRIME == whole))


def _minus(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return (a + np.uint64(PRIME) - b) % np.uint64(PRIME)
