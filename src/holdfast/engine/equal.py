"""Are two tensors the same, byte for byte? For those whose bytes lie in one piece, at the speed of reading them.

Ranges of both sides are read in batches that stay in a core's cache, and compared there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.digest import canonicalize
from holdfast.core.protocols import Store
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.blocks import find_contiguous_bytes
from holdfast.engine.checksums import Progress
from holdfast.engine.coalesce import SUMS, Ranges
from holdfast.engine.ranges import read_to_scratch
from holdfast.engine.threads import DEFAULT_THREADS, run_reads

SIDE = replace(SUMS, block_nbytes=2 << 20)
"""How each side is read. The blocks of two sides take as much cache as one block that is summed."""

BATCH_RANGES = 4096
"""The most ranges that are compared together."""

Pair = tuple[LazyTensor, LazyTensor]
Places = list[tuple[str, int, int]]


class StoreRanges(Value, frozen=True, eq=False):
    """Ranges of the files of a store."""

    store: Store
    ranges: Ranges
    name: Callable[[int], str]  # What a range is called, for messages.


def compare_bytes(
    pairs: Sequence[Pair], progress: Progress | None = None, *, threads: int | None = None
) -> list[bool]:
    """Return for each pair whether it has one dtype, one shape and the same bytes.

    False also means that the elements must be compared: strides, pieces, byte orders. Progress
    counts pairs that are the same. A caller that reads the others again counts those.
    """
    same = [canonicalize(a.dtype, a.shape) == canonicalize(b.dtype, b.shape) for a, b in pairs]
    by_stores: dict[tuple[Store, Store], tuple[list[int], Places, Places]] = {}
    for number, (a, b) in enumerate(pairs):
        if not same[number] or not a.size:
            continue
        place_a, place_b = find_contiguous_bytes(a), find_contiguous_bytes(b)
        if place_a is None or place_b is None:
            same[number] = False
            continue
        stores = a.source.store, b.source.store
        numbers, places_a, places_b = by_stores.setdefault(stores, ([], [], []))
        numbers.append(number)
        places_a.append((*place_a, a.nbytes))
        places_b.append((*place_b, b.nbytes))

    for stores, (numbers, *places) in by_stores.items():
        names_a = [pairs[number][0].name for number in numbers]
        names_b = [pairs[number][1].name for number in numbers]
        side_a = StoreRanges(stores[0], Ranges.from_tuples(places[0]), names_a.__getitem__)
        side_b = StoreRanges(stores[1], Ranges.from_tuples(places[1]), names_b.__getitem__)
        are_equal = compare_ranges(side_a, side_b, progress, threads=threads)
        for number, is_equal in zip(numbers, are_equal.tolist(), strict=True):
            same[number] = is_equal
    return same


def compare_ranges(
    a: StoreRanges, b: StoreRanges, progress: Progress | None = None, *, threads: int | None = None
) -> Bools:
    """Return for each range of `a` whether it has the bytes of the range of `b` with its number.

    The two ranges are equally long. Progress is counted as in `compare_bytes`.
    """
    comparison = _Comparison(a, b, progress)
    tasks = [partial(comparison.compare, *batch) for batch in _cut_batches(a.ranges)]
    run_reads(tasks, threads or DEFAULT_THREADS, stores=[a.store, b.store])
    return comparison.same


def _cut_batches(ranges: Ranges) -> Iterator[tuple[Ints, int, int]]:
    """Yield batches of whole ranges, with 0 and -1; and pieces of one range, with their first byte and length."""
    is_long = ranges.nbytes > SIDE.block_nbytes
    for number in np.flatnonzero(is_long).tolist():
        nbytes = ranges.nbytes.item(number)
        for begin in range(0, nbytes, SIDE.block_nbytes):
            yield np.array([number]), begin, min(SIDE.block_nbytes, nbytes - begin)

    (numbers,) = ((ranges.nbytes > 0) & ~is_long).nonzero()
    order = np.lexsort((ranges.starts[numbers], ranges.files[numbers]))
    numbers = numbers[order]
    reach = ranges.nbytes[numbers].cumsum()
    first = before = 0
    while first < len(numbers):
        last = int(reach.searchsorted(before + SIDE.block_nbytes, side="right"))
        last = min(max(last, first + 1), first + BATCH_RANGES)
        yield numbers[first:last], 0, -1
        first, before = last, reach.item(last - 1)


class _Comparison:
    def __init__(self, a: StoreRanges, b: StoreRanges, progress: Progress | None) -> None:
        self._a, self._b = a, b
        self.same: Bools = np.ones(len(a.ranges), np.bool_)
        self._left_nbytes = a.ranges.nbytes.copy()
        self._progress = progress
        self._lock = threading.Lock()

    def compare(self, numbers: Ints, begin: int, nbytes: int) -> None:
        """Compare a batch of `_cut_batches`."""
        numbers = numbers[self.same[numbers]]
        if not len(numbers):
            return
        lengths = self._a.ranges.nbytes[numbers] if nbytes < 0 else np.array([nbytes])
        left, right = (self._read(side, numbers, begin, lengths) for side in (self._a, self._b))
        are_equal: Bools = np.ones(len(numbers), np.bool_)
        if not np.array_equal(left, right):
            are_equal = ~np.logical_or.reduceat(left != right, lengths.cumsum() - lengths)

        with self._lock:
            self.same[numbers[~are_equal]] = False
            self._left_nbytes[numbers] -= lengths
            done = numbers[self.same[numbers] & (self._left_nbytes[numbers] == 0)]
        if len(done) and self._progress is not None:
            self._progress(2 * int(self._a.ranges.nbytes[done].sum()))

    def _read(self, side: StoreRanges, numbers: Ints, begin: int, lengths: Ints) -> np.ndarray:
        ranges = side.ranges
        wanted = Ranges(ranges.keys, ranges.files[numbers], ranges.starts[numbers] + begin, lengths)
        return read_to_scratch(
            side.store, wanted, lambda position: side.name(numbers.item(position)), policy=SIDE
        )
