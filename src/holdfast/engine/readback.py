"""Read back what was written, before it is published, and compare: what the disk gives is what was meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from holdfast.core.protocols import Store
from holdfast.engine.checksums import Span, Sweep
from holdfast.engine.coalesce import Ranges
from holdfast.engine.digest import recorded_crc
from holdfast.engine.saves import Data, FilePlan, Gathered, Hole, Memory
from holdfast.engine.threads import default_threads, run_all
from holdfast.engine.write import Block
from holdfast.errors import Corrupted, NotCommitted
from holdfast.stores.local import read_at
from holdfast.stores.virtual import Virtual, VirtualFile


def recorded_sums(plan: FilePlan) -> Iterator[tuple[Data, int]]:
    """The data of a plan whose source records its CRC-32, with that."""
    for segment in plan.segments:
        # Nothing is recorded of memory, which is most of what is saved.
        if isinstance(segment, Data) and any(chunk.storage.crc32 is not None for chunk in segment.tensor.chunks):
            crc = recorded_crc(segment.tensor)
            if crc is not None and segment.nbytes:
                yield segment, crc


def check_source(plan: FilePlan, crcs: Mapping[str, int]) -> None:
    """Compare what was read with what the source records of itself, where it records anything."""
    for segment, expected in recorded_sums(plan):
        found, place = crcs[segment.label], segment.tensor.chunks[0].storage
        if expected != found:
            raise Corrupted(
                "the source does not have the checksum that it records: it changed after it was written; get it again",
                file=place.key, tensor=segment.tensor.name or segment.label, offset=place.start, expected=expected, found=found,
            )  # fmt: skip


def check_written(
    plan: FilePlan, descriptor: int, crcs: Mapping[str, int], *, path: str, blocks: Sequence[Block] = (),
    threads: int | None = None,
) -> None:  # fmt: skip
    """Compare what the file gives back with the checksums of what was written to it. By `blocks`, as they were written: headers and
    all, and of a hundred thousand tensors a few. Where one is not the same, or where the blocks are not all of the file, every
    tensor is compared by itself, so that the one can be named."""
    same = _same_blocks(descriptor, blocks, nbytes=plan.nbytes, threads=threads) if _covers(plan, blocks) else None
    if same:
        return
    for label, found in file_crcs(plan, descriptor, threads=threads).items():
        if found != crcs[label]:
            raise NotCommitted(CHANGED, file=path, tensor=label, expected=crcs[label], found=found)
    if same is False:
        raise NotCommitted(CHANGED, file=path)


CHANGED = "what was written does not read back the same: the disk or the memory is failing; nothing was published"


def _covers(plan: FilePlan, blocks: Sequence[Block]) -> bool:
    """Whether blocks are all bytes of a file but those of holes."""
    places = zip(plan.segments, plan.offsets(), strict=True)
    spans = [(offset, segment.nbytes) for segment, offset in places if isinstance(segment, Hole)]
    reach = 0
    for start, nbytes in sorted([*spans, *((start, nbytes) for start, nbytes, _ in blocks)]):
        if start > reach:
            return False
        reach = max(reach, start + nbytes)
    return reach == plan.nbytes


def _same_blocks(descriptor: int, blocks: Sequence[Block], *, nbytes: int, threads: int | None) -> bool:
    written = Virtual("<written>")
    key = written.put(VirtualFile(nbytes, partial(read_at, descriptor)))
    sweep = Sweep(written, (Span(key, start, length) for start, length, _ in blocks))
    run_all(sweep.tasks(), threads or default_threads())
    return all(sweep.outcome(number) == crc for number, (_, _, crc) in enumerate(blocks))


def file_crcs(plan: FilePlan, descriptor: int, *, threads: int | None = None) -> dict[str, int]:
    """The CRC-32 of every data segment, from the bytes of an open file that has this layout."""
    written = Virtual("<written>")
    key = written.put(VirtualFile(plan.nbytes, partial(read_at, descriptor)))
    return stored_crcs(plan, written, key, threads=threads)


def stored_crcs(plan: FilePlan, store: Store, key: str, *, threads: int | None = None) -> dict[str, int]:
    """The CRC-32 of every data segment of a file that has this layout, from what its store gives."""
    labels: list[str] = []
    starts: list[int] = []
    lengths: list[int] = []
    for segment, offset in zip(plan.segments, plan.offsets(), strict=True):
        if isinstance(segment, Data | Memory):
            labels.append(segment.label)
            starts.append(offset)
            lengths.append(segment.nbytes)
        elif isinstance(segment, Gathered) and segment.lengths is not None:
            labels += segment.labels
            starts += [*accumulate(segment.lengths, initial=offset)][:-1]
            lengths += segment.lengths
    ranges = Ranges([key], np.zeros(len(labels), np.int64), np.array(starts, np.int64), np.array(lengths, np.int64))
    sweep = Sweep(store, ranges, block=store.medium.block_nbytes) if store.medium.block_nbytes else Sweep(store, ranges)
    run_all(sweep.tasks(), store.medium.requests or threads or default_threads())
    for number in sorted(sweep.errors):
        sweep.crc32(number, name=labels[number])  # raises
    return dict(zip(labels, sweep.crcs().tolist(), strict=True))
