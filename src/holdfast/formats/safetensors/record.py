"""Two entries of `__metadata__`: Holdfast's record, and the offsets of shards that torch's ranks
save.

**The record.** The entry `holdfast` has checksums, and what the format has no other place for:

    {"version": 2, "of": "1c291ca3", "texts": "8d0f11c2", …, "crc32": "9f3a01d2" + "00c4e6b7" + …,
     "self": "5bb0e7a9"}

    crc32    the CRC-32 of each tensor in the order of the header, as eight hexadecimal digits
    of       the CRC-32 of the entries of tensors in the header, as msgspec writes them
    texts    the CRC-32 of the other texts in `__metadata__`
    rest     a file in the same folder with more: the manifest of a native directory, or an index
    self     the CRC-32 of the record (`core/documents.py`)

Other fields are those of `formats/recorded.py`. So everything in a header has a checksum, and a
wrong one tells its cause:

    self     the record is damaged: it is refused
    of       another program changed the tensors and copied the metadata, or the file is damaged:
             the record is not used, with a note
    texts    another program changed the texts, or the file is damaged: the record is used, with a
    note

A verification reports both notes. Version 1 of the record has no `texts` and no `self`.

**Shards.** `HuggingFaceStorageWriter` of torch 2.8 and later writes the shards of each rank as
plain safetensors, with their offsets in the whole tensor:

    DCP_SHARDING_INFO    {"model.w": {"saved_offsets": [0, 256]}, …}      as JSON text

The shape of the whole tensor is not stored. It is the smallest shape that has all shards, and these
must cover it exactly once.
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
    HEX,
    SEAL_CLOSING,
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
"""The first version with a checksum of the record itself."""

CRC_DIGITS = 8
"""The hexadecimal digits of a CRC-32."""

OTHER_TENSORS = (
    f"__metadata__.{RECORD} is about tensors that were there before another program changed the "
    "file, or the file is damaged; the record is not used. If the change was meant, write the file "
    "again with `holdfast convert`"
)
OTHER_TEXTS = (
    f"the texts beside __metadata__.{RECORD} are not those that were written with it: another "
    "program changed them, or the file is damaged. If the change was meant, write the file again "
    "with `holdfast convert`"
)

VALUE_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def compute_fingerprint(content: object) -> str:
    """Return the CRC-32 of what a record is about, as eight digits."""
    return f"{crc32(msgspec.json.encode(content)):08x}"


def _compute_texts_fingerprint(texts: Mapping[str, object]) -> str:
    """Return the CRC-32 of the texts beside a record, as eight digits.

    They are sorted first, because other programs change their order.
    """
    pairs: list[str] = []
    for key, value in sorted(texts.items()):
        # An index can have integers that are too large for msgspec, so `json` encodes values that
        # are not texts.
        if isinstance(value, str):
            value_json = encode_basestring(value)
        else:
            value_json = VALUE_ENCODER.encode(value)
        pairs.append(f"[{encode_basestring(key)},{value_json}]")
    text = ",".join(pairs)
    return f"{crc32(f'[{text}]'.encode()):08x}"


def format_crcs(crcs: Mapping[str, int], labels: Sequence[str]) -> str:
    """Return the checksums of tensors as hexadecimal digits, in the order of their labels."""
    # numpy formats all of them at once, from a list of 64-bit integers, which is the fastest way.
    crc_array = np.array([crcs[label] for label in labels], np.int64)
    return crc_array.astype(">u4").tobytes().hex()


class RecordText:
    """The JSON text of a record, which is written before its checksums are known.

    Spaces at the end make it long enough for the limit on lists that the reader has.

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
        """Write the text around the checksums.

        Args:
            fields: The fields of the record besides checksums.
            of: The fingerprint of what the record is about.
            texts: The texts beside the record.
            tensors: How many tensors have checksums; None for a record without the field `crc32`.
        """
        texts_crc = _compute_texts_fingerprint(texts)
        document = {"version": VERSION, "of": of, "texts": texts_crc, **fields}
        raw = msgspec.json.encode(document)
        self._nbytes = required_nbytes(raw)
        self.opening = raw[:-1]
        self._quote = b""
        if tensors is not None:
            self.opening += b',"crc32":"'
            self._quote = b'"'
        self._opening_crc = crc32(self.opening)
        digits_nbytes = CRC_DIGITS * (tensors or 0) + len(self._quote)
        closing_nbytes = self._nbytes - len(self.opening) - digits_nbytes - SEAL_NBYTES
        self.closing = SEAL_CLOSING.ljust(closing_nbytes + len(SEAL_CLOSING))

    def middle(self, digits: bytes = b"") -> bytes:
        """Return the text between opening and closing, for these checksums of tensors."""
        quoted = digits + self._quote
        seal_start = len(self.opening) + len(quoted)
        seal = make_seal(crc32(quoted, self._opening_crc), seal_start, self._nbytes)
        return quoted + seal[: SEAL_NBYTES - len(SEAL_CLOSING)]

    def whole(self) -> bytes:
        """Return a whole record without checksums of tensors."""
        return b"".join((self.opening, self.middle(), self.closing))


def read_record(
    text: object,
    content: Mapping[str, object],
    texts: Mapping[str, object],
    *,
    header: bool,
    limits: Limits,
) -> HeaderRecord:
    """Read a record and check its checksums.

    Args:
        text: The record; None if there is none.
        content: What it is about: the entries of a header, or the weight map of an index.
        texts: The texts beside the record.
        header: Whether it is the record of a header, which has checksums of tensors.
        limits: How deeply it may nest.

    Raises:
        Corrupted: The record is damaged.
        HeaderError: The record is not valid. The offset in errors is the start of its document.
        LimitExceeded: It nests too deeply.
    """
    if text is None:
        _reject_renamed_record(content, texts)
        return NO_RECORD
    try:
        if not isinstance(text, str):
            raise HeaderError(f"expected text, found {describe_json(text)}")
        return _parse_record(text.encode("utf-8"), content, texts, header=header, limits=limits)
    except (Corrupted, HeaderError, LimitExceeded) as error:
        error.message = f"in __metadata__.{RECORD}: {error.message}"
        error.args = (error.message,)
        error.offset = PREFIX_NBYTES if header else 0
        raise


def _parse_record(
    raw: bytes,
    content: Mapping[str, object],
    texts: Mapping[str, object],
    *,
    header: bool,
    limits: Limits,
) -> HeaderRecord:
    """Parse a record. For the arguments and errors, see `read_record`."""
    is_sealed = check_seal(raw, "the record")
    document = parse(raw, json_limits(limits))
    if not isinstance(document, dict):
        raise HeaderError(f"at $: expected an object, found {describe_json(document)}")
    version = document.get("version")
    recorded_of = document.get("of")
    if type(version) is not int or not isinstance(recorded_of, str):
        raise HeaderError("at $: expected a version and what the record is of")
    # Without this check, damage that removes the last field would go unnoticed.
    if version == VERSION and not is_sealed:
        raise Corrupted(
            f"a record of version {version} ends with its own checksum, and this one does not: it "
            "changed after it was written; get the file again"
        )
    of = compute_fingerprint(content)
    if of != recorded_of:
        error = _build_mismatch(OTHER_TENSORS, recorded_of, of)
        return HeaderRecord(notes=(OTHER_TENSORS,), mismatch=error, is_present=True)
    if not 1 <= version <= VERSION:
        note = (
            f"__metadata__.{RECORD} has version {version:,}, which this Holdfast cannot read; "
            "it is not used"
        )
        return HeaderRecord(notes=(note,), is_present=True)

    allowed_fields = {"version", "of", *RECORDED_FIELDS}
    if version >= SEALED_VERSION:
        allowed_fields |= {"texts", "rest", SELF}
    if header:
        allowed_fields.add("crc32")
    for name in document:
        if name not in allowed_fields:
            raise HeaderError(f"at {format_pointer(name)}: a record has no such field")
    metadata_file = document.get("rest")
    if not isinstance(metadata_file, str | None):
        found = describe_json(metadata_file)
        raise HeaderError(f"at {format_pointer('rest')}: expected text, found {found}")
    crcs = _parse_crcs(document.get("crc32"), len(content)) if header else ()
    recorded = None
    if not document.keys().isdisjoint(RECORDED_FIELDS):
        from holdfast.formats.recorded import parse_recorded  # for states that are not plain

        recorded = parse_recorded(document)
    notes: tuple[str, ...] = ()
    mismatch: Corrupted | None = None
    texts_crc = document.get("texts")
    if version >= SEALED_VERSION and texts_crc != _compute_texts_fingerprint(texts):
        notes = (OTHER_TEXTS,)
        mismatch = _build_mismatch(OTHER_TEXTS, texts_crc, _compute_texts_fingerprint(texts))
    return HeaderRecord(crcs, recorded, notes, metadata_file, mismatch, is_present=True)


def _build_mismatch(message: str, recorded_crc: object, crc: str) -> Corrupted:
    """Return the error that `verify` reports for a file that differs from its record."""
    expected = parse_crc(recorded_crc)
    if expected is None:
        return Corrupted(message, expected=recorded_crc, found=int(crc, 16))
    return Corrupted(message, expected=expected, found=int(crc, 16))


def _reject_renamed_record(content: Mapping[str, object], texts: Mapping[str, object]) -> None:
    """Raise `Corrupted` if the record of this content has another name: its name is damaged."""
    for name, text in texts.items():
        if not isinstance(text, str) or not text.startswith(RECORD_START):
            continue
        if f'"of":"{compute_fingerprint(content)}"' in text[:64]:
            raise Corrupted(
                f"the record of Holdfast has the name __metadata__.{quote(name)} instead of "
                f"{RECORD}: the header changed after it was written; get the file again",
                expected=RECORD,
                found=name,
            )


def _parse_crcs(digits: object, tensor_count: int) -> array[int]:
    """Return the checksums of tensors from their hexadecimal digits."""
    if (
        not isinstance(digits, str)
        or len(digits) != CRC_DIGITS * tensor_count
        or not HEX.issuperset(digits)
    ):
        expected = f"{CRC_DIGITS} digits for each of {tensor_count:,} tensors"
        found = describe_json(digits)
        raise HeaderError(f"at {format_pointer('crc32')}: expected {expected}, found {found}")
    crcs = np.frombuffer(bytes.fromhex(digits), ">u4")
    return array("q", crcs.astype(np.int64).tobytes())


OFFSETS = "saved_offsets"
"""The only field of a tensor in `SHARDING_INFO` that torch writes or reads."""

PAIRED = "F4"
"""The code of 4-bit floats, which torch stores in pairs."""


def read_saved_offsets(header: Header, limits: Limits) -> dict[str, tuple[int, ...]]:
    """Return the offsets of each shard of a file in its whole tensor, by name.

    Raises:
        HeaderError: The text in the metadata is not valid.
        MetadataError: It does not agree with the tensors of the file.
    """
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        return {}
    key = header.key
    with error_context(file=key):
        try:
            info = parse(text.encode("utf-8"), limits)
        except HeaderError as error:
            message = f"in __metadata__.{SHARDING_INFO}: {error.message}"
            raise HeaderError(message, file=key) from None
    if not isinstance(info, dict):
        found = describe_json(info)
        message = f"in __metadata__.{SHARDING_INFO}: expected an object, found {found}"
        raise HeaderError(message, file=key)
    return {name: _check_offsets(header, name, value) for name, value in info.items()}


def _check_offsets(header: Header, name: str, value: object) -> tuple[int, ...]:
    """Check the offsets of one shard, and return them."""
    place = f"in __metadata__.{SHARDING_INFO} at {format_pointer(name)}"
    if name not in header.positions:
        message = f"{place}: the file has no tensor {quote(name)}"
        raise MetadataError(message, file=header.key, tensor=name)
    offsets = value.get(OFFSETS) if isinstance(value, dict) else None
    if not isinstance(offsets, list):
        message = f"{place}: expected an object with {OFFSETS}, found {describe_json(value)}"
        raise HeaderError(message, file=header.key, tensor=name)
    for index, offset in enumerate(offsets):
        if type(offset) is not int or not 0 <= offset <= ADDRESSABLE:
            place = f"in __metadata__.{SHARDING_INFO} at {format_pointer(name, OFFSETS, index)}"
            message = f"{place}: expected an offset, found {describe_json(offset)}"
            raise HeaderError(message, file=header.key, tensor=name)
    rank = len(header.entry(name).shape)
    if len(offsets) != rank:
        message = f"{place}: {len(offsets)} offsets for a tensor of rank {rank}"
        raise MetadataError(message, file=header.key, tensor=name)
    return tuple(offsets)


def join_shards(
    name: str, shards: Sequence[tuple[Header, tuple[int, ...]]], source: Source
) -> LazyTensor:
    """Join the shards of a tensor, without reading data.

    Args:
        name: The name of the tensor.
        shards: The header of each file that has a shard, and the offsets of the shard.
        source: The source of the files.

    Raises:
        MetadataError: The shards have different dtypes or ranks, or do not cover a box exactly
            once.
    """
    first_header, _ = shards[0]
    first_entry = first_header.entry(name)
    dtype = DTYPE_OF_CODE[first_entry.dtype]
    rank = len(first_entry.shape)
    chunks: list[Chunk] = []
    for header, offsets in shards:
        entry = header.entry(name)
        shard_dtype = DTYPE_OF_CODE[entry.dtype]
        shard_rank = len(entry.shape)
        if shard_dtype is not dtype or shard_rank != rank:
            message = (
                f"the shards in {first_header.key!r} and {header.key!r} do not go together: "
                f"{dtype} of rank {rank} and {shard_dtype} of rank {shard_rank}"
            )
            raise MetadataError(message, file=header.key, tensor=name)
        if dtype.safetensors == PAIRED and rank:
            # torch counts pairs of 4-bit floats, and the header counts floats.
            offsets = (*offsets[:-1], 2 * offsets[-1])
        box = Box.from_offsets(offsets, entry.shape)
        strides = c_strides(entry.shape, dtype.bits)
        chunks.append(Chunk(box, header.storage(name, source.store), 0, strides))

    whole = Box.whole([max(chunk.box.stop[axis] for chunk in chunks) for axis in range(rank)])
    boxes = [chunk.box for chunk in chunks]
    if not is_addressable(whole.shape, dtype.bits) or not is_tiled_by(whole, boxes):
        element_count = sum(box.count for box in boxes)
        raise MetadataError(
            f"{len(chunks):,} shards with {element_count:,} elements do not cover "
            f"{list(whole.shape)} exactly once; a file is missing, or two have the same elements",
            file=first_header.key,
            tensor=name,
            expected=whole.shape,
            found=tuple(boxes[:16]),
        )
    return LazyTensor(name, dtype, whole.shape, tuple(chunks), source)
