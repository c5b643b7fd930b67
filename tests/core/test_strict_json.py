"""The strict JSON parser, which reads all headers and indexes, against Python's `json`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import strict_json
from holdfast.core.limits import Limits
from holdfast.core.strict_json import describe_json, format_pointer, parse, required_nbytes
from holdfast.errors import HeaderError, HoldfastError, LimitExceeded

MAX_INT64 = (1 << 63) - 1

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_INT64, MAX_INT64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda items: st.lists(items, max_size=4) | st.dictionaries(st.text(), items, max_size=4),
    max_leaves=20,
)
"""Values without NaN and infinities, which JSON does not have."""


@given(JSON_VALUES, st.booleans())
def test_parse_returns_the_value_that_json_wrote(value, ensure_ascii):
    raw = json.dumps(value, ensure_ascii=ensure_ascii).encode()

    assert parse(raw, Limits()) == value


UNUSUAL_TEXTS = [
    "-0", "-0.0", "0.0", "1E5", "1e2", "100.0", "1e999", "NaN", "-Infinity", "01",
    "12345678901234567890", "18446744073709551615", "18446744073709551616",
    "-9223372036854775808", "-9223372036854775809", "123456789012345678901",
    "-12345678901234567890", "0.1", "1.7976931348623157e308", "true", "null", "[ ]",
    '{"a":1,"a":1}', '{"a":1, "a":2}', '{"a b":1,"ab":1}', "'a'", "1 0", "[1,]", '"\\ud800"',
    '"\\uD83D\\uDE00"', '"\\u00e9"', '"é"', '"a\\/b"', '" a\\t"', '"a, \\"b\\": c"', '"\\u0000"',
    '"\n"', "\ufeff1", '"12345678901234567890123"',
]  # fmt: skip
"""Documents that some parsers accept and others refuse, or that they read as different values."""


def join_items(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return a strategy for lists and objects of these texts, with different spaces."""
    separators = st.sampled_from([",", ", ", ",\n  "])
    lists = st.builds(
        lambda texts, separator: f"[{separator.join(texts)}]",
        st.lists(items, max_size=4),
        separators,
    )
    keys = st.sampled_from(["a", "b ", "é", "\\\\"])
    fields = st.builds(lambda key, text: f'"{key}": {text}', keys, items)
    objects = st.lists(fields, max_size=3).map(lambda texts: "{" + ", ".join(texts) + "}")
    return lists | objects


DOCUMENTS = st.recursive(
    st.sampled_from(UNUSUAL_TEXTS)
    | st.integers(-MAX_INT64, MAX_INT64).map(str)
    | st.floats().map(json.dumps)
    | st.text(max_size=4).map(json.dumps),
    join_items,
    max_leaves=8,
)


@given(DOCUMENTS, st.sampled_from(["", " ", "\n"]))
def test_the_fast_and_the_slow_parser_have_the_same_results(text, trailing_space):
    """The slow parser examines every value, so it is the oracle for the fast one."""
    raw = f"{text}{trailing_space}".encode()

    def outcome(parse_raw: Callable[[bytes], object]) -> tuple[object, ...]:
        try:
            # Unlike `==`, `repr` tells 1 from 1.0 and from True.
            return (repr(parse_raw(raw)),)
        except HoldfastError as error:
            return type(error), str(error)

    expected = outcome(lambda raw: strict_json._parse_slowly(raw, None, 0))
    assert outcome(lambda raw: parse(raw, Limits())) == expected


@given(st.binary(max_size=60))
def test_arbitrary_bytes_raise_an_error_of_holdfast_or_are_parsed_as_by_json(raw):
    try:
        value = parse(raw, Limits())
    except HoldfastError:
        return
    assert value == json.loads(raw)


def measure_depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(measure_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(measure_depth, value), default=0)
    return 0


@given(st.text(alphabet='[]{}"\\a,:1', max_size=40))
def test_no_document_nests_deeper_than_the_limit(text):
    try:
        value = parse(text.encode(), Limits(depth=3))
    except HoldfastError:
        return
    assert measure_depth(value) <= 3


@pytest.mark.parametrize("block_nbytes", [1, 2, 3, 7])
def test_depth_is_counted_across_blocks(block_nbytes, monkeypatch):
    monkeypatch.setattr(strict_json, "BLOCK_NBYTES", block_nbytes)
    raw = rb'{"a[[[":["]]\"[[[",["\\",[1]]]}'

    assert parse(raw, Limits(depth=4)) == json.loads(raw)
    with pytest.raises(LimitExceeded):
        parse(raw, Limits(depth=3))


def test_a_limit_above_what_the_call_stack_allows_is_no_crash():
    with pytest.raises(LimitExceeded):
        parse(b"[          " * 100_000, Limits(depth=10**9))


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_errors_have_the_file_and_the_place_of_the_first_flaw(text, message):
    with pytest.raises(HeaderError) as caught:
        parse(text.encode(), Limits(), file="index.json", start=100)

    assert message in caught.value.message
    assert caught.value.file == "index.json"
    assert caught.value.offset >= 100


def test_a_complete_surrogate_pair_is_one_character():
    assert parse(b'"\\ud83e\\udd80"', Limits()) == "\U0001f980"


def test_a_document_of_the_required_size_is_accepted_and_a_smaller_one_refused():
    raw = b"[" + b"[]," * 5000 + b"[]]"
    nbytes = required_nbytes(raw)

    assert len(parse(raw.ljust(nbytes), Limits())) == 5001
    with pytest.raises(HeaderError, match="5,002 lists and objects"):
        parse(raw.ljust(nbytes - 10), Limits())


@pytest.mark.parametrize(
    ("keys", "pointer"),
    [
        ((), "$"),
        (("model.layers.0/x", "shape", 1), "$.model.layers.0/x.shape[1]"),
        (("a\x1b", ""), '$["a\\u001b"][""]'),
    ],
)
def test_a_pointer_has_unusual_keys_in_quotes(keys, pointer):
    assert format_pointer(*keys) == pointer


def test_a_pointer_shortens_long_keys():
    assert len(format_pointer("x" * 1000)) < 200


@pytest.mark.parametrize(
    ("value", "description"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (1.5, "the number 1.5"),
        ("F32", 'the text "F32"'),
        ([1, 2], "a list of 2"),
        ({"a": 1}, "an object of 1 keys"),
    ],
)
def test_describe_json_says_what_a_value_is(value, description):
    assert describe_json(value) == description
