"""numpy's array files and archives, and GGUF.

numpy writes and reads the first; the gguf package, version 0.19.0, the second. It is not among the packages of the tests: without
it, the GGUF files stay as they are.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from recipe import golden

GGUF = "0.19.0"


def row(dtype: str, *shape: int) -> np.ndarray:
    """Elements of any dtype, of many bit patterns."""
    made = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if made == np.bool_:
        return (np.arange(count) % 3 == 0).reshape(shape)
    return (
        ((np.arange(count * made.itemsize) * 37 + 11) % 256)
        .astype(np.uint8)
        .view(made)
        .reshape(shape)
    )


def as_torch(array: np.ndarray) -> torch.Tensor:
    """The same elements, in this machine's order and C's."""
    return torch.from_numpy(
        np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).reshape(array.shape)
    )


def loaded(path: Path) -> dict[str, torch.Tensor]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: as_torch(archive[name]) for name in archive.files}


@golden("turned.npy", "npy", "an array in Fortran's order and a big-endian machine's")
def _turned(path: Path) -> torch.Tensor:
    np.save(path, np.asfortranarray(row(">f4", 3, 4)))
    return as_torch(np.load(path))


@golden(
    "version3.npy",
    "npy",
    "the third version of the header, which numpy writes for names of fields that are not ASCII",
)
def _version3(path: Path) -> torch.Tensor:
    with path.open("wb") as file:
        np.lib.format.write_array(file, row("<u2", 2, 3, 2), version=(3, 0))
    return as_torch(np.load(path))


@golden(
    "bfloat16.npy", "npy", "bfloat16 of ml_dtypes, of which numpy only writes that it has two bytes"
)
def _bfloat16(path: Path) -> torch.Tensor:
    array = np.arange(6).astype(ml_dtypes.bfloat16)
    np.save(path, array)
    return torch.arange(6, dtype=torch.bfloat16)


@golden(
    "stored.npz",
    "npz",
    "dtypes of both byte orders, 0-d, empty, a name with slashes, and one letter in two cases",
)
def _stored(path: Path) -> dict[str, torch.Tensor]:
    kinds = ("?", ">i8", "<u2", "<f2", ">f4", "<c16")
    arrays = {np.dtype(kind).name: row(kind, 2, 3) for kind in kinds}
    arrays |= {
        "layer/0/w": np.asfortranarray(row("<f4", 2, 2)),
        "w": row("<f4"),
        "W": row("<f4", 0, 3),
    }
    np.savez(path, **arrays)
    return loaded(path)


@golden("deflated.npz", "npz", "compressed members")
def _deflated(path: Path) -> dict[str, torch.Tensor]:
    np.savez_compressed(
        path,
        w=np.arange(600, dtype=np.float32).reshape(20, 30),
        b=np.zeros(30),
        t=np.asfortranarray(row("<i4", 3, 2)),
    )
    return loaded(path)


def blocks(kind: str, count: int) -> np.ndarray:
    """Quantised blocks of many bit patterns, with scales that are numbers."""
    import gguf

    each = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw = ((np.arange(count * each) * 89 + 7) % 251).astype(np.uint8).reshape(count, each)
    return raw & np.uint8(0x3B)


def write_gguf(path: Path, *, big: bool = False) -> dict[str, torch.Tensor]:
    import gguf

    writer = gguf.GGUFWriter(
        path, "tiny", endianess=gguf.GGUFEndian.BIG if big else gguf.GGUFEndian.LITTLE
    )
    writer.add_name("a tiny model")
    writer.add_uint32("tiny.block_count", 2)
    writer.add_float32("tiny.rope.freq_base", 0.1)
    writer.add_bool("tiny.tied", True)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "naïve", "☃"])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, 0.1])
    writer.add_array("tiny.sizes", [3, 1, 2])
    for name, dtype in (
        ("f32", "f4"),
        ("f16", "f2"),
        ("f64", "f8"),
        ("i8", "i1"),
        ("i16", "i2"),
        ("i32", "i4"),
        ("i64", "i8"),
    ):
        # The writer swaps in place what is to be of the other byte order.
        writer.add_tensor(f"blk.0.{name}", row(f"<{dtype}", 3, 5).copy())
    writer.add_tensor("norm.weight", row("<f4", 7).copy())
    if not big:
        bf16 = np.arange(8).astype(ml_dtypes.bfloat16).view(np.uint8).reshape(2, 8)
        writer.add_tensor("blk.0.bf16", bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
        for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
                     "TQ2_0", "IQ2_XXS"):  # fmt: skip
            writer.add_tensor(
                f"blk.1.{kind}",
                blocks(kind, 2).reshape(1, -1),
                raw_dtype=gguf.GGMLQuantizationType[kind],
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        array = np.array(tensor.data)
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            found[tensor.name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            found[tensor.name] = as_torch(array)
    return found


def dequantized(path: Path) -> dict[str, str]:
    """The SHA-256 of what quantised tensors stand for, as far as Holdfast decodes them, by the gguf package."""
    import gguf

    assert version("gguf") == GGUF
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name.startswith("blk.1.") and tensor.name != "blk.1.IQ2_XXS":
            numbers = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
            found[tensor.name] = hashlib.sha256(numbers.astype("<f4").tobytes()).hexdigest()
    return found


@golden(
    "tiny.gguf",
    "gguf",
    "every plain type, one tensor in each kind of blocks that is decoded and one that is not, values of all sorts",
)
def _gguf(path: Path) -> dict[str, torch.Tensor]:
    return write_gguf(path)


@golden("big_endian.gguf", "gguf", "the same plain tensors as a big-endian machine has them")
def _gguf_big(path: Path) -> dict[str, torch.Tensor]:
    return write_gguf(path, big=True)
