"""A small transformer is trained with FSDP2 on two ranks, saved, and goes on with two, four and one as if nothing had happened.

What is loaded is bit-equal to what was saved. The losses that follow are bit-equal on as many ranks. On more or fewer, gradients
are summed in another order, so they agree to 1e-14 (in float64; measured are 2e-16, the last bit). To forget the optimizer's
moments changes them by 2e-2.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from holdfast.torch.ranks.load_sharded import load_sharded
from holdfast.torch.ranks.save_sharded import async_save_sharded, save_sharded
from tests.ranks.pool import Pool, World, good
from tests.ranks.states import gather_values

pytestmark = pytest.mark.timeout(120)

WIDTH, LENGTH, VOCABULARY, BATCH = 32, 6, 17, 8
BEFORE, AFTER = 3, 3
"""Steps until the save, and from there on."""


class Transformer(nn.Module):
    """Two layers, no dropout, a head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def _made(
    world: World, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    model = Transformer().double()
    if world.size > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=world.mesh())
        fully_shard(model, mesh=world.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _step(world: World, number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step on this rank's share of the batch; the loss of the whole batch."""
    tokens = torch.randint(
        0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(number)
    )
    mine = tokens.chunk(world.size)[world.rank]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    shared = loss.detach().clone()
    dist.all_reduce(shared, group=world.group)
    return shared.item() / world.size


def _state(model, optimizer, scheduler, step: int) -> dict[str, object]:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
        "step": step,
    }


def train(world: World, path: str, format: str, block: bool) -> tuple[list[float], object]:
    """The run that nothing interrupts. It saves on its way."""
    model, optimizer, scheduler = _made(world, 1)
    losses, saved, handle = [], None, None
    for number in range(BEFORE + AFTER):
        if number == BEFORE:
            state = _state(model, optimizer, scheduler, number)
            saved = gather_values(state)
            save = save_sharded if block else async_save_sharded
            handle = save(path, state, group=world.group, format=format, durable=False)
        losses.append(_step(world, number, model, optimizer))
        scheduler.step()
    if not block:
        handle.wait(30)
    return losses[BEFORE:], saved


def resume(world: World, path: str, *, forget: bool = False) -> tuple[list[float], object]:
    """Another model, filled from the checkpoint, goes on."""
    model, optimizer, scheduler = _made(world, 2)
    # As torch's own documentation has it: states exist after a first step, and are loaded in place.
    state = _state(model, optimizer, scheduler, -1)
    load_sharded(path, state, group=world.group)
    set_model_state_dict(model, state["model"])
    if not forget:
        set_optimizer_state_dict(model, optimizer, state["optim"])
    scheduler.load_state_dict(state["scheduler"])
    loaded = gather_values(_state(model, optimizer, scheduler, state["step"]))
    losses = []
    for number in range(state["step"], state["step"] + AFTER):
        losses.append(_step(world, number, model, optimizer))
        scheduler.step()
    return losses, loaded


def forget(world: World, path: str) -> list[float]:
    return resume(world, path, forget=True)[0]


@pytest.mark.parametrize(("format", "block"), [("native", True), ("native", False), ("dcp", True)])
def test_training_goes_on(pool: Pool, tmp_path: Path, format: str, block: bool):
    path = str(tmp_path / "step-3")
    ran = good(pool.run(2, train, path, format, block))
    (wanted, saved), losses = ran[0], [losses for losses, _ in ran]
    assert losses[0] == losses[1]
    assert wanted[0] != wanted[-1]
    for size in (2, 4, 1):
        for found, loaded in good(pool.run(size, resume, path)):
            assert loaded == saved, "every weight, moment and number is what it was, bit for bit"
            if size == 2:
                assert found == wanted, "the same sums in the same order"
            else:
                assert found == pytest.approx(wanted, rel=1e-14, abs=0)
    assert good(pool.run(2, forget, path))[0] != pytest.approx(wanted, rel=1e-3), (
        "without the moments it would be another run"
    )
