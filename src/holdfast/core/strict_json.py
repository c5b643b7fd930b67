"""JSON that every reader understands alike. Headers, index files and sharding notes pass through here and nowhere else.

Python's `json` is generous: it keeps the last of two equal keys, takes `NaN`, `1e999` and lone surrogates, and
recurses as deep as the text does. Here each of these is a refusal that points at its place in the document (`at
$.weight_map["a b"]`).

1. The bytes are decoded as UTF-8, strictly.
2. Brackets outside of strings are counted on the bytes, before anything recurses or is allocated: too deep, or more
   of them than a header, an index or a sharding note of that length could have, and the document is refused.
3. What msgspec reads and writes again to the same bytes, but for spaces, has no double key, no odd number and no odd escape: it is
   read, ten times as fast as by the next step. So are most documents that programs write, ours among them.
4. `json` parses all others. What it would accept and we do not becomes a `Flaw` in the place of the value.
5. Only where a flaw can be in there, the document is walked (without recursion) to find and report the first one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from holdfast.core.limits import Limits
from holdfast.core.value import Value, replace
from holdfast.errors import HeaderError, LimitExceeded

BLOCK_NBYTES = (
    1 << 18
)  # Bytes that the depth count looks at in one go: its masks stay in the cache, whatever the document's size.

CONTAINER_NBYTES = 10
"""Fewest bytes of text for each list or object. The densest that is honest is a sharding note, with 13 for each
(`"w":{"saved_offsets":[0]},`); `[],[],[],…` has 3, and would take 27 times its length in memory."""

FREE_CONTAINERS = 1000  # Lists and objects that a document may have however short it is.
NO_BRACKETS = bytes(
    sorted({*range(256)} - {*b'[]{}"'})
)  # What neither opens nor closes a list, an object or a text.

FREE_BRACKETS = (
    64  # So few brackets can neither nest too deeply nor be too many: they are not looked at.
)
SPACES = b" \t\n\r"  # What may stand between values. Inside of texts it is deleted in both documents that are compared.
INTEGER_DIGITS = 20  # Digits (and sign) of the longest 64-bit integer. Longer ones take quadratic time to parse and fit no tensor.
ANY_DIGIT = bytes.maketrans(b"123456789", b"000000000")

LONG_NUMBER = b"0" * INTEGER_DIGITS  # Digits, by `ANY_DIGIT`, that may be those of a longer one.
SHOWN = 80

PLAIN_STEP = re.compile(
    r"[A-Za-z0-9_./:\-]{1,200}\Z"
)  # Keys that can stand in a pointer as they are; all others are quoted.

Steps = (
    tuple["Steps", str | int] | None
)  # The way to a value, innermost step last, as a linked list.


class Flaw(Value, frozen=True):
    """What stands in a parsed document where a value was that readers disagree about."""

    reason: str


def parse(raw: bytes, limits: Limits, *, file: str | None = None, start: int = 0) -> object:
    """The value of a JSON document: dicts, lists, text, ints, finite floats, bools, None. `file` and `start` (the byte of the file
    where the document begins) go into errors. Raises `HeaderError`, or `LimitExceeded` where it nests deeper than
    `limits.depth`."""
    _check_paid(_count_brackets(raw, limits.depth, file, start=start), len(raw), file, start=start)
    return _parse(raw, file, start)


def parse_values(parts: Mapping[str, bytes], limits: Limits, *, nbytes: int) -> dict[str, object]:
    """Some values out of a document of `nbytes` bytes, as `parse` would give them. Their lists and objects are paid for together,
    by the length of the whole document: it is the whole that its writer pays for."""
    count = sum(_count_brackets(raw, limits.depth, None, start=0) for raw in parts.values())
    _check_paid(count, nbytes, None, start=0)
    return {name: _parse(raw, None, 0) for name, raw in parts.items()}


def required_nbytes(raw: bytes, more: int = 0) -> int:
    """How long a document has to be, so that its lists and objects, and so many more, are not too many for its length."""
    containers = raw.count(b"[") + raw.count(b"{") + more
    return max(len(raw), (containers - FREE_CONTAINERS) * CONTAINER_NBYTES)


def format_pointer(*steps: str | int) -> str:
    """A place in a document, for messages.

    >>> format_pointer("model.w", "shape", 1)
    '$.model.w.shape[1]'
    >>> format_pointer("a b", "dtype")
    '$["a b"].dtype'
    """
    shown = ["$"]
    for step in steps:
        if isinstance(step, int):
            shown.append(f"[{step}]")
        else:
            shown.append(f".{step}" if PLAIN_STEP.match(step) else f"[{quote(step)}]")
    return "".join(shown)


def quote(text: str) -> str:
    """A text from a file, in quotes, escaped and cut so that it can be shown anywhere."""
    return json.dumps(text if len(text) <= SHOWN else text[:SHOWN] + "…")


def describe_json(value: object) -> str:
    """What a parsed value is, in words, with the value where it is short."""
    match value:
        case bool() | None:
            return {True: "true", False: "false", None: "null"}[value]
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {quote(value)}"
        case list():
            return f"a list of {len(value):,}"
        case dict():
            return f"an object of {len(value):,} keys"
        case _:
            return type(value).__name__


def _parse(raw: bytes, file: str | None, start: int) -> object:
    try:
        if LONG_NUMBER not in raw.translate(ANY_DIGIT):
            proven: object = msgspec.json.decode(raw)
            if msgspec.json.encode(proven).translate(None, SPACES) == raw.translate(None, SPACES):
                return proven
    except (ValueError, RecursionError, msgspec.MsgspecError):
        pass
    return _parse_slowly(raw, file, start)


def _parse_slowly(raw: bytes, file: str | None, start: int) -> object:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HeaderError(
            f"not UTF-8: {error.reason}", file=file, offset=start + error.start
        ) from None
    flaws: list[Flaw] = []

    def flaw(reason: str) -> Flaw:
        flaws.append(Flaw(reason))
        return flaws[-1]

    def make_object(pairs: list[tuple[str, object]]) -> object:
        made = dict(pairs)
        return (
            made
            if len(made) == len(pairs)
            else flaw(f"the key {quote(_first_double(pairs))} occurs twice")
        )

    def make_int(digits: str) -> object:
        if len(digits) > INTEGER_DIGITS:
            return flaw(f"an integer of {len(digits):,} digits")
        # The safetensors library reads -0 as a float, Python as an integer.
        return flaw("-0 is not an integer to every reader") if digits == "-0" else int(digits)

    def make_float(digits: str) -> object:
        value = float(digits)
        return value if math.isfinite(value) else flaw("a number that no float can hold")

    def make_constant(word: str) -> object:
        return flaw(f"{word} is not JSON")

    decoder = json.JSONDecoder(
        object_pairs_hook=make_object,
        parse_int=make_int,
        parse_float=make_float,
        parse_constant=make_constant,
    )
    try:
        document = decoder.decode(text)
    except json.JSONDecodeError as error:
        place = start + len(text[: error.pos].encode())
        raise HeaderError(f"not JSON: {error.msg}", file=file, offset=place) from None
    except RecursionError:
        # A caller may have raised `limits.depth` above what the interpreter has left.
        raise LimitExceeded(
            "the JSON document nests too deeply to be parsed", file=file, offset=start
        ) from None
    if flaws or re.search(rb"\\u[dD]", raw):
        _report_flaw(document, file, start)
    return document


def _first_double(pairs: list[tuple[str, object]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return ""


def _check_paid(count: int, nbytes: int, file: str | None, *, start: int) -> None:
    if count > FREE_CONTAINERS + nbytes // CONTAINER_NBYTES:
        raise HeaderError(
            f"{count:,} lists and objects in {nbytes:,} bytes describe no tensors",
            file=file,
            offset=start,
        )


def _count_brackets(raw: bytes, limit: int, file: str | None, *, start: int) -> int:
    """The lists and objects in a text; refuses one whose brackets, outside of strings, nest deeper than `limit`. Exact up to the
    first syntax error, and beyond that the parser does not get. Escaped backslashes and then escaped quotes are taken out first;
    after that every quote opens or closes a string, and nothing else counts. Blocks carry three numbers: the containers and the
    depth so far, and whether the last block ended inside a string."""
    most = raw.count(b"[") + raw.count(b"{")
    if most <= min(limit, FREE_BRACKETS):
        return most
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    plain = plain.translate(None, NO_BRACKETS)
    count, depth, inside = 0, 0, False
    for begin in range(0, len(plain), BLOCK_NBYTES):
        block = np.frombuffer(plain, np.uint8, min(BLOCK_NBYTES, len(plain) - begin), begin)
        in_string = np.logical_xor.accumulate(block == ord('"')) ^ inside
        opening = ((block == ord("{")) | (block == ord("["))) & ~in_string
        closing = ((block == ord("}")) | (block == ord("]"))) & ~in_string
        steps = opening.astype(np.int8) - closing
        levels = np.cumsum(steps, dtype=np.int32)
        if depth + int(levels.max()) > limit:
            message = f"the JSON document nests deeper than Limits(depth={limit})"
            raise LimitExceeded(message, file=file, offset=start, expected=limit)
        count += int(np.count_nonzero(opening))
        depth, inside = depth + int(levels[-1]), bool(in_string[-1])
    return count


def _report_flaw(document: object, file: str | None, start: int) -> None:
    """Raise for the first `Flaw` or lone surrogate in the order of the document; return where there is none."""
    waiting: list[tuple[Steps, object]] = [(None, document)]
    while waiting:
        path, value = waiting.pop()
        reason = None
        match value:
            case Flaw():
                reason = value.reason
            case str() if LONE_SURROGATE.search(value):
                reason = "half of a surrogate pair"
            case list():
                waiting += [((path, i), value[i]) for i in reversed(range(len(value)))]
            case dict():
                reason = (
                    "a key with half of a surrogate pair"
                    if any(map(LONE_SURROGATE.search, value))
                    else None
                )
                waiting += [((path, key), value[key]) for key in reversed(value)]
        if reason is not None:
            raise HeaderError(
                f"at {format_pointer(*_steps(path))}: {reason}", file=file, offset=start
            )


def _steps(path: Steps) -> list[str | int]:
    steps: list[str | int] = []
    while path is not None:
        path, step = path
        steps.append(step)
    return steps[::-1]


LONE_SURROGATE = re.compile("[\ud800-\udfff]")


INVALID_UNICODE = "a name with half of a surrogate pair, which is no Unicode"


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8. Half of a surrogate pair cannot."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def encode_keys(names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Names as the keys of a JSON object: what stands before and behind each, and the texts. Nearly always that is a quote and the
    names themselves; where one is odd, nothing, and each with its quotes and escapes."""
    every = "".join(names)
    if every.isascii() and len(msgspec.json.encode(every)) == len(every) + 2:
        return '"', names
    return "", [msgspec.json.encode(name).decode() for name in names]


@lru_cache(16)
def json_limits(limits: Limits) -> Limits:
    """The limits for the JSON text of a tree of `limits.depth` levels: a level takes up to three brackets."""
    return replace(limits, depth=4 * limits.depth + 16)
