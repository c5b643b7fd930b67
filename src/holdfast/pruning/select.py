"""The n-th lowest of all keys of some tensors, exactly, in passes that hold a few pieces at a time.

1. Histograms close in on it (`order.narrow`). 16-bit floats are done with one.
2. Where few keys are left, the next pass takes them out and sorts them.
3. Equal keys are counted by parts of the work, so that only one part is read again to find the index before which they go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Ints
from holdfast.core.value import Value, replace
from holdfast.engine.threads import run_all
from holdfast.errors import NotCommitted
from holdfast.pruning import order
from holdfast.pruning.keys import KeyBits, Keys

HISTOGRAM_PARTS = 32
"""Histograms of parts of the work: 256 KiB each."""

Progress = Callable[[int], None]


class KeyCounts(Value, frozen=True, eq=False):
    """How often each key of 15 bits is there, and how often it goes."""

    there: Ints
    gone: Ints


class Threshold(Value, frozen=True, eq=False):
    """What goes: every key below this one, and of those that are equal the ones before an index, which each tensor has."""

    key: int
    cuts: tuple[int, ...]
    counts: KeyCounts | None = None
    """Where a single histogram was enough."""


def select(sources: Sequence[Keys], count: int, *, threads: int = 1, progress: Progress | None = None) -> Threshold:
    """The threshold below which exactly `count` of all keys are. All sources have keys of one width."""
    if count <= 0:
        return Threshold(0, (0,) * len(sources))
    return _narrowed(Sweep(sources, threads, progress), count)


class Sweep:
    """Passes over the keys of several tensors, on threads."""

    def __init__(self, sources: Sequence[Keys], threads: int, progress: Progress | None) -> None:
        self.sources, self._threads, self._progress = sources, threads, progress
        self.width = sources[0].width
        self.total = sum(source.count for source in sources)
        self.work = [(number, start, stop) for number, source in enumerate(sources) for start, stop in source.pieces()]

    def read(self, at: int) -> np.ndarray:
        """The keys of one piece of the work."""
        number, start, stop = self.work[at]
        return self.sources[number].read(start, stop)

    def begin(self, at: int, bits: KeyBits) -> np.ndarray:
        """The keys of one piece of the work that begin with a prefix, in order; they are made in parts that stay in a cache."""
        number, start, stop = self.work[at]
        return np.concatenate([bits.begin(keys, self.width) for keys in self.sources[number].steps(start, stop)])

    def count_by(self, at: int, bits: KeyBits) -> Ints:
        """How many keys one piece of the work has by some of their bits."""
        number, start, stop = self.work[at]
        return self.sources[number].count_by(start, stop, bits)

    def pieces(self, use: Callable[[int], None]) -> None:
        """Call a function with the place of every piece of the work."""

        def task(at: int) -> Callable[[], None]:
            def run() -> None:
                use(at)
                if self._progress is not None:
                    self._progress(self.work[at][2] - self.work[at][1])

            return run

        run_all([task(at) for at in range(len(self.work))], self._threads)


class ComputedKeys(Value, frozen=True, eq=False):
    """Keys that were computed once."""

    keys: npt.NDArray[np.uint64]
    ranges: Sequence[tuple[int, int]]
    width = 63

    @property
    def count(self) -> int:
        return len(self.keys)

    def pieces(self) -> Iterator[tuple[int, int]]:
        return iter(self.ranges)

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        return self.keys[start:stop]

    def steps(self, start: int, stop: int) -> Iterator[np.ndarray]:
        yield self.keys[start:stop]

    def count_by(self, start: int, stop: int, bits: KeyBits) -> Ints:
        return bits.count(self.keys[start:stop], self.width)


def hold(source: Keys, *, threads: int = 1, progress: Progress | None = None) -> ComputedKeys:
    """All keys of a tensor, for further passes."""
    sweep = Sweep([source], threads, progress)
    held = ComputedKeys(np.empty(source.count, np.uint64), [(start, stop) for _, start, stop in sweep.work])

    def put(at: int) -> None:
        held.keys[slice(*held.ranges[at])] = sweep.read(at)

    sweep.pieces(put)
    return held


def _narrowed(sweep: Sweep, count: int) -> Threshold:
    """From histograms of more and more bits."""
    passes: list[Ints] = []

    def histogram(prefix: int, known: int, shift: int) -> Ints:
        passes.append(_histogram(sweep, KeyBits(prefix, known, shift)))
        bins: Ints = passes[-1].sum(axis=0)
        return bins

    found = order.narrow(histogram, count, total=sweep.total, width=sweep.width)
    if found.known == 0:
        parts = passes[-1]
        bucket = found.prefix % parts.shape[1]
        threshold = _among_equals(sweep, found.prefix, found.rank, equal=parts[:, bucket].tolist())
        return threshold if passes[1:] else replace(threshold, counts=_counts(parts.sum(axis=0), bucket, found.rank))
    left = KeyBits(found.prefix, found.known, 0)
    candidates = [np.empty(0, np.uint64)] * len(sweep.work)

    def take(at: int) -> None:
        candidates[at] = sweep.begin(at, left)

    sweep.pieces(take)
    return _sorted(sweep, candidates, found.rank)


def _counts(bins: Ints, key: int, ties: int) -> KeyCounts:
    gone = np.where(np.arange(len(bins)) < key, bins, 0)
    gone[key] = ties
    return KeyCounts(bins, gone)


def _histogram(sweep: Sweep, bits: KeyBits) -> Ints:
    """How many keys with a prefix there are by their next bits; by parts of the work if these bits are the last."""
    rows = min(HISTOGRAM_PARTS, len(sweep.work)) if bits.shift == 0 else 1
    parts = np.zeros((rows, 1 << (bits.known - bits.shift)), np.int64)
    lock = threading.Lock()

    def add(at: int) -> None:
        own = sweep.count_by(at, bits)
        row = parts[at * len(parts) // len(sweep.work)]
        with lock:
            np.add(row, own, out=row)

    sweep.pieces(add)
    return parts


def _sorted(sweep: Sweep, candidates: Sequence[np.ndarray], count: int) -> Threshold:
    """The `count`-th lowest of keys that were taken out of the pieces of the work."""
    every = np.concatenate(candidates)
    every.partition(count - 1)
    key = int(every[count - 1])
    equal = [int(np.count_nonzero(keys == key)) for keys in candidates]
    return _among_equals(sweep, key, count - int(np.count_nonzero(every < key)), equal=equal)


def _among_equals(sweep: Sweep, key: int, ties: int, *, equal: Sequence[int]) -> Threshold:
    """Where the first `ties` of the keys equal to this one end, knowing how many each part of the work has."""
    if ties == sum(equal):
        return Threshold(key, tuple(source.count for source in sweep.sources))
    ends = np.cumsum(equal)
    part = int(np.searchsorted(ends, ties))
    ties -= int(ends[part]) - equal[part]
    for at in range(-(-part * len(sweep.work) // len(equal)), len(sweep.work)):
        places = np.flatnonzero(sweep.read(at) == key)
        if ties <= len(places):
            number, start, _ = sweep.work[at]
            whole = [source.count for source in sweep.sources[:number]]
            cut = start + int(places[ties - 1]) + 1
            return Threshold(key, (*whole, cut, *(0 for _ in sweep.sources[number + 1 :])))
        ties -= len(places)
    raise NotCommitted(
        "a tensor changed while its threshold was looked for; nothing was written: start again when nobody writes to it"
    )
