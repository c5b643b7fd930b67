"""Casts against torch's own: every pattern of the narrow types, borders and random ones of the wide, and what was lost, counted."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.dtype import DTYPES
from holdfast.numeric.cast import cast, count_losses
from holdfast.torch import versions
from tests.golden.expect import short
from tests.sampling import examples
from tests.support import dtypes, needs

NARROW = [
    short(dtype)
    for dtype in dtypes(
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"
    )
]
FLOATS = ["float16", "bfloat16", "float32", "float64", *NARROW]
PAIRS = [
    pytest.param(a, b, marks=() if b != "float8_e4m3fn" else needs(versions.SATURATES))
    for a in FLOATS
    for b in FLOATS
    if a != b
]
BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def torch_type(name):
    return getattr(torch, name)


def patterns(name):
    """All patterns of a narrow type. Of a wide one: all upper halves with several lower ones, around every border of the others."""
    width = DTYPES.name(name).numpy.itemsize
    if width <= 2:
        return np.arange(1 << 8 * width, dtype=f"u{width}").view(DTYPES.name(name).numpy)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    singles = np.concatenate(
        [upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF)]
    )
    if width == 4:
        return singles.view(np.float32)
    with np.errstate(invalid="ignore"):
        near = singles[: 3 << 16].view(np.float32).astype(np.float64).view(np.uint64)
    own = np.arange(1 << 16, dtype=np.uint64) << np.uint64(48)
    one = np.uint64(1)
    return np.concatenate([near, near + one, near - one, own, own + one]).view(np.float64)


def as_torch(array, name):
    bits = torch.from_numpy(array.view(f"u{array.itemsize}").copy())
    return bits.view(torch_type(name)).to(torch_type(name))


def bits_of(tensor):
    return tensor.contiguous().view(BITS[tensor.element_size()]).numpy()


def check(array, source, target):
    dtype = DTYPES.name(target)
    expected = as_torch(array, source).to(torch_type(target))
    with np.errstate(all="ignore"):
        made = cast(array, dtype)
        was, now = (
            array.astype(np.float64),
            made.astype(np.float32).astype(np.float64) if dtype.bits < 64 else made,
        )
    both_nan = np.isnan(now) & expected.to(torch.float64).isnan().numpy()
    different = np.flatnonzero((bits_of(expected) != made.view(f"u{made.itemsize}")) & ~both_nan)
    assert not different.size, [(array[i], made[i], expected[i]) for i in different[:5]]
    # The same from pairs of elements, without any threshold.
    lost = {
        "infinite": np.isinf(now) & np.isfinite(was),
        "nan": np.isnan(now) & ~np.isnan(was),
        "zero": (now == 0) & (was != 0),
    }
    if target == "float8_e4m3fn":
        with np.errstate(over="ignore", invalid="ignore"):
            lost["saturated"] = np.abs(was.astype(np.float32)) > 464
    if target == "float8_e8m0fnu":
        lost |= {"smallest": np.abs(was) < 2.0**-127, "unsigned": was < 0}
    counted = {outcome: int(found.sum()) for outcome, found in lost.items() if found.any()}
    assert count_losses(array, dtype) == counted


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_every_pattern_is_cast_as_torch_does(source, target):
    check(patterns(source), source, target)


@needs(versions.SATURATES)
@settings(max_examples=examples(60))
@given(
    st.sampled_from([pair.values for pair in PAIRS if pair.values[0] in ("float32", "float64")]),
    st.lists(
        st.floats() | st.floats(-1e-4, 1e-4) | st.floats(400, 500) | st.floats(-7e4, -5e4),
        min_size=1,
        max_size=40,
    ),
)
def test_any_number_is_cast_as_torch_does(pair, values):
    with np.errstate(over="ignore", invalid="ignore"):
        check(np.array(values).astype(DTYPES.name(pair[0]).numpy), *pair)


@pytest.mark.parametrize("source", ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"])
@pytest.mark.parametrize("target", FLOATS)
def test_packed_numbers_are_cast_by_their_values(source, target):
    array = np.arange(1 << DTYPES.name(source).bits, dtype=np.uint8).view(DTYPES.name(source).numpy)
    wide = array.astype(np.float32)
    expected = torch.from_numpy(wide).to(torch_type(target))
    assert cast(array, DTYPES.name(target)).tobytes() == bits_of(expected).tobytes()


VALUES = {
    "w": [1.0, 500.0, -1e9, np.inf, 464.0, 464.1],
    "tiny": [1e-9, -1e-9, 0.0],
    "none": [np.nan, 0.5],
}


def saved(path, dtype=torch.float32):
    holdfast.save(
        {name: torch.tensor(values, dtype=dtype) for name, values in VALUES.items()} | {"step": 3},
        path,
    )
    return path


@needs(versions.SATURATES)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ""])
def test_convert_saturates_and_says_how_many(tmp_path, suffix):
    done = holdfast.convert(
        saved(tmp_path / "a.pt"), tmp_path / f"b{suffix}", dtype="float8_e4m3fn", threads=2
    )
    with holdfast.open(tmp_path / f"b{suffix}") as ckpt:
        for name, values in VALUES.items():
            expected = torch.tensor(values).to(torch.float8_e4m3fn)
            assert ckpt[name].numpy().tobytes() == bits_of(expected).tobytes()
    notes = [note for note in done.notes if note.startswith("cast to")]
    assert notes == [
        "cast to float8_e4m3fn: 4 of 11 values beyond ±448 became that: 'w' (4)",
        "cast to float8_e4m3fn: 2 of 11 values too small became zero: 'tiny' (2)",
    ]


def test_edit_says_what_became_infinite(tmp_path):
    done = holdfast.edit(saved(tmp_path / "a.pt"), in_place=True, dtype="f16")
    assert [n for n in done.notes if "cast" in n] == [
        "cast to float16: 1 of 11 values beyond ±65504 became infinite: 'w' (1)",
        "cast to float16: 2 of 11 values too small became zero: 'tiny' (2)",
    ]


def test_a_cast_that_loses_nothing_says_nothing(tmp_path):
    torch.save({"w": torch.ones(5), "zero": torch.zeros(5)}, tmp_path / "a.pt")
    assert holdfast.convert(tmp_path / "a.pt", tmp_path / "b.pt", dtype="bf16").notes == ()


def test_each_element_counts_once(tmp_path):
    """A weight that is tied is written twice by some formats."""
    weight = torch.full((300, 300), 1e9)
    torch.save({"a": weight, "b": weight.T}, tmp_path / "a.pt")
    done = holdfast.convert(
        tmp_path / "a.pt", tmp_path / "b", dtype="f16", max_memory="70MB", threads=2
    )
    assert any("90,000 of 90,000 values" in note for note in done.notes)


@needs(versions.SATURATES)
@pytest.mark.parametrize("source", NARROW)
@pytest.mark.parametrize("target", NARROW)
def test_bytes_become_other_bytes(tmp_path, source, target):
    tensor = torch.arange(256, dtype=torch.uint8).view(torch_type(source))
    torch.save({"w": tensor}, tmp_path / "a.pt")
    holdfast.convert(tmp_path / "a.pt", tmp_path / "b.pt", dtype=target)
    found = torch.load(tmp_path / "b.pt")["w"]
    assert torch.equal(
        found.float().nan_to_num(7e30), tensor.to(torch_type(target)).float().nan_to_num(7e30)
    )


@needs(versions.SATURATES)
@pytest.mark.parametrize("dtype", dtypes("float16", "float8_e4m3fn", "float8_e8m0fnu"), ids=short)
def test_load_into_says_what_was_lost(tmp_path, dtype):
    from holdfast.torch import load_into

    saved(tmp_path / "a.pt")
    state = {name: torch.zeros(len(values), dtype=dtype) for name, values in VALUES.items()}
    loaded = load_into(state, tmp_path / "a.pt", strict=False)
    assert (
        sorted(note for note in loaded.notes if "cast" in note)
        == {
            "float16": [
                "cast to float16: 1 of 11 values beyond ±65504 became infinite: 'w' (1)",
                "cast to float16: 2 of 11 values too small became zero: 'tiny' (2)",
            ],
            "float8_e4m3fn": [
                "cast to float8_e4m3fn: 2 of 11 values too small became zero: 'tiny' (2)",
                "cast to float8_e4m3fn: 4 of 11 values beyond ±448 became that: 'w' (4)",
            ],
            "float8_e8m0fnu": [
                "cast to float8_e8m0fnu: 1 of 11 values beyond ±1.70141e+38 became NaN, for there is no infinity: 'w' (1)",
                "cast to float8_e8m0fnu: 1 of 11 values of zero, or too small, became 2^-127, the smallest number: 'tiny' (1)",
                "cast to float8_e8m0fnu: 2 of 11 values below zero lost their sign: 'tiny' (1), 'w' (1)",
            ],
        }[short(dtype)]
    )


def test_load_into_counts_integers_that_become_infinite(tmp_path):
    from holdfast.torch import load_into

    torch.save({"n": torch.tensor([1, 70000])}, tmp_path / "a.pt")
    loaded = load_into(
        {"n": torch.zeros(2, dtype=torch.float16)}, tmp_path / "a.pt", dtype=torch.float16
    )
    assert "cast to float16: 1 of 2 values beyond ±65504 became infinite: 'n' (1)" in loaded.notes
