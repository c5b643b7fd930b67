"""`holdfast.seal.json`: what is written is read, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.core.documents import seal as with_checksum
from holdfast.core.limits import Limits
from holdfast.errors import (
    Corrupted,
    HeaderError,
    HoldfastError,
    LimitExceeded,
    UnsafePath,
    Unsupported,
)
from holdfast.verbs.seals.document import (
    LARGEST,
    SEAL,
    Seal,
    SealedFile,
    encode_seal,
    misfits,
    parse_seal,
)

SHA = "sha256:" + "0f" * 32
XXH = "xxh3-128:" + "a0" * 16
GOOD: dict[str, object] = {
    "format": "holdfast.seal",
    "version": 1,
    "step": 500,
    "saved": 1763270000.125,
    "metrics": {"val_loss": 2.5},
    "files": [{"name": "a/b.pt", "nbytes": 3, "digest": SHA}, {"name": "c", "nbytes": 0}],
}


def text(**changes: object) -> bytes:
    """A document with its checksum, whatever is in it."""
    return with_checksum(json.dumps({**GOOD, **changes}).encode())


def files(*names: str) -> list[dict[str, object]]:
    return [{"name": name, "nbytes": 1} for name in names]


def test_a_seal_is_read_as_it_was_written():
    seal = Seal(
        7,
        1.5,
        {"loss": 0.25, "n": 3.0},
        (SealedFile("a", 3, XXH), SealedFile("sub/ü.pt", LARGEST, None)),
    )
    assert parse_seal(encode_seal(seal), Limits()) == seal
    assert parse_seal(text(), Limits()) == Seal(
        500,
        1763270000.125,
        {"val_loss": 2.5},
        (SealedFile("a/b.pt", 3, SHA), SealedFile("c", 0, None)),
    )
    assert parse_seal(encode_seal(Seal(None, 0.0, {}, ())), Limits()) == Seal(None, 0.0, {}, ())


def test_the_files_are_sorted_when_it_is_written():
    raw = encode_seal(Seal(1, 0.0, {}, (SealedFile("b", 1, None), SealedFile("a", 1, None))))
    assert [file.name for file in parse_seal(raw, Limits()).files] == ["a", "b"]


def test_metrics_that_are_no_finite_number_stay_what_they_are():
    raw = encode_seal(Seal(1, 0.0, {"a": math.nan, "b": math.inf, "c": -math.inf}, ()))
    assert b"NaN" not in raw
    found = parse_seal(raw, Limits()).metrics
    assert math.isnan(found["a"])
    assert (found["b"], found["c"]) == (math.inf, -math.inf)


def test_how_long_the_run_had_run_is_no_field_that_an_older_reader_refuses():
    raw = encode_seal(Seal(7, 1.5, {"loss": 0.25}, (), 86400.125))
    document = json.loads(raw)
    assert set(document) == {*GOOD, "self"}
    assert document["metrics"] == {"loss": 0.25, "holdfast.ran": 86400.125}
    assert parse_seal(raw, Limits()) == Seal(7, 1.5, {"loss": 0.25}, (), 86400.125)
    assert parse_seal(text(), Limits()).ran is None  # nobody counted
    for wrong in (-1.0, "nan", "inf", "-inf"):
        assert parse_seal(text(metrics={"holdfast.ran": wrong}), Limits()).ran is None


@pytest.mark.parametrize(
    "name",
    ["..", "a/../b", "../x", "/etc/passwd", "a//b", "a/", "./a", "", "a\0b", "a\\b", "C:\\x"],
)
def test_a_name_that_leads_out_is_refused(name: str):
    with pytest.raises(UnsafePath):
        parse_seal(text(files=files(name)), Limits())
    with pytest.raises(UnsafePath):
        encode_seal(Seal(1, 0.0, {}, (SealedFile(name, 1, None),)))


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({"files": files("a", "a")}, "$.files[1].name"),
        ({"files": files("b", "a")}, "$.files[1].name"),
        ({"files": files(SEAL)}, "$.files[0].name"),
        ({"files": [{"name": "a", "nbytes": -1}]}, "$.files[0].nbytes"),
        ({"files": [{"name": "a", "nbytes": 1 << 63}]}, "$.files[0].nbytes"),
        ({"files": [{"name": "a", "nbytes": 1.0}]}, "$.files[0].nbytes"),
        ({"files": [{"name": "a", "nbytes": True}]}, "$.files[0].nbytes"),
        ({"files": [{"name": "a"}]}, "$.files[0]"),
        ({"files": [{"name": "a", "nbytes": 1, "mode": 7}]}, "$.files[0]"),
        ({"files": [{"name": "a", "nbytes": 1, "digest": None}]}, "$.files[0].digest"),
        ({"files": [{"name": "a", "nbytes": 1, "digest": "sha256:00"}]}, "$.files[0].digest"),
        (
            {"files": [{"name": "a", "nbytes": 1, "digest": SHA.upper().replace("SHA", "sha")}]},
            "$.files[0].digest",
        ),
        ({"files": {"a": 1}}, "$.files"),
        ({"step": -1}, "$.step"),
        ({"step": 10**19}, "$.step"),
        ({"step": 10**30}, "$.step"),
        ({"step": 1.5}, "$.step"),
        ({"step": True}, "$.step"),
        ({"step": "5"}, "$.step"),
        ({"saved": -1.0}, "$.saved"),
        ({"saved": "now"}, "$.saved"),
        ({"metrics": {"a": "NaN"}}, "$.metrics.a"),
        ({"metrics": {"a": math.nan}}, "$.metrics.a"),
        ({"metrics": {"a": True}}, "$.metrics"),
        ({"metrics": {"a": None}}, "$.metrics"),
        ({"metrics": [1]}, "$.metrics"),
        ({"format": "holdfast"}, "$.format"),
        ({"version": True}, "$.version"),
        ({"more": 1}, "$"),
    ],
)
def test_what_breaks_the_schema_is_refused_and_its_place_named(changes: dict[str, object], at: str):
    with pytest.raises(HeaderError) as refused:
        parse_seal(text(**changes), Limits())
    assert f"at {at}" in str(refused.value)


def test_a_key_that_occurs_twice_is_refused():
    raw = with_checksum(
        json.dumps(GOOD).replace('"step": 500', '"step": 500, "step": 501').encode()
    )
    with pytest.raises(HeaderError, match="twice"):
        parse_seal(raw, Limits())


@pytest.mark.parametrize("field", sorted(GOOD))
def test_a_field_that_is_missing_is_refused(field: str):
    raw = with_checksum(
        json.dumps({name: value for name, value in GOOD.items() if name != field}).encode()
    )
    with pytest.raises(HeaderError):
        parse_seal(raw, Limits())


def test_other_versions_and_digests_are_for_another_reader():
    with pytest.raises(Unsupported):
        parse_seal(text(version=2, more="fields"), Limits())
    with pytest.raises(Unsupported):
        parse_seal(text(files=[{"name": "a", "nbytes": 1, "digest": "blake9:00"}]), Limits())


def test_limits_are_kept():
    with pytest.raises(LimitExceeded, match="files"):
        parse_seal(text(), Limits(files=1))
    with pytest.raises(LimitExceeded, match="index_nbytes"):
        parse_seal(text(), Limits(index_nbytes=100))
    with pytest.raises(LimitExceeded):
        parse_seal(text(metrics=json.loads("[" * 90 + "]" * 90)), Limits())


def test_without_its_own_checksum_it_is_none():
    with pytest.raises(Corrupted):
        parse_seal(json.dumps(GOOD).encode(), Limits())
    for raw in (b"", b"{}", b"null", text()[:-1], text()[1:]):
        with pytest.raises(HoldfastError):
            parse_seal(raw, Limits())


def test_every_changed_byte_is_noticed():
    raw = text()
    for i in range(len(raw)):
        with pytest.raises(HoldfastError):
            parse_seal(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :], Limits())


def test_no_seal_is_written_that_no_reader_takes():
    for seal in (
        Seal(-1, 0.0, {}, ()),
        Seal(10**30, 0.0, {}, ()),
        Seal(1, math.nan, {}, ()),
        Seal(1, 0.0, {"\udc80": 1.0}, ()),
        Seal(1, 0.0, {}, (SealedFile("a", 1, None), SealedFile("a", 1, None))),
        Seal(1, 0.0, {}, (SealedFile("\udc80", 1, None),)),
    ):
        with pytest.raises(HeaderError):
            encode_seal(seal)


def test_many_files_are_within_the_limits_of_the_reader():
    seal = Seal(1, 0.0, {}, tuple(SealedFile(f"{i:06}", 1, None) for i in range(5000)))
    assert parse_seal(encode_seal(seal), Limits()) == seal


def test_misfits_are_named():
    seal = Seal(1, 0.0, {}, tuple(SealedFile(name, 5, None) for name in "abcd"))
    assert dict(misfits(seal, {"a": 5, "b": 4, "c": 6}.get)) == {
        "b": "truncated: 4 of 5 bytes",
        "c": "longer: 6 of 5 bytes",
        "d": "missing",
    }


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300), st.booleans())
def test_no_bytes_raise_anything_but_our_errors(noise: bytes, at: int, summed: bool):
    raw = text().rstrip()
    mixed = raw[:at] + noise + raw[at + len(noise) :]
    with contextlib.suppress(HoldfastError):
        parse_seal(with_checksum(mixed) if summed else mixed, Limits())
