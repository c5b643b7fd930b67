"""The parts of the document behind a page: columns of one length, one entry a tensor, in as few characters as there may be.

    names      front coding: how many characters a name has in common with the one before it, and the rest
    labels     what repeats (dtypes, shapes, files, roles) once, and numbers of it
    numbers    four significant digits; what JSON lacks (NaN, infinities) is null

The text is ASCII: what is not is written as `\\uXXXX`, so names out of hostile files are exact and harmless at once. docs/report.md
has the schema; it only ever grows.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence

from holdfast.core.opaque import AnyValue

SCHEMA = 1
"""The version of the schema, which is raised when a field changes its meaning or goes away."""

Document = dict[str, AnyValue]

LONGEST = 4000
"""Characters of one name. Real ones have 120 at most; a hostile file may have one of a million, on every line of the page."""


def dumps(value: object) -> str:
    """JSON text without blanks, ASCII only, with no tokens that JSON lacks."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def short(name: str) -> str:
    """A name, cut where it is longer than any real one.

    >>> len(short("x" * 1_000_000)), short("layers.0.weight")
    (4001, 'layers.0.weight')
    """
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}…"


def front_coded(names: Iterable[str]) -> dict[str, list[int] | list[str]]:
    """The number of characters that each name shares with the one before it, and the rest. Lengths are in UTF-16 units.

    >>> front_coded(["layers.0.w", "layers.1.w", "norm"])
    {'shared': [0, 7, 0], 'rest': ['layers.0.w', '1.w', 'norm']}
    """
    shared: list[int] = []
    rest: list[str] = []
    before = ""
    for name in names:
        common = next(
            (at for at, (a, b) in enumerate(zip(before, name, strict=False)) if a != b),
            min(len(before), len(name)),
        )
        # Characters beyond 16 bits are two units each in JavaScript.
        shared.append(
            common
            if name.isascii()
            else common + sum(character > "\uffff" for character in name[:common])
        )
        rest.append(name[common:])
        before = name
    return {"shared": shared, "rest": rest}


def labelled(
    values: Iterable[Hashable], known: Sequence[Hashable] = ()
) -> dict[str, list[object] | list[int]]:
    """Each value once, in the order in which they are met, and the number of each; those that are `known` come first.

    >>> labelled(["f32", "bf16", "f32"])
    {'labels': ['f32', 'bf16'], 'at': [0, 1, 0]}
    """
    labels: dict[Hashable, int] = {value: number for number, value in enumerate(known)}
    at = [labels.setdefault(value, len(labels)) for value in values]
    return {
        "labels": [list(label) if isinstance(label, tuple) else label for label in labels],
        "at": at,
    }
