"""`Box`: a rectangle of indices of a tensor.

Slices, shards, chunks and copies are all described by boxes. A box has a start and a stop for each
dimension, and like a Python range it contains its start but not its stop:

    Box((1, 2), (3, 5))     the elements [1:3, 2:5] of a matrix

A box without dimensions contains exactly one point: the element of a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import sub

from holdfast.core.value import Value


class Box(Value, frozen=True, gc=False):
    """A rectangle of indices: the points p with `start[d] <= p[d] < stop[d]` in every dimension d.

    Args:
        start: The lowest index in each dimension.
        stop: The index after the highest one in each dimension. The box is empty if it equals the
            start in any dimension.

    Raises:
        ValueError: `start` and `stop` have different lengths, a start is negative, or a stop is
            below its start.

    >>> box = Box((1, 2), (3, 5))
    >>> box.shape, box.count
    ((2, 3), 6)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(
                f"a box needs as many starts as stops, got {self.start} and {self.stop}"
            )
        for start, stop in zip(self.start, self.stop, strict=True):
            if not 0 <= start <= stop:
                raise ValueError(
                    f"a box needs 0 <= start <= stop, got {self.start} and {self.stop}"
                )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor.

        Args:
            shape: The shape of the tensor.

        >>> Box.whole((2, 3))
        Box(start=(0, 0), stop=(2, 3))
        """
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def from_offsets(cls, offsets: Sequence[int], sizes: Sequence[int]) -> Box:
        """Return the box of a given size at a given position.

        Args:
            offsets: The start of the box in each dimension.
            sizes: The length of the box in each dimension.

        Raises:
            ValueError: There are not as many offsets as sizes, or one of them is negative.

        >>> Box.from_offsets((4, 0), (2, 3))
        Box(start=(4, 0), stop=(6, 3))
        """
        if len(offsets) != len(sizes):
            raise ValueError(
                f"a box needs as many offsets as sizes, got {tuple(offsets)} and {tuple(sizes)}"
            )
        stop = tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
        return cls(tuple(offsets), stop)

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of the box in each dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def count(self) -> int:
        """The number of elements in the box."""
        return math.prod(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the box from an array: `array[box.slices]`."""
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the points that are in both boxes, or None if they share no point.

        Args:
            other: A box of the same rank.

        Raises:
            ValueError: The boxes have different ranks.

        >>> Box((0, 0), (4, 4)).intersect(Box((2, 3), (9, 9)))
        Box(start=(2, 3), stop=(4, 4))
        """
        if self.rank != other.rank:
            raise ValueError(f"cannot intersect boxes of rank {self.rank} and {other.rank}")
        starts = tuple(map(max, self.start, other.start))
        stops = tuple(map(min, self.stop, other.stop))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, stops)

    def contains(self, other: Box) -> bool:
        """Return whether every point of another box is in this one.

        An empty box is contained in every box of its rank. A box of another rank never is.

        Args:
            other: The other box.

        >>> Box.whole((4, 4)).contains(Box((1, 1), (3, 4)))
        True
        """
        if self.rank != other.rank:
            return False
        if other.count == 0:
            return True
        return all(
            start <= other_start and other_stop <= stop
            for start, other_start, other_stop, stop in zip(
                self.start, other.start, other.stop, self.stop, strict=True
            )
        )

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return this box in coordinates that start at another point.

        A box of a tensor becomes a box of a chunk, for example, if the origin is the start of the
        chunk.

        Args:
            origin: The point that becomes zero. It must not be above the start of the box.

        Raises:
            ValueError: The origin is above the start in some dimension, or has another rank.

        >>> Box((4, 2), (6, 3)).relative_to((4, 0))
        Box(start=(0, 2), stop=(2, 3))
        """
        starts = zip(self.start, origin, strict=True)
        stops = zip(self.stop, origin, strict=True)
        return Box(
            tuple(start - offset for start, offset in starts),
            tuple(stop - offset for stop, offset in stops),
        )

    def split(self, axis: int, count: int) -> Iterator[Box]:
        """Cut the box along an axis into boxes of lengths that differ by at most one.

        Args:
            axis: The dimension to cut.
            count: The number of boxes. If the axis is shorter than that, there are fewer, because
                empty boxes are left out.

        Yields:
            The boxes in the order of their starts, the longer ones first.

        >>> [box.shape for box in Box.whole((5, 2)).split(0, 3)]
        [(2, 2), (2, 2), (1, 2)]
        """
        short_length, longer_count = divmod(self.shape[axis], count)
        axis_start = self.start[axis]
        for index in range(count):
            length = short_length
            if index < longer_count:
                length += 1
            if length:
                start = list(self.start)
                stop = list(self.stop)
                start[axis] = axis_start
                stop[axis] = axis_start + length
                axis_start += length
                yield Box(tuple(start), tuple(stop))


def run_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return a run of consecutive elements of a tensor as boxes.

    A run of a matrix consists of the end of one row, some whole rows, and the start of another row.
    In a tensor with more dimensions, each of the two partial rows is cut in the same way. So a run
    has at most 2 · rank − 1 boxes.

    Args:
        shape: The shape of the tensor.
        start: The index in C order of the first element.
        stop: The index after that of the last element.

    Returns:
        The boxes, in the order of their elements. There is none if the run is empty.

    Raises:
        ValueError: The tensor does not have these elements.

    >>> [box.slices for box in run_boxes((4, 3), 3, 10)]
    [(slice(1, 3, None), slice(0, 3, None)), (slice(3, 4, None), slice(0, 1, None))]
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"a tensor of shape {tuple(shape)} has no elements {start} to {stop}")
    if start == stop:
        return []
    return list(_yield_run_boxes((), tuple(shape), start, stop))


def _yield_run_boxes(
    outer_index: tuple[int, ...],
    inner_shape: tuple[int, ...],
    start: int,
    stop: int,
) -> Iterator[Box]:
    """Yield the boxes of a run that lies inside of `tensor[outer_index]`.

    This part of the tensor consists of rows, its elements in all dimensions but the first. A run
    that starts or stops in the middle of a row is cut there, and the part of that row is cut by a
    recursive call.

    Args:
        outer_index: Indices in the outer dimensions. Without them, the run is in the whole tensor.
        inner_shape: The shape of `tensor[outer_index]`.
        start: The index in C order of the first element, counted in `tensor[outer_index]`.
        stop: The index after that of the last element. The run is not empty.
    """
    outer_stop = tuple(index + 1 for index in outer_index)
    if start == 0 and stop == math.prod(inner_shape):
        zeros = (0,) * len(inner_shape)
        yield Box(outer_index + zeros, outer_stop + inner_shape)
        return

    row_shape = inner_shape[1:]
    row_size = math.prod(row_shape)
    first_row, first_element = divmod(start, row_size)
    last_row, last_element = divmod(stop, row_size)
    if first_row == last_row:
        row_index = (*outer_index, first_row)
        yield from _yield_run_boxes(row_index, row_shape, first_element, last_element)
        return

    if first_element:
        row_index = (*outer_index, first_row)
        yield from _yield_run_boxes(row_index, row_shape, first_element, row_size)
        first_row += 1
    if first_row < last_row:
        zeros = (0,) * len(row_shape)
        yield Box((*outer_index, first_row, *zeros), (*outer_stop, last_row, *row_shape))
    if last_element:
        yield from _yield_run_boxes((*outer_index, last_row), row_shape, 0, last_element)
