"""`HoldfastLoader`: vLLM serves a training step as it lies.

    vllm serve base/ --load-format holdfast --model-loader-extra-config '{"path": "step-1000", "prefix": "model."}'

`base/` has the config and the tokenizer, the step has the weights. `register` is an entry point of the group
`vllm.general_plugins`, so `--load-format holdfast` is there wherever both packages are installed.

The weights come as the model's own `load_weights` wants them, by the names that the step has behind `prefix`. All else (quantising,
experts of other ranks, the check that every parameter was loaded) is vLLM's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from holdfast.integrations.weights import Options, secondary_weights

NAME = "holdfast"


class HoldfastLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Loads the weights of a model from a checkpoint of any format. `weights` says what `model_loader_extra_config` may hold."""

    def __init__(self, load_config: LoadConfig) -> None:
        self._options = Options(load_config.model_loader_extra_config)
        super().__init__(replace(load_config, model_loader_extra_config=self._options.rest))

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is downloaded; a checkpoint that is not there is an error here."""
        self._options.path(model_config.model)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, read ahead and compared with their checksums. Experts that other ranks have are not read."""
        self.counter_before_loading_weights = time.perf_counter()
        yield from self._options.weights(
            model_config.model, skip=lambda name: should_skip_weight(name, self.local_expert_ids)
        )
        yield from secondary_weights(model)


def register() -> None:
    """Tell vLLM of the loader. vLLM calls it, in each of its processes."""
    register_model_loader(NAME)(HoldfastLoader)
