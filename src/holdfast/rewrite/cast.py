"""Cast the tensors of a state, so that what shares a storage still does.

Where all tensors over one storage are of one dtype, the storage is cast as a row of elements, and each tensor becomes the same
view of the new one: tied weights stay tied, slices stay slices. The same holds for views that a file only remembers
(`Traits.alias`). Where a storage has several dtypes, each tensor is cast by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DType
from holdfast.core.protocols import Source
from holdfast.core.sharing import View, identity
from holdfast.core.tensor import AliasView, LazyTensor
from holdfast.engine.casting import OUTCOMES, cast, count_losses, largest
from holdfast.engine.computed import Computed, Observe

__all__ = ["Cast", "Losses"]

SHOWN = 3
"""Tensors that a note names."""


class Losses:
    """What casts did to elements that they could not keep: counted while they are computed, said when they are done.

    Each element counts once, however often it is read. Elements between those of a view that is read with its gaps count as well.
    """

    def __init__(self) -> None:
        self.elements = 0
        """How many were cast."""
        self.counts: dict[str, dict[str, int]] = {outcome: {} for outcome in OUTCOMES}
        """By outcome and tensor."""
        self._lock = threading.Lock()

    def add(self, name: str, elements: int, lost: Mapping[str, int]) -> None:
        with self._lock:
            self.elements += elements
            for outcome, count in lost.items():
                own = self.counts[outcome]
                own[name] = own.get(name, 0) + count

    def notes(self, dtype: DType) -> tuple[str, ...]:
        """A sentence for each way in which elements were lost."""
        return tuple(self._note(outcome, own, dtype) for outcome, own in self.counts.items() if own)

    def _note(self, outcome: str, own: Mapping[str, int], dtype: DType) -> str:
        most = f"±{largest(dtype):g}"
        said = {
            "saturated": f"beyond {most} became that",
            "infinite": f"beyond {most} became infinite",
            "nan": f"beyond {most} became NaN, for there is no infinity",
            "zero": "too small became zero",
            "smallest": "of zero, or too small, became 2^-127, the smallest number",
            "unsigned": "below zero lost their sign",
        }[outcome]
        worst = sorted(own, key=lambda name: (-own[name], name))
        names = ", ".join(f"{name!r} ({own[name]:,})" for name in worst[:SHOWN])
        more = f" and {len(worst) - SHOWN:,} more tensors" if len(worst) > SHOWN else ""
        total = sum(own.values())
        return f"cast to {dtype}: {total:,} of {self.elements:,} values {said}: {names}{more}"


class Cast:
    """Call it with a tensor to have it cast; integers, booleans and quantised ones come back as they are. Nothing is read."""

    def __init__(self, dtype: DType, tensors: Iterable[LazyTensor], *, losses: Losses | None = None) -> None:
        self._dtype = dtype
        self._losses = losses or Losses()
        self._kinds: dict[Storage, set[DType]] = {}
        self._computed: dict[Source, Computed] = {}
        self._storages: dict[Storage | View, LazyTensor] = {}
        self._made: dict[int, tuple[LazyTensor, LazyTensor]] = {}
        for tensor in tensors:
            for storage in (*tensor.storages, *tensor.shared_storages):
                self._kinds.setdefault(storage, set()).add(tensor.dtype)

    def __call__(self, tensor: LazyTensor) -> LazyTensor:
        if tensor.dtype.kind != "float" or tensor.dtype is self._dtype:
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, self._cast(tensor))
        return self._made[id(tensor)][1]

    def _cast(self, tensor: LazyTensor) -> LazyTensor:
        tensor = replace(tensor, traits=replace(tensor.traits, alias=self._alias(tensor)))
        if tensor.traits.meta:
            return replace(tensor, dtype=self._dtype)
        computed = self._computed.setdefault(tensor.source, Computed())
        if len(tensor.chunks) == 1:
            (chunk,) = tensor.chunks
            moved = self._scaled(tensor.dtype, (chunk.offset, *chunk.strides))
            uniform = len(self._kinds.get(chunk.storage, ())) < 2
            if moved is not None and uniform and chunk.storage.nbytes:
                flat = self._storage(tensor, chunk.storage, computed)
                view = Chunk(chunk.box, flat.chunks[0].storage, moved[0], moved[1:])
                return replace(tensor, dtype=self._dtype, chunks=(view,), source=flat.source)
        return self._once(identity(tensor), tensor, computed)

    def _storage(self, tensor: LazyTensor, storage: Storage, computed: Computed) -> LazyTensor:
        """A whole storage as a row of elements, cast."""
        count = storage.nbytes * 8 // tensor.dtype.bits
        row = Chunk(Box((0,), (count,)), storage, 0, (tensor.dtype.bits,))
        flat = LazyTensor(tensor.name, tensor.dtype, (count,), (row,), tensor.source)
        return self._once(storage, flat, computed)

    def _once(self, key: Storage | View, tensor: LazyTensor, computed: Computed) -> LazyTensor:
        if key not in self._storages:
            self._storages[key] = computed.tensor(tensor, self._dtype, self._compute, observe=self._observer(tensor.name))
        return replace(self._storages[key], name=tensor.name, traits=replace(tensor.traits, conj=False, neg=False))

    def _compute(self, array: np.ndarray) -> np.ndarray:
        return cast(array, self._dtype)

    def _observer(self, name: str) -> Observe:
        def observe(array: np.ndarray, made: np.ndarray) -> None:
            self._losses.add(name, array.size, count_losses(array, made, self._dtype))

        return observe

    def _alias(self, tensor: LazyTensor) -> AliasView | None:
        """Where the tensor lay in a storage of old, had that been cast."""
        view = tensor.traits.alias
        if view is None or any(len(self._kinds.get(storage, ())) > 1 for storage in tensor.shared_storages):
            return None
        moved = self._scaled(tensor.dtype, (view.nbytes * 8, view.offset, *view.strides))
        return None if moved is None else AliasView(view.group, moved[0] // 8, moved[1], moved[2:])

    def _scaled(self, dtype: DType, places: tuple[int, ...]) -> tuple[int, ...] | None:
        """Places counted in bits, for elements of the new width; None where they are no places of elements."""
        if any(place % dtype.bits for place in places[1:]):
            return None
        return tuple(place // dtype.bits * self._dtype.bits for place in places)
