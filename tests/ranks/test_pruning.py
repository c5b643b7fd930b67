"""A model is pruned while FSDP2 trains it on two ranks, saved sharded with its masks, and goes on in one process and in two.

Masks are put on before `fully_shard`. Each rank has whole masks and a part of each weight; a step of the sparsifier gathers the
weights, so all ranks find the same masks, and those are the ones of a model that was never cut.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.torch.ranks.load_sharded import load_full, load_sharded
from holdfast.torch.ranks.save_sharded import save_sharded
from holdfast.torch.sparsity import (
    BaseSparsifier,
    CubicSL,
    MagnitudeSparsifier,
    WeightNormSparsifier,
)
from tests.ranks.pool import Failure, Pool, World, good

pytestmark = pytest.mark.timeout(120)

LEVEL, BEFORE, TOTAL, AFTER = 0.8, 4, 6, 5
"""The level in the end, steps until the save, those until that level is reached, and those after the save."""

NAMES = ("0.weight", "2.weight")

KINDS = {
    "magnitude": lambda: MagnitudeSparsifier(LEVEL),
    "global": lambda: MagnitudeSparsifier(LEVEL, scope="global"),
    "blocks": lambda: WeightNormSparsifier(LEVEL, (1, 4)),
}


class Run:
    """A model with a sparsifier and a schedule, cut over the ranks if there are several."""

    def __init__(
        self, world: World | None, kind: str, seed: int, saved: dict | None = None
    ) -> None:
        torch.manual_seed(seed)
        self.world = world
        self.model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8)).double()
        self.sparsifier: BaseSparsifier = KINDS[kind]()
        if saved is None:
            self.sparsifier.prepare(self.model, [{"tensor_fqn": name} for name in NAMES])
        else:
            self.sparsifier.load_state_dict(saved["sparsifier"], model=self.model)
        self.schedule = CubicSL(self.sparsifier, delta_t=1, total_t=TOTAL)
        if saved is not None:
            self.schedule.load_state_dict(saved["schedule"])
        if world is not None:
            fully_shard(self.model, mesh=world.mesh())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, number: int, *, prune: bool = True) -> None:
        batch = torch.randn(
            8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
        )
        mine = batch if self.world is None else batch.chunk(self.world.size)[self.world.rank]
        self.optimizer.zero_grad()
        (self.model(mine) - mine[:, :8]).square().mean().backward()
        self.optimizer.step()
        if prune:
            self.sparsifier.step()
            self.schedule.step()

    def masks(self) -> list[list[bool]]:
        return [(self.sparsifier.state[name]["mask"] != 0).flatten().tolist() for name in NAMES]

    def levels(self) -> list[float]:
        return [group["sparsity_level"] for group in self.sparsifier.groups]

    def weights(self) -> list[torch.Tensor]:
        """What the model computes with, whole."""
        found = []
        for name in NAMES:
            layer = self.model.get_submodule(name.partition(".")[0])
            tensor = layer.parametrizations.weight.original.detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.append(layer.parametrizations.weight[0](whole))
        return found

    def state(self) -> dict[str, object]:
        return {
            "model": get_model_state_dict(self.model),
            "sparsifier": self.sparsifier.state_dict(),
            "schedule": self.schedule.state_dict(),
        }


def train(world: World, path: str, kind: str) -> list[tuple[list[list[bool]], list[float]]]:
    """Prune on the way up the schedule, and save before its end. The masks and levels of each step."""
    run = Run(world, kind, 1)
    seen = []
    for number in range(BEFORE + AFTER):
        if number == BEFORE:
            save_sharded(path, run.state(), group=world.group, durable=False)
        run.step(number)
        seen.append((run.masks(), run.levels()))
    assert isinstance(next(run.model.parameters()), DTensor)
    return seen


def resume(world: World, path: str, kind: str) -> list[tuple[list[list[bool]], list[float]]]:
    """Masks and levels that follow when another model, on as many ranks as there are, goes on."""
    saved = load_full(path)
    run = Run(world, kind, 2, saved)
    state = {"model": get_model_state_dict(run.model)}
    load_sharded(path, state, group=world.group, strict=False)
    set_model_state_dict(run.model, state["model"])
    seen = []
    for number in range(BEFORE, BEFORE + AFTER):
        run.step(number)
        seen.append((run.masks(), run.levels()))
    return seen


def squash(world: World) -> None:
    run = Run(world, "magnitude", 1)
    run.step(0)
    run.sparsifier.squash_mask()


def load_late(world: World) -> None:
    run = Run(world, "magnitude", 1)
    run.sparsifier.load_state_dict(run.sparsifier.state_dict())


def prepare_late(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mesh=world.mesh())
    MagnitudeSparsifier(0.5).prepare(model)


def zeros(masks: list[list[bool]]) -> list[int]:
    return [mask.count(False) for mask in masks]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_hold_from_two_ranks_to_one(pool: Pool, tmp_path: Path, kind: str):
    path = str(tmp_path / "step")
    first, second = good(pool.run(2, train, path, kind))
    assert first == second, "all ranks have the same masks"
    # The same without ranks.
    alone = Run(None, kind, 1)
    for number, (masks, levels) in enumerate(first):
        alone.step(number)
        assert (alone.masks(), alone.levels()) == (masks, levels)
    level = [LEVEL * (1 - (1 - min(t, TOTAL) / TOTAL) ** 3) for t in range(1, BEFORE + AFTER + 1)]
    assert [levels for _, levels in first] == [pytest.approx([x, x]) for x in level], (
        "the schedule's levels"
    )
    # Loaded in one process: the masks as they were saved, then fine-tuned.
    saved = load_full(path)
    run = Run(None, kind, 2, saved)
    run.model.load_state_dict(saved["model"])
    assert run.masks() == first[BEFORE - 1][0]
    for number in range(BEFORE, BEFORE + AFTER):
        run.step(number)
        assert (run.masks(), run.levels()) == first[number]
        assert all(
            not weight[torch.tensor(m).view_as(weight) == 0].any()
            for weight, m in zip(run.weights(), run.masks(), strict=True)
        )
    reached = zeros(run.masks())
    assert sum(reached) == pytest.approx(LEVEL * (12 * 16 + 16 * 8), abs=4)
    masks, before = run.masks(), run.weights()
    for number in range(3):
        run.step(100 + number, prune=False)
    assert run.masks() == masks
    run.sparsifier.squash_mask()
    after = [run.model.get_parameter(name) for name in NAMES]
    assert [int((weight == 0).sum()) for weight in after] == reached
    assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True)), (
        "what is left was trained"
    )
    # And on two ranks again.
    for seen in good(pool.run(2, resume, path, kind)):
        assert seen == first[BEFORE:]


@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [
        (squash, "Refused", "squash_mask() of a model that is cut over ranks"),
        (load_late, "Refused", "load_state_dict() of a model that is cut over ranks"),
        (
            prepare_late,
            "TypeError",
            "is a DTensor: masks are for plain tensors; prepare before fully_shard",
        ),
    ],
)
def test_masks_are_put_on_and_taken_off_whole_models(pool: Pool, job, kind: str, text: str):
    for found in pool.run(2, job):
        assert isinstance(found, Failure)
        assert kind in found.kinds
        assert text in found.text
