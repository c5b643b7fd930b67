"""The tensors of a native directory, as rows of a table. Each is made when it is asked for.

A manifest is a dozen objects for each of a million tensors. Almost all are one chunk, as it is in memory: of those a few numbers
are kept in columns, and the manifest is let go. What is split, packed or shares bytes between elements is an odd row.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain, count
from operator import attrgetter

import numpy as np

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Source
from holdfast.core.runtime import copied_together
from holdfast.core.strict_json import quoted
from holdfast.core.table import ODD, FilePlace, Kind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.files import FileStorages
from holdfast.errors import HeaderError
from holdfast.formats.native.chunks import UnpackedStore, sparse_storage
from holdfast.formats.native.schema import DataFile, OtherFile, Parsed, StoredChunk, StoredTensor
from holdfast.formats.recorded import Recorded

BYTES_OF, CRC_OF, FILE_OF = attrgetter("bytes"), attrgetter("crc32"), attrgetter("file")

WHOLE = {row.name for row in DTYPES.rows if not row.packed}
"""Dtypes whose elements fill whole bytes, which lie in a file as in memory."""


class Stored(Value, frozen=True, eq=False):
    """The tensors of a manifest that was checked, and what else it says."""

    table: Table
    """The numbers of files in its storages are those of the manifest."""
    storages: FileStorages
    odd: Mapping[str, StoredTensor]
    """The entries of odd rows."""
    recorded: Recorded
    metadata: dict[str, str]
    files: Sequence[DataFile]
    others: Sequence[OtherFile]
    version: int
    source: Source


def stored_tensors(manifest: Parsed, source: Source) -> Stored:
    """The rows of a manifest that was checked, which is let go."""
    # While all else is there: what is freed later has gaps, and the copies are not to lie in these.
    names, tensors = copied_together([*manifest.tensors]), [*manifest.tensors.values()]
    # The manifest was checked: a chunk that has no box is the whole tensor, and has as many bytes as its elements take.
    chunks = [stored.chunks[0] for stored in tensors]
    rows = [
        row
        for row, (first, stored) in enumerate(zip(chunks, tensors, strict=True))
        if first.start is not None or first.sparse is not None or stored.chunks[1:] or stored.dtype not in WHOLE
    ]
    entries = {names[row]: tensors[row] for row in rows}
    made = OddTensors(manifest, source)
    odd = {row: made.tensor(names[row], tensors[row]) for row in rows}
    dtypes, shapes = [stored.dtype for stored in tensors], [stored.shape for stored in tensors]
    positions = dict(zip(dict.fromkeys(zip(dtypes, shapes, strict=True)), count()))
    kinds = [Kind.plain(dtype_named(dtype), shape) for dtype, shape in positions]
    kind = array("q", map(positions.__getitem__, zip(dtypes, shapes, strict=True)))
    for row, tensor in odd.items():
        kind[row] = len(kinds)
        kinds.append(Kind.of(tensor))
    if odd:
        chunks = [one for row, one in enumerate(chunks) if row not in odd]
    edges = np.fromiter(chain.from_iterable(map(BYTES_OF, chunks)), np.int64, 2 * len(chunks)).reshape(-1, 2)
    starts, lengths = edges[:, 0].copy(), edges[:, 1] - edges[:, 0]
    crcs = np.frombuffer(bytes.fromhex("".join(map(CRC_OF, chunks))), ">u4").astype(np.int64)
    files = array("q", map(FILE_OF, chunks))
    places = [FilePlace(source, file.name, source.store) for file in manifest.files]
    rest = manifest.recorded, manifest.metadata, manifest.files, manifest.others, manifest.version, source
    labels: Sequence[str] = names
    storage: Sequence[int] = range(len(names))
    if odd:
        labels, counter = [name for row, name in enumerate(names) if row not in odd], count()
        storage = array("q", [ODD if row in odd else next(counter) for row in range(len(names))])
    storages = FileStorages(places, files, starts, lengths, crcs, names=labels)
    return Stored(Table(names, kinds, kind, storage, storages, odd), storages, entries, *rest)


class OddTensors:
    """Makes the tensors of a manifest that are split, packed, or share bytes between elements."""

    def __init__(self, manifest: Parsed, source: Source) -> None:
        self._keys, self._source = [file.name for file in manifest.files], source
        self._unpacked: UnpackedStore | None = None
        self._unpacking = source

    def tensor(self, name: str, stored: StoredTensor) -> LazyTensor:
        dtype = dtype_named(stored.dtype)
        packed = any(chunk.sparse is not None for chunk in stored.chunks)
        if packed and self._unpacked is None:
            self._unpacked = UnpackedStore(self._source.store)
            self._unpacking = self._source.over(self._unpacked)
        chunks = tuple([self._chunk(name, dtype, stored, chunk=chunk) for chunk in stored.chunks])
        return LazyTensor(name, dtype, stored.shape, chunks, self._unpacking if packed else self._source)

    def _chunk(self, name: str, dtype: DType, stored: StoredTensor, *, chunk: StoredChunk) -> Chunk:
        start, stop = chunk.bytes
        key, home, box = self._keys[chunk.file], self._source.store, box_of(stored, chunk)
        storage = Storage(key, start, stop - start, crc32=int(chunk.crc32, 16), label=name, home=home)
        if chunk.sparse is not None and self._unpacked is not None:
            packed = sparse_storage(name, chunk, chunk.sparse, dtype=dtype, shape=box.shape, files=self._keys, home=home)
            self._unpacked.add(packed)
            storage = packed
        return Chunk(box, storage, 0, c_strides(box.shape, dtype.bits))


def dtype_named(name: str) -> DType:
    dtype = DTYPES.name(name)
    if dtype is None:  # the check has looked every name up
        raise HeaderError(f"there is no dtype {quoted(name)}")
    return dtype


def box_of(stored: StoredTensor, chunk: StoredChunk) -> Box:
    """The part of a tensor that a chunk holds."""
    return Box.whole(stored.shape) if chunk.start is None or chunk.stop is None else Box(chunk.start, chunk.stop)
