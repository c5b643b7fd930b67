"""Checksums of byte ranges of files.

`RangeSums` reads ranges only for their checksums, each byte once:

1. Ranges are cut where blocks of the file end. Pieces that touch, or almost do, are one read. So a
   gigabyte is read by 256 calls, even if it consists of a hundred thousand small tensors.
2. A thread reads into scratch memory, and computes the CRC-32 of each piece while it is in the
   cache.
3. The checksum of a range is combined from those of its pieces. Most ranges have one piece. There
   can be a million ranges, so their checksums are an array.

An error does not stop the others. If a read fails, each of its pieces is read again by itself, and
the error belongs to the ranges whose pieces cannot be read.

`StorageChecks` is for bytes that are read for another reason: it compares checksums on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from msgspec import Struct

from holdfast.core.arrays import Bools, Ints
from holdfast.core.chunk import Storage
from holdfast.core.crc import BlockCrcs, crc32
from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.group import Ranks, exchange
from holdfast.core.protocols import Request, Store, group_by_source
from holdfast.core.value import replace
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

READ_ERRORS = {kind.__name__: kind for kind in (StoreError, Truncated, Corrupted, Replaced)}
"""The errors that reading a file can raise, by name."""

Progress = Callable[[int], None]
"""Called with the bytes that were done since the last call, from several threads at once."""


class RankChecksums(Struct):
    """What one rank has computed, for the other ranks. A range is its index."""

    range_indices: bytes
    """The ranges with one piece that this rank has read, as 64-bit integers."""
    crcs: bytes
    """The CRC-32 of each of these ranges, as 64-bit integers."""
    pieces: bytes
    """Pieces of other ranges, as rows of four 64-bit integers: the range, the first byte, the
    length and the CRC-32."""
    errors: dict[int, tuple[str, str]]
    """For each range that cannot be read, the class of the error and its message."""


RANK_CHECKSUMS = message_type("list of checksums of a rank", RankChecksums)


class RangeSums:
    """The checksums of ranges of one store.

    Run every task of `tasks`, on any thread. After that the checksums can be asked for.
    """

    def __init__(
        self,
        store: Store,
        ranges: Ranges,
        *,
        needs_crc: Bools | None = None,
        block_nbytes: int = SUMS.block_nbytes,
    ) -> None:
        """Prepare to read ranges. Nothing is read before the tasks run.

        Args:
            store: The store.
            ranges: The ranges.
            needs_crc: For each range whether its checksum is needed, by default all. The other
                ranges are read as well, because a damaged file may not be readable there.
            block_nbytes: The most bytes that are read at a time.
        """
        self.errors: dict[int, HoldfastError] = {}
        """For each range that cannot be read, the error, by the index of the range."""
        self._store = store
        self._ranges = ranges
        self._policy = replace(SUMS, block_nbytes=block_nbytes)
        if needs_crc is None:
            needs_crc = np.ones(len(ranges), np.bool_)
        self._needs_crc = needs_crc

        # A range whose first and last byte are in different blocks of the file is cut into pieces.
        # Its checksum is combined later.
        first_blocks = ranges.starts // block_nbytes
        last_blocks = (ranges.starts + ranges.nbytes - 1) // block_nbytes
        self._is_cut = last_blocks > first_blocks
        cut_indices = np.flatnonzero(self._is_cut & needs_crc).tolist()
        self._cut_crcs = {range_index: BlockCrcs() for range_index in cut_indices}
        # The checksums of the other ranges, and whether this process has computed them.
        self._crcs: Ints = np.zeros(len(ranges), np.int64)
        self._is_computed: Bools = np.zeros(len(ranges), np.bool_)

    def join_reads(self) -> list[JoinedReads]:
        """Return the reads of each file, which cover all ranges.

        Neighboring ranges are joined to one read. Long ranges are cut into pieces in several reads.
        Each byte of each range is in one piece of one read.
        """
        return join_ranges(self._ranges, self._policy)

    def tasks(self, progress: Progress | None = None) -> list[Callable[[], None]]:
        """Return the tasks that read the ranges, about a block each.

        If a file cannot be read, a task does not raise the error but adds it to `errors`, so that
        the other ranges are still read.

        Args:
            progress: Called with the bytes of ranges that were read.
        """
        scratch = Scratch()
        tasks: list[Callable[[], None]] = []
        for reads in self.join_reads():
            for first_read, stop_read in split_into_tasks(reads, self._policy.block_nbytes):
                read_indices = range(first_read, stop_read)
                tasks.append(partial(self._sum_reads, reads, read_indices, scratch, progress))
        return tasks

    def _sum_reads(
        self,
        reads: JoinedReads,
        read_indices: Iterable[int],
        scratch: Scratch,
        progress: Progress | None,
    ) -> None:
        """Do some of the reads of a file, and compute the checksums of their pieces.

        Args:
            reads: All reads of the file, each of which contains one or more pieces of ranges.
            read_indices: The reads to do.
            scratch: Memory for the data. Each thread has a buffer of its own in it.
            progress: Called with the bytes of the pieces.
        """
        for read_index in read_indices:
            pieces = reads.select_pieces(read_index)
            try:
                data = read_joined(self._store, reads, read_index, scratch)
            except HoldfastError:
                # One bad byte must not fail all ranges of the read, so each piece is tried alone.
                for range_index, start, stop in pieces.rows():
                    self._sum_piece(range_index, start, scratch.reserve(stop - start))
            else:
                self._add_pieces(pieces, reads.starts.item(read_index), data)
            if progress is not None:
                # The bytes of gaps between pieces were read, but belong to no range.
                progress((pieces.stops - pieces.starts).sum().item())

    def _sum_piece(self, range_index: int, start: int, out: memoryview) -> None:
        """Read one piece of a range by itself, and compute its checksum or record the error."""
        key = self._ranges.keys[self._ranges.files.item(range_index)]
        try:
            self._store.read(key, start, out)
        except HoldfastError as error:
            self.errors.setdefault(range_index, drop_tracebacks(error))
        else:
            # `_add_pieces` expects columns, so this is a list of pieces with one entry.
            stop = start + out.nbytes
            piece = RangePieces(np.array([range_index]), np.array([start]), np.array([stop]))
            self._add_pieces(piece, start, out)

    def _add_pieces(self, pieces: RangePieces, data_start: int, data: memoryview) -> None:
        """Compute and store the checksums of pieces of ranges that were read together.

        A piece that is a whole range has the checksum of the range. The checksums of pieces of cut
        ranges are collected, and combined when all of them have been read.

        Args:
            pieces: The pieces.
            data_start: The byte of the file that `data` starts with.
            data: The bytes from there on.
        """
        needs_crc = self._needs_crc[pieces.range_indices]
        if not needs_crc.all():
            pieces = pieces.select(np.flatnonzero(needs_crc))
        starts = (pieces.starts - data_start).tolist()
        stops = (pieces.stops - data_start).tolist()
        crcs = [crc32(data[start:stop]) for start, stop in zip(starts, stops, strict=True)]

        range_indices = pieces.range_indices
        is_cut = self._is_cut[range_indices]
        if is_cut.any():
            # Cut ranges are long, so there are few of them, and a loop is fast enough.
            for piece_index in np.flatnonzero(is_cut).tolist():
                piece_crcs = self._cut_crcs[range_indices.item(piece_index)]
                start = pieces.starts.item(piece_index)
                nbytes = pieces.stops.item(piece_index) - start
                piece_crcs.add_crc(start, nbytes, crcs[piece_index])
            whole_indices = range_indices[~is_cut]
            self._crcs[whole_indices] = np.array(crcs, np.int64)[~is_cut]
            self._is_computed[whole_indices] = True
        else:
            self._crcs[range_indices] = crcs
            self._is_computed[range_indices] = True

    def join(self, ranks: Ranks) -> None:
        """Exchange checksums with the other ranks, each of which has run some of the tasks.

        Afterwards every rank has all checksums and all errors. All ranks must call this.

        Args:
            ranks: The ranks that have read the same ranges together.
        """
        if ranks.size == 1:
            return
        computed_indices = np.flatnonzero(self._is_computed)
        piece_rows: list[tuple[int, ...]] = []
        for range_index, crcs in self._cut_crcs.items():
            piece_rows += [(range_index, *block) for block in crcs.blocks()]
        errors: dict[int, tuple[str, str]] = {}
        for range_index, error in self.errors.items():
            errors[range_index] = (type(error).__name__, error.message)
        rank_checksums = RankChecksums(
            range_indices=computed_indices.astype("<i8").tobytes(),
            crcs=self._crcs[computed_indices].astype("<i8").tobytes(),
            pieces=np.array(piece_rows, "<i8").tobytes(),
            errors=errors,
        )

        # `exchange` fails if the ranks do not have the same ranges, which `common` tells.
        message = write_document(RANK_CHECKSUMS, rank_checksums)
        for answer in exchange(ranks, message, common=self._ranges.nbytes.tobytes()):
            checksums = read_document(RANK_CHECKSUMS, answer)
            range_indices = np.frombuffer(checksums.range_indices, "<i8")
            self._crcs[range_indices] = np.frombuffer(checksums.crcs, "<i8")
            pieces = np.frombuffer(checksums.pieces, "<i8").reshape(-1, 4)
            for range_index, start, nbytes, crc in pieces.tolist():
                self._cut_crcs[range_index].add_crc(start, nbytes, crc)
            for range_index, (error_name, text) in checksums.errors.items():
                # Errors are sent by the name of their class. Any other class is a `StoreError`.
                error_class = READ_ERRORS.get(error_name, StoreError)
                self.errors.setdefault(range_index, error_class(text))

    def crcs(self) -> Ints:
        """Return the CRC-32 of each range.

        It is 0 for a range whose checksum is not needed, and meaningless for a range of `errors`.
        """
        crcs = self._crcs.copy()
        for range_index, piece_crcs in self._cut_crcs.items():
            crcs[range_index] = piece_crcs.crc32()
        return crcs

    def outcome(self, range_index: int) -> int | HoldfastError:
        """Return the CRC-32 of a range, or the error if the range cannot be read.

        The error is returned and not raised, so that the caller can report all damaged ranges. As
        in `crcs`, the CRC-32 is 0 if it is not needed.
        """
        error = self.errors.get(range_index)
        if error is not None:
            return error
        # A range that was cut into pieces has its checksums there.
        piece_crcs = self._cut_crcs.get(range_index)
        if piece_crcs is not None:
            return piece_crcs.crc32()
        return self._crcs.item(range_index)

    def crc32(self, range_index: int, *, name: str) -> int:
        """Return the CRC-32 of a range, or raise the error if the range cannot be read.

        Args:
            range_index: The index of the range.
            name: The name of the tensor of the range, which is added to the error.
        """
        outcome = self.outcome(range_index)
        if isinstance(outcome, HoldfastError):
            # A raised error refers to this frame and all frames above it. If this object or a
            # variable also kept the error, their memory would not be freed.
            del self.errors[range_index]
            with error_context(tensor=name):
                try:
                    raise outcome
                finally:
                    del outcome
        return outcome


def find_whole_storages(requests: Sequence[Request]) -> dict[Storage, str]:
    """Find the storages that requests read completely and whose checksum is recorded.

    Only these can be checked on the way, because a checksum is that of all bytes of a storage.

    Returns:
        For each storage the name of the first tensor that reads it.
    """
    tensor_names: dict[Storage, str] = {}
    for request in requests:
        tensor = request.tensor
        for chunk in tensor.chunks:
            storage = chunk.storage
            if storage.crc32 is None or storage in tensor_names or not storage.nbytes:
                continue
            # The chunk must have as many elements as the storage, and be the whole range of it.
            has_all_elements = chunk.box.count * tensor.dtype.bits == storage.nbytes * 8
            if has_all_elements and chunk.byte_range(tensor.dtype) == (0, storage.nbytes):
                tensor_names[storage] = tensor.name
    return tensor_names


class StorageChecks:
    """Compares the checksums of storages whose blocks are read by several threads, in any order."""

    def __init__(self, tensor_names: Mapping[Storage, str]) -> None:
        """Prepare to check storages.

        Args:
            tensor_names: The storages, each with the name of a tensor that reads it, for errors.
        """
        self._tensor_names = tensor_names
        self._crcs = {storage: BlockCrcs() for storage in tensor_names}

    def has_storage(self, storage: Storage) -> bool:
        """Return whether a storage is checked, so that its blocks must be passed to `add`."""
        return storage in self._crcs

    def add(self, storage: Storage, start: int, data: memoryview) -> None:
        """Add the checksum of a block to those of its storage, if this storage is checked.

        Args:
            storage: The storage.
            start: The first byte of the block in the file.
            data: The bytes of the block.
        """
        crcs = self._crcs.get(storage)
        if crcs is not None:
            crcs.add(start - storage.start, data)

    def finish(self) -> None:
        """Compare the checksums of all storages whose blocks have all been added.

        Raises:
            Corrupted: A storage does not have the checksum that its file records.
        """
        for storage, crcs in self._crcs.items():
            if not crcs.is_complete(storage.nbytes):
                # Some blocks were not read, so there is no checksum of the whole storage.
                continue
            crc = crcs.crc32()
            if crc != storage.crc32:
                raise build_damage_error(storage, self._tensor_names[storage], crc)


def build_damage_error(storage: Storage, tensor: str, found: int) -> Corrupted:
    """Return the error for a storage with a wrong checksum.

    Args:
        storage: The storage, with the checksum that its file records.
        tensor: The name of a tensor over it.
        found: The checksum of the bytes that were read.
    """
    return Corrupted(
        f"the {storage.nbytes:,} bytes of {storage.label or 'this tensor'} do not have the "
        "checksum that the file records: they changed after they were written; get the file again, "
        "or read it anyway in Python with holdfast.open(path, verify=False)",
        file=storage.key,
        tensor=tensor,
        offset=storage.start,
        expected=storage.crc32,
        found=found,
    )


def check_before_reading(requests: Sequence[Request]) -> None:
    """Compare the checksums of all storages that requests read completely.

    A load into existing tensors calls this first, so that no tensor changes if one is damaged. It
    reads the bytes once more, usually from the page cache.

    Raises:
        Corrupted: A storage does not have the checksum that its file records.
    """
    for source, source_requests in group_by_source(requests).items():
        # The ranges have the order of the storages in this dict.
        tensor_names = find_whole_storages(source_requests)
        places = [(storage.key, storage.start, storage.nbytes) for storage in tensor_names]
        sums = RangeSums(source.store, Ranges.from_tuples(places))
        run_reads(sums.tasks(), DEFAULT_THREADS, stores=[source.store])
        for range_index, (storage, tensor_name) in enumerate(tensor_names.items()):
            crc = sums.crc32(range_index, name=tensor_name)
            if crc != storage.crc32:
                raise build_damage_error(storage, tensor_name, crc)
