"""`fill` against copies one by one: rows and lazy tensors, to targets that may overlap, be strided or have another dtype."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.table import IRREGULAR
from holdfast.torch.tensors.fill import Fills, fill, is_dense
from tests.sampling import examples

LENGTH = 64


@st.composite
def targets(draw):
    """Where in a buffer a tensor of some elements lies, and which buffer: one of the file's dtype, or another."""
    count, step = draw(st.integers(0, 8)), draw(st.sampled_from([1, 1, 1, 2]))
    return count, step, draw(st.integers(0, LENGTH - count * step)), draw(st.integers(0, 3)) == 0


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(targets(), min_size=1, max_size=8), st.data())
def test_the_last_one_wins(drawn, data):
    state = {
        f"t{i}": np.arange(count, dtype=np.float32) + 100 * i
        for i, (count, _, _, _) in enumerate(drawn)
    }
    with holdfast.open(holdfast.to_bytes(state, "safetensors")) as checkpoint:
        table = checkpoint.stored
        found, plain = (
            (torch.full((LENGTH,), -1.0), torch.full((LENGTH,), -1.0, dtype=torch.float64))
            for _ in range(2)
        )
        views = []
        rows, lazies = [], {}
        for i, (count, step, start, cast) in enumerate(drawn):
            views.append(found[cast][start : start + count * step : step])
            expected = plain[cast][start : start + count * step : step]
            expected.copy_(torch.from_numpy(state[f"t{i}"]))
            if not cast and is_dense(views[i]) and data.draw(st.booleans()):
                rows.append(table.row_indices[f"t{i}"])
            else:
                lazies[i] = checkpoint[f"t{i}"]
                rows.append(IRREGULAR)
        counted: list[int] = []
        fill(Fills(table, rows, lazies, views), counted.append)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert sum(counted) == sum(array.nbytes for array in state.values())
