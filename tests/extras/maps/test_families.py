"""What checkpoints of the shipped families have beside what was recorded: more layers, scales, GGUF's own values and blocks."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.core.checkpoint import Checkpoint
from holdfast.errors import BadMap, DoesNotFit
from holdfast.extras.maps.find import Map, families, find_map
from holdfast.extras.maps.mapped import mapped
from holdfast.extras.maps.parts import NamePattern
from tests.extras.maps.test_oracles import FOLDER, RECORDED, digest, numbered
from tests.formats.gguf.craft_gguf import gguf, info, value

MORE = [
    f"{name}.weight"
    for name in (
        "embed_tokens",
        "enorm",
        "hnorm",
        "eh_proj",
        "shared_head.norm",
        "shared_head.head",
    )
]
ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "mistral": "llama",
}  # What llama.cpp calls them.


def model(name: str) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    return numbered([row[:2] for row in recorded["source"]]), recorded["config"]


def opened(tensors: dict[str, np.ndarray]) -> Checkpoint:
    return holdfast.open(holdfast.to_bytes(tensors, format="safetensors"))


def predicting() -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """DeepSeek V3 as the hub has it: behind its last layer stands one that predicts the token behind the next."""
    tensors, config = model("deepseek_v3-q-lora.hf-titan")
    last = int(str(config["num_hidden_layers"])) - 1
    copied = {
        name.replace(f".{last}.", f".{last + 1}.", 1): one
        for name, one in tensors.items()
        if f"layers.{last}." in name
    }
    more = {f"model.layers.{last + 1}.{name}": np.zeros((2, 2), np.int64) for name in MORE}
    return {**tensors, **copied, **more}, {**config, "num_nextn_predict_layers": 1}


@pytest.mark.parametrize("target", ["titan", "megatron", "transformers", "gguf"])
def test_layers_that_predict_more_tokens_are_left_out_by_name(target: str):
    tensors, config = predicting()
    plain, _ = model("deepseek_v3-q-lora.hf-titan")
    bound = Map(families()["deepseek_v3"], "hf", target).bind(opened(tensors), config)
    assert (
        set(bound.dropped)
        == {name for name in tensors if name.startswith("model.layers.3.")}
        == {*tensors} - {*plain}
    )
    without = Map(families()["deepseek_v3"], "hf", target).bind(opened(plain), config)
    assert [one.name for one in bound.targets] == [one.name for one in without.targets]
    assert bound.used == len(plain)
    (note,) = bound.left_out()
    assert "model.layers.3.eh_proj.weight" in note
    assert f"the layout {target!r} has no place for it" in note


@pytest.mark.parametrize(
    "layers",
    [{"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": None}, {"num_hidden_layers": 2}],
)
def test_layers_that_the_config_does_not_say_are_left_over(layers: dict[str, object]):
    tensors, config = predicting()
    with pytest.raises(DoesNotFit) as caught:
        Map(families()["deepseek_v3"], "hf", "titan").bind(opened(tensors), {**config, **layers})
    assert "model.layers.3.eh_proj.weight" in caught.value.unexpected


def test_without_a_config_a_layer_that_predicts_more_tokens_is_no_layer_of_the_model():
    tensors, _ = predicting()
    with pytest.raises(DoesNotFit) as caught:
        Map(families()["deepseek_v3"], "hf", "titan", {"nope": 8, "rope": 4, "head": 3}).bind(
            opened(tensors), {}
        )
    assert {f"model.layers.3.{name}" for name in MORE} <= {*caught.value.unexpected}


@pytest.mark.parametrize("target", ["titan", "megatron", "transformers", "gguf"])
def test_scales_that_a_family_does_not_know_are_refused(target: str):
    tensors, config = model("qwen3-gqa.hf-titan")
    scale = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    with pytest.raises(DoesNotFit, match=f"{scale}: left over, the scale of fp8 weights") as caught:
        Map(families()["qwen3"], "hf", target).bind(
            opened({**tensors, scale: np.zeros((1, 1), np.int64)}), config
        )
    assert caught.value.unexpected == (scale,)


def scaled() -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """DeepSeek V3 in fp8: beside each matrix but the router's one with a scale for each block of it, here of 4 by 2."""
    tensors, config = model("deepseek_v3-q-lora.hf-titan")
    linear = [name for name in tensors if name.endswith(("_proj.weight", "with_mqa.weight"))]
    shapes = [
        [f"{name}_scale_inv", [-(-tensors[name].shape[0] // 4), -(-tensors[name].shape[1] // 2)]]
        for name in linear
    ]
    return tensors | {name: one + 10**6 for name, one in numbered(shapes).items()}, config


@pytest.mark.parametrize("target", ["titan", "megatron", "transformers"])
def test_scales_of_fp8_weights_go_along(target: str):
    tensors, config = scaled()
    chosen = Map(families()["deepseek_v3"], "hf", target)
    checkpoint = opened(tensors)
    there = {
        name: one.numpy()
        for name, one in mapped(
            checkpoint, chosen.bind(checkpoint, config), lambda one: one
        ).items()
    }
    assert sum(name.endswith("_scale_inv") for name in there) > 10
    assert sum(one.size for one in there.values()) == sum(one.size for one in tensors.values())
    again = opened(there)
    back = mapped(again, chosen.invert().bind(again, config), lambda one: one)
    assert {name: digest(one.numpy()) for name, one in back.items()} == {
        name: digest(one) for name, one in tensors.items()
    }


def test_scales_are_never_left_behind():
    tensors, config = scaled()
    with pytest.raises(DoesNotFit, match="the scale of fp8 weights"):
        Map(families()["deepseek_v3"], "hf", "gguf").bind(opened(tensors), config)
    some = {
        name: one
        for name, one in tensors.items()
        if "layers.1.mlp.experts.2.up_proj.weight_scale_inv" not in name
    }
    with pytest.raises(DoesNotFit) as caught:
        Map(families()["deepseek_v3"], "hf", "titan").bind(opened(some), config)
    assert caught.value.missing == ("model.layers.1.mlp.experts.2.up_proj.weight_scale_inv",)


Q8_0, Q8_1 = (8, 34), (9, 40)
"""Types of blocks of 32 elements: number and bytes. The second one cannot be decoded."""


def gguf_file(
    folder: Path, name: str, blocks: str = "", block_type: tuple[int, int] = Q8_0
) -> Path:
    """What llama.cpp made of a model, without its elements.

    Tensors that are called like `blocks` are in blocks, and rows of 32 then.
    """
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    config, infos, data = recorded["config"], [], b""
    for tensor, recorded_shape, _ in recorded["target"]:
        shape = [
            32 if blocks and size == config["hidden_size"] else size for size in recorded_shape
        ]
        size = int(np.prod(shape))
        is_quantised = blocks and blocks in tensor
        kind, nbytes = (
            (block_type[0], size // 32 * block_type[1]) if is_quantised else (0, 4 * size)
        )
        infos.append(info(tensor, shape[::-1], kind, len(data)))
        data += bytes(nbytes + -nbytes % 32)
    keys = {
        "head_count": "num_attention_heads",
        "head_count_kv": "num_key_value_heads",
        "key_length": "head_dim",
    }
    stated = {
        "head_dim": int(config["hidden_size"]) // int(config["num_attention_heads"]),
        **config,
    }
    kind = str(config["model_type"])
    said = [
        value(f"{ARCHITECTURES.get(kind, kind)}.attention.{key}", 4, struct.pack("<I", stated[own]))
        for key, own in keys.items()
    ]
    (path := folder / "model.gguf").write_bytes(gguf(infos, data, said))
    return path


@pytest.mark.parametrize(
    "name", [one for one in RECORDED if one.endswith(".hf-gguf") and "gemma" not in one]
)
def test_a_gguf_file_says_the_sizes_itself(tmp_path: Path, name: str):
    tensors, _ = model(name)
    with holdfast.open(gguf_file(tmp_path, name), map="auto") as checkpoint:
        assert {one: tuple(checkpoint[one].shape) for one in checkpoint} == {
            one: values.shape for one, values in tensors.items()
        }


def test_a_map_reads_the_numbers_that_blocks_stand_for(tmp_path: Path):
    path = gguf_file(tmp_path, "mistral-gqa.hf-gguf", blocks="attn_k.weight")
    with holdfast.open(path, map="auto") as checkpoint:
        mapped = checkpoint["model.layers.0.self_attn.k_proj.weight"]
        assert (mapped.dtype, mapped.shape, mapped.traits.blocks) == ("float32", (30, 32), None)


def test_a_map_refuses_blocks_that_cannot_be_decoded(tmp_path: Path):
    path = gguf_file(tmp_path, "mistral-gqa.hf-gguf", blocks="attn_k.weight", block_type=Q8_1)
    with pytest.raises(
        DoesNotFit, match=r"blk.0.attn_k.weight: is in blocks of Q8_1, which cannot be decoded"
    ) as caught:
        holdfast.open(path, map="auto")
    assert sorted(caught.value.mismatched) == [f"blk.{layer}.attn_k.weight" for layer in range(3)]


def test_layouts_that_hold_all_alike_are_found_as_the_first(tmp_path: Path):
    tensors, config = model("qwen3-gqa.hf-titan")
    holdfast.save(tensors, tmp_path / "model.safetensors", durable=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with holdfast.open(tmp_path) as checkpoint:
        assert str(find_map("auto->megatron", checkpoint)) == "qwen3:hf:megatron"
        assert str(find_map("auto->transformers", checkpoint)) == "qwen3:hf:transformers"


def test_a_number_in_a_name_may_be_of_a_range():
    pattern = NamePattern.read("layers.{layer[:dense]}.fc1.{expert}")
    assert (pattern.plain, pattern.numbers, pattern.axes) == (
        "layers.#.fc#.#",
        ("layer", "1", "expert"),
        ("layer", "expert"),
    )
    assert pattern.name({"layer": 2, "expert": 7}) == "layers.2.fc1.7"
    for bad in (
        "layers.{layer[}",
        "layers.{layer[1:2:3]}",
        "layers.{}",
        "layers.{Layer}",
        "layers.{layer[:dense]}{expert}",
    ):
        with pytest.raises(BadMap):
            NamePattern.read(bad)
