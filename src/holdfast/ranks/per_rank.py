"""What every rank keeps for itself: the state of a random number generator, the place of a data loader.

    save_sharded(path, {"model": …, "rng": rng}, per_rank=["rng"])         "rng" becomes {"rank-0-of-4": rng} on rank 0, and so on

A key with the rank in it is put between the name and what stands there, tensor, value or nested state. All formats can say that,
and readers of other makers see one entry for each rank. A load finds the key by itself: of a name that is not there, the one of
this rank is taken, where the checkpoint was written by as many ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from holdfast.core.patterns import matcher
from holdfast.core.tree import Path, dotted, rebuilt, step

KEY = re.compile(r"rank-(\d{1,9})-of-(\d{1,9})")


def rank_key(rank: int, size: int) -> str:
    """The key of one rank among so many.

    >>> rank_key(3, 8)
    'rank-3-of-8'
    """
    return f"rank-{rank}-of-{size}"


def size_in(key: object) -> int | None:
    """How many ranks a key of this kind speaks of; None for any other key."""
    found = KEY.fullmatch(key) if isinstance(key, str) else None
    return None if found is None else int(found[2])


def marked(path: Path, key: str) -> Iterator[Path]:
    """The paths at which a rank's own may stand, the outermost first."""
    for i in range(1, len(path) + 1):
        yield (*path[:i], key, *path[i:])


def mark(state: object, patterns: Sequence[str], key: str) -> tuple[object, list[str]]:
    """Put the key above everything whose dotted name matches a pattern. The state, and the patterns that found something.

    Containers on the way are copied. What is inside of something that matched is not looked at again.
    """
    if not patterns:
        return state, []
    marking = _Marking(patterns, key)
    return marking.walk(state, ()), list(marking.used)


class _Marking:
    """One walk of `mark`."""

    def __init__(self, patterns: Sequence[str], key: str) -> None:
        self._patterns = {pattern: matcher(pattern) for pattern in patterns}
        self._key = key
        self.used: dict[str, None] = {}

    def walk(self, value: object, path: Path) -> object:
        name = dotted(path)
        hits = [pattern for pattern, means in self._patterns.items() if path and means(name)]
        if hits:
            self.used.update(dict.fromkeys(hits))
            return {self._key: value}
        if len(path) > 64:
            return value  # deeper than a state can be; whoever describes it says so
        if isinstance(value, Mapping):
            inner = {k: self.walk(v, (*path, step(k))) for k, v in value.items()}
            if isinstance(value, dict):
                return rebuilt(value, list(inner.values()))
            return value if all(inner[k] is v for k, v in value.items()) else inner
        if type(value) is list or type(value) is tuple:
            return rebuilt(value, [self.walk(v, (*path, i)) for i, v in enumerate(value)])
        return value
