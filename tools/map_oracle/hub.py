"""Names and shapes as they lie on the hub: what `save_pretrained` of transformers writes for a configuration."""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from tools.map_oracle.record import Shapes, fill, number


def shapes(config: dict[str, object]) -> Shapes:
    """The tensors of a checkpoint of this configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    made = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found: Shapes = {}
        for file in Path(folder).glob("*.safetensors"):
            with safe_open(file, "np") as opened:
                for name in opened.keys():  # noqa: SIM118
                    found[name] = tuple(opened.get_slice(name).get_shape())
        return found


def write(config: dict[str, object], folder: Path, dtype: type = np.float64) -> Shapes:
    """A folder as on the hub, its tensors filled with their numbers."""
    from transformers import AutoConfig

    found = shapes(config)
    made = AutoConfig.for_model(**config)
    made.dtype = np.dtype(dtype).name
    made.architectures = [_architecture(made)]
    made.save_pretrained(folder)
    save_file(
        {name: fill(a, dtype) for name, a in number(found).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return found


def _architecture(made: object) -> str:
    """The class of the model, as config.json names it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(made)].__name__


def read(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, as float64."""
    found: dict[str, np.ndarray] = {}
    index = folder / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.exists()
        else ["model.safetensors"]
    )
    for file in files:
        with safe_open(folder / file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118
                found[name] = opened.get_tensor(name).astype(np.float64)
    return found
