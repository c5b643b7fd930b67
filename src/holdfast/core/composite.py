"""`Composite`: one torch tensor that is stored as several plain ones (sparse, quantised, nested)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from holdfast.core.tensor import LazyTensor, Traits

__all__ = ["Composite"]


@dataclass(frozen=True, slots=True, eq=False)
class Composite:
    """A tensor made of plain parts. In a checkpoint's mapping its parts stand under `name.part`."""

    kind: str
    """`sparse_coo`, `sparse_csr`, `sparse_csc`, `sparse_bsr`, `sparse_bsc`, `quantized`, `nested` or `jagged`."""

    shape: tuple[int, ...]
    """The shape of the whole; of a nested tensor only how many tensors are in it."""

    parts: Mapping[str, LazyTensor]
    """Its plain tensors: `indices` and `values`; `int_repr`, `scales`, `zero_points`; `buffer`, `sizes`, `strides`, `offsets`;
    `values`, `offsets`, `lengths`."""

    attributes: Mapping[str, object]
    """Everything else: `coalesced`, `qscheme`, `scale`, `zero_point`, `axis`, `ragged_idx`, `min_seqlen`, `max_seqlen`."""

    traits: Traits

    def children(self) -> Iterator[tuple[str, LazyTensor]]:
        yield from self.parts.items()

    def torch(self) -> torch.Tensor:
        """The whole as a torch tensor of its kind, its indices checked; imports torch."""
        from holdfast.torch.tensors.from_lazy import tensor_from_composite

        return tensor_from_composite(self)

    def __repr__(self) -> str:
        return f"<Composite {self.kind} {list(self.shape)}>"
