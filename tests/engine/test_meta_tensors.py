"""Tensors of the meta device have a shape and no data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import Unsupported

READS = {
    "all": lambda tensor: tensor.numpy(),
    "a slice": lambda tensor: tensor[1:].numpy(),
    "into memory": lambda tensor: tensor.read(out=np.empty(3, np.float32)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_a_meta_tensor_is_refused(read, tmp_path):
    torch.save({"w": torch.empty(3, device="meta"), "v": torch.ones(2)}, tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint["w"].shape == (3,)
        with pytest.raises(Unsupported, match="saved on the meta device"):
            read(checkpoint["w"])
        assert checkpoint["v"].numpy().tolist() == [1, 1]
