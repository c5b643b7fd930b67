"""The files of a sharded save: how one rank writes them, and how the first rank publishes them.

    open_together   first rank    the hidden target, in which the files come together
    write_files     every rank    its files, with checksums on the way                    ──► receipts
    publish         first rank    compares receipts with the plan, writes the index, opens everything
                                  as a reader would, and publishes

No rank has the whole checkpoint, so nobody can tell before it is written whether a reader accepts
it. If several ranks write, the first one opens the finished target while it is still hidden. That
reads the index and headers, and no tensor data.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from holdfast.core.dtype import DTYPES
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import Store
from holdfast.core.runtime import gc_paused
from holdfast.core.value import Value, replace
from holdfast.engine.saves import FilePlan, SavePlan
from holdfast.engine.source import OpenSource
from holdfast.engine.targets.bucket import BucketNames
from holdfast.engine.targets.bucket_commit import make_save_id
from holdfast.engine.targets.target import (
    BucketOptions,
    DeliveredFile,
    DiskOptions,
    SaveContext,
    Target,
    WriteFile,
    make_target,
)
from holdfast.engine.threads import run_all
from holdfast.engine.write import Progress
from holdfast.errors import CannotHold, FormatError, HoldfastError, NotCommitted
from holdfast.formats import Format, rank_formats
from holdfast.formats.dcp.index import BESIDE
from holdfast.formats.detect import detect
from holdfast.formats.native.base import Reuse
from holdfast.formats.native.manifest import StoredBoxes, as_column
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.formats.sharded import (
    NOTHING,
    Contents,
    RankFile,
    Receipt,
)
from holdfast.ranks.plan import RankWrites
from holdfast.stores.memory import MemoryStore
from holdfast.stores.place import place_at
from holdfast.stores.remote.url import Url
from holdfast.verbs.seals.document import Stamp, seal_file
from holdfast.verbs.shared.formats import is_checkpoint_file
from holdfast.verbs.shared.read_back import (
    Outline,
    check_tensors,
    describe_unpublished,
)
from holdfast.verbs.shared.references import replaced_at


class AsStep(Value, frozen=True):
    """The functions of a run that make the checkpoint a step of it. The first rank alone calls them, but for one."""

    stamp: Stamp
    begin: Callable[[int], tuple[bool, str | None]]
    """Called with the number of bytes that are to be written, before anything is: whether what is there may be replaced, and the
    name of the step whose files this one may share."""
    named: Callable[[str], str]
    """The path of the step of a name. Called on every rank."""
    attributes: Callable[[Sequence[tuple[str, int]]], Mapping[str, str] | None]
    """From the data files to what the object of the manifest says of the step; None where a seal says it."""
    sure: Callable[[], None]
    """Called before the checkpoint is published: what it raises keeps everything as it was."""
    linked: Callable[[int], None]
    """Called with the number of bytes that its base has as well, before it is published."""


def open_together(
    path: str,
    format: Format,
    *,
    durable: bool,
    overwrite: bool,
    replaceable: Callable[[str], bool] = is_checkpoint_file,
) -> Target:
    """On the first rank: open a target for a save to a path or URL. Raises `NotCommitted` where there may be none."""
    # Of a DCP directory no checksum is recorded beside its index: that would be a second name to write, and two names cannot be put
    # at once.
    index, indexes = format.index, [one.index for one in rank_formats()]
    names = BucketNames(
        find_replaced=lambda url, there: replaced_at(
            url, [name for name in indexes if name in there]
        ),
        find_other_indexes=lambda url, there: _other_indexes(
            url, index, there, overwrite=overwrite
        ),
        stale_names=(BESIDE,),
    )
    plan = SavePlan(format.name, (), directory=True, index=(FilePlan(index, ()),))
    return make_target(
        path,
        plan,
        overwrite=overwrite,
        disk=DiskOptions(durable=durable, is_replaceable=replaceable, makes_parents=True),
        bucket=BucketOptions(
            load_names=lambda: names,
            save_id="" if place_at(path).on_disk else make_save_id(),
        ),
    ).__enter__()


def _other_indexes(url: Url, index: str, there: Collection[str], *, overwrite: bool) -> list[str]:
    """The indexes of other formats that are there. Raises `NotCommitted` where one may not, or cannot, be replaced."""
    others = [one.index for one in rank_formats() if one.index != index and one.index in there]
    if others and not overwrite:
        raise NotCommitted(
            "a checkpoint exists there; pass overwrite=True to replace it",
            file=url,
            errno=errno.EEXIST,
        )
    if MANIFEST in others:
        message = f"there is a checkpoint with a {MANIFEST}, which would still be the one that is opened; save elsewhere"
        raise NotCommitted(f"{message}, or remove that object first", file=url, errno=errno.EEXIST)
    return others


VALUE_FORMATS = ("torch-zip",)
"""The formats that the archive of a value may be recognized as."""


def check_value(name: str, archive: bytes) -> None:
    """Raise `CannotHold` if the archive of a value that is not a tensor would not open."""
    source = OpenSource(MemoryStore({"value": archive}, name=name), limits=DEFAULTS)
    try:
        format = detect(source)
        if format.name not in VALUE_FORMATS:
            raise FormatError(f"it would be opened as {format.name}, and is {VALUE_FORMATS[0]}")
        format.describe(source)
    except HoldfastError as error:
        message = "what would be written could not be opened again, so nothing is"
        raise CannotHold(message, [error.message], file=name) from error


def _outlines(contents: Contents) -> dict[str, Outline]:
    """Return the dtype and shape of each tensor by its name."""
    rows = {row.name: row for row in DTYPES.rows}
    dtypes = [rows[name] for name in contents.dtypes]
    outlines = zip(dtypes, contents.shapes, strict=True)
    return dict(zip(contents.names, outlines, strict=True))


def write_files(
    files: Sequence[RankFile],
    target: Target,
    *,
    threads: int,
    progress: Progress | None = None,
    block: int | None = None,
    reuse: Reuse = NOTHING,
) -> list[Receipt]:
    """Write the files of one rank, all at once, and return their receipts.

    Files of the base are linked first. Their receipts say so.
    """
    linked: list[Receipt] = []
    if reuse.linked:
        for file, (rows, chunks) in zip(reuse.linked, reuse.by_file(), strict=True):
            stored = StoredBoxes.of(rows, chunks)
            linked.append(Receipt(file.key, file.nbytes, stored, linked=target.link_file(file)))
    saving = SaveContext(
        threads=max(threads // max(len(files), 1), 1),
        progress=progress,
        block_nbytes=block,
    )
    written: dict[str, Receipt] = {}

    def write_file(file: RankFile, fill: WriteFile) -> None:
        # Each file has checksums of its own: ranks give one name to several pieces of a tensor.
        crcs = fill(replace(saving, crcs={}))
        key, nbytes = file.plan.key, file.plan.nbytes
        written[key] = Receipt(key, nbytes, file.stored(crcs), [*file.values])

    run_all([partial(write_file, file, target.prepare_file(file.plan)) for file in files], threads)
    return [*linked, *(written[file.plan.key] for file in files)]


def publish(
    target: Target,
    format: Format,
    contents: Contents,
    delivered: Sequence[tuple[RankWrites, Sequence[Receipt]]],
    *,
    path: str,
    step: AsStep | None,
) -> None:
    """Make the files of all ranks a checkpoint, in one step.

    Raises `NotCommitted` unless every rank has written each of its boxes and values once.

    Args:
        target: The target with the files.
        format: The format of the checkpoint.
        contents: The contents of the checkpoint.
        delivered: For each rank what it was to write, and the receipts of its files.
        path: The path as the caller wrote it.
        step: Set for a step of a run.
    """
    for rank, (writes, receipts) in enumerate(delivered):
        columns = [as_column(receipt.stored.boxes) for receipt in receipts]
        boxes = np.sort(np.concatenate([np.zeros(0, np.int64), *columns]))
        values = sorted(name for receipt in receipts for name, _, _ in receipt.values)
        is_complete = np.array_equal(boxes, np.arange(len(writes.boxes)))
        if not is_complete or values != sorted(writes.values):
            raise NotCommitted(f"rank {rank} did not write what was planned for it", file=path)
    every = [receipt for _, receipts in delivered for receipt in receipts]
    index = format.sharded.index(contents, delivered, path=path, save=target.save_id)
    attributes = None
    if step is not None:
        files = [(receipt.key, receipt.nbytes) for receipt in every]
        step.linked(sum(receipt.nbytes for receipt in every if receipt.linked))
        attributes = step.attributes(files)
        if attributes is None:
            index.append(seal_file(files, index, step.stamp))

    others = [
        DeliveredFile(receipt.key, receipt.nbytes, is_linked=receipt.linked)
        for _, receipts in delivered[1:]
        for receipt in receipts
    ]
    is_checked = len(delivered) > 1
    saving = SaveContext(
        check_opens=partial(_check_opens, format, contents, path) if is_checked else None,
        before_publish=step.sure if step is not None else lambda: None,
        attributes=attributes,
    )
    target.publish(index, saving, others)


def _check_opens(format: Format, contents: Contents, path: str, store: Store) -> None:
    """Open what the ranks have written. Raises `NotCommitted` if it does not open or has other tensors."""
    with gc_paused():
        description = describe_unpublished(store, format.opened_as, path)
        check_tensors(description.tensors, _outlines(contents).items(), path)
