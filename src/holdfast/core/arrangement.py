"""How the pieces that one holder has of a tensor lie to each other.

A rank may hold several boxes of one tensor: two column blocks, every second row, a corner. Three questions are asked of them.

1. Do two overlap? Then nobody could say which one is true (`first_overlap`).
2. Along which single axis do they follow each other (`common_axis`)? Boxes that differ in that axis alone can be put together
   into one block however far apart they are.
3. What shape does the block have that they make (`joined_shape`)? Along a common axis their lengths add up, so that gaps do not
   count; where there is no such axis it is the smallest box around all of them.

       [0:2, 0:3] [0:2, 3:7]      axis 1    2 × 7
       [0:2, 0:3] [8:10, 0:3]     axis 0    4 × 3
       [0:2, 0:3] [2:4, 3:6]      none      4 × 6

Empty boxes take no part where there is any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.box import Box

__all__ = ["common_axis", "first_overlap", "joined_shape", "surrounding"]


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The positions of two boxes that share a point, or None. A sweep along the axis with the most distinct starts.

    >>> first_overlap([Box((0,), (4,)), Box((4,), (6,)), Box((5,), (9,))])
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


def common_axis(boxes: Sequence[Box]) -> int | None:
    """The one axis in which the boxes differ, or None: they differ in several, or there are not two that are not empty."""
    filled = [box for box in boxes if box.count]
    if len(filled) < 2:
        return None
    sides = [{(box.start[d], box.stop[d]) for box in filled} for d in range(filled[0].rank)]
    differing = [d for d, side in enumerate(sides) if len(side) > 1]
    return differing[0] if len(differing) == 1 else None


def surrounding(boxes: Sequence[Box]) -> Box:
    """The smallest box around all that are not empty; the first box where all are."""
    filled = [box for box in boxes if box.count] or boxes[:1]
    return Box(
        tuple(map(min, *(box.start for box in filled))) if filled[1:] else filled[0].start,
        tuple(map(max, *(box.stop for box in filled))) if filled[1:] else filled[0].stop,
    )


def joined_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """The shape of the block that the boxes, of which there is at least one, make together.

    >>> joined_shape([Box.at((0, 0), (2, 3)), Box.at((2, 0), (4, 3))])
    (6, 3)
    """
    around, axis = surrounding(boxes).shape, common_axis(boxes)
    if axis is None:
        return around
    length = sum(box.shape[axis] for box in boxes if box.count)
    return (*around[:axis], length, *around[axis + 1 :])
