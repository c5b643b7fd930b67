"""The faults that cost others a step (`test_accelerate`, `test_demonstrations`, `test_trainer`), in a Run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import holdfast
import holdfast.torch
from holdfast.errors import NotCommitted
from tests.integrations.faults import files_of_at_most


class Training:
    """A model, its optimizer, and the numbers of a step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self) -> torch.Tensor:
        self.model(torch.ones(2, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.model.weight.detach().clone()

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}


def test_a_full_disk_leaves_the_step_before(tmp_path: Path):
    training, run = Training(), holdfast.torch.Run(tmp_path, keep="latest:1")
    first = training.step()
    run.save(1, training.state)
    training.step()
    with files_of_at_most(20_000), pytest.raises(NotCommitted):
        run.save(2, training.state)
    assert [step.step for step in run] == [1]
    again = Training()
    assert run.resume(into=again.state) is not None
    assert torch.equal(again.model.weight, first)
    run.save(2, training.state)
    assert [step.step for step in run] == [2]  # the one before went when this one was there


def test_there_is_a_whole_step_at_every_moment(tmp_path: Path):
    training, run = Training(), holdfast.torch.Run(tmp_path, keep="latest:1", durable=False)
    run.save(0, training.state)
    seen: set[object] = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            found = holdfast.Run(tmp_path).latest()
            seen.add(None if found is None else found.step)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for step in range(1, 12):
            training.step()
            run.async_save(step, training.state)
        run.wait()
    finally:
        over.set()
        looking.join()
    assert None not in seen
    assert len(seen) > 1
    assert [step.step for step in run] == [11]


def test_a_torn_step_with_the_highest_number_is_neither_resumed_from_nor_counted(tmp_path: Path):
    training, run = Training(), holdfast.torch.Run(tmp_path, keep="latest:1")
    first = training.step()
    run.save(1, training.state)
    torn = tmp_path / "step-00000009"
    torn.mkdir()
    (torn / "data-00001-of-00001.safetensors").write_bytes(b"half")
    again = Training()
    run.resume(into=again.state)
    assert torch.equal(again.model.weight, first)
    run.save(2, training.state)
    latest = run.latest()
    assert latest is not None
    assert latest.step == 2
