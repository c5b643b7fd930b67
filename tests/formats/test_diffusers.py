"""The folder of a diffusers pipeline, which opens as one checkpoint."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.support import flip_bit

import holdfast
from holdfast.errors import (
    FormatError,
    HeaderError,
    LimitExceeded,
    MetadataError,
    NotCommitted,
    StoreError,
    UnsafePath,
    Unsupported,
)

DIFFUSION = "diffusion_pytorch_model"
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.35.1",
    "feature_extractor": [None, None],
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "requires_safety_checker": True,
}


def values(start: float, *shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)) + start).astype(np.float32).reshape(shape)


EXPECTED = {
    "text_encoder.embed": values(0, 4, 2),
    "unet.conv": values(10, 3),
    "unet.proj": values(20, 2, 2),
    "vae.decoder.w": values(30, 5),
}


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A pipeline as `save_pretrained` writes it: one file, two shards and an index, and a file of `torch.save`."""
    folder = tmp_path / "pipeline"
    for name in ("text_encoder", "unet", "vae", "scheduler", "tokenizer"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    save_file({"embed": EXPECTED["text_encoder.embed"]}, folder / "text_encoder/model.safetensors")
    shards = {"conv": f"{DIFFUSION}-00001-of-00002", "proj": f"{DIFFUSION}-00002-of-00002"}
    for name, shard in shards.items():
        save_file({name: EXPECTED[f"unet.{name}"]}, folder / f"unet/{shard}.safetensors")
    weight_map = {name: f"{shard}.safetensors" for name, shard in shards.items()}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / f"unet/{DIFFUSION}.safetensors.index.json").write_text(index)
    torch.save({"decoder.w": torch.arange(30.0, 35.0)}, folder / f"vae/{DIFFUSION}.bin")
    return folder


def assert_expected(checkpoint: holdfast.Checkpoint) -> None:
    assert list(checkpoint) == list(EXPECTED)
    for name, expected in EXPECTED.items():
        np.testing.assert_array_equal(checkpoint[name].numpy(), expected)


def test_components_are_prefixes(pipeline):
    with holdfast.open(pipeline) as checkpoint:
        assert checkpoint.format == "diffusers"
        assert_expected(checkpoint)
        assert checkpoint.metadata["_class_name"] == "StableDiffusionPipeline"
        assert checkpoint.notes == ()
        assert checkpoint["unet.proj"][1].numpy().tolist() == [22, 23]


def test_it_travels_to_another_process(pipeline):
    with holdfast.open(pipeline) as checkpoint:
        assert_expected(pickle.loads(pickle.dumps(checkpoint)))


def test_a_hub_snapshot_with_links_opens(pipeline, tmp_path):
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "abc"
    (cache / "blobs").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    for number, file in enumerate(sorted(pipeline.rglob("*.*"))):
        link = snapshot / file.relative_to(pipeline)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = cache / "blobs" / str(number)
        file.rename(blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    with holdfast.open(cache) as checkpoint:
        assert_expected(checkpoint)


def test_it_opens_in_a_bucket(pipeline):
    obstore = pytest.importorskip("obstore")
    client = obstore.store.MemoryStore()
    for file in pipeline.rglob("*.*"):
        obstore.put(client, f"p/{file.relative_to(pipeline).as_posix()}", file.read_bytes())
    with holdfast.open("p/", store=client) as checkpoint:
        assert_expected(checkpoint)


def test_verify_reads_every_file_and_finds_damage(pipeline):
    report = holdfast.verify(pipeline)
    assert report.ok
    assert {name for name, _ in report.files} >= {
        "text_encoder/model.safetensors",
        f"vae/{DIFFUSION}.bin",
    }
    weights = pipeline / f"vae/{DIFFUSION}.bin"
    flip_bit(weights, after=np.float32(31).tobytes())
    report = holdfast.verify(pipeline)
    assert not report.ok
    assert report.damaged[0].tensors == ("vae.decoder.w",)


def test_it_converts_to_one_file_and_is_equal_to_it(pipeline, tmp_path):
    holdfast.convert(pipeline, tmp_path / "all.safetensors")
    assert load_file(tmp_path / "all.safetensors").keys() == EXPECTED.keys()
    assert holdfast.diff(pipeline, tmp_path / "all.safetensors", tensors_only=True).equal


def test_a_copy_to_a_folder_is_refused_and_leaves_nothing(pipeline, tmp_path):
    """A save makes one folder, and a pipeline has several."""
    with pytest.raises(NotCommitted, match=r"scheduler/config\.json"):
        holdfast.copy(pipeline, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_an_edit_in_place_is_refused_and_changes_nothing(pipeline):
    before = {file: file.read_bytes() for file in pipeline.rglob("*.*")}
    with pytest.raises((NotCommitted, Unsupported)):
        holdfast.edit(pipeline, in_place=True, drop="vae.*")
    assert {file: file.read_bytes() for file in pipeline.rglob("*.*")} == before


def test_variants_beside_the_usual_name_do_not_count(pipeline):
    folder = pipeline / "text_encoder"
    for name in ("model.fp16.safetensors", "model.non_ema.safetensors"):
        save_file({"embed": values(90, 4, 2).astype(np.float16)}, folder / name)
    torch.save({"decoder.w": torch.zeros(5)}, pipeline / f"vae/{DIFFUSION}.fp16.bin")
    with holdfast.open(pipeline) as checkpoint:
        assert_expected(checkpoint)


def test_a_variant_alone_counts(pipeline):
    folder = pipeline / "text_encoder"
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    with holdfast.open(pipeline) as checkpoint:
        assert_expected(checkpoint)


def test_several_variants_without_the_usual_name_are_refused(pipeline):
    folder = pipeline / "text_encoder"
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    save_file({"embed": values(0, 4, 2)}, folder / "model.ema.safetensors")
    with pytest.raises(MetadataError, match="all claim this tensor"):
        holdfast.open(pipeline)


def test_weights_at_the_top_are_named_and_not_read(pipeline):
    save_file({"whole": values(0, 1)}, pipeline / "sd.safetensors")
    with holdfast.open(pipeline) as checkpoint:
        assert_expected(checkpoint)
        assert any('"sd.safetensors"' in note for note in checkpoint.notes)


def test_a_component_that_is_not_here_is_named(pipeline):
    (pipeline / "model_index.json").write_text(json.dumps({**INDEX, "controlnet": ["a", "B"]}))
    with holdfast.open(pipeline) as checkpoint:
        assert_expected(checkpoint)
        assert any('"controlnet"' in note for note in checkpoint.notes)


def test_without_weights_in_components_the_file_at_the_top_counts(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps(INDEX))
    save_file({"whole": values(0, 1)}, tmp_path / "sd.safetensors")
    with holdfast.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["whole"]


def test_a_missing_shard_names_the_component(pipeline):
    (pipeline / f"unet/{DIFFUSION}-00002-of-00002.safetensors").unlink()
    with pytest.raises(StoreError, match="00002-of-00002") as caught:
        holdfast.open(pipeline)
    assert caught.value.file == f"unet/{DIFFUSION}.safetensors.index.json"


def test_a_broken_component_is_named(pipeline):
    (pipeline / "text_encoder/model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(FormatError) as caught:
        holdfast.open(pipeline)
    assert caught.value.file is not None
    assert "text_encoder" in caught.value.file


@pytest.mark.parametrize("content", ["[]", "3", "{", '{"a": 1, "a": 2}', '{"vae": NaN}', ""])
def test_a_model_index_that_is_no_plain_object_is_refused(pipeline, content):
    (pipeline / "model_index.json").write_text(content)
    with pytest.raises(HeaderError):
        holdfast.open(pipeline)


@pytest.mark.parametrize("name", ["..", "../secret", ".", "", "/etc", "unet/..", "a\\b", "a\0b"])
def test_a_component_cannot_lead_out_of_the_folder(pipeline, name):
    secret = pipeline.parent / "secret"
    secret.mkdir()
    save_file({"s": values(0, 1)}, secret / "model.safetensors")
    (pipeline / "model_index.json").write_text(json.dumps({**INDEX, name: ["a", "B"]}))
    with holdfast.open(pipeline) as checkpoint:
        assert_expected(checkpoint)


def test_weights_that_are_a_link_out_of_the_folder_are_refused(pipeline, tmp_path):
    save_file({"s": values(0, 1)}, tmp_path / "secret.safetensors")
    (pipeline / "text_encoder/model.safetensors").unlink()
    (pipeline / "text_encoder/model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(UnsafePath):
        holdfast.open(pipeline)


def test_a_component_folder_that_is_a_link_out_of_the_folder_is_refused(pipeline, tmp_path):
    (pipeline / "text_encoder").rename(tmp_path / "elsewhere")
    (pipeline / "text_encoder").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath):
        holdfast.open(pipeline)


def test_an_index_beyond_the_limit_is_refused(pipeline):
    with pytest.raises(LimitExceeded, match="index_nbytes"):
        holdfast.open(pipeline, limits=holdfast.Limits(index_nbytes=10))


def test_a_scan_reads_the_pickles_of_components(pipeline):
    (pipeline / f"vae/{DIFFUSION}.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert holdfast.scan(pipeline).verdict() == "dangerous"


def test_pickles_of_components_are_inert_and_named(pipeline):
    class Payload:
        def __reduce__(self):
            return os.system, ("false",)

    torch.save({"decoder.w": torch.zeros(2), "x": Payload()}, pipeline / f"vae/{DIFFUSION}.bin")
    with holdfast.open(pipeline) as checkpoint:
        assert [(str(item.what), item.stream) for item in checkpoint.foreign] == [
            ("posix.system", "vae: data.pkl")
        ]
