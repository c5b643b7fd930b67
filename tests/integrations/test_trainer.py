"""transformers' Trainer with `SealCallback`; and what it does without, under the same faults."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastWarning
from holdfast.verbs.seals.check import read_seal
from holdfast.verbs.seals.document import SEAL

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers.trainer_utils import get_last_checkpoint  # noqa: E402 (where transformers is there)

from holdfast.integrations.transformers import SealCallback, latest_whole  # noqa: E402
from tests.integrations.faults import files_of_at_most  # noqa: E402

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore::UserWarning")]


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def examples() -> list[dict[str, torch.Tensor]]:
    numbers = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    return [{"x": row, "labels": row * 2} for row in numbers]


def trainer(
    folder: Path, *callbacks: object, steps: int = 6, **more: object
) -> transformers.Trainer:
    given = {"save_steps": 2, "save_strategy": "steps", "eval_strategy": "no", **more}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **given,
    )
    return transformers.Trainer(
        model=Line(),
        args=args,
        train_dataset=examples(),
        eval_dataset=examples()[:4],
        callbacks=list(callbacks),
    )


class Full(transformers.TrainerCallback):
    """From a step on the disk has room for the weights, and none for the optimizer."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._limit = files_of_at_most(20_000)

    def on_step_begin(
        self, args: object, state: transformers.TrainerState, control: object, **more: object
    ) -> None:
        if state.global_step == self._step - 1:
            self._limit.__enter__()

    def over(self) -> None:
        self._limit.__exit__(None, None, None)


def cut_off(folder: Path, step: int, *callbacks: object, **more: object) -> None:
    """Train until a save fails because the disk is full."""
    full = Full(step)
    made = trainer(folder, full, *callbacks, **more)
    try:
        with pytest.raises((RuntimeError, OSError)):
            made.train()
    finally:
        full.over()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def weights(made: transformers.Trainer) -> torch.Tensor:
    return made.model.layer.weight.detach().clone()


def test_every_checkpoint_is_sealed_and_verifies(tmp_path: Path):
    trainer(tmp_path, SealCallback(), eval_strategy="steps", eval_steps=2).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        seal = read_seal(folder)
        assert seal is not None
        assert seal.step == step
        assert set(seal.metrics) == {"eval_loss"}
        assert {file.name for file in seal.files} == set(os.listdir(folder)) - {SEAL}
        assert holdfast.verify(folder).ok
    assert latest_whole(tmp_path) == str(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / "rng_state.pth").unlink()
    assert latest_whole(tmp_path) == str(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_bytes(
        (tmp_path / "checkpoint-4" / "trainer_state.json")
        .read_bytes()
        .replace(b'"global_step": 4', b'"global_step": 5')
    )
    assert latest_whole(tmp_path) == str(tmp_path / "checkpoint-4")
    assert latest_whole(tmp_path, deep=True) == str(tmp_path / "checkpoint-2")
    assert latest_whole(tmp_path / "nothing") is None


def test_a_full_disk_tears_a_step_that_transformers_resumes_from_and_we_do_not(tmp_path: Path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    # transformers: the highest number is the newest, whatever is in it.
    cut_off(tmp_path / "stock", 4)
    assert get_last_checkpoint(str(tmp_path / "stock")) == str(tmp_path / "stock" / "checkpoint-4")
    with pytest.raises((OSError, RuntimeError, ValueError)):
        trainer(tmp_path / "stock").train(resume_from_checkpoint=True)
    # Here: the newest that is whole, and the training ends as if nothing had happened.
    cut_off(tmp_path / "ours", 4, SealCallback())
    assert names(tmp_path / "ours") == ["checkpoint-2", "checkpoint-4"]
    assert latest_whole(tmp_path / "ours") == str(tmp_path / "ours" / "checkpoint-2")
    again = trainer(tmp_path / "ours", SealCallback())
    again.train(resume_from_checkpoint=latest_whole(tmp_path / "ours"))
    assert torch.equal(weights(again), weights(whole))
    assert latest_whole(tmp_path / "ours") == str(tmp_path / "ours" / "checkpoint-6")
    assert (
        holdfast.verify(tmp_path / "ours" / "checkpoint-4").seal is not None
    )  # written again, and whole now


class NoTimes(transformers.TrainerCallback):
    """A file system on which all folders have about one time, as that of a bucket has, or a copy."""

    def on_step_end(
        self, args: transformers.TrainingArguments, *rest: object, **more: object
    ) -> None:
        for name in os.listdir(args.output_dir):
            os.utime(Path(args.output_dir, name), (time.time(), time.time()))


def test_rotation_keeps_a_torn_step_there_and_the_good_ones_here(tmp_path: Path):
    cut_off(tmp_path / "stock", 4)
    trainer(tmp_path / "stock", NoTimes(), steps=3, save_steps=3, save_total_limit=1).train(
        resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-2")
    )
    assert names(tmp_path / "stock") == [
        "checkpoint-4"
    ]  # both good ones are gone: it was the newest by its number
    with pytest.raises((OSError, RuntimeError, ValueError)):
        trainer(tmp_path / "stock").train(resume_from_checkpoint=True)

    cut_off(tmp_path / "ours", 4, SealCallback(keep=1))
    trainer(tmp_path / "ours", NoTimes(), SealCallback(keep=1), steps=3, save_steps=3).train(
        resume_from_checkpoint=latest_whole(tmp_path / "ours")
    )
    assert latest_whole(tmp_path / "ours") == str(tmp_path / "ours" / "checkpoint-3")
    assert not (tmp_path / "ours" / "checkpoint-2").exists()
    assert holdfast.verify(tmp_path / "ours" / "checkpoint-3").ok


class Signal(transformers.TrainerCallback):
    """What SIGTERM does to a Trainer with `enable_jit_checkpoint`, when its time to wait is over."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.trainer: transformers.Trainer | None = None

    def on_step_end(
        self, args: object, state: transformers.TrainerState, control: object, **more: object
    ) -> None:
        if state.global_step == self._step and self.trainer is not None:
            for callback in self.trainer.callback_handler.callbacks:
                if getattr(callback, "jit_manager", None) is not None:
                    callback.jit_manager.is_checkpoint_requested = True


@pytest.mark.parametrize("full", [False, True], ids=["with room", "full"])
def test_a_save_at_a_signal_is_sealed_if_it_is_whole(tmp_path: Path, full: bool):
    signal = Signal(3)
    disk = Full(3)
    made = trainer(
        tmp_path, SealCallback(), signal, *([disk] if full else []), enable_jit_checkpoint=True
    )
    signal.trainer = made
    if not full:
        made.train()
        assert read_seal(tmp_path / "checkpoint-3") is not None  # that of the signal
        assert latest_whole(tmp_path) == str(
            tmp_path / "checkpoint-4"
        )  # that of the step in which it was noticed
        return
    try:
        with pytest.raises((RuntimeError, OSError)):
            made.train()
    finally:
        disk.over()
    marker = tmp_path / "checkpoint-3" / "checkpoint-is-incomplete.txt"
    assert marker.exists()
    assert get_last_checkpoint(str(tmp_path)) == str(
        tmp_path / "checkpoint-3"
    )  # although it says itself that it is none
    assert latest_whole(tmp_path) == str(tmp_path / "checkpoint-2")


def test_a_seal_is_gone_before_its_folder_is_written_over(tmp_path: Path):
    trainer(tmp_path, SealCallback()).train()
    before = (tmp_path / "checkpoint-4" / "optimizer.pt").stat().st_size
    # The same step again from an earlier one: sizes are equal, so nothing but the missing seal tells that it is torn.
    full = Full(4)
    made = trainer(tmp_path, full, SealCallback())
    try:
        with pytest.raises((RuntimeError, OSError)):
            made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    finally:
        full.over()
    os.truncate(tmp_path / "checkpoint-4" / "optimizer.pt", before)
    assert not (tmp_path / "checkpoint-4" / SEAL).exists()
    (tmp_path / "checkpoint-6" / SEAL).unlink()
    assert latest_whole(tmp_path) == str(tmp_path / "checkpoint-2")


def test_rules_say_which_stay(tmp_path: Path):
    rules = ["latest:1", "best:eval_loss:1", holdfast.Every(4)]
    trainer(
        tmp_path,
        SealCallback(keep=rules),
        steps=10,
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=0.1,
    ).train()
    scores = {step.step: step.metrics["eval_loss"] for step in holdfast.Run(tmp_path)}
    assert {4, 8, 10} <= set(scores)
    assert len(scores) in (3, 4)  # the best one may be one of these
    assert set(names(tmp_path)) == {f"checkpoint-{step}" for step in scores}


def test_a_limit_of_the_trainer_is_warned_of(tmp_path: Path):
    with pytest.warns(HoldfastWarning, match="save_total_limit"):
        trainer(tmp_path, SealCallback(), steps=2, save_total_limit=2).train()


RANK = """
import sys, time
from pathlib import Path
import torch
from tests.integrations.test_trainer import SealCallback, trainer

made = trainer(Path(sys.argv[1]), SealCallback(), steps=2, ddp_backend="gloo")
if made.args.process_index == 1:
    late = made._save_rng_state
    made._save_rng_state = lambda folder: (time.sleep(1.0), late(folder))
made.train()
torch.distributed.destroy_process_group()
"""


def test_the_files_of_other_ranks_are_waited_for(tmp_path: Path):
    port = str(20_000 + os.getpid() % 20_000)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)],
            env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        _, said = rank.communicate(timeout=150)
        assert rank.returncode == 0, said
    seal = read_seal(tmp_path / "checkpoint-2")
    assert seal is not None
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {file.name for file in seal.files}
