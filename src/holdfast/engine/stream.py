"""Writes a planned file from front to back, to a buffer, a socket, an upload or a compressor.

A stream cannot go back. If a format has checksums in front of the data (safetensors), all data is
read twice: once for its checksums, and once to write it. If the source records the checksums, the
data is read once, and compared with them as it is written.

Data of a remote store is read ahead: several requests are in flight, and their blocks are written
in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Protocol, TypeGuard

from holdfast.core.content_hash import ContentHasher
from holdfast.core.crc import crc32
from holdfast.core.value import Value
from holdfast.engine.blocks import (
    ContiguousBlock,
    choose_block_nbytes,
    read_block,
    split_into_blocks,
)
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
    list_checksum_keys,
)
from holdfast.engine.threads import BackgroundCall
from holdfast.engine.write import (
    GATHER_NBYTES,
    assemble_file,
    check_source,
    cut_segment,
    find_expected_crc,
    read_small_tensor,
    read_small_tensors,
)
from holdfast.errors import SaveError, error_context

BLOCK_NBYTES = 4 << 20
"""How much data of a local store is read and written at a time."""

REMOTE_BLOCK_NBYTES = 8 << 20
"""How much data of a remote store one request reads."""

BUFFER_NBYTES = 256 << 10
"""Smaller pieces are collected and written together."""

ZEROS = bytes(1 << 20)

ReadBlocks = Callable[[], list[memoryview]]
"""Reads one or several blocks of data."""


class Writer(Protocol):
    """Anything with a `write` that takes bytes and memoryviews, such as a binary file."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Write data. Return how many bytes were written; anything but a number means all."""


class CountingWriter(Value, frozen=True):
    """Passes data on to a file, and reports how many bytes were written."""

    file: Writer
    progress: Callable[[int], None]
    """Called with the number of bytes of each write."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Write data, and report it."""
        written_nbytes = self.file.write(data)
        # A file that returns anything but a number has written all.
        if type(written_nbytes) is int:
            self.progress(written_nbytes)
        else:
            self.progress(memoryview(data).nbytes)
        return written_nbytes

    def flush(self) -> None:
        """Flush the file, if it can be flushed."""
        _flush(self.file)


class _NullWriter:
    """Drops everything, for data that is read only for its checksum."""

    def write(self, data: bytes | memoryview, /) -> None:
        """Drop the data."""


class _BufferedWriter:
    """Collects small pieces and writes them together.

    A write to an object store is a call on another thread, so many small ones would be slow.
    """

    def __init__(self, file: Writer) -> None:
        """Start with an empty buffer."""
        self._file = file
        self._pieces: list[bytes] = []
        self._nbytes = 0

    def write(self, data: bytes | memoryview, /) -> None:
        """Write large data at once, or add small data to the buffer."""
        if len(data) >= BUFFER_NBYTES:
            self.flush()
            write_all(self._file, data)
            return
        self._pieces.append(bytes(data))
        self._nbytes += len(data)
        if self._nbytes >= BUFFER_NBYTES:
            self.flush()

    def flush(self) -> None:
        """Write what the buffer has."""
        if self._pieces:
            write_all(self._file, b"".join(self._pieces))
            self._pieces.clear()
            self._nbytes = 0


class _HashingWriter:
    """Computes the content hash of data while it is written."""

    def __init__(self, writer: Writer, segment: Data) -> None:
        """Prepare to write the data of one segment."""
        self._writer = writer
        self._offset = 0
        self.hasher = ContentHasher(segment.nbytes, needs_hash=segment.hashing == "hash")

    def write(self, data: bytes | memoryview, /) -> None:
        """Write the next piece of the data."""
        self.hasher.add(self._offset, data)
        self._offset += memoryview(data).nbytes
        write_all(self._writer, data)


def write_all(writer: Writer, data: bytes | memoryview) -> None:
    """Write all of the data, even if the writer takes less at a time.

    An unbuffered file writes at most 2 GiB by one call, and returns how much it has written.
    """
    remaining = memoryview(data)
    while remaining.nbytes:
        written_nbytes = writer.write(remaining)
        # A writer that returns anything but a number has written all.
        if type(written_nbytes) is not int or written_nbytes >= remaining.nbytes:
            return
        remaining = remaining[written_nbytes:]


def _flush(writer: Writer) -> None:
    """Flush a writer, if it has a method for that."""
    flush = getattr(writer, "flush", None)
    if callable(flush):
        flush()


def write_stream(
    plan: FilePlan,
    file: Writer,
    *,
    known_crcs: Mapping[str, int] | None = None,
    max_requests: int | None = None,
    block_nbytes: int = REMOTE_BLOCK_NBYTES,
) -> dict[str, int]:
    """Write all segments of a planned file in order, and flush the file if it can be flushed.

    Args:
        plan: The planned file.
        file: Receives the bytes.
        known_crcs: The checksums of files that were written before, which this file may contain.
        max_requests: The most blocks of remote data that are read ahead. None for as many as the
            store prefers.
        block_nbytes: The size of these blocks.

    Returns:
        The CRC-32 of all data by label, and content hashes under their own keys.

    Raises:
        SaveError: Data changed between the two times that it was read.
        Corrupted: Data is not what its source records.
    """
    # A small file is put together in memory and written by one call.
    if plan.nbytes < GATHER_NBYTES:
        content, receipt = assemble_file(plan, known_crcs or {})
        write_all(file, content)
        _flush(file)
        return receipt.crcs

    # The window is the number of remote blocks that are read ahead.
    remote_segments = [segment for segment in plan.segments if _is_remote(segment)]
    request_counts = [_count_requests(segment) for segment in remote_segments]
    preferred_count = max(request_counts, default=0)
    if max_requests:
        window = max(1, min(preferred_count, max_requests))
    else:
        window = max(1, preferred_count)

    # If checksums stand before their data, they must be known before the data is written. The
    # source may record a checksum. All other data is read once for its checksum, and again below
    # when it is written.
    expected_crcs: dict[str, int] = {}
    if _has_checksums_before_data(plan):
        for segment in plan.segments:
            if isinstance(segment, Data):
                crc = find_expected_crc(segment)
                if crc is not None:
                    expected_crcs[segment.label] = crc
        unknown_segments = [
            segment for segment in remote_segments if segment.label not in expected_crcs
        ]
        calls = _cut_remote_data(unknown_segments, block_nbytes)
        # Closing the blocks waits for the reads that are still running, even after an error.
        with closing(_read_ahead(calls, window)) as blocks:
            expected_crcs |= _compute_crcs(plan, blocks, expected_crcs)

    crcs = {**(known_crcs or {}), **expected_crcs}
    calls = _cut_remote_data(remote_segments, block_nbytes)
    with closing(_read_ahead(calls, window)) as blocks:
        return _write_segments(plan, file, crcs, expected_crcs, blocks)


def _count_requests(segment: Data) -> int:
    """Return how many requests the store of some data should receive at the same time."""
    return segment.tensor.source.store.read_profile.request_count


def _is_remote(segment: Segment) -> TypeGuard[Data]:
    """Return whether a segment is data of a remote store."""
    return isinstance(segment, Data) and _count_requests(segment) > 0


def _has_checksums_before_data(plan: FilePlan) -> bool:
    """Return whether a segment contains checksums of data that comes after it.

    If so, the data must be read before the segment can be written: a stream cannot go back.
    """
    labels_before: set[str] = set()
    has_unknown_checksum = False
    for segment in plan.segments:
        if isinstance(segment, Late):
            # This segment is made of the checksum of one label, or of all data of the plan.
            # None means all data of the plan.
            if segment.needs is None or segment.needs not in labels_before:
                has_unknown_checksum = True
        elif isinstance(segment, Data | Memory | Gathered):
            if has_unknown_checksum:
                return True
            if isinstance(segment, Gathered):
                labels_before.update(segment.labels)
            else:
                labels_before.add(segment.label)
    return False


def _compute_crcs(
    plan: FilePlan, remote_blocks: Iterator[memoryview], known_crcs: Mapping[str, int]
) -> dict[str, int]:
    """Read all data whose checksum is not known yet, and return the checksums by label.

    Args:
        plan: The planned file.
        remote_blocks: The blocks of all remote data whose checksum is not known, in order.
        known_crcs: The checksums of data that is not read.
    """
    crcs: dict[str, int] = {}
    for segment in plan.segments:
        if isinstance(segment, Gathered):
            content, item_crcs = segment.make()
            check_length(content, segment.nbytes)
            crcs.update(item_crcs)
        elif isinstance(segment, Data | Memory) and segment.label not in known_crcs:
            crcs[segment.label] = _write_data(_NullWriter(), segment, remote_blocks)
    return crcs


def _write_segments(
    plan: FilePlan,
    file: Writer,
    crcs: dict[str, int],
    expected_crcs: Mapping[str, int],
    remote_blocks: Iterator[memoryview],
) -> dict[str, int]:
    """Write all segments of a planned file in order, and flush the file.

    Args:
        plan: The planned file.
        file: Receives the bytes.
        crcs: All checksums that are known. Those of the data are added as it is written.
        expected_crcs: The checksums that the data must have.
        remote_blocks: The blocks of all remote data of the plan, in order.

    Returns:
        The checksums and hashes of the data of this plan.
    """
    checksum_keys = set(list_checksum_keys(plan.segments))
    writer = _BufferedWriter(file)
    for segment in plan.segments:
        match segment:
            case Literal():
                writer.write(segment.data)
            case Late():
                writer.write(check_length(segment.make(crcs), segment.nbytes))
            case Gathered():
                content, item_crcs = segment.make()
                writer.write(check_length(content, segment.nbytes))
                crcs.update(item_crcs)
                checksum_keys.update(item_crcs)
            case Hole():
                for start in range(0, segment.nbytes, len(ZEROS)):
                    writer.write(memoryview(ZEROS)[: segment.nbytes - start])
            case Data() if segment.hashing:
                hashing_writer = _HashingWriter(writer, segment)
                crcs[segment.label] = _write_data(hashing_writer, segment, remote_blocks)
                crcs |= get_hash_fields(segment.label, hashing_writer.hasher.result())
            case Data() | Memory():
                crcs[segment.label] = _write_data(writer, segment, remote_blocks)
    writer.flush()

    # Some checksums were written before their data was read. The data must still have them.
    for label, expected_crc in expected_crcs.items():
        if crcs[label] != expected_crc:
            # If the source records checksums, the error says that the source is damaged.
            check_source(plan, crcs)
            raise SaveError(
                f"{label!r} changed while it was saved; discard what was written and save again",
                tensor=label,
            )
    _flush(file)
    # A segment of many small tensors may have no hash of some of them.
    return {key: crcs[key] for key in checksum_keys if key in crcs}


def _write_data(writer: Writer, segment: Data | Memory, remote_blocks: Iterator[memoryview]) -> int:
    """Write the bytes of one segment, and return their CRC-32.

    Args:
        writer: Receives the bytes.
        segment: The segment.
        remote_blocks: The next of these blocks are those of the segment, if it is remote.
    """
    crc = 0
    if _is_remote(segment):
        remaining_nbytes = segment.nbytes
        while remaining_nbytes:
            block = next(remote_blocks)
            remaining_nbytes -= block.nbytes
            crc = crc32(block, crc)
            write_all(writer, block)
        return crc
    for _, lend_block in cut_segment(segment, BLOCK_NBYTES):
        with lend_block() as data:
            crc = crc32(data, crc)
            write_all(writer, data)
    return crc


def _cut_remote_data(segments: Iterable[Data], block_nbytes: int) -> Iterator[ReadBlocks]:
    """Yield calls that read remote data in order.

    Each call reads one block of a large tensor, or several small tensors.
    """
    small_segments: list[Data] = []
    small_nbytes = 0
    for segment in segments:
        is_small = segment.nbytes <= GATHER_NBYTES
        if is_small:
            small_segments.append(segment)
            small_nbytes += segment.nbytes
        # Blocks must come in the order of the file, so a large tensor ends a batch of small ones.
        if small_segments and (not is_small or small_nbytes >= GATHER_NBYTES):
            yield partial(_read_small_segments, small_segments)
            small_segments = []
            small_nbytes = 0
        if not is_small:
            tensor = segment.tensor
            for block in split_into_blocks(tensor, choose_block_nbytes(tensor, block_nbytes)):
                yield partial(_read_large_block, segment.label, block)
    if small_segments:
        yield partial(_read_small_segments, small_segments)


def _read_large_block(label: str, block: ContiguousBlock) -> list[memoryview]:
    """Read one block of a large tensor."""
    with error_context(tensor=label):
        return [read_block(block)]


def _read_small_segments(segments: list[Data]) -> list[memoryview]:
    """Read several small tensors together, each as one block. Empty tensors have no block."""
    contents = read_small_tensors(segments)
    blocks: list[memoryview] = []
    for segment in segments:
        # Tensors that cannot be read together with others are not in `contents`.
        if segment.label in contents:
            blocks.append(contents[segment.label])
        elif segment.nbytes:
            blocks.append(memoryview(read_small_tensor(segment)))
    return blocks


def _read_ahead(calls: Iterable[ReadBlocks], window: int) -> Generator[memoryview, None, None]:
    """Yield the blocks that calls read, in order, while further calls are running.

    Args:
        calls: Each of them reads one block or several. None is called before the first block is
            requested.
        window: How many calls run at the same time, each on a thread.
    """
    # Each background call is a context. An `ExitStack` would keep the finished calls and their
    # blocks until the end, so the contexts are entered and left by hand.
    running: deque[BackgroundCall[list[memoryview]]] = deque()
    try:
        for call in calls:
            running.append(BackgroundCall(call).__enter__())
            if len(running) >= window:
                yield from running[0].result()
                running.popleft()
        while running:
            yield from running[0].result()
            running.popleft()
    finally:
        for background_call in running:
            background_call.__exit__(None, None, None)
