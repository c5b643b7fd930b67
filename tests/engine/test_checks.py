"""A flipped bit is caught when the storage is read, and named: file, tensor, byte."""

import os

import numpy as np
import pytest

import holdfast
from holdfast.errors import Corrupted

STATE = {
    "small": np.arange(6, dtype=np.float32),
    "other": np.ones(5, np.int8),
    "large": np.arange(5 << 20, dtype=np.uint16),
}


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a"])
@pytest.mark.parametrize("tensor", STATE)
def test_damage_is_caught_on_read(tmp_path, name, tensor):
    path = tmp_path / name
    holdfast.save(STATE, path, durable=False)
    with holdfast.open(path) as ckpt:
        (storage,) = ckpt[tensor].storages
        file = path / storage.key if path.is_dir() else path
    at = storage.start + storage.nbytes - 1
    with open(file, "r+b") as damaged:
        damaged.seek(at)
        byte = damaged.read(1)[0]
        damaged.seek(-1, os.SEEK_CUR)
        damaged.write(bytes([byte ^ 1]))
    with holdfast.open(path) as ckpt:
        for read in (ckpt[tensor].numpy, ckpt.read):
            with pytest.raises(Corrupted) as caught:
                read()
            assert (caught.value.tensor, caught.value.offset) == (tensor, storage.start)
        others = [n for n in STATE if n != tensor]
        assert set(ckpt.read(*others)) == set(others)
    with holdfast.open(path, verify=False) as ckpt:
        assert ckpt[tensor].numpy().tobytes() != STATE[tensor].tobytes()
