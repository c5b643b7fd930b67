"""Documents of our own: JSON texts that say what they are, of which version, and whether a byte of them changed. One codec for all.

    {"format":"holdfast.seal","version":1, …, "self":"5bb0e7a9"}␠␠␠

A `DocumentType` says what a kind of them is. `write_document` makes the text of a value, `read_document` the value of a text:

1. A text that is longer than its kind may be is refused; whoever reads a file asks `check_length` before.
2. `self` is the last field: the CRC-32 of the whole text, the spaces behind it included, with these eight digits as zeros. It
   stands at a known distance from the end, so it is compared before anything is parsed: damage is not taken for another form.
3. msgspec reads the text as the type of the kind. The proof that it read nothing else is that it writes the same text again:
   there is no double key, odd number or other spelling in it. So nearly every text is read, for nearly all are ours.
4. Any other text is read by `core.strict_json`, which refuses what readers disagree about; its format and version are checked, and
   then msgspec reads it. What does not fit is named, with its place.
5. A field that came with a later version is refused, and so is a version without the checksum that it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic, TypeVar, get_args

import msgspec
from msgspec import field

from holdfast.core.crc import crc32
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.strict_json import describe_json as found_kind
from holdfast.core.strict_json import format_pointer, parse, required_nbytes
from holdfast.core.value import Value
from holdfast.errors import Corrupted, HeaderError, LimitExceeded, Unsupported, error_context

D = TypeVar("D")

UNLIMITED = 1 << 62

TOGETHER = 4096  # Entries whose text is made at a time, of a field that may have a million.

FAILURES = (ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
"""What msgspec raises of a text or a value that is no document of ours."""


class DocumentType(Value, Generic[D], frozen=True, eq=False, kw_only=True):
    name: str
    """In messages: "a seal", "the seal"."""
    file: str = ""
    """Where it stands, unless a reader says otherwise; empty where it stands in no file."""
    decoder: msgspec.json.Decoder[D] | msgspec.msgpack.Decoder[D]
    """Of its type: a struct, with the fields in the order of the text. msgpack is for messages, which no file has."""
    format: str = ""
    versions: tuple[int, ...] = ()
    """Those that are read; none where there is no such field."""
    since: Mapping[str, int] = field(default_factory=dict)
    """Fields that are not in every version, and the first that has each. `self` among them: a document of that version has it."""
    most: int | None = None
    """Bytes of the longest; None: as many as `Limits.index_nbytes`."""
    many: str = ""
    """The field with the most entries, of which the text is made in pieces."""
    indent: int = -1
    """Of the text, as `msgspec.json.format` has it; -1 is without any spaces."""
    canonical: bool = False
    """Whether nothing but the text that `write_document` makes is taken."""
    remedy: str = "get it again"

    @property
    def packed(self) -> bool:
        """Whether it is a message, of msgpack: nobody else writes them, and a text of one value needs no proof."""
        return isinstance(self.decoder, msgspec.msgpack.Decoder)

    @property
    def sealed(self) -> int | None:
        """The first version that has a checksum of its own; None: none has."""
        return self.since.get(SELF)


def message_type(name: str, of: type[D]) -> DocumentType[D]:
    """A kind of messages, from one rank to another. They are as long as what they describe."""
    return DocumentType(
        name=name, decoder=msgspec.msgpack.Decoder(of), most=UNLIMITED, canonical=True
    )


def write_document(kind: DocumentType[D], value: D) -> bytes:
    """The text of a value, with its own checksum where the kind has one. Raises `HeaderError` for what JSON cannot say."""
    try:
        raw = _text(kind, value)
    except FAILURES as error:
        raise HeaderError(
            f"this cannot stand in a {kind.name}: {error}", file=kind.file or None
        ) from None
    return raw if kind.sealed is None else seal(raw, required_nbytes(raw))


def read_document(
    kind: DocumentType[D], raw: bytes, limits: Limits = DEFAULTS, *, file: str | None = None
) -> D:
    """The value of a text; `file` is where it stands. Raises `Corrupted` where it has not its own checksum, `HeaderError`,
    `LimitExceeded`, or `Unsupported` for an unknown version."""
    with error_context(file=file or kind.file or None):
        check_length(kind, len(raw), limits, file=file)
        sealed = kind.sealed is not None and check_seal(raw, f"the {kind.name}", kind.remedy)
        if not sealed and kind.sealed == next(iter(kind.versions), 0):
            raise _unsealed(kind, kind.name)
        value = decode_canonical(kind, raw)
        if value is None:
            value = decode_strictly(kind, raw, limits)
        version: int = getattr(value, "version", 0)
        if not sealed and kind.sealed is not None and version >= kind.sealed:
            raise _unsealed(kind, f"{kind.name} of version {version}")
        return value


def check_length(
    kind: DocumentType[D], nbytes: int, limits: Limits = DEFAULTS, *, file: str | None = None
) -> None:
    most, place = limits.index_nbytes if kind.most is None else kind.most, file or kind.file or None
    if nbytes > most:
        limit = (
            f"longer than Limits(index_nbytes={most})"
            if kind.most is None
            else f"longer than any ({most:,})"
        )
        raise LimitExceeded(
            f"a {kind.name} of {nbytes:,} bytes is {limit}", file=place, expected=most, found=nbytes
        )


def decode_canonical(kind: DocumentType[D], raw: bytes) -> D | None:
    """The value of a text that is the one that Holdfast writes of it; None for any other, be it valid or not."""
    try:
        value = _decode(kind, raw)
        same = kind.packed or _is_text_of(
            kind, value, raw if kind.sealed is None else raw.rstrip(b" ")
        )
    except FAILURES:
        return None
    if not same or (kind.format and getattr(value, "format", "") != kind.format):
        return None
    if not kind.versions:
        return value
    version: int = getattr(value, "version", 0)
    later = (ATTRIBUTES.get(name, name) for name, first in kind.since.items() if version < first)
    early = any(getattr(value, name) is not msgspec.UNSET for name in later)
    return None if early or version not in kind.versions else value


def decode_strictly(kind: DocumentType[D], raw: bytes, limits: Limits) -> D:
    """The value of any text, or what is wrong with it and where."""
    document = None if kind.canonical else parse(raw, limits)
    if kind.versions:
        _check_version(kind, document)
    try:
        value = _decode(kind, raw)
    except FAILURES as error:
        raise HeaderError(
            f"the {kind.name}: {error}"
            if kind.canonical
            else _explanation(kind, document, str(error))
        ) from None
    if kind.canonical:
        raise HeaderError(f"the {kind.name} is not in the form in which it is written")
    return value


def _text(kind: DocumentType[D], value: D) -> bytes:
    if kind.packed:
        return encode_message(value)
    raw = msgspec.json.encode(value)
    return raw if kind.indent < 0 else msgspec.json.format(raw, indent=kind.indent) + b"\n"


ESCAPED = b"\xc1"
"""Begins a message whose texts are escaped. No value of msgpack begins with this byte."""


def encode_message(value: object) -> bytes:
    """Encode a message. A text with half of a surrogate pair, which a pickle may contain as a name, has no UTF-8."""
    try:
        return msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, builtin_types=(bytes, bytearray, memoryview))
        return ESCAPED + msgspec.msgpack.encode(_with_texts(plain, _escape))


def _decode(kind: DocumentType[D], raw: bytes) -> D:
    if not kind.packed or not raw.startswith(ESCAPED):
        return kind.decoder.decode(raw)
    plain = _with_texts(msgspec.msgpack.decode(raw[1:]), _unescape)
    return msgspec.convert(plain, kind.decoder.type)


def _with_texts(value: object, change: Callable[[str], str]) -> object:
    """Return a message with other texts. Messages nest a few levels deep."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_with_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {_with_texts(key, change): _with_texts(item, change) for key, item in value.items()}
    return value


def _escape(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")


def _unescape(text: str) -> str:
    return text.encode("ascii").decode("unicode_escape")


def _is_text_of(kind: DocumentType[D], value: D, raw: bytes) -> bool:
    """Whether a text is what msgspec writes of a value. It is written a few thousand entries at a time."""
    if not kind.many:
        return _text(kind, value) == raw
    entries: Mapping[str, object] = getattr(value, kind.many)
    hollow = msgspec.structs.replace(value, **{kind.many: {}})  # type: ignore[type-var]  # a kind with many entries is a struct
    before, mark, behind = msgspec.json.encode(hollow).partition(b'"%s":{' % kind.many.encode())
    at, items, between = len(before) + len(mark), iter(entries.items()), b""
    same = raw.startswith(before + mark) and raw.endswith(behind)
    while same and (batch := dict(islice(items, TOGETHER))):
        text = between + msgspec.json.encode(batch)[1:-1]
        same, at, between = raw.startswith(text, at), at + len(text), b","
    return same and at + len(behind) == len(raw)


def _check_version(kind: DocumentType[D], document: object) -> None:
    if not isinstance(document, dict):
        raise HeaderError(f"at $: expected an object, found {found_kind(document)}")
    if kind.format and document.get("format") != kind.format:
        raise HeaderError(
            f"at $.format: expected {kind.format!r}, found {found_kind(document.get('format'))}"
        )
    version, known = document.get("version"), kind.versions
    if type(version) is not int:
        raise HeaderError(f"at $.version: expected a number, found {found_kind(version)}")
    if version not in known:
        reads = f"versions {known[0]} to {known[-1]}" if len(known) > 1 else f"version {known[0]}"
        message = f"a {kind.name} of version {version}; this Holdfast reads {reads}; a newer one may read this"
        raise Unsupported(message, expected=known, found=version)
    for name in document:
        if kind.since.get(name, version) > version:
            raise HeaderError(f"at {format_pointer(name)}: a {kind.name} has no such field")


STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
"""A step of a place in a document, as msgspec says it; it does not say keys of an object that may have any."""

UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
MISSING = re.compile(r"Object missing required field `(.*)`")


def _explanation(kind: DocumentType[D], document: object, said: str) -> str:
    """What msgspec says of a document, with the place that it means and what stands there."""
    reason, _, inside = said.partition(" - at `$")
    steps: list[str | int] = []
    value: object = document
    shape: object = kind.decoder.type
    for name, number in STEP.findall(inside.removesuffix("`")):
        step: str | int = name or (_wrong_key(value, shape) if number == "..." else int(number))
        value = value[step]  # type: ignore[index]  # msgspec has gone there
        shape = (
            next((one.type for one in _fields(shape) if one.encode_name == step), object)
            if name
            else _entry(shape)
        )
        steps.append(step)
    if unknown := UNKNOWN.fullmatch(reason):
        return f"at {format_pointer(*steps, unknown[1])}: a {kind.name} has no such field"
    if missing := MISSING.fullmatch(reason):
        return f"at {format_pointer(*steps)}: the field {missing[1]} is missing"
    expected, got, _ = reason.partition(", got ")
    return f"at {format_pointer(*steps)}: {expected[:1].lower()}{expected[1:]}{f', found {found_kind(value)}' if got else ''}"


def _fields(shape: object) -> tuple[msgspec.structs.FieldInfo, ...]:
    return (
        msgspec.structs.fields(shape)
        if isinstance(shape, type) and issubclass(shape, msgspec.Struct)
        else ()
    )


def _entry(shape: object) -> object:
    """What the entries of a list or an object are."""
    return next((one for one in reversed(get_args(shape)) if one is not Ellipsis), object)


def _wrong_key(entries: object, shape: object) -> str:
    """The first key of an object whose value is not what it should be."""
    assert isinstance(entries, dict)  # it has keys
    for key, value in entries.items():
        try:
            msgspec.convert({key: value}, shape)
        except FAILURES:
            return str(key)
    return str(next(iter(entries)))


SELF = "self"

ATTRIBUTES = {SELF: "sealed"}

OPENING = b',"self":"'
BLANK = b"00000000"
CLOSING = b'"}'
SEAL_NBYTES = len(OPENING) + len(BLANK) + len(CLOSING)

HEX = frozenset("0123456789abcdef")


def parse_crc(digits: object) -> int | None:
    """A CRC-32 from its eight digits, or None for anything else."""
    return (
        int(digits, 16)
        if isinstance(digits, str) and len(digits) == len(BLANK) and HEX.issuperset(digits)
        else None
    )


def seal(raw: bytes, nbytes: int = 0) -> bytes:
    """A JSON object with a last field that is its checksum, filled with spaces to a length of `nbytes`."""
    return b"".join(seal_pieces((raw[:-1],), nbytes))


def seal_pieces(pieces: Iterable[bytes], nbytes: int = 0) -> Iterator[bytes]:
    """The pieces of an object, up to its last brace, and behind them its checksum and the spaces."""
    crc, done = 0, 0
    for piece in pieces:
        crc, done = crc32(piece, crc), done + len(piece)
        yield piece
    yield make_seal(crc, done, nbytes)


def make_seal(crc: int, length: int, nbytes: int = 0) -> bytes:
    """How a sealed object of `nbytes` ends, from its last field on, whose text up to there has this CRC-32 and length."""
    end = CLOSING.ljust(nbytes - length - len(OPENING) - len(BLANK))
    return OPENING + b"%08x" % crc32(OPENING + BLANK + end, crc) + end


def check_seal(raw: bytes, what: str, remedy: str = "get it again") -> bool:
    """Whether a document has a checksum of its own. Raises `Corrupted` where it is not that of the document."""
    end = len(raw.rstrip(b" "))
    tail = raw[max(end - SEAL_NBYTES, 0) : end]
    if len(tail) != SEAL_NBYTES or not tail.startswith(OPENING) or not tail.endswith(CLOSING):
        return False
    at = end - len(CLOSING) - len(BLANK)
    digits = raw[at : at + len(BLANK)].decode("latin-1")
    whole = memoryview(raw)
    found = crc32(whole[at + len(BLANK) :], crc32(BLANK, crc32(whole[:at])))
    if digits != f"{found:08x}":
        expected = parse_crc(digits)
        message = f"{what} does not have the checksum that it records of itself ({digits!r}, not {found:08x})"
        raise Corrupted(
            f"{message}: it changed after it was written; {remedy}", expected=expected, found=found
        )
    return True


def _unsealed(kind: DocumentType[D], what: str) -> Corrupted:
    return Corrupted(
        f"a {what} ends with its own checksum, and this one does not: it changed after it was written; {kind.remedy}"
    )
