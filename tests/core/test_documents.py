"""Every kind of document: it comes back, and whatever else stands in its place is an error of ours, with the name of its file."""

from __future__ import annotations

import json

import msgspec
import pytest

from holdfast.core import documents
from holdfast.core.documents import (
    DocumentType,
    check_length,
    decode_canonical,
    decode_strictly,
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
SEALED = seals.Document(
    seals.FORMAT,
    1,
    5,
    1.5,
    {"loss": 0.5, "other": "nan"},
    (seals.StoredFile("a", 3), seals.StoredFile("b", 4)),
)
DESCRIPTION = together.Description(b"{}", {"a": "b"}, {"w": ("m", 0)}, ["v"], [], [])

KINDS: dict[str, tuple[DocumentType, object]] = {
    "manifest": (native.DOCUMENT, MANIFEST),
    "seal": (seals.DOCUMENT, SEALED),
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

every = pytest.mark.parametrize("name", KINDS)
in_json = pytest.mark.parametrize(
    "name", [name for name, (kind, _) in KINDS.items() if not kind.is_message]
)
of_a_version = pytest.mark.parametrize(
    "name", [name for name, (kind, _) in KINDS.items() if kind.versions]
)


def unsealed(value: object) -> bytes:
    return msgspec.json.encode(value)


def sealed(kind: DocumentType, raw: bytes) -> bytes:
    """A text with a right checksum, where the kind has one."""
    return raw if kind.first_sealed_version is None else seal(raw, required_nbytes(raw))


def refused(kind: DocumentType, raw: bytes, limits: Limits | None = None) -> HoldfastError:
    with pytest.raises(HoldfastError) as caught:
        read_document(kind, raw, limits or Limits())
    assert caught.value.file == (kind.file or None)
    with pytest.raises(HoldfastError) as elsewhere:
        read_document(kind, raw, limits or Limits(), file="elsewhere/name")
    assert elsewhere.value.file == "elsewhere/name"
    return caught.value


def attempted(kind: DocumentType, raw: bytes) -> tuple[object, HoldfastError | None]:
    """The value, or the error."""
    try:
        return read_document(kind, raw), None
    except HoldfastError:
        return None, refused(kind, raw)


def without_checksum(value: object) -> object:
    return (
        msgspec.structs.replace(value, sealed=msgspec.UNSET) if hasattr(value, "sealed") else value
    )  # type: ignore[type-var]


@every
def test_it_comes_back(name: str):
    kind, value = KINDS[name]
    raw = write_document(kind, value)
    assert without_checksum(read_document(kind, raw)) == value
    assert decode_canonical(kind, raw) is not None, "what we wrote is read by the proof"
    assert write_document(kind, without_checksum(read_document(kind, raw))) == raw


@in_json
def test_another_spelling_says_the_same_or_is_refused(name: str):
    kind, value = KINDS[name]
    raw = sealed(kind, msgspec.json.format(unsealed(value), indent=3))
    assert decode_canonical(kind, raw) is None
    if kind.is_canonical:
        assert "differs from what Holdfast writes" in refused(kind, raw).message
    elif kind.first_sealed_version is None:
        assert read_document(kind, raw) == value
    else:
        pretty = json.dumps(json.loads(unsealed(value)), separators=(",", ": ")).encode()
        found = without_checksum(read_document(kind, sealed(kind, pretty)))
        assert json.loads(unsealed(found)) == json.loads(unsealed(value))


@every
def test_a_text_that_is_cut_is_refused(name: str):
    kind, value = KINDS[name]
    raw = write_document(kind, value)
    for stop in range(len(raw.rstrip())):
        refused(kind, raw[:stop])


@every
def test_a_byte_that_changed_is_refused_or_another_value(name: str):
    kind, value = KINDS[name]
    raw = write_document(kind, value)
    for at in range(len(raw)):
        for bit in (1, 128):
            changed = raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]
            found, error = attempted(kind, changed)
            if error is None:
                assert kind.first_sealed_version is None, "no byte changes unnoticed"
                assert found != value or not kind.is_canonical or kind.is_message
            else:
                assert kind.first_sealed_version is None or isinstance(
                    error, Corrupted | HeaderError
                ), "damage has its name"


@of_a_version
def test_a_newer_version_is_for_a_newer_reader(name: str):
    kind, value = KINDS[name]
    newer = kind.versions[-1] + 1
    text = unsealed(msgspec.structs.replace(value, version=newer))  # type: ignore[type-var]  # they are structs
    for raw in (text, text[:-1] + b',"more":{"fields":1}}'):
        error = refused(kind, sealed(kind, raw))
        assert isinstance(error, Unsupported)
        assert f"of version {newer}" in error.message
        assert "a newer one may read this" in error.message


@in_json
def test_a_key_that_occurs_twice_is_refused(name: str):
    kind, value = KINDS[name]
    raw = unsealed(value)
    first = raw[1 : raw.index(b":")]
    twice = (
        b"{"
        + first
        + b":"
        + json.dumps(json.loads(raw)[json.loads(first)]).encode()
        + b","
        + raw[1:]
    )
    error = refused(kind, sealed(kind, twice))
    assert isinstance(error, HeaderError)
    assert "occurs twice" in error.message or kind.is_canonical


@in_json
def test_what_is_deep_or_of_another_type_is_refused(name: str):
    kind, value = KINDS[name]
    document = json.loads(unsealed(value))
    for field in document:
        for wrong in (None, True, 1.5, "x", [], [{}], {}, {"a": None}, -1):
            if type(wrong) is type(document[field]) and wrong not in ([{}], {"a": None}):
                continue
            raw = sealed(
                kind, json.dumps(document | {field: wrong}, separators=(",", ":")).encode()
            )
            _, error = attempted(kind, raw)
            assert error is None or kind.is_canonical or f"at $.{field}" in error.message, error
    deep = sealed(kind, b'{"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert isinstance(
        refused(kind, deep, Limits(index_nbytes=1 << 30)), HeaderError | LimitExceeded
    )
    for other in (b"", b"null", b"[]", b"{}", b"\xff", b'"x"', b"\0" * 64):
        refused(kind, sealed(kind, other) if other.endswith(b"}") else other)


@every
def test_one_that_is_too_long_is_refused_before_it_is_read(name: str):
    kind, value = KINDS[name]
    raw = write_document(kind, value)
    if kind.max_nbytes is None:
        assert "Limits(index_nbytes=7)" in refused(kind, raw, Limits(index_nbytes=7)).message
    elif kind.max_nbytes < 1 << 40:
        assert isinstance(refused(kind, raw + b" " * kind.max_nbytes), LimitExceeded)
    with pytest.raises(LimitExceeded) as caught:
        check_length(kind, 1 << 63, file="x")
    assert caught.value.file == "x"


@pytest.mark.parametrize(
    "name", [name for name, (kind, _) in KINDS.items() if kind.first_sealed_version is not None]
)
def test_one_without_its_checksum_is_damaged_and_says_what_to_do(name: str):
    kind, value = KINDS[name]
    error = refused(kind, unsealed(value))
    assert isinstance(error, Corrupted)
    assert error.message.endswith(kind.remedy)
    whole = write_document(kind, value)
    error = refused(kind, whole.replace(b'"version":', b'"versiom":'))
    assert isinstance(error, Corrupted)
    assert error.message.endswith(kind.remedy)


@pytest.mark.parametrize(
    ("change", "said"),
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
def test_what_is_wrong_is_named_with_its_place(change: dict[str, object], said: str):
    document = json.loads(msgspec.json.encode(MANIFEST)) | change
    assert refused(native.DOCUMENT, seal(json.dumps(document).encode())).message == said


def test_a_place_in_nested_objects_has_its_keys():
    document = {
        "format": "holdfast.exports",
        "version": 1,
        "exports": {"a": [["b", 5, "c"]], "d": [["e", "f", "g"]]},
    }
    error = refused(record.EXPORTS, json.dumps(document).encode())
    assert error.message.startswith("at $.exports.d[0][1]: expected `int`, found the text")


def test_the_slow_way_and_the_proof_agree():
    for kind, value in KINDS.values():
        if not kind.is_canonical:
            raw = write_document(kind, value)
            assert decode_canonical(kind, raw) == decode_strictly(kind, raw, Limits())


class NamedNumbers(msgspec.Struct):
    names: list[str]
    numbers: dict[str, int]
    content: bytes


@pytest.mark.parametrize("text", ["\ud800", "a\\ud800\udfff", "\udc80\n\\", "ä\ud834"])
def test_a_message_with_halves_of_surrogate_pairs_comes_back(text: str):
    kind = documents.message_type("list of numbers", list[NamedNumbers])
    value = [NamedNumbers([text, "\\n", "plain"], {text: 1, "\\x41": 2}, b"\xc1\xff")]
    assert read_document(kind, write_document(kind, value)) == value
    with pytest.raises(HeaderError):
        read_document(kind, write_document(kind, value)[:-1])
