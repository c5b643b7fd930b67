"""`diff`: what is different between checkpoints, across formats, in numbers that an independent computation agrees with."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import holdfast
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.digest import Digest
from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Global, Opaque
from holdfast.core.protocols import Description
from holdfast.core.value import replace
from holdfast.engine import scan
from holdfast.engine.files import ViewTable
from holdfast.engine.scan import cut_elements
from holdfast.errors import CannotHold, LimitExceeded, NoSuchTensor, Unsupported
from holdfast.numeric import compare
from holdfast.numeric.compare import Tally, compare_elements
from holdfast.stores.local import LocalStore
from holdfast.verbs.compare_values import ContainerKind, ValueChange, compare_values
from holdfast.verbs.diff import ABSENT, COMPARISONS, Comparison, Rename, diff, match_names
from holdfast.verbs.save import save
from holdfast.verbs.shared.state import make_lazy_tree, tabulate_state
from holdfast.verbs.side import Side
from tests.sampling import examples


def in_memory(state: object) -> Checkpoint:
    """A checkpoint over arrays, without a file."""
    described = tabulate_state(state)
    source = next(iter(described.tensors.values())).source if described.tensors else None
    return Checkpoint(
        source, Description("torch-zip", described.tensors, make_lazy_tree(described))
    )


def content(a: np.ndarray, b: np.ndarray) -> compare.ContentDifference:
    (change,) = diff(in_memory({"x": a}), in_memory({"x": b})).changed
    assert change.content is not None
    return change.content


def test_formats_of_the_same_state_are_the_same(tmp_path):
    rng = np.random.default_rng(1)
    state = {"a": rng.standard_normal((40, 30)).astype(np.float32), "t": rng.standard_normal((9, 8)).T,
             "h": np.arange(5, dtype=ml_dtypes.bfloat16), "e": np.zeros((0, 3)), "s": np.array(1.5)}  # fmt: skip
    paths = [tmp_path / "x.pt", tmp_path / "x.safetensors", tmp_path / "x"]
    for path in paths:
        save(state, path, format=None if path.suffix else "native", durable=False)
    for a in paths:
        for b in paths:
            found = diff(a, b)
            assert found.equal
            assert found.same == 5
            assert diff(a, b, exact=True).same_by_checksum == 0
    # The transposed one was saved in C order by safetensors and as a view by torch: read there, recorded elsewhere.
    assert diff(paths[1], paths[2]).same_by_checksum == 5


def test_parity_with_the_peers(tmp_path):
    torch = pytest.importorskip("torch")
    peer = pytest.importorskip("safetensors.torch")
    tensors = {f"layers.{i}.weight": torch.randn(17, 5).to(torch.bfloat16) for i in range(4)}
    torch.save(tensors, tmp_path / "x.pt")
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    peer.save_file(tensors, tmp_path / "x.safetensors")
    for name in ("old.pt", "x.safetensors"):
        found = diff(tmp_path / "x.pt", tmp_path / name)
        assert (found.equal, found.same, found.same_by_checksum) == (True, 4, 0)
    assert diff(tmp_path / "x.pt", tmp_path / "x.pt").same_by_checksum == 4


def test_golden_files_are_the_same_as_themselves(golden):
    found = diff(golden, golden, exact=True)
    assert found.equal
    with holdfast.open(golden) as checkpoint:
        assert found.same == len(checkpoint)


def test_golden_byte_orders_and_protocols(golden_dir):
    files = golden_dir / "files"
    found = diff(files / "big_endian.pt", files / "dtypes.pt")
    assert (found.removed, found.renamed, found.changed) == ((), (), ())
    assert found.same == 17
    assert diff(files / "protocol4.pt", files / "protocol5.pt").equal
    assert diff(files / "plain.pt", files / "no_crc.pt").equal
    assert diff(files / "hf_index", files / "hf_plain").equal


def test_nothing_is_read_where_both_record_it(tmp_path, monkeypatch):
    state = {"a": np.arange(1000.0), "b": np.arange(500)}
    save(state, tmp_path / "x.pt", durable=False)
    save(state, tmp_path / "y", format="native", durable=False)
    with holdfast.open(tmp_path / "x.pt") as a, holdfast.open(tmp_path / "y") as b:
        assert Comparison(Side.of(a), Side.of(b)).nbytes == 0
        assert Comparison(Side.of(a), Side.of(b), exact=True).nbytes == 2 * (8000 + 4000)
        monkeypatch.setattr(LocalStore, "read", lambda *rest: pytest.fail("tensor bytes were read"))
        assert diff(a, b).same_by_checksum == 2


def test_added_removed_changed_and_values(tmp_path):
    old = {
        "m": {"w": np.ones((2, 2), np.float32), "gone": np.zeros(3)},
        "lr": 0.1,
        "betas": (0.9, 1),
        "n": math.nan,
        "k": [1, 2],
    }
    new = {
        "m": {"w": np.full((2, 2), 3, np.float32), "new": np.ones(4)},
        "lr": 0.2,
        "betas": [0.9, 1],
        "n": math.nan,
        "k": [1],
    }
    save(old, tmp_path / "a.pt", durable=False)
    save(new, tmp_path / "b.pt", durable=False)
    found = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (found.added, found.removed, found.same, found.equal) == (
        ("m.new",),
        ("m.gone",),
        0,
        False,
    )
    (change,) = found.changed
    assert (change.name, change.dtypes, change.shapes) == (
        "m.w",
        ("float32", "float32"),
        ((2, 2), (2, 2)),
    )
    assert (change.content.changed, change.content.total, change.content.max_abs) == (4, 4, 2.0)
    values = {v.name: (v.a, v.b) for v in found.values}
    assert values["lr"] == (0.1, 0.2)
    assert values["k.1"] == (2, ABSENT)
    assert [str(v) for v in values["betas"]] == ["tuple", "list"]
    assert len(values) == 3


def test_shapes_and_dtypes():
    base = {
        "s": np.zeros((2, 3)),
        "d": np.arange(4, dtype=np.float32),
        "r": np.array([1.0, 2.0]),
        "i": np.array([1, 2]),
    }
    other = {"s": np.zeros((3, 2)), "d": base["d"].astype(ml_dtypes.bfloat16), "r": np.array([1.0, 2.5], np.float32),
             "i": np.array([1.0, 2.5])}  # fmt: skip
    found = {c.name: c for c in diff(in_memory(base), in_memory(other)).changed}
    assert found["s"].content is None
    assert found["d"].dtypes == ("float32", "bfloat16")
    assert found["d"].content.changed == 0
    assert found["r"].content.max_abs == 0.5
    assert (found["i"].content.changed, found["i"].content.max_abs) == (1, 0.5)


def test_renames(tmp_path):
    rng = np.random.default_rng(2)
    w = [rng.standard_normal((3, 4)).astype(np.float32) for _ in range(3)]
    zeros = np.zeros(5)
    old = {
        "model.0.w": w[0],
        "model.1.w": w[1],
        "keep": w[2],
        "model.0.b": zeros,
        "model.1.b": zeros.copy(),
        "x": np.ones(5),
    }
    new = {
        "0.w": w[0],
        "1.w": w[1],
        "keep": w[2],
        "1.b": zeros,
        "0.b": zeros.copy(),
        "y": np.full(5, 2.0),
    }
    save(old, tmp_path / "a.pt", durable=False)
    save(new, tmp_path / "b.safetensors", durable=False)
    for exact in (False, True):
        found = diff(tmp_path / "a.pt", tmp_path / "b.safetensors", exact=exact)
        assert set(found.renamed) == {Rename(f"model.{n}", n) for n in ("0.w", "1.w", "0.b", "1.b")}
        assert (found.added, found.removed) == (("y",), ("x",))
    plain = diff(tmp_path / "a.pt", tmp_path / "b.safetensors", find_renamed=False)
    assert (len(plain.added), len(plain.removed), plain.renamed) == (5, 5, ())


@pytest.mark.parametrize("copies", [3, COMPARISONS])
def test_the_nearest_of_many_names(copies):
    same = Digest(DTYPES.name("float32"), (1,), 7)
    old = {f"net.layers.{i}.bias": same for i in range(copies)}
    new = {f"layers.{i}.bias": same for i in reversed(range(copies))}
    pairs = match_names(old, new)
    assert len(pairs) == copies
    assert all(p.a == f"net.{p.b}" for p in pairs)
    (pair,) = match_names({"enc.fc1.bias": same, "enc.fc2.bias": same}, {"enc.fc2_new.bias": same})
    assert pair == Rename("enc.fc2.bias", "enc.fc2_new.bias")


def test_meta_tensors(golden_dir):
    with holdfast.open(golden_dir / "files/kinds.pt") as checkpoint:
        name, meta = next((n, t) for n, t in checkpoint.items() if t.traits.meta)
        tensors = {name: replace(meta, shape=(9,))}
        other = Checkpoint(meta.source, Description("torch-zip", ViewTable(tensors), tensors))
        alone = Checkpoint(
            meta.source, Description("torch-zip", ViewTable({name: meta}), {name: meta})
        )
        assert diff(alone, alone).same == 1
        (change,) = diff(alone, other).changed
        assert change.content is None


@pytest.mark.parametrize(("a", "b", "expected"), [
    (np.array([2**63 - 1, 0]), np.array([-(2**63), 0]), 2**64 - 1),
    (np.array([2**64 - 1], np.uint64), np.array([-(2**63)]), 2**64 + 2**63 - 1),
    (np.array([2**53 + 1]), np.array([2**53]), 1),
    (np.array([True, False]), np.array([True, True]), 1),
])  # fmt: skip
def test_integers_are_exact(a, b, expected):
    for found in (content(a, b), content(b, a)):
        assert (found.changed, found.max_abs) == (1, expected)
        assert isinstance(found.max_abs, int)
        assert 0 < found.max_rel <= 2


INTEGERS = st.sampled_from([np.int8, np.uint8, np.int16, np.uint16, np.int64, np.uint64])


@settings(max_examples=examples(150))
@given(st.data(), INTEGERS, INTEGERS)
def test_integers_against_python(data, first, second):
    a, b = (data.draw(hnp.arrays(t, 6)) for t in (first, second))
    found = compare_elements(a, b, compare_bits=first is second).difference()
    pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert found.changed == sum(x != y for x, y in pairs)
    assert found.max_abs == max(abs(x - y) for x, y in pairs)
    assert found.max_rel == pytest.approx(
        max(abs(x - y) / (max(abs(x), abs(y)) or 1) for x, y in pairs)
    )


def test_nan_infinity_and_zero():
    nan, inf = math.nan, math.inf
    a, b = np.array([nan, nan, 1.0, inf, inf, 0.0]), np.array([nan, 1.0, 1.0, inf, -inf, -0.0])
    found = content(a, b)
    assert (found.changed, found.nans, found.max_abs, found.max_rel) == (3, 2, inf, inf)
    # Where each pair that changed has a NaN, no difference is a number; where another one changed, that one's counts.
    assert (content(a[:2], b[:2]).max_abs, content(a[:2], b[:2]).max_rel) == (None, None)
    assert content(np.array([1.0, 2.0]), np.array([1.0, nan])).max_abs is None
    assert content(np.array([1.0, 2.0]), np.array([1.5, nan])).max_abs == 0.5
    assert (content(a[5:], b[5:]).max_abs, content(a[5:], b[5:]).max_rel) == (0, 0)
    quiet = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert (
        content(quiet, quiet[::-1].copy()).changed,
        content(quiet, quiet[::-1].copy()).max_abs,
    ) == (2, None)
    assert diff(in_memory({"x": quiet}), in_memory({"x": quiet.copy()})).equal


def test_no_magnitude_overflows():
    found = content(np.array([1.7e308, 5e-324]), np.array([-1.7e308, 5e-324]))
    assert (found.max_abs, found.max_rel) == (math.inf, 2.0)
    assert found.cosine == pytest.approx(-1)
    assert content(np.array([1e-310, 0.0]), np.array([3e-310, 0.0])).cosine == pytest.approx(1)
    assert content(np.zeros(3), np.ones(3)).cosine is None


FLOATS = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics_against_numpy(dtype):
    rng = np.random.default_rng(5)
    kind = DTYPES.name(dtype).numpy
    complex_ = dtype.startswith("complex")
    a, b = (
        (
            rng.standard_normal((50, 7)) + (1j * rng.standard_normal((50, 7)) if complex_ else 0)
        ).astype(kind)
        for _ in "ab"
    )
    b[:20] = a[:20]
    found = content(a, b)
    x, y = (v.astype(np.complex128 if complex_ else np.float64).ravel() for v in (a, b))
    assert found.changed == np.count_nonzero(x != y)
    assert found.max_abs == pytest.approx(np.abs(x - y).max())
    assert found.max_rel == pytest.approx(
        np.nanmax(np.abs(x - y) / np.maximum(np.abs(x), np.abs(y)))
    )
    assert found.cosine == pytest.approx(
        np.vdot(x, y).real / (np.linalg.norm(x) * np.linalg.norm(y))
    )


@settings(max_examples=examples(60))
@given(hnp.arrays(np.float64, 12), hnp.arrays(np.float64, 12), st.integers(1, 12))
def test_blocks_add_up(a, b, block):
    whole = compare_elements(a, b, compare_bits=True).difference()
    parts = sum(
        (compare_elements(a[i:j], b[i:j], compare_bits=True) for i, j in cut_elements(12, block)),
        Tally(),
    ).difference()
    assert (whole.changed, whole.total, whole.max_abs, whole.max_rel, whole.nans) == (
        parts.changed, parts.total, parts.max_abs, parts.max_rel, parts.nans)  # fmt: skip
    assert (whole.cosine is None) == (parts.cosine is None)
    if whole.cosine is not None:
        assert whole.cosine == pytest.approx(parts.cosine, abs=1e-9)


def test_strided_and_long_tensors_are_walked_in_blocks(monkeypatch):
    monkeypatch.setattr(scan.cut_elements, "__defaults__", (64,))
    a = np.arange(3000.0).reshape(30, 100)
    b = np.asfortranarray(a)
    seen: list[int] = []
    assert diff(in_memory({"x": a}), in_memory({"x": b}), progress=seen.append).equal
    assert sum(seen) == 2 * a.nbytes
    assert len(seen) == 47
    b[17, 23] += 4
    assert content(a, b).changed == 1


def test_packed_floats_and_pairs():
    from holdfast.core.chunk import Storage
    from holdfast.core.tensor import LazyTensor
    from holdfast.engine.source import OpenSource
    from holdfast.stores.memory import MemoryStore

    def checkpoint(dtype: str, shape: tuple[int, ...], data: bytes) -> Checkpoint:
        source = OpenSource(MemoryStore({"data": data}))
        tensor = LazyTensor.contiguous(
            "x", DTYPES.name(dtype), shape, Storage("data", 0, len(data), home=source.store), source
        )
        return Checkpoint(source, Description("torch-zip", ViewTable({"x": tensor}), {"x": tensor}))

    pairs = checkpoint("float4_e2m1fn_x2", (2, 3), b"\x21\x43\x65\x07\x21\x43")
    assert diff(pairs, checkpoint("float4_e2m1fn", (2, 6), b"\x21\x43\x65\x07\x21\x43")).equal
    (change,) = diff(
        pairs, checkpoint("float4_e2m1fn", (2, 6), b"\x21\x43\x65\x07\x21\x23")
    ).changed
    assert change.dtypes == ("float4_e2m1fn", "float4_e2m1fn")
    assert (change.content.changed, change.content.total, change.content.max_abs) == (
        1,
        12,
        1.0,
    )  # 2.0 and 1.0


def test_hostile_expansion_is_refused(golden_dir):
    from holdfast.core.box import Box
    from holdfast.core.chunk import Chunk

    with holdfast.open(golden_dir / "files/no_crc.pt") as checkpoint:
        name, tensor = next(
            (n, t) for n, t in checkpoint.items() if t.dtype.name == "float32" and t.size
        )
        chunk = Chunk(Box.whole((1 << 40,)), tensor.chunks[0].storage, 0, (0,))
        wide = {name: replace(tensor, shape=(1 << 40,), chunks=(chunk,))}
        side = Checkpoint(tensor.source, Description("torch-zip", ViewTable(wide), wide))
        with pytest.raises(LimitExceeded):
            diff(side, side)


def test_hostile_trees_end():
    loop: dict[str, object] = {"v": 1}
    loop["self"] = loop
    shared: object = [1]
    for _ in range(40):
        shared = [shared, shared]
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    tree = {"loop": loop, "deep": deep, "shared": shared}
    changes, _ = compare_values({"loop": loop, "deep": deep}, {"loop": {"v": 2}, "deep": [1]})
    assert [c.name for c in changes[:1]] == ["loop.v"]
    again = copy.deepcopy({"loop": loop, "shared": shared}) | {"deep": [1]}
    for _ in range(4999):
        again["deep"] = [again["deep"]]
    assert compare_values(tree, again | {"deep": [again["deep"]]})[0] == (
        ValueChange(("deep", *(0,) * 5000), 1, ContainerKind("list")),
    )
    assert compare_values(tree, again)[0] == ()


def test_objects_are_compared_by_structure():
    def made(lr: float, what: str = "Config") -> Opaque:
        return Opaque(
            Global("app", what), args=(1,), state={"lr": lr, "inner": Opaque(Global("app", "X"))}
        )

    assert compare_values({"c": made(0.1)}, {"c": made(0.1)})[0] == ()
    assert [(c.name, c.a, c.b) for c in compare_values({"c": made(0.1)}, {"c": made(0.2)})[0]] == [
        ("c.lr", 0.1, 0.2)
    ]
    assert [c.name for c in compare_values({"c": made(0.1)}, {"c": made(0.1, "Other")})[0]] == ["c"]


@pytest.mark.parametrize(("a", "b", "same"), [
    (1, 1, True), (1, 1.0, False), (1, True, False), (0.0, -0.0, False), (math.nan, math.nan, True), ("x", "x", True),
    ((), [], False), ({}, OrderedDict(), True), (b"a", bytearray(b"a"), False), ({1, 2}, {2, 1}, True), ({1}, {2}, False),
    (np.float32(1), np.float64(1), False), (np.arange(3), np.arange(3), True), (np.arange(3), np.arange(4), False),
    (np.array([math.nan]), np.array([math.nan]), True), (complex(0, math.nan), complex(0, math.nan), True),
    ({0: 1}, {"0": 1}, False),
])  # fmt: skip
def test_plain_values(a, b, same):
    assert (not compare_values({"v": a}, {"v": b})[0]) is same


def test_metadata_of_safetensors(tmp_path):
    peer = pytest.importorskip("safetensors.numpy")
    for name, text in (("a", "1"), ("b", "2")):
        peer.save_file({"x": np.zeros(2)}, tmp_path / name, metadata={"step": text})
    (value,) = diff(tmp_path / "a", tmp_path / "b").values
    assert (value.path, value.a, value.b) == (("__metadata__", "step"), "1", "2")


def test_a_tied_tensor_is_compared_once_for_each_of_its_names(tmp_path):
    torch = pytest.importorskip("torch")
    weight = torch.arange(4.0)
    torch.save({"embed": weight, "head": weight}, tmp_path / "a.pt")
    holdfast.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", dtype="bf16")
    found = holdfast.diff(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert [change.name for change in found.changed] == ["embed", "head"]


@pytest.fixture
def wrapped(tmp_path):
    """A trainer's file, and the model that came out of it with one weight changed."""
    w, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)
    holdfast.save(
        {"model": {"up.weight": w, "up.bias": b}, "optimizer": {"m": w + 1}, "step": 7},
        tmp_path / "a.pt",
    )
    holdfast.save(
        {"up.weight": w, "up.bias": b + 1}, tmp_path / "b.safetensors", metadata={"licence": "mit"}
    )
    return tmp_path / "a.pt", tmp_path / "b.safetensors"


def test_names_of_one_side_are_changed(wrapped):
    found = holdfast.diff(*wrapped, rename=[("model.*", "*")])
    assert [change.name for change in found.changed] == ["up.bias"]
    assert (found.same, found.removed, found.added, found.renamed) == (1, ("optimizer.m",), (), ())
    assert [change.path for change in found.values] == [("step",)]
    assert holdfast.diff(*wrapped, rename={"model.*": "*"}) == found
    back = holdfast.diff(*reversed(wrapped), rename=[("*", "model.*")], tensors_only=True)
    assert [change.name for change in back.changed] == ["model.up.bias"]
    assert not back.values


def test_a_part_is_compared(wrapped):
    found = holdfast.diff(*wrapped, rename=[("model.*", "*")], filter="*.weight")
    assert found.equal
    assert found.same == 1
    found = holdfast.diff(*wrapped, filter="optimizer")
    assert (found.removed, found.values) == (("optimizer.m",), ())
    assert [change.path for change in holdfast.diff(*wrapped, filter="step").values] == [("step",)]
    assert not holdfast.diff(*wrapped, tensors_only=True).values


def test_what_cannot_be_compared_so(wrapped):
    with pytest.raises(CannotHold, match="'modle\\.\\*' matches nothing"):
        holdfast.diff(*wrapped, rename=[("modle.*", "*")])
    with pytest.raises(CannotHold, match="the same number"):
        holdfast.diff(*wrapped, rename=[("model.*", "x")])
    with pytest.raises(CannotHold, match="two tensors would be called"):
        holdfast.diff(*wrapped, rename=[("model.up.bias", "model.up.weight")])
    with pytest.raises(NoSuchTensor, match=r"is called 'up\.wieght'; near: up\.weight"):
        holdfast.diff(*wrapped, filter="up.wieght")
    with pytest.raises(Unsupported, match="find_renamed"):
        holdfast.diff(*wrapped, rename=False)


def test_what_is_nested_is_compared_by_its_names(tmp_path):
    torch = pytest.importorskip("torch")
    sparse = torch.eye(3).to_sparse()
    torch.save({"m": {"s": sparse, "l": [1, {"x": 2}], "e": {}}}, tmp_path / "a.pt")
    torch.save({"s": sparse, "l": [1, {"x": 3}], "e": {}}, tmp_path / "b.pt")
    found = holdfast.diff(tmp_path / "a.pt", tmp_path / "b.pt", rename=[("m.*", "*")])
    assert [(change.path, change.a, change.b) for change in found.values] == [(("l.1.x",), 2, 3)]
    assert (found.removed, found.added, found.changed) == ((), (), ())
