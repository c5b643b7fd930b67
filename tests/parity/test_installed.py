"""torch's own programs with ours in their place: what they do with `torch.save` and `torch.load` comes out the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from holdfast.torch import install, uninstall
from tests.support import ALONE
from tests.torch.serialization.test_weights import assert_same


@pytest.fixture(params=["stock", "installed"], autouse=True)
def programs(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test runs with torch as it is and with ours in its place: it can fail for either."""
    if request.param == "stock":
        yield request.param
        return
    install()
    try:
        yield request.param
    finally:
        uninstall()


def state() -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    moments = optimizer.state_dict()
    moments["state"] = {
        str(number): values for number, values in moments["state"].items()
    }  # torch's converter makes them text
    return {
        "model": dict(model.state_dict()),
        "optimizer": moments,
        "step": 7,
        "text": "epoch",
        "nested": {"list": [1, 2.5, None], "rng": torch.get_rng_state()},
    }


def zeroed(value: object) -> object:
    """The same state with other values, to be loaded into."""
    match value:
        case torch.Tensor():
            return torch.zeros_like(value)
        case dict():
            return {key: zeroed(item) for key, item in value.items()}
        case list():
            return [zeroed(item) for item in value]
        case int() | float() if not isinstance(value, bool):
            return type(value)(0)
        case _:
            return value


def saved(folder: Path) -> None:
    dcp.save(state(), checkpoint_id=folder, **ALONE)


def saved_in_the_background(folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        dcp.async_save(state(), checkpoint_id=folder).result()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("save", [saved, saved_in_the_background])
def test_a_distributed_checkpoint_goes_round(save: Callable[[Path], None], tmp_path: Path):
    save(tmp_path / "step")
    target = zeroed(state())
    dcp.load(target, checkpoint_id=tmp_path / "step", **ALONE)
    assert_same(target, state())


def test_a_distributed_checkpoint_becomes_one_file_and_comes_back(tmp_path: Path):
    saved(tmp_path / "step")
    dcp_to_torch_save(tmp_path / "step", tmp_path / "one.pt")
    assert_same(torch.load(tmp_path / "one.pt", weights_only=False), state())
    torch_save_to_dcp(tmp_path / "one.pt", tmp_path / "again")
    target = zeroed(state())
    dcp.load(target, checkpoint_id=tmp_path / "again", **ALONE)
    assert_same(target, state())
