"""`compact`: a checkpoint without the bytes that no tensor reaches, such as the 2.4 GB parent of a view of ten rows.

    storage   │ · · · · a a a a · · · · · · · · b b · · │       a and b were views of it, and have no byte in common
    compact   │ a a a a │ b b │

1. Tensors of one storage that overlap, or touch, belong together; each such island is a storage of its own.
2. The checkpoint is written again in its format, each island once. What is tied stays tied, and views of each other stay views.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from holdfast.api.open import open as open_checkpoint
from holdfast.api.save import Saved, unchanged, write_plan
from holdfast.api.state import describe_state, map_tensors
from holdfast.api.targets import NAMES, Options, format_for, plan_save
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.write import Progress
from holdfast.errors import Unsupported
from holdfast.formats.pt2.lay_out import lay_out_pt2, models_of
from holdfast.formats.pt2.replace import lay_out_replaced
from holdfast.formats.torch.layout import archive_name
from holdfast.plan.saves import SavePlan

__all__ = ["Compacted", "compact", "is_pt2_path", "plan_compact", "plan_rewrite", "weights_of"]

BESIDE = ("constants", "sample_inputs", "aotinductor")
"""What stands beside the weights in the tree of a `.pt2` model; `#2` is added where a weight has the name."""

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
    source = os.fspath(path)
    target = source if output is None else os.fspath(output)
    with open_checkpoint(source, threads=threads, limits=limits) as opened:
        plan = plan_compact(opened, target, format=format, limits=limits)
        described = describe_state(opened, limits=limits)
        inside = os.path.realpath(target) == os.path.realpath(source)
        before = _nbytes(source)
        saved = write_plan(
            plan, target, overwrite=overwrite or inside, durable=durable, threads=threads, progress=progress,
            before_commit=lambda: unchanged(described, target),
        )  # fmt: skip
        return Compacted(target, plan.format, before, saved.nbytes, saved)


def _nbytes(path: str) -> int:
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())


def plan_compact(source: Checkpoint, target: str, *, format: str | None = None, limits: Limits | None = None) -> SavePlan:
    """Lay out an open checkpoint without what no tensor reaches."""
    inside = os.path.realpath(target) == os.path.realpath(source.path)
    return plan_rewrite(source, _islands(describe_state(source, limits=limits)), target, format=format, in_place=inside)


def plan_rewrite(source: Checkpoint, state: State, target: str, *, format: str | None = None, in_place: bool = False) -> SavePlan:
    """Lay out a state that came from an open checkpoint, with other places for its tensors; in its own format where in place."""
    if in_place and format is None:
        format = source.format
        if format != "pt2" and format not in NAMES.values():
            raise Unsupported(
                f"{format} can be read and not written, so it cannot be replaced; give the new one another path",
                file=source.path,
                found=format,
            )
    if format == "pt2" or (format is None and is_pt2_path(target)):
        return _plan_pt2(source, state, target)
    options = Options(keep_tree=True)
    return plan_save(target, state, format_for(target, format, options), options)


def is_pt2_path(path: str) -> bool:
    """Whether a suffix asks for a package."""
    return path.lower().endswith(".pt2")


def _plan_pt2(source: Checkpoint, state: State, target: str) -> SavePlan:
    name = archive_name(target)
    if source.format != "pt2":
        return lay_out_pt2(models_of(replace(state, tree={"model": state.tree})), name=name)
    tensors = list(source.values())
    if not tensors:
        raise Unsupported("this package has no weights", file=source.path)
    models = weights_of(source, state.tree)
    plain = {model: weights for model, weights in models.items() if all(t.traits.subclass is None for t in weights.values())}
    kept = [f"model {model!r} has weights that are pickled objects, and keeps them all" for model in models if model not in plain]
    plan = lay_out_replaced(tensors[0].source, plain, name=name)
    return replace(plan, notes=(*kept, *plan.notes))


def weights_of(source: Checkpoint, tree: object) -> dict[str, dict[str, LazyTensor]]:
    """The weights of each model of a package that is open, taken from a tree like its own."""
    named = tree if isinstance(tree, dict) else {}
    several = all(isinstance(value, dict) for value in named.values()) and ", ".join(named) == source.metadata.get("models")
    models = named if several else {source.metadata.get("models", "model"): named}
    return {
        model: {name: value for name, value in values.items() if isinstance(value, LazyTensor) and not _beside(name, value)}
        for model, values in models.items()
    }


def _beside(name: str, value: object) -> bool:
    return name.removesuffix("#2") in BESIDE and not isinstance(value, LazyTensor)


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
