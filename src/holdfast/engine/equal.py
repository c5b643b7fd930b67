"""Are two tensors the same, byte for byte? For those whose bytes lie in one piece, at the speed of reading them.

A sink for the first of two sides: what was read of it is compared with the same bytes of the other, which the sink reads itself,
those of neighbours together. Where a stretch of both files is laid out alike, it is compared by one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.digest import canonical
from holdfast.core.protocols import Store
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.blocks import contiguous_bytes
from holdfast.engine.checksums import Progress
from holdfast.engine.coalesce import SUMS, Parts, Ranges, coalesce, join_files
from holdfast.engine.threads import default_threads
from holdfast.engine.transfer import Scratch, Sink, transfer
from holdfast.errors import HoldfastError, located

SIDE = replace(
    SUMS, block=2 << 20
)  # Of each side at a time: two of them take as much cache as one block that is summed.
Pair = tuple[LazyTensor, LazyTensor]
Places = list[tuple[str, int, int]]


class Located(Value, frozen=True, eq=False):
    store: Store
    ranges: Ranges
    name: Callable[[int], str]  # What a range is called, for messages.


def same_bytes(
    pairs: Sequence[Pair], progress: Progress | None = None, *, threads: int | None = None
) -> list[bool]:
    """Whether each pair has one dtype, one shape and the same bytes. False also where that cannot be told without looking at
    elements: strides, pieces, byte orders. Progress counts pairs that turn out to be the same; whoever reads the others again
    counts those."""
    same = [canonical(a.dtype, a.shape) == canonical(b.dtype, b.shape) for a, b in pairs]
    by_stores: dict[tuple[Store, Store], tuple[list[int], Places, Places]] = {}
    for number, (a, b) in enumerate(pairs):
        if same[number] and a.size:
            places = contiguous_bytes(a), contiguous_bytes(b)
            if places[0] is None or places[1] is None:
                same[number] = False
                continue
            numbers, *both = by_stores.setdefault((a.source.store, b.source.store), ([], [], []))
            numbers.append(number)
            for side, (key, start) in zip(both, (places[0], places[1]), strict=True):
                side.append((key, start, a.nbytes))
    for (first, second), (numbers, left, right) in by_stores.items():
        names = [[pairs[number][side].name for number in numbers] for side in (0, 1)]
        one, other = (
            Located(first, Ranges.of(left), names[0].__getitem__),
            Located(second, Ranges.of(right), names[1].__getitem__),
        )
        for number, equal in zip(
            numbers, same_ranges(one, other, progress, threads=threads).tolist(), strict=True
        ):
            same[number] = equal
    return same


def same_ranges(
    a: Located, b: Located, progress: Progress | None = None, *, threads: int | None = None
) -> Bools:
    """Whether each range of `a` has the bytes of that of `b` with its number, which is as long. Progress as for `same_bytes`."""
    comparison = Comparison(a, b, progress)
    work = [(a.store, parts, OneSide(comparison, parts)) for parts in join_files(a.ranges, SIDE)]
    transfer(work, threads or default_threads(), nbytes=SIDE.block)
    return comparison.same


class Comparison:
    def __init__(self, a: Located, b: Located, progress: Progress | None) -> None:
        self.a, self._b = a, b
        self.same: Bools = np.ones(len(a.ranges), np.bool_)
        self._left = a.ranges.nbytes.copy()
        self._progress = progress
        self._lock = threading.Lock()
        self._scratch = Scratch()

    def compare(self, columns: tuple[Ints, Ints, Ints], origin: int, data: memoryview) -> None:
        """Compare parts of the first side (numbers, starts, stops), each of another range; `data` begins at byte `origin`."""
        wanted = self.same[columns[0]]
        owners, begins, ends = columns if wanted.all() else [column[wanted] for column in columns]
        a, b = self.a.ranges, self._b.ranges
        starts = b.starts[owners] + (begins - a.starts[owners])
        files = b.files[owners]
        order = np.lexsort((starts, files))
        owners, begins, lengths = owners[order], (begins - origin)[order], (ends - begins)[order]
        starts, files = starts[order], files[order]
        for chosen in np.split(np.arange(len(order)), np.flatnonzero(np.diff(files)) + 1):
            if not len(chosen):
                continue
            key, stops = b.keys[int(files[chosen[0]])], starts[chosen] + lengths[chosen]
            heads = coalesce(starts[chosen], stops, SIDE)
            for few in np.split(chosen, heads[1:]):
                span = int(starts[few[0]]), int((starts[few] + lengths[few]).max())
                other = self._other(key, span, owners[few], starts[few], lengths[few])
                equal = _equal(data, begins[few], other, starts[few] - span[0], lengths[few])
                self._settle(owners[few], lengths[few], equal)

    def _other(
        self, key: str, span: tuple[int, int], owners: Ints, starts: Ints, lengths: Ints
    ) -> memoryview:
        out = self._scratch.of(span[1] - span[0])
        read = self._b.store.read
        try:
            read(key, span[0], out)
        except HoldfastError:
            # Each by itself, so that the error names the one that cannot be read.
            for owner, start, nbytes in zip(
                owners.tolist(), starts.tolist(), lengths.tolist(), strict=True
            ):
                with located(tensor=self._b.name(owner)):
                    read(key, start, out[start - span[0] : start - span[0] + nbytes])
        return out

    def _settle(self, owners: Ints, lengths: Ints, equal: Bools) -> None:
        with self._lock:
            self.same[owners[~equal]] = False
            self._left[owners] -= lengths
            done = owners[equal & (self._left[owners] == 0) & self.same[owners]]
        if len(done) and self._progress is not None:
            self._progress(2 * int(self.a.ranges.nbytes[done].sum()))


def _equal(a: memoryview, begins: Ints, b: memoryview, starts: Ints, lengths: Ints) -> Bools:
    one, other = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    if (np.diff(begins) == np.diff(starts)).all():
        # One stretch of both sides, gaps and all.
        nbytes = int((begins + lengths).max() - begins[0])
        one, other = one[begins[0] : begins[0] + nbytes], other[starts[0] : starts[0] + nbytes]
        equal = np.array_equal(one, other)
        if len(begins) == 1 or equal:
            return np.full(len(begins), equal)
        # One element more, since the last part ends where the bytes do.
        differing = np.append(one != other, False)
        edges = np.column_stack((begins, begins + lengths)).reshape(-1) - begins[0]
        return ~np.logical_or.reduceat(differing, edges)[::2]
    rows = zip(begins.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    return np.fromiter(
        (bytes(a[x : x + n]) == bytes(b[y : y + n]) for x, y, n in rows), np.bool_, len(begins)
    )


class OneSide(Sink):
    def __init__(self, comparison: Comparison, parts: Parts) -> None:
        self._comparison, self._parts = comparison, parts

    def name(self, number: int) -> str:
        owners, _, _ = self._parts.columns(number)
        return self._comparison.a.name(int(owners[0]))

    def wants(self, number: int) -> bool:
        return bool(self._comparison.same[self._parts.columns(number)[0]].any())

    def take(self, number: int, data: memoryview) -> None:
        self._comparison.compare(self._parts.columns(number), int(self._parts.starts[number]), data)
