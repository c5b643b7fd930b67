"""GGUF headers that lie."""

from __future__ import annotations

import struct

from holdfast.errors import (
    FormatError,
    HeaderError,
    LimitExceeded,
    MetadataError,
    Truncated,
    Unsupported,
)
from tests.formats.gguf.craft_gguf import array, gguf, info, text, texts, value

from .case import Case, either, opens, refused

__all__ = ["CASES"]

DATA = bytes(range(32))
W = info("w", [8])
U32 = struct.pack("<I", 1)
HUGE = 1 << 63
LENGTHS = (1 << 20, HUGE, (1 << 64) - 1)


def one(name: str, entry: bytes, *errors: type[Exception], data: bytes = DATA) -> Case:
    return refused(f"gguf-{name}", gguf([entry], data), *(errors or (FormatError,)))


def kept(name: str, *values: bytes) -> Case:
    return opens(
        f"gguf-{name}",
        gguf([W], DATA, values),
        lambda ckpt: len(dict(ckpt.metadata)) == len(values),
    )


def held(name: str, *values: bytes, errors: tuple[type[Exception], ...] = (FormatError,)) -> Case:
    return refused(f"gguf-{name}", gguf([W], DATA, values), *errors)


def nested(depth: int) -> bytes:
    return array(9, 1, b"") * depth + array(4, 0, b"")


def pickle_and_tensors() -> bytes:
    """A file whose counts are opcodes: GGUF as a float, V as a text up to a newline, and behind that whatever one likes."""
    count = 0x56 << 8
    infos = [info(str(i), [0]) for i in range(count)]
    payload = b"\ncos\nsystem\n(Vtrue\ntR."
    return gguf(infos, b"", [value("x", 8, text(payload))])


CASES = [
    opens("gguf-honest", gguf([W], DATA), lambda ckpt: ckpt["w"].numpy().tobytes() == DATA),
    opens("gguf-version-2", gguf([W], DATA, version=2)),
    opens("gguf-nothing-in-it", gguf(), lambda ckpt: len(ckpt) == 0),
    opens("gguf-big-endian", gguf([info("w", [8], order=">")], DATA, order=">"), lambda ckpt: ckpt["w"].shape == (8,)),
    opens("gguf-rank-0", gguf([info("w", [])], DATA[:4]), lambda ckpt: ckpt["w"].shape == ()),
    opens("gguf-no-elements", gguf([info("w", [0, 5])], b""), lambda ckpt: ckpt["w"].shape == (5, 0)),
    opens("gguf-last-padding-missing", gguf([info("w", [7])], DATA[:28])),
    opens("gguf-any-order", gguf([info("b", [8], offset=32), info("a", [8])], DATA * 2), lambda ckpt: list(ckpt) == ["b", "a"]),
    kept("values", value("a", 4, U32), value("b", 8, text("x")), value("c", 9, texts("x", "y")), value("d", 9, nested(3))),
    kept("text-that-is-no-utf8", value("a", 8, text(b"\xff\xfe"))),
    kept("text-with-a-nul", value("a", 8, text("x\0y"))),
    kept("every-scalar", *(value(str(k), k, bytes(n)) for k, n in enumerate((1, 1, 2, 2, 4, 4, 4, 1))), value("f", 12, bytes(8))),
    kept("no-numbers", value("a", 6, struct.pack("<f", float("nan"))), value("b", 12, struct.pack("<d", float("inf")))),
    kept("nesting-60", value("a", 9, nested(60))),
    kept("50000-texts", value("a", 9, array(8, 50_000, text("word") * 50_000))),
    kept("50000-empty-arrays", value("a", 9, array(9, 50_000, array(4, 0, b"") * 50_000))),
    opens("gguf-3000-tensors", gguf([info(str(i), [0]) for i in range(3_000)]), lambda ckpt: len(ckpt) == 3_000),
    refused("gguf-only-a-magic", b"GGUF", FormatError),
    refused("gguf-cut-in-the-counts", gguf()[:20], Truncated),
    refused("gguf-version-0", gguf([W], DATA, version=0), Unsupported),
    refused("gguf-version-1", gguf([W], DATA, version=1), Unsupported),
    refused("gguf-version-4", gguf([W], DATA, version=4), Unsupported),
    refused("gguf-version-2^31", gguf([W], DATA, version=1 << 31), Unsupported),
    *(refused(f"gguf-{n:#x}-tensors", gguf([W], DATA, tensors=n), Truncated) for n in (1 << 32, HUGE, (1 << 64) - 1)),
    *(refused(f"gguf-{n:#x}-values", gguf([W], DATA, count=n), Truncated) for n in (1 << 32, HUGE, (1 << 64) - 1)),
    refused("gguf-one-tensor-more", gguf([W], DATA, tensors=2), FormatError),
    refused("gguf-one-tensor-less", gguf([W, info("v", [8], offset=32)], DATA * 2, tensors=1), FormatError),
    either("gguf-one-value-more", gguf([W], DATA, count=1)),
    one("name-empty", info("", [8]), HeaderError),
    held("key-empty", value("", 4, U32), errors=(HeaderError,)),
    *(held(f"key-of-{n:#x}-bytes", text("a", length=n), errors=(Truncated,)) for n in LENGTHS),
    *(held(f"text-of-{n:#x}-bytes", value("a", 8, text("x", length=n)), errors=(Truncated,)) for n in LENGTHS),
    *(held(f"array-of-{n:#x}", value("a", 9, array(0, n, b"")), errors=(Truncated,)) for n in LENGTHS),
    held("array-of-2^61-numbers-that-wrap", value("a", 9, array(10, 1 << 61, b"")), errors=(Truncated,)),
    held("array-of-2^63-texts", value("a", 9, array(8, HUGE, b"")), errors=(Truncated,)),
    held("array-of-2^63-arrays", value("a", 9, array(9, HUGE, b"")), errors=(Truncated,)),
    held("text-in-an-array-of-2^64-1", value("a", 9, array(8, 2, text("x", length=(1 << 64) - 1))), errors=(Truncated,)),
    held("last-text-beyond-the-end", value("a", 9, array(8, 1, text("x", length=1 << 30))), errors=(Truncated,)),
    held("array-of-no-type", value("a", 9, array(13, 0, b""))),
    held("array-of-type-2^32-1", value("a", 9, array((1 << 32) - 1, 1, b""))),
    held("value-of-no-type", value("a", 13, b"")),
    held("nesting-65", value("a", 9, nested(65)), errors=(LimitExceeded,)),
    held("nesting-20000", value("a", 9, nested(20_000)), errors=(LimitExceeded,)),
    held("value-twice", value("a", 4, U32), value("a", 4, U32)),
    held("key-with-a-nul", value("a\0b", 4, U32)),
    held("key-that-is-no-utf8", value(b"\xff", 4, U32)),
    *(held(f"alignment-{n}", value("general.alignment", 4, struct.pack("<I", n)), errors=(HeaderError,)) for n in (0, 3, 24, 48)),
    held("alignment-2^31", value("general.alignment", 4, struct.pack("<I", 1 << 31)), errors=(FormatError,)),
    held("alignment-is-text", value("general.alignment", 8, text("32")), errors=(HeaderError,)),
    held("alignment-of-64-bits", value("general.alignment", 10, struct.pack("<Q", 32)), errors=(HeaderError,)),
    held("alignment-is-an-array", value("general.alignment", 9, array(4, 1, U32)), errors=(HeaderError,)),
    refused("gguf-name-twice", gguf([W, W], DATA), HeaderError),
    one("name-with-a-nul", info("w\0.x", [8])),
    one("name-that-is-no-utf8", info(b"\xc3", [8])),
    one("rank-65", info("w", [1] * 64 + [8]), LimitExceeded),
    one("rank-2^32-1", info("w", [8], rank=(1 << 32) - 1), LimitExceeded),
    one("rank-more-than-there", info("w", [8], rank=9)),
    one("size-2^63", info("w", [HUGE]), MetadataError),
    one("size-2^64-1", info("w", [(1 << 64) - 1]), MetadataError),
    one("size-wraps-to-8", info("w", [1 << 32, 1 << 32, 8]), MetadataError),
    one("size-zero-times-huge", info("w", [0, 1 << 62, 1 << 62]), MetadataError),
    one("size-too-large", info("w", [1 << 40]), Truncated),
    one("one-element-more", info("w", [9]), Truncated),
    one("type-4-withdrawn", info("w", [8], 4), Unsupported),
    one("type-1000", info("w", [8], 1000), Unsupported),
    one("type-2^32-1", info("w", [8], (1 << 32) - 1), Unsupported),
    one("blocks-of-33-elements", info("w", [33], 2), MetadataError),
    one("blocks-of-no-axis", info("w", [], 2), MetadataError),
    one("blocks-too-few", info("w", [64], 2), Truncated),
    one("offset-not-aligned", info("w", [4], offset=8), HeaderError),
    one("offset-2^63", info("w", [8], offset=HUGE), FormatError),
    one("offset-wraps", info("w", [8], offset=(1 << 64) - 32), FormatError),
    one("offset-past-the-end", info("w", [8], offset=1 << 20), FormatError),
    one("hole-before-the-first", info("w", [8], offset=32), HeaderError, data=DATA * 2),
    one("bytes-behind-the-last", info("w", [8]), HeaderError, data=DATA * 2),
    refused("gguf-overlap-whole", gguf([W, info("v", [8])], DATA), HeaderError),
    refused("gguf-overlap-part", gguf([info("w", [16]), info("v", [8], offset=32)], DATA * 2), HeaderError),
    refused("gguf-empty-inside-of-another", gguf([info("w", [16]), info("v", [0], offset=32)], DATA * 2), HeaderError),
    refused("gguf-hole", gguf([W, info("v", [8], offset=64)], DATA * 3), HeaderError),
    refused("gguf-no-tensors-but-data", gguf([], DATA * 4), HeaderError),
    refused("gguf-pickle-in-the-tail", gguf([W], DATA + b"cos\nsystem\n(Vtrue\ntR." * 4), HeaderError),
    refused("gguf-pickle-at-once", lambda _: pickle_and_tensors(), FormatError),
]  # fmt: skip
