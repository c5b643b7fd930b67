"""Small models of the shipped families, as folders, and how many bytes of their tensors are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.stores import local
from tests.extras.maps.test_oracles import FOLDER, numbered

QWEN, MOE, LLAMA, DEEPSEEK = ("qwen3-gqa", "qwen3_moe-gqa", "llama-gqa", "deepseek_v3-q-lora")


def model(name: str = QWEN) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """The tensors of a model in Hugging Face's layout, each element another number, and its config.json."""
    recorded = json.loads((FOLDER / f"{name}.hf-titan.json").read_text())
    return {
        key: values.astype("<i4") for key, values in numbered(recorded["source"]).items()
    }, recorded["config"]


def write(folder: Path, tensors: dict[str, np.ndarray], config: object = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    holdfast.save(tensors, folder / "model.safetensors", durable=False)
    if config is not None:
        text = config if isinstance(config, bytes) else json.dumps(config).encode()
        (folder / "config.json").write_bytes(text)
    return folder


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many bytes of tensors each read of a safetensors file takes; headers are none."""
    found: list[int] = []
    read = local.LocalStore.read

    def count(self: local.LocalStore, key: str, start: int, nbytes: int) -> None:
        size = bytearray(8)
        read(self, key, 0, memoryview(size))
        data = 8 + struct.unpack("<Q", size)[0]
        # What is read from the beginning on is to see what file it is, and how long its header.
        found.append(max(start + nbytes - max(start, data), 0) if start else 0)

    def counting_read(self: local.LocalStore, key: str, start: int, out: memoryview) -> None:
        if key.endswith(".safetensors"):
            count(self, key, start, out.nbytes)
        read(self, key, start, out)

    with monkeypatch.context() as patch:
        patch.setattr(local.LocalStore, "read", counting_read)
        yield found
