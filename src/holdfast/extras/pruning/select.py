"""The thresholds of pruning for tensors in files: the n-th lowest of their keys, exactly, in scans that hold a few blocks.

1. What each pass finds out stands in `numeric/threshold.py: search`; 16-bit floats are done with one pass.
2. Many tensors are searched in one scan, each by itself or several together. A search goes on as soon as all of its blocks were
   seen, so that counts are held only of tensors that are begun.
3. Equal keys are counted by parts of the work, so that only one part is read again to find the index before which they go.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from holdfast.core.arrays import Ints, matrix_shape
from holdfast.core.box import Box
from holdfast.core.documents import message_kind, read_document, write_document
from holdfast.core.group import Ranks, deal, exchange, share_out, telling
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.checksums import Progress
from holdfast.engine.scan import Block, blocks, read_block, scan, start_of
from holdfast.engine.threads import run_all
from holdfast.errors import NotCommitted
from holdfast.numeric.threshold import (
    ORDERS,
    KeyBits,
    Search,
    magnitude_keys,
    mean_squares,
    search,
)

PIECE_ELEMENTS = 1 << 19
"""Elements at a time: 4 MiB as 64-bit numbers. With fewer, threads wait for each other's turn at the interpreter; more only take
memory."""

HISTOGRAM_PARTS = 32
"""Histograms of parts of the work: 256 KiB each."""


def pieces(count: int, align: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges that cover `count` elements and begin at multiples of `align`."""
    return blocks(count, max(PIECE_ELEMENTS // align, 1) * align)


class Magnitudes(Value):
    """The keys of a tensor's elements by their absolute values. Members of all kinds of keys are described here."""

    tensor: LazyTensor
    order: str

    @property
    def count(self) -> int:
        return self.tensor.size

    @property
    def width(self) -> int:
        return 8 * ORDERS[self.order][1].itemsize - 1

    def blocks(self) -> Iterator[Block]:
        """Elements that are looked at together, in the order of the keys."""
        return pieces(self.count)

    def place(self, start: int) -> int:
        """The number of the first key of a block that begins with this element."""
        return start

    def of(self, values: np.ndarray, start: int = 0) -> np.ndarray:
        """The keys of a block, as it was read."""
        return magnitude_keys(values, self.order)


class BlockScores(Value):
    """The keys of a tensor's blocks, by the mean square of the elements that each has, summed one after the other in float64."""

    tensor: LazyTensor
    height: int
    width_of_block: int
    width = 63

    @property
    def grid(self) -> tuple[int, int]:
        """The number of blocks below and beside each other."""
        rows, columns = matrix_shape(self.tensor.shape)
        return -(-rows // self.height), -(-columns // self.width_of_block)

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    def blocks(self) -> Iterator[Block]:
        """Whole rows of blocks, or parts of one that begin at multiples of eight, so that their bits fill bytes."""
        (rows, columns), across = matrix_shape(self.tensor.shape), self.grid[1]
        size = self.height * self.width_of_block
        if not self.count:
            return
        if across * size <= PIECE_ELEMENTS:
            yield from blocks(
                rows * columns, max(PIECE_ELEMENTS // (across * size), 1) * self.height * columns
            )
            return
        step = max(PIECE_ELEMENTS // size // 8, 1) * 8 * self.width_of_block
        for top in range(0, rows, self.height):
            yield from (
                Box((top, left), (min(top + self.height, rows), right))
                for left, right in blocks(columns, step)
            )

    def place(self, start: int) -> int:
        top, left = divmod(start, matrix_shape(self.tensor.shape)[1])
        return top // self.height * self.grid[1] + left // self.width_of_block

    def of(self, values: np.ndarray) -> np.ndarray:
        matrix = (
            values if values.ndim > 1 else values.reshape(-1, matrix_shape(self.tensor.shape)[1])
        )
        return magnitude_keys(
            mean_squares(matrix, self.height, self.width_of_block).reshape(-1), "float64"
        )


Keys = Magnitudes | BlockScores


class KeySearch:
    """A search for the keys of some tensors that go together: every key below `key`, and of equal ones those before an index."""

    def __init__(self, sources: Sequence[Keys], gone: int) -> None:
        """`gone` keys go, all of one width."""
        self.sources = sources
        self._work = [
            (number, block) for number, source in enumerate(sources) for block in source.blocks()
        ]
        self._at = {
            (number, start_of(sources[number].tensor, block)): at
            for at, (number, block) in enumerate(self._work)
        }
        self._lock = threading.Lock()
        self.key, self.before = 0, (0,) * len(sources)
        """The key that was found, and the index in each tensor before which equal keys go. Known after `select`."""
        self.asked: KeyBits | None = None
        """The bits that the next pass counts; None where all is known."""
        self._equal: Sequence[int] = ()
        """How many keys equal to the one that was found each part of the work has."""
        self._ties = 0
        if gone > 0:
            self._search: Search = search(
                gone, total=sum(source.count for source in sources), width=sources[0].width
            )
            self._begin(next(self._search))

    def _begin(self, asked: KeyBits) -> None:
        self.asked, self._left = asked, len(self.sources)
        self._parts: Ints | None = None
        self._taken: list[np.ndarray] = [np.empty(0, np.uint64)] * (
            len(self._work) if asked.taken else 0
        )

    def look(self, number: int, start: int, values: np.ndarray) -> None:
        """Count the keys of one block, or take them, for this pass."""
        asked, source, at = self.asked, self.sources[number], self._at[number, start]
        if asked is None:
            return
        keys = source.of(values)
        if asked.taken:
            self._taken[at] = asked.begin(keys, source.width)
            return
        own = asked.count(keys, source.width)
        with self._lock:
            if self._parts is None:
                # By parts of the work, if these bits are the last.
                rows = min(HISTOGRAM_PARTS, len(self._work)) if asked.shift == 0 else 1
                self._parts = np.zeros((rows, len(own)), np.int64)
            self._parts[at * len(self._parts) // len(self._work)] += own

    def finish(self) -> None:
        """Go on with the search where this was the last tensor of the pass."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._go_on(self._parts, self._taken)

    def join(self, ranks: Ranks) -> None:
        """Go on with the search when all ranks have looked at their tensors."""
        own = None if self._parts is None else (self._parts.shape, self._parts.tobytes())
        keys = {
            at: (keys.dtype.str, keys.tobytes()) for at, keys in enumerate(self._taken) if len(keys)
        }
        found = [
            read_document(PASS, one)
            for one in exchange(ranks, write_document(PASS, (own, keys)), common=b"")
        ]
        counted = [
            np.frombuffer(raw, np.int64).reshape(shape)
            for shape, raw in (one[0] for one in found if one[0] is not None)
        ]
        taken = self._taken
        for at, (kind, raw) in (
            (at, keys) for _, own_keys in found for at, keys in own_keys.items()
        ):
            taken[at] = np.frombuffer(raw, kind)
        self._go_on(np.sum(counted, axis=0) if counted else None, taken)

    def _go_on(self, parts: Ints | None, taken: list[np.ndarray]) -> None:
        try:
            self._begin(
                self._search.send(np.concatenate(taken) if parts is None else parts.sum(axis=0))
            )
        except StopIteration as done:
            self.asked, self._parts, self._taken = None, None, []
            self.key, self._ties = done.value.key, done.value.ties
            if parts is None:
                self._equal = [int(np.count_nonzero(keys == self.key)) for keys in taken]
                return
            self._equal = parts[:, self.key % parts.shape[1]].tolist()

    def locate(self) -> None:
        """Find where the first of the equal keys that go end, from how many each part of the work has. Reads one part."""
        ties, equal, sources = self._ties, self._equal, self.sources
        if not ties:
            return
        if ties == sum(equal):
            self.before = tuple(source.count for source in sources)
            return
        ends = np.cumsum(equal)
        part = int(np.searchsorted(ends, ties))
        ties -= int(ends[part]) - equal[part]
        for number, block in self._work[-(-part * len(self._work) // len(equal)) :]:
            source = sources[number]
            places = np.flatnonzero(source.of(read_block(source.tensor, block)) == self.key)
            if ties <= len(places):
                last = source.place(start_of(source.tensor, block)) + int(places[ties - 1]) + 1
                self.before = (
                    *(one.count for one in sources[:number]),
                    last,
                    *(0 for _ in sources[number + 1 :]),
                )
                return
            ties -= len(places)
        problem = "a tensor changed while its threshold was looked for; nothing was written"
        raise NotCommitted(f"{problem}: start again when nobody writes to it")


class KeyPass:
    def __init__(self, searching: KeySearch, number: int, *, shared: bool = False) -> None:
        self._search, self._number, self._shared = searching, number, shared
        self.source = searching.sources[number]

    def add(self, start: int, values: np.ndarray) -> None:
        self._search.look(self._number, start, values)

    def result(self) -> None:
        if not self._shared:
            self._search.finish()


def select(
    searches: Sequence[KeySearch], *, threads: int = 1, progress: Progress | None = None
) -> None:
    """Carry out searches, all of them together, until each knows what goes."""
    while waiting := [
        KeyPass(one, number)
        for one in searches
        if one.asked is not None
        for number in range(len(one.sources))
    ]:
        _look(waiting, threads, progress)
    run_all([one.locate for one in searches], threads)


def _look(waiting: Sequence[KeyPass], threads: int, progress: Progress | None) -> None:
    cuts = [one.source.blocks() for one in waiting]
    tensors = [one.source.tensor for one in waiting]
    scan(tensors, waiting.__getitem__, cuts.__getitem__, threads=threads, progress=progress)


PASS = message_kind(
    "counts of a pass", tuple[tuple[tuple[int, int], bytes] | None, dict[int, tuple[str, bytes]]]
)


FoundKey = tuple[int, tuple[int, ...]]
"""The key that a search found, and the index in each tensor before which equal keys go, as they are sent."""


def select_together(
    searches: Sequence[KeySearch],
    ranks: Ranks,
    *,
    threads: int = 1,
    progress: Progress | None = None,
) -> None:
    """Carry out searches with all ranks. Each of one tensor is one rank's; the tensors of the others are dealt."""
    if ranks.size == 1:
        select(searches, threads=threads, progress=progress)
        return
    alone = [one for one in searches if len(one.sources) == 1]

    def search(numbers: list[int]) -> list[FoundKey]:
        own = [alone[number] for number in numbers]
        select(own, threads=threads, progress=progress)
        return [(one.key, one.before) for one in own]

    nbytes_alone = [one.sources[0].tensor.nbytes for one in alone]
    found = share_out(ranks, nbytes_alone, search, tuple[int, tuple[int, ...]])
    for one, (key, before) in zip(alone, found, strict=True):
        one.key, one.before = key, before
    for one in (one for one in searches if len(one.sources) > 1):
        nbytes = np.array([source.tensor.nbytes for source in one.sources], np.int64)
        own = np.flatnonzero(
            deal(nbytes, np.zeros(ranks.size, np.int64)) == ranks.size - 1 - ranks.rank
        ).tolist()
        while one.asked is not None:
            with telling(ranks):
                _look([KeyPass(one, number, shared=True) for number in own], threads, progress)
            one.join(ranks)

        def locate(numbers: list[int], one: KeySearch = one) -> list[FoundKey]:
            for _ in numbers:
                one.locate()
            return [(one.key, one.before)] * len(numbers)

        ((_, one.before),) = share_out(ranks, [1], locate, tuple[int, tuple[int, ...]])
