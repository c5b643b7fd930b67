"""Counts of zeros, compared with an oracle that looks at one group and block at a time."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.core.arrays import matrix_shape
from holdfast.engine.arrays import MemoryTensors
from holdfast.numeric.zeros import GROUP_SIZES
from holdfast.verbs import sparsity as module
from holdfast.verbs.sparsity import BLOCKS, EXPLAINED, TensorSparsity, find_zeros


def find_zeros_by_definition(array: np.ndarray) -> TensorSparsity:
    """Loop over all groups and blocks. This is right because it repeats the definitions."""
    zero = np.array([value == 0 for value in array.reshape(-1).tolist()], bool).reshape(array.shape)
    zeros, filled = int(zero.sum()), int((~zero).sum())
    patterns = []
    for m in GROUP_SIZES:
        if array.ndim and array.shape[-1] % m == 0 and array.size:
            most = max(int(group.sum()) for group in ~zero.reshape(-1, m))
            if 0 < most < m and filled >= EXPLAINED * array.size * most / m:
                patterns.append((most / m, m, most))
    matrix = zero.reshape(matrix_shape(array.shape))
    rows, columns = matrix.shape
    block = None
    for height, width in BLOCKS:
        if height <= rows and width <= columns and zeros and filled:
            tiles = [
                matrix[i : i + height, j : j + width]
                for i in range(0, rows, height)
                for j in range(0, columns, width)
            ]
            if sum(tile.size for tile in tiles if tile.all()) >= EXPLAINED * zeros:
                block = height, width
                break
    dead = (0, 0)
    # A tensor without elements has no dead rows or columns, however many it claims.
    if array.ndim > 1 and array.size:
        dead = (int(matrix.all(axis=1).sum()), int(matrix.all(axis=0).sum()))
    best = min(patterns, default=None)
    return TensorSparsity(
        "", array.dtype.name, array.shape, zeros, best and (best[2], best[1]), block, *dead
    )


def make_pruned_array(rng: np.random.Generator, shape: tuple[int, ...], layout: str) -> np.ndarray:
    array = rng.standard_normal(shape) + 3
    matrix = array.reshape(matrix_shape(shape))
    rows, columns = matrix.shape
    if layout == "anywhere":
        matrix[rng.random(matrix.shape) < rng.choice([0.02, 0.5, 0.99])] = 0
    elif layout == "groups" and array.size:
        m = int(rng.choice([2, 4, 8, 16]))
        order = (
            rng.random((rows, -(-columns // m) * m))
            .reshape(rows, -1, m)
            .argsort(axis=2)
            .reshape(rows, -1)[:, :columns]
        )
        matrix[order < int(rng.integers(1, m))] = -0.0
    elif layout == "blocks" and array.size:
        height, width = BLOCKS[int(rng.integers(len(BLOCKS)))]
        is_dead = rng.random((-(-rows // height), -(-columns // width))) < rng.choice([0.1, 0.6])
        matrix[np.repeat(np.repeat(is_dead, height, axis=0), width, axis=1)[:rows, :columns]] = 0
        matrix[rng.random(matrix.shape) < 0.001] = 0
    elif layout == "lines" and array.size:
        matrix[rng.random(rows) < 0.3] = 0
        matrix[:, rng.random(columns) < 0.3] = 0
    return array


SHAPES = [
    (),
    (0, 4),
    (4, 0),
    (1,),
    (7,),
    (64,),
    (130,),
    (1, 200),
    (3, 5),
    (64, 64),
    (65, 129),
    (100, 90),
    (200, 16),
    (130, 8, 9),
    (2, 4096),
]


@settings(deadline=None, max_examples=examples(150))
@given(
    st.sampled_from(SHAPES),
    st.sampled_from(["anywhere", "groups", "blocks", "lines"]),
    st.sampled_from(
        [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int8, np.bool_, np.complex64]
    ),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_zeros_are_where_counting_finds_them(shape, layout, dtype, uses_small_tiles, seed):
    array = make_pruned_array(np.random.default_rng(seed), shape, layout).astype(dtype)
    if uses_small_tiles and array.ndim == 2:
        array = np.asfortranarray(array)
    with pytest.MonkeyPatch.context() as patch:
        if uses_small_tiles:
            patch.setattr(module, "TILE_COLUMNS", 64)
        (found,) = find_zeros([MemoryTensors().wrap_array(array)], threads=2)
    expected = find_zeros_by_definition(array)
    assert [getattr(found, name) for name in expected.__slots__[1:]] == [
        getattr(expected, name) for name in expected.__slots__[1:]
    ]
