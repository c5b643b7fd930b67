"""The files of a sharded save on their way: opened before they are written, written by every rank, published by the first one.

    first rank    would the index open? Asked before there is a place for anything (`check_opens`)
    every rank    its files to where they come together (engine/targets), checksums on the way      ──► receipts
    first rank    compare receipts with the plan, make the index, publish

No rank has the whole checkpoint. What the first one has is its description, so before anything is made it lays out the checkpoint
that one rank would write of tensors like these, each in one piece, with the functions that lay out the real one, and gives it to
the reader (`check_opens`). How the pieces are spread decides no more than the length of the index. Where the ranks told different
trees, or the index comes near to a limit, what is finished is opened as a whole before it is published.
"""

from __future__ import annotations

import errno
import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.keys import beside
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import State
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.commit.remote import save_id
from holdfast.engine.commit.target import refusal
from holdfast.engine.planned_store import PlannedStore
from holdfast.engine.source import OpenSource
from holdfast.engine.stream import write_stream
from holdfast.engine.targets.bucket import BucketNames, ReplacedObjects
from holdfast.engine.targets.target import Fill, Saving, Target, target_of
from holdfast.engine.threads import run_all
from holdfast.engine.write import Progress
from holdfast.errors import HoldfastError, NotCommitted, StoreError
from holdfast.formats.dcp.index import BESIDE, METADATA, SavedTensor, read_index
from holdfast.formats.dcp.schema import Item
from holdfast.formats.index_file import read_index as read_pieces
from holdfast.formats.native.base import Reuse
from holdfast.formats.native.boxes import Boxes
from holdfast.formats.native.manifest import as_column
from holdfast.formats.native.read import read_manifest
from holdfast.formats.native.write import lay_out_native
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.formats.torch.write import lay_out_torch_zip
from holdfast.plan.saves import FilePlan, SavePlan
from holdfast.plan.table import NO_TENSORS, value_state
from holdfast.ranks.files import (
    NOTHING,
    PIECES_INDEX,
    Contents,
    DcpIndex,
    RankFile,
    RankOutput,
    Receipt,
    index_files,
    is_part,
    linked_receipts,
    rank_files,
)
from holdfast.ranks.plan import RankWrites
from holdfast.ranks.state import Catalogue
from holdfast.ranks.together import Together
from holdfast.rewrite.formats import Outline, check_holds, described, near_limits, note_opened, rehearse, was_opened
from holdfast.rewrite.references import References
from holdfast.rewrite.renewal import NOTHING as NO_SEALS
from holdfast.rewrite.state import tabulate_state
from holdfast.rewrite.step_seal import Stamp, seal_file
from holdfast.stores.memory import MemoryStore
from holdfast.stores.remote.client import bucket_of
from holdfast.stores.remote.store import RemoteStore
from holdfast.stores.remote.url import Url

NONE = np.zeros(0, np.int64)

READ_AS = {"native": ("native",), "dcp": ("dcp",), "safetensors": ("safetensors", "safetensors-dir")}
"""What a finished folder is opened as. One safetensors file in a folder of its own is just that file."""


def check_opens(format: str, contents: Contents, path: str, *, dcp_index: DcpIndex) -> None:
    """Raise `CannotHold` where a checkpoint with these contents would not open, or would show other tensors.

    Of fifty thousand tensors the reader would read the same fields fifty thousand times: one tensor of each kind stands for them.
    What was opened once in a process opens again: of contents without texts of the caller's, by their kinds.
    """
    kinds = _of_each_kind(contents.catalogue)
    names = [contents.catalogue.names[row] for row in kinds.values()]
    marks = [(name in contents.grads, *map(type, contents.paths.get(name, ()))) for name in names]
    key = "ranks", format, *kinds, *marks, bool(contents.values)
    if not contents.metadata and was_opened(key):
        return
    sample = _sample(contents, sorted(kinds.values()))
    catalogue = sample.catalogue
    tensors = [_nowhere(*one) for one in _outlines(catalogue).items()]
    every, storages = [Kind.of(tensor) for tensor in tensors], NO_TENSORS.storages
    table = Table(catalogue.names, every, range(len(every)), [ODD] * len(every), storages, dict(enumerate(tensors)))
    none = np.zeros((catalogue.rank, len(catalogue)), np.int64)
    numbers = np.arange(len(catalogue), dtype=np.int64)
    writes = RankWrites(numbers, numbers, none, catalogue.extents, (), 0)
    # What is no tensor is looked at where it is, by `check_value`.
    values = dict.fromkeys(sample.values, _nothing()) if sample.values else {}
    boxes = Boxes.cut(table, range(len(table)), none, catalogue.extents)
    files = rank_files(format, RankOutput(0, 1, boxes, sample.metadata, values))
    unknown: Mapping[str, int] = defaultdict(int)
    receipts = [Receipt(file.plan.key, file.plan.nbytes, file.stored(unknown), [*file.values]) for file in files]
    plans = [*(file.plan for file in files), *index_files(format, sample, [(writes, receipts)], dcp_index=dcp_index)]
    found = described(PlannedStore(plans, name=path), READ_AS[format])
    check_holds(found.tensors, _outlines(catalogue), path)
    if not contents.metadata:
        note_opened(key)


def check_containers(state: State) -> None:
    """Open a native directory with a container of each kind that a state has. Raises `CannotHold` where that cannot be."""
    sample = tabulate_state({"containers": state.leaves.samples(), "others": state.leaves.others()})
    rehearse(replace(lay_out_native(sample), holds=sample.tensors), "")


def _of_each_kind(catalogue: Catalogue) -> dict[tuple[str, int, bool], int]:
    """A tensor of each kind. Lengths of dimensions make no kinds."""
    every = dict(zip(zip(catalogue.dtypes, catalogue.shapes, strict=True), range(len(catalogue)), strict=True))
    return {(dtype, len(shape), 0 in shape): number for (dtype, shape), number in every.items()}


def _sample(contents: Contents, rows: Sequence[int]) -> Contents:
    """Contents of which these tensors are there, and one value."""
    catalogue = contents.catalogue
    names = tuple([catalogue.names[row] for row in rows])
    dtypes, shapes = tuple([catalogue.dtypes[row] for row in rows]), tuple([catalogue.shapes[row] for row in rows])
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
    """A tensor whose elements nobody is going to read."""
    dtype, shape = outline
    storage = Storage("nowhere", 0, dtype.nbytes(math.prod(shape)), home=NOWHERE.store)
    return LazyTensor.contiguous(name, dtype, shape, storage, NOWHERE)


NOWHERE = OpenSource(MemoryStore({}))


def check_value(name: str, archive: bytes) -> None:
    """Raise `CannotHold` where the archive of a value that is no tensor would not open."""
    described(MemoryStore({"value": archive}, name=name), ("torch-zip",))


def _nothing() -> bytes:
    """The archive of None."""
    out = io.BytesIO()
    write_stream(lay_out_torch_zip(value_state(None)).files[0], out)
    return out.getvalue()


def _outlines(catalogue: Catalogue) -> Mapping[str, Outline]:
    rows = {row.name: row for row in DTYPES.rows}
    dtypes = [rows[dtype] for dtype in catalogue.dtypes]
    return dict(zip(catalogue.names, zip(dtypes, catalogue.shapes, strict=True), strict=True))


class AsStep(Value, frozen=True):
    """What makes the checkpoint a step of a run. Asked of the first rank alone."""

    stamp: Stamp
    begin: Callable[[int], bool]
    """Called with the number of bytes that are to be written, before anything is: whether what is there may be replaced."""
    attributes: Callable[[Sequence[tuple[str, int]]], Mapping[str, str] | None]
    """From the data files to what the object of the manifest says of the step; None where a seal says it."""
    sure: Callable[[], None]
    """Asked before it is published: what it raises keeps everything as it was."""
    linked: Callable[[int], None]
    """Called with the number of bytes that are those of its base, before it is published."""


class Publishing(Value, frozen=True):
    """On the first rank: where a checkpoint comes together, and what it is to hold."""

    path: str
    format: str
    target: Target
    together: Together
    step: AsStep | None = None
    """Where it is to be a step of a run."""


def open_publishing(
    path: str, format: str, together: Together, *, durable: bool, overwrite: bool, step: AsStep | None = None
) -> Publishing:
    """Make a place in which the checkpoint comes together."""
    if step is not None:
        overwrite = step.begin(together.nbytes)
    return Publishing(path, format, open_together(path, format, durable=durable, overwrite=overwrite), together, step)


INDEXES = {"native": MANIFEST, "dcp": METADATA, "safetensors": PIECES_INDEX}
"""The object that makes the others a checkpoint, in each format. Safetensors files of ranks have one here alone. Of a DCP directory
no checksum is recorded beside it: that would be a second name to write, and two names cannot be put at once."""


def open_together(
    path: str, format: str, *, durable: bool, overwrite: bool, replaceable: Callable[[str], bool] = is_part
) -> Target:
    """On the first rank: make a place for a save to a path or URL. Raises `NotCommitted` where there may be none."""
    index = INDEXES[format]
    names = BucketNames(
        replaced=lambda url, there: _objects_of(url, index),
        others=lambda url: _other_indexes(url, index, overwrite=overwrite),
        stale=(BESIDE,) if index == METADATA else (),
    )
    plan = SavePlan(format, (), directory=True, index=(FilePlan(index, ()),))
    return target_of(
        path, plan, overwrite=overwrite, durable=durable, names=lambda: names, replaceable=replaceable, save=save_id(), parents=True
    )


def _other_indexes(url: Url, index: str, *, overwrite: bool) -> list[str]:
    """The indexes of other formats that are there. Raises `NotCommitted` where one may not, or cannot, be replaced."""
    there = [name for name in INDEXES.values() if name != index and _is_there(url, name)]
    if there and not overwrite:
        raise refusal("a checkpoint exists there; pass overwrite=True to replace it", url, errno.EEXIST)
    if MANIFEST in there:
        message = f"there is a checkpoint with a {MANIFEST}, which would still be the one that is opened; save elsewhere"
        raise refusal(f"{message}, or remove that object first", url, errno.EEXIST)
    return there


def _is_there(url: Url, name: str) -> bool:
    try:
        bucket_of(url).head(url.below(name).key)
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise refusal(f"the target cannot be looked at: {error.message}", url, error.errno) from None
        return False
    return True


def _objects_of(url: Url, index: str) -> ReplacedObjects:
    """What the checkpoint there names, in the formats that ranks write; nothing of one that cannot be read."""
    found: list[str] = []
    shared = False
    with suppress(HoldfastError):
        store = RemoteStore(url)
        source = OpenSource(store, limits=DEFAULTS)
        if store.holds(MANIFEST):
            manifest = read_manifest(source)
            found += [*(file.name for file in manifest.files), *(file.name for file in manifest.others or ())]
            shared = manifest.hash is not None
        elif store.holds(METADATA):
            for entry in read_index(source, whole=False).entries.values():
                if isinstance(entry, SavedTensor):
                    found += [piece.item.file for piece in entry.pieces]
                elif isinstance(entry, Item):
                    found.append(entry.file)
        elif store.holds(PIECES_INDEX):
            found += read_pieces(source, PIECES_INDEX).files
    named = References(url.parent).named if shared else None
    return ReplacedObjects([index, *(name for name in dict.fromkeys(found) if "/" not in name or beside(name))], named)


def write_files(
    files: Sequence[RankFile],
    into: Target,
    *,
    threads: int,
    progress: Progress | None = None,
    block: int | None = None,
    reuse: Reuse = NOTHING,
) -> list[Receipt]:
    """Write the files of one rank, all at once.

    What it takes over is linked first. The receipt of a file that had to be copied says that it is not linked.
    """
    taken = linked_receipts(reuse)
    receipts: dict[str, Receipt] = {}
    each = max(threads // max(len(files), 1), 1)

    def task(file: RankFile, fill: Fill) -> Callable[[], None]:
        def run() -> None:
            crcs = fill(Saving(seals=NO_SEALS, threads=each, progress=progress, block=block))
            receipts[file.plan.key] = Receipt(file.plan.key, file.plan.nbytes, file.stored(crcs), [*file.values])

        return run

    try:
        for receipt, file in zip(taken, reuse.linked, strict=True):
            receipt.linked = into.link(file)
        begun = [(file, into.begin(file.plan)) for file in files]
        run_all([task(file, fill) for file, fill in begun], threads)
    finally:
        into.close()
    return [*taken, *(receipts[file.plan.key] for file in files)]


def publish(publishing: Publishing, delivered: Sequence[Sequence[Receipt]], *, dcp_index: DcpIndex) -> None:
    """Make the files of all ranks a checkpoint, in one step. `delivered[r]` is what rank r has written."""
    format, contents, into = publishing.format, publishing.together.contents, publishing.target
    together = [*zip(publishing.together.writes, delivered, strict=True)]
    for rank, (writes, receipts) in enumerate(together):
        found = [as_column(receipt.stored.boxes) for receipt in receipts]
        values = sorted(name for receipt in receipts for name, _, _ in receipt.values)
        planned = sorted(writes.values) if format == "dcp" else []
        if not np.array_equal(np.sort(np.concatenate([*found, NONE])), np.arange(len(writes.boxes))) or values != planned:
            raise NotCommitted(f"rank {rank} did not write what was planned for it", file=publishing.path)
    everything = [receipt for receipts in delivered for receipt in receipts]

    def last() -> None:
        if whole:
            with closing(into.written()) as store:
                check_holds(described(store, READ_AS[format]).tensors, _outlines(contents.catalogue), store.name)
        if step is not None:
            step.sure()

    index = index_files(format, contents, together, dcp_index=dcp_index, save=into.save)
    whole = not publishing.together.sampled or near_limits(sum(f.nbytes for f in index), len(contents.catalogue), len(everything))
    step, attributes = publishing.step, None
    if step is not None:
        step.linked(sum(receipt.nbytes for receipt in everything if receipt.linked))
        attributes = step.attributes([(receipt.key, receipt.nbytes) for receipt in everything])
        if attributes is None:
            index.append(seal_file([(receipt.key, receipt.nbytes) for receipt in everything], index, step.stamp))
    others = [(one.key, one.nbytes, one.linked) for receipts in delivered[1:] for one in receipts]
    into.publish(index, Saving(seals=NO_SEALS, last=last, attributes=attributes), others)
