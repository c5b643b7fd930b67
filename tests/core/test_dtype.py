"""The one table of element types agrees with torch, numpy and safetensors."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from holdfast.core.dtype import DTYPES
from holdfast.torch import versions

SAFETENSORS = {
    *(
        "BOOL",
        "F4",
        "F6_E2M3",
        "F6_E3M2",
        "U8",
        "I8",
        "F8_E5M2",
        "F8_E4M3",
        "F8_E8M0",
        "F8_E4M3FNUZ",
        "F8_E5M2FNUZ",
    ),
    *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
}


def test_every_safetensors_dtype_has_a_row():
    assert len(SAFETENSORS) == 22
    assert {row.safetensors for row in DTYPES.rows if row.safetensors} == SAFETENSORS


def test_every_torch_dtype_has_a_row():
    every = {
        str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)
    }
    assert every <= {row.torch for row in DTYPES.rows}


@pytest.mark.parametrize("row", [r for r in DTYPES.rows if versions.dtype(r.torch)], ids=str)
def test_widths_are_those_of_torch(row):
    theirs = getattr(torch, row.torch)
    if row.packed:
        # The packed quantised types: several elements to the byte that torch counts.
        assert theirs.itemsize == 1
    else:
        assert theirs.itemsize * 8 == row.bits == row.numpy.itemsize * 8


def test_every_typed_storage_class_of_torch_has_a_row():
    classes = {name for name in vars(torch) if name.endswith("Storage")} - {
        "Storage",
        "TypedStorage",
        "UntypedStorage",
    }
    assert {row.storage for row in DTYPES.rows if row.storage} == classes


@pytest.mark.parametrize("row", DTYPES.rows, ids=str)
def test_a_row_is_found_by_each_of_its_names(row):
    assert DTYPES.name(row.name) is row
    assert row.safetensors is None or DTYPES.safetensors(row.safetensors) is row
    assert row.torch is None or DTYPES.torch(row.torch) is row
    assert row.storage is None or DTYPES.storage(row.storage) is row
    assert DTYPES.numpy(row.numpy).numpy == row.numpy
    assert pickle.loads(pickle.dumps(row)) is row


def test_numpy_names_the_plain_row():
    assert DTYPES.numpy(np.dtype(np.uint8)).name == "uint8"
    assert DTYPES.numpy(np.dtype(">i4")).name == "int32"
    assert DTYPES.numpy(np.dtype(ml_dtypes.bfloat16)).name == "bfloat16"
    assert DTYPES.numpy(np.dtype("M8[s]")) is None


def test_unknown_names_give_none():
    assert (
        DTYPES.name("float7")
        is DTYPES.torch("")
        is DTYPES.safetensors("f32")
        is DTYPES.storage("Storage")
        is None
    )


def test_bytes_of_packed_elements_are_rounded_up():
    assert [DTYPES.name("float4_e2m1fn").nbytes(n) for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert DTYPES.name("float6_e3m2fn").nbytes(4) == 3
    assert DTYPES.name("complex64").swap_nbytes == 4


@pytest.mark.parametrize("row", DTYPES.rows, ids=str)
def test_a_row_equals_what_others_call_it(row):
    assert row == row.name
    assert row.name == row
    assert row in {row.name}
    assert hash(row) == hash(row.name)
    theirs = versions.dtype(row.torch)
    if theirs is not None:
        assert row == theirs
        assert theirs == row
    if DTYPES.numpy(row.numpy) is row:
        assert row == row.numpy == row
        assert row == row.numpy.type or row.numpy.names
    others = [other for other in DTYPES.rows if other is not row]
    assert not any(row in (other, other.name) for other in others)
    assert not any(
        row == versions.dtype(other.torch)
        for other in others
        if versions.dtype(other.torch) is not None
    )
    assert not any(row == value for value in (None, 3, "x", [], object(), int, float, np.generic))


def test_a_byte_order_of_elsewhere_is_another_dtype():
    assert DTYPES.name("float32") != np.dtype(">f4")
    assert DTYPES.name("float32") == np.dtype("<f4")
    assert DTYPES.name("quint8") != np.uint8
    assert DTYPES.name("float32") != "f32"
