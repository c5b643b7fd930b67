"""Names of records: bytes to text, refusing every name that two readers could take for different ones.

All names are checked together, as one text with NUL before, between and behind them: a hundred thousand names cost a
few passes in C. Only when a pass finds something are the names visited one by one, to say which.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.formats.zip.layout import UTF8, Places, refused

__all__ = ["decode_names", "unsafe"]

DRIVE = re.compile(r"\0[A-Za-z]:")
"""A drive letter, behind the NUL that ends the name before."""

SHOWN = 80
"""Characters of a hostile name that an error message repeats."""


def decode_names(raw: Sequence[bytes], flags: Sequence[int], places: Places) -> list[str]:
    """The names as text, in the same order. A folder's name keeps its final slash."""
    if not raw:
        return []
    together = b"\0".join(raw)
    try:
        text = together.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    names = text.split("\0")
    agreed = together.isascii() or all(flag & UTF8 for flag in flags)
    if len(names) != len(raw) or not agreed or unsafe(text):
        for row, name in enumerate(raw):
            problem = _problem(name, utf8=bool(flags[row] & UTF8))
            if problem:
                raise refused(problem, key=places.key, offset=int(places.offsets[row]))
    # Folding works character by character, so folding the whole is folding each. A folder must not share a file's name.
    folded = (text.casefold() + "\0").replace("/\0", "\0").split("\0")[:-1]
    if len(set(folded)) != len(folded):
        first: dict[str, int] = {}
        for row, same in enumerate(folded):
            before = first.setdefault(same, row)
            if before != row:
                pair = f"{names[before][:SHOWN]!r} and {names[row][:SHOWN]!r}"
                message = f"two records of one name, {pair} (torch ignores case)"
                raise refused(message, key=places.key, offset=int(places.offsets[row]))
    return names


def unsafe(text: str) -> bool:
    """Whether any of NUL-separated names has a part that is empty, `.` or `..`, a backslash or a drive letter.

    >>> unsafe("archive/data.pkl"), unsafe("folder/"), unsafe("a/../b"), unsafe("/a"), unsafe("a//b"), unsafe("")
    (False, False, True, True, True, True)
    """
    padded = f"\0{text}\0"
    parts = padded.replace("/\0", "\0").replace("\0", "/")
    if any(odd in parts for odd in ("//", "/./", "/../", "\\")):
        return True
    return ":" in parts and DRIVE.search(padded) is not None


def _problem(raw: bytes, *, utf8: bool) -> str | None:
    """What is wrong with one name, if anything is."""
    shown = repr(raw[:SHOWN])
    if b"\0" in raw:
        return f"a NUL in the name {shown}, where some readers end it"
    if not utf8 and not raw.isascii():
        return f"the name {shown} is neither ASCII nor marked as UTF-8"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return f"the name {shown} is marked as UTF-8 and is not"
    return f"the unsafe name {text[:SHOWN]!r}" if unsafe(text) else None
