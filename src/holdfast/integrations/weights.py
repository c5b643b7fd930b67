"""What the loaders of vLLM and SGLang have in common: options of ours, and the weights of a training step, one after the other.

path      the checkpoint: a DCP step, a .pt, a native directory; the folder of the model where it is left out
prefix    which of its names are the model's; it is taken off them
mmap      map the file and compare no checksums: for ranks that need a part of every tensor each
verify    compare checksums (default)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from holdfast.core.arguments import check_flag, check_text
from holdfast.errors import BadArgument
from holdfast.stores.paths import local_path
from holdfast.torch.tensors.slices import slices

KNOWN = {"path": check_text, "prefix": check_text, "mmap": check_flag, "verify": check_flag}


class Options:
    """`--model-loader-extra-config`, of which some is ours."""

    def __init__(self, given: object) -> None:
        extra = dict(given) if isinstance(given, Mapping) else {}
        self._own = {
            name: read(extra.pop(name), f"{name!r} of the loader's extra config")
            for name, read in KNOWN.items()
            if name in extra
        }
        self.rest: object = extra if isinstance(given, Mapping) else given
        """The options of the framework itself."""

    def path(self, model: str | os.PathLike[str]) -> str:
        found = local_path(str(self._own.get("path", model)))
        if not os.path.exists(found):
            advice = (
                "name one by --model-loader-extra-config '{\"path\": …}'; nothing is downloaded"
            )
            raise BadArgument(
                f"the loader reads checkpoints on disk, and {found!r} is none: {advice}",
                found=found,
            )
        return found

    def weights(
        self, model: str | os.PathLike[str], *, skip: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, in the order of the checkpoint."""
        options = {name: value for name, value in self._own.items() if name != "path"}
        with slices(self.path(model), **options) as state:  # type: ignore[arg-type]  # of the kinds that `KNOWN` says
            yield from state.stream(skip=skip)


def secondary_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the other checkpoints that a model of a framework names."""
    for source in getattr(model, "secondary_weights", ()):
        for name, tensor in Options({}).weights(source.model_or_path):
            yield source.prefix + name, tensor
