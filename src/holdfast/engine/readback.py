"""Read back what was written, before it is published, and compare: what the disk gives is what was meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from holdfast.core.crc import Sums
from holdfast.engine.digest import recorded_crc
from holdfast.engine.execute import default_threads, run_all
from holdfast.errors import Corrupted, NotCommitted
from holdfast.plan.saves import Data, FilePlan
from holdfast.stores.local import read_at

__all__ = ["check_source", "check_written", "file_crcs"]

BLOCK_NBYTES = 4 << 20


def check_source(plan: FilePlan, crcs: Mapping[str, int]) -> None:
    """Compare what was read with what the source records of itself, where it records anything."""
    for segment in plan.segments:
        if isinstance(segment, Data):
            recorded = recorded_crc(segment.tensor)
            if recorded is not None and segment.nbytes and recorded != crcs[segment.label]:
                (chunk,) = segment.tensor.chunks
                raise Corrupted(
                    "the source does not have the checksum that it records; nothing was written",
                    file=chunk.storage.key,
                    tensor=segment.tensor.name or segment.label,
                    offset=chunk.storage.start,
                    expected=recorded,
                    found=crcs[segment.label],
                )


def check_written(plan: FilePlan, descriptor: int, crcs: Mapping[str, int], *, path: str, threads: int | None = None) -> None:
    """Compare what the file gives back with the checksums of what was written to it."""
    for label, found in file_crcs(plan, descriptor, threads=threads).items():
        if found != crcs[label]:
            raise NotCommitted(
                "what was written does not read back the same: the disk or the memory is failing; nothing was published",
                file=path,
                tensor=label,
                expected=crcs[label],
                found=found,
            )


def file_crcs(plan: FilePlan, descriptor: int, *, threads: int | None = None) -> dict[str, int]:
    """The CRC-32 of every data segment, from the bytes of an open file that has this layout."""
    sums: dict[str, Sums] = {}

    def task(label: str, offset: int, start: int, nbytes: int) -> Callable[[], None]:
        def run() -> None:
            block = np.empty(nbytes, np.uint8).data
            read_at(descriptor, offset + start, block)
            sums[label].add(start, block)

        return run

    work = []
    for segment, offset in zip(plan.segments, plan.offsets(), strict=True):
        if isinstance(segment, Data):
            sums[segment.label] = Sums()
            cuts = range(0, segment.nbytes, BLOCK_NBYTES)
            work += [task(segment.label, offset, start, min(BLOCK_NBYTES, segment.nbytes - start)) for start in cuts]
    if work:
        run_all(work, threads or default_threads())
    return {label: blocks.crc32() for label, blocks in sums.items()}
