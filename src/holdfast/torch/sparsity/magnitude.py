"""`MagnitudeSparsifier` and `RandomSparsifier`: single elements, of any module."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from holdfast.torch.sparsity.fake import fake_of, whole_of
from holdfast.torch.sparsity.masks import checked_level, drawn_seed, global_masks, random_mask
from holdfast.torch.sparsity.names import Weight
from holdfast.torch.sparsity.sparsifier import BaseSparsifier
from holdfast.torch.sparsity.state import Group

__all__ = ["MagnitudeSparsifier", "RandomSparsifier"]

Scope = Literal["tensor", "global"]


class _Elements(BaseSparsifier):
    """What both have in common: a level, and every weight of every module when no config is given."""

    def check_config(self, weight: Weight, config: Group) -> None:
        try:
            checked_level(config["sparsity_level"])
        except ValueError as error:
            raise ValueError(f"{weight.fqn!r}: {error}") from None

    def make_config_from_model(
        self,
        model: nn.Module,
        SUPPORTED_MODULES: Collection[type[nn.Module]] = (),  # noqa: N803 (torch's name)
    ) -> None:
        """Take each parameter of two dimensions or more that is called a weight: of these classes, or of all when none is given.

        Linear, convolutions, embeddings, attention and recurrent modules have such; norms and biases do not. A module that is
        parametrized by something else is left out.
        """
        config = []
        for prefix, module in model.named_modules():
            if isinstance(module, parametrize.ParametrizationList):
                continue
            if SUPPORTED_MODULES and parametrize.type_before_parametrizations(module) not in SUPPORTED_MODULES:
                continue
            names = [name for name, found in module._parameters.items() if found is not None and found.dim() > 1]
            if parametrize.is_parametrized(module):
                assert isinstance(module.parametrizations, nn.ModuleDict)
                names += [name for name in module.parametrizations if fake_of(module, name) is not None]
            config += [{"tensor_fqn": f"{prefix}.{name}" if prefix else name} for name in names if "weight" in name]
        self.config = config


class MagnitudeSparsifier(_Elements):
    """Prunes the part `sparsity_level` of the elements with the smallest absolute values.

    With `scope="tensor"` of each tensor; with `scope="global"` of all tensors together, so that some lose more than others and the
    level has to be the same for all. What is pruned stays pruned, unless the level falls.
    """

    def __init__(self, sparsity_level: float = 0.5, *, scope: Scope = "tensor") -> None:
        if scope not in ("tensor", "global"):
            raise ValueError(f"the scope is 'tensor' or 'global'; found {scope!r}")
        checked_level(sparsity_level)
        self.scope: Scope = scope
        super().__init__({"sparsity_level": sparsity_level})

    def _update(self) -> None:
        if self.scope == "tensor":
            return super()._update()
        levels = {group["tensor_fqn"]: checked_level(group["sparsity_level"]) for group in self.groups}
        if len(set(levels.values())) > 1:
            least, most = min(levels, key=levels.__getitem__), max(levels, key=levels.__getitem__)
            raise ValueError(
                "a global threshold has one sparsity level, and the config has several: "
                f"{levels[least]:g} for {least!r}, {levels[most]:g} for {most!r}"
            )
        return self._prune([(group["module"], group["tensor_name"]) for group in self.groups], next(iter(levels.values()), 0.0))

    def update_mask(  # type: ignore[override]  # torch's signature: the settings by name
        self, module: nn.Module, tensor_name: str, sparsity_level: float, **kwargs: object
    ) -> None:
        self._prune([(module, tensor_name)], sparsity_level)

    @staticmethod
    def _prune(places: list[tuple[nn.Module, str]], level: float) -> None:
        masks = [_mask(*place) for place in places]
        kept = global_masks([whole_of(*place) for place in places], level, pruned=[mask == 0 for mask in masks])
        for mask, keep in zip(masks, kept, strict=True):
            mask.copy_(keep)


class RandomSparsifier(_Elements):
    """Prunes the part `sparsity_level` of each tensor at random, the same elements for the same seed and tensor name.

    The order in which elements go does not change between steps, so that a rising level adds to what is pruned. It does not depend
    on the device, on the other tensors or on the rank. A generator is asked for a seed once.
    """

    def __init__(self, sparsity_level: float = 0.5, *, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        if seed is not None and generator is not None:
            raise ValueError("give a seed or a generator, not both")
        checked_level(sparsity_level)
        super().__init__({"sparsity_level": sparsity_level, "seed": drawn_seed(generator if seed is None else seed)})

    def update_mask(  # type: ignore[override]  # torch's signature: the settings by name
        self, module: nn.Module, tensor_name: str, sparsity_level: float, seed: int, tensor_fqn: str, **kwargs: object
    ) -> None:
        mask = _mask(module, tensor_name)
        digest = hashlib.sha256(f"{seed}:{tensor_fqn}".encode()).digest()
        own = int.from_bytes(digest[:8], "little")
        mask.copy_(random_mask(whole_of(module, tensor_name), sparsity_level, own, pruned=mask == 0))


def _mask(module: nn.Module, tensor_name: str) -> torch.Tensor:
    fake = fake_of(module, tensor_name)
    assert fake is not None
    return fake.mask
