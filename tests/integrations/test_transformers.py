"""A transformers model straight out of a training step: no conversion first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.torch import slices

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

STEPS: dict[str, Callable[[dict[str, object], Path], object]] = {
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
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
        made = transformers.LlamaForCausalLM.from_pretrained(None, config=config(tied=tied), state_dict=state)
    for name, value in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], value), name
    half = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config(tied=tied), state_dict=slices(tmp_path / "step", prefix="model."), dtype=torch.bfloat16
    )
    assert half.lm_head.weight.dtype is torch.bfloat16
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))
