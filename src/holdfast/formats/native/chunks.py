"""Chunks of a manifest: their entries; and packed ones: their entries in the data file, their checks, their storage.

    data file    "w.sparse.values"   the dtype of w, flat                 manifest    "chunks": [{"file": 0, "bytes": of the values,
                 "w.sparse.where"    U8                                                "crc32": of the dense elements,
                 "w.sparse.starts"   U64, where groups differ                          "sparse": {"encoding": "bitmap", …}}]

`numeric.pack` defines the contents of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.content_hash import HEAD_NBYTES, Hashed, hash_bytes
from holdfast.core.crc import crc32
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.core.protocols import Stamp, Store
from holdfast.core.runtime import Sent
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.saves import HASH_KEY, HEAD_KEY, Hashing
from holdfast.errors import Corrupted, HeaderError, LimitExceeded, MetadataError, located
from holdfast.formats.native.schema import Runs, StoredChunk, StoredPart, StoredSparse, StoredTensor
from holdfast.formats.safetensors.record import CRC_DIGITS
from holdfast.formats.safetensors.schema import ADDRESSABLE
from holdfast.numeric.pack import (
    SparseParts,
    SparseStorage,
    element_type,
    encoding_of,
    group_count,
    spread,
    where_total,
)
from holdfast.stores.virtual import ContentCache, Virtual, VirtualFile


def part_names(name: str) -> tuple[str, str, str]:
    return f"{name}.sparse.values", f"{name}.sparse.where", f"{name}.sparse.starts"


def entries_of(name: str, tensor: LazyTensor, parts: SparseParts | None) -> dict[str, LazyTensor]:
    if parts is None:
        return {name: tensor}
    given = zip(part_names(name), (parts.values, parts.where, parts.starts), strict=True)
    return {entry: part for entry, part in given if part is not None}


def without_clashes(
    chosen: Mapping[str, SparseParts], names: Sequence[str]
) -> dict[str, SparseParts]:
    """The tensors that can be stored packed: none of their parts has the name of another tensor."""
    taken = set(names)
    return {name: parts for name, parts in chosen.items() if taken.isdisjoint(part_names(name))}


def stored_chunk(
    name: str,
    place: Callable[[str], tuple[int, tuple[int, int]]],
    crc: Callable[[str], int],
    *,
    parts: SparseParts | None,
    hashed: Hashed | None,
) -> StoredChunk:
    """The manifest's entry of a whole tensor.

    `place` maps the name of an entry to its file number and byte range, `crc` the name of an entry with bytes to their CRC-32.
    """

    def known(entry: str) -> tuple[int, tuple[int, int], str]:
        file, (start, stop) = place(entry)
        return file, (start, stop), f"{crc(entry) if start < stop else 0:08x}"

    hash, head = hash_digits(hashed)
    if parts is None:
        return StoredChunk(*known(name), hash=hash, head=head)
    values, where, starts = part_names(name)
    file, span, digits = known(values)
    marks, begins = (
        StoredPart(*known(where)),
        None if parts.starts is None else StoredPart(*known(starts)),
    )
    sparse = StoredSparse(parts.encoding.name, parts.encoding.sizes, digits, marks, begins)
    return StoredChunk(file, span, f"{parts.crc32:08x}", sparse=sparse, hash=hash, head=head)


def hash_in(sums: Mapping[str, int], label: str, nbytes: int, how: Hashing | None) -> Hashed | None:
    """The hash of written data, by its label; None where it is not hashed. Without bytes there is no data segment."""
    if how is None or not nbytes:
        return None if how is None else hash_bytes(b"")
    if how == "head":
        return Hashed(None, sums[label + HEAD_KEY])
    return Hashed(sums[label + HASH_KEY], sums[label + HEAD_KEY] if nbytes > HEAD_NBYTES else None)


def hash_tails(
    crcs: Mapping[str, int],
    table: Table,
    rows: Sequence[int],
    labels: Sequence[str],
    hashing: Mapping[str, Hashing],
) -> list[str]:
    """The text behind the checksum of each row: hash and head, for the names in `hashing`. `labels` are those of their data."""
    names, kind = table.names, table.kind
    short = [0 < one.nbytes <= HEAD_NBYTES for one in table.kinds]
    return [
        f',"hash":"{crcs[label + HASH_KEY]:032x}"'
        if short[kind[row]] and names[row] in hashing
        else hash_text(
            *hash_digits(hash_in(crcs, label, table.kind_of(row).nbytes, hashing.get(names[row])))
        )
        for row, label in zip(rows, labels, strict=True)
    ]


def hash_digits(hashed: Hashed | None) -> tuple[str | None, str | None]:
    hash, head = (None, None) if hashed is None else hashed
    return None if hash is None else f"{hash:032x}", None if head is None else f"{head:08x}"


def hash_text(hash: str | None, head: str | None) -> str:
    return ("" if hash is None else f',"hash":"{hash}"') + (
        "" if head is None else f',"head":"{head}"'
    )


def in_files(chunk: StoredChunk, numbers: Mapping[int, int]) -> StoredChunk:
    sparse = None if chunk.sparse is None else sparse_in(chunk.sparse, numbers.__getitem__)
    return msgspec.structs.replace(chunk, file=numbers[chunk.file], sparse=sparse)


def sparse_in(sparse: StoredSparse, number: Callable[[int], int]) -> StoredSparse:
    def moved(part: StoredPart) -> StoredPart:
        return msgspec.structs.replace(part, file=number(part.file))

    starts = None if sparse.starts is None else moved(sparse.starts)
    return msgspec.structs.replace(sparse, where=moved(sparse.where), starts=starts)


def check_sparse(
    chunk: StoredChunk,
    sparse: StoredSparse,
    dtype: DType,
    *,
    shape: tuple[int, ...],
    limits: Limits,
) -> None:
    """Raise where the numbers of a packed chunk of this shape contradict each other. The parts are known to lie in their files."""
    if dtype.packed:
        raise MetadataError(f"elements of {dtype} share bytes and are never stored packed")
    if 0 in shape:
        raise MetadataError("a chunk without elements that is stored packed")
    encoding = encoding_of(sparse.encoding, sparse.sizes, shape)
    width = dtype.bits // 8
    nbytes = encoding.count * width
    if (sparse.starts is not None) != encoding.counted:
        raise HeaderError(
            f"the encoding {encoding.name} has {'' if encoding.counted else 'no '}starts"
        )
    stored = _length(chunk.bytes) + _length(sparse.where.bytes)
    _check_length("where", sparse.where.bytes, where_total(encoding))
    if sparse.starts is not None:
        _check_length("starts", sparse.starts.bytes, (group_count(encoding) + 1) * 8)
        stored += _length(sparse.starts.bytes)
    last = group_count(encoding) - 1
    most = (last * encoding.most(encoding.group) + encoding.most(spread(encoding, last))) * width
    values = _length(chunk.bytes)
    if (
        values > most
        or values % (encoding.unit * width)
        or (not encoding.counted and values != most)
    ):
        said = (
            f"{values:,} bytes of values for {encoding.count:,} elements stored as {encoding.name}"
        )
        raise MetadataError(said, expected=most, found=values)
    if nbytes > limits.sparse_expansion * stored:
        message = f"{stored:,} stored bytes stand for {nbytes:,}; open with Limits(sparse_expansion=…) if that can be true"
        raise LimitExceeded(message, expected=limits.sparse_expansion * stored, found=nbytes)


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _check_length(name: str, span: tuple[int, int], wanted: int) -> None:
    found = _length(span)
    if found != wanted:
        raise MetadataError(
            f"{found:,} bytes of {name}, where there should be {wanted:,}",
            expected=wanted,
            found=found,
        )


def sparse_storage(
    name: str,
    chunk: StoredChunk,
    sparse: StoredSparse,
    *,
    dtype: DType,
    shape: tuple[int, ...],
    files: Sequence[str],
    home: object,
) -> SparseStorage:
    """The dense bytes of a checked packed chunk, under a key of their own."""
    values, where, starts = part_names(name)

    def part(label: str, file: int, span: tuple[int, int], crc: str) -> Storage:
        return Storage(
            files[file], span[0], _length(span), crc32=int(crc, 16), label=label, home=home
        )

    encoding = encoding_of(sparse.encoding, sparse.sizes, shape)
    marks = part(where, sparse.where.file, sparse.where.bytes, sparse.where.crc32)
    begins = sparse.starts
    return SparseStorage(
        f"{marks.key}@{marks.start}",
        0,
        encoding.count * dtype.bits // 8,
        crc32=int(chunk.crc32, 16),
        label=name,
        home=home,
        encoding=encoding,
        width=dtype.bits // 8,
        values=part(values, chunk.file, chunk.bytes, sparse.values),
        where=marks,
        starts=None if begins is None else part(starts, begins.file, begins.bytes, begins.crc32),
    )


def runs_of(column: Ints) -> Runs:
    """A column as stretches that rise evenly.

    >>> runs_of(np.array([0, 1, 2, 9, 9, 9]))
    (0, 1, 3, 9, 0, 3)
    """
    steps = np.diff(column)
    bends = np.flatnonzero(steps[1:] != steps[:-1]) + 2
    places = np.arange(len(bends))
    # Behind a stretch that ends come two bends: the step to the next stretch, and the step in it.
    since = places - np.maximum.accumulate(np.where(np.diff(bends, prepend=0) != 1, places, 0))
    heads = np.concatenate(([0], bends[since % 2 == 0]))
    counts = np.diff(heads, append=len(column))
    inside = np.where(counts > 1, np.append(steps, 0)[heads], 0)
    return tuple(np.stack((column[heads], inside, counts), axis=1).reshape(-1).tolist())


def column_of(runs: Runs, count: int, most: int) -> Ints | None:
    """The column of so many numbers, from 0 to `most`; None where there is no such column."""
    firsts, steps, counts = runs[::3], runs[1::3], runs[2::3]
    if (
        not len(firsts) == len(steps) == len(counts)
        or min(counts, default=0) < 1
        or sum(counts) != count
    ):
        return None
    ends = [
        *firsts,
        *[first + step * (own - 1) for first, step, own in zip(firsts, steps, counts, strict=True)],
    ]
    if min(ends) < 0 or max(ends) > most or max(map(abs, steps)) > most:
        return None
    own = np.array(counts, np.int64)
    inside = np.arange(count) - (own.cumsum() - own).repeat(own)
    column: Ints = (
        np.array(firsts, np.int64).repeat(own) + np.array(steps, np.int64).repeat(own) * inside
    )
    return column


class CutColumns(Value, frozen=True, eq=False):
    """The chunks of a tensor in columns, and their names and places where they are wanted as objects."""

    file: Ints
    spans: Ints
    """First bytes, and those after the last."""
    starts: Ints
    """Lowest corners, a row for each dimension."""
    stops: Ints
    crc32: str

    @classmethod
    def of(cls, stored: StoredTensor) -> CutColumns | None:
        """None where there are none, or of other lengths, or with impossible numbers."""
        columns, dtype = stored.columns, DTYPES.name(stored.dtype)
        if columns is None or dtype is None:
            return None
        count, rest = divmod(len(columns.crc32), CRC_DIGITS)
        if (
            rest
            or len(columns.start) != len(stored.shape)
            or len(columns.stop) != len(stored.shape)
        ):
            return None
        limits = (ADDRESSABLE, ADDRESSABLE, *stored.shape, *stored.shape)
        runs = (columns.file, columns.bytes, *columns.start, *columns.stop)
        made = [column_of(one, count, most) for one, most in zip(runs, limits, strict=True)]
        known = [column for column in made if column is not None]
        if len(known) < len(made):
            return None
        file, begins, *corners = known
        starts, stops = np.array(corners, np.int64).reshape(2, len(stored.shape), count)
        # A whole tensor is known to be addressable, and so are its parts.
        lengths = (np.multiply.reduce(np.maximum(stops - starts, 0)) * dtype.bits + 7) >> 3
        return cls(file, np.stack((begins, begins + lengths)), starts, stops, columns.crc32)

    def crc(self, number: int) -> int:
        return int(self.crc32[CRC_DIGITS * number : CRC_DIGITS * (number + 1)], 16)

    def places(self) -> Ints:
        """File, first byte and the byte after the last, a row for each."""
        return np.stack((self.file, *self.spans), axis=1)


class CutChunks(Value, frozen=True, eq=False):
    """The chunks of a tensor in columns, each made when somebody asks for it."""

    name: str
    dtype: DType
    stored: StoredTensor
    files: Sequence[str]
    home: object

    def made(self, low: Sequence[int] = (), high: Sequence[int] = ()) -> tuple[Chunk, ...]:
        cut = CutColumns.of(self.stored)
        assert cut is not None  # checked when the manifest was opened
        wanted = np.ones(len(cut.file), np.bool_)
        for d, (first, last) in enumerate(zip(low, high, strict=True)):
            wanted &= (cut.starts[d] < last) & (cut.stops[d] > first)
        rows = wanted.nonzero()[0]
        places = zip(
            rows.tolist(), cut.file[rows].tolist(), *cut.spans[:, rows].tolist(), strict=True
        )
        boxes = map(
            Box,
            map(tuple, cut.starts[:, rows].T.tolist()),
            map(tuple, cut.stops[:, rows].T.tolist()),
        )
        return tuple([
            Chunk(box, self._storage(file, first, last, cut.crc(row)), 0, c_strides(box.shape, self.dtype.bits))
            for box, (row, file, first, last) in zip(boxes, places, strict=True)
        ])  # fmt: skip

    def _storage(self, file: int, start: int, stop: int, crc: int) -> Storage:
        return Storage(
            self.files[file], start, stop - start, crc32=crc, label=self.name, home=self.home
        )


CACHE_NBYTES = 32 << 20
"""Dense groups that stay in memory beyond the last one."""

RUN_NBYTES = 2 << 20
"""Dense bytes that are unpacked from one read of each part."""

BLOCK_NBYTES = 4 << 20


class UnpackedStore(Virtual):
    """The store of a directory, with the dense bytes of each packed chunk as one more file, which is not listed.

        data-00001-of-00001.safetensors@4096     the elements of the chunk whose marks begin at byte 4096 of that file

    Reading a range unpacks the groups that it touches and no others. A range inside of a group unpacks that group; the last few
    of those stay in memory, so that a column of a matrix unpacks each once. Marks, starts and values that do not fit together are
    an error: `Corrupted` where a part has another checksum than the manifest records, else `MetadataError`.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(over=store)
        self._store = store
        self._cache = ContentCache(CACHE_NBYTES)

    def add(self, storage: SparseStorage) -> None:
        read, stamp = partial(Sent(self._read), storage), partial(Sent(self._stamp), storage)
        self.put(VirtualFile(partial(Sent(self._size), storage), read, stamp), storage.key)

    def close(self) -> None:
        self._cache.clear()
        super().close()

    def _size(self, storage: SparseStorage) -> int:
        self._store.size(storage.where.key)  # raises where the directory was closed
        return storage.nbytes

    def _stamp(self, storage: SparseStorage) -> Stamp:
        return tuple(
            (part.key, part.start, part.nbytes, self._store.stamp(part.key))
            for part in storage.parts
        )

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
                self._unpack(storage, group, last, out=out[at - start : end - start])
            else:
                end = min(end, stop)
                out[at - start : end - start] = self._group(storage, group)[
                    at - group * size : end - group * size
                ].data
            at = end

    def _group(self, storage: SparseStorage, group: int) -> np.ndarray:
        found = self._cache.get((storage.key, group))
        if found is not None:
            return found
        made = np.empty(spread(storage.encoding, group) * storage.width, np.uint8)
        self._unpack(storage, group, group + 1, out=made.data)
        self._cache.put((storage.key, group), made)
        return made

    def _unpack(self, storage: SparseStorage, first: int, last: int, *, out: memoryview) -> None:
        encoding, width = storage.encoding, storage.width
        kind = element_type(width)
        dense = np.frombuffer(out, kind)
        each = encoding.where_nbytes(encoding.group)
        counts = [spread(encoding, group) for group in range(first, last)]
        with located(file=storage.where.key, tensor=storage.label):
            starts = self._starts(storage, first, last, counts=counts)
            where = self._bytes(
                storage.where,
                first * each,
                (len(counts) - 1) * each + encoding.where_nbytes(counts[-1]),
            )
            values = self._bytes(
                storage.values, starts[0] * width, (starts[-1] - starts[0]) * width
            ).view(kind)
            try:
                for i, count in enumerate(counts):
                    marks = where[i * each : i * each + encoding.where_nbytes(count)]
                    here = values[starts[i] - starts[0] : starts[i + 1] - starts[0]]
                    encoding.unpack(
                        marks, here, dense[i * encoding.group : i * encoding.group + count]
                    )
            except MetadataError as error:
                self._blame(storage, error)

    def _starts(
        self, storage: SparseStorage, first: int, last: int, *, counts: Sequence[int]
    ) -> Sequence[int]:
        encoding, total = storage.encoding, storage.values.nbytes // storage.width
        if storage.starts is None:
            full = encoding.most(encoding.group)
            return [min(group * full, total) for group in range(first, last + 1)]
        raw = self._bytes(storage.starts, first * 8, (last + 1 - first) * 8)
        starts: list[int] = raw.view("<u8").tolist()
        fits = all(
            0 <= b - a <= encoding.most(n)
            for a, b, n in zip(starts, starts[1:], counts, strict=False)
        )
        ends = (first > 0 or starts[0] == 0) and (
            last < group_count(encoding) or starts[-1] == total
        )
        if not fits or not ends or starts[-1] > total:
            self._blame(
                storage, MetadataError("the numbers of values before each group cannot be true")
            )
        return starts

    def _bytes(self, part: Storage, start: int, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            self._store.read(part.key, part.start + start, out.data)
        return out

    def _blame(self, storage: SparseStorage, error: MetadataError) -> None:
        """Raise `Corrupted` for the part that has a wrong checksum; without one, raise `error`."""
        for part in storage.parts:
            found = 0
            for start in range(0, part.nbytes, BLOCK_NBYTES):
                found = crc32(
                    self._bytes(part, start, min(BLOCK_NBYTES, part.nbytes - start)).data, found
                )
            if found != part.crc32:
                raise Corrupted(
                    f"the {part.nbytes:,} bytes of {part.label} do not have the checksum that the manifest records, and cannot be "
                    "unpacked: they changed after they were written; get the file again",
                    file=part.key, tensor=storage.label, offset=part.start, expected=part.crc32, found=found,
                ) from None  # fmt: skip
        raise error
