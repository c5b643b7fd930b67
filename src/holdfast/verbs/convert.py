"""`convert` and `edit`: make a new checkpoint out of another one.

`convert` is `save(open(src), dst)` in blocks. Each block is read, summed and written. Checksums that
the source records are compared with what was read, and what was written is read back and compared
before anything is published. Memory is a few blocks for each thread, whatever the size of the
checkpoint; `max_memory` chooses the block.

`edit` renames, drops, keeps and casts tensors and sets metadata. It is a conversion to the same
format. In place, the old file is read while the new one is written beside it, and a rename replaces
the old one: readers see either the old or the new checkpoint, and a failure leaves the old one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
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
        target_line, write_line, *space_lines = Saved._lines(self)
        read_line = f"read   {self.read_nbytes:,} bytes"
        if self.over_read_nbytes:
            read_line += f" ({self.over_read_nbytes:,} of them between wanted ones)"
        lines = [f"{self.source} {target_line}", read_line, write_line]
        if self.peak_nbytes is not None:
            lines.append(f"memory {self.peak_nbytes:,} bytes at the most")
        return [*lines, *space_lines]


@validate_arguments
def convert(
    src: Openable | Checkpoint, dst: str | os.PathLike[str], **options: Unpack[ConvertOptions]
) -> Conversion:
    """Convert a checkpoint to another format.

    `src` can have any format that `open` reads. The suffix of `dst`, or `format`, selects the new
    format.

    **Tensors.** `keep`, `drop` and `rename` accept globs for the dotted names of tensors. `dtype`
    casts all floating-point tensors or, as a dict, those that a glob for their name in the source
    matches: `{"*norm*": "f32", "*": "bf16"}`. The first glob that matches applies, and `"keep"`
    does not cast.

    **Other values.** If the new format cannot store a value, `convert` raises an error that lists
    all such values, and writes nothing. `tensors_only=True` drops all values that are not tensors.
    In a safetensors file, `convert` stores them in the header, where Holdfast finds them.
    `keep_tree=False` turns this off.

    **Check and resume.** With `dry_run=True`, `convert` writes nothing and returns a description of
    the result. `resume=True` continues an interrupted conversion to a directory: `convert` checks
    the finished files and does not write them again.

    **GGUF.** `dequantize=True` decodes quantized blocks to float32, or to `dtype`. By default,
    `convert` copies the bytes of the blocks.

    **Hugging Face folders.** From a Hugging Face folder to a directory, `convert` also copies the
    config, tokenizer and generation files. If it casts the weights, it sets the dtype in the
    config. `copy_config=False` copies none of these files. `copy_config="base/"` copies them from
    another folder.

    **Packages.** From a `.pt2` archive, `convert` writes the state dict: parameters and buffers.
    `model` selects one of several models, in any package. `constants=True` and `sample_inputs=True`
    add these tensors. A note lists everything that is left out.

    **Object stores.** `src` and `dst` can be URLs. If you pass an obstore store as `store`, `dst`
    is a key in this store.
    """
    # The plan has no name here, so it is freed before the garbage collector would walk through it.
    with gc_paused():
        return plan_conversion(src, dst, options).carry_out(options["progress"])


def plan_conversion(
    src: Openable | Checkpoint, dst: str | os.PathLike[str], options: ConvertOptions
) -> Planned[Conversion]:
    """Plan a conversion as `convert` does it. Nothing is written yet."""
    lay_out = partial(
        lay_out_conversion,
        selection=pick_fields(Selection, options),
        edits=_parse_edits(options),
        limits=options["limits"],
    )
    if options["store"] is not None:
        dst = target_place(dst, options["store"], folder=options["folder"])
    return plan_derived_checkpoint(src, dst, lay_out, options)


def _parse_edits(options: ConvertOptions | EditOptions) -> Edits:
    """Return the edits that the options of a verb ask for."""
    casts = parse_casts(options["dtype"]) if options["dtype"] else ()
    return pick_fields(Edits, options, casts=casts)


def lay_out_conversion(
    source: Checkpoint,
    where: Destination,
    *,
    selection: Selection = NOTHING_SELECTED,
    edits: Edits,
    metadata: Mapping[str, str | None] | None = None,
    limits: Limits | None = None,
) -> Planned[Conversion]:
    """Lay out a conversion of an open checkpoint.

    Args:
        source: The open checkpoint.
        where: The target.
        selection: Which model of a package is converted, and what else of it.
        edits: What changes in names and dtypes.
        metadata: Texts to set in the metadata. None removes a text.
        limits: Limits for the depth of the tree.

    Raises:
        CannotHold: The edits do not fit the checkpoint, or the format cannot store the result.
    """
    target = where.path
    options = where.layout
    format = resolve_format(target, where.format, options)
    source_state = tabulate_state(source, limits=limits, whole=bool(edits.keep))
    state = source_state
    selection_notes: tuple[str, ...] = ()
    # A `.pt2` always becomes a state dict. Any other checkpoint stays as it is if nothing is selected.
    if selection != NOTHING_SELECTED or format_of(source.format).programs_by:
        state, selection_notes = select(source, state, selection)
    selected_tree = state.tree
    losses: dict[DType, Losses] = {}
    if edits != NO_EDITS:
        state = transform(state, edits, limits, losses=losses)
    if metadata:
        state = _set_metadata(state, metadata, format, path=source.path)
    try:
        plan = plan_save(target, state, format, options=options)
    except CannotHold as error:
        if edits.tensors_only:
            raise
        raise _suggest_tensors_only(error, target, state, format, options=options) from None

    source_notes = source.notes_on_numbers if edits.dequantize else source.notes
    notes = [*source_notes, *source_state.notes, *selection_notes]
    if edits.tensors_only:
        notes += describe_left_out(selected_tree, edits)
    if not find_suffix(target) and not is_same_place(target, source.path):
        notes += note_single_file(target, format)

    plan = replace(plan, notes=(*notes, *plan.notes))
    report = _make_report(source, where, plan)
    planned = Planned(plan, report, where.writing, reads=source_state.tensors.stores)
    if not losses:
        return planned
    return replace(
        planned,
        finish=partial(_add_loss_notes, losses),
        findings=LossFindings(dict(losses)),
    )


def _make_report(source: Checkpoint, where: Destination, plan: SavePlan) -> Conversion:
    """Return the report of a conversion, with the bytes that it is going to read."""
    tensor_count = 0
    read_nbytes = 0
    over_read_nbytes = 0
    for file in plan.files:
        for segment in file.segments:
            if isinstance(segment, Data):
                tensor_count += 1
                tensor_nbytes, gap_nbytes = _count_read_nbytes(segment.tensor)
                read_nbytes += tensor_nbytes
                over_read_nbytes += gap_nbytes
            elif isinstance(segment, Gathered):
                tensor_count += len(segment.labels)
                # A computed segment is read from other bytes than its own.
                if segment.read_nbytes is None:
                    read_nbytes += segment.nbytes - segment.overhead_nbytes
                else:
                    read_nbytes += segment.read_nbytes

    budget = where.writing.budget
    return Conversion(
        **make_report_fields(plan, where.path),
        source=source.path,
        tensors=tensor_count,
        read_nbytes=read_nbytes,
        over_read_nbytes=over_read_nbytes,
        peak_nbytes=None if budget is None else budget.peak_nbytes,
    )


def _add_loss_notes(
    losses: Mapping[DType, Losses], report: Conversion, progress: Progress | None
) -> Conversion:
    """Return the report with notes about the values that casts could not keep, after the save."""
    if not report.done:
        return report
    notes = [*report.notes]
    for dtype, dtype_losses in losses.items():
        notes += dtype_losses.notes(dtype)
    return replace(report, notes=tuple(notes))


def _set_metadata(
    state: State, metadata: Mapping[str, str | None], format: str, *, path: str
) -> State:
    """Return the state with changed metadata. None removes a text.

    Raises:
        Unsupported: The format has no metadata.
        CannotHold: A text to remove is not there.
    """
    entry = format_of(format)
    if not entry.metadata and any(text is not None for text in metadata.values()):
        raise Unsupported(
            f"a {entry.title} file has no place for metadata; write safetensors or a native directory",
            file=path,
        )
    absent_keys = [
        key for key, text in metadata.items() if text is None and key not in state.metadata
    ]
    if absent_keys:
        problems = [f"there is no metadata {key!r}" for key in absent_keys]
        raise CannotHold("these edits do not fit the checkpoint", problems)
    merged: dict[str, str | None] = {**state.metadata, **metadata}
    return replace(state, metadata={key: text for key, text in merged.items() if text is not None})


def _suggest_tensors_only(
    error: CannotHold, target: str, state: State, format: str, *, options: LayoutOptions
) -> CannotHold:
    """Return the error with a hint if the format could store the tensors alone, otherwise as it is."""
    try:
        plan_save(target, transform(state, Edits(tensors_only=True)), format, options=options)
    except CannotHold:
        return error
    message = error.summary + " (keep the tensors alone with tensors_only=True)"
    return CannotHold(message, error.problems, file=error.file)


def _count_read_nbytes(tensor: LazyTensor) -> tuple[int, int]:
    """Count the bytes that reading a tensor takes.

    Returns:
        All bytes, and those of them that are not part of the tensor.
    """
    byte_range = find_contiguous_bytes(tensor)
    if byte_range is not None:
        return tensor.source.store.count_read_nbytes(byte_range[0], tensor.nbytes), 0
    # Only the shape and the strides of a destination count, so one element represents all of it.
    destination = np.broadcast_to(np.empty((), tensor.dtype.numpy), tensor.shape)
    cost = estimate_read_cost([Request(tensor, destination)])
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


def merge_metadata_changes(
    new_texts: Mapping[str, str], removed_keys: Iterable[str]
) -> dict[str, str | None]:
    """Return the texts to set in the metadata, and None for each text to remove.

    Raises `CannotHold` if the same text is set and removed.
    """
    removed_keys = tuple(removed_keys)
    contradictory_keys = [key for key in removed_keys if key in new_texts]
    if contradictory_keys:
        problems = [f"the metadata {key!r} is set and taken out" for key in contradictory_keys]
        raise CannotHold("these edits do not fit each other", problems)
    return {**new_texts, **dict.fromkeys(removed_keys)}


def plan_edit(
    src: Openable | Checkpoint, dst: str | os.PathLike[str] | None, options: EditOptions
) -> Planned[Conversion]:
    """Plan an edit as `edit` does it. Nothing is written yet."""
    edits = _parse_edits(options)
    metadata = merge_metadata_changes(options["set_metadata"] or {}, options["unset_metadata"])
    if edits == NO_EDITS and not metadata:
        raise Unsupported("nothing to do; pass keep=, drop=, rename=, dtype= or set_metadata=")
    lay_out = partial(
        lay_out_conversion,
        edits=edits,
        metadata=metadata,
        limits=options["limits"],
    )
    return plan_derived_checkpoint(src, dst, lay_out, options)
