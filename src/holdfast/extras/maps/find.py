"""`Map`: from one layout of a family to another, by name, and the one that fits a checkpoint.

qwen3:hf:megatron                 a family of the package
my.toml:hf:mine                   a family of a file
qwen3:megatron:hf,group=4         a size that neither config.json nor the shapes say; prefix=model. for names that begin so
auto   auto:megatron              the family and the layout that fit; to Hugging Face's, unless another is named

`qwen3:hf..megatron` and `qwen3:hf->megatron?group=4&query=2` mean the same. A shell takes the `>` and the `&` of the last one for
its own, unless it is quoted.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files

from msgspec import field

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import DEFAULTS
from holdfast.core.value import Value, replace
from holdfast.engine.computed import decode_quantized_table
from holdfast.errors import BadMap
from holdfast.extras.maps.bind import Bound
from holdfast.extras.maps.family import MOST_NBYTES, Family, read_family
from holdfast.extras.maps.mapped import mapped
from holdfast.extras.maps.parts import DIGITS
from holdfast.formats.index_file import read_config

SUFFIX = ".toml"
COMMON = "hf"  # The layout that `auto` leads to.
SPEC = re.compile(
    r"""(?P<family>.+?):(?P<source>[a-z0-9-]+)(?:->|:|\.\.)(?P<target>[a-z0-9-]+)
        (?: \?(?P<queried>.*) | ,(?P<listed>.*) )?""",
    re.DOTALL | re.VERBOSE,
)
AUTO_SPEC = re.compile(r"auto\s*(?:(?:->|:|\.\.)(?P<target>.*))?", re.DOTALL)
REDIRECTED = re.compile(r"(?P<start>auto|.+:[a-z0-9-]+?)-", re.DOTALL)
"""What a shell leaves of `qwen3:hf->megatron` without quotes: it sends the output to a file `megatron`."""


class Map(Value, eq=False):
    """A map from one layout of a family to another. `holdfast.open(path, map=…)` shows a checkpoint through it."""

    family: Family
    source: str
    target: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes that whoever asks knows better."""
    prefix: str = ""
    """What all names of the source begin with."""
    then: Map | None = None
    """What comes behind it."""

    def __post_init__(self) -> None:
        self.family.layout(self.source), self.family.layout(self.target)

    @classmethod
    def named(cls, name: str) -> Map:
        """Return the map of a name, like "qwen3:hf:megatron"; not `auto`. Raises `BadMap`."""
        found = SPEC.fullmatch(name)
        if found is None:
            raise _explain_misspelling(name)
        family_name = found["family"]
        if family_name.endswith(SUFFIX):
            try:
                with open(family_name, "rb") as file:
                    content = file.read(MOST_NBYTES + 1)
            except (OSError, ValueError) as error:  # A ValueError for a zero in the name.
                raise BadMap(
                    f"the file of a family cannot be read: {error}", file=family_name
                ) from None
            family = read_family(os.path.basename(family_name).removesuffix(SUFFIX), content)
        elif family_name in families():
            family = families()[family_name]
        else:
            raise BadMap(
                f"there is no family {family_name!r}: there are {', '.join(families())}; a file of your own ends with .toml",
                found=family_name,
            )
        sizes: dict[str, int] = {}
        prefix = ""
        parts = (found["queried"] or "").split("&") + (found["listed"] or "").split(",")
        for part in filter(None, parts):
            key, equals, value = part.partition("=")
            if key == "prefix":
                prefix = value
            elif equals and value.isdecimal() and len(value) < 12:
                sizes[key] = int(value)
            else:
                raise BadMap(
                    f"sizes and a prefix follow the map as ,group=4,prefix=model. and not as {part[:40]!r}",
                    found=name,
                )
        return cls(family, found["source"], found["target"], sizes, prefix)

    def __str__(self) -> str:
        return f"{self.family.name}:{self.source}:{self.target}" + (
            f", {self.then}" if self.then is not None else ""
        )

    def invert(self) -> Map:
        """The way back."""
        back = Map(self.family, self.target, self.source, self.sizes)
        return back if self.then is None else self.then.invert().compose(back)

    def compose(self, other: Map) -> Map:
        """This map, and behind it another: what that one reads is what this one makes."""
        return replace(self, then=other if self.then is None else self.then.compose(other))

    def bind(self, checkpoint: Checkpoint, config: Mapping[str, object] | None = None) -> Bound:
        """Prove that this map fits a checkpoint, without what comes behind it. Raises `DoesNotFit` with every problem."""
        known = read_config(checkpoint.source, DEFAULTS) if config is None else config
        # A map cuts and joins tensors by their elements, and has nothing to say of bytes in blocks.
        numbers = decode_quantized_table(checkpoint.stored)
        return Bound(
            self.family, self.source, self.target, numbers, config=known, given=self.sizes,
            metadata=checkpoint.metadata, prefix=self.prefix, file=checkpoint.path,
        )  # fmt: skip

    def through(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint as the target layout has it. It shares the files of the one that is given, and closes them."""
        seen = mapped(checkpoint, self.bind(checkpoint), replace(self, then=None).through)
        return seen if self.then is None else self.then.through(seen)


AnyMap = str | Map


@cache
def families() -> Mapping[str, Family]:
    """The families of the package, by name."""
    folder = files("holdfast.extras.maps") / "families"
    names = sorted(file.name.removesuffix(SUFFIX) for file in folder.iterdir())
    return {name: read_family(name, (folder / f"{name}{SUFFIX}").read_bytes()) for name in names}


def _explain_misspelling(text: str) -> BadMap:
    """Return the error for a text that is not the name of a map, with what a shell may have made of it."""
    redirected = REDIRECTED.fullmatch(text)
    if redirected is None:
        message = (
            f"a map is written qwen3:hf:megatron, with a family or a file first, not {text[:80]!r}"
        )
        return BadMap(message, found=text)
    return BadMap(
        f"the name of the map ends in the middle: {text[:80]!r}. An unquoted > sends the output of a command to a file with the "
        f"rest of the name: delete that file, and write {redirected['start'][-80:]}:LAYOUT, which needs no quotes",
        found=text,
    )


def map_names() -> list[str]:
    """Return the names of all maps between the layouts of built-in families."""
    return [
        f"{family.name}:{source}:{target}"
        for family in families().values()
        for source, target in itertools.permutations(family.layouts, 2)
    ]


def find_map(
    text: AnyMap,
    checkpoint: Checkpoint,
    wanted: Callable[[], Iterable[str]] | None = None,
    *,
    is_check: bool = False,
) -> Map | None:
    """Return the map of a name, or the one that fits a checkpoint; None if that is in the layout already.

    `wanted` gives the names of the other side if they are known: a model's. With `is_check`, "auto"
    only has to find the layout of the checkpoint: if that is the common one, the map keeps it, and
    binding it proves that the checkpoint fits. Raises `BadMap` if no map fits, or several do.
    """
    if isinstance(text, Map):
        return text
    auto = AUTO_SPEC.fullmatch(text.strip())
    if auto is None:
        return Map.named(text)
    target = auto["target"]
    config = read_config(checkpoint.source, DEFAULTS)
    targets = None if wanted is None else [*_layouts_of(wanted())]
    fitting = list[Map]()
    for family, source in _layouts_of(checkpoint.stored.names, config):
        if targets is not None:
            ends = [layout for own, layout in targets if own is family]
        elif source == COMMON and not target and not is_check:
            other = next((layout for layout in family.layouts if layout != source), source)
            raise BadMap(
                f"this is {family.name} in the layout {source!r}: say where to, auto:{other}",
                found=text,
            )
        else:
            ends = [target or COMMON] if (target or COMMON) in family.layouts else []
        fitting += [Map(family, source, end) for end in ends]
    if any(one.source == one.target for one in fitting) and (target or not is_check):
        return None
    if len(fitting) != 1:
        said = (
            "fits none of the families"
            if not fitting
            else "fits several: " + ", ".join(map(str, fitting))
        )
        raise BadMap(
            f"the map auto: the checkpoint {said}; name one ('holdfast maps' lists them)",
            file=checkpoint.path,
            found=text,
        )
    return fitting[0]


def _layouts_of(
    names: Iterable[str], config: Mapping[str, object] | None = None
) -> Iterator[tuple[Family, str]]:
    """The layouts whose parts are called as these names are, numbers aside. Of several families config.json decides, and of layouts
    of a family that hold all arrays alike the first one counts."""
    plain = {DIGITS.sub("#", name) for name in names}
    found = list[tuple[Family, str]]()
    for family in families().values():
        seen = list[object]()
        for layout in family.layouts.values():
            alike = [
                (one.name.text, one.pattern)
                for array in family.arrays
                for one in array.parts[layout.name]
            ]
            if alike in seen:
                continue
            seen.append(alike)
            parts = {
                part.name.plain: array
                for array in family.arrays
                for part in array.parts[layout.name]
            }
            needed = {name for name, array in parts.items() if not (array.optional or array.tied)}
            known = {*parts, *(one.plain for one in layout.drops)}
            others = {
                name
                for name in plain - known
                if (layout.state_of(name) or ("", ""))[1] not in known
            }
            if needed and needed <= plain and not others:
                found.append((family, layout.name))
    kind = (config or {}).get("model_type")
    named = [one for one in found if kind in one[0].model_types]
    yield from named or found
