"""A damaged byte is noticed when its storage is read, and the error names file, tensor and offset."""

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
def test_a_damaged_tensor_is_refused_and_all_others_are_read(tmp_path, name, tensor):
    path = tmp_path / name
    holdfast.save(STATE, path, durable=False)
    with holdfast.open(path) as checkpoint:
        (storage,) = checkpoint[tensor].storages
    file_path = path / storage.key if path.is_dir() else path
    last_offset = storage.start + storage.nbytes - 1
    with open(file_path, "r+b") as file:
        file.seek(last_offset)
        last_byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last_byte ^ 1]))

    with holdfast.open(path) as checkpoint:
        for read in (checkpoint[tensor].numpy, checkpoint.read):
            with pytest.raises(Corrupted) as caught:
                read()
            assert (caught.value.tensor, caught.value.offset) == (tensor, storage.start)
        other_tensors = [other for other in STATE if other != tensor]
        assert set(checkpoint.read(*other_tensors)) == set(other_tensors)

    with holdfast.open(path, verify=False) as checkpoint:
        assert checkpoint[tensor].numpy().tobytes() != STATE[tensor].tobytes()
