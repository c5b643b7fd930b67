"""The header of a safetensors file: from bytes to entries, as strict as the strictest reader, as fast as the fastest.

    byte 0          8                                    8 + N                       end
         ├──────────┼────────────────────────────────────┼───────────────────────────┤
         │ N, u64 LE│ {"name":{"dtype":…,"shape":…,      │ data: the tensors without │
         │          │  "data_offsets":[begin,end]},…}␠␠  │ holes, begin and end      │
         │          │                                    │ counted from here         │

There are two parsers. `parse_exact` is the authority: it accepts or it says what is wrong, and where. `parse_fast`
knows only the form that writers produce, reads it with msgspec, and returns None for everything else, so it never
refuses anything. A test feeds both with the same headers; whatever the fast one accepts, the exact one must accept
with the same result.

Neither looks at the meaning of the numbers; `check_layout` does: dtypes that exist, shapes whose bytes are there, no hole and no
overlap.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import msgspec

from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.strict_json import describe_json, format_pointer, parse, quote
from holdfast.core.value import Value
from holdfast.errors import Corrupted, HeaderError, LimitExceeded, Truncated

if TYPE_CHECKING:
    from holdfast.formats.recorded import Recorded

METADATA = "__metadata__"

RECORD = "holdfast"
"""The key of Holdfast's record in `__metadata__`, and in the `metadata` of an index."""

RECORD_START = '{"version":'
"""How every record begins."""

RECORDED_FIELDS = ("aliases", "views", "dtypes", "tree")
"""The fields of a record that change what a file shows (`formats/recorded.py`)."""

MANIFEST = "holdfast.json"
"""The manifest of a native directory."""

SHARDING_INFO = "DCP_SHARDING_INFO"
"""The key in `__metadata__` under which torch's ranks note which piece of a tensor a file has."""

PREFIX_NBYTES = 8
"""The length in front of the header; byte offsets in errors count from the start of the file."""


class HeaderEntry(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    """A header's entry of one tensor. `gc=False`: it can hold no cycle, and there may be a million of them."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Document(msgspec.Struct, frozen=True):
    """A parsed header: entries in the order of the text, and the text that the file carries about itself."""

    entries: dict[str, HeaderEntry]
    metadata: dict[str, str]
    unknown_fields: tuple[str, ...] = ()
    """Fields of entries that the format does not define, each once."""


FIELDS = ("dtype", "shape", "data_offsets")
QUOTES = 10
"""Quotes of one entry: around its name, the names of its fields, and its dtype."""
STAND_IN = '{"__metadata__":{"dtype":"","shape":[],"data_offsets":[0,0]}'
METADATA_FIRST = re.compile(r'\{[ \t\r\n]*"__metadata__"[ \t\r\n]*:[ \t\r\n]*')
NEGATIVE_ZERO = re.compile(r"[\[, \t\r\n]-0")
ENTRIES = msgspec.json.Decoder(dict[str, HeaderEntry])


def parse_fast(raw: bytes) -> Document | None:
    """Parse a header of the form that writers produce; None for any other, be it valid or not.

    msgspec keeps the last of two equal keys, so their absence is proved by counting. Let the text have no backslash.
    Then each string has two quotes, and there are no other quotes. msgspec took every value of the outer object for a
    `HeaderEntry`, so each outer pair *in the text* has at least five strings: its name, the names of the three fields, and the
    dtype. An outer key that occurs twice, or a field that does, makes more strings than five for each entry of the dict. As
    many quotes as ten for each entry therefore mean no double key.

    `__metadata__` is text to text, usually with backslashes (torch puts JSON in there). Where it comes first, as
    every writer puts it, it is parsed by itself and a dummy entry takes its place; elsewhere it is no `HeaderEntry`, and
    msgspec fails.
    """
    if raw[:1] != b"{" or not raw.rstrip(b" ").endswith(b"}"):
        return None
    metadata: dict[str, str] = {}
    try:
        text = raw.decode("utf-8")
        first = METADATA_FIRST.match(text)
        if first is not None:
            pairs, end = FIRST_OBJECT.raw_decode(text, first.end())
            if type(pairs) is not Pairs:
                return None
            metadata = dict(pairs)
            if len(metadata) != len(pairs) or not all(type(v) is str for v in metadata.values()):
                return None
            # Half a surrogate pair is the exact parser's business.
            "".join((*metadata, *metadata.values())).encode("utf-8")
            text = STAND_IN + text[end:]
        # -0 is an integer to msgspec and a float to the safetensors library.
        if "\\" in text or ("-" in text and "-0" in text and NEGATIVE_ZERO.search(text)):
            return None
        entries = ENTRIES.decode(text)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None
    if text.count('"') != QUOTES * len(entries):
        return None
    if (entries.pop(METADATA, None) is None) != (first is None):
        return None
    return Document(entries, metadata)


def parse_exact(raw: bytes, limits: Limits, *, file: str | None = None) -> Document:
    """Parse any header. Raises `HeaderError`, or `LimitExceeded` for nesting.

    The meaning of the numbers is not checked.
    """
    if raw[:1] != b"{":
        message = f"a header must begin with {{, not with {quote(raw[:1].decode('latin-1'))}"
        raise HeaderError(message, file=file, offset=PREFIX_NBYTES)
    end = len(raw.rstrip(b" "))
    if raw[end - 1 : end] != b"}":
        raise HeaderError(
            "only spaces may follow the header's closing }",
            file=file,
            offset=PREFIX_NBYTES + end - 1,
        )
    document = parse(raw, limits, file=file, start=PREFIX_NBYTES)
    if not isinstance(document, dict):
        raise _wrong("an object", document, file, None)
    metadata: dict[str, str] = {}
    entries: dict[str, HeaderEntry] = {}
    fields = dict.fromkeys(FIELDS)
    for name, value in document.items():
        if name != METADATA:
            entries[name] = _entry(name, value, file)
            # The safetensors library ignores fields that it does not know, and other writers add
            # some (nntrainer).
            fields |= dict.fromkeys(value)
            continue
        if not isinstance(value, dict):
            raise _wrong("an object", value, file, None, METADATA)
        for key, text in value.items():
            if not isinstance(text, str):
                raise _wrong("text", text, file, None, METADATA, key)
        metadata = value
    return Document(entries, metadata, tuple(fields)[len(FIELDS) :])


def _entry(name: str, value: object, file: str | None) -> HeaderEntry:
    if not isinstance(value, dict):
        raise _wrong("an object", value, file, name, name)
    for field in FIELDS:
        if field not in value:
            raise HeaderError(
                f"at {format_pointer(name)}: the field {field} is missing",
                file=file,
                tensor=name,
                offset=PREFIX_NBYTES,
            )
    dtype = value["dtype"]
    if not isinstance(dtype, str):
        raise _wrong("text", dtype, file, name, name, "dtype")
    shape = _integers(name, "shape", value["shape"], file=file)
    offsets = _integers(name, "data_offsets", value["data_offsets"], file=file)
    if len(offsets) != 2:
        raise _wrong("two integers", value["data_offsets"], file, name, name, "data_offsets")
    return HeaderEntry(dtype, shape, (offsets[0], offsets[1]))


def _integers(name: str, field: str, value: object, *, file: str | None) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _wrong("a list of integers", value, file, name, name, field)
    for i, number in enumerate(value):
        if type(number) is not int:  # bool is an int to isinstance
            raise _wrong("an integer", number, file, name, name, field, i)
    return tuple(value)


def _wrong(
    expected: str, value: object, file: str | None, name: str | None, *steps: str | int
) -> HeaderError:
    message = f"at {format_pointer(*steps)}: expected {expected}, found {describe_json(value)}"
    return HeaderError(
        message,
        file=file,
        tensor=name,
        offset=PREFIX_NBYTES,
        expected=expected,
        found=describe_json(value),
    )


class Pairs(list[tuple[str, str]]):
    """The pairs of one JSON object as they stand in the text; a type of its own, to tell it from a list."""


FIRST_OBJECT = json.JSONDecoder(object_pairs_hook=Pairs)


TensorKind = tuple[str, tuple[int, ...]]

DTYPE_OF_CODE = {row.safetensors: row for row in DTYPES.rows if row.safetensors is not None}
"""Dtypes by their codes."""

BITS = {code: row.bits for code, row in DTYPE_OF_CODE.items()}

ADDRESSABLE = (1 << 63) - 1
"""The most bits in one tensor, and the last place in a file. numpy and the safetensors library stop near here, even for
tensors that are empty because another of their dimensions is 0."""


def is_addressable(shape: Sequence[int], bits: int) -> bool:
    """Whether 64-bit readers can hold a shape: the product of its dimensions, with 1 in place of 0, must not overflow.

    >>> is_addressable((1 << 62, 4, 0), 8)
    False
    """
    for n in shape:
        bits *= n or 1
        if bits > ADDRESSABLE:
            return False
    return True


class HeaderColumns(Value, frozen=True):
    """The entries of a checked header, in their order."""

    kinds: Sequence[TensorKind]
    """Dtypes and shapes, each pair once."""
    kind_indices: array[int]
    """For each entry its index in `kinds`."""
    starts: array[int]
    """For each entry its first byte in the file."""
    nbytes: array[int]


class HeaderRecord(Value, frozen=True):
    """What Holdfast recorded in a header or an index beside the tensors (`record.py`)."""

    crcs: Sequence[int] = ()
    """CRC-32 of each tensor, in the order of the header; empty if not recorded."""
    recorded: Recorded | None = None
    notes: tuple[str, ...] = ()
    metadata_file: str | None = None
    """The file beside this one with the rest of the metadata."""
    mismatch: Corrupted | None = None
    """How the file differs from its record, for a verification."""
    is_present: bool = False


NO_RECORD = HeaderRecord()


def check_layout(
    entries: Mapping[str, HeaderEntry], data: range, limits: Limits, *, file: str | None = None
) -> HeaderColumns:
    """Check every entry, and that together they tile the data section exactly; `data` are its places in the file.

    Raises `HeaderError`, `LimitExceeded` for the rank, or `Truncated` where the data section is shorter than they say.

    All arithmetic is on Python's integers, which do not overflow. A dtype and shape is judged once. One pass checks all; it is
    written for the honest file, where the tensors lie in the order of the header, and leaves every other one to a second look.
    """
    outlines: list[TensorKind] = []
    judged: dict[str, dict[tuple[int, ...], tuple[int, int | None]]] = {}
    lengths: list[int] = []
    outline: list[int] = []
    starts: list[int] = []
    first, position = data.start, 0
    in_order = True
    for entry in entries.values():
        begin, end = entry.data_offsets
        try:
            number, nbytes = judged[entry.dtype][entry.shape]
        except KeyError:
            number, nbytes = len(outlines), _outline_nbytes(entry.dtype, entry.shape, limits)
            judged.setdefault(entry.dtype, {})[entry.shape] = number, nbytes
            outlines.append((entry.dtype, entry.shape))
            lengths.append(nbytes or 0)
        outline.append(number)
        starts.append(first + begin)
        if begin != position or end - begin != nbytes:
            in_order = False
        position = end
    # In order, no end is behind the last one.
    if not in_order or position > ADDRESSABLE:
        for name, entry in entries.items():
            begin, end = entry.data_offsets
            if begin < 0 or end - begin != judged[entry.dtype][entry.shape][1] or end > ADDRESSABLE:
                _explain(name, entry, limits, file=file)
        position = _check_sorted(entries, file)
    if position > len(data):
        message = f"the header describes {position:,} bytes of tensors, the file has {len(data):,}"
        raise Truncated(message, file=file, expected=position, found=len(data))
    if position < len(data):
        raise HeaderError(
            f"{len(data) - position:,} bytes follow the last tensor",
            file=file,
            expected=position,
            found=len(data),
        )
    return HeaderColumns(
        outlines,
        array("q", outline),
        array("q", starts),
        array("q", map(lengths.__getitem__, outline)),
    )


def _outline_nbytes(dtype: str, shape: tuple[int, ...], limits: Limits) -> int | None:
    bits = BITS.get(dtype, 0)
    # The rank before the product: that of a million long dimensions would take hours.
    if (
        not bits
        or len(shape) > limits.rank
        or min(shape, default=0) < 0
        or (0 in shape and not is_addressable(shape, bits))
    ):
        return None
    count = bits * math.prod(shape)
    return None if count % 8 else count // 8


def _check_sorted(entries: Mapping[str, HeaderEntry], file: str | None) -> int:
    """The end of the last tensor of a header in another order than the data. Raises for holes and overlaps."""
    position = 0
    before = ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position:
            if begin < position:
                found = f"overlaps tensor {quote(before)}, which ends at {position:,}"
            else:
                found = f"leaves a hole after byte {position:,} of the data"
            message = f"at {format_pointer(name, 'data_offsets', 0)}: {begin:,} {found}"
            raise HeaderError(
                message,
                file=file,
                tensor=name,
                offset=PREFIX_NBYTES,
                expected=position,
                found=begin,
            )
        position, before = end, name
    return position


def _explain(name: str, entry: HeaderEntry, limits: Limits, *, file: str | None) -> NoReturn:
    begin, end = entry.data_offsets
    bits = BITS.get(entry.dtype)
    if bits is None:
        _refuse(name, ("dtype",), f"there is no dtype {quote(entry.dtype)}", file=file)
    if len(entry.shape) > limits.rank:
        message = f"at {format_pointer(name, 'shape')}: {len(entry.shape):,} dimensions are more than Limits(rank={limits.rank})"
        raise LimitExceeded(
            message,
            file=file,
            tensor=name,
            offset=PREFIX_NBYTES,
            expected=limits.rank,
            found=len(entry.shape),
        )
    for i, n in enumerate(entry.shape):
        if not 0 <= n <= ADDRESSABLE:
            _refuse(name, ("shape", i), f"{_shown(n)} is no length", file=file)
    for i, place in enumerate((begin, end)):
        if not 0 <= place <= ADDRESSABLE:
            _refuse(name, ("data_offsets", i), f"{_shown(place)} is no place in a file", file=file)
    if end < begin:
        _refuse(
            name, ("data_offsets", 1), f"the end {end:,} lies before the begin {begin:,}", file=file
        )
    if not is_addressable(entry.shape, bits):
        _refuse(
            name,
            ("shape",),
            f"{list(entry.shape)} of {entry.dtype} is more than any file can hold",
            file=file,
        )
    count = bits
    for n in entry.shape:
        count *= n
    if count % 8:
        _refuse(
            name, ("shape",), f"{count:,} bits of {entry.dtype} do not fill whole bytes", file=file
        )
    _refuse(
        name,
        ("data_offsets",),
        f"{end - begin:,} bytes, but {list(entry.shape)} of {entry.dtype} takes {count // 8:,}",
        file=file,
    )


def _shown(number: int) -> str:
    return f"{number:,}" if abs(number) < 1 << 70 else f"a number of {number.bit_length():,} bits"


def _refuse(name: str, steps: tuple[str | int, ...], found: str, *, file: str | None) -> NoReturn:
    message = f"at {format_pointer(name, *steps)}: {found}"
    raise HeaderError(message, file=file, tensor=name, offset=PREFIX_NBYTES)
