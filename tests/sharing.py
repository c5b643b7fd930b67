"""Which tensors share memory, found by comparing lazy tensors one by one: the oracle of `core/sharing.py`."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.chunk import Storage
from holdfast.core.sharing import ViewIdentity, identify_view
from holdfast.core.tensor import LazyTensor


def groups(
    tensors: Mapping[str, LazyTensor], *, stored_aliases: bool = False
) -> dict[Storage, list[str]]:
    """The names over each storage that has bytes, storages and names in the order of the tensors."""
    found: dict[Storage, list[str]] = {}
    for name, tensor in tensors.items():
        for storage in tensor.shared_storages if stored_aliases else tensor.storages:
            if storage.nbytes:
                found.setdefault(storage, []).append(name)
    return found


def ties(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Names of a view that has an earlier name, each with the first of its names. What has no bytes is no view."""
    firsts: dict[ViewIdentity, str] = {}
    found = {
        name: firsts.setdefault(identify_view(tensor), name)
        for name, tensor in tensors.items()
        if any(s.nbytes for s in tensor.storages)
    }
    return {name: first for name, first in found.items() if first != name}
