"""Do the boxes of each tensor cover it exactly once? For thousands of tensors and millions of boxes at a time.

1. A tensor that is cut along one dimension, as almost all are: its boxes, sorted, must be a chain without gap or overlap.
2. Any other. Let c(x) be how many boxes hold the point x, less 1 inside of the tensor: the boxes tile it when c is 0 everywhere.
   Take the difference of c along every dimension that is cut. What is left of a box are its corners, positive or negative as
   the number of *stops* among their coordinates is even or odd,

        + ─── −         4 × 4 in two boxes   + ─── ∓ ─── −      the tensor itself, subtracted,
        │     │                              │     │     │      takes away the outer four;
        − ─── +                              − ─── ± ─── +      the inner ones cancel

   and a sum of corners is 0 everywhere if and only if c is, because summing undoes the difference. So the boxes tile the tensor
   exactly when the positive corners and the negative ones, sorted, are the same list.
3. Let the two lists first differ at a corner p. Of the corners whose sum is c(p), those that are beyond p in no dimension, only p
   itself has not cancelled. So c(p) is what is left at p: below 0, and p is the first point in C order that no
   box holds; above 0, and it is the first that two boxes hold.

Exact, and n log n in the number of corners: n times 2 for each dimension that is cut. `core/tiling.py` decides the same of one
tensor, in any number of dimensions, and cannot say where; here it decides where the corners would be too many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.tiling import covers

__all__ = ["Defect", "defects"]


MAX_CORNERS = 1 << 26
"""Corners that are compared together, 8 bytes each. One tensor that has more is left to `core.tiling`."""

MAX_CUT = 16
"""Dimensions cut at once, by the same reasoning. Coordinates then stay far below 2^63: they have one more value than elements."""


@dataclass(frozen=True, slots=True)
class Defect:
    """The first place in C order where the boxes of a tensor do not cover it exactly once."""

    tensor: int
    point: tuple[int, ...] | None
    """None where the boxes are too many, and cut in too many dimensions, to say the place."""
    boxes: tuple[int, int] | None
    """Two boxes that hold the point; None where none does."""


def defects(extents: Ints, tensors: Ints, starts: Ints, sizes: Ints) -> list[Defect]:
    """What is wrong, a defect for each tensor that is not tiled, in the order of the tensors.

    `extents` has a column for each tensor. The boxes are not empty, lie inside of their tensors, are sorted by tensor and then by
    their starts in C order, and no two neighbours are the same; tensors are numbered as in `extents`.
    """
    totals = _product(extents)
    if not len(tensors):
        return [_nothing(int(t), extents) for t in np.flatnonzero(totals)]
    heads = np.flatnonzero(np.concatenate(([True], tensors[1:] != tensors[:-1])))
    tails = np.append(heads[1:], len(tensors)) - 1
    owners = tensors[heads]
    cut = np.zeros(extents.shape, np.bool_)
    for d in range(len(extents)):
        cut[d, owners] = np.minimum.reduceat(sizes[d], heads) != extents[d, owners]
    several = cut.sum(axis=0) > 1
    # Where one dimension is cut, the others are whole and begin at 0: elements before a box, and elements in it.
    ends = _product(sizes)
    places = np.zeros(len(tensors), np.int64)
    for d in range(len(extents)):
        places += starts[d] * (totals // np.maximum(extents[d], 1))[tensors]
    ends += places
    broken = np.zeros(len(totals), np.bool_)
    broken[owners] = (places[heads] != 0) | (ends[tails] != totals[owners])
    linked = places[1:] == ends[:-1]
    linked[heads[1:] - 1] = True
    broken[tensors[1:][~linked]] = True
    suspect = np.flatnonzero((broken | several)[owners])
    found = {d.tensor: d for d in _first_defects(extents, cut, _Boxes(tensors, starts, sizes), heads, tails + 1, suspect)}
    totals[owners] = 0
    found.update((int(t), _nothing(int(t), extents)) for t in np.flatnonzero(totals))
    return [found[t] for t in sorted(found)]


@dataclass(frozen=True, slots=True)
class _Boxes:
    tensors: Ints
    starts: Ints
    sizes: Ints


def _first_defects(extents: Ints, cut: Bools, boxes: _Boxes, heads: Ints, stops: Ints, suspect: Ints) -> Iterator[Defect]:
    """Compare corners: of tensors that are cut in the same dimensions together, as many as `MAX_CORNERS` allows."""
    owners = boxes.tensors[heads]
    alike: dict[tuple[int, ...], list[int]] = {}
    for group, pattern in zip(suspect.tolist(), cut[:, owners[suspect]].T.tolist(), strict=True):
        alike.setdefault(tuple(d for d, is_cut in enumerate(pattern) if is_cut), []).append(group)
    for dims, members in alike.items():
        groups = np.array(members, np.int64)
        counts = stops[groups] - heads[groups]
        room = MAX_CORNERS >> len(dims)
        begin = 0
        while begin < len(groups):
            stop = begin + int(np.searchsorted(np.cumsum(counts[begin:]), room, side="right"))
            if stop == begin or len(dims) > MAX_CUT:
                yield from _slowly(extents, boxes, int(heads[groups[begin]]), int(stops[groups[begin]]))
                begin += 1
                continue
            chosen = groups[begin:stop]
            rows = np.repeat(heads[chosen] - np.cumsum(counts[begin:stop]) + counts[begin:stop], counts[begin:stop])
            rows += np.arange(len(rows))
            yield from _compared(extents, dims, boxes, owners[chosen], rows)
            begin = stop


def _compared(extents: Ints, dims: tuple[int, ...], boxes: _Boxes, whole: Ints, rows: Ints) -> Iterator[Defect]:
    """The defects of the tensors `whole`, whose boxes are at `rows`."""
    # A corner's number: its place, in C order, among the corners of all these tensors.
    weights = np.ones((len(dims), extents.shape[1]), np.int64)
    volume = np.ones(extents.shape[1], np.int64)
    for i in reversed(range(len(dims))):
        weights[i] = volume
        volume *= extents[dims[i]] + 1
    bases = np.zeros(extents.shape[1], np.int64)
    bases[whole[1:]] = np.cumsum(volume[whole])[:-1]
    tensors = boxes.tensors[rows]
    sides = [(w[tensors], boxes.starts[d][rows], boxes.sizes[d][rows]) for d, w in zip(dims, weights, strict=True)]
    plus, minus = _corners(bases[tensors], [(start * w, (start + size) * w) for w, start, size in sides])
    edges = [(w * extents[d])[whole] for d, w in zip(dims, weights, strict=True)]
    less, more = _corners(bases[whole], [(np.zeros_like(whole), edge) for edge in edges])
    left, right = np.concatenate((*plus, *more)), np.concatenate((*minus, *less))
    left.sort()
    right.sort()
    differ = np.flatnonzero(left != right)
    corners = np.minimum(left[differ], right[differ])
    # A tensor has as many positive corners as negative ones, so the lists of one never shift those of the next.
    first, at = np.unique(np.searchsorted(bases[whole], corners, side="right") - 1, return_index=True)
    for t, i in zip(whole[first].tolist(), at.tolist(), strict=True):
        point = np.zeros(len(extents), np.int64)
        point[list(dims)] = (int(corners[i]) - bases[t]) // weights[:, t] % (extents[list(dims), t] + 1)
        holders = None
        if left[differ[i]] < right[differ[i]]:
            holds = tensors == t
            for d, (_, start, size) in zip(dims, sides, strict=True):
                holds &= (start <= point[d]) & (point[d] < start + size)
            one, other = rows[np.flatnonzero(holds)[:2]].tolist()
            holders = (one, other)
        yield Defect(t, tuple(point.tolist()), holders)


def _corners(bases: Ints, sides: list[tuple[Ints, Ints]]) -> tuple[list[Ints], list[Ints]]:
    """The numbers of the corners of all boxes: those with an even number of stops, and those with an odd one."""
    plus, minus = [bases], list[Ints]()
    for low, high in sides:
        plus, minus = [*(x + low for x in plus), *(x + high for x in minus)], [*(x + high for x in plus), *(x + low for x in minus)]
    return plus, minus


def _slowly(extents: Ints, boxes: _Boxes, begin: int, stop: int) -> Iterator[Defect]:
    tensor = int(boxes.tensors[begin])
    starts, sizes = boxes.starts[:, begin:stop].T.tolist(), boxes.sizes[:, begin:stop].T.tolist()
    if not covers(tuple(extents[:, tensor].tolist()), list(zip(map(tuple, starts), map(tuple, sizes), strict=True))):
        yield Defect(tensor, None, None)


def _nothing(tensor: int, extents: Ints) -> Defect:
    return Defect(tensor, (0,) * len(extents), None)


def _product(columns: Ints) -> Ints:
    """The product of each column, dimension by dimension: numpy is slow along a short axis."""
    out = np.ones(columns.shape[1], np.int64)
    for row in columns:
        out *= row
    return out
