"""An index on a tensor: checked against its shape as numpy would, and then arithmetic on chunks. Nothing is read.

`select` takes every index. `narrowed` takes the common one, integers and stretches of a tensor in one piece, and gives what
`select` would give, its oracle: a program that gathers rows takes ten thousand of them, and each is an offset that moved.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.value import Value
from holdfast.errors import BadIndex


class Take(Value, frozen=True, gc=False):
    """One coordinate of a dimension; the dimension disappears."""

    at: int


class StepRange(Value, frozen=True, gc=False):
    """`count` coordinates `start, start + step, …` of a dimension."""

    start: int
    step: int
    count: int


class NewAxis(Value, frozen=True, gc=False):
    """A dimension of length 1 that the input does not have."""


Pick = Take | StepRange | NewAxis


class Selection(Value, frozen=True):
    """An index that has been checked against a shape."""

    picks: tuple[Pick, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(1 if isinstance(p, NewAxis) else p.count for p in self.picks if not isinstance(p, Take))

    def apply(self, chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
        """The chunks of the result, in its coordinates; chunks that the index misses are left out."""
        return tuple(c for chunk in chunks if (c := self._map(chunk)) is not None)

    def _map(self, chunk: Chunk) -> Chunk | None:
        starts: list[int] = []
        stops: list[int] = []
        strides: list[int] = []
        offset = chunk.offset
        dim = 0
        for pick in self.picks:
            if isinstance(pick, NewAxis):
                starts.append(0)
                stops.append(1)
                strides.append(0)
                continue
            low, high, stride = chunk.box.start[dim], chunk.box.stop[dim], chunk.strides[dim]
            dim += 1
            if isinstance(pick, Take):
                if not low <= pick.at < high:
                    return None
                offset += (pick.at - low) * stride
                continue
            first, last = _overlap(pick, low, high)
            if first >= last:
                return None
            offset += (pick.start + first * pick.step - low) * stride
            starts.append(first)
            stops.append(last)
            strides.append(stride * pick.step)
        return Chunk(Box(tuple(starts), tuple(stops)), chunk.storage, offset, tuple(strides))


def _overlap(pick: StepRange, low: int, high: int) -> tuple[int, int]:
    """The positions i of the stretch whose coordinate `start + i·step` lies in [low, high), as a half-open range."""
    if pick.step > 0:
        first = -((pick.start - low) // pick.step)
        last = -((pick.start - high) // pick.step)
    else:
        first = -((high - 1 - pick.start) // -pick.step)
        last = (pick.start - low) // -pick.step + 1
    return max(first, 0), min(last, pick.count)


def select(shape: Sequence[int], index: object) -> Selection:
    """Check an index against a shape, as numpy would.

    >>> select((4, 5), (slice(1, 3), -1)).shape
    (2,)
    >>> select((4, 5), (..., None, slice(None, None, -2))).shape
    (4, 1, 3)

    An index is first normalised against a shape into one `Pick` an input dimension and a list of where new axes go; then each
    chunk is mapped through it. Advanced indexing (arrays, booleans) would gather single elements: it is refused with advice.
    """
    parts = index if isinstance(index, tuple) else (index,)
    used = sum(1 for p in parts if p is not None and p is not Ellipsis)
    if sum(1 for p in parts if p is Ellipsis) > 1:
        raise BadIndex("an index can only have a single ellipsis ('...')")
    if used > len(shape):
        raise BadIndex(f"too many indices: the tensor has {len(shape)} dimensions, but {used} were indexed")
    if Ellipsis not in [p for p in parts if p is None or p is Ellipsis]:
        parts = (*parts, Ellipsis)
    picks: list[Pick] = []
    dim = 0
    for part in parts:
        if part is None:
            picks.append(NewAxis())
        elif part is Ellipsis:
            for _ in range(len(shape) - used):
                picks.append(StepRange(0, 1, shape[dim]))
                dim += 1
        else:
            picks.append(_pick(part, shape[dim], dim))
            dim += 1
    return Selection(tuple(picks))


def _pick(part: object, length: int, dim: int) -> Take | StepRange:
    if isinstance(part, slice):
        try:
            start, stop, step = part.indices(length)
        except (TypeError, ValueError) as error:
            raise BadIndex(f"bad slice in dimension {dim}: {error}") from None
        return StepRange(start, step, len(range(start, stop, step)))
    # A bool is an int to Python and a mask to numpy; here it is neither.
    if not isinstance(part, bool):
        try:
            at = operator.index(part)  # type: ignore[arg-type]  # anything with __index__; the TypeError is the check
        except TypeError:
            pass
        else:
            if not -length <= at < length:
                raise BadIndex(f"index {at} is out of bounds for dimension {dim} with size {length}")
            return Take(at % length)
    raise BadIndex(
        f"a lazy tensor takes integers, slices, ... and None, not {type(part).__name__}; "
        "read it first (tensor.numpy()) and index the array"
    )


_ORIGINS = tuple((0,) * rank for rank in range(65))

_PLACES = (int, type(None))


Place = tuple[tuple[int, ...], int, tuple[int, ...]]
"""Of a slice: its shape, the bit of the storage where it begins, and its strides in bits."""


def narrowed(shape: tuple[int, ...], chunks: tuple[Chunk, ...], index: object) -> Place | None:
    """Where a slice lies in the one chunk of a tensor; None where it takes more than this to find it, or nothing is left.

    For integers and slices without a step, of a tensor that is one chunk from its first element on.
    """
    if len(chunks) != 1 or type(chunks[0]) is not Chunk:
        return None
    (chunk,) = chunks
    box, strides, offset = chunk.box, chunk.strides, chunk.offset
    if box.stop != shape or box.start != _ORIGINS[len(shape)]:
        return None
    parts = index if type(index) is tuple else (index,)
    used = len(parts)
    if used > len(shape):
        return None
    left: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    for axis, part in enumerate(parts):
        length, stride = shape[axis], strides[axis]
        if type(part) is int:
            if not -length <= part < length:
                return None
            offset += (part + length if part < 0 else part) * stride
        elif type(part) is slice and part.step is None:
            first, last = part.start, part.stop
            if type(first) is not int or type(last) is not int or not 0 <= first < last <= length:
                if type(first) not in _PLACES or type(last) not in _PLACES:
                    return None
                first, last, _ = part.indices(length)
                if first >= last:
                    return None
            offset += first * stride
            left, steps = (*left, last - first), (*steps, stride)
        else:
            return None
    if used < len(shape):
        left, steps = (*left, *shape[used:]), (*steps, *strides[used:])
    return None if 0 in left else (left, offset, steps)
