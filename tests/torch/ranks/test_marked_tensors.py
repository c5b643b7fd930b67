"""Plain tensors that say of which whole they are parts: shards, as `torch.distributed.checkpoint` has it since 2.14."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.errors import BadPlacement
from holdfast.torch import async_save_sharded, load_sharded, save_sharded, versions
from holdfast.torch.ranks.shards import is_sharded, shards_of
from tests.support import ALONE, needs

WHOLE = torch.arange(12.0).reshape(4, 3)


def marked(tensor: torch.Tensor, **fields: object) -> torch.Tensor:
    for name, value in fields.items():
        setattr(tensor, name, value)
    return tensor


def in_two(whole: torch.Tensor) -> torch.Tensor:
    """The lower rows first, then one of padding, then the upper ones."""
    held = torch.cat([whole[2:], torch.full((1, 3), -1.0), whole[:2]])
    return marked(
        held,
        global_shape=(4, 3),
        global_offsets=((2, 0), (0, 0)),
        local_offsets=((0, 0), (3, 0)),
        local_sizes=((2, 3), (2, 3)),
    )


def by_column(whole: torch.Tensor) -> torch.Tensor:
    """Three columns, the last one first."""
    columns = ((0, 2), (0, 1), (0, 0))
    return marked(
        whole.flip(1).contiguous(),
        global_shape=(4, 3),
        global_offsets=columns,
        local_offsets=columns[::-1],
        local_sizes=((4, 1),) * 3,
    )


def test_parts_are_views_of_the_tensor():
    tensor = in_two(WHOLE)
    assert is_sharded(tensor)
    found = shards_of(tensor, "w")
    assert found.shape == (4, 3)
    assert [(part.box.start, part.box.stop) for part in found.parts] == [
        ((2, 0), (4, 3)),
        ((0, 0), (2, 3)),
    ]
    found.parts[1].tensor.fill_(-7)
    assert tensor[3:].eq(-7).all()
    assert tensor[:3].ne(-7).all()
    assert not is_sharded(
        marked(torch.zeros(2), global_shape=(4,), global_offsets=((0,),), local_offsets=((0,),))
    )


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
@pytest.mark.parametrize(
    "way",
    [save_sharded, lambda *args, **more: async_save_sharded(*args, **more).wait()],
    ids=["now", "later"],
)
def test_they_are_saved_as_the_whole_and_loaded_in_other_parts(tmp_path, format, way):
    way({"w": in_two(WHOLE)}, tmp_path / "x", format=format, durable=False)
    with holdfast.open(tmp_path / "x") as ckpt:
        assert torch.equal(ckpt["w"].torch(), WHOLE)
    for other in (in_two, by_column):
        target = other(torch.zeros(4, 3))
        load_sharded(tmp_path / "x", {"w": target})
        assert torch.equal(target, other(WHOLE))


@needs(versions.CHECKPOINTABLE_TENSOR)
@pytest.mark.parametrize("there", [in_two, by_column])
def test_torchs_checkpoint_and_ours_read_each_other(tmp_path, there):
    dcp.save({"w": in_two(WHOLE)}, checkpoint_id=tmp_path / "theirs", **ALONE)
    save_sharded({"w": in_two(WHOLE)}, tmp_path / "ours", format="dcp", durable=False)
    target = there(torch.zeros(4, 3))
    load_sharded(tmp_path / "theirs", {"w": target})
    assert torch.equal(target, there(WHOLE))
    again = there(torch.zeros(4, 3))
    dcp.load({"w": again}, checkpoint_id=tmp_path / "ours", **ALONE)
    assert torch.equal(again, there(WHOLE))


@pytest.mark.parametrize(
    "wrong",
    [
        {"local_sizes": ((2, 3),)},
        {"global_offsets": ((3, 0), (0, 0))},
        {"local_offsets": ((0, 0), (4, 0))},
        {"global_offsets": ((2,), (0,))},
        {"local_offsets": ((0, 0), (-1, 0))},
        {"local_sizes": ((2, 3), (2, 3, 1))},
    ],
    ids=str,
)
def test_parts_that_lie_nowhere_are_refused(tmp_path, wrong):
    with pytest.raises(BadPlacement, match=r"(global|local)_offsets"):
        save_sharded({"w": marked(in_two(WHOLE), **wrong)}, tmp_path / "x", durable=False)
    assert not (tmp_path / "x").exists()
