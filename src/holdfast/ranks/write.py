"""The files of a sharded save on their way to disk: rehearsed, written by every rank, published by the first one.

    first rank    would the index open? Asked before a folder is made (`rehearse_contents`)
    every rank    its files into a hidden folder beside the target, checksums on the way, fsync      ──► receipts
    first rank    compare receipts with the plan, write the index, read it once more, rename

The rehearsal. No rank has the whole checkpoint. What the first one has is its description, so before a folder is made it lays out
the checkpoint that one rank would write of tensors like these, each in one piece, with the functions that lay out the real one, and
gives it to the reader. That finds whatever names, dtypes, ranks, shapes and the tree have against them. How the pieces are spread
decides no more than the length of the index; of the finished folder the index is read once more, before it is published.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.box import Box
from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.commit.linked import linked_or_copied
from holdfast.engine.commit.target import refusing
from holdfast.engine.commit.transactions import DirectoryTransaction, NewFile
from holdfast.engine.planned_store import PlannedStore
from holdfast.engine.source import OpenSource
from holdfast.engine.stream import write_stream
from holdfast.engine.threads import run_all
from holdfast.engine.write import Progress, write_file
from holdfast.errors import NotCommitted
from holdfast.formats.native.base import Place, Reuse
from holdfast.formats.native.write import BoxToWrite
from holdfast.formats.torch.write import lay_out_torch_zip
from holdfast.plan.saves import FilePlan, LinkedFile
from holdfast.ranks.files import (
    NOTHING,
    Contents,
    DcpIndex,
    Part,
    RankFile,
    Receipt,
    index_files,
    is_part,
    linked_receipts,
    rank_files,
)
from holdfast.ranks.together import Together
from holdfast.rewrite.formats import Outline, check_holds, described
from holdfast.rewrite.step_seal import Stamp, digest_of, seal_file
from holdfast.stores.files import Files, make_parents
from holdfast.stores.local import LocalStore
from holdfast.stores.memory import MemoryStore
from holdfast.stores.path_files import system_files

__all__ = ["AsStep", "Publishing", "open_folder", "publish", "rehearse_contents", "rehearse_value", "write_files"]

READ_AS = {"native": ("native",), "dcp": ("dcp",), "safetensors": ("safetensors", "safetensors-dir")}
"""What a finished folder is opened as. One safetensors file in a folder of its own is just that file."""


def rehearse_contents(format: str, contents: Contents, path: str, *, dcp_index: DcpIndex) -> None:
    """Raise `CannotHold` where a checkpoint with these contents would not open, or would show other tensors."""
    nowhere = OpenSource(MemoryStore({}))
    boxes = []
    for name, (dtype, shape) in _outlines(contents).items():
        if name not in contents.aliases:
            storage = Storage("nowhere", 0, dtype.nbytes(_count(shape)), home=nowhere.store)
            tensor = LazyTensor.contiguous(name, dtype, shape, storage, nowhere)
            boxes.append(BoxToWrite(name, Box.whole(shape), tensor, shape))
    # What is no tensor is looked at where it is, by `rehearse_value`.
    values = dict.fromkeys(contents.values, _nothing()) if contents.values else {}
    files = rank_files(format, Part(0, 1, boxes, contents.metadata, values))
    unknown: Mapping[str, int] = defaultdict(int)
    receipts = [Receipt(file.plan.key, file.plan.nbytes, list(file.chunks(unknown))) for file in files]
    plans = [*(file.plan for file in files), *index_files(format, contents, receipts, dcp_index=dcp_index)]
    found = described(PlannedStore(plans, name=path), READ_AS[format])
    check_holds(found.tensors, _outlines(contents), path)


def rehearse_value(name: str, archive: bytes) -> None:
    """Raise `CannotHold` where the archive of a value that is no tensor would not open."""
    described(MemoryStore({"value": archive}, name=name), ("torch-zip",))


def check_folder(format: str, contents: Contents, folder: str) -> None:
    """The same as `rehearse_contents` for a folder that is finished and not published."""
    store = LocalStore(folder, max_files=Limits().files)
    try:
        check_holds(described(store, READ_AS[format]).tensors, _outlines(contents), folder)
    finally:
        store.close()


def _nothing() -> bytes:
    """The archive of None."""
    out = io.BytesIO()
    write_stream(lay_out_torch_zip(State(None, {}, {})).files[0], out)
    return out.getvalue()


def _outlines(contents: Contents) -> Mapping[str, Outline]:
    rows = {row.name: row for row in DTYPES.rows}
    return {name: (rows[dtype], tuple(shape)) for name, (dtype, shape) in contents.tensors.items()}


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


@dataclass(frozen=True, slots=True)
class AsStep:
    """What makes the checkpoint a step of a run. Asked of the first rank alone."""

    stamp: Stamp
    begin: Callable[[int], bool]
    """Called with the number of bytes that are to be written, before a folder is made: whether what is there may be replaced."""


@dataclass(frozen=True, slots=True)
class Publishing:
    """On the first rank: the folder in which a checkpoint comes together, and what it is to hold."""

    path: str
    format: str
    transaction: DirectoryTransaction
    together: Together
    stamp: Stamp | None = None
    """What the seal says, where it is to be a step of a run."""

    def give_up(self) -> None:
        """Remove the folder, unless it was published."""
        self.transaction.__exit__(None, None, None)


def open_folder(
    path: str, format: str, together: Together, *, durable: bool, overwrite: bool, step: AsStep | None = None
) -> Publishing:
    """Make the hidden folder beside the target, and the folders that lead to it."""
    if step is not None:
        overwrite = step.begin(together.nbytes)
    with refusing("making the folders that lead to it", path):
        make_parents(path, durable=durable)
    transaction = DirectoryTransaction(path, durable=durable, overwrite=overwrite, replaceable=is_part)
    transaction.__enter__()
    return Publishing(path, format, transaction, together, None if step is None else step.stamp)


def write_files(
    files: Sequence[RankFile],
    into: Publishing | str,
    *,
    path: str,
    durable: bool,
    threads: int,
    progress: Progress | None = None,
    block: int | None = None,
    reuse: Reuse[Place] = NOTHING,
) -> list[Receipt]:
    """Write the files of one rank, all at once; on other ranks than the first one `into` is the name of the folder.

    What it takes over is linked first. The receipt of a file that had to be copied says that it is not linked.
    """
    if not files and not reuse.linked:
        return []
    system = system_files()
    folder = system.open_directory(into) if isinstance(into, str) else -1
    taken = linked_receipts(reuse)
    receipts: dict[str, Receipt] = {}
    each = max(threads // max(len(files), 1), 1)

    def create(key: str) -> NewFile:
        if isinstance(into, str):
            return NewFile(system, system.create(key, at=folder), path=f"{path}/{key}", durable=durable)
        return into.transaction.create(key)

    def task(file: RankFile, sink: NewFile) -> Callable[[], None]:
        def run() -> None:
            crcs = write_file(file.plan, sink, threads=each, progress=progress, block=block).crcs
            sink.finish(durable=durable)
            receipts[file.plan.key] = Receipt(file.plan.key, file.plan.nbytes, list(file.chunks(crcs)))

        return run

    sinks: list[NewFile] = []
    try:
        for receipt, file in zip(taken, reuse.linked, strict=True):
            receipt.linked = _link(file, into, system, folder=folder, path=path, durable=durable)
        sinks.extend(create(file.plan.key) for file in files)
        run_all([task(file, sink) for file, sink in zip(files, sinks, strict=True)], threads)
    except BaseException:
        for sink in sinks:
            sink.give_up()
        raise
    finally:
        if isinstance(into, str):
            system.close(folder)
    return [*taken, *(receipts[file.plan.key] for file in files)]


def _link(file: LinkedFile, into: Publishing | str, system: Files, *, folder: int, path: str, durable: bool) -> bool:
    """Take over a file of the base; whether by a link."""
    with refusing("opening the base", file.folder):
        base = system.open_directory(file.folder)
    try:
        if not isinstance(into, str):
            return into.transaction.link(file.key, file.nbytes, folder=base)
        label = f"{path}/{file.key}"
        with refusing("taking over a file of the base", label):
            made, linked = linked_or_copied(system, file.key, file.nbytes, source_at=base, at=folder, label=label)
            made.finish(durable=durable)
        return linked
    finally:
        system.close(base)


def publish(publishing: Publishing, delivered: Sequence[Sequence[Receipt]], *, dcp_index: DcpIndex) -> None:
    """Make the files of all ranks a checkpoint, by one rename. `delivered[r]` is what rank r has written."""
    folder, contents = publishing.transaction, publishing.together.contents
    for rank, (receipts, planned) in enumerate(zip(delivered, publishing.together.boxes, strict=True)):
        chunks = (chunk for receipt in receipts for chunk in receipt.chunks)
        found = sorted((name, chunk.start, chunk.stop) for name, chunk in chunks if name not in contents.values)
        if found != sorted(planned):
            raise NotCommitted(f"rank {rank} did not write what was planned for it", file=publishing.path)
        if rank:
            for receipt in receipts:
                folder.join(receipt.key, receipt.nbytes, linked=receipt.linked)
    everything = [receipt for receipts in delivered for receipt in receipts]
    folder.seal_data()
    index = list(index_files(publishing.format, contents, everything, dcp_index=dcp_index))
    if publishing.stamp is not None:
        index.append(_seal(everything, tuple(index), publishing.stamp))
    for file in index:
        write_file(file, folder.create(file.key))
    check_folder(publishing.format, contents, folder.folder)
    folder.commit()


def _seal(receipts: Sequence[Receipt], index: Sequence[FilePlan], stamp: Stamp) -> FilePlan:
    """The seal of what all ranks have written, and of the index."""

    def digests(crcs: Mapping[str, int]) -> Mapping[str, str]:
        return {file.key: digest_of(_content(file)) for file in index}

    data = [(receipt.key, receipt.nbytes) for receipt in receipts]
    return seal_file(data, [(file.key, file.nbytes) for file in index], stamp, digests=digests)


def _content(file: FilePlan) -> bytes:
    out = io.BytesIO()
    write_stream(file, out)
    return out.getvalue()
