"""What the safetensors library and torch write is read as they read it."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from craft_safetensors import MemorySource, craft, entry, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.errors import HeaderError, HoldfastError
from holdfast.formats.safetensors.read import describe as describe_safetensors
from holdfast.formats.safetensors.schema import parse_exact, parse_fast

CODES = (
    *(
        "BOOL",
        "U8",
        "I8",
        "I16",
        "U16",
        "I32",
        "U32",
        "I64",
        "U64",
        "F16",
        "BF16",
        "F32",
        "F64",
        "C64",
    ),
    *("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2"),
)
NUMPY = [
    bool,
    "u1",
    "i1",
    "i2",
    "u2",
    "i4",
    "u4",
    "i8",
    "u8",
    "f2",
    "f4",
    "f8",
    "c8",
    ml_dtypes.bfloat16,
]


def describe(raw: bytes):
    return describe_safetensors(MemorySource(raw))


def library_view(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name → code, shape, bytes, as the library sees them."""
    return {
        name: (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
        for name, info in safetensors.deserialize(raw)
    }


def our_view(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (t.dtype.safetensors, t.shape, stored(t.source, t.storages[0]))
        for name, t in describe(raw).tensors.items()
    }


def test_all_codes_are_in_the_table():
    assert {row.safetensors for row in DTYPES.rows if row.safetensors} == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_every_dtype_as_the_library_reads_it(code):
    bits = DTYPES.safetensors(code).bits
    raw = craft({"w": entry(code, [2, 4], 0, bits), "empty": entry(code, [0, 3], bits, bits)}, bits)
    assert our_view(raw) == library_view(raw)
    assert describe(raw).tensors["w"].shape == (2, 4)


def test_a_file_that_the_library_writes_and_cannot_read():
    # safetensors 0.8.0, no tensors and empty metadata: the header is `{},"__metadata__":{}}`.
    raw = safetensors.numpy.save({}, metadata={})
    try:
        library_view(raw)
    except safetensors.SafetensorError:
        with pytest.raises(HeaderError, match="Extra data"):
            describe(raw)


def test_the_mapping_and_the_tree():
    description = describe(craft({"b": entry("U8", [2], 2, 4), "a": entry("U8", [2], 0, 2)}, 4))
    tensors = description.tensors
    assert list(tensors) == ["b", "a"]
    assert "a" in tensors
    assert "c" not in tensors
    with pytest.raises(KeyError):
        tensors["c"]
    assert tensors["b"].numpy().tolist() == [2, 3]
    assert list(description.tree) == ["b", "a"]
    assert [t.storages[0].label for t in tensors.values()] == ["b", "a"]


def test_a_lone_piece_is_noted():
    info = json.dumps({"w": {"saved_offsets": [4]}})
    description = describe(craft({"w": entry("U8", [4], 0, 4)}, 4, {"DCP_SHARDING_INFO": info}))
    assert "shards of larger ones" in description.notes[0]
    assert description.tensors["w"].shape == (4,)


def test_a_header_with_unknown_fields_is_what_the_library_reads():
    entries = {
        "a": {"owner": {"x": [1, None]}, **entry("U8", [4], 0, 4), "scale": 0.5},
        "b": {**entry("U8", [2], 4, 6), "strides": [1]},
    }
    raw = craft(entries, 6)
    assert our_view(raw) == library_view(raw)


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(
    st.dictionaries(st.text(max_size=12), st.tuples(st.sampled_from(NUMPY), SHAPES), max_size=6),
    st.booleans(),
)
@settings(max_examples=examples(120))
def test_any_file_of_the_library(wanted, with_metadata):
    wanted.pop("__metadata__", None)
    arrays = {name: np.ones(shape, dtype) for name, (dtype, shape) in wanted.items()}
    raw = safetensors.numpy.save(
        arrays, metadata={"k": "v", **{n: n for n in wanted}} if with_metadata else None
    )
    assert our_view(raw) == library_view(raw)


MEDDLING = st.lists(
    st.tuples(
        st.integers(0, 10_000),
        st.sampled_from(list(b'{}[]",:0123456789-.eE\\ \n\tFIU8t\x00\xc3\xff')),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=3,
)


@given(MEDDLING, st.booleans())
@settings(max_examples=examples(400))
def test_a_changed_header_is_refused_or_means_what_the_library_says(changes, with_metadata):
    entries = {
        "a": entry("U8", [2, 2], 0, 4),
        "bb": entry("I16", [2], 4, 8),
        "-0": entry("F32", [], 8, 12),
    }
    raw = craft(entries, 12, {"k": 'v"'} if with_metadata else None)
    header = bytearray(raw[8:-12])
    for place, value, action in changes:
        place %= len(header)
        header[place : place + (action > 0)] = bytes([value]) if action < 2 else b""
    changed = len(header).to_bytes(8, "little") + bytes(header) + raw[-12:]
    try:
        ours = our_view(changed)
    except HoldfastError:
        ours = None
    if ours is not None:
        assert ours == library_view(changed)
    fast = parse_fast(bytes(header))
    if fast is not None:
        assert fast == parse_exact(bytes(header), Limits())


NUMBERS = st.integers(-2, 1 << 65) | st.sampled_from([0, 1, 1.0, True, None, "1"])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "F4", "?", 1]),
        "shape": st.lists(NUMBERS, max_size=3) | st.just(3),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
        "other": st.just(0),
    },
)
SOUND = st.builds(lambda n: entry("U8", [n], 0, n), st.integers(0, 9))
NAMES = st.sampled_from(["a", "b", "dtype", "shape", "__metadata__", "\u00fc", '"', "-0"])


@given(
    st.lists(
        st.tuples(NAMES, SOUND | FIELDS | st.dictionaries(NAMES, st.text(max_size=4), max_size=2)),
        max_size=4,
    ),
    st.booleans(),
    st.sampled_from([(",", ":"), (", ", ": "), (",\n", " :")]),
)
@settings(max_examples=examples(400))
def test_both_parsers_agree(pairs, ascii_only, separators):
    """Headers put together from pairs, so that names may occur twice."""
    parts = [
        json.dumps({name: value}, ensure_ascii=ascii_only, separators=separators)[1:-1]
        for name, value in pairs
    ]
    raw = ("{" + separators[0].join(parts) + "}").encode()
    try:
        exact = parse_exact(raw, Limits())
    except HoldfastError:
        exact = None
    fast = parse_fast(raw)
    if exact is None:
        assert fast is None
    elif fast is not None:
        assert fast == exact
        assert list(fast.entries) == list(exact.entries)
    if len({name for name, _ in pairs}) < len(pairs):
        assert exact is None
