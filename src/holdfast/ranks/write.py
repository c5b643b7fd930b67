"""The files of a sharded save on their way: opened before they are written, written by every rank, published by the first one.

    first rank    would the index open? Asked before there is a place for anything (`check_contents_open`)
    every rank    its files to where they come together (engine/targets), checksums on the way      ──► receipts
    first rank    compare receipts with the plan, make the index, publish

No rank has the whole checkpoint. What the first one has is its description, so before anything is made it lays out the checkpoint
that one rank would write of tensors like these, each in one piece, with the functions that lay out the real one, and gives it to
the reader (`check_contents_open`). How pieces are spread decides only the length of the index. Where the ranks told different
trees, or the index comes near to a limit, what is finished is opened as a whole before it is published.
"""

from __future__ import annotations

import errno
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import State
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.commit.target import refusal
from holdfast.engine.planned_store import PlannedStore
from holdfast.engine.saves import FilePlan, SavePlan
from holdfast.engine.source import OpenSource
from holdfast.engine.table import NO_TENSORS, value_state
from holdfast.engine.targets.bucket import BucketNames
from holdfast.engine.targets.bucket_commit import save_id
from holdfast.engine.targets.target import Fill, Saving, Target, target_of
from holdfast.engine.threads import run_all
from holdfast.engine.write import Progress
from holdfast.errors import NotCommitted
from holdfast.formats import Format, rank_formats
from holdfast.formats.dcp.index import BESIDE
from holdfast.formats.dcp.write import joined
from holdfast.formats.native.base import Reuse
from holdfast.formats.native.boxes import Boxes
from holdfast.formats.native.manifest import StoredBoxes, as_column
from holdfast.formats.native.write import lay_out_native
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.formats.sharded import (
    NOTHING,
    Contents,
    RankFile,
    RankOutput,
    Receipt,
    Storing,
    spread,
)
from holdfast.formats.torch.write import lay_out_torch_zip
from holdfast.ranks.plan import RankWrites
from holdfast.ranks.state import Catalogue
from holdfast.ranks.together import Together
from holdfast.stores.memory import MemoryStore
from holdfast.stores.remote.url import Url
from holdfast.verbs.seals.document import Stamp, seal_file
from holdfast.verbs.seals.renew import NOTHING as NO_SEALS
from holdfast.verbs.shared.formats import (
    Outline,
    check_holds,
    check_opens,
    described,
    is_part,
    near_limits,
    note_opened,
    was_opened,
)
from holdfast.verbs.shared.references import replaced_at
from holdfast.verbs.shared.state import tabulate_state

NONE = np.zeros(0, np.int64)


def check_contents_open(format: Format, contents: Contents, path: str) -> None:
    """Raise `CannotHold` where a checkpoint with these contents would not open, or would show other tensors.

    Of fifty thousand tensors the reader would read the same fields fifty thousand times: one tensor of each kind stands for them.
    What was opened once in a process opens again: of contents without texts of the caller's, by their kinds.
    """
    kinds = _of_each_kind(contents.catalogue)
    names = [contents.catalogue.names[row] for row in kinds.values()]
    marks = [(name in contents.grads, *map(type, contents.paths.get(name, ()))) for name in names]
    key = "ranks", format.name, *kinds, *marks, bool(contents.values)
    if not contents.metadata and was_opened(key):
        return
    sample = _sample(contents, sorted(kinds.values()))
    catalogue = sample.catalogue
    tensors = [_nowhere(*one) for one in _outlines(catalogue).items()]
    every, storages = [Kind.of(tensor) for tensor in tensors], NO_TENSORS.storages
    table = Table(
        catalogue.names,
        every,
        range(len(every)),
        [ODD] * len(every),
        storages,
        dict(enumerate(tensors)),
    )
    none = np.zeros((catalogue.rank, len(catalogue)), np.int64)
    numbers = np.arange(len(catalogue), dtype=np.int64)
    writes = RankWrites(numbers, numbers, none, catalogue.extents, (), 0)
    # What is no tensor is looked at where it is, by `check_value`.
    nothing = (
        joined(lay_out_torch_zip(value_state(None)).files[0].segments) if sample.values else b""
    )
    values = dict.fromkeys(sample.values, nothing)
    boxes = Boxes.cut(table, range(len(table)), none, catalogue.extents)
    files = format.sharded.files(
        RankOutput(0, 1, boxes, sample.metadata, values), spread(boxes, 1), Storing()
    )
    unknown: Mapping[str, int] = defaultdict(int)
    receipts = [
        Receipt(file.plan.key, file.plan.nbytes, file.stored(unknown), [*file.values])
        for file in files
    ]
    plans = [
        *(file.plan for file in files),
        *format.sharded.index(sample, [(writes, receipts)], path=path),
    ]
    found = described(PlannedStore(plans, name=path), format.opened_as)
    check_holds(found.tensors, _outlines(catalogue), path)
    if not contents.metadata:
        note_opened(key)


def check_containers(state: State) -> None:
    """Open a native directory with a container of each kind that a state has. Raises `CannotHold` where that cannot be."""
    sample = tabulate_state({"containers": state.leaves.samples(), "others": state.leaves.others()})
    check_opens(replace(lay_out_native(sample), holds=sample.tensors), "")


def _of_each_kind(catalogue: Catalogue) -> dict[tuple[str, int, bool], int]:
    """A tensor of each kind. Lengths of dimensions make no kinds."""
    every = dict(
        zip(
            zip(catalogue.dtypes, catalogue.shapes, strict=True), range(len(catalogue)), strict=True
        )
    )
    return {(dtype, len(shape), 0 in shape): number for (dtype, shape), number in every.items()}


def _sample(contents: Contents, rows: Sequence[int]) -> Contents:
    catalogue = contents.catalogue
    names = tuple([catalogue.names[row] for row in rows])
    dtypes, shapes = (
        tuple([catalogue.dtypes[row] for row in rows]),
        tuple([catalogue.shapes[row] for row in rows]),
    )
    values = frozenset(sorted(contents.values)[:1])
    return Contents(
        catalogue=Catalogue(names, dtypes, shapes),
        aliases={},
        tree=None,
        metadata=contents.metadata,
        values=values,
        paths={name: contents.paths[name] for name in (*names, *values) if name in contents.paths},
        grads=contents.grads.intersection(names),
    )


def _nowhere(name: str, outline: Outline) -> LazyTensor:
    dtype, shape = outline
    storage = Storage("nowhere", 0, dtype.nbytes(math.prod(shape)), home=NOWHERE.store)
    return LazyTensor.contiguous(name, dtype, shape, storage, NOWHERE)


NOWHERE = OpenSource(MemoryStore({}))


def check_value(name: str, archive: bytes) -> None:
    """Raise `CannotHold` where the archive of a value that is no tensor would not open."""
    described(MemoryStore({"value": archive}, name=name), ("torch-zip",))


def _outlines(catalogue: Catalogue) -> Mapping[str, Outline]:
    rows = {row.name: row for row in DTYPES.rows}
    dtypes = [rows[dtype] for dtype in catalogue.dtypes]
    return dict(zip(catalogue.names, zip(dtypes, catalogue.shapes, strict=True), strict=True))


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


class Publishing(Value, frozen=True):
    """On the first rank: where a checkpoint comes together, and what it is to hold."""

    path: str
    format: Format
    target: Target
    together: Together
    step: AsStep | None = None
    base: str | None = None
    """The name of the step whose files it may share."""


def open_publishing(
    path: str,
    format: Format,
    together: Together,
    *,
    durable: bool,
    overwrite: bool,
    step: AsStep | None = None,
) -> Publishing:
    """Begin the target in which the checkpoint comes together."""
    base = None
    if step is not None:
        overwrite, base = step.begin(together.nbytes)
    return Publishing(
        path,
        format,
        open_together(path, format, durable=durable, overwrite=overwrite),
        together,
        step,
        base,
    )


def open_together(
    path: str,
    format: Format,
    *,
    durable: bool,
    overwrite: bool,
    replaceable: Callable[[str], bool] = is_part,
) -> Target:
    """On the first rank: begin a target for a save to a path or URL. Raises `NotCommitted` where there may be none."""
    # Of a DCP directory no checksum is recorded beside its index: that would be a second name to write, and two names cannot be put
    # at once.
    index, indexes = format.index, [one.index for one in rank_formats()]
    names = BucketNames(
        replaced=lambda url, there: replaced_at(url, [name for name in indexes if name in there]),
        others=lambda url, there: _other_indexes(url, index, there, overwrite=overwrite),
        stale=(BESIDE,),
    )
    plan = SavePlan(format.name, (), directory=True, index=(FilePlan(index, ()),))
    return target_of(
        path,
        plan,
        overwrite=overwrite,
        durable=durable,
        names=lambda: names,
        replaceable=replaceable,
        save=save_id(),
        parents=True,
    )


def _other_indexes(url: Url, index: str, there: Collection[str], *, overwrite: bool) -> list[str]:
    """The indexes of other formats that are there. Raises `NotCommitted` where one may not, or cannot, be replaced."""
    others = [one.index for one in rank_formats() if one.index != index and one.index in there]
    if others and not overwrite:
        raise refusal(
            "a checkpoint exists there; pass overwrite=True to replace it", url, errno.EEXIST
        )
    if MANIFEST in others:
        message = f"there is a checkpoint with a {MANIFEST}, which would still be the one that is opened; save elsewhere"
        raise refusal(f"{message}, or remove that object first", url, errno.EEXIST)
    return others


def write_files(
    files: Sequence[RankFile],
    into: Target,
    *,
    threads: int,
    progress: Progress | None = None,
    block: int | None = None,
    reuse: Reuse = NOTHING,
) -> list[Receipt]:
    """Write the files of one rank, all at once; files of the base are linked first. A receipt says whether its file is linked."""
    given = zip(reuse.linked, reuse.by_file(), strict=True)
    taken = [
        Receipt(file.key, file.nbytes, StoredBoxes.of(*inside), linked=True)
        for file, inside in given
    ]
    receipts: dict[str, Receipt] = {}
    each = max(threads // max(len(files), 1), 1)

    def task(file: RankFile, fill: Fill) -> Callable[[], None]:
        def run() -> None:
            crcs = fill(Saving(seals=NO_SEALS, threads=each, progress=progress, block=block))
            receipts[file.plan.key] = Receipt(
                file.plan.key, file.plan.nbytes, file.stored(crcs), [*file.values]
            )

        return run

    try:
        for receipt, file in zip(taken, reuse.linked, strict=True):
            receipt.linked = into.link(file)
        begun = [(file, into.begin(file.plan)) for file in files]
        run_all([task(file, fill) for file, fill in begun], threads)
    finally:
        into.close()
    return [*taken, *(receipts[file.plan.key] for file in files)]


def publish(publishing: Publishing, delivered: Sequence[Sequence[Receipt]], *, path: str) -> None:
    """Make the files of all ranks a checkpoint, in one step. `delivered[r]` is what rank r has written. `path` is what the caller
    says where."""
    format, contents, into = publishing.format, publishing.together.contents, publishing.target
    together = [*zip(publishing.together.writes, delivered, strict=True)]
    for rank, (writes, receipts) in enumerate(together):
        found = [as_column(receipt.stored.boxes) for receipt in receipts]
        values = sorted(name for receipt in receipts for name, _, _ in receipt.values)
        numbers = np.sort(np.concatenate([*found, NONE]))
        if numbers.tobytes() != np.arange(len(writes.boxes)).tobytes() or values != sorted(
            writes.values
        ):
            raise NotCommitted(
                f"rank {rank} did not write what was planned for it", file=publishing.path
            )
    everything = [receipt for receipts in delivered for receipt in receipts]

    def last() -> None:
        if whole:
            with closing(into.written()) as store:
                check_holds(
                    described(store, format.opened_as).tensors,
                    _outlines(contents.catalogue),
                    store.name,
                )
        if step is not None:
            step.sure()

    index = format.sharded.index(contents, together, path=path, save=into.save)
    whole = not publishing.together.sampled or near_limits(
        sum(f.nbytes for f in index), len(contents.catalogue), len(everything)
    )
    step, attributes = publishing.step, None
    if step is not None:
        step.linked(sum(receipt.nbytes for receipt in everything if receipt.linked))
        attributes = step.attributes([(receipt.key, receipt.nbytes) for receipt in everything])
        if attributes is None:
            index.append(
                seal_file(
                    [(receipt.key, receipt.nbytes) for receipt in everything], index, step.stamp
                )
            )
    others = [(one.key, one.nbytes, one.linked) for receipts in delivered[1:] for one in receipts]
    into.publish(index, Saving(seals=NO_SEALS, last=last, attributes=attributes), others)
