"""Copies of what a rank saves: the same elements, in memory of our own, however they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.engine import source
from holdfast.engine.arrays import MemoryTensors
from holdfast.engine.table import make_lazy_table
from holdfast.torch.cuda import memory, stage
from holdfast.torch.cuda.host import HostBlock
from holdfast.torch.ranks import staging
from holdfast.torch.tensors.to_lazy import torch_leaf

BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
TENSORS = {
    "whole": BASE,
    "row": BASE[1, 2],
    "turned": BASE.permute(3, 1, 0, 2),
    "part": BASE[1:, ::2, 1:3],
    "number": BASE[1, 2, 3, 4],
    "empty": BASE[:0],
    "conj": torch.complex(BASE, BASE).conj(),
    "neg": torch._neg_view(BASE[0]),
    "half": BASE.to(torch.bfloat16)[:, 1],
    "long": torch.arange(100_000),
    **{f"small{i}": torch.full((i,), i) for i in range(1, 50)},
}


@pytest.mark.parametrize("piece", [1 << 12, 64 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_layout(monkeypatch, piece, threads):
    monkeypatch.setattr(staging, "PIECE_NBYTES", piece)
    monkeypatch.setattr(staging, "LEAST_NBYTES", piece // 2)
    planned = []
    before = source.OpenSource.read
    monkeypatch.setattr(
        source.OpenSource,
        "read",
        lambda self, requests: planned.append(len(requests)) or before(self, requests),
    )
    convert = torch_leaf(MemoryTensors())
    table = make_lazy_table(
        [*TENSORS], [convert(tensor, (name,)) for name, tensor in TENSORS.items()]
    )
    staged = staging.stage(table, staging.Versions(), "path", threads=threads)
    assert planned == [5], "what lies in memory as it is wanted is copied without a plan"
    for tensor, copy in zip(TENSORS.values(), staged.table.values(), strict=True):
        expected = (
            tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
            if tensor.numel()
            else np.empty(0, "u1")
        )
        assert np.ascontiguousarray(copy.numpy()).tobytes() == expected.tobytes()
    TENSORS["long"].add_(1)
    assert staged.table["long"].numpy()[0] == int(TENSORS["long"][0]) - 1


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.int8, torch.float64]])
@pytest.mark.parametrize("together", [1 << 8, 64 << 20])
def test_rows_are_laid_behind_each_other_and_copied_as_one(monkeypatch, dtypes, together):
    monkeypatch.setattr(memory, "GATHER_NBYTES", together)
    monkeypatch.setattr(memory, "SHORT_NBYTES", 1 << 10)
    tensors = [
        torch.arange(1, n + 1, dtype=dtypes[n % len(dtypes)]) for n in (1, 16, 300, 5, 5, 64, 7)
    ] + [torch.tensor(3.0)]
    nbytes = np.array([tensor.nbytes for tensor in tensors])
    starts = np.cumsum(nbytes + -nbytes % 64) - nbytes - -nbytes % 64
    starts[-2:] += 640
    room = HostBlock(int(starts[-1] + nbytes[-1]), lock_nbytes=0)
    copies = stage.Copies(room)
    copies.begin_rows(tensors[0].device, tensors, starts, nbytes)
    copies.wait()
    for tensor, start in zip(tensors, starts.tolist(), strict=True):
        assert room.array[start : start + tensor.nbytes].tobytes() == tensor.numpy().tobytes()
