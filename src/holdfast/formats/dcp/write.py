"""Lay out the data file of one rank of a torch distributed checkpoint: archive after archive, each a `torch.save` of a tensor.

    │ archive: a value │ archive: a value │ … │ archive: a tensor's box │ archive: a tensor's box │ …

Values come first, as torch's writer puts them. Every archive is what torch 2.13 writes for the tensor as a whole on the CPU.

Archives of one dtype and shape differ in their elements, the CRC-32 of these, the serialization id, and the CRC-32 of that. They
are laid out once (`ArchiveKind`), and filled in for each tensor:

    │ data.pkl, … │ elements │ …, CRC, … │ id │ …, CRC of the id, … │ the directory: …, CRC, …, CRC of the id, … │
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import cast

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Storage
from holdfast.core.crc import crc32, crc32_each
from holdfast.core.dtype import DType
from holdfast.core.protocols import Source
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.saves import (
    SMALL_NBYTES,
    Data,
    FilePlan,
    Gathered,
    Hole,
    Late,
    Literal,
    Memory,
    Segment,
    check_length,
)
from holdfast.engine.table import plan_segment, split_into_segments
from holdfast.errors import Unsupported
from holdfast.formats.torch.write import (
    NBYTES,
    SERIALIZATION_ID,
    fold,
    lay_out_container,
    mistaken_crc,
)
from holdfast.formats.torch.writer import TorchPickle

ARCHIVE, STORAGE, VERSION = "archive", "data/0", b"3\n"
"""The folder in an archive, the record of the elements, and what the record behind it says."""

HEADER_NBYTES, ENTRY_NBYTES, DESCRIPTOR_CRC, ENTRY_CRC = 30, 46, 4, 16
"""Of a zip: what the header and the entry of a record have before its name; where its descriptor and its entry have the CRC-32."""


class ArchiveKind(Value, frozen=True, eq=False):
    """The common bytes of all archives of tensors of one dtype and shape."""

    head: bytes
    rest: tuple[bytes, ...]
    """The bytes behind the elements, cut where their CRC, the id, the CRC of the id, and both CRCs again are filled in."""
    nbytes: int
    names: bytes
    before: int
    """The folded checksums of the records before the elements."""

    @property
    def rest_nbytes(self) -> int:
        return sum(map(len, self.rest)) + NBYTES + 16

    def fill(self, crc: int, mistaken: int | None) -> tuple[bytes, ...]:
        sums = (crc, VERSION_CRC) if mistaken is None else (mistaken, crc, VERSION_CRC)
        identity = b"%b%020d" % (self.names, fold(sums, self.before))
        own, of_id = crc.to_bytes(4, "little"), crc32(identity).to_bytes(4, "little")
        a, b, c, d, e, f = self.rest
        return (a, own, b, identity, c, of_id, d, own, e, of_id, f)


VERSION_CRC = crc32(VERSION)


@lru_cache(4096)
def archive_kind(dtype: DType, shape: tuple[int, ...]) -> ArchiveKind:
    nbytes = dtype.nbytes(math.prod(shape))
    laid = lay_out_container(ARCHIVE, tensor_pickle(dtype, shape), [(STORAGE, Hole(nbytes))])
    at = next(number for number, segment in enumerate(laid) if isinstance(segment, Hole))
    head, rest = joined(laid[:at]), joined(laid[at + 1 :])
    name, storage = (f"{ARCHIVE}/{record}".encode() for record in (SERIALIZATION_ID, STORAGE))
    header = rest.index(name) - HEADER_NBYTES
    named, extra = struct.unpack_from("<2H", rest, header + HEADER_NBYTES - 4)
    begin = header + HEADER_NBYTES + named + extra
    stop = begin + NBYTES
    entries = [rest.rindex(record) - ENTRY_NBYTES + ENTRY_CRC for record in (storage, name)]
    holes = [
        (DESCRIPTOR_CRC, 4),
        (begin, NBYTES),
        (stop + DESCRIPTOR_CRC, 4),
        *((entry, 4) for entry in entries),
    ]
    cut, done = [], 0
    for start, length in holes:
        cut.append(rest[done:start])
        done = start + length
    before = fold(map(crc32, (tensor_pickle(dtype, shape), b"1", b"64", sys.byteorder.encode())))
    assert (
        b"%020d" % fold((0, VERSION_CRC), before) == rest[begin + NBYTES // 2 : stop]
    )  # a hole has no checksum
    return ArchiveKind(
        head,
        (*cut, rest[done:]),
        len(head) + nbytes + len(rest),
        rest[begin : begin + NBYTES // 2],
        before,
    )


def joined(segments: Sequence[Segment]) -> bytes:
    """The bytes of segments without data."""
    return b"".join(
        [
            check_length(one.make({}), one.nbytes) if isinstance(one, Late) else one.data
            for one in segments
            if isinstance(one, Late | Literal)
        ]
    )


@lru_cache(4096)
def _empty_archive(dtype: DType, shape: tuple[int, ...]) -> Literal:
    return Literal(
        joined(lay_out_container(ARCHIVE, tensor_pickle(dtype, shape), [(STORAGE, b"")]))
    )


def lay_out_items(
    key: str, values: Sequence[bytes], table: Table, rows: Sequence[int]
) -> tuple[FilePlan, Ints]:
    """The file of a rank with archives of values and rows, and their lengths. The label of a row's elements is its number."""
    used = {
        number: table.kinds[number]
        for number in dict.fromkeys([table.kind_indices[row] for row in rows])
    }
    kinds = {
        number: archive_kind(kind.dtype, kind.shape) for number, kind in used.items() if kind.nbytes
    }
    empty = {
        number: _empty_archive(kind.dtype, kind.shape)
        for number, kind in used.items()
        if not kind.nbytes
    }
    lengths = {number: one.nbytes for number, one in kinds.items()} | {
        number: one.nbytes for number, one in empty.items()
    }
    nbytes = np.array([lengths[table.kind_indices[row]] for row in rows], np.int64)
    segments: list[Segment] = [Literal(archive) for archive in values]
    data = table.row_nbytes(rows)
    alone = (data > SMALL_NBYTES) | (data == 0)
    if single := table.rows_read_singly:
        alone |= np.array([row in single for row in rows], bool)
    for first, stop in split_into_segments(np.flatnonzero(alone).tolist(), np.cumsum(nbytes)):
        if not alone[first]:
            own = rows[first:stop]
            segments.append(
                _gathered(
                    table,
                    own,
                    [kinds[table.kind_indices[row]] for row in own],
                    int(nbytes[first:stop].sum()),
                )
            )
        elif not data[first]:
            segments.append(empty[table.kind_indices[rows[first]]])
        else:
            segments += _archive(table, rows[first], kinds[table.kind_indices[rows[first]]])
    return FilePlan(key, tuple(segments)), np.concatenate(
        (np.array([*map(len, values)], np.int64), nbytes)
    )


def _archive(table: Table, row: int, kind: ArchiveKind) -> tuple[Segment, ...]:
    label = f"{row}"
    elements = plan_segment(table, row, label)
    assert isinstance(elements, Data | Memory)  # it is not empty

    def rest(crcs: Mapping[str, int]) -> bytes:
        return b"".join(kind.fill(crcs[label], mistaken_crc(elements)))

    return Literal(kind.head), elements, Late(kind.rest_nbytes, rest, label)


def _archives(
    kinds: Sequence[ArchiveKind], pieces: Sequence[bytes], crcs: Sequence[int]
) -> list[bytes]:
    own, folded = np.array(crcs, np.uint64), np.array([kind.before for kind in kinds], np.uint64)
    for sums in (own, np.full(len(own), VERSION_CRC, np.uint64)):
        folded ^= sums + SALT + (folded << SIX) + (folded >> TWO)  # `fold`, of all of them
    ids = [
        b"%b%020d" % (kind.names, number)
        for kind, number in zip(kinds, folded.tolist(), strict=True)
    ]
    digits, of_ids = (np.array(column, "<u4").tobytes() for column in (crcs, crc32_each(ids)))
    made = [
        b"%b%b%b%b%b%b%b%b%b%b%b%b%b"
        % (kind.head, piece, a, crc, b, identity, c, of_id, d, crc, e, of_id, f)
        for at, (kind, piece, identity) in enumerate(zip(kinds, pieces, ids, strict=True))
        for (a, b, c, d, e, f), crc, of_id in (
            (kind.rest, digits[4 * at : 4 * at + 4], of_ids[4 * at : 4 * at + 4]),
        )
    ]
    for at in [at for at, piece in enumerate(pieces) if piece[:4] == DESCRIPTOR]:
        kind, piece = kinds[at], pieces[at]
        made[at] = b"".join(
            (kind.head, piece, *kind.fill(crcs[at], mistaken_crc(bytes(piece[:8]))))
        )
    return made


SALT, SIX, TWO = np.uint64(0x9E3779B9), np.uint64(6), np.uint64(2)
DESCRIPTOR = b"PK\7\x08"


def _gathered(
    table: Table, rows: Sequence[int], kinds: Sequence[ArchiveKind], nbytes: int
) -> Gathered:
    labels = [*map(str, rows)]

    def make() -> tuple[bytes, dict[str, int]]:
        pieces = table.read_bytes(rows)
        crcs = crc32_each(pieces)
        return b"".join(_archives(kinds, cast("Sequence[bytes]", pieces), crcs)), dict(
            zip(labels, crcs, strict=True)
        )

    return Gathered(
        nbytes,
        labels,
        make,
        tensors=lambda: [table.lazy_tensor(row) for row in rows],
    )


def tensor_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The `data.pkl` of a contiguous CPU tensor that fills its storage, as torch 2.13 pickles it with protocol 2."""
    if dtype.torch is None:
        raise Unsupported(f"torch has no dtype for {dtype}")
    storage = Storage("", 0, dtype.nbytes(math.prod(shape)), home=None)
    writer = TorchPickle()
    # Neither source nor store: the pickle has the outline of a tensor, and nothing is read.
    writer.write(LazyTensor.contiguous("", dtype, shape, storage, cast("Source", None)))
    raw = writer.finish()
    if writer.problems:
        raise Unsupported(writer.problems[0])
    return raw
