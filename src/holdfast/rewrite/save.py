"""`save`: any state to any format, wholly or not at all.

1. The state is described: every tensor a lazy tensor, nothing copied (rewrite/state.py).
2. The format lays out every byte (rewrite/formats.py); what it cannot hold is refused now, all of it, before a file exists.
3. The reader opens the plan (rewrite/rehearse.py); what it would refuse is refused now as well.
4. The plan is written beside the target and published by one rename (engine/write.py, engine/commit/transactions.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from holdfast.core.collector import resting_collector
from holdfast.core.protocols import State
from holdfast.engine.commit.resumable import Staging
from holdfast.engine.commit.transactions import DirectoryTransaction, FileTransaction, NewFile
from holdfast.engine.readback import check_source, check_written
from holdfast.engine.write import Progress, write_file
from holdfast.errors import NotCommitted
from holdfast.plan.saves import FilePlan, SavePlan
from holdfast.rewrite.formats import Options, byte_count, format_for, is_replaceable, plan_save
from holdfast.rewrite.rehearse import rehearse
from holdfast.rewrite.state import describe_state
from holdfast.stores.files import Files
from holdfast.stores.paths import local_path

__all__ = ["Saved", "save", "unchanged", "write_plan"]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save did."""

    path: str
    format: str
    nbytes: int
    files: int
    crcs: Mapping[str, int]
    """CRC-32 of the bytes of each stored piece, under the name that the file gives it."""
    notes: tuple[str, ...] = ()


def save(
    path: str | os.PathLike[str],
    state: object,
    *,
    format: str | None = None,
    overwrite: bool | None = None,
    durable: bool = True,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    keep_tree: bool = False,
    sparse: str = "never",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Saved:
    """Save a state: nested dicts, lists and tuples of arrays, tensors, lazy tensors and plain values; or an open checkpoint.

    The format is `format` (`torch`, `safetensors`, `native`) or what the suffix says: `.pt` and `.pth` are torch's zip,
    `.safetensors` is safetensors, a name without suffix is a native directory. `max_shard_size` ("5GB") splits safetensors
    into a directory with an index. In a native directory, `sparse="auto"` stores tensors with many zeros as marks and values, where
    that is smaller; other programs cannot read those tensors, so the default is "never". Files are replaced by default and
    directories are not (`overwrite`). With `durable=False` nothing is flushed to disk: a killed process still leaves the old or
    the new, a power cut may not.

    Raises `CannotHold` with every problem when the format cannot hold the state, `NotCommitted` when the save failed and
    nothing changed, `DurabilityUncertain` when the new content is in place but could not be flushed.
    """
    target = local_path(path)
    options = Options(None if max_shard_size is None else byte_count(max_shard_size), keep_tree, sparse)

    def run() -> Saved:
        described = describe_state(state, metadata=metadata)
        plan = plan_save(target, described, format_for(target, format, options), options)
        return write_plan(
            replace(plan, notes=(*described.notes, *plan.notes)),
            target,
            overwrite=overwrite,
            durable=durable,
            threads=threads,
            progress=progress,
            before_commit=lambda: unchanged(described, target),
        )

    # In a function of its own, so that description and plan are gone before the collector wakes and would walk through them.
    with resting_collector():
        return run()


def unchanged(state: State, target: str) -> None:
    """Raise `NotCommitted` where a file that tensors of this state were read from was written to since it was opened."""
    stores = {id(tensor.source): tensor.source.store for tensor in state.tensors.values()}
    for store in stores.values():
        changed = store.changed()
        if changed:
            names = ", ".join(changed[:3])
            raise NotCommitted(
                f"the source {store.name!r} changed while it was read ({names}); nothing was published: start again when nobody "
                "writes to it",
                file=target,
                found=changed,
            )


def write_plan(
    plan: SavePlan,
    path: str,
    *,
    overwrite: bool | None = None,
    durable: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
    block: int | None = None,
    check: bool = False,
    resume: bool = False,
    before_commit: Callable[[], None] | None = None,
    files: Files | None = None,
    rehearsed: bool = True,
) -> Saved:
    """Write a plan and publish it. With `check`, what was written is read back and compared before it is published.

    First of all the plan is given to the reader (`api.rehearse`): what would not open again is refused with `CannotHold` while
    nothing has been touched. `rehearsed=False` is for a writer that promises what torch does, be it to open here or not.

    With `resume`, the finished files of an interrupted try at the same directory are taken over (engine/commit/resumable.py).
    `before_commit` has the last word: what it raises keeps everything as it was.
    """
    if rehearsed:
        plan = rehearse(plan, path)
    crcs: dict[str, int] = {}

    def write(file: FilePlan, sink: NewFile) -> Mapping[str, int]:
        receipt = write_file(file, sink, crcs=crcs, threads=threads, progress=progress, block=block)
        crcs.update(receipt.crcs)
        check_source(file, crcs)
        if check:
            check_written(file, sink.descriptor, crcs, path=path, threads=threads)
        sink.complete = True
        return receipt.crcs

    if plan.directory:
        staging = Staging(path, plan, durable=durable, files=files) if resume else None
        try:
            if staging is not None:
                for file in plan.files:
                    crcs.update(staging.put(file, write))
            replaced = bool(overwrite)
            with DirectoryTransaction(path, durable=durable, overwrite=replaced, replaceable=is_replaceable, files=files) as folder:
                for file in plan.files:
                    if staging is not None:
                        staging.adopt(folder, file)
                    else:
                        write(file, folder.create(file.key))
                folder.seal_data()
                for file in plan.index:
                    write(file, folder.create(file.key))
                if before_commit:
                    before_commit()
                folder.commit()
            if staging is not None:
                staging.remove()
        finally:
            if staging is not None:
                staging.close()
    else:
        (file,) = plan.files
        with FileTransaction(path, durable=durable, overwrite=overwrite is not False, files=files) as single:
            write(file, single.file)
            if before_commit:
                before_commit()
            single.commit()
    return Saved(path, plan.format, plan.nbytes, len(plan.files) + len(plan.index), crcs, plan.notes)
