"""accelerate's `save_state` with seals; and what it loses without, under the same fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import Corrupted, NotCommitted
from holdfast.verbs.seals.check import read_seal
from holdfast.verbs.seals.document import SEAL

accelerate = pytest.importorskip("accelerate")

from accelerate.utils import ProjectConfiguration  # noqa: E402 (where accelerate is there)

from holdfast.integrations.accelerate import guard, load_state, save_state  # noqa: E402
from tests.integrations.faults import files_of_at_most  # noqa: E402

pytestmark = pytest.mark.timeout(120)


class Training:
    """A line through some numbers."""

    def __init__(self, folder: Path, *, limit: int | None = None) -> None:
        torch.manual_seed(1)
        project = ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=limit
        )
        self.accelerator = accelerate.Accelerator(cpu=True, project_config=project)
        self.model = nn.Linear(64, 64)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def step(self) -> torch.Tensor:
        loss = self.model(torch.ones(2, 64)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.weights()

    def weights(self) -> torch.Tensor:
        return self.accelerator.unwrap_model(self.model).weight.detach().clone()


def left(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def test_what_was_saved_is_sealed_and_loaded(tmp_path: Path):
    training = Training(tmp_path)
    first = training.step()
    folder = save_state(training.accelerator, step=100, metrics={"loss": 0.5})
    assert folder == str(tmp_path / "checkpoints" / "checkpoint_0")
    seal = read_seal(folder)
    assert seal is not None
    assert (seal.step, dict(seal.metrics)) == (100, {"loss": 0.5})
    assert {file.name for file in seal.files} == set(os.listdir(folder)) - {SEAL}
    training.step()
    assert save_state(training.accelerator, step=200) == str(
        tmp_path / "checkpoints" / "checkpoint_1"
    )
    os.truncate(tmp_path / "checkpoints" / "checkpoint_1" / "optimizer.bin", 1000)

    again = Training(tmp_path)
    assert load_state(again.accelerator) == folder
    assert torch.equal(again.weights(), first)
    assert save_state(again.accelerator) == str(
        tmp_path / "checkpoints" / "checkpoint_2"
    )  # behind the torn one
    assert load_state(Training(tmp_path / "fresh").accelerator) is None
    assert load_state(again.accelerator, folder) == folder


def test_a_full_disk_leaves_nothing_there_and_the_step_before_here(tmp_path: Path):
    stock = Training(tmp_path / "stock", limit=1)
    stock.step()
    stock.accelerator.save_state()
    with files_of_at_most(20_000), pytest.raises((RuntimeError, OSError)):
        stock.accelerator.save_state()
    # The old one went first; what is left has weights and half an optimizer.
    assert left(tmp_path / "stock") == ["checkpoint_1"]
    with pytest.raises(Exception):  # noqa: B017 (whatever the reader of half a file raises)
        Training(tmp_path / "stock", limit=1).accelerator.load_state()

    ours = Training(tmp_path / "ours", limit=1)
    first = ours.step()
    save_state(ours.accelerator)
    ours.step()
    with files_of_at_most(20_000), pytest.raises((RuntimeError, OSError)):
        save_state(ours.accelerator)
    assert left(tmp_path / "ours") == ["checkpoint_0", "checkpoint_1"]
    again = Training(tmp_path / "ours", limit=1)
    assert load_state(again.accelerator) == str(tmp_path / "ours" / "checkpoints" / "checkpoint_0")
    assert torch.equal(again.weights(), first)
    assert holdfast.verify(tmp_path / "ours" / "checkpoints" / "checkpoint_0").ok
    # With room again the next one is saved, and only then the one before goes; the torn one was never counted.
    last = save_state(again.accelerator)
    assert last == str(tmp_path / "ours" / "checkpoints" / "checkpoint_2")
    assert left(tmp_path / "ours") == ["checkpoint_1", "checkpoint_2"]
    assert load_state(Training(tmp_path / "ours").accelerator) == last


def test_accelerate_itself_refuses_what_is_not_whole_when_it_is_guarded(tmp_path: Path):
    training = Training(tmp_path)
    guard(training.accelerator)
    training.accelerator.save_state()
    with pytest.raises(Corrupted, match="no seal"):
        training.accelerator.load_state()
    holdfast.seal(tmp_path / "checkpoints" / "checkpoint_0")
    training.accelerator.load_state()
    os.truncate(tmp_path / "checkpoints" / "checkpoint_0" / "optimizer.bin", 100)
    with pytest.raises(Corrupted, match=r"optimizer\.bin: truncated"):
        training.accelerator.load_state()


def test_a_seal_is_gone_before_its_folder_is_written_over(tmp_path: Path):
    training = Training(tmp_path)
    training.step()
    save_state(training.accelerator, tmp_path / "last", step=1)
    with files_of_at_most(20_000), pytest.raises((RuntimeError, OSError)):
        save_state(training.accelerator, tmp_path / "last", step=2)
    assert not (tmp_path / "last" / SEAL).exists()
    save_state(training.accelerator, tmp_path / "last", step=2)
    assert read_seal(tmp_path / "last").step == 2  # type: ignore[union-attr]  # it is there
    guard(training.accelerator)
    training.accelerator.project_configuration.automatic_checkpoint_naming = False
    with files_of_at_most(20_000), pytest.raises((RuntimeError, OSError)):
        training.accelerator.save_state(str(tmp_path / "last"))
    assert not (tmp_path / "last" / SEAL).exists()


def test_an_existing_folder_is_not_taken_for_a_new_one(tmp_path: Path):
    save_state(Training(tmp_path).accelerator)
    with pytest.raises(NotCommitted, match="iteration"):
        save_state(Training(tmp_path).accelerator)


RANK = """
import sys, time
from pathlib import Path
import torch
from holdfast.errors import NotCommitted
from tests.integrations.test_accelerate import Training, load_state, save_state

folder = Path(sys.argv[1])
training = Training(folder, limit=1)
first = training.step()
rank = training.accelerator.process_index
if rank == 1:
    import accelerate.accelerator as inner
    write = inner.save_accelerator_state
    inner.save_accelerator_state = lambda *a, **k: (time.sleep(1.0), write(*a, **k))[1]
saved = save_state(training.accelerator, step=1)
training.step()
if rank == 0:
    Path(folder, "bad").mkdir()
    Path(folder, "bad", "link").symlink_to("nowhere")
try:
    save_state(training.accelerator, folder / "bad", step=2)
    print("sealed", rank)
except NotCommitted:
    print("refused", rank)
assert load_state(training.accelerator) == saved
assert torch.equal(training.accelerator.unwrap_model(training.model).weight, first)
torch.distributed.destroy_process_group()
"""


def test_two_processes_wait_for_each_other_and_hear_of_failures(tmp_path: Path):
    port = str(21_000 + os.getpid() % 20_000)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)],
            env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for number, rank in enumerate(ranks):
        out, said = rank.communicate(timeout=110)
        assert rank.returncode == 0, said
        assert f"refused {number}" in out
    seal = read_seal(tmp_path / "checkpoints" / "checkpoint_0")
    assert seal is not None
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= {file.name for file in seal.files}
