"""Lines of styled text, and where they go.

A line is a list of spans; a span is escaped text and the name of a style. To a terminal they go in colours, into a pipe
or a file as plain text, and never wrapped. No markup is ever parsed, so nothing in a file can pose as markup.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

__all__ = ["Line", "Span", "guides", "plain", "print_lines"]

Span = tuple[str, str]
"""Escaped text, and a key of `STYLES`; an empty one means unstyled."""

Line = list[Span]

STYLES = {
    "title": "1",
    "dim": "2",
    "group": "1;36",
    "dtype": "32",
    "size": "36",
    "value": "33",
    "tie": "35",
    "foreign": "31",
    "note": "33",
    "dangerous": "1;31",
    "suspicious": "1;33",
    "unknown": "34",
    "known": "2",
    "error": "1;31",
    "clean": "32",
}
"""The sixteen colours that every terminal has, in its own shades: 1 bold, 2 faint, 31 red, 32 green, 33 yellow, 34 blue, …"""


def plain(line: Line) -> str:
    """The text of a line, without spaces at its end."""
    return "".join(text for text, _ in line).rstrip()


def print_lines(lines: Iterable[Line], *, file: TextIO | None = None) -> None:
    """Write lines to standard output, or to `file`."""
    out = sys.stdout if file is None else file
    render = _coloured if _takes_colours(out) else plain
    for line in lines:
        out.write(render(line) + "\n")
    out.flush()


def guides(file: TextIO | None = None) -> tuple[str, str, str, str]:
    """The pieces that trees are drawn with: branch, last branch, bar, gap; in ASCII where the output has no others."""
    encoding = (sys.stdout if file is None else file).encoding or "ascii"
    try:
        "├─└│…×·".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ("|- ", "`- ", "|  ", "   ")
    return ("├─ ", "└─ ", "│  ", "   ")


def _coloured(line: Line) -> str:
    """The text of a line with the terminal's own colours around its spans."""
    return "".join(f"\x1b[{code}m{text}\x1b[0m" if text and (code := STYLES.get(style)) else text for text, style in line)


def _takes_colours(out: TextIO) -> bool:
    """Whether colours are wanted there: a terminal that knows them, and no NO_COLOR (https://no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
