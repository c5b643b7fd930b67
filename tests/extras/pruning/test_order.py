"""The order of pruning in numpy and in torch: the same keys in the same order, whatever ties, NaN and signs there are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from holdfast.numeric import threshold as of_arrays
from holdfast.torch.sparsity import masks as of_tensors

SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-14, np.inf, -np.inf, np.nan, -np.nan, 1.5, -1.5, 65504.0]
CPU = torch.device("cpu")


def values(kind: str, dtype: torch.dtype) -> torch.Tensor:
    rng = np.random.default_rng(5)
    drawn = rng.standard_normal(5000) if kind == "random" else rng.choice(SPECIAL, 5000)
    return torch.from_numpy(drawn).to(dtype)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.mark.parametrize("kind", ["random", "ties"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_magnitudes_have_one_order(kind, dtype):
    tensor = values(kind, dtype)
    own = of_arrays.magnitude_keys(as_array(tensor), str(dtype).removeprefix("torch."))
    wide = of_arrays.magnitude_keys(as_array(tensor), "float64")
    np.testing.assert_array_equal(of_tensors.magnitude_keys(tensor).numpy().view(np.uint64), wide)
    # Keys of fewer bits are other numbers in the same order, equals and all.
    np.testing.assert_array_equal(
        np.unique(own, return_inverse=True)[1], np.unique(wide, return_inverse=True)[1]
    )


@pytest.mark.parametrize("seed", [0, 7, -5, (1 << 64) + 3])
def test_random_keys_have_one_order(seed):
    expected = of_arrays.random_keys(3, 70_000, seed).view(np.int64)
    np.testing.assert_array_equal(
        of_tensors.random_keys(3, 70_000, seed=seed, device=CPU).numpy(), expected
    )
