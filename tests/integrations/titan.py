"""One rank of a small training with TorchTitan's parts; `test_torchtitan` starts as many as it wants.

    python -m tests.integrations.titan '[["name", "folder", "job", {"argument": 1}]]'

A job is a function here. What it returns is printed by rank 0, with the name, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

import holdfast
from holdfast.integrations.torchtitan import Checkpointer


class Loader:
    """A data loader with a state of its own on every rank, as TorchTitan's."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, object]:
        return {f"dp_rank_{dist.get_rank()}": bytes([self.at]), "world_size": dist.get_world_size()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if f"dp_rank_{dist.get_rank()}" in state:
            self.at = state[f"dp_rank_{dist.get_rank()}"][0]


class Progress:
    """What the trainer keeps of itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step, "ntokens_seen": self.step * 10 + dist.get_rank()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.step = state["step"]


class Adapter(StateDictAdapter):
    """To the names of Hugging Face, and one weight transposed."""

    def to_hf(self, state: dict[str, object]) -> dict[str, object]:
        return {
            f"model.{name}": value.T.contiguous() if name == "1.weight" else value
            for name, value in state.items()
        }

    def from_hf(self, state: dict[str, object]) -> dict[str, object]:
        plain = {name.removeprefix("model."): value for name, value in state.items()}
        return {
            name: value.T.contiguous() if name == "1.weight" else value
            for name, value in plain.items()
        }


class Training:
    """A model, all that belongs to it, and a checkpointer of some kind."""

    def __init__(
        self,
        folder: Path,
        kind: type = Checkpointer,
        *,
        seed: int = 0,
        assets: str | None = None,
        **config: object,
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizers = (
            default_adamw(lr=0.1)
            .__class__(param_groups=default_adamw(lr=0.1).param_groups, implementation="for-loop")
            .build(model_parts=[self.model])
        )
        assert isinstance(self.optimizers, OptimizersContainer)
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=100)
        self.loader, self.progress = Loader(), Progress()
        self.checkpointer = kind.Config(enable=True, **config).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=Adapter(None, assets),
            base_folder=str(folder),
        )

    def train(self, steps: int, *, last: int = -1) -> None:
        for _ in range(steps):
            self.progress.step += 1
            self.loader.at += 1
            loss = self.model(torch.full((2, 8), float(self.progress.step))).square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.checkpointer.save(self.progress.step, last_step=self.progress.step == last)

    def content(self) -> dict[str, object]:
        """All of the training, in plain numbers."""
        state = {
            name: value.full_tensor().tolist() for name, value in self.model.state_dict().items()
        }
        for name, value in self.optimizers.state_dict().items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            state[name] = full.tolist() if isinstance(full, torch.Tensor) else full
        return json.loads(
            json.dumps(
                state
                | self.schedulers.state_dict()
                | {"step": self.progress.step, "at": self.loader.at}
            )
        )


def steps(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoint")) if (folder / "checkpoint").exists() else []


KINDS = {"ours": Checkpointer, "stock": CheckpointManager}


def resume(
    folder: Path, *, writer: str, reader: str, format: str, background: bool = True
) -> object:
    """Train five steps, resume another training from the fourth, and train both to the end: they must be the same."""

    def options(kind: str) -> dict[str, object]:
        return {"format": format, "background": background} if kind == "ours" else {}

    one = Training(folder, KINDS[writer], interval=2, **options(writer))
    assert not one.checkpointer.load()
    one.train(4)
    one.checkpointer.maybe_wait_for_saving()
    saved = one.content()
    two = Training(folder, KINDS[reader], seed=1, interval=100, **options(reader))
    assert two.content() != saved
    assert two.checkpointer.load()
    assert two.content() == saved
    one.train(1)
    two.train(1)
    assert two.content() == one.content()
    one.checkpointer.close()
    two.checkpointer.close()
    return steps(folder)


def torn(folder: Path) -> object:
    """The newest step is torn, one is half removed: the training goes on from the newest whole one."""
    one = Training(folder, interval=1, keep_latest_k=0)
    one.train(3)
    one.checkpointer.close()
    expected = Training(folder, interval=100)
    assert expected.checkpointer.load(step=2)
    dist.barrier()
    if dist.get_rank() == 0:
        largest = max(
            (folder / "checkpoint" / "step-3").rglob("*"),
            key=lambda file: file.stat().st_size * file.is_file(),
        )
        os.truncate(largest, largest.stat().st_size // 2)
        (folder / "checkpoint" / "step-7").mkdir()
        (folder / "checkpoint" / ".step-9.abc.tmp").mkdir()
    dist.barrier()
    two = Training(folder, seed=1, interval=100)
    assert two.checkpointer.load()
    assert two.content() == expected.content()
    return two.progress.step


def retention(folder: Path, *, background: bool) -> object:
    """At every moment two whole steps are there once two were saved, and no more than the one that is being written besides."""
    one = Training(folder, interval=1, keep_latest_k=2, background=background)
    seen = []
    for _ in range(6):
        one.train(1)
        dist.barrier()
        whole = [
            name
            for name in steps(folder)
            if name.startswith("step-") and opens(folder / "checkpoint" / name)
        ]
        seen.append(len(whole))
        dist.barrier()
    one.checkpointer.close()
    dist.barrier()
    return {"seen": seen, "left": [name for name in steps(folder) if not name.startswith(".")]}


def opens(path: Path) -> bool:
    try:
        holdfast.open(path).close()
    except holdfast.HoldfastError:
        return False
    return True


def exported(folder: Path, *, hf: bool, assets: str | None = None) -> object:
    """The last step is the model alone; another training begins with it."""
    one = Training(folder, interval=2, last_save_in_hf=hf, export_dtype="bfloat16", assets=assets)
    one.train(5, last=5)
    one.checkpointer.close()
    path = folder / "checkpoint" / "step-5"
    weights = {
        name: value.full_tensor().to(torch.bfloat16)
        for name, value in one.model.state_dict().items()
    }
    with holdfast.torch.open(path) as checkpoint:
        found = {name: checkpoint[name] for name in checkpoint}
    expected = one.checkpointer._adapter.to_hf(weights) if hf else weights
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    two = Training(folder / "other", seed=1, initial_load_path=str(path), initial_load_in_hf=hf)
    assert two.checkpointer.load()
    assert all(
        torch.equal(value.full_tensor().bfloat16(), weights[name])
        for name, value in two.model.state_dict().items()
    )
    assert two.progress.step == 0
    # It cannot be gone on from: what is, has an optimizer.
    three = Training(folder, seed=2)
    assert three.checkpointer.load()
    assert three.progress.step == 4
    return sorted(os.listdir(path))


def failing(folder: Path) -> object:
    """A background save that fails on one rank is raised on all, where they wait for it."""
    one = Training(folder, interval=1)
    one.train(1)
    one.checkpointer.maybe_wait_for_saving()
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "checkpoint" / "step-2").write_text("a file is in the way")
    dist.barrier()
    try:
        one.train(1)
        one.checkpointer.maybe_wait_for_saving()
    except holdfast.HoldfastError as error:
        failure = type(error).__name__
    one.checkpointer.close()
    two = Training(folder, seed=1)
    assert two.checkpointer.load()
    assert two.progress.step == 1
    return failure


def missing(folder: Path) -> object:
    """A step without what is asked for is refused; a step that is not there as well."""
    one = Training(folder, interval=1, last_save_model_only=True)
    one.train(1, last=1)
    two = Training(folder, seed=1)
    said = []
    for step in (-1, 7):
        try:
            two.checkpointer.load(step=step)
        except (holdfast.HoldfastError, FileNotFoundError) as error:
            said.append(type(error).__name__)
    three = Training(
        folder,
        seed=1,
        exclude_from_loading=["optimizer", "lr_scheduler", "dataloader", "train_state"],
    )
    assert three.checkpointer.load(step=1)
    return said


def main() -> None:
    """Run every job of a list, each in a folder of its own."""
    dist.init_process_group("gloo")
    try:
        for name, folder, job, arguments in json.loads(sys.argv[1]):
            result = globals()[job](Path(folder), **arguments)
            dist.barrier()
            if dist.get_rank() == 0:
                print(json.dumps([name, result]), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
