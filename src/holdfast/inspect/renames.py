"""Which tensor went by which name before: pairs of names with equal digests, each name used once.

One name on each side is unambiguous. Where several tensors hold the same (tied weights, biases of zeros), the nearest names go
together: by similarity of their text as long as a budget of comparisons lasts, and by the longest common ending of dotted parts
beyond that, which takes time in proportion to the names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.digest import Digest

__all__ = ["Rename", "match_names"]

COMPARISONS = 20_000
"""Pairs of names that are compared as text, in all: about a second."""

NAME_LIMIT = 160
"""Characters of a name that are compared: its end, which says most."""


@dataclass(frozen=True, slots=True)
class Rename:
    """The same content under two names."""

    a: str
    b: str


def match_names(before: Mapping[str, Digest], after: Mapping[str, Digest]) -> list[Rename]:
    """Pair the names of equal digests; a name that has no counterpart left is in no pair."""
    groups: dict[Digest, tuple[list[str], list[str]]] = {}
    for side, names in enumerate((before, after)):
        for name, digest in names.items():
            groups.setdefault(digest, ([], []))[side].append(name)
    pairs: list[Rename] = []
    budget = COMPARISONS
    for old, new in groups.values():
        cost = len(old) * len(new)
        if cost == 1:
            pairs.append(Rename(old[0], new[0]))
        elif cost <= budget:
            budget -= cost
            pairs += _by_likeness(old, new)
        else:
            pairs += _by_ending(old, new)
    return pairs


def _by_likeness(old: Sequence[str], new: Sequence[str]) -> Iterator[Rename]:
    """The most alike first."""
    scored = []
    for i, b in enumerate(new):
        matcher = difflib.SequenceMatcher(None, "", b[-NAME_LIMIT:], autojunk=False)
        for j, a in enumerate(old):
            matcher.set_seq1(a[-NAME_LIMIT:])
            scored.append((-matcher.ratio(), j, i))
    left, right = set(range(len(old))), set(range(len(new)))
    for _, j, i in sorted(scored):
        if j in left and i in right:
            left.remove(j)
            right.remove(i)
            yield Rename(old[j], new[i])


def _by_ending(old: Sequence[str], new: Sequence[str]) -> Iterator[Rename]:
    """Those first that have the most dotted parts at their ends in common; then the rest, in order."""
    left, right = dict.fromkeys(old), dict.fromkeys(new)
    parts = {name: name.rsplit(".", 16) for name in (*old, *new)}
    for depth in range(max(map(len, parts.values())), 0, -1):
        waiting: dict[tuple[str, ...], list[str]] = {}
        for name in right:
            if len(parts[name]) >= depth:
                waiting.setdefault(tuple(parts[name][-depth:]), []).append(name)
        for name in list(left):
            found = waiting.get(tuple(parts[name][-depth:])) if len(parts[name]) >= depth else None
            if found:
                counterpart = found.pop(0)
                del left[name], right[counterpart]
                yield Rename(name, counterpart)
    for a, b in zip(left, right, strict=False):
        yield Rename(a, b)
