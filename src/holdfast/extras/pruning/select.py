"""The thresholds of pruning for tensors in files: the n-th lowest of their keys, exactly, in scans that hold a few blocks.

1. What each pass finds out stands in `numeric/threshold.py: search_threshold`; 16-bit floats are done with one pass.
2. Many tensors are searched in one scan, each by itself or several together. A search goes on as soon as all of its blocks were
   seen, so that counts are held only of tensors that are begun.
3. If only some of the keys go that are equal to the threshold, the tensors are read again up to the last of these.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from holdfast.core.arrays import Ints, matrix_shape
from holdfast.core.box import Box
from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.group import Ranks, assign_evenly, divide_work, exchange, shared_errors
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.checksums import Progress
from holdfast.engine.scan import ElementBlock, cut_elements, find_first_index, read_block, scan
from holdfast.engine.threads import computing, run_all
from holdfast.errors import NotCommitted
from holdfast.numeric.threshold import (
    KEY_ORDERS,
    Search,
    SearchPass,
    magnitude_keys,
    mean_squares,
    random_keys,
    search_threshold,
)

PIECE_ELEMENTS = 1 << 19
"""Elements at a time: 4 MiB as 64-bit numbers. With fewer, threads wait for each other's turn at the interpreter; more only take
memory."""


def pieces(count: int, align: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges that cover `count` elements and begin at multiples of `align`."""
    return cut_elements(count, max(PIECE_ELEMENTS // align, 1) * align)


class ElementKeys(Value):
    """Keys that order the elements of a tensor. Members of all kinds of keys are described here."""

    tensor: LazyTensor

    @property
    def count(self) -> int:
        return self.tensor.size

    def blocks(self) -> Iterator[ElementBlock]:
        """Return elements that are looked at together, in the order of the keys."""
        return pieces(self.count)

    def place(self, start: int) -> int:
        """Return the number of the first key of a block that begins with this element."""
        return start


class Magnitudes(ElementKeys):
    """The keys of a tensor's elements by their absolute values."""

    order: str

    @property
    def width(self) -> int:
        return 8 * KEY_ORDERS[self.order].bits_dtype.itemsize - 1

    def of(self, values: np.ndarray, start: int = 0) -> np.ndarray:
        """Return the keys of values, the first of which is the element `start`."""
        return magnitude_keys(values, self.order)

    def read(self, block: ElementBlock) -> np.ndarray:
        """Return the keys of a block."""
        return self.of(read_block(self.tensor, block))


class RandomKeys(ElementKeys):
    """The keys of a random order of elements. They do not depend on the values."""

    seed: int
    width = 63

    def of(self, values: np.ndarray, start: int = 0) -> np.ndarray:
        return random_keys(start, start + len(values), self.seed)

    def read(self, block: ElementBlock) -> np.ndarray:
        assert isinstance(block, tuple)  # As `pieces` returns them.
        return random_keys(*block, self.seed)


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

    def blocks(self) -> Iterator[ElementBlock]:
        """Whole rows of blocks, or parts of one that begin at multiples of eight, so that their bits fill bytes."""
        (rows, columns), across = matrix_shape(self.tensor.shape), self.grid[1]
        size = self.height * self.width_of_block
        if not self.count:
            return
        if across * size <= PIECE_ELEMENTS:
            yield from cut_elements(
                rows * columns, max(PIECE_ELEMENTS // (across * size), 1) * self.height * columns
            )
            return
        step = max(PIECE_ELEMENTS // size // 8, 1) * 8 * self.width_of_block
        for top in range(0, rows, self.height):
            yield from (
                Box((top, left), (min(top + self.height, rows), right))
                for left, right in cut_elements(columns, step)
            )

    def place(self, start: int) -> int:
        top, left = divmod(start, matrix_shape(self.tensor.shape)[1])
        return top // self.height * self.grid[1] + left // self.width_of_block

    def of(self, values: np.ndarray) -> np.ndarray:
        columns = matrix_shape(self.tensor.shape)[1]
        matrix = values if values.ndim > 1 else values.reshape(-1, columns)
        scores = mean_squares(matrix, self.height, self.width_of_block)
        return magnitude_keys(scores.reshape(-1), "float64")

    def read(self, block: ElementBlock) -> np.ndarray:
        return self.of(read_block(self.tensor, block))


Keys = Magnitudes | RandomKeys | BlockScores


class KeySearch:
    """A search among the keys of some tensors that are pruned together.

    When it is over, every key below `key` goes, and of equal keys those before an index.
    """

    def __init__(self, sources: Sequence[Keys], gone: int) -> None:
        """`gone` keys of all sources go. All keys have the same width."""
        self.sources = sources
        self.key = 0
        self.before = (0,) * len(sources)
        """For each source, the index before which keys equal to `key` go."""
        self.asked: SearchPass | None = None
        """The bits that the next pass counts; None when the key is found."""
        self._lock = threading.Lock()
        self._ties = self._equal = 0
        """How many keys equal to `key` go, and how many there are."""
        if gone > 0:
            total = sum(source.count for source in sources)
            self._search: Search = search_threshold(gone, total=total, width=sources[0].width)
            self._begin(next(self._search))

    def _begin(self, asked: SearchPass) -> None:
        self.asked, self._left = asked, len(self.sources)
        self._counts: Ints | None = None
        self._taken: list[np.ndarray] = []

    def look(self, keys: np.ndarray) -> None:
        """Count the keys of one block for this pass, or take them if few are left."""
        asked, width = self.asked, self.sources[0].width
        if asked is None:
            return
        if asked.needs_keys:
            taken = asked.select_keys(keys, width)
            with self._lock:
                self._taken.append(taken)
            return
        counts = asked.count_keys(keys, width)
        with self._lock:
            self._counts = counts if self._counts is None else self._counts + counts

    def finish(self) -> None:
        """Go on with the search if this was the last tensor of the pass."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._go_on(self._counts, self._taken)

    def join(self, ranks: Ranks) -> None:
        """Go on with the search when all ranks have looked at their tensors."""
        counts = None if self._counts is None else self._counts.tobytes()
        taken = [(keys.dtype.str, keys.tobytes()) for keys in self._taken]
        messages = exchange(ranks, write_document(PASS, (counts, taken)), common=b"")
        passes = [read_document(PASS, message) for message in messages]
        all_counts = [np.frombuffer(raw, np.int64) for raw, _ in passes if raw is not None]
        all_taken = [np.frombuffer(raw, kind) for _, keys in passes for kind, raw in keys]
        self._go_on(np.sum(all_counts, axis=0) if all_counts else None, all_taken)

    def _go_on(self, counts: Ints | None, taken: Sequence[np.ndarray]) -> None:
        keys = np.concatenate([np.empty(0, np.uint64), *taken])
        try:
            self._begin(self._search.send(keys if counts is None else counts))
        except StopIteration as done:
            self.asked, self._counts, self._taken = None, None, []
            self.key, self._ties = done.value.key, done.value.ties
            if counts is None:
                self._equal = int(np.count_nonzero(keys == self.key))
            else:
                self._equal = int(counts[self.key % len(counts)])

    def locate(self) -> None:
        """Find where the first of the equal keys that go end. Reads up to there, unless all go."""
        ties, sources = self._ties, self.sources
        if ties == self._equal:
            self.before = tuple(source.count if ties else 0 for source in sources)
            return
        for number, source in enumerate(sources):
            for block in source.blocks():
                places = np.flatnonzero(source.read(block) == self.key)
                if ties <= len(places):
                    first = source.place(find_first_index(source.tensor, block))
                    passed = [earlier.count for earlier in sources[:number]]
                    later = [0] * (len(sources) - number - 1)
                    self.before = (*passed, first + int(places[ties - 1]) + 1, *later)
                    return
                ties -= len(places)
        problem = "a tensor changed while its threshold was looked for; nothing was written"
        raise NotCommitted(f"{problem}: start again when nobody writes to it")


class KeyPass:
    def __init__(self, searching: KeySearch, number: int, *, shared: bool = False) -> None:
        self._search, self._shared = searching, shared
        self.source = searching.sources[number]

    def add(self, start: int, values: np.ndarray) -> None:
        self._search.look(self.source.of(values))

    def result(self) -> None:
        if not self._shared:
            self._search.finish()


def select(
    searches: Sequence[KeySearch], *, threads: int = 1, progress: Progress | None = None
) -> None:
    """Carry out searches, all of them together, until each knows what goes."""
    for searching in searches:
        while searching.asked is not None and isinstance(searching.sources[0], RandomKeys):
            # Keys that do not depend on the values are found without reading anything.
            _count_random_keys(searching, searching.sources[0], threads)
            searching.finish()
    while waiting := [
        KeyPass(one, number)
        for one in searches
        if one.asked is not None
        for number in range(len(one.sources))
    ]:
        _look(waiting, threads, progress)
    run_all([one.locate for one in searches], threads)


def _count_random_keys(searching: KeySearch, keys: RandomKeys, threads: int) -> None:
    def look(block: ElementBlock) -> None:
        with computing():
            searching.look(keys.read(block))

    run_all([partial(look, block) for block in keys.blocks()], threads)


def _look(waiting: Sequence[KeyPass], threads: int, progress: Progress | None) -> None:
    cuts = [one.source.blocks() for one in waiting]
    tensors = [one.source.tensor for one in waiting]
    scan(tensors, waiting.__getitem__, cuts.__getitem__, threads=threads, progress=progress)


PASS = message_type("counts of a pass", tuple[bytes | None, list[tuple[str, bytes]]])


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
    found = divide_work(ranks, nbytes_alone, search, tuple[int, tuple[int, ...]])
    for one, (key, before) in zip(alone, found, strict=True):
        one.key, one.before = key, before
    for one in (one for one in searches if len(one.sources) > 1):
        nbytes = np.array([source.tensor.nbytes for source in one.sources], np.int64)
        own = np.flatnonzero(
            assign_evenly(nbytes, np.zeros(ranks.size, np.int64)) == ranks.size - 1 - ranks.rank
        ).tolist()
        while one.asked is not None:
            with shared_errors(ranks):
                _look([KeyPass(one, number, shared=True) for number in own], threads, progress)
            one.join(ranks)

        def locate(numbers: list[int], one: KeySearch = one) -> list[FoundKey]:
            for _ in numbers:
                one.locate()
            return [(one.key, one.before)] * len(numbers)

        ((_, one.before),) = divide_work(ranks, [1], locate, tuple[int, tuple[int, ...]])
