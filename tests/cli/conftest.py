"""Checkpoints made by hand, so that what is shown does not depend on any reader."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.leaves import name_tensors
from holdfast.core.limits import Limits
from holdfast.core.protocols import Description, Foreign
from holdfast.core.tensor import LazyTensor, Traits
from holdfast.core.value import replace
from holdfast.engine.files import ViewTable
from holdfast.engine.source import OpenSource
from holdfast.stores.memory import MemoryStore


class Made:
    """A store that grows: `tensor` appends an array to it and describes it; `checkpoint` opens what was made."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.source = OpenSource(MemoryStore({"data": b""}, name="made.pt"))

    def tensor(self, array: np.ndarray, *, traits: Traits | None = None) -> LazyTensor:
        start = len(self.content)
        self.content += np.ascontiguousarray(array).tobytes()
        dtype = DTYPES.numpy(array.dtype)
        assert dtype is not None
        storage = Storage(
            "data", start, array.nbytes, label=f"data/{start}", home=self.source.store
        )
        tensor = LazyTensor.contiguous("", dtype, array.shape, storage, self.source)
        return tensor if traits is None else replace(tensor, traits=traits)

    def zeros(self, *shape: int, dtype: str = "float32") -> LazyTensor:
        """A tensor that takes no memory here: only its description matters."""
        row = DTYPES.name(dtype)
        assert row is not None
        start = len(self.content)
        self.content += b"\0"
        nbytes = row.nbytes(int(np.prod(shape)))
        return LazyTensor.contiguous(
            "", row, shape, Storage("data", start, nbytes, home=self.source.store), self.source
        )

    def checkpoint(
        self,
        tree: object,
        *,
        foreign: tuple[Foreign, ...] = (),
        notes: tuple[str, ...] = (),
        metadata: dict[str, str] | None = None,
        name: str = "made.pt",
    ) -> Checkpoint:
        self.source.store = MemoryStore({"data": bytes(self.content)}, name=name)
        named = name_tensors(tree, Limits(), 1 << 20)
        return Checkpoint(
            self.source,
            Description(
                "torch-zip",
                ViewTable(named.tensors),
                tree,
                foreign,
                (*notes, *named.notes),
                metadata or {},
            ),
        )


@pytest.fixture
def made() -> Made:
    return Made()
