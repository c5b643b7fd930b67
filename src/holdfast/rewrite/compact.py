"""`compact`: a checkpoint without the bytes that no tensor reaches, such as the 2.4 GB parent of a view of ten rows.

    storage   │ · · · · a a a a · · · · · · · · b b · · │       a and b were views of it, and have no byte in common
    compact   │ a a a a │ b b │

1. Tensors of one storage that overlap, or touch, belong together; each such island is a storage of its own.
2. The checkpoint is written again in its format, each island once. What is tied stays tied, and views of each other stay views.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from holdfast.core.chunk import Chunk, Storage
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.write import Progress
from holdfast.inspect.open import open as open_checkpoint
from holdfast.rewrite.places import plan_rewrite
from holdfast.rewrite.planned import PlannedSave, Writing
from holdfast.rewrite.save import Saved
from holdfast.rewrite.state import describe_state, map_tensors
from holdfast.stores.paths import local_path

__all__ = ["Compacted", "PlannedCompact", "compact", "planned_compact"]

WIDEST = 16
"""Bytes of the widest element: islands begin at multiples of it, so that every view begins with a whole element."""

Place = tuple[int, Storage]


@dataclass(frozen=True, slots=True)
class Compacted:
    """What `compact` did."""

    path: str
    format: str
    before_nbytes: int
    """Bytes of the files that were read."""
    after_nbytes: int
    """Bytes of those that were written."""
    saved: Saved

    @property
    def dropped_nbytes(self) -> int:
        """How much smaller it became."""
        return max(self.before_nbytes - self.after_nbytes, 0)


def compact(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    format: str | None = None,
    overwrite: bool = False,
    durable: bool = True,
    threads: int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Compacted:
    """Write a checkpoint again without what no tensor reaches: in its place, atomically, or at `output`.

    Raises `Unsupported` for a format that can be read and not written, where no other path is given.
    """
    writing = Writing(overwrite, durable, threads)
    with planned_compact(path, output=output, format=format, writing=writing, limits=limits) as planned:
        saved = planned.run(progress)
        return Compacted(saved.path, saved.format, planned.before_nbytes, saved.nbytes, saved)


@dataclass(frozen=True, slots=True)
class PlannedCompact(PlannedSave):
    """A `compact` that is laid out and not begun."""

    before_nbytes: int
    """Bytes of the files that are read."""


@contextmanager
def planned_compact(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    format: str | None = None,
    writing: Writing,
    limits: Limits | None = None,
) -> Iterator[PlannedCompact]:
    """A checkpoint laid out without what no tensor reaches, as long as the block lasts."""
    source = local_path(path)
    with open_checkpoint(source, threads=writing.threads, limits=limits) as opened:
        described = describe_state(opened, limits=limits)
        target = source if output is None else local_path(output)
        planned = plan_rewrite(opened, _islands(described), target, read=described, format=format, writing=writing)
        yield PlannedCompact(planned.plan, target, planned.writing, planned.before_commit, _nbytes(source))


def _nbytes(path: str) -> int:
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())


def _islands(state: State) -> State:
    """A state in which no storage holds more than its tensors reach without a gap."""
    reached: dict[Place, list[tuple[int, int]]] = {}
    for tensor in state.tensors.values():
        for chunk in tensor.chunks:
            start, stop = chunk.extent(tensor.dtype)
            if start < stop:
                reached.setdefault((id(tensor.source), chunk.storage), []).append((start, stop))
    islands = {place: _merged(extents) for place, extents in reached.items()}
    made: dict[int, tuple[LazyTensor, LazyTensor]] = {}

    def change(tensor: LazyTensor) -> LazyTensor:
        if id(tensor) not in made:
            chunks = tuple(_on_island(chunk, tensor, islands) for chunk in tensor.chunks)
            made[id(tensor)] = tensor, tensor if chunks == tensor.chunks else replace(tensor, chunks=chunks)
        return made[id(tensor)][1]

    tensors = {name: change(tensor) for name, tensor in state.tensors.items()}
    return replace(state, tree=map_tensors(state.tree, change), tensors=tensors)


def _merged(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that overlap or touch as one.

    >>> _merged([(32, 40), (0, 8), (6, 9)])
    [(0, 9), (32, 40)]
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((start - start % WIDEST, stop) for start, stop in extents):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def _on_island(chunk: Chunk, tensor: LazyTensor, islands: dict[Place, list[tuple[int, int]]]) -> Chunk:
    found = islands.get((id(tensor.source), chunk.storage), [])
    start, stop = chunk.extent(tensor.dtype)
    # A packed storage is kept whole: torch pads its rows. One island is what every writer makes of it by itself.
    if len(found) < 2 or start == stop or tensor.dtype.packed:
        return chunk
    low, high = next((low, high) for low, high in found if low <= start and stop <= high)
    storage = replace(chunk.storage, start=chunk.storage.start + low, nbytes=high - low, crc32=None)
    return replace(chunk, storage=storage, offset=chunk.offset - low * 8)
