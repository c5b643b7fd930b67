"""Distributed checkpoints with torch's own calls, in one process: save, load, a part, in the background, over what is there."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys


class Counter:
    """Something that keeps its own state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "seen": torch.full((3,), self.count)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.count = int(str(state["count"]))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Linear(16, 4).to(torch.bfloat16).float(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for _ in range(3):
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state() -> dict[str, object]:
    whole = torch.arange(60.0).reshape(6, 10)
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": moments,
        "views": {
            "rows": whole[1:3],
            "columns": whole[:, 2:4],
            "turned": whole.t(),
            "whole": whole,
        },
        "kinds": {
            str(dtype).removeprefix("torch."): torch.arange(7).to(dtype)
            for dtype in (
                torch.bool,
                torch.uint8,
                torch.int64,
                torch.float16,
                torch.bfloat16,
                torch.complex64,
                torch.float8_e4m3fn,
            )
        },
        "small": [torch.tensor(1.5), torch.zeros(0, 3), {"deep": (1, "two", None, b"three")}],
        "step": 17,
        "text": "words",
        "counter": Counter(5),
        "rng": torch.get_rng_state(),
    }


def emptied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(emptied, value))
    return Counter() if isinstance(value, Counter) else value


def same(one: object, two: object, where: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(two, torch.Tensor), where
        assert one.dtype == two.dtype, where
        assert one.shape == two.shape, where
        assert torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)), (
            where
        )
    elif isinstance(one, dict):
        assert isinstance(two, dict), where
        assert sorted(map(str, one)) == sorted(map(str, two)), where
        for key in one:
            same(one[key], two[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert isinstance(two, list | tuple), where
        assert len(one) == len(two), where
        for index, each in enumerate(one):
            same(each, two[index], f"{where}.{index}")
    elif isinstance(one, Counter):
        assert isinstance(two, Counter), where
        assert one.count == two.count, where
    else:
        assert one == two, where


def main() -> None:
    torch.manual_seed(3)
    saved = state()
    dcp.save(saved, checkpoint_id="plain")
    loaded = emptied(saved)
    dcp.load(loaded, checkpoint_id="plain")
    same(saved, loaded)

    dcp.async_save(saved, checkpoint_id="background").result()
    loaded = emptied(saved)
    dcp.load(loaded, checkpoint_id="background")
    same(saved, loaded)

    # Over one that is there, with one file a rank, with and without the cache of the plan.
    for _ in range(2):
        writer = dcp.FileSystemWriter(
            "again", single_file_per_rank=False, thread_count=2, overwrite=True
        )
        dcp.save(saved, storage_writer=writer)
    loaded = emptied(saved)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader("again"))
    same(saved, loaded)

    # Parts of it, and without a state to fill.
    some = {"views": emptied(saved["views"])}
    dcp.load(some, checkpoint_id="plain")
    same(saved["views"], some["views"])
    found = _load_state_dict_from_keys({"views"}, checkpoint_id="plain")
    same(saved["views"], found["views"])

    model, optimizer = trained()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    weights, moments = get_state_dict(model, optimizer)
    into = {"model": weights, "optimizer": moments}
    dcp.load(into, checkpoint_id="background")
    set_state_dict(
        model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
    )
    same(saved["model"], model.state_dict())

    try:
        dcp.load({"nothing": torch.zeros(1)}, checkpoint_id="plain")
    except dcp.CheckpointException:
        return
    raise AssertionError("a tensor was loaded that is not there")


if __name__ == "__main__":
    main()
