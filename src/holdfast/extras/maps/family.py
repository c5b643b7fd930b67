"""A family of models, from its TOML file: the arrays that a model is made of, and how each layout holds them.

    model_types = ["qwen3"]                       # `model_type` of config.json, by which `auto` finds the family

    [sizes]                                       # axes whose size shapes alone do not say; the first that is known counts
    dim = ["config.head_dim", "hidden / heads"]

    [layouts.hf]
    drop = ["model.layers.{layer}.rotary_emb.inv_freq"]           # tensors without a place elsewhere, left out on purpose
    [layouts.megatron]
    format = "dcp"                                                # what `convert` writes where nothing says another
    torch_dist = true                                             # with the small files that megatron-core looks for
    states = "optimizer.state.{state}.{name}"                     # an optimizer's tensors, which go as the weights do
    [layouts.megatron-layers]
    from = "megatron"                                             # as another layout, with texts of its names replaced
    replace = {"decoder.layers." = "decoder.layers.{layer}."}     # where a name has the axis now, its first dimension goes

    [[array]]
    id = "out"
    hf = "model.layers.{layer}.self_attn.o_proj.weight : hidden (group query dim)"
    megatron = "decoder.layers.self_attention.linear_proj.weight : layer hidden (group query dim)"

An array is `optional` where a checkpoint may lack it, and may have a `range` of places (`{layer = "dense:"}`). One that is
`tied = "embed"` is the same as another array in models whose config says `tie_word_embeddings`, or that have none of its own: then
only layouts of `copies` have tensors of it. The file is data: it has limits, and nothing in it is run.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, cast

import msgspec
from msgspec import Meta, field

from holdfast.core.value import Value
from holdfast.errors import BadMap
from holdfast.extras.maps.parts import LONGEST, NAME, AxisRange, LayoutPart, NamePattern, tokens

MOST_NBYTES, MOST_DOTS = 1 << 18, 256  # Of a file of a family, and of a line of it.
MOST_ARRAYS, MOST_PARTS, MOST_LAYOUTS, MOST_SIZES = 400, 64, 16, 400

STATES = re.compile(r"(\{(?:state|name)\})")

Text = Annotated[str, Meta(max_length=LONGEST)]
Texts = Text | Annotated[list[Text], Meta(max_length=MOST_PARTS)]


class LayoutText(msgspec.Struct, forbid_unknown_fields=True):
    drop: Texts = []
    states: Text = ""
    format: Text = ""
    torch_dist: bool = False
    base: Text = field(default="", name="from")
    replace: dict[Text, Text] = {}


class FamilyText(msgspec.Struct, forbid_unknown_fields=True):
    array: Annotated[list[dict[str, object]], Meta(max_length=MOST_ARRAYS)]
    layouts: Annotated[dict[str, LayoutText], Meta(max_length=MOST_LAYOUTS)]
    about: Text = ""
    model_types: list[Text] = []
    sizes: Annotated[dict[str, Texts], Meta(max_length=MOST_SIZES)] = {}


class Array(Value, eq=False):
    """One array of the model, and the parts in which each layout has it."""

    id: str
    parts: Mapping[str, tuple[LayoutPart, ...]]
    ranges: Mapping[str, AxisRange]
    optional: bool = False
    tied: str = ""
    copies: tuple[str, ...] = ()


class WeightLayout(Value, eq=False):
    name: str
    drops: tuple[NamePattern, ...]
    states: str
    """How an optimizer's tensor of a weight is called; empty where they have no place."""
    format: str = ""
    """The format in which checkpoints of this layout are expected."""
    torch_dist: bool = False

    def state_of(self, name: str) -> tuple[str, str] | None:
        """The state and the weight that a name of an optimizer's tensor stands for."""
        if not self.states:
            return None
        before, first, between, _, after = re.split(STATES, self.states)
        inside = name.removeprefix(before).removesuffix(after)
        start, found, rest = (
            inside.partition(between) if first == "{state}" else inside.rpartition(between)[::-1]
        )
        if (
            before + inside + after != name
            or not found
            or not rest
            or not re.fullmatch(r"[a-z0-9_]+", start)
        ):
            return None
        return start, rest

    def name_of(self, state: str, name: str) -> str:
        return self.states.replace("{state}", state).replace("{name}", name) if state else name


class Family(Value, eq=False):
    name: str
    about: str
    model_types: tuple[str, ...]
    sizes: Mapping[str, tuple[str, ...]]
    layouts: Mapping[str, WeightLayout]
    arrays: tuple[Array, ...]

    def layout(self, name: str) -> WeightLayout:
        if name not in self.layouts:
            raise BadMap(
                f"the family {self.name!r} has no layout {name!r}: it has {', '.join(self.layouts)}",
                found=name,
            )
        return self.layouts[name]


def read_family(name: str, content: bytes) -> Family:
    """The family of a TOML file. Raises `BadMap` where it is none."""
    if len(content) > MOST_NBYTES:
        raise BadMap(
            f"the file of a family has at most {MOST_NBYTES:,} bytes, and this one {len(content):,}",
            file=name,
        )
    if (
        max(line.count(b".") for line in content.split(b"\n")) > MOST_DOTS
    ):  # tomllib takes the square of a key's memory
        raise BadMap(f"a line of the file of a family has at most {MOST_DOTS} dots", file=name)
    try:
        text = msgspec.convert(tomllib.loads(content.decode()), FamilyText)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise BadMap(f"this is no file of a family: {error}", file=name) from None
    try:
        layouts = {key: _layout(key, one, text.layouts) for key, one in text.layouts.items()}
        sizes = {key: _texts(one) for key, one in text.sizes.items()}
        for one in (expression for several in sizes.values() for expression in several):
            tokens(one)
        arrays = tuple(_array(number, one, text.layouts) for number, one in enumerate(text.array))
        _check(layouts, arrays)
    except BadMap as error:
        error.file = name
        raise
    return Family(name, text.about, tuple(text.model_types), sizes, layouts, arrays)


def _texts(given: Texts) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _layout(name: str, text: LayoutText, others: Mapping[str, LayoutText]) -> WeightLayout:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise BadMap(f"{name[:40]!r} is no name of a layout")
    if text.base and (text.base not in others or others[text.base].base):
        raise BadMap(
            f"the layout {name!r} is made from {text.base!r}, which is no layout, or made from another one itself"
        )
    words = re.split(STATES, text.states)
    if text.states and (
        sorted(words[1::2]) != ["{name}", "{state}"] or not re.search(r"[^a-z0-9_]", words[2])
    ):
        raise BadMap(f"states are written 'optimizer.{{state}}.{{name}}', not {text.states!r}")
    base = others.get(text.base, text)
    drops = tuple(map(NamePattern.read, _texts(text.drop or base.drop)))
    return WeightLayout(
        name,
        drops,
        text.states or base.states,
        text.format or base.format,
        text.torch_dist or base.torch_dist,
    )


def _array(number: int, given: Mapping[str, object], layouts: Mapping[str, LayoutText]) -> Array:
    known = {"id": str, "optional": bool, "tied": str, "copies": list, "range": dict}
    for key, value in given.items():
        if key in known and not isinstance(value, known[key]):
            raise BadMap(f"{key!r} of array {number} is of another type")
        if key not in known and key not in layouts:
            raise BadMap(f"array {number} has {key!r}, which is no layout of the file")
    parts: dict[str, tuple[LayoutPart, ...]] = {}
    for layout, about in layouts.items():
        texts = given.get(layout, given.get(about.base, []))
        if not isinstance(texts, str) and not (
            isinstance(texts, list) and all(isinstance(one, str) for one in texts)
        ):
            raise BadMap(f"the parts of array {number} in {layout!r} are no texts")
        made = tuple(map(LayoutPart.read, _texts(cast("Texts", texts))))
        parts[layout] = (
            made if layout in given else tuple(_renamed(one, about.replace) for one in made)
        )
        if len(made) > MOST_PARTS:
            raise BadMap(f"an array has at most {MOST_PARTS} parts")
    ranges: dict[str, AxisRange] = {}
    for axis, text in cast("dict[str, object]", given.get("range", {})).items():
        start, colon, stop = str(text).partition(":")
        if not colon or not re.fullmatch(NAME, axis):
            raise BadMap(f"a range is written 'first:last', not {text!r}")
        ranges[axis] = AxisRange(axis, start or "0", stop)
    copies = tuple(map(str, cast("list[object]", given.get("copies", []))))
    return Array(
        str(given.get("id", f"array {number}")), parts, ranges, bool(given.get("optional")), str(given.get("tied", "")), copies
    )  # fmt: skip


def _renamed(part: LayoutPart, replaced: Mapping[str, str]) -> LayoutPart:
    """A part under its name in a layout that is made of another. An axis that the name has now is no dimension any more."""
    text = part.name.text
    for old, new in replaced.items():
        text = text.replace(old, new)
        if len(text) > LONGEST:
            raise BadMap(
                f"a name has at most {LONGEST} characters, and this one {len(text):,}",
                found=text[:LONGEST],
            )
    name = NamePattern.read(text)
    dims = tuple(dim for dim in part.dims if not (len(dim) == 1 and dim[0].axis in name.axes))
    return LayoutPart(name, dims, part.pattern)


def _check(layouts: Mapping[str, WeightLayout], arrays: tuple[Array, ...]) -> None:
    """What can be said of a family without a checkpoint: no two parts have one name, ties lead to arrays with the same axes."""
    axes = {
        one.id: {axis for parts in one.parts.values() for part in parts for axis in part.axes}
        for one in arrays
    }
    if len(axes) < len(arrays):
        raise BadMap("two arrays have one id")
    for array in arrays:
        if array.tied and axes.get(array.tied) != axes[array.id]:
            raise BadMap(
                f"{array.id!r} is tied to {array.tied!r}, which is no array, or has other axes"
            )
    for layout in layouts:
        seen: dict[tuple[str, tuple[str, ...]], str] = {}
        for one in (part.name for array in arrays for part in array.parts[layout]):
            key = one.plain, tuple(number if number.isdecimal() else "" for number in one.numbers)
            if key in seen:
                raise BadMap(
                    f"{one.text!r} and {seen[key]!r} are one name in the layout {layout!r}"
                )
            seen[key] = one.text
