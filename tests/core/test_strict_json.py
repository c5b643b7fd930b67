"""The gate that all JSON goes through."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import strict_json
from holdfast.core.limits import Limits
from holdfast.core.strict_json import format_pointer, parse
from holdfast.errors import HeaderError, HoldfastError, LimitExceeded

SMALL = (1 << 63) - 1
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-SMALL, SMALL)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_what_json_writes_comes_back(value, ascii_only):
    assert parse(json.dumps(value, ensure_ascii=ascii_only).encode(), Limits()) == value


ODD = [
    "-0", "-0.0", "0.0", "1E5", "1e2", "100.0", "1e999", "NaN", "-Infinity", "01", "12345678901234567890", "18446744073709551615",
    "18446744073709551616", "-9223372036854775808", "-9223372036854775809", "123456789012345678901", "-12345678901234567890",
    "0.1", "1.7976931348623157e308", "true", "null", "[ ]", '{"a":1,"a":1}', '{"a":1, "a":2}', '{"a b":1,"ab":1}', "'a'", "1 0",
    "[1,]", '"\\ud800"', '"\\uD83D\\uDE00"', '"\\u00e9"', '"é"', '"a\\/b"', '" a\\t"', '"a, \\"b\\": c"', '"\\u0000"', '"\n"',
    "\ufeff1", '"12345678901234567890123"',
]  # fmt: skip
DOCUMENTS = st.recursive(
    st.sampled_from(ODD)
    | st.integers(-SMALL, SMALL).map(str)
    | st.floats().map(json.dumps)
    | st.text(max_size=4).map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=4).flatmap(
            lambda all: st.sampled_from([",", ", ", ",\n  "]).map(lambda by: f"[{by.join(all)}]")
        )
        | st.lists(st.tuples(st.sampled_from(["a", "b ", "é", "\\\\"]), inner), max_size=3).map(
            lambda all: "{" + ", ".join(f'"{key}": {value}' for key, value in all) + "}"
        )
    ),
    max_leaves=8,
)


@given(DOCUMENTS, st.sampled_from(["", " ", "\n"]))
def test_documents_that_are_proven_are_read_as_those_that_are_looked_at(text, behind):
    raw = f"{text}{behind}".encode()

    def read(how) -> tuple[object, ...]:
        try:
            return (repr(how(raw)),)
        except HoldfastError as error:
            return type(error), str(error)

    assert read(lambda raw: parse(raw, Limits())) == read(
        lambda raw: strict_json._parse_slowly(raw, None, 0)
    )


@given(st.binary(max_size=60))
def test_bytes_of_any_content_raise_only_our_errors(raw):
    try:
        value = parse(raw, Limits())
    except HoldfastError:
        return
    assert value == json.loads(raw)


@given(st.text(alphabet='[]{}"\\a,:1', max_size=40))
def test_depth_is_never_measured_too_low(text):
    raw = text.encode()
    try:
        value = parse(raw, Limits(depth=3))
    except HoldfastError:
        return

    def depth(v):
        if isinstance(v, dict | list):
            return 1 + max(map(depth, v.values() if isinstance(v, dict) else v), default=0)
        return 0

    assert depth(value) <= 3


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_depth_across_blocks(block, monkeypatch):
    monkeypatch.setattr(strict_json, "BLOCK_NBYTES", block)
    raw = rb'{"a[[[":["]]\"[[[",["\\",[1]]]}'
    assert parse(raw, Limits(depth=4)) == json.loads(raw)
    with pytest.raises(LimitExceeded):
        parse(raw, Limits(depth=3))


def test_a_deep_limit_does_not_reach_the_interpreter():
    with pytest.raises(LimitExceeded):
        parse(b"[          " * 100_000, Limits(depth=10**9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a":[{"b c":NaN}]}', 'at $.a[0]["b c"]: NaN'),
        ('[1,{"x":1,"x":2}]', 'at $[1]: the key "x" occurs twice'),
        ('{"a":{"k":1,"k":{"j":1,"j":2}}}', 'at $.a: the key "k" occurs twice'),
        ("[1e400]", "at $[0]: a number that is too large for a float"),
        ("[" + "1" * 21 + "]", "at $[0]: an integer of 21 digits"),
        ('["\\ud834"]', "at $[0]: half of a surrogate pair"),
        ("", "not JSON"),
        ("\ufeff{}", "not JSON"),
    ],
)
def test_flaws_are_found_where_they_are(text, words):
    with pytest.raises(HeaderError) as caught:
        parse(text.encode(), Limits(), file="index.json", start=100)
    assert words in caught.value.message
    assert caught.value.file == "index.json"
    assert caught.value.offset >= 100


def test_pairs_of_surrogates_are_one_character():
    assert parse(b'"\\ud83e\\udd80"', Limits()) == "\U0001f980"


def test_pointers_quote_what_is_odd():
    assert format_pointer() == "$"
    assert format_pointer("model.layers.0/x", "shape", 1) == "$.model.layers.0/x.shape[1]"
    assert format_pointer("a\x1b", "") == '$["a\\u001b"][""]'
    assert len(format_pointer("x" * 1000)) < 200
