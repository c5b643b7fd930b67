"""Reads contiguous ranges of files into memory. The bytes of every tensor pass through here.

A contiguous row of a table is one range, and its array is the destination. So is a storage of a
torch file, or a tensor of a model. All other tensors (strided, split, byte-swapped, packed) are
read by engine/boxes.py as several ranges.

Short neighboring ranges are read together into scratch memory and copied from there to their
destinations. A long range is read straight to its destination, a block of the file at a time. If
the file records the CRC-32 of a range, it is compared while the bytes are in the cache.

Threads share the work in tasks of a few megabytes. Each thread has scratch memory for its longest
joined read, so memory beyond the destinations is at most one block for each thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.crc import BlockCrcs, crc32, has_crcs
from holdfast.core.protocols import Store
from holdfast.core.runtime import address_of, memory_at
from holdfast.core.table import Column
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value
from holdfast.engine.coalesce import (
    RECORDS,
    JoinedReads,
    JoinPolicy,
    RangePieces,
    Ranges,
    join_ranges,
)
from holdfast.engine.threads import INLINE_NBYTES, Scratch, run_reads
from holdfast.errors import Corrupted, HoldfastError, error_context

MAX_TASK_READS = 2048
"""The most joined reads that a thread takes at a time."""

FEW_RANGES = 32
"""Up to this many ranges of a local file are read one by one. To plan joined reads takes 150 µs
however few ranges there are, and to read one range takes 2 µs."""


class RangeReads(Value, frozen=True, eq=False):
    """Ranges of files and the memory that each of them is read to, as columns.

    The caller keeps the memory alive until everything is read.
    """

    keys: Sequence[str]
    """The files."""
    files: Column
    """The file of each range, as an index into `keys`."""
    starts: Column
    """The first byte of each range in its file."""
    nbytes: Column
    """The size of each range."""
    addresses: Column
    """The address in memory that each range is read to."""
    crcs: Column
    """The CRC-32 that the bytes of each range must have, or `NO_CRC`."""
    find_tensor_name: Callable[[int], str]
    """Returns the tensor of a range, given the index of the range. For error messages."""
    describe_damage: Callable[[int, int], Corrupted]
    """Returns the error for a range whose bytes have another CRC-32 than recorded. Receives the
    index of the range and the CRC-32 of the bytes that were read."""


def read_ranges(
    store: Store, reads: RangeReads, *, threads: int, policy: JoinPolicy = RECORDS
) -> int:
    """Read every range to its destination.

    Args:
        store: The store that has the files.
        reads: The ranges and their destinations.
        threads: The most threads that read at the same time.
        policy: Which neighboring ranges are read together.

    Returns:
        The number of bytes that were read, including gaps between joined ranges.

    Raises:
        Corrupted: A range does not have its recorded checksum.
        HoldfastError: A range cannot be read. The error names the tensor.
    """
    # Planning joined reads does not pay for few ranges of a local file, and a single range has no
    # neighbor. A request to a remote store takes milliseconds, so even few ranges are joined there.
    profile = store.read_profile
    is_local = not (profile.request_count or profile.is_sequential)
    is_few = len(reads.starts) == 1 or (is_local and len(reads.starts) <= FEW_RANGES)
    # Joining ranges saves system calls, and there are none if the file is in memory.
    if is_few or profile.is_in_memory:
        total_nbytes = int(sum(reads.nbytes))
        if total_nbytes < INLINE_NBYTES:
            _read_one_by_one(store, reads)
            return total_nbytes
    return _read_in_parallel(store, reads, threads=threads, policy=policy)


def _read_in_parallel(store: Store, reads: RangeReads, *, threads: int, policy: JoinPolicy) -> int:
    """Join neighboring ranges, read them on several threads, and return how many bytes were read.

    The reads of each file are divided into tasks, which the threads take one after the other.
    """
    # Columns may be lists. Planning the reads needs arrays.
    profile = store.read_profile
    starts = np.asarray(reads.starts, np.int64)
    nbytes = np.asarray(reads.nbytes, np.int64)
    ranges = Ranges(reads.keys, np.asarray(reads.files, np.int64), starts, nbytes)
    addresses = np.asarray(reads.addresses, np.int64)
    crcs = np.asarray(reads.crcs, np.int64)
    scratch = Scratch()
    file_readers: list[_FileReader] = []
    for joined_reads in join_ranges(ranges, policy):
        reader = _FileReader(
            store, reads, ranges, joined_reads, addresses=addresses, crcs=crcs, scratch=scratch
        )
        file_readers.append(reader)

    total_nbytes = sum(reader.joined_reads.nbytes for reader in file_readers)
    task_nbytes = policy.block_nbytes
    if profile.request_count:
        # Each request to a remote store is a task of its own, so that none waits for another.
        task_nbytes = 1
    elif total_nbytes < INLINE_NBYTES:
        # Starting threads would take longer than reading.
        threads = 1
    tasks: list[Callable[[], None]] = []
    for reader in file_readers:
        for first_read, stop_read in split_into_tasks(reader.joined_reads, task_nbytes):
            tasks.append(partial(reader.run, first_read, stop_read, policy.block_nbytes))
    run_reads(tasks, threads, stores=[store])
    # Only now are all pieces of every range read.
    for reader in file_readers:
        reader.check_cut_ranges()
    return total_nbytes


def _read_one_by_one(store: Store, reads: RangeReads) -> None:
    """Read short ranges to their destinations one after the other, on this thread.

    If a checksum is recorded, it is compared at once.
    """
    columns: list[Sequence[int]] = []
    for column in (reads.files, reads.starts, reads.nbytes, reads.addresses, reads.crcs):
        # The loop below is faster with integers of Python than with those of numpy.
        if isinstance(column, np.ndarray):
            columns.append(column.tolist())
        else:
            columns.append(column)
    rows = zip(*columns, strict=True)
    for range_index, (file, start, nbytes, address, recorded_crc) in enumerate(rows):
        if not nbytes:
            continue
        out = memory_at(address, nbytes)
        try:
            store.read(reads.keys[file], start, out)
        except HoldfastError as error:
            # Add the name of the tensor to the error. Entering the context before every read would
            # slow down short reads.
            with error_context(tensor=reads.find_tensor_name(range_index)):
                raise error
        if recorded_crc != NO_CRC:
            crc = crc32(out)
            if crc != recorded_crc:
                raise reads.describe_damage(range_index, crc)


def read_to_scratch(
    store: Store, ranges: Ranges, find_tensor_name: Callable[[int], str], *, policy: JoinPolicy
) -> np.ndarray:
    """Read ranges on this thread, one behind the other into new memory.

    Recorded checksums are not compared.

    Args:
        store: The store that has the files.
        ranges: The ranges, in the order of their bytes in the result.
        find_tensor_name: Returns the tensor of a range, given its index. For error messages.
        policy: Which neighboring ranges are read together.

    Returns:
        The bytes of all ranges.
    """
    out = np.empty(int(ranges.nbytes.sum()), np.uint8)
    offsets = ranges.nbytes.cumsum() - ranges.nbytes
    reads = RangeReads(
        keys=ranges.keys,
        files=ranges.files,
        starts=ranges.starts,
        nbytes=ranges.nbytes,
        addresses=address_of(out) + offsets,
        crcs=np.full(len(ranges), NO_CRC, np.int64),
        find_tensor_name=find_tensor_name,
        describe_damage=_reject_unrecorded_crc,
    )
    read_ranges(store, reads, threads=1, policy=policy)
    return out


def _reject_unrecorded_crc(range_index: int, crc: int) -> Corrupted:
    """Stand in for `RangeReads.describe_damage` where no checksums are compared."""
    raise AssertionError("a checksum was compared, but none is recorded")


def split_into_tasks(reads: JoinedReads, task_nbytes: int) -> Iterator[tuple[int, int]]:
    """Divide the reads of one file into tasks of about `task_nbytes`, for several threads.

    A read is never divided, and a task has at most `MAX_TASK_READS` of them.

    Yields:
        For each task, the index of its first read and the one after its last read.
    """
    cumulative_nbytes = (reads.stops - reads.starts).cumsum()
    first_read = 0
    previous_nbytes = 0
    while first_read < len(cumulative_nbytes):
        # As many reads as have at most `task_nbytes`, but at least one read.
        max_nbytes = previous_nbytes + task_nbytes
        stop_read = int(cumulative_nbytes.searchsorted(max_nbytes, side="right"))
        stop_read = min(max(stop_read, first_read + 1), first_read + MAX_TASK_READS)
        yield first_read, stop_read
        first_read = stop_read
        previous_nbytes = int(cumulative_nbytes[stop_read - 1])


def read_joined(store: Store, reads: JoinedReads, read_index: int, scratch: Scratch) -> memoryview:
    """Return the bytes of one joined read.

    Bytes that are in memory already are not copied. All others are read into scratch memory, where
    they stay until this thread reads again.
    """
    start = reads.starts.item(read_index)
    stop = reads.stops.item(read_index)
    if store.read_profile.is_in_memory:
        content = store.map(reads.key)
        # If the range reaches beyond the end of the file, `store.read` raises the error.
        if content is not None and stop <= content.nbytes:
            return content[start:stop]
    data = scratch.reserve(stop - start)
    store.read(reads.key, start, data)
    return data


class _FileReader:
    """Reads the ranges of one file to their destinations. Its methods may run on several threads.

    The ranges are cut into pieces where blocks of the file end. Each joined read covers one piece
    or several.
    """

    def __init__(
        self,
        store: Store,
        reads: RangeReads,
        ranges: Ranges,
        joined_reads: JoinedReads,
        *,
        addresses: Ints,
        crcs: Ints,
        scratch: Scratch,
    ) -> None:
        """Prepare to read one file.

        Args:
            store: The store that has the file.
            reads: The ranges of all files, with the functions that describe them in errors.
            ranges: The same ranges, whose columns are arrays.
            joined_reads: The reads of this file. Their pieces refer to `ranges`.
            addresses: The address that each of the ranges is read to.
            crcs: The CRC-32 that each of the ranges must have, or `NO_CRC`.
            scratch: Scratch memory for joined reads.
        """
        self._store = store
        self._reads = reads
        self._ranges = ranges
        self._range_crcs = crcs
        self._scratch = scratch
        self.joined_reads = joined_reads

        # The remaining columns have an entry for each piece of this file.
        pieces = joined_reads.pieces
        range_indices = pieces.range_indices
        offsets = pieces.starts - ranges.starts[range_indices]
        self._piece_addresses: Ints = addresses[range_indices] + offsets
        self._has_crc: Bools = crcs[range_indices] != NO_CRC
        self._is_whole_range: Bools = pieces.stops - pieces.starts == ranges.nbytes[range_indices]
        self._crcs_of_cut_ranges: dict[int, BlockCrcs] = {}
        """The checksums of the pieces that were read so far, by the index of their range."""

    def run(self, first_read: int, stop_read: int, block_nbytes: int) -> None:
        """Do some of the joined reads, one after the other.

        Args:
            first_read: The index of the first joined read.
            stop_read: The index after the last joined read.
            block_nbytes: How many bytes of a range are read before their checksum is computed.
        """
        joined_reads = self.joined_reads
        key = joined_reads.key
        first_pieces = joined_reads.first_pieces[first_read : stop_read + 1]
        is_single_piece = np.diff(first_pieces) == 1
        first_pieces = first_pieces[:-1]

        # A column of a matrix may be a million reads, so all arrays are indexed before the loop.
        rows = zip(
            is_single_piece.tolist(),
            self._has_crc[first_pieces].tolist(),
            self._piece_addresses[first_pieces].tolist(),
            joined_reads.starts[first_read:stop_read].tolist(),
            joined_reads.stops[first_read:stop_read].tolist(),
            strict=True,
        )
        for read_index, (is_single, has_crc, address, start, stop) in enumerate(rows, first_read):
            try:
                if not is_single:
                    self._read_pieces(read_index)
                elif has_crc:
                    self._read_with_crc(read_index, memory_at(address, stop - start), block_nbytes)
                else:
                    self._store.read(key, start, memory_at(address, stop - start))
            except HoldfastError as error:
                # The error is raised here. A function that raises its argument is in a reference
                # cycle with it, which would keep everything alive that the caller holds.
                with error_context(tensor=self._find_failed_tensor(read_index, error.tensor)):
                    raise

    def _read_with_crc(self, read_index: int, out: memoryview, block_nbytes: int) -> None:
        """Read a single piece straight to its destination, with its checksum, block by block."""
        start = self.joined_reads.starts.item(read_index)
        range_index = self._find_first_range(read_index)
        for offset in range(0, out.nbytes, block_nbytes):
            block = out[offset : offset + block_nbytes]
            self._store.read(self.joined_reads.key, start + offset, block)
            self._add_to_crc(range_index, start + offset, block)

    def _read_pieces(self, read_index: int) -> None:
        """Do a joined read of several pieces, and copy each of them to its destination."""
        data = read_joined(self._store, self.joined_reads, read_index, self._scratch)
        read_start = self.joined_reads.starts.item(read_index)
        pieces = self.joined_reads.select_pieces(read_index)
        first_piece = self.joined_reads.first_pieces.item(read_index)
        piece_indices = slice(first_piece, first_piece + len(pieces.starts))

        if self._has_crc[piece_indices].any():
            self._check_pieces(pieces, piece_indices, read_start, data)

        # The destinations are known by their addresses, so the bytes are copied by address.
        data_address = np.frombuffer(data, np.uint8).ctypes.data
        copies = zip(
            self._piece_addresses[piece_indices].tolist(),
            (pieces.starts + (data_address - read_start)).tolist(),
            (pieces.stops - pieces.starts).tolist(),
            strict=True,
        )
        for destination, source, nbytes in copies:
            ctypes.memmove(destination, source, nbytes)

    def _check_pieces(
        self, pieces: RangePieces, piece_indices: slice, read_start: int, data: memoryview
    ) -> None:
        """Compare the bytes of a joined read with the checksums that the file records.

        A piece that is a whole range is compared at once. A piece of a range that was cut adds to
        the checksum of the range, which is compared when all of its pieces are read.

        Args:
            pieces: The pieces that the joined read covers.
            piece_indices: Their indices among all pieces of the file.
            read_start: The offset in the file of the first byte of `data`.
            data: The bytes of the joined read.

        Raises:
            Corrupted: A range does not have its recorded checksum.
        """
        has_crc = self._has_crc[piece_indices]
        is_whole_range = self._is_whole_range[piece_indices]
        # The position of each piece in `data`.
        data_starts = pieces.starts - read_start
        data_stops = pieces.stops - read_start

        # One call compares all pieces that are whole ranges. A call for each would take longer.
        whole_pieces = np.flatnonzero(has_crc & is_whole_range)
        are_whole_pieces_intact = has_crcs(
            data,
            data_starts[whole_pieces].tolist(),
            data_stops[whole_pieces].tolist(),
            self._range_crcs[pieces.range_indices[whole_pieces]].tolist(),
        )

        # The pieces of cut ranges are added one by one. If a whole range is damaged, the whole
        # ranges are compared again one by one as well, because the error must name the damaged one.
        needs_check = has_crc
        if are_whole_pieces_intact:
            needs_check = has_crc & ~is_whole_range
        for piece_index in np.flatnonzero(needs_check).tolist():
            piece_data = data[data_starts.item(piece_index) : data_stops.item(piece_index)]
            range_index = pieces.range_indices.item(piece_index)
            self._add_to_crc(range_index, pieces.starts.item(piece_index), piece_data)

    def _find_first_range(self, read_index: int) -> int:
        """Return the index of the first range that a joined read covers."""
        first_piece = self.joined_reads.first_pieces.item(read_index)
        return self.joined_reads.pieces.range_indices.item(first_piece)

    def _find_failed_tensor(self, read_index: int, tensor_in_error: str | None) -> str:
        """Return the tensor to name in the error of a joined read that failed.

        A joined read may have pieces of many tensors. If the error names no tensor yet, the pieces
        are read again one by one. The first of them that fails raises an error that names its
        tensor. If none of them fails this time, the first tensor is returned.

        Args:
            read_index: The index of the joined read.
            tensor_in_error: The tensor that the error names already, or None.
        """
        pieces = self.joined_reads.select_pieces(read_index)
        if tensor_in_error is None and len(pieces.starts) > 1:
            for range_index, start, stop in pieces.rows():
                with error_context(tensor=self._reads.find_tensor_name(range_index)):
                    out = memoryview(bytearray(stop - start))
                    self._store.read(self.joined_reads.key, start, out)
        return self._reads.find_tensor_name(self._find_first_range(read_index))

    def _add_to_crc(self, range_index: int, start: int, data: memoryview) -> None:
        """Compare the checksum of a range, or remember the checksum of a part of the range.

        Args:
            range_index: The range.
            start: The offset of `data` in the file.
            data: All bytes of the range, or some of them.
        """
        if data.nbytes == self._ranges.nbytes.item(range_index):
            self._compare_crc(range_index, crc32(data))
        else:
            block_crcs = self._crcs_of_cut_ranges.setdefault(range_index, BlockCrcs())
            block_crcs.add(start - self._ranges.starts.item(range_index), data)

    def check_cut_ranges(self) -> None:
        """Compare the checksums of ranges that were read in several parts, when all are read."""
        for range_index, block_crcs in sorted(self._crcs_of_cut_ranges.items()):
            self._compare_crc(range_index, block_crcs.crc32())

    def _compare_crc(self, range_index: int, crc: int) -> None:
        """Raise an error if the checksum of a range is not the recorded one."""
        if crc != self._range_crcs.item(range_index):
            raise self._reads.describe_damage(range_index, crc)
