"""Read ranges of files from end to end, each byte once, for their checksums alone.

1. Ranges are cut where blocks of the file end, and parts that touch, or almost, are read together: a gigabyte becomes 256 reads,
   and so do the hundred thousand small tensors in it.
2. A thread reads into scratch memory that it keeps, and takes the CRC-32 of each part while it is in the cache.
3. The CRCs of parts combine to those of the ranges. Most ranges are one part; where there are a million, all of this is columns.

Nothing stops at an error: a read that fails is tried again part by part, and the error belongs to the ranges whose parts fail.

`StorageChecks` sums what is read for other reasons, as it passes by, and compares it with what the file records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.chunk import Storage
from holdfast.core.crc import BlockCrcs, crc32
from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.group import Ranks, exchange
from holdfast.core.protocols import Request, Store, group_by_source
from holdfast.core.value import Value, replace
from holdfast.engine.coalesce import SUMS, JoinedReads, RangePieces, Ranges, join_ranges
from holdfast.engine.ranges import read_joined, split_into_tasks
from holdfast.engine.threads import DEFAULT_THREADS, Scratch, run_reads
from holdfast.errors import (
    Corrupted,
    HoldfastError,
    Replaced,
    StoreError,
    Truncated,
    drop_tracebacks,
    error_context,
)

SWEPT = message_type("list of checksums of a rank", tuple[list[bytes], dict[int, tuple[str, str]]])
ERRORS = {kind.__name__: kind for kind in (StoreError, Truncated, Corrupted, Replaced)}
"""What reading a file may raise, by name."""

Progress = Callable[
    [int], None
]  # Called with how many more bytes are done, from several threads at once.


class SweptRange(Value, frozen=True):
    key: str
    start: int
    nbytes: int
    summed: bool = True  # Whether the CRC is wanted; without, the bytes are read and dropped, so that errors show.

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


class RangeSums:
    """The sums of ranges of one store. Run every task of `tasks`, on any thread, and then ask for the outcomes."""

    def __init__(
        self,
        store: Store,
        ranges: Iterable[SweptRange] | Ranges,
        *,
        summed: Bools | None = None,
        block: int = SUMS.block_nbytes,
    ) -> None:
        """Take ranges one by one, or as columns; `summed` says of which the CRC is wanted (by default of all)."""
        if not isinstance(ranges, Ranges):
            given = list(ranges)
            ranges = Ranges.from_tuples([(swept.key, swept.start, swept.nbytes) for swept in given])
            summed = np.fromiter((swept.summed for swept in given), np.bool_, len(given))
        self._store, self._ranges = store, ranges
        self._summed = np.ones(len(ranges), np.bool_) if summed is None else summed
        self._policy = replace(SUMS, block_nbytes=block)
        starts, stops = ranges.starts, ranges.starts + ranges.nbytes
        self._cut = (
            stops - 1
        ) // block > starts // block  # Which lie in several blocks, and so in several parts.
        self._whole: Ints = np.zeros(
            len(ranges), np.int64
        )  # The CRC of each range that lies in one block.
        self._sums = {
            number: BlockCrcs() for number in (self._cut & self._summed).nonzero()[0].tolist()
        }
        self._known: Bools = np.zeros(len(ranges), np.bool_)  # Which of them were summed here.
        self.errors: dict[
            int, HoldfastError
        ] = {}  # What kept ranges from being read, by their numbers.

    def reads(self) -> list[JoinedReads]:
        """The ranges of each file, cut and joined; each byte of each range is in one part."""
        return join_ranges(self._ranges, self._policy)

    def tasks(self, progress: Progress | None = None) -> list[Callable[[], None]]:
        """What is to be done, about a block each. They raise nothing that is about the files."""
        scratch = Scratch()
        return [
            partial(self._sum_reads, reads, first, last, scratch=scratch, progress=progress)
            for reads in self.reads()
            for first, last in split_into_tasks(reads, self._policy.block_nbytes)
        ]

    def _sum_reads(
        self,
        reads: JoinedReads,
        first: int,
        last: int,
        *,
        scratch: Scratch,
        progress: Progress | None,
    ) -> None:
        """Do joined reads [first, last) of one file."""
        for number in range(first, last):
            pieces = reads.select_pieces(number)
            try:
                data = read_joined(self._store, reads, number, scratch)
            except HoldfastError:
                for owner, begin, end in pieces.rows():
                    self.try_again(owner, begin, scratch.reserve(end - begin))
            else:
                self.add(pieces, int(reads.starts[number]), data)
            if progress is not None:
                # Without what lies between the pieces: nobody counts that.
                progress(int((pieces.stops - pieces.starts).sum()))

    def add(self, pieces: RangePieces, origin: int, data: memoryview) -> None:
        """Sum up pieces of ranges whose sums are wanted; byte `origin` of the file comes first."""
        wanted = self._summed[pieces.range_indices]
        if not wanted.all():
            pieces = pieces.select(np.flatnonzero(wanted))
        owners, begins, ends = pieces.range_indices, pieces.starts, pieces.stops
        places = zip((begins - origin).tolist(), (ends - origin).tolist(), strict=True)
        crcs = [crc32(data[begin:end]) for begin, end in places]
        cut = self._cut[owners]
        if cut.any():
            for at in np.flatnonzero(cut).tolist():
                self._sums[int(owners[at])].add_crc(
                    int(begins[at]), int(ends[at] - begins[at]), crcs[at]
                )
            self._whole[owners[~cut]] = np.array(crcs, np.int64)[~cut]
            self._known[owners[~cut]] = True
        else:
            self._whole[owners] = crcs
            self._known[owners] = True

    def try_again(self, number: int, start: int, out: memoryview) -> None:
        try:
            self._store.read(self._ranges.keys[int(self._ranges.files[number])], start, out)
        except HoldfastError as error:
            self.errors.setdefault(number, drop_tracebacks(error))
        else:
            pieces = RangePieces(
                np.array([number]), np.array([start]), np.array([start + out.nbytes])
            )
            self.add(pieces, start, out)

    def join(self, ranks: Ranks) -> None:
        """Take what the other ranks have summed, each by its own tasks."""
        if ranks.size == 1:
            return
        (numbers,) = self._known.nonzero()
        blocks = [
            (number, *block) for number, sums in self._sums.items() for block in sums.blocks()
        ]
        errors = {
            number: (type(error).__name__, error.message) for number, error in self.errors.items()
        }
        columns = [
            np.asarray(one, "<i8").tobytes() for one in (numbers, self._whole[numbers], blocks)
        ]
        for other in exchange(
            ranks, write_document(SWEPT, (columns, errors)), common=self._ranges.nbytes.tobytes()
        ):
            (own, crcs, cut), failed = read_document(SWEPT, other)
            self._whole[np.frombuffer(own, "<i8")] = np.frombuffer(crcs, "<i8")
            for number, *block in np.frombuffer(cut, "<i8").reshape(-1, 4).tolist():
                self._sums[number].add_crc(*block)
            for number, (kind, message) in failed.items():
                self.errors.setdefault(number, ERRORS.get(kind, StoreError)(message))

    def crcs(self) -> Ints:
        """The CRC of each range; 0 where it was not wanted. Those of `errors` mean nothing."""
        found = self._whole.copy()
        for number, sums in self._sums.items():
            found[number] = sums.crc32()
        return found

    def outcome(self, number: int) -> int | HoldfastError:
        """The CRC of a range (0 where it was not wanted), or what kept it from being read."""
        error = self.errors.get(number)
        if error is not None:
            return error
        sums = self._sums.get(number)
        return int(self._whole[number]) if sums is None else sums.crc32()

    def crc32(self, number: int, *, name: str) -> int:
        """The CRC of a range; raises what kept it from being read, as an error of the tensor of this name."""
        outcome = self.outcome(number)
        if isinstance(outcome, HoldfastError):
            # Not the one that is kept: it would keep this frame, and all above it.
            del self.errors[number]
            with error_context(tensor=name):
                try:
                    raise outcome
                finally:
                    del outcome
        return outcome


def find_whole_storages(requests: Sequence[Request]) -> dict[Storage, str]:
    """The storages that record a checksum and will be read from end to end, with the tensor that reads them."""
    found: dict[Storage, str] = {}
    for request in requests:
        tensor = request.tensor
        for chunk in tensor.chunks:
            storage = chunk.storage
            if storage.crc32 is None or storage in found or not storage.nbytes:
                continue
            fills_storage = chunk.box.count * tensor.dtype.bits == storage.nbytes * 8
            if fills_storage and chunk.byte_range(tensor.dtype) == (0, storage.nbytes):
                found[storage] = tensor.name
    return found


class StorageChecks:
    """Collects block checksums from many threads; `finish` raises for the first storage that is damaged."""

    def __init__(self, storages: dict[Storage, str]) -> None:
        self._storages = storages
        self._sums = {storage: BlockCrcs() for storage in storages}

    def wants(self, storage: Storage) -> bool:
        return storage in self._sums

    def add(self, storage: Storage, start: int, data: memoryview) -> None:
        sums = self._sums.get(storage)
        if sums is not None:
            sums.add(start - storage.start, data)

    def damaged(self) -> Iterable[tuple[Storage, str, int]]:
        """The storages whose blocks are all here and do not sum to the record: with the tensor and what was found."""
        for storage, sums in self._sums.items():
            if sums.is_complete(storage.nbytes) and (found := sums.crc32()) != storage.crc32:
                yield storage, self._storages[storage], found

    def finish(self) -> None:
        for storage, tensor, found in self.damaged():
            raise build_damage_error(storage, tensor, found)


def build_damage_error(storage: Storage, tensor: str, found: int) -> Corrupted:
    return Corrupted(
        f"the {storage.nbytes:,} bytes of {storage.label or 'this tensor'} do not have the checksum that the file records: "
        "they changed after they were written; get the file again, or read it anyway in Python with "
        "holdfast.open(path, verify=False)",
        file=storage.key, tensor=tensor, offset=storage.start, expected=storage.crc32, found=found,
    )  # fmt: skip


def check_before_reading(requests: Sequence[Request]) -> None:
    """Compare the checksums of what these requests will read whole, before any of it is read to its place. Raises `Corrupted` for
    the first storage that is damaged. It is one more reading, of the page cache where memory allows."""
    for source, mine in group_by_source(requests).items():
        storages = find_whole_storages(mine)
        sweep = RangeSums(
            source.store, [SweptRange(one.key, one.start, one.nbytes) for one in storages]
        )
        run_reads(sweep.tasks(), DEFAULT_THREADS, stores=[source.store])
        for number, (storage, tensor) in enumerate(storages.items()):
            if (found := sweep.crc32(number, name=tensor)) != storage.crc32:
                raise build_damage_error(storage, tensor, found)
