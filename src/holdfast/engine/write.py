"""Writes the files of a save plan, with several threads, and computes checksums on the way.

1. A large tensor is cut into blocks. Data in memory is written from where it lies. Data of a file
   is read into scratch memory, one block for each thread.
2. Small neighboring segments form a batch, which is written by one call. A system call for each of
   them would cost more than its bytes. So fifty thousand headers become a few writes.
3. The thread that has a block computes its CRC-32, and its hash if the plan asks for one. The
   CRC-32 of a tensor is combined from those of its blocks.
4. A `Gathered` segment is made and written by one thread. It computes the checksums of its items.
5. A `Late` segment that needs the checksum of one tensor is made together with that tensor, if both
   are in one batch. The other `Late` segments are made and written after all data.

Several ranks can write one file, each a range of it (`write_range`). Each rank sends its checksums
(`RankSums`) to the first rank, which finishes the file (`finish_file`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol, cast

import numpy as np
from msgspec import Struct, field

from holdfast.core.arrays import byte_row
from holdfast.core.content_hash import ContentHasher, hash_bytes, hash_head
from holdfast.core.crc import BlockCrcs, crc32
from holdfast.core.protocols import Request, Store, group_by_source
from holdfast.engine.blocks import (
    choose_block_nbytes,
    find_bytes_in_memory,
    lend_block,
    pack_elements,
    read_block,
    split_into_blocks,
)
from holdfast.engine.checksums import RangeSums
from holdfast.engine.coalesce import SUMS, Ranges
from holdfast.engine.digest import find_recorded_crc
from holdfast.engine.saves import (
    Data,
    FilePlan,
    Gathered,
    Hole,
    Late,
    Literal,
    Memory,
    Segment,
    check_length,
    get_hash_fields,
)
from holdfast.engine.threads import (
    DEFAULT_THREADS,
    Scratch,
    choose_cached_nbytes,
    run_all,
    run_reads,
)
from holdfast.errors import Corrupted, NotCommitted, error_context
from holdfast.stores.local import read_at
from holdfast.stores.virtual import Virtual, VirtualFile

BLOCK_NBYTES = 4 << 20
"""The most bytes that a thread reads, sums and writes at a time. A few threads take less, so that a
block stays in the cache (`choose_cached_nbytes`)."""

GATHER_NBYTES = 256 << 10
"""A batch of small segments is written when it has this many bytes. A file with fewer is assembled
in memory and written by one call."""

BATCH_DIVISOR = 2
"""Some stores, such as a GPU, prefer reads of a certain size, because each read costs much. A batch
with data of such a store may have that size divided by this, so that one read fetches it all."""

SMALL_DIVISOR = 16
"""Data of a store that prefers reads of a certain size goes into a batch up to that size divided by
this. Larger data is a read of its own."""

MAX_GATHERING_THREADS = 4
"""The most threads that write a file that is mostly `Gathered` segments. To make such a segment
takes Python code, which holds the interpreter lock: sixteen threads would mostly wait for it."""

CHANGED_BYTES = (
    "what was written does not read back the same: the disk or the memory is failing; "
    "nothing was published"
)

Progress = Callable[[int], None]
"""Called with the bytes that were written since the last call, from several threads."""

BytesLike = bytes | bytearray | memoryview

OpenBlock = Callable[[], AbstractContextManager[memoryview]]
"""Reads a block and returns a context with its bytes: `with open_block() as data`. Afterwards their
memory may be used for another block."""

PlacedSegment = tuple[int, Segment]
"""A segment and its offset in the file."""


class WritableFile(Protocol):
    """An open file that several threads can write, at any offset."""

    def allocate(self, nbytes: int) -> None:
        """Make the file this long."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of the data at an offset."""


class WrittenBlock(NamedTuple):
    """Consecutive bytes of a file that were written together."""

    offset: int
    nbytes: int
    crc32: int


class Receipt(Struct):
    """What was written to a file."""

    nbytes: int
    """The length of the file."""
    crcs: dict[str, int] = field(default_factory=dict)
    """The CRC-32 of all data by label; content hashes and heads under the keys of `saves`."""
    blocks: list[WrittenBlock] = field(default_factory=list)
    """All bytes of the file except holes, in no order. Some bytes may be in two blocks."""


class FileSums(Struct):
    """The checksums of a file. Several threads add to it while they write the file."""

    crcs: dict[str, int] = field(default_factory=dict)
    """The CRC-32 of data that was written in one block, and what else is known, as in `Receipt`."""
    block_sums: dict[str, BlockCrcs] = field(default_factory=dict)
    """The checksums of data that is written in several blocks, by label."""
    block_hashes: dict[str, ContentHasher] = field(default_factory=dict)
    """The hashes of data that is written in several blocks, by label."""
    late_offsets: set[int] = field(default_factory=set)
    """The offsets of the `Late` segments that are written already."""
    blocks: list[WrittenBlock] = field(default_factory=list)

    def add(self, segment: Data | Memory, start: int, data: memoryview | bytearray) -> int:
        """Compute the CRC-32 of a block of a segment, and its content hash if the plan asks for it.

        A segment that is one block gets its final checksums here. The checksums of several blocks
        are collected, and `combine` turns them into those of the segment. The caller writes the
        block right before or after this call, while its bytes are in the cache.

        Args:
            segment: The segment that the block belongs to.
            start: The offset of the block in the segment.
            data: The bytes of the block.

        Returns:
            The CRC-32 of the block.
        """
        label = segment.label
        is_whole = len(data) == segment.nbytes
        if isinstance(segment, Data) and segment.hashing:
            needs_hash = segment.hashing == "hash"
            if is_whole:
                hash_and_head = hash_bytes(data) if needs_hash else hash_head(data)
                self.crcs.update(get_hash_fields(label, hash_and_head))
            else:
                hasher = self.block_hashes.get(label)
                if hasher is None:
                    # Several threads may get here at once. `setdefault` returns the hasher of the
                    # first thread to all of them.
                    new_hasher = ContentHasher(segment.nbytes, needs_hash=needs_hash)
                    hasher = self.block_hashes.setdefault(label, new_hasher)
                hasher.add(start, data)

        crc = crc32(data)
        self.add_crc(segment, start, len(data), crc)
        return crc

    def add_crc(self, segment: Data | Memory, start: int, nbytes: int, crc: int) -> None:
        """Record the CRC-32 of a block of a segment.

        Args:
            segment: The segment that the block belongs to.
            start: The offset of the block in the segment.
            nbytes: The length of the block.
            crc: The CRC-32 of the block.
        """
        if nbytes == segment.nbytes:
            # The block is the whole segment, so there is nothing to combine later.
            self.crcs[segment.label] = crc
        else:
            block_crcs = self.block_sums.setdefault(segment.label, BlockCrcs())
            block_crcs.add_crc(start, nbytes, crc)

    def combine(self) -> dict[str, int]:
        """Combine the checksums of blocks to those of segments, and return all checksums by label.

        Call this after all blocks have been added. The result is the dict of this object and not a
        copy, because there can be a million checksums.
        """
        for label, block_crcs in self.block_sums.items():
            self.crcs[label] = block_crcs.crc32()
        for label, hasher in self.block_hashes.items():
            self.crcs.update(get_hash_fields(label, hasher.result()))
        return self.crcs


def write_file(
    plan: FilePlan,
    file: WritableFile,
    *,
    crcs: Mapping[str, int] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    block_nbytes: int | None = None,
) -> Receipt:
    """Write one file of a plan.

    Besides the state itself this takes about `2 * threads * block_nbytes` of memory: each thread
    has a block that was read, and a block that is computed from it, such as converted elements.

    Args:
        plan: The file.
        file: An empty file.
        crcs: The checksums of files that were written before. `Late` segments may need them.
        threads: The number of threads, by default a suitable one for the data.
        progress: Called while data is written.
        block_nbytes: The most bytes that a thread handles at a time.

    Returns:
        The length of the file, the checksums of its data, and the blocks that were written.
    """
    if plan.nbytes < GATHER_NBYTES:
        # A short file is one write, so there is no reason to allocate space before it.
        content, receipt = assemble_file(plan, crcs or {})
        if content:
            file.write(0, memoryview(content))
            if progress:
                progress(len(content))
        return receipt

    file.allocate(plan.nbytes)
    whole_range = (0, plan.nbytes)
    sums = write_range(
        plan, file, whole_range, threads=threads, progress=progress, block_nbytes=block_nbytes
    )
    return finish_file(plan, file, sums, crcs=crcs, progress=progress)


def write_range(
    plan: FilePlan,
    file: WritableFile,
    byte_range: tuple[int, int],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    block_nbytes: int | None = None,
) -> FileSums:
    """Write the blocks of a file that start in a range of its bytes.

    Ranks that write one file together call this with adjoining ranges. They must pass the same
    `block_nbytes`, so that all of them cut the file into the same blocks.

    Args:
        plan: The file.
        file: A file that is as long as the plan says.
        byte_range: The first byte of the range, and the byte after its last one.
        threads: See `write_file`.
        progress: See `write_file`.
        block_nbytes: See `write_file`.

    Returns:
        The checksums of these blocks, for `finish_file`.
    """
    data_segments = [segment for segment in plan.segments if isinstance(segment, Data)]
    stores = [segment.tensor.source.store for segment in data_segments]
    # Only remote stores have a request count. It is 0 if all data is local.
    request_count = max([store.read_profile.request_count for store in stores], default=0)
    if not threads:
        gathered = [segment for segment in plan.segments if isinstance(segment, Gathered)]
        is_mostly_gathered = 2 * sum(segment.nbytes for segment in gathered) > plan.nbytes
        threads = DEFAULT_THREADS
        if is_mostly_gathered:
            threads = min(threads, MAX_GATHERING_THREADS)
        # A thread that reads from a remote store mostly waits, so there is one for each request.
        threads = max(threads, request_count)
    if not block_nbytes:
        if request_count:
            # A remote store is asked for large blocks, because each request takes long.
            block_nbytes = 2 * BLOCK_NBYTES
        else:
            block_nbytes = choose_cached_nbytes(threads, BLOCK_NBYTES)

    sums = FileSums()
    start, stop = byte_range
    tasks = _SegmentWriter(file, sums, progress).cut_tasks(plan, block_nbytes)
    # A block belongs to the range where it starts, even if it ends in the next one.
    tasks_in_range = (task for offset, task in tasks if start <= offset < stop)
    run_reads(tasks_in_range, threads, stores=stores)
    return sums


def finish_file(
    plan: FilePlan,
    file: WritableFile,
    sums: FileSums,
    *,
    crcs: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Receipt:
    """Write the segments that depend on checksums, after all data of the file has been written.

    An example is the directory of a zip file, which lists the checksum of each record.

    Args:
        plan: The file.
        file: The file with its data.
        sums: The checksums of the data, from `write_range`.
        crcs: The checksums of files that were written before.
        progress: Called with the bytes of the segments.

    Returns:
        The length of the file, the checksums of its data, and the blocks that were written.
    """
    receipt = Receipt(plan.nbytes, sums.combine(), sums.blocks)
    all_crcs = receipt.crcs
    if crcs:
        all_crcs = {**crcs, **all_crcs}
    for offset, content, late_nbytes in _join_late_segments(plan, all_crcs, sums.late_offsets):
        file.write(offset, memoryview(content))
        receipt.blocks.append(WrittenBlock(offset, len(content), crc32(content)))
        if progress:
            progress(late_nbytes)
    return receipt


class RankSums(Struct):
    """The checksums of the bytes of a file that one rank wrote, in a form that can be sent.

    All ranks have the same plan, so a segment is its index in the plan.
    """

    blocks: bytes
    """Blocks of `Data` and `Memory` segments, as rows of four 64-bit integers: the index of the
    segment, the first byte in it, the length, and the CRC-32."""
    gathered: dict[int, bytes]
    """For each `Gathered` segment the CRC-32 of its items, in their order, as 32-bit integers."""
    named_sums: dict[str, int]
    """Other checksums by their keys, such as content hashes."""
    late_offsets: list[int]
    """The offsets of the `Late` segments that are written already."""

    @classmethod
    def from_file_sums(cls, plan: FilePlan, sums: FileSums) -> RankSums:
        """Convert the checksums of the bytes that this rank wrote.

        A checksum is sent as a few integers instead of with its label, if the index of the segment
        identifies it. There can be a million labels, and every rank has them in its plan.
        """
        # What remains here after the loop has a key that is not the label of a segment.
        named_sums = dict(sums.crcs)
        block_rows: list[tuple[int, int, int, int]] = []
        gathered: dict[int, bytes] = {}
        for index, segment in enumerate(plan.segments):
            if isinstance(segment, Data | Memory):
                # A segment that another rank wrote is in neither of the two dicts.
                label = segment.label
                if label in named_sums:
                    block_rows.append((index, 0, segment.nbytes, named_sums.pop(label)))
                elif label in sums.block_sums:
                    block_rows += [(index, *block) for block in sums.block_sums[label].blocks()]
            elif isinstance(segment, Gathered):
                # A rank writes a `Gathered` segment completely or not at all, so one of its items
                # shows whether this rank wrote it.
                is_written = bool(segment.labels) and segment.labels[0] in named_sums
                if is_written:
                    item_crcs = [named_sums.pop(label) for label in segment.labels]
                    gathered[index] = np.array(item_crcs, "<u4").tobytes()
        return cls(
            blocks=np.array(block_rows, "<i8").tobytes(),
            gathered=gathered,
            named_sums=named_sums,
            late_offsets=[*sums.late_offsets],
        )

    @classmethod
    def from_crcs(cls, plan: FilePlan, crcs: Mapping[str, int]) -> RankSums:
        """Convert the checksums of a file that this rank wrote completely.

        They are already those of whole segments, so there are no checksums of blocks.
        """
        return cls.from_file_sums(plan, FileSums(crcs=dict(crcs)))

    def combine_crcs(self, plan: FilePlan) -> dict[str, int]:
        """Return the checksums of a file that the sending rank wrote completely, by label."""
        sums = FileSums()
        self.add_to(plan, sums)
        return sums.combine()

    def add_to(self, plan: FilePlan, sums: FileSums) -> None:
        """Add the checksums that another rank has sent to those of the file.

        Args:
            plan: The file. Both ranks have the same plan.
            sums: The checksums of the file. They receive those of the other rank.
        """
        block_rows = np.frombuffer(self.blocks, "<i8").reshape(-1, 4)
        for index, start, nbytes, crc in block_rows.tolist():
            segment = plan.segments[index]
            assert isinstance(segment, Data | Memory)  # the ranks have the same plan
            sums.add_crc(segment, start, nbytes, crc)
        for index, packed_crcs in self.gathered.items():
            segment = plan.segments[index]
            assert isinstance(segment, Gathered)  # the ranks have the same plan
            item_crcs = np.frombuffer(packed_crcs, "<u4").tolist()
            sums.crcs.update(zip(segment.labels, item_crcs, strict=True))
        sums.crcs.update(self.named_sums)
        sums.late_offsets.update(self.late_offsets)


def assemble_file(plan: FilePlan, crcs: Mapping[str, int]) -> tuple[bytes, Receipt]:
    """Build a short file in memory, with the checksums that are part of it.

    Args:
        plan: The file.
        crcs: The checksums of files that were written before. `Late` segments may need them.

    Returns:
        The content, and the receipt that `write_file` returns after writing it.
    """
    sums = FileSums()
    pieces: list[BytesLike | None] = []
    data_segments = [segment for segment in plan.segments if isinstance(segment, Data)]
    stores = [segment.tensor.source.store for segment in data_segments]
    sequential_stores = [store for store in stores if store.read_profile.is_sequential]
    if sequential_stores:

        def assemble_in_task() -> None:
            """Fill `pieces`, because a task cannot return a result."""
            pieces.extend(_assemble_pieces(plan.segments, sums))

        # `run_reads` keeps such a store open for reading, and has everything read by this thread.
        run_reads([assemble_in_task], 1, stores=sequential_stores)
    else:
        pieces = _assemble_pieces(plan.segments, sums)

    # None marks a piece that depends on checksums of other data. All of them are known now.
    if None in pieces:
        all_crcs = {**crcs, **sums.crcs}
        for index, segment in enumerate(plan.segments):
            if isinstance(segment, Late) and pieces[index] is None:
                pieces[index] = check_length(segment.make(all_crcs), segment.nbytes)

    content = b"".join(cast("list[bytes]", pieces))
    receipt = Receipt(plan.nbytes, sums.crcs)
    if content:
        receipt.blocks.append(WrittenBlock(0, len(content), crc32(content)))
    return content, receipt


def _join_late_segments(
    plan: FilePlan, crcs: Mapping[str, int], written_offsets: set[int]
) -> Iterator[tuple[int, bytes, int]]:
    """Make the `Late` segments that are not written yet, and join neighbors.

    Short literals between two `Late` segments are joined with them, so that one call writes all of
    it. These literals are in the file already, and are written for a second time.

    Args:
        plan: The file.
        crcs: All checksums that the segments are made from.
        written_offsets: The offsets of the `Late` segments that are written already.

    Yields:
        An offset, the bytes to write there, and how many of these are of `Late` segments.
    """
    start = 0
    late_nbytes = 0
    pieces: list[bytes] = []
    # Literals after the last piece. They are needed only if another `Late` segment follows.
    literals: list[bytes] = []
    for segment, offset in zip(plan.segments, plan.offsets(), strict=True):
        if isinstance(segment, Late) and offset not in written_offsets:
            if not pieces:
                start = offset
                late_nbytes = 0
            pieces += literals
            pieces.append(check_length(segment.make(crcs), segment.nbytes))
            late_nbytes += segment.nbytes
            literals.clear()
        elif pieces and isinstance(segment, Literal) and segment.nbytes <= GATHER_NBYTES:
            literals.append(segment.data)
        elif pieces:
            yield start, b"".join(pieces), late_nbytes
            pieces.clear()
            literals.clear()
    if pieces:
        yield start, b"".join(pieces), late_nbytes


class _SegmentWriter:
    """Writes segments of one file and collects their checksums. Several threads use it at once."""

    def __init__(self, file: WritableFile, sums: FileSums, progress: Progress | None) -> None:
        """Prepare to write to a file.

        Args:
            file: The file, which is long enough already.
            sums: Receives the checksums of what is written.
            progress: Called after each write with its length.
        """
        self._file = file
        self._sums = sums
        self._progress = progress

    def cut_tasks(
        self, plan: FilePlan, block_nbytes: int
    ) -> Iterator[tuple[int, Callable[[], None]]]:
        """Divide the writing of a file into tasks that can run on any thread.

        A task writes a block of a large segment, or a batch of small segments.

        Args:
            plan: The file.
            block_nbytes: The most bytes of a block of a large segment.

        Yields:
            The offset in the file where a task starts, and the task.
        """
        for batch in _group_segments(plan):
            # A large segment is the only one of its batch. All segments of other batches are small.
            offset, segment = batch[0]
            if not _is_large(segment):
                yield offset, partial(self._write_batch, batch)
            elif isinstance(segment, Gathered):
                yield offset, partial(self._write_gathered, segment, offset)
            elif isinstance(segment, Data | Memory):
                for start, open_block in cut_segment(segment, block_nbytes):
                    task = partial(self._write_block, segment, offset, start, open_block)
                    yield offset + start, task
            else:
                # Nothing is written for a large hole: `allocate` has made the file long enough.
                # Literals and late segments are never large.
                assert isinstance(segment, Hole)

    def _write_block(
        self, segment: Data | Memory, segment_offset: int, block_start: int, open_block: OpenBlock
    ) -> None:
        """Write one block of a large segment.

        Args:
            segment: The segment.
            segment_offset: The offset of the segment in the file.
            block_start: The offset of the block in the segment.
            open_block: Reads the block, and returns a context with its bytes.
        """
        offset = segment_offset + block_start
        with ExitStack() as stack:
            # Only an error of reading names the tensor. A failed write concerns the file.
            with error_context(tensor=segment.label):
                data = stack.enter_context(open_block())
            # After the `with`, the memory of `data` may already have another block.
            nbytes = data.nbytes
            crc = self._sums.add(segment, block_start, data)
            self._file.write(offset, data)
            self._sums.blocks.append(WrittenBlock(offset, nbytes, crc))
        if self._progress:
            self._progress(nbytes)

    def _write_gathered(self, segment: Gathered, offset: int) -> None:
        """Make and write a segment with many small tensors.

        `Gathered.make` returns the checksums of the tensors together with their bytes.

        Args:
            segment: The segment.
            offset: The offset of the segment in the file.
        """
        content, crcs = segment.make()
        check_length(content, segment.nbytes)
        self._sums.crcs.update(crcs)
        self._file.write(offset, memoryview(content))
        self._sums.blocks.append(WrittenBlock(offset, segment.nbytes, crc32(content)))
        if self._progress:
            self._progress(segment.nbytes)

    def _write_batch(self, batch: Sequence[PlacedSegment]) -> None:
        """Write consecutive small segments with one call.

        `Late` segments that need checksums of other batches are written as zeros, and `finish_file`
        replaces them. The zeros are in no `WrittenBlock`, because a check that reads the file back
        would find other bytes.

        Args:
            batch: The segments, each with its offset in the file.
        """
        pieces = _assemble_pieces([segment for _, segment in batch], self._sums)
        batch_offset, _ = batch[0]
        blank_nbytes = 0
        # The ranges of the file between the zeros, and the start of the current one.
        complete_ranges: list[tuple[int, int]] = []
        complete_start = batch_offset
        for index, (offset, segment) in enumerate(batch):
            if not isinstance(segment, Late):
                continue
            if pieces[index] is not None:
                # The segment could be made, so `finish_file` need not write it.
                self._sums.late_offsets.add(offset)
                continue
            pieces[index] = bytes(segment.nbytes)
            blank_nbytes += segment.nbytes
            complete_ranges.append((complete_start, offset))
            complete_start = offset + segment.nbytes

        content = memoryview(b"".join(cast("list[bytes]", pieces)))
        if not content:
            # All segments of the batch are empty, such as tensors without elements.
            return
        complete_ranges.append((complete_start, batch_offset + content.nbytes))
        self._file.write(batch_offset, content)
        for start, stop in complete_ranges:
            crc = crc32(content[start - batch_offset : stop - batch_offset])
            self._sums.blocks.append(WrittenBlock(start, stop - start, crc))
        if self._progress:
            # `finish_file` reports the bytes of the segments that are still zeros.
            self._progress(content.nbytes - blank_nbytes)


class _Batch(Struct):
    """Consecutive small segments that are written by one call."""

    segments: list[PlacedSegment] = field(default_factory=list)
    nbytes: int = 0
    limit_nbytes: int = GATHER_NBYTES
    """The batch gets no more segments when it has this many bytes."""


def _group_segments(plan: FilePlan) -> Iterator[Sequence[PlacedSegment]]:
    """Divide the segments of a file into batches of small neighbors.

    A large segment is a batch of its own. The limit of a batch is checked before a segment is added
    to it, so a batch exceeds its limit by less than one small segment.

    Yields:
        The segments of each batch, with their offsets in the file.
    """
    batch = _Batch()
    for segment, offset in zip(plan.segments, plan.offsets(), strict=True):
        is_large = _is_large(segment)
        if batch.segments and (is_large or batch.nbytes >= batch.limit_nbytes):
            yield batch.segments
            batch = _Batch()
        if is_large:
            yield [(offset, segment)]
            continue

        batch.segments.append((offset, segment))
        batch.nbytes += segment.nbytes
        if isinstance(segment, Data):
            # Each read from a store such as a GPU costs much. All data of a batch is read together,
            # so larger batches need fewer reads.
            preferred_nbytes = _get_preferred_nbytes(segment)
            batch.limit_nbytes = max(batch.limit_nbytes, preferred_nbytes // BATCH_DIVISOR)
    if batch.segments:
        yield batch.segments


def _is_large(segment: Segment) -> bool:
    """Return whether a segment is written by itself and not in a batch with its neighbors."""
    # Literals and late segments are never cut, whatever their size. A batch can have any length.
    if segment.nbytes <= GATHER_NBYTES or isinstance(segment, Literal | Late):
        return False
    if isinstance(segment, Data):
        # A store such as a GPU is read in large pieces, so that more of its data counts as small.
        # For a store without a preference, the right side is 0.
        return segment.nbytes > _get_preferred_nbytes(segment) // SMALL_DIVISOR
    return True


def _get_preferred_nbytes(segment: Data) -> int:
    """Return the size of the reads that the store of a tensor prefers, 0 for no preference."""
    profile = segment.tensor.source.store.read_profile
    # Only remote stores have a request count. Their `block_nbytes` is the size of the largest
    # request and not a preference.
    if profile.request_count:
        return 0
    return profile.block_nbytes


def cut_segment(segment: Data | Memory, block_nbytes: int) -> Iterator[tuple[int, OpenBlock]]:
    """Cut a segment into blocks, so that several threads can write it.

    Args:
        segment: The segment.
        block_nbytes: The most bytes of a block, unless the store of the data prefers larger reads.

    Yields:
        The offset of a block in the segment, and a function that reads the block and returns a
        context with its bytes.
    """
    if isinstance(segment, Memory):
        for start in range(0, segment.nbytes, block_nbytes):
            content = segment.content[start : start + block_nbytes]
            yield start, partial(_lend_memory, content)
        return
    tensor = segment.tensor
    for block in split_into_blocks(tensor, choose_block_nbytes(tensor, block_nbytes)):
        yield block.start, partial(lend_block, block)


def _lend_memory(content: memoryview) -> AbstractContextManager[memoryview]:
    """Return a context with bytes that are in memory already, so that nothing is read or freed."""
    return nullcontext(content)


def _assemble_pieces(segments: Sequence[Segment], sums: FileSums) -> list[BytesLike | None]:
    """Return the bytes of small segments, and add their checksums to those of the file.

    Args:
        segments: The segments, in the order of the file.
        sums: The checksums of the file. They receive those of the segments.

    Returns:
        The bytes of each segment; None for a `Late` segment whose checksums are not known yet.
    """
    # All tensors that can be read together are read first. The loop reads the others.
    data_segments = [segment for segment in segments if isinstance(segment, Data)]
    tensor_bytes = read_small_tensors(data_segments) if data_segments else {}
    pieces: list[BytesLike | None] = []
    for segment in segments:
        match segment:
            case Literal():
                pieces.append(segment.data)
            case Hole():
                pieces.append(bytes(segment.nbytes))
            case Late():
                # If it needs the checksums of all data, `needs` is None, which is never a label.
                if segment.needs in sums.crcs:
                    pieces.append(check_length(segment.make(sums.crcs), segment.nbytes))
                else:
                    pieces.append(None)
            case Gathered():
                content, crcs = segment.make()
                sums.crcs.update(crcs)
                pieces.append(check_length(content, segment.nbytes))
            case Memory():
                sums.add(segment, 0, segment.content)
                pieces.append(segment.content)
            case Data():
                # Tensors in memory, and those of sequential stores, have not been read yet.
                with error_context(tensor=segment.label):
                    data = tensor_bytes.get(segment.label) or read_small_tensor(segment)
                sums.add(segment, 0, data)
                pieces.append(data)
    return pieces


def read_small_tensors(segments: Iterable[Data]) -> dict[str, memoryview]:
    """Read small tensors together, so that neighbors in a file are one read.

    Returns:
        The bytes by label. Tensors in memory are left out because nothing has to be read. Tensors
        of a store that is read sequentially are left out because they cannot be read together.
    """
    # The requests by label.
    requests: dict[str, Request] = {}
    for segment in segments:
        tensor = segment.tensor
        profile = tensor.source.store.read_profile
        if segment.nbytes and not profile.is_in_memory and not profile.is_sequential:
            out = np.empty(tensor.shape, tensor.dtype.numpy)
            requests[segment.label] = Request(tensor, out)

    for source, source_requests in group_by_source(requests.values()).items():
        source.read(source_requests)

    contents: dict[str, memoryview] = {}
    for label, request in requests.items():
        dtype = request.tensor.dtype
        if dtype.packed:
            # Sources return one byte for each element, but a file has several elements in a byte.
            contents[label] = memoryview(pack_elements(request.out, dtype))
        else:
            contents[label] = byte_row(request.out).data
    return contents


def read_small_tensor(segment: Data) -> memoryview | bytearray:
    """Return the bytes of one tensor in C order, without a copy if they are in memory."""
    memory = find_bytes_in_memory(segment.tensor)
    if memory is not None:
        return memory
    data = bytearray()
    for block in split_into_blocks(segment.tensor, BLOCK_NBYTES):
        data += read_block(block)
    return data


def find_expected_crc(segment: Data) -> int | None:
    """Return the CRC-32 that the source records of this data, None if it records none."""
    tensor = segment.tensor
    # Most saved tensors are in memory, where nothing records checksums. This test is faster than
    # the general search below.
    if not segment.nbytes or all(chunk.storage.crc32 is None for chunk in tensor.chunks):
        return None
    return find_recorded_crc(tensor)


def check_source(plan: FilePlan, crcs: Mapping[str, int]) -> None:
    """Compare the data that was read with the checksums that its source records.

    This finds a source file that was damaged, or that changed while it was copied.

    Args:
        plan: The file that was written.
        crcs: The checksums of the data, by label.

    Raises:
        Corrupted: Data does not have the recorded checksum.
    """
    for segment in plan.segments:
        if not isinstance(segment, Data):
            continue
        expected_crc = find_expected_crc(segment)
        if expected_crc is None or expected_crc == crcs[segment.label]:
            continue
        # If the tensor has several chunks, it is not known which one differs. The error names the
        # first.
        storage = segment.tensor.chunks[0].storage
        raise Corrupted(
            "the source does not have the checksum that it records: it changed after it was "
            "written; download or copy it again",
            file=storage.key,
            tensor=segment.tensor.name or segment.label,
            offset=storage.start,
            expected=expected_crc,
            found=crcs[segment.label],
        )


def check_written(
    plan: FilePlan,
    descriptor: int,
    crcs: Mapping[str, int],
    *,
    path: str,
    blocks: Sequence[WrittenBlock] = (),
    threads: int | None = None,
) -> None:
    """Read a file back and compare it with the checksums of what was written.

    Usually the blocks are compared. They include headers, and there are few of them even if the
    file has a hundred thousand tensors. If a block differs, or if blocks are missing, all tensors
    are compared one by one, so that the error can name the damaged tensor.

    Args:
        plan: The file that was written.
        descriptor: The file, open for reading.
        crcs: The checksums of the data, by label.
        path: The path of the file, for errors.
        blocks: The blocks that were written.
        threads: The number of threads.

    Raises:
        NotCommitted: The file has other bytes.
    """
    is_covered = _cover_file(blocks, plan)
    wrong_block = None
    if is_covered:
        wrong_block = _find_wrong_block(descriptor, blocks, threads)
        if wrong_block is None:
            return

    for label, found_crc in read_file_crcs(plan, descriptor, threads=threads).items():
        expected_crc = crcs[label]
        if found_crc != expected_crc:
            raise NotCommitted(
                CHANGED_BYTES, file=path, tensor=label, expected=expected_crc, found=found_crc
            )
    if wrong_block is not None:
        # No tensor differs, so the damage is in a header or an index.
        raise NotCommitted(CHANGED_BYTES, file=path)


def check_range(
    plan: FilePlan, descriptor: int, sums: FileSums, *, path: str, threads: int | None = None
) -> None:
    """Read back the blocks that `write_range` wrote to a file, and compare their checksums.

    Args:
        plan: The file.
        descriptor: The file, open for reading.
        sums: The checksums of the blocks, from `write_range`.
        path: The path of the file, for errors.
        threads: The number of threads.

    Raises:
        NotCommitted: A block has other bytes. The error names the segment where the block starts.
    """
    wrong_block = _find_wrong_block(descriptor, sums.blocks, threads)
    if wrong_block is not None:
        offset = wrong_block.offset
        segment_index = int(np.searchsorted(plan.offsets(), offset, side="right")) - 1
        # Only data of tensors has a label. The block may start in a header instead.
        label = getattr(plan.segments[segment_index], "label", None)
        raise NotCommitted(CHANGED_BYTES, file=path, tensor=label, offset=offset)


def _cover_file(blocks: Sequence[WrittenBlock], plan: FilePlan) -> bool:
    """Return whether every byte of a file is in one of these blocks or in a hole.

    Holes have no checksum, because nothing is written there.
    """
    ranges = [(block.offset, block.offset + block.nbytes) for block in blocks]
    for segment, offset in zip(plan.segments, plan.offsets(), strict=True):
        if isinstance(segment, Hole):
            ranges.append((offset, offset + segment.nbytes))

    covered_stop = 0
    for start, stop in sorted(ranges):
        if start > covered_stop:
            # The bytes between the two positions are in no range.
            return False
        covered_stop = max(covered_stop, stop)
    return covered_stop == plan.nbytes


def _find_wrong_block(
    descriptor: int, blocks: Sequence[WrittenBlock], threads: int | None
) -> WrittenBlock | None:
    """Read blocks of a file back, and return the first one that differs from what was written.

    Returns:
        The block with the lowest offset whose bytes have another checksum or cannot be read; None
        if all blocks are as they were written.
    """
    scratch = Scratch()
    wrong_blocks: list[WrittenBlock] = []

    def check(block: WrittenBlock) -> None:
        """Read one block, and add it to `wrong_blocks` if it differs or cannot be read."""
        content = scratch.reserve(block.nbytes)
        try:
            read_at(descriptor, block.offset, content)
        except OSError:
            wrong_blocks.append(block)
        else:
            if crc32(content) != block.crc32:
                wrong_blocks.append(block)

    run_all([partial(check, block) for block in blocks], threads or DEFAULT_THREADS)
    return min(wrong_blocks, default=None)


def read_file_crcs(
    plan: FilePlan, descriptor: int, *, threads: int | None = None
) -> dict[str, int]:
    """Read a file back, and return the CRC-32 of each `Data` and `Memory` segment and item.

    Args:
        plan: The plan that the file was written by.
        descriptor: The file, open for reading.
        threads: The number of threads.

    Returns:
        The checksums by label.
    """
    # The functions that read ranges need a store, so the open file becomes one.
    store = Virtual("<written>")
    key = store.put(VirtualFile(plan.nbytes, partial(read_at, descriptor)))
    return read_stored_crcs(plan, store, key, threads=threads)


def read_stored_crcs(
    plan: FilePlan, store: Store, key: str, *, threads: int | None = None
) -> dict[str, int]:
    """Read a file of a store back, and return the CRC-32 of its data.

    Args:
        plan: The plan that the file was written by.
        store: The store that has the file, such as a bucket.
        key: The name of the file in the store.
        threads: The number of threads.

    Returns:
        The checksums by label.
    """
    labels: list[str] = []
    starts: list[int] = []
    range_nbytes: list[int] = []
    for segment, offset in zip(plan.segments, plan.offsets(), strict=True):
        if isinstance(segment, Data | Memory):
            labels.append(segment.label)
            starts.append(offset)
            range_nbytes.append(segment.nbytes)
        elif isinstance(segment, Gathered) and segment.item_nbytes is not None:
            # The items follow each other without gaps. Where there are other bytes between them,
            # `item_nbytes` is None, and their checksums are not part of the result.
            item_offsets = [*accumulate(segment.item_nbytes, initial=offset)]
            labels += segment.labels
            starts += item_offsets[:-1]
            range_nbytes += segment.item_nbytes

    ranges = Ranges(
        [key],
        np.zeros(len(labels), np.int64),
        np.array(starts, np.int64),
        np.array(range_nbytes, np.int64),
    )
    # The preferred size of a read is 0 for a store without a preference.
    block_nbytes = store.read_profile.block_nbytes or SUMS.block_nbytes
    sums = RangeSums(store, ranges, block_nbytes=block_nbytes)
    # A remote store has one thread for each request, because threads mostly wait for it.
    run_all(sums.tasks(), store.read_profile.request_count or threads or DEFAULT_THREADS)
    for index in sorted(sums.errors):
        # `crc32` raises the error of this range, with the label of its tensor.
        sums.crc32(index, name=labels[index])
    return dict(zip(labels, sums.crcs().tolist(), strict=True))
