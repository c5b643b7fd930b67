"""The tensors of a native directory, as the manifest has them. Each is made when it is asked for.

A manifest is a dozen objects for each of a million tensors. Almost all are one chunk, as it is in memory: of those a few numbers
are kept in columns, and the manifest is let go. What is split, packed or shares bytes between elements is kept as it stands.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.columns import Columns
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Source
from holdfast.core.rows import RowKind
from holdfast.core.tensor import LazyTensor
from holdfast.errors import HeaderError
from holdfast.formats.native.chunks import UnpackedStore, sparse_storage
from holdfast.formats.native.schema import Parsed, StoredChunk, StoredTensor
from holdfast.formats.strict_json import quoted

WHOLE = {row.name: row.numpy for row in DTYPES.rows if not row.packed}
"""What an element is in memory; of those that fill whole bytes, which lie in a file as in memory."""

Kind = tuple[str, tuple[int, ...]]
"""A dtype and a shape: of a million tensors there are a dozen."""


class ManifestTensors(Mapping[str, LazyTensor]):
    """The tensors of a manifest that was checked. Iterating over names makes none."""

    def __init__(self, manifest: Parsed, source: Source) -> None:
        self.files, self.others, self.version = manifest.files, manifest.others, manifest.version
        """Those of the manifest."""
        self.odd: dict[str, StoredTensor] = {}
        """Those that are not ordinary."""
        self.source = source
        self._keys = [file.name for file in manifest.files]
        self._rows = {name: row for row, name in enumerate(manifest.tensors)}
        kinds: dict[Kind, int] = {}
        numbers, files, starts, stops, digits = array("q"), array("q"), array("q"), array("q"), []
        for name, stored in manifest.tensors.items():
            # The manifest was checked: a chunk that has no box is the whole tensor, and has as many bytes as its elements take.
            (chunk, *others) = stored.chunks
            if others or chunk.start is not None or chunk.sparse is not None or stored.dtype not in WHOLE:
                self.odd[name] = stored
                numbers.append(-1)
            else:
                kind = stored.dtype, stored.shape
                number = kinds.get(kind)
                if number is None:
                    number = kinds[kind] = len(kinds)
                numbers.append(number)
            files.append(chunk.file)
            starts.append(chunk.bytes[0])
            stops.append(chunk.bytes[1])
            digits.append(chunk.crc32)
        self.kinds = [(dtype_named(dtype), shape) for dtype, shape in kinds]
        """The dtypes and shapes of ordinary ones."""
        self.kind_of: Ints = np.frombuffer(numbers, np.int64).astype(np.int32)
        """Of each tensor, as a position in `kinds`; -1 for an odd one, of which the other columns have the first chunk."""
        self.file_of: Ints = np.frombuffer(files, np.int64).astype(np.int32)
        self.starts: Ints = np.frombuffer(starts, np.int64)
        self.nbytes: Ints = np.frombuffer(stops, np.int64) - self.starts
        self.crcs = np.frombuffer(bytes.fromhex("".join(digits)), ">u4").astype(np.uint32)
        self._made: dict[tuple[int, int], RowKind] = {}
        """What makes ordinary tensors of a kind in a file."""
        self._unpacked = UnpackedStore(source.store)
        self._unpacking = source.over(self._unpacked)
        """What reads tensors of which a chunk is stored packed."""

    def __getitem__(self, name: str) -> LazyTensor:
        row = self._rows[name]
        if name in self.odd:
            return self._odd(name, self.odd[name])
        place = self.kind_of.item(row), self.file_of.item(row)
        made = self._made.get(place)
        if made is None:
            made = self._made[place] = RowKind.plain(*self.kinds[place[0]], self.source, key=self._keys[place[1]])
        return made.tensor(self.starts.item(row), self.crcs.item(row), name, name)

    def outline(self, name: str) -> tuple[DType, tuple[int, ...]]:
        number = self.kind_of.item(self._rows[name])
        return self.kinds[number] if number >= 0 else (dtype_named(self.odd[name].dtype), self.odd[name].shape)

    def columns(self, names: Sequence[str]) -> tuple[Source, Columns] | None:
        try:
            rows = np.fromiter(map(self._rows.__getitem__, names), np.int64, len(names))
        except (KeyError, TypeError):
            return None
        numbers: Sequence[int] = range(len(names))
        if self.odd:
            ordinary = self.kind_of[rows] >= 0
            numbers, rows = np.flatnonzero(ordinary).tolist(), rows[ordinary]
        kinds = self.kind_of[rows].tolist()
        dtypes, shapes = [dtype.numpy for dtype, _ in self.kinds], [shape for _, shape in self.kinds]
        return self.source, Columns(
            numbers, [dtypes[kind] for kind in kinds], [shapes[kind] for kind in kinds], self._keys,
            self.file_of[rows].astype(np.int64), self.starts[rows], self.nbytes[rows], self.crcs[rows].astype(np.int64),
        )  # fmt: skip

    def _odd(self, name: str, stored: StoredTensor) -> LazyTensor:
        dtype = dtype_named(stored.dtype)
        chunks = tuple([self._chunk(name, dtype, stored, chunk=chunk) for chunk in stored.chunks])
        packed = any(chunk.sparse is not None for chunk in stored.chunks)
        return LazyTensor(name, dtype, stored.shape, chunks, self._unpacking if packed else self.source)

    def _chunk(self, name: str, dtype: DType, stored: StoredTensor, *, chunk: StoredChunk) -> Chunk:
        start, stop = chunk.bytes
        key, home, box = self._keys[chunk.file], self.source.store, box_of(stored, chunk)
        storage = Storage(key, start, stop - start, crc32=int(chunk.crc32, 16), label=name, home=home)
        if chunk.sparse is not None:
            packed = sparse_storage(name, chunk, chunk.sparse, dtype=dtype, shape=box.shape, files=self._keys, home=home)
            self._unpacked.add(packed)
            storage = packed
        return Chunk(box, storage, 0, c_strides(box.shape, dtype.bits))

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __repr__(self) -> str:
        return f"<{len(self):,} tensors of {self.source.store.name!r}>"


def dtype_named(name: str) -> DType:
    dtype = DTYPES.name(name)
    if dtype is None:  # the check has looked every name up
        raise HeaderError(f"there is no dtype {quoted(name)}")
    return dtype


def box_of(stored: StoredTensor, chunk: StoredChunk) -> Box:
    """The part of a tensor that a chunk holds."""
    return Box.whole(stored.shape) if chunk.start is None or chunk.stop is None else Box(chunk.start, chunk.stop)
