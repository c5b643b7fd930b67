"""Which tensors are what they were: content hashes of tensors (`core.content_hash`), compared with recorded ones.

1. The first 64 KiB of each are looked at. Where they differ, the tensor has changed, and nothing more of it is read.
2. The others are read from end to end, in parallel, a few blocks at a time, and hashed.

So a run in which everything changes pays for the heads alone: what changed gets no hash either. What is in this process's memory
is hashed where it lies; everything else is read as a save would read it (`engine.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile

from holdfast.core.content_hash import HEAD_NBYTES, ContentHash, Hashed, hash_short
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.engine.blocks import ContiguousBlock, block_size, contiguous_blocks, lent_bytes
from holdfast.engine.threads import default_threads
from holdfast.engine.transfer import run_reads
from holdfast.errors import located

BLOCK_NBYTES = 4 << 20
"""Bytes that a thread reads or looks at in one task."""

BATCH = 4096
"""Rows of a table that are one task."""

TOGETHER = 64
"""Pieces of tensors that are one task, at the most."""


def unchanged(
    tensors: Mapping[str, LazyTensor], recorded: Mapping[str, Hashed], *, threads: int | None = None, block: int | None = None
) -> tuple[set[str], set[str]]:
    """The names of the tensors that have the hash that is recorded for them, and of those that have another head.

    Each name has a record. One without a hash is in neither where the head is the same: it may have changed, or not.
    """
    heads = _heads({name: tensors[name] for name, known in recorded.items() if known.head is not None}, threads)
    changed = {name for name, head in heads.items() if head != recorded[name].head}
    likely = {name: tensors[name] for name, known in recorded.items() if name not in changed and known.hash is not None}
    found = tensor_hashes(likely, threads=threads, block=block)
    return {name for name, hashed in found.items() if hashed.hash == recorded[name].hash}, changed


def unchanged_rows(table: Table, recorded: Mapping[int, int], *, threads: int | None = None) -> set[int]:
    """The plain rows of a table, none longer than a head, that have the hash that is recorded for them."""
    found: set[int] = set()
    rows = [*recorded]

    def compare(some: Sequence[int]) -> None:
        found.update([row for row, now in zip(some, hash_short(table.read(some)), strict=True) if now == recorded[row]])

    work = [partial(compare, rows[first : first + BATCH]) for first in range(0, len(rows), BATCH)]
    run_reads(work, threads or default_threads(), stores=table.stores)
    return found


def tensor_hashes(tensors: Mapping[str, LazyTensor], *, threads: int | None = None, block: int | None = None) -> dict[str, Hashed]:
    """The hash of each tensor. Every byte is read once; memory beyond the tensors is a few blocks a thread."""
    pieces = (
        (name, piece) for name, one in tensors.items() for piece in contiguous_blocks(one, block_size(one, block or BLOCK_NBYTES))
    )
    return _hashed(tensors, pieces, threads, whole=True)


def _heads(tensors: Mapping[str, LazyTensor], threads: int | None) -> dict[str, int | None]:
    begins = (
        (name, takewhile(lambda piece: piece.start < HEAD_NBYTES, contiguous_blocks(one, HEAD_NBYTES)))
        for name, one in tensors.items()
    )
    found = _hashed(tensors, ((name, piece) for name, some in begins for piece in some), threads, whole=False)
    return {name: hashed.head for name, hashed in found.items()}


def _hashed(
    tensors: Mapping[str, LazyTensor], pieces: Iterable[tuple[str, ContiguousBlock]], threads: int | None, *, whole: bool
) -> dict[str, Hashed]:
    """What `pieces` of tensors, each under the name of its tensor, say of each: its hash, or its head alone."""
    contents = {name: ContentHash(tensor.nbytes, whole=whole) for name, tensor in tensors.items()}

    def add(some: Sequence[tuple[str, ContiguousBlock]]) -> None:
        for name, piece in some:
            with located(tensor=name), lent_bytes(piece) as data:
                contents[name].add(piece.start, data)

    work: list[Callable[[], None]] = []
    some: list[tuple[str, ContiguousBlock]] = []
    for piece in pieces:
        some.append(piece)
        if len(some) == TOGETHER or sum([piece.nbytes for _, piece in some]) >= BLOCK_NBYTES:
            work.append(partial(add, some))
            some = []
    if some:
        work.append(partial(add, some))
    run_reads(work, threads or default_threads(), stores=[tensor.source.store for tensor in tensors.values()])
    return {name: content.done() for name, content in contents.items()}
