"""A transformers model straight out of a training step: no conversion first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.torch import slices
from tests.support import ALONE

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

STEPS: dict[str, Callable[[dict[str, object], Path], object]] = {
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, **ALONE),
    "torch": lambda state, path: torch.save(state, path),
    "native": lambda state, path: holdfast.save(state, path, format="native"),
}


def config(*, tied: bool) -> object:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("format", STEPS)
def test_a_model_from_a_step(format: str, tied: bool, tmp_path: Path):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config(tied=tied))
    STEPS[format]({"model": model.state_dict(), "step": 5}, tmp_path / "step")
    with slices(tmp_path / "step", prefix="model.") as state:
        made = transformers.LlamaForCausalLM.from_pretrained(
            None, config=config(tied=tied), state_dict=state
        )
    for name, value in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], value), name
    half = transformers.LlamaForCausalLM.from_pretrained(
        None,
        config=config(tied=tied),
        state_dict=slices(tmp_path / "step", prefix="model."),
        dtype=torch.bfloat16,
    )
    assert half.lm_head.weight.dtype is torch.bfloat16
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))


@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}, "cpu", "auto"], ids=str
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_device_map(tied: bool, device_map: object, tmp_path: Path):
    pytest.importorskip("accelerate")
    model = transformers.LlamaForCausalLM(config(tied=tied)).to(torch.bfloat16)
    torch.save({"model": model.state_dict()}, tmp_path / "step.pt")
    with slices(tmp_path / "step.pt", prefix="model.") as state:
        made = transformers.LlamaForCausalLM.from_pretrained(
            None, config=config(tied=tied), state_dict=state, device_map=device_map, dtype="auto"
        )
    assert made.dtype is torch.bfloat16, "as the step has it"
    assert (made.lm_head.weight is made.model.embed_tokens.weight) is tied
    for name, value in model.state_dict().items():
        # "auto" chooses a GPU where there is one.
        assert torch.equal(made.state_dict()[name].cpu(), value), name


def test_a_part_stays_on_the_disk(tmp_path: Path):
    pytest.importorskip("accelerate")
    model = transformers.LlamaForCausalLM(config(tied=False))
    torch.save({"model": model.state_dict()}, tmp_path / "step.pt")
    where = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    with slices(tmp_path / "step.pt", prefix="model.") as state:
        made = transformers.LlamaForCausalLM.from_pretrained(
            None,
            config=config(tied=False),
            state_dict=state,
            device_map=where | {"model.layers.0": "cpu", "model.layers.1": "disk"},
            offload_folder=tmp_path / "offloaded",
        )
        tokens = torch.arange(8)[None]
        assert torch.allclose(made(tokens).logits, model(tokens).logits, atol=1e-5)


def test_tensor_parallel_ranks_read_their_slices(tmp_path: Path):
    torch.manual_seed(0)
    made = config(tied=False)
    STEPS["dcp"]({"model": transformers.LlamaForCausalLM(made).state_dict()}, tmp_path / "step")
    made.save_pretrained(tmp_path / "step-config")
    script = Path(__file__).with_name("tensor_parallel.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "step")],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
