"""Chunks that are stored packed, as files of their own with the dense bytes.

    data-00001-of-00001.safetensors@4096     the elements of the chunk whose marks begin at byte 4096 of that file

Reading a range unpacks the groups that it touches and no others: of each group two ranges are read, whose places are known. A
range inside of a group unpacks that group; the last few of those stay in memory, so that a column of a matrix unpacks each once.

Nothing that is stored is believed: a group's marks must ask for as many values as it has, and these must lie in the part. What does
not fit is damage where the part's checksum says so, and a lie otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.crc import crc32
from holdfast.core.protocols import Stamp, Store
from holdfast.core.sparse.elements import element_type
from holdfast.core.sparse.encoding import group_count, spread
from holdfast.core.sparse.storage import SparseStorage
from holdfast.errors import Corrupted, MetadataError, located
from holdfast.stores.virtual import Entry, Kept, Virtual

__all__ = ["UnpackedStore"]

KEPT_NBYTES = 32 << 20
"""Dense groups that are kept beyond the last one."""

RUN_NBYTES = 2 << 20
"""Dense bytes that are unpacked from one read of each part."""

BLOCK_NBYTES = 4 << 20


class UnpackedStore(Virtual):
    """The store of a directory, with its packed chunks as further files. These are not listed."""

    def __init__(self, store: Store) -> None:
        super().__init__(over=store)
        self._store = store
        """Where the parts are."""
        self._kept = Kept(KEPT_NBYTES)

    def add(self, storage: SparseStorage) -> None:
        """Make a packed chunk a file, under its key."""
        read, stamp = partial(self._read, storage), partial(self._stamp, storage)
        self.put(Entry(partial(self._size, storage), read, stamp), storage.key)

    def close(self) -> None:
        self._kept.clear()
        super().close()

    def _size(self, storage: SparseStorage) -> int:
        self._store.size(storage.where.key)  # raises where the directory was closed
        return storage.nbytes

    def _stamp(self, storage: SparseStorage) -> Stamp:
        return tuple((part.key, part.start, part.nbytes, self._store.stamp(part.key)) for part in storage.parts)

    def _read(self, storage: SparseStorage, start: int, out: memoryview) -> None:
        stop = start + out.nbytes
        size = storage.encoding.group * storage.width
        at = start
        while at < stop:
            group = at // size
            end = min((group + 1) * size, storage.nbytes)
            if at == group * size and stop >= end:
                last = group_count(storage.encoding) if stop == storage.nbytes else stop // size
                last = min(last, group + max(RUN_NBYTES // size, 1))
                end = min(last * size, storage.nbytes)
                self._unpack(storage, group, last, out[at - start : end - start])
            else:
                end = min(end, stop)
                out[at - start : end - start] = self._group(storage, group)[at - group * size : end - group * size].data
            at = end

    def _group(self, storage: SparseStorage, group: int) -> np.ndarray:
        """The dense bytes of one group; kept."""
        found = self._kept.get((storage.key, group))
        if found is not None:
            return found
        made = np.empty(spread(storage.encoding, group) * storage.width, np.uint8)
        self._unpack(storage, group, group + 1, made.data)
        self._kept.put((storage.key, group), made)
        return made

    def _unpack(self, storage: SparseStorage, first: int, last: int, out: memoryview) -> None:
        """The dense bytes of groups [first, last)."""
        encoding, width = storage.encoding, storage.width
        kind = element_type(width)
        dense = np.frombuffer(out, kind)
        each = encoding.where_nbytes(encoding.group)
        counts = [spread(encoding, group) for group in range(first, last)]
        with located(file=storage.where.key, tensor=storage.label):
            starts = self._starts(storage, first, last, counts)
            where = self._bytes(storage.where, first * each, (len(counts) - 1) * each + encoding.where_nbytes(counts[-1]))
            values = self._bytes(storage.values, starts[0] * width, (starts[-1] - starts[0]) * width).view(kind)
            try:
                for i, count in enumerate(counts):
                    marks = where[i * each : i * each + encoding.where_nbytes(count)]
                    here = values[starts[i] - starts[0] : starts[i + 1] - starts[0]]
                    encoding.unpack(marks, here, dense[i * encoding.group : i * encoding.group + count])
            except MetadataError as error:
                self._blame(storage, error)

    def _starts(self, storage: SparseStorage, first: int, last: int, counts: Sequence[int]) -> Sequence[int]:
        """Where the values of each group begin, and the last ones end."""
        encoding, total = storage.encoding, storage.values.nbytes // storage.width
        if storage.starts is None:
            full = encoding.most(encoding.group)
            return [min(group * full, total) for group in range(first, last + 1)]
        raw = self._bytes(storage.starts, first * 8, (last + 1 - first) * 8)
        starts: list[int] = raw.view("<u8").tolist()
        fits = all(0 <= b - a <= encoding.most(n) for a, b, n in zip(starts, starts[1:], counts, strict=False))
        ends = (first > 0 or starts[0] == 0) and (last < group_count(encoding) or starts[-1] == total)
        if not fits or not ends or starts[-1] > total:
            self._blame(storage, MetadataError("the numbers of values before each group cannot be true"))
        return starts

    def _bytes(self, part: Storage, start: int, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            self._store.read(part.key, part.start + start, out.data)
        return out

    def _blame(self, storage: SparseStorage, error: MetadataError) -> None:
        """Raise for parts that do not fit together: as damage of the one that has not its checksum, else as it is."""
        for part in storage.parts:
            found = 0
            for start in range(0, part.nbytes, BLOCK_NBYTES):
                found = crc32(self._bytes(part, start, min(BLOCK_NBYTES, part.nbytes - start)).data, found)
            if found != part.crc32:
                raise Corrupted(
                    f"the {part.nbytes:,} bytes of {part.label} do not have the checksum that the manifest records, and cannot be "
                    "unpacked: they changed after they were written; get the file again",
                    file=part.key, tensor=storage.label, offset=part.start, expected=part.crc32, found=found,
                ) from None  # fmt: skip
        raise error
