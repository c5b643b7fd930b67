"""`HoldfastLoader`: SGLang serves a training step as it lies. SGLang takes a class as `load_format`.

    LoadConfig(load_format=HoldfastLoader, model_loader_extra_config={"path": "step-1000", "prefix": "model."})

The folder of the model has the config and the tokenizer, the step has the weights. All but where they come from is SGLang's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import nn

from holdfast.integrations.weights import Options, secondary_weights


class HoldfastLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang is not there when types are checked
    """Loads the weights of a model from a checkpoint of any format. `weights` says what `model_loader_extra_config` may hold."""

    def __init__(self, load_config: LoadConfig) -> None:
        self._options = Options(load_config.model_loader_extra_config)
        super().__init__(replace(load_config, model_loader_extra_config=self._options.rest))

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is downloaded; a checkpoint that is not there is an error here."""
        self._options.path(model_config.model_path)

    def _get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.counter_before_loading_weights = time.perf_counter()
        yield from self._options.weights(model_config.model_path)
        yield from secondary_weights(model)
