"""Holdfast's own documents: JSON texts with a format, a version and a checksum of themselves.

    {"format":"holdfast.seal","version":1, …, "self":"5bb0e7a9"}␠␠␠

A `DocumentType` describes one type of document, such as a manifest or a seal. `write_document`
returns the text of a value, and `read_document` returns the value of a text:

1. A text that is longer than its type allows is refused. Callers that read a file call
   `check_length` before they read it.
2. `self` is the last field. It is the CRC-32 of the whole text, including the spaces behind it, with
   zeros in the place of these eight digits. Its distance from the end is known, so it is compared
   before anything is parsed: damage is reported as damage, and not as an unknown field.
3. msgspec decodes the text, and the value is encoded again (`decode_canonical`). If that is the same
   text, it has no double keys, unusual numbers or other things that JSON parsers disagree about.
   Nearly every document is read this way, because Holdfast wrote it.
4. Any other text goes through `core.strict_json`, which refuses what parsers disagree about. Then its
   format and version are checked, and msgspec decodes it (`decode_strictly`). A message names the
   place in the document where something is wrong.
5. A field that only later versions have is refused. So is a document without a checksum, if its
   version has one.

Messages between ranks are documents as well. They are in msgpack and have no checksum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import field

from holdfast.core.crc import crc32
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.strict_json import describe_json, format_pointer, parse, required_nbytes
from holdfast.core.value import Value
from holdfast.errors import Corrupted, HeaderError, LimitExceeded, Unsupported, error_context

D = TypeVar("D")

UNLIMITED = 1 << 62

BATCH_LENGTH = 4096
"""How many entries of a large field are encoded at a time. A manifest may have a million of them."""

FAILURES = (ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
"""What msgspec raises for a text or a value that does not fit the type of a document."""


class DocumentType(Value, Generic[D], frozen=True, eq=False, kw_only=True):
    """Describes a type of document: its fields, its versions, and the limits for reading it."""

    name: str
    """What messages call it, without an article: "seal"."""
    file: str = ""
    """The file that has it, unless the reader passes another one. Empty if it is in no file."""
    decoder: msgspec.json.Decoder[D] | msgspec.msgpack.Decoder[D]
    """Decodes its struct, whose fields are in the order of the text. msgpack is for messages."""
    format: str = ""
    """The content of the field `format`. Empty if there is no such field."""
    versions: tuple[int, ...] = ()
    """The versions that can be read. Empty if there is no field `version`."""
    field_versions: Mapping[str, int] = field(default_factory=dict)
    """Fields that early versions do not have, with the first version that has them."""
    max_nbytes: int | None = None
    """The length of the longest text. None stands for `Limits.index_nbytes`."""
    largest_field: str = ""
    """The field that may have a million entries. It is encoded in batches to save memory."""
    indent: int = -1
    """The indentation, as for `msgspec.json.format`. -1 is a text without any spaces."""
    is_canonical: bool = False
    """Whether only the very text that `write_document` returns is accepted."""
    remedy: str = "download or copy it again"
    """What to do about a damaged document, for messages."""

    @property
    def is_message(self) -> bool:
        """Whether this is a message in msgpack. Only Holdfast writes and reads messages."""
        return isinstance(self.decoder, msgspec.msgpack.Decoder)

    @property
    def first_sealed_version(self) -> int | None:
        """The first version with a checksum of itself, or None if no version has one."""
        return self.field_versions.get(SELF)


def message_type(name: str, content_type: type[D]) -> DocumentType[D]:
    """Return a type of messages between ranks. A message may be as long as its content needs."""
    return DocumentType(
        name=name,
        decoder=msgspec.msgpack.Decoder(content_type),
        max_nbytes=UNLIMITED,
        is_canonical=True,
    )


def write_document(document_type: DocumentType[D], value: D) -> bytes:
    """Return the text of a value, with its checksum if its type has one.

    Raises:
        HeaderError: The value cannot be written as JSON.
    """
    try:
        raw = _encode(document_type, value)
    except FAILURES as error:
        message = f"cannot write the {document_type.name}: {error}"
        raise HeaderError(message, file=document_type.file or None) from None
    if document_type.first_sealed_version is None:
        return raw
    return seal(raw, required_nbytes(raw))


def read_document(
    document_type: DocumentType[D],
    raw: bytes,
    limits: Limits = DEFAULTS,
    *,
    file: str | None = None,
) -> D:
    """Return the value of a document: a JSON text that may have a checksum of itself at its end.

    Args:
        document_type: What the text should be.
        raw: The text, in UTF-8.
        limits: Limits for its length and depth.
        file: The file that it was read from, for messages. By default the one that documents of
            this type are stored in.

    Raises:
        Corrupted: The checksum does not match, or is missing.
        HeaderError: The text is not a document of this type.
        LimitExceeded: The text is too long or nested too deep.
        Unsupported: The version is not known.
    """
    first_sealed_version = document_type.first_sealed_version
    with error_context(file=file or document_type.file or None):
        check_length(document_type, len(raw), limits, file=file)
        # The checksum is compared before anything is parsed, so that damage is reported as damage.
        is_sealed = False
        if first_sealed_version is not None:
            is_sealed = check_seal(raw, f"the {document_type.name}", document_type.remedy)
            if not is_sealed and first_sealed_version == document_type.versions[0]:
                # All versions of this type have a checksum, so the version need not be known.
                raise _make_unsealed_error(document_type, document_type.name)

        # Nearly every document is the text that Holdfast writes, which is decoded fast.
        value = decode_canonical(document_type, raw)
        if value is None:
            value = decode_strictly(document_type, raw, limits)

        # Early versions of some types have no checksum.
        version: int = getattr(value, "version", 0)
        must_be_sealed = first_sealed_version is not None and version >= first_sealed_version
        if must_be_sealed and not is_sealed:
            raise _make_unsealed_error(document_type, f"{document_type.name} of version {version}")
        return value


def _make_unsealed_error(document_type: DocumentType[D], description: str) -> Corrupted:
    """Return the error for a document that lacks its checksum. The writer always adds it."""
    return Corrupted(
        f"this {description} lacks the checksum of itself: it changed after it was written; "
        f"{document_type.remedy}"
    )


def check_length(
    document_type: DocumentType[D],
    nbytes: int,
    limits: Limits = DEFAULTS,
    *,
    file: str | None = None,
) -> None:
    """Raise `LimitExceeded` if a text of this length is too long for its type.

    Args:
        document_type: What the text should be.
        nbytes: The length of the text.
        limits: They have the limit for types without one of their own.
        file: The file of the text, for messages. By default that of the type.
    """
    max_nbytes = document_type.max_nbytes
    if max_nbytes is None:
        max_nbytes = limits.index_nbytes
        reason = f"longer than Limits(index_nbytes={max_nbytes})"
    else:
        reason = f"longer than the maximum of {max_nbytes:,}"
    if nbytes > max_nbytes:
        raise LimitExceeded(
            f"a {document_type.name} of {nbytes:,} bytes is {reason}",
            file=file or document_type.file or None,
            expected=max_nbytes,
            found=nbytes,
        )


def decode_canonical(document_type: DocumentType[D], raw: bytes) -> D | None:
    """Return the value of a text if it is the very text that Holdfast writes for that value.

    Any other text returns None, whether it is valid or not. `decode_strictly` reads it.
    """
    # Spaces follow a document that has a checksum, so that it can have a given length.
    text = raw
    if document_type.first_sealed_version is not None:
        text = raw.rstrip(b" ")
    try:
        value = _decode(document_type, raw)
        # If msgspec writes the same text again, it has no double keys or unusual numbers. Messages
        # are not compared, because only Holdfast writes them.
        if not document_type.is_message and not _encodes_to(document_type, value, text):
            return None
    except FAILURES:
        return None

    if document_type.format and getattr(value, "format", "") != document_type.format:
        return None
    if not document_type.versions:
        return value
    version: int = getattr(value, "version", 0)
    if version not in document_type.versions:
        return None
    # A document of an early version cannot have a field that only later versions have.
    for field_name, first_version in document_type.field_versions.items():
        field_value = getattr(value, ATTRIBUTES.get(field_name, field_name))
        if version < first_version and field_value is not msgspec.UNSET:
            return None
    return value


def decode_strictly(document_type: DocumentType[D], raw: bytes, limits: Limits) -> D:
    """Return the value of a text, or raise an error with the place where something is wrong.

    This is slower than `decode_canonical`, which reads nearly all documents and returned None for
    this text.
    """
    # The document as dicts and lists, in which the place of an error is searched. Only Holdfast
    # writes a document that must be canonical, so the place of an error would help nobody.
    document: object = None
    if not document_type.is_canonical:
        document = parse(raw, limits)
    if document_type.versions:
        _check_version(document_type, document)
    try:
        value = _decode(document_type, raw)
    except FAILURES as error:
        message = f"the {document_type.name}: {error}"
        if not document_type.is_canonical:
            message = _explain_failure(document_type, document, str(error))
        raise HeaderError(message) from None
    if document_type.is_canonical:
        # The text is valid, but `decode_canonical` found that Holdfast would write another one.
        raise HeaderError(f"the {document_type.name} differs from what Holdfast writes")
    return value


def _encode(document_type: DocumentType[D], value: D) -> bytes:
    """Return the text of a value, without a checksum."""
    if document_type.is_message:
        return encode_message(value)
    raw = msgspec.json.encode(value)
    if document_type.indent >= 0:
        raw = msgspec.json.format(raw, indent=document_type.indent) + b"\n"
    return raw


def _decode(document_type: DocumentType[D], raw: bytes) -> D:
    """Decode a text with msgspec, which raises one of `FAILURES` if it does not fit."""
    if not document_type.is_message or not raw.startswith(ESCAPED):
        return document_type.decoder.decode(raw)
    content = _replace_texts(msgspec.msgpack.decode(raw[1:]), _unescape)
    return msgspec.convert(content, document_type.decoder.type)


ESCAPED = b"\xc1"
"""The first byte of a message whose texts are escaped. No msgpack value starts with this byte."""


def encode_message(value: object) -> bytes:
    """Encode a message in msgpack.

    A pickle may have a name with half of a surrogate pair. UTF-8 cannot represent it, so a message
    with such a name has all of its texts escaped.
    """
    try:
        return msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        content = msgspec.to_builtins(value, builtin_types=(bytes, bytearray, memoryview))
        return ESCAPED + msgspec.msgpack.encode(_replace_texts(content, _escape))


def _replace_texts(value: object, change: Callable[[str], str]) -> object:
    """Return a copy of a message in which a function has changed every text, also texts as keys.

    This recurses, because only Holdfast writes messages and they are not nested deep.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_replace_texts(item, change) for item in value]
    if isinstance(value, dict):
        keys = [_replace_texts(key, change) for key in value]
        items = [_replace_texts(item, change) for item in value.values()]
        return dict(zip(keys, items, strict=True))
    return value


def _escape(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")


def _unescape(text: str) -> str:
    return text.encode("ascii").decode("unicode_escape")


def _encodes_to(document_type: DocumentType[D], value: D, text: bytes) -> bool:
    """Return whether a text is what msgspec writes for a value.

    A field with very many entries is encoded and compared in batches, so that there is never a
    second copy of the whole text.

    Args:
        document_type: The type of the document.
        value: The value that the text was decoded to.
        text: The text, without spaces at its end.
    """
    field_name = document_type.largest_field
    if not field_name:
        return _encode(document_type, value) == text

    # Encode the value without the entries, and split the result where the entries belong.
    entries: Mapping[str, object] = getattr(value, field_name)
    value_without_entries = msgspec.structs.replace(value, **{field_name: {}})  # type: ignore[type-var]  # a type with such a field is a struct
    text_without_entries = msgspec.json.encode(value_without_entries)
    prefix, opening, suffix = text_without_entries.partition(b'"%s":{' % field_name.encode())
    if not text.startswith(prefix + opening) or not text.endswith(suffix):
        return False

    offset = len(prefix) + len(opening)
    separator = b""
    remaining_entries = iter(entries.items())
    while batch := dict(islice(remaining_entries, BATCH_LENGTH)):
        # The braces around the batch are not in the text, where the next batch follows.
        batch_text = separator + msgspec.json.encode(batch)[1:-1]
        if not text.startswith(batch_text, offset):
            return False
        offset += len(batch_text)
        separator = b","
    # The entries and the suffix must be all of the text, without anything between them.
    return offset + len(suffix) == len(text)


def _check_version(document_type: DocumentType[D], document: object) -> None:
    """Check the format and the version of a parsed document, and that its version has its fields.

    Raises:
        HeaderError: The format is another one, there is no version, or a field belongs to a later
            version.
        Unsupported: The version cannot be read.
    """
    name = document_type.name
    if not isinstance(document, dict):
        raise HeaderError(f"at $: expected an object, found {describe_json(document)}")
    format = document.get("format")
    if document_type.format and format != document_type.format:
        raise HeaderError(
            f"at $.format: expected {document_type.format!r}, found {describe_json(format)}"
        )

    version = document.get("version")
    if type(version) is not int:
        raise HeaderError(f"at $.version: expected a number, found {describe_json(version)}")
    versions = document_type.versions
    if version not in versions:
        readable_versions = f"version {versions[0]}"
        if len(versions) > 1:
            readable_versions = f"versions {versions[0]} to {versions[-1]}"
        raise Unsupported(
            f"a {name} of version {version}; this Holdfast reads {readable_versions}; a newer one "
            "may read this",
            expected=versions,
            found=version,
        )

    for field_name in document:
        # Fields that are not listed exist in every version.
        first_version = document_type.field_versions.get(field_name, version)
        if first_version > version:
            raise HeaderError(f"at {format_pointer(field_name)}: a {name} has no such field")


PATH_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
"""A step of a path in messages of msgspec: `.name`, `[3]`, or `[...]` for a key of a dict."""

UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
MISSING_FIELD = re.compile(r"Object missing required field `(.*)`")


def _explain_failure(document_type: DocumentType[D], document: object, failure: str) -> str:
    """Return the message of msgspec with the place in the document, and with the value there.

    Args:
        document_type: What the document should be.
        document: The parsed document.
        failure: The message, such as "Expected `str`, got `int` - at `$.files[0].name`".
    """
    # The messages of msgspec have four forms: an unknown field, a missing field, a value of the
    # wrong type with "got", and other texts. A message without a path is about the document itself.
    reason, _, path = failure.partition(" - at `$")
    place = _resolve_path(document_type, document, path.removesuffix("`"))
    unknown_field = UNKNOWN_FIELD.fullmatch(reason)
    if unknown_field:
        pointer = format_pointer(*place.steps, unknown_field[1])
        return f"at {pointer}: a {document_type.name} has no such field"

    pointer = format_pointer(*place.steps)
    missing_field = MISSING_FIELD.fullmatch(reason)
    if missing_field:
        return f"at {pointer}: the field {missing_field[1]} is missing"
    # msgspec calls only the type that it got. The message describes the value.
    expectation, got_separator, _ = reason.partition(", got ")
    message = f"at {pointer}: {expectation[:1].lower()}{expectation[1:]}"
    if got_separator:
        message += f", found {describe_json(place.value)}"
    return message


class _Place(NamedTuple):
    """A place in a document."""

    steps: list[str | int]
    """The keys and indices that lead there."""
    value: object


def _resolve_path(document_type: DocumentType[D], document: object, path: str) -> _Place:
    """Return the place in a document that a path of msgspec means, such as `.files[0].name`.

    Args:
        document_type: What the document should be. Its types help to find a key that msgspec left
            out of the path.
        document: The parsed document.
        path: The path, without the `$` for the whole document.
    """
    steps: list[str | int] = []
    value = document
    value_type: object = document_type.decoder.type
    for field_name, index in PATH_STEP.findall(path):
        step: str | int
        if field_name:
            step = field_name
            value_type = _find_field_type(value_type, field_name)
        elif index == "...":
            # msgspec writes this for any key of a dict. The right key is that of a wrong value.
            step = _find_wrong_key(value, value_type)
            value_type = _find_item_type(value_type)
        else:
            step = int(index)
            value_type = _find_item_type(value_type)
        steps.append(step)
        value = value[step]  # type: ignore[index]  # msgspec has gone this way
    return _Place(steps, value)


def _find_field_type(struct_type: object, field_name: str) -> object:
    """Return the type of a field of a struct. `object` if it is not known."""
    if isinstance(struct_type, type) and issubclass(struct_type, msgspec.Struct):
        for struct_field in msgspec.structs.fields(struct_type):
            if struct_field.encode_name == field_name:
                return struct_field.type
    return object


def _find_item_type(container_type: object) -> object:
    """Return the type of the items of a list, a tuple or a dict. `object` if it is not known."""
    arguments = [argument for argument in get_args(container_type) if argument is not Ellipsis]
    return arguments[-1] if arguments else object


def _find_wrong_key(entries: object, dict_type: object) -> str:
    """Return the first key of a dict whose value does not have the right type."""
    assert isinstance(entries, dict)  # msgspec has found a value in it
    for key, value in entries.items():
        try:
            msgspec.convert({key: value}, dict_type)
        except FAILURES:
            return str(key)
    return str(next(iter(entries)))


SELF = "self"
"""The field with the checksum of a document."""

ATTRIBUTES = {SELF: "sealed"}
"""Fields whose attributes have another name in a struct."""

SEAL_OPENING = b',"self":"'
"""The start of the last field, up to the digits of its checksum."""

BLANK_DIGITS = b"00000000"
"""Stands in the place of the digits while the checksum is computed."""

SEAL_CLOSING = b'"}'
"""The end of the last field, and the brace that closes the document."""

SEAL_NBYTES = len(SEAL_OPENING) + len(BLANK_DIGITS) + len(SEAL_CLOSING)
"""The length of the last field, from its comma to the brace that closes the document."""

HEX = frozenset("0123456789abcdef")


def parse_crc(digits: object) -> int | None:
    """Return the CRC-32 that eight hexadecimal digits stand for. None for anything else."""
    if not isinstance(digits, str) or len(digits) != len(BLANK_DIGITS):
        return None
    # `int` would accept more than hexadecimal digits, such as underscores.
    if not HEX.issuperset(digits):
        return None
    return int(digits, 16)


def seal(raw: bytes, nbytes: int = 0) -> bytes:
    """Return a JSON object with its checksum as a last field, and spaces behind it.

    Args:
        raw: The object, without spaces at its end.
        nbytes: The length that is reached with spaces, if the object is not longer by itself.
    """
    return b"".join(seal_pieces((raw[:-1],), nbytes))


def seal_pieces(pieces: Iterable[bytes], nbytes: int = 0) -> Iterator[bytes]:
    """Yield the pieces of a JSON object without its last brace, and then its checksum and the brace.

    This does the same as `seal`, for an object that is too large to be in memory twice.

    Args:
        pieces: The text of the object in order, without its last brace.
        nbytes: The length that is reached with spaces, if the object is not longer by itself.
    """
    crc = 0
    length = 0
    for piece in pieces:
        crc = crc32(piece, crc)
        length += len(piece)
        yield piece
    yield make_seal(crc, length, nbytes)


def make_seal(crc: int, length: int, nbytes: int = 0) -> bytes:
    """Return the end of a sealed document: its checksum, the last brace, and spaces.

    Args:
        crc: The CRC-32 of the document up to its last brace.
        length: The length of the document up to its last brace.
        nbytes: The length of the whole document, if it is not longer by itself.
    """
    closing_nbytes = nbytes - length - len(SEAL_OPENING) - len(BLANK_DIGITS)
    closing = SEAL_CLOSING.ljust(closing_nbytes)
    # The checksum covers the whole document, with zeros in the place of its own digits.
    document_crc = crc32(SEAL_OPENING + BLANK_DIGITS + closing, crc)
    return SEAL_OPENING + b"%08x" % document_crc + closing


def check_seal(raw: bytes, subject: str, remedy: str = "download or copy it again") -> bool:
    """Compare the seal of a document with its bytes.

    The seal is the last field, `"self":"5bb0e7a9"`. It has the CRC-32 of the whole document, in
    which zeros stand in the place of these digits.

    Args:
        raw: The document.
        subject: What the document is, for messages: "the manifest".
        remedy: What to do about a damaged document, for messages.

    Returns:
        True if the document has a seal that matches, False if it has none.

    Raises:
        Corrupted: The document has a seal that does not match.
    """
    # A writer may append spaces so that the document has a given length. The seal is before them.
    seal_stop = len(raw.rstrip(b" "))
    last_field = raw[max(seal_stop - SEAL_NBYTES, 0) : seal_stop]
    if len(last_field) != SEAL_NBYTES:
        return False
    if not last_field.startswith(SEAL_OPENING) or not last_field.endswith(SEAL_CLOSING):
        return False

    digits_stop = seal_stop - len(SEAL_CLOSING)
    digits_start = digits_stop - len(BLANK_DIGITS)
    digits = raw[digits_start:digits_stop].decode("latin-1")
    # A memoryview slices a large document without a copy.
    memory = memoryview(raw)
    crc = crc32(memory[:digits_start])
    crc = crc32(BLANK_DIGITS, crc)
    crc = crc32(memory[digits_stop:], crc)
    if digits != f"{crc:08x}":
        raise Corrupted(
            f"{subject} has the checksum {crc:08x} and records {digits!r}: it changed after it was "
            f"written; {remedy}",
            expected=parse_crc(digits),
            found=crc,
        )
    return True
