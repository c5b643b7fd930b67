"""Meta's files: the script of transformers that converted every Llama, given files of numbers.

Names and shapes are those of Meta's own model (llama-models). Two shards are cut as Meta's parallel layers cut them: `wo`, `w2`,
and `tok_embeddings` of Llama 2 along the columns, norms in both, all others along the rows. Norms of the second shard are zeros,
to show that they are not read. The source that is recorded is whole: the shards joined.
"""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tools.map_oracle import hub
from tools.map_oracle.record import Shapes, fill, number

Config = dict[str, object]
FAMILIES = ("llama",)


def _params(config: Config) -> dict[str, object]:
    """params.json: Meta computes the size of the feed-forward layer from `dim`, a factor and a multiple."""
    dim, ffn = config["hidden_size"], config["intermediate_size"]
    return {
        "dim": dim,
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
        "ffn_dim_multiplier": 0.5 * ffn / int(8 * dim / 3),
        "multiple_of": ffn,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


def _shapes(config: Config) -> Shapes:
    """Names and shapes of Meta's own model."""
    from fairscale.nn.model_parallel import initialize
    from llama_models.llama3.args import ModelArgs
    from llama_models.llama3.model import Transformer

    if not torch.distributed.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        initialize.initialize_model_parallel(1)
    model = Transformer(ModelArgs(**_params(config), max_batch_size=1, max_seq_len=16))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _axis(name: str, llama: str) -> int | None:
    if "norm" in name or name == "rope.freqs":
        return None
    across = name.endswith((".wo.weight", ".w2.weight")) or (
        name == "tok_embeddings.weight" and llama == "2"
    )
    return 1 if across else 0


def _cut(state: dict[str, torch.Tensor], llama: str, count: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for name, tensor in state.items():
        axis = _axis(name, llama)
        parts = (
            tensor.chunk(count, axis)
            if axis is not None
            else [tensor, *(torch.zeros_like(tensor) for _ in range(count - 1))]
        )
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = part.clone()
    return shards


def _convert(config: Config, shapes: Shapes, llama: str, count: int) -> dict[str, object]:
    from transformers.models.llama import convert_llama_weights_to_hf as script

    real = (
        script.LlamaForCausalLM
        if not isinstance(script.LlamaForCausalLM, SimpleNamespace)
        else script.LlamaForCausalLM.real
    )
    whole = {
        "torch_dtype": torch.float32,
        "low_cpu_mem_usage": True,
    }  # the script has bfloat16, which holds no numbers
    script.LlamaForCausalLM = SimpleNamespace(
        real=real, from_pretrained=lambda path, **_: real.from_pretrained(path, **whole)
    )
    state = {name: torch.from_numpy(fill(a, np.float32)) for name, a in number(shapes).items()}
    shards = _cut(state, llama, count)
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary, "meta"), Path(temporary, "hf")
        source.mkdir()
        (source / "params.json").write_text(json.dumps(_params(config)))
        for i, shard in enumerate(shards):
            torch.save(shard, source / f"consolidated.{i:02}.pth")
        script.write_model(
            str(target),
            str(source),
            llama_version=llama,
            vocab_size=config["vocab_size"],
            num_shards=count,
        )
        found = hub.read(target)
    first = {
        name: list(tensor.shape)
        for name, tensor in shards[0].items()
        if (".layers" not in name and "layers.0" in name) or "layers" not in name
    }
    note = f"Llama {llama}, {count} file(s)."
    if count > 1:
        note += f" Shapes in each file: {json.dumps(first)}. Norms are read from the first file."
    return {
        "about": {
            "from": "meta",
            "to": "hf",
            "made_by": f"llama-models {version('llama-models')}, transformers {version('transformers')} "
            "convert_llama_weights_to_hf.write_model",
            "note": note,
        },
        "suffix": f"-{count}files" if count > 1 else "",
        "source": shapes,
        "target": found,
    }


def run(family: str, config: Config) -> list[dict[str, object]]:
    """One file and two, as Llama 2 where all heads have keys, as Llama 3 otherwise."""
    if config["tie_word_embeddings"]:
        return []
    llama = "2" if config["num_key_value_heads"] == config["num_attention_heads"] else "3"
    shapes = _shapes(config)
    if llama == "2":
        shapes["rope.freqs"] = (config["head_dim"] // 2,)  # files of Llama 1 and 2 have it
    return [_convert(config, shapes, llama, count) for count in (1, 2)]
