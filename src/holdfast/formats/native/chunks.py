"""Chunks of a manifest: the text of their hashes, and those of one tensor in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.content_hash import HEAD_NBYTES, HashAndHead, hash_bytes
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.table import Table
from holdfast.core.value import Value
from holdfast.engine.saves import HASH_SUFFIX, HEAD_SUFFIX, Hashing
from holdfast.formats.native.schema import Runs, StoredTensor
from holdfast.formats.safetensors.record import CRC_DIGITS
from holdfast.formats.safetensors.schema import ADDRESSABLE


def hash_in(
    sums: Mapping[str, int], label: str, nbytes: int, how: Hashing | None
) -> HashAndHead | None:
    """The hash of written data, by its label; None where it is not hashed. Without bytes there is no data segment."""
    if how is None or not nbytes:
        return None if how is None else hash_bytes(b"")
    if how == "head":
        return HashAndHead(None, sums[label + HEAD_SUFFIX])
    return HashAndHead(
        sums[label + HASH_SUFFIX], sums[label + HEAD_SUFFIX] if nbytes > HEAD_NBYTES else None
    )


def hash_tails(
    crcs: Mapping[str, int],
    table: Table,
    rows: Sequence[int],
    labels: Sequence[str],
    hashing: Mapping[str, Hashing],
) -> list[str]:
    """The text behind the checksum of each row: hash and head, for the names in `hashing`. `labels` are those of their data."""
    names, kind = table.names, table.kind_indices
    short = [0 < one.nbytes <= HEAD_NBYTES for one in table.kinds]
    return [
        f',"hash":"{crcs[label + HASH_SUFFIX]:032x}"'
        if short[kind[row]] and names[row] in hashing
        else hash_text(
            *hash_digits(hash_in(crcs, label, table.row_kind(row).nbytes, hashing.get(names[row])))
        )
        for row, label in zip(rows, labels, strict=True)
    ]


def hash_digits(hashed: HashAndHead | None) -> tuple[str | None, str | None]:
    hash, head = (None, None) if hashed is None else hashed
    return None if hash is None else f"{hash:032x}", None if head is None else f"{head:08x}"


def hash_text(hash: str | None, head: str | None) -> str:
    return ("" if hash is None else f',"hash":"{hash}"') + (
        "" if head is None else f',"head":"{head}"'
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

    def build(self, start: Sequence[int] = (), stop: Sequence[int] = ()) -> tuple[Chunk, ...]:
        cut = CutColumns.of(self.stored)
        assert cut is not None  # checked when the manifest was opened
        wanted = np.ones(len(cut.file), np.bool_)
        for d, (first, last) in enumerate(zip(start, stop, strict=True)):
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
