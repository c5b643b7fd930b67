"""torch's `dcp.save` and `dcp.load` on several ranks, over our storage: any ranks save, any others load, stock or ours."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.integrations.dcp import Reader, Writer
from tests.ranks.conftest import Saved
from tests.ranks.jobs import load, load_stock
from tests.ranks.pool import Pool, World, good
from tests.ranks.states import check, state_of

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def save_through(world: World, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            state_of(world), storage_writer=Writer(path, durable=False), process_group=world.group
        )


def load_through(world: World, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for other in (False, True):
            state = state_of(world, blank=True, other=other)
            dcp.load(state, storage_reader=Reader(path), process_group=world.group)
            check(world, state, nested=True, other=other)
    torch.distributed.barrier(world.group)


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 4), (4, 1), (3, 2)])
@pytest.mark.parametrize("format", ["dcp", "stock-dcp", "native"])
def test_ranks_load_through_the_reader(
    format: str, saving: int, loading: int, pool: Pool, saved: Saved
):
    good(pool.run(loading, load_through, str(saved(format, saving))))


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 4), (4, 1), (3, 2)])
def test_ranks_save_through_the_writer(saving: int, loading: int, pool: Pool, tmp_path: Path):
    path = str(tmp_path / "step")
    good(pool.run(saving, save_through, path))
    assert [each.name for each in tmp_path.iterdir()] == ["step"]
    good(pool.run(loading, load_stock, path, "dcp"))
    good(pool.run(loading, load_through, path))
    good(pool.run(loading, load, path, True))
