"""What stands after `--slice`: numpy's basic index as text, read by a small parser and never evaluated.

index  =  item { "," item } [ "," ]          optionally in brackets
item   =  integer  |  [integer] ":" [integer] [ ":" [integer] ]  |  "..."  |  "None"  |  "newaxis"
"""

from __future__ import annotations

import re
from types import EllipsisType

from holdfast.errors import BadIndex

__all__ = ["Item", "parse_slice"]

Item = int | slice | EllipsisType | None

INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
"""18 digits are below 2^63; no dimension is longer."""


def parse_slice(text: str) -> tuple[Item, ...]:
    """The index that a text says; raises `BadIndex` with the piece that is wrong.

    >>> parse_slice("0:2, ::2, -1")
    (slice(0, 2, None), slice(None, None, 2), -1)
    >>> parse_slice("[..., None, 3]")
    (Ellipsis, None, 3)
    """
    inside = text.strip()
    if inside.startswith("[") and inside.endswith("]"):
        inside = inside[1:-1].strip()
    if not inside:
        return ()
    pieces = [piece.strip() for piece in inside.split(",")]
    if pieces[-1] == "" and len(pieces) > 1:
        pieces.pop()
    return tuple(_item(piece, text) for piece in pieces)


def _item(piece: str, text: str) -> Item:
    if piece == "...":
        return ...
    if piece in ("None", "newaxis", "np.newaxis"):
        return None
    if ":" not in piece:
        return _integer(piece, text)
    bounds = piece.split(":")
    if len(bounds) > 3:
        raise BadIndex(f"cannot read the slice {text!r}: {piece!r} has more than two colons", found=piece)
    start, stop, step = [_integer(b.strip(), text) if b.strip() else None for b in (*bounds, "")[:3]]
    if step == 0:
        raise BadIndex(f"cannot read the slice {text!r}: the step of {piece!r} is zero", found=piece)
    return slice(start, stop, step)


def _integer(piece: str, text: str) -> int:
    if not INTEGER.fullmatch(piece):
        raise BadIndex(
            f"cannot read the slice {text!r}: {piece!r} is no integer, a:b:c, ... or None (as in '0:2, ::2, -1')",
            found=piece,
        )
    return int(piece)
