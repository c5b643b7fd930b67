"""safetensors: single files, and directories with and without an index."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from expect import short
from recipe import golden, numbers, of_dtype, plain_dtypes


def writable(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.save({"x": of_dtype(dtype)})
    except Exception:
        return False  # complex128, complex32, bits*, int1 …: safetensors has no code for them
    return True


@golden(
    "dtypes.safetensors",
    "safetensors",
    "every dtype that safetensors writes for torch; 0-d, empty and zero-length shapes",
)
def _st_dtypes(path: Path) -> dict[str, torch.Tensor]:
    state = {short(d): of_dtype(d) for d in plain_dtypes() if writable(d)}
    state |= {
        "zero_d": torch.tensor(2.5),
        "empty": torch.empty(0),
        "none_wide": torch.empty(3, 0, 2),
    }
    safetensors.torch.save_file(state, path)
    return safetensors.torch.load_file(path)


@golden(
    "metadata.safetensors",
    "safetensors",
    "with __metadata__, and names that need care: dots, spaces, non-ASCII",
)
def _st_metadata(path: Path) -> dict[str, torch.Tensor]:
    metadata = {"author": "nobody", "format": "pt", "note": "naïve ☃"}
    state = {
        "model.0.weight": numbers(2, 3),
        "a name with spaces": numbers(2),
        "poids.é": numbers(1),
        "": numbers(1, start=4),
    }
    order = json.dumps(metadata, separators=(",", ":"), ensure_ascii=False).encode()
    while not path.exists() or order not in path.read_bytes():
        safetensors.torch.save_file(
            state, path, metadata=metadata
        )  # in random order: safetensors 0.8.0 keeps a hash map
    return safetensors.torch.load_file(path)


@golden("empty.safetensors", "safetensors", "no tensors at all")
def _st_empty(path: Path) -> dict[str, torch.Tensor]:
    safetensors.torch.save_file({}, path)
    return safetensors.torch.load_file(path)


@golden(
    "packed.safetensors",
    "safetensors",
    "6- and 4-bit floats, with a header made by hand (no torch dtype for them)",
)
def _st_packed(path: Path) -> None:
    sizes = {"e2m3": ("F6_E2M3", [2, 4], 6), "e3m2": ("F6_E3M2", [8], 6), "f4": ("F4", [3, 2], 3)}
    header: dict[str, object] = {}
    data = b""
    for name, (code, shape, nbytes) in sizes.items():
        header[name] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [len(data), len(data) + nbytes],
        }
        data += bytes((37 * i + 11 * len(data) + 5) % 256 for i in range(nbytes))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with safetensors.safe_open(path, "pt") as opened:
        assert sorted(opened.keys()) == sorted(sizes)


def packed_expectation(path: Path) -> dict[str, object]:
    """Bytes out of the file itself: neither torch nor numpy has an array for these."""
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    names = {"F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn", "F4": "float4_e2m1fn"}
    tensors = {}
    for name, line in json.loads(raw[8:start]).items():
        a, b = line["data_offsets"]
        digest = hashlib.sha256(raw[start + a : start + b]).hexdigest()
        tensors[name] = {
            "dtype": names[line["dtype"]],
            "shape": line["shape"],
            "packed": True,
            "sha256": digest,
        }
    return {"format": "safetensors", "tensors": tensors, "aliases": []}


def shards() -> list[dict[str, torch.Tensor]]:
    return [
        {"embed.weight": numbers(5, 2), "layers.0.weight": numbers(2, 2, dtype=torch.bfloat16)},
        {"layers.1.weight": numbers(2, 2, start=9), "head.bias": numbers(5, dtype=torch.float16)},
    ]


def write_shards(path: Path, pattern: str) -> dict[str, str]:
    path.mkdir()
    where = {}
    for i, shard in enumerate(shards(), 1):
        name = pattern.format(i)
        safetensors.torch.save_file(shard, path / name, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, name)
    return where


@golden(
    "hf_index",
    "safetensors-dir",
    "a directory as the Hugging Face hub has it: two shards, an index, a config beside them",
)
def _hf_index(path: Path) -> dict[str, torch.Tensor]:
    where = write_shards(path, "model-{:05d}-of-00002.safetensors")
    total = sum(t.nbytes for shard in shards() for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (path / "config.json").write_text('{"model_type": "tiny"}\n')
    return {
        k: v
        for file in sorted(set(where.values()))
        for k, v in safetensors.torch.load_file(path / file).items()
    }


@golden("hf_plain", "safetensors-dir", "a directory of two safetensors files without an index")
def _hf_plain(path: Path) -> dict[str, torch.Tensor]:
    where = write_shards(path, "part{}.safetensors")
    return {
        k: v
        for file in sorted(set(where.values()))
        for k, v in safetensors.torch.load_file(path / file).items()
    }
