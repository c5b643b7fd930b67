"""The part of a tensor that a rank has, by its place in a mesh and the placements of a DTensor.

A mesh is a block of ranks. Along each of its dimensions a tensor is cut, or every rank has the same:

    Shard(dim)                   pieces of ⌈n / ranks⌉, as `torch.chunk` cuts: the last ones may be short or empty
    _StridedShard(dim, split)    first `split` pieces, each of which is cut over the ranks: a rank has its piece of each, one behind
                                 the other. With a Shard behind it this is FSDP over tensor parallelism, for which the tensor was
                                 cut first.
    Replicate                    all of it

Placements are followed in the order of the mesh's dimensions, or in the order that a spec names (`shard_order`, from torch 2.10).
What a rank has of one dimension are runs of indices, in the order of its local tensor; a product of runs is a box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from holdfast.core.box import Box
from holdfast.core.value import Value
from holdfast.errors import LimitExceeded, MetadataError

MOST_RUNS = 1024
"""Runs that one rank has of one tensor. FSDP over tensor parallelism makes one, or a few where lengths are uneven."""

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a block, in C order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    places: dict[int, int] = field(init=False, repr=False, compare=False)
    """Positions by rank, for `coordinate`, which every tensor of every rank calls."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {rank: at for at, rank in enumerate(self.ranks)})
        if (
            not self.ranks
            or math.prod(self.shape) != len(self.ranks)
            or len(self.places) != len(self.ranks)
        ):
            raise MetadataError(
                "a mesh of ranks that has not each of them once", found=self.shape[:8]
            )

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        at = self.places.get(rank)
        if at is None:
            return None
        found = []
        for n in reversed(self.shape):
            at, here = divmod(at, n)
            found.append(here)
        return tuple(reversed(found))


class Cut(Value):
    """A dimension of a tensor that is cut along the dimension `axis` of the mesh."""

    dim: int
    axis: int
    split: int = 1
    """The number of pieces, each of which is cut over the ranks."""


@lru_cache
def local_boxes(shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[
    tuple[Box, Box], ...
]:  # fmt: skip
    """The part of the rank at a place of a mesh: boxes of the whole, each with its box of the local tensor.

    The cuts are made in their order. A rank without elements has one empty box.

    >>> [(whole.slices, own.slices) for whole, own in local_boxes((10,), (4,), (3,), (Cut(0, 0),))]
    [((slice(9, 10, None),), (slice(0, 1, None),))]
    """
    runs: list[list[Run]] = [[(0, n)] for n in shape]
    for cut in cuts:
        runs[cut.dim] = _cut(runs[cut.dim], mesh[cut.axis], at[cut.axis], split=cut.split)
    count = math.prod(max(1, len(found)) for found in runs)
    if count > MOST_RUNS:
        raise LimitExceeded(
            f"a rank has {count:,} pieces of one tensor, and {MOST_RUNS:,} are allowed", found=count
        )
    return tuple(_boxes(runs))


def _boxes(runs: Sequence[Sequence[Run]]) -> Iterator[tuple[Box, Box]]:
    sides: list[list[tuple[Run, Run]]] = []
    for found in runs:
        at, side = 0, []
        for start, stop in found or [(0, 0)]:
            side.append(((start, stop), (at, at + stop - start)))
            at += stop - start
        sides.append(side)
    for chosen in product(*sides):
        whole, own = [pair[0] for pair in chosen], [pair[1] for pair in chosen]
        yield (
            Box(tuple(a for a, _ in whole), tuple(b for _, b in whole)),
            Box(tuple(a for a, _ in own), tuple(b for _, b in own)),
        )


def _cut(runs: Sequence[Run], ranks: int, rank: int, *, split: int) -> list[Run]:
    length = sum(stop - start for start, stop in runs)
    size = -(-length // split) if length else 0
    pieces = -(-length // size) if size else 0
    if pieces > MOST_RUNS:
        raise LimitExceeded(
            f"a dimension is cut into {pieces:,} pieces first, and {MOST_RUNS:,} are allowed",
            found=pieces,
        )
    taken: list[Run] = []
    for piece in range(pieces):
        begin, end = piece * size, min((piece + 1) * size, length)
        each = -(-(end - begin) // ranks)
        first, last = min(begin + each * rank, end), min(begin + each * (rank + 1), end)
        for run in _between(runs, first, last):
            if taken and taken[-1][1] == run[0]:
                taken[-1] = (taken[-1][0], run[1])
            else:
                taken.append(run)
    return taken


def _between(runs: Sequence[Run], first: int, last: int) -> Iterator[Run]:
    at = 0
    for start, stop in runs:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            yield start + low, start + high
        at += stop - start
