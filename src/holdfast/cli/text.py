"""Text for people on a terminal: lines of styled text, as wide as it is.

Everything that comes out of a file is hostile text, and escaped (`core/text.py`, whose words are those of this module as well).

A line is a list of spans; a span is escaped text and the name of a style. A terminal gets colours, and lines that are broken
between words where they are too long; a pipe or a file gets plain text. No markup is ever parsed, so nothing in a file can pose as
markup. Where the output has fewer characters than Unicode (LC_ALL=C), ours are replaced by others (`replace_unencodable`).
"""

from __future__ import annotations

import codecs
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from holdfast.core.text import clip, escape

LINES = 200
"""Lines that a verb shows unless `--all` is given: a few screens."""

NARROWEST, INDENT = 20, 8
"""Columns below which lines are not broken any further, and columns before a piece of a line that was broken."""


def width(text: str) -> int:
    """Columns that escaped text takes in a terminal: wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


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
    return "".join(text for text, _ in line).rstrip()


def print_lines(lines: Iterable[Line], *, file: TextIO | None = None) -> None:
    """Write lines to standard output, or to `file`."""
    out = sys.stdout if file is None else file
    # A terminal that knows colours, and no NO_COLOR (https://no-color.org).
    colours = (
        out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    )
    render = _coloured if colours else plain
    columns = line_width(out)
    for line in lines:
        for piece in [line] if columns is None else broken(line, columns):
            out.write(render(piece) + "\n")
    out.flush()


def print_json(value: object) -> None:
    """Write a document to standard output, on one line: ASCII only, with no tokens that JSON lacks.

    Its field `schema` is raised when a field changes its meaning or goes away.
    """
    sys.stdout.write(json.dumps(value, ensure_ascii=True, allow_nan=False) + "\n")


def fields_of(thing: object, names: str) -> dict[str, object]:
    """Attributes of a result under their names, as values that JSON has: what is beyond its numbers is null."""
    return {name: _native(getattr(thing, name)) for name in names.split()}


def _native(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return list(value) if isinstance(value, tuple) else value


def duration(seconds: float) -> str:
    """Return a time for a line of output, such as "2.5 s"."""
    return "<0.1 s" if seconds < 0.05 else f"{seconds:.1f} s"


def note_lines(notes: Iterable[str]) -> Iterator[Line]:
    """A line for each note."""
    for note in notes:
        yield [("  note  ", "note"), (shell_text(note), "")]


def shell_text(text: str, most: int = 600) -> str:
    """Return a sentence of the library as a shell shows it: with flags for the names of options.

    A sentence in which the flags of the command stand already stays as it is.
    """
    from holdfast.cli.options import in_flags  # most output has no such sentence

    return escape(in_flags(clip(text, most)))


def padded(texts: Sequence[str]) -> list[str]:
    """Names out of a file, escaped, and made as wide as the widest."""
    shown = [escape(clip(text, 70)) for text in texts]
    wide = max(map(width, shown), default=0)
    return [text + " " * (wide - width(text)) for text in shown]


def line_width(out: TextIO) -> int | None:
    """Columns of a terminal; None for a pipe or a file, where lines are as long as they are."""
    return max(terminal_width(), NARROWEST) if out.isatty() else None


def terminal_width() -> int:
    """Columns of the terminal: as COLUMNS says, as the system says, or 80. `shutil` has it, and imports three compressors."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # type: ignore[union-attr]  # the AttributeError is caught
    except (AttributeError, ValueError, OSError):
        return 80  # no terminal, or closed


def broken(line: Line, columns: int) -> Iterator[Line]:
    """A line in pieces of at most so many columns, broken where there are spaces; the pieces after the first are indented.

    >>> [plain(piece) for piece in broken([("layers.0.weight", "name"), ("  f32  [4, 4]  64 B", "dim")], 24)]
    ['layers.0.weight  f32', '        [4, 4]  64 B']
    """
    rest = line
    while width(plain(rest)) > columns:
        text = plain(rest)
        ends = itertools.accumulate(map(width, text))
        fits = max(sum(1 for _ in itertools.takewhile(lambda end: end <= columns, ends)), 1)
        lead = len(text) - len(text.lstrip())
        space = text.rfind(" ", lead + 1, fits + 1)
        cut = fits if space < 0 else space
        head, rest = _split(rest, cut)
        yield head
        tail = plain(rest)
        rest = [(" " * INDENT, ""), *_split(rest, len(tail) - len(tail.lstrip()))[1]]
    yield rest


def _split(line: Line, at: int) -> tuple[Line, Line]:
    head: Line = []
    for position, (text, style) in enumerate(line):
        if at < len(text):
            return [*head, (text[:at], style)], [(text[at:], style), *line[position + 1 :]]
        head.append((text, style))
        at -= len(text)
    return head, []


ASCII_FORMS = str.maketrans({
    "…": "...", "→": "->", "←": "<-", "×": "x", "·": "-", "−": "-", "±": "+-", "≤": "<=", "≥": ">=", "µ": "u", "–": "-",
    "─": "-", "│": "|", "├": "|", "└": "`", "┌": ".", "┐": ".", "┘": "'", "┼": "+", "┤": "|", "┴": "+", "┬": "+",
    "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%", "█": "#",
})  # fmt: skip
"""The replacements of characters of ours that an output does not have."""


def replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """The error handler for characters that an output cannot hold: ours become others, the rest shows its code."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(ASCII_FORMS)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error("holdfast", replace_unencodable)


def guides() -> tuple[str, str, str, str]:
    """The pieces that trees are drawn with: branch, last branch, bar, gap; in ASCII where the output has no others."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        "├─└│…×·".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ("|- ", "`- ", "|  ", "   ")
    return ("├─ ", "└─ ", "│  ", "   ")


def _coloured(line: Line) -> str:
    return "".join(
        f"\x1b[{code}m{text}\x1b[0m" if text and (code := STYLES.get(style)) else text
        for text, style in line
    )
