"""Carry out a save plan: segments at their offsets, by several threads, with checksums while the bytes pass by.

1. Literal segments are joined with their neighbours where they touch, so that fifty thousand headers are a few writes.
2. Data is cut into blocks. Tensors in memory are written straight from it; tensors in files are read into scratch, one block a
   thread. Small tensors are gathered into blocks as well, since a system call a tensor would cost more than its bytes.
3. Each block's CRC-32 is taken by the thread that has it; a tensor's follows by combination. So does its hash, where it is wanted.
4. A Gathered segment is made and written by one thread; it knows its own CRCs.
5. A Late segment that needs one CRC is made where that tensor is written, if both are in one stretch; the others are made and
   written when all data is.

Several ranks may write one file, each a part of it (`write_range`). What each knows of the data then goes to the one of them that
finishes the file (`RankSums`, `finish_file`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import accumulate
from typing import Protocol, cast

import numpy as np
from msgspec import Struct, field

from holdfast.core.arrays import byte_row
from holdfast.core.content_hash import ContentHasher, HashAndHead, hash_bytes, hash_head
from holdfast.core.crc import BlockCrcs, crc32
from holdfast.core.protocols import Request, Store, group_by_source
from holdfast.engine.blocks import (
    block_size,
    contiguous_blocks,
    lent_bytes,
    mapped_bytes,
    pack,
    read_block,
)
from holdfast.engine.checksums import RangeSums
from holdfast.engine.coalesce import Ranges
from holdfast.engine.digest import find_recorded_crc
from holdfast.engine.saves import (
    HASH_KEY,
    HEAD_KEY,
    Data,
    FilePlan,
    Gathered,
    Hole,
    Late,
    Literal,
    Memory,
    Segment,
    check_length,
)
from holdfast.engine.threads import DEFAULT_THREADS, Scratch, cached_nbytes, run_all, run_reads
from holdfast.errors import Corrupted, NotCommitted, error_context
from holdfast.stores.local import read_at
from holdfast.stores.virtual import Virtual, VirtualFile

BLOCK_NBYTES = (
    4 << 20
)  # Most bytes that one thread reads, sums and writes at a time; few threads take less.
GATHER_NBYTES = (
    256 << 10
)  # Neighbouring segments are gathered into one write as long as they are smaller than this together.

GATHERED_PART, SMALL_PART = 2, 16
"""Where a store would rather be asked for so many bytes at a time (a GPU), segments are gathered up to the first part of them, and
those up to the second part are small enough for that."""

MAX_GATHERING_THREADS = 4
"""Threads that write a file of which most is gathered, at the most: what makes such segments holds the interpreter lock for a part
of the time, and sixteen threads would rather wait for it than write."""

Progress = Callable[
    [int], None
]  # Called with the bytes that were written since the last call, from several threads.


class WritableFile(Protocol):
    """An open file that can be written at any offset by several threads."""

    def allocate(self, nbytes: int) -> None:
        """Make the file this long."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of the data at an offset."""


Task = Callable[[], None]
Block = tuple[
    int, int, int
]  # Bytes as they were written: the first one's place in the file, how many, their CRC-32.


class Receipt(Struct):
    """What was written: the CRC-32 of every data segment by its label, hash and head of those that are hashed, and the length."""

    nbytes: int
    crcs: dict[str, int] = field(default_factory=dict)
    blocks: list[Block] = field(
        default_factory=list
    )  # All bytes but those of holes, in no order; some may be there twice.


class FileSums(Struct):
    sums: dict[str, BlockCrcs]
    """Of each tensor, by its label."""
    made: set[int] = field(default_factory=set)
    """Offsets of the late segments that are written already."""
    hashes: dict[str, ContentHasher] = field(default_factory=dict)
    """Of each tensor that is hashed and comes in several blocks, by its label."""
    hashed: dict[str, HashAndHead] = field(default_factory=dict)
    gathered: dict[str, int] = field(default_factory=dict)
    """What segments with many tensors in them said of those, by their labels."""
    blocks: list[Block] = field(default_factory=list)

    @classmethod
    def for_plan(cls, plan: FilePlan) -> FileSums:
        """Of a file of which nothing is written yet."""
        return cls(
            {
                segment.label: BlockCrcs()
                for segment in plan.segments
                if isinstance(segment, Data | Memory)
            }
        )

    def add(self, segment: Data | Memory, start: int, data: memoryview | bytearray) -> int:
        """Sum and hash a block of a tensor, while it is in the cache; its CRC-32."""
        label = segment.label
        if isinstance(segment, Data) and segment.hashing:
            if start == 0 and len(data) == segment.nbytes:
                self.hashed[label] = (
                    hash_bytes(data) if segment.hashing == "hash" else hash_head(data)
                )
            else:
                self.hashes[label].add(start, data)
        return self.sums[label].add(start, data)


def write_file(
    plan: FilePlan, sink: WritableFile, *, crcs: Mapping[str, int] | None = None, threads: int | None = None,
    progress: Progress | None = None, block: int | None = None,
) -> Receipt:  # fmt: skip
    """Write one file. `crcs` are those of files written before, for Late segments that need them. Memory beyond the state itself is
    about `threads × block × 2`: what was read, and what is computed from it."""
    if plan.nbytes < GATHER_NBYTES:
        # What is written by one write says itself where it fails. To make room for it first would take as long.
        content, receipt = assemble_file(plan, crcs or {})
        if content:
            sink.write(0, memoryview(content))
            if progress:
                progress(len(content))
        return receipt
    sink.allocate(plan.nbytes)
    written = write_range(
        plan, sink, (0, plan.nbytes), threads=threads, progress=progress, block=block
    )
    return finish_file(plan, sink, written, crcs=crcs, progress=progress)


def write_range(
    plan: FilePlan, sink: WritableFile, part: tuple[int, int], *, threads: int | None = None, progress: Progress | None = None,
    block: int | None = None,
) -> FileSums:  # fmt: skip
    """Write the blocks of a file that begin in this range of its bytes. Who writes the others cuts by the same `block`."""
    written = FileSums.for_plan(plan)
    large = [
        s for s in plan.segments if isinstance(s, Data) and s.hashing and s.nbytes > GATHER_NBYTES
    ]
    written.hashes = {s.label: ContentHasher(s.nbytes, whole=s.hashing == "hash") for s in large}
    stores = _stores(plan)
    remote = max((store.read_profile.request_count for store in stores), default=0)
    gathered = sum(segment.nbytes for segment in plan.segments if isinstance(segment, Gathered))
    usual = (
        min(DEFAULT_THREADS, MAX_GATHERING_THREADS)
        if 2 * gathered > plan.nbytes
        else DEFAULT_THREADS
    )
    threads = threads or max(usual, remote)
    block = block or (2 * BLOCK_NBYTES if remote else cached_nbytes(threads, BLOCK_NBYTES))
    tasks = _tasks(plan, plan.offsets(), sink, written, progress, block)
    run_reads(
        (task for offset, task in tasks if part[0] <= offset < part[1]), threads, stores=stores
    )
    return written


def finish_file(
    plan: FilePlan, sink: WritableFile, written: FileSums, *, crcs: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Receipt:  # fmt: skip
    """Write what depends on checksums, when all data is written. `crcs` as for `write_file`."""
    # A dict of a million checksums is not copied where it is all that is known.
    receipt = Receipt(plan.nbytes, written.gathered, blocks=written.blocks)
    for segment in plan.segments:
        if isinstance(segment, Data | Memory):
            receipt.crcs[segment.label] = written.sums[segment.label].crc32()
            if isinstance(segment, Data) and segment.hashing:
                label = segment.label
                receipt.crcs |= _hash_fields(
                    label, written.hashed.get(label) or written.hashes[label].result()
                )
    known = {**crcs, **receipt.crcs} if crcs and receipt.crcs else crcs or receipt.crcs
    for begin, content, late in _joined_late(plan, plan.offsets(), known, written.made):
        sink.write(begin, memoryview(content))
        receipt.blocks.append((begin, len(content), crc32(content)))
        if progress:
            progress(late)
    return receipt


class RankSums(Struct):
    """The checksums of what a rank wrote of a file, for the rank that finishes it. The segments of the plan have numbers."""

    blocks: bytes
    """Of data: its segment, the first byte in it, the length and the CRC-32; 64-bit integers, a row each."""
    gathered: dict[int, bytes]
    """Of the pieces of a gathered segment, in their order, 32-bit integers."""
    more: dict[str, int]
    """What else is known, by its key."""
    made: list[int]

    @classmethod
    def from_file_sums(cls, plan: FilePlan, written: FileSums) -> RankSums:
        rows: list[tuple[int, int, int, int]] = []
        gathered: dict[int, bytes] = {}
        more = dict(written.gathered)
        for number, segment in enumerate(plan.segments):
            if isinstance(segment, Data | Memory):
                rows += [(number, *block) for block in written.sums[segment.label].blocks()]
            elif isinstance(segment, Gathered) and segment.labels and segment.labels[0] in more:
                gathered[number] = np.array(
                    [more.pop(label) for label in segment.labels], "<u4"
                ).tobytes()
        return cls(np.array(rows, "<i8").tobytes(), gathered, more, [*written.made])

    @classmethod
    def from_crcs(cls, plan: FilePlan, crcs: Mapping[str, int]) -> RankSums:
        """Of a file that was written from end to end, with what is known of it."""
        written = FileSums.for_plan(plan)
        written.gathered = dict(crcs)
        for segment in plan.segments:
            if isinstance(segment, Data | Memory):
                written.sums[segment.label].add_crc(
                    0, segment.nbytes, written.gathered.pop(segment.label)
                )
        return cls.from_file_sums(plan, written)

    def combine_crcs(self, plan: FilePlan) -> dict[str, int]:
        """What is known of a file that was written from end to end."""
        written = FileSums.for_plan(plan)
        self.add_to(plan, written)
        return {label: sums.crc32() for label, sums in written.sums.items()} | written.gathered

    def add_to(self, plan: FilePlan, written: FileSums) -> None:
        segments = plan.segments
        for number, *block in np.frombuffer(self.blocks, "<i8").reshape(-1, 4).tolist():
            written.sums[_labelled(segments[number]).label].add_crc(*block)
        for number, crcs in self.gathered.items():
            one = segments[number]
            assert isinstance(one, Gathered)  # the ranks have the same plan
            written.gathered.update(
                zip(one.labels, np.frombuffer(crcs, "<u4").tolist(), strict=True)
            )
        written.gathered.update(self.more)
        written.made.update(self.made)


def _labelled(segment: Segment) -> Data | Memory:
    assert isinstance(segment, Data | Memory)  # the ranks have the same plan
    return segment


def assemble_file(plan: FilePlan, crcs: Mapping[str, int]) -> tuple[bytes, Receipt]:
    """A short file put together in memory, with its checksums in it; `crcs` are those of files written before."""
    here: dict[str, int] = {}
    pieces: list[Piece] = []
    data = [segment for segment in plan.segments if isinstance(segment, Data)]
    ordered = [
        one.tensor.source.store
        for one in data
        if one.tensor.source.store.read_profile.is_sequential
    ]
    if ordered:
        run_reads((lambda: pieces.extend(_pieces(plan.segments, here)),), 1, stores=ordered)
    else:
        pieces = _pieces(plan.segments, here)
    if None in pieces:
        known = {**crcs, **here} if crcs else here
        for at, segment in enumerate(plan.segments):
            if isinstance(segment, Late) and pieces[at] is None:
                pieces[at] = check_length(segment.make(known), segment.nbytes)
    content = b"".join(cast("list[bytes]", pieces))
    return content, Receipt(
        plan.nbytes, here, [(0, len(content), crc32(content))] if content else []
    )


def _stores(plan: FilePlan) -> list[Store]:
    return [
        *dict.fromkeys(
            [segment.tensor.source.store for segment in plan.segments if isinstance(segment, Data)]
        )
    ]


def _hash_fields(label: str, hashed: HashAndHead) -> dict[str, int]:
    return {label + HASH_KEY: hashed.hash or 0, label + HEAD_KEY: hashed.head or 0}


def _joined_late(
    plan: FilePlan, offsets: Sequence[int], crcs: Mapping[str, int], written: set[int]
) -> Iterator[tuple[int, bytes, int]]:
    """The late segments that are not written yet, where they begin, and how many of the bytes are theirs. Short literals between
    two of them are written again, to make it one piece."""
    begin, late = -1, 0
    pieces: list[bytes] = []
    between: list[bytes] = []
    for segment, offset in zip(plan.segments, offsets, strict=True):
        if isinstance(segment, Late) and offset not in written:
            made = check_length(segment.make(crcs), segment.nbytes)
            if begin < 0:
                begin = offset
            pieces += (*between, made)
            between, late = [], late + len(made)
        elif begin >= 0 and isinstance(segment, Literal) and segment.nbytes <= GATHER_NBYTES:
            between.append(segment.data)
        elif begin >= 0:
            yield begin, pieces.pop() if len(pieces) == 1 else b"".join(pieces), late
            begin, late = -1, 0
            pieces, between = [], []
    if begin >= 0:
        yield begin, pieces.pop() if len(pieces) == 1 else b"".join(pieces), late


def _tasks(
    plan: FilePlan, offsets: Sequence[int], sink: WritableFile, written: FileSums, progress: Progress | None, block: int,
) -> Iterator[tuple[int, Task]]:  # fmt: skip
    """Blocks of work, each with the byte of the file where it begins: a large tensor's piece, or a stretch of small segments that
    are neighbours in the file."""
    stretch: list[tuple[int, Segment]] = []
    size, most = 0, GATHER_NBYTES
    for segment, offset in zip(plan.segments, offsets, strict=True):
        wished = _wished_nbytes(segment)
        large = segment.nbytes > max(GATHER_NBYTES, wished // SMALL_PART) and isinstance(
            segment, Data | Memory | Hole
        )
        if large or (isinstance(segment, Gathered) and segment.nbytes > GATHER_NBYTES):
            if stretch:
                yield stretch[0][0], _stretch(stretch, sink, written, progress)
                stretch, size, most = [], 0, GATHER_NBYTES
            match segment:
                case Gathered():
                    yield offset, _gathered(segment, offset, sink, written, progress)
                case Data() | Memory():
                    for start, lend in cut_segment(segment, block):
                        yield (
                            offset + start,
                            _block(segment, start, lend, offset, sink, written, progress),
                        )
            continue
        stretch.append((offset, segment))
        size, most = size + segment.nbytes, max(most, wished // GATHERED_PART)
        if size >= most:
            yield stretch[0][0], _stretch(stretch, sink, written, progress)
            stretch, size, most = [], 0, GATHER_NBYTES
    if stretch:
        yield stretch[0][0], _stretch(stretch, sink, written, progress)


def _wished_nbytes(segment: Segment) -> int:
    """What the store of data would rather be asked for at a time; 0 where it has no such wish, or is remote and has others."""
    if not isinstance(segment, Data):
        return 0
    store = segment.tensor.source.store
    return 0 if store.read_profile.request_count else store.read_profile.block_nbytes


Lend = Callable[
    [], AbstractContextManager[memoryview]
]  # Bytes for a while, in memory that somebody lends.


def _held(data: memoryview) -> AbstractContextManager[memoryview]:
    return nullcontext(data)


def cut_segment(segment: Data | Memory, nbytes: int) -> Iterator[tuple[int, Lend]]:
    """A tensor, or memory, in blocks of about so many bytes: where in it each one begins, and its bytes."""
    if isinstance(segment, Memory):
        for start in range(0, segment.nbytes, nbytes):
            yield start, partial(_held, segment.content[start : start + nbytes])
        return
    for piece in contiguous_blocks(segment.tensor, block_size(segment.tensor, nbytes)):
        yield piece.start, partial(lent_bytes, piece)


def _block(
    segment: Data | Memory,
    start: int,
    lend: Lend,
    offset: int,
    sink: WritableFile,
    written: FileSums,
    progress: Progress | None,
) -> Callable[[], None]:
    def run() -> None:
        with ExitStack() as lent:
            with error_context(tensor=segment.label):
                data = lent.enter_context(lend())
            nbytes, crc = data.nbytes, written.add(segment, start, data)
            sink.write(offset + start, data)
            written.blocks.append((offset + start, nbytes, crc))
        if progress:
            progress(nbytes)

    return run


def _gathered(
    segment: Gathered, offset: int, sink: WritableFile, written: FileSums, progress: Progress | None
) -> Callable[[], None]:
    def run() -> None:
        content, known = segment.make()
        check_length(content, segment.nbytes)
        written.gathered.update(known)
        sink.write(offset, memoryview(content))
        written.blocks.append((offset, segment.nbytes, crc32(content)))
        if progress:
            progress(segment.nbytes)

    return run


def _stretch(
    parts: list[tuple[int, Segment]],
    sink: WritableFile,
    written: FileSums,
    progress: Progress | None,
) -> Callable[[], None]:
    """Neighbouring small segments in one write; the place of a late one is left blank until it is known."""

    def run() -> None:
        begin = parts[0][0]
        here: dict[str, int] = {}
        pieces = _pieces([segment for _, segment in parts], here, written)
        blank, known = 0, begin
        places: list[tuple[int, int]] = []
        for at, (offset, segment) in enumerate(parts):
            if isinstance(segment, Late):
                if pieces[at] is None:
                    # What stands before it is known now.
                    pieces[at] = bytes(segment.nbytes)
                    places.append((known, offset))
                    blank, known = blank + segment.nbytes, offset + segment.nbytes
                else:
                    written.made.add(offset)
        content = memoryview(b"".join(cast("list[bytes]", pieces)))
        places.append((known, begin + content.nbytes))
        if content:
            sink.write(begin, content)
            written.blocks += [
                (start, stop - start, crc32(content[start - begin : stop - begin]))
                for start, stop in places
            ]
            if progress:
                progress(content.nbytes - blank)

    return run


Piece = bytes | bytearray | memoryview | None


def _pieces(
    segments: Sequence[Segment], here: dict[str, int], written: FileSums | None = None
) -> list[Piece]:
    """The bytes of small segments; None in the place of a late one that needs more than is known. What is known of their data is
    added `here`, and to what is `written` of a file of which they are a part."""
    data_segments = [segment for segment in segments if isinstance(segment, Data)]
    fetched = read_small_tensors(data_segments) if data_segments else {}
    pieces: list[Piece] = []
    for segment in segments:
        if isinstance(segment, Literal):
            pieces.append(segment.data)
        elif isinstance(segment, Gathered):
            content, sums = segment.make()
            here.update(sums)
            if written is not None:
                written.gathered.update(sums)
            pieces.append(check_length(content, segment.nbytes))
        elif isinstance(segment, Late):
            known = segment.needs in here
            pieces.append(check_length(segment.make(here), segment.nbytes) if known else None)
        elif isinstance(segment, Hole):
            pieces.append(bytes(segment.nbytes))
        else:
            with error_context(tensor=segment.label):
                data = (
                    segment.content
                    if isinstance(segment, Memory)
                    else fetched.get(segment.label) or read_small_tensor(segment)
                )
            if written is not None:
                here[segment.label] = written.add(segment, 0, data)
            else:
                here[segment.label] = crc32(data)
                if isinstance(segment, Data) and segment.hashing:
                    here |= _hash_fields(
                        segment.label,
                        hash_bytes(data) if segment.hashing == "hash" else hash_head(data),
                    )
            pieces.append(data)
    return pieces


def read_small_tensors(segments: Iterable[Data]) -> dict[str, memoryview]:
    """The bytes of small tensors by their labels, neighbours by one read; not of memory, nor of a stream, which is read in
    order."""
    wanted = [
        s
        for s in segments
        if s.nbytes
        and not (
            (profile := s.tensor.source.store.read_profile).is_in_memory or profile.is_sequential
        )
    ]
    outs = [np.empty(s.tensor.shape, s.tensor.dtype.numpy) for s in wanted]
    for source, requests in group_by_source(
        Request(s.tensor, out) for s, out in zip(wanted, outs, strict=True)
    ).items():
        source.read(requests)
    return {
        s.label: memoryview(pack(out, s.tensor.dtype))
        if s.tensor.dtype.packed
        else byte_row(out).data
        for s, out in zip(wanted, outs, strict=True)
    }


def read_small_tensor(segment: Data) -> memoryview | bytearray:
    memory = mapped_bytes(segment.tensor)
    if memory is not None:
        return memory
    data = bytearray()
    for piece in contiguous_blocks(segment.tensor, BLOCK_NBYTES):
        data += read_block(piece)
    return data


def find_expected_crc(segment: Data) -> int | None:
    """Return the CRC-32 that the source records of this data, None if it records none."""
    tensor = segment.tensor
    # Nothing is recorded of memory, which is most of what is saved.
    if not segment.nbytes or all(chunk.storage.crc32 is None for chunk in tensor.chunks):
        return None
    return find_recorded_crc(tensor)


def check_source(plan: FilePlan, crcs: Mapping[str, int]) -> None:
    """Compare what was read with what the source records of itself, where it records anything."""
    for segment in plan.segments:
        expected = find_expected_crc(segment) if isinstance(segment, Data) else None
        if not isinstance(segment, Data) or expected in (None, crcs[segment.label]):
            continue
        place = segment.tensor.chunks[0].storage
        raise Corrupted(
            "the source does not have the checksum that it records: it changed after it was written; get it again",
            file=place.key, tensor=segment.tensor.name or segment.label, offset=place.start, expected=expected,
            found=crcs[segment.label],
        )  # fmt: skip


def check_written(
    plan: FilePlan, descriptor: int, crcs: Mapping[str, int], *, path: str, blocks: Sequence[Block] = (),
    threads: int | None = None,
) -> None:  # fmt: skip
    """Compare what the file gives back with the checksums of what was written to it. By `blocks`, as they were written: headers and
    all, and of a hundred thousand tensors a few. Where one is not the same, or where the blocks are not all of the file, every
    tensor is compared by itself, so that the one can be named."""
    is_covered = _covers(plan, blocks)
    wrong_index = _find_wrong_block(descriptor, blocks, threads) if is_covered else None
    if is_covered and wrong_index is None:
        return
    for label, found in read_file_crcs(plan, descriptor, threads=threads).items():
        if found != crcs[label]:
            raise NotCommitted(CHANGED, file=path, tensor=label, expected=crcs[label], found=found)
    if wrong_index is not None:
        raise NotCommitted(CHANGED, file=path)


def check_range(
    plan: FilePlan, descriptor: int, written: FileSums, *, path: str, threads: int | None = None
) -> None:
    """Compare what a file gives back of a part of it with what was written there. What is wrong is named by its place."""
    wrong_index = _find_wrong_block(descriptor, written.blocks, threads)
    if wrong_index is not None:
        start = written.blocks[wrong_index][0]
        segment = plan.segments[int(np.searchsorted(plan.offsets(), start, side="right")) - 1]
        raise NotCommitted(CHANGED, file=path, tensor=getattr(segment, "label", None), offset=start)


CHANGED = "what was written does not read back the same: the disk or the memory is failing; nothing was published"


def _covers(plan: FilePlan, blocks: Sequence[Block]) -> bool:
    """Whether blocks are all bytes of a file but those of holes."""
    spans = [(start, nbytes) for start, nbytes, _ in blocks]
    offset = 0
    for segment in plan.segments:
        if isinstance(segment, Hole):
            spans.append((offset, segment.nbytes))
        offset += segment.nbytes
    reach = 0
    for start, nbytes in sorted(spans):
        if start > reach:
            return False
        reach = max(reach, start + nbytes)
    return reach == plan.nbytes


def _find_wrong_block(descriptor: int, blocks: Sequence[Block], threads: int | None) -> int | None:
    """Return the index of the first block that a file does not give back as it was written."""
    scratch = Scratch()
    wrong_indices: list[int] = []

    def check(index: int) -> None:
        start, nbytes, crc = blocks[index]
        content = scratch.of(nbytes)
        try:
            read_at(descriptor, start, content)
        except OSError:
            wrong_indices.append(index)
        else:
            if crc32(content) != crc:
                wrong_indices.append(index)

    checks = [partial(check, index) for index in range(len(blocks))]
    run_all(checks, threads or DEFAULT_THREADS)
    return min(wrong_indices, default=None)


def read_file_crcs(
    plan: FilePlan, descriptor: int, *, threads: int | None = None
) -> dict[str, int]:
    """The CRC-32 of every data segment, from the bytes of an open file that has this layout."""
    written = Virtual("<written>")
    key = written.put(VirtualFile(plan.nbytes, partial(read_at, descriptor)))
    return read_stored_crcs(plan, written, key, threads=threads)


def read_stored_crcs(
    plan: FilePlan, store: Store, key: str, *, threads: int | None = None
) -> dict[str, int]:
    """The CRC-32 of every data segment of a file that has this layout, from what its store gives."""
    labels: list[str] = []
    starts: list[int] = []
    lengths: list[int] = []
    for segment, offset in zip(plan.segments, plan.offsets(), strict=True):
        if isinstance(segment, Data | Memory):
            labels.append(segment.label)
            starts.append(offset)
            lengths.append(segment.nbytes)
        elif isinstance(segment, Gathered) and segment.item_nbytes is not None:
            labels += segment.labels
            starts += [*accumulate(segment.item_nbytes, initial=offset)][:-1]
            lengths += segment.item_nbytes
    ranges = Ranges(
        [key],
        np.zeros(len(labels), np.int64),
        np.array(starts, np.int64),
        np.array(lengths, np.int64),
    )
    sweep = (
        RangeSums(store, ranges, block=store.read_profile.block_nbytes)
        if store.read_profile.block_nbytes
        else RangeSums(store, ranges)
    )
    run_all(sweep.tasks(), store.read_profile.request_count or threads or DEFAULT_THREADS)
    for number in sorted(sweep.errors):
        sweep.crc32(number, name=labels[number])  # raises
    return dict(zip(labels, sweep.crcs().tolist(), strict=True))
