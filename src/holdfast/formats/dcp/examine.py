"""Look into every item of an open distributed checkpoint: what opening leaves for later, a scan cannot.

A loader that reads a tensor unpickles its item, so the items of tensors are parsed as well, all of them. Elements are not read.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.protocols import Foreign
from holdfast.core.tensor import LazyTensor
from holdfast.formats.dcp.lazy import ItemStorage, Unread

__all__ = ["examine"]


def examine(tree: object, tensors: Iterable[LazyTensor]) -> tuple[Foreign, ...]:
    """The globals that items mention which were not read when the checkpoint was opened. Raises where one cannot be parsed."""
    for tensor in tensors:
        for storage in tensor.storages:
            if isinstance(storage, ItemStorage):
                # An item of a tensor that mentions anything foreign is refused.
                storage.items.find(storage)
    found: list[Foreign] = []
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Unread):
            found += value.foreign()
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return tuple(found)
