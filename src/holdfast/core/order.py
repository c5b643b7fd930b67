"""Names in the order in which people read them: `layers.2` before `layers.10`.

A run of digits counts as a number of any length. No integer is made of it, so a hostile name of a million digits costs what its
characters do. What a program reads (`Checkpoint`, `--json`) stays in the order of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

DIGITS = re.compile("([0-9]+)")

LEVELS = 32  # Parts of a name that are looked at one by one. A hostile one may have a million.
Number = tuple[int, str]


def _number(digits: str) -> Number:
    size = digits.lstrip("0")
    return len(size), size


def natural_sort_key(name: str) -> tuple[tuple[str | Number, ...], str]:
    """What to sort names by.

    >>> sorted(["layers.10.w", "layers.2.w", "layers.w", "layers.02.w"], key=natural)
    ['layers.02.w', 'layers.2.w', 'layers.10.w', 'layers.w']
    """
    parts: list[str | Number] = list(DIGITS.split(name))
    parts[1::2] = [_number(str(digits)) for digits in parts[1::2]]
    return tuple(parts), name


def sort_naturally(things: Iterable[T], name: Callable[[T], str] = str) -> list[T]:
    """Things in the order of their names, which is that of their numbers where nothing else tells them apart, else their own.

    >>> sort_naturally(["embed", "layers.0.w", "layers.0.b", "layers.10.w", "layers.2.w", "layers.2.b", "head"])
    ['embed', 'layers.0.w', 'layers.0.b', 'layers.2.w', 'layers.2.b', 'layers.10.w', 'head']
    """
    # Parts below one another, their numbers left out, are counted in the order in which they are met.
    met: dict[tuple[int, tuple[str, ...]], int] = {}
    known: dict[tuple[int, str], tuple[int, tuple[Number, ...]]] = {}

    def place(thing: T) -> tuple[tuple[int, tuple[Number, ...]], ...]:
        above, found = -1, []
        for part in name(thing).split(".", LEVELS):
            step = known.get((above, part))
            if step is None:
                texts = DIGITS.split(part)
                number = met.setdefault((above, tuple(texts[::2])), len(met))
                step = known[above, part] = number, tuple(map(_number, texts[1::2]))
            found.append(step)
            above = step[0]
        return tuple(found)

    return sorted(things, key=place)
