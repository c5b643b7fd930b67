"""TorchTitan: its adapters are given state dicts of numbers, in both directions.

The names of "titan" are those of `model.state_dict()`, which is what TorchTitan's DCP folders hold. A fused wqkv is split there by
TorchTitan's own hooks, so the fused and the separate module have the same names.
"""

from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch
from tools.map_oracle import hub
from tools.map_oracle.record import Shapes, fill, number

Config = dict[str, object]
NOTES = {
    ("gpt_oss", "hf"): (
        "TorchTitan's bug: the table of its adapter says inner_experts.mlp1_bias and mlp2_bias, its model has mlp1_bias_EG and "
        "mlp2_bias_ED; weights of experts are known to it by the names of the MXFP4 files only (gate_up_proj_blocks), so "
        "gate_up_proj and down_proj are left out in silence."
    ),
    ("gpt_oss", "titan"): (
        "TorchTitan's bug: to_hf drops every tensor of the experts in silence, because its table says mlp1_weight and the model "
        "has mlp1_weight_EGD."
    ),
    (
        "qwen3_moe",
        "hf",
    ): "expert_bias_E of TorchTitan's router has no place in hf; a map makes zeros.",
    (
        "qwen3_moe",
        "titan",
    ): "expert_bias_E of TorchTitan's router has no place in hf and is left out.",
}


def _decoder(module: object, config: Config, layers: list) -> dict[str, object]:
    """The parts that the configuration of every decoder has."""
    from torchtitan.models.common import Embedding, Linear, RMSNorm

    dim, vocab = config["hidden_size"], config["vocab_size"]
    return {
        "dim": dim,
        "vocab_size": vocab,
        "tok_embeddings": Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init=module._EMBEDDING_INIT
        ),
        "norm": RMSNorm.Config(normalized_shape=dim, param_init=module._NORM_INIT),
        "lm_head": Linear.Config(
            in_features=dim,
            out_features=vocab,
            param_init=module._output_linear_init(dim)
            if hasattr(module, "_output_linear_init")
            else module._LINEAR_INIT,
        ),
        "layers": layers,
    }


def _attention(config: Config) -> dict[str, object]:
    return {
        "n_layers": config["num_hidden_layers"],
        "dim": config["hidden_size"],
        "n_heads": config["num_attention_heads"],
        "attn_backend": "flex",
    }


def _llama(config: Config) -> tuple[object, type]:
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE

    rope = ComplexRoPE.Config(dim=config["head_dim"], max_seq_len=64, theta=10000.0)
    layers = llama3._build_llama3_layers(
        **_attention(config),
        n_kv_heads=config["num_key_value_heads"],
        hidden_dim=config["intermediate_size"],
        rope=rope,
    )
    made = llama3.Llama3Model.Config(
        **_decoder(llama3, config, layers), enable_weight_tying=config["tie_word_embeddings"]
    )
    return made, llama3.Llama3StateDictAdapter


def _qwen3(config: Config) -> tuple[object, type]:
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE

    rope = CosSinRoPE.Config(dim=config["head_dim"], max_seq_len=64, theta=10000.0)
    same = {
        **_attention(config),
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "rope": rope,
    }
    if "num_experts" in config:
        layers = qwen3._build_qwen3_moe_layers(
            **same,
            moe_hidden_dim=config["moe_intermediate_size"],
            num_experts=config["num_experts"],
            top_k=config["num_experts_per_tok"],
            moe_comm_backend="standard",
        )
    else:
        layers = qwen3._build_qwen3_layers(**same, hidden_dim=config["intermediate_size"])
    made = qwen3.Qwen3Model.Config(
        **_decoder(qwen3, config, layers), enable_weight_tying=config["tie_word_embeddings"]
    )
    return made, qwen3.Qwen3StateDictAdapter


def _deepseek(config: Config) -> tuple[object, type]:
    from torchtitan.models import deepseek_v3
    from torchtitan.models.common import ComplexRoPE

    rope = ComplexRoPE.Config(dim=config["qk_rope_head_dim"], max_seq_len=64, theta=10000.0)
    layers = deepseek_v3._build_dsv3_layers(
        **_attention(config),
        n_dense_layers=config["first_k_dense_replace"],
        q_lora_rank=config["q_lora_rank"] or 0,
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        mscale=1.0,
        dense_hidden_dim=config["intermediate_size"],
        moe_hidden_dim=config["moe_intermediate_size"],
        num_experts=config["n_routed_experts"],
        num_shared_experts=config["n_shared_experts"],
        router_top_k=config["num_experts_per_tok"],
        router_score_func="sigmoid",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=rope,
    )
    made = deepseek_v3.DeepSeekV3Model.Config(
        **_decoder(deepseek_v3, config, layers), mtp_layers=[]
    )
    return made, deepseek_v3.DeepSeekV3StateDictAdapter


def _gpt_oss(config: Config) -> tuple[object, type]:
    import functools

    from torchtitan.models import gpt_oss
    from torchtitan.models.common import CosSinRoPE

    rope = CosSinRoPE.Config(dim=config["head_dim"], max_seq_len=64, theta=10000.0)
    real = gpt_oss._make_gptoss_attn_config
    heads = {
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
    }
    gpt_oss._make_gptoss_attn_config = functools.partial(
        real, **heads
    )  # the builder of layers has no parameter for heads
    try:
        layers = gpt_oss._build_gptoss_layers(
            dim=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            hidden_dim=config["intermediate_size"],
            num_experts=config["num_local_experts"],
            top_k=config["num_experts_per_tok"],
            load_balance_coeff=1e-3,
            attn_backend="flex",
            moe_comm_backend="standard",
            rope=rope,
        )
    finally:
        gpt_oss._make_gptoss_attn_config = real
    return gpt_oss.GptOssModel.Config(
        **_decoder(gpt_oss, config, layers)
    ), gpt_oss.GptOssStateDictAdapter


FAMILIES: dict[str, Callable[[Config], tuple[object, type]]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "qwen3_moe": _qwen3,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}


def _state(shapes: Shapes) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(fill(a)) for name, a in number(shapes).items()}


def _arrays(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in state.items()}


def run(family: str, config: Config) -> list[dict[str, object]]:
    """Both directions for one configuration."""
    made, adapter = FAMILIES[family](config)
    with torch.device("meta"):
        model = made.build()
    ours = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    theirs = hub.shapes(config)
    ran = f"torchtitan {version('torchtitan')} {adapter.__name__}"
    there = _arrays(adapter(made, None).from_hf(_state(theirs)))
    back = _arrays(adapter(made, None).to_hf(_state(ours)))
    found = []
    for ends, source, target, expected in (
        (("hf", "titan"), theirs, there, ours),
        (("titan", "hf"), ours, back, theirs),
    ):
        wrong = {name: a.shape for name, a in target.items() if expected.get(name) != a.shape}
        if wrong and family != "gpt_oss":
            raise ValueError(f"not what a model of this configuration has: {wrong}")
        found.append(
            {
                "about": {
                    "from": ends[0],
                    "to": ends[1],
                    "made_by": f"{ran}.{'from_hf' if ends[0] == 'hf' else 'to_hf'}",
                    "note": NOTES.get((family, ends[0]), ""),
                },
                "source": source,
                "target": target,
                "absent": {name: shape for name, shape in expected.items() if name not in target},
            }
        )
    return found
