"""Write a plan from front to back, to anything that has a `write`: buffers, sockets' files, compressors.

There is one writer. A format with its sums in
front of the data (safetensors) is read twice, summed first and then written, unless its source records the sums: those are compared
when the data passes by. A remote store is read ahead: it has as many requests under way as it wants, and blocks are written in
order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Protocol

from msgspec import Struct

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
    HASH_KEY,
    HEAD_KEY,
    Data,
    FilePlan,
    Gathered,
    Hole,
    Late,
    Literal,
    Memory,
    check_length,
    list_sum_keys,
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
REMOTE_BLOCK_NBYTES = 8 << 20

JOINED_NBYTES = 256 << 10

ZEROS = bytes(1 << 20)


class Writer(Protocol):
    """Anything with a `write` that takes bytes and memoryviews."""

    def write(self, data: bytes | memoryview, /) -> object: ...


class CountingWriter(Value, frozen=True):
    file: Writer
    progress: Callable[[int], None]

    def write(self, data: bytes | memoryview, /) -> object:
        done = self.file.write(data)
        self.progress(done if type(done) is int else memoryview(data).nbytes)
        return done

    def flush(self) -> None:
        _flush(self.file)


def write_stream(
    plan: FilePlan, target: Writer, *, known: Mapping[str, int] | None = None, requests: int | None = None,
    block: int = REMOTE_BLOCK_NBYTES,
) -> dict[str, int]:  # fmt: skip
    """Write all segments in order, and flush the target if it can. Gives the CRC-32 of each piece of data, by its label. `known`
    are those of files that were written before. `requests` bounds how many blocks of remote data are read ahead, of `block` bytes
    each. Raises `SaveError` where data changed between two readings, `Corrupted` where it is not what its source records."""
    if plan.nbytes < GATHER_NBYTES:
        content, receipt = assemble_file(plan, known or {})
        write_all(target, content)
        _flush(target)
        return receipt.crcs
    remote = [
        segment
        for segment in plan.segments
        if isinstance(segment, Data) and segment.tensor.source.store.read_profile.request_count
    ]
    wanted = max(
        (segment.tensor.source.store.read_profile.request_count for segment in remote), default=0
    )
    window = max(1, min(wanted, requests or wanted))
    foreseen: dict[str, int] = {}
    if _asks_ahead(plan):
        data = [segment for segment in plan.segments if isinstance(segment, Data)]
        crcs = {segment.label: find_expected_crc(segment) for segment in data}
        foreseen = {label: crc for label, crc in crcs.items() if crc is not None}
        unknown = [segment for segment in remote if segment.label not in foreseen]
        with closing(_ahead(_fetches(unknown, block), window)) as blocks:
            foreseen |= _sums(plan, blocks, known=foreseen)
    with closing(_ahead(_fetches(remote, block), window)) as blocks:
        return _write_all(plan, target, foreseen, known=known, blocks=blocks)


def _write_all(
    plan: FilePlan,
    target: Writer,
    foreseen: Mapping[str, int],
    *,
    known: Mapping[str, int] | None,
    blocks: Iterator[memoryview],
) -> dict[str, int]:
    crcs = {**(known or {}), **foreseen}
    own = {*list_sum_keys(plan.segments)}
    joined = _Joining(target)
    for segment in plan.segments:
        match segment:
            case Literal():
                joined.write(segment.data)
            case Late():
                joined.write(check_length(segment.make(crcs), segment.nbytes))
            case Gathered():
                content, found = segment.make()
                joined.write(check_length(content, segment.nbytes))
                crcs.update(found)
                own.update(found)
            case Hole():
                for start in range(0, segment.nbytes, len(ZEROS)):
                    joined.write(memoryview(ZEROS)[: segment.nbytes - start])
            case Data():
                crcs |= _write_hashed(joined, segment, blocks)
            case Memory():
                crcs[segment.label] = _write_data(joined, segment, blocks)
    joined.flush()
    changed = [label for label, crc in foreseen.items() if crcs[label] != crc]
    if changed:
        check_source(plan, crcs)
        raise SaveError(
            f"{changed[0]!r} changed while it was saved; what was written is of no use",
            tensor=changed[0],
        )
    _flush(target)
    return {label: crcs[label] for label in own if label in crcs}  # not where a record has none


def _flush(target: Writer) -> None:
    finish = getattr(target, "flush", None)
    if callable(finish):
        finish()


def _asks_ahead(plan: FilePlan) -> bool:
    """Whether a segment stands before data whose sum it holds."""
    passed: set[str] = set()
    waiting = False
    for segment in plan.segments:
        match segment:
            case Data() | Memory() | Gathered() if waiting:
                return True
            case Gathered():
                passed.update(segment.labels)
            case Data() | Memory():
                passed.add(segment.label)
            case Late():
                waiting = waiting or (segment.needs is None or segment.needs not in passed)
    return False


def _fetches(remote: Iterable[Data], block: int) -> Iterator[Callable[[], list[memoryview]]]:
    """All of this data in its order, as calls that read a block each: a piece of a large tensor, or some small ones."""
    few: list[Data] = []
    for segment in remote:
        if segment.nbytes <= GATHER_NBYTES:
            few.append(segment)
            if sum(one.nbytes for one in few) >= GATHER_NBYTES:
                yield partial(_fetch_few, few)
                few = []
            continue
        if few:
            yield partial(_fetch_few, few)
            few = []
        for piece in split_into_blocks(segment.tensor, choose_block_nbytes(segment.tensor, block)):
            yield partial(_fetch, segment, piece)
    if few:
        yield partial(_fetch_few, few)


def _fetch(segment: Data, piece: ContiguousBlock) -> list[memoryview]:
    with error_context(tensor=segment.label):
        return [read_block(piece)]


def _fetch_few(segments: list[Data]) -> list[memoryview]:
    fetched = read_small_tensors(segments)
    return [
        fetched[one.label] if one.label in fetched else memoryview(read_small_tensor(one))
        for one in segments
        if one.nbytes
    ]


def _ahead(
    calls: Iterable[Callable[[], list[memoryview]]], window: int
) -> Generator[memoryview, None, None]:
    """What calls give, in their order, so many of them under way at once. Nothing is called before the first is asked for."""
    waiting: deque[BackgroundCall[list[memoryview]]] = deque()
    try:
        for call in calls:
            waiting.append(BackgroundCall(call).__enter__())
            if len(waiting) >= window:
                yield from waiting[0].result()
                waiting.popleft()
        while waiting:
            yield from waiting[0].result()
            waiting.popleft()
    finally:
        for one in waiting:
            one.__exit__(None, None, None)


def _sums(
    plan: FilePlan, blocks: Iterator[memoryview], *, known: Mapping[str, int]
) -> dict[str, int]:
    sums: dict[str, int] = {}
    for segment in plan.segments:
        match segment:
            case Data() | Memory() if segment.label not in known:
                sums[segment.label] = _write_data(NOWHERE, segment, blocks)
            case Gathered():
                content, found = segment.make()
                check_length(content, segment.nbytes)
                sums.update(found)
    return sums


class Nowhere:
    def write(self, data: bytes | memoryview, /) -> None:
        """Drop the bytes."""


NOWHERE = Nowhere()


class _Joining:
    """A target that is given small pieces together: a write to an object store is a call on another thread."""

    def __init__(self, target: Writer) -> None:
        self._target = target
        self._pieces: list[bytes] = []
        self._nbytes = 0

    def write(self, data: bytes | memoryview, /) -> None:
        if len(data) >= JOINED_NBYTES:
            self.flush()
            write_all(self._target, data)
            return
        self._pieces.append(bytes(data))
        self._nbytes += len(data)
        if self._nbytes >= JOINED_NBYTES:
            self.flush()

    def flush(self) -> None:
        if self._pieces:
            write_all(self._target, b"".join(self._pieces))
            self._pieces.clear()
            self._nbytes = 0


class _Hashing(Struct):
    target: Writer
    hashed: ContentHasher
    at: int = 0

    def write(self, data: bytes | memoryview, /) -> None:
        self.hashed.add(self.at, data)
        self.at += memoryview(data).nbytes
        write_all(self.target, data)


def _write_hashed(target: Writer, segment: Data, blocks: Iterator[memoryview]) -> dict[str, int]:
    """Write the data; its sum, and its hash where that is wanted, under the keys of both."""
    label = segment.label
    if not segment.hashing:
        return {label: _write_data(target, segment, blocks)}
    through = _Hashing(target, ContentHasher(segment.nbytes, needs_hash=segment.hashing == "hash"))
    crc, found = _write_data(through, segment, blocks), through.hashed.result()
    return {label: crc, label + HASH_KEY: found.hash or 0, label + HEAD_KEY: found.head or 0}


def _write_data(target: Writer, segment: Data | Memory, blocks: Iterator[memoryview]) -> int:
    """Write the data, and return its sum."""
    crc = 0
    if isinstance(segment, Data) and segment.tensor.source.store.read_profile.request_count:
        left = segment.nbytes
        while left:
            ahead = next(blocks)
            left -= ahead.nbytes
            crc = crc32(ahead, crc)
            write_all(target, ahead)
        return crc
    for _, lend in cut_segment(segment, BLOCK_NBYTES):
        with lend() as data:
            crc = crc32(data, crc)
            write_all(target, data)
    return crc


def write_all(target: Writer, data: bytes | memoryview) -> None:
    """Write everything, where the target takes less at a time and says so (an unbuffered file stops at 2 GiB)."""
    view = memoryview(data)
    while view.nbytes:
        done = target.write(view)
        if type(done) is not int or done >= view.nbytes:
            return
        view = view[done:]
