"""vLLM's loader on small modules: what it yields, what vLLM's own `load_weights` makes of it, and how it is registered.

Nothing is served here: that needs a GPU.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.errors import BadArgument, BadArgumentType, Corrupted

pytest.importorskip("vllm")

from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.plugins import DEFAULT_PLUGINS_GROUP

from holdfast.integrations.vllm import HoldfastLoader, register
from tests.support import flip_bit

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Small(torch.nn.Module):
    """A model as vLLM has them: it loads itself from names and tensors, and says what it has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 8)
        self.head = torch.nn.Linear(8, 32)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            with torch.no_grad():
                parameters[name].copy_(tensor)
            loaded.add(name)
        return loaded


def loader(extra: dict[str, object]) -> HoldfastLoader:
    register()
    made = get_model_loader(LoadConfig(load_format="holdfast", model_loader_extra_config=extra))
    assert type(made) is HoldfastLoader
    made._init_ep_weight_filter = lambda model_config: (
        None
    )  # asks for the configuration of a whole engine
    return made


def model_config(path: Path) -> SimpleNamespace:
    return SimpleNamespace(
        model=str(path), revision=None, quantization=None, multimodal_config=None
    )


@pytest.mark.parametrize("format", ["dcp", "torch", "native", "safetensors"])
def test_a_step_is_loaded_by_vllm_itself(format: str, tmp_path: Path):
    trained, served = Small(), Small()
    state = {"model": trained.state_dict(), "optimizer": {"m": torch.ones(3)}, "step": 5}
    step = tmp_path / {"torch": "step.pt", "safetensors": "step.safetensors"}.get(format, "step")
    if format == "dcp":
        dcp.save(state, checkpoint_id=step, no_dist=True)
    elif format == "torch":
        torch.save(state, step)
    else:
        holdfast.save(state if format == "native" else {"model": state["model"]}, step)
    loader({"path": str(step), "prefix": "model."}).load_weights(
        served, model_config(tmp_path / "base")
    )
    for name, value in trained.state_dict().items():
        assert torch.equal(served.state_dict()[name], value), name


def test_a_step_that_lacks_a_weight_is_refused(tmp_path: Path):
    """vLLM's own check, which a loader of another base would not have."""
    state = Small().state_dict()
    del state["head.bias"]
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"head\.bias"):
        loader({"path": str(tmp_path / "x.pt")}).load_weights(Small(), model_config(tmp_path))


def test_damage_is_found_while_it_loads(tmp_path: Path):
    state = Small().state_dict()
    torch.save(state, tmp_path / "x.pt")
    flip_bit(tmp_path / "x.pt", 100, after=state["head.weight"].numpy().tobytes())
    with pytest.raises(Corrupted):
        loader({"path": str(tmp_path / "x.pt")}).load_weights(Small(), model_config(tmp_path))
    loader({"path": str(tmp_path / "x.pt"), "mmap": True}).load_weights(
        Small(), model_config(tmp_path)
    )


def test_experts_of_other_ranks_are_not_read(tmp_path: Path):
    state = {f"mlp.experts.{i}.w.weight": torch.ones(1000) for i in range(4)} | {
        "norm.weight": torch.ones(10)
    }
    torch.save(state, tmp_path / "x.pt")
    made = loader({"path": str(tmp_path / "x.pt")})
    made.local_expert_ids = {1}
    found = dict(made.get_all_weights(model_config(tmp_path), Small()))
    assert set(found) == {"mlp.experts.1.w.weight", "norm.weight"}


def test_secondary_weights_come_behind(tmp_path: Path):
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    torch.save({"b": torch.zeros(1)}, tmp_path / "y.pt")
    model = Small()
    model.secondary_weights = [
        SimpleNamespace(model_or_path=str(tmp_path / "y.pt"), prefix="vision.")
    ]
    found = dict(loader({}).get_all_weights(model_config(tmp_path / "x.pt"), model))
    assert list(found) == ["a", "vision.b"]


def test_options_are_understood(tmp_path: Path):
    with pytest.raises(BadArgument, match="nothing is downloaded"):
        loader({}).download_model(model_config(tmp_path / "absent"))
    with pytest.raises(BadArgumentType, match="'verify'"):
        loader({"verify": "False"})
    with pytest.raises(ValueError, match="Unexpected extra config keys"):
        loader({"perfix": "model."})
    assert loader({"enable_weights_track": True}).enable_weights_track is True


def test_vllm_finds_the_plugin(monkeypatch: pytest.MonkeyPatch):
    """Through vLLM's own loading of plugins, in a process where nothing is registered yet."""
    found = entry_points(group=DEFAULT_PLUGINS_GROUP)
    if "holdfast" not in found.names:
        pytest.skip("holdfast is not installed here, or with another pyproject.toml")
    import subprocess

    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from vllm.model_executor.model_loader import get_model_loader;"
        "from vllm.config.load import LoadConfig;"
        "print(type(get_model_loader(LoadConfig(load_format='holdfast'))).__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("holdfast.integrations.vllm"), done.stderr
