"""`WeightNormSparsifier`: prunes the blocks of a weight with the lowest norm, whole or in part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from holdfast.torch.sparsity.fake import fake_of, whole_of
from holdfast.torch.sparsity.masks import Norm, block_mask, checked_level
from holdfast.torch.sparsity.names import Weight
from holdfast.torch.sparsity.sparsifier import BaseSparsifier
from holdfast.torch.sparsity.state import Group

__all__ = ["WeightNormSparsifier"]


class WeightNormSparsifier(BaseSparsifier):
    """Prunes in the part `sparsity_level` of all blocks the `zeros_per_block` lowest elements.

    Blocks are compared by the mean of their elements' norms: absolute values for 1, squares for 2 or None, or what a function makes
    of the weight. `zeros_per_block` is all of them unless it is given, so

        WeightNormSparsifier(0.9, (16, 16))                             nine of ten blocks of 16 x 16 are zero
        WeightNormSparsifier(1.0, (1, 4), zeros_per_block=2)            2:4

    A weight of more than two dimensions, as of convolutions, is seen as a matrix: its first axis, and all others as one. Blocks at
    the edge may be smaller (`masks.block_mask`). What is pruned stays pruned, unless the level falls.
    """

    def __init__(
        self,
        sparsity_level: float = 0.5,
        sparse_block_shape: Sequence[int] = (1, 4),
        zeros_per_block: int | None = None,
        norm: Norm | None = None,
    ) -> None:
        if norm is not None and not callable(norm) and norm not in (1, 2):
            raise NotImplementedError(f"the norm is 1, 2 or a function; found {norm!r}")
        self.norm: Norm = 2 if norm is None else norm
        _check(sparsity_level, sparse_block_shape, zeros_per_block)
        rows, columns = sparse_block_shape
        zeros = rows * columns if zeros_per_block is None else zeros_per_block
        super().__init__(
            {"sparsity_level": sparsity_level, "sparse_block_shape": tuple(sparse_block_shape), "zeros_per_block": zeros}
        )

    @property
    def norm_fn(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The norm, as a function of a weight."""
        if callable(self.norm):
            return self.norm
        return torch.abs if self.norm == 1 else torch.square

    def check_config(self, weight: Weight, config: Group) -> None:
        try:
            _check(config["sparsity_level"], config["sparse_block_shape"], config["zeros_per_block"])
        except ValueError as error:
            raise ValueError(f"{weight.fqn!r}: {error}") from None

    def update_mask(  # type: ignore[override]  # torch's signature: the settings by name
        self,
        module: nn.Module,
        tensor_name: str,
        sparsity_level: float,
        sparse_block_shape: Sequence[int],
        zeros_per_block: int | None,
        **kwargs: object,
    ) -> None:
        fake = fake_of(module, tensor_name)
        assert fake is not None
        weight = whole_of(module, tensor_name)
        kept = block_mask(
            weight, sparse_block_shape, sparsity_level, zeros_per_block, self.norm, pruned=(fake.mask == 0).view(weight.shape)
        )
        fake.mask.copy_(kept)


def _check(level: float, shape: Sequence[int], zeros: int | None) -> None:
    checked_level(level)
    if not isinstance(shape, tuple | list) or len(shape) != 2 or not all(isinstance(n, int) and n >= 1 for n in shape):
        raise ValueError(f"sparse_block_shape is rows and columns, both at least 1; found {shape!r}")
    size = shape[0] * shape[1]
    if zeros is not None and (not isinstance(zeros, int) or not 0 <= zeros <= size):
        raise ValueError(f"zeros_per_block is at most the {size} elements of a block of {shape[0]} x {shape[1]}; found {zeros}")
