"""The table of element types against torch, numpy and safetensors."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from holdfast.core.dtype import DTYPES
from holdfast.torch import versions

SAFETENSORS_CODES = {
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ",
    "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
}  # fmt: skip
"""All dtypes of the safetensors format."""

DTYPES_OF_TORCH = [dtype for dtype in DTYPES.rows if versions.dtype(dtype.torch)]
"""The dtypes that the installed version of torch has."""


def test_the_table_has_every_dtype_of_safetensors():
    codes = {dtype.safetensors for dtype in DTYPES.rows if dtype.safetensors}

    assert codes == SAFETENSORS_CODES


def test_the_table_has_every_dtype_of_torch():
    torch_dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]

    names = {str(torch_dtype).removeprefix("torch.") for torch_dtype in torch_dtypes}

    assert names <= {dtype.torch for dtype in DTYPES.rows}


@pytest.mark.parametrize("dtype", DTYPES_OF_TORCH, ids=str)
def test_elements_have_the_size_that_torch_says(dtype):
    torch_itemsize = getattr(torch, dtype.torch).itemsize

    if dtype.packed:
        # torch counts the byte that several elements share.
        assert torch_itemsize == 1
    else:
        assert torch_itemsize * 8 == dtype.bits
        assert torch_itemsize == dtype.numpy.itemsize


def test_the_table_has_every_typed_storage_of_torch():
    class_names = {name for name in vars(torch) if name.endswith("Storage")}
    untyped_names = {"Storage", "TypedStorage", "UntypedStorage"}

    names = {dtype.storage for dtype in DTYPES.rows if dtype.storage}

    assert names == class_names - untyped_names


@pytest.mark.parametrize("dtype", DTYPES.rows, ids=str)
def test_each_name_of_a_dtype_finds_it(dtype):
    assert DTYPES.name(dtype.name) is dtype
    if dtype.safetensors:
        assert DTYPES.safetensors(dtype.safetensors) is dtype
    if dtype.torch:
        assert DTYPES.torch(dtype.torch) is dtype
    if dtype.storage:
        assert DTYPES.storage(dtype.storage) is dtype
    assert DTYPES.numpy(dtype.numpy).numpy == dtype.numpy


@pytest.mark.parametrize("dtype", DTYPES.rows, ids=str)
def test_a_pickled_dtype_is_the_instance_of_the_table_again(dtype):
    assert pickle.loads(pickle.dumps(dtype)) is dtype


@pytest.mark.parametrize(
    ("numpy_dtype", "name"),
    [(np.uint8, "uint8"), (">i4", "int32"), (ml_dtypes.bfloat16, "bfloat16")],
)
def test_a_numpy_dtype_finds_the_plain_type_whatever_its_byte_order(numpy_dtype, name):
    assert DTYPES.numpy(np.dtype(numpy_dtype)).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [("bf16", "bfloat16"), (" torch.half ", "float16"), ("np.float64", "float64")],
)
def test_parse_accepts_abbreviations_and_the_prefixes_of_modules(text, name):
    assert DTYPES.parse(text).name == name


def test_unknown_names_return_none():
    assert DTYPES.name("float7") is None
    assert DTYPES.torch("") is None
    assert DTYPES.safetensors("f32") is None
    assert DTYPES.storage("Storage") is None
    assert DTYPES.numpy(np.dtype("M8[s]")) is None
    assert DTYPES.parse("float7") is None


@pytest.mark.parametrize("value", [None, 3, "float32", float, object(), np.generic])
def test_from_any_returns_none_for_what_is_not_a_dtype(value):
    assert DTYPES.from_any(value) is None


def test_the_size_of_packed_elements_is_rounded_up_to_bytes():
    float4 = DTYPES.name("float4_e2m1fn")
    float6 = DTYPES.name("float6_e3m2fn")

    assert [float4.nbytes(count) for count in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert float6.nbytes(4) == 3


@pytest.mark.parametrize(
    ("name", "nbytes"), [("float32", 4), ("complex64", 4), ("uint8", 1), ("float4_e2m1fn", 1)]
)
def test_swapping_bytes_reverses_elements_or_halves_of_complex_numbers(name, nbytes):
    assert DTYPES.name(name).swap_nbytes == nbytes


@pytest.mark.parametrize("dtype", DTYPES.rows, ids=str)
def test_a_dtype_is_equal_to_its_name_and_found_by_it_in_a_set(dtype):
    assert dtype == dtype.name
    assert dtype.name == dtype
    assert hash(dtype) == hash(dtype.name)
    assert dtype in {dtype.name}


@pytest.mark.parametrize("dtype", DTYPES_OF_TORCH, ids=str)
def test_a_dtype_is_equal_to_that_of_torch(dtype):
    torch_dtype = versions.dtype(dtype.torch)

    assert dtype == torch_dtype
    assert torch_dtype == dtype


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES.rows if DTYPES.numpy(dtype.numpy) is dtype], ids=str
)
def test_a_plain_dtype_is_equal_to_that_of_numpy_and_to_the_class_of_its_scalars(dtype):
    assert dtype == dtype.numpy
    assert dtype.numpy == dtype
    is_record = dtype.numpy.names is not None
    if not is_record:
        assert dtype == dtype.numpy.type


@pytest.mark.parametrize("dtype", DTYPES.rows, ids=str)
def test_a_dtype_is_equal_to_nothing_else(dtype):
    other_values: list[object] = [None, 3, "x", [], object(), int, float, np.generic]
    for other in DTYPES.rows:
        if other is not dtype:
            other_values += [other, other.name]
            torch_dtype = versions.dtype(other.torch)
            if torch_dtype is not None:
                other_values.append(torch_dtype)

    assert not any(dtype == value for value in other_values)


def test_a_numpy_dtype_is_equal_only_with_the_byte_order_of_this_machine():
    assert DTYPES.name("float32") == np.dtype("<f4")
    assert DTYPES.name("float32") != np.dtype(">f4")


def test_a_type_that_borrows_a_numpy_dtype_is_not_equal_to_it():
    assert DTYPES.name("quint8") != np.uint8


def test_a_dtype_is_not_equal_to_its_abbreviation():
    assert DTYPES.name("float32") != "f32"
