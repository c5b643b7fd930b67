"""`weights_only=False`: the unpickler of the caller's pickle module, with torch's persistent ids. It runs what the file says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import BinaryIO, Protocol, cast

import torch

from holdfast.core.dtype import DTYPES

__all__ = ["StorageClass", "unpickler"]

MOVED = {"torch.tensor": "torch._tensor"}
"""Modules that were renamed since files mention them."""


class StorageClass:
    """Stands for `torch.FloatStorage` and its like while a file is read: a dtype, and no class that warns."""

    def __init__(self, name: str) -> None:
        row = DTYPES.storage(name)
        if row is None or row.torch is None:
            raise KeyError(name)
        self.name = name
        self.dtype: torch.dtype = getattr(torch, row.torch)

    def __str__(self) -> str:
        return f"StorageType(dtype={self.dtype})"


class _Unpickler(Protocol):
    def load(self) -> object: ...


def unpickler(
    pickle_module: ModuleType, file: BinaryIO, persistent: Callable[[object], object], arguments: Mapping[str, object]
) -> _Unpickler:
    """An unpickler at the position of `file`, which gives persistent ids to `persistent`."""
    made = _unpickler_class(pickle_module)(file, **arguments)
    made.ids = persistent
    return made


@cache
def _unpickler_class(pickle_module: ModuleType) -> Callable[..., _UnpicklerWithIds]:
    stock = pickle_module.Unpickler

    def find_class(self: object, module: str, name: str) -> object:
        if type(name) is str and "Storage" in name:
            try:
                return StorageClass(name)
            except KeyError:
                pass
        return stock.find_class(self, MOVED.get(module, module), name)

    def persistent_load(self: _UnpicklerWithIds, pid: object) -> object:
        return self.ids(pid)

    made = type("TorchUnpickler", (stock,), {"find_class": find_class, "persistent_load": persistent_load})
    return cast("Callable[..., _UnpicklerWithIds]", made)


class _UnpicklerWithIds(Protocol):
    ids: Callable[[object], object]

    def load(self) -> object: ...
