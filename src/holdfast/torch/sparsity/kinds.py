"""The sparsifiers, each with its own rule of what is kept.

    WeightNormSparsifier                       the blocks of a weight with the lowest norm go, whole or in part
    MagnitudeSparsifier, RandomSparsifier      single elements, of any module
    NearlyDiagonalSparsifier                   keeps a band around the diagonal, whatever the values
    BaseStructuredSparsifier, SaliencyPruner   whole rows or channels; those of the lowest norm

For rows or channels the mask has one boolean for each index of an axis of the weight. A row that is pruned gives nothing, so the
same
mask is put on the bias of the module; torch 2.13 takes the bias off the module and adds it in a hook, and does not put it back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from holdfast.core.arrays import matrix_shape
from holdfast.errors import Unsupported
from holdfast.torch.sparsity import masks
from holdfast.torch.sparsity.fake import (
    FakeSparsity,
    FakeStructuredSparsity,
    Weight,
    fake_of,
    parametrized_names,
    put_mask,
    take_mask_off,
    whole_of,
)
from holdfast.torch.sparsity.masks import Norm, checked_level
from holdfast.torch.sparsity.sparsifier import BaseSparsifier, Group


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
        checked_level(sparsity_level)
        *shape, zeros = masks.read_block(sparse_block_shape, zeros_per_block)
        super().__init__(
            {
                "sparsity_level": sparsity_level,
                "sparse_block_shape": tuple(shape),
                "zeros_per_block": zeros,
            }
        )

    @property
    def norm_fn(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The norm, as a function of a weight."""
        if callable(self.norm):
            return self.norm
        return torch.abs if self.norm == 1 else torch.square

    def check_config(self, weight: Weight, config: Group) -> None:
        checked_level(config["sparsity_level"])
        masks.read_block(config["sparse_block_shape"], config["zeros_per_block"])

    def update_mask(  # type: ignore[override]  # torch's signature: the settings by name
        self,
        module: nn.Module,
        tensor_name: str,
        sparsity_level: float,
        sparse_block_shape: Sequence[int],
        zeros_per_block: int | None,
        **kwargs: object,
    ) -> None:
        weight, mask = whole_of(module, tensor_name), _mask(module, tensor_name)
        kept = masks.block_mask(
            weight,
            sparse_block_shape,
            sparsity_level,
            zeros_per_block=zeros_per_block,
            norm=self.norm,
            pruned=(mask == 0).view(weight.shape),
        )
        mask.copy_(kept)


Scope = Literal["tensor", "global"]


class _Elements(BaseSparsifier):
    """A sparsifier of single elements: a level, and every weight of every module when no config is given."""

    def check_config(self, weight: Weight, config: Group) -> None:
        checked_level(config["sparsity_level"])

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
            if (
                SUPPORTED_MODULES
                and parametrize.type_before_parametrizations(module) not in SUPPORTED_MODULES
            ):
                continue
            names = [
                name
                for name, found in module._parameters.items()
                if found is not None and found.dim() > 1
            ]
            names += [
                name for name in parametrized_names(module) if fake_of(module, name) is not None
            ]
            config += [
                {"tensor_fqn": f"{prefix}.{name}" if prefix else name}
                for name in names
                if "weight" in name
            ]
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
        levels = {
            group["tensor_fqn"]: checked_level(group["sparsity_level"]) for group in self.groups
        }
        if len(set(levels.values())) > 1:
            least, most = min(levels, key=levels.__getitem__), max(levels, key=levels.__getitem__)
            raise ValueError(
                "a global threshold has one sparsity level, and the config has several: "
                f"{levels[least]:g} for {least!r}, {levels[most]:g} for {most!r}"
            )
        return self._prune(
            [(group["module"], group["tensor_name"]) for group in self.groups],
            next(iter(levels.values()), 0.0),
        )

    def update_mask(  # type: ignore[override]  # torch's signature: the settings by name
        self, module: nn.Module, tensor_name: str, sparsity_level: float, **kwargs: object
    ) -> None:
        self._prune([(module, tensor_name)], sparsity_level)

    @staticmethod
    def _prune(places: list[tuple[nn.Module, str]], level: float) -> None:
        old = [_mask(*place) for place in places]
        kept = masks.global_masks(
            [whole_of(*place) for place in places], level, pruned=[mask == 0 for mask in old]
        )
        for mask, keep in zip(old, kept, strict=True):
            mask.copy_(keep)


class RandomSparsifier(_Elements):
    """Prunes the part `sparsity_level` of each tensor at random, the same elements for the same seed and tensor name.

    The order in which elements go does not change between steps, so that a rising level adds to what is pruned. It does not depend
    on the device, on the other tensors or on the rank. A generator is asked for a seed once.
    """

    def __init__(
        self,
        sparsity_level: float = 0.5,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if seed is not None and generator is not None:
            raise ValueError("give a seed or a generator, not both")
        checked_level(sparsity_level)
        super().__init__(
            {
                "sparsity_level": sparsity_level,
                "seed": masks.drawn_seed(generator if seed is None else seed),
            }
        )

    def update_mask(  # type: ignore[override]  # torch's signature: the settings by name
        self,
        module: nn.Module,
        tensor_name: str,
        sparsity_level: float,
        seed: int,
        tensor_fqn: str,
        **kwargs: object,
    ) -> None:
        mask = _mask(module, tensor_name)
        digest = hashlib.sha256(f"{seed}:{tensor_fqn}".encode()).digest()
        own = int.from_bytes(digest[:8], "little")
        mask.copy_(
            masks.random_mask(whole_of(module, tensor_name), sparsity_level, own, pruned=mask == 0)
        )


def _mask(module: nn.Module, tensor_name: str) -> torch.Tensor:
    fake = fake_of(module, tensor_name)
    assert fake is not None
    return fake.mask


class NearlyDiagonalSparsifier(BaseSparsifier):
    """Keeps the elements at most `nearliness // 2` off the diagonal: 1 is the diagonal alone, 3 its neighbours too.

    `nearliness` is odd, and below twice the shorter side of the weight; at zero and below nothing is kept. A weight of more than
    two dimensions is seen as a matrix, its first axis and all others as one.
    """

    def __init__(self, nearliness: int = 1) -> None:
        super().__init__({"nearliness": nearliness})

    def update_mask(  # type: ignore[override]  # torch's signature: the settings by name
        self, module: nn.Module, tensor_name: str, nearliness: int, **kwargs: object
    ) -> None:
        mask = _mask(module, tensor_name)
        rows, columns = matrix_shape(mask.shape)
        # Checked here and not in `prepare`: torch raises at the first step.
        if nearliness > 0 and nearliness % 2 == 0:
            raise ValueError(
                f"nearliness is an odd number, the same on both sides of the diagonal; found {nearliness}"
            )
        if nearliness // 2 >= min(rows, columns):
            raise ValueError(
                f"nearliness {nearliness} is too large for a weight of {rows} x {columns}"
            )
        off = (
            torch.arange(rows, device=mask.device)[:, None]
            - torch.arange(columns, device=mask.device)
        ).abs()
        kept = off <= nearliness // 2 if nearliness > 0 else torch.zeros_like(off, dtype=torch.bool)
        mask.copy_(kept.view(mask.shape))


MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose bias has one element for each row of the weight."""


class BaseStructuredSparsifier(BaseSparsifier):
    """A sparsifier whose masks are of slices along an axis, the setting `dim`: 0, rows or output channels, unless given.

    For rows the bias is masked as well, unless the setting `prune_bias` is False.
    """

    FAKE = FakeStructuredSparsity

    def __init__(self, defaults: Mapping[str, object] | None = None, patterns: None = None) -> None:
        if patterns is not None:
            raise Unsupported(
                "patterns are for rewriting the sizes of modules, which is not done here"
            )
        super().__init__(defaults)

    def make_config_from_model(
        self,
        model: nn.Module,
        SUPPORTED_MODULES: Collection[type[nn.Module]] | None = MODULES,  # noqa: N803 (torch's name)
    ) -> None:
        """Take the `weight` of every linear module and convolution."""
        super().make_config_from_model(
            model, MODULES if SUPPORTED_MODULES is None else SUPPORTED_MODULES
        )

    def check_config(self, weight: Weight, config: Group) -> None:
        dim, shape = config.get("dim", 0), tuple(weight.tensor.shape)
        if type(dim) is not int or not 0 <= dim < len(shape):
            raise ValueError(f"a weight of shape {shape} has no axis {dim!r}")

    def mask_shape(self, weight: Weight, config: Group) -> tuple[int, ...]:
        return (weight.tensor.shape[config.get("dim", 0)],)

    def _fake_for(self, weight: Weight, group: Group, mask: torch.Tensor) -> FakeSparsity:
        return self._fake_class(weight, group)(mask, group.get("dim", 0))  # type: ignore[call-arg]  # a FakeStructuredSparsity

    def fresh_mask(self, weight: Weight, config: Group) -> torch.Tensor:
        return torch.ones(
            self.mask_shape(weight, config), dtype=torch.bool, device=weight.tensor.device
        )

    def _put(self, group: Group, fake: FakeSparsity) -> None:
        super()._put(group, fake)
        module = group["module"]
        is_rows = isinstance(module, MODULES) and group["tensor_name"] == "weight"
        if (
            is_rows
            and group.get("dim", 0) == 0
            and group.get("prune_bias", True)
            and module._parameters.get("bias") is not None
        ):
            put_mask(module, "bias", fake)

    def _take_off(self, group: Group, *, apply: bool) -> None:
        module = group["module"]
        fake = fake_of(module, group["tensor_name"])
        if fake is not None and fake_of(module, "bias") is fake and group["tensor_name"] != "bias":
            take_mask_off(module, "bias", apply=apply)
        take_mask_off(module, group["tensor_name"], apply=apply)

    def prune(self) -> None:
        """Always raises `Unsupported`: `squash_mask` leaves rows of zeros, and a model of the same sizes."""
        raise Unsupported(
            "the sizes of modules are not rewritten; squash_mask() sets the pruned rows to zero"
        )


class SaliencyPruner(BaseStructuredSparsifier):
    """Prunes the part `sparsity_level` of the rows, rounded down, that have the lowest sum of absolute values."""

    def check_config(self, weight: Weight, config: Group) -> None:
        super().check_config(weight, config)
        if "sparsity_level" not in config:
            raise ValueError(
                "there is no sparsity_level, neither in the defaults nor in the config"
            )
        checked_level(config["sparsity_level"])

    def update_mask(  # type: ignore[override]  # torch's signature: the settings by name
        self, module: nn.Module, tensor_name: str, sparsity_level: float, **kwargs: object
    ) -> None:
        fake = fake_of(module, tensor_name)
        assert isinstance(fake, FakeStructuredSparsity)
        rows = whole_of(module, tensor_name).movedim(fake.dim, 0).reshape(len(fake.mask), -1)
        sums = rows.to(torch.float64).abs().sum(1)
        keys = [masks.Keys(masks.score_keys(sums), ~fake.mask)]
        fake.mask.copy_(
            masks.keep_above(
                keys, masks.select(keys, int(checked_level(sparsity_level) * len(sums)))
            )[0]
        )
