"""Text for people: names made safe for a terminal, sizes and counts made short; lines of styled text.

Everything that comes out of a file is hostile text. A tensor may be called `\\x1b[2J` (clear the screen), may hold a
bidi mark that makes `exe.tp` look like `pt.exe`, or a newline that forges a line of output. `escape` makes all of
that visible. It does not double backslashes, so it is for reading and not for parsing: the exact text is in `--json`.

A line is a list of spans; a span is escaped text and the name of a style. To a terminal they go in colours, into a pipe
or a file as plain text. A line that is too long for a terminal is broken between words; into a pipe it goes as it is. No markup is
ever parsed, so nothing in a file can pose as markup.

Where the output has fewer characters than Unicode (LC_ALL=C), those that we draw with have others in their place (`plainer`).
"""

from __future__ import annotations

import codecs
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

__all__ = [
    "Line",
    "Span",
    "clip",
    "count",
    "escape",
    "guides",
    "line_width",
    "nbytes",
    "percent",
    "plain",
    "plural",
    "print_lines",
    "width",
]

INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Letters and marks (to Unicode, and so to `str.isprintable`) that take no room: the default-ignorable ones of
categories L and M.
"""

NARROWEST = 20
"""Columns below which lines are not broken any further."""

INDENT = 8
"""Columns before a piece of a line that was broken."""

LABEL_LIMIT = 200
"""Characters of one name on a line. Real ones stay below 120; a hostile one may have millions."""


def escape(text: str) -> str:
    r"""The text with everything that a terminal would act on, or hide, written out.

    >>> escape("a\x1b[31m\u202eb\n")
    'a\\x1b[31m\\u202eb\\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() and not INVISIBLE.match(c) else _written_out(c) for c in text)


def _written_out(char: str) -> str:
    known = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    code = ord(char)
    if char in known:
        return known[char]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clip(text: str, limit: int = LABEL_LIMIT) -> str:
    """The text, or its beginning and end when it is longer than `limit`.

    >>> clip("abcdefghij", 7)
    'abcd…ij'
    """
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 1]}…{text[-tail:]}"


def width(text: str) -> int:
    """Columns that escaped text takes in a terminal: wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def nbytes(number: int) -> str:
    """A size in binary units with three or four digits.

    >>> nbytes(512), nbytes(1536), nbytes(154_389_504)
    ('512 B', '1.5 KiB', '147.2 MiB')
    """
    if number < 1024:
        return f"{number} B"
    size = float(number)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        # 1023.96 would be shown as 1024.0: that is the next unit's 1.0.
        if size < 1023.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} EiB"


def count(number: int) -> str:
    """How many, shortened above 100,000.

    >>> count(50_257), count(124_439_808), count(6_738_415_616)
    ('50,257', '124.4M', '6.74B')
    """
    if number < 100_000:
        return f"{number:,}"
    if number < 999_500:
        return f"{number / 1e3:.0f}K"
    if number < 999_950_000:
        return f"{number / 1e6:.1f}M"
    if number < 999_995_000_000:
        return f"{number / 1e9:.2f}B"
    return f"{number / 1e12:,.2f}T"


def plural(number: int, noun: str) -> str:
    """
    >>> plural(1, "tensor"), plural(1200, "tensor")
    ('1 tensor', '1,200 tensors')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(part: int, whole: int) -> str:
    """A share that never rounds to "none" or "all" when it is neither.

    >>> percent(1, 3), percent(1, 10**6), percent(999_999, 10**6)
    ('33%', '<1%', '>99%')
    """
    if part == whole:
        return "100%"
    share = 100 * part / whole
    return "<1%" if share < 0.5 else ">99%" if share >= 99.5 else f"{share:.0f}%"


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
    columns = line_width(out)
    for line in lines:
        for piece in [line] if columns is None else broken(line, columns):
            out.write(render(piece) + "\n")
    out.flush()


def line_width(out: TextIO) -> int | None:
    """Columns of a terminal; None for a pipe or a file, where lines are as long as they are."""
    return max(shutil.get_terminal_size().columns, NARROWEST) if out.isatty() else None


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
    """The spans before and after a character of a line."""
    head: Line = []
    for position, (text, style) in enumerate(line):
        if at < len(text):
            return [*head, (text[:at], style)], [(text[at:], style), *line[position + 1 :]]
        head.append((text, style))
        at -= len(text)
    return head, []


PLAINER = str.maketrans({
    "…": "...", "→": "->", "←": "<-", "×": "x", "·": "-", "−": "-", "±": "+-", "≤": "<=", "≥": ">=", "µ": "u", "–": "-",
    "─": "-", "│": "|", "├": "|", "└": "`", "┌": ".", "┐": ".", "┘": "'", "┼": "+", "┤": "|", "┴": "+", "┬": "+",
    "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+", "▆": "*", "▇": "%", "█": "#",
})  # fmt: skip
"""What stands for a character of ours where there is none."""


def plainer(error: UnicodeError) -> tuple[str, int]:
    """What Python asks about characters that an output cannot hold: ours have others in their place, the rest shows its code."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(PLAINER)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error("holdfast", plainer)


def guides() -> tuple[str, str, str, str]:
    """The pieces that trees are drawn with: branch, last branch, bar, gap; in ASCII where the output has no others."""
    encoding = sys.stdout.encoding or "ascii"
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
