"""Laying out safetensors: the library loads it, Holdfast restores all of it, and what the format cannot hold is listed first."""

import json
import zlib
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.formats.slow_save import (
    Memory,
    assert_same,
    execute,
    raw_bytes,
    reopen,
    state_of,
    state_of_checkpoint,
)
from tests.formats.tree_strategies import trees
from tests.sampling import examples

import holdfast
from holdfast.core.documents import seal
from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tensor import AliasView, Composite, Traits
from holdfast.engine.table import make_lazy_table
from holdfast.errors import CannotHold, HeaderError, MetadataError
from holdfast.formats.recorded import share
from holdfast.formats.safetensors.write import ORDER, lay_out_safetensors
from holdfast.torch import versions

CODED = [row for row in DTYPES.rows if row.safetensors is not None]


def save(tree, metadata=None, **options):
    return execute(lay_out_safetensors(state_of(tree, metadata), **options))


def save_one(tree, metadata=None, **options):
    (content,) = save(tree, metadata, **options).values()
    return content


def header_of(content):
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), 8 + length


def record_of(content):
    return json.loads(header_of(content)[0]["__metadata__"]["holdfast"])


def with_record(content, change):
    """The same file with another record in it, which has the checksum of its own."""
    header, start = header_of(content)
    record = json.loads(header["__metadata__"]["holdfast"])
    del record["self"]
    text = change(record)
    header["__metadata__"]["holdfast"] = (
        seal(text.encode()).decode() if text.endswith("}") else text
    )
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + content[start:]


def all_dtypes(memory):
    return {f"t.{row.name}": memory.raw(row, (3, 4)) for row in CODED} | {
        "scalar": memory.raw("float32", ()), "none": memory.raw("int64", (0, 3)), "narrow": memory.raw("float6_e2m3fn", (4,)),
    }  # fmt: skip


def test_every_dtype_comes_back():
    tree = all_dtypes(Memory())
    ckpt = reopen({"": save_one(tree)})
    assert ckpt.format == "safetensors"
    assert set(ckpt) == set(tree)
    for name, tensor in tree.items():
        assert_same(tensor, ckpt[name], name)
        (storage,) = ckpt[name].storages
        assert storage.crc32 == zlib.crc32(raw_bytes(tensor))


def test_the_header_is_as_the_library_writes_it():
    kinds = ("?", "<f4", "<f8", "<f2", "<i8", "<u8", "<u4", "i1", "<i2")
    arrays = {
        f"{name}{i}": np.zeros(i, kind)
        for i in (2, 0)
        for name, kind in zip("bfdhiucsw", kinds, strict=True)
    }
    memory = Memory()
    ours, start = header_of(save_one({name: memory.array(array) for name, array in arrays.items()}))
    theirs, _ = header_of(safetensors.numpy.save(arrays))
    metadata = ours.pop("__metadata__")
    assert metadata["format"] == "pt"
    assert list(ours.items()) == list(theirs.items())
    assert start % 64 == 0


def test_the_table_of_dtypes_is_complete():
    assert sorted(ORDER) == sorted(row.safetensors for row in CODED)


def test_torch_loads_it(tmp_path):
    torch = pytest.importorskip("torch")
    import safetensors.torch

    memory = Memory()
    tree = {row.name: memory.raw(row, (3, 4)) for row in CODED if versions.dtype(row.torch)}
    tree["pairs"] = memory.raw("float4_e2m1fn_x2", (2, 3))
    path = tmp_path / "all.safetensors"
    path.write_bytes(save_one(tree))
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == set(tree)
    for name, tensor in tree.items():
        assert loaded[name].dtype == getattr(torch, tensor.dtype.name)
        assert tuple(loaded[name].shape) == tensor.shape
        assert loaded[name].reshape(-1).view(torch.uint8).numpy().tobytes() == raw_bytes(tensor)
    assert_same(tree["pairs"], holdfast.open(path)["pairs"])


def test_what_the_format_cannot_hold_is_listed():
    memory = Memory()
    tree = {
        "epoch": 3, "w": memory.array(np.ones(2)), "c": memory.raw("complex128", (2,)), "bits": memory.raw("bits8", (2,)),
        "odd": memory.raw("float4_e2m1fn", (3,)), "__metadata__": memory.array(np.ones(1)), "layers": [1, 2],
        "o": {"lr": 0.1, "n": None},
        "k": {1: memory.array(np.ones(1))}, "x": Opaque(Global("a.b", "C")), "\ud800": memory.array(np.ones(1)),
    }  # fmt: skip
    with pytest.raises(CannotHold) as caught:
        lay_out_safetensors(state_of(tree, {"m": "\udfff"}))
    problems = {p.split(":")[0]: p for p in caught.value.problems}
    assert set(problems) == {
        "epoch", "c", "bits", "odd", "__metadata__", "layers", "o.lr", "o.n", "k", "x", "\ud800", "metadata 'm'",
    }  # fmt: skip
    assert (
        problems["epoch"]
        == "epoch: an int; safetensors holds tensors only (keep_tree=True records it in __metadata__)"
    )
    assert "complex128" in problems["c"]
    assert "a.b.C" in problems["x"]


def test_an_expanded_view_is_not_written_out_by_accident():
    memory = Memory()
    one = memory.array(np.ones(1))
    with pytest.raises(CannotHold, match="expanded"):
        lay_out_safetensors(state_of({"huge": memory.view(one, (10**12,), (0,))}))


def test_nested_dicts_are_restored_without_being_asked():
    memory = Memory()
    tree = OrderedDict(
        model={
            "a": memory.array(np.arange(3)),
            "b.c": memory.array(np.ones(2), requires_grad=True, parameter=True),
        },
        empty={},
    )
    tree._metadata = OrderedDict({"": {"version": 2}})
    content = save_one(tree)
    assert set(header_of(content)[0]) == {"__metadata__", "model.a", "model.b.c"}
    assert_same(tree, reopen({"": content}).tree)


def test_a_plain_state_dict_needs_no_tree():
    memory = Memory()
    record = record_of(save_one({"a.b": memory.array(np.ones(2)), "c": memory.array(np.ones(3))}))
    assert set(record) == {"version", "of", "texts", "crc32", "self"}


def test_a_tensor_alone_and_one_without_data():
    memory = Memory()
    tensor = memory.array(np.ones(2))
    assert_same(tensor, reopen({"": save_one(tensor)}).tree)
    meta = holdfast.LazyTensor(
        "", DTYPES.name("float32"), (3, 4), (), memory.source, Traits(meta=True, requires_grad=True)
    )
    with pytest.raises(CannotHold, match="meta"):
        save_one({"m": meta})
    ckpt = reopen({"": save_one({"m": meta, "w": tensor}, keep_tree=True)})
    assert list(ckpt) == ["m", "w"]
    assert_same(meta, ckpt["m"])


def test_a_sparse_tensor_is_its_parts_and_comes_back_whole():
    memory = Memory()
    parts = {
        "indices": memory.array(np.zeros((2, 1), np.int64)),
        "values": memory.array(np.ones(1, np.float32)),
    }
    tree = {"s": Composite("sparse_coo", (3, 4), parts, {"coalesced": True}, Traits())}
    content = save_one(tree)
    assert set(header_of(content)[0]) == {"__metadata__", "s.indices", "s.values"}
    assert_same(tree, reopen({"": content}).tree)


@settings(max_examples=examples(60))
@given(st.data())
def test_any_tree_comes_back(data):
    memory = Memory()
    tensor = st.builds(lambda n: memory.array(np.full(n, n, np.int16)), st.integers(0, 3))
    tree = data.draw(trees(tensor))
    state = state_of(tree)
    assume(
        all(
            name != "__metadata__" and name.encode("utf-8", "replace").decode() == name
            for name in state.tensors
        )
    )
    shard = data.draw(st.none() | st.integers(1, 10))
    ckpt = reopen(execute(lay_out_safetensors(state, keep_tree=True, max_shard_size=shard)))
    if state.leaves.is_flat:
        # Nothing is recorded of a plain dict, and a file has its tensors in the order of their dtypes and names.
        assert_same(tree, {name: ckpt.tree[name] for name in tree})
    else:
        assert_same(tree, ckpt.tree)
    assert set(ckpt) == set(state.tensors)


def test_tied_weights_are_written_once_and_restored():
    memory = Memory()
    w = memory.array(np.arange(6.0).reshape(2, 3))
    tree = {"embed": w, "other": memory.array(np.ones(1)), "head": memory.view(w, (2, 3), (3, 1))}
    plan = lay_out_safetensors(state_of(tree))
    assert len(plan.tensors()) == 2
    assert plan.notes
    content = execute(plan)[""]
    assert record_of(content)["aliases"] == {"head": "embed"}
    ckpt = reopen({"": content})
    assert set(ckpt) == set(tree)
    assert ckpt["embed"].storages == ckpt["head"].storages
    assert ckpt["head"].name == "head"
    assert [alias.names for alias in ckpt.aliases] == [("embed", "head")]
    assert_same(tree, {name: ckpt[name] for name in tree})
    again = lay_out_safetensors(state_of_checkpoint(ckpt))
    assert len(again.tensors()) == 2


def test_views_are_copies_and_the_relation_survives():
    memory = Memory()
    base = memory.array(np.arange(12, dtype=np.int32).reshape(3, 4))
    tree = {
        "base": base, "column": memory.view(base, (3,), (4,), 1), "turned": memory.view(base, (4, 3), (1, 4)),
        "alone": memory.array(np.ones(3)), "part": memory.view(memory.array(np.arange(9)), (3,), (1,), 3),
        "lone_turned": memory.view(memory.array(np.arange(6)), (3, 2), (1, 3)),
    }  # fmt: skip
    content = save_one(tree)
    views = record_of(content)["views"]
    assert views == [
        {
            "nbytes": 48,
            "names": {"base": [0, [128, 32]], "column": [32, [128]], "turned": [0, [32, 128]]},
        },
        {"nbytes": 48, "names": {"lone_turned": [0, [64, 192]]}},
    ]
    ckpt = reopen({"": content})
    assert_same(tree, {name: ckpt[name] for name in tree})
    assert ckpt["column"].traits.alias == AliasView(0, 48, 32, (128,))
    assert ckpt["turned"].T.traits.alias is None
    assert ckpt["alone"].traits.alias is None
    # And once more, out of a file that only remembers.
    again = record_of(save_one(ckpt.tree))["views"]
    assert sorted(again, key=str) == sorted(views, key=str)


def test_conjugated_elements_are_resolved_and_share_nothing():
    memory = Memory()
    base = memory.array(np.array([1 + 2j, 3 - 4j], np.complex64))
    tree = {
        "z": base,
        "conj": memory.view(base, (2,), (1,), conj=True),
        "both": memory.view(base, (2,), (1,), conj=True),
    }
    content = save_one(tree)
    record = record_of(content)
    assert record["aliases"] == {"both": "conj"}
    assert "views" not in record
    assert reopen({"": content})["both"].numpy().tolist() == [1 - 2j, 3 + 4j]


def test_sharing_needs_one_storage_and_one_source():
    first, second = Memory(), Memory()
    same = np.arange(4)
    empty = {"e": first.raw("float32", (0,)), "f": first.raw("int8", (0,))}
    tensors = {"a": first.array(same), "b": second.array(same), **empty}
    found = share(make_lazy_table([*tensors], [*tensors.values()]))
    assert (list(found.rows), found.aliases, list(found.groups)) == ([0, 1, 2, 3], {}, [])


def test_metadata_passes_through_and_an_old_record_does_not():
    memory = Memory()
    tree = {"w": memory.array(np.ones(2))}
    first = save_one(tree, {"author": "me", "format": "tf", "holdfast": "stale"})
    ckpt = reopen({"": first})
    assert ckpt.metadata == {"author": "me", "format": "tf"}
    assert save_one(ckpt.tree, ckpt.metadata) == first


def test_a_file_of_another_writer_is_as_it_was():
    ckpt = reopen({"": safetensors.numpy.save({"w": np.ones(2)}, {"a": "b"})})
    assert ckpt.metadata == {"a": "b"}
    assert ckpt["w"].storages[0].crc32 is None
    assert ckpt.notes == ()


def test_a_record_about_another_file_is_not_used():
    memory = Memory()
    content = save_one({"w": memory.array(np.ones(2)), "v": [1, 2]}, keep_tree=True)
    metadata = header_of(content)[0]["__metadata__"]
    rewritten = safetensors.numpy.save({"w": np.ones(2, np.float16)}, metadata)
    ckpt = reopen({"": rewritten})
    assert ckpt["w"].storages[0].crc32 is None
    assert "another program" in ckpt.notes[0]
    assert "holdfast" not in ckpt.metadata
    newer = with_record(content, lambda r: json.dumps(r | {"version": 3, "new": 1}))
    assert "version 3" in reopen({"": newer}).notes[0]


BROKEN = {
    "no JSON": lambda r: "{",
    "no object": lambda r: "[]",
    "no version": lambda r: json.dumps({k: v for k, v in r.items() if k != "version"}),
    "version true": lambda r: json.dumps(r | {"version": True}),
    "of a number": lambda r: json.dumps(r | {"of": 1}),
    "unknown field": lambda r: json.dumps(r | {"exec": "x"}),
    "double key": lambda r: json.dumps(r)[:-1] + ',"crc32":"00000000"}',
    "no checksums": lambda r: json.dumps({k: v for k, v in r.items() if k != "crc32"}),
    "checksums too short": lambda r: json.dumps(r | {"crc32": r["crc32"][1:]}),
    "checksums of other letters": lambda r: json.dumps(r | {"crc32": "g" * len(r["crc32"])}),
    "checksums in capitals": lambda r: json.dumps(r | {"crc32": "A" * len(r["crc32"])}),
    "checksums as a list": lambda r: json.dumps(r | {"crc32": [1, 2]}),
    "alias of nothing": lambda r: json.dumps(r | {"aliases": {"x": "y"}}),
    "alias that is a tensor": lambda r: json.dumps(r | {"aliases": {"a": "b"}}),
    "alias of an alias": lambda r: json.dumps(r | {"aliases": {"x": "a", "y": "x"}}),
    "alias of a number": lambda r: json.dumps(r | {"aliases": {"x": 1}}),
    "aliases as a list": lambda r: json.dumps(r | {"aliases": ["a"]}),
    "views as an object": lambda r: json.dumps(r | {"views": {}}),
    "view of nothing": lambda r: json.dumps(
        r | {"views": [{"nbytes": 8, "names": {"x": [0, [32]]}}]}
    ),
    "view of another rank": lambda r: json.dumps(
        r | {"views": [{"nbytes": 99, "names": {"a": [0, [32, 32]]}}]}
    ),
    "view beyond its storage": lambda r: json.dumps(
        r | {"views": [{"nbytes": 7, "names": {"a": [0, [32]]}}]}
    ),
    "view at a negative place": lambda r: json.dumps(
        r | {"views": [{"nbytes": 99, "names": {"a": [-32, [32]]}}]}
    ),
    "view with a negative stride": lambda r: json.dumps(
        r | {"views": [{"nbytes": 99, "names": {"a": [32, [-32]]}}]}
    ),
    "view between bytes": lambda r: json.dumps(
        r | {"views": [{"nbytes": 99, "names": {"a": [1, [32]]}}]}
    ),
    "view of floats": lambda r: json.dumps(
        r | {"views": [{"nbytes": 99, "names": {"a": [0.0, [32]]}}]}
    ),
    "view of booleans": lambda r: json.dumps(
        r | {"views": [{"nbytes": True, "names": {"a": [False, [True]]}}]}
    ),
    "view in two storages": lambda r: json.dumps(
        r | {"views": [{"nbytes": 9, "names": {"a": [0, [32]]}}] * 2}
    ),
    "view with more fields": lambda r: json.dumps(
        r | {"views": [{"nbytes": 9, "names": {}, "x": 1}]}
    ),
    "dtype that is not noted here": lambda r: json.dumps(r | {"dtypes": {"a": "complex128"}}),
    "pairs of what is no F4": lambda r: json.dumps(r | {"dtypes": {"a": "float4_e2m1fn_x2"}}),
    "tree without a tensor": lambda r: json.dumps(
        r | {"tree": {"a": {"$": "tensor", "name": "a"}}}
    ),
    "tree with a tensor too many": lambda r: json.dumps(
        r | {"tree": [{"$": "tensor", "name": n} for n in "abc"]}
    ),
    "tree of an unknown tag": lambda r: json.dumps(r | {"tree": {"$": "pickle"}}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_record_that_breaks_a_rule_is_refused(case):
    memory = Memory()
    content = save_one({"a": memory.array(np.ones(2, np.float32)), "b": memory.array(np.ones(1))})
    assert reopen({"": with_record(content, json.dumps)})["a"].storages[0].crc32 is not None
    with pytest.raises((HeaderError, MetadataError)) as caught:
        reopen({"": with_record(content, BROKEN[case])})
    assert caught.value.file is not None


def test_shards_load_one_by_one_and_together():
    memory = Memory()
    w = memory.array(np.arange(10, dtype=np.float32))
    arrays = {f"layer.{i}": np.full(3 + i, i, np.float32) for i in range(6)}
    tree = {"w": w, **{name: memory.array(array) for name, array in arrays.items()}}
    tree |= {"tied": memory.view(w, (10,), (1,)), "none": memory.raw("int8", (0,))}
    plan = lay_out_safetensors(state_of(tree, {"a": "b"}), max_shard_size=40)
    assert plan.directory
    assert plan.format == "safetensors-dir"
    files = execute(plan)
    index = json.loads(files["model.safetensors.index.json"])
    assert files["model.safetensors.index.json"].startswith(
        b'{\n  "metadata": {\n    "total_size": '
    )
    assert index["metadata"]["total_size"] == sum(t.nbytes for n, t in tree.items() if n != "tied")
    assert set(index["weight_map"]) == set(tree) - {"tied"}
    shards = [key for key in files if key.endswith(".safetensors")]
    assert shards == [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]
    together = {}
    for key in shards:
        loaded = safetensors.numpy.load(files[key])
        assert sum(array.nbytes for array in loaded.values()) <= 40
        assert {index["weight_map"][name] for name in loaded} == {key}
        together |= loaded
        assert set(reopen({"file": files[key]})) == set(loaded)
    for name, array in arrays.items():
        assert together[name].tobytes() == array.tobytes()
    ckpt = reopen(files)
    assert ckpt.format == "safetensors-dir"
    assert_same(tree, {name: ckpt[name] for name in tree})
    assert ckpt["tied"].storages == ckpt["w"].storages
    assert ckpt.metadata == {"format": "pt", "a": "b"}
    assert all(
        ckpt[name].storages[0].crc32 == zlib.crc32(raw_bytes(tensor))
        for name, tensor in tree.items()
    )


def test_a_folder_of_files_that_were_saved_one_by_one():
    memory = Memory()
    w = memory.array(np.ones(3))
    files = {
        "a.safetensors": save_one({"w": w, "tied": memory.view(w, (3,), (1,))}),
        "b.safetensors": save_one({"n": {"v": w}}),
    }
    ckpt = reopen(files)
    assert set(ckpt) == {"w", "tied", "n.v"}
    assert any("b.safetensors" in note for note in ckpt.notes)


def test_an_index_whose_record_is_broken_or_old():
    memory = Memory()
    files = save({"n": {"v": memory.array(np.ones(3))}}, max_shard_size=100, index=True)
    index = json.loads(files["model.safetensors.index.json"])
    for record, error in ((5, HeaderError), ("{}", HeaderError)):
        index["metadata"]["holdfast"] = record
        with pytest.raises(error):
            reopen(files | {"model.safetensors.index.json": json.dumps(index).encode()})
    index = json.loads(files["model.safetensors.index.json"])
    more = safetensors.numpy.save({"x": np.ones(1, ml_dtypes.bfloat16)})
    index["weight_map"]["x"] = "more.safetensors"
    ckpt = reopen(
        files
        | {"more.safetensors": more, "model.safetensors.index.json": json.dumps(index).encode()}
    )
    assert set(ckpt) == {"n.v", "x"}
    assert ckpt.notes


def test_a_tensor_without_data_is_named_among_many(tmp_path):
    state = {f"t{number}": torch.zeros(3) for number in range(20)} | {
        "inner": {"meta": torch.zeros(3, device="meta")}
    }
    with pytest.raises(CannotHold, match=r"inner\.meta: a tensor without data"):
        holdfast.save(state, tmp_path / "x.safetensors", format="safetensors")
