"""Tensors of the meta device have a shape and no data."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.errors import Unsupported


@pytest.mark.parametrize("read", [lambda tensor: tensor.numpy(), lambda tensor: tensor[1:].numpy()])
def test_reading_a_meta_tensor_is_refused(read, tmp_path):
    torch.save({"w": torch.empty(3, device="meta"), "v": torch.ones(2)}, tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint["w"].shape == (3,)
        with pytest.raises(Unsupported, match="saved on the meta device"):
            read(checkpoint["w"])
        assert checkpoint["v"].numpy().tolist() == [1, 1]
