"""What each tag is read by. Every tag has exactly its fields, and every refusal points into the document."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath, PureWindowsPath
from typing import cast

import numpy as np

from holdfast.core.composite import Composite
from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Global
from holdfast.core.tensor import LazyTensor, Traits
from holdfast.core.values import Device, Size
from holdfast.errors import HeaderError, LimitExceeded, MetadataError
from holdfast.formats.pickle.plain import PATH_CHARACTERS, PLAIN_TYPES, DefaultDict
from holdfast.formats.safetensors.strict_json import kind, quoted
from holdfast.formats.tree_json import scalars
from holdfast.formats.tree_json.composites import check_composite
from holdfast.formats.tree_json.decoder import TRAITS, At, Decoder, Fields, Reader, check_fields, refuse, shown

__all__ = ["READERS"]

FLAVOURS: dict[object, type[PurePosixPath | PureWindowsPath]] = {"posix": PurePosixPath, "windows": PureWindowsPath}


def read_tensor(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    if len(fields) != 2 or "name" not in fields:  # the usual form needs no further look
        check_fields(fields, at, "name", optional=("dtype", "shape", *TRAITS))
    name = d.text(fields, "name", at)
    if name in d.tensors:
        refuse(f"the tensor {quoted(name)} stands in the tree twice", (at, "name"))
    if "dtype" in fields or "shape" in fields:
        dtype = DTYPES.name(d.text(fields, "dtype", at))
        if dtype is None:
            refuse(f"there is no dtype {kind(fields['dtype'])}", (at, "dtype"))
        tensor = LazyTensor(name, dtype, d.shape(fields, at), (), d.source, Traits(meta=True))
    else:
        try:
            tensor = d.find(name)
        except KeyError:
            refuse(f"there is no tensor {quoted(name)}", (at, "name"))
    d.tensors[name] = tensor  # the place in the order, before tensors in attributes
    traits = d.traits(tensor.traits, fields, at, depth)
    if traits is not tensor.traits:
        d.tensors[name] = tensor = replace(tensor, traits=traits)
    return tensor


def read_composite(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "kind", "shape", "parts", "attributes", optional=TRAITS)
    objects: dict[str, dict[str, object]] = {}
    for field in ("parts", "attributes"):
        value = fields[field]
        if not isinstance(value, dict):
            refuse(f"expected an object, found {kind(value)}", (at, field))
        objects[field] = {name: d.node(inside, ((at, field), name), depth + 1) for name, inside in value.items()}
    parts = {name: part for name, part in objects["parts"].items() if isinstance(part, LazyTensor)}
    if len(parts) != len(objects["parts"]):
        refuse("a part that is no tensor", (at, "parts"))
    what, shape = d.text(fields, "kind", at), d.shape(fields, at)
    try:
        check_composite(what, shape, parts, objects["attributes"])
    except MetadataError as error:
        raise MetadataError(f"at {shown(at)}: {error.message}", found=shape) from None
    return Composite(what, shape, parts, objects["attributes"], d.traits(Traits(), fields, at, depth))


def read_dict(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, optional=("entries", "items"))
    made: dict[object, object] = {}
    d.entries(made, fields, at, depth)
    return made


def read_ordered_dict(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, optional=("entries", "items", "metadata"))
    made: OrderedDict[object, object] = OrderedDict()
    d.entries(made, fields, at, depth)
    if "metadata" in fields:
        metadata = d.node(fields["metadata"], (at, "metadata"), depth + 1)
        if not isinstance(metadata, dict):
            refuse(f"expected a dict, found {kind(fields['metadata'])}", (at, "metadata"))
        vars(made)["_metadata"] = metadata
    return made


def read_counter(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, optional=("entries", "items"))
    made: Counter[object] = Counter()
    d.entries(cast("dict[object, object]", made), fields, at, depth)
    return made


def read_defaultdict(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "filler", optional=("entries", "items"))
    name = fields["filler"]
    fillers: dict[str | None, Callable[[], object] | None] = {None: None, "OrderedDict": OrderedDict}
    fillers.update(PLAIN_TYPES)
    if not isinstance(name, str | None) or name not in fillers:
        refuse(f"expected the name of a plain type, found {kind(name)}", (at, "filler"))
    made = DefaultDict(fillers[name])
    d.entries(made, fields, at, depth)
    return made


def read_tuple(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "items")
    return tuple([d.node(item, ((at, "items"), i), depth + 1) for i, item in enumerate(d.many(fields, "items", at))])


def read_size(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "lengths")
    lengths = [d.node(item, ((at, "lengths"), i), depth + 1) for i, item in enumerate(d.many(fields, "lengths", at))]
    if any(type(n) is not int for n in lengths):
        refuse("expected integers", (at, "lengths"))
    return Size(cast("list[int]", lengths))


def read_set(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "items")
    return d.members(fields, at, depth)


def read_frozenset(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "items")
    return frozenset(d.members(fields, at, depth))


def read_range(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "start", "stop", "step")
    start, stop, step = (d.integer(fields, field, at, depth) for field in ("start", "stop", "step"))
    if not step:
        refuse("a step of 0", (at, "step"))
    return range(start, stop, step)


def read_slice(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "start", "stop", "step")
    return slice(*(d.optional_integer(fields, field, at, depth) for field in ("start", "stop", "step")))


def read_complex(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "real", "imag")
    real, imag = (d.node(fields[field], (at, field), depth + 1) for field in ("real", "imag"))
    if type(real) is not float or type(imag) is not float:
        refuse("expected two floats", at)
    # Not real + imag * 1j, which loses signs of zero.
    return complex(real, imag)


def read_device(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "type", "index")
    return Device(d.any_text(fields, "type", at, depth), d.optional_integer(fields, "index", at, depth))


def read_dtype(d: Decoder, fields: Fields, at: At, _: int) -> object:
    check_fields(fields, at, "name")
    dtype = DTYPES.name(d.text(fields, "name", at))
    if dtype is None:
        refuse(f"there is no dtype {kind(fields['name'])}", (at, "name"))
    return dtype


def read_global(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "module", "name")
    return Global(d.any_text(fields, "module", at, depth), d.any_text(fields, "name", at, depth))


def read_path(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "flavour", "path")
    flavour = d.text(fields, "flavour", at)
    text = d.any_text(fields, "path", at, depth)
    if flavour not in FLAVOURS or len(text) > PATH_CHARACTERS:
        refuse(f"no path of at most {PATH_CHARACTERS} characters", at)
    return FLAVOURS[flavour](text)


def read_array(d: Decoder, fields: Fields, at: At, _: int) -> object:
    check_fields(fields, at, "dtype", "shape", "base64")
    data = scalars.bytes_from(d.text(fields, "base64", at))
    return scalars.array_from(data, scalars.dtype_from(fields["dtype"]), d.many(fields, "shape", at), d.limits.rank)


def read_scalar(d: Decoder, fields: Fields, at: At, _: int) -> object:
    check_fields(fields, at, "dtype", "base64")
    return scalars.scalar_from(scalars.bytes_from(d.text(fields, "base64", at)), scalars.dtype_from(fields["dtype"]))


def read_numpy_str(d: Decoder, fields: Fields, at: At, depth: int) -> object:
    check_fields(fields, at, "value")
    return np.str_(d.any_text(fields, "value", at, depth))


def read_numpy_dtype(_: Decoder, fields: Fields, at: At, __: int) -> object:
    check_fields(fields, at, "dtype")
    return scalars.dtype_from(fields["dtype"])


def from_text(field: str, make: Callable[[str], object]) -> Reader:
    """The reader of a tag whose only field is a text."""

    def read(d: Decoder, fields: Fields, at: At, _: int) -> object:
        check_fields(fields, at, field)
        return make(d.text(fields, field, at))

    return read


def located(read: Reader) -> Reader:
    """The same reader, with a place for the `ValueError`s of `scalars`."""

    def with_place(d: Decoder, fields: Fields, at: At, depth: int) -> object:
        try:
            return read(d, fields, at, depth)
        except (HeaderError, LimitExceeded):
            raise
        except ValueError as error:
            refuse(str(error), at)

    return with_place


def _text_of(data: str) -> str:
    return scalars.bytes_from(data).decode("utf-8", "surrogatepass")


READERS: dict[str, Reader] = {
    "tensor": read_tensor,
    "composite": read_composite,
    "dict": read_dict,
    "ordered_dict": read_ordered_dict,
    "counter": read_counter,
    "defaultdict": read_defaultdict,
    "tuple": read_tuple,
    "size": read_size,
    "set": read_set,
    "frozenset": read_frozenset,
    "range": read_range,
    "slice": read_slice,
    "complex": read_complex,
    "device": read_device,
    "dtype": read_dtype,
    "global": read_global,
    "path": read_path,
    "numpy.array": located(read_array),
    "numpy.scalar": located(read_scalar),
    "numpy.str": read_numpy_str,
    "numpy.bytes": located(from_text("base64", lambda text: np.bytes_(scalars.bytes_from(text)))),
    "numpy.dtype": located(read_numpy_dtype),
    "bytes": located(from_text("base64", scalars.bytes_from)),
    "bytearray": located(from_text("base64", lambda text: bytearray(scalars.bytes_from(text)))),
    "str": located(from_text("utf8", _text_of)),
    "int": located(from_text("value", scalars.integer_from)),
    "float": located(from_text("value", scalars.float_from)),
}
"""What each tag is read by."""
