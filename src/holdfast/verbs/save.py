"""`save`: any state to any format, wholly or not at all.

1. The state is described: every tensor a lazy tensor, nothing copied (saving/state.py).
2. The format lays out every byte (saving/formats.py); what it cannot hold is refused now, all of it, before a file exists.
3. The plan is written beside the target and published by one rename (engine/write.py, engine/commit/transactions.py). With
   `read_back` the reader opens what was written before the rename (verbs/shared/read_back.py).

A file object takes the place of 3: what it is given, it is given from front to back (engine/stream.py), and nothing is published.
`to_bytes` is a save to memory.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Unpack, cast

from holdfast.core.limits import Limits
from holdfast.core.options import Progress, SaveOptions, pick_fields, validate_arguments
from holdfast.core.protocols import State
from holdfast.core.runtime import gc_paused
from holdfast.core.value import replace
from holdfast.engine.saves import SavePlan
from holdfast.engine.stream import CountingWriter, Writer, write_stream
from holdfast.engine.write import check_source
from holdfast.errors import BadArgument, CannotHold, NotCommitted, SaveError
from holdfast.formats import format_of
from holdfast.stores.paths import check_binary, order_content_and_path, place_of, target_place
from holdfast.verbs.shared.base import check_shares, not_shared, open_base
from holdfast.verbs.shared.formats import (
    LayoutOptions,
    find_suffix,
    map_suffixes_to_formats,
    note_single_file,
    plan_save,
    resolve_format,
)
from holdfast.verbs.shared.planned import Planned, Saved, Writing, check_target, make_report_fields
from holdfast.verbs.shared.state import tabulate_state


@validate_arguments
def save(
    state: object, dst: str | os.PathLike[str] | Writer, **options: Unpack[SaveOptions]
) -> Saved:
    """Save tensors and other values as a checkpoint.

    The state is a nested dict, list or tuple of arrays, tensors, lazy tensors and plain Python values, or an open
    checkpoint. You can also pass the path first: `save(path, state)`.

    **Format.** The suffix of `dst` selects the format: `.pt` and `.pth` for torch's zip format, `.safetensors` for safetensors,
    and no suffix for a native directory. `format` (`"torch"`, `"safetensors"` or `"native"`) overrides the suffix.
    `max_shard_size="5GB"` splits a safetensors checkpoint into a folder of files with an index. If `dst` is a string that ends
    with a slash, `save` writes a folder. For a `pathlib.Path`, which drops the slash, pass `folder=True`. By default, `save`
    replaces an existing file, but not an existing directory. `overwrite` changes this.

    **Unchanged tensors.** `base` is an older native directory on the same file system, usually the previous step. `save`
    hard-links the files that did not change, and writes only the others. The new directory is complete without the base. In an
    object store, the base must be next to the new checkpoint in the same prefix. The new checkpoint then refers to the objects
    of the base. Pass `hashes=True` to the first save of such a series. With `base`, `save` always stores hashes. If `save`
    cannot use the base, the result has a note with the reason.

    **File objects.** `dst` can be a binary file object. `format`, or the suffix of the file's name, selects the format. `save`
    writes the file from front to back, so a failed save leaves an incomplete file. `to_bytes` returns the bytes instead.

    **Object stores.** `dst` can be the URL of an object or a prefix (`s3://`, `gs://`, `az://`), or a key in the obstore store
    that you pass as `store`. A single conditional request publishes the checkpoint.

    **Durability.** With `durable=False`, `save` does not flush the files to the disk. If the process is killed, readers still
    see the old or the new checkpoint. After a power cut, the checkpoint may be damaged.

    Raises `CannotHold` with a list of all problems if the format cannot store the state, `NotCommitted` if the save failed and
    nothing changed, and `DurabilityUncertain` if the new checkpoint is in place but could not be flushed.
    """
    state, path = order_content_and_path(state, dst)
    layout, writing, limits, progress = (
        pick_fields(LayoutOptions, options),
        pick_fields(Writing, options),
        options["limits"],
        options["progress"],
    )
    format, metadata, base, hashes = (
        options["format"],
        options["metadata"],
        options["base"],
        options["hashes"],
    )
    older = None if base is None else place_of(base)
    if not isinstance(path, str | os.PathLike) and hasattr(path, "write"):
        if older is not None or hashes:
            check_shares("", "a file object", older)
        if options["folder"]:
            raise BadArgument("folder=True: a file object holds one file; give a path")
        described = tabulate_state(state, metadata=metadata, limits=limits)
        return _stream(
            described,
            cast(Writer, path),
            format=format,
            options=layout,
            writing=writing,
            progress=progress,
        )
    target = target_place(path, options["store"], folder=options["folder"])
    plan = partial(
        plan_saving, state, target, format=format, metadata=metadata, options=layout, writing=writing, limits=limits,
    )  # fmt: skip
    # The plan has no name here, so that it is gone before the collector wakes and would walk through it.
    with gc_paused():
        try:
            return plan(base=older, hashes=hashes).carry_out(progress)
        except NotCommitted as error:
            if older is None or error.errno != errno.ESTALE:
                raise
            note = not_shared(older, "it was replaced or removed meanwhile")
        saved = plan(base=None, hashes=True).carry_out(progress)
        return replace(saved, notes=(*saved.notes, note))


@validate_arguments
def to_bytes(
    state: object,
    format: str,
    *,
    metadata: Mapping[str, str] | None = None,
    keep_tree: bool = False,
    limits: Limits | None = None,
) -> bytes:
    """Return the bytes of the file that `save` would write, for example `to_bytes(state, "safetensors")`.

    `open` accepts these bytes. Raises `CannotHold` with a list of all problems if the format cannot store the state.
    """
    memory = io.BytesIO()
    described = tabulate_state(state, metadata=metadata, limits=limits)
    plan = _plan_stream(described, "", format, LayoutOptions(keep_tree=keep_tree))
    _write_stream(plan, memory, described, "<BytesIO>")
    return memory.getvalue()


def _stream(
    described: State,
    file: Writer,
    *,
    format: str | None,
    options: LayoutOptions,
    writing: Writing,
    progress: Progress | None,
) -> Saved:
    check_binary(file, "wb")
    name = getattr(file, "name", None)
    plan = _plan_stream(described, name if isinstance(name, str) else "", format, options)
    where = name if isinstance(name, str) else f"<{type(file).__name__}>"
    notes = (*described.notes, *plan.notes)
    report = Saved(
        path=where, format=plan.format, nbytes=plan.nbytes, files=((where, plan.nbytes),), notes=notes, free_nbytes=plan.nbytes,
        done=not writing.dry_run,
    )  # fmt: skip
    if not writing.dry_run:
        _write_stream(plan, CountingWriter(file, progress) if progress else file, described, where)
    return report


def _plan_stream(
    described: State, name: str, format: str | None, options: LayoutOptions
) -> SavePlan:
    suffix = os.path.splitext(name)[1].lower()
    if format is None and (not suffix or suffix not in map_suffixes_to_formats()):
        raise BadArgument(
            "say format='safetensors' or format='torch': a file object has no suffix that would tell"
        )
    found = resolve_format(f"archive{suffix}", format, options, is_target=False)
    if format_of(found).folder:
        more = ", and so is what max_shard_size= asks for" if options.max_shard_size else ""
        problem = f"{found} is a directory of files{more}; give the path of a directory, or another format"
        raise CannotHold("a file object holds one file", [problem])
    return plan_save("archive", described, found, options=options)


def _write_stream(plan: SavePlan, file: Writer, described: State, where: str) -> None:
    """Write the one file of a plan to a file object, called `where` in messages."""
    (one,) = plan.files
    check_source(one, write_stream(one, file))
    for store in described.tensors.stores:
        if store.find_changed():
            raise SaveError(
                f"the source {store.name!r} changed while it was read; what was written is of no use",
                file=where,
            )


def plan_saving(
    state: object, target: str, *, format: str | None, metadata: Mapping[str, str] | None, options: LayoutOptions, base: str | None,
    hashes: bool, writing: Writing, limits: Limits | None,
) -> Planned[Saved]:  # fmt: skip
    described = tabulate_state(state, metadata=metadata, limits=limits)
    found = resolve_format(target, format, options)
    if base is not None or hashes:
        check_shares(target, found, base)
    folder = format_of(found).folder
    if writing.overwrite is False or folder:
        check_target(target, directory=folder, writing=writing)
    with ExitStack() as stack:
        reads = described.tensors.stores
        if base is not None or hashes:
            within = writing.budget
            threads, block = (
                (writing.threads, None) if within is None else (within.threads, within.block_nbytes)
            )
            opened = open_base(base, target, limits=limits, threads=threads, block=block)
            stack.callback(opened.close)
            reads = (*reads, *((opened.store,) if opened.store else ()))
            options = replace(options, base=opened)
        plan = plan_save(target, described, found, options=options)
        notes = described.notes
        if not find_suffix(target):
            notes = (*notes, *note_single_file(target, found))
        if notes:
            plan = replace(plan, notes=(*notes, *plan.notes))
        return Planned(
            plan,
            Saved(**make_report_fields(plan, target)),
            writing,
            reads=reads,
            sources=stack.pop_all(),
        )
