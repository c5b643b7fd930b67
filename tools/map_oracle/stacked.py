"""transformers: a folder of numbers through `from_pretrained`, and the state of a model through `revert_weight_conversion`.

The names of "transformers" are those of `model.state_dict()` since transformers 5, where experts are stacked. A dense model has the
names of the hub. A head that is tied is in the state, but not on the hub.
"""

import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from tools.map_oracle import hub
from tools.map_oracle.record import Shapes, fill, number

FAMILIES = (
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "gemma3_text",
    "mistral",
    "qwen2",
    "qwen3",
    "llama",
)


def _kept(state: dict[str, torch.Tensor]) -> Shapes:
    """Shapes of the state, each storage once, as `save_pretrained` keeps them."""
    seen: set[int] = set()
    shapes: Shapes = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen:
            shapes[name] = tuple(tensor.shape)
        seen.add(tensor.data_ptr())
    return shapes


def run(family: str, config: dict[str, object]) -> list[dict[str, object]]:
    """Both directions for one configuration."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with tempfile.TemporaryDirectory() as folder:
        on_hub = hub.write(config, Path(folder), np.float32)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = model.state_dict()
    there = {name: tensor.numpy() for name, tensor in state.items()}
    ours = _kept(state)
    back = revert_weight_conversion(
        model, {name: torch.from_numpy(fill(a)) for name, a in number(ours).items()}
    )
    ran = f"transformers {version('transformers')}"
    return [
        {
            "about": {
                "from": "hf",
                "to": "transformers",
                "made_by": f"{ran} from_pretrained",
                "note": _note(there, ours),
            },
            "source": on_hub,
            "target": there,
        },
        {
            "about": {
                "from": "transformers",
                "to": "hf",
                "made_by": f"{ran} revert_weight_conversion",
                "note": _note(there, ours),
            },
            "source": ours,
            "target": {name: tensor.numpy() for name, tensor in back.items()},
            "absent": {name: shape for name, shape in on_hub.items() if name not in back},
        },
    ]


def _note(state: dict[str, np.ndarray], kept: Shapes) -> str:
    tied = sorted(set(state) - set(kept))
    return (
        f"{', '.join(tied)} of the state shares memory with another tensor, and is not saved."
        if tied
        else ""
    )
