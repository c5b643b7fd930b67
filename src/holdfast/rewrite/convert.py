"""`convert`: `save(dst, open(src))`, streaming under a byte budget and checked on both sides.

Blocks go from file to file: read, summed, written. What the source records of its own checksums is compared with what was read;
what was written is read back and compared with what was meant, before anything is published. Memory is bounded by the number
of threads times a few blocks, whatever the checkpoint's size; `max_memory` chooses the block.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.dtype import DType
from holdfast.core.limits import Limits
from holdfast.core.protocols import Request, State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.blocks import contiguous_bytes
from holdfast.engine.execute import default_threads
from holdfast.engine.write import Progress
from holdfast.errors import CannotHold, LimitExceeded, NotCommitted, StoreError, Unsupported
from holdfast.inspect.open import open as open_checkpoint
from holdfast.plan.reads import plan_reads
from holdfast.plan.saves import SavePlan
from holdfast.rewrite.cast import Losses
from holdfast.rewrite.formats import Options, byte_count, format_for, plan_save
from holdfast.rewrite.models import Selection, select
from holdfast.rewrite.save import Saved, unchanged, write_plan
from holdfast.rewrite.state import describe_state
from holdfast.rewrite.transform import Edits, dtype_named, transform
from holdfast.stores.local import free_nbytes
from holdfast.stores.paths import local_path

__all__ = ["Conversion", "PlannedConversion", "convert", "plan_conversion"]

SMALLEST_BLOCK = 64 << 10
LARGEST_BLOCK = 4 << 20

BASE_NBYTES = 64 << 20
"""What the plan and the interpreter take beside the blocks, counted against the budget."""

COPIES = 4
"""Blocks that one thread may hold: what was read, what is computed from it, what is written, what is checked."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion does, or would do; `saved` says which."""

    source: str
    target: str
    format: str
    tensors: int
    read_nbytes: int
    """Bytes that are read from the source."""
    over_read_nbytes: int
    """Bytes among them that are read only because they lie between wanted ones."""
    write_nbytes: int
    files: tuple[tuple[str, int], ...]
    """Each file of the target and its length."""
    peak_nbytes: int
    """Memory above the interpreter's own that the conversion keeps to."""
    free_nbytes: int
    """What is free where the target goes; the old target stays until the new one is in place."""
    notes: tuple[str, ...]
    """What a person should know; when it is done, also how many values a cast saturated, took to zero or made infinite."""
    saved: Saved | None = None

    def explain(self) -> str:
        """The conversion in words."""
        over = f" ({self.over_read_nbytes:,} of them between wanted ones)" if self.over_read_nbytes else ""
        lines = [
            f"{self.source} → {self.target} ({self.format})",
            f"read   {self.read_nbytes:,} bytes{over}",
            f"write  {self.write_nbytes:,} bytes in {len(self.files):,} file{'s' if len(self.files) != 1 else ''}",
            f"memory {self.peak_nbytes:,} bytes at the most",
            f"space  {self.free_nbytes:,} bytes free" + ("" if self.free_nbytes >= self.write_nbytes else ": NOT ENOUGH"),
        ]
        return "\n".join([*lines, *(f"note   {note}" for note in self.notes)])


def convert(
    src: str | os.PathLike[str] | Checkpoint,
    dst: str | os.PathLike[str],
    *,
    format: str | None = None,
    max_memory: int | str = "1GiB",
    dtype: str | None = None,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    rename: Sequence[tuple[str, str]] = (),
    model: str | None = None,
    constants: bool = False,
    sample_inputs: bool = False,
    max_shard_size: int | str | None = None,
    tensors_only: bool = False,
    keep_tree: bool = True,
    sparse: str = "never",
    resume: bool = False,
    overwrite: bool = False,
    durable: bool = True,
    verify: bool = True,
    explain: bool = False,
    threads: int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint of any format that opens to any format that can be written.

    `keep`, `drop` and `rename` take globs on dotted names; `dtype` casts floating-point tensors. `tensors_only` leaves out what
    is no tensor; without it, what the target cannot hold is an error that lists all of it, and nothing is written. safetensors
    keeps the rest in its header where Holdfast finds it (`keep_tree`). `sparse` is as for `save`; zeros are counted first, so it
    reads the source when the conversion is planned. With `explain=True` nothing is done and the result says
    what would be. `resume` takes up an interrupted conversion to a directory: its finished files are checked and kept.

    Of a `.pt2`, the state dict is converted: parameters and buffers, of `model` where it holds several; `constants` and
    `sample_inputs` come along when asked for, and a note says what stays behind. `model` chooses from any package.
    """
    options = Options(None if max_shard_size is None else byte_count(max_shard_size), keep_tree, sparse)
    edits = Edits(tuple(keep), tuple(drop), tuple(rename), dtype_named(dtype) if dtype else None, tensors_only)
    opened = src if isinstance(src, Checkpoint) else open_checkpoint(src, threads=1, limits=limits)
    try:
        planned = plan_conversion(
            opened, local_path(dst), format=format, selection=Selection(model, constants, sample_inputs), edits=edits,
            options=options, max_memory=max_memory, overwrite=overwrite, durable=durable, verify=verify, threads=threads,
            limits=limits,
        )  # fmt: skip
        return planned.report if explain else planned.run(progress, resume=resume)
    finally:
        if opened is not src:
            opened.close()


@dataclass(frozen=True, slots=True)
class PlannedConversion:
    """A conversion that is laid out and not begun."""

    report: Conversion
    plan: SavePlan
    source: State
    """What is read, before any edit."""
    block: int
    threads: int
    overwrite: bool
    durable: bool
    verify: bool
    dtype: DType | None
    """What is cast to."""
    losses: Losses

    def run(self, progress: Progress | None = None, *, resume: bool = False) -> Conversion:
        """Do it, while the source is open. Raises `NotCommitted` where there is no room, or where the source changes meanwhile."""
        report = self.report
        if report.free_nbytes < report.write_nbytes:
            raise NotCommitted(
                f"{report.write_nbytes:,} bytes are to be written and {report.free_nbytes:,} are free",
                file=report.target, expected=report.write_nbytes, found=report.free_nbytes,
            )  # fmt: skip
        saved = write_plan(
            self.plan, report.target, overwrite=self.overwrite, durable=self.durable, threads=self.threads, progress=progress,
            block=self.block, check=self.verify, resume=resume, before_commit=lambda: unchanged(self.source, report.target),
        )  # fmt: skip
        lost = () if self.dtype is None else self.losses.notes(self.dtype)
        return replace(report, saved=saved, notes=(*report.notes, *lost))


def plan_conversion(
    source: Checkpoint,
    target: str,
    *,
    format: str | None = None,
    selection: Selection | None = None,
    edits: Edits | None = None,
    metadata: Mapping[str, str | None] | None = None,
    options: Options | None = None,
    max_memory: int | str = "1GiB",
    overwrite: bool = False,
    durable: bool = True,
    verify: bool = True,
    threads: int | None = None,
    limits: Limits | None = None,
) -> PlannedConversion:
    """Lay out a conversion of an open checkpoint. `metadata` is set in its text, or taken out where it is None."""
    options = options or Options()
    workers = threads or default_threads()
    block, peak = _budget(byte_count(max_memory), workers)
    described = describe_state(source, limits=limits)
    chosen, left = select(source, described, selection or Selection())
    edits, losses = edits or Edits(), Losses()
    state = transform(chosen, edits, limits, losses=losses)
    found = format_for(target, format, options)
    if metadata:
        state = _with_metadata(state, metadata, found, source.path)
    plan = _plan(target, state, found, options, edits.tensors_only)
    report = _report(source, target, replace(plan, notes=(*left, *plan.notes)), peak)
    return PlannedConversion(report, plan, described, block, workers, overwrite, durable, verify, edits.dtype, losses)


def _with_metadata(state: State, metadata: Mapping[str, str | None], format: str, path: str) -> State:
    if format == "torch-zip" and any(text is not None for text in metadata.values()):
        raise Unsupported("a torch file has no place for metadata; write safetensors or a native directory", file=path)
    absent = [key for key, text in metadata.items() if text is None and key not in state.metadata]
    if absent:
        raise CannotHold("these edits do not fit the checkpoint", [f"there is no metadata {key!r}" for key in absent])
    merged: dict[str, str | None] = {**state.metadata, **metadata}
    return replace(state, metadata={key: text for key, text in merged.items() if text is not None})


def _plan(target: str, state: State, format: str, options: Options, tensors_only: bool) -> SavePlan:
    try:
        return plan_save(target, state, format, options)
    except CannotHold as error:
        if tensors_only:
            raise
        try:
            plan_save(target, transform(state, Edits(tensors_only=True)), format, options)
        except CannotHold:
            raise error from None
        message = error.what + " (keep the tensors alone with tensors_only=True, --tensors-only)"
        raise CannotHold(message, error.problems, file=error.file) from None


def _budget(max_memory: int, workers: int) -> tuple[int, int]:
    """The block that fits the budget, and the memory that it leads to."""
    block = min(LARGEST_BLOCK, (max_memory - BASE_NBYTES) // (workers * COPIES))
    if block < SMALLEST_BLOCK:
        least = BASE_NBYTES + workers * COPIES * SMALLEST_BLOCK
        message = f"max_memory is too small: {workers} threads need {least:,} bytes at least"
        raise LimitExceeded(message, expected=least, found=max_memory)
    return block, BASE_NBYTES + workers * COPIES * block


def _report(source: Checkpoint, target: str, plan: SavePlan, peak: int) -> Conversion:
    tensors = plan.tensors()
    reads = [_read_cost(t) for t in tensors]
    return Conversion(
        source=source.path,
        target=target,
        format=plan.format,
        tensors=len(tensors),
        read_nbytes=sum(read for read, _ in reads),
        over_read_nbytes=sum(over for _, over in reads),
        write_nbytes=plan.nbytes,
        files=tuple((f.key or os.path.basename(target), f.nbytes) for f in (*plan.files, *plan.index)),
        peak_nbytes=peak,
        free_nbytes=_free(target),
        notes=(*source.notes, *plan.notes),
    )


def _free(target: str) -> int:
    parent = os.path.dirname(os.path.abspath(target))
    try:
        return free_nbytes(parent)
    except StoreError as error:
        refused = NotCommitted(f"the folder to save into cannot be used: {error.message} ({parent!r})", file=target)
        refused.errno = error.errno
        raise refused from None


def _read_cost(tensor: LazyTensor) -> tuple[int, int]:
    """Bytes that reading a tensor takes, and how many of them are not wanted."""
    place = contiguous_bytes(tensor)
    if place is not None:
        return tensor.source.store.cost(place[0], tensor.nbytes), 0
    # The planner looks at the target's shape and strides only; one element stands for all of it.
    stand_in = np.broadcast_to(np.empty((), tensor.dtype.numpy), tensor.shape)
    plan = plan_reads([Request(tensor, stand_in)])
    return plan.read_nbytes, max(plan.read_nbytes - plan.wanted_nbytes, 0)
