"""GGUF: llama.cpp's own converter on a folder of numbers, read back by its own reader.

LLAMA_CPP names the folder of llama.cpp (it lies in the source archive of llama-cpp-python). A tokenizer is not needed: the part
that writes it is left out. Tensors are written as float32. Shapes are given as numpy has them, (rows, columns); the file has them
reversed.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from tools.map_oracle import hub

FAMILIES = (
    "qwen3",
    "llama",
    "qwen3_moe",
    "qwen2",
    "mistral",
    "mixtral",
    "gemma3_text",
    "deepseek_v3",
    "gpt_oss",
)


def run(family: str, config: dict[str, object]) -> list[dict[str, object]]:
    """From the hub to GGUF; llama.cpp does not convert back."""
    place = Path(os.environ["LLAMA_CPP"])
    sys.path[:0] = [str(place / "gguf-py"), str(place)]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        folder, file = Path(temporary, "hub"), Path(temporary, "made.gguf")
        on_hub = hub.write(config, folder, np.float32)
        words = {
            f"w{i}": i for i in range(config["vocab_size"])
        }  # Gemma's embedding is cut to the tokenizer's words
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": words}, "added_tokens": []})
        )
        kind = get_model_class(
            get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
        )
        unworded = type(
            kind.__name__, (kind,), {"set_vocab": lambda self: None, "model_arch": kind.model_arch}
        )
        unworded(folder, gguf.LlamaFileType.ALL_F32, file).write()
        found = {
            t.name: np.array(t.data).reshape([int(n) for n in reversed(t.shape)])
            for t in gguf.GGUFReader(file).tensors
        }
    return [
        {
            "about": {
                "from": "hf",
                "to": "gguf",
                "made_by": f"llama.cpp of {place.parent.parent.name}, conversion.{kind.__name__}",
                "note": "Shapes are (rows, columns); the file has them reversed.",
            },
            "source": on_hub,
            "target": found,
        }
    ]
