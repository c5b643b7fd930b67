"""Do all ranks have the same elements where they have the same tensor? What they told of each is compared here.

A rank tells one sum for each tensor that it has whole (`torch/ranks/replica_sums`). Sums of one kind are compared; ranks of one
save rarely differ in the kind. Most ranks tell the very same, which is looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.ranks.merge import say_ranks

__all__ = ["differing", "say_different"]


def differing(told: Sequence[bytes]) -> dict[str, list[list[int]]]:
    """The tensors that differ, from what all ranks told: for each, the ranks that have one and the same."""
    alike: dict[bytes, list[int]] = {}
    for rank, sums in enumerate(told):
        if not sums:
            continue  # it was told not to look
        alike.setdefault(sums, []).append(rank)
    found: dict[str, dict[int | bytes, list[int]]] = {}
    for sums, ranks in alike.items():
        for name, (one,) in msgspec.msgpack.decode(sums, type=dict[str, tuple[int | bytes]]).items():
            found.setdefault(name, {}).setdefault(one, []).extend(ranks)
    different: dict[str, list[list[int]]] = {}
    for name, versions in found.items():
        kinds = [type(one) for one in versions]
        if len(kinds) > len(set(kinds)):
            different[name] = list(versions.values())
    return different


def say_different(name: str, versions: Sequence[Sequence[int]]) -> str:
    """One of them in words."""
    return (
        f"{name!r}: its elements differ between {', '.join(map(say_ranks, versions))}; pass per_rank=[{name!r}] to keep one for "
        "each rank, or check_replicas=False to store one of them"
    )
