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

import msgspec

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.core.strict_json import describe_json, parse, quote
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


class StoredSize(msgspec.Struct, forbid_unknown_fields=True):
    """A size, stride or offset. A symbolic one has other fields: no bytes can be described by it."""

    as_int: int


class StoredDevice(msgspec.Struct):
    type: str
    index: int | None


class StoredMeta(msgspec.Struct):
    dtype: int
    sizes: list[StoredSize]
    requires_grad: bool
    device: StoredDevice
    strides: list[StoredSize]
    storage_offset: StoredSize
    layout: int


class StoredEntry(msgspec.Struct):
    """An entry of a config as torch writes it."""

    path_name: str
    is_param: bool
    use_pickle: bool
    tensor_meta: StoredMeta | None = None


@contextmanager
def about(model: str, what: str, name: str | None = None) -> Iterator[None]:
    """Add the model and the weight, or another part of the model, to the message of an error."""
    try:
        yield
    except HoldfastError as error:
        which = what if name is None else f"{what} {quote(name)}"
        error.message = f"{which} of model {quote(model)}: {error.message}"
        error.tensor = error.tensor or name
        raise error from None


def parse_config(raw: bytes, limits: Limits, *, model: str, what: str) -> dict[str, ConfigEntry]:
    """The entries of a config by name. `what` is `weight` or `constant`, for messages."""
    with about(model, f"the config of the {what}s"):
        document = parse(raw, limits)
    if not isinstance(document, dict) or not isinstance(document.get("config"), dict):
        raise HeaderError(
            f"the config of the {what}s of model {quote(model)} has no object 'config'",
            found=describe_json(document),
        )
    entries = {}
    for name, value in document["config"].items():
        with about(model, what, name):
            entries[name] = _entry(value)
    return entries


def _entry(value: object) -> ConfigEntry:
    try:
        stored = msgspec.convert(value, StoredEntry)
    except msgspec.ValidationError as error:
        raise HeaderError(f"{error}, where $ is the entry") from None
    record, meta = stored.path_name, stored.tensor_meta
    if record in (".", "..") or not RECORD(record):
        raise UnsafePath(f"{quote(record)} is no name of a record in this folder", found=record)
    return ConfigEntry(
        record,
        stored.is_param,
        stored.use_pickle,
        None if meta is None else _tensor_meta(meta, is_raw=not stored.use_pickle),
    )


def _tensor_meta(stored: StoredMeta, *, is_raw: bool) -> TensorMeta:
    dtype = DTYPES.name(SCALARS.get(stored.dtype, ""))
    if dtype is None:
        raise MetadataError(
            f"{stored.dtype} is no dtype that torch 2.13 writes", found=stored.dtype
        )
    if is_raw and stored.layout != STRIDED:
        layout = LAYOUTS.get(stored.layout, "unknown")
        message = f"a raw record cannot hold a tensor of layout {layout}"
        raise MetadataError(message, found=stored.layout)
    device = stored.device
    return TensorMeta(
        dtype,
        tuple([size.as_int for size in stored.sizes]),
        tuple([stride.as_int for stride in stored.strides]),
        stored.storage_offset.as_int,
        stored.requires_grad,
        device.type if device.index is None else f"{device.type}:{device.index}",
    )
