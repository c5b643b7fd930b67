"""A map over a quantised GGUF file: every verb sees the numbers, in one step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
import holdfast.torch
from holdfast.cli.main import main
from tests.formats.gguf.craft_gguf import q8_0_file

LAYERS, HIDDEN, FFN, VOCAB = 2, 64, 96, 70
HEADS, GROUPS, DIM = 4, 2, 16

SIZES = f"?heads={HEADS}&group={GROUPS}&dim={DIM}"
MAP = "llama:gguf->hf" + SIZES


def llama() -> dict[str, np.ndarray]:
    """The tensors of a small Llama as llama.cpp names them, each element another number."""
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN)}
    shapes["output_norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        parts = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
            "attn_q": (HEADS * DIM, HIDDEN), "attn_k": (GROUPS * DIM, HIDDEN),
            "attn_v": (GROUPS * DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * DIM),
            "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    numbers = np.random.default_rng(0)
    return {name: numbers.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of which the keys of the first layer are not quantised: a fused tensor has both kinds of parts."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return q8_0_file(path, llama(), plain=["blk.0.attn_k.weight"])


@pytest.fixture(scope="module")
def in_two_steps(quantised: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in Hugging Face's layout, by way of a file of numbers."""
    folder = tmp_path_factory.mktemp("steps")
    numbers, model = folder / "numbers.safetensors", folder / "model.safetensors"
    holdfast.convert(quantised, numbers, dequantize=True, durable=False)
    holdfast.convert(numbers, model, map=MAP, durable=False)
    return model


@pytest.mark.parametrize("layout", ["hf", "megatron", "meta", "titan"])
def test_a_map_gives_the_same_elements_as_a_map_over_a_file_of_numbers(
    layout: str, quantised: Path, tmp_path: Path
):
    holdfast.convert(quantised, tmp_path / "n.safetensors", dequantize=True, durable=False)
    name = f"llama:gguf->{layout}{SIZES}"
    with (
        holdfast.open(quantised, map=name) as mapped,
        holdfast.open(tmp_path / "n.safetensors", map=name) as expected,
    ):
        assert len(mapped) > 5
        assert sorted(mapped) == sorted(expected)
        for key in expected:
            assert mapped[key].numpy().tobytes() == expected[key].numpy().tobytes(), key
            part = (slice(1, None, 2),)
            assert mapped[key][part].numpy().tobytes() == expected[key][part].numpy().tobytes()


def test_convert_maps_in_one_step(quantised: Path, in_two_steps: Path, tmp_path: Path, capsys):
    out = tmp_path / "out.safetensors"
    assert main(["convert", str(quantised), str(out), "--map", MAP]) == 0
    assert "dequantize" not in capsys.readouterr().out
    assert holdfast.diff(out, in_two_steps, exact=True).equal


def test_convert_casts_what_it_maps(quantised: Path, in_two_steps: Path, tmp_path: Path):
    for source, name, options in (
        (quantised, "a.safetensors", {"map": MAP, "dequantize": True}),
        (in_two_steps, "b.safetensors", {}),
    ):
        holdfast.convert(source, tmp_path / name, dtype="bfloat16", durable=False, **options)
    assert holdfast.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", exact=True).equal


def test_diff_maps_in_one_step(quantised: Path, in_two_steps: Path, capsys):
    assert main(["diff", str(quantised), str(in_two_steps), "--map", MAP]) == 0
    assert "21 tensors the same" in capsys.readouterr().out


def test_report_maps_in_one_step(quantised: Path, tmp_path: Path):
    document = holdfast.report(quantised, map=MAP, stats=True).document
    rms = next(one["values"] for one in document["measures"] if one["key"] == "rms")
    assert [HEADS * DIM, HIDDEN] in document["tensors"]["shape"]["labels"]
    assert document["tensors"]["dtype"]["labels"] == ["float32"]
    assert all(0.9 < value < 1.1 for value in rms)
    assert not any("dequantize" in note for note in document["notes"])


def test_load_into_maps_in_one_step(quantised: Path, in_two_steps: Path):
    with holdfast.open(in_two_steps) as checkpoint:
        expected = {name: torch.from_numpy(one.numpy()) for name, one in checkpoint.items()}
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    holdfast.torch.load_into(targets, quantised, map=MAP)
    assert all(torch.equal(targets[name], tensor) for name, tensor in expected.items())


def test_maps_check_fits(quantised: Path, capsys):
    assert main(["maps", "check", MAP, str(quantised)]) == 0
    assert "fits: 21 tensors" in capsys.readouterr().out
    assert main(["maps", "check", MAP, str(quantised), "--json"]) == 0
    rows = {row["name"]: row["shape"] for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert rows["model.embed_tokens.weight"] == [VOCAB, HIDDEN]
