"""The CRC-32 of a tensor's elements in C order: from the file's own records where they say it, else from the bytes, in parallel.

A tensor takes the cheapest way that it can: the file's record of exactly these bytes; the records of its pieces, where these are
consecutive in C order (shards of rows); one pass over its bytes, where they lie in one piece of one file or in memory; else it is
read piece by piece, in C order (strides, shards of columns, big-endian, conjugated).

Content hashes (`core.content_hash`) say which tensors are what they were. The first 64 KiB of each are looked at; where they
differ, nothing more is read. The others are read from end to end, in parallel, and hashed. So a run in which everything changes
pays for the heads alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from holdfast.core.chunk import Chunk, c_strides, is_c_ordered
from holdfast.core.crc import BlockCrcs
from holdfast.core.protocols import Store
from holdfast.core.sharing import ViewIdentity, identify_view
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.engine.blocks import (
    ContiguousBlock,
    choose_block_nbytes,
    find_bytes_in_memory,
    find_contiguous_bytes,
    lend_block,
    read_block,
    split_into_blocks,
)
from holdfast.engine.checksums import Progress, RangeSums
from holdfast.engine.coalesce import Ranges
from holdfast.engine.threads import DEFAULT_THREADS, run_reads
from holdfast.errors import error_context

if TYPE_CHECKING:
    from holdfast.core.content_hash import HashAndHead  # it imports a library, for those who save

BLOCK_NBYTES = (
    8 << 20
)  # Bytes of a piece: enough rows of a strided tensor that neighbouring runs are read together.


def find_recorded_crc(tensor: LazyTensor) -> int | None:
    """The checksum, where the file records it for exactly these bytes, in one piece or in several; else None."""
    if tensor.traits.meta:
        return None
    if tensor.size == 0:
        return 0
    if len(tensor.chunks) > 1:
        return _recorded_pieces(tensor)
    if find_contiguous_bytes(tensor) is None:
        return None
    (chunk,) = tensor.chunks
    storage = chunk.storage
    return storage.crc32 if chunk.offset == 0 and storage.nbytes == tensor.nbytes else None


def _recorded_pieces(tensor: LazyTensor) -> int | None:
    if tensor.traits.conj or tensor.traits.neg:
        return None
    sums, nbytes = BlockCrcs(), 0
    for chunk in tensor.chunks:
        if chunk.box.count == 0:
            continue
        crc, start = chunk.storage.crc32, _run_start(chunk, tensor)
        if crc is None or start is None:
            return None
        sums.add_crc(start, chunk.storage.nbytes, crc)
        nbytes += chunk.storage.nbytes
    # A piece that is there twice takes one place, and shows in the length.
    return sums.crc32() if nbytes == tensor.nbytes and sums.is_complete(nbytes) else None


def _run_start(chunk: Chunk, tensor: LazyTensor) -> int | None:
    """The byte of the tensor's C order where a chunk begins that fills its storage and is one run of it; else None."""
    dtype, storage = tensor.dtype, chunk.storage
    if storage.byteorder != "little" and dtype.swap_nbytes > 1:
        return None
    if chunk.offset != 0 or chunk.box.count * dtype.bits != storage.nbytes * 8:
        return None
    if not is_c_ordered(chunk.shape, chunk.strides, dtype.bits):
        return None
    # One run: single rows, then part of one dimension, then whole dimensions.
    cut = next((d for d, n in enumerate(chunk.shape) if n > 1), tensor.ndim)
    if chunk.shape[cut + 1 :] != tensor.shape[cut + 1 :]:
        return None
    start = sum(
        a * s for a, s in zip(chunk.box.start, c_strides(tensor.shape, dtype.bits), strict=True)
    )
    return start // 8 if start % 8 == 0 else None


def compute_crcs(
    tensors: Sequence[LazyTensor], *, recorded: bool = True, threads: int | None = None, progress: Progress | None = None,
    expand: bool = False,
) -> list[int]:  # fmt: skip
    """One checksum a tensor. With `recorded=False` every byte is read, whatever the file says of it. Raises `LimitExceeded` for an
    expanded view whose elements are many more than were stored, unless it may `expand`."""
    known = [find_recorded_crc(t) if recorded else None for t in tensors]
    firsts: dict[ViewIdentity, int] = {}
    alias_of: dict[int, int] = {}
    swept: dict[Store, tuple[list[int], list[tuple[str, int, int]]]] = {}
    parts: dict[int, BlockCrcs] = {}
    work: list[Callable[[], None]] = []
    for i, tensor in enumerate(tensors):
        if known[i] is not None:
            continue
        # Tied weights are read once.
        first = firsts.setdefault(identify_view(tensor), i)
        if first != i:
            alias_of[i] = first
            continue
        if not expand:
            with error_context(tensor=tensor.name):
                tensor.check_expansion()
        place = find_contiguous_bytes(tensor)
        if place is not None and find_bytes_in_memory(tensor) is None:
            numbers, ranges = swept.setdefault(tensor.source.store, ([], []))
            numbers.append(i)
            ranges.append((*place, tensor.nbytes))
        else:
            parts[i] = BlockCrcs()
            work += [
                _block_task(piece, tensor.name, parts[i], progress)
                for piece in split_into_blocks(tensor, BLOCK_NBYTES)
            ]
    sweeps = [
        (numbers, RangeSums(store, Ranges.from_tuples(ranges)))
        for store, (numbers, ranges) in swept.items()
    ]
    for _, sweep in sweeps:
        work += sweep.tasks(progress)
    if work:
        run_reads(
            work, threads or DEFAULT_THREADS, stores=[tensor.source.store for tensor in tensors]
        )
    for numbers, sweep in sweeps:
        for position, i in enumerate(numbers):
            known[i] = sweep.crc32(position, name=tensors[i].name)
    for i, sums in parts.items():
        known[i] = sums.crc32()
    return [known[alias_of.get(i, i)] or 0 for i in range(len(tensors))]


def _block_task(
    piece: ContiguousBlock, name: str, sums: BlockCrcs, progress: Progress | None
) -> Callable[[], None]:
    def run() -> None:
        with error_context(tensor=name):
            data = read_block(piece)
        sums.add(piece.start, data)
        if progress is not None:
            progress(data.nbytes)

    return run


HASHED_NBYTES = 4 << 20

BATCH = 4096

TOGETHER = 64


def find_unchanged(
    tensors: Mapping[str, LazyTensor],
    recorded: Mapping[str, HashAndHead],
    *,
    threads: int | None = None,
    block: int | None = None,
) -> tuple[set[str], set[str]]:
    """The names of the tensors that have the hash that is recorded for them, and of those that have another head. Each name has a
    record. One without a hash is in neither where the head is the same: it may have changed, or not."""
    heads = _heads(
        {name: tensors[name] for name, known in recorded.items() if known.head is not None}, threads
    )
    changed = {name for name, head in heads.items() if head != recorded[name].head}
    likely = {
        name: tensors[name]
        for name, known in recorded.items()
        if name not in changed and known.hash is not None
    }
    found = compute_hashes(likely, threads=threads, block=block)
    return {name for name, hashed in found.items() if hashed.hash == recorded[name].hash}, changed


def find_unchanged_rows(
    table: Table, recorded: Mapping[int, int], *, threads: int | None = None
) -> set[int]:
    """The plain rows of a table, none longer than a head, that have the hash that is recorded for them."""
    from holdfast.core.content_hash import hash_small_pieces

    found: set[int] = set()
    rows = [*recorded]

    def compare(some: Sequence[int]) -> None:
        found.update(
            [
                row
                for row, now in zip(some, hash_small_pieces(table.read_bytes(some)), strict=True)
                if now == recorded[row]
            ]
        )

    work = [partial(compare, rows[first : first + BATCH]) for first in range(0, len(rows), BATCH)]
    run_reads(work, threads or DEFAULT_THREADS, stores=table.stores)
    return found


def compute_hashes(
    tensors: Mapping[str, LazyTensor], *, threads: int | None = None, block: int | None = None
) -> dict[str, HashAndHead]:
    """The hash of each tensor. Every byte is read once; memory beyond the tensors is a few blocks a thread."""
    pieces = (
        (name, piece)
        for name, one in tensors.items()
        for piece in split_into_blocks(one, choose_block_nbytes(one, block or HASHED_NBYTES))
    )
    return _hashed(tensors, pieces, threads, whole=True)


def _heads(tensors: Mapping[str, LazyTensor], threads: int | None) -> dict[str, int | None]:
    from holdfast.core.content_hash import HEAD_NBYTES

    begins = (
        (
            name,
            takewhile(lambda piece: piece.start < HEAD_NBYTES, split_into_blocks(one, HEAD_NBYTES)),
        )
        for name, one in tensors.items()
    )
    found = _hashed(
        tensors, ((name, piece) for name, some in begins for piece in some), threads, whole=False
    )
    return {name: hashed.head for name, hashed in found.items()}


def _hashed(
    tensors: Mapping[str, LazyTensor],
    pieces: Iterable[tuple[str, ContiguousBlock]],
    threads: int | None,
    *,
    whole: bool,
) -> dict[str, HashAndHead]:
    """What `pieces` of tensors, each under the name of its tensor, say of each: its hash, or its head alone."""
    from holdfast.core.content_hash import ContentHasher

    contents = {
        name: ContentHasher(tensor.nbytes, needs_hash=whole) for name, tensor in tensors.items()
    }

    def add(some: Sequence[tuple[str, ContiguousBlock]]) -> None:
        for name, piece in some:
            with error_context(tensor=name), lend_block(piece) as data:
                contents[name].add(piece.start, data)

    work: list[Callable[[], None]] = []
    some: list[tuple[str, ContiguousBlock]] = []
    for piece in pieces:
        some.append(piece)
        if len(some) == TOGETHER or sum([piece.nbytes for _, piece in some]) >= HASHED_NBYTES:
            work.append(partial(add, some))
            some = []
    if some:
        work.append(partial(add, some))
    run_reads(
        work,
        threads or DEFAULT_THREADS,
        stores=[tensor.source.store for tensor in tensors.values()],
    )
    return {name: content.result() for name, content in contents.items()}
