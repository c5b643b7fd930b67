"""Packed tensors of a native directory as torch's, and torch's sparse tensors in checkpoints."""

import pytest
import torch
from torch import nn

import holdfast
from holdfast.numeric.pack import packing_of
from holdfast.torch import async_save_sharded, load_into, load_sharded, save_sharded
from holdfast.torch import open as open_torch


def pruned_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 128), nn.Embedding(40, 200)).to(
        torch.bfloat16
    )
    with torch.no_grad():
        for weight in (model[0].weight, model[1].weight, model[2].weight):
            weight.mul_(torch.rand(weight.shape) < 0.3)
            weight[0, 0] = -0.0
    return model


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)
    )


@pytest.fixture
def saved(tmp_path):
    model = pruned_model()
    holdfast.save(model.state_dict(), tmp_path / "c", sparse="auto")
    with holdfast.open(tmp_path / "c") as ckpt:
        assert sum(packing_of(tensor) is not None for tensor in ckpt.values()) == 3
    return model.state_dict(), tmp_path / "c"


def test_tensors_are_read(saved):
    state, path = saved
    with open_torch(path) as ckpt:
        for name, tensor in state.items():
            assert same_bits(ckpt[name], tensor)
    with holdfast.open(path) as ckpt:
        assert same_bits(ckpt["2.weight"][3:9, 5:].torch(), state["2.weight"][3:9, 5:])


@pytest.mark.parametrize(
    "load",
    [load_into, lambda target, path: load_sharded(path, target)],
    ids=["load_into", "load_sharded"],
)
def test_a_module_is_filled(saved, load):
    state, path = saved
    target = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 128), nn.Embedding(40, 200)).to(
        torch.bfloat16
    )
    load(target, path)
    assert all(same_bits(tensor, state[name]) for name, tensor in target.state_dict().items())


COMPOSITES = {
    "coo": lambda dense: dense.to_sparse_coo(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 4)),
    "bsc": lambda dense: dense.to_sparse_bsc((4, 2)),
}


@pytest.mark.parametrize("target", ["c", "c.pt"])
@pytest.mark.parametrize("kind", COMPOSITES)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_layouts_go_both_ways(tmp_path, kind, target):
    dense = torch.zeros(8, 16)
    dense[2:4, 4:8] = torch.arange(8.0).reshape(2, 4) - 3
    made = COMPOSITES[kind](dense)
    sparse = {} if target == "c.pt" else {"sparse": "auto"}
    holdfast.save({"w": made, "step": 3}, tmp_path / target, **sparse)
    other = tmp_path / ("again.pt" if target == "c" else "again")
    holdfast.convert(tmp_path / target, other)
    for path in (tmp_path / target, other):
        with open_torch(path) as ckpt:
            found = ckpt.tree["w"]
        assert found.layout is made.layout
        assert torch.equal(found.to_dense(), dense)
    path = tmp_path / target if target.endswith(".pt") else other
    assert torch.equal(torch.load(path, weights_only=True)["w"].to_dense(), dense)


@pytest.mark.parametrize("block", [True, False], ids=["now", "in the background"])
def test_save_sharded_packs_too(saved, tmp_path, block):
    state, path = saved
    done = (save_sharded if block else async_save_sharded)(
        tmp_path / "sharded", state, sparse="auto"
    )
    if not block:
        done.wait()
    with holdfast.open(tmp_path / "sharded") as ckpt:
        assert sum(packing_of(tensor) is not None for tensor in ckpt.values()) == 3
        assert all(same_bits(ckpt[name].torch(), tensor) for name, tensor in state.items())
    assert holdfast.diff(path, tmp_path / "sharded").equal
    assert holdfast.verify(tmp_path / "sharded").ok
    assert not (tmp_path / "sharded" / "model.safetensors.index.json").exists()
