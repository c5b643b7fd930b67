"""What every rank keeps for itself: the state of a random number generator, the place of a data loader.

    save_sharded(path, {"model": …, "rng": rng}, per_rank=["rng"])         "rng" becomes {"rank-0-of-4": rng} on rank 0, and so on

A key with the rank in it is put between the name and what stands there, tensor, value or nested state. All formats can say that,
and readers of other makers see one entry for each rank. A load finds the key by itself: of a name that is not there, the one of
this rank is taken, where the checkpoint was written by as many ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import is_

from holdfast.core.patterns import make_matcher
from holdfast.core.tree import (
    MAX_LEAVES,
    TOO_OFTEN,
    Path,
    Unrolled,
    find_name_ends,
    get_mapping_children,
    join_path,
    replace_children,
    to_path_key,
    unroll,
)
from holdfast.errors import LimitExceeded

KEY = re.compile(r"rank-(\d{1,9})-of-(\d{1,9})")


def rank_key(rank: int, size: int) -> str:
    """The key of one rank among so many.

    >>> rank_key(3, 8)
    'rank-3-of-8'
    """
    return f"rank-{rank}-of-{size}"


def size_in(key: object) -> int | None:
    """How many ranks a key of this kind is for; None for any other key."""
    found = KEY.fullmatch(key) if isinstance(key, str) else None
    return None if found is None else int(found[2])


def marked(path: Path, key: str) -> Iterator[tuple[str, Path]]:
    """The names and paths under which a rank's own value may stand, the outermost first."""
    name = join_path(path)
    for i, end in enumerate(find_name_ends(path), 1):
        yield f"{name[:end]}.{key}{name[end:]}", (*path[:i], key, *path[i:])


def mark(state: object, patterns: Sequence[str], key: str) -> tuple[object, list[str]]:
    """Put the key above everything whose dotted name matches a pattern. A new state, and the patterns that match something."""
    if not patterns:
        return state, []
    marking = _Marking(patterns, key)
    return unroll(marking.marked(state, "")), [*marking.used]


class _Marking:
    def __init__(self, patterns: Sequence[str], key: str) -> None:
        self._patterns = {pattern: make_matcher(pattern) for pattern in patterns}
        self._key = key
        self._left = MAX_LEAVES
        self._around: set[int] = set()
        self.used: dict[str, None] = {}

    def marked(self, value: object, prefix: str) -> Unrolled[object]:
        """A container in which everything that matches is marked; one that contains itself is left as it is."""
        around = self._around
        if id(value) in around or not (isinstance(value, Mapping) or type(value) in (list, tuple)):
            return value
        around.add(id(value))
        made: list[object] = []
        for key, inner in get_mapping_children(value) or ():
            name = f"{prefix}{to_path_key(key)}"
            hits = [pattern for pattern, means in self._patterns.items() if means(name)]
            self.used.update(dict.fromkeys(hits))
            if hits:
                made.append({self._key: inner})
            else:
                made.append(
                    (yield self.marked(inner, f"{name}."))
                    if isinstance(inner, Mapping | list | tuple)
                    else inner
                )
        around.remove(id(value))
        self._left -= len(made)
        if self._left < 0:
            raise LimitExceeded(TOO_OFTEN, expected=MAX_LEAVES)
        if isinstance(value, Mapping) and not isinstance(value, dict):
            return (
                value
                if all(map(is_, made, value.values()))
                else dict(zip(value, made, strict=True))
            )
        return replace_children(value, made)
