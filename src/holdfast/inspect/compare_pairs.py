"""How the elements of pairs of tensors differ: what is not the same byte for byte is read and counted, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from holdfast.core.dense import read_tensors
from holdfast.core.digest import canonical
from holdfast.core.tensor import LazyTensor
from holdfast.engine.checksums import Progress
from holdfast.engine.compare import Content, Tally, blocks, compare_arrays, compare_block
from holdfast.engine.equal import same_bytes
from holdfast.engine.threads import default_threads
from holdfast.engine.transfer import run_reads
from holdfast.errors import HoldfastError, located

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
