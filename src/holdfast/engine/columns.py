"""Read columns: many small ordinary tensors by few long reads, each array copied out of scratch memory.

1. Ranges of each file are sorted and joined by the same rule as any others (plan/coalesce.py).
2. A read is done; each array is a copy of its part, and owns it: to keep one of them keeps nothing else.
3. The checksum of each part is compared as it lies in the cache.

What is long is left to others, who read it straight into its place. Where anything is wrong nothing is given, so that whoever asked
reads again in the ordinary way, which says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import compress

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.columns import FEW, Columns
from holdfast.core.crc import crc32
from holdfast.core.protocols import Store
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.engine.threads import run_all
from holdfast.engine.transfer import INLINE_NBYTES, TASK_READS, Scratch
from holdfast.errors import HoldfastError
from holdfast.plan.coalesce import Policy, coalesce

SMALL_NBYTES = 16 << 10
"""Above this a call for each is little beside the copy, which other threads can do meanwhile."""

SHARED_NBYTES = 2 << 10
"""Of tensors that are shorter than this on the average, one thread makes all arrays: to make one takes the interpreter lock, which
two threads would only hand to each other."""


class _Changed(Exception):
    """Bytes that are not those of the checksum. Nobody outside sees it."""


def read_columns(
    store: Store, columns: Columns, policy: Policy, *, verify: bool, threads: int
) -> tuple[Mapping[int, np.ndarray], int]:
    """The arrays of those that are small, and how many bytes were read; nothing where one cannot be had as it was written."""
    small = np.flatnonzero(columns.nbytes <= SMALL_NBYTES)
    near = not (store.requests or store.in_order)
    if not near or len(small) < FEW * max(len(columns.keys), 1):
        return {}, 0
    arrays = _Arrays(store, columns, verify=verify)
    work: list[Callable[[], None]] = []
    total = 0
    order = small[np.lexsort((columns.starts[small], columns.files[small]))]
    for chosen in np.split(order, np.flatnonzero(np.diff(columns.files[order])) + 1):
        key = columns.keys[int(columns.files[chosen[0]])]
        joined, single = _reads(columns, chosen, policy)
        work += [partial(arrays.read, key, (start, stop), members) for start, stop, members in joined]
        work += [partial(arrays.scattered, key, single[at : at + TASK_READS]) for at in range(0, len(single), TASK_READS)]
        total += sum(stop - start for start, stop, _ in joined) + int(columns.nbytes[single].sum())
    wanted = int(columns.nbytes[small].sum())
    alone = wanted < INLINE_NBYTES or wanted < SHARED_NBYTES * len(small)
    try:
        run_all(work, 1 if alone else threads)
    except (HoldfastError, _Changed):
        return {}, 0
    return arrays.made(), total


def fetch(store: Store, tensor: LazyTensor, *, verify: bool) -> np.ndarray | None:
    """A small ordinary tensor by itself: one call straight into the array. None where it cannot be had so, as it was written."""
    place = tensor.file_range()
    if place is None or place[2] > SMALL_NBYTES or store.requests or store.in_order:
        return None
    key, start, nbytes, crc = place
    if not nbytes:
        return np.empty(tensor.shape, tensor.dtype.numpy)
    try:
        (data,) = store.scattered(key, (start,), (nbytes,))
    except HoldfastError:
        return None
    if verify and crc != NO_CRC and crc != crc32(data):
        return None
    # To copy a few bytes takes less than to tell the system where they shall go.
    return np.ndarray(tensor.shape, tensor.dtype.numpy, data).copy()


def _reads(columns: Columns, chosen: Ints, policy: Policy) -> tuple[list[tuple[int, int, Ints]], Ints]:
    """Reads of one file: first byte, the byte after the last, and the tensors in it; and the tensors that are read by themselves.

    `chosen` is in the order of the file.
    """
    reads: list[tuple[int, int, Ints]] = []
    empty = columns.nbytes[chosen] == 0
    if empty.any():
        # What has no bytes lies nowhere, whatever its place.
        reads.append((0, 0, chosen[empty]))
        chosen = chosen[~empty]
    starts = columns.starts[chosen]
    stops = starts + columns.nbytes[chosen]
    heads = coalesce(starts, stops, policy)
    if not len(heads):
        return reads, chosen
    edges = np.append(heads, len(chosen))
    several = np.flatnonzero(np.diff(edges) > 1)
    reach = np.maximum.reduceat(stops, heads)
    for first, last, stop in zip(edges[several].tolist(), edges[several + 1].tolist(), reach[several].tolist(), strict=True):
        reads.append((int(starts[first]), stop, chosen[first:last]))
    return reads, chosen[heads[np.diff(edges) == 1]]


class _Arrays:
    """The arrays of columns, as they come. Every thread makes others."""

    def __init__(self, store: Store, columns: Columns, *, verify: bool) -> None:
        self._store, self._columns, self._verify = store, columns, verify
        self._scratch = Scratch()
        self._out: list[np.ndarray | None] = [None] * len(columns)

    def made(self) -> dict[int, np.ndarray]:
        """By their numbers."""
        return {number: array for number, array in zip(self._columns.numbers, self._out, strict=True) if array is not None}

    def read(self, key: str, span: tuple[int, int], members: Ints) -> None:
        """One read, and the arrays that lie in it."""
        columns, out, (start, stop) = self._columns, self._out, span
        data = self._scratch.of(stop - start)
        if not data.nbytes:
            for number in members.tolist():
                out[number] = np.empty(columns.shapes[number], columns.dtypes[number])
            return
        self._store.read(key, start, data)
        begins = columns.starts[members] - start
        array, shapes, dtypes, places = np.ndarray, columns.shapes, columns.dtypes, begins.tolist()
        for number, place in zip(members.tolist(), places, strict=True):
            out[number] = array(shapes[number], dtypes[number], data, place).copy()
        recorded = columns.crcs[members] != NO_CRC
        if self._verify and recorded.any():
            ends = (begins + columns.nbytes[members]).tolist()
            _compare(
                [crc32(data[place:end]) for place, end in compress(zip(places, ends, strict=True), recorded)],
                columns,
                members[recorded],
            )

    def scattered(self, key: str, members: Ints) -> None:
        """The arrays of tensors with much between them."""
        columns, out = self._columns, self._out
        pieces = self._store.scattered(key, columns.starts[members].tolist(), columns.nbytes[members].tolist())
        numbers = members.tolist()
        shapes, dtypes = [columns.shapes[number] for number in numbers], [columns.dtypes[number] for number in numbers]
        if shapes[0] and shapes.count(shapes[0]) == dtypes.count(dtypes[0]) == len(numbers):
            # The rows of one array, of which there are views in half of the time that it takes to make arrays.
            rows: Iterable[np.ndarray] = np.frombuffer(b"".join(pieces), dtypes[0]).reshape(-1, *shapes[0])
        else:
            rows = map(np.ndarray, shapes, dtypes, pieces)
        for number, row in zip(numbers, rows, strict=True):
            out[number] = row.copy()
        recorded = columns.crcs[members] != NO_CRC
        if self._verify and recorded.any():
            _compare([crc32(piece) for piece in compress(pieces, recorded)], columns, members[recorded])


def _compare(sums: list[int], columns: Columns, members: Ints) -> None:
    """Raise where the bytes of one have another checksum than the file records."""
    if (np.array(sums, np.int64) != columns.crcs[members]).any():
        raise _Changed
