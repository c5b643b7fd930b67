"""Numbers as people give them: bytes, counts and seconds; as numbers of any kind, or as text with a unit.

True is no number here, although Python counts it as one: whoever passes it meant something else.
"""

from __future__ import annotations

import math
import operator
import re
from contextlib import suppress
from datetime import timedelta
from typing import SupportsFloat, SupportsIndex

from holdfast.errors import BadArgument, BadArgumentType, Unsupported

Size = SupportsIndex | float | str

BYTES = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
SECONDS = {
    "": 1.0,
    "s": 1.0,
    "sec": 1.0,
    "ms": 0.001,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}

AMOUNT = re.compile(r"\s*([0-9_,.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.ASCII)

LENGTH = 80


def describe_value(value: object) -> str:
    """A value in a message: as it is written, cut where it is long, and its type where that does not show.

    >>> describe_value("x"), describe_value(3), describe_value([1])
    ("'x'", '3', '[1] (a list)')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, PLAIN):
        text = repr(value[: LENGTH + 1]) if isinstance(value, str | bytes) else repr(value)
        return text if len(text) <= LENGTH else f"{text[:LENGTH]}…"
    # What a stranger's repr does is not ours to find out: arrays of gigabytes have one, too.
    if isinstance(value, list | tuple | set | dict) and len(value) <= LENGTH:
        inside = [*value, *value.values()] if isinstance(value, dict) else [*value]
        text = repr(value) if all(isinstance(item, PLAIN) for item in inside) else ""
        if text and len(text) <= LENGTH:
            return f"{text} ({_article(type(value).__name__)})"
    return _article(type(value).__name__)


PLAIN = (str, bytes, int, float, complex, type(None))


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def parse_nbytes(size: object, name: str = "a size") -> int:
    """A number of bytes, as a number or as people write it.

    >>> parse_nbytes("5GB"), parse_nbytes("1GiB"), parse_nbytes(4096), parse_nbytes(1e9)
    (5000000000, 1073741824, 4096, 1000000000)
    """
    if isinstance(size, str):
        amount = _amount(size, BYTES, suffix="b")
        if amount is None:
            raise Unsupported(
                f"{size!r} is no number of bytes; write 512MiB, 5GB or 1000000", found=size
            )
        count = int(amount)
    else:
        found = _whole(size)
        if found is None:
            message = f"{name} takes a number of bytes (2_000_000_000, 2e9 or '2GB'), not {describe_value(size)}"
            raise BadArgumentType(message, found=size)
        count = found
    if count <= 0:
        raise Unsupported(f"a size must be positive, not {size!r}", found=size)
    return count


def parse_count(value: object, name: str, *, least: int = 1, most: int | None = None) -> int:
    """A count: any integer, or a float that is one.

    >>> parse_count(8.0, "threads")
    8
    """
    found = _whole(value)
    if found is None and isinstance(value, str) and value.strip().isdecimal() and value.isascii():
        found = int(value)
    if found is None:
        raise BadArgumentType(
            f"{name} takes a whole number, not {describe_value(value)}", found=value
        )
    if found < least:
        raise BadArgument(
            f"{name} takes a number from {least} on, not {describe_value(value)}", found=value
        )
    if most is not None and found > most:
        raise BadArgument(
            f"{name} takes a number up to {most:,}, not {describe_value(value)}", found=value
        )
    return found


def parse_fraction(value: object, name: str = "a share") -> float:
    """A part of a whole: a number up to 1, or text, in percent or not.

    >>> parse_fraction(0.25), parse_fraction("1%"), parse_fraction("0.5")
    (0.25, 0.01, 0.5)
    """
    found: float | None = None
    text = value.strip() if isinstance(value, str) else None
    if text is not None:
        try:
            found = (
                float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
                if text.isascii()
                else None
            )
        except ValueError:
            found = None
    else:
        found = to_float(value)
    if found is None:
        raise BadArgumentType(
            f"{name} takes a share (0.01 or '1%'), not {describe_value(value)}", found=value
        )
    if not 0 < found <= 1:
        raise BadArgument(
            f"{name} takes a share above 0 and up to 1 (or '100%'), not {describe_value(value)}",
            found=value,
        )
    return found


def parse_seconds(value: object, name: str = "a duration") -> float:
    """A duration: seconds as a number, "90s" or "5min", or a `timedelta`.

    >>> parse_seconds(60), parse_seconds("5 min"), parse_seconds(timedelta(seconds=2))
    (60.0, 300.0, 2.0)
    """
    if isinstance(value, timedelta):
        found: float | None = value.total_seconds()
    else:
        found = _amount(value, SECONDS) if isinstance(value, str) else to_float(value)
    if found is None:
        raise BadArgumentType(
            f"{name} takes seconds (60, '90s' or '5min'), not {describe_value(value)}", found=value
        )
    if not found > 0:
        raise BadArgument(
            f"{name} takes a time that is longer than none, not {describe_value(value)}",
            found=value,
        )
    return found


def to_float(value: object) -> float | None:
    """A number of any kind as a float; None for anything else, and for True and False."""
    if isinstance(value, SupportsFloat | SupportsIndex) and not isinstance(value, bool):
        # A tensor of several numbers says that it has no float, each library in its own way.
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return float(value)
    return None


def _whole(value: object) -> int | None:
    """An integer of any kind, or a float that is one; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, SupportsIndex):
        try:
            return operator.index(value)
        except (TypeError, ValueError):
            return None
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return None


def _amount(
    text: str, units: dict[str, float] | dict[str, int], *, suffix: str = ""
) -> float | None:
    found = AMOUNT.fullmatch(text.lower())
    unit = found[2].removesuffix(suffix) if found else ""
    if found is None or unit not in units:
        return None
    try:
        number = float(found[1].replace(",", "").replace("_", "")) * units[unit]
    except ValueError:
        return None
    return number if math.isfinite(number) else None
