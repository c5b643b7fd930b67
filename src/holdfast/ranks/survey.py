"""The boxes of all ranks, some tensors at a time: which are the same, who has them, do they tile their tensors?

All boxes of a *batch*, a stretch of the merged catalogue, are gathered from all ranks and sorted by one number: the place of their
first element among all elements of the batch. Boxes with one number have one start; with the same sizes as well, they are replicas.

    rank 0    w[0:4]  b[0:2]               box        w[0:4]   w[4:8]   b[0:2]
    rank 1    w[4:8]  b[0:2]      ───►     holders    0  2     1  2     0  1
    rank 2    w[0:4]  w[4:8]               as box     0  0     0  1     1  1

A batch keeps memory bounded: what is left of it are, for each different box, its holders and where they have it.

`defects`: do the boxes of each tensor cover it exactly once? For thousands of tensors and millions of boxes at a time.

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

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools, Ints
from holdfast.core.group import format_ranks
from holdfast.core.tiling import is_shape_tiled
from holdfast.core.value import Value
from holdfast.ranks.merge import RankBoxes
from holdfast.ranks.state import BITS, Catalogue

Int32s = npt.NDArray[np.int32]


BATCH_BOXES = 1 << 19
"""Boxes in one batch, unless one tensor has more. A column of 4 MiB is sorted in the processor's cache."""

BATCH_BOXES_A_RANK = 256
"""Or as many a rank, if that is more: a stretch that is worth the Python that fetches it."""

BATCH_TENSORS = 1 << 16
"""numpy sorts 16-bit numbers in linear time."""

BATCH_COUNT = 1 << 52
"""Elements of the tensors in one batch: room above for the corners of `defects`."""


class BoxBatch(Value, frozen=True):
    """The different boxes of some tensors, in the order of the catalogue and then in C order of their starts."""

    heads: Ints
    """Where the holders of each box begin; one more entry marks the end."""
    ranks: Int32s
    """The holders of each box, ascending."""
    boxes: Int32s
    """The number of the box in the columns of each holder."""
    nbytes: Ints
    problems: tuple[tuple[int, str], ...]
    """Tensors that are not covered exactly once, and why."""


class _Boxes(Value, frozen=True):
    """Boxes of all ranks, one column each."""

    tensors: Ints
    """Counted from the first tensor of the batch."""
    ranks: Int32s
    boxes: Int32s
    offsets: Ints
    sizes: Ints

    def at(self, where: Ints | Bools) -> _Boxes:
        return _Boxes(
            self.tensors[where], self.ranks[where], self.boxes[where], *self.geometry(where)
        )

    def geometry(self, where: Ints | Bools) -> tuple[Ints, Ints]:
        places = where.nonzero()[0] if where.dtype == np.bool_ else where
        return self.offsets.take(places, axis=1), self.sizes.take(places, axis=1)


def cut_batches(held: Sequence[RankBoxes], catalogue: Catalogue) -> list[int]:
    """The places in the catalogue at which batches begin; one more entry marks the end."""
    boxes = np.zeros(len(catalogue), np.int64)
    for h in held:
        boxes += np.bincount(h.tensors, minlength=len(catalogue))
    counts = np.multiply.reduce(catalogue.extents)
    room = max(BATCH_BOXES, BATCH_BOXES_A_RANK * len(held))
    edges = [0]
    while (begin := edges[-1]) < len(catalogue):
        window = slice(begin, begin + BATCH_TENSORS)
        # As floating point no sum overflows, and up to twice the limit all are exact.
        elements = counts[window].cumsum(dtype=np.float64).searchsorted(BATCH_COUNT, "right")
        edges.append(
            begin + max(int(min(boxes[window].cumsum().searchsorted(room, "right"), elements)), 1)
        )
    return edges


def survey(held: Sequence[RankBoxes], catalogue: Catalogue, left_out: Bools) -> Iterator[BoxBatch]:
    """Every batch of the catalogue in turn. The tensors that are `left_out` have no boxes and no problems."""
    edges = cut_batches(held, catalogue)
    cuts = [h.tensors.searchsorted(edges).tolist() for h in held]
    bits = np.array([BITS[dtype] for dtype in catalogue.dtypes], np.int64)
    for i, (begin, stop) in enumerate(pairwise(edges)):
        parts = [
            (rank, h, *cut[i : i + 2]) for rank, (h, cut) in enumerate(zip(held, cuts, strict=True))
        ]
        gathered = _gather(
            [part for part in parts if part[2] < part[3]], first=begin, rank=catalogue.rank
        )
        about = _About(catalogue, begin, catalogue.extents[:, begin:stop], bits[begin:stop])
        yield about.batch(gathered, left_out[begin:stop].copy())


def _gather(parts: Sequence[tuple[int, RankBoxes, int, int]], *, first: int, rank: int) -> _Boxes:
    if not parts:
        none, no_columns = np.zeros(0, np.int32), np.zeros((rank, 0), np.int64)
        return _Boxes(np.zeros(0, np.int64), none, none, no_columns, no_columns)
    return _Boxes(
        np.concatenate([h.tensors[a:b] for _, h, a, b in parts]) - first,
        np.array([number for number, _, _, _ in parts], np.int32).repeat(
            [b - a for _, _, a, b in parts]
        ),
        # A rank whose boxes were not sorted has its own numbers.
        np.concatenate(
            [np.arange(a, b) if h.order is None else h.order[a:b] for _, h, a, b in parts]
        ).astype(np.int32),
        np.concatenate(
            [_filled(h.taken(h.state.offsets, a, b), rank, 0) for _, h, a, b in parts], axis=1
        ),
        np.concatenate(
            [_filled(h.taken(h.state.sizes, a, b), rank, 1) for _, h, a, b in parts], axis=1
        ),
    )


def _filled(columns: Ints, rank: int, value: int) -> Ints:
    """The columns of a rank; where it has no tensor of so many dimensions, with those added."""
    if len(columns) == rank:
        return columns
    return np.concatenate(
        (columns, np.full((rank - len(columns), columns.shape[1]), value, np.int64))
    )


class _About(Value, frozen=True):
    """The tensors of a batch."""

    catalogue: Catalogue
    first: int
    extents: Ints
    bits: Ints

    def batch(self, boxes: _Boxes, left_out: Bools) -> BoxBatch:
        if self._are_one_each(boxes, left_out):
            return BoxBatch(
                np.arange(len(boxes.tensors) + 1),
                boxes.ranks,
                boxes.boxes,
                self._nbytes(boxes.tensors, boxes.sizes),
                (),
            )
        boxes, problems = self._inside(boxes, left_out)
        order, same = self._sorted(boxes)
        heads = _edges(~same, len(order))
        ranks = boxes.ranks[order]
        different = order[heads[:-1]]
        twice = (same & (ranks[1:] == ranks[:-1])).nonzero()[0]
        for i in _first_of_each(boxes.tensors[order[twice]], order[twice]):
            where = f"{self._name(boxes, i)}: {format_ranks([int(boxes.ranks[i])])} has {self._box(boxes, i)} twice"
            problems.append((int(boxes.tensors[i]), where))
        tensors, (offsets, sizes) = boxes.tensors[different], boxes.geometry(different)
        for defect in defects(self.extents, tensors, starts=offsets, sizes=sizes):
            if not left_out[defect.tensor]:
                problems.append((defect.tensor, self._explain(defect, boxes, different)))
        placed = tuple((self.first + tensor, text) for tensor, text in problems)
        return BoxBatch(heads, ranks, boxes.boxes[order], self._nbytes(tensors, sizes), placed)

    def _are_one_each(self, boxes: _Boxes, left_out: Bools) -> bool:
        """Whether each tensor has one box, which is all of it, and elements: then nothing is to be sorted or found wrong."""
        extents, count = self.extents, self.extents.shape[1]
        if (
            np.count_nonzero(left_out)
            or np.count_nonzero(boxes.offsets)
            or np.count_nonzero(extents) < extents.size
        ):
            return False
        in_order = boxes.tensors.tobytes() == np.arange(count).tobytes()
        return in_order and boxes.sizes.tobytes() == extents.tobytes()

    def _nbytes(self, tensors: Ints, sizes: Ints) -> Ints:
        nbytes: Ints = (self.bits[tensors] * np.multiply.reduce(sizes) + 7) >> 3
        return nbytes

    def _inside(self, boxes: _Boxes, left_out: Bools) -> tuple[_Boxes, list[tuple[int, str]]]:
        """The boxes that have elements, of the tensors all of whose boxes lie inside; the others are marked as left out."""
        unwanted = left_out[boxes.tensors]
        # Not the sum of offset and size: it may not fit 64 bits.
        outside = (
            np.logical_or.reduce(
                boxes.offsets > self.extents.take(boxes.tensors, axis=1) - boxes.sizes
            )
            & ~unwanted
        )
        problems = []
        if np.count_nonzero(outside):
            beyond = outside.nonzero()[0]
            of_each = np.bincount(boxes.tensors[beyond], minlength=len(left_out))
            firsts = _first_of_each(boxes.tensors[beyond], beyond)
            owners = boxes.tensors[firsts].tolist()
            problems = [
                (t, self._say_outside(boxes, i, int(of_each[t])))
                for i, t in zip(firsts, owners, strict=True)
            ]
            left_out |= of_each > 0
            unwanted = left_out[boxes.tensors]
        unwanted |= np.logical_or.reduce(boxes.sizes == 0)
        return (boxes.at(~unwanted) if np.count_nonzero(unwanted) else boxes), problems

    def _sorted(self, boxes: _Boxes) -> tuple[Ints, Bools]:
        """The order by tensor, start and rank; and for each box but the first, whether it is the same as the one before."""
        counts = np.multiply.reduce(self.extents)
        places = (counts.cumsum() - counts)[boxes.tensors]
        stride = np.ones(self.extents.shape[1], np.int64)
        for extent, offsets in zip(self.extents[::-1], boxes.offsets[::-1], strict=True):
            places += offsets * stride[boxes.tensors]
            stride *= np.maximum(extent, 1)
        # By tensor in linear time. Ranks mostly hold ascending parts, and then this was all.
        order = boxes.tensors.astype(np.uint16).argsort(kind="stable")
        places = places[order]
        if not bool((places[1:] >= places[:-1]).all()):
            again = places.argsort(kind="stable")
            order, places = order[again], places[again]
        same = places[1:] == places[:-1]
        if np.count_nonzero(same):
            # One start and different sizes: they overlap, so it does not matter in which order they are.
            one, other = order[:-1][same], order[1:][same]
            alike = np.ones(len(one), np.bool_)
            for sizes in boxes.sizes:
                alike &= sizes[one] == sizes[other]
            same[same] = alike
        return order, same

    def _name(self, boxes: _Boxes, i: int) -> str:
        return repr(self.catalogue.names[self.first + int(boxes.tensors[i])])

    def _box(self, boxes: _Boxes, i: int) -> str:
        rank = len(self.catalogue.shapes[self.first + int(boxes.tensors[i])])
        sides = zip(boxes.offsets[:rank, i].tolist(), boxes.sizes[:rank, i].tolist(), strict=True)
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in sides) + "]"

    def _say_outside(self, boxes: _Boxes, i: int, count: int) -> str:
        shape = self.catalogue.shapes[self.first + int(boxes.tensors[i])]
        more = f"; {count - 1} more of its boxes are" if count > 1 else ""
        return f"{self._name(boxes, i)}: rank {boxes.ranks[i]} has {self._box(boxes, i)}, which is outside of {shape}{more}"

    def _explain(self, defect: Defect, boxes: _Boxes, different: Ints) -> str:
        name, shape = (
            self.catalogue.names[self.first + defect.tensor],
            self.catalogue.shapes[self.first + defect.tensor],
        )
        holders = np.unique(boxes.ranks[boxes.tensors == defect.tensor]).tolist()
        if defect.point is None:
            return (
                f"{name!r}: the boxes of {format_ranks(holders)} do not cover {shape} exactly once"
            )
        point = defect.point[: len(shape)]
        if defect.boxes is None:
            who = f"of {format_ranks(holders)} none" if holders else "no rank"
            return f"{name!r}: {who} covers {point} of {shape}"
        (a, one), (b, other) = sorted(
            (int(boxes.ranks[i]), self._box(boxes, i))
            for i in different[list(defect.boxes)].tolist()
        )
        both = (
            f"rank {a} has {one} and rank {b} has {other}"
            if a != b
            else f"rank {a} has both {one} and {other}"
        )
        return f"{name!r}: {both}, which overlap at {point} without being the same"


def _edges(begins: Bools, count: int) -> Ints:
    """Where groups of equal neighbours begin, and the end of the last one. `begins` has an entry for all but the first."""
    edges = np.ones(count + 1, np.bool_)
    edges[1:count] = begins
    return edges.nonzero()[0]


def _first_of_each(groups: Ints, items: Ints) -> list[int]:
    if not len(items):
        return []
    _, first = np.unique(groups, return_index=True)
    return [int(i) for i in items[first]]


MAX_CORNERS = 1 << 26
"""Corners that are compared together, 8 bytes each. One tensor that has more is left to `core.tiling`."""

MAX_CUT = 16
"""Dimensions cut at once, by the same reasoning. Coordinates then stay far below 2^63: they have one more value than elements."""


class Defect(Value, frozen=True):
    """The first place in C order where the boxes of a tensor do not cover it exactly once."""

    tensor: int
    point: tuple[int, ...] | None
    """None where the boxes are too many, and cut in too many dimensions, to say the place."""
    boxes: tuple[int, int] | None
    """Two boxes that hold the point; None where none does."""


def defects(extents: Ints, tensors: Ints, *, starts: Ints, sizes: Ints) -> list[Defect]:
    """What is wrong, a defect for each tensor that is not tiled, in the order of the tensors.

    `extents` has a column for each tensor. The boxes are not empty, lie inside of their tensors, are sorted by tensor and then by
    their starts in C order, and no two neighbours are the same; tensors are numbered as in `extents`.
    """
    totals = np.multiply.reduce(extents)
    found: dict[int, Defect] = {}
    # A box that is all of its tensor covers it, and is there once. Most tensors of most saves are not cut.
    if np.count_nonzero(sizes != extents.take(tensors, axis=1)):
        found = {
            d.tensor: d
            for d in _defects_of_cut(extents, totals, _Different(tensors, starts, sizes))
        }
    totals[tensors] = 0
    found.update((int(t), Defect(int(t), (0,) * len(extents), None)) for t in totals.nonzero()[0])
    return [found[t] for t in sorted(found)]


class _Different(Value, frozen=True):
    tensors: Ints
    starts: Ints
    sizes: Ints


def _defects_of_cut(extents: Ints, totals: Ints, boxes: _Different) -> Iterator[Defect]:
    tensors, starts, sizes = boxes.tensors, boxes.starts, boxes.sizes
    edges = _edges(tensors[1:] != tensors[:-1], len(tensors))
    heads, tails = edges[:-1], edges[1:] - 1
    owners = tensors[heads]
    cut = np.zeros(extents.shape, np.bool_)
    for d in range(len(extents)):
        cut[d, owners] = np.minimum.reduceat(sizes[d], heads) != extents[d, owners]
    several = cut.sum(axis=0) > 1
    # Where one dimension is cut, the others are whole and begin at 0: elements before a box, and elements in it.
    ends = np.multiply.reduce(sizes)
    places = np.zeros(len(tensors), np.int64)
    for d in range(len(extents)):
        places += starts[d] * (totals // np.maximum(extents[d], 1))[tensors]
    ends += places
    broken = np.zeros(len(totals), np.bool_)
    broken[owners] = (places[heads] != 0) | (ends[tails] != totals[owners])
    linked = places[1:] == ends[:-1]
    linked[heads[1:] - 1] = True
    broken[tensors[1:][~linked]] = True
    suspect = ((broken | several)[owners]).nonzero()[0]
    return _first_defects(extents, cut, boxes, heads=heads, stops=tails + 1, suspect=suspect)


def _first_defects(
    extents: Ints, cut: Bools, boxes: _Different, *, heads: Ints, stops: Ints, suspect: Ints
) -> Iterator[Defect]:
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
            stop = begin + int(np.searchsorted(counts[begin:].cumsum(), room, side="right"))
            if stop == begin or len(dims) > MAX_CUT:
                yield from _slowly(
                    extents, boxes, begin=int(heads[groups[begin]]), stop=int(stops[groups[begin]])
                )
                begin += 1
                continue
            chosen = groups[begin:stop]
            rows = (heads[chosen] - counts[begin:stop].cumsum() + counts[begin:stop]).repeat(
                counts[begin:stop]
            )
            rows += np.arange(len(rows))
            yield from _compared(extents, dims, boxes, whole=owners[chosen], rows=rows)
            begin = stop


def _compared(
    extents: Ints, dims: tuple[int, ...], boxes: _Different, *, whole: Ints, rows: Ints
) -> Iterator[Defect]:
    """The defects of the tensors `whole`, whose boxes are at `rows`."""
    # A corner's number: its place, in C order, among the corners of all these tensors.
    weights = np.ones((len(dims), extents.shape[1]), np.int64)
    volume = np.ones(extents.shape[1], np.int64)
    for i in reversed(range(len(dims))):
        weights[i] = volume
        volume *= extents[dims[i]] + 1
    bases = np.zeros(extents.shape[1], np.int64)
    bases[whole[1:]] = volume[whole].cumsum()[:-1]
    tensors = boxes.tensors[rows]
    sides = [
        (w[tensors], boxes.starts[d][rows], boxes.sizes[d][rows])
        for d, w in zip(dims, weights, strict=True)
    ]
    plus, minus = _corners(
        bases[tensors], [(start * w, (start + size) * w) for w, start, size in sides]
    )
    edges = [(w * extents[d])[whole] for d, w in zip(dims, weights, strict=True)]
    less, more = _corners(bases[whole], [(np.zeros_like(whole), edge) for edge in edges])
    left, right = np.concatenate((*plus, *more)), np.concatenate((*minus, *less))
    left.sort()
    right.sort()
    differ = (left != right).nonzero()[0]
    corners = np.minimum(left[differ], right[differ])
    # A tensor has as many positive corners as negative ones, so the lists of one never shift those of the next.
    first, at = np.unique(
        np.searchsorted(bases[whole], corners, side="right") - 1, return_index=True
    )
    for t, i in zip(whole[first].tolist(), at.tolist(), strict=True):
        point = np.zeros(len(extents), np.int64)
        point[list(dims)] = (
            (int(corners[i]) - bases[t]) // weights[:, t] % (extents[list(dims), t] + 1)
        )
        holders = None
        if left[differ[i]] < right[differ[i]]:
            holds = tensors == t
            for d, (_, start, size) in zip(dims, sides, strict=True):
                holds &= (start <= point[d]) & (point[d] < start + size)
            one, other = rows[holds.nonzero()[0][:2]].tolist()
            holders = (one, other)
        yield Defect(t, tuple(point.tolist()), holders)


def _corners(bases: Ints, sides: list[tuple[Ints, Ints]]) -> tuple[list[Ints], list[Ints]]:
    """The numbers of the corners of all boxes: those with an even number of stops, and those with an odd one."""
    plus, minus = [bases], list[Ints]()
    for low, high in sides:
        plus, minus = (
            [*(x + low for x in plus), *(x + high for x in minus)],
            [*(x + high for x in plus), *(x + low for x in minus)],
        )
    return plus, minus


def _slowly(extents: Ints, boxes: _Different, *, begin: int, stop: int) -> Iterator[Defect]:
    tensor = int(boxes.tensors[begin])
    starts, sizes = boxes.starts[:, begin:stop].T.tolist(), boxes.sizes[:, begin:stop].T.tolist()
    if not is_shape_tiled(
        tuple(extents[:, tensor].tolist()),
        list(zip(map(tuple, starts), map(tuple, sizes), strict=True)),
    ):
        yield Defect(tensor, None, None)
