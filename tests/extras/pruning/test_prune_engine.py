"""The threshold of pruning against sorting, what is lost against plain sums, and pruned tensors read at odd places."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.engine.arrays import MemoryTensors
from holdfast.errors import NotCommitted
from holdfast.extras.pruning import masked as prune_loss
from holdfast.extras.pruning import select as prune_select
from holdfast.extras.pruning.masked import (
    Loss,
    Masked,
    Tally,
    Weighed,
    loss_of,
)
from holdfast.extras.pruning.masks import (
    BlockMask,
    GroupMask,
    ThresholdMask,
    group_keep,
    zero_out,
)
from holdfast.extras.pruning.select import KeySearch, Magnitudes, RandomKeys, select
from holdfast.numeric import threshold as prune_keys
from holdfast.numeric import threshold as prune_order
from holdfast.numeric.threshold import mean_squares, random_keys
from tests.sampling import examples

NARROW = {15: "float16", 31: "float32", 63: "float64"}
"""By the bits of their keys: floats whose magnitudes have them."""


def given_keys(keys: list[int], width: int) -> Magnitudes:
    """A tensor in memory that has these keys, some of its numbers negative."""
    order = prune_keys.KEY_ORDERS[NARROW[width]]
    floats, bits = order.float_dtype, order.bits_dtype
    signs = np.arange(len(keys), dtype=bits) % bits.type(2) << bits.type(width)
    return Magnitudes(
        MemoryTensors().wrap_array((np.array(keys, bits) | signs).view(floats)), NARROW[width]
    )


def oracle(sources: list[list[int]], count: int) -> list[np.ndarray]:
    """What stays, by sorting: the lowest keys go, of equals the first of the first source."""
    every = np.concatenate([np.array(source, np.uint64) for source in sources])
    kept = np.ones(len(every), bool)
    kept[np.argsort(every, kind="stable")[:count]] = False
    return np.split(kept, np.cumsum([len(source) for source in sources])[:-1])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], int, int]:
    width = draw(st.sampled_from(sorted(NARROW)))
    # Few distinct keys, in few buckets of a histogram: ties in every place.
    most = prune_order.KEY_ORDERS[NARROW[width]].infinity_key
    some = draw(st.lists(st.integers(0, most), min_size=1, max_size=6))
    near = [min(key + 1, most) for key in some]
    keys = st.lists(st.sampled_from(some + near), min_size=0, max_size=60)
    found = draw(st.lists(keys, min_size=1, max_size=4).filter(lambda lists: any(lists)))
    return found, width, draw(st.integers(0, sum(map(len, found))))


@settings(deadline=None)
@given(
    st.lists(cases(), min_size=1, max_size=3),
    st.sampled_from([1, 5, 1000]),
    st.sampled_from([1, 3]),
)
def test_a_threshold_is_the_one_that_sorting_finds(every, few, threads):
    """Several searches at once, of several tensors each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prune_order, "SORTED_KEYS", few)
        patch.setattr(prune_select, "PIECE_ELEMENTS", 7)
        searched = [
            KeySearch([given_keys(keys, width) for keys in sources], count)
            for sources, width, count in every
        ]
        select(searched, threads=threads)
    for (sources, _, count), cut in zip(every, searched, strict=True):
        expected = oracle(sources, count)
        for source, before, kept in zip(sources, cut.before, expected, strict=True):
            keys, after = np.array(source, np.uint64), np.arange(len(source)) >= before
            np.testing.assert_array_equal(np.where(after, keys >= cut.key, keys > cut.key), kept)


def test_keys_that_change_are_an_error(monkeypatch):
    monkeypatch.setattr(prune_select, "PIECE_ELEMENTS", 7)
    array = np.zeros(70, np.float16)
    seen: list[int] = []

    def progress(nbytes: int) -> None:
        seen.append(nbytes)
        if sum(seen) == array.nbytes:
            array[:] = (
                1  # when all was counted, and before the one is looked for that is the last to go
            )

    with pytest.raises(NotCommitted, match="changed while"):
        select(
            [KeySearch([Magnitudes(MemoryTensors().wrap_array(array), "float16")], 35)],
            progress=progress,
        )


def test_random_keys_do_not_depend_on_where_they_begin(monkeypatch):
    monkeypatch.setattr(prune_keys, "RUN_KEYS", 64)
    every = random_keys(0, 1000, -5)
    assert all(
        (random_keys(a, b, -5) == every[a:b]).all()
        for a, b in ((0, 0), (3, 4), (63, 65), (100, 1000))
    )
    monkeypatch.undo()
    np.testing.assert_array_equal(random_keys(0, 1000, -5), every)


def test_squares_of_a_block_are_added_one_after_the_other():
    values = np.random.default_rng(0).normal(size=(13, 10))
    for height, width in ((1, 4), (4, 4), (5, 1), (13, 10), (64, 64)):
        found = mean_squares(values, height, width)
        for i, row in enumerate(found):
            for j, score in enumerate(row):
                part = (
                    values[i * height : (i + 1) * height, j * width : (j + 1) * width]
                    .reshape(-1)
                    .tolist()
                )
                total = 0.0
                for x in part:
                    total += x * x
                assert score == total / len(part)


@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, np.float32, np.float64],
    ids=lambda t: np.dtype(t).name,
)
def test_what_is_lost_is_a_plain_sum(monkeypatch, dtype):
    monkeypatch.setattr(prune_loss, "STEP_ELEMENTS", 64)
    values = np.random.default_rng(1).normal(size=200).round(1).astype(dtype)
    values[[3, 70, 71]] = [np.nan, np.inf, -np.inf]
    values[[4, 5]] = [-0.0, 0.0]
    kept = np.random.default_rng(2).random(200) < 0.5
    found = loss_of(values, kept)
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    assert (found.pruned, found.nonfinite) == (int((~kept).sum()), 3)
    assert found.zeros == int(((wide == 0) | ~kept).sum())
    assert found.squares == pytest.approx(math.fsum(wide[finite] ** 2))
    assert found.lost == pytest.approx(math.fsum(wide[finite & ~kept] ** 2))


def test_squares_beyond_float64_are_said_to_be_infinite():
    assert loss_of(np.array([1e200, 1.0]), np.array([True, False])).squares == math.inf


def test_a_tally_is_whole_when_every_element_was_told_once():
    tally = Tally(10)
    tally.add(4, 10, Loss(2))
    assert tally.whole() is None
    tally.add(0, 4, Loss(1))
    tally.add(0, 4, Loss(1))
    assert tally.whole() == Loss(3)
    tally.add(3, 4, Loss(1))
    assert tally.whole() is None
    assert Tally(0).whole() == Loss()


@pytest.mark.parametrize("packed", [False, True], ids=["values", "bits"])
def test_pruned_tensors_are_read_at_any_byte(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(prune_select, "PIECE_ELEMENTS", 24)
    # Whole numbers: sums of their squares are exact in any order.
    values = (np.random.default_rng(3).permutation(168) - 83.5).astype(np.float32).reshape(
        6, 28
    ) * np.float32(2)
    holdfast.save({"w": values}, tmp_path / "a.safetensors")
    with holdfast.open(tmp_path / "a.safetensors") as source:
        masked, tally = Masked(), Tally(168)
        mask = GroupMask(2, 4, "float32")
        made = (
            masked.bits("m", source["w"], mask, tally=tally)
            if packed
            else masked.tensor(source["w"], mask, tally)
        )
        whole = made.numpy().tobytes()
        assert tally.whole() == loss_of(values.reshape(-1), _kept(values))
        expected = (
            np.packbits(_kept(values), bitorder="little")
            if packed
            else (values.view(np.uint32) * _kept(values).reshape(6, 28))
        )
        assert whole == expected.tobytes()
        for start, stop in (
            (0, 1),
            (1, 3),
            (3, 18),
            (5, len(whole)),
            (len(whole) - 1, len(whole)),
            (7, 7),
        ):
            out = memoryview(bytearray(stop - start))
            masked.read("0", start, out)
            assert bytes(out) == whole[start:stop]


def _kept(values: np.ndarray) -> np.ndarray:
    """The two largest of every four; of equals the last."""
    order = np.argsort(np.abs(values.reshape(-1, 4)), axis=1, kind="stable")
    kept = np.ones(order.shape, bool)
    np.put_along_axis(kept, order[:, :2], False, axis=1)
    return kept.reshape(-1)


FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@settings(deadline=None, max_examples=examples(80))
@given(st.sampled_from(FLOATS), st.binary(min_size=16, max_size=640), st.data())
def test_pruning_in_place_is_what_the_mask_says(dtype, content, data):
    width = np.dtype(dtype).itemsize
    values = np.frombuffer(content[: len(content) // 16 * 16], dtype).copy()
    # Few values, so that many are equal.
    values = (
        np.where(np.arange(len(values)) % 3 == 0, values, values[0])
        if data.draw(st.booleans())
        else values
    )
    name, tensor, start = (
        np.dtype(dtype).name,
        MemoryTensors().wrap_array(values),
        data.draw(st.integers(0, 9)),
    )
    kind = data.draw(st.sampled_from(["threshold", "groups", "random"]))
    if kind == "groups":
        m = data.draw(st.sampled_from([m for m in (2, 4, 8, 32) if len(values) % m == 0]))
        mask, start = GroupMask(data.draw(st.integers(1, m - 1)), m, name), start * m
    elif kind == "random":
        keys = RandomKeys(MemoryTensors().wrap_array(np.zeros(len(values) + start)), 7)
        mask = ThresholdMask(
            keys,
            int(np.sort(random_keys(0, keys.count, 7))[keys.count // 2]),
            start + len(values) // 2,
        )
    else:
        order = data.draw(st.sampled_from([name, "float64"]))
        keys = Magnitudes(tensor, order)
        own = [*keys.of(values).tolist(), 0, prune_keys.nan_key(order)]
        mask = ThresholdMask(
            keys,
            data.draw(st.sampled_from(own)),
            data.draw(st.integers(0, start + len(values) + 1)),
        )
    kept = mask.keep(values, start)
    expected = np.where(kept, values.view(f"u{width}"), 0)
    after = values.copy()
    zero_out(after, kept)
    assert after.view(f"u{width}").tolist() == expected.tolist()
    tally = Tally(start + len(values))
    Weighed(mask, tally).add(start, values)
    tally.add(0, start, Loss())
    loss = tally.whole()
    assert loss is not None
    assert loss.pruned == int((~kept).sum())
    assert loss == loss_of(values, kept) or not math.isfinite(loss.squares)


@given(st.integers(2, 18), st.integers(1, 20), st.sampled_from([1, 3, 100, 30000]), st.data())
def test_groups_keep_the_largest_and_of_equals_the_last(m, groups, different, data):
    keys = (
        np.random.default_rng(data.draw(st.integers(0, 99)))
        .integers(0, different, m * groups)
        .astype(np.uint16)
    )
    zeros = data.draw(st.integers(0, m))
    kept = np.ones((groups, m), bool)
    np.put_along_axis(
        kept, np.argsort(keys.reshape(-1, m), axis=1, kind="stable")[:, :zeros], False, axis=1
    )
    assert group_keep(keys, zeros, m=m).tolist() == kept.reshape(-1).tolist()


@given(
    st.sampled_from(FLOATS),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.data(),
)
def test_blocks_go_as_a_whole_wherever_a_range_begins(dtype, rows, columns, height, width, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    bits = rng.integers(0, 256, (-(-rows // height), -(-columns // width) // 8 + 1), dtype=np.uint8)
    marked = np.unpackbits(bits, axis=1, bitorder="little").astype(bool)
    kept = np.repeat(np.repeat(marked, height, axis=0), width, axis=1)[:rows, :columns].reshape(-1)
    values = rng.normal(size=rows * columns).astype(dtype)
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    mask = BlockMask(height, width, columns, bits)
    assert mask.keep(values[start:stop], start).tolist() == kept[start:stop].tolist()


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda t: np.dtype(t).name)
def test_scores_of_narrow_floats_are_those_of_wide_ones(dtype):
    values = np.random.default_rng(4).normal(size=(9, 22)).astype(dtype)
    values[3, 4], values[0, 21] = 1e-7, np.inf
    expected = mean_squares(values.astype(np.float64), 4, 4)
    assert mean_squares(values, 4, 4).tobytes() == expected.tobytes()


@pytest.mark.parametrize("most_sorted", [1, 5000], ids=["counted", "sorted"])
@pytest.mark.parametrize("gone", [0, 1, 700, 1998, 1999])
def test_the_lowest_of_a_random_order_go_however_often_they_are_read(
    monkeypatch, gone, most_sorted
):
    monkeypatch.setattr(prune_select, "PIECE_ELEMENTS", 250)
    monkeypatch.setattr(prune_order, "SORTED_KEYS", most_sorted)
    kept = np.ones(1999, bool)
    kept[np.argsort(random_keys(0, 1999, 11), kind="stable")[:gone]] = False
    keys = RandomKeys(MemoryTensors().wrap_array(np.zeros(1999, np.float32)), 11)
    searching = KeySearch([keys], gone)
    select([searching], threads=2)
    mask = ThresholdMask(keys, searching.key, searching.before[0])
    values = np.arange(1, 2000, dtype=np.float32)
    for ends in ([0, 1, 3, 800, 1200, 1999], [0, 1999], [5, 77]):
        for start, stop in itertools.pairwise(ends):
            assert mask.keep(values[start:stop], start).tolist() == kept[start:stop].tolist()
