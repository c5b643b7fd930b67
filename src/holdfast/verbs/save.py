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
from holdfast.core.options import Progress, SaveOptions, pick, validated
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
    Options,
    describe_one_file,
    format_for,
    format_named,
    plan_save,
    suffix_of,
    written_suffixes,
)
from holdfast.verbs.shared.planned import Planned, Saved, Writing, check_target, planned_fields
from holdfast.verbs.shared.state import tabulate_state


@validated
def save(
    state: object, dst: str | os.PathLike[str] | Writer, **options: Unpack[SaveOptions]
) -> Saved:
    """Save a state: nested dicts, lists and tuples of arrays, tensors, lazy tensors and plain values; or an open checkpoint.

    `save(path, state)` is understood as well: which of the two is the path can be seen.
    The format is `format` (`torch`, `safetensors`, `native`) or what the suffix says: `.pt` and `.pth` are torch's zip,
    `.safetensors` is safetensors, a name without suffix is a native directory. `max_shard_size` ("5GB") splits safetensors
    into a directory with an index. With `folder=True`, or a slash at the end of a text, `dst` is a folder: `pathlib.Path` drops
    the slash. Files are replaced by default and directories are not (`overwrite`).

    `base` is an older native directory on the same file system, the step before: what did not change since then is not written
    again. The new directory has the unchanged files of the base as hard links, and is a whole checkpoint without it. In an object
    store the base is beside the new one in a prefix, and the new one names its objects where they are. `hashes=True`
    makes the first one of such a row; with a `base` it goes without saying. A base that cannot be used is a note in the result.

    `dst` may be a binary file object as well, anything with `write`: the format is then `format`, or what the suffix of its name
    says. It is written from front to back, so a save that fails has written a part; `to_bytes` gives the bytes themselves.

    `dst` may be the URL of an object or a prefix in an object store (`s3://`, `gs://`, `az://`), or with `store`, an obstore store,
    a key in it. It is published by one request with a condition.

    With `durable=False` nothing is flushed to disk: a killed process still leaves the old or the new, a power cut may not.

    Raises `CannotHold` with every problem when the format cannot hold the state, `NotCommitted` when the save failed and
    nothing changed, `DurabilityUncertain` when the new content is in place but could not be flushed.
    """
    state, path = order_content_and_path(state, dst)
    layout, writing, limits, progress = (
        pick(Options, options),
        pick(Writing, options),
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


@validated
def to_bytes(
    state: object,
    format: str,
    *,
    metadata: Mapping[str, str] | None = None,
    keep_tree: bool = False,
    limits: Limits | None = None,
) -> bytes:
    """A state as the bytes of one file, as `save` would write it: `to_bytes(state, "safetensors")`. `open` takes such bytes.

    Raises `CannotHold` with every problem when the format cannot hold the state.
    """
    memory = io.BytesIO()
    described = tabulate_state(state, metadata=metadata, limits=limits)
    plan = _plan_stream(described, "", format, Options(keep_tree=keep_tree))
    _write_stream(plan, memory, described, "<BytesIO>")
    return memory.getvalue()


def _stream(
    described: State,
    file: Writer,
    *,
    format: str | None,
    options: Options,
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


def _plan_stream(described: State, name: str, format: str | None, options: Options) -> SavePlan:
    suffix = os.path.splitext(name)[1].lower()
    if format is None and (not suffix or suffix not in written_suffixes()):
        raise BadArgument(
            "say format='safetensors' or format='torch': a file object has no suffix that would tell"
        )
    found = format_named(f"archive{suffix}", format, options)
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
        if store.changed():
            raise SaveError(
                f"the source {store.name!r} changed while it was read; what was written is of no use",
                file=where,
            )


def plan_saving(
    state: object, target: str, *, format: str | None, metadata: Mapping[str, str] | None, options: Options, base: str | None,
    hashes: bool, writing: Writing, limits: Limits | None,
) -> Planned[Saved]:  # fmt: skip
    described = tabulate_state(state, metadata=metadata, limits=limits)
    found = format_for(target, format, options)
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
                (writing.threads, None) if within is None else (within.threads, within.block)
            )
            opened = open_base(base, target, limits=limits, threads=threads, block=block)
            stack.callback(opened.close)
            reads = (*reads, *((opened.store,) if opened.store else ()))
            options = replace(options, base=opened)
        plan = plan_save(target, described, found, options=options)
        notes = described.notes
        if not suffix_of(target):
            notes = (*notes, *describe_one_file(target, found))
        if notes:
            plan = replace(plan, notes=(*notes, *plan.notes))
        return Planned(
            plan,
            Saved(**planned_fields(plan, target)),
            writing,
            reads=reads,
            sources=stack.pop_all(),
        )
