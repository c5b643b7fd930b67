"""Hugging Face folders: what lies beside the weights comes along, stays in place, and says what the weights are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import holdfast
from holdfast.errors import CannotHold, NotCommitted, StoreError, UnsafePath, Unsupported
from holdfast.verbs.shared import side_files
from holdfast.verbs.shared.planned import Planned

WEIGHTS = {
    "model.embed_tokens.weight": np.arange(64, dtype=np.float32).reshape(16, 4),
    "model.layers.0.mlp.up_proj.weight": np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4),
    "model.layers.0.input_layernorm.weight": np.ones(4, np.float32),
    "model.norm.weight": np.full(4, 2, np.float32),
    "lm_head.weight": np.linspace(2, 3, 64, dtype=np.float32).reshape(16, 4),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-06,
    "dtype": "float32",
    "vocab_size": 16,
    "name": "Ωmega",
}
BESIDE = {
    "config.json": (json.dumps(CONFIG, indent=2, ensure_ascii=False) + "\n").encode(),
    "generation_config.json": b'{"eos_token_id": 2}\n',
    "tokenizer.json": b'{"model": {"type": "BPE"}}',
    "tokenizer_config.json": b"{}",
    "tokenizer.model": b"\x0a\x0e\x0a\x05<unk>",
    "merges.txt": b"a b\n",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"---\nlicense: mit\n---\n",
    "LICENSE": b"MIT",
    "added_tokens.json": b"",
}


def folder(path: Path, *, shards: int = 1, config: object = CONFIG, **more: bytes) -> Path:
    """A model as `save_pretrained` of transformers writes it."""
    path.mkdir()
    names = list(WEIGHTS)
    if shards == 1:
        safetensors.numpy.save_file(WEIGHTS, path / "model.safetensors", {"format": "pt"})
    else:
        weight_map = {
            name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
            for i, name in enumerate(names)
        }
        for file in sorted(set(weight_map.values())):
            part = {name: WEIGHTS[name] for name in names if weight_map[name] == file}
            safetensors.numpy.save_file(part, path / file, {"format": "pt"})
        index = {
            "metadata": {"total_size": sum(w.nbytes for w in WEIGHTS.values())},
            "weight_map": weight_map,
        }
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name, content in (BESIDE | more).items():
        (path / name).write_bytes(content)
    (path / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return path


def beside(path: Path) -> dict[str, bytes]:
    return {
        name: (path / name).read_bytes() for name in os.listdir(path) if ".safetensors" not in name
    }


def loaded(path: Path) -> dict[str, np.ndarray]:
    """What transformers finds: the one file, or what the index names."""
    if (path / "model.safetensors").exists():
        assert not (path / "model.safetensors.index.json").exists()
        return safetensors.numpy.load_file(path / "model.safetensors")
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    parts = {file: safetensors.numpy.load_file(path / file) for file in set(weight_map.values())}
    return {name: parts[file][name] for name, file in weight_map.items()}


def same(found: dict[str, np.ndarray], dtype: object = np.float32) -> bool:
    return found.keys() == WEIGHTS.keys() and all(
        np.array_equal(found[name], w.astype(dtype)) for name, w in WEIGHTS.items()
    )


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["b", "b/"])
def test_a_folder_is_converted_to_a_folder(tmp_path, shards, name):
    a = folder(tmp_path / "a", shards=shards)
    done = holdfast.convert(a, f"{tmp_path}/{name}")
    b = tmp_path / "b"
    assert done.format == "safetensors-dir"
    assert sorted(os.listdir(b)) == sorted(["model.safetensors", *BESIDE])
    assert beside(b) == beside(a)
    assert same(loaded(b))
    assert dict(done.files) == {file: (b / file).stat().st_size for file in os.listdir(b)}
    assert done.nbytes == sum(nbytes for _, nbytes in done.files)
    split = holdfast.convert(b, tmp_path / "c", max_shard_size=300)
    files = [file for file, _ in split.files if file.startswith("model")]
    assert files == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert same(loaded(tmp_path / "c"))
    assert holdfast.verify(tmp_path / "c").ok


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_config_says_what_the_weights_are(tmp_path, key):
    config = {name: value for name, value in CONFIG.items() if name != "dtype"} | {
        key: "float32", "text_config": {key: "float32", "hidden": 4}, "quantization_config": {"dtype": "float32"},
    }  # fmt: skip
    a = folder(tmp_path / "a", config=config)
    done = holdfast.convert(a, tmp_path / "b", dtype="bf16")
    wanted = config | {key: "bfloat16", "text_config": {key: "bfloat16", "hidden": 4}}
    assert (tmp_path / "b" / "config.json").read_text() == json.dumps(
        wanted, indent=2, ensure_ascii=False
    ) + "\n"
    assert any(f"{key} float32 → bfloat16" in note for note in done.notes)
    assert same(loaded(tmp_path / "b"), ml_dtypes.bfloat16)
    # Most of it decides; nothing that was cast to what it was changes a byte.
    holdfast.convert(a, tmp_path / "c", dtype={"*norm*": "bf16"})
    assert beside(tmp_path / "c") == beside(a)


def test_a_config_that_cannot_be_edited(tmp_path):
    a = folder(tmp_path / "a", config={"torch_dtype": "float32"})
    done = holdfast.convert(a, tmp_path / "b", dtype="float8_e4m3fn")
    assert any(
        "config.json is unchanged" in note and "float8_e4m3fn" in note for note in done.notes
    )
    (a / "config.json").write_text('{"torch_dtype": "float32", "torch_dtype": "float32"}')
    done = holdfast.convert(a, tmp_path / "c", dtype="bf16")
    assert any("config.json is unchanged" in note for note in done.notes)
    assert beside(tmp_path / "c") == beside(a)
    (a / "config.json").write_text("{}")
    assert not holdfast.convert(a, tmp_path / "d", dtype="bf16").notes
    assert (tmp_path / "d" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("shards", [1, 3])
def test_in_place(tmp_path, shards):
    others = {
        "training_args.bin": b"\x80\x02K\x01.",
        ".gitattributes": b"*",
        "events.log": b"1\n" * 5000,
    }
    a = folder(tmp_path / "a", shards=shards, **others)
    os.chmod(a / "events.log", 0o640)
    before = beside(a)
    holdfast.edit(a, in_place=True, dtype="f16")
    after = beside(a)
    assert json.loads(after.pop("config.json")) == CONFIG | {"dtype": "float16"}
    del before["config.json"]
    assert after == before
    assert (a / "events.log").stat().st_mode & 0o777 == 0o640
    assert same(loaded(a), np.float16)
    assert os.listdir(tmp_path) == ["a"]
    for verb in (holdfast.compact, holdfast.tie):
        verb(a, in_place=True)
        assert beside(a) | {"config.json": b""} == before | {"config.json": b""}
        assert same(loaded(a), np.float16)


def test_other_weights_of_the_folder_stay(tmp_path):
    a = folder(tmp_path / "a", shards=2)
    (a / "consolidated.safetensors").write_bytes(
        safetensors.numpy.save({"tok": np.ones(3, np.float32)})
    )
    (a / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    kept = {
        name: (a / name).read_bytes() for name in ("consolidated.safetensors", "pytorch_model.bin")
    }
    holdfast.edit(a, in_place=True, drop=["lm_head.*"])
    assert {name: (a / name).read_bytes() for name in kept} == kept
    with holdfast.open(a) as opened:
        assert sorted(opened) == sorted(set(WEIGHTS) - {"lm_head.weight"})
    done = holdfast.convert(a, tmp_path / "b")
    assert not set(kept) & set(os.listdir(tmp_path / "b"))
    assert any("not copied" in note and "pytorch_model.bin" in note for note in done.notes)


def test_what_is_left_behind(tmp_path):
    more = {
        "optimizer.pt": b"PK",
        "vocab.json": b"\x80\x04K\x01.",
        "modeling_x.py": b"import os",
        "notes.txt": bytes(100),
    }
    a = folder(tmp_path / "a", **more)
    (a / "onnx").mkdir()
    (a / "onnx" / "model.onnx").write_bytes(b"")
    done = holdfast.convert(a, tmp_path / "b")
    assert set(os.listdir(tmp_path / "b")) == {
        "model.safetensors",
        "modeling_x.py",
        "notes.txt",
        *BESIDE,
    }
    assert any("'vocab.json' is a pickle" in note for note in done.notes)
    assert any("trust_remote_code=True" in note and "modeling_x.py" in note for note in done.notes)
    assert any("'onnx', 'optimizer.pt'" in note for note in done.notes)


def test_a_file_that_is_no_config_by_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(side_files, "MOST_NBYTES", 1000)
    a = folder(tmp_path / "a", **{"corpus.txt": bytes(1001)})
    done = holdfast.convert(a, tmp_path / "b")
    assert "corpus.txt" not in os.listdir(tmp_path / "b")
    assert any("corpus.txt" in note and "1,001 bytes" in note for note in done.notes)


def test_not_asked_for(tmp_path):
    a = folder(tmp_path / "a")
    holdfast.convert(a, tmp_path / "b", copy_config=False)
    assert os.listdir(tmp_path / "b") == ["model.safetensors"]
    one = holdfast.convert(a, tmp_path / "b.safetensors")
    assert any("single file" in note and "config.json" in note for note in one.notes)
    assert not holdfast.convert(a, tmp_path / "c.safetensors", copy_config=False).notes
    with pytest.raises(Unsupported, match="keeps the other files"):
        holdfast.edit(a, in_place=True, drop=["lm_head.*"], copy_config=False)
    assert beside(a).keys() == BESIDE.keys()
    # A folder of a checkpoint alone has nothing to tell.
    holdfast.save(WEIGHTS, tmp_path / "native")
    (tmp_path / "native" / "log.txt").write_text("")
    holdfast.convert(tmp_path / "native", tmp_path / "d")
    assert "log.txt" not in os.listdir(tmp_path / "d")


def test_from_another_folder(tmp_path):
    base = folder(tmp_path / "base", config=CONFIG | {"dtype": "bfloat16"})
    holdfast.save(WEIGHTS, tmp_path / "actor")
    done = holdfast.convert(tmp_path / "actor", tmp_path / "hf", dtype="bf16", copy_config=base)
    assert done.format == "safetensors-dir"
    assert beside(tmp_path / "hf") == beside(base)
    assert same(loaded(tmp_path / "hf"), ml_dtypes.bfloat16)
    # The config is about other weights until it says what these are.
    told = holdfast.convert(tmp_path / "actor", tmp_path / "wide", copy_config=f"{base}/")
    assert json.loads((tmp_path / "wide" / "config.json").read_text()) == CONFIG
    assert any("bfloat16 → float32" in note for note in told.notes)
    with pytest.raises(Unsupported, match="give a directory"):
        holdfast.convert(tmp_path / "actor", tmp_path / "x.safetensors", copy_config=base)
    with pytest.raises(StoreError, match="there is none"):
        holdfast.convert(tmp_path / "actor", tmp_path / "x", copy_config=tmp_path / "nowhere")
    with pytest.raises(StoreError, match="no config and no tokenizer"):
        holdfast.convert(tmp_path / "actor", tmp_path / "x", copy_config=tmp_path / "actor")
    with pytest.raises(Unsupported, match="not a int"):
        holdfast.convert(tmp_path / "actor", tmp_path / "x", copy_config=5)
    assert not (tmp_path / "x").exists()


def test_twice_to_one_place(tmp_path):
    a = folder(tmp_path / "a")
    for _ in range(2):
        holdfast.convert(a, tmp_path / "b", overwrite=True)
        assert beside(tmp_path / "b") == beside(a)
    with pytest.raises(NotCommitted, match=r"would be lost.*config\.json"):
        holdfast.convert(a, tmp_path / "b", overwrite=True, copy_config=False)
    assert beside(tmp_path / "b") == beside(a)


def test_the_hub_cache_and_links(tmp_path):
    blobs, snapshot = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b" / "snapshots" / "0123",
    )
    snapshot.mkdir(parents=True)
    folder(tmp_path / "a").rename(blobs)
    for name in os.listdir(blobs):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    holdfast.convert(snapshot, tmp_path / "b")
    assert beside(tmp_path / "b") == beside(blobs)
    assert not any(path.is_symlink() for path in (tmp_path / "b").iterdir())
    (tmp_path / "secret.txt").write_text("s")
    (snapshot / "vocab.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UnsafePath, match="leads out"):
        holdfast.convert(snapshot, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_all_or_nothing(tmp_path, monkeypatch):
    a = folder(tmp_path / "a", shards=2)
    before = {path.name: path.read_bytes() for path in a.iterdir()}

    def refuse(plan, check_replaced):
        assert any(store.name == str(a) for store in plan.reads)
        raise NotCommitted("at the last moment")

    monkeypatch.setattr(Planned, "_check_before_publish", refuse)
    with pytest.raises(NotCommitted, match="last moment"):
        holdfast.edit(a, in_place=True, dtype="bf16")
    with pytest.raises(NotCommitted, match="last moment"):
        holdfast.convert(a, tmp_path / "b", dtype="bf16")
    assert {path.name: path.read_bytes() for path in a.iterdir()} == before
    assert os.listdir(tmp_path) == ["a"]


def test_a_config_that_changes_meanwhile(tmp_path):
    a = folder(tmp_path / "a")

    def meddle(nbytes: int) -> None:
        (a / "tokenizer.json").write_bytes(bytes(len(BESIDE["tokenizer.json"])))

    with pytest.raises(NotCommitted, match=r"changed while it was read \(tokenizer\.json\)"):
        holdfast.convert(a, tmp_path / "b", progress=meddle, threads=1)
    assert not (tmp_path / "b").exists()


def test_what_is_written_is_read_back(tmp_path, monkeypatch):
    a = folder(tmp_path / "a")
    read: list[str] = []
    monkeypatch.setattr(
        "holdfast.engine.targets.folder.check_written",
        lambda file, *rest, **more: read.append(file.key),
    )
    holdfast.convert(a, tmp_path / "b")
    assert set(read) == {"model.safetensors", *BESIDE}


def test_resumed(tmp_path, monkeypatch):
    a = folder(tmp_path / "a")

    def refuse(plan, check_replaced):
        raise NotCommitted("cut off")

    monkeypatch.setattr(Planned, "_check_before_publish", refuse)
    with pytest.raises(NotCommitted, match="cut off"):
        holdfast.convert(a, tmp_path / "b", dtype="f16", resume=True)
    monkeypatch.undo()
    holdfast.convert(a, tmp_path / "b", dtype="f16", resume=True)
    assert same(loaded(tmp_path / "b"), np.float16)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "float16"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_tensor_may_be_called_like_a_file(tmp_path):
    a = folder(tmp_path / "a")
    (a / "model.safetensors").write_bytes(
        safetensors.numpy.save({"config.json": np.ones(3, np.float32)})
    )
    holdfast.convert(a, tmp_path / "b", format="safetensors")
    assert beside(tmp_path / "b") == beside(a)
    assert holdfast.verify(tmp_path / "b").ok


def test_one_file_of_a_folder_keeps_the_tree(tmp_path):
    state = {"m": {"w": np.ones(3, np.float32)}, "step": 7}
    holdfast.save(state, f"{tmp_path}/a/", format="safetensors", keep_tree=True)
    assert os.listdir(tmp_path / "a") == ["model.safetensors"]
    for name in (None, "config.json"):
        if name:
            (tmp_path / "a" / name).write_text("{}")
        with holdfast.open(tmp_path / "a") as opened:
            assert opened.tree["step"] == 7
            assert list(opened.tree["m"]) == ["w"]
            assert not opened.notes


def test_formats_of_a_folder(tmp_path):
    a = folder(tmp_path / "a")
    assert holdfast.edit(a, tmp_path / "b", drop=["lm_head.*"], format="native").format == "native"
    assert beside(tmp_path / "b").keys() == {*BESIDE, "holdfast.json"}
    assert (
        holdfast.convert(tmp_path / "b", tmp_path / "c", format="safetensors").format
        == "safetensors-dir"
    )
    assert beside(tmp_path / "c") == beside(a)
    assert holdfast.edit(a, tmp_path / "d", drop=["lm_head.*"]).format == "safetensors-dir"
    assert holdfast.convert(a, tmp_path / "e", format="native").format == "native"
    assert holdfast.edit(a, in_place=True, drop=["lm_head.*"], format="native").format == "native"
    assert beside(a).keys() == {*BESIDE, "holdfast.json"}


@pytest.mark.parametrize("stem", ["adapter_model", "diffusion_pytorch_model"])
def test_weights_keep_their_name(tmp_path, stem):
    a = folder(tmp_path / "a")
    (a / "model.safetensors").rename(a / f"{stem}.safetensors")
    holdfast.edit(a, in_place=True, dtype="bf16")
    assert {name for name in os.listdir(a) if ".safetensors" in name} == {f"{stem}.safetensors"}
    holdfast.convert(a, tmp_path / "b", max_shard_size=150)
    found = sorted(name for name in os.listdir(tmp_path / "b") if ".safetensors" in name)
    assert found == [
        *(f"{stem}-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        f"{stem}.safetensors.index.json",
    ]
    assert holdfast.diff(a, tmp_path / "b").equal
    holdfast.prune(tmp_path / "b", tmp_path / "c", ["*: 2:4"])
    assert f"{stem}.safetensors" in os.listdir(tmp_path / "c")
    holdfast.save(WEIGHTS, tmp_path / "d.pt")
    holdfast.convert(tmp_path / "d.pt", tmp_path / "e", copy_config=tmp_path / "b")
    assert f"{stem}.safetensors" in os.listdir(tmp_path / "e")


def test_a_file_that_is_in_the_way(tmp_path):
    a = folder(tmp_path / "a", shards=2)
    (a / "model-00001-of-00001.safetensors").write_bytes(
        safetensors.numpy.save({"x": np.ones(3, np.float32)})
    )
    before = {path.name: path.read_bytes() for path in a.iterdir()}
    with pytest.raises(CannotHold, match="would be lost"):
        holdfast.edit(a, in_place=True, drop=["lm_head.*"])
    assert {path.name: path.read_bytes() for path in a.iterdir()} == before
