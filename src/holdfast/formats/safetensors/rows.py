"""A safetensors file of very many small tensors, as rows (`plan.rows`): the bytes of `plan_file`, without an object a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32_each
from holdfast.core.limits import Limits
from holdfast.formats.recorded import PAIRS
from holdfast.formats.safetensors.schema import PREFIX_NBYTES
from holdfast.formats.safetensors.write import METADATA, RANK, frame
from holdfast.plan.rows import Piece, RowKind, TensorRows, packed_segments
from holdfast.plan.saves import FilePlan

__all__ = ["RowFile", "row_file"]


@dataclass(frozen=True, slots=True, eq=False)
class RowFile:
    """A file and where its tensors lie in it."""

    plan: FilePlan
    order: list[int]
    """The rows in the order of the file."""
    stops: Ints
    """The byte of the file after each, in that order."""


def row_file(
    key: str, names: Sequence[str], rows: TensorRows, *, metadata: Mapping[str, str], fields: Mapping[str, object]
) -> RowFile | None:
    """Lay out a file of tensors that share nothing, under these names; None where the way of objects has something to say."""
    codes = [_code(kind) for kind in rows.table]
    if None in codes or len(rows.nbytes) < len(rows) or METADATA in names:
        return None
    try:
        "".join([*names, *metadata, *metadata.values()]).encode("utf-8")
    except UnicodeEncodeError:
        return None
    shapes, nbytes = [kind.shape for kind in rows.table], rows.nbytes.tolist()
    order = _ordered(names, rows, [RANK[code or ""] for code in codes])
    kinds, named = [rows.kinds[row] for row in order], [names[row] for row in order]
    each = zip(named, [codes[k] or "" for k in kinds], [shapes[k] for k in kinds], [nbytes[row] for row in order], strict=True)
    framed = frame(each, metadata, fields=fields)
    if framed.header_nbytes > Limits().header_nbytes:
        return None
    segments = (framed.head, framed.late, framed.tail, *packed_segments(rows, order, named, _sums))
    stops = np.cumsum(rows.nbytes[order]) + PREFIX_NBYTES + framed.header_nbytes
    return RowFile(FilePlan(key, segments), order, stops)


def _code(kind: RowKind) -> str | None:
    """The dtype in the header; None for what is recorded beside the header."""
    plain = not (kind.requires_grad or kind.parameter or kind.dtype.packed or kind.dtype.name == PAIRS)
    return kind.dtype.safetensors if plain else None


def _ordered(names: Sequence[str], rows: TensorRows, ranks: list[int]) -> list[int]:
    """Rows by dtype, then by name. Each dtype is sorted by itself, where a key is a name and no pair."""
    if len(set(ranks)) == 1:
        return sorted(range(len(names)), key=names.__getitem__)
    by: dict[int, list[int]] = {rank: [] for rank in sorted(set(ranks))}
    for row, kind in enumerate(rows.kinds):
        by[ranks[kind]].append(row)
    return [row for some in by.values() for row in sorted(some, key=names.__getitem__)]


def _sums(pieces: Sequence[Piece]) -> list[int]:
    return crc32_each(pieces)
