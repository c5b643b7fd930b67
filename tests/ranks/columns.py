"""States of ranks from rows, and plans as rows: the code under test has columns alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.errors import MetadataError
from holdfast.ranks.plan import RankPlan
from holdfast.ranks.state import Catalogue, RankState


def rank_state(
    tensors: Iterable[tuple[str, str, Sequence[int], Sequence[Box]]],
    *,
    values: Mapping[str, bytes] | None = None,
    aliases: Iterable[tuple[str, str]] = (),
) -> RankState:
    """From the name, dtype, shape and boxes of each tensor.

    >>> state = rank_state([("w", "float32", (8, 4), [Box((0, 0), (2, 4))]), ("b", "float32", (4,), [Box((0,), (4,))])])
    >>> state.tensors.tolist(), state.offsets.tolist(), state.sizes.tolist()
    ([0, 1], [[0, 0], [0, 0]], [[2, 4], [4, 1]])
    """
    rows = [(name, dtype, tuple(shape), list(boxes)) for name, dtype, shape, boxes in tensors]
    catalogue = Catalogue(
        tuple(r[0] for r in rows), tuple(r[1] for r in rows), tuple(r[2] for r in rows)
    )
    owners = np.arange(len(rows), dtype=np.int64).repeat([len(r[3]) for r in rows])
    offsets = np.zeros((catalogue.rank, len(owners)), np.int64)
    sizes = np.ones((catalogue.rank, len(owners)), np.int64)
    for i, (name, box) in enumerate((r[0], box) for r in rows for box in r[3]):
        if box.rank != len(catalogue.shapes[int(owners[i])]):
            raise MetadataError(
                f"a box of rank {box.rank} is no part of {catalogue.shapes[int(owners[i])]}",
                tensor=name,
            )
        offsets[: box.rank, i] = box.start
        sizes[: box.rank, i] = box.shape
    return RankState(catalogue, owners, offsets, sizes, dict(values or {}), tuple(aliases))


def loads_of(plan: RankPlan) -> Ints:
    """Bytes of tensors that each rank writes."""
    return np.array([writes.nbytes for writes in plan.writes], np.int64)


def boxes_of(plan: RankPlan, rank: int) -> list[tuple[str, Box]]:
    """The name and box of everything that one rank writes, in order."""
    writes, catalogue = plan.writes[rank], plan.catalogue
    named = []
    for i, t in enumerate(writes.tensors.tolist()):
        dims = len(catalogue.shapes[t])
        named.append(
            (
                catalogue.names[t],
                Box.from_offsets(
                    writes.offsets[:dims, i].tolist(), writes.sizes[:dims, i].tolist()
                ),
            )
        )
    return named
