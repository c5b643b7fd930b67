"""Damage for fuzzing: the same few operations for Hypothesis and for the soak."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NUMBERS", "Edit", "apply"]

NUMBERS = [
    b"\0", b"\xff", b"\x7f", b"\x80", b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"\0" * 7 + b"\x80",
    b"\0" * 7 + b"\x40", b"(", b".", b"R", b"h\0", b"\x85", b"2", b"}", b"]", b")", b"0", b"b", b"Q", b"\x93", b"\x94",
    b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\7", b"ustar", b'"', b"{", b"[", b"]", b"}", b"-1", b"1e9", b"99999999999", b"null",
]  # fmt: skip
"""Pieces that mean something to one of the parsers."""

Edit = tuple[str, int, int, bytes]
"""What to do (`set`, `insert`, `delete`, `repeat`, `move`), where, how many bytes, and with what."""


def apply(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """Bytes after some edits; positions wrap around."""
    for kind, where, count, piece in edits:
        at = where % (len(raw) + 1)
        match kind:
            case "set":
                raw = raw[:at] + piece + raw[at + len(piece) :]
            case "insert":
                raw = raw[:at] + piece + raw[at:]
            case "delete":
                raw = raw[:at] + raw[at + count :]
            case "repeat":
                raw = raw[:at] + raw[at : at + count] * 3 + raw[at + count :]
            case "move":
                raw = (
                    raw[:at]
                    + raw[at + count : at + 2 * count]
                    + raw[at : at + count]
                    + raw[at + 2 * count :]
                )
    return raw
