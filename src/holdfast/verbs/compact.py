"""`compact`: a checkpoint without the bytes that no tensor reaches, such as the 2.4 GB parent of a view of ten rows.

    storage   │ · · · · a a a a · · · · · · · · b b · · │       a and b were views of it, and have no byte in common
    compact   │ a a a a │ b b │

1. Tensors of one storage that overlap, or touch, belong together; each such group is a storage of its own.
2. The checkpoint is written again in its format, each group once. What is tied stays tied, and views of each other stay views.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk
from holdfast.core.dtype import WIDEST_NBYTES
from holdfast.core.options import InPlaceOptions, validate_arguments
from holdfast.core.protocols import State
from holdfast.core.sharing import RangeGroup, find_reached_ranges
from holdfast.core.table import IRREGULAR
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import replace
from holdfast.verbs.open import Openable
from holdfast.verbs.shared.models import plan_rewrite
from holdfast.verbs.shared.planned import (
    Destination,
    Planned,
    Saved,
    make_report_fields,
    plan_derived_checkpoint,
)
from holdfast.verbs.shared.state import replace_rows, replace_table, tabulate_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted(Saved):
    """The files that `compact` wrote, or would write."""

    source: str
    before_nbytes: int
    """Bytes of the files that were read."""

    @property
    def dropped_nbytes(self) -> int:
        """Bytes by which it became smaller."""
        return max(self.before_nbytes - self.nbytes, 0)

    def _lines(self) -> list[str]:
        would = "went" if self.done else "would go"
        return [
            f"{self.source}: {self.dropped_nbytes:,} of {self.before_nbytes:,} bytes {would}",
            *Saved._lines(self),
        ]


@validate_arguments
def compact(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None = None,
    **options: Unpack[InPlaceOptions],
) -> Compacted:
    """Write a checkpoint again without what no tensor reaches: at `dst`, or in its place, atomically (`in_place=True`).

    Raises `Unsupported` for a format that can be read and not written, where no other path is given.
    """
    return plan_compact(src, dst, options).carry_out(options["progress"])


def plan_compact(
    src: Openable | Checkpoint, dst: str | os.PathLike[str] | None, options: InPlaceOptions
) -> Planned[Compacted]:

    def lay_out(source: Checkpoint, where: Destination) -> Planned[Compacted]:
        described = tabulate_state(source, limits=options["limits"])
        plan = plan_rewrite(source, _without_gaps(described), where)
        report = Compacted(
            **make_report_fields(plan, where.path),
            source=source.path,
            before_nbytes=source.stored_nbytes,
        )
        return Planned(plan, report, where.writing, reads=described.tensors.stores)

    return plan_derived_checkpoint(src, dst, lay_out, options, programs=True)


def _without_gaps(state: State) -> State:
    """A state in which no storage holds more than its tensors reach without a gap."""
    table = state.tensors
    views = {number for number, kind in enumerate(table.kinds) if not kind.is_whole}
    parts = (
        {
            number
            for number, kind in zip(table.storage_indices, table.kind_indices, strict=True)
            if kind in views
        }
        if views
        else set()
    )
    # A row that is all of its storage leaves nothing of it, and neither do others over that storage.
    tensors = {
        row: table.lazy_tensor(row)
        for row, number in enumerate(table.storage_indices)
        if number in parts or number == IRREGULAR
    }
    found = find_reached_ranges(tensors.values(), aligned=WIDEST_NBYTES)
    moved: dict[int, LazyTensor] = {}
    for row, tensor in tensors.items():
        chunks = tuple(_in_group(chunk, tensor, found[chunk.storage]) for chunk in tensor.chunks)
        if chunks != tensor.chunks:
            moved[row] = replace(tensor, chunks=chunks)
    return replace_table(state, replace_rows(table, moved)) if moved else state


def _in_group(chunk: Chunk, tensor: LazyTensor, found: Sequence[RangeGroup[None]]) -> Chunk:
    start, stop = chunk.byte_range(tensor.dtype)
    # A packed storage is kept whole: torch pads its rows. One group is what every writer makes of it by itself.
    if len(found) < 2 or start == stop or tensor.dtype.packed:
        return chunk
    group = found[bisect_right(found, start, key=lambda one: one.start) - 1]
    storage = replace(
        chunk.storage,
        start=chunk.storage.start + group.start,
        nbytes=group.stop - group.start,
        crc32=None,
    )
    return replace(chunk, storage=storage, offset=chunk.offset - group.start * 8)
