"""An index on a tensor: checked against its shape as numpy would, and then arithmetic on chunks. Nothing is read.

A program that gathers rows takes ten thousand of them, and each is an offset that moved. So an index is a list of plain tuples, and
dimensions behind those that it names are not looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.errors import BadIndex

Pick = tuple[int, int, int]
"""What is taken of a dimension: the first coordinate, the step to the next, and how many."""

TAKEN = -1
"""In the place of their number: one, and the dimension goes."""

NEW_AXIS: Pick = (0, 0, 1)
"""A dimension of length 1 that the tensor does not have. No dimension that is there has a step of 0."""

Slice = tuple[tuple[int, ...], int, tuple[int, ...], list[Pick]]
"""Its shape; where it begins and its strides, of a tensor in one piece; and what it takes of the dimensions."""


def sliced(shape: tuple[int, ...], offset: int, strides: tuple[int, ...], index: object) -> Slice:
    """Check an index against a shape, as numpy would, and follow it.

    What is taken is said of the first dimensions, and of new ones. All others are whole.

    >>> sliced((4, 5), 0, (40, 8), (slice(1, 3), -1))
    ((2,), 72, (40,), [(1, 1, 2), (4, 0, -1)])
    >>> sliced((4, 5), 0, (40, 8), (..., None, slice(None, None, -2)))
    ((4, 1, 3), 32, (40, 0, -16), [(0, 1, 4), (0, 0, 1), (4, -2, 3)])

    Advanced indexing (arrays, booleans) would gather single elements: it is refused with advice.
    """
    parts = index if type(index) is tuple else (index,)
    if len(parts) > len(shape):
        _refuse_many(parts, len(shape))
    picks: list[Pick] = []
    left: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    dim = 0
    for part in parts:
        if part is None:
            picks.append(NEW_AXIS)
            left, steps = (*left, 1), (*steps, 0)
            continue
        if part is Ellipsis:
            if sum(1 for one in parts if one is Ellipsis) > 1:
                raise BadIndex("an index can only have a single ellipsis ('...')")
            after = dim + len(shape) - sum(1 for one in parts if one is not None and one is not Ellipsis)
            picks += [(0, 1, length) for length in shape[dim:after]]
            left, steps, dim = (*left, *shape[dim:after]), (*steps, *strides[dim:after]), after
            continue
        stride = strides[dim]
        start, step, count = pick = _pick(part, shape[dim], dim)
        offset += start * stride
        if count != TAKEN:
            left, steps = (*left, count), (*steps, step * stride)
        picks.append(pick)
        dim += 1
    return (*left, *shape[dim:]), offset, (*steps, *strides[dim:]), picks


def _refuse_many(parts: Sequence[object], rank: int) -> None:
    """Raise where an index names more dimensions than there are."""
    used = sum(1 for part in parts if part is not None and part is not Ellipsis)
    if used > rank:
        raise BadIndex(f"too many indices: the tensor has {rank} dimensions, but {used} were indexed")


def _pick(part: object, length: int, dim: int) -> Pick:
    if type(part) is int and 0 <= part < length:
        return part, 0, TAKEN
    if isinstance(part, slice):
        first, last = part.start, part.stop
        if part.step is None and type(first) is int and type(last) is int and 0 <= first < last <= length:
            return first, 1, last - first
        try:
            start, stop, step = part.indices(length)
        except (TypeError, ValueError) as error:
            raise BadIndex(f"bad slice in dimension {dim}: {error}") from None
        return start, step, len(range(start, stop, step))
    # A bool is an int to Python and a mask to numpy; here it is neither.
    if not isinstance(part, bool):
        try:
            at = operator.index(part)  # type: ignore[arg-type]  # anything with __index__; the TypeError is the check
        except TypeError:
            pass
        else:
            if not -length <= at < length:
                raise BadIndex(f"index {at} is out of bounds for dimension {dim} with size {length}")
            return at % length, 0, TAKEN
    raise BadIndex(
        f"a lazy tensor takes integers, slices, ... and None, not {type(part).__name__}; "
        "read it first (tensor.numpy()) and index the array"
    )


def slice_chunks(picks: Sequence[Pick], chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """The chunks of a slice, in its coordinates; chunks that the index misses are left out."""
    found: list[Chunk] = []
    for chunk in chunks:
        box, dim, offset = chunk.box, 0, chunk.offset
        starts: list[int] = []
        stops: list[int] = []
        strides: list[int] = []
        for pick in picks:
            start, step, count = pick
            if pick is NEW_AXIS:
                starts, stops, strides = [*starts, 0], [*stops, 1], [*strides, 0]
                continue
            low, high, stride = box.start[dim], box.stop[dim], chunk.strides[dim]
            dim += 1
            if count == TAKEN:
                if not low <= start < high:
                    break
                offset += (start - low) * stride
                continue
            first, last = _overlap(pick, low, high)
            if first >= last:
                break
            offset += (start + first * step - low) * stride
            starts, stops, strides = [*starts, first], [*stops, last], [*strides, stride * step]
        else:
            left = Box((*starts, *box.start[dim:]), (*stops, *box.stop[dim:]))
            if left.count:
                found.append(Chunk(left, chunk.storage, offset, (*strides, *chunk.strides[dim:])))
    return tuple(found)


def _overlap(pick: Pick, low: int, high: int) -> tuple[int, int]:
    """The positions i of a pick whose coordinate `start + i·step` lies in [low, high), as a half-open range."""
    start, step, count = pick
    if step > 0:
        first = -((start - low) // step)
        last = -((start - high) // step)
    else:
        first = -((high - 1 - start) // -step)
        last = (start - low) // -step + 1
    return max(first, 0), min(last, count)
