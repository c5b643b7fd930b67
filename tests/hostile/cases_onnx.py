"""ONNX models that lie: lengths, numbers, dims, and names of external files that lead elsewhere."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from holdfast.errors import (
    FormatError,
    HeaderError,
    LimitExceeded,
    MetadataError,
    StoreError,
    Truncated,
    UnknownFormat,
    UnsafePath,
    Unsupported,
)
from tests.formats.onnx.craft_onnx import (
    BOOL,
    FLOAT,
    INT4,
    INT8,
    INT64,
    STRING,
    UINT8,
    UINT64,
    content,
    external,
    floats,
    graph,
    model,
    number,
    packed,
    tag,
    tensor,
    varint,
)

from .case import Case, Make, either, opens, refused

__all__ = ["CASES"]

TWO = struct.pack("<2f", 1, 2)
HUGE = 1 << 63
HEAD = number(1, 10)
HONEST = model(tensor("w"), tensor("v", (3,), INT64, packed(7, (-1, 0, 300))))


def beside(
    location: str,
    offset: object = None,
    length: object = None,
    *more: tuple[str, str],
    write: str = "",
    nbytes: int = 8,
    link: str = "",
) -> Make:
    """A model whose tensor of two floats lies in another file; `link` makes that file a link to a place."""

    def make(folder: Path) -> Path:
        inner = folder / "model"
        inner.mkdir(exist_ok=True)
        (folder / "secret").write_bytes(TWO)
        if write:
            (inner / write).write_bytes(bytes(nbytes))
        if link:
            os.symlink(link, inner / "link")
        path = inner / "model.onnx"
        path.write_bytes(model(tensor("w", (2,), FLOAT, external(location, offset, length, *more))))
        return path

    return make


def device(folder: Path) -> Path:
    path = beside("pipe")(folder)
    os.mkfifo(path.parent / "pipe")
    return path


def one(name: str, message: bytes, *errors: type[Exception]) -> Case:
    return refused(f"onnx-{name}", model(message), *(errors or (FormatError,)))


CASES = [
    opens("onnx-honest", model(tensor("w")), lambda ckpt: ckpt["w"].numpy().tolist() == [1, 2]),
    opens(
        "onnx-floats",
        model(tensor("w", (2,), FLOAT, floats(4, (1, 2)))),
        lambda ckpt: ckpt["w"].numpy().tolist() == [1, 2],
    ),
    opens(
        "onnx-varints",
        model(tensor("w", (3,), INT64, packed(7, (-1, 0, 300)))),
        lambda ckpt: ckpt["w"].numpy().tolist() == [-1, 0, 300],
    ),
    opens(
        "onnx-no-elements",
        model(tensor("w", (0, 5), FLOAT, b"")),
        lambda ckpt: ckpt["w"].shape == (0, 5),
    ),
    opens(
        "onnx-external",
        beside("w.bin", 4, 8, write="w.bin", nbytes=12),
        lambda ckpt: ckpt["w"].numpy().tolist() == [0, 0],
    ),
    opens(
        "onnx-dims-one-by-one",
        model(number(1, 2) + number(1, 1) + number(2, FLOAT) + content(8, "w") + content(9, TWO)),
        lambda ckpt: ckpt["w"].shape == (2, 1),
    ),
    opens(
        "onnx-unknown-fields",
        model(
            tensor("w")
            + content(99, b"x")
            + number(98, 1)
            + tag(97, 5)
            + bytes(4)
            + tag(96, 1)
            + bytes(8),
            more=content(99, b"x"),
        ),
    ),
    opens(
        "onnx-text-is-not-read",
        model(tensor("w", (1,), STRING, content(6, b"x")), tensor("v")),
        lambda ckpt: list(ckpt) == ["v"],
    ),
    opens(
        "onnx-int4-is-not-read",
        model(tensor("w", (4,), INT4, raw=b"xx")),
        lambda ckpt: len(ckpt) == 0,
    ),
    opens(
        "onnx-sparse-is-not-read",
        HEAD + content(7, graph(tensor("v"), more=content(15, content(1, tensor("w"))))),
        lambda ckpt: list(ckpt) == ["v"],
    ),
    opens(
        "onnx-3000-tensors",
        model(*[tensor(str(i)) for i in range(3_000)]),
        lambda ckpt: len(ckpt) == 3_000,
    ),
    opens(
        "onnx-3000-tensors-of-varints",
        model(*[tensor(str(i), (2,), INT64, packed(7, (i, -i))) for i in range(3_000)]),
        lambda ckpt: ckpt["7"].numpy().tolist() == [7, -7],
    ),
    opens(
        "onnx-100000-nodes",
        HEAD + content(7, content(1, b"") * 100_000 + graph(tensor("w"))),
        lambda ckpt: list(ckpt) == ["w"],
    ),
    either(
        "onnx-100000-fields", HEAD + content(7, graph(tensor("w"), more=number(99, 1) * 100_000))
    ),
    either(
        "onnx-10000-opsets",
        model(tensor("w"), more=content(8, content(1, "a") + number(2, 1)) * 10_000),
    ),
    either("onnx-nested-graphs", model(tensor("w"), more=content(25, b"\x3a" * 1000))),
    refused("onnx-only-a-version", HEAD, UnknownFormat),
    refused("onnx-graph-first", content(7, graph(tensor("w"))), UnknownFormat),
    refused("onnx-version-0", number(1, 0) + content(7, graph()), UnknownFormat),
    refused("onnx-no-graph", HEAD + content(2, "x") + content(8, b""), UnknownFormat),
    refused(
        "onnx-two-graphs", model(tensor("w"), more=content(7, graph(tensor("v")))), HeaderError
    ),
    refused("onnx-graph-is-a-number", model(tensor("w"), more=number(7, 1)), HeaderError),
    refused("onnx-cut", model(tensor("w"))[:-20], FormatError),
    refused("onnx-cut-in-the-graph", HEAD + content(7, graph(tensor("w")))[:-4], Truncated),
    refused("onnx-tail", model(tensor("w")) + b"\0", FormatError),
    refused("onnx-graph-of-2^63-bytes", HEAD + content(7, b"", nbytes=HUGE), Truncated),
    refused("onnx-graph-of-2^64-1-bytes", HEAD + content(7, b"", nbytes=(1 << 64) - 1), Truncated),
    refused("onnx-endless-varint", HEAD + content(7, b"\x2a" + b"\xff" * 20), HeaderError),
    refused(
        "onnx-varint-of-65-bits", HEAD + content(7, b"\x08" + b"\xff" * 9 + b"\x02"), HeaderError
    ),
    refused("onnx-varint-cut", HEAD + content(7, graph(tensor("w")) + b"\xff"), FormatError),
    refused("onnx-field-0", HEAD + content(7, graph(tensor("w"), more=number(0, 1))), HeaderError),
    refused(
        "onnx-field-2^29",
        HEAD + content(7, graph(tensor("w"), more=number(1 << 29, 1))),
        HeaderError,
    ),
    refused(
        "onnx-group",
        HEAD + content(7, graph(tensor("w"), more=tag(99, 3) + tag(99, 4))),
        HeaderError,
    ),
    refused(
        "onnx-wire-type-7", HEAD + content(7, graph(tensor("w"), more=tag(99, 7))), HeaderError
    ),
    refused(
        "onnx-initializer-longer-than-its-graph",
        HEAD + content(7, content(5, tensor("w"), nbytes=1 << 20)) + bytes(1 << 21),
        FormatError,
    ),
    refused("onnx-initializer-is-a-number", HEAD + content(7, number(5, 7)), HeaderError),
    refused("onnx-name-twice", model(tensor("w"), tensor("w")), HeaderError),
    one("no-name", tensor("", (2,), FLOAT, raw=TWO), HeaderError),
    one("name-with-a-nul", tensor("a\0b"), HeaderError),
    one("name-that-is-no-utf8", tensor(b"\xff"), HeaderError),
    one("two-names", tensor("w") + content(8, "v"), HeaderError),
    one("two-types", tensor("w") + number(2, INT64), HeaderError),
    one("two-raw-datas", tensor("w") + content(9, TWO), HeaderError),
    one("two-locations", tensor("w") + number(14, 0) + number(14, 1), HeaderError),
    one("location-2", tensor("w") + number(14, 2), HeaderError),
    one("raw-and-floats", tensor("w", (2,), FLOAT, floats(4, (3, 4)), raw=TWO), MetadataError),
    one(
        "floats-in-pieces", tensor("w", (2,), FLOAT, floats(4, (1,)), floats(4, (2,))), HeaderError
    ),
    one("floats-that-are-not-packed", tensor("w", (1,), FLOAT, tag(4, 5) + bytes(4)), HeaderError),
    one("floats-of-another-type", tensor("w", (2,), FLOAT, packed(7, (1, 2))), MetadataError),
    one("raw-data-is-a-number", tensor("w", (2,), FLOAT, number(9, 8)), HeaderError),
    one("type-is-text", content(1, b"\2") + content(2, "FLOAT") + content(8, "w"), HeaderError),
    one("type-0", tensor("w", (2,), 0), Unsupported),
    one("type-1000", tensor("w", (2,), 1000), Unsupported),
    one("segment", tensor("w") + content(3, number(1, 0) + number(2, 1)), Unsupported),
    one("no-content", tensor("w", (2,), FLOAT, b""), MetadataError),
    one("one-byte-more", tensor("w", (2,), FLOAT, raw=TWO + b"x"), MetadataError),
    one("one-byte-less", tensor("w", (2,), FLOAT, raw=TWO[:-1]), MetadataError),
    one("dim-negative", tensor("w", (-1,)), MetadataError),
    one("dim-2^62", tensor("w", (1 << 62,)), MetadataError),
    one("dims-that-wrap-to-2", tensor("w", (1 << 32, 1 << 32, 2)), MetadataError),
    one("dims-zero-times-huge", tensor("w", (0, 1 << 61, 1 << 61), FLOAT, b""), MetadataError),
    one("rank-65", tensor("w", [1] * 65), LimitExceeded),
    one("rank-100000", tensor("w", [1] * 100_000), LimitExceeded),
    one("rank-65-one-by-one", number(1, 1) * 65 + tensor("w", ()), LimitExceeded),
    one("dims-are-text", content(1, b"\xff") + tensor("w", ()), FormatError),
    one("varints-fewer", tensor("w", (3,), INT64, packed(7, (1, 2))), MetadataError),
    one("varints-more", tensor("w", (1,), INT64, packed(7, (1, 2))), MetadataError),
    one("varints-2^40-claimed", tensor("w", (1 << 40,), UINT8, packed(5, (1, 2))), MetadataError),
    one("varints-cut", tensor("w", (2,), INT64, content(7, b"\x01\x80")), MetadataError),
    one(
        "varints-of-11-bytes",
        tensor("w", (2,), UINT64, content(11, b"\x80" * 10 + b"\x01\x01")),
        MetadataError,
    ),
    one(
        "varints-of-65-bits",
        tensor("w", (1,), UINT64, content(11, b"\xff" * 9 + b"\x02")),
        MetadataError,
    ),
    one("varints-beyond-their-type", tensor("w", (1,), INT8, packed(5, (128,))), MetadataError),
    one("varints-below-their-type", tensor("w", (1,), INT8, packed(5, (-129,))), MetadataError),
    one("varints-negative-unsigned", tensor("w", (1,), UINT8, packed(5, (-1,))), MetadataError),
    either("onnx-bool-that-is-2", model(tensor("w", (1,), BOOL, packed(5, (2,))))),
    one("external-and-raw", tensor("w", (2,), FLOAT, external("x"), raw=TWO), MetadataError),
    refused(
        "onnx-external-of-bytes", model(tensor("w", (2,), FLOAT, external("w.bin"))), Unsupported
    ),
    refused("onnx-external-missing", beside("w.bin"), StoreError),
    refused("onnx-external-cut", beside("w.bin", 0, 8, write="w.bin", nbytes=7), Truncated),
    refused("onnx-external-offset-beyond", beside("w.bin", 1 << 40, 8, write="w.bin"), Truncated),
    refused("onnx-external-offset-negative", beside("w.bin", -4, 8, write="w.bin"), HeaderError),
    refused(
        "onnx-external-offset-huge", beside("w.bin", "9" * 5000, 8, write="w.bin"), HeaderError
    ),
    refused("onnx-external-offset-hex", beside("w.bin", "0x4", 8, write="w.bin"), HeaderError),
    refused(
        "onnx-external-offset-other-digits", beside("w.bin", "٤", 8, write="w.bin"), HeaderError
    ),
    refused(
        "onnx-external-length-wrong",
        beside("w.bin", 0, 9, write="w.bin", nbytes=100),
        MetadataError,
    ),
    refused(
        "onnx-external-twice",
        beside("w.bin", 0, 8, ("location", "v.bin"), write="w.bin"),
        HeaderError,
    ),
    refused("onnx-external-without-a-location", beside("", 0, 8, write="w.bin"), UnsafePath),
    refused("onnx-external-above", beside("../secret", 0, 8), UnsafePath),
    refused("onnx-external-above-later", beside("a/../../secret", 0, 8), UnsafePath),
    refused("onnx-external-absolute", beside("/etc/passwd", 0, 8), UnsafePath),
    refused("onnx-external-backslash", beside("..\\secret", 0, 8), UnsafePath),
    refused("onnx-external-dot", beside("./w.bin", 0, 8, write="w.bin"), UnsafePath),
    refused("onnx-external-nul", beside("w.bin\0x", 0, 8, write="w.bin"), FormatError),
    refused("onnx-external-url", beside("https://host/w.bin", 0, 8), UnsafePath),
    refused("onnx-external-is-a-link-out", beside("link", 0, 8, link="../secret"), UnsafePath),
    refused(
        "onnx-external-in-a-link-out",
        beside("link/secret", 0, 8, link=".."),
        UnsafePath,
        StoreError,
    ),
    refused("onnx-external-is-a-folder", beside("link", 0, 8, link="."), UnsafePath, StoreError),
    refused("onnx-external-is-a-pipe", device, UnsafePath),
    either(
        "onnx-pickle-at-once", model(tensor("w"), more=content(14, b"cos\nsystem\n(S'true'\ntR."))
    ),
    refused("onnx-zeros", HEAD + bytes(1000), UnknownFormat),
    refused("onnx-a-field-of-the-whole-file", varint(10), UnknownFormat),
]
