"""Where the elements of a tensor of one layout lie in the tensors of another: chunks of their storages. Nothing is read.

Both tensors are parts of one array with named axes. Where they meet, each axis has a range of places. A chunk is a box of the
target, so its places must follow each other there. In the source they may be any number of rows apart. Axes that allow neither are
gone through place by place:

    target  (group slot dim) hidden     source  (group slot[:query] dim) hidden    a chunk for each group
    target  (head half pair) hidden     source  (head pair half) hidden            one for each head and half, of every second row
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value


class AxisSpan(NamedTuple):
    """What a tensor has of an axis."""

    axis: str
    start: int
    stop: int


class Placed(Value):
    """The tensors of one part: what each dimension has of which axes, and the axes of which each tensor is one place."""

    dims: tuple[tuple[AxisSpan, ...], ...]
    places: Mapping[str, range]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(span.stop - span.start for span in dim) for dim in self.dims)

    def reach(self, axis: str) -> tuple[int, int] | None:
        """The places that tensors of this part have of an axis; None for an axis that they do not have."""
        if axis in self.places:
            return self.places[axis].start, self.places[axis].stop
        return next(
            ((span.start, span.stop) for dim in self.dims for span in dim if span.axis == axis),
            None,
        )


class Stride(NamedTuple):
    """Where an axis lies in a tensor: its dimension, how many rows one place is, and the place of the first."""

    dim: int
    rows: int
    start: int


def strides_of(dims: tuple[tuple[AxisSpan, ...], ...]) -> dict[str, Stride]:
    found: dict[str, Stride] = {}
    for number, dim in enumerate(dims):
        rows = 1
        for span in reversed(dim):
            found[span.axis] = Stride(number, rows, span.start)
            rows *= span.stop - span.start
    return found


class RowRun(NamedTuple):
    """Rows of a dimension of the target that follow each other, and a dimension of the source that has them some rows apart."""

    dim: int
    first: int
    length: int
    source_dim: int
    source_first: int
    step: int


class Meeting:
    """How tensors of a target part and of a source part meet: the same for all of them but for the numbers in their names."""

    def __init__(self, target: Placed, source: Placed, first: Mapping[str, int]) -> None:
        """`first` says where an axis begins, where that is not at 0."""
        self.target, self.source = target, source
        self._there, self._here = strides_of(source.dims), strides_of(target.dims)
        self.common: dict[str, tuple[int, int]] = {}
        for axis in (*target.places, *self._here, *source.places, *self._there):
            own, other = target.reach(axis), source.reach(axis)
            # Along an axis that the target does not have all places are the same: the first one is taken.
            low, high = own or (first.get(axis, 0), first.get(axis, 0) + 1)
            self.common[axis] = (
                (low, high) if other is None else (max(low, other[0]), min(high, other[1]))
            )
        self.empty = any(low >= high for low, high in self.common.values())
        self.runs = [] if self.empty else self._runs()
        running = (
            {axis for _, axes in self._running for axis in axes} if not self.empty else set[str]()
        )
        self.stepped = [
            axis
            for axis, (low, high) in self.common.items()
            if axis not in running and axis not in target.places
        ]
        """Axes that are gone through place by place."""

    @property
    def renames(self) -> bool:
        """Whether a target is a source under another name."""
        whole = [
            RowRun(dim, 0, count, dim, 0, 1)
            for dim, count in enumerate(self.target.shape)
            if count > 1
        ]
        alike = [axis for axis in self.stepped if self.common[axis][1] - self.common[axis][0] > 1]
        return not alike and sorted(self.runs) == whole and self.target.shape == self.source.shape

    def _runs(self) -> list[RowRun]:
        """For each dimension of the target the axes, from the last on, that are one stretch here and evenly apart there."""
        self._running: list[tuple[int, list[str]]] = []
        runs: list[RowRun] = []
        used = set[int]()
        for number in reversed(range(len(self.target.dims))):
            axes: list[str] = []
            count, step = 1, 0
            for span in reversed(self.target.dims[number]):
                low, high = self.common[span.axis]
                there = self._there.get(span.axis)
                extent = span.stop - span.start
                if high - low == 1:
                    if extent == 1:
                        continue
                    break  # what comes before would not follow each other
                if there is None or (not axes and there.dim in used):
                    break
                if axes and (there.dim != self._there[axes[-1]].dim or there.rows != step * count):
                    break
                step = step or there.rows
                axes.append(span.axis)
                count *= high - low
                if high - low < extent:
                    break
            if axes:
                dim = self._there[axes[0]].dim
                used.add(dim)
                first = sum(
                    (self.common[a][0] - self._here[a].start) * self._here[a].rows for a in axes
                )
                there_first = sum(
                    (self.common[a][0] - self._there[a].start) * self._there[a].rows for a in axes
                )
                runs.append(RowRun(number, first, count, dim, there_first, step))
                self._running.append((number, axes))
        return runs

    def steps(
        self, places: Mapping[str, int], low: Sequence[int] = (), high: Sequence[int] = ()
    ) -> Iterator[dict[str, int]]:
        """The places of all axes but those of runs, for each chunk of the target at these places; of those chunks alone that may
        meet a box."""
        if self.empty or any(
            not first <= places[a] < last for a, (first, last) in self.common.items() if a in places
        ):
            return
        for values in product(*(self._near(axis, low, high) for axis in self.stepped)):
            yield {**places, **dict(zip(self.stepped, values, strict=True))}

    def _near(self, axis: str, low: Sequence[int], high: Sequence[int]) -> range:
        """Places of an axis whose rows may meet a box: an axis is known to where nothing stands before it in its dimension."""
        first, last = self.common[axis]
        here = self._here.get(axis)
        if here is None or here.dim >= len(low) or self.target.dims[here.dim][0].axis != axis:
            return range(first, last)
        return range(
            max(first, here.start + low[here.dim] // here.rows),
            min(last, here.start - -high[here.dim] // here.rows),
        )

    def source_places(self, at: Mapping[str, int]) -> tuple[int, ...]:
        """The numbers in the name of the source."""
        return tuple([at[axis] for axis in self.source.places])

    def placed(self, at: Mapping[str, int], tensor: LazyTensor) -> list[Chunk]:
        """The chunks of the target at these places, which lie in this source."""
        starts = [0] * len(self.target.dims)
        index: list[int | slice] = [0] * len(self.source.dims)
        for axis, place in at.items():
            if axis in self._here:
                here = self._here[axis]
                starts[here.dim] += (place - here.start) * here.rows
            if axis in self._there:
                there = self._there[axis]
                row = index[there.dim]
                assert isinstance(row, int)  # runs come below
                index[there.dim] = row + (place - there.start) * there.rows
        sizes = [1] * len(starts)
        for run in self.runs:
            starts[run.dim] += run.first
            sizes[run.dim] = run.length
            begin = index[run.source_dim] + run.source_first  # type: ignore[operator]  # a number yet
            index[run.source_dim] = slice(begin, begin + (run.length - 1) * run.step + 1, run.step)
        order = sorted(run.source_dim for run in self.runs)
        part = tensor[tuple(index)] if index else tensor
        dims = {run.dim: order.index(run.source_dim) for run in self.runs}
        return [_moved(chunk, starts, sizes, dims, bits=tensor.dtype.bits) for chunk in part.chunks]


def _moved(
    chunk: Chunk, starts: Sequence[int], sizes: Sequence[int], dims: Mapping[int, int], *, bits: int
) -> Chunk:
    """A chunk of a part of a source as one of the target: `dims` says which dimension of the part is which of the target."""
    low, high, strides = (
        list(starts),
        [start + size for start, size in zip(starts, sizes, strict=True)],
        [bits] * len(starts),
    )
    for dim, own in dims.items():
        low[dim], high[dim] = starts[dim] + chunk.box.start[own], starts[dim] + chunk.box.stop[own]
        strides[dim] = chunk.strides[own]
    return Chunk(Box(tuple(low), tuple(high)), chunk.storage, chunk.offset, tuple(strides))
