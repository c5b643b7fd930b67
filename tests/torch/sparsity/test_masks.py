"""Masks as functions of tensors, held against sorting in Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from holdfast.core.arrays import matrix_shape
from holdfast.numeric import threshold as pruning_order
from holdfast.torch.sparsity import masks
from holdfast.torch.sparsity.masks import (
    block_mask,
    checked_level,
    global_masks,
    global_threshold,
    magnitude_mask,
    nm_mask,
    pruned_count,
    random_mask,
)
from tests.torch.sparsity.models import quantised

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.fixture
def small_chunks(monkeypatch):
    """Every tensor is a large one: histograms, several chunks."""
    monkeypatch.setattr(masks, "CHUNK_ELEMENTS", 7)
    monkeypatch.setattr(pruning_order, "SORTED_KEYS", 3)


def tied(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Few different values, of both signs."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return (torch.randint(-4, 5, shape, generator=generator) / 2).to(dtype)


def lowest(values: list[float], count: int) -> set[int]:
    """The indices that go, by Python's stable sort."""
    return set(
        sorted(
            range(len(values)),
            key=lambda i: (math.isnan(values[i]), abs(values[i]) if values[i] == values[i] else 0),
        )[:count]
    )


def gone(mask: torch.Tensor) -> set[int]:
    assert mask.dtype is torch.bool
    return set((~mask).flatten().nonzero().flatten().tolist())


@pytest.mark.parametrize("level", [0, 0.1, 0.5, 0.77, 0.999, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_go_and_of_equals_the_first(dtype, level):
    tensor = tied(5, 9, dtype=dtype)
    mask = magnitude_mask(tensor, level)
    assert mask.shape == tensor.shape
    assert gone(mask) == lowest(tensor.double().flatten().tolist(), pruned_count(level, 45))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("level", [0.1, 0.77])
def test_large_tensors_are_pruned_alike(level):
    for tensor in (
        tied(5, 9),
        torch.randn(41, generator=torch.Generator().manual_seed(1)),
        torch.zeros(30),
        torch.rand(50) * 1e-40,
    ):
        assert gone(magnitude_mask(tensor, level)) == lowest(
            tensor.flatten().tolist(), pruned_count(level, tensor.numel())
        )
    with_held = torch.arange(20.0)
    held = with_held > 15
    assert gone(magnitude_mask(with_held, 0.5, pruned=held)) == {0, 1, 2, 3, 4, 5, 16, 17, 18, 19}


def test_nan_goes_last_and_zeros_have_no_sign():
    tensor = torch.tensor([float("nan"), -0.0, float("inf"), 0.0, -float("nan"), 5.0])
    order_of_going = [
        next(iter(gone(magnitude_mask(tensor, k / 6)) - gone(magnitude_mask(tensor, (k - 1) / 6))))
        for k in range(1, 6)
    ]
    assert order_of_going == [1, 3, 5, 2, 0]


def test_values_that_float32_would_tie_are_told_apart():
    tensor = torch.tensor([1 + 2**-50, 1.0, 1 + 2**-51], dtype=torch.float64)
    assert gone(magnitude_mask(tensor, 2 / 3)) == {1, 2}


def test_what_is_pruned_already_goes_first_and_comes_back_largest_first():
    tensor = torch.tensor([1.0, 9.0, 2.0, 8.0, 0.0])
    held = torch.tensor([False, True, False, True, False])
    assert gone(magnitude_mask(tensor, 0.4, pruned=held)) == {1, 3}
    assert gone(magnitude_mask(tensor, 0.6, pruned=held)) == {1, 3, 4}
    assert gone(magnitude_mask(tensor, 0.2, pruned=held)) == {3}


@pytest.mark.parametrize(
    ("level", "count", "expected"),
    [(0.5, 5, 2), (0.5, 7, 4), (0.9, 4, 3), (1, 4, 4), (0.05, 10, 0), (1, 0, 0), (0.5, 1, 0)],
)
def test_how_many_go(level, count, expected):
    assert pruned_count(level, count) == expected


@pytest.mark.parametrize("level", [-0.1, 1.5, 90, float("nan"), float("inf")])
def test_a_level_outside_of_its_range_is_refused(level):
    for prune in (magnitude_mask, random_mask):
        with pytest.raises(ValueError, match="from 0 to 1"):
            prune(torch.ones(4), level)
    with pytest.raises(ValueError, match="from 0 to 1"):
        block_mask(torch.ones(4, 4), (1, 1), level)


def test_a_level_says_what_was_meant():
    with pytest.raises(ValueError, match=r"for 90 percent say 0\.9"):
        checked_level(90)
    with pytest.raises(TypeError, match="not a str"):
        checked_level("0.5")
    assert checked_level(1 + 1e-12) == 1  # somebody's rounding


@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        (quantised(4), TypeError, "quantised"),
        (torch.arange(4), TypeError, "is torch.int64"),
        (torch.ones(4, 4).to_sparse(), TypeError, "dense"),
        (torch.ones(4, device="meta"), ValueError, "meta"),
        ([1.0], TypeError, "list"),
    ],
)
def test_what_has_no_order_is_refused(tensor, error, text):
    with pytest.raises(error, match=text):
        magnitude_mask(tensor, 0.5)


def test_one_threshold_over_tensors_of_several_dtypes():
    tensors = [tied(3, 4), tied(7, dtype=torch.bfloat16), tied(2, 2, 2, dtype=torch.float64)]
    values = [x for tensor in tensors for x in tensor.double().flatten().tolist()]
    for level in (0.2, 0.5, 0.9):
        count = pruned_count(level, len(values))
        flat = torch.cat([mask.flatten() for mask in global_masks(tensors, level)])
        assert gone(flat) == lowest(values, count)
        threshold = global_threshold(tensors, level)
        assert threshold.value == sorted(map(abs, values))[count - 1]
        assert threshold.ties == count - sum(abs(x) < threshold.value for x in values)


def test_nothing_is_below_the_threshold_of_level_zero():
    threshold = global_threshold([torch.zeros(3)], 0)
    assert (threshold.value, threshold.ties) == (0, 0)
    assert global_masks([], 0.5) == []
    assert magnitude_mask(torch.empty(0, 3), 0.5).shape == (0, 3)


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (0, 2), (4, 4), (1, 2)])
def test_n_of_every_m_stay(n, m, dim):
    tensor = tied(4, 8, 12)
    mask = nm_mask(tensor, n, m, dim=dim)
    moved, kept = tensor.movedim(dim, -1).reshape(-1, m), mask.movedim(dim, -1).reshape(-1, m)
    for values, keep in zip(moved.tolist(), kept, strict=True):
        assert gone(keep) == lowest(values, m - n)


def test_n_of_every_m_with_marks_and_in_chunks(small_chunks):
    tensor = tied(6, 8)
    assert torch.equal(nm_mask(tensor, 2, 4), block_mask(tensor, (1, 4), 1, zeros_per_block=2))
    held = torch.zeros(6, 8, dtype=torch.bool)
    held[:, ::4] = True
    assert not nm_mask(tensor, 1, 4, pruned=held)[:, ::4].any()


@pytest.mark.parametrize(
    ("n", "m", "dim", "text"),
    [
        (2, 5, -1, "multiple of 5"),
        (3, 2, -1, "0 <= n <= m"),
        (1, 2, 2, "no axis 2"),
        (0, 0, 0, "m >= 1"),
    ],
)
def test_n_of_m_that_cannot_be(n, m, dim, text):
    with pytest.raises(ValueError, match=text):
        nm_mask(torch.ones(4, 8), n, m, dim=dim)


def block_oracle(
    tensor: torch.Tensor, shape: tuple[int, int], level: float, zeros: int, power: int
) -> torch.Tensor:
    """Block by block, in Python."""
    matrix = tensor.double().reshape(matrix_shape(tensor.shape))
    kept = torch.ones(matrix.shape, dtype=torch.bool)
    rows, columns = matrix.shape
    blocks = [(r, c) for r in range(0, rows, shape[0]) for c in range(0, columns, shape[1])]
    inside = {
        (r, c): [
            (i, j)
            for i in range(r, min(r + shape[0], rows))
            for j in range(c, min(c + shape[1], columns))
        ]
        for r, c in blocks
    }
    means = [
        sum(abs(float(matrix[at])) ** power for at in inside[b]) / len(inside[b]) for b in blocks
    ]
    for k in lowest(means, pruned_count(level, len(blocks))):
        places = inside[blocks[k]]
        missing = shape[0] * shape[1] - len(places)
        for i in lowest([float(matrix[at]) for at in places], max(0, zeros - missing)):
            kept[places[i]] = False
    return kept.view(tensor.shape)


@pytest.mark.parametrize("shape", [(6, 8), (5, 7), (3, 2, 3, 3), (9,)])
@pytest.mark.parametrize("block", [(1, 1), (1, 4), (2, 3), (4, 4), (20, 20)])
def test_blocks(shape, block):
    tensor = tied(*shape)
    size = block[0] * block[1]
    for level, zeros, norm in itertools.product((0, 0.5, 1), {0, 1, size // 2, size}, (1, 2)):
        assert torch.equal(
            block_mask(tensor, block, level, zeros_per_block=zeros, norm=norm),
            block_oracle(tensor, block, level, zeros, norm),
        )
    assert torch.equal(block_mask(tensor, block, 0.5), block_oracle(tensor, block, 0.5, size, 2))


@pytest.mark.usefixtures("small_chunks")
def test_blocks_in_chunks():
    assert torch.equal(
        block_mask(tied(11, 13), (2, 3), 0.6, zeros_per_block=4),
        block_oracle(tied(11, 13), (2, 3), 0.6, 4, 2),
    )


def test_a_norm_may_be_a_function_also_one_that_is_negative():
    tensor = tied(6, 8)
    assert torch.equal(
        block_mask(tensor, (2, 2), 0.5, zeros_per_block=3, norm=torch.abs),
        block_mask(tensor, (2, 2), 0.5, zeros_per_block=3, norm=1),
    )
    signed = torch.tensor([[3.0, -5.0, 0.0, -0.0, float("nan"), 1.0]])
    goes = [gone(block_mask(signed, (1, 1), k / 6, norm=lambda x: x)) for k in range(1, 6)]
    assert [next(iter(b - a)) for a, b in itertools.pairwise([set(), *goes])] == [1, 2, 3, 5, 0]
    with pytest.raises(ValueError, match=r"each element, \(1, 6\); found \(\)"):
        block_mask(signed, (1, 1), 0.5, norm=torch.sum)
    with pytest.raises(NotImplementedError):
        block_mask(signed, (1, 1), 0.5, norm=3)


def test_a_block_that_is_pruned_already_is_chosen_first():
    tensor = torch.tensor([[9.0, 9, 1, 1, 2, 2, 0, 0]])
    held = torch.tensor([[True, True] + [False] * 6])
    assert gone(block_mask(tensor, (1, 2), 0.5, pruned=held)) == {0, 1, 6, 7}
    held = torch.tensor([[False, True] + [False] * 6])
    assert gone(block_mask(tensor, (1, 2), 0.25, zeros_per_block=1, pruned=held)) == {1}


@pytest.mark.parametrize(
    ("block", "zeros", "text"),
    [
        ((0, 1), None, "at least 1"),
        ((2,), None, "rows and columns"),
        ((1, 4), 5, "4 elements"),
        ((1, 4), -1, "4 elements"),
    ],
)
def test_blocks_that_cannot_be(block, zeros, text):
    with pytest.raises(ValueError, match=text):
        block_mask(torch.ones(4, 4), block, 0.5, zeros_per_block=zeros)


def test_marks_have_the_shape_and_device_of_the_tensor():
    for pruned in (
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(2, 2),
        torch.zeros(2, 2, dtype=torch.bool, device="meta"),
    ):
        with pytest.raises(ValueError, match="marked by booleans"):
            magnitude_mask(torch.ones(2, 2), 0.5, pruned=pruned)


def test_chance_is_reproducible_nested_and_even():
    tensor = torch.empty(100, 100)
    half, most = random_mask(tensor, 0.5, 7), random_mask(tensor, 0.9, 7)
    assert len(gone(half)) == 5000
    assert gone(half) < gone(most)
    assert torch.equal(half, random_mask(torch.ones(100, 100, dtype=torch.float64), 0.5, 7))
    assert len(gone(half) & gone(random_mask(tensor, 0.5, 8))) == pytest.approx(2500, abs=150)
    assert (~half).sum(0).double().mean() == 50
    assert (~half).sum(0).double().std() == pytest.approx(5, abs=1.5)
    a, b = (random_mask(tensor, 0.5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(random_mask(tensor, 0.5), random_mask(tensor, 0.5))


def test_random_keys_are_splitmix64():
    # The first outputs for the seed 1234567, from the reference program of Vigna; without the lowest bit.
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert masks.random_keys(0, 3, seed=1234567, device=torch.device("cpu")).tolist() == [
        x >> 1 for x in reference
    ]
    assert masks.random_keys(
        1, 3, seed=1234567 + (1 << 64), device=torch.device("cpu")
    ).tolist() == [x >> 1 for x in reference[1:]]
