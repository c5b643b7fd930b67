"""torch's sparse tensors in checkpoints."""

import pytest
import torch

import holdfast
from holdfast.torch import open as open_torch

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
    holdfast.save({"w": made, "step": 3}, tmp_path / target)
    other = tmp_path / ("again.pt" if target == "c" else "again")
    holdfast.convert(tmp_path / target, other)
    for path in (tmp_path / target, other):
        with open_torch(path) as ckpt:
            found = ckpt.tree["w"]
        assert found.layout is made.layout
        assert torch.equal(found.to_dense(), dense)
    path = tmp_path / target if target.endswith(".pt") else other
    assert torch.equal(torch.load(path, weights_only=True)["w"].to_dense(), dense)
