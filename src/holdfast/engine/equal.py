"""Are two tensors the same, byte for byte? For those whose bytes lie in one piece, at the speed of reading them.

A sink for the first of two sides: what was read of it is compared with the same bytes of the other, which the sink reads itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from holdfast.core.digest import canonical
from holdfast.core.protocols import Store
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import replace
from holdfast.engine.blocks import contiguous_bytes
from holdfast.engine.checksums import Progress
from holdfast.engine.threads import default_threads
from holdfast.engine.transfer import Scratch, Sink, transfer
from holdfast.errors import located
from holdfast.plan.coalesce import SUMS, Parts, join_files

__all__ = ["same_bytes"]

SIDE = replace(SUMS, block=2 << 20)
"""Of each side at a time: two of them take as much cache as one block that is summed."""

Pair = tuple[LazyTensor, LazyTensor]
Place = tuple[str, int]
"""A file and a byte of it."""


def same_bytes(pairs: Sequence[Pair], progress: Progress | None = None, *, threads: int | None = None) -> list[bool]:
    """Whether each pair has one dtype, one shape and the same bytes.

    False also where that cannot be told without looking at elements: strides, pieces, byte orders. Progress is told of pairs
    that turn out to be the same; whoever reads the others again counts those.
    """
    same = [canonical(a.dtype, a.shape) == canonical(b.dtype, b.shape) for a, b in pairs]
    comparison = Comparison(pairs, same, progress)
    by_store: dict[Store, list[int]] = {}
    for number, (a, b) in enumerate(pairs):
        if same[number] and a.size:
            places = contiguous_bytes(a), contiguous_bytes(b)
            if places[0] is None or places[1] is None:
                same[number] = False
                continue
            comparison.places[number] = places[0], places[1]
            by_store.setdefault(a.source.store, []).append(number)
    work: list[tuple[Store, Parts, Sink]] = []
    for store, numbers in by_store.items():
        starts = [comparison.places[number][0] for number in numbers]
        ranges = [(key, start, start + pairs[n][0].nbytes) for n, (key, start) in zip(numbers, starts, strict=True)]
        for parts in join_files(ranges, SIDE):
            own = replace(parts, owners=np.array(numbers, np.int64)[parts.owners])
            work.append((store, own, OneSide(comparison, own)))
    transfer(work, threads or default_threads(), nbytes=SIDE.block)
    return same


class Comparison:
    """What is known of pairs while they are compared."""

    def __init__(self, pairs: Sequence[Pair], same: list[bool], progress: Progress | None) -> None:
        self.pairs, self.same = pairs, same
        self.places: dict[int, tuple[Place, Place]] = {}
        """Where the two of each pair lie that is compared."""
        self._left = [a.nbytes for a, _ in pairs]
        self._progress = progress
        self._lock = threading.Lock()
        self._scratch = Scratch()

    def compare(self, number: int, start: int, data: memoryview) -> None:
        """Compare bytes of the first side, which begin with byte `start` of its file."""
        if not self.same[number]:
            return
        (_, first), (key, second) = self.places[number]
        other = self._scratch.of(data.nbytes)
        with located(tensor=self.pairs[number][1].name):
            self.pairs[number][1].source.store.read(key, second + start - first, other)
        if not np.array_equal(np.frombuffer(data, np.uint8), np.frombuffer(other, np.uint8)):
            self.same[number] = False
            return
        with self._lock:
            self._left[number] -= data.nbytes
            done = self._left[number] == 0
        if done and self._progress is not None:
            self._progress(2 * self.pairs[number][0].nbytes)


class OneSide(Sink):
    """The reads of one file of the first side."""

    def __init__(self, comparison: Comparison, parts: Parts) -> None:
        self._comparison, self._parts = comparison, parts

    def name(self, number: int) -> str:
        owner, _, _ = next(self._parts.of(number))
        return self._comparison.pairs[owner][0].name

    def wants(self, number: int) -> bool:
        return any(self._comparison.same[owner] for owner, _, _ in self._parts.of(number))

    def take(self, number: int, data: memoryview) -> None:
        origin = int(self._parts.starts[number])
        for owner, begin, end in self._parts.of(number):
            self._comparison.compare(owner, begin, data[begin - origin : end - origin])
