"""`package`, `replace_weights`, `tie` and `compact`, without torch where that can be."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import holdfast
from holdfast import errors
from tests.parity.compare import elements
from tests.support import nbytes_on_disk


@pytest.fixture
def models():
    """A base with its tied head, and three adapters over it."""
    generator = torch.Generator().manual_seed(0)
    emb, mid = (
        torch.randn(1024, 256, generator=generator),
        torch.randn(256, 256, generator=generator),
    )
    base = {"emb": emb, "mid": mid, "head": emb}
    adapters = {
        f"adapter{i}": {**base, "lora.a": torch.randn(4, 256, generator=generator)}
        for i in range(3)
    }
    return {"base": base, **adapters}


def parts(models):
    """Bytes of the base and the adapters, each storage once."""
    return sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for s in models.values()
            for t in s.values()
        }.values()
    )


def assert_holds(path, models):
    with holdfast.open(path) as ckpt:
        assert list(ckpt.tree) == list(models)
        assert len(ckpt) == sum(map(len, models.values()))
        for model, state in models.items():
            for name, tensor in state.items():
                assert ckpt[f"{model}.{name}"].numpy().tobytes() == elements(tensor)
        assert sorted(len(alias.names) for alias in ckpt.aliases) == [4, 8]


@pytest.mark.parametrize("format", ["pt2", "native"])
def test_a_base_and_its_adapters_take_the_bytes_of_one_base(models, tmp_path, format):
    saved = holdfast.package(models, tmp_path / "p", format=format)
    assert saved.nbytes == nbytes_on_disk(tmp_path / "p")
    assert nbytes_on_disk(tmp_path / "p") == pytest.approx(parts(models), rel=0.01)
    for model, state in models.items():
        torch.save(state, tmp_path / f"{model}.pt")
    assert sum(nbytes_on_disk(tmp_path / f"{model}.pt") for model in models) > 3.9 * nbytes_on_disk(
        tmp_path / "p"
    )
    assert_holds(tmp_path / "p", models)


@pytest.mark.parametrize("format", ["pt2", "native"])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_files_that_each_hold_the_base(models, tmp_path, suffix, format):
    paths = {model: tmp_path / f"{model}.{suffix}" for model in models}
    for model, state in models.items():
        holdfast.save(state, paths[model])
    holdfast.package(paths, tmp_path / "apart", format=format)
    assert nbytes_on_disk(tmp_path / "apart") > 3.9 * parts(models)
    holdfast.package(paths, tmp_path / "p", format=format, deduplicate="content")
    assert nbytes_on_disk(tmp_path / "p") == pytest.approx(parts(models), rel=0.01)
    assert_holds(tmp_path / "p", {m: dict(sorted(s.items())) for m, s in models.items()})


def test_a_file_that_is_given_twice_is_one_file(models, tmp_path):
    holdfast.save(models["base"], tmp_path / "base.pt")
    with (
        holdfast.open(tmp_path / "base.pt") as first,
        holdfast.open(tmp_path / "base.pt") as second,
    ):
        given = {"a": first, "b": second, "c": tmp_path / "base.pt", "d": str(tmp_path / "base.pt")}
        saved = holdfast.package(given, tmp_path / "p.pt2")
    assert saved.nbytes < 1.02 * nbytes_on_disk(tmp_path / "base.pt")


def test_views_are_views_again(tmp_path):
    whole = np.arange(24.0).reshape(4, 6)
    state = {"whole": whole, "turned": whole.T, "rows": whole[1:3], "steps": whole[:, ::2]}
    holdfast.package({"m": state, "n": {"row": whole[2]}}, tmp_path / "p.pt2")
    with holdfast.open(tmp_path / "p.pt2") as ckpt:
        assert [len(alias.names) for alias in ckpt.aliases] == [5]
        for name, array in state.items():
            assert np.array_equal(ckpt[f"m.{name}"].numpy(), array)
        assert ckpt.nbytes == whole.nbytes


def test_equal_storages_take_their_views_along(tmp_path):
    a, b = np.arange(4096.0), np.arange(4096.0)
    models = {"a": {"w": a}, "b": {"w": b, "part": b[100:200]}}
    saved = holdfast.package(models, tmp_path / "p.pt2", deduplicate="content")
    assert saved.nbytes < 1.2 * a.nbytes
    with holdfast.open(tmp_path / "p.pt2") as ckpt:
        assert [alias.names for alias in ckpt.aliases] == [("a.w", "b.w", "b.part")]
        assert np.array_equal(ckpt["b.part"].numpy(), b[100:200])


def test_storages_that_are_equal_in_two_shapes(tmp_path):
    a, b, c = (np.arange(4096.0) for _ in range(3))
    turned = [x.reshape(64, 64) for x in (c, b, a)]
    state = {"a": a, "b": b, "c2": turned[0], "b2": turned[1], "a2": turned[2], "part": b[7:9]}
    saved = holdfast.package({"m": state}, tmp_path / "p.pt2", deduplicate="content")
    assert saved.nbytes < 1.2 * a.nbytes
    with holdfast.open(tmp_path / "p.pt2") as ckpt:
        assert [len(alias.names) for alias in ckpt.aliases] == [6]
        for name, array in state.items():
            assert np.array_equal(ckpt[name].numpy(), array)


def test_parameters_are_told_from_buffers(tmp_path):
    norm = torch.nn.BatchNorm1d(3)
    holdfast.package({"m": norm, "n": norm.state_dict()}, tmp_path / "p.pt2")
    with holdfast.open(tmp_path / "p.pt2") as ckpt:
        assert {name for name, tensor in ckpt.items() if tensor.traits.parameter} == {
            "m.weight",
            "m.bias",
        }


def test_constants_of_a_package_stay_constants(tmp_path):
    holdfast.package(
        {"m": {"w": np.ones(3), "constants": {"mask": np.zeros(2)}}}, tmp_path / "a.pt2"
    )
    holdfast.package({"again": tmp_path / "a.pt2", "more": {"w": np.ones(2)}}, tmp_path / "b.pt2")
    with holdfast.open(tmp_path / "b.pt2") as ckpt:
        assert list(ckpt) == ["again.w", "again.constants.mask", "more.w"]
        assert (
            ckpt["again.constants.mask"]
            .chunks[0]
            .storage.label.startswith("data/constants/tensor_")
        )


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({}, "no model"),
        ({"a": {"w": np.ones(2), "step": 3}}, "a.step: a int"),
        ({"a": 5}, "a: a int"),
        ({"a/b": {"w": np.ones(2)}}, "'a/b' is no name"),
        ({3: {"w": np.ones(2)}}, "3 is no name"),
        ({"a": {"w": np.ones(2)}, "A": {"w": np.ones(2)}}, "'A' and 'a' are one name"),
        ({"a": {"w": torch.ones(2, device="meta")}}, "a.w: on the meta device"),
        ({"a": {"w": torch.eye(3).to_sparse()}}, "a.w: a Composite"),
    ],
)
def test_what_cannot_be_packaged(tmp_path, models, words):
    with pytest.raises(errors.CannotHold) as caught:
        holdfast.package(models, tmp_path / "p.pt2")
    assert words in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_models_that_disagree_in_the_dtype_of_a_storage(tmp_path):
    words = torch.arange(6, dtype=torch.int32)
    with pytest.raises(
        errors.CannotHold, match=r"b\.w: float32 over the storage of a\.w, which is int32"
    ):
        holdfast.package(
            {"a": {"w": words}, "b": {"w": words.view(torch.float32)}}, tmp_path / "p.pt2"
        )
    assert os.listdir(tmp_path) == []


def test_a_group_without_a_complete_member(tmp_path):
    from holdfast.core.value import replace

    with holdfast.open(_saved(tmp_path / "a.pt", {"w": np.ones((4, 4))})) as ckpt:
        chunk = ckpt["w"][:2].chunks[0]
        part = replace(ckpt["w"], chunks=(chunk,))
        with pytest.raises(errors.CannotHold, match=r"a\.w: 8 of 16 elements are here") as caught:
            holdfast.package({"a": {"w": part}, "b": {"w": part}}, tmp_path / "p.pt2")
    assert len(caught.value.problems) == 2
    assert os.listdir(tmp_path) == ["a.pt"]


def _saved(path, state):
    holdfast.save(state, path)
    return path


def test_other_formats_and_ways_are_refused(tmp_path):
    for wrong in ({"format": "zip"}, {"deduplicate": "luck"}):
        with pytest.raises(errors.Unsupported):
            holdfast.package({"a": {"w": np.ones(1)}}, tmp_path / "p", **wrong)
    assert os.listdir(tmp_path) == []


# Other weights in a package.


def test_weights_are_replaced_in_place_and_beside(tmp_path):
    holdfast.package(
        {"a": {"w": np.ones(3), "v": np.zeros(2)}, "b": {"w": np.ones(3)}}, tmp_path / "p.pt2"
    )
    holdfast.save({"w": np.full(3, 5.0), "v": np.full(2, 6.0)}, tmp_path / "new.safetensors")
    holdfast.replace_weights(
        tmp_path / "p.pt2", tmp_path / "q.pt2", weights=tmp_path / "new.safetensors", model="a"
    )
    holdfast.replace_weights(
        tmp_path / "p.pt2", weights={"b": {"w": np.full(3, 7.0)}}, in_place=True
    )
    with holdfast.open(tmp_path / "p.pt2") as p, holdfast.open(tmp_path / "q.pt2") as q:
        assert [float(p[name].numpy()[0]) for name in ("a.w", "a.v", "b.w")] == [1, 0, 7]
        assert [float(q[name].numpy()[0]) for name in ("a.w", "a.v", "b.w")] == [5, 6, 1]


def test_weights_that_do_not_fit_are_listed_and_nothing_is_written(tmp_path):
    holdfast.package(
        {"a": {"w": np.ones(3), "v": np.zeros(2), "u": np.ones(1)}, "b": {"w": np.ones(3)}},
        tmp_path / "p.pt2",
    )
    before = (tmp_path / "p.pt2").read_bytes()
    with pytest.raises(errors.CannotHold) as caught:
        holdfast.replace_weights(
            tmp_path / "p.pt2",
            weights={"w": np.ones(3, np.float32), "v": np.ones(5), "x": np.ones(1)},
            in_place=True,
            model="a",
        )
    assert sorted(p.partition(":")[0] for p in caught.value.problems) == [
        "a.u",
        "a.v",
        "a.w",
        "a.x",
    ]
    for state, model in (
        ({"w": np.ones(3)}, None),
        ({"w": np.ones(3)}, "c"),
        ({"w": np.ones(3), "n": 1}, "b"),
    ):
        with pytest.raises(errors.CannotHold):
            holdfast.replace_weights(tmp_path / "p.pt2", weights=state, in_place=True, model=model)
    assert (tmp_path / "p.pt2").read_bytes() == before
    assert os.listdir(tmp_path) == ["p.pt2"]


def test_what_is_no_package_has_no_weights_to_replace(tmp_path):
    holdfast.save({"w": np.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(errors.HoldfastError):
        holdfast.replace_weights(tmp_path / "a.pt", weights={"w": np.ones(3)}, in_place=True)


# Ties that were lost.


@pytest.mark.parametrize("target", ["out.pt", "out.safetensors", "out", "out.pt2", None])
@pytest.mark.parametrize("source", ["in.pt", "in.safetensors"])
def test_ties_are_found_and_restored(tmp_path, source, target):
    values = np.arange(5000.0)
    state = {"emb": values, "head": values.copy(), "other": values + 1}
    path = _saved(tmp_path / source, state)
    found = holdfast.tie(path, dry_run=True)
    assert not found.done
    assert found.savable_nbytes == values.nbytes
    assert [[m.name for m in group.members] for group in found.groups] == [["emb", "head"]]
    assert f"{values.nbytes:,} of {3 * values.nbytes:,} bytes could be saved" in str(found)
    output = path if target is None else tmp_path / target
    done = holdfast.tie(path, in_place=True) if target is None else holdfast.tie(path, output)
    assert done.done
    assert nbytes_on_disk(output) < 2.2 * values.nbytes
    with holdfast.open(output) as ckpt:
        for name, array in state.items():
            assert np.array_equal(ckpt[name].numpy(), array)
        assert [set(alias.names) for alias in ckpt.aliases] == [{"emb", "head"}]
    assert holdfast.tie(output, dry_run=True).savable_nbytes == 0


# Bytes that nothing reaches.


def test_the_parent_of_a_few_rows_goes_away(tmp_path):
    large = torch.arange(1_000_000.0)
    rows = large.view(1000, 1000)
    state = {
        "first": rows[3:13, :5],
        "same": rows[3:13, :5],
        "inner": rows[4, :2],
        "last": large[-10:],
    }
    torch.save(state, tmp_path / "a.pt")
    done = holdfast.compact(tmp_path / "a.pt", tmp_path / "b.pt")
    assert done.before_nbytes > 4_000_000
    assert done.nbytes == nbytes_on_disk(tmp_path / "b.pt") < 60_000
    found = torch.load(tmp_path / "b.pt")
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)
        assert found[name].stride() == tensor.stride()
    pointers = [found[n].untyped_storage().data_ptr() for n in state]
    assert pointers[0] == pointers[1] == pointers[2] != pointers[3]
    holdfast.compact(tmp_path / "a.pt", in_place=True)
    assert nbytes_on_disk(tmp_path / "a.pt") == nbytes_on_disk(tmp_path / "b.pt")


@pytest.mark.parametrize("name", ["m.safetensors", "m", "m.pt2"])
def test_other_formats_stay_what_they_are(tmp_path, name):
    state = {"a": np.arange(10.0), "b": np.arange(3)}
    holdfast.package({"model": state}, tmp_path / name) if name.endswith("pt2") else holdfast.save(
        state, tmp_path / name
    )
    with holdfast.open(tmp_path / name) as ckpt:
        before = ckpt.digest()
    holdfast.compact(tmp_path / name, in_place=True)
    with holdfast.open(tmp_path / name) as ckpt:
        assert ckpt.digest() == before


def test_what_cannot_be_written_is_not_replaced(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(errors.Unsupported, match="another path"):
        holdfast.compact(tmp_path / "old.pt", in_place=True)
    holdfast.compact(tmp_path / "old.pt", tmp_path / "new.pt")
    assert torch.equal(torch.load(tmp_path / "new.pt")["a"], torch.ones(3))


@pytest.mark.parametrize("name", ["p.safetensors", "p.PT", "p.bin", "p.onnx"])
def test_a_name_that_says_another_format(tmp_path, name):
    models = {"a": {"w": np.ones(3, np.float32)}}
    with pytest.raises(errors.Unsupported, match=r"\.pt2"):
        holdfast.package(models, tmp_path / name)
    assert os.listdir(tmp_path) == []
    assert holdfast.package(models, tmp_path / name, format="pt2").format == "pt2"
    assert holdfast.package(models, tmp_path / "step-1000.5").format == "native"


def test_weights_are_not_replaced_under_a_name_of_another_format(tmp_path):
    holdfast.package({"a": {"w": np.ones(3, np.float32)}}, tmp_path / "p.pt2")
    with pytest.raises(errors.Unsupported, match=r"call it q\.pt2"):
        holdfast.replace_weights(
            tmp_path / "p.pt2", tmp_path / "q.safetensors", weights={"w": np.zeros(3, np.float32)}
        )
    assert os.listdir(tmp_path) == ["p.pt2"]


@pytest.mark.parametrize("name", ["p", "p.pt2"])
def test_metadata_that_a_package_has_no_place_for_is_told(tmp_path, name):
    holdfast.save({"w": np.ones(3)}, tmp_path / "a.safetensors", metadata={"author": "somebody"})
    holdfast.save({"w": np.ones(3)}, tmp_path / "b.safetensors")
    done = holdfast.package(
        {"a": tmp_path / "a.safetensors", "b": tmp_path / "b.safetensors"}, tmp_path / name
    )
    assert [note for note in done.notes if "metadata" in note] == [
        "model 'a': its metadata (author) has no place in a package and is not kept"
    ]
