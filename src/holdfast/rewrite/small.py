"""Save many small tensors as rows: no object a tensor, and the file as one piece of bytes.

A dict of fifty thousand arrays of a few bytes costs `describe_state`, the layout and the writer a few dozen objects each. Here one
walk takes dtype, shape and bytes of each; the header is made by the same function as always (`formats.safetensors.write.frame`),
with the checksums in it, and the file is a `Literal`. From there on all is as it always is: the reader rehearses the plan, the
transaction writes it.

*Ordinary* is said here and nowhere else, in `rows_of`: a plain dict from text to plain arrays or CPU tensors that own just their
memory, in C order, each by itself, small, and not too much of them together, because they are copied. For everything else, and for
whatever is wrong, there is the way of objects: it says what. Both give the same bytes and the same notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from holdfast.core.arrays import AnyDType
from holdfast.core.crc import crc32
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.engine.planned_store import PlannedStore
from holdfast.formats.safetensors.write import METADATA, RANK, file_order_notes, frame
from holdfast.plan.saves import FilePlan, Literal, SavePlan
from holdfast.rewrite.formats import check_holds, described
from holdfast.rewrite.state import Row, foreign_rows

__all__ = ["Rows", "plan_rows", "rows_of"]

FEW = 64
"""Fewer are saved as objects: nobody waits for those."""

SMALL_NBYTES = 64 << 10
"""A tensor that is longer is written from where it lies."""

MOST_NBYTES = 64 << 20
"""What is copied, at the most."""

MOST_CHARACTERS = 4 << 20
"""Of all names. What is beyond is looked at name by name."""


@dataclass(frozen=True, slots=True)
class Rows:
    """An ordinary state, copied. All rows are of one length."""

    names: list[str]
    dtypes: list[DType]
    shapes: list[tuple[int, ...]]
    pieces: list[bytes]
    metadata: dict[str, str]


def rows_of(state: object, metadata: Mapping[str, str] | None) -> Rows | None:
    """The rows of an ordinary state; None for any other."""
    if type(state) is not dict or len(state) < FEW:
        return None
    names: list[str] = list(state)
    texts = [*(metadata or {}), *(metadata or {}).values()]
    if {*map(type, names), *map(type, texts)} != {str} or sum(map(len, names)) > MOST_CHARACTERS:
        return None
    take = _taken()
    dtypes: list[DType] = []
    shapes: list[tuple[int, ...]] = []
    pieces: list[bytes] = []
    room = MOST_NBYTES
    for value in state.values():
        row = take(value)
        if row is None:
            return None
        dtypes.append(row[0])
        shapes.append(row[1])
        pieces.append(row[2])
        room -= len(row[2])
        if room < 0:
            return None
    return Rows(names, dtypes, shapes, pieces, dict(metadata or {}))


def _taken() -> Callable[[object], Row | None]:
    """What takes an ordinary tensor of one state. An array that comes twice is tied, and so are two over the same memory."""
    kinds: dict[AnyDType, DType | None] = {}
    met: set[int] = set()
    foreign = foreign_rows(SMALL_NBYTES)

    def take(value: object) -> Row | None:
        if type(value) is not np.ndarray:
            return None if foreign is None else foreign(value)
        dtype, flags = value.dtype, value.flags
        if dtype not in kinds:
            row = DTYPES.numpy(dtype) if dtype.isnative and not dtype.hasobject else None
            kinds[dtype] = None if row is None or row.packed or row.safetensors is None else row
        kind = kinds[dtype]
        # What owns its memory shares it with no other that does.
        owns = value.base is None and flags.owndata and flags.c_contiguous
        if kind is None or not owns or value.nbytes > SMALL_NBYTES or id(value) in met:
            return None
        met.add(id(value))
        return kind, value.shape, value.tobytes()

    return take


def plan_rows(rows: Rows, path: str) -> tuple[SavePlan, dict[str, int]] | None:
    """The plan of one safetensors file, known to open, and the CRC-32 of what has bytes, which a writer would find.

    None where the way of objects has something to say about it.
    """
    names, codes = rows.names, [dtype.safetensors or "" for dtype in rows.dtypes]
    if METADATA in names:
        return None
    try:
        "".join([*names, *rows.metadata, *rows.metadata.values()]).encode("utf-8")
    except UnicodeEncodeError:
        return None
    order = sorted(range(len(names)), key=lambda at: (RANK[codes[at]], names[at]))
    pieces = [rows.pieces[at] for at in order]
    written = [names[at] for at in order]
    framed = frame([(names[at], codes[at], rows.shapes[at], len(rows.pieces[at])) for at in order], rows.metadata, fields={})
    if framed.header_nbytes > Limits().header_nbytes:
        return None
    sums = dict(zip(written, map(crc32, pieces), strict=True))
    whole = b"".join((framed.head.data, framed.late.make(sums), framed.tail.data, *pieces))
    plan = SavePlan("safetensors", (FilePlan("", (Literal(whole),)),), tuple(file_order_notes(written, names)), opens=True)
    found = described(PlannedStore(plan.files, name=path), (plan.format,))
    check_holds(found.tensors, dict(zip(names, zip(rows.dtypes, rows.shapes, strict=True), strict=True)), path)
    return plan, {name: sums[name] for name, piece in zip(written, pieces, strict=True) if piece}
