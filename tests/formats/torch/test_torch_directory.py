"""Hugging Face folders whose weights are files of `torch.save`: they open as one checkpoint, and become safetensors."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import obstore
import pytest
import safetensors.torch
import torch
from obstore.store import MemoryStore

import holdfast
import holdfast.torch
from holdfast.errors import LimitExceeded, UnknownFormat, Unsupported

EMBED = torch.arange(12.0).reshape(3, 4)
STATE = {
    "embed.weight": EMBED,
    "mlp.weight": torch.linspace(-1, 1, 6).reshape(2, 3).to(torch.bfloat16),
    "ids": torch.tensor([3, 1, 2]),
    "lm_head.weight": EMBED,
}
CONFIG = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
INDEX = "pytorch_model.bin.index.json"
SHARD = "pytorch_model-0000{}-of-00002.bin".format
PARTS = {SHARD(1): ["embed.weight", "lm_head.weight"], SHARD(2): ["mlp.weight", "ids"]}


def folder(path: Path, weights: str = "pytorch_model.bin", *, zipped: bool = True) -> Path:
    """A model of one file, as `save_pretrained(safe_serialization=False)` of transformers 4 wrote it."""
    path.mkdir()
    torch.save(STATE, path / weights, _use_new_zipfile_serialization=zipped)
    return beside(path)


def sharded(
    path: Path, stem: str = "pytorch_model", *, zipped: bool = True, index: bool = True
) -> Path:
    """The same in two shards."""
    path.mkdir()
    parts = {file.replace("pytorch_model", stem): names for file, names in PARTS.items()}
    for file, names in parts.items():
        torch.save(
            {name: STATE[name] for name in names},
            path / file,
            _use_new_zipfile_serialization=zipped,
        )
    weight_map = {name: file for file, names in parts.items() for name in names}
    if index:
        content = {
            "metadata": {"total_size": 1.0},
            "weight_map": {name: weight_map[name] for name in STATE},
        }
        (path / f"{stem}.bin.index.json").write_text(json.dumps(content))
    return beside(path)


def beside(path: Path) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    return path


MAKERS = {
    "one": folder,
    "one-legacy": lambda path: folder(path, zipped=False),
    "shards": sharded,
    "shards-legacy": lambda path: sharded(path, zipped=False),
    "shards-without-index": lambda path: sharded(path, index=False),
}


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MAKERS[request.param](tmp_path / "model")


def check(found: holdfast.Checkpoint) -> None:
    assert found.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert str(found[name].dtype) == str(tensor.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(
            found[name].numpy().astype(np.float32), tensor.float().numpy()
        )


def test_it_opens_as_one_checkpoint(model: Path):
    with holdfast.open(model) as found:
        assert found.format == "torch-dir"
        assert found.notes == ()
        check(found)
        assert found["embed.weight"].storages == found["lm_head.weight"].storages
        np.testing.assert_array_equal(
            found["embed.weight"][1:, ::2].numpy(), EMBED[1:, ::2].numpy()
        )


def test_it_becomes_a_folder_of_safetensors(model: Path, tmp_path: Path):
    done = holdfast.convert(model, tmp_path / "new")
    assert done.format == "safetensors-dir"
    assert sorted(os.listdir(tmp_path / "new")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert not any("not copied" in note for note in done.notes)
    loaded = safetensors.torch.load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(loaded[name], STATE[name]) for name in loaded)
    with holdfast.open(tmp_path / "new") as found:
        check(found)
    holdfast.convert(model, tmp_path / "half", dtype="f16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"
    assert not holdfast.diff(model, tmp_path / "new").changed


def test_it_becomes_shards(model: Path, tmp_path: Path):
    holdfast.convert(model, tmp_path / "new", max_shard_size=60)
    assert "model.safetensors.index.json" in os.listdir(tmp_path / "new")
    with holdfast.open(tmp_path / "new") as found:
        check(found)


@pytest.mark.parametrize(
    ("weights", "becomes"),
    [
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"),
        ("adapter_model.bin", "adapter_model.safetensors"),
        ("pytorch_lora_weights.bin", "pytorch_lora_weights.safetensors"),
        ("pytorch_model.fp16.bin", "model.fp16.safetensors"),
    ],
)
def test_other_names(weights: str, becomes: str, tmp_path: Path):
    holdfast.convert(folder(tmp_path / "a", weights), tmp_path / "new")
    assert becomes in os.listdir(tmp_path / "new")


def test_shards_of_another_name(tmp_path: Path):
    holdfast.convert(
        sharded(tmp_path / "a", "diffusion_pytorch_model"), tmp_path / "new", max_shard_size=60
    )
    assert "diffusion_pytorch_model.safetensors.index.json" in os.listdir(tmp_path / "new")


def test_other_weights_are_told(tmp_path: Path):
    model = folder(tmp_path / "a")
    (model / "tf_model.h5").write_bytes(b"\x89HDF")
    (model / "flax_model.msgpack").write_bytes(b"x")
    with holdfast.open(model) as found:
        assert found.notes == (
            'beside them lie other weights, which are not read: "flax_model.msgpack", "tf_model.h5"',
        )
        check(found)


@pytest.mark.parametrize(
    "weights", [["tf_model.h5"], ["flax_model.msgpack", "flax_model-2.msgpack"], ["rust_model.ot"]]
)
def test_a_folder_of_other_weights_only_says_which(weights: list[str], tmp_path: Path):
    """Holdfast opens none of them, so it does not send anybody to one of its files."""
    for name in ("config.json", "training_args.bin", *weights):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(
        UnknownFormat, match="does not read: " + ", ".join(f'"{name}"' for name in sorted(weights))
    ) as caught:
        holdfast.open(tmp_path)
    assert "save it from there" in str(caught.value)
    assert "open one of its files" not in str(caught.value)
    holdfast.save({"w": np.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(UnknownFormat, match="open one of its files instead"):
        holdfast.open(tmp_path)


def test_safetensors_win(tmp_path: Path):
    model = sharded(tmp_path / "a")
    safetensors.torch.save_file({"only": torch.ones(2)}, model / "model.safetensors")
    with holdfast.open(model) as found:
        assert (found.format, list(found)) == ("safetensors-dir", ["only"])
        assert found.notes == (
            f'beside them lie other weights, which are not read: "{SHARD(1)}", "{SHARD(2)}"',
        )


def test_the_usual_name_wins_and_several_others_are_refused(tmp_path: Path):
    model = folder(tmp_path / "a", "adapter_model.bin")
    torch.save({"x": torch.ones(1)}, model / "pytorch_model.fp16.bin")
    with pytest.raises(Unsupported, match="2 checkpoints of torch"):
        holdfast.open(model)
    torch.save(STATE, model / "pytorch_model.bin")
    torch.save({}, model / "training_args.bin")
    with holdfast.open(model) as found:
        check(found)
        assert found.notes == (
            'beside them lie other weights, which are not read: "adapter_model.bin", "pytorch_model.fp16.bin"',
        )


def test_a_lone_index_of_something_else_is_no_index(tmp_path: Path):
    model = folder(tmp_path / "a")
    (model / "optimizer.bin.index.json").write_text("{")
    with holdfast.open(model) as found:
        check(found)


def test_what_the_index_leaves_out_comes_last_and_is_told(tmp_path: Path):
    """As transformers loads it: all that the shards have."""
    model = sharded(tmp_path / "a")
    (model / INDEX).write_text(
        json.dumps({"weight_map": {"ids": SHARD(2), "lm_head.weight": SHARD(1)}})
    )
    with holdfast.open(model) as found:
        assert list(found) == ["ids", "lm_head.weight", "mlp.weight", "embed.weight"]
        assert found.notes == (
            f'2 of the names in the files are not in {INDEX!r}, and come last: "mlp.weight", "embed.weight"',
        )


def test_the_pickles_of_all_shards_have_one_limit(tmp_path: Path):
    model = sharded(tmp_path / "a")
    # Each pickle of the two has some 200 bytes.
    with holdfast.open(model / SHARD(1), limits=holdfast.Limits(pickle_nbytes=400)):
        pass
    with pytest.raises(LimitExceeded, match="pickles of all files"):
        holdfast.open(model, limits=holdfast.Limits(pickle_nbytes=400))


def test_versions_of_modules_stay(tmp_path: Path):
    model = sharded(tmp_path / "a")
    for number, names in enumerate(PARTS.values(), 1):
        part = OrderedDict((name, STATE[name]) for name in names)
        part._metadata = {f"module{number}": {"version": number}}
        torch.save(part, model / SHARD(number))
    with holdfast.open(model) as found:
        assert vars(found.tree)["_metadata"] == {
            "module1": {"version": 1},
            "module2": {"version": 2},
        }


def test_what_is_foreign_in_a_shard_is_data(tmp_path: Path):
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("touch pwned",)

    model = sharded(tmp_path / "a", index=False)
    torch.save({"ids": STATE["ids"], "extra": Evil()}, model / SHARD(2))
    with holdfast.open(model) as found:
        assert [(str(one.what), one.stream) for one in found.foreign] == [
            ("posix.system", f"{SHARD(2)}: data.pkl")
        ]
    assert holdfast.scan(model).verdict() == "dangerous"


def test_the_other_verbs(model: Path, tmp_path: Path):
    assert holdfast.verify(model).ok
    assert holdfast.scan(model).verdict() == "clean"
    assert len(list(holdfast.stats(model))) >= 3
    module = torch.nn.Module()
    for name in ("embed", "lm_head", "mlp"):
        child = torch.nn.Module()
        child.weight = torch.nn.Parameter(torch.zeros_like(STATE[f"{name}.weight"]))
        module.add_module(name, child)
    module.register_buffer("ids", torch.zeros(3, dtype=torch.int64))
    holdfast.torch.load_into(module, model)
    assert all(torch.equal(value, STATE[name]) for name, value in module.state_dict().items())
    with holdfast.torch.open(model) as found:
        assert torch.equal(found["mlp.weight"], STATE["mlp.weight"])
    holdfast.copy(model, tmp_path / "copied")
    assert sorted(os.listdir(tmp_path / "copied")) == sorted(os.listdir(model))
    with pytest.raises(Unsupported, match="can be read and not written"):
        holdfast.edit(model, in_place=True, drop="ids")


def test_damage_in_a_shard_is_found(tmp_path: Path):
    model = sharded(tmp_path / "a")
    with holdfast.open(model) as found:
        storage = found["mlp.weight"].storages[0]
    with open(model / storage.key, "r+b") as file:
        file.seek(storage.start)
        file.write(b"\xff")
    report = holdfast.verify(model)
    assert not report.ok
    assert [damage.tensors for damage in report.damaged] == [("mlp.weight",)]


def test_in_a_bucket(model: Path):
    store = MemoryStore()
    for path in model.iterdir():
        obstore.put(store, f"hub/model/{path.name}", path.read_bytes())
    with holdfast.open("hub/model", store=store) as found:
        assert found.format == "torch-dir"
        check(found)
        holdfast.convert(found, "hub/new/", store=store)
    with holdfast.open("hub/new", store=store) as made:
        assert made.format == "safetensors-dir"
        check(made)
