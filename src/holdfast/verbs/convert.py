"""`convert`: `save(open(src), dst)`, streaming under a byte budget and checked on both sides.

Blocks go from file to file: read, summed, written. Checksums that the source records are compared with what was read; what was
written is read back and compared, before anything is published. Memory is a few blocks a thread, whatever the checkpoint's size;
`max_memory` chooses the block.

`edit`: rename, drop, keep, cast, set metadata: a new checkpoint, beside the old one or in its place.

An edit is a conversion to the same format. In place, the old file is read while the new one is written beside it, and one rename
puts the new one there: a reader sees the old or the new, and a failure leaves the old.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import numpy as np

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.dtype import DType
from holdfast.core.limits import Limits
from holdfast.core.options import (
    ConvertOptions,
    EditOptions,
    Progress,
    pick_fields,
    validate_arguments,
)
from holdfast.core.protocols import Request, State
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import replace
from holdfast.engine.blocks import find_contiguous_bytes
from holdfast.engine.boxes import estimate_read_cost
from holdfast.engine.saves import Data, Gathered, SavePlan
from holdfast.errors import CannotHold, Unsupported
from holdfast.formats import format_of
from holdfast.stores.paths import target_place
from holdfast.stores.place import is_same_place
from holdfast.verbs.open import Openable
from holdfast.verbs.shared.formats import (
    LayoutOptions,
    find_suffix,
    note_single_file,
    plan_save,
    resolve_format,
)
from holdfast.verbs.shared.models import NOTHING_SELECTED, Selection, select
from holdfast.verbs.shared.planned import (
    Destination,
    Planned,
    Saved,
    make_report_fields,
    plan_derived_checkpoint,
)
from holdfast.verbs.shared.state import tabulate_state
from holdfast.verbs.shared.transform import (
    NO_EDITS,
    Edits,
    Losses,
    LossFindings,
    describe_left_out,
    parse_casts,
    transform,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion(Saved):
    """The result of `convert` and `edit`. The notes count the values that a cast saturated or rounded to zero."""

    source: str
    tensors: int
    read_nbytes: int
    """Number of bytes to read from the source."""
    over_read_nbytes: int
    """Number of these bytes that no tensor needs. They lie in gaps that are cheaper to read than to skip."""
    peak_nbytes: int | None
    """Limit of the memory that the conversion uses in addition to the interpreter. None if there is no limit."""

    def _lines(self) -> list[str]:
        over = (
            f" ({self.over_read_nbytes:,} of them between wanted ones)"
            if self.over_read_nbytes
            else ""
        )
        where, write, *space = Saved._lines(self)
        memory = (
            [] if self.peak_nbytes is None else [f"memory {self.peak_nbytes:,} bytes at the most"]
        )
        return [
            f"{self.source} {where}",
            f"read   {self.read_nbytes:,} bytes{over}",
            write,
            *memory,
            *space,
        ]


@validate_arguments
def convert(
    src: Openable | Checkpoint, dst: str | os.PathLike[str], **options: Unpack[ConvertOptions]
) -> Conversion:
    """Convert a checkpoint to another format.

    `src` can have any format that `open` reads. The suffix of `dst`, or `format`, selects the new format.

    **Tensors.** `keep`, `drop` and `rename` accept globs for the dotted names of tensors. `dtype` casts all floating-point tensors
    or, as a dict, those that a glob for their name in the source matches: `{"*norm*": "f32", "*": "bf16"}`. The first glob
    that matches applies, and `"keep"` does not cast.

    **Other values.** If the new format cannot store a value, `convert` raises an error that lists all such values, and writes
    nothing. `tensors_only=True` drops all values that are not tensors. In a safetensors file, `convert` stores them in the
    header, where Holdfast finds them. `keep_tree=False` turns this off.

    **Check and resume.** With `dry_run=True`, `convert` writes nothing and returns a description of the result. `resume=True`
    continues an interrupted conversion to a directory: `convert` checks the finished files and does not write them again.

    **GGUF.** `dequantize=True` decodes quantized blocks to float32, or to `dtype`. By default, `convert` copies the bytes of the
    blocks.

    **Hugging Face folders.** From a Hugging Face folder to a directory, `convert` also copies the config, tokenizer and
    generation files. If it casts the weights, it sets the dtype in the config. `copy_config=False` copies none of these files.
    `copy_config="base/"` copies them from another folder.

    **Packages.** From a `.pt2` archive, `convert` writes the state dict: parameters and buffers. `model` selects one of several
    models, in any package. `constants=True` and `sample_inputs=True` add these tensors. A note lists everything that is left out.

    **Object stores.** `src` and `dst` can be URLs. If you pass an obstore store as `store`, `dst` is a key in this store.
    """
    # The plan has no name here, so that it is gone before the collector wakes and would walk through it.
    with gc_paused():
        return plan_conversion(src, dst, options).carry_out(options["progress"])


def plan_conversion(
    src: Openable | Checkpoint, dst: str | os.PathLike[str], options: ConvertOptions
) -> Planned[Conversion]:
    edits = pick_fields(
        Edits, options, casts=parse_casts(options["dtype"]) if options["dtype"] else ()
    )
    lay_out = partial(
        lay_out_conversion,
        selection=pick_fields(Selection, options),
        edits=edits,
        limits=options["limits"],
    )
    return plan_derived_checkpoint(
        src,
        dst
        if options["store"] is None
        else target_place(dst, options["store"], folder=options["folder"]),
        lay_out,
        options,
    )


def lay_out_conversion(
    source: Checkpoint, where: Destination, *, selection: Selection = NOTHING_SELECTED, edits: Edits,
    metadata: Mapping[str, str | None] | None = None, limits: Limits | None = None,
) -> Planned[Conversion]:  # fmt: skip
    """Lay out a conversion of an open checkpoint. `metadata` is set in its text, or taken out where it is None."""
    target = where.path
    options = where.layout
    found = resolve_format(target, where.format, options)
    described = tabulate_state(source, limits=limits, whole=bool(edits.keep))
    chosen, left = described, tuple[str, ...]()
    # A `.pt2` always becomes a state dict. Any other checkpoint stays as it is if nothing is selected.
    if selection != NOTHING_SELECTED or format_of(source.format).programs_by:
        chosen, left = select(source, described, selection)
    losses: dict[DType, Losses] = {}
    state = chosen if edits == NO_EDITS else transform(chosen, edits, limits, losses=losses)
    if metadata:
        state = _with_metadata(state, metadata, found, path=source.path)
    try:
        plan = plan_save(target, state, found, options=options)
    except CannotHold as error:
        if edits.tensors_only:
            raise
        raise _suggest_tensors_only(error, target, state, found, options=options) from None
    source_notes = source.notes_on_numbers if edits.dequantize else source.notes
    notes = [*source_notes, *described.notes, *left]
    if edits.tensors_only:
        notes += describe_left_out(chosen.tree, edits)
    if not find_suffix(target) and not is_same_place(target, source.path):
        notes += note_single_file(target, found)
    return _planned(source, where, plan, described, notes, losses)


def _planned(
    source: Checkpoint,
    where: Destination,
    plan: SavePlan,
    described: State,
    notes: Sequence[str],
    losses: Mapping[DType, Losses],
) -> Planned[Conversion]:
    """The plan of a conversion; `notes` are those about the source."""
    plan = replace(plan, notes=(*notes, *plan.notes))
    within = where.writing.budget
    segments = [segment for file in plan.files for segment in file.segments]
    gathered = [segment for segment in segments if isinstance(segment, Gathered)]
    tensors = [segment.tensor for segment in segments if isinstance(segment, Data)]
    reads = [_read_cost(tensor) for tensor in tensors]
    # What is computed is read from other bytes than its own.
    gathered_nbytes = sum(
        one.nbytes - one.overhead_nbytes if one.read_nbytes is None else one.read_nbytes
        for one in gathered
    )
    report = Conversion(
        **make_report_fields(plan, where.path), source=source.path, tensors=len(tensors) + sum(len(one.labels) for one in gathered),
        read_nbytes=sum(read for read, _ in reads) + gathered_nbytes,
        over_read_nbytes=sum(over for _, over in reads), peak_nbytes=None if within is None else within.peak_nbytes,
    )  # fmt: skip

    planned = Planned(plan, report, where.writing, reads=described.tensors.stores)
    if not losses:
        return planned

    def finish(report: Conversion, progress: Progress | None) -> Conversion:
        if not report.done:
            return report
        lost = [note for dtype, lost in losses.items() for note in lost.notes(dtype)]
        return replace(report, notes=(*report.notes, *lost))

    return replace(planned, finish=finish, findings=LossFindings(dict(losses)))


def _with_metadata(
    state: State, metadata: Mapping[str, str | None], format: str, *, path: str
) -> State:
    found = format_of(format)
    if not found.metadata and any(text is not None for text in metadata.values()):
        raise Unsupported(
            f"a {found.title} file has no place for metadata; write safetensors or a native directory",
            file=path,
        )
    absent = [key for key, text in metadata.items() if text is None and key not in state.metadata]
    if absent:
        raise CannotHold(
            "these edits do not fit the checkpoint",
            [f"there is no metadata {key!r}" for key in absent],
        )
    merged: dict[str, str | None] = {**state.metadata, **metadata}
    return replace(state, metadata={key: text for key, text in merged.items() if text is not None})


def _suggest_tensors_only(
    error: CannotHold, target: str, state: State, format: str, *, options: LayoutOptions
) -> CannotHold:
    """Return the error with a hint if the format could hold the tensors alone, otherwise as it is."""
    try:
        plan_save(target, transform(state, Edits(tensors_only=True)), format, options=options)
    except CannotHold:
        return error
    message = error.summary + " (keep the tensors alone with tensors_only=True)"
    return CannotHold(message, error.problems, file=error.file)


def _read_cost(tensor: LazyTensor) -> tuple[int, int]:
    """Bytes that reading a tensor takes, and how many of them are not wanted."""
    place = find_contiguous_bytes(tensor)
    if place is not None:
        return tensor.source.store.count_read_nbytes(place[0], tensor.nbytes), 0
    # Only the target's shape and strides count; one element stands for all of it.
    stand_in = np.broadcast_to(np.empty((), tensor.dtype.numpy), tensor.shape)
    cost = estimate_read_cost([Request(tensor, stand_in)])
    return cost.read_nbytes, max(cost.read_nbytes - cost.wanted_nbytes, 0)


@validate_arguments
def edit(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None = None,
    **options: Unpack[EditOptions],
) -> Conversion:
    """Edit a checkpoint: rename, drop or cast tensors, and set metadata.

    `edit` writes a new checkpoint to `dst`. The suffix of `dst` can select another format. With `in_place=True` and without
    `dst`, it replaces the source atomically. Other files in the folder do not change.

    `keep`, `drop`, `rename`, `dtype` and `copy_config` have the same meaning as in `convert`. `set_metadata` and `unset_metadata`
    change the text entries in safetensors files and native directories. `overwrite` allows `edit` to replace `dst`. With
    `dry_run=True`, `edit` writes nothing.

    Raises `CannotHold` with a list of all problems if the edits do not fit, and `NotCommitted` if nothing changed.
    """
    return plan_edit(src, dst, options).carry_out(options["progress"])


def metadata_changes(changed: Mapping[str, str], removed: Iterable[str]) -> dict[str, str | None]:
    """The metadata that is to be set, with None for what is to go."""
    removed = tuple(removed)
    both = [key for key in removed if key in changed]
    if both:
        raise CannotHold(
            "these edits do not fit each other",
            [f"the metadata {key!r} is set and taken out" for key in both],
        )
    return {**changed, **dict.fromkeys(removed)}


def plan_edit(
    src: Openable | Checkpoint, dst: str | os.PathLike[str] | None, options: EditOptions
) -> Planned[Conversion]:
    edits = pick_fields(
        Edits, options, casts=parse_casts(options["dtype"]) if options["dtype"] else ()
    )
    metadata = metadata_changes(options["set_metadata"] or {}, options["unset_metadata"])
    if edits == NO_EDITS and not metadata:
        raise Unsupported("nothing to do; pass keep=, drop=, rename=, dtype= or set_metadata=")
    lay_out = partial(
        lay_out_conversion,
        edits=edits,
        metadata=metadata,
        limits=options["limits"],
    )
    return plan_derived_checkpoint(src, dst, lay_out, options)
