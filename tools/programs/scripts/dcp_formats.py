"""From a distributed checkpoint to one file and back, with torch's own calls."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp import emptied, same, state, trained
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)


def main() -> None:
    torch.manual_seed(3)
    saved = state()
    del saved["counter"]
    dcp.save(saved, checkpoint_id="dcp")

    dcp_to_torch_save("dcp", "one.pt")
    for mapped in (False, True):
        same(saved, torch.load("one.pt", weights_only=False, mmap=mapped))

    torch_save_to_dcp("one.pt", "two")
    loaded = emptied(saved)
    dcp.load(loaded, checkpoint_id="two")
    same(saved, loaded)

    # A file of torch.save, read on the first rank as if it were a distributed checkpoint.
    model, _ = trained()
    torch.save(model.state_dict(), "model.pt")
    weights = emptied(dict(model.state_dict()))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dcp.load(
        weights,
        storage_reader=BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
        checkpoint_id="model.pt",
    )
    same(dict(model.state_dict()), weights)
    dist.destroy_process_group()

    # The same from the command line.
    command = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils"]
    subprocess.run([*command, "dcp_to_torch", "dcp", "three.pt"], check=True)
    subprocess.run([*command, "torch_to_dcp", "three.pt", "four"], check=True)
    loaded = emptied(saved)
    dcp.load(loaded, checkpoint_id="four")
    same(saved, loaded)


if __name__ == "__main__":
    main()
