"""Parses sizes, counts, fractions and durations that people pass as numbers or as text with a unit.

True and False are refused, although Python treats them as integers: whoever passes one of them
meant another argument.
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
"""A number of bytes, as `parse_nbytes` accepts it."""

NBYTES_OF_UNITS = {
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
"""The size of each unit, in lower case and without the `b`."""

SECONDS_OF_UNITS = {
    "": 1.0,
    "s": 1.0,
    "sec": 1.0,
    "ms": 0.001,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}

NUMBER_AND_UNIT = re.compile(r"\s*([0-9_,.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.ASCII)

MAX_SHOWN_LENGTH = 80
"""The most characters of a value in a message, and the most items of a container."""

SHOWN_TYPES = (str, bytes, int, float, complex, type(None))
"""Types whose values are shown in messages."""


def describe_value(value: object) -> str:
    """Return a value as it is shown in an error message, shortened if it is long.

    Small containers of plain values are shown with their type, and other objects only by it.

    >>> describe_value("x"), describe_value(3), describe_value([1])
    ("'x'", '3', '[1] (a list)')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, SHOWN_TYPES):
        if isinstance(value, str | bytes):
            value = value[: MAX_SHOWN_LENGTH + 1]
        text = repr(value)
        if len(text) <= MAX_SHOWN_LENGTH:
            return text
        return f"{text[:MAX_SHOWN_LENGTH]}…"

    noun = type(value).__name__
    description = f"a {noun}"
    if noun[:1].lower() in "aeio":
        description = f"an {noun}"
    # The `repr` of other objects is not called: it may run any code, and that of an array may read
    # gigabytes.
    if isinstance(value, list | tuple | set | dict) and len(value) <= MAX_SHOWN_LENGTH:
        items = list(value)
        if isinstance(value, dict):
            items += value.values()
        if all(isinstance(item, SHOWN_TYPES) for item in items):
            text = repr(value)
            if len(text) <= MAX_SHOWN_LENGTH:
                return f"{text} ({description})"
    return description


def parse_nbytes(size: object, name: str = "a size") -> int:
    """Return a size in bytes.

    Args:
        size: A whole number, or a text with a unit.
        name: What the size is called in messages, such as `max_memory=`.

    Raises:
        Unsupported: The text is not a size, or the size is not positive.
        BadArgumentType: The value is neither a text nor a whole number.

    >>> parse_nbytes("5GB"), parse_nbytes("1GiB"), parse_nbytes(4096), parse_nbytes(1e9)
    (5000000000, 1073741824, 4096, 1000000000)
    """
    if isinstance(size, str):
        amount = _parse_amount(size, NBYTES_OF_UNITS, optional_suffix="b")
        if amount is None:
            raise Unsupported(
                f"{size!r} is not a number of bytes; write 512MiB, 5GB or 1000000", found=size
            )
        nbytes = int(amount)
    else:
        integer = _to_int(size)
        if integer is None:
            raise BadArgumentType(
                f"{name} takes a number of bytes (2_000_000_000, 2e9 or '2GB'), "
                f"not {describe_value(size)}",
                found=size,
            )
        nbytes = integer
    if nbytes <= 0:
        raise Unsupported(f"a size must be positive, not {size!r}", found=size)
    return nbytes


def parse_count(
    value: object,
    name: str,
    *,
    minimum: int = 1,
    maximum: int | None = None,
) -> int:
    """Return a whole number from an integer, from a float without a fraction, or from digits.

    Args:
        value: The number.
        name: What the number is called in messages, such as `threads=`.
        minimum: The smallest number that is accepted.
        maximum: The largest number that is accepted. None if there is no limit.

    Raises:
        BadArgumentType: The value is not a whole number.
        BadArgument: The number is too small or too large.

    >>> parse_count(8.0, "threads=")
    8
    """
    count = _to_int(value)
    if isinstance(value, str) and value.strip().isdecimal() and value.isascii():
        count = int(value)
    if count is None:
        raise BadArgumentType(
            f"{name} takes a whole number, not {describe_value(value)}", found=value
        )
    if count < minimum:
        raise BadArgument(
            f"{name} takes a number from {minimum} on, not {describe_value(value)}", found=value
        )
    if maximum is not None and count > maximum:
        raise BadArgument(
            f"{name} takes a number up to {maximum:,}, not {describe_value(value)}", found=value
        )
    return count


def parse_fraction(value: object, name: str = "a fraction") -> float:
    """Return a fraction of a whole: a number above 0 and up to 1, also from a percentage.

    Raises:
        BadArgumentType: The value is not a number.
        BadArgument: The number is not in the range.

    >>> parse_fraction(0.25), parse_fraction("1%"), parse_fraction("0.5")
    (0.25, 0.01, 0.5)
    """
    if isinstance(value, str):
        fraction = _parse_percentage(value.strip())
    else:
        fraction = to_float(value)
    if fraction is None:
        raise BadArgumentType(
            f"{name} takes a fraction (0.01 or '1%'), not {describe_value(value)}", found=value
        )
    if not 0 < fraction <= 1:
        raise BadArgument(
            f"{name} takes a fraction above 0 and up to 1 (or '100%'), not {describe_value(value)}",
            found=value,
        )
    return fraction


def parse_seconds(value: object, name: str = "a duration") -> float:
    """Return a duration in seconds, from a number of seconds, a text with a unit or a `timedelta`.

    Raises:
        BadArgumentType: The value is not a duration.
        BadArgument: The duration is not positive.

    >>> parse_seconds(60), parse_seconds("5 min"), parse_seconds(timedelta(seconds=2))
    (60.0, 300.0, 2.0)
    """
    if isinstance(value, timedelta):
        seconds: float | None = value.total_seconds()
    elif isinstance(value, str):
        seconds = _parse_amount(value, SECONDS_OF_UNITS)
    else:
        seconds = to_float(value)
    if seconds is None:
        raise BadArgumentType(
            f"{name} takes seconds (60, '90s' or '5min'), not {describe_value(value)}", found=value
        )
    if not seconds > 0:
        raise BadArgument(
            f"{name} takes a time above zero, not {describe_value(value)}", found=value
        )
    return seconds


def to_float(value: object) -> float | None:
    """Return a number of any type as a float. None for anything else, and for True and False."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat | SupportsIndex):
        return None
    # A tensor with several elements has `__float__`, but raises an error that depends on its
    # library.
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        return float(value)
    return None


def _to_int(value: object) -> int | None:
    """Return an integer of any type, or a float without a fraction, as an int. None otherwise."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, SupportsIndex):
        # numpy arrays have `__index__`, but raise an error if they have several elements.
        with suppress(TypeError, ValueError):
            return operator.index(value)
        return None
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return None


def _parse_percentage(text: str) -> float | None:
    """Return the number in a text such as `0.01` or `1%`, or None if it is something else."""
    # `float` accepts the digits of all scripts. Other options accept only those of ASCII.
    if not text.isascii():
        return None
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        return None
    if text.endswith("%"):
        return number / 100
    return number


def _parse_amount(
    text: str,
    units: dict[str, float] | dict[str, int],
    *,
    optional_suffix: str = "",
) -> float | None:
    """Return the number in a text times its unit, or None if the text is something else.

    Args:
        text: A number, and maybe a unit in lower or upper case.
        units: How much each unit is.
        optional_suffix: What may follow a unit without a meaning, as in `GB` for `G`.
    """
    match = NUMBER_AND_UNIT.fullmatch(text.lower())
    if match is None:
        return None
    unit = match[2].removesuffix(optional_suffix)
    if unit not in units:
        return None
    digits = match[1].replace(",", "").replace("_", "")
    try:
        amount = float(digits) * units[unit]
    except ValueError:
        return None
    if not math.isfinite(amount):
        return None
    return amount
