"""Checksums by which ranks compare tensors that several of them have.

A plain tensor is taken as replicated, and one rank writes it. Where the others have something else under its name, the state of a
random number generator or a shard that nobody declared, theirs would be lost. So every rank sums up what it has whole:

1. What is in the memory of this process, or short, by the CRC-32 of its bytes in C order, on all threads.
2. What is long and on a GPU, there: sums of weighted words, a row at a time, then a hash of those. A 512th of it is moved.

The sums are compared in `ranks/merge`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch

from holdfast.core.crc import crc32_each
from holdfast.core.documents import write_document
from holdfast.core.table import IRREGULAR, Table
from holdfast.core.tensor import LazyTensor
from holdfast.engine.blocks import split_into_blocks
from holdfast.engine.digest import compute_crcs
from holdfast.ranks.merge import SUMS
from holdfast.torch.cuda.host import BLOCK_NBYTES
from holdfast.torch.cuda.memory import GpuSource

ROW = 512
"""Words of eight bytes that make one sum."""

ALONE_NBYTES = 16 << 20
"""Bytes that one thread sums up as soon as several would."""

SMALL_NBYTES = 8 * ROW
"""Bytes of a piece that is hashed as it is."""

SMALL_ROW_NBYTES, TOGETHER = 64 << 10, 512
"""Bytes of a tensor that is read together with others, and how many are at a time."""


def replica_sums(table: Table, *, threads: int) -> bytes:
    """The sums of all tensors of which this rank has all elements, in memory or on a GPU, by name."""
    host: dict[str, LazyTensor] = {}
    gpu: dict[str, torch.Tensor] = {}
    sums_by_name: dict[str, tuple[int | bytes]] = {}
    # Rows that are all of their storages, and short, are read together, from wherever they are.
    short = [kind.is_whole and 0 < kind.nbytes <= SMALL_ROW_NBYTES for kind in table.kinds]
    small = [
        row
        for row, kind in enumerate(table.kind_indices)
        if table.storage_indices[row] != IRREGULAR and short[kind]
    ]
    others = table.names
    if small:
        for first in range(0, len(small), TOGETHER):
            rows = small[first : first + TOGETHER]
            sums_by_name |= {
                table.names[row]: (crc,)
                for row, crc in zip(rows, crc32_each(table.read_bytes(rows)), strict=True)
            }
        others = [name for name in others if name not in sums_by_name]
    for name in others:
        tensor = table[name]
        if (
            not tensor.size
            or tensor.traits.meta
            or sum(chunk.box.count for chunk in tensor.chunks) != tensor.size
        ):
            continue
        source = tensor.source
        if isinstance(source, GpuSource) and tensor.nbytes > SMALL_ROW_NBYTES:
            gpu[name] = _on_gpu(tensor, source)
        elif isinstance(source, GpuSource) or source.store.read_profile.is_in_memory:
            host[name] = tensor
    some = sum(tensor.nbytes for tensor in host.values()) > ALONE_NBYTES
    crcs = compute_crcs(list(host.values()), threads=threads if some else 1, allow_expansion=True)
    sums_by_name |= {name: (crc,) for name, crc in zip(host, crcs, strict=True)}
    sums_by_name |= {
        name: (hashlib.blake2b(sums, digest_size=16).digest(),) for name, sums in _fetched(gpu)
    }
    return write_document(SUMS, sums_by_name)


def byte_sums(byte_rows: torch.Tensor) -> torch.Tensor:
    """The weighted sums of a row of bytes, on its device: one for every `ROW` words; what is left over follows as it is."""
    body = byte_rows.numel() // SMALL_NBYTES * SMALL_NBYTES
    if not body:
        return byte_rows
    words = byte_rows[:body]
    words = (
        words if words.data_ptr() % 8 == 0 and words.storage_offset() % 8 == 0 else words.clone()
    ).view(torch.int64)
    # Odd numbers without a pattern: a change of one word changes its sum, and so does an exchange of two.
    weights = (
        torch.arange(1, ROW + 1, dtype=torch.int64, device=byte_rows.device) * 0x1E3779B97F4A7C15
        | 1
    )
    sums = (words.view(-1, ROW) * weights).sum(1)
    return torch.cat([sums.view(torch.uint8), byte_rows[body:]])


def _on_gpu(tensor: LazyTensor, source: GpuSource) -> torch.Tensor:
    return torch.cat(
        [
            byte_sums(byte_rows)
            for byte_rows in source.byte_rows(
                [piece.tensor for piece in split_into_blocks(tensor, BLOCK_NBYTES)]
            )
        ]
    )


def _fetched(sums: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, memoryview]]:
    """Bytes from GPUs, all of a device in one piece: for each by itself this would wait, thousands of times."""
    by_device: dict[torch.device, list[str]] = {}
    for name, byte_rows in sums.items():
        by_device.setdefault(byte_rows.device, []).append(name)
    for names in by_device.values():
        row = torch.cat([sums[name] for name in names]).cpu().numpy().data
        start = 0
        for name in names:
            stop = start + sums[name].numel()
            yield name, row[start:stop]
            start = stop
