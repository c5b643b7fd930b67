"""Computes CRC-32 and content hashes of the elements of tensors, in C order.

The CRC-32 of a tensor is found in the cheapest possible way:

1. The file records it for exactly these bytes.
2. The file records it for several chunks that are consecutive in C order, such as shards of rows.
   The checksums are combined.
3. The elements are one range of a file, or are in memory: that range is read from start to end.
4. In all other cases the elements are read in C order, block by block. This is necessary for
   strides, shards of columns, other byte orders and conjugated tensors.

Content hashes (`core/content_hash.py`) tell which tensors have changed since an older checkpoint.
The first 64 KiB of each tensor, its head, are compared first. Only tensors with an equal head are
read completely. So if everything changes, only the heads are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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

BLOCK_NBYTES = 8 << 20
"""The bytes of a block that is read for a checksum. It has enough rows of a tensor with strides
that neighboring ranges are read together."""

HASH_BLOCK_NBYTES = 4 << 20
"""The bytes of a block that is read for a hash, and of several small ones that one task reads."""

MAX_TASK_BLOCKS = 64
"""The most small blocks that one task reads for hashes."""

MAX_TASK_ROWS = 4096
"""The most rows of a table that one task reads for hashes."""

NamedBlock = tuple[str, ContiguousBlock]
"""A block of a tensor, with the name of the tensor."""


def find_recorded_crc(tensor: LazyTensor) -> int | None:
    """Return the CRC-32 of a tensor from the records of its file, without reading data.

    Returns:
        None if the file does not record checksums of exactly these bytes.
    """
    if tensor.traits.meta:
        # A tensor on the meta device has no bytes.
        return None
    if tensor.size == 0:
        # This is the CRC-32 of no bytes.
        return 0
    if len(tensor.chunks) > 1:
        return _combine_recorded_crcs(tensor)
    if find_contiguous_bytes(tensor) is None:
        return None
    (chunk,) = tensor.chunks
    storage = chunk.storage
    # Files record checksums of whole storages, which say nothing about a range of a storage.
    is_whole_storage = chunk.offset == 0 and storage.nbytes == tensor.nbytes
    if not is_whole_storage:
        return None
    return storage.crc32


def _combine_recorded_crcs(tensor: LazyTensor) -> int | None:
    """Combine the recorded checksums of the chunks of a tensor to the checksum of the tensor.

    Returns:
        None if a chunk has no recorded checksum, or is not consecutive in the C order of the tensor.
    """
    if tensor.traits.conj or tensor.traits.neg:
        # The elements of a conjugated or negated tensor are not the stored bytes.
        return None
    chunk_crcs = BlockCrcs()
    total_nbytes = 0
    for chunk in tensor.chunks:
        if chunk.box.count == 0:
            continue
        crc = chunk.storage.crc32
        start = _find_chunk_start(chunk, tensor)
        if crc is None or start is None:
            return None
        chunk_crcs.add_crc(start, chunk.storage.nbytes, crc)
        total_nbytes += chunk.storage.nbytes

    # Two chunks may be the same part of the tensor. `chunk_crcs` has only one of them, but the total
    # counts both, and is too large then.
    if total_nbytes != tensor.nbytes or not chunk_crcs.is_complete(total_nbytes):
        return None
    return chunk_crcs.crc32()


def _find_chunk_start(chunk: Chunk, tensor: LazyTensor) -> int | None:
    """Return where the bytes of a chunk start among the bytes of its tensor in C order.

    Returns:
        None unless the storage of the chunk has exactly these bytes, and they are consecutive.
    """
    dtype = tensor.dtype
    storage = chunk.storage
    # Checksums of tensors are those of little-endian elements.
    if storage.byteorder != "little" and dtype.swap_nbytes > 1:
        return None
    if chunk.offset != 0 or chunk.box.count * dtype.bits != storage.nbytes * 8:
        return None
    if not is_c_ordered(chunk.shape, chunk.strides, dtype.bits):
        return None

    # A consecutive box has length 1 in its first dimensions, any length in the next one, and the
    # full length in all others.
    # `cut_axis` is the axis of "any length".
    cut_axis = 0
    while cut_axis < tensor.ndim and chunk.shape[cut_axis] <= 1:
        cut_axis += 1
    if chunk.shape[cut_axis + 1 :] != tensor.shape[cut_axis + 1 :]:
        return None

    strides = c_strides(tensor.shape, dtype.bits)
    axes = zip(chunk.box.start, strides, strict=True)
    start_bit = sum(index * stride for index, stride in axes)
    if start_bit % 8:
        # Packed elements may start inside of a byte, and checksums are of whole bytes.
        return None
    return start_bit // 8


def compute_crcs(
    tensors: Sequence[LazyTensor],
    *,
    use_recorded: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
    allow_expansion: bool = False,
) -> list[int]:
    """Return the CRC-32 of each tensor.

    Args:
        tensors: The tensors. Tied tensors are read once.
        use_recorded: Whether to use checksums that the files record. Otherwise everything is read.
        threads: The number of threads.
        progress: Called with the bytes that were read.
        allow_expansion: Whether an expanded view may have many more elements than are stored.

    Raises:
        LimitExceeded: An expanded view has too many elements.
    """
    crcs: dict[int, int] = {}
    # Tied tensors are the same view of the same storage. The first of them is read for all.
    index_of_view: dict[ViewIdentity, int] = {}
    # For each tensor without a recorded checksum, the index of the first tensor with its view.
    first_index: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        recorded_crc = find_recorded_crc(tensor) if use_recorded else None
        if recorded_crc is not None:
            crcs[index] = recorded_crc
            continue
        first_index[index] = index_of_view.setdefault(identify_view(tensor), index)
        if first_index[index] == index and not allow_expansion:
            with error_context(tensor=tensor.name):
                tensor.check_expansion()

    read_indices = [*index_of_view.values()]
    read_crcs = _read_crcs([tensors[index] for index in read_indices], threads, progress)
    crcs.update(zip(read_indices, read_crcs, strict=True))
    return [crcs[first_index.get(index, index)] for index in range(len(tensors))]


def _read_crcs(
    tensors: Sequence[LazyTensor], threads: int | None, progress: Progress | None
) -> list[int]:
    """Read the bytes of tensors, and return the CRC-32 of each.

    Tensors that are one range of a file are read as ranges, so that neighbors in a file are one
    read. All other tensors are read block by block.
    """
    # The ranges and the blocks of tensors, by the index of the tensor.
    ranges_by_store: dict[Store, dict[int, tuple[str, int, int]]] = {}
    block_crcs: dict[int, BlockCrcs] = {}
    tasks: list[Callable[[], None]] = []
    for index, tensor in enumerate(tensors):
        place = find_contiguous_bytes(tensor)
        if place is not None and find_bytes_in_memory(tensor) is None:
            ranges = ranges_by_store.setdefault(tensor.source.store, {})
            ranges[index] = (*place, tensor.nbytes)
            continue
        block_crcs[index] = BlockCrcs()
        for block in split_into_blocks(tensor, BLOCK_NBYTES):
            tasks.append(partial(_add_block, block, tensor.name, block_crcs[index], progress))

    sums_by_store: dict[Store, RangeSums] = {}
    for store, ranges in ranges_by_store.items():
        sums = RangeSums(store, Ranges.from_tuples([*ranges.values()]))
        sums_by_store[store] = sums
        tasks += sums.tasks(progress)
    if tasks:
        stores = [tensor.source.store for tensor in tensors]
        run_reads(tasks, threads or DEFAULT_THREADS, stores=stores)

    crcs = {index: tensor_crcs.crc32() for index, tensor_crcs in block_crcs.items()}
    for store, sums in sums_by_store.items():
        for range_index, index in enumerate(ranges_by_store[store]):
            crcs[index] = sums.crc32(range_index, name=tensors[index].name)
    return [crcs[index] for index in range(len(tensors))]


def _add_block(
    block: ContiguousBlock, name: str, crcs: BlockCrcs, progress: Progress | None
) -> None:
    """Read a block of a tensor, and add its checksum to those of the tensor."""
    with error_context(tensor=name):
        data = read_block(block)
    crcs.add(block.start, data)
    if progress is not None:
        progress(data.nbytes)


def find_unchanged(
    tensors: Mapping[str, LazyTensor],
    recorded: Mapping[str, HashAndHead],
    *,
    threads: int | None = None,
    block_nbytes: int | None = None,
) -> tuple[set[str], set[str]]:
    """Compare tensors with content hashes that an older checkpoint records.

    The heads, which are checksums of the first 64 KiB, are compared first. Only tensors with an
    equal head are read completely.

    Args:
        tensors: The tensors by name.
        recorded: The recorded hash or head, or both, of each tensor.
        threads: The number of threads.
        block_nbytes: The most bytes that a thread reads at a time.

    Returns:
        The names of the tensors with an equal hash, and the names of those with another head. A
        tensor with an equal head and another or no recorded hash is in neither set: it must be
        saved again, and its new hash is worth computing.
    """
    tensors_with_head: dict[str, LazyTensor] = {}
    for name, recorded_hashes in recorded.items():
        if recorded_hashes.head is not None:
            tensors_with_head[name] = tensors[name]
    head_crcs = _compute_head_crcs(tensors_with_head, threads)
    changed = {name for name, head_crc in head_crcs.items() if head_crc != recorded[name].head}

    candidates: dict[str, LazyTensor] = {}
    for name, recorded_hashes in recorded.items():
        if name not in changed and recorded_hashes.hash is not None:
            candidates[name] = tensors[name]
    hashes = compute_hashes(candidates, threads=threads, block_nbytes=block_nbytes)
    unchanged = {name for name, hashed in hashes.items() if hashed.hash == recorded[name].hash}
    return unchanged, changed


def find_unchanged_rows(
    table: Table, recorded: Mapping[int, int], *, threads: int | None = None
) -> set[int]:
    """Return the rows of a table that have the content hash that is recorded for them.

    This is `find_unchanged` for small tensors without an object for each of them. They have no head
    that could be compared first.

    Args:
        table: The table.
        recorded: The hash of each row. A row must be a whole tensor of at most 64 KiB.
        threads: The number of threads.
    """
    # Imported here because it imports a library that only saves need.
    from holdfast.core.content_hash import hash_small_pieces

    unchanged: set[int] = set()

    def compare(rows: Sequence[int]) -> None:
        """Read rows, and add those with an equal hash to `unchanged`."""
        hashes = hash_small_pieces(table.read_bytes(rows))
        pairs = zip(rows, hashes, strict=True)
        unchanged.update([row for row, row_hash in pairs if row_hash == recorded[row]])

    all_rows = [*recorded]
    tasks: list[Callable[[], None]] = []
    for first in range(0, len(all_rows), MAX_TASK_ROWS):
        tasks.append(partial(compare, all_rows[first : first + MAX_TASK_ROWS]))
    run_reads(tasks, threads or DEFAULT_THREADS, stores=table.stores)
    return unchanged


def compute_hashes(
    tensors: Mapping[str, LazyTensor],
    *,
    threads: int | None = None,
    block_nbytes: int | None = None,
) -> dict[str, HashAndHead]:
    """Return the content hash and the head of each tensor. Every byte is read once.

    Args:
        tensors: The tensors by name.
        threads: The number of threads. Each needs memory for a few blocks.
        block_nbytes: The most bytes that a thread reads at a time.
    """
    max_nbytes = block_nbytes or HASH_BLOCK_NBYTES

    def iterate_blocks() -> Iterator[NamedBlock]:
        """Yield all blocks of all tensors."""
        for name, tensor in tensors.items():
            for block in split_into_blocks(tensor, choose_block_nbytes(tensor, max_nbytes)):
                yield name, block

    return _hash_blocks(tensors, iterate_blocks(), threads, needs_hash=True)


def _compute_head_crcs(
    tensors: Mapping[str, LazyTensor], threads: int | None
) -> dict[str, int | None]:
    """Read only the head of each tensor, its first 64 KiB, and return the CRC-32 of each head.

    Returns:
        The CRC-32 by the name of the tensor; None for a tensor of 64 KiB or less, which has no
        head, because its hash takes no longer.
    """
    # Imported here because it imports a library that only saves need.
    from holdfast.core.content_hash import HEAD_NBYTES

    def iterate_head_blocks() -> Iterator[NamedBlock]:
        """Yield the blocks that start in the head of a tensor, for all tensors."""
        for name, tensor in tensors.items():
            # Blocks end where rows end. So they can be shorter than the head, which then consists
            # of several of them.
            for block in split_into_blocks(tensor, HEAD_NBYTES):
                if block.start >= HEAD_NBYTES:
                    break
                yield name, block

    hashes = _hash_blocks(tensors, iterate_head_blocks(), threads, needs_hash=False)
    return {name: hashed.head for name, hashed in hashes.items()}


def _hash_blocks(
    tensors: Mapping[str, LazyTensor],
    blocks: Iterable[NamedBlock],
    threads: int | None,
    *,
    needs_hash: bool,
) -> dict[str, HashAndHead]:
    """Read blocks of tensors, and return the hash of each tensor or only its head.

    Small blocks share a task, because a task for each of a hundred thousand tensors costs more than
    reading them.

    Args:
        tensors: The tensors by name.
        blocks: All of their blocks, or those of the heads.
        threads: The number of threads.
        needs_hash: Whether the hashes are computed, and not only the heads.
    """
    # Imported here because it imports a library that only saves need.
    from holdfast.core.content_hash import ContentHasher

    hashers: dict[str, ContentHasher] = {}
    for name, tensor in tensors.items():
        hashers[name] = ContentHasher(tensor.nbytes, needs_hash=needs_hash)

    def add_blocks(named_blocks: Sequence[NamedBlock]) -> None:
        """Read blocks, and add them to the hashes of their tensors."""
        for name, block in named_blocks:
            with error_context(tensor=name), lend_block(block) as data:
                hashers[name].add(block.start, data)

    tasks: list[Callable[[], None]] = []
    task_blocks: list[NamedBlock] = []
    task_nbytes = 0
    for name, block in blocks:
        task_blocks.append((name, block))
        task_nbytes += block.nbytes
        if len(task_blocks) == MAX_TASK_BLOCKS or task_nbytes >= HASH_BLOCK_NBYTES:
            tasks.append(partial(add_blocks, task_blocks))
            task_blocks = []
            task_nbytes = 0
    if task_blocks:
        tasks.append(partial(add_blocks, task_blocks))
    stores = [tensor.source.store for tensor in tensors.values()]
    run_reads(tasks, threads or DEFAULT_THREADS, stores=stores)
    return {name: hasher.result() for name, hasher in hashers.items()}
