"""`copy`: a checkpoint as it is, byte for byte, to another place: between disks, buckets, or inside of one bucket.

1. The source is opened, so that what cannot be read is not copied; nothing of its format is changed, and every file of a folder
   comes along under its name.
2. Where checksums are recorded, what was read is compared with them while it passes by.
3. On this machine a rename publishes it. In a bucket the index goes last (`engine/targets/bucket`), after everything it names.
4. From a bucket to itself the store copies, and no byte comes here.
5. A step in a bucket that names data of steps beside it becomes whole: the data comes along, and the manifest says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from holdfast.core.arguments import understood
from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.keys import beside
from holdfast.core.limits import Limits
from holdfast.core.protocols import Source, Store
from holdfast.core.quantities import Size
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import nbytes
from holdfast.core.value import replace
from holdfast.engine.source import OpenSource
from holdfast.engine.write import Progress
from holdfast.errors import CannotHold
from holdfast.formats.dcp.index import is_index
from holdfast.formats.index_file import choose_index
from holdfast.formats.native.read import read_manifest
from holdfast.formats.native.schema import made_whole
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.formats.torch.directory import FORMAT as TORCH_FOLDER
from holdfast.formats.torch.directory import weight_files
from holdfast.inspect.open import Openable, opened, store_of
from holdfast.plan.saves import Data, FilePlan, LinkedFile, Literal, SavePlan
from holdfast.rewrite.planned import MAX_MEMORY, Planned, Saved, check_target, planned_fields
from holdfast.rewrite.writing import Writing
from holdfast.stores.paths import place_of
from holdfast.stores.place import join, place_at, same_place
from holdfast.stores.remote.url import COPIED_NBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(Saved):
    """What was copied, or would be. `shared_nbytes` is what the store itself copies."""

    source: str
    checked_nbytes: int
    """Bytes that are compared with a checksum which the source records, on their way."""


@understood
def copy(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str],
    *,
    store: object | None = None,
    overwrite: bool = False,
    durable: bool = True,
    read_back: bool = True,
    max_memory: Size | None = MAX_MEMORY,
    dry_run: bool = False,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Copy a checkpoint of any format as it is, all files of its folder included; paths and URLs on both sides.

    Where the source records checksums, they are compared on the way. What is there already is refused unless `overwrite=True`. A
    file that goes to a folder (a slash at the end of `dst`) keeps its name. From a bucket to itself the store copies the objects.
    `store` is an obstore store that `dst` is a key in.
    """
    writing = Writing(
        overwrite=overwrite, durable=durable, threads=threads, read_back=read_back, max_memory=max_memory, dry_run=dry_run
    )
    return plan_copy(src, place_of(dst, store), writing=writing, limits=limits).carry_out(progress)


def plan_copy(
    src: Openable | Checkpoint, dst: str | os.PathLike[str], *, writing: Writing, limits: Limits | None = None
) -> Planned[Copied]:
    """Lay out a copy."""
    with ExitStack() as stack:
        source = stack.enter_context(opened(src, threads=1, limits=limits))
        target = place_of(dst)
        store = _raw(src, source, stack, limits or Limits())
        if not store.folder and place_at(target).says_folder:
            target = join(target, os.path.basename(source.path))
        if same_place(target, source.path):
            raise CannotHold("the target is read while it is written", [f"{target!r} is the source"], file=target)
        writing = replace(writing, requests=store.requests)
        check_target(target, directory=store.folder, writing=writing)
        plan, checked = _lay_out(source, store, target, limits or Limits())
        report = Copied(**planned_fields(plan, target), source=source.path, checked_nbytes=checked)
        report = replace(report, notes=(*report.notes, *_unchecked(source, checked, by_store=bool(plan.linked))))
        return Planned(plan, report, writing, reads=(store,), sources=stack.pop_all())


def _unchecked(source: Checkpoint, checked: int, *, by_store: bool) -> Iterator[str]:
    """What nobody can say of the tensors that are copied: whether they are as they were written."""
    whole = sum(storage.nbytes for storage in dict.fromkeys(s for tensor in source.values() for s in tensor.storages))
    if checked < whole:
        compared = f"{nbytes(checked)} of {nbytes(whole)} of tensors were" if checked else "nothing was"
        recorded = "no other checksums are recorded" if checked else "no checksums are recorded"
        why = "the store copies by itself" if by_store else recorded
        yield f"{compared} compared on the way: {why}"


def _raw(src: Openable | Checkpoint, source: Checkpoint, stack: ExitStack, limits: Limits) -> Store:
    """The files themselves, where the store of an open checkpoint may have some that are computed."""
    store = source.source.store
    if isinstance(src, Checkpoint) and store.place() != place_at(source.path).identity:
        return store  # it was opened from memory
    raw = store_of(source.path if isinstance(src, Checkpoint) else src, limits)
    stack.callback(raw.close)
    return raw


def _lay_out(source: Checkpoint, store: Store, target: str, limits: Limits) -> tuple[SavePlan, int]:
    names = list(store.list())
    last = _index(names, source) if store.folder else None
    origin = OpenSource(store, limits=limits, threads=1)
    recorded: dict[str, list[Storage]] = {}
    for storage in dict.fromkeys(s for tensor in source.values() for s in tensor.storages):
        if storage.crc32 is not None and storage.nbytes:
            recorded.setdefault(storage.key, []).append(storage)
    linked: list[LinkedFile] = []
    files: list[FilePlan] = []
    index: list[FilePlan] = []
    checked, url, goal = 0, place_at(source.path).url, place_at(target).url
    shares = url is not None and goal is not None and url.root == goal.root and url.client is goal.client
    shared = {file.name: at for file in read_manifest(origin).files if (at := beside(file.name))} if last == MANIFEST else {}
    for name in (*names, *shared):
        folder, key = shared.get(name, ("", name if store.folder else ""))
        if name != last and url is not None and shares and store.size(name) <= COPIED_NBYTES:
            linked.append(LinkedFile(key, store.size(name), url.sibling(folder) if folder else url))
            continue
        if name == last and shared:
            text = made_whole(origin.bytes(name, 0, store.size(name)), {one: at for one, (_, at) in shared.items()})
            index.append(FilePlan(name, (Literal(text),)))
            continue
        file, compared = _copied(name, origin, recorded.get(name, ()), key=key)
        (index if name == last else files).append(file)
        checked += compared
    plan = SavePlan(
        source.format, tuple(files), directory=store.folder, index=tuple(index), opens=True, linked=tuple(linked), copied=True
    )
    return plan, checked


def _index(names: Sequence[str], source: Checkpoint) -> str | None:
    """The file that makes a checkpoint of a folder, where one of them does."""
    if MANIFEST in names:
        return MANIFEST
    if source.format == TORCH_FOLDER:
        return weight_files(source.source).index
    return next((name for name in names if "/" not in name and is_index(name)), None) or choose_index(names, source.path)


def _copied(name: str, origin: Source, recorded: Iterable[Storage], *, key: str) -> tuple[FilePlan, int]:
    """A file as it is, in rows of bytes: those that a checksum is recorded of, and what lies between them."""
    size, at, checked = origin.store.size(name), 0, 0
    segments: list[Data] = []

    def row(start: int, stop: int, crc32: int | None = None) -> None:
        label = f"{name} from byte {start}"
        storage = Storage(name, start, stop - start, crc32=crc32, label=label, home=origin.store)
        chunk = Chunk(Box((0,), (stop - start,)), storage, 0, (8,))
        dtype = DTYPES.name("uint8")
        assert dtype is not None  # it is in the table
        segments.append(Data(LazyTensor(label, dtype, (stop - start,), (chunk,), origin), label))

    for storage in sorted(recorded, key=lambda one: one.start):
        stop = storage.start + storage.nbytes
        if storage.start < at or stop > size:
            continue
        if storage.start > at:
            row(at, storage.start)
        row(storage.start, stop, storage.crc32)
        at, checked = stop, checked + storage.nbytes
    if at < size:
        row(at, size)
    return FilePlan(key, tuple(segments)), checked
