"""`<model>_weights_config.json` and `<model>_constants_config.json`: each name as a view over a record, or as a pickle in one.

    {"config": {"head.weight": {"path_name": "weight_0", "is_param": true, "use_pickle": false,
                                "tensor_meta": {"dtype": 7, "sizes": [{"as_int": 5}, {"as_int": 4}], "requires_grad": true,
                                                "device": {"type": "cpu", "index": null}, "strides": [{"as_int": 4}, {"as_int": 1}],
                                                "storage_offset": {"as_int": 0}, "layout": 7}}}}

Every field is checked, and every error names the model and the weight. Fields that are not known are passed over, as torch does:
the archive's version says when what is known changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.core.strict_json import kind, parse, pointer, quoted
from holdfast.errors import HeaderError, HoldfastError, MetadataError, UnsafePath

SCALARS: Mapping[int, str] = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 9: "complex32",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
    31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
"""torch's numbers for dtypes (schema 8.20). 0 stands for every other dtype."""

LAYOUTS: Mapping[int, str] = {
    1: "sparse_coo", 2: "sparse_csr", 3: "sparse_csc", 4: "sparse_bsr", 5: "sparse_bsc", 6: "_mkldnn", 7: "strided",
}  # fmt: skip
STRIDED = 7

WEIGHT, TENSOR, OBJECT, OPAQUE = "weight_", "tensor_", "custom_obj_", "opaque_obj_"
"""Prefixes of the names of records: weights; constants that are tensors, torchbind objects, Python objects."""

RECORD = re.compile(r"[^/\\:\0]+\Z").match
"""Names of records in a folder, but for `.` and `..`."""


class TensorMeta(NamedTuple):
    """A view of a storage, counted in elements. It is not compared with the storage."""

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool
    location: str


class ConfigEntry(NamedTuple):
    record: str
    is_param: bool
    use_pickle: bool
    meta: TensorMeta | None
    """None for objects that are no tensors."""


@contextmanager
def about(model: str, what: str, name: str | None = None) -> Iterator[None]:
    """Add the model and the weight, or another part of the model, to the message of an error."""
    try:
        yield
    except HoldfastError as error:
        which = what if name is None else f"{what} {quoted(name)}"
        error.message = f"{which} of model {quoted(model)}: {error.message}"
        error.tensor = error.tensor or name
        raise error from None


def parse_config(raw: bytes, limits: Limits, *, model: str, what: str) -> dict[str, ConfigEntry]:
    """The entries of a config by name. `what` is `weight` or `constant`, for messages."""
    with about(model, f"the config of the {what}s"):
        document = parse(raw, limits)
    if not isinstance(document, dict) or not isinstance(document.get("config"), dict):
        raise HeaderError(
            f"the config of the {what}s of model {quoted(model)} has no object 'config'",
            found=kind(document),
        )
    entries = {}
    for name, value in document["config"].items():
        with about(model, what, name):
            entries[name] = _entry(value, ("config", name))
    return entries


def _entry(value: object, at: tuple[str, ...]) -> ConfigEntry:
    if not isinstance(value, dict):
        raise HeaderError(f"at {pointer(*at)}: an object was expected, not {kind(value)}")
    record = value.get("path_name")
    if not isinstance(record, str):
        raise HeaderError(
            f"at {pointer(*at, 'path_name')}: a text was expected, not {kind(record)}"
        )
    if record in (".", "..") or not RECORD(record):
        raise UnsafePath(
            f"at {pointer(*at, 'path_name')}: {quoted(record)} is no name of a record in this folder",
            found=record,
        )
    meta, pickled = value.get("tensor_meta"), _flag(value, "use_pickle", at)
    return ConfigEntry(
        record,
        _flag(value, "is_param", at),
        pickled,
        None if meta is None else tensor_meta(meta, (*at, "tensor_meta"), raw=not pickled),
    )


def _flag(value: Mapping[str, object], key: str, at: tuple[str, ...]) -> bool:
    found = value.get(key)
    if not isinstance(found, bool):
        raise HeaderError(f"at {pointer(*at, key)}: true or false was expected, not {kind(found)}")
    return found


def tensor_meta(value: object, at: tuple[str, ...], *, raw: bool = True) -> TensorMeta:
    if not isinstance(value, dict):
        raise HeaderError(f"at {pointer(*at)}: an object was expected, not {kind(value)}")
    number, layout = value.get("dtype"), value.get("layout")
    name = SCALARS.get(number) if type(number) is int else None
    dtype = DTYPES.name(name) if name else None
    if dtype is None:
        raise MetadataError(
            f"at {pointer(*at, 'dtype')}: {kind(number)} is no dtype that torch 2.13 writes",
            found=number,
        )
    if raw and (type(layout) is not int or layout != STRIDED):
        shown = LAYOUTS.get(layout, "unknown") if type(layout) is int else kind(layout)
        raise MetadataError(
            f"at {pointer(*at, 'layout')}: a raw record cannot hold a tensor of layout {shown}",
            found=layout,
        )
    return TensorMeta(
        dtype,
        _ints(value.get("sizes"), (*at, "sizes")),
        _ints(value.get("strides"), (*at, "strides")),
        _int(value.get("storage_offset"), *at, "storage_offset"),
        _flag(value, "requires_grad", at),
        _location(value.get("device"), (*at, "device")),
    )


def _ints(values: object, at: tuple[str, ...]) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise HeaderError(f"at {pointer(*at)}: a list was expected, not {kind(values)}")
    return tuple([_int(one, *at, number) for number, one in enumerate(values)])


def _int(value: object, *at: str | int) -> int:
    if not isinstance(value, dict) or len(value) != 1:
        raise HeaderError(f"at {pointer(*at)}: {{'as_int': …}} was expected, not {kind(value)}")
    number = value.get("as_int")
    if type(number) is not int:
        if "as_expr" in value or "as_sym_int" in value:
            raise MetadataError(
                f"at {pointer(*at)}: a symbolic size, where the bytes of a tensor are described"
            )
        raise HeaderError(f"at {pointer(*at)}: an integer was expected, not {kind(number)}")
    if number < 0:
        raise MetadataError(f"at {pointer(*at)}: {number} is negative", found=number)
    return number


def _location(device: object, at: tuple[str, ...]) -> str:
    name, index = (
        (device.get("type"), device.get("index", "")) if isinstance(device, dict) else ("", "")
    )
    if type(name) is str and (index is None or type(index) is int):
        return name if index is None else f"{name}:{index}"
    raise HeaderError(f"at {pointer(*at)}: a type and an index were expected, not {kind(device)}")
