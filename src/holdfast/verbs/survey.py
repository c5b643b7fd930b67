"""`survey`: what the tensors of a checkpoint share, and how large they are, in one pass over their columns. Nothing is read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from holdfast.core.checkpoint import Alias, Checkpoint, find_aliases
from holdfast.core.sharing import find_shared_rows
from holdfast.core.table import Table
from holdfast.core.value import Value
from holdfast.numeric.dequantize import number_shape


class Survey(Value, frozen=True):
    tensors: Table
    aliases: tuple[Alias, ...]
    ties: Mapping[str, str]
    """For each name that shares its storage with an earlier one: `= other` (the same elements) or `in other`."""
    nbytes: int
    """Bytes of all storages, each once."""
    elements: Mapping[str, int]
    """Elements of each dtype, or of each type of quantised blocks, by name; what is tied counts once."""


def survey(checkpoint: Checkpoint) -> Survey:
    table = checkpoint.stored
    shared = find_shared_rows([table])
    names, same = table.names, shared.ties()
    ties: dict[str, str] = {}
    for _, rows in shared.groups():
        for row in rows[1:]:
            ties.setdefault(
                names[row], f"= {names[same[row]]}" if row in same else f"in {names[rows[0]]}"
            )
    counts = np.bincount(
        np.asarray(table.kind_indices, np.int64), minlength=len(table.kinds)
    ).tolist()
    labels = [kind.traits.dtype_label(kind.dtype) for kind in table.kinds]
    elements = {labels[number]: 0 for number in dict.fromkeys(table.kind_indices)}
    for row in same:
        counts[table.kind_indices[row]] -= 1
    for kind, label, count in zip(table.kinds, labels, counts, strict=True):
        if count:
            shape = number_shape(kind.shape, kind.traits.blocks)
            elements[label] += count * math.prod(shape)
    return Survey(table, find_aliases(table, shared), ties, shared.total_nbytes(), elements)
