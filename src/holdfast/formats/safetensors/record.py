"""Two entries of a file's `__metadata__`: Holdfast's record, and the pieces of torch's Hugging Face writer.

The entry `holdfast` has checksums, and everything that the format has no other place for:

    {"version": 2, "of": "1c291ca3", "texts": "8d0f11c2", …the fields of `formats.recorded`…, "crc32": "9f3a01d2" + "00c4e6b7" + …,
     "self": "5bb0e7a9"}

- `crc32` holds eight hexadecimal digits a tensor, in the order of the header.
- `of` is the CRC-32 of the tensors' part of the header as msgspec writes it, `texts` that of the other texts in `__metadata__`.
- `rest` names the file beside this one with the rest: the manifest of a native directory, or the index of a split checkpoint.
- `self` is the checksum of the record (`core.documents`).

So everything in a header has a checksum, and a wrong one tells its cause:

    `self` is wrong       the record is damaged, and refused
    `of` is wrong         another tool changed the tensors and copied the metadata, or damage: not used, with a note
    `texts` is wrong      another tool changed the texts, or damage: used, with a note

A verification reports both notes (`changed`). A record of version 1 has no `texts` and no `self`.

torch 2.8 and later (`HuggingFaceStorageWriter`) write each rank's pieces of tensors as plain safetensors, with their offsets:

    DCP_SHARDING_INFO    {"model.w": {"saved_offsets": [0, 256]}, …}      as JSON text

The shape of the whole is not stored: it is the smallest shape that holds all pieces, and the pieces must tile it exactly. torch
counts 4-bit floats in pairs, and the header counts the floats (F4), so that the last offset of such a piece is doubled.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, c_strides
from holdfast.core.crc import crc32
from holdfast.core.documents import (
    CLOSING,
    HEX,
    SEAL_NBYTES,
    SELF,
    check_seal,
    make_seal,
    parse_crc,
)
from holdfast.core.limits import Limits
from holdfast.core.protocols import Source
from holdfast.core.strict_json import (
    describe_json,
    format_pointer,
    json_limits,
    parse,
    quote,
    required_nbytes,
)
from holdfast.core.tensor import LazyTensor
from holdfast.core.tiling import is_tiled_by
from holdfast.core.value import replace
from holdfast.errors import Corrupted, HeaderError, LimitExceeded, MetadataError, error_context
from holdfast.formats.safetensors.schema import (
    ADDRESSABLE,
    DTYPE_OF_CODE,
    NO_RECORD,
    PREFIX_NBYTES,
    RECORD,
    RECORD_START,
    RECORDED_FIELDS,
    SHARDING_INFO,
    HeaderRecord,
    is_addressable,
)

if TYPE_CHECKING:
    from holdfast.formats.safetensors.read import Header

VERSION = 2
SEALED_VERSION = 2
"""The first version with a checksum of its own."""

CRC_DIGITS = 8

OTHER_TENSORS = (
    f"__metadata__.{RECORD} is about tensors that were there before another program changed the file, or the file is damaged; the "
    "record is not used. If the change was meant, write the file again with `holdfast convert`"
)
OTHER_TEXTS = (
    f"the texts beside __metadata__.{RECORD} are not those that were written with it: another program changed them, or the file is "
    "damaged. If the change was meant, write the file again with `holdfast convert`"
)


def fingerprint(content: object) -> str:
    """The checksum of the content of a record, in eight digits."""
    return f"{crc32(msgspec.json.encode(content)):08x}"


TEXTS = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def texts_fingerprint(texts: Mapping[str, object]) -> str:
    """The checksum of the texts beside a record. Their order does not count, since other writers change it."""
    # Not msgspec: an index may have integers that it does not write. An encoder is made for each value that is no text.
    pairs = sorted(texts.items())
    listed = [
        f"[{encode_basestring(key)},{encode_basestring(v) if type(v) is str else TEXTS.encode(v)}]"
        for key, v in pairs
    ]
    text = ",".join(listed)
    return f"{crc32(f'[{text}]'.encode()):08x}"


def checksum_digits(crcs: Mapping[str, int], labels: Sequence[str]) -> str:
    # From a list, as numbers of 64 bits: a third of the time that the others take.
    return np.array(list(map(crcs.__getitem__, labels)), np.int64).astype(">u4").tobytes().hex()


class RecordText:
    """A record as JSON text, before its checksums are known: eight digits for each tensor, and its own.

    `of` is the fingerprint of its content, `texts` stand beside it, and `tensors` is the number of checksums; without it there is
    no such field. Spaces at the end make it long enough for the reader's limit on lists.

        opening                         │ middle                                │ closing
        {"version":2,…,"crc32":"        │ digits of the tensors","self":"digits │ "}␠␠␠
    """

    def __init__(
        self,
        fields: Mapping[str, object],
        of: str,
        texts: Mapping[str, object],
        *,
        tensors: int | None = None,
    ) -> None:
        raw = msgspec.json.encode(
            {"version": VERSION, "of": of, "texts": texts_fingerprint(texts), **fields}
        )
        self._nbytes = required_nbytes(raw)
        self._quote = b"" if tensors is None else b'"'
        self.opening = raw[:-1] if tensors is None else raw[:-1] + b',"crc32":"'
        self._crc = crc32(self.opening)
        spaces = self._nbytes - len(self._quote) - len(self.opening) - CRC_DIGITS * (tensors or 0)
        self.closing = CLOSING.ljust(spaces - SEAL_NBYTES + len(CLOSING))

    def middle(self, digits: bytes = b"") -> bytes:
        """The text between opening and closing, for these checksums of tensors."""
        quoted = digits + self._quote
        end = make_seal(crc32(quoted, self._crc), len(self.opening) + len(quoted), self._nbytes)
        return quoted + end[: SEAL_NBYTES - len(CLOSING)]

    def whole(self) -> bytes:
        return b"".join((self.opening, self.middle(), self.closing))


def read_record(
    text: object,
    content: Mapping[str, object],
    texts: Mapping[str, object],
    *,
    header: bool,
    limits: Limits,
) -> HeaderRecord:
    """Check a record, None where there is none, against the entries of a `header` or the weight map of an index.

    `texts` stand beside the record. Raises `Corrupted` for a damaged record, `HeaderError`, or `LimitExceeded` for nesting. The
    offset in errors is the start of the document in its file.
    """
    if text is None:
        _look_elsewhere(content, texts)
        return NO_RECORD
    try:
        if not isinstance(text, str):
            raise HeaderError(f"expected text, found {describe_json(text)}")
        return _read(text.encode("utf-8"), content, texts, header=header, limits=limits)
    except (Corrupted, HeaderError, LimitExceeded) as error:
        error.args = (f"in __metadata__.{RECORD}: {error.message}",)
        error.message, error.offset = error.args[0], PREFIX_NBYTES if header else 0
        raise


def _read(
    raw: bytes,
    content: Mapping[str, object],
    texts: Mapping[str, object],
    *,
    header: bool,
    limits: Limits,
) -> HeaderRecord:
    sealed = check_seal(raw, "the record")
    document = parse(raw, json_limits(limits))
    if not isinstance(document, dict):
        raise HeaderError(f"at $: expected an object, found {describe_json(document)}")
    version, of = document.get("version"), document.get("of")
    if type(version) is not int or not isinstance(of, str):
        raise HeaderError("at $: expected a version and what the record is of")
    if version == VERSION and not sealed:
        raise Corrupted(
            f"a record of version {version} ends with its own checksum, and this one does not: it changed after it was written; "
            "get the file again"
        )
    if of != (now := fingerprint(content)):
        return _changed(OTHER_TENSORS, of, now)
    if version > VERSION or version < 1:
        note = f"__metadata__.{RECORD} is of version {version:,}, which this Holdfast does not know; not used"
        return HeaderRecord(notes=(note,), is_present=True)
    later = ("texts", "rest", SELF) if version >= SEALED_VERSION else ()
    allowed = {"version", "of", *later, *RECORDED_FIELDS, *(("crc32",) if header else ())}
    for name in document:
        if name not in allowed:
            raise HeaderError(f"at {format_pointer(name)}: a record has no such field")
    rest, then = document.get("rest"), document.get("texts")
    if not isinstance(rest, str | None):
        raise HeaderError(
            f"at {format_pointer('rest')}: expected text, found {describe_json(rest)}"
        )
    crcs = _checksums(document.get("crc32"), content) if header else ()
    recorded = None
    if not document.keys().isdisjoint(RECORDED_FIELDS):
        from holdfast.formats.recorded import parse_recorded  # for states that are not plain

        recorded = parse_recorded(document)
    if version >= SEALED_VERSION and then != (now := texts_fingerprint(texts)):
        return replace(
            _changed(OTHER_TEXTS, then, now), crcs=crcs, recorded=recorded, metadata_file=rest
        )
    return HeaderRecord(crcs, recorded, metadata_file=rest, is_present=True)


def _changed(how: str, then: object, now: str) -> HeaderRecord:
    expected = parse_crc(then)
    error = Corrupted(how, expected=then if expected is None else expected, found=int(now, 16))
    return HeaderRecord(notes=(how,), mismatch=error, is_present=True)


def _look_elsewhere(content: Mapping[str, object], texts: Mapping[str, object]) -> None:
    """Raise if the record of this content stands under another name: its name is damaged."""
    for name, text in texts.items():
        if (
            isinstance(text, str)
            and text.startswith(RECORD_START)
            and f'"of":"{fingerprint(content)}"' in text[:64]
        ):
            message = (
                f"the record of Holdfast stands under __metadata__.{quote(name)} and not under {RECORD}: the header changed after "
                "it was written; get the file again"
            )
            raise Corrupted(message, expected=RECORD, found=name)


def _checksums(digits: object, names: Mapping[str, object]) -> array[int]:
    if (
        not isinstance(digits, str)
        or len(digits) != CRC_DIGITS * len(names)
        or not HEX.issuperset(digits)
    ):
        expected = f"{CRC_DIGITS} digits for each of {len(names):,} tensors"
        raise HeaderError(
            f"at {format_pointer('crc32')}: expected {expected}, found {describe_json(digits)}"
        )
    return array("q", np.frombuffer(bytes.fromhex(digits), ">u4").astype(np.int64).tobytes())


OFFSETS = "saved_offsets"
"""The only field of a tensor in `SHARDING_INFO` that torch writes or reads."""

PAIRED = "F4"


def saved_offsets(header: Header, limits: Limits) -> dict[str, tuple[int, ...]]:
    """The offset of each piece of a file in its whole tensor. Raises `HeaderError` or `MetadataError` for a wrong text."""
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        return {}
    key = header.key
    with error_context(file=key):
        try:
            info = parse(text.encode("utf-8"), limits)
        except HeaderError as error:
            raise HeaderError(
                f"in __metadata__.{SHARDING_INFO}: {error.message}", file=key
            ) from None
    if not isinstance(info, dict):
        raise HeaderError(
            f"in __metadata__.{SHARDING_INFO}: expected an object, found {describe_json(info)}",
            file=key,
        )
    return {name: _offsets(header, name, value) for name, value in info.items()}


def join(name: str, pieces: Sequence[tuple[Header, tuple[int, ...]]], source: Source) -> LazyTensor:
    """One tensor out of its pieces: headers with the offset of each piece. Raises `MetadataError` if they do not fit together."""
    first, _ = pieces[0]
    dtype = DTYPE_OF_CODE[first.entry(name).dtype]
    rank = len(first.entry(name).shape)
    if dtype.safetensors == PAIRED and rank and any(offsets[-1] for _, offsets in pieces):
        pieces = [(header, (*offsets[:-1], 2 * offsets[-1])) for header, offsets in pieces]
    chunks = []
    for header, offsets in pieces:
        entry = header.entry(name)
        shape, other = entry.shape, DTYPE_OF_CODE[entry.dtype]
        if other is not dtype or len(shape) != rank:
            message = (
                f"the pieces in {first.key!r} and {header.key!r} do not go together: {dtype} of rank {rank} and "
                f"{other} of rank {len(shape)}"
            )
            raise MetadataError(message, file=header.key, tensor=name)
        storage = header.storage(name, source.store)
        chunks.append(
            Chunk(Box.from_offsets(offsets, shape), storage, 0, c_strides(shape, dtype.bits))
        )
    whole = Box.whole([max(chunk.box.stop[d] for chunk in chunks) for d in range(rank)])
    if not is_addressable(whole.shape, dtype.bits) or not is_tiled_by(
        whole, (chunk.box for chunk in chunks)
    ):
        stored = sum(chunk.box.count for chunk in chunks)
        raise MetadataError(
            f"{len(chunks):,} pieces with {stored:,} elements do not cover {list(whole.shape)} exactly once; "
            "a file is missing, or two hold the same part",
            file=first.key,
            tensor=name,
            expected=whole.shape,
            found=tuple(chunk.box for chunk in chunks[:16]),
        )
    return LazyTensor(name, dtype, whole.shape, tuple(chunks), source)


def _offsets(header: Header, name: str, value: object) -> tuple[int, ...]:
    place = f"in __metadata__.{SHARDING_INFO} at {format_pointer(name)}"
    if name not in header.positions:
        raise MetadataError(
            f"{place}: the file has no tensor {quote(name)}", file=header.key, tensor=name
        )
    offsets = value.get(OFFSETS) if isinstance(value, dict) else None
    if not isinstance(offsets, list):
        found = describe_json(value)
        raise HeaderError(
            f"{place}: expected an object with {OFFSETS}, found {found}",
            file=header.key,
            tensor=name,
        )
    for i, offset in enumerate(offsets):
        if type(offset) is not int or not 0 <= offset <= ADDRESSABLE:
            place = f"in __metadata__.{SHARDING_INFO} at {format_pointer(name, OFFSETS, i)}"
            raise HeaderError(
                f"{place}: expected a place, found {describe_json(offset)}",
                file=header.key,
                tensor=name,
            )
    if len(offsets) != (rank := len(header.entry(name).shape)):
        raise MetadataError(
            f"{place}: {len(offsets)} offsets for a tensor of rank {rank}",
            file=header.key,
            tensor=name,
        )
    return tuple(offsets)
