"""Copies out of a device, gathered: every byte comes to its place, whatever the dtypes and gaps. Here the device is the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.torch.cuda.memory import GpuStorages

DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def some_tensors(seed: int, dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 60))
    return [
        (torch.rand(int(rng.integers(1, 5_000))) * 100).to(dtypes[int(rng.integers(len(dtypes)))])
        for _ in range(count)
    ]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtypes", [DTYPES[:1], DTYPES])
def test_storages_are_gathered_in_any_order(dtypes: tuple[torch.dtype, ...]):
    tensors = some_tensors(3, dtypes)
    nbytes = np.array([len(bytes_of(tensor)) for tensor in tensors], np.int64)
    storages = GpuStorages(
        dict(enumerate(tensors)), nbytes, [torch.device("cpu")], alike=len(dtypes) == 1
    )
    for numbers in (range(len(tensors)), [*reversed(range(len(tensors)))], [0]):
        assert [bytes(piece) for piece in storages.read([*numbers])] == [
            bytes_of(tensors[number]) for number in numbers
        ]
