"""safetensors headers that lie."""

from __future__ import annotations

import json
import struct

from holdfast.errors import FormatError, HeaderError, LimitExceeded, MetadataError, Truncated
from tests.formats.safetensors.craft_safetensors import craft, entry, frame

from .case import Case, opens, refused

__all__ = ["CASES"]

A = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
DATA = b"\1\2\3\4"
MANY_FIELDS = "".join(f'"x{number}":0,' for number in range(100_000))


def raw(
    name: str,
    header: str | bytes,
    *errors: type[Exception],
    data: bytes = DATA,
    length: int | None = None,
) -> Case:
    return refused(f"st-{name}", frame(header, data, length=length), *(errors or (HeaderError,)))


def one(
    name: str,
    dtype: object = "U8",
    shape: object = (4,),
    begin: object = 0,
    end: object = 4,
    *errors: type[Exception],
) -> Case:
    """A file of one tensor with one field that lies."""
    header = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}})
    return refused(f"st-{name}", frame(header, DATA), *(errors or (HeaderError,)))


def sharded(text: object) -> bytes:
    value = text if isinstance(text, str) else json.dumps(text)
    return craft({"a": entry("U8", [4], 0, 4)}, 4, {"DCP_SHARDING_INFO": value})


def nest(depth: int) -> str:
    return "[" * depth + "]" * depth


CASES = [
    opens(
        "st-honest",
        frame("{" + A + "}", DATA),
        lambda ckpt: ckpt["a"].numpy().tolist() == [1, 2, 3, 4],
    ),
    raw("header-length-0", "{" + A + "}", FormatError, length=0),
    raw("header-length-1", "{" + A + "}", FormatError, length=1),
    raw("header-length-2^63", "{" + A + "}", FormatError, length=1 << 63),
    raw("header-length-2^64-1", "{" + A + "}", FormatError, length=(1 << 64) - 1),
    raw("header-length-2^47", "{" + A + "}", Truncated, length=1 << 47),
    raw("header-length-2^31", "{" + A + "}", Truncated, length=1 << 31),
    raw("header-length-past-the-end", "{" + A + "}", Truncated, length=len(A) + 7),
    raw("header-length-one-less", "{" + A + "}", length=len(A) + 1),
    raw("header-length-into-the-data", "{" + A + "}", FormatError, length=len(A) + 4),
    raw("header-begins-with-space", " {" + A + "}"),
    raw("header-begins-with-bom", b"\xef\xbb\xbf{" + A.encode() + b"}", FormatError),
    raw("header-ends-with-nul", "{" + A + "}\0"),
    raw("header-ends-with-tab", "{" + A + "}\t"),
    raw("header-is-a-list", "[" + "]", FormatError, data=b""),
    raw("header-two-objects", "{}{" + A + "}"),
    raw("header-utf16", ("{" + A + "}").encode("utf-16-le"), FormatError),
    raw("header-not-utf8", b'{"\xff":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'),
    raw("header-comment", "{/*x*/" + A + "}"),
    raw("header-trailing-comma", "{" + A + ",}"),
    raw("header-single-quotes", "{" + A.replace('"', "'") + "}"),
    raw("header-unterminated", "{" + A),
    raw("key-twice", "{" + A + "," + A + "}"),
    raw("key-twice-by-escape", "{" + A + "," + A.replace('"a"', '"\\u0061"') + "}"),
    raw("field-twice", "{" + A.replace('"dtype":"U8"', '"dtype":"F32","dtype":"U8"') + "}"),
    raw(
        "field-twice-by-escape",
        "{" + A.replace('"dtype":"U8"', '"dtype":"U8","d\\u0074ype":"I8"') + "}",
    ),
    raw("metadata-twice", '{"__metadata__":{},"__metadata__":{},' + A + "}"),
    raw("metadata-key-twice", '{"__metadata__":{"x":"1","x":"2"},' + A + "}"),
    raw("metadata-is-a-list", '{"__metadata__":[],' + A + "}"),
    raw("metadata-is-null", '{"__metadata__":null,' + A + "}"),
    raw("metadata-value-is-a-number", '{"__metadata__":{"x":1},' + A + "}"),
    raw("metadata-value-is-nested", '{"__metadata__":{"x":{}},' + A + "}"),
    raw("metadata-lone-surrogate", '{"__metadata__":{"x":"\\ud800"},' + A + "}"),
    raw("metadata-as-a-tensor", '{"__metadata__":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'),
    raw("name-lone-surrogate", "{" + A.replace('"a"', '"\\udfff"') + "}"),
    raw("nan", "{" + A.replace("[4]", "[NaN]") + "}"),
    raw("infinity", "{" + A.replace("[4]", "[Infinity]") + "}"),
    raw("float-size", "{" + A.replace("[4]", "[4.0]") + "}"),
    raw("exponent-size", "{" + A.replace("[4]", "[4e0]") + "}"),
    raw("negative-zero", "{" + A.replace("[0,4]", "[-0,4]") + "}"),
    raw("leading-zero", "{" + A.replace("[4]", "[04]") + "}"),
    raw("leading-plus", "{" + A.replace("[4]", "[+4]") + "}"),
    raw("size-of-5000-digits", "{" + A.replace("[4]", "[" + "9" * 5000 + "]") + "}"),
    raw("size-of-a-million-digits", "{" + A.replace("[4]", "[" + "9" * 1_000_000 + "]") + "}"),
    raw("exponent-bomb", "{" + A.replace("[4]", "[1e999999999]") + "}"),
    raw("nesting-100", "{" + A.replace("[4]", nest(100)) + "}", HeaderError, LimitExceeded),
    raw("nesting-200000", "{" + A.replace("[4]", nest(200_000)) + "}", HeaderError, LimitExceeded),
    raw(
        "nesting-in-metadata",
        '{"__metadata__":{"x":' + nest(200_000) + "}," + A + "}",
        HeaderError,
        LimitExceeded,
    ),
    raw("nesting-of-objects", '{"a":' * 100_000 + "1" + "}" * 100_000, HeaderError, LimitExceeded),
    raw("nesting-unclosed", "{" + '"a":[' + "[" * 200_000, HeaderError, LimitExceeded),
    raw("many-empty-lists", '{"a":[' + "[]," * 200_000 + "[]]}", HeaderError, LimitExceeded),
    one("size-true", shape=[True]),
    one("size-null", shape=[None]),
    one("size-text", shape=["4"]),
    one("size-negative", shape=[-4]),
    one("shape-is-a-number", shape=4),
    one("shape-nested", shape=[[4]]),
    one("offset-true", "U8", [1], False, True),
    one("offset-float", begin=0.0),
    one("offset-text", end="4"),
    one("offsets-swapped", "U8", [4], 4, 0),
    one("offset-negative", "U8", [4], -4, 0),
    one("offset-2^63", "U8", [4], 1 << 63, (1 << 63) + 4),
    one("offset-2^64", "U8", [4], 0, 1 << 64),
    one("dtype-unknown", "F33"),
    one("dtype-lower-case", "u8"),
    one("dtype-empty", ""),
    one("dtype-number", 8),
    one("dtype-null", None),
    one("rank-65", "U8", [1] * 64 + [4], 0, 4, LimitExceeded),
    one("rank-10000", "U8", [1] * 10_000 + [4], 0, 4, LimitExceeded),
    one("shape-overflows-2^64", "U8", [1 << 32, 1 << 32], 0, 4),
    one("shape-wraps-to-4", "U8", [(1 << 62) + 1, 4], 0, 4),
    one("shape-zero-times-huge", "U8", [0, 1 << 62, 1 << 62], 0, 0),
    one("bytes-too-few", "F32", [2], 0, 4),
    one("bytes-too-many", "U8", [3], 0, 4),
    one("hole-before-the-first", "U8", [3], 1, 4),
    one("tail", "U8", [3], 0, 3),
    one("past-the-end", "U8", [5], 0, 5, Truncated),
    one("far-past-the-end", "U8", [1 << 40], 0, 1 << 40, Truncated),
    one("sub-byte-does-not-divide", "F4", [3], 0, 2),
    one("sub-byte-six-bits", "F6_E2M3", [3], 0, 3),
    raw("three-offsets", "{" + A.replace("[0,4]", "[0,4,4]") + "}"),
    raw("one-offset", "{" + A.replace("[0,4]", "[0]") + "}"),
    raw("offsets-missing", '{"a":{"dtype":"U8","shape":[4]}}'),
    raw("offsets-null", "{" + A.replace("[0,4]", "null") + "}"),
    raw("unknown-field-twice", "{" + A.replace('"dtype"', '"x":[1],"x":[2],"dtype"') + "}"),
    opens(
        "st-unknown-field",
        frame("{" + A.replace('"dtype"', '"stride":[1],"dtype"') + "}", DATA),
        lambda ckpt: ckpt["a"].shape == (4,) and '"stride"' in ckpt.notes[0],
    ),
    opens(
        "st-many-unknown-fields",
        frame("{" + A.replace('"dtype"', MANY_FIELDS + '"dtype"') + "}", DATA),
        lambda ckpt: len(ckpt.notes[0]) < 1000,
    ),
    raw("entry-is-a-list", '{"a":[]}'),
    raw("entry-is-null", '{"a":null}'),
    refused(
        "st-overlap",
        craft({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, 6),
        HeaderError,
    ),
    refused(
        "st-overlap-whole",
        craft({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, 4),
        HeaderError,
    ),
    refused(
        "st-overlap-inside",
        craft({"a": entry("U8", [8], 0, 8), "b": entry("U8", [2], 3, 5)}, 8),
        HeaderError,
    ),
    refused(
        "st-hole", craft({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 5, 9)}, 9), HeaderError
    ),
    refused(
        "st-empty-tensor-in-the-middle-of-another",
        craft({"a": entry("U8", [4], 0, 4), "b": entry("U8", [0], 2, 2)}, 4),
        HeaderError,
    ),
    refused("st-data-too-short", craft({"a": entry("U8", [4], 0, 4)}, 3), Truncated),
    refused("st-data-too-long", craft({"a": entry("U8", [4], 0, 4)}, 5), HeaderError),
    refused("st-no-tensors-but-data", frame("{}", b"x"), HeaderError),
    refused("st-pickle-in-the-tail", frame("{}", b"cos\nsystem\n(Vtrue\ntR."), HeaderError),
    refused("st-only-a-length", struct.pack("<Q", 2), FormatError),
    refused("st-seven-bytes", b"\x02\0\0\0\0\0\0", FormatError),
    refused("st-sharding-not-json", sharded("{"), HeaderError),
    refused("st-sharding-a-list", sharded([]), HeaderError),
    refused("st-sharding-unknown-tensor", sharded({"b": {"saved_offsets": [0]}}), MetadataError),
    refused("st-sharding-wrong-rank", sharded({"a": {"saved_offsets": [0, 0]}}), MetadataError),
    refused("st-sharding-negative", sharded({"a": {"saved_offsets": [-1]}}), HeaderError),
    refused("st-sharding-2^64", sharded({"a": {"saved_offsets": [1 << 64]}}), HeaderError),
    refused("st-sharding-true", sharded({"a": {"saved_offsets": [True]}}), HeaderError),
    refused("st-sharding-nested", sharded({"a": {"saved_offsets": [[[]]]}}), HeaderError),
    refused("st-sharding-deep", sharded('{"a":' + nest(100_000) + "}"), HeaderError, LimitExceeded),
    refused(
        "st-sharding-twice",
        sharded('{"a":{"saved_offsets":[0]},"a":{"saved_offsets":[1]}}'),
        HeaderError,
    ),
    opens("st-piece-alone", sharded({"a": {"saved_offsets": [1 << 40]}})),
    opens(
        "st-names-that-need-care",
        frame(
            json.dumps(
                {
                    n: entry("U8", [0], 0, 0)
                    for n in (
                        "",
                        ".",
                        "..",
                        "/etc/passwd",
                        "\x1b[2J",
                        "\u202e",
                        "\0",
                        "a\\b",
                        "x" * 10_000,
                    )
                }
            )
        ),
    ),
    opens(
        "st-200000-tensors",
        lambda _: frame(
            "{"
            + ",".join(
                f'"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(200_000)
            )
            + "}"
        ),
        lambda ckpt: len(ckpt) == 200_000,
    ),
    opens(
        "st-rank-64",
        craft({"a": entry("U8", [1] * 63 + [4], 0, 4)}, 4),
        lambda ckpt: ckpt["a"].numpy().size == 4,
    ),
    opens("st-padding-of-a-megabyte", frame("{" + A + "}" + " " * (1 << 20), DATA)),
]
