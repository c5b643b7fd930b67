"""Every type of document: it is read back, and any other content raises an error with the file name."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from holdfast.core.documents import (
    DocumentType,
    check_length,
    decode_canonical,
    decode_strictly,
    message_type,
    read_document,
    seal,
    write_document,
)
from holdfast.core.limits import Limits
from holdfast.core.strict_json import required_nbytes
from holdfast.engine.targets import bucket_claims
from holdfast.errors import Corrupted, HeaderError, HoldfastError, LimitExceeded, Unsupported
from holdfast.extras.runs import lock, record
from holdfast.formats.dcp import index as dcp
from holdfast.formats.native import schema as native
from holdfast.ranks import merge, together
from holdfast.ranks import state as ranks
from holdfast.verbs.seals import document as seals

MANIFEST = native.Manifest(
    native.FORMAT, 4, (native.DataFile("data.safetensors", 472),),
    {"w": native.StoredTensor("float32", (2, 3), (native.StoredChunk(0, (448, 472), "5bb0e7a9", hash="0" * 32),))},
    {"ä": "\n"}, tree=msgspec.Raw(b'{"a":[1,2]}'), hash="xxh3-128/1MiB",
)  # fmt: skip
SEAL = seals.Document(
    seals.FORMAT,
    1,
    5,
    1.5,
    {"loss": 0.5, "other": "nan"},
    (seals.StoredFile("a", 3), seals.StoredFile("b", 4)),
)
DESCRIPTION = together.Description(b"{}", {"a": "b"}, {"w": ("m", 0)}, ["v"], [], [])

DOCUMENTS: dict[str, tuple[DocumentType, object]] = {
    "manifest": (native.DOCUMENT, MANIFEST),
    "seal": (seals.DOCUMENT, SEAL),
    "side file": (dcp.DOCUMENT, dcp.SideFileFields(1, 9, "5bb0e7a9")),
    "run record": (record.RECORD, record.RunRecord(keep=["last(3)"], budget=5)),
    "pins": (record.PINS, record.Pins(pins=[record.Pin(3, "why", 1.5)])),
    "pins in a bucket": (
        record.PINS,
        record.Pins(pins=[record.Pin(3)], going=(4,), since=1.5, write="0123"),
    ),
    "doubts": (record.DOUBTS, record.Doubts(doubted=[record.Doubt(3, 1.5)])),
    "exports": (record.EXPORTS, record.Receipts(exports={"a": [("b", 5, "c")]})),
    "lock": (lock.DOCUMENT, lock.Holder(17, "host", 1.5)),
    "claim": (bucket_claims.DOCUMENT, bucket_claims.ClaimContent("uses", ("a", "b"))),
    "catalogue": (ranks.CATALOGUE, ranks.CatalogueDocument(("w",), ("int8",), ((4, 2),))),
    "header of a rank": (ranks.HEADER, ranks.Header(1, (("v", "00"),), ())),
    "proposal of a rank": (
        together.PROPOSAL,
        together.ProposalMessage(DESCRIPTION, b"state", b"sums"),
    ),
    "sums of a rank": (merge.SUMS, {"w": (5,)}),
}
"""Each type of document with a value of it."""

every_document = pytest.mark.parametrize("name", DOCUMENTS)


def select_documents(is_selected: Callable[[DocumentType], bool]) -> pytest.MarkDecorator:
    """Parametrize a test with the documents whose types are selected."""
    names = [name for name, (document_type, _) in DOCUMENTS.items() if is_selected(document_type)]
    return pytest.mark.parametrize("name", names)


every_json_document = select_documents(lambda document_type: not document_type.is_message)
every_versioned_document = select_documents(lambda document_type: bool(document_type.versions))
every_sealed_document = select_documents(
    lambda document_type: document_type.first_sealed_version is not None
)


def add_seal(document_type: DocumentType, raw: bytes) -> bytes:
    """Add a correct checksum to a JSON text, if its type has one."""
    if document_type.first_sealed_version is None:
        return raw
    return seal(raw, required_nbytes(raw))


def read_error(
    document_type: DocumentType, raw: bytes, limits: Limits | None = None
) -> HoldfastError:
    """Read an invalid document, check that the error has the file name, and return the error."""
    limits = limits or Limits()
    with pytest.raises(HoldfastError) as caught:
        read_document(document_type, raw, limits)
    assert caught.value.file == (document_type.file or None)
    with pytest.raises(HoldfastError) as caught_elsewhere:
        read_document(document_type, raw, limits, file="elsewhere/name")
    assert caught_elsewhere.value.file == "elsewhere/name"
    return caught.value


def try_to_read(
    document_type: DocumentType, raw: bytes
) -> tuple[object, None] | tuple[None, HoldfastError]:
    """Return the value of a document, or the error for it."""
    try:
        return read_document(document_type, raw), None
    except HoldfastError:
        return None, read_error(document_type, raw)


def without_checksum(value: object) -> object:
    """Return a value that was read without its checksum, as it was before it was written."""
    if hasattr(value, "sealed"):
        return msgspec.structs.replace(value, sealed=msgspec.UNSET)  # type: ignore[type-var]
    return value


@every_document
def test_a_document_is_read_back_and_written_as_before(name: str):
    document_type, value = DOCUMENTS[name]
    raw = write_document(document_type, value)
    read_value = without_checksum(read_document(document_type, raw))
    assert read_value == value
    assert decode_canonical(document_type, raw) is not None
    assert write_document(document_type, read_value) == raw


@every_json_document
def test_an_indented_text_has_the_same_value_or_is_refused(name: str):
    document_type, value = DOCUMENTS[name]
    indented = msgspec.json.format(msgspec.json.encode(value), indent=3)
    raw = add_seal(document_type, indented)
    assert decode_canonical(document_type, raw) is None
    if document_type.is_canonical:
        assert "differs from what Holdfast writes" in read_error(document_type, raw).message
    elif document_type.first_sealed_version is None:
        assert read_document(document_type, raw) == value
    else:
        # The seal has no spaces in it, so the text is not indented around it.
        fields = json.loads(msgspec.json.encode(value))
        spaced = json.dumps(fields, separators=(",", ": ")).encode()
        read_value = read_document(document_type, add_seal(document_type, spaced))
        assert json.loads(msgspec.json.encode(without_checksum(read_value))) == fields


@every_document
def test_a_truncated_document_is_refused(name: str):
    document_type, value = DOCUMENTS[name]
    raw = write_document(document_type, value)
    for stop in range(len(raw.rstrip())):
        read_error(document_type, raw[:stop])


@every_document
def test_a_changed_byte_is_refused_or_changes_the_value(name: str):
    document_type, value = DOCUMENTS[name]
    is_sealed = document_type.first_sealed_version is not None
    raw = write_document(document_type, value)
    for offset in range(len(raw)):
        for bit in (1, 128):
            changed = raw[:offset] + bytes([raw[offset] ^ bit]) + raw[offset + 1 :]
            read_value, error = try_to_read(document_type, changed)
            if error is None:
                assert not is_sealed, "the checksum did not notice a change"
                has_one_text = document_type.is_canonical and not document_type.is_message
                assert read_value != value or not has_one_text
            elif is_sealed:
                assert isinstance(error, Corrupted | HeaderError)


@every_versioned_document
def test_a_newer_version_is_unsupported(name: str):
    document_type, value = DOCUMENTS[name]
    newer_version = document_type.versions[-1] + 1
    newer_value = msgspec.structs.replace(value, version=newer_version)  # type: ignore[type-var]
    text = msgspec.json.encode(newer_value)
    for raw in (text, text[:-1] + b',"more":{"fields":1}}'):
        error = read_error(document_type, add_seal(document_type, raw))
        assert isinstance(error, Unsupported)
        assert f"of version {newer_version}" in error.message
        assert "a newer one may read this" in error.message


@every_json_document
def test_a_repeated_key_is_refused(name: str):
    document_type, value = DOCUMENTS[name]
    raw = msgspec.json.encode(value)
    first_key = raw[1 : raw.index(b":")]
    first_item = json.dumps(json.loads(raw)[json.loads(first_key)]).encode()
    repeated = b"{" + first_key + b":" + first_item + b"," + raw[1:]
    error = read_error(document_type, add_seal(document_type, repeated))
    assert isinstance(error, HeaderError)
    assert "occurs twice" in error.message or document_type.is_canonical


@every_json_document
def test_a_field_of_another_type_is_refused_with_its_name(name: str):
    document_type, value = DOCUMENTS[name]
    fields = json.loads(msgspec.json.encode(value))
    for field, item in fields.items():
        for other in (None, True, 1.5, "x", [], [{}], {}, {"a": None}, -1):
            if type(other) is type(item) and other not in ([{}], {"a": None}):
                continue
            text = json.dumps(fields | {field: other}, separators=(",", ":"))
            _, error = try_to_read(document_type, add_seal(document_type, text.encode()))
            is_named = error is None or f"at $.{field}" in error.message
            assert is_named or document_type.is_canonical, error


@every_json_document
def test_deep_nesting_is_refused(name: str):
    document_type, _ = DOCUMENTS[name]
    deep = b'{"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    raw = add_seal(document_type, deep)
    error = read_error(document_type, raw, Limits(index_nbytes=1 << 30))
    assert isinstance(error, HeaderError | LimitExceeded)


@every_json_document
@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{}", b"\xff", b'"x"', b"\0" * 64])
def test_other_content_is_refused(name: str, raw: bytes):
    document_type, _ = DOCUMENTS[name]
    if raw == b"{}":
        raw = add_seal(document_type, raw)
    read_error(document_type, raw)


@every_document
def test_a_document_that_is_too_long_is_refused(name: str):
    document_type, value = DOCUMENTS[name]
    raw = write_document(document_type, value)
    if document_type.max_nbytes is None:
        error = read_error(document_type, raw, Limits(index_nbytes=7))
        assert "Limits(index_nbytes=7)" in error.message
    elif document_type.max_nbytes < 1 << 40:
        padded = raw + b" " * document_type.max_nbytes
        assert isinstance(read_error(document_type, padded), LimitExceeded)
    with pytest.raises(LimitExceeded) as caught:
        check_length(document_type, 1 << 63, file="x")
    assert caught.value.file == "x"


@every_sealed_document
def test_a_document_without_its_checksum_is_damaged(name: str):
    document_type, value = DOCUMENTS[name]
    error = read_error(document_type, msgspec.json.encode(value))
    assert isinstance(error, Corrupted)
    assert error.message.endswith(document_type.remedy)


@every_sealed_document
def test_a_document_with_a_wrong_checksum_is_damaged(name: str):
    document_type, value = DOCUMENTS[name]
    raw = write_document(document_type, value)
    error = read_error(document_type, raw.replace(b'"version":', b'"versiom":'))
    assert isinstance(error, Corrupted)
    assert error.message.endswith(document_type.remedy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": {"w": {"dtype": "int8", "shape": [1], "chunks": []}, "a b": {"dtype": 5, "shape": [], "chunks": []}}},
         'at $.tensors["a b"].dtype: expected `str`, found the number 5'),
        ({"metadata": {"a": "b", "c": None}}, "at $.metadata.c: expected `str`, found null"),
        ({"files": [{"name": "a"}]}, "at $.files[0]: the field nbytes is missing"),
        ({"files": [{"name": "a", "nbytes": 1, "mode": 7}]}, "at $.files[0].mode: a manifest has no such field"),
        ({"tensors": {"w": {"dtype": "int8", "shape": [1], "chunks": [{"file": 0, "bytes": [1], "crc32": ""}]}}},
         "at $.tensors.w.chunks[0].bytes: expected `array` of length 2"),
        ({"pickle": 1}, "at $.pickle: a manifest has no such field"),
    ],
)  # fmt: skip
def test_an_error_names_the_place_in_the_document(change: dict[str, object], message: str):
    document = json.loads(msgspec.json.encode(MANIFEST)) | change
    error = read_error(native.DOCUMENT, seal(json.dumps(document).encode()))
    assert error.message == message


def test_an_error_names_the_keys_of_nested_dicts():
    document = {
        "format": "holdfast.exports",
        "version": 1,
        "exports": {"a": [["b", 5, "c"]], "d": [["e", "f", "g"]]},
    }
    error = read_error(record.EXPORTS, json.dumps(document).encode())
    assert error.message.startswith("at $.exports.d[0][1]: expected `int`, found the text")


@select_documents(lambda document_type: not document_type.is_canonical)
def test_both_decoders_return_the_same_value(name: str):
    document_type, value = DOCUMENTS[name]
    raw = write_document(document_type, value)
    canonical_value = decode_canonical(document_type, raw)
    assert canonical_value == decode_strictly(document_type, raw, Limits())


class NamedNumbers(msgspec.Struct):
    names: list[str]
    numbers: dict[str, int]
    content: bytes


@pytest.mark.parametrize("text", ["\ud800", "a\\ud800\udfff", "\udc80\n\\", "ä\ud834"])
def test_a_message_with_half_a_surrogate_pair_is_read_back(text: str):
    document_type = message_type("list of numbers", list[NamedNumbers])
    value = [NamedNumbers([text, "\\n", "plain"], {text: 1, "\\x41": 2}, b"\xc1\xff")]
    raw = write_document(document_type, value)
    assert read_document(document_type, raw) == value
    with pytest.raises(HeaderError):
        read_document(document_type, raw[:-1])
