"""Ranks that open a path while another save replaces it load one checkpoint, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

import holdfast
from holdfast.core.group import check_same_checkpoint
from holdfast.errors import Replaced
from holdfast.torch.ranks.load_sharded import load_sharded
from holdfast.torch.ranks.save_sharded import save_sharded
from holdfast.verbs.open import hash_checkpoint
from tests.ranks.pool import Pool, World, failures, good
from tests.ranks.states import sharded

SIZE = 2


def state_of(world: World, number: float) -> dict[str, object]:
    return {
        "rows": sharded(torch.full((6, 4), number), world.mesh(), (Shard(0),)),
        "plain": torch.full((3,), number),
    }


def save_two(world: World, folder: str, format: str) -> None:
    for number in (1.0, 2.0):
        save_sharded(
            f"{folder}/{number}",
            state_of(world, number),
            group=world.group,
            format=format,
            durable=False,
        )


def load_apart(world: World, folder: str) -> None:
    """What the ranks would open if a save fell between them."""
    load_sharded(f"{folder}/{1.0 + world.rank}", state_of(world, 0.0), group=world.group)


def load_together(world: World, folder: str) -> None:
    state = state_of(world, 0.0)
    load_sharded(f"{folder}/1.0", state, group=world.group)
    assert torch.equal(state["plain"], torch.ones(3))


def test_ranks_that_opened_different_checkpoints_load_none(pool: Pool, tmp_path: Path):
    good(pool.run(SIZE, save_two, str(tmp_path), "native"))
    raised = failures(pool.run(SIZE, load_apart, str(tmp_path)))
    assert {one.kinds[0] for one in raised} == {"RanksFailed"}
    assert all("different checkpoints" in one.text for one in raised)
    good(pool.run(SIZE, load_together, str(tmp_path)))


@pytest.mark.parametrize("name", ["x", "x.pt"])
def test_copies_are_one_checkpoint_and_other_content_is_not(tmp_path: Path, name: str):
    marks = []
    for folder, number in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / folder).mkdir()
        holdfast.save({"w": torch.full((5,), number), "step": 1}, tmp_path / folder / name)
        with holdfast.open(tmp_path / folder / name) as checkpoint:
            marks.append(hash_checkpoint(checkpoint))
    check_same_checkpoint(marks[:2])
    with pytest.raises(Replaced) as raised:
        check_same_checkpoint(marks)
    assert raised.value.found == (2,)


def test_other_data_without_recorded_checksums_is_another_checkpoint(tmp_path: Path):
    marks = []
    for name, number in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        save_file({"w": torch.full((5,), number)}, tmp_path / f"{name}.safetensors")
        with holdfast.open(tmp_path / f"{name}.safetensors") as checkpoint:
            marks.append(hash_checkpoint(checkpoint))
    assert marks[0] == marks[1] != marks[2]
