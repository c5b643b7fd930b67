"""Paths that stand for something else, which a download may have made: indexes, folders of the hub's cache, pipelines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import (
    HeaderError,
    LimitExceeded,
    NoSuchPath,
    StoreError,
    UnsafePath,
    Unsupported,
)

from .case import Make, either, opens, refused

__all__ = ["CASES"]

HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(4)
INDEX = "model.safetensors.index.json"
PIPE, LINK = "a named pipe", "a link to "
"""Contents that stand for a file of another kind."""

Files = Mapping[str, bytes | str]


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content == PIPE:
            os.mkfifo(path)
        elif isinstance(content, str) and content.startswith(LINK):
            path.symlink_to(content.removeprefix(LINK))
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def cached(files: Files) -> Make:
    """A folder of the hub's cache with a snapshot, and with these files."""

    def make(folder: Path) -> Path:
        write(folder, {"outside/model.safetensors": WEIGHTS, "secret": "abc"})
        model = folder / "models--org--name"
        write(model, {"snapshots/abc/model.safetensors": WEIGHTS, **files})
        return model

    return make


def sparse_ref(folder: Path) -> Path:
    model = cached({"refs/main": "abc"})(folder)
    os.truncate(model / "refs/main", 1 << 40)
    return model


def indexed(files: Files) -> Make:
    """The path of an index, in a folder with these files."""

    def make(folder: Path) -> Path:
        write(folder, {"secret.safetensors": WEIGHTS})
        write(folder / "model", {"model.safetensors": WEIGHTS, "config.json": "{}", **files})
        return folder / "model" / INDEX

    return make


def weight_map(file: str) -> str:
    return json.dumps({"weight_map": {"w": file}})


def pipeline(index: str, files: Files = {}) -> Make:  # noqa: B006  # is not changed
    """A pipeline of one component, `vae`, with this index."""

    def make(folder: Path) -> Path:
        write(folder, {"secret/model.safetensors": WEIGHTS})
        made = {"model_index.json": index, "vae/config.json": "{}"}
        write(folder / "pipeline", {**made, "vae/model.safetensors": WEIGHTS, **files})
        return folder / "pipeline"

    return make


VAE = json.dumps({"vae": ["diffusers", "AutoencoderKL"]})

CASES = [
    opens("cache-honest", cached({"refs/main": "abc\n"}), lambda ckpt: list(ckpt) == ["w"]),
    opens("cache-ref-is-a-pipe", cached({"refs/main": PIPE}), lambda ckpt: list(ckpt) == ["w"]),
    refused("cache-ref-above", cached({"refs/main": "../../outside"}), HeaderError),
    refused("cache-ref-is-dots", cached({"refs/main": ".."}), HeaderError),
    refused("cache-ref-absolute", cached({"refs/main": "/etc"}), HeaderError),
    refused("cache-ref-with-an-escape", cached({"refs/main": "\x1b[31mabc"}), HeaderError),
    refused("cache-ref-of-bytes", cached({"refs/main": b"\xff\x00" * 40}), HeaderError),
    refused("cache-ref-of-a-tebibyte", sparse_ref, HeaderError),
    refused("cache-ref-is-a-link-out", cached({"refs/main": LINK + "../../secret"}), UnsafePath),
    refused("cache-ref-to-nothing", cached({"refs/main": "def"}), NoSuchPath),
    refused(
        "cache-snapshot-is-a-link-out",
        cached({"refs/main": "def", "snapshots/def": LINK + "../../outside"}),
        UnsafePath,
    ),
    refused("cache-two-snapshots", cached({"snapshots/def/x": ""}), Unsupported),
    opens(
        "index-honest",
        indexed({INDEX: weight_map("model.safetensors")}),
        lambda ckpt: list(ckpt) == ["w"],
    ),
    refused("index-above", indexed({INDEX: weight_map("../secret.safetensors")}), UnsafePath),
    refused("index-is-a-pipe", indexed({INDEX: PIPE}), UnsafePath, StoreError),
    refused("index-of-itself", indexed({INDEX: weight_map(INDEX)})),
    refused("index-is-no-json", indexed({INDEX: b"\x80\x04."}), HeaderError),
    refused("index-nested", indexed({INDEX: "[" * 100_000}), LimitExceeded, HeaderError),
    refused("index-absolute", indexed({INDEX: weight_map("/etc/passwd")}), UnsafePath),
    refused("index-with-a-nul", indexed({INDEX: weight_map("model.safetensors\0")}), UnsafePath),
    refused(
        "index-with-a-backslash", indexed({INDEX: weight_map("..\\secret.safetensors")}), UnsafePath
    ),
    refused(
        "index-of-a-missing-file", indexed({INDEX: weight_map("other.safetensors")}), StoreError
    ),
    refused("index-is-a-list", indexed({INDEX: "[]"}), HeaderError),
    refused(
        "index-name-twice",
        indexed({INDEX: '{"weight_map": {"w": "model.safetensors", "w": "secret.safetensors"}}'}),
        HeaderError,
    ),
    refused(
        "index-of-a-tensor-that-its-file-lacks",
        indexed({INDEX: json.dumps({"weight_map": {"v": "model.safetensors"}})}),
    ),
    refused("pipeline-index-is-a-list", pipeline("[]")),
    refused("pipeline-index-has-nan", pipeline('{"vae": ["a", "B"], "x": NaN}'), HeaderError),
    opens("pipeline-honest", pipeline(VAE), lambda ckpt: list(ckpt) == ["vae.w"]),
    opens(
        "pipeline-component-above",
        pipeline(json.dumps({"../secret": ["a", "B"], "vae": ["a", "B"]})),
        lambda ckpt: list(ckpt) == ["vae.w"],
    ),
    either(
        "pipeline-100000-components",
        pipeline(json.dumps({str(i): ["a", "B"] for i in range(100_000)})),
    ),
    refused("pipeline-nested", pipeline("[" * 100_000), LimitExceeded, HeaderError),
    refused("pipeline-name-twice", pipeline('{"vae": ["a", "B"], "vae": ["a", "B"]}'), HeaderError),
    refused(
        "pipeline-weights-are-a-link-out",
        pipeline(
            VAE,
            {"vae/diffusion_pytorch_model.safetensors": LINK + "../../secret/model.safetensors"},
        ),
        UnsafePath,
    ),
    opens(
        "pipeline-weights-are-a-pipe",
        pipeline(VAE, {"vae/diffusion_pytorch_model.safetensors": PIPE}),
        lambda ckpt: list(ckpt) == ["vae.w"],
    ),
]
