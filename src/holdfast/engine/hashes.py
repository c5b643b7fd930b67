"""Which tensors are what they were: content hashes of tensors (`core.content_hash`), compared with recorded ones.

1. The first 64 KiB of each are looked at. Where they differ, the tensor has changed, and nothing more of it is read.
2. The others are read from end to end, in parallel, a few blocks at a time, and hashed.

So a run in which everything changes pays for the heads alone: what changed gets no hash either. What is in this process's memory
is hashed where it lies; everything else is read as a save would read it (`engine.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from holdfast.core.content_hash import HEAD_NBYTES, ContentHash, Hashed, hash_bytes, hash_short
from holdfast.core.crc import crc32
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.engine.blocks import Slab, mapped_bytes, slab_block, slab_bytes, slabs
from holdfast.engine.threads import default_threads
from holdfast.engine.transfer import run_reads
from holdfast.errors import located

BLOCK_NBYTES = 4 << 20
"""Bytes that a thread reads or looks at in one task."""

BATCH = 4096
"""Rows of a table that are one task."""

TOGETHER = 256
"""Small tensors that are one task."""


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
    small: dict[str, Hashed] = {}
    large: dict[str, ContentHash] = {}
    work: list[Callable[[], None]] = []
    few: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if tensor.nbytes > HEAD_NBYTES:
            large[name] = ContentHash(tensor.nbytes)
            work += _block_tasks(name, tensor, large[name], block=block or BLOCK_NBYTES)
        else:
            few[name] = tensor
    work += [_small_task(some, small) for some in _groups(few)]
    _run(work, tensors.values(), threads)
    return small | {name: content.done() for name, content in large.items()}


def _heads(tensors: Mapping[str, LazyTensor], threads: int | None) -> dict[str, int]:
    """The head of each tensor, all of them longer than one."""
    found: dict[str, int] = {}

    def task(some: Mapping[str, LazyTensor]) -> Callable[[], None]:
        def run() -> None:
            for name, tensor in some.items():
                with located(tensor=name):
                    found[name] = _head(tensor)

        return run

    _run([task(some) for some in _groups(tensors)], tensors.values(), threads)
    return found


def _head(tensor: LazyTensor) -> int:
    memory = mapped_bytes(tensor)
    if memory is not None:
        return crc32(memory[:HEAD_NBYTES])
    crc = 0
    for slab in slabs(tensor, HEAD_NBYTES):
        if slab.start >= HEAD_NBYTES:
            break
        with slab_bytes(slab) as data:
            crc = crc32(data[: HEAD_NBYTES - slab.start], crc)
    return crc


def _block_tasks(name: str, tensor: LazyTensor, content: ContentHash, *, block: int) -> Iterator[Callable[[], None]]:
    memory = mapped_bytes(tensor)
    if memory is not None:
        for start in range(0, memory.nbytes, BLOCK_NBYTES):
            yield partial(content.add, start, memory[start : start + BLOCK_NBYTES])
        return
    for slab in slabs(tensor, slab_block(tensor, block)):
        yield partial(_add, slab, content, name)


def _add(slab: Slab, content: ContentHash, name: str) -> None:
    with located(tensor=name), slab_bytes(slab) as data:
        content.add(slab.start, data)


def _small_task(some: Mapping[str, LazyTensor], found: dict[str, Hashed]) -> Callable[[], None]:
    def run() -> None:
        for name, tensor in some.items():
            data = bytearray()
            with located(tensor=name):
                for slab in slabs(tensor, HEAD_NBYTES):
                    with slab_bytes(slab) as block:
                        data += block
            found[name] = hash_bytes(data)

    return run


def _groups(tensors: Mapping[str, LazyTensor]) -> Iterator[dict[str, LazyTensor]]:
    names = list(tensors)
    for first in range(0, len(names), TOGETHER):
        yield {name: tensors[name] for name in names[first : first + TOGETHER]}


def _run(work: Sequence[Callable[[], None]], tensors: Iterable[LazyTensor], threads: int | None) -> None:
    if work:
        run_reads(work, threads or default_threads(), stores=[tensor.source.store for tensor in tensors])
