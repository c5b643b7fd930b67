"""Bare pickles of arrays and tensors that lie, and every attack on a torch pickle without the zip around it."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

from holdfast.errors import (
    FormatError,
    LimitExceeded,
    MetadataError,
    PickleError,
    Truncated,
    UnknownFormat,
)

from . import cases_calls, cases_numpy, cases_resources
from .case import Case, either, foreign, opens, refused
from .cases_resources import MILLION, array, dtype
from .craft_pickle import (
    APPENDS,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    MARK,
    NEWOBJ,
    NONE,
    POP,
    REDUCE,
    SETITEM,
    STOP,
    binbytes,
    call,
    dict_of,
    frame,
    get,
    inst,
    integer,
    list_of,
    named,
    number,
    proto,
    put,
    stream,
    text,
    tuple_of,
)
from .craft_torch import DATA, legacy, storage, tensor

__all__ = ["CASES"]

LARGE = 64 << 10
"""From this length on a byte string stays in the file."""

CONTENT = bytes(range(256)) * (LARGE // 256)
LARGE_SHAPE = tuple_of(integer(LARGE))
SYSTEM = call("os", "system", text("true"))
STORAGE = stream(storage(view=NONE))


def bytes8(content: bytes, nbytes: int | None = None, opcode: bytes = b"\x8e") -> bytes:
    """BINBYTES8, with a length that may lie."""
    return opcode + (len(content) if nbytes is None else nbytes).to_bytes(8, "little") + content


def loaded(content: bytes) -> bytes:
    """A call of torch's loader with a whole file as bytes."""
    return call("torch.storage", "_load_from_bytes", content)


def saved(pickle: bytes = STORAGE) -> bytes:
    """A stream of `torch.save` as bytes."""
    return binbytes(legacy(pickle))


def buffer(
    data: bytes, shape: bytes, order: bytes = text("C"), *more: bytes, kind: bytes | None = None
) -> bytes:
    """An array as protocol 5 writes it."""
    return call(
        "numpy._core.numeric", "_frombuffer", data, kind or dtype("u1"), shape, order, *more
    )


def bare(case: Case) -> Case:
    """The pickle of a case without the zip around it."""

    def make(folder: Path) -> bytes:
        content = case.make(folder)
        raw = content.read_bytes() if isinstance(content, Path) else content
        try:
            return zipfile.ZipFile(io.BytesIO(raw)).read("archive/data.pkl")
        except (zipfile.BadZipFile, KeyError):
            return raw

    return either(f"bare-{case.name}", make)


def sparse_file(folder: Path) -> Path:
    """A file of 4 GiB without content, whose pickle says that it is one array."""
    head = stream(array(LARGE_SHAPE, bytes8(b"", (4 << 30) - 100)))
    path = folder / "sparse.pkl"
    path.write_bytes(head.removesuffix(BUILD + STOP))
    os.truncate(path, 4 << 30)
    return path


def same(*values: bytes) -> bytes:
    return stream(list_of(*values))


HONEST = stream(dict_of(text("w"), array(LARGE_SHAPE, bytes8(CONTENT))), protocol=4)

CASES = [
    opens("bare-array", HONEST, lambda ckpt: ckpt["w"].numpy().tobytes() == CONTENT),
    opens(
        "bare-array-of-another-byte-order",
        same(
            array(
                tuple_of(integer(1)),
                binbytes(b"\x01\x02"),
                dtype(
                    "i2",
                    tuple_of(
                        integer(3),
                        text(">"),
                        NONE,
                        NONE,
                        NONE,
                        integer(-1),
                        integer(-1),
                        integer(0),
                    ),
                ),
            )
        ),
        lambda ckpt: ckpt["0"].numpy().tolist() == [258],
    ),
    opens(
        "bare-array-in-a-frame",
        proto(4) + frame(array(LARGE_SHAPE, bytes8(CONTENT)) + STOP),
        lambda ckpt: ckpt["tensor"].numpy().tobytes() == CONTENT,
    ),
    opens(
        "bare-array-transposed",
        same(
            buffer(
                bytes8(CONTENT),
                tuple_of(integer(256), integer(LARGE // 256)),
                text("K"),
                tuple_of(integer(1), integer(0)),
            )
        ),
        lambda ckpt: ckpt["0"].shape == (256, 256),
    ),
    opens(
        "bare-storage",
        same(tensor(loaded(saved()))),
        lambda ckpt: ckpt["0"].numpy().tobytes() == DATA,
    ),
    opens(
        "bare-large-bytes-are-not-read",
        same(bytes8(CONTENT)),
        lambda ckpt: "not read" in str(ckpt.tree[0].args),
    ),
    opens("bare-large-bytes-as-a-key", stream(EMPTY_DICT + bytes8(CONTENT) + NONE + SETITEM)),
    opens("bare-large-bytes-are-called", stream(bytes8(CONTENT) + EMPTY_TUPLE + REDUCE)),
    opens("bare-large-bytes-are-made", stream(bytes8(CONTENT) + EMPTY_TUPLE + NEWOBJ)),
    opens("bare-large-bytes-have-a-state", stream(bytes8(CONTENT) + EMPTY_DICT + BUILD)),
    opens("bare-large-bytes-have-items", stream(bytes8(CONTENT) + MARK + NONE + APPENDS)),
    opens(
        "bare-large-array-of-objects",
        same(array(LARGE_SHAPE, bytes8(CONTENT), call("numpy", "dtype", text("O8")))),
        lambda ckpt: len(ckpt) == 0,
    ),
    opens(
        "bare-large-array-of-text",
        same(array(tuple_of(integer(LARGE // 4)), bytes8(CONTENT), dtype("U1"))),
        lambda ckpt: len(ckpt) == 0,
    ),
    opens(
        "bare-opcodes-that-look-like-a-length",
        same(text(b"B\x7f\x7f\x7f\x00" * 20_000), array(LARGE_SHAPE, bytes8(CONTENT))),
        lambda ckpt: ckpt["1"].shape == (LARGE,),
    ),
    opens(
        "bare-pickle-that-calls-inside-of-a-storage",
        same(loaded(saved(stream(tuple_of(storage(view=NONE), SYSTEM))))),
        foreign("os.system"),
    ),
    opens(
        "bare-loader-in-a-storage",
        same(loaded(saved(stream(tuple_of(storage(view=NONE), loaded(saved())))))),
        foreign("torch.storage._load_from_bytes"),
    ),
    opens(
        "bare-loader-of-text", same(loaded(text("x"))), foreign("torch.storage._load_from_bytes")
    ),
    opens(
        "bare-payload-that-is-popped",
        stream(SYSTEM + POP + array(LARGE_SHAPE, bytes8(CONTENT))),
        foreign("os.system"),
    ),
    opens("bare-inst", b"(" + text("true") + inst("os", "system") + STOP, foreign("os.system")),
    refused(
        "bare-large-array-one-element-more",
        same(array(tuple_of(integer(LARGE + 1)), bytes8(CONTENT))),
        PickleError,
    ),
    refused(
        "bare-large-array-one-element-less",
        same(array(tuple_of(integer(LARGE - 1)), bytes8(CONTENT))),
        PickleError,
    ),
    refused(
        "bare-array-of-2^62-elements",
        same(array(tuple_of(number(1 << 62, 9)), binbytes(b""))),
        MetadataError,
    ),
    refused(
        "bare-array-of-zero-times-2^62",
        same(array(tuple_of(integer(0), number(1 << 61, 9), integer(8)), binbytes(b""))),
        MetadataError,
    ),
    refused(
        "bare-array-of-negative-size",
        same(array(tuple_of(integer(-1)), binbytes(b""))),
        MetadataError,
    ),
    refused(
        "bare-array-with-a-bool-as-size",
        same(array(tuple_of(b"\x88"), binbytes(b"x"))),
        MetadataError,
    ),
    refused(
        "bare-array-of-rank-65",
        same(array(tuple_of(*[integer(1)] * 65), binbytes(b"x"))),
        LimitExceeded,
    ),
    refused(
        "bare-array-of-rank-10000",
        same(array(tuple_of(*[integer(1)] * 10_000), binbytes(b"x"))),
        LimitExceeded,
    ),
    refused(
        "bare-axes-that-repeat",
        same(
            buffer(
                binbytes(b"abcd"),
                tuple_of(integer(2), integer(2)),
                text("K"),
                tuple_of(integer(0), integer(0)),
            )
        ),
        PickleError,
    ),
    refused(
        "bare-axes-of-another-rank",
        same(
            buffer(
                binbytes(b"abcd"), tuple_of(integer(4)), text("K"), tuple_of(integer(0), integer(1))
            )
        ),
        PickleError,
    ),
    refused(
        "bare-axes-that-are-no-integers",
        same(buffer(binbytes(b"abcd"), tuple_of(integer(4)), text("K"), tuple_of(text("0")))),
        PickleError,
    ),
    refused(
        "bare-axes-without-a-reason",
        same(buffer(binbytes(b"abcd"), tuple_of(integer(4)), text("C"), tuple_of(integer(0)))),
        PickleError,
    ),
    refused(
        "bare-order-that-numpy-has-not",
        same(buffer(binbytes(b"abcd"), tuple_of(integer(4)), text("Z"))),
        PickleError,
    ),
    refused("bare-storage-cut", same(loaded(binbytes(legacy(STORAGE)[:-4]))), FormatError),
    refused(
        "bare-storage-with-a-tail", same(loaded(binbytes(legacy(STORAGE) + b"tail"))), PickleError
    ),
    refused(
        "bare-storage-that-reaches-into-the-file",
        same(loaded(binbytes(legacy(STORAGE)[:-16])), text("x" * 100)),
        FormatError,
    ),
    refused("bare-storage-that-is-no-stream", same(loaded(binbytes(b"x" * 100))), FormatError),
    refused(
        "bare-storage-that-is-a-zip", same(loaded(binbytes(b"PK\3\4" + bytes(100)))), FormatError
    ),
    refused("bare-length-of-2^63", stream(bytes8(CONTENT, 1 << 63)), Truncated),
    refused("bare-length-of-2^64-1", stream(bytes8(CONTENT, (1 << 64) - 1)), Truncated),
    refused("bare-length-beyond-the-end", stream(bytes8(CONTENT, LARGE + 2)), Truncated),
    refused("bare-length-that-takes-the-stop", stream(bytes8(CONTENT, LARGE + 1)), Truncated),
    refused("bare-negative-binstring", stream(b"T\xff\xff\xff\xff" + CONTENT), FormatError),
    refused(
        "bare-frame-that-ends-in-a-length",
        proto(4) + frame(bytes8(CONTENT)[:5]) + bytes8(CONTENT)[5:] + STOP,
        PickleError,
    ),
    refused(
        "bare-frame-that-ends-in-a-payload",
        proto(4) + frame(bytes8(CONTENT)[:100]) + bytes8(CONTENT)[100:] + STOP,
        PickleError,
    ),
    refused(
        "bare-frame-inside-of-a-frame",
        proto(4) + frame(frame(NONE, 0) + bytes8(CONTENT), 1 << 17) + bytes(1 << 16) + STOP,
        FormatError,
    ),
    refused("bare-two-pickles", HONEST + HONEST, FormatError),
    refused("bare-tail", HONEST + bytes(1000), FormatError),
    refused("bare-persistent-id", same(storage()), PickleError),
    refused("bare-no-stop", HONEST[:-1], Truncated),
    refused("bare-only-proto", proto(4), FormatError),
    refused("bare-sparse-4-gib", sparse_file, FormatError),
    refused(
        "bare-joblib",
        stream(
            named("joblib.numpy_pickle", "NumpyArrayWrapper")
            + EMPTY_TUPLE
            + NEWOBJ
            + EMPTY_DICT
            + BUILD
            + b"\xff" * 8
        ),
        UnknownFormat,
    ),
    opens(
        "bare-one-payload-in-many-arrays",
        same(bytes8(CONTENT) + put(0), *[array(LARGE_SHAPE, get(0))] * 2_000),
        lambda ckpt: len(ckpt) == 2_000,
    ),
    opens(
        "bare-one-short-payload-in-many-arrays",
        same(binbytes(b"x" * 4000) + put(0), *[array(tuple_of(integer(4000)), get(0))] * 2_000),
        lambda ckpt: len(ckpt) == 2_000,
    ),
    opens(
        "bare-one-file-loaded-many-times",
        same(text("x" * 20), saved() + put(0), *[loaded(get(0))] * 20_000),
        lambda ckpt: len(ckpt) >= 1,
    ),
    refused(
        "bare-one-text-decoded-many-times",
        same(
            text("x" * 10_000) + put(0),
            *[array(tuple_of(integer(10_000)), call("_codecs", "encode", get(0), text("latin1")))]
            * 5_000,
        ),
        PickleError,
    ),
    either("bare-many-lists", stream(EMPTY_LIST * MILLION)),
    *(bare(case) for cases in (cases_calls, cases_resources, cases_numpy) for case in cases.CASES),
]
