"""Small configurations that are hard to get right by luck: odd counts of heads, head_dim that is not hidden_size / heads.

Sizes differ from each other wherever the family allows it, so that a wrong axis cannot have the right shape.
"""

_COMMON = {
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "num_hidden_layers": 3,
}


def _dense(
    model_type: str,
    hidden: int,
    heads: tuple[int, int, int],
    *,
    ffn: int,
    vocab: int,
    tied: bool,
    **more: object,
) -> dict[str, object]:
    """A dense decoder: `heads` are those of q, of k and v, and the size of one."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **_COMMON,
        **more,
    }


_QWEN3_MOE = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 20,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 22,
    "moe_intermediate_size": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "vocab_size": 37,
    "tie_word_embeddings": False,
    **_COMMON,
}

CONFIGS: dict[str, dict[str, dict[str, object]]] = {
    "qwen3": {
        "gqa": _dense("qwen3", 24, (6, 2, 10), ffn=22, vocab=37, tied=False),
        "mqa-tied": _dense("qwen3", 20, (3, 1, 8), ffn=14, vocab=29, tied=True),
        "mha": _dense("qwen3", 20, (5, 5, 6), ffn=18, vocab=31, tied=False),
    },
    "llama": {
        "mha": _dense("llama", 24, (6, 6, 4), ffn=22, vocab=38, tied=False),
        "gqa": _dense("llama", 36, (6, 2, 6), ffn=22, vocab=38, tied=False),
        "mqa-tied": _dense("llama", 24, (3, 1, 8), ffn=14, vocab=29, tied=True),
    },
    "qwen3_moe": {
        "gqa": _dense(
            "qwen3_moe",
            20,
            (6, 2, 8),
            ffn=22,
            vocab=37,
            tied=False,
            num_experts=6,
            moe_intermediate_size=10,
            **_QWEN3_MOE,
        ),
        "mqa": _dense(
            "qwen3_moe",
            16,
            (3, 1, 6),
            ffn=22,
            vocab=29,
            tied=False,
            num_experts=4,
            moe_intermediate_size=6,
            **_QWEN3_MOE,
        ),
    },
    "deepseek_v3": {
        "q-lora": {**_DEEPSEEK, "q_lora_rank": 14},
        "q-full": {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_shared_experts": 1,
            "n_routed_experts": 6,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
        },
    },
    "qwen2": {
        "gqa": _dense("qwen2", 24, (6, 2, 4), ffn=22, vocab=37, tied=False),
        "mqa-tied": _dense("qwen2", 24, (3, 1, 8), ffn=14, vocab=29, tied=True),
    },
    "mistral": {
        "gqa": _dense("mistral", 24, (6, 3, 10), ffn=22, vocab=37, tied=False, sliding_window=None),
        "mqa": _dense("mistral", 20, (3, 1, 6), ffn=14, vocab=29, tied=False, sliding_window=None),
    },
    "mixtral": {
        "gqa": _dense(
            "mixtral",
            24,
            (6, 3, 4),
            ffn=14,
            vocab=37,
            tied=False,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=None,
        ),
        "mqa": _dense(
            "mixtral",
            24,
            (3, 1, 8),
            ffn=10,
            vocab=29,
            tied=False,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=None,
        ),
    },
    "gemma3_text": {
        "gqa": _dense(
            "gemma3_text",
            24,
            (6, 2, 10),
            ffn=22,
            vocab=37,
            tied=True,
            hidden_activation="gelu_pytorch_tanh",
            sliding_window=16,
        ),
        "mqa": _dense(
            "gemma3_text",
            21,
            (3, 1, 8),
            ffn=14,
            vocab=29,
            tied=True,
            hidden_activation="gelu_pytorch_tanh",
            sliding_window=16,
        ),
    },
    "gpt_oss": {
        "gqa": _dense(
            "gpt_oss",
            24,
            (6, 2, 10),
            ffn=22,
            vocab=37,
            tied=False,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
        ),
        "mqa": _dense(
            "gpt_oss",
            20,
            (3, 1, 8),
            ffn=14,
            vocab=29,
            tied=False,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=16,
        ),
    },
}
