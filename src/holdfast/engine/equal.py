"""Compares the bytes of tensors that are ranges of files, at the speed of reading them.

Ranges of both sides are read in batches. A batch stays in the cache of a core until it is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

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
"""How each side is read. A block of each side together take as much cache as one block of `SUMS`."""

MAX_BATCH_RANGES = 4096
"""The most ranges that are compared together."""

TensorPair = tuple[LazyTensor, LazyTensor]


class StoreRanges(Value, frozen=True, eq=False):
    """Ranges of the files of one store."""

    store: Store
    ranges: Ranges
    find_tensor_name: Callable[[int], str]
    """Returns the name of the tensor of a range, given the index of the range, for errors."""


class _RangeBatch(NamedTuple):
    """What one task compares: several short ranges, or a piece of one long range."""

    range_indices: Ints
    piece_start: int
    """The first byte of the piece in its range; 0 for short ranges."""
    nbytes: Ints
    """The length of each range, or of the piece."""


class _PairGroup(Struct):
    """The pairs of tensors in the same two stores, as columns."""

    pair_indices: list[int] = field(default_factory=list)
    places_a: list[tuple[str, int, int]] = field(default_factory=list)
    places_b: list[tuple[str, int, int]] = field(default_factory=list)


def compare_bytes(
    pairs: Sequence[TensorPair], progress: Progress | None = None, *, threads: int | None = None
) -> list[bool]:
    """Return for each pair of tensors whether they have the same dtype, shape and bytes.

    False does not mean that elements differ: tensors with strides, several chunks or another byte
    order are not compared here. The caller compares their elements one by one.

    Args:
        pairs: The pairs.
        progress: Called with the bytes of both tensors of an equal pair. The bytes of other pairs
            are counted when their elements are compared.
        threads: The number of threads.
    """
    are_equal: list[bool] = []
    groups: dict[tuple[Store, Store], _PairGroup] = {}
    for pair_index, (a, b) in enumerate(pairs):
        has_same_kind = canonicalize(a.dtype, a.shape) == canonicalize(b.dtype, b.shape)
        if not has_same_kind or not a.size:
            # Tensors without elements are equal if they have the same dtype and shape.
            are_equal.append(has_same_kind)
            continue
        place_a = find_contiguous_bytes(a)
        place_b = find_contiguous_bytes(b)
        if place_a is None or place_b is None:
            are_equal.append(False)
            continue
        group = groups.setdefault((a.source.store, b.source.store), _PairGroup())
        group.pair_indices.append(pair_index)
        group.places_a.append((*place_a, a.nbytes))
        group.places_b.append((*place_b, b.nbytes))
        # This keeps a place for the result, which the second loop replaces.
        are_equal.append(True)

    # Pairs of the same two stores are read together.
    for (store_a, store_b), group in groups.items():
        names_a = [pairs[pair_index][0].name for pair_index in group.pair_indices]
        names_b = [pairs[pair_index][1].name for pair_index in group.pair_indices]
        side_a = StoreRanges(store_a, Ranges.from_tuples(group.places_a), names_a.__getitem__)
        side_b = StoreRanges(store_b, Ranges.from_tuples(group.places_b), names_b.__getitem__)
        has_same_bytes = compare_ranges(side_a, side_b, progress, threads=threads)
        for pair_index, is_equal in zip(group.pair_indices, has_same_bytes.tolist(), strict=True):
            are_equal[pair_index] = is_equal
    return are_equal


def compare_ranges(
    a: StoreRanges, b: StoreRanges, progress: Progress | None = None, *, threads: int | None = None
) -> Bools:
    """Compare ranges of two stores in pairs, and return for each pair whether the bytes are equal.

    Args:
        a: The ranges of one side.
        b: As many ranges of the other side, with the same lengths.
        progress: See `compare_bytes`.
        threads: The number of threads.
    """
    comparison = _RangeComparison(a, b, progress)
    tasks = [partial(comparison.compare, batch) for batch in _cut_batches(a.ranges)]
    run_reads(tasks, threads or DEFAULT_THREADS, stores=[a.store, b.store])
    return comparison.are_equal


def _cut_batches(ranges: Ranges) -> Iterator[_RangeBatch]:
    """Divide ranges into batches, which are compared by one task each.

    A batch is a piece of a long range, or a group of short ranges that are neighbors in a file. It
    has at most as many bytes as stay in the cache of a core.
    """
    is_long = ranges.nbytes > SIDE.block_nbytes
    for range_index in np.flatnonzero(is_long).tolist():
        nbytes = ranges.nbytes.item(range_index)
        for start in range(0, nbytes, SIDE.block_nbytes):
            piece_nbytes = min(SIDE.block_nbytes, nbytes - start)
            yield _RangeBatch(np.array([range_index]), start, np.array([piece_nbytes]))

    # Sort the short ranges by file and start, so that neighbors are in one batch.
    short_indices = np.flatnonzero((ranges.nbytes > 0) & ~is_long)
    order = np.lexsort((ranges.starts[short_indices], ranges.files[short_indices]))
    short_indices = short_indices[order]
    short_nbytes = ranges.nbytes[short_indices]

    # `total_nbytes` is the size of all short ranges up to each one. So a batch ends before the first
    # range that lies beyond the limit. A short range always fits, so no batch is empty.
    total_nbytes = short_nbytes.cumsum()
    first = 0
    nbytes_before = 0
    while first < len(short_indices):
        limit_nbytes = nbytes_before + SIDE.block_nbytes
        stop = int(total_nbytes.searchsorted(limit_nbytes, side="right"))
        stop = min(stop, first + MAX_BATCH_RANGES)
        yield _RangeBatch(short_indices[first:stop], 0, short_nbytes[first:stop])
        first = stop
        nbytes_before = total_nbytes.item(stop - 1)


class _RangeComparison:
    """The results of comparing ranges, while several threads compare batches of them."""

    def __init__(self, a: StoreRanges, b: StoreRanges, progress: Progress | None) -> None:
        """Start with all ranges equal, and no bytes compared.

        Args:
            a: The ranges of one side.
            b: As many ranges of the other side, with the same lengths.
            progress: Called with the bytes of both ranges of a pair, if they are equal.
        """
        self.are_equal: Bools = np.ones(len(a.ranges), np.bool_)
        """For each range, whether no difference has been seen."""
        self._a = a
        self._b = b
        self._remaining_nbytes = a.ranges.nbytes.copy()
        self._progress = progress
        self._lock = threading.Lock()

    def compare(self, batch: _RangeBatch) -> None:
        """Read a batch from both sides, and mark the ranges whose bytes differ."""
        # If another piece of a long range has differed, there is nothing left to find out.
        is_undecided = self.are_equal[batch.range_indices]
        if not is_undecided.any():
            return
        range_indices = batch.range_indices[is_undecided]
        nbytes = batch.nbytes[is_undecided]
        bytes_a = _read_batch(self._a, range_indices, batch.piece_start, nbytes)
        bytes_b = _read_batch(self._b, range_indices, batch.piece_start, nbytes)
        has_difference: Bools = np.zeros(len(range_indices), np.bool_)
        if not np.array_equal(bytes_a, bytes_b):
            # Find out which ranges have a different byte. This is rare, because most are equal.
            starts = nbytes.cumsum() - nbytes
            has_difference = np.logical_or.reduceat(bytes_a != bytes_b, starts)

        # Other threads may compare other pieces of the same range. The lock makes sure that exactly
        # one of them sees that no bytes remain, and reports the range.
        with self._lock:
            self.are_equal[range_indices[has_difference]] = False
            self._remaining_nbytes[range_indices] -= nbytes
            is_finished = self._remaining_nbytes[range_indices] == 0
            finished_equal = range_indices[self.are_equal[range_indices] & is_finished]
        if len(finished_equal) and self._progress is not None:
            # Both sides were read, so the bytes count twice.
            self._progress(2 * int(self._a.ranges.nbytes[finished_equal].sum()))


def _read_batch(side: StoreRanges, range_indices: Ints, start: int, nbytes: Ints) -> np.ndarray:
    """Read bytes of several ranges, one after the other into one array.

    Args:
        side: The store and its ranges.
        range_indices: The ranges to read.
        start: How many bytes at the start of each range are skipped.
        nbytes: How many bytes of each range are read after the skipped ones.

    Returns:
        The bytes of all ranges.
    """
    ranges = side.ranges
    starts = ranges.starts[range_indices] + start
    batch_ranges = Ranges(ranges.keys, ranges.files[range_indices], starts, nbytes)

    def find_tensor_name(batch_index: int) -> str:
        """Return the name of the tensor of a range of this batch, for errors."""
        return side.find_tensor_name(range_indices.item(batch_index))

    return read_to_scratch(side.store, batch_ranges, find_tensor_name, policy=SIDE)
