"""What a verification reads of the files of a checkpoint: the storages of tensors, other records of archives, and all between them.

A storage with a checksum of its own, under one name, is a row of numbers (`Rows`): of a million tensors almost all are. What is
shared, packed, split or inflated is an object with all that is known about it (`Range`), and so is a row that turns out to be
damaged, which the way of objects then tells of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Storage
from holdfast.core.protocols import Source, Store
from holdfast.core.sparse.storage import SparseStorage
from holdfast.core.tensor import LazyTensor
from holdfast.engine.checksums import Span
from holdfast.errors import HoldfastError, detached
from holdfast.formats.zip.layout import Records
from holdfast.formats.zip.reader import read_archive
from holdfast.inspect.storage_rows import NONE, Rows, among, storage_rows
from holdfast.plan.coalesce import Ranges

NPZ = "npz"


class Range(Struct):
    """A span with what is known about it."""

    span: Span
    label: str
    crc32: int | None
    store: Store
    position: int
    """Of its first tensor among all of them."""
    tensors: list[str] = field(default_factory=list)
    content_nbytes: int | None = None
    """Length after inflating, for a compressed record."""


class StorageRanges(Struct):
    """The storages of all tensors, each once."""

    names: Sequence[str]
    rows: Rows
    others: dict[object, Range]
    """By file, start and length."""
    lost: Sequence[tuple[str, HoldfastError]]
    """Tensors whose bytes cannot be found, because what says where they are is damaged."""

    def keys(self, store: Store) -> list[str]:
        """The files of a store that have bytes of them."""
        ranges = self.rows.ranges
        used = {ranges.keys[file] for file in np.unique(ranges.files).tolist()}
        return sorted(used | {at.span.key for at in self.others.values() if at.store is store})


def find_storages(tensors: Mapping[str, LazyTensor], source: Source, *, rows: bool) -> StorageRanges:
    """The storages of tensors in the files of a source; with `rows=False`, all of them as objects."""
    names = list(tensors)
    found = storage_rows(tensors, names, source) if rows else NONE
    while True:
        left = np.ones(len(names), np.bool_)
        left[found.positions] = False
        others, lost = ranges_of(tensors, names, np.flatnonzero(left).tolist())
        known = {place for place, at in others.items() if at.store is source.store}
        shared = among(found.ranges, known)
        if not shared.any():
            return StorageRanges(names, found.some(found.ranges.nbytes > 0), others, lost)
        # An object uses the storage of a row: then all of its names are entered, in their order.
        found = found.some(~shared)


def ranges_of(
    tensors: Mapping[str, LazyTensor], names: Sequence[str], positions: Iterable[int]
) -> tuple[dict[object, Range], list[tuple[str, HoldfastError]]]:
    """The storages of some tensors as objects, each once, with every name that uses it; and tensors whose are not to be found."""
    ranges: dict[object, Range] = {}
    lost: list[tuple[str, HoldfastError]] = []
    for position in positions:
        name = names[position]
        tensor = tensors[name]
        for storage in _with_parts(tensor):
            if storage.nbytes:
                try:
                    place = (storage.key, storage.start, storage.nbytes)
                except HoldfastError as error:
                    lost.append((name, detached(error)))
                    continue
                at = ranges.get(place)
                if at is None:
                    span = Span(*place, summed=storage.crc32 is not None)
                    at = ranges[place] = Range(span, storage.label, storage.crc32, _store_of(storage, tensor), position)
                at.tensors.append(name)
    return ranges, lost


def _with_parts(tensor: LazyTensor) -> Iterator[Storage]:
    """The storages of a tensor; of one that is stored packed, its parts as well."""
    for storage in tensor.storages:
        if isinstance(storage, SparseStorage):
            yield from storage.parts
        yield storage


def _store_of(storage: Storage, tensor: LazyTensor) -> Store:
    """Where the bytes of a storage are: in the files, or in what unpacks or inflates them."""
    store = tensor.source.store
    return store.below(storage.key) or store


def add_records(storages: StorageRanges, source: Source, key: str, *, arrays: bool) -> None:
    """Add records of a zip that are no tensor's storage. Tensors of an .npz end their records, and their checksums cover them."""
    archive = read_archive(source, key, fold_case=not arrays)
    ranges, rows = storages.others, storages.rows.ranges
    cut = len(archive.prefix) + 1 if archive.prefix and not arrays else 0
    ends = {at.span.stop for at in ranges.values() if at.crc32 is not None and at.span.key == key} if arrays else set()
    inflated = {at.label for at in ranges.values() if at.span.key != key} if arrays else set()
    records = archive.records
    own = rows.files == rows.keys.index(key) if key in rows.keys else np.zeros(len(rows), np.bool_)
    left = records.besides(rows.starts[own], rows.nbytes[own]) if isinstance(records, Records) and own.any() else records.values()
    for record in left:
        if record.stop in ends or record.name in inflated:
            continue
        if record.nbytes and record.crc32 is not None and (key, record.start, record.nbytes) not in ranges:
            span = Span(key, record.start, record.nbytes)
            length = None if record.stored else record.content_nbytes
            made = Range(span, record.name[cut:], record.crc32, source.store, len(storages.names), content_nbytes=length)
            ranges[key, record.start, record.nbytes] = made


def fold_into_records(ranges: dict[object, Range]) -> None:
    """Let the record that a range without a checksum lies in stand for it: tensors may be cut from a row that is one record."""
    records: dict[str, list[Range]] = {}
    for at in ranges.values():
        if at.crc32 is not None and at.content_nbytes is None:
            records.setdefault(at.span.key, []).append(at)
    starts = {}
    for key, own in records.items():
        own.sort(key=lambda at: at.span.start)
        starts[key] = [at.span.start for at in own]
    for place, at in list(ranges.items()):
        number = bisect_right(starts.get(at.span.key, ()), at.span.start) - 1
        if at.crc32 is None and number >= 0:
            record = records[at.span.key][number]
            if at.span.stop <= record.span.stop and at.store is record.store:
                record.tensors += at.tensors
                del ranges[place]
    for own in records.values():
        for at in own:
            at.tensors = list(dict.fromkeys(at.tensors))


def gaps(ranges: Ranges, sizes: Mapping[str, int]) -> Ranges:
    """What ranges leave of files of these sizes: between them by their starts, then behind the last of each file."""
    keys = list(sizes)
    inner: list[tuple[Ints, Ints, Ints]] = []
    tails: list[tuple[int, int, int]] = []
    for number, key in enumerate(keys):
        own = ranges.files == ranges.keys.index(key) if key in ranges.keys else np.zeros(len(ranges), np.bool_)
        starts = ranges.starts[own]
        order = np.argsort(starts, kind="stable")
        starts, stops = starts[order], (starts + ranges.nbytes[own])[order]
        reach = np.maximum.accumulate(np.append(0, stops))
        open_at = np.flatnonzero(starts > reach[:-1])
        inner.append((np.full(len(open_at), number), reach[open_at], starts[open_at] - reach[open_at]))
        if reach[-1] < sizes[key]:
            tails.append((number, int(reach[-1]), sizes[key] - int(reach[-1])))
    files, starts, nbytes = (np.concatenate([np.zeros(0, np.int64), *columns]) for columns in zip(*inner, strict=True))
    order = np.argsort(starts, kind="stable")
    last = np.array(tails, np.int64).reshape(-1, 3).T
    first = files[order], starts[order], nbytes[order]
    return Ranges(keys, *(np.concatenate(pair) for pair in zip(first, last, strict=True)))
