"""`holdfast.torch` on a simulated system: it imports, and what needs no GPU and no ranks goes round. `… SYSTEM FOLDER`."""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys

import ml_dtypes
import torch
import torch._export.serde.serialize
import torch.distributed.checkpoint
import torch.distributed.tensor
import torch.export

from tests.platforms.systems import become, shown

ml_dtypes.bfloat16  # noqa: B018 (imported before the system changes)
become(sys.argv[1])

import holdfast.torch

for name in dir(holdfast.torch):
    getattr(holdfast.torch, name)
folder = shown(sys.argv[2]) if sys.argv[1] == "win32" else sys.argv[2]
state = {"w": torch.arange(12.0).reshape(3, 4), "step": 3}
for seed in (1, 2):
    path = os.path.join(folder, "model.pt")
    holdfast.torch.save(state | {"step": seed}, path)
    loaded = holdfast.torch.load(path)
    assert loaded["step"] == seed
    assert torch.equal(loaded["w"], state["w"])
    with open(path, "rb") as file:
        assert torch.equal(holdfast.torch.load(file)["w"], state["w"])
    step = os.path.join(folder, "step")
    holdfast.torch.save_sharded(step, state | {"step": seed}, overwrite=True)
    target = {"w": torch.zeros(3, 4), "step": 0}
    holdfast.torch.load_sharded(step, target)
    assert torch.equal(target["w"], state["w"])
module = torch.nn.Linear(4, 3)
holdfast.save(module.state_dict(), os.path.join(folder, "linear.safetensors"))
holdfast.torch.load_into(module, os.path.join(folder, "linear.safetensors"))
assert sorted(os.listdir(folder)) == ["linear.safetensors", "model.pt", "step"], os.listdir(folder)
print("done")
