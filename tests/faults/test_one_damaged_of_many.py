"""One damaged tensor of very many is named with its file and offset, by every way to read it, where a format has checksums."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
import holdfast.torch
from holdfast.errors import Corrupted

MANY, SOME, SLOW = 100_000, 5_000, 500
"""As many as a format takes to write in a few seconds."""


def arrays(count: int) -> dict[str, np.ndarray]:
    return {f"layers.{n // 100}.w.{n % 100}": np.full(4, n, "f4") for n in range(count)}


def tensors(count: int) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays(count).items()}


def in_shards(path: Path) -> None:
    holdfast.save(arrays(SOME), path, format="safetensors", max_shard_size=16_000, durable=False)


def torch_shards(path: Path) -> None:
    path.mkdir()
    state = tensors(SOME)
    names = [*state]
    for number in range(2):
        torch.save(
            {name: state[name] for name in names[number::2]},
            path / f"pytorch_model-0000{number + 1}-of-00002.bin",
        )


def in_dcp(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors(SLOW), checkpoint_id=path)


def split(path: Path) -> None:
    """Every tensor in two pieces."""
    whole = path.with_name("whole")
    holdfast.save(arrays(SLOW), whole, durable=False)
    holdfast.reshard(whole, path, mesh={"tp": 2}, rules=["*: tp=0"], durable=False)


WRITERS: dict[str, tuple[Callable[[Path], object], int]] = {
    "x.safetensors": (lambda path: holdfast.save(arrays(MANY), path, durable=False), MANY),
    "native": (lambda path: holdfast.save(arrays(MANY), path, durable=False), MANY),
    "x.pt": (lambda path: torch.save(tensors(MANY), path), MANY),
    "x.npz": (lambda path: np.savez(path, **arrays(SOME)), SOME),
    "shards": (in_shards, SOME),
    "torch-shards": (torch_shards, SOME),
    "dcp": (in_dcp, SLOW),
    "split": (split, SLOW),
}


@pytest.mark.parametrize("name", WRITERS)
def test_one_damaged_tensor_is_named_with_file_and_offset(tmp_path: Path, name: str):
    path, (write, count) = tmp_path / name, WRITERS[name]
    write(path)
    wanted = [*arrays(count)][count * 3 // 7]
    with holdfast.open(path) as checkpoint:
        storage = checkpoint[wanted].storages[-1]
        key, start = storage.key, storage.start
    file = path / key if path.is_dir() else path
    with file.open("r+b") as changed:
        changed.seek(start + 3)
        changed.write(b"\xff")
    with holdfast.open(path) as checkpoint:
        for read in (checkpoint.read, checkpoint[wanted].numpy, lambda: checkpoint.read(wanted)):
            check(read, wanted, key, start)
    into = {name: torch.empty(4) for name in arrays(count)}
    check(lambda: holdfast.torch.load_into(into, path), wanted, key, start)
    with holdfast.torch.open(path) as checkpoint:
        check(checkpoint.read, wanted, key, start)
    if name == "x.pt":
        check(lambda: holdfast.torch.load(path), wanted, key, start)
        check(lambda: holdfast.torch.load(path, weights_only=False), wanted, key, start)
    (damage,) = holdfast.verify(path).damaged
    assert (damage.tensors, damage.file, damage.offset) == ((wanted,), str(file), start)


def check(read: Callable[[], object], name: str, key: str, offset: int) -> None:
    with pytest.raises(Corrupted) as caught:
        read()
    found = caught.value
    assert (found.tensor, Path(found.file or "").name, found.offset) == (
        name,
        Path(key).name,
        offset,
    )
