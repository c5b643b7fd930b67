"""From typed JSON back to Python state.

`Decoder` walks through the document. `strict_json` made its values, so that their depth is bounded, keys are unique and numbers are
exact. Keys of dicts and members of sets are limited as in the pickle reader, because a file can choose keys that collide. Each tag
has a reader and exactly its fields. Every error points into the document.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import NoReturn, cast

import numpy as np

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Device, Global, Size
from holdfast.core.protocols import Source
from holdfast.core.strict_json import describe_json, format_pointer, quote
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.core.tree import LinkedPath, expand_path
from holdfast.core.value import replace
from holdfast.errors import HeaderError, LimitExceeded, MetadataError, PickleError
from holdfast.formats.pickle.plain import PATH_CHARACTERS, PLAIN_TYPES, DefaultDict
from holdfast.formats.pickle.table import Spending
from holdfast.formats.safetensors.schema import is_addressable
from holdfast.formats.torch.composites import Apart, check_composite
from holdfast.formats.tree_json import scalars
from holdfast.formats.tree_json.encode import FLAGS, TAG
from holdfast.formats.tree_json.scalars import SAFE_INTEGER
from holdfast.numeric.dequantize import BLOCK_TYPES

Fields = dict[str, object]

TRAITS = (*FLAGS, "subclass", "state")

LEVELS_BELOW = 8
"""Levels of tagged objects below the deepest container that `Limits.depth` allows."""

Reader = Callable[["Decoder", Fields, LinkedPath], object]

PLAIN = frozenset({str, float, bool, type(None)})
"""JSON values that are read as they are. Integers are not among them: some are too large for other readers."""


class Decoder:
    def __init__(self, tensor: Callable[[str], LazyTensor], source: Source) -> None:
        self.find = tensor
        self.source = source
        self.limits = source.limits
        self.tensors: dict[str, LazyTensor] = {}
        self.spending = Spending(source.limits, 0)
        self.depth = 0
        self.deepest = source.limits.depth + LEVELS_BELOW

    def node(self, value: object, at: LinkedPath) -> object:
        made: object
        if isinstance(value, dict):
            if self.depth > self.deepest:
                self.too_deep(at)
            self.depth += 1
            if TAG in value:
                found = READERS.get(tag) if isinstance(tag := value[TAG], str) else None
                if found is None:
                    refuse(f"there is no tag {describe_json(tag)}", (at, TAG))
                read, required, optional = found
                if len(value) != 1 + len(required) or not value.keys() >= {*required}:
                    check_fields(value, at, required, optional)
                made = read(self, value, at)
            else:
                if f",{TAG}" in ",".join(("", *value)):
                    for key in value:
                        if key.startswith(TAG):
                            refuse(f"a key that begins with {TAG} in a plain dict", (at, key))
                made = {
                    key: inside if type(inside) in PLAIN else self.node(inside, (at, key))
                    for key, inside in value.items()
                }
            self.depth -= 1
            return made
        if isinstance(value, list):
            if self.depth > self.deepest:
                self.too_deep(at)
            self.depth += 1
            made = [
                inside
                if type(inside) in PLAIN
                or (type(inside) is int and -SAFE_INTEGER <= inside <= SAFE_INTEGER)
                else self.node(inside, (at, i))
                for i, inside in enumerate(value)
            ]
            self.depth -= 1
            return made
        if type(value) is int and not -SAFE_INTEGER <= value <= SAFE_INTEGER:
            refuse("an integer that not every reader of JSON can hold, and no tag", at)
        return value

    def too_deep(self, at: LinkedPath) -> NoReturn:
        raise LimitExceeded(
            f"at {shown(at)}: nested deeper than Limits(depth={self.limits.depth})",
            expected=self.limits.depth,
        )

    def entries(
        self, target: dict[object, object], fields: Fields, at: LinkedPath
    ) -> dict[object, object]:
        """Fill a dict from `entries`, an object, or from `items`, a list of pairs."""
        entries = fields.get("entries")
        if entries is not None:
            if "items" in fields or not isinstance(entries, dict):
                refuse("expected an object of entries or a list of items", at)
            for key, inside in entries.items():
                target[key] = self.node(inside, ((at, "entries"), key))
            return target
        place: LinkedPath = (at, "items")
        for i, pair in enumerate(self.many(fields, "items", at)):
            if not isinstance(pair, list) or len(pair) != 2:
                refuse(f"expected a pair, found {describe_json(pair)}", (place, i))
            key = self.key(pair[0], len(target), ((place, i), 0))
            if key in target:
                refuse("a key that was there before", ((place, i), 0))
            target[key] = self.node(pair[1], ((place, i), 1))
        return target

    def members(self, fields: Fields, at: LinkedPath) -> set[object]:
        made: set[object] = set()
        for i, item in enumerate(self.many(fields, "items", at)):
            member = self.key(item, len(made), ((at, "items"), i))
            if member in made:
                refuse("a member that was there before", ((at, "items"), i))
            made.add(member)
        return made

    def key(self, value: object, size: int, at: LinkedPath) -> object:
        """A dict key or a set member; checked before it is hashed."""
        key = self.node(value, at)
        try:
            self.spending.key(key, size)
        except PickleError as error:
            refuse(error.message, at)
        return key

    def many(self, fields: Fields, field: str, at: LinkedPath) -> list[object]:
        values = fields.get(field)
        if not isinstance(values, list):
            refuse(f"expected a list, found {describe_json(values)}", (at, field))
        return values

    def values(self, fields: Fields, field: str, at: LinkedPath) -> list[object]:
        return [
            self.node(item, ((at, field), i)) for i, item in enumerate(self.many(fields, field, at))
        ]

    def text(self, fields: Fields, field: str, at: LinkedPath) -> str:
        value = fields.get(field)
        if not isinstance(value, str):
            refuse(f"expected text, found {describe_json(value)}", (at, field))
        return value

    def any_text(self, fields: Fields, field: str, at: LinkedPath) -> str:
        """Text that may have been tagged because it is not Unicode."""
        value = self.node(fields.get(field), (at, field))
        if not isinstance(value, str):
            refuse(f"expected text, found {describe_json(fields.get(field))}", (at, field))
        return value

    def integer(self, fields: Fields, field: str, at: LinkedPath) -> int | None:
        value = self.node(fields.get(field), (at, field))
        if value is not None and type(value) is not int:
            refuse(f"expected an integer, found {describe_json(fields.get(field))}", (at, field))
        return value

    def shape(self, fields: Fields, at: LinkedPath) -> tuple[int, ...]:
        lengths = self.many(fields, "shape", at)
        checked = tuple(n for n in lengths if type(n) is int and n >= 0)
        if (
            len(checked) != len(lengths)
            or len(checked) > self.limits.rank
            or not is_addressable(checked, 8)
        ):
            refuse("expected a list of lengths", (at, "shape"))
        return checked

    def traits(self, traits: Traits, fields: Fields, at: LinkedPath) -> Traits:
        if fields.keys().isdisjoint(TRAITS):
            return traits
        for flag in FLAGS:
            if fields.get(flag, True) is not True:
                refuse(f"expected true, found {describe_json(fields[flag])}", (at, flag))
        subclass = self.node(fields.get("subclass"), (at, "subclass"))
        if "subclass" in fields and not isinstance(subclass, Global):
            refuse("expected a global", (at, "subclass"))
        return replace(
            traits,
            requires_grad="requires_grad" in fields,
            parameter="parameter" in fields,
            buffer="buffer" in fields,
            subclass=subclass if isinstance(subclass, Global) else None,
            state=self.node(fields.get("state"), (at, "state")),
        )


def shown(at: LinkedPath) -> str:
    return format_pointer(*expand_path(at))


def refuse(reason: str, at: LinkedPath) -> NoReturn:
    raise HeaderError(f"at {shown(at)}: {reason}")


def check_fields(
    fields: Fields, at: LinkedPath, required: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    for field in required:
        if field not in fields:
            refuse(f"the field {field} is missing", at)
    for field in fields:
        if field != TAG and field not in required and field not in optional:
            refuse(f"{quote(str(fields[TAG]))} has no such field", (at, field))


FLAVOURS: dict[object, type[PurePosixPath | PureWindowsPath]] = {
    "posix": PurePosixPath,
    "windows": PureWindowsPath,
}


def read_tensor(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    name = d.text(fields, "name", at)
    if name in d.tensors:
        refuse(f"the tensor {quote(name)} stands in the tree twice", (at, "name"))
    if "dtype" in fields or "shape" in fields:
        tensor = LazyTensor(
            name,
            read_dtype(d, fields, at, "dtype"),
            d.shape(fields, at),
            (),
            d.source,
            Traits(meta=True),
        )
    else:
        try:
            tensor = d.find(name)
        except KeyError:
            refuse(f"there is no tensor {quote(name)}", (at, "name"))
    d.tensors[name] = tensor  # the place in the order, before tensors in attributes
    traits = d.traits(tensor.traits, fields, at)
    if "blocks" in fields:
        blocks = BLOCK_TYPES.get(kind := d.text(fields, "blocks", at))
        if blocks is None or tensor.dtype != "uint8" or blocks.decoded_shape(tensor.shape) is None:
            refuse(
                f"{tensor.dtype} {list(tensor.shape)} is not in blocks of {quote(kind)}",
                (at, "blocks"),
            )
        traits = replace(traits, blocks=blocks.name)
    if traits is not tensor.traits:
        d.tensors[name] = tensor = replace(tensor, traits=traits)
    return tensor


def read_composite(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    objects: dict[str, dict[str, object]] = {}
    for field in ("parts", "attributes"):
        value = fields[field]
        if not isinstance(value, dict):
            refuse(f"expected an object, found {describe_json(value)}", (at, field))
        objects[field] = {
            name: d.node(inside, ((at, field), name)) for name, inside in value.items()
        }
    parts = {name: part for name, part in objects["parts"].items() if isinstance(part, LazyTensor)}
    if len(parts) != len(objects["parts"]):
        refuse("a part that is no tensor", (at, "parts"))
    what, shape = d.text(fields, "kind", at), d.shape(fields, at)
    try:
        check_composite(what, Apart(shape, parts, objects["attributes"]))
    except MetadataError as error:
        raise MetadataError(f"at {shown(at)}: {error.message}", found=shape) from None
    return Composite(what, shape, parts, objects["attributes"], d.traits(Traits(), fields, at))


def read_ordered_dict(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    made: dict[object, object] = OrderedDict()
    d.entries(made, fields, at)
    if "metadata" in fields:
        metadata = d.node(fields["metadata"], (at, "metadata"))
        if not isinstance(metadata, dict):
            refuse(f"expected a dict, found {describe_json(fields['metadata'])}", (at, "metadata"))
        vars(made)["_metadata"] = metadata
    return made


def read_defaultdict(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    name = fields["filler"]
    fillers: dict[str, Callable[[], object]] = {"OrderedDict": OrderedDict, **PLAIN_TYPES}
    if name is not None and (not isinstance(name, str) or name not in fillers):
        refuse(f"expected the name of a plain type, found {describe_json(name)}", (at, "filler"))
    return d.entries(DefaultDict(None if name is None else fillers[name]), fields, at)


def read_size(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    lengths = d.values(fields, "lengths", at)
    if any(type(n) is not int for n in lengths):
        refuse("expected integers", (at, "lengths"))
    return Size(cast("list[int]", lengths))


def read_range(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    values = [d.integer(fields, field, at) for field in BOUNDS]
    if None in values:
        refuse("expected an integer, found null", (at, BOUNDS[values.index(None)]))
    start, stop, step = cast("list[int]", values)
    if not step:
        refuse("a step of 0", (at, "step"))
    return range(start, stop, step)


def read_complex(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    real, imag = (d.node(fields[field], (at, field)) for field in ("real", "imag"))
    if type(real) is not float or type(imag) is not float:
        refuse("expected two floats", at)
    # Not real + imag * 1j, which loses signs of zero.
    return complex(real, imag)


def read_dtype(d: Decoder, fields: Fields, at: LinkedPath, field: str = "name") -> DType:
    dtype = DTYPES.name(d.text(fields, field, at))
    if dtype is None:
        refuse(f"there is no dtype {describe_json(fields[field])}", (at, field))
    return dtype


def read_path(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    flavour, text = d.text(fields, "flavour", at), d.any_text(fields, "path", at)
    if flavour not in FLAVOURS or len(text) > PATH_CHARACTERS:
        refuse(f"no path of at most {PATH_CHARACTERS} characters", at)
    return FLAVOURS[flavour](text)


def read_array(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    data = scalars.bytes_from(d.text(fields, "base64", at))
    return scalars.array_from(
        data, scalars.dtype_from(fields["dtype"]), d.many(fields, "shape", at), rank=d.limits.rank
    )


def read_scalar(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    return scalars.scalar_from(
        scalars.bytes_from(d.text(fields, "base64", at)), scalars.dtype_from(fields["dtype"])
    )


def from_text(field: str, make: Callable[[str], object]) -> Reader:
    return lambda d, fields, at: make(d.text(fields, field, at))


def located(read: Reader) -> Reader:
    """A reader that gives the `ValueError`s of `scalars` a place."""

    def with_place(d: Decoder, fields: Fields, at: LinkedPath) -> object:
        try:
            return read(d, fields, at)
        except (HeaderError, LimitExceeded):
            raise
        except ValueError as error:
            refuse(str(error), at)

    return with_place


def read_global(d: Decoder, fields: Fields, at: LinkedPath) -> object:
    return Global(d.any_text(fields, "module", at), d.any_text(fields, "name", at))


ENTRIES, BOUNDS = ("entries", "items"), ("start", "stop", "step")

READERS: dict[str, tuple[Reader, tuple[str, ...], tuple[str, ...]]] = {
    "tensor": (read_tensor, ("name",), ("dtype", "shape", "blocks", *TRAITS)),
    "composite": (read_composite, ("kind", "shape", "parts", "attributes"), TRAITS),
    "dict": (lambda d, fields, at: d.entries({}, fields, at), (), ENTRIES),
    "ordered_dict": (read_ordered_dict, (), (*ENTRIES, "metadata")),
    "counter": (lambda d, fields, at: d.entries(cast("dict[object, object]", Counter()), fields, at), (), ENTRIES),
    "defaultdict": (read_defaultdict, ("filler",), ENTRIES),
    "tuple": (lambda d, fields, at: tuple(d.values(fields, "items", at)), ("items",), ()),
    "size": (read_size, ("lengths",), ()),
    "set": (lambda d, fields, at: d.members(fields, at), ("items",), ()),
    "frozenset": (lambda d, fields, at: frozenset(d.members(fields, at)), ("items",), ()),
    "range": (read_range, BOUNDS, ()),
    "slice": (lambda d, fields, at: slice(*(d.integer(fields, field, at) for field in BOUNDS)), BOUNDS, ()),
    "complex": (read_complex, ("real", "imag"), ()),
    "device": (lambda d, fields, at: Device(d.any_text(fields, "type", at), d.integer(fields, "index", at)), ("type", "index"), ()),
    "dtype": (read_dtype, ("name",), ()),
    "global": (read_global, ("module", "name"), ()),
    "path": (read_path, ("flavour", "path"), ()),
    "numpy.array": (located(read_array), ("dtype", "shape", "base64"), ()),
    "numpy.scalar": (located(read_scalar), ("dtype", "base64"), ()),
    "numpy.str": (lambda d, fields, at: np.str_(d.any_text(fields, "value", at)), ("value",), ()),
    "numpy.bytes": (located(from_text("base64", lambda text: np.bytes_(scalars.bytes_from(text)))), ("base64",), ()),
    "numpy.dtype": (located(lambda d, fields, at: scalars.dtype_from(fields["dtype"])), ("dtype",), ()),
    "bytes": (located(from_text("base64", scalars.bytes_from)), ("base64",), ()),
    "bytearray": (located(from_text("base64", lambda text: bytearray(scalars.bytes_from(text)))), ("base64",), ()),
    "str": (located(from_text("utf8", lambda text: scalars.bytes_from(text).decode("utf-8", "surrogatepass"))), ("utf8",), ()),
    "int": (located(from_text("value", scalars.integer_from)), ("value",), ()),
    "float": (located(from_text("value", scalars.float_from)), ("value",), ()),
}  # fmt: skip
"""For each tag its reader, its fields, and its optional fields."""


def decode_tree(
    value: object,
    tensor: Callable[[str], LazyTensor],
    source: Source,
    *,
    at: tuple[str | int, ...] = (),
) -> tuple[object, dict[str, LazyTensor]]:
    """The tree of a JSON value, and its tensors by name, each name once.

    `tensor` gives the tensor of a name, or raises `KeyError`. `at` is the place of the value in its document. Raises
    `HeaderError`, `MetadataError` for impossible composites, or `LimitExceeded`.
    """
    place: LinkedPath = None
    for part in at:
        place = (place, part)
    decoder = Decoder(tensor, source)
    try:
        return decoder.node(value, place), decoder.tensors
    except RecursionError:
        raise LimitExceeded("the tree nests too deeply to be decoded") from None
