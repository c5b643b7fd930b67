"""A safetensors file of very many small tensors, as rows (`plan.rows`): the bytes of `plan_file`, without an object a tensor.

The header is made from a piece of text for each kind of tensor, a batch of tensors at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.formats.recorded import PAIRS
from holdfast.formats.safetensors.schema import PREFIX_NBYTES, HeaderEntry
from holdfast.formats.safetensors.write import METADATA, RANK, frame
from holdfast.formats.strict_json import as_keys
from holdfast.plan.rows import BATCH, RowKind, TensorRows, packed_segments
from holdfast.plan.saves import FilePlan


class RowFile(Value, frozen=True, eq=False):
    """A file and where its tensors lie in it."""

    plan: FilePlan
    order: list[int]
    """The rows in the order of the file."""
    names: list[str]
    """In that order."""
    stops: Ints
    """The byte of the file after each, in that order."""


def row_file(
    key: str, names: Sequence[str], rows: TensorRows, *, metadata: Mapping[str, str], fields: Mapping[str, object]
) -> RowFile | None:
    """Lay out a file of tensors that share nothing, under these names, which are Unicode.

    None where the way of objects has something to say.
    """
    codes = [_code(kind) for kind in rows.table]
    if None in codes or len(rows.nbytes) < len(rows) or METADATA in names:
        return None
    try:
        "".join([*metadata, *metadata.values()]).encode("utf-8")
    except UnicodeEncodeError:
        return None
    order = _ordered(names, rows, [RANK[code or ""] for code in codes])
    named = [names[row] for row in order]
    nbytes = rows.nbytes[order]
    stops = np.cumsum(nbytes)
    quote, keys = as_keys(named)
    openings = [quote + _opening(code or "", kind.shape) for code, kind in zip(codes, rows.table, strict=True)]
    kinds = rows.kinds
    listed: list[bytes] = []
    for first in range(0, len(named), BATCH):
        stop = first + BATCH
        # Each begins where the one before it ends.
        ends = [str(first and stops[first - 1]), *map(str, stops[first:stop].tolist())]
        each = zip(keys[first:stop], [openings[kinds[row]] for row in order[first:stop]], ends, islice(ends, 1, None), strict=False)
        text = f"]}},{quote}".join([f"{name}{opening}{start},{end}" for name, opening, start, end in each])
        listed.append(f"{',' * bool(first)}{quote}{text}]}}".encode())
    empty = [] if nbytes.all() else [named[at] for at in np.flatnonzero(nbytes == 0).tolist()]
    framed = frame(listed, named, metadata, fields=fields, empty=empty)
    if framed.header_nbytes > Limits().header_nbytes:
        return None
    segments = (*framed.segments, *packed_segments(rows, order, named))
    return RowFile(FilePlan(key, segments), order, named, stops + PREFIX_NBYTES + framed.header_nbytes)


def _opening(code: str, shape: tuple[int, ...]) -> str:
    """What stands behind the name of a tensor in a header, up to where its data begins."""
    text = msgspec.json.encode(HeaderEntry(code, shape, (0, 0))).decode()
    return ":" + text.removesuffix("0,0]}")


def _code(kind: RowKind) -> str | None:
    """The dtype in the header; None for what is recorded beside the header."""
    return None if kind.dtype.packed or kind.dtype.name == PAIRS else kind.dtype.safetensors


def _ordered(names: Sequence[str], rows: TensorRows, ranks: list[int]) -> list[int]:
    """Rows by dtype, then by name. Each dtype is sorted by itself, where a key is a name and no pair."""
    if len(set(ranks)) == 1:
        return sorted(range(len(names)), key=names.__getitem__)
    by: dict[int, list[int]] = {rank: [] for rank in sorted(set(ranks))}
    for row, kind in enumerate(rows.kinds):
        by[ranks[kind]].append(row)
    return [row for some in by.values() for row in sorted(some, key=names.__getitem__)]
