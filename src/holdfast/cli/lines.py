"""Lines of styled text, and where they go.

A line is a list of spans; a span is escaped text and the name of a style. To a terminal they go in colours, through
rich's styles, which is imported only then (50 ms); into a pipe or a file they go as plain text, never wrapped. No
markup is ever parsed, so nothing in a file can pose as markup.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TextIO

__all__ = ["Line", "Span", "guides", "plain", "print_lines"]

Span = tuple[str, str]
"""Escaped text, and a key of `STYLES`; an empty one means unstyled."""

Line = list[Span]

STYLES = {
    "title": "bold",
    "dim": "dim",
    "name": "",
    "group": "bold cyan",
    "dtype": "green",
    "shape": "",
    "size": "cyan",
    "value": "yellow",
    "tie": "magenta",
    "foreign": "red",
    "note": "yellow",
    "dangerous": "bold red",
    "suspicious": "bold yellow",
    "unknown": "blue",
    "known": "dim",
    "error": "bold red",
    "clean": "green",
}


def plain(line: Line) -> str:
    """The text of a line, without spaces at its end."""
    return "".join(text for text, _ in line).rstrip()


def print_lines(lines: Iterable[Line], *, file: TextIO | None = None) -> None:
    """Write lines to standard output, or to `file`."""
    out = sys.stdout if file is None else file
    render = _colours(out) if out.isatty() else plain
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


def _colours(out: TextIO) -> Callable[[Line], str]:
    from rich.color import ColorSystem
    from rich.console import Console
    from rich.style import Style

    # Console knows NO_COLOR, TERM=dumb and how many colours there are.
    console = Console(file=out, highlight=False)
    system = None if console.no_color or console.color_system is None else ColorSystem[console.color_system.upper()]
    if system is None:
        return plain
    styles = {name: Style.parse(text) for name, text in STYLES.items()}

    def render(line: Line) -> str:
        return "".join(styles[style].render(text, color_system=system) if style else text for text, style in line)

    return render
