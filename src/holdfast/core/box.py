"""`Box`: a half-open rectangle of integer coordinates, the only geometry in the library.

Everything that moves elements (slices, shards, chunks, copies) is said in boxes. A box of rank 0 holds exactly one point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import sub

from holdfast.core.value import Value


class Box(Value, frozen=True, gc=False):
    """The points p with `start[d] <= p[d] < stop[d]` in every dimension d."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        start, stop = self.start, self.stop
        if len(start) != len(stop):
            raise ValueError(f"a box needs as many starts as stops, got {start} and {stop}")
        for a, b in zip(start, stop, strict=True):
            if not 0 <= a <= b:
                raise ValueError(f"a box needs 0 <= start <= stop, got {start} and {stop}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor.

        >>> Box.whole((2, 3))
        Box(start=(0, 0), stop=(2, 3))
        """
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def from_offsets(cls, offsets: Sequence[int], sizes: Sequence[int]) -> Box:
        """The box of the given sizes whose lowest corner is at the given offsets."""
        if len(offsets) != len(sizes):
            raise ValueError(
                f"a box needs as many offsets as sizes, got {tuple(offsets)} and {tuple(sizes)}"
            )
        return cls(tuple(offsets), tuple(o + s for o, s in zip(offsets, sizes, strict=True)))

    @property
    def rank(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def count(self) -> int:
        return math.prod(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The points in both, or None when there are none.

        >>> Box((0, 0), (4, 4)).intersect(Box((2, 3), (9, 9)))
        Box(start=(2, 3), stop=(4, 4))
        """
        if self.rank != other.rank:
            raise ValueError(f"boxes of rank {self.rank} and {other.rank} do not meet")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def contains(self, other: Box) -> bool:
        """Whether every point of `other` is in this box; an empty box is in every box of its rank."""
        if self.rank != other.rank:
            return False
        if other.count == 0:
            return True
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True)
        )

    def relative_to(self, origin: Sequence[int]) -> Box:
        """This box in coordinates that begin at `origin`."""
        return Box(
            tuple(a - o for a, o in zip(self.start, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin, strict=True)),
        )

    def split(self, axis: int, parts: int) -> Iterator[Box]:
        """Cut into `parts` boxes along one axis, the larger ones first; parts that would be empty are left out.

        >>> [b.shape for b in Box.whole((5, 2)).split(0, 3)]
        [(2, 2), (2, 2), (1, 2)]
        """
        length, begin = self.shape[axis], self.start[axis]
        base, extra = divmod(length, parts)
        for i in range(parts):
            size = base + (i < extra)
            if size:
                start, stop = list(self.start), list(self.stop)
                start[axis], stop[axis] = begin, begin + size
                begin += size
                yield Box(tuple(start), tuple(stop))


def run_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a tensor in C order, as boxes: one after the other, at most 2 · rank − 1 of them.

    A run takes the rest of a row, then whole rows, then the beginning of a row; and so in each dimension.

    >>> [box.slices for box in run_boxes((4, 3), 2, 10)]
    [(slice(0, 1, None), slice(2, 3, None)), (slice(1, 3, None), slice(0, 3, None)), (slice(3, 4, None), slice(0, 1, None))]
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"a tensor of {tuple(shape)} has no elements {start} to {stop}")
    return list(_run_boxes((), tuple(shape), start, stop)) if start < stop else []


def _run_boxes(at: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes of a run in the part of a tensor that lies `at` the given first coordinates."""
    upper = tuple(n + 1 for n in at)
    if start == 0 and stop == math.prod(shape):
        yield Box((*at, *(0,) * len(shape)), (*upper, *shape))
        return
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _run_boxes((*at, first), shape[1:], head, tail)
        return
    if head:
        yield from _run_boxes((*at, first), shape[1:], head, row)
        first += 1
    if first < last:
        yield Box((*at, first, *(0,) * (len(shape) - 1)), (*upper, last, *shape[1:]))
    if tail:
        yield from _run_boxes((*at, last), shape[1:], 0, tail)
