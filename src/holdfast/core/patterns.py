"""Globs on dotted names: which names are meant, and what they become.

In a glob, `*` stands for anything, dots included. A rename is a pair of globs with as many stars on both sides (`model.*` → `*`):
each star of the new name stands for what that star of the old one matched. Of several renames the first that matches decides.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

__all__ = ["Renames", "glob", "matcher", "rename_problems", "renamer", "unmatched"]

Renames = Sequence[tuple[str, str]]


def glob(pattern: str) -> re.Pattern[str]:
    """A glob in which only the star has a meaning; each is a group.

    >>> glob("model.*.weight").fullmatch("model.a.b.weight").groups()
    ('a.b',)
    """
    return re.compile("(.*)".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a name passes a filter: a glob with `*`, `?` and `[…]`, or a name that stands for everything below it as well."""
    if not any(c in pattern for c in "*?["):
        return lambda name: name == pattern or name.startswith(f"{pattern}.")
    match = re.compile(fnmatch.translate(pattern)).match
    return lambda name: match(name) is not None


def renamer(renames: Renames) -> Callable[[str], str]:
    """What becomes of a name.

    >>> renamer([("model.*", "*"), ("*.w", "*.weight")])("model.a.w")
    'a.w'
    """
    rules = [(glob(old), new.split("*")) for old, new in renames]

    def rename(name: str) -> str:
        for regex, pieces in rules:
            found = regex.fullmatch(name)
            if found:
                return pieces[0] + "".join(g + p for g, p in zip(found.groups(), pieces[1:], strict=True))
        return name

    return rename


def rename_problems(renames: Renames) -> list[str]:
    """Renames that make no sense, whatever the names."""
    return [
        f"the rename {old!r} → {new!r} needs as many * on both sides" for old, new in renames if old.count("*") != new.count("*")
    ]


def unmatched(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The globs that match none of these names."""
    return [pattern for pattern in patterns if not any(map(glob(pattern).fullmatch, names))]
