"""How a layout holds an array, as text and read: names with numbers in them, and dimensions made of named axes.

    model.layers.{layer}.self_attn.q_proj.weight : (group slot[:query] dim) hidden
    decoder.layers.self_attention.linear_qkv.weight : layer (group slot dim) hidden

Both lines are parts of one array, whose axes are layer, group, slot, dim and hidden. A number in a name, `{layer}`, is a place on
an axis: there is a tensor for each. A dimension is one axis, or several in brackets, the last one fastest. `slot[:query]` is the
first `query` places of an axis, `slot[query]` the one behind them, and `{layer[:dense]}` in a name the first `dense` numbers. A
part is the same all along an axis that it does not have.

Sizes are small expressions: whole numbers and names with + - * and /, which must come out even. Python evaluates none of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product

from holdfast.core.value import Value
from holdfast.errors import BadMap

LONGEST = 300  # Characters of a part, or of an expression.
MOST_AXES = 12
LARGEST = 1 << 48  # Of what an expression may come to, on the way as well.

NAME = r"[a-z][a-z0-9_]*"
TOKEN = re.compile(rf"\s*(?:(\d{{1,12}})|({NAME}(?:\.[A-Za-z0-9_]+)*)|([-+*/]))")
AXIS = re.compile(rf"({NAME})(?:\[([^\[\]:]*)(:?)([^\[\]:]*)\])?")
NUMBER = re.compile(r"\{([^{}]*)\}")
DIGITS = re.compile(r"\d+")

Lookup = Callable[[str], int | None]


def evaluate(text: str, lookup: Lookup) -> int | None:
    """The value of an expression; None where a name in it is not known. Products come before sums.

    >>> evaluate("heads / 2 + 3 * group", {"heads": 8, "group": 2}.get)
    10
    """
    total, term, operator = 0, 0, "+"
    for word in tokens(text):
        if word in ("+", "-", "*", "/"):
            operator = word
            continue
        value = int(word) if word.isdecimal() else lookup(word)
        if value is None:
            return None
        if operator in ("+", "-"):
            total, term = total + term, value if operator == "+" else -value
        elif operator == "*":
            term *= value
        elif not value or term % value:
            raise BadMap(f"{text!r} does not come out even: {term} / {value}", found=text)
        else:
            term //= value
        if max(abs(total), abs(term)) > LARGEST:
            raise BadMap(f"{text!r} is more than any size", found=text)
    return total + term


def tokens(text: str) -> list[str]:
    """The words of an expression: values and operators in turn. Raises `BadMap` for anything else."""
    words, at = list[str](), 0
    while at < len(text.rstrip()):
        found = TOKEN.match(text, at)
        is_operator = found is not None and found.group(3) is not None
        if found is None or is_operator != bool(len(words) % 2) or len(text) > LONGEST:
            break
        words.append(found.group(0).strip())
        at = found.end()
    if at < len(text.rstrip()) or not len(words) % 2:
        message = f"{text[:80]!r} is no size: write numbers and names with + - * / between them"
        raise BadMap(message, found=text)
    return words


class AxisRange(Value):
    """Places of an axis: from `start` to before `stop`, both expressions; no `stop`: all of it."""

    axis: str
    start: str = "0"
    stop: str = ""

    def __post_init__(self) -> None:
        tokens(self.start), tokens(self.stop or self.axis)


class NamePattern(Value):
    """A name with numbers in it. Names are found by what they are without digits."""

    text: str
    plain: str
    """The name with # for every number."""
    numbers: tuple[str, ...]
    """For each of these, the axis that it is a place on, or the digits that stand there always."""
    spans: tuple[AxisRange, ...]
    """The places that the axes among them have."""

    @classmethod
    def read(cls, text: str) -> NamePattern:
        """
        >>> NamePattern.read("layers.{layer}.fc1.weight{expert}").numbers
        ('layer', '1', 'expert')
        """
        spans = tuple(_axis_range(axis, text) for axis in NUMBER.findall(text))
        if "#" in text or re.search(r"\d\{|\}\d|\}\{", text) or not text.strip():
            raise BadMap(f"a name has its numbers apart, and no # in it: {text[:80]!r}", found=text)
        plain = DIGITS.sub("#", NUMBER.sub("#", text))
        numbers = tuple(
            axis or digits for axis, digits in re.findall(rf"\{{({NAME})[^{{}}]*\}}|(\d+)", text)
        )
        return cls(text, plain, numbers, spans)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(span.axis for span in self.spans)

    def places(self, digits: tuple[str, ...]) -> tuple[int, ...] | None:
        """The places that a name with these digits stands for; None where others always stand there, or too many."""
        if any(
            len(found) > 9 or (own.isdecimal() and own != found)
            for own, found in zip(self.numbers, digits, strict=True)
        ):
            return None
        return tuple(
            int(found)
            for own, found in zip(self.numbers, digits, strict=True)
            if not own.isdecimal()
        )

    def name(self, places: Mapping[str, int]) -> str:
        return NUMBER.sub(lambda found: str(places[found.group(1).partition("[")[0]]), self.text)


class LayoutPart(Value):
    """What a tensor, or one for each place, holds of an array."""

    name: NamePattern
    dims: tuple[tuple[AxisRange, ...], ...]
    pattern: str

    @classmethod
    def read(cls, text: str) -> LayoutPart:
        """Read a part. Raises `BadMap` with the text where it is none."""
        name, colon, pattern = text.partition(" : ")
        if len(text) > LONGEST or not colon:
            raise BadMap(
                f"a part is written 'name : axis (axis axis)', not {text[:80]!r}", found=text
            )
        dims: list[tuple[AxisRange, ...]] = []
        for found in re.finditer(r"\(([^()]*)\)|([^\s()]+)|(\S)", pattern):
            inside, single, odd = found.groups()
            if odd is not None:
                raise BadMap(f"a bracket is not closed in {text[:80]!r}", found=text)
            words = (
                re.findall(r"[^\s\[]+(?:\[[^\]]*\])?", inside) if inside is not None else [single]
            )
            dims.append(tuple(_axis_range(word, text) for word in words))
        return cls(NamePattern.read(name.strip()), tuple(dims), " ".join(pattern.split()))

    def __post_init__(self) -> None:
        if len({*self.axes}) < len(self.axes) or len(self.axes) > MOST_AXES:
            raise BadMap(
                f"an axis stands twice in {self.name.text!r}, or there are more than {MOST_AXES}",
                found=self.name.text,
            )

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.name.axes, *(one.axis for dim in self.dims for one in dim))


def _axis_range(word: str, text: str) -> AxisRange:
    found = AXIS.fullmatch(word)
    if found is None:
        raise BadMap(f"{word[:40]!r} is no axis, in {text[:80]!r}", found=text)
    axis, start, colon, stop = found.groups()
    if start is None:
        return AxisRange(axis)
    if not colon:
        return AxisRange(axis, start, f"{start} + 1")
    return AxisRange(axis, start or "0", stop)


def every_place(axes: tuple[str, ...], ranges: Mapping[str, range]) -> list[dict[str, int]]:
    """Each way to choose a place on each of these axes.

    >>> every_place(("layer",), {"layer": range(2)})
    [{'layer': 0}, {'layer': 1}]
    """
    return [
        dict(zip(axes, places, strict=True)) for places in product(*(ranges[axis] for axis in axes))
    ]
