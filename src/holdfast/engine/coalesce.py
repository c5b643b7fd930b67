"""Which neighbouring ranges are read together? The one place where that is decided, whatever becomes of the bytes.

Reading through a gap costs its bytes; skipping it costs a system call. Four rules, all bounded:

1. A gap of at most `free_gap` bytes is always read through: at memory speed it takes less time than the call that skips it.
2. Larger gaps, up to `max_gap`, are read through smallest first, until together they reach a part of the wanted bytes. Gaps of one
   size are read through all or none: strided ranges of which some are joined would be neither one read nor a row of equal ones.
3. A range of `alone` bytes or more is read by itself: the call costs nothing beside it, and it can go straight into place.
4. Ranges that begin in two blocks of the file are not joined, so that threads share the work and scratch memory stays small.

So the over-read of a plan is bounded by its policy, plus gaps that are cheaper than their system calls. There is a policy for each
medium; they stand here side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.value import Value, replace


class Policy(Value, frozen=True):
    """How far reads may be joined. As it is made, for what is read to memory."""

    free_gap: int = 512
    """Gaps up to this many bytes never split a read. A `preadv` from Python takes 1 to 2 µs: some kilobytes at memory's speed."""
    max_gap: int = 1 << 20
    """Larger gaps always do: a megabyte of reading is more than any seek costs."""
    over_read: float = 0.04
    """The part of the wanted bytes that may be read in vain to save calls."""
    alone: int = 256 << 10
    """Ranges from this length on are joined with nothing: some 50 µs of copying, beside which a call is nothing, and a second copy
    out of scratch memory is not."""
    block: int = 8 << 20
    """Joined ranges all begin in one block of this many bytes, counted from the start of the file."""


MEMORY = Policy()
"""Tensors and slices of them, to arrays of any strides."""

REMOTE = Policy(free_gap=64 << 10, max_gap=1 << 20, over_read=0.1, alone=4 << 20, block=8 << 20)
"""Object stores, where a request takes 20 ms or more: as long as it takes to read a megabyte."""

RECORDS = Policy(free_gap=16 << 10, max_gap=16 << 10, over_read=0.0, block=4 << 20)
"""Whole records of an archive, between which are headers and padding: below 200 bytes in almost all files."""

HEADERS = Policy(free_gap=16 << 10, max_gap=16 << 10, over_read=0.0, block=1 << 20)
"""Headers of records: a call takes about as long as copying 16 KiB, and a disk gives them for the price of one page."""

SUMS = Policy(free_gap=512, max_gap=512, over_read=0.0, alone=4 << 20, block=4 << 20)
"""Bytes that are summed or compared and dropped: those that touch are read together, and with them the headers and the padding that
an archive has between small records, which take less time than a call for each. All of it passes through scratch memory, of which a
few megabytes a thread stay in the cache that reading and summing share."""

PAGE_LOCKED = Policy(free_gap=4096, max_gap=1 << 20, over_read=1 / 16, alone=1 << 62, block=1 << 62)
"""Blocks that a GPU copies from: no read goes straight into place, so long ones are joined as well. Who lays them out cuts them."""


class Ranges(Value, frozen=True, eq=False):
    """Ranges of files as columns: a checkpoint may have a million of them."""

    keys: Sequence[str]
    files: Ints
    """The file of each, as a position in `keys`."""
    starts: Ints
    nbytes: Ints

    @classmethod
    def of(cls, places: Sequence[tuple[str, int, int]]) -> Ranges:
        keys: dict[str, int] = {}
        files = np.fromiter((keys.setdefault(key, len(keys)) for key, _, _ in places), np.int64, len(places))
        starts = np.fromiter((start for _, start, _ in places), np.int64, len(places))
        return cls(list(keys), files, starts, np.fromiter((nbytes for _, _, nbytes in places), np.int64, len(places)))

    @classmethod
    def joined(cls, parts: Sequence[Ranges]) -> Ranges:
        keys: dict[str, int] = {}
        files: list[Ints] = []
        for part in parts:
            numbers = np.array([keys.setdefault(key, len(keys)) for key in part.keys], np.int64)
            files.append(numbers[part.files] if len(part) else part.files)
        starts, nbytes = np.concatenate([part.starts for part in parts]), np.concatenate([part.nbytes for part in parts])
        return cls(list(keys), np.concatenate(files), starts, nbytes)

    def some(self, wanted: Bools) -> Ranges:
        return Ranges(self.keys, self.files[wanted], self.starts[wanted], self.nbytes[wanted])

    def place(self, number: int) -> tuple[str, int, int]:
        return self.keys[self.files.item(number)], self.starts.item(number), self.nbytes.item(number)

    def __len__(self) -> int:
        return len(self.files)


class Reads(Value, frozen=True):
    """Ranges of one file, joined into reads. Arrays, because a column of a tall matrix has more of them than objects should be."""

    key: str
    starts: Ints
    stops: Ints
    heads: Ints
    """Number of the first range of each read; one more entry marks the end."""

    @property
    def nbytes(self) -> int:
        return int((self.stops - self.starts).sum())


class Parts(Reads, frozen=True):
    """Reads of ranges, which may be cut where blocks of the file end."""

    owners: Ints
    """For each part, the number of its range."""
    begins: Ints
    ends: Ints

    def columns(self, number: int) -> tuple[Ints, Ints, Ints]:
        """Range, start and stop of each part in one read, as columns."""
        span = slice(*self.heads[number : number + 2].tolist())
        return self.owners[span], self.begins[span], self.ends[span]

    def of(self, number: int) -> Iterator[tuple[int, int, int]]:
        owners, begins, ends = self.columns(number)
        return zip(owners.tolist(), begins.tolist(), ends.tolist(), strict=True)


def coalesce(starts: Ints, stops: Ints, policy: Policy) -> Ints:
    """Positions where a new joined read begins, for ranges that are sorted by start. The first is 0 unless there are none."""
    if not len(starts):
        return np.zeros(0, np.int64)
    reach = np.maximum.accumulate(stops)
    gaps, first = starts[1:] - reach[:-1], starts.item(0)
    one_block = first // policy.block == starts.item(-1) // policy.block
    if one_block and reach.item(-1) - first < policy.alone and not np.count_nonzero(gaps > policy.free_gap):
        # Near each other, short together and in one block: one read.
        return np.zeros(1, np.int64)
    gaps = np.maximum(gaps, 0)
    long = stops - starts >= policy.alone
    # What overlaps is joined whatever its length: its bytes are read once.
    joinable = (gaps <= policy.max_gap) & ~((long[1:] | long[:-1]) & (starts[1:] >= reach[:-1]))
    joined = joinable & (gaps <= policy.free_gap)
    (candidates,) = (joinable & ~joined).nonzero()
    if len(candidates):
        budget = int(int((stops - starts).sum()) * policy.over_read)
        cheapest = candidates[gaps[candidates].argsort(kind="stable")]
        sizes = gaps[cheapest]
        affordable = int(sizes.cumsum().searchsorted(budget, side="right"))
        if affordable < len(sizes):
            affordable = int(sizes.searchsorted(sizes[affordable]))
        joined[cheapest[:affordable]] = True
    blocks = starts // policy.block
    return np.concatenate(([True], ~joined | (blocks[1:] != blocks[:-1]))).nonzero()[0]


def _cut(starts: Ints, stops: Ints, block: int) -> tuple[Ints, Ints, Ints]:
    """Cut ranges, none of them empty, where blocks of the file end. Of each part: the number of its range, start and stop."""
    first = starts // block
    counts = (stops - 1) // block - first + 1
    owners = np.arange(len(starts), dtype=np.int64).repeat(counts)
    numbers = np.arange(len(owners), dtype=np.int64) - (counts.cumsum() - counts).repeat(counts)
    edges = (first[owners] + numbers) * block
    return owners, np.maximum(edges, starts[owners]), np.minimum(edges + block, stops[owners])


def join_parts(key: str, starts: Ints, stops: Ints, policy: Policy, *, whole: bool = False) -> Parts:
    """Reads of at most a block each that have every byte of these ranges, which come in any order and may be empty. A range that is
    to be read `whole` is not cut: its read is as long as it is, however long."""
    (filled,) = (stops > starts).nonzero()
    begins, ends = starts[filled], stops[filled]
    owners, begins, ends = (np.arange(len(filled)), begins, ends) if whole else _cut(begins, ends, policy.block)
    order = begins.argsort(kind="stable")
    owners, begins, ends = filled[owners[order]], begins[order], ends[order]
    heads = coalesce(begins, ends, policy)
    reach = np.maximum.reduceat(ends, heads) if len(heads) else ends
    return Parts(key, begins[heads], reach, np.concatenate((heads, (len(begins),))), owners, begins, ends)


def join_files(ranges: Ranges, policy: Policy, *, whole: bool = False) -> list[Parts]:
    """The reads of ranges of several files, as `join_parts`; owners are positions among all of them."""
    if len(ranges.keys) == 1:
        return [join_parts(ranges.keys[0], ranges.starts, ranges.starts + ranges.nbytes, policy, whole=whole)]
    found = []
    for file in np.unique(ranges.files).tolist():
        (numbers,) = (ranges.files == file).nonzero()
        starts = ranges.starts[numbers]
        parts = join_parts(ranges.keys[file], starts, starts + ranges.nbytes[numbers], policy, whole=whole)
        found.append(replace(parts, owners=numbers[parts.owners]))
    return found


def gaps(ranges: Ranges, sizes: Mapping[str, int]) -> Ranges:
    """What ranges leave of files of these sizes: between them by their starts, then behind the last of each file."""
    keys = list(sizes)
    inner: list[tuple[Ints, Ints, Ints]] = []
    tails: list[tuple[int, int, int]] = []
    for number, key in enumerate(keys):
        own = ranges.files == ranges.keys.index(key) if key in ranges.keys else np.zeros(len(ranges), np.bool_)
        starts = ranges.starts[own]
        order = starts.argsort(kind="stable")
        starts, stops = starts[order], (starts + ranges.nbytes[own])[order]
        reach = np.maximum.accumulate(np.concatenate(((0,), stops)))
        (open_at,) = (starts > reach[:-1]).nonzero()
        inner.append((np.full(len(open_at), number), reach[open_at], starts[open_at] - reach[open_at]))
        if reach[-1] < sizes[key]:
            tails.append((number, int(reach[-1]), sizes[key] - int(reach[-1])))
    files, starts, nbytes = (np.concatenate([np.zeros(0, np.int64), *columns]) for columns in zip(*inner, strict=True))
    order = starts.argsort(kind="stable")
    last = np.array(tails, np.int64).reshape(-1, 3).T
    first = files[order], starts[order], nbytes[order]
    return Ranges(keys, *(np.concatenate(pair) for pair in zip(first, last, strict=True)))
