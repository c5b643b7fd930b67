"""Natural sorting: names in the order in which people read them, `layers.2` before `layers.10`.

Runs of digits are compared as numbers, but they are never converted to integers: converting takes
quadratic time, and a hostile name may have a million digits. Only what people see is sorted like
this. `Checkpoint` and `--json` keep the order of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

DIGITS = re.compile("([0-9]+)")

MAX_COMPONENTS = 32
"""The components of a name that are sorted one by one. A hostile name may have a million dots, so
all that follow are treated as one component."""

NumberKey = tuple[int, str]
"""The length and the digits of a number without leading zeros. They sort like the number."""

ComponentKey = tuple[int, tuple[NumberKey, ...]]
"""Sorts the components of names below one parent: first by the position at which such a component
first appears, its numbers left out, then by its numbers."""


def _make_number_key(digits: str) -> NumberKey:
    significant_digits = digits.lstrip("0")
    return len(significant_digits), significant_digits


def natural_sort_key(name: str) -> tuple[tuple[str | NumberKey, ...], str]:
    """Return a sort key for names that compares numbers in them by value.

    >>> sorted(["layers.10.w", "layers.2.w", "layers.w", "layers.02.w"], key=natural_sort_key)
    ['layers.02.w', 'layers.2.w', 'layers.10.w', 'layers.w']
    """
    # `split` returns texts and digits in turns, so keys of two names never compare a text with a
    # number.
    texts_and_digits = DIGITS.split(name)
    parts: list[str | NumberKey] = [*texts_and_digits]
    parts[1::2] = map(_make_number_key, texts_and_digits[1::2])

    # The name itself tells numbers apart that differ only in leading zeros.
    return tuple(parts), name


def sort_naturally(items: Iterable[T], get_name: Callable[[T], str] = str) -> list[T]:
    """Sort items by the numbers in their dotted names, and keep the given order otherwise.

    Names are sorted like a tree, by one component after the other (`layers.10.w` has three). Below
    one parent, components that differ only in their numbers are sorted by these. All others stay in
    the order in which they first appear.

    Args:
        items: The items, in the order of a file or a model.
        get_name: Returns the dotted name of an item.

    >>> sort_naturally(["embed", "layers.10.w", "layers.2.w", "layers.2.b", "head"])
    ['embed', 'layers.2.w', 'layers.2.b', 'layers.10.w', 'head']
    """
    # The position of a component in that order, its numbers left out, by the position of its
    # parent. `layers.2` and `layers.10` have the same one.
    positions: dict[tuple[int, tuple[str, ...]], int] = {}
    # Most names share their first components, so their keys are computed only once.
    component_keys: dict[tuple[int, str], ComponentKey] = {}

    def make_key(item: T) -> tuple[ComponentKey, ...]:
        """Return the keys of the components of a name: position below the parent, then numbers."""
        keys = []
        parent_position = -1
        for component in get_name(item).split(".", MAX_COMPONENTS):
            key = component_keys.get((parent_position, component))
            if key is None:
                # `split` returns texts and digits in turns.
                parts = DIGITS.split(component)
                texts = tuple(parts[::2])
                position = positions.setdefault((parent_position, texts), len(positions))
                key = position, tuple(map(_make_number_key, parts[1::2]))
                component_keys[parent_position, component] = key
            keys.append(key)
            parent_position = key[0]
        return tuple(keys)

    return sorted(items, key=make_key)
