"""Sparsity: masks on the weights of a model while it is trained.

    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(model, config=[{"tensor_fqn": "mlp.up.weight"}])
    …                                             train; sparsifier.step() when masks are to change
    sparsifier.squash_mask()

The names of `torch.ao.pruning` are here, and its users change one import; `docs/sparsity.md` lists the differences. Masks without
modules, as pure functions of tensors, are in `masks`.
"""

from __future__ import annotations

from holdfast.numeric.threshold import Threshold
from holdfast.torch.sparsity.fake import (
    FakeSparsity,
    FakeStructuredSparsity,
    fqn_to_module,
    get_arg_info_from_tensor_fqn,
    get_dynamic_sparse_quantized_mapping,
    get_static_sparse_quantized_mapping,
    module_contains_param,
    module_to_fqn,
    swap_module,
)
from holdfast.torch.sparsity.kinds import (
    BaseStructuredSparsifier,
    MagnitudeSparsifier,
    NearlyDiagonalSparsifier,
    RandomSparsifier,
    SaliencyPruner,
    WeightNormSparsifier,
)
from holdfast.torch.sparsity.masks import (
    block_mask,
    global_masks,
    global_threshold,
    magnitude_mask,
    nm_mask,
    random_mask,
)
from holdfast.torch.sparsity.schedule import BaseScheduler, CubicSL, LambdaSL, LinearSL
from holdfast.torch.sparsity.semi_structured import (
    from_semi_structured,
    is_two_of_four,
    to_semi_structured,
)
from holdfast.torch.sparsity.sparsifier import BaseSparsifier, pack_mask, unpack_mask

__all__ = [
    "BaseScheduler", "BaseSparsifier", "BaseStructuredSparsifier", "CubicSL", "FakeSparsity", "FakeStructuredSparsity", "LambdaSL",
    "LinearSL", "MagnitudeSparsifier", "NearlyDiagonalSparsifier", "RandomSparsifier", "SaliencyPruner", "Threshold",
    "WeightNormSparsifier", "block_mask", "fqn_to_module", "from_semi_structured", "get_arg_info_from_tensor_fqn",
    "get_dynamic_sparse_quantized_mapping", "get_static_sparse_quantized_mapping", "global_masks", "global_threshold",
    "is_two_of_four", "magnitude_mask", "module_contains_param", "module_to_fqn", "nm_mask", "pack_mask", "random_mask",
    "swap_module", "to_semi_structured", "unpack_mask",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
