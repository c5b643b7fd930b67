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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.keys import parse_sibling_key
from holdfast.core.limits import Limits
from holdfast.core.options import CopyOptions, pick_fields, validate_arguments
from holdfast.core.protocols import Source, Store
from holdfast.core.table import IRREGULAR, RowKind, StoredFile, Table
from holdfast.core.tensor import NO_CRC
from holdfast.core.text import format_nbytes
from holdfast.core.value import replace
from holdfast.engine.files import UINT8, FileStorages
from holdfast.engine.saves import FilePlan, LinkedFile, Literal, SavePlan
from holdfast.engine.source import OpenSource
from holdfast.engine.table import plan_segments
from holdfast.errors import CannotHold
from holdfast.formats import format_of
from holdfast.formats.dcp.index import is_index
from holdfast.formats.native.schema import made_whole, parse_manifest
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.stores.paths import place_of
from holdfast.stores.place import is_same_place, join, place_at
from holdfast.stores.remote.url import MAX_COPY_NBYTES
from holdfast.verbs.open import Openable, hash_checkpoint, open_checkpoint_store, opened_checkpoint
from holdfast.verbs.shared.planned import (
    Planned,
    Saved,
    Writing,
    begin_ranks,
    check_target,
    make_report_fields,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(Saved):
    """The result of `copy`. `shared_nbytes` counts the bytes that the object store copies itself."""

    source: str
    checked_nbytes: int
    """Number of bytes that `copy` compares with a checksum of the source."""


@validate_arguments
def copy(
    src: Openable | Checkpoint, dst: str | os.PathLike[str], **options: Unpack[CopyOptions]
) -> Copied:
    """Copy a checkpoint byte for byte, with all files of its folder.

    Both places can be paths or URLs. If the source contains checksums, `copy` verifies them while it copies. If `dst` ends with a
    slash, it is a folder, and a file keeps its name in it. An existing target is an error without `overwrite=True`. Within one
    bucket, the object store copies the objects itself. If you pass an obstore store as `store`, `dst` is a key in this store.
    """
    return plan_copy(src, dst, options).carry_out(options["progress"])


def plan_copy(
    src: Openable | Checkpoint, dst: str | os.PathLike[str], options: CopyOptions
) -> Planned[Copied]:
    with ExitStack() as stack:
        ranks, common = begin_ranks(options, dst, stack)
        limits = options["limits"] or Limits()
        source = stack.enter_context(opened_checkpoint(src, threads=1, limits=limits))
        target = place_of(dst, options["store"])
        store = _raw(src, source, stack, limits)
        if not store.is_folder and any(one.is_folder for one in source.stored.stores):
            raise CannotHold(
                "this file cannot be copied alone",
                [f"tensors of {source.path!r} lie in other files of its folder; copy the folder"],
                file=source.path,
            )
        if not store.is_folder and place_at(target).is_marked_as_folder:
            target = join(target, os.path.basename(source.path))
        if is_same_place(target, source.path):
            raise CannotHold(
                "the target is read while it is written", [f"{target!r} is the source"], file=target
            )
        writing = pick_fields(
            Writing, {**options, **common}, requests=store.read_profile.request_count
        )
        check_target(target, directory=store.is_folder, writing=writing)
        recorded, whole = _recorded(source)
        plan, checked = _lay_out(source, store, target, limits, recorded=recorded)
        report = Copied(
            **make_report_fields(plan, target), source=source.path, checked_nbytes=checked
        )
        report = replace(
            report, notes=(*report.notes, *_unchecked(whole, checked, by_store=bool(plan.linked)))
        )
        mark = partial(hash_checkpoint, source)
        return Planned(
            plan,
            report,
            writing,
            reads=(store,),
            sources=stack.pop_all(),
            ranks=ranks,
            hash_source=mark,
        )


def _unchecked(whole: int, checked: int, *, by_store: bool) -> Iterator[str]:
    """A note where tensors are copied without being compared with a checksum."""
    if checked < whole:
        compared = (
            f"{format_nbytes(checked)} of {format_nbytes(whole)} of tensors were"
            if checked
            else "nothing was"
        )
        recorded = "no other checksums are recorded" if checked else "no checksums are recorded"
        why = "the store copies by itself" if by_store else recorded
        yield f"{compared} compared on the way: {why}"


def _raw(src: Openable | Checkpoint, source: Checkpoint, stack: ExitStack, limits: Limits) -> Store:
    """The store of the files themselves; that of an open checkpoint may have some that are computed."""
    store = source.source.store
    if isinstance(src, Checkpoint) and store.identity() != place_at(source.path).identity:
        return store  # it was opened from memory
    raw = open_checkpoint_store(source.path if isinstance(src, Checkpoint) else src, limits)
    stack.callback(raw.close)
    return raw


def _lay_out(
    source: Checkpoint, store: Store, target: str, limits: Limits, *, recorded: Mapping[str, Ints]
) -> tuple[SavePlan, int]:
    names = list(store.list())
    last = _index(names, source) if store.is_folder else None
    origin = OpenSource(store, limits=limits, threads=1)
    linked: list[LinkedFile] = []
    files: list[FilePlan] = []
    index: list[FilePlan] = []
    checked, url, goal = 0, place_at(source.path).url, place_at(target).url
    shares = (
        url is not None and goal is not None and url.root == goal.root and url.client is goal.client
    )
    listed = (
        parse_manifest(origin.bytes(MANIFEST, 0, store.size(MANIFEST)), limits).files
        if last == MANIFEST
        else ()
    )
    shared = {file.name: at for file in listed if (at := parse_sibling_key(file.name))}
    for name in (*names, *shared):
        folder, key = shared.get(name, ("", name if store.is_folder else ""))
        if name != last and url is not None and shares and store.size(name) <= MAX_COPY_NBYTES:
            linked.append(LinkedFile(key, store.size(name), url.sibling(folder) if folder else url))
            continue
        if name == last and shared:
            text = made_whole(
                origin.bytes(name, 0, store.size(name)),
                {one: at for one, (_, at) in shared.items()},
            )
            index.append(FilePlan(name, (Literal(text),)))
            continue
        file, compared = _copied(name, origin, recorded.get(name), key=key)
        (index if name == last else files).append(file)
        checked += compared
    plan = SavePlan(
        source.format,
        tuple(files),
        directory=store.is_folder,
        index=tuple(index),
        linked=tuple(linked),
        is_copy=True,
    )
    return plan, checked


def _index(names: Sequence[str], source: Checkpoint) -> str | None:
    """The file that makes a checkpoint of a folder, where one of them does."""
    if MANIFEST in names:
        return MANIFEST
    found = next((name for name in names if "/" not in name and is_index(name)), None)
    format = format_of(source.format)
    return (
        format.weight_files(source.source).index if found is None and format.weights_by else found
    )


def _recorded(source: Checkpoint) -> tuple[dict[str, Ints], int]:
    """The ranges of each file with a checksum (first byte, the byte behind the last, CRC-32), and the bytes of all storages."""
    table = source.stored
    found: dict[str, list[Ints]] = {}
    storages, whole = table.storages, 0
    if isinstance(storages, FileStorages):
        used = np.unique(np.asarray(table.storage_indices, np.int64))
        used = used[used != IRREGULAR]
        file, start, nbytes, crc = (
            column[used]
            for column in (storages.file_indices, storages.starts, storages.nbytes, storages.crcs)
        )
        columns, summed = (
            np.stack((start, start + nbytes, crc), axis=1),
            (crc != NO_CRC) & (nbytes > 0),
        )
        for number, place in enumerate(storages.files):
            found.setdefault(place.key, []).append(columns[summed & (file == number)])
        whole = int(nbytes.sum())
    for storage in dict.fromkeys(
        storage for tensor in table.irregular.values() for storage in tensor.storages
    ):
        whole += storage.nbytes
        if storage.crc32 is not None and storage.nbytes:
            own = storage.start, storage.start + storage.nbytes, storage.crc32
            found.setdefault(storage.key, []).append(np.array([own], np.int64))
    return {key: np.concatenate(rows) for key, rows in found.items()}, whole


def _apart(ranges: Ints, size: int) -> Ints:
    """The ranges of a file that lie in it and begin where none before them goes on, by their starts."""
    ranges = ranges[ranges[:, 1] <= size]
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(np.append(0, ranges[:, 1]))[:-1]
    if (ranges[:, 0] >= reach).all():
        return ranges
    kept: list[int] = []
    at = 0
    for row, (start, stop) in enumerate(ranges[:, :2].tolist()):
        if start >= at:
            kept.append(row)
            at = stop
    return ranges[kept]


def _copied(name: str, origin: Source, recorded: Ints | None, *, key: str) -> tuple[FilePlan, int]:
    """The plan of a file as it is: rows with a recorded checksum, and what lies between them; and how many bytes have one."""
    store = origin.store
    size = store.size(name)
    ranges = _apart(np.zeros((0, 3), np.int64) if recorded is None else recorded, size)
    edges = np.unique(np.concatenate(([0, size], ranges[:, 0], ranges[:, 1])))
    starts, lengths = edges[:-1], np.diff(edges)
    crcs = np.full(len(starts), NO_CRC)
    crcs[np.searchsorted(starts, ranges[:, 0])] = ranges[:, 2]
    labels = [f"{name} from byte {start}" for start in starts.tolist()]
    storages = FileStorages(
        [StoredFile(origin, name, store)],
        np.zeros_like(starts),
        starts,
        lengths,
        crcs,
        names=labels,
    )
    of_length, kind = np.unique(lengths, return_inverse=True)
    kinds = [RowKind.from_shape(UINT8, (length,)) for length in of_length.tolist()]
    rows = range(len(starts))
    # What a remote store has is requested ahead, which a row by itself is.
    ahead = store.read_profile.is_sequential or store.read_profile.block_nbytes
    irregular = (
        {row: storages.lazy_tensor(row, kinds[kind[row]], labels[row]) for row in rows}
        if ahead
        else {}
    )
    table = Table(
        labels,
        kinds,
        kind.tolist(),
        [IRREGULAR] * len(rows) if ahead else rows,
        storages,
        irregular,
    )
    file = FilePlan(
        key, tuple(plan_segments(table, rows, lengths, labels, {}, stops=lengths.cumsum()))
    )
    return file, int((ranges[:, 1] - ranges[:, 0]).sum())
