"""The CRC-32 of a tensor's elements in C order: from the file's own records where they say it, else from the bytes, in parallel.

A tensor takes one of four ways, the cheapest that it can:

1. The file records the checksum of exactly these bytes: nothing is read.
2. It is cut into pieces that each have such a record and that are consecutive in C order (shards of rows): the records combine.
3. Its bytes lie in one piece of one file: they are swept. In this process's memory: they are looked at.
4. Anything else (strides, shards of columns, big-endian, conjugated): it is read piece by piece, in C order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.core.chunk import Chunk, c_strides, in_c_order
from holdfast.core.crc import Sums
from holdfast.core.protocols import Store
from holdfast.core.sharing import View, identity
from holdfast.core.tensor import LazyTensor
from holdfast.engine.blocks import ContiguousBlock, contiguous_blocks, contiguous_bytes, mapped_bytes, read_block
from holdfast.engine.checksums import Progress, Span, Sweep
from holdfast.engine.threads import default_threads
from holdfast.engine.transfer import run_reads
from holdfast.errors import located

BLOCK_NBYTES = 8 << 20
"""Bytes of a piece: enough rows of a strided tensor that neighbouring runs are read together."""


def recorded_crc(tensor: LazyTensor) -> int | None:
    """The checksum, where the file records it for exactly these bytes, in one piece or in several; else None."""
    if tensor.traits.meta:
        return None
    if tensor.size == 0:
        return 0
    if len(tensor.chunks) > 1:
        return _recorded_pieces(tensor)
    if contiguous_bytes(tensor) is None:
        return None
    (chunk,) = tensor.chunks
    storage = chunk.storage
    return storage.crc32 if chunk.offset == 0 and storage.nbytes == tensor.nbytes else None


def _recorded_pieces(tensor: LazyTensor) -> int | None:
    """The checksum from the records of pieces that follow each other in C order."""
    if tensor.traits.conj or tensor.traits.neg:
        return None
    sums, nbytes = Sums(), 0
    for chunk in tensor.chunks:
        if chunk.box.count == 0:
            continue
        crc, start = chunk.storage.crc32, _run_start(chunk, tensor)
        if crc is None or start is None:
            return None
        sums.note(start, chunk.storage.nbytes, crc)
        nbytes += chunk.storage.nbytes
    # A piece that is there twice takes one place, and shows in the length.
    return sums.crc32() if nbytes == tensor.nbytes and sums.covers(nbytes) else None


def _run_start(chunk: Chunk, tensor: LazyTensor) -> int | None:
    """The byte of the tensor's C order where a chunk begins that fills its storage and is one run of it; else None."""
    dtype, storage = tensor.dtype, chunk.storage
    if storage.byteorder != "little" and dtype.swap_nbytes > 1:
        return None
    if chunk.offset != 0 or chunk.box.count * dtype.bits != storage.nbytes * 8:
        return None
    if not in_c_order(chunk.shape, chunk.strides, dtype.bits):
        return None
    # One run: single rows, then part of one dimension, then whole dimensions.
    cut = next((d for d, n in enumerate(chunk.shape) if n > 1), tensor.ndim)
    if chunk.shape[cut + 1 :] != tensor.shape[cut + 1 :]:
        return None
    start = sum(a * s for a, s in zip(chunk.box.start, c_strides(tensor.shape, dtype.bits), strict=True))
    return start // 8 if start % 8 == 0 else None


def tensor_crcs(
    tensors: Sequence[LazyTensor],
    *,
    recorded: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
    expand: bool = False,
) -> list[int]:
    """One checksum a tensor. With `recorded=False` every byte is read, whatever the file says of it.

    Raises `LimitExceeded` for an expanded view whose elements are many more than were stored, unless it may `expand`.
    """
    known = [recorded_crc(t) if recorded else None for t in tensors]
    twins: dict[View, int] = {}
    twin_of: dict[int, int] = {}
    swept: dict[Store, tuple[list[int], list[Span]]] = {}
    parts: dict[int, Sums] = {}
    work: list[Callable[[], None]] = []
    for i, tensor in enumerate(tensors):
        if known[i] is not None:
            continue
        # Tied weights are read once.
        first = twins.setdefault(identity(tensor), i)
        if first != i:
            twin_of[i] = first
            continue
        if not expand:
            with located(tensor=tensor.name):
                tensor.check_expansion()
        place = contiguous_bytes(tensor)
        if place is not None and mapped_bytes(tensor) is None:
            numbers, spans = swept.setdefault(tensor.source.store, ([], []))
            numbers.append(i)
            spans.append(Span(place[0], place[1], tensor.nbytes))
        else:
            parts[i] = Sums()
            work += [_block_task(piece, tensor.name, parts[i], progress) for piece in contiguous_blocks(tensor, BLOCK_NBYTES)]
    sweeps = [(numbers, Sweep(store, spans)) for store, (numbers, spans) in swept.items()]
    for _, sweep in sweeps:
        work += sweep.tasks(progress)
    if work:
        run_reads(work, threads or default_threads(), stores=[tensor.source.store for tensor in tensors])
    for numbers, sweep in sweeps:
        for position, i in enumerate(numbers):
            known[i] = sweep.crc32(position, name=tensors[i].name)
    for i, sums in parts.items():
        known[i] = sums.crc32()
    return [known[twin_of.get(i, i)] or 0 for i in range(len(tensors))]


def _block_task(piece: ContiguousBlock, name: str, sums: Sums, progress: Progress | None) -> Callable[[], None]:
    def run() -> None:
        with located(tensor=name):
            data = read_block(piece)
        sums.add(piece.start, data)
        if progress is not None:
            progress(data.nbytes)

    return run
