"""A chunk in the manifest, whoever writes it; and one that is stored packed: its entries in the data file, its checks, its storage.

    data file    "w.sparse.values"   the dtype of w, flat                 manifest    "chunks": [{"file": 0, "bytes": of the values,
                 "w.sparse.where"    U8                                                "crc32": of the dense elements,
                 "w.sparse.starts"   U64, where groups differ                          "sparse": {"encoding": "bitmap", …}}]

What the parts hold is told in `core.sparse.encoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from holdfast.core.box import Box
from holdfast.core.chunk import Storage
from holdfast.core.dtype import DType
from holdfast.core.limits import Limits
from holdfast.core.sparse.encoding import Encoding, encoding_of, group_count, spread, where_total
from holdfast.core.sparse.storage import SparseParts, SparseStorage
from holdfast.core.tensor import LazyTensor
from holdfast.errors import HeaderError, LimitExceeded, MetadataError
from holdfast.formats.native.schema import StoredChunk, StoredPart, StoredSparse

__all__ = [
    "Place",
    "Sum",
    "check_sparse",
    "entries_of",
    "in_file",
    "part_names",
    "sparse_storage",
    "stored_chunk",
    "without_clashes",
]

Place = Callable[[str], tuple[int, tuple[int, int]]]
"""From the name of an entry to the number of its file, its first byte there and the byte after its last."""

Sum = Callable[[str], int]
"""From the name of an entry that has bytes to the CRC-32 of these."""


def part_names(name: str) -> tuple[str, str, str]:
    """What the data file calls the parts of a tensor: values, marks, starts."""
    return f"{name}.sparse.values", f"{name}.sparse.where", f"{name}.sparse.starts"


def entries_of(name: str, tensor: LazyTensor, parts: SparseParts | None) -> dict[str, LazyTensor]:
    """What is written for a tensor, by the names that the data file has for it."""
    if parts is None:
        return {name: tensor}
    given = zip(part_names(name), (parts.values, parts.where, parts.starts), strict=True)
    return {entry: part for entry, part in given if part is not None}


def without_clashes(chosen: Mapping[str, SparseParts], names: Sequence[str]) -> dict[str, SparseParts]:
    """Those that can be stored packed: no tensor has the name of a part of theirs."""
    taken = set(names)
    return {name: parts for name, parts in chosen.items() if taken.isdisjoint(part_names(name))}


def stored_chunk(name: str, place: Place, crc: Sum, *, box: Box | None = None, parts: SparseParts | None = None) -> StoredChunk:
    """A chunk as the manifest has it; without a box it is the whole tensor."""
    start, stop = (None, None) if box is None else (box.start, box.stop)
    if parts is None:
        return StoredChunk(*_known(name, place, crc), start, stop)
    values, where, starts = part_names(name)
    file, span, digits = _known(values, place, crc)
    marks = StoredPart(*_known(where, place, crc))
    begins = None if parts.starts is None else StoredPart(*_known(starts, place, crc))
    sparse = StoredSparse(parts.encoding.name, parts.encoding.sizes, digits, marks, begins)
    return StoredChunk(file, span, f"{parts.crc32:08x}", start, stop, sparse)


def in_file(sparse: StoredSparse | None, number: int) -> StoredSparse | None:
    """How a chunk is packed, once the number of its file is known."""
    if sparse is None:
        return None
    starts = None if sparse.starts is None else msgspec.structs.replace(sparse.starts, file=number)
    return msgspec.structs.replace(sparse, where=msgspec.structs.replace(sparse.where, file=number), starts=starts)


def _known(entry: str, place: Place, crc: Sum) -> tuple[int, tuple[int, int], str]:
    """File, bytes and checksum of an entry. One without bytes has no data segment, and the checksum of nothing, 0."""
    file, (start, stop) = place(entry)
    return file, (start, stop), f"{crc(entry) if start < stop else 0:08x}"


def check_sparse(chunk: StoredChunk, sparse: StoredSparse, dtype: DType, shape: tuple[int, ...], limits: Limits) -> None:
    """Raise where the numbers of a packed chunk of this shape cannot be true together; bytes of the parts lie in their files."""
    if dtype.packed:
        raise MetadataError(f"elements of {dtype} share bytes and are never stored packed")
    if 0 in shape:
        raise MetadataError("a chunk without elements that is stored packed")
    encoding = encoding_of(sparse.encoding, sparse.sizes, shape)
    width = dtype.bits // 8
    nbytes = encoding.count * width
    if (sparse.starts is not None) != encoding.counted:
        raise HeaderError(f"the encoding {encoding.name} has {'' if encoding.counted else 'no '}starts")
    stored = _length(chunk.bytes) + _length(sparse.where.bytes)
    _check_length("where", sparse.where.bytes, where_total(encoding))
    if sparse.starts is not None:
        _check_length("starts", sparse.starts.bytes, (group_count(encoding) + 1) * 8)
        stored += _length(sparse.starts.bytes)
    values, most = _length(chunk.bytes), _most(encoding) * width
    if values > most or values % (encoding.unit * width) or (not encoding.counted and values != most):
        said = f"{values:,} bytes of values for {encoding.count:,} elements stored as {encoding.name}"
        raise MetadataError(said, expected=most, found=values)
    if nbytes > limits.sparse_expansion * stored:
        raise LimitExceeded(
            f"{stored:,} stored bytes stand for {nbytes:,}; open with Limits(sparse_expansion=…) if that can be true",
            expected=limits.sparse_expansion * stored,
            found=nbytes,
        )


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _check_length(name: str, span: tuple[int, int], wanted: int) -> None:
    found = _length(span)
    if found != wanted:
        raise MetadataError(f"{found:,} bytes of {name}, where there should be {wanted:,}", expected=wanted, found=found)


def _most(encoding: Encoding) -> int:
    last = group_count(encoding) - 1
    return last * encoding.most(encoding.group) + encoding.most(spread(encoding, last))


def sparse_storage(
    name: str, chunk: StoredChunk, sparse: StoredSparse, dtype: DType, shape: tuple[int, ...], *, files: Sequence[str], home: object
) -> SparseStorage:
    """The dense bytes of a packed chunk that was checked, under a key of their own."""
    values, where, starts = part_names(name)

    def part(label: str, file: int, span: tuple[int, int], crc: str) -> Storage:
        return Storage(files[file], span[0], _length(span), crc32=int(crc, 16), label=label, home=home)

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
