"""Keep, drop, rename and cast on trees: what changes, what stays the same object, what is refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict

import ml_dtypes
import numpy as np
import pytest
import torch

from holdfast.core.tensor import Composite
from holdfast.errors import CannotHold, Unsupported
from holdfast.verbs.shared.state import make_lazy_tree, tabulate_state
from holdfast.verbs.shared.transform import Edits, parse_casts, parse_float_dtype, transform


def changed(tree: object, **edits: object) -> object:
    return make_lazy_tree(transform(tabulate_state(tree), Edits(**edits)))


def refused(tree: object, **edits: object) -> tuple[str, ...]:
    with pytest.raises(CannotHold) as caught:
        changed(tree, **edits)
    return caught.value.problems


TREE = {
    "model": OrderedDict({"a.w": 1, "a.b": 2, "c": 3}),
    "opt": {"lr": 0.1, "state": {0: {"m": 4}}},
    "step": 5,
}


def test_keep_and_drop():
    assert changed(TREE, keep=("model.*",)) == {"model": {"a.w": 1, "a.b": 2, "c": 3}}
    assert changed(TREE, drop=("opt.*", "*.b")) == {"model": {"a.w": 1, "c": 3}, "step": 5}
    assert changed(TREE, keep=("model.*",), drop=("*.w",)) == {"model": {"a.b": 2, "c": 3}}
    assert changed(TREE, drop=("*",)) == {}


def test_containers_without_a_change_stay_themselves():
    counter, filled, size = Counter("aab"), defaultdict(list, k=[1]), torch.Size([2, 3])
    state = tabulate_state(
        {"a": {"x": 1}, "rest": {"c": counter, "d": filled, "s": size, "n": np.float32(1)}}
    )
    made = transform(state, Edits(drop=("a.x",))).tree
    assert made == {"rest": state.tree["rest"]}
    assert made["rest"] is state.tree["rest"]
    assert type(changed({"d": filled, "a": 1, "b": 2}, drop=("a",))["d"]) is type(filled)
    kept = changed({"d": defaultdict(list, a=1, b=2)}, drop=("d.a",))["d"]
    assert isinstance(kept, defaultdict)
    assert kept.default_factory is list


def test_the_attributes_of_a_state_dict_stay():
    state = torch.nn.Linear(2, 2).state_dict()
    made = changed({"m": state}, drop=("m.bias",))["m"]
    assert list(made) == ["weight"]
    assert made._metadata == state._metadata


def test_rename():
    assert changed(TREE, keep=("model.*",), rename=(("model.*", "*"),)) == {
        "a.w": 1,
        "a.b": 2,
        "c": 3,
    }
    assert changed({"m": {"a.w": 1, "b.w": 2}}, rename=(("m.*.w", "m.*.weight"),)) == {
        "m": {"a.weight": 1, "b.weight": 2}
    }
    assert list(changed({"x": 1, "y": 2, "z": 3}, rename=(("y", "why"),))) == ["x", "why", "z"]
    assert changed({"a.b": 1}, rename=(("*.*", "*/*"),)) == {"a/b": 1}
    # The first that matches wins, and names may trade places.
    assert changed({"a": 1, "b": 2}, rename=(("a", "b"), ("b", "a"))) == {"b": 1, "a": 2}


@pytest.mark.parametrize(
    ("tree", "rename"),
    [
        ({"a": 1, "b": 2}, ("a", "b")),
        ({"m": {"a": 1}, "n": {"a": 2}}, ("*.a", "x*")),
        ({"m": {"b": 1}, "x": 2}, ("x", "m.b")),
        ({"m": {"b": 1}, "x": {"y": 2}}, ("x.y", "m")),
        ({"m": {"a": 1}, "n": {"a": 2}}, ("m.a", "n.a")),
    ],
)
def test_names_that_collide(tree, rename):
    if rename == ("*.a", "x*"):
        assert changed(tree, rename=(rename,)) == {"xm": 1, "xn": 2}
        rename = ("m.a", "n.a")
    assert any("the name" in problem for problem in refused(tree, rename=(rename,)))


def test_edits_that_do_not_fit():
    first, second = refused(TREE, keep=("modle.*",), drop=("nothing",))
    assert first.startswith("'modle.*' matches nothing; near: model.")
    assert second == "'nothing' matches nothing"
    assert refused(TREE, rename=(("model.*", "x"),)) == (
        "the rename 'model.*' → 'x' must have the same number of * on both sides",
    )
    assert "cannot be taken out" in refused({"l": [1, 2]}, drop=("l.0",))[0]
    assert "no name that could be changed" in refused({"l": [1, 2]}, rename=(("l.0", "l.7"),))[0]
    assert "only a dict" in refused([1, 2], drop=("0",))[0]
    assert "nothing of a name" in refused({"m": {"a": 1}}, rename=(("m.a", ""),))[0]


def test_tensors_only_is_flat():
    state = tabulate_state({"m": {"w": np.zeros(2), "l": [np.ones(1)]}, "step": 3, 0: np.zeros(1)})
    assert list(transform(state, Edits(tensors_only=True)).tree) == ["m.w", "m.l.0", "0"]


def test_a_cast_leaves_integers_and_keeps_ties_and_views():
    base = torch.randn(4, 6)
    state = tabulate_state(
        {"base": base, "tied": base, "row": base[1:3], "turned": base.T, "i": torch.arange(3)}
    )
    made = transform(state, Edits(casts=parse_casts("bfloat16"))).tensors
    assert {t.dtype.name for n, t in made.items() if n != "i"} == {"bfloat16"}
    assert made["i"].dtype.name == "int64"
    assert len({t.chunks[0].storage for n, t in made.items() if n != "i"}) == 1
    half = base.bfloat16()
    for name, expected in (("base", half), ("tied", half), ("row", half[1:3]), ("turned", half.T)):
        assert (
            made[name].numpy().tobytes()
            == expected.contiguous().view(torch.int16).numpy().tobytes()
        )


def test_a_cast_of_views_of_several_dtypes_casts_each_by_itself():
    raw = np.arange(16, dtype=np.uint8)
    state = tabulate_state({"f4": raw.view(np.float32), "f2": raw.view(np.float16), "u1": raw})
    made = transform(state, Edits(casts=parse_casts("float64"))).tensors
    assert made["f4"].numpy().tolist() == raw.view(np.float32).astype(np.float64).tolist()
    assert made["f2"].numpy().tobytes() == raw.view(np.float16).astype(np.float64).tobytes()
    assert made["u1"].numpy().tolist() == raw.tolist()


def test_a_cast_tells_a_view_from_its_negative():
    """Both are the same elements of one storage, which has complex numbers as well."""
    pairs = torch.complex(torch.arange(4.0), torch.arange(1.0, 5.0))
    state = tabulate_state({"pairs": pairs, "one": pairs.imag, "other": pairs.conj().imag})
    made = transform(state, Edits(casts=parse_casts("float64"))).tensors
    assert made["one"].numpy().tolist() == [1, 2, 3, 4]
    assert made["other"].numpy().tolist() == [-1, -2, -3, -4]


def test_a_cast_keeps_what_a_file_remembers_of_views(tmp_path):
    import holdfast

    base = torch.randn(4, 6)
    holdfast.save({"base": base, "row": base[1:3], "turned": base.T}, tmp_path / "a.safetensors")
    holdfast.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", dtype="bf16")
    holdfast.convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == 1
    assert torch.equal(loaded["turned"], base.bfloat16().T)
    assert loaded["turned"].stride() == (1, 6)


def test_a_cast_of_composites():
    sparse = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.5, 2.5], (2, 2))
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    made = changed({"s": sparse, "q": quantized}, casts=parse_casts("float16"))
    assert isinstance(made["s"], Composite)
    assert {n: p.dtype.name for n, p in made["s"].parts.items()} == {
        "indices": "int64",
        "values": "float16",
    }
    assert made["q"].parts["int_repr"].dtype.name == "qint8"


def test_a_cast_overflows_as_numpy_does():
    made = changed({"w": np.array([1e9, -1e9, np.nan], np.float32)}, casts=parse_casts("float16"))
    assert [str(v) for v in made["w"].numpy()] == ["inf", "-inf", "nan"]


def test_dtype_names():
    assert parse_float_dtype("bf16").numpy == ml_dtypes.bfloat16
    assert parse_float_dtype("fp8").name == "float8_e4m3fn"
    with pytest.raises(Unsupported, match="did you mean 'bfloat16'"):
        parse_float_dtype("bloat16")
    for name in ("int8", "float4_e2m1fn", "", "none at all"):
        with pytest.raises(Unsupported):
            parse_float_dtype(name)


def dtypes(state, casts):
    return {
        name: tensor.dtype.name
        for name, tensor in transform(state, Edits(casts=parse_casts(casts))).tensors.items()
    }


def test_dtypes_by_patterns():
    names = ("a.norm.weight", "a.up.weight", "router.weight")
    state = tabulate_state(
        {name: np.ones((2, 4), np.float32) for name in names} | {"ids": np.ones(2, np.int64)}
    )
    wanted = {"*norm*": "f64", "router.*": "keep", "*": "bf16"}
    assert dtypes(state, wanted) == {
        "a.norm.weight": "float64", "a.up.weight": "bfloat16", "router.weight": "float32", "ids": "int64",
    }  # fmt: skip
    assert dtypes(state, {"*.up.*": "f16"})["router.weight"] == "float32"
    # The names are those of the source, whatever becomes of them.
    edits = Edits(casts=parse_casts({"a.*": "f16"}), rename=(("a.*", "b.*"),))
    assert transform(state, edits).tensors["b.norm.weight"].dtype.name == "float16"


def test_patterns_that_cast_nothing():
    state = tabulate_state({"norm": np.ones(3, np.float32), "ids": np.ones(2, np.int64)})
    for casts, words in (
        ({"nrom": "f16"}, "'nrom': it matches no floating-point tensor; near: norm"),
        ({"ids": "f16", "*": "bf16"}, "'ids': it matches no floating-point"),
        ({"*": "f16", "norm": "bf16"}, "'norm' decides nothing"),
        ({"n*": "f16", "norm": "bf16"}, "'norm' decides nothing"),
    ):
        with pytest.raises(CannotHold) as caught:
            transform(state, Edits(casts=parse_casts(casts)))
        assert any(words in problem for problem in caught.value.problems), caught.value.problems
    assert dtypes(state, {"norm": "f16", "*": "bf16"})["norm"] == "float16"
    assert dtypes(tabulate_state({"ids": np.ones(2, np.int64)}), "bf16") == {"ids": "int64"}
    with pytest.raises(Unsupported, match="cannot cast to 'f17'"):
        parse_casts({"*": "f17"})


def test_names_of_one_tensor_agree_in_their_dtype():
    w = torch.arange(8.0)
    with pytest.raises(CannotHold, match="a and b are one tensor"):
        dtypes(tabulate_state({"a": w, "b": w}), {"a": "f16", "*": "bf16"})
    with pytest.raises(CannotHold, match="is to stay as it is"):
        dtypes(tabulate_state({"a": w, "b": w}), {"a": "f16"})
    # Other views of one storage come apart, each with its own values; those that agree stay together.
    state = tabulate_state({"whole": w, "half": w[:4], "tail": w[4:], "also": w[4:]})
    made = transform(
        state, Edits(casts=parse_casts({"whole": "f64", "half": "f16", "*": "bf16"}))
    ).tensors
    assert [made[name].dtype.name for name in made] == [
        "float64",
        "float16",
        "bfloat16",
        "bfloat16",
    ]
    assert [made[name].numpy().astype(np.float64).tolist() for name in made] == [
        [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7],
    ]  # fmt: skip
    assert made["tail"].storages == made["also"].storages
    # Tensors without data have no storage that could tell them apart.
    metas = tabulate_state({"a": torch.empty(3, device="meta"), "b": torch.empty(3, device="meta")})
    assert dtypes(metas, {"a": "f16", "*": "f64"}) == {"a": "float16", "b": "float64"}


def test_losses_are_told_by_dtype(tmp_path):
    import holdfast

    holdfast.save(
        {"a": np.array([1e6, 1], np.float32), "b": np.array([1e-30, 1], np.float32)},
        tmp_path / "a.pt",
    )
    done = holdfast.convert(
        tmp_path / "a.pt", tmp_path / "b.pt", dtype={"a": "f16", "*": "float8_e5m2"}
    )
    assert any("cast to float16: 1 of 2 values" in note and "'a'" in note for note in done.notes)
    assert any(
        "cast to float8_e5m2: 1 of 2 values" in note and "'b'" in note for note in done.notes
    )


FLOATS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e8m0fnu",
)
EXTREMES = (
    0.0,
    -0.0,
    1.5,
    -3.0,
    1e-300,
    -1e-40,
    1e-8,
    3e-3,
    448.0,
    6e4,
    -1e9,
    1e39,
    1e300,
    float("inf"),
    float("nan"),
)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ["", ".safetensors", ".pt"])
def test_many_are_cast_as_each_by_itself(tmp_path, dtype, format):
    """Short tensors are cast together, long ones block by block; values and losses are those of each tensor alone."""
    import holdfast
    from holdfast.numeric.cast import cast, count_losses

    generator = np.random.default_rng(7)
    to, state = parse_float_dtype(dtype), {}
    for number, name in enumerate(FLOATS[:-1] * 3):
        with np.errstate(all="ignore"):
            values = generator.choice(EXTREMES, size=generator.integers(0, 9)).astype(
                parse_float_dtype(name).numpy
            )
        state[f"{number}.{name}"] = torch.from_numpy(values.view(f"i{values.itemsize}")).view(
            getattr(torch, name)
        )
    state["long"] = torch.from_numpy(generator.choice(EXTREMES, size=70_000))
    state["tied"], state["rows"], state["whole"] = state["long"], torch.arange(6.0), torch.arange(4)
    state["part"] = state["rows"][2:4]
    holdfast.save(state, tmp_path / f"source{format}")
    told = holdfast.convert(tmp_path / f"source{format}", tmp_path / f"target{format}", dtype=dtype)
    lost: dict[str, int] = {}
    with (
        holdfast.open(tmp_path / f"source{format}") as source,
        holdfast.open(tmp_path / f"target{format}") as target,
    ):
        assert set(source) == set(target)
        for name, tensor in target.items():
            given = source[name].numpy()
            changes = source[name].dtype.kind == "float" and source[name].dtype is not to
            made = cast(given.reshape(-1), to).reshape(given.shape) if changes else given
            assert tensor.dtype is (to if changes else source[name].dtype)
            nan = (
                np.isnan(made.astype("f8"))
                if made.dtype.kind != "i"
                else np.zeros(made.shape, bool)
            )
            assert tensor.numpy()[~nan].tobytes() == made[~nan].tobytes()
            assert not changes or np.isnan(tensor.numpy().astype("f8"))[nan].all()
            if changes and name not in ("tied", "part"):
                for outcome, count in count_losses(given.reshape(-1), to).items():
                    lost[outcome] = lost.get(outcome, 0) + count
    counts = sorted(
        int(note.split(": ", 1)[1].split(" of ")[0].replace(",", ""))
        for note in told.notes
        if note.startswith("cast to")
    )
    assert counts == sorted(lost.values())
