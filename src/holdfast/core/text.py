"""Text for people: escaped names, and short forms of sizes and counts.

Text from a file is hostile. The name of a tensor may clear the screen, reverse the order of
characters, or imitate a line of output. `escape` makes such characters visible. It does not double
backslashes, so its result is for reading and cannot be parsed. Programs use `--json`, which has the
exact text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that Python counts as printable, but that are not visible: those of Unicode's
default-ignorable characters that are letters or marks."""

LABEL_LIMIT = 200
"""The most characters of a name on a line. Those of models stay below 120."""


def escape(text: str) -> str:
    r"""Return a text with every character escaped that a terminal would obey or not show.

    >>> escape("a\x1b[31m\u202eb\n")
    'a\\x1b[31m\\u202eb\\n'
    """
    if text.isascii() and text.isprintable():
        return text
    characters = []
    for character in text:
        if character.isprintable() and not INVISIBLE.match(character):
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    return "".join(characters)


def clip(text: str, limit: int = LABEL_LIMIT) -> str:
    """Return a text, without its middle if it is longer than a limit.

    >>> clip("abcdefghij", 7)
    'abcd…ij'
    """
    if len(text) <= limit:
        return text
    tail_length = limit // 3
    return f"{text[: limit - tail_length - 1]}…{text[-tail_length:]}"


def format_nbytes(nbytes: int) -> str:
    """Return a size in binary units, with one decimal.

    >>> format_nbytes(512), format_nbytes(1536), format_nbytes(154_389_504)
    ('512 B', '1.5 KiB', '147.2 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        # 1023.96 would be rounded to 1024.0, which is 1.0 of the next unit.
        if size < 1023.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} EiB"


def format_count(count: int) -> str:
    """Return a count, in thousands, millions or billions from 100,000 on.

    >>> format_count(50_257), format_count(124_439_808), format_count(6_738_415_616)
    ('50,257', '124.4M', '6.74B')
    """
    if count < 100_000:
        return f"{count:,}"
    # As in `format_nbytes`: what would be rounded to 1,000 is 1 of the next unit.
    if count < 999_500:
        return f"{count / 1e3:.0f}K"
    if count < 999_950_000:
        return f"{count / 1e6:.1f}M"
    if count < 999_995_000_000:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e12:,.2f}T"


def pluralize(count: int, noun: str) -> str:
    """Return a count with a noun, which gets an `s` unless the count is 1.

    >>> pluralize(1, "tensor"), pluralize(1200, "tensor")
    ('1 tensor', '1,200 tensors')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def list_names(names: Sequence[str], max_names: int = 5, count: int | None = None) -> str:
    """Return the first names, and how many others there are.

    Args:
        names: The names, or only the first of them.
        max_names: How many names are listed.
        count: The number of all names. The default is the length of `names`.

    >>> list_names(["a", "b"]), list_names(["a", "b", "c"], 2), list_names(["a"], count=1001)
    ('a, b', 'a, b and 1 more', 'a and 1,000 more')
    """
    if count is None:
        count = len(names)
    text = ", ".join(names[:max_names])
    omitted_count = count - min(len(names), max_names)
    if omitted_count > 0:
        text += f" and {omitted_count:,} more"
    return text


def format_percent(count: int, total: int) -> str:
    """Return a count as a percentage of a total, rounded, but never to 0% or 100%.

    Only a count that is the total itself is shown as 100%.

    >>> format_percent(1, 3), format_percent(1, 10**6), format_percent(999_999, 10**6)
    ('33%', '<1%', '>99%')
    """
    if count == total:
        return "100%"
    percentage = 100 * count / total
    if percentage < 0.5:
        return "<1%"
    if percentage >= 99.5:
        return ">99%"
    return f"{percentage:.0f}%"


def round_significant(value: float | None, digits: int = 4) -> float | int | None:
    """Round a number to a few significant digits.

    Returns:
        An int if the result is a whole number. None for NaN and infinities, which JSON does not
        have.

    >>> [round_significant(value) for value in (0.000123456, 12.0, float("nan"), 123456.0)]
    [0.0001235, 12, None, 123500]
    """
    if value is None or not math.isfinite(value):
        return None
    rounded_value = float(f"{value:.{digits - 1}e}")
    # Above 10^15, the int would show digits that the float does not have.
    if rounded_value.is_integer() and abs(rounded_value) < 1e15:
        return int(rounded_value)
    return rounded_value


def format_iso_time(seconds: float) -> str:
    """Return a time as ISO 8601 in UTC, without fractions of a second.

    Args:
        seconds: The time in seconds since 1970.

    >>> format_iso_time(1763270000.9)
    '2025-11-16T05:13:20Z'
    """
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
