"""Text for people: names made safe to look at, sizes and counts made short.

Text out of a file is hostile: a tensor's name may clear the screen, hide behind bidi marks, or forge a line of output. `escape`
makes all of that visible. It does not double backslashes, so it is for reading and not for parsing: the exact text is in `--json`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that Unicode calls printable and that take no room: the default-ignorable ones of categories L and M."""

LABEL_LIMIT = 200  # Characters of one name on a line. Real ones stay below 120; a hostile one may have millions.


def escape(text: str) -> str:
    r"""The text with everything that a terminal would act on, or hide, written out.

    >>> escape("a\x1b[31m\u202eb\n")
    'a\\x1b[31m\\u202eb\\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c.isprintable() and not INVISIBLE.match(c) else c.encode("unicode_escape").decode()
        for c in text
    )


def clip(text: str, limit: int = LABEL_LIMIT) -> str:
    """The text, or its beginning and end when it is longer than `limit`.

    >>> clip("abcdefghij", 7)
    'abcd…ij'
    """
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 1]}…{text[-tail:]}"


def format_nbytes(number: int) -> str:
    """A size in binary units with three or four digits.

    >>> format_nbytes(512), format_nbytes(1536), format_nbytes(154_389_504)
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


def format_count(number: int) -> str:
    """How many, shortened above 100,000.

    >>> format_count(50_257), format_count(124_439_808), format_count(6_738_415_616)
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


def pluralize(number: int, noun: str) -> str:
    """
    >>> pluralize(1, "tensor"), pluralize(1200, "tensor")
    ('1 tensor', '1,200 tensors')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def list_names(names: Sequence[str], most: int = 5, count: int | None = None) -> str:
    """Return the first names, and the number of the others. `count` is the number of all names.

    >>> list_names(["a", "b"]), list_names(["a", "b", "c"], 2), list_names(["a"], count=1001)
    ('a, b', 'a, b and 1 more', 'a and 1,000 more')
    """
    shown = names[:most]
    rest = (len(names) if count is None else count) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more" if rest > 0 else "")


def format_percent(part: int, whole: int) -> str:
    """A share that never rounds to "none" or "all" when it is neither.

    >>> format_percent(1, 3), format_percent(1, 10**6), format_percent(999_999, 10**6)
    ('33%', '<1%', '>99%')
    """
    if part == whole:
        return "100%"
    share = 100 * part / whole
    return "<1%" if share < 0.5 else ">99%" if share >= 99.5 else f"{share:.0f}%"


def round_significant(value: float | None, digits: int = 4) -> float | int | None:
    """Round a number to a few significant digits. NaN and infinities, which JSON lacks, become None.

    >>> round_significant(0.000123456), round_significant(12.0), round_significant(float("nan")), round_significant(123456.0)
    (0.0001235, 12, None, 123500)
    """
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits - 1}e}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def format_iso_time(seconds: float) -> str:
    """Return a time in ISO 8601, to the second.

    >>> format_iso_time(1763270000.9)
    '2025-11-16T05:13:20Z'
    """
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
