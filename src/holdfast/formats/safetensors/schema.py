"""The header of a safetensors file: parsing its JSON, and checking the numbers in it.

`formats/safetensors/__init__.py` shows where the header lies.

There are two parsers. `parse_exact` accepts every valid header, and reports what is wrong with all
others. `parse_fast` accepts only the form that writers produce, and returns None for everything
else. A test parses the same headers with both: what the fast parser accepts, the exact one must
accept with the same result.

Both check the types of all values. `check_layout` then checks their meaning: dtypes exist, the
bytes of each shape are there, and tensors have no gaps between them and do not overlap.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.strict_json import describe_json, format_pointer, parse, quote
from holdfast.core.value import Value
from holdfast.errors import Corrupted, HeaderError, HoldfastError, LimitExceeded, Truncated

if TYPE_CHECKING:
    from holdfast.formats.recorded import Recorded

METADATA = "__metadata__"

RECORD = "holdfast"
"""The key of Holdfast's record in `__metadata__`, and in the `metadata` of an index."""

RECORD_START = '{"version":'
"""The first characters of every record."""

RECORDED_FIELDS = ("aliases", "views", "dtypes", "tree")
"""The fields of a record that change what a reader sees of a file (`formats/recorded.py`)."""

MANIFEST = "holdfast.json"
"""The manifest of a native directory."""

SHARDING_INFO = "DCP_SHARDING_INFO"
"""The key in `__metadata__` under which torch's ranks note which part of a tensor a file has."""

PREFIX_NBYTES = 8
"""The size of the length in front of the header."""


class HeaderEntry(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    """The entry of one tensor in a header.

    With `gc=False` Python's collector does not look at it. It can be in no cycle, and there can be
    a million entries.
    """

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """The first byte of the tensor, and the byte after its last one, counted from the end of the
    header."""


class Document(msgspec.Struct, frozen=True):
    """A parsed header."""

    entries: dict[str, HeaderEntry]
    """The entries of tensors by name, in the order of the text."""
    metadata: dict[str, str]
    unknown_fields: tuple[str, ...] = ()
    """Fields of entries that the format does not define, each once."""


FIELDS = ("dtype", "shape", "data_offsets")

QUOTES_OF_ENTRY = 10
"""The quotation marks of an entry: around its name, the names of three fields, and its dtype."""

DUMMY_ENTRY = '{"__metadata__":{"dtype":"","shape":[],"data_offsets":[0,0]}'
"""The start of a header in which an entry replaces the metadata."""

METADATA_FIRST = re.compile(r'\{[ \t\r\n]*"__metadata__"[ \t\r\n]*:[ \t\r\n]*')
NEGATIVE_ZERO = re.compile(r"[\[, \t\r\n]-0")
ENTRIES = msgspec.json.Decoder(dict[str, HeaderEntry])


class JsonPairs(list[tuple[str, str]]):
    """The pairs of a JSON object, in the order of the text. Equal keys are both there."""


PAIRS_DECODER = json.JSONDecoder(object_pairs_hook=JsonPairs)


def parse_fast(raw: bytes) -> Document | None:
    """Parse a header in the form that writers produce.

    msgspec is fast, but of two equal keys it keeps the last one, and a file with equal keys would
    have other tensors for other readers. So their absence is proved by counting quotation marks. In
    a text without backslashes each string has two. msgspec requires that every value of the outer
    object is a `HeaderEntry`, so each entry in the text has at least five strings: its name, its
    dtype, and the names of three fields. If a key occurs twice, there are more than five strings
    for each entry of the result. So if there are exactly ten quotation marks for each entry, no key
    occurs twice.

    `__metadata__` maps strings to strings, and usually contains backslashes, because torch puts
    JSON into it. All writers put it first. There it is parsed by itself, and a dummy entry replaces
    it. At another place it is not a `HeaderEntry`, so msgspec refuses it.

    Returns:
        None if the header has another form. It may be valid nevertheless.
    """
    if raw[:1] != b"{" or not raw.rstrip(b" ").endswith(b"}"):
        return None
    metadata: dict[str, str] = {}
    try:
        text = raw.decode("utf-8")
        metadata_match = METADATA_FIRST.match(text)
        if metadata_match is not None:
            pairs, metadata_stop = PAIRS_DECODER.raw_decode(text, metadata_match.end())
            if type(pairs) is not JsonPairs:
                return None
            metadata = dict(pairs)
            has_equal_keys = len(metadata) != len(pairs)
            if has_equal_keys or not all(type(value) is str for value in metadata.values()):
                return None
            # Half of a surrogate pair cannot be encoded. The exact parser reports it.
            "".join((*metadata, *metadata.values())).encode("utf-8")
            text = DUMMY_ENTRY + text[metadata_stop:]
        # -0 is an integer for msgspec, and a float for the safetensors library, which refuses it.
        if "\\" in text or ("-" in text and "-0" in text and NEGATIVE_ZERO.search(text)):
            return None
        entries = ENTRIES.decode(text)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None

    if text.count('"') != QUOTES_OF_ENTRY * len(entries):
        return None
    dummy_entry = entries.pop(METADATA, None)
    # Without metadata in front, an entry with this name is not a tensor.
    if (dummy_entry is None) != (metadata_match is None):
        return None
    return Document(entries, metadata)


def parse_exact(raw: bytes, limits: Limits, *, file: str | None = None) -> Document:
    """Parse any valid header.

    Args:
        raw: The header, with the spaces that fill it up.
        limits: How deeply it may nest.
        file: The name of the file, for errors.

    Raises:
        HeaderError: It is not valid.
        LimitExceeded: It nests too deeply.
    """
    # The specification requires this, although the safetensors library accepts blanks in front.
    if raw[:1] != b"{":
        message = f"a header must begin with {{, not with {quote(raw[:1].decode('latin-1'))}"
        raise HeaderError(message, file=file, offset=PREFIX_NBYTES)
    # Writers fill up the header with spaces to align the data. Nothing else is allowed there.
    text_nbytes = len(raw.rstrip(b" "))
    if raw[text_nbytes - 1 : text_nbytes] != b"}":
        raise HeaderError(
            "only spaces may follow the header's closing }",
            file=file,
            offset=PREFIX_NBYTES + text_nbytes - 1,
        )

    document = parse(raw, limits, file=file, start=PREFIX_NBYTES)
    if not isinstance(document, dict):
        raise _build_type_error("an object", document, file, None)
    metadata: dict[str, str] = {}
    entries: dict[str, HeaderEntry] = {}
    fields = dict.fromkeys(FIELDS)
    for name, value in document.items():
        if name == METADATA:
            metadata = _check_metadata(value, file)
        else:
            entries[name] = _check_entry(name, value, file)
            # The safetensors library ignores fields that it does not know, and other writers add
            # some (nntrainer).
            fields.update(dict.fromkeys(value))
    unknown_fields = tuple(fields)[len(FIELDS) :]
    return Document(entries, metadata, unknown_fields)


def _check_metadata(value: object, file: str | None) -> dict[str, str]:
    """Check that the metadata of a header maps strings to strings, and return it."""
    if not isinstance(value, dict):
        raise _build_type_error("an object", value, file, None, METADATA)
    for key, text in value.items():
        if not isinstance(text, str):
            raise _build_type_error("text", text, file, None, METADATA, key)
    return value


def _check_entry(name: str, value: object, file: str | None) -> HeaderEntry:
    """Check that the entry of a tensor has all fields with values of the right types."""
    if not isinstance(value, dict):
        raise _build_type_error("an object", value, file, name, name)
    for field in FIELDS:
        if field not in value:
            raise _build_entry_error(name, f"the field {field} is missing", file=file)
    dtype = value["dtype"]
    if not isinstance(dtype, str):
        raise _build_type_error("text", dtype, file, name, name, "dtype")
    shape = _check_integers(name, "shape", value["shape"], file)
    offsets = _check_integers(name, "data_offsets", value["data_offsets"], file)
    if len(offsets) != 2:
        raise _build_type_error(
            "two integers", value["data_offsets"], file, name, name, "data_offsets"
        )
    return HeaderEntry(dtype, shape, (offsets[0], offsets[1]))


def _check_integers(name: str, field: str, value: object, file: str | None) -> tuple[int, ...]:
    """Check that a field of an entry is a list of integers, and return them."""
    if not isinstance(value, list):
        raise _build_type_error("a list of integers", value, file, name, name, field)
    for index, number in enumerate(value):
        # `isinstance` would accept booleans, which are no integers in JSON.
        if type(number) is not int:
            raise _build_type_error("an integer", number, file, name, name, field, index)
    return tuple(value)


def _build_type_error(
    expected: str, value: object, file: str | None, tensor: str | None, *keys: str | int
) -> HeaderError:
    """Return the error for a value of the wrong type.

    Args:
        expected: What the value should be.
        value: The value.
        file: The name of the file.
        tensor: The tensor that the value belongs to; None if it belongs to none.
        keys: The keys and indices from the root of the header to the value.
    """
    found = describe_json(value)
    return HeaderError(
        f"at {format_pointer(*keys)}: expected {expected}, found {found}",
        file=file,
        tensor=tensor,
        offset=PREFIX_NBYTES,
        expected=expected,
        found=found,
    )


def _build_entry_error(
    tensor: str, problem: str, *keys: str | int, file: str | None
) -> HeaderError:
    """Return the error for a problem in the entry of a tensor, at these keys of the entry."""
    message = f"at {format_pointer(tensor, *keys)}: {problem}"
    return HeaderError(message, file=file, tensor=tensor, offset=PREFIX_NBYTES)


TensorKind = tuple[str, tuple[int, ...]]
"""A dtype, as its code in a header, and a shape."""

DTYPE_OF_CODE = {dtype.safetensors: dtype for dtype in DTYPES.rows if dtype.safetensors is not None}
"""All dtypes of the format, by their codes."""

ADDRESSABLE = (1 << 63) - 1
"""The most bits of a tensor, and the last offset in a file. numpy and the safetensors library
refuse larger numbers, even for tensors that are empty because another dimension is 0."""


def is_addressable(shape: Sequence[int], bits: int) -> bool:
    """Return whether readers with 64-bit integers can use a shape.

    The product of its dimensions, with 1 in place of 0, must not overflow. Otherwise two readers
    could compute different sizes, and read different bytes.

    Args:
        shape: The shape.
        bits: The bits of an element.

    >>> is_addressable((1 << 62, 4, 0), 8)
    False
    """
    for length in shape:
        bits *= length or 1
        if bits > ADDRESSABLE:
            return False
    return True


class HeaderColumns(Value, frozen=True):
    """The entries of a checked header as columns, in their order."""

    kinds: Sequence[TensorKind]
    """All kinds of tensors, each once."""
    kind_indices: array[int]
    """For each entry its index in `kinds`."""
    starts: array[int]
    """For each entry its first byte in the file."""
    nbytes: array[int]


class HeaderRecord(Value, frozen=True):
    """What Holdfast recorded besides the tensors, in a header or an index (`record.py`)."""

    crcs: Sequence[int] = ()
    """The CRC-32 of each tensor, in the order of the header; empty if not recorded."""
    recorded: Recorded | None = None
    notes: tuple[str, ...] = ()
    metadata_file: str | None = None
    """The file in the same folder with the rest of the metadata."""
    mismatch: Corrupted | None = None
    """How the file differs from its record, for a verification."""
    is_present: bool = False


NO_RECORD = HeaderRecord()


def check_layout(
    entries: Mapping[str, HeaderEntry], data: range, limits: Limits, *, file: str | None = None
) -> HeaderColumns:
    """Check every entry, and that the tensors fill the data exactly, without gaps or overlaps.

    Bytes that belong to no tensor could hide content, and bytes of two tensors could make a small
    file claim a huge checkpoint. Python's integers do not overflow, so all sums are exact.

    The first loop is for files whose tensors lie in the order of the header, as nearly all do. If
    it finds anything else, a second check sorts the entries and reports what is wrong.

    Args:
        entries: The entries.
        data: The offsets of the data in the file.
        limits: The most dimensions of a tensor.
        file: The name of the file, for errors.

    Raises:
        HeaderError: An entry is not valid, or bytes belong to no tensor or to several.
        LimitExceeded: A tensor has too many dimensions.
        Truncated: The file ends before the last tensor does.
    """
    kind_index: dict[TensorKind, int] = {}
    nbytes_of_kind: list[int | None] = []
    kind_indices: list[int] = []
    starts: list[int] = []
    data_start = data.start
    position = 0
    is_in_order = True
    for entry in entries.values():
        kind = (entry.dtype, entry.shape)
        index = kind_index.get(kind)
        if index is None:
            index = kind_index[kind] = len(nbytes_of_kind)
            nbytes_of_kind.append(_compute_nbytes(entry.dtype, entry.shape, limits))
        start, stop = entry.data_offsets
        if start != position or stop - start != nbytes_of_kind[index]:
            is_in_order = False
        position = stop
        kind_indices.append(index)
        starts.append(data_start + start)

    # If the tensors are in order, no offset is larger than the last one.
    if not is_in_order or position > ADDRESSABLE:
        nbytes_by_kind = dict(zip(kind_index, nbytes_of_kind, strict=True))
        position = _check_sorted(entries, nbytes_by_kind, limits, file=file)
    if position > len(data):
        message = f"the header describes {position:,} bytes of tensors, the file has {len(data):,}"
        raise Truncated(message, file=file, expected=position, found=len(data))
    if position < len(data):
        message = f"{len(data) - position:,} bytes follow the last tensor"
        raise HeaderError(message, file=file, expected=position, found=len(data))

    # Every kind has a size now: `_check_sorted` has refused all others.
    nbytes = [nbytes_of_kind[index] or 0 for index in kind_indices]
    return HeaderColumns(
        [*kind_index], array("q", kind_indices), array("q", starts), array("q", nbytes)
    )


def _compute_nbytes(dtype_code: str, shape: tuple[int, ...], limits: Limits) -> int | None:
    """Return the size of tensors of a kind; None if the dtype or the shape is not valid."""
    dtype = DTYPE_OF_CODE.get(dtype_code)
    # The rank is checked before the product: that of a million large dimensions would take hours.
    if dtype is None or len(shape) > limits.rank or min(shape, default=0) < 0:
        return None
    # The size of other shapes is compared with the file, and is too large for it anyway.
    if 0 in shape and not is_addressable(shape, dtype.bits):
        return None
    total_bits = dtype.bits * math.prod(shape)
    return None if total_bits % 8 else total_bits // 8


def _check_sorted(
    entries: Mapping[str, HeaderEntry],
    nbytes_by_kind: Mapping[TensorKind, int | None],
    limits: Limits,
    *,
    file: str | None,
) -> int:
    """Check entries in the order of their offsets, and return the offset after the last tensor.

    Args:
        entries: The entries.
        nbytes_by_kind: The size of each kind of tensor; None for one that is not valid.
        limits: The most dimensions of a tensor.
        file: The name of the file, for errors.
    """
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        nbytes = nbytes_by_kind[entry.dtype, entry.shape]
        if start < 0 or stop - start != nbytes or stop > ADDRESSABLE:
            raise _find_entry_error(name, entry, limits, file=file)

    position = 0
    previous_name = ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != position:
            if start < position:
                problem = f"overlaps tensor {quote(previous_name)}, which ends at {position:,}"
            else:
                problem = f"leaves a hole after byte {position:,} of the data"
            raise HeaderError(
                f"at {format_pointer(name, 'data_offsets', 0)}: {start:,} {problem}",
                file=file,
                tensor=name,
                offset=PREFIX_NBYTES,
                expected=position,
                found=start,
            )
        position = stop
        previous_name = name
    return position


def _find_entry_error(
    name: str, entry: HeaderEntry, limits: Limits, *, file: str | None
) -> HoldfastError:
    """Return the error for the first problem of an entry that is not valid."""
    start, stop = entry.data_offsets
    shape = list(entry.shape)
    dtype = DTYPE_OF_CODE.get(entry.dtype)
    if dtype is None:
        problem = f"there is no dtype {quote(entry.dtype)}"
        return _build_entry_error(name, problem, "dtype", file=file)
    if len(shape) > limits.rank:
        return LimitExceeded(
            f"at {format_pointer(name, 'shape')}: {len(shape):,} dimensions are more than "
            f"Limits(rank={limits.rank})",
            file=file,
            tensor=name,
            offset=PREFIX_NBYTES,
            expected=limits.rank,
            found=len(shape),
        )
    for axis, length in enumerate(shape):
        if not 0 <= length <= ADDRESSABLE:
            problem = f"{_format_integer(length)} is not a valid length"
            return _build_entry_error(name, problem, "shape", axis, file=file)
    for index, offset in enumerate((start, stop)):
        if not 0 <= offset <= ADDRESSABLE:
            problem = f"{_format_integer(offset)} is not a valid offset"
            return _build_entry_error(name, problem, "data_offsets", index, file=file)
    if stop < start:
        problem = f"the end {stop:,} lies before the start {start:,}"
        return _build_entry_error(name, problem, "data_offsets", 1, file=file)
    if not is_addressable(shape, dtype.bits):
        problem = f"{shape} of {entry.dtype} is more than any file can hold"
        return _build_entry_error(name, problem, "shape", file=file)

    total_bits = dtype.bits * math.prod(shape)
    if total_bits % 8:
        problem = f"{total_bits:,} bits of {entry.dtype} do not fill whole bytes"
        return _build_entry_error(name, problem, "shape", file=file)
    problem = f"{stop - start:,} bytes, but {shape} of {entry.dtype} takes {total_bits // 8:,}"
    return _build_entry_error(name, problem, "data_offsets", file=file)


def _format_integer(number: int) -> str:
    """Return an integer as text. A file can have numbers of thousands of digits."""
    if abs(number) < 1 << 70:
        return f"{number:,}"
    return f"a number of {number.bit_length():,} bits"
