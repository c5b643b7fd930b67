"""GGUF beside the gguf package: its files, its values, and what its blocks stand for, bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

import holdfast
from holdfast.numeric.dequantize import BLOCK_TYPES

pytest.importorskip("gguf.gguf_writer")  # a folder of tests has the name of the package
gguf = pytest.importorskip("gguf")

TYPES = [name for name, row in BLOCK_TYPES.items() if row.decode is not None]


def written(path, tensors, values=()):
    writer = gguf.GGUFWriter(path, "tiny")
    for name, add, value in values:
        getattr(writer, add)(name, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_table_of_blocks():
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items() if size[0] > 1}
    assert {name: (row.elements, row.nbytes) for name, row in BLOCK_TYPES.items()} == sizes


@pytest.mark.parametrize("name", TYPES)
def test_decoded_as_the_package_does(name, tmp_path):
    kind, row = gguf.GGMLQuantizationType[name], BLOCK_TYPES[name]
    raw = np.random.default_rng(1).integers(0, 256, (64, 3 * row.nbytes), dtype=np.uint8)
    path = written(tmp_path / "m.gguf", {"w": (raw, kind)})
    with holdfast.open(path) as ckpt, np.errstate(all="ignore"):
        found, wanted = holdfast.dequantize(ckpt["w"]).numpy(), gguf.quants.dequantize(raw, kind)
    assert found.shape == wanted.shape
    unequal = (found.view(np.uint32) != wanted.view(np.uint32)) & ~(
        np.isnan(found) & np.isnan(wanted)
    )
    assert not unequal.any()


def test_values(tmp_path):
    values = [
        ("s", "add_string", "naïve ☃"), ("u", "add_uint64", 1 << 60), ("i", "add_int8", -3), ("f", "add_float32", 0.1),
        ("b", "add_bool", False), ("a", "add_array", [1, 2, 3]), ("t", "add_array", ["x", "", "☃"]), ("r", "add_array", [0.5, 1.5]),
    ]  # fmt: skip
    path = written(tmp_path / "m.gguf", {"w": (np.ones((2, 3), np.float32), None)}, values)
    with holdfast.open(path) as ckpt:
        assert ckpt["w"].shape == (2, 3)
        assert ckpt.metadata["s"] == "naïve ☃"
        for name, _, value in values[1:]:
            assert json.loads(ckpt.metadata[name]) == value, name
