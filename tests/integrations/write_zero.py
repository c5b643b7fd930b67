"""A program for two processes: DeepSpeed trains a small model on the CPU, saves it in each stage, and merges it by its own script.

python tests/integrations/write_zero.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing
from torch import nn

RANKS = 2


class Net(nn.Module):
    """Two groups, a tied weight, a frozen layer, buffers; sizes that two ranks cannot share equally."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 5)
        self.a = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.b = nn.Linear(7, 5, bias=False)
        self.frozen = nn.Linear(5, 3).requires_grad_(requires_grad=False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("table", torch.arange(13.0) / 3)
        self.register_buffer("count", torch.tensor([7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.norm(self.a(self.emb(x))))
        return self.head(h + self.frozen(h).sum() * 0).float().logsumexp(-1).mean()


def work(rank: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1",
        DS_ACCELERATOR="cpu",
    )  # fmt: skip
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # type: ignore[import-not-found]

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    deepspeed.init_distributed("gloo")
    for stage, more in ((1, {}), (2, {}), (3, {}), (3, {"sub_group_size": 12})):
        torch.manual_seed(0)
        net = Net()
        trained = [p for p in net.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more},
        }
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config
        )
        for step in range(3):
            engine.backward(engine(torch.arange(8).view(1, 8) + (rank + step) % 3))
            engine.step()
        own = Path(folder) / f"stage{stage}{'-sub' if more else ''}"
        engine.save_checkpoint(str(own))
        torch.distributed.barrier()
        if rank == 0:
            merged = get_fp32_state_dict_from_zero_checkpoint(str(own))
            torch.save(
                {name: tensor.clone() for name, tensor in merged.items()},
                own.with_suffix(".merged.pt"),
            )
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=RANKS)
