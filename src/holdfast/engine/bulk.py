"""Read whole records into memory that somebody else owns: the storages of a torch file, thousands of small ones or a few large.

    file      │ a a │ b │ c c c c c c c c c … c c c │ d │ e │
    reads     └──── span ────┘└─ block ─┘└─ block ─┘└─ span ─┘

1. Records are taken in the order of the file. Small neighbours are read together into scratch and copied out; a large one is read
   straight to its place, a block a task.
2. Tasks run on threads; `preadv` and the checksum release the interpreter lock.
3. A recorded CRC-32 is compared with the one of the bytes that came; that of a large record is combined from its blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.core.crc import Sums, crc32
from holdfast.core.protocols import Store
from holdfast.core.runtime import memory_at
from holdfast.engine.execute import run_all
from holdfast.errors import Corrupted

__all__ = ["RecordRead", "read_pieces"]

BLOCK_NBYTES = 4 << 20
"""Bytes of a large record that one thread reads at a time."""

SMALL_NBYTES = 256 << 10
"""Records up to this size are read together with their neighbours."""

GAP_NBYTES = 16 << 10
"""Bytes between two records that are cheaper to read than to skip. Headers and padding of an archive are below 200."""

INLINE_NBYTES = 2 << 20
"""Below this much in all, starting threads takes longer than reading."""


@dataclass(slots=True)
class RecordRead:
    """One record and where it goes."""

    start: int
    """First byte in the file."""
    nbytes: int
    address: int
    """First byte in memory. Whoever asks keeps the memory alive."""
    crc32: int | None
    """The checksum that is recorded, or None."""
    label: str
    sums: Sums = field(default_factory=Sums)
    """Of the blocks that were read."""


def read_pieces(store: Store, key: str, pieces: Sequence[RecordRead], *, threads: int, verify: bool = True) -> None:
    """Read every piece to its place. Raises `Corrupted` for one whose checksum does not match."""
    wanted = sorted((piece for piece in pieces if piece.nbytes), key=lambda piece: piece.start)
    work = list(_tasks(store, key, wanted, verify=verify))
    if threads > 1 and len(work) > 1 and sum(piece.nbytes for piece in wanted) > INLINE_NBYTES:
        run_all(work, threads)
    else:
        for task in work:
            task()
    if verify:
        for piece in wanted:
            if piece.sums and piece.crc32 is not None:
                _compare(piece, piece.sums.crc32(), key)


def _compare(piece: RecordRead, found: int, key: str) -> None:
    if found != piece.crc32:
        raise Corrupted(
            f"{piece.label}: the bytes do not have the checksum that the file records for them; the file is damaged",
            file=key,
            tensor=piece.label,
            offset=piece.start,
            expected=piece.crc32,
            found=found,
        )


def _tasks(store: Store, key: str, pieces: Sequence[RecordRead], *, verify: bool) -> Iterator[Callable[[], None]]:
    span: list[RecordRead] = []
    for piece in pieces:
        if piece.nbytes > SMALL_NBYTES:
            for start in range(0, piece.nbytes, BLOCK_NBYTES):
                yield _block(store, key, piece, start, min(start + BLOCK_NBYTES, piece.nbytes), verify=verify)
            continue
        if span and (piece.start - span[-1].start - span[-1].nbytes > GAP_NBYTES or piece.start - span[0].start > BLOCK_NBYTES):
            yield _span(store, key, span, verify=verify)
            span = []
        span.append(piece)
    if span:
        yield _span(store, key, span, verify=verify)


def _block(store: Store, key: str, piece: RecordRead, start: int, stop: int, *, verify: bool) -> Callable[[], None]:
    def run() -> None:
        out = memory_at(piece.address + start, stop - start)
        store.read(key, piece.start + start, out)
        if verify and piece.crc32 is not None:
            piece.sums.add(start, out)

    return run


def _span(store: Store, key: str, pieces: list[RecordRead], *, verify: bool) -> Callable[[], None]:
    def run() -> None:
        begin = pieces[0].start
        scratch = np.empty(max(piece.start + piece.nbytes for piece in pieces) - begin, np.uint8)
        view, address = scratch.data, scratch.ctypes.data
        store.read(key, begin, view)
        for piece in pieces:
            at = piece.start - begin
            if verify and piece.crc32 is not None:
                _compare(piece, crc32(view[at : at + piece.nbytes]), key)
            ctypes.memmove(piece.address, address + at, piece.nbytes)

    return run
