"""Parses JSON that all programs understand in the same way. All headers and indexes pass here.

Python's `json` is lenient: it keeps the last of two equal keys, accepts `NaN`, `1e999` and lone
surrogates, and recurses as deeply as the text does. `parse` refuses each of these, and its error
has a pointer to the place in the document (`at $.weight_map["a b"]`).

1. Brackets outside of strings are counted on the bytes, before anything recurses or is allocated. A
   document is refused if it nests too deeply, or if it has more containers than a real header or
   index of its length could have.
2. msgspec parses the document and writes it again. If the result has the same bytes, except for
   spaces, the document cannot contain an equal key, an odd number or an odd escape. Most documents
   that programs write end here, 10 times as fast as in the next step.
3. `json` parses all others. Where it would accept a value that other programs understand
   differently, hooks put a `Flaw` in place of the value.
4. If there may be a flaw, the document is searched (without recursion) for the first one.
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

BLOCK_NBYTES = 1 << 18
"""The bytes whose brackets are counted at a time, so that masks of them stay in the cache."""

CONTAINER_NBYTES = 10
"""The least bytes of text for each list or object. In real files, the densest are the notes on
sharding with 13 bytes for each (`"w":{"saved_offsets":[0]},`). A hostile `[],[],[],…` has 3, and
would take 27 times its length in memory."""

FREE_CONTAINERS = 1000
"""The lists and objects that any document may have, however short it is."""

FREE_BRACKETS = 64
"""With at most this many opening brackets, a document can neither nest too deeply nor have too many
containers, so its brackets are not examined."""

NOT_STRUCTURAL = bytes(sorted({*range(256)} - {*b'[]{}"'}))
"""All bytes that do not open or close a list, an object or a string."""

SPACES = b" \t\n\r"
"""The bytes that may stand between values. They are removed from two documents that are compared.
This also removes spaces inside of strings, but from both."""

MAX_INTEGER_LENGTH = 20
"""The digits and the sign of the longest 64-bit integer. Converting a longer one takes quadratic
time, and no tensor needs one."""

DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")

LONG_NUMBER = b"0" * MAX_INTEGER_LENGTH
"""After `DIGITS_TO_ZERO`, a document with an integer that is too long contains these bytes."""

MAX_QUOTED_LENGTH = 80

PLAIN_KEY = re.compile(r"[A-Za-z0-9_./:\-]{1,200}\Z")
"""Keys that appear in a pointer without quotes."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair. A complete pair becomes one character when a document is parsed."""

SURROGATE_ESCAPE = re.compile(rb"\\u[dD]")

INVALID_UNICODE = "a name with half of a surrogate pair, which is not valid Unicode"

KeyPath = tuple["KeyPath", str | int] | None
"""The keys and indices from the root of a document to a value: those of the parent, and the last
one. None is the root. As a linked list, siblings share the path of their parent."""


class Flaw(Value, frozen=True):
    """Takes the place of a value in a document that programs understand in different ways."""

    reason: str


def parse(raw: bytes, limits: Limits, *, file: str | None = None, start: int = 0) -> object:
    """Parse a JSON document.

    Args:
        raw: The document.
        limits: How deeply it may nest.
        file: The name of its file, for errors.
        start: The offset of the document in its file, for errors.

    Returns:
        The value: dicts, lists, texts, integers, finite floats, booleans and None.

    Raises:
        HeaderError: It is not JSON, or programs would understand it in different ways.
        LimitExceeded: It nests more deeply than `limits.depth`.
    """
    container_count = _count_containers(raw, limits.depth, file, start)
    _check_container_count(container_count, len(raw), file, start)
    return _parse(raw, file, start)


def parse_values(
    raw_values: Mapping[str, bytes], limits: Limits, *, nbytes: int
) -> dict[str, object]:
    """Parse some values of a document, as `parse` would parse them in the whole document.

    Args:
        raw_values: The text of each value, by any name.
        limits: How deeply each value may nest.
        nbytes: The size of the whole document, which limits the number of lists and objects in all
            values together.

    Returns:
        The values by their names.

    Raises:
        HeaderError: A value is not JSON, or programs would understand it in different ways, or all
            values together have too many lists and objects.
        LimitExceeded: A value nests more deeply than `limits.depth`.
    """
    container_count = 0
    for raw in raw_values.values():
        container_count += _count_containers(raw, limits.depth, None, 0)
    _check_container_count(container_count, nbytes, None, 0)
    return {name: _parse(raw, None, 0) for name, raw in raw_values.items()}


def required_nbytes(raw: bytes, more_containers: int = 0) -> int:
    """Return how large a document must be so that `parse` accepts its number of containers.

    Writers append spaces to a document up to this size.

    Args:
        raw: The document. Brackets inside of strings are counted as well.
        more_containers: Lists and objects that will be added to it.
    """
    container_count = raw.count(b"[") + raw.count(b"{") + more_containers
    return max(len(raw), (container_count - FREE_CONTAINERS) * CONTAINER_NBYTES)


def format_pointer(*keys: str | int) -> str:
    """Return the place of a value in a document as text, for messages.

    Args:
        keys: The keys and indices from the root to the value.

    >>> format_pointer("model.w", "shape", 1), format_pointer("a b", "dtype")
    ('$.model.w.shape[1]', '$["a b"].dtype')
    """
    texts = ["$"]
    for key in keys:
        if isinstance(key, int):
            texts.append(f"[{key}]")
        elif PLAIN_KEY.match(key):
            texts.append(f".{key}")
        else:
            texts.append(f"[{quote(key)}]")
    return "".join(texts)


def quote(text: str) -> str:
    """Return a text from a file in quotes, escaped and shortened, so that it is safe to show.

    >>> quote('a"b')
    '"a\\\\"b"'
    """
    if len(text) > MAX_QUOTED_LENGTH:
        text = text[:MAX_QUOTED_LENGTH] + "…"
    return json.dumps(text)


def describe_json(value: object) -> str:
    """Return what a parsed value is, for messages. Numbers and short texts are included.

    >>> describe_json([1, 2]), describe_json("F32"), describe_json(None)
    ('a list of 2', 'the text "F32"', 'null')
    """
    match value:
        case bool() | None:
            return json.dumps(value)
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
    """Parse a document that does not nest too deeply.

    msgspec parses it and writes it again. If the result has the same bytes, except for spaces, the
    document has nothing that programs understand in different ways, such as two equal keys. All
    other documents are parsed slowly, with checks.

    Args:
        raw: The document.
        file: The name of its file, for errors. None if it is not known.
        start: The offset of the document in its file, for errors.
    """
    # msgspec would take quadratic time to convert a very long integer.
    if _has_long_number(raw):
        return _parse_slowly(raw, file, start)
    try:
        value: object = msgspec.json.decode(raw)
        written = msgspec.json.encode(value)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        # The slow parser has better error messages.
        return _parse_slowly(raw, file, start)

    is_unambiguous = written.translate(None, SPACES) == raw.translate(None, SPACES)
    if is_unambiguous:
        return value
    return _parse_slowly(raw, file, start)


def _has_long_number(raw: bytes) -> bool:
    """Return whether a document may have an integer that is longer than any 64-bit integer.

    All digits are made zeros, so that a search for a fixed text finds any long row of digits. It
    also finds one inside of a string. That does no harm, because the slow parser reads it correctly.
    """
    return LONG_NUMBER in raw.translate(DIGITS_TO_ZERO)


def _parse_slowly(raw: bytes, file: str | None, start: int) -> object:
    """Parse a document with Python's `json`, and refuse what programs understand differently.

    Hooks of the parser put a `Flaw` in place of each such value. A hook does not know where in the
    document its value is, so the parsed document is searched afterwards for the error message.

    Args:
        raw: The document.
        file: The name of its file, for errors. None if it is not known.
        start: The offset of the document in its file, for errors.

    Raises:
        HeaderError: The document is not JSON, or has a flaw.
        LimitExceeded: It nests more deeply than the parser can recurse.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = start + error.start
        raise HeaderError(f"not UTF-8: {error.reason}", file=file, offset=offset) from None

    hooks = _DecoderHooks()
    decoder = json.JSONDecoder(
        object_pairs_hook=hooks.make_object,
        parse_int=hooks.make_int,
        parse_float=hooks.make_float,
        parse_constant=hooks.make_constant,
    )
    try:
        document = decoder.decode(text)
    except json.JSONDecodeError as error:
        offset = start + len(text[: error.pos].encode())
        raise HeaderError(f"not JSON: {error.msg}", file=file, offset=offset) from None
    except RecursionError:
        # The depth was checked. A caller may have set `Limits(depth=…)` to more levels than
        # Python's parser can recurse.
        raise LimitExceeded(
            "the JSON document nests too deeply to be parsed; pass a lower Limits(depth=…)",
            file=file,
            offset=start,
        ) from None

    # No hook checks texts, which may have half of a surrogate pair. UTF-8 cannot represent one, so
    # it can only come from an escape.
    if hooks.has_flaws or SURROGATE_ESCAPE.search(raw):
        _raise_first_flaw(document, file, start)
    return document


class _DecoderHooks:
    """Hooks for Python's JSON decoder. Each returns a value, or a `Flaw` in its place.

    They do not raise errors, because they do not know the place of the value in the document.
    """

    def __init__(self) -> None:
        self.has_flaws = False

    def _make_flaw(self, reason: str) -> Flaw:
        self.has_flaws = True
        return Flaw(reason)

    def make_object(self, pairs: list[tuple[str, object]]) -> object:
        """Return an object as a dict, or a flaw if a key occurs twice.

        Some programs keep the first value of such a key, and some the last one.
        """
        fields = dict(pairs)
        if len(fields) == len(pairs):
            return fields

        # Find the first key that occurs again, for the message.
        seen_keys: set[str] = set()
        for key, _ in pairs:
            if key in seen_keys:
                break
            seen_keys.add(key)
        return self._make_flaw(f"the key {quote(key)} occurs twice")

    def make_int(self, digits: str) -> object:
        """Return an integer, or a flaw if it is too long or `-0`."""
        if len(digits) > MAX_INTEGER_LENGTH:
            return self._make_flaw(f"an integer of {len(digits):,} digits")
        if digits == "-0":
            # The safetensors library reads it as a float, Python as an integer.
            return self._make_flaw("-0 is not an integer to every reader")
        return int(digits)

    def make_float(self, digits: str) -> object:
        """Return a float, or a flaw if it would be infinite: `1e999`."""
        number = float(digits)
        if not math.isfinite(number):
            return self._make_flaw("a number that is too large for a float")
        return number

    def make_constant(self, word: str) -> object:
        """Return a flaw for `NaN`, `Infinity` or `-Infinity`, which Python's parser accepts."""
        return self._make_flaw(f"{word} is not JSON")


def _check_container_count(container_count: int, nbytes: int, file: str | None, start: int) -> None:
    """Raise an error if a document has so many lists and objects that it must be an attack."""
    if container_count > FREE_CONTAINERS + nbytes // CONTAINER_NBYTES:
        raise HeaderError(
            f"{container_count:,} lists and objects in {nbytes:,} bytes are more than a description of "
            "tensors needs",
            file=file,
            offset=start,
        )


def _count_containers(raw: bytes, max_depth: int, file: str | None, start: int) -> int:
    """Return the number of lists and objects in a document, without parsing it.

    A hostile document could exhaust the stack or the memory of a parser, so this runs before it.
    Brackets inside of strings are not counted, unless there are very few. The count is exact up to
    the first syntax error, where the parser will stop as well.

    Args:
        raw: The document.
        max_depth: How many lists and objects may be nested in each other.
        file: The name of its file, for errors. None if it is not known.
        start: The offset of the document in its file, for errors.

    Raises:
        LimitExceeded: The containers nest more deeply than `max_depth`.
    """
    # So few brackets can do no harm, whether or not they are inside of strings.
    bracket_count = raw.count(b"[") + raw.count(b"{")
    if bracket_count <= min(max_depth, FREE_BRACKETS):
        return bracket_count

    # Remove escaped backslashes and then escaped quotes. Every quote that remains opens or closes a
    # string.
    unescaped = raw
    if b"\\" in raw:
        unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = np.frombuffer(unescaped.translate(None, NOT_STRUCTURAL), np.uint8)

    # The blocks before a block pass three results on to it: the number of containers, the depth at
    # the end of the last block, and whether that block ended inside of a string.
    container_count = 0
    depth = 0
    ends_in_string = False
    for block_start in range(0, len(structure), BLOCK_NBYTES):
        block = structure[block_start : block_start + BLOCK_NBYTES]
        # A byte is inside of a string if the number of quotes up to it is odd.
        is_in_string = np.logical_xor.accumulate(block == ord('"')) ^ ends_in_string
        is_opening = ((block == ord("{")) | (block == ord("["))) & ~is_in_string
        is_closing = ((block == ord("}")) | (block == ord("]"))) & ~is_in_string
        depth_changes = is_opening.astype(np.int8) - is_closing
        relative_depths = np.cumsum(depth_changes, dtype=np.int32)
        if depth + int(relative_depths.max()) > max_depth:
            raise LimitExceeded(
                f"the JSON document nests deeper than Limits(depth={max_depth})",
                file=file,
                offset=start,
                expected=max_depth,
            )
        container_count += int(np.count_nonzero(is_opening))
        depth += int(relative_depths[-1])
        ends_in_string = bool(is_in_string[-1])
    return container_count


def _raise_first_flaw(document: object, file: str | None, start: int) -> None:
    """Raise an error for the first flaw in a parsed document. Return if there is none.

    Flaws are values that programs understand differently, and halves of surrogate pairs. This is a
    depth-first search in the order of the document, without recursion.

    Args:
        document: The parsed document, in which a `Flaw` may stand in place of a value.
        file: The name of its file, for the error. None if it is not known.
        start: The offset of the document in its file, for the error.
    """
    # A stack. Its last item is examined next, so items of a container are added in reverse order.
    pending: list[tuple[KeyPath, object]] = [(None, document)]
    while pending:
        path, value = pending.pop()
        reason = _find_flaw(value)
        if reason is not None:
            pointer = format_pointer(*_list_keys(path))
            raise HeaderError(f"at {pointer}: {reason}", file=file, offset=start)

        if isinstance(value, list):
            for index in reversed(range(len(value))):
                pending.append(((path, index), value[index]))
        elif isinstance(value, dict):
            for key in reversed(value):
                pending.append(((path, key), value[key]))


def _find_flaw(value: object) -> str | None:
    """Return what is wrong with a value itself, or None. Its items are not examined."""
    if isinstance(value, Flaw):
        return value.reason
    if isinstance(value, str) and SURROGATE.search(value):
        return "half of a surrogate pair"
    if isinstance(value, dict) and any(map(SURROGATE.search, value)):
        return "a key with half of a surrogate pair"
    return None


def _list_keys(path: KeyPath) -> list[str | int]:
    """Return the keys of a path, starting at the root."""
    keys: list[str | int] = []
    while path is not None:
        path, key = path
        keys.append(key)
    return keys[::-1]


def is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8. Half of a surrogate pair cannot."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def encode_keys(names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Encode many names as keys of a JSON object, as fast as possible in the usual case.

    Returns:
        The text to put before and after each key, and the keys. Nearly always this is a quotation
        mark and the names themselves. If a name needs an escape, it is an empty text and the keys
        in quotes.
    """
    # All names are encoded as one text. If it became longer by its two quotation marks only, no
    # name needs an escape.
    joined_names = "".join(names)
    encoded_names = msgspec.json.encode(joined_names)
    needs_no_escape = joined_names.isascii() and len(encoded_names) == len(joined_names) + 2
    if needs_no_escape:
        return '"', names
    return "", [msgspec.json.encode(name).decode() for name in names]


@lru_cache(16)
def json_limits(limits: Limits) -> Limits:
    """Return the limits for the JSON text of a tree that nests up to `limits.depth`.

    A level of a tree takes up to three brackets, and the document around it some more.
    """
    return replace(limits, depth=4 * limits.depth + 16)
