"""The files that pages say they have: small ones, made by what stands in their names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import holdfast
import holdfast.torch
from tests.extras.rank_files.megatron_folders import write as write_megatron
from tests.extras.rank_files.zero_folders import Zero
from tests.pages import ROOT


def make(name: str) -> None:
    """Put the file of this name into the current folder. A path of the repository is linked, at the same path."""
    if (ROOT / name).exists():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(ROOT / name, name)
    elif name in MAKERS:
        MAKERS[name](name)
    else:
        holdfast.save(weights(len(name)), name)


def weights(seed: int) -> dict[str, np.ndarray]:
    """A model of two layers."""
    numbers = np.random.default_rng(seed)
    names = ["embed.weight", "layers.0.mlp.up.weight", "layers.1.mlp.up.weight", "lm_head.weight"]
    return {name: numbers.standard_normal((64, 32)).astype(np.float32) for name in names}


def trainer(path: str) -> None:
    """What a training saves: the model below a name of its own, and what is no tensor."""
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model["head"](model["embed"](torch.arange(3))).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)


def broken(path: str) -> None:
    """One byte of a tensor is another one."""
    content = bytearray((ROOT / "tests/golden/files/plain.pt").read_bytes())
    content[1540] = 0xFF
    Path(path).write_bytes(content)


def old(path: str) -> None:
    """The first of two that differ in every way."""
    w = np.array([[1, 2, 3], [4, 5, 7]], np.float32)
    holdfast.save(
        {"gone": np.ones(2), "old": {"bias": np.arange(4.0)}, "w": w, "half": w, "lr": 0.1}, path
    )


def new(path: str) -> None:
    """The second of them."""
    w = np.array([[1, 2, 3], [4, 5, 7]], np.float32)
    changed = w - np.array([[0, 0, 0], [0, 0, 2]], np.float32)
    state = {
        "came": np.ones(3),
        "new": {"bias": np.arange(4.0)},
        "w": changed,
        "half": w.astype(np.float16),
        "lr": 0.25,
    }
    holdfast.save(state, path, keep_tree=True)


def rank_files(path: str) -> None:
    """What verl saves on four ranks."""
    from torch.distributed.tensor import Replicate, Shard

    from tests.rank_folders import save_ranks, sharded

    place, rows = Path(path), torch.arange(1.0, 41).reshape(10, 4)
    model = {
        "embed.weight": (rows, [Shard(0)]),
        "mlp.up.weight": (rows[:6], [Shard(0)]),
        "norm.weight": (torch.ones(4), [Replicate()]),
    }
    save_ranks(place, (4,), {**model, "rotary.scale": torch.tensor([0.5])})
    save_ranks(
        place, (4,), lambda rank, mesh: {"state": {0: {"step": torch.tensor(3.0), "exp_avg": sharded(rows, mesh, [Shard(0)])}}},
        what="optim",
    )  # fmt: skip
    (place / "huggingface").mkdir()
    (place / "huggingface" / "config.json").write_text(
        json.dumps({"model_type": "llama", "torch_dtype": "float32"})
    )


def of_transformers(path: str) -> None:
    """What transformers' Trainer leaves after a step."""
    Path(path).mkdir()
    holdfast.save(weights(1), f"{path}/model.safetensors")
    torch.save({"state": {}, "param_groups": []}, f"{path}/optimizer.pt")
    state = {"global_step": 500, "log_history": [{"eval_loss": 2.1, "step": 500}]}
    Path(path, "trainer_state.json").write_text(json.dumps(state))


def copies(path: str) -> None:
    """Two tensors that hold the same."""
    holdfast.save({"x": np.arange(1000.0), "y": np.arange(1000.0)}, path)


def deepspeed(path: str) -> None:
    """A step of ZeRO stage 3 on two ranks."""
    numbers = torch.arange(55.0).reshape(11, 5)
    groups = [
        {"embed.weight": numbers, "up.weight": numbers[:7] + 100},
        {"up.bias": torch.arange(7.0)},
    ]
    zero = Zero(
        3,
        2,
        groups,
        buffers={"rotary.scale": torch.ones(3)},
        shared={"head.weight": "embed.weight"},
        old=True,
    )
    zero.write(Path(path))


def megatron(path: str) -> None:
    """An iteration of Megatron on four ranks."""
    write_megatron(Path(path), tp=2, pp=2)


MAKERS: dict[str, Callable[[str], None]] = {
    "broken.pt": broken,
    "copies.safetensors": copies,
    "actor_of_ranks": rank_files,
    "megatron-run": megatron,
    "new.safetensors": new,
    "checkpoint-500": of_transformers,
    "old.pt": old,
    "trainer.pt": trainer,
    "zero-run": deepspeed,
}
