"""`prune`: against masks made in memory, by plain numpy and by `holdfast.torch.sparsity.masks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest

import holdfast
from holdfast.errors import CannotHold
from holdfast.extras.pruning import masked as prune_loss
from holdfast.extras.pruning import select as prune_select
from holdfast.extras.pruning.rules import parse_rule, tensor_seed
from holdfast.numeric import threshold as prune_order

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BF16, np.dtype(np.float32), np.dtype(np.float64)]


def values(shape, dtype, seed=0, *, odd=True) -> np.ndarray:
    """Numbers with many equals, zeros of both signs, and what is not finite."""
    rng = np.random.default_rng(seed)
    array = rng.normal(size=shape).round(1).astype(dtype)
    if odd and array.size > 64:
        flat = array.reshape(-1)
        flat[[3, 17]] = np.nan
        flat[[5, 40]] = [np.inf, -np.inf]
        flat[[7, 8, 9]] = [-0.0, 0.0, -0.0]
    return array


def load(path) -> dict[str, np.ndarray]:
    with holdfast.open(path) as found:
        return {name: found[name].numpy() for name in found}


def count(level: float, total: int) -> int:
    return total if level == 1 else max(0, min(round(level * total), total - 1))


def order(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Absolute values with NaN above all."""
    wide = np.abs(array.astype(np.float64))
    return np.where(np.isnan(wide), np.inf, wide) + 0.0, np.isnan(wide)


def lowest(array: np.ndarray, zeros: int) -> np.ndarray:
    """Keep all but the lowest of a row, of equals the first."""
    wide, nan = order(array)
    kept = np.ones(array.size, bool)
    kept[np.lexsort((np.arange(array.size), nan, wide))[:zeros]] = False
    return kept


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def applied(array: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return np.where(kept.reshape(array.shape), bits(array), 0)


def oracle_block(array: np.ndarray, height: int, width: int, level: float) -> np.ndarray:
    matrix = array.reshape(1, -1) if array.ndim < 2 else array.reshape(len(array), -1)
    down, across = -(-matrix.shape[0] // height), -(-matrix.shape[1] // width)
    scores = np.zeros((down, across))
    for i in range(down):
        for j in range(across):
            part = matrix[i * height : (i + 1) * height, j * width : (j + 1) * width].astype(
                np.float64
            )
            total = 0.0
            for x in part.reshape(-1).tolist():
                total += x * x
            scores[i, j] = total / part.size
    kept = lowest(scores.reshape(-1), count(level, scores.size)).reshape(scores.shape)
    spread = kept.repeat(height, 0).repeat(width, 1)
    return spread[: matrix.shape[0], : matrix.shape[1]].reshape(array.shape)


@pytest.fixture(params=["whole", "pieces"])
def small_pieces(request, monkeypatch):
    """Also with pieces and limits so small that every way through the code is taken."""
    if request.param == "pieces":
        monkeypatch.setattr(prune_select, "PIECE_ELEMENTS", 96)
        monkeypatch.setattr(prune_order, "SORTED_KEYS", 20)
        monkeypatch.setattr(prune_loss, "STEP_ELEMENTS", 32)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestMethods:
    @pytest.mark.parametrize("level", [0, 0.1, 0.5, 0.97, 1])
    @pytest.mark.parametrize("shape", [(24, 32), (7, 3, 5), (129,), (1,), (0, 4)])
    def test_magnitude(self, tmp_path, dtype, level, shape):
        array = values(shape, dtype)
        holdfast.save({"w": array}, tmp_path / "a.safetensors")
        done = holdfast.prune(
            tmp_path / "a.safetensors", tmp_path / "b.safetensors", [f"w: {level}"]
        )
        found = load(tmp_path / "b.safetensors")["w"]
        kept = lowest(array.reshape(-1), count(level, array.size))
        np.testing.assert_array_equal(bits(found), applied(array, kept))
        assert done.tensors[0].pruned == count(level, array.size)
        assert done.tensors[0].zeros == int((found == 0).sum())

    @pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (0, 2), (3, 3), (5, 24), (1, 1)])
    def test_groups(self, tmp_path, dtype, n, m):
        array = values((10, 48), dtype)
        holdfast.save({"w": array}, tmp_path / "a.safetensors")
        holdfast.prune(tmp_path / "a.safetensors", tmp_path / "b.safetensors", [f"w: {n}:{m}"])
        kept = np.concatenate([lowest(row, m - n) for row in array.reshape(-1, m)])
        np.testing.assert_array_equal(
            bits(load(tmp_path / "b.safetensors")["w"]), applied(array, kept)
        )

    @pytest.mark.parametrize("shape", [(24, 32), (7, 30), (5, 3, 7), (300,), (3, 500)])
    @pytest.mark.parametrize(
        ("block", "level"),
        [((4, 4), 0.9), ((1, 4), 0.5), ((2, 3), 0.3), ((16, 1), 1), ((64, 64), 0.5)],
    )
    def test_block(self, tmp_path, dtype, shape, block, level):
        array = values(shape, dtype)
        holdfast.save({"w": array}, tmp_path / "a.safetensors")
        holdfast.prune(
            tmp_path / "a.safetensors",
            tmp_path / "b.safetensors",
            [f"w: block {block[0]}x{block[1]} {level}"],
        )
        found = load(tmp_path / "b.safetensors")["w"]
        np.testing.assert_array_equal(
            bits(found), applied(array, oracle_block(array, *block, level))
        )

    def test_random(self, tmp_path, dtype):
        state = {
            "a": values((30, 40), dtype, odd=False) + dtype.type(9),
            "b": values((30, 40), dtype, odd=False) + dtype.type(9),
        }
        holdfast.save(state, tmp_path / "a.safetensors")
        for out, seed in (("b", 1), ("c", 1), ("d", 2)):
            holdfast.prune(
                tmp_path / "a.safetensors", tmp_path / out, [f"*: random 0.3 seed={seed}"]
            )
        b, c, d = (load(tmp_path / out) for out in "bcd")
        assert [(b[n] == 0).sum() for n in "ab"] == [360, 360]
        assert all((bits(b[n]) == bits(c[n])).all() for n in "ab")
        assert ((b["a"] == 0) != (d["a"] == 0)).any()
        assert ((b["a"] == 0) != (b["b"] == 0)).any()

    def test_global(self, tmp_path, dtype):
        state = {
            "z": values((30, 8), dtype, 1),
            "a": values((90,), dtype, 2),
            "m": values((4, 40), np.float32, 3),
        }
        holdfast.save(state, tmp_path / "a.safetensors")
        holdfast.prune(
            tmp_path / "a.safetensors", tmp_path / "b", ["z: global 0.8", "*: global 0.8"]
        )
        flat = np.concatenate(
            [state[name].reshape(-1).astype(np.float64) for name in sorted(state)]
        )
        kept = np.split(lowest(flat, count(0.8, flat.size)), [90, 90 + 160])
        found = load(tmp_path / "b")
        for name, mask in zip(sorted(state), kept, strict=True):
            np.testing.assert_array_equal(bits(found[name]), applied(state[name], mask))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_as_the_masks_of_torch(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from holdfast.torch.sparsity import masks

    state = {
        f"{name}.{i}": values((33, 24), dtype, i)
        for name in ("mag", "nm", "block", "random", "global")
        for i in range(3)
    }
    holdfast.save(state, tmp_path / "a.safetensors")
    rules = [
        "mag*: 0.7",
        "nm*: 2:4",
        "block*: block 4x5 0.6",
        "random*: random 0.4 seed=5",
        "global*: global 0.55",
    ]
    holdfast.prune(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules)
    found = load(tmp_path / "b.safetensors")
    with holdfast.open(tmp_path / "a.safetensors") as source:
        tensors = {name: source[name].torch() for name in source}
    names = sorted(name for name in state if name.startswith("global"))
    together = dict(zip(names, masks.global_masks([tensors[n] for n in names], 0.55), strict=True))
    for name, tensor in tensors.items():
        match name.partition(".")[0]:
            case "mag":
                mask = masks.magnitude_mask(tensor, 0.7)
            case "nm":
                mask = masks.nm_mask(tensor, 2, 4)
            case "block":
                mask = masks.block_mask(tensor, (4, 5), 0.6)
            case "random":
                mask = masks.random_mask(tensor, 0.4, tensor_seed(5, name))
            case _:
                mask = together[name]
        np.testing.assert_array_equal(
            bits(found[name]), applied(state[name], mask.numpy()), err_msg=name
        )
    assert torch.__version__


@pytest.mark.parametrize("kind", ["magnitude", "global", "2:4", "block"])
def test_the_same_as_a_sparsifier_in_memory(tmp_path, kind):
    torch = pytest.importorskip("torch")
    from holdfast.torch.sparsity import MagnitudeSparsifier, WeightNormSparsifier

    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(640, 900, bias=False),
        torch.nn.Linear(900, 50),
        torch.nn.Linear(52, 36),
    ]
    model = torch.nn.Sequential(*layers).bfloat16()
    assert layers[0].weight.numel() > prune_select.PIECE_ELEMENTS
    torch.save(model.state_dict(), tmp_path / "a.pt")
    sparsifier, rule = {
        "magnitude": (MagnitudeSparsifier(0.6), "0.6"),
        "global": (MagnitudeSparsifier(0.6, scope="global"), "global 0.6"),
        "2:4": (WeightNormSparsifier(1.0, (1, 4), zeros_per_block=2), "2:4"),
        "block": (WeightNormSparsifier(0.8, (4, 8)), "block 4x8 0.8"),
    }[kind]
    sparsifier.prepare(model, [{"tensor_fqn": f"{i}.weight"} for i in range(3)])
    sparsifier.step()
    sparsifier.squash_mask()
    done = holdfast.prune(tmp_path / "a.pt", tmp_path / "b.pt", [f"*.weight: {rule}"])
    found = torch.load(tmp_path / "b.pt")
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name
    assert [row.zeros for row in done.tensors] == [
        int((found[row.name] == 0).sum()) for row in done.tensors
    ]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ""])
def test_any_format_and_the_rest_as_it_was(tmp_path, suffix):
    state = {
        "model": {
            "w": values((8, 8), np.float32),
            "head": values((8, 8), np.float32, 1),
            "n": np.int64(3),
        },
        "step": 7,
    }
    holdfast.save(state, tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    done = holdfast.prune(
        tmp_path / "a.pt", tmp_path / f"b{suffix}", ["model.head: keep", "model.[wh]*: 0.5"]
    )
    assert (tmp_path / "a.pt").read_bytes() == before
    assert [t.name for t in done.tensors] == ["model.w"]
    with holdfast.open(tmp_path / f"b{suffix}") as found:
        np.testing.assert_array_equal(
            bits(found["model.head"].numpy()), bits(state["model"]["head"])
        )
        assert (found["model.w"].numpy() == 0).sum() >= 32
        assert found.tree["step"] == 7


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_tied_weights_are_one_and_stay_tied(tmp_path, suffix):
    torch = pytest.importorskip("torch")
    weight = torch.randn(16, 8)
    holdfast.save(
        {"embed": weight, "head": weight, "other": torch.randn(4, 4)}, tmp_path / f"a{suffix}"
    )
    done = holdfast.prune(
        tmp_path / f"a{suffix}",
        tmp_path / "b.pt",
        ["embed: global 0.5", "head: global 0.5", "o*: global 0.5"],
    )
    assert [(t.name, t.also) for t in done.tensors] == [("embed", ("head",)), ("other", ())]
    assert sum(t.pruned for t in done.tensors) == 72
    loaded = torch.load(tmp_path / "b.pt")
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr()
    with pytest.raises(CannotHold, match="embed and head are one tensor"):
        holdfast.prune(tmp_path / f"a{suffix}", tmp_path / "c.pt", ["embed: 0.5"])
    with pytest.raises(CannotHold, match="embed and head are one tensor"):
        holdfast.prune(tmp_path / f"a{suffix}", tmp_path / "c.pt", ["embed: 0.5", "head: 0.6"])
    holdfast.save({"a": weight, "b": weight[2:]}, tmp_path / f"v{suffix}")
    with pytest.raises(CannotHold, match="share elements"):
        holdfast.prune(tmp_path / f"v{suffix}", tmp_path / "c.pt", ["a: 0.5"])
    assert not (tmp_path / "c.pt").exists()


def test_a_view_and_its_negative_are_not_one_tensor(tmp_path):
    torch = pytest.importorskip("torch")
    pairs = torch.complex(torch.arange(4.0), torch.arange(1.0, 5.0))
    holdfast.save(tmp_path / "a.pt", {"one": pairs.imag, "other": pairs.conj().imag})
    with pytest.raises(CannotHold, match="share elements"):
        holdfast.prune(tmp_path / "a.pt", tmp_path / "b.pt", ["*: 0.5"])


def test_masks_beside_and_only(tmp_path):
    state = {"w": values((9, 12), np.float32), "b": values((4,), np.float32)}
    holdfast.save(state, tmp_path / "a.safetensors")
    for rule in ("0.5", "2:4", "block 2x5 0.4"):
        done = holdfast.prune(
            tmp_path / "a.safetensors",
            tmp_path / "b",
            [f"w: {rule}"],
            masks="beside",
            overwrite=True,
        )
        only = holdfast.prune(
            tmp_path / "a.safetensors",
            tmp_path / "m.safetensors",
            [f"w: {rule}"],
            masks="only",
            overwrite=True,
        )
        assert done.masks == str(tmp_path / "b" / "masks.safetensors")
        assert ("masks.safetensors", os.path.getsize(done.masks)) in done.files
        assert (only.masks, only.tensors) == (str(tmp_path / "m.safetensors"), done.tensors)
        for path in (done.masks, only.masks):
            with holdfast.open(path) as found:
                about = json.loads(found.metadata["holdfast.masks"])
                assert about == {"w": {"shape": [9, 12], "rule": rule}}
                packed = found["w.mask"].numpy()
                assert list(found) == ["w.mask"]
            kept = np.unpackbits(packed, count=108, bitorder="little").astype(bool)
            np.testing.assert_array_equal(
                bits(load(tmp_path / "b")["w"]), applied(state["w"], kept)
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_report(tmp_path, dtype):
    array = np.array([[3.0, 0.0, 4.0, 1.0, 2.0, np.nan]], dtype)
    holdfast.save({"w": array, "b": array[0].copy()}, tmp_path / "a.safetensors")
    done = holdfast.prune(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", ["w: 0.5"], dry_run=True
    )
    assert not (tmp_path / "b.safetensors").exists()
    assert not done.done
    (row,) = done.tensors
    assert (row.rule, row.pruned, row.zeros, row.nonfinite, row.sparsity) == (
        "w: 0.5",
        3,
        3,
        1,
        0.5,
    )
    assert row.norm_lost == pytest.approx((5 / 30) ** 0.5)
    assert (done.kept, done.sparsity, done.norm_lost) == (1, 0.5, row.norm_lost)
    written = holdfast.prune(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ["w: 0.5"])
    assert written.tensors == done.tensors
    assert (done.format, done.nbytes) == (
        "safetensors",
        (tmp_path / "b.safetensors").stat().st_size,
    )


def test_every_problem_is_listed_and_nothing_is_written(tmp_path):
    state = {"w": np.ones((4, 6), np.float32), "i": np.ones(4, np.int64)}
    state |= {"s": np.ones((), np.float32), "f8": np.ones(4, ml_dtypes.float8_e4m3fn)}
    holdfast.save(state, tmp_path / "a.safetensors")
    rules = [
        "wx: 0.5",
        "w: 2:4",
        "i: 0.5",
        "s: 0.5",
        "w: 0.1",
        "*: 50",
        "f8: 1:2",
        "g: global 0.1",
        "h: global 0.2",
        "nonsense",
    ]
    rules += ["a: 5:4"]
    before = (tmp_path / "a.safetensors").read_bytes()
    with pytest.raises(CannotHold) as caught:
        holdfast.prune(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules)
    problems = "\n".join(caught.value.problems)
    for words in [
        "rule 'wx' matches no tensor; near: w",
        "w: 2:4 needs a last axis of a multiple of 4 elements, and [4, 6] has 6",
        "i: int64 is not one of",
        "f8: float8_e4m3fn is not one of",
        "s: a single number",
        "rule 'w' is there twice: '2:4' and '0.1'",
        "found 50; for 50 percent write 0.5",
        "one level; found 0.1, 0.2",
        "'nonsense' is no rule",
        "5:4 keeps n of every m",
    ]:
        assert words in problems
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert (tmp_path / "a.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([], "there is no rule"),
        (["*: keep", "w: 0.5"], "decides nothing"),
        (["w: -0.1"], "found -0.1"),
        (["w: nan"], "found nan"),
        (["w: block 0x4 0.5"], "has no elements"),
        (["w: block 4 0.5"], "is no rule"),
        (["w: random 0.x"], "no number"),
    ],
)
def test_rules_that_make_no_sense(tmp_path, rules, words):
    holdfast.save({"w": np.ones((4, 4), np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(CannotHold, match=words):
        holdfast.prune(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules)


def test_the_source_is_no_target(tmp_path):
    holdfast.save({"w": np.ones((4, 4), np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(CannotHold, match="is the source"):
        holdfast.prune(tmp_path / "a.safetensors", tmp_path / "a.safetensors", ["w: 0.5"])


def test_parts_of_quantised_and_sparse_tensors_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"s": torch.eye(4).to_sparse(), "w": torch.ones(4, 4)}, tmp_path / "a.pt")
    with pytest.raises(CannotHold, match="part of a sparse coo tensor"):
        holdfast.prune(tmp_path / "a.pt", tmp_path / "b.pt", ["*: 0.5"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(
            {"q": torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)},
            tmp_path / "q.pt",
        )
    with pytest.raises(CannotHold, match="part of a quantised tensor"):
        holdfast.prune(tmp_path / "q.pt", tmp_path / "b.pt", ["*: 0.5"])
    assert not (tmp_path / "b.pt").exists()


def test_a_rule_as_a_value():
    assert parse_rule("a:b : 2:4").pattern == "a:b"
    assert parse_rule("*.w:random 0.5").method == parse_rule("x: random 0.5 seed=0").method


MEMORY = """
import resource, sys
import holdfast
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small, large, out, rule = sys.argv[1:]
holdfast.prune(small, out, ["*: " + rule], threads=2, durable=False)
before = peak()
holdfast.prune(large, out, ["*: " + rule], threads=2, durable=False, overwrite=True)
print(peak() - before)
"""


@pytest.mark.parametrize("rule", ["0.5", "2:4", "global 0.8", "block 4x4 0.9"])
def test_memory_is_bounded(tmp_path, rule):
    rng = np.random.default_rng(0)
    nbytes = 256 << 20
    row = rng.standard_normal((64, 4096), np.float32)
    holdfast.save({"w": np.tile(row, (8, 1))}, tmp_path / "small.safetensors", durable=False)
    holdfast.save(
        {"w": np.tile(row, (nbytes // row.nbytes, 1))},
        tmp_path / "large.safetensors",
        durable=False,
    )
    arguments = [
        str(tmp_path / name)
        for name in ("small.safetensors", "large.safetensors", "out.safetensors")
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments, rule],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < nbytes / 3


MODEL = {
    "model.embed_tokens.weight": np.ones((8, 4), np.float32),
    "model.layers.0.mlp.up.weight": np.arange(32, dtype=np.float32).reshape(8, 4),
    "model.layers.0.mlp.up.bias": np.ones(8, np.float32),
    "model.norm.weight": np.ones(4, np.float32),
    "model.position_ids": np.ones((1, 8), np.int64),
    "lm_head.weight": np.arange(32, dtype=np.float32).reshape(8, 4),
}


def pruned_names(tmp_path, state, *rules, suffix=".pt"):
    holdfast.save(state, tmp_path / f"a{suffix}")
    done = holdfast.prune(tmp_path / f"a{suffix}", tmp_path / f"b{suffix}", rules, overwrite=True)
    return {name for row in done.tensors for name in (row.name, *row.also)}, done


def test_groups_of_a_whole_model_are_those_of_its_matrices(tmp_path):
    names, done = pruned_names(tmp_path, MODEL, "*: 2:4")
    assert names == {"model.layers.0.mlp.up.weight", "lm_head.weight"}
    assert done.kept == 4
    (note,) = [note for note in done.notes if "is for matrices" in note]
    assert "2 of one dimension or none ('model.layers.0.mlp.up.bias', 'model.norm.weight')" in note
    assert "1 embeddings ('model.embed_tokens.weight')" in note
    assert "1 of integers or flags ('model.position_ids')" in note
    found = load(tmp_path / "b.pt")
    assert all((found[name] == MODEL[name]).all() for name in MODEL if name not in names)


def test_what_is_named_is_meant(tmp_path):
    names, done = pruned_names(tmp_path, MODEL, "*embed*: 2:4", "model.norm.weight: 2:4")
    assert names == {"model.embed_tokens.weight", "model.norm.weight"}
    assert not done.notes
    with pytest.raises(CannotHold, match=r"'\*\.bias: 2:4' finds no matrix"):
        pruned_names(tmp_path, MODEL, "*.bias: 2:4")
    # Other methods are for whatever they match.
    assert "model.norm.weight" in pruned_names(tmp_path, MODEL, "*_ids: keep", "*: 0.5")[0]
    state = {
        "transformer.wte.weight": MODEL["lm_head.weight"],
        "h.0.shared.up.weight": MODEL["lm_head.weight"],
    }
    assert pruned_names(
        tmp_path, state | {"experts.weight": np.ones((2, 3, 4), np.float32)}, "*.weight: 2:4"
    )[0] == {"experts.weight"}


def test_a_head_that_is_tied_to_the_embedding_is_left_with_it(tmp_path):
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(array) for name, array in MODEL.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    names, done = pruned_names(tmp_path, state, "*: 2:4")
    assert names == {"model.layers.0.mlp.up.weight"}
    assert any("lm_head.weight" in note for note in done.notes)
    with pytest.raises(CannotHold, match="are one tensor"):
        pruned_names(tmp_path, state, "lm_head.weight: 2:4", "*: 2:4")


def test_shards_of_pruned_weights(tmp_path):
    holdfast.save(MODEL, tmp_path / "a.pt")
    done = holdfast.prune(
        tmp_path / "a.pt", tmp_path / "b", ["*: 2:4"], format="safetensors", max_shard_size=200
    )
    assert done.format == "safetensors-dir"
    assert sum(name.startswith("model-") for name, _ in done.files) == 3
    assert set(load(tmp_path / "b")) == set(MODEL)
