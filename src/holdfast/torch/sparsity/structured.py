"""Whole rows or channels: `BaseStructuredSparsifier`, and `SaliencyPruner`, which prunes those of the lowest norm.

The mask has one boolean for each index of an axis of the weight. A row that is pruned gives nothing, so that the bias of the module
is masked along with it, by the same mask; torch 2.13 takes the bias off the module and adds it in a hook, and does not put it
back. The sizes of modules stay what they are: rewriting a model so that the rows are gone, torch's `prune()`, is not done here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from holdfast.errors import Unsupported
from holdfast.torch.sparsity.fake import FakeStructuredSparsity, fake_of, put_mask, take_mask_off, whole_of
from holdfast.torch.sparsity.masks import checked_level
from holdfast.torch.sparsity.names import Weight
from holdfast.torch.sparsity.order import Keys, keep_above, score_keys, select
from holdfast.torch.sparsity.sparsifier import BaseSparsifier, Placed
from holdfast.torch.sparsity.state import Group

__all__ = ["BaseStructuredSparsifier", "SaliencyPruner"]

MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Those whose bias has an element for each row of the weight, and nothing else."""


class BaseStructuredSparsifier(BaseSparsifier):
    """A sparsifier whose masks are of slices along an axis, the setting `dim`: 0, rows or output channels, unless given.

    For rows the bias is masked as well, unless the setting `prune_bias` is False.
    """

    def __init__(self, defaults: Mapping[str, object] | None = None, patterns: None = None) -> None:
        if patterns is not None:
            raise Unsupported("patterns are for rewriting the sizes of modules, which is not done here")
        super().__init__(defaults)

    def make_config_from_model(
        self,
        model: nn.Module,
        SUPPORTED_MODULES: Collection[type[nn.Module]] | None = MODULES,  # noqa: N803 (torch's name)
    ) -> None:
        """Take the `weight` of every linear module and convolution."""
        super().make_config_from_model(model, MODULES if SUPPORTED_MODULES is None else SUPPORTED_MODULES)

    def check_config(self, weight: Weight, config: Group) -> None:
        dim, shape = config.get("dim", 0), tuple(weight.tensor.shape)
        if type(dim) is not int or not 0 <= dim < len(shape):
            raise ValueError(f"{weight.fqn!r} of shape {shape} has no axis {dim!r}")

    def mask_shape(self, weight: Weight, config: Group) -> tuple[int, ...]:
        return (weight.tensor.shape[config.get("dim", 0)],)

    def fresh_mask(self, weight: Weight, config: Group) -> torch.Tensor:
        return torch.ones(self.mask_shape(weight, config), dtype=torch.bool, device=weight.tensor.device)

    def _put(self, placed: Placed) -> None:
        group = placed.group
        fake = FakeStructuredSparsity(placed.mask, group.get("dim", 0))
        put_mask(group["module"], group["tensor_name"], fake)
        if _masks_bias(group):
            put_mask(group["module"], "bias", fake)

    def _take_off(self, group: Group, *, apply: bool) -> None:
        module = group["module"]
        fake = fake_of(module, group["tensor_name"])
        if fake is not None and fake_of(module, "bias") is fake and group["tensor_name"] != "bias":
            take_mask_off(module, "bias", apply=apply)
        take_mask_off(module, group["tensor_name"], apply=apply)

    def prune(self) -> None:
        """Not done: `squash_mask` leaves rows of zeros, and a model of the same sizes."""
        raise Unsupported("the sizes of modules are not rewritten; squash_mask() sets the pruned rows to zero")


def _masks_bias(group: Group) -> bool:
    """Whether a module's bias goes with the rows of its weight."""
    module = group["module"]
    bias = module._parameters.get("bias")
    rows = isinstance(module, MODULES) and group["tensor_name"] == "weight" and group.get("dim", 0) == 0
    return bool(rows and bias is not None and group.get("prune_bias", True))


class SaliencyPruner(BaseStructuredSparsifier):
    """Prunes the part `sparsity_level` of the rows, rounded down, that have the lowest sum of absolute values."""

    def check_config(self, weight: Weight, config: Group) -> None:
        super().check_config(weight, config)
        if "sparsity_level" not in config:
            raise ValueError(f"there is no sparsity_level for {weight.fqn!r}, neither in the defaults nor in the config")
        try:
            checked_level(config["sparsity_level"])
        except ValueError as error:
            raise ValueError(f"{weight.fqn!r}: {error}") from None

    def update_mask(  # type: ignore[override]  # torch's signature: the settings by name
        self, module: nn.Module, tensor_name: str, sparsity_level: float, **kwargs: object
    ) -> None:
        fake = fake_of(module, tensor_name)
        assert isinstance(fake, FakeStructuredSparsity)
        rows = whole_of(module, tensor_name).movedim(fake.dim, 0).reshape(len(fake.mask), -1)
        sums = rows.to(torch.float64).abs().sum(1)
        keys = [Keys(score_keys(sums), ~fake.mask)]
        fake.mask.copy_(keep_above(keys, select(keys, int(checked_level(sparsity_level) * len(sums))))[0])
