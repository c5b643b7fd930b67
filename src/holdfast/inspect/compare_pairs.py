"""How the elements of pairs of tensors differ: what is not the same byte for byte is read and counted, in bounded memory.

Of most tensors that two checkpoints have, the bytes in both files are those of an array (`DensePairs`). Whether they are the same
is asked of columns, a million at a time, without making a tensor. All others are compared as pairs of tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.dense import DenseRows, read_tensors
from holdfast.core.digest import canonical
from holdfast.core.protocols import Store
from holdfast.core.table import Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.engine.checksums import Progress
from holdfast.engine.compare import Content, Tally, blocks, compare_arrays, compare_block
from holdfast.engine.equal import Located, same_bytes, same_ranges
from holdfast.engine.threads import default_threads
from holdfast.engine.transfer import run_reads
from holdfast.errors import HoldfastError, located
from holdfast.plan.coalesce import Ranges

SMALL_NBYTES = 16 << 10
"""Tensors up to this length are read by the hundred."""

TOGETHER = 256
"""That many of them: 8 MiB at the most for both sides."""

Pair = tuple[LazyTensor, LazyTensor]


def compare_tensors(pairs: Sequence[Pair], progress: Progress | None, *, threads: int | None = None) -> list[Content]:
    """The difference of each pair, in bounded memory: at most a few blocks of each side a thread.

    Most tensors of most pairs are the same, so their bytes are compared first, where that can be done without looking at
    elements; only what differs is looked at element by element. What is the same has a content of nothing changed.
    """
    equal = same_bytes(pairs, progress, threads=threads)
    counting = Counting(pairs, progress)
    work: list[Callable[[], None]] = []
    small: list[int] = []
    for number, (a, b) in enumerate(pairs):
        if equal[number]:
            continue
        for tensor in (a, b):
            with located(file=tensor.source.store.name, tensor=tensor.name):
                tensor.check_expansion()
        if max(a.nbytes, b.nbytes) <= SMALL_NBYTES:
            small.append(number)
        else:
            work += [partial(counting.block, number, start, stop) for start, stop in blocks(elements_of(a))]
    work += [partial(counting.together, small[at : at + TOGETHER]) for at in range(0, len(small), TOGETHER)]
    if work:
        run_reads(work, threads or default_threads(), stores=[tensor.source.store for pair in pairs for tensor in pair])
    return [tally.content() for tally in counting.tallies]


class DensePairs(Value, frozen=True, eq=False):
    """Pairs of tensors of one dtype and shape, in one piece in C order on both sides; those of two sources."""

    names: Sequence[str]
    """All that both sides have."""
    numbers: Ints
    """Which of those these are, ascending."""
    a: Ranges
    b: Ranges
    stores: tuple[Store, Store]
    crcs: tuple[Ints, Ints]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        return 2 * int(self.a.nbytes.sum())

    def recorded_same(self) -> Bools:
        """Of which both files record the same checksum; what has no bytes has that of nothing."""
        a, b = self.crcs
        return np.asarray(((a == b) & (a != NO_CRC)) | (self.a.nbytes == 0))

    def some(self, wanted: Bools) -> DensePairs:
        """Those that are wanted."""
        crcs = self.crcs[0][wanted], self.crcs[1][wanted]
        return DensePairs(self.names, self.numbers[wanted], self.a.some(wanted), self.b.some(wanted), self.stores, crcs)

    def different(self, progress: Progress | None, *, threads: int | None) -> list[str]:
        """The names of those that are not the same byte for byte. Reads all; progress is told of those that are."""

        def name(number: int) -> str:
            return self.names[self.numbers.item(number)]

        a, b = (Located(store, ranges, name) for store, ranges in zip(self.stores, (self.a, self.b), strict=True))
        same = same_ranges(a, b, progress, threads=threads)
        return [self.names[number] for number in self.numbers[~same].tolist()]


def dense_pairs(a: Table, b: Table, rows: tuple[Sequence[int], Sequence[int]], names: Sequence[str]) -> list[DensePairs]:
    """The pairs of these rows that are dense on both sides, those of two sources together; `names` of all pairs, for messages."""
    kinds = [np.array([side.kind[row] for row in own], np.int64) for side, own in zip((a, b), rows, strict=True)]
    # A pair of kinds is judged once.
    codes, where = np.unique(kinds[0] * max(len(b.kinds), 1) + kinds[1], return_inverse=True)
    judged = [(a.kinds[code // len(b.kinds)], b.kinds[code % len(b.kinds)]) for code in codes.tolist()]
    alike = np.array([x.dtype is y.dtype and x.shape == y.shape for x, y in judged], np.bool_)[where]
    found = []
    for source, left in a.dense(rows[0]):
        for other, right in b.dense(rows[1]):
            own, theirs = np.asarray(left.numbers, np.int64), np.asarray(right.numbers, np.int64)
            numbers, first, second = np.intersect1d(own, theirs, assume_unique=True, return_indices=True)
            wanted = alike[numbers]
            (one, crcs), (two, sums) = (_ranges(side, at[wanted]) for side, at in ((left, first), (right, second)))
            found.append(DensePairs(names, numbers[wanted], one, two, (source.store, other.store), (crcs, sums)))
    return found


def _ranges(dense: DenseRows, at: Ints) -> tuple[Ranges, Ints]:
    return Ranges(dense.keys, dense.files[at], dense.starts[at], dense.nbytes[at]), dense.crcs[at]


class Counting:
    """What is known of pairs while they are read, by several threads."""

    def __init__(self, pairs: Sequence[Pair], progress: Progress | None) -> None:
        self._pairs, self._progress = pairs, progress
        self._lock = threading.Lock()
        self.tallies = [Tally() for _ in pairs]

    def block(self, number: int, start: int, stop: int) -> None:
        """Elements [start, stop) of a pair."""
        a, b = self._pairs[number]
        with located(tensor=a.name):
            found = compare_block(a, b, start, stop)
        with self._lock:
            self.tallies[number] += found
        if self._progress is not None:
            share, count = stop - start, elements_of(a)
            self._progress(a.dtype.nbytes(a.size * share // count) + b.dtype.nbytes(b.size * share // count))

    def together(self, numbers: Sequence[int]) -> None:
        """All elements of pairs that are small."""
        pairs = [self._pairs[number] for number in numbers]
        try:
            arrays = read_tensors([tensor for pair in pairs for tensor in pair])
        except HoldfastError:
            # One by one, so that the first that cannot be read is told of.
            for number, (a, _) in zip(numbers, pairs, strict=True):
                self.block(number, 0, elements_of(a))
            return
        for number, pair, first, second in zip(numbers, pairs, arrays[::2], arrays[1::2], strict=True):
            self.tallies[number] = compare_arrays(pair, first, second)
        if self._progress is not None:
            self._progress(sum(tensor.nbytes for pair in pairs for tensor in pair))


def elements_of(tensor: LazyTensor) -> int:
    """How many elements it has, pairs counted as two."""
    return tensor.size * (2 if canonical(tensor.dtype, tensor.shape)[0] is not tensor.dtype else 1)
