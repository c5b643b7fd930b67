"""Everything that safetensors 0.8 writes, from numpy and from torch, against what it loads."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import holdfast
from holdfast.core.dtype import DTYPES
from holdfast.torch import versions
from tests.golden.expect import short
from tests.parity.compare import elements
from tests.parity.test_torch_files import filled
from tests.support import dtypes

FLOAT4 = versions.dtype("float4_e2m1fn_x2")
TORCH = dtypes(
    *(row.torch for row in DTYPES.rows if row.torch and row.safetensors),
    "float4_e2m1fn_x2",
    but=() if versions.FLOAT4_COPIED else ("float4_e2m1fn_x2",),
)
NUMPY = [row.numpy for row in DTYPES.rows if row.safetensors and row.numpy.kind != "V"] + [
    np.dtype(ml_dtypes.bfloat16)
]


def assert_tensor(lazy: holdfast.LazyTensor, tensor: torch.Tensor) -> None:
    """The same bits through numpy and torch; a pair of 4-bit floats counts as two elements in the file and in numpy."""
    wanted = elements(tensor)
    array = lazy.numpy()
    if tensor.dtype == FLOAT4:
        assert lazy.dtype.name == "float4_e2m1fn"
        assert lazy.shape == (*tensor.shape[:-1], tensor.shape[-1] * 2)
        nibbles = array.reshape(-1).view(np.uint8)
        assert (nibbles[::2] | nibbles[1::2] << 4).tobytes() == wanted
    else:
        assert lazy.dtype.name == short(tensor.dtype)
        assert lazy.shape == tuple(tensor.shape)
        assert array.tobytes() == wanted
    made = lazy.torch()
    assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
    assert elements(made) == wanted


@pytest.mark.parametrize("dtype", TORCH, ids=short)
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_every_torch_dtype(dtype, mmap, tmp_path):
    state = {
        "whole": filled(dtype, 6, 8),
        "row": filled(dtype, 4),
        "empty": filled(dtype, 0, 2),
        "one": filled(dtype, 1, 1, 2),
    }
    if dtype != FLOAT4:
        state["scalar"] = filled(dtype, 1).reshape(())
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(state, path, metadata={"format": "pt", "ä": "\N{WHALE}"})
    with holdfast.open(path, mmap=mmap) as ckpt:
        assert ckpt.format == "safetensors"
        assert dict(ckpt.metadata) == {"format": "pt", "ä": "\N{WHALE}"}
        loaded = safetensors.torch.load_file(path)
        assert set(ckpt) == set(loaded)
        for name, tensor in loaded.items():
            assert_tensor(ckpt[name], tensor)
        assert ckpt.aliases == ()
        assert list(ckpt.tree) == list(ckpt)


@pytest.mark.parametrize("dtype", sorted({d for d in NUMPY if d.kind != "V"}, key=str), ids=str)
def test_every_numpy_dtype(dtype):
    array = np.arange(24).reshape(4, 6).astype(dtype)
    state = {"a": array, "b": array[1], "empty": array[:0], "scalar": array[2, 3, ...]}
    try:
        data = safetensors.numpy.save(state)
    except (KeyError, ValueError, safetensors.SafetensorError):
        pytest.skip(f"safetensors does not write {dtype} from numpy")
    # Against what was saved: for some dtypes (F8_E5M2) the loader for numpy lacks what the writer has.
    with holdfast.open(data) as ckpt:
        assert set(ckpt) == set(state)
        for name, wanted in state.items():
            assert ckpt[name].numpy().tobytes() == wanted.tobytes()
            assert ckpt[name].shape == wanted.shape
            assert ckpt[name].dtype.numpy == wanted.dtype


@pytest.mark.parametrize(("code", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
def test_packed_floats_bit_by_bit(code, bits):
    """6-bit floats have no writer in Python; the file is made by hand, and the bits are counted one at a time."""
    raw = bytes((i * 91 + 17) % 256 for i in range(24))
    count = len(raw) * 8 // bits
    header = json.dumps(
        {"x": {"dtype": code, "shape": [4, count // 4], "data_offsets": [0, len(raw)]}}
    ).encode()
    stream = int.from_bytes(raw, "little")
    wanted = np.array(
        [stream >> (i * bits) & ((1 << bits) - 1) for i in range(count)], np.uint8
    ).reshape(4, -1)
    with holdfast.open(len(header).to_bytes(8, "little") + header + raw) as ckpt:
        assert np.array_equal(ckpt["x"].numpy().view(np.uint8), wanted)
        assert np.array_equal(ckpt["x"][1:, 1::3].numpy().view(np.uint8), wanted[1:, 1::3])
        assert np.array_equal(ckpt["x"][2, -1].numpy().view(np.uint8), wanted[2, -1])


def test_names_come_in_the_order_of_the_file():
    state = {
        name: torch.ones(2, dtype=dtype)
        for name, dtype in (("b", torch.int8), ("z", torch.float64), ("a", torch.float64))
    }
    with holdfast.open(safetensors.torch.save(state)) as ckpt:
        # The writer puts wide types first, for alignment, and sorts names within a type.
        assert list(ckpt) == ["a", "z", "b"]


def test_slices_are_those_of_safe_open(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"x": torch.arange(120.0).reshape(10, 12)}, path)
    with safetensors.safe_open(path, "np") as reference, holdfast.open(path) as ckpt:
        part = reference.get_slice("x")
        for index in [
            (slice(2, 5),),
            (slice(None), slice(3, 4)),
            (slice(1, 9), slice(2, 11)),
            (4,),
        ]:
            assert np.array_equal(ckpt["x"][index].numpy(), part[index])


def test_no_tensors_at_all(tmp_path):
    with holdfast.open(safetensors.torch.save({}, metadata={"only": "text"})) as ckpt:
        assert list(ckpt) == []
        assert ckpt.metadata == {"only": "text"}
        assert ckpt.nbytes == 0


def test_a_sharded_model_is_one_checkpoint(tmp_path):
    shards = {
        "model-00001-of-00002.safetensors": {"a": torch.randn(3, 4), "b": torch.arange(5)},
        "model-00002-of-00002.safetensors": {"c": torch.randn(2).bfloat16()},
    }
    for file, state in shards.items():
        safetensors.torch.save_file(state, tmp_path / file)
    weight_map = {name: file for file, state in shards.items() for name in state}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    with holdfast.open(tmp_path) as ckpt:
        assert ckpt.format == "safetensors-dir"
        assert set(ckpt) == set(weight_map)
        for file, state in shards.items():
            for name, tensor in safetensors.torch.load_file(tmp_path / file).items():
                assert_tensor(ckpt[name], tensor)
                assert elements(state[name]) == ckpt[name].numpy().tobytes()
