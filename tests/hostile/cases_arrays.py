"""Array files of numpy, and archives of them, that lie."""

from __future__ import annotations

import zlib

from holdfast.errors import (
    Corrupted,
    FormatError,
    HeaderError,
    LimitExceeded,
    Truncated,
    Unsupported,
    ZipError,
)
from tests.formats.npy.craft_npy import npy, npz
from tests.formats.zip.craft import Item, build

from .case import Case, opens, refused
from .craft_pickle import stream
from .craft_torch import state, torch_zip

__all__ = ["CASES"]


def header(name: str, text: str | bytes, *errors: type[Exception]) -> Case:
    return refused(f"npy-{name}", npy(text=text), *(errors or (FormatError,)))


def one(
    name: str,
    descr: str = "'<f4'",
    shape: str = "(2, 3)",
    *errors: type[Exception],
    fortran: str = "False",
) -> Case:
    return refused(f"npy-{name}", npy(descr, shape, fortran=fortran), *(errors or (FormatError,)))


def tar_and_array() -> bytes:
    """An array whose elements make a tar header of the whole: torch would read a tar."""
    raw = bytearray(npy("'|u1'", "(384,)", bytes(384)))
    raw[128:136], raw[156:157] = b"0" * 8, b"0"
    raw[148:156] = b" " * 8
    total = sum(raw[:512])
    raw[148:156] = f"{total:06o}\0 ".encode()
    return bytes(raw)


HONEST = npy(data=bytes(range(24)))
ZEROS = npy("'|u1'", "(100000000,)", b"")
BOMB = zlib.compressobj(9, wbits=-15)
PACKED = BOMB.compress(ZEROS) + b"".join(BOMB.compress(bytes(1 << 20)) for _ in range(95))
REST = 100_000_000 - (95 << 20)
PACKED += BOMB.compress(bytes(REST)) + BOMB.flush()
CONTENT_NBYTES = len(ZEROS) + 100_000_000


def bomb(claim: int = CONTENT_NBYTES) -> bytes:
    """A hundred megabytes in a hundred kilobytes."""
    sizes = {"size": claim, "packed": len(PACKED)}
    item = Item("a.npy", b"x", method=8, flags=0, payload=PACKED, local=sizes, central=sizes)
    return build([item], wide=False, alignment=0)


def deflated(name: str, payload: bytes) -> Case:
    """A compressed member with other bytes than it should have."""
    item = Item("a.npy", HONEST, method=8, payload=payload, flags=0)
    return refused(f"npz-{name}", build([item], wide=False, alignment=0), Corrupted)


DAMAGED = build(
    [Item("a.npy", HONEST, payload=HONEST[:-1] + b"?", flags=0)], wide=False, alignment=0
)
OBJECTS = npy("'|O'", "(1,)", stream(b"}"))

CASES = [
    opens("npy-honest", HONEST, lambda ckpt: ckpt["tensor"].numpy().tobytes() == bytes(range(24))),
    opens("npy-version-2", npy(version=(2, 0))),
    opens("npy-version-3", npy(version=(3, 0))),
    opens("npy-other-order-of-fields", npy(text="{'shape':(2,3),\"fortran_order\":False,'descr':'<f4'}")),
    opens("npy-python-2-lengths", npy(shape="(2L, 3L)")),
    opens("npy-no-elements-of-a-long-axis", npy(shape="(0, 1000000)", data=b"")),
    refused("npy-only-a-magic", b"\x93NUMPY", FormatError),
    refused("npy-eleven-bytes", HONEST[:11], Truncated),
    refused("npy-version-0", npy(version=(0, 0)), Unsupported),
    refused("npy-version-4", npy(version=(4, 0)), Unsupported),
    refused("npy-version-1.1", npy(version=(1, 1)), Unsupported),
    refused("npy-header-beyond-the-end", npy(length=60_000), Truncated),
    refused("npy-header-of-2^32-1", npy(version=(2, 0), length=(1 << 32) - 1), LimitExceeded, Truncated),
    refused("npy-header-too-short", npy(length=20), FormatError),
    refused("npy-header-of-nothing", npy(length=0), FormatError),
    refused("npy-header-into-the-data", npy(length=124), FormatError),
    refused("npy-data-too-short", HONEST[:-1], Truncated),
    refused("npy-data-too-long", HONEST + b"x", HeaderError),
    refused("npy-two-arrays", HONEST + HONEST, HeaderError),
    refused("npy-array-and-a-pickle", HONEST + stream(b"}"), HeaderError),
    refused("npy-tar-at-once", tar_and_array(), FormatError),
    one("shape-negative", shape="(-2, 3)"),
    one("shape-is-a-number", shape="6"),
    one("shape-is-a-number-in-brackets", shape="(6)"),
    one("shape-is-a-list", shape="[2, 3]"),
    one("shape-nested", shape="((2, 3),)"),
    one("shape-of-floats", shape="(2.0, 3)"),
    one("shape-of-truths", shape="(True, 6)"),
    one("shape-hexadecimal", shape="(0x2, 3)"),
    one("shape-with-underscores", shape="(1_0, 3)"),
    one("shape-of-other-digits", shape="(\u00b2, 3)"),
    one("shape-computed", shape="(2*1, 3)"),
    one("shape-two-commas", shape="(2,, 3)"),
    one("shape-without-commas", shape="(2 3)"),
    one("shape-2^63", shape=f"({1 << 63},)"),
    one("shape-wraps", shape=f"({1 << 62}, 4)"),
    one("shape-zero-times-huge", shape=f"(0, {1 << 62}, {1 << 62})"),
    one("shape-too-large", shape="(1000, 1000)"),
    one("size-of-5000-digits", shape=f"({'9' * 5000},)"),
    one("rank-65", "'<f4'", "(" + "1, " * 64 + "6)", LimitExceeded),
    one("rank-10000", "'<f4'", "(" + "1, " * 10_000 + "6)", LimitExceeded),
    one("order-is-a-number", fortran="1"),
    one("order-is-text", fortran="'False'"),
    one("order-is-none", fortran="None"),
    one("type-objects", "'|O'", "(2, 3)", Unsupported),
    one("type-objects-of-8", "'|O8'", "(2, 3)", Unsupported),
    one("type-text", "'<U6'", "(1,)", Unsupported),
    one("type-dates", "'<M8[ns]'", "(3,)", Unsupported),
    one("type-long-double", "'<f16'", "(1,)", Unsupported),
    one("type-structured", "[('a', '<f4'), ('b', '|O')]", "(3,)", Unsupported),
    one("type-subarray", "('<f4', (2,))", "(3,)", Unsupported),
    one("type-dict", "{'names': ['a'], 'formats': ['<f4']}", "(3,)", Unsupported),
    one("type-empty", "''"),
    one("type-nonsense", "'float32'"),
    one("type-number", "4"),
    one("type-long-digits", "'<f" + "9" * 4000 + "'"),
    one("type-code", "__import__('os').system('true')"),
    one("type-no-bytes", "'|V0'", "(2, 3)", Unsupported),
    header("no-dict", "['descr', 'fortran_order', 'shape']"),
    header("empty", "{}"),
    header("no-shape", "{'descr': '<f4', 'fortran_order': False}"),
    header("field-twice", "{'descr': '<f4', 'descr': '|O', 'fortran_order': False, 'shape': (2, 3)}"),
    header("another-field", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), 'x': 1}"),
    header("behind-the-dict", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)} + {}"),
    header("comment", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)} # x"),
    header("escape", "{'descr': '<\\x664', 'fortran_order': False, 'shape': (2, 3)}"),
    header("joined-texts", "{'descr': '<' 'f4', 'fortran_order': False, 'shape': (2, 3)}"),
    header("deep", "{" + "(" * 50_000, FormatError),
    header("long-number", "{'shape': (" + "9" * 60_000),
    header("nul", b"{'descr': '<f4\0', 'fortran_order': False, 'shape': (2, 3)}"),
    opens("npz-honest", npz({"a.npy": HONEST, "b/c.npy": HONEST}), lambda ckpt: list(ckpt) == ["a", "b/c"]),
    opens("npz-deflated", npz({"a.npy": HONEST}, method=8), lambda ckpt: ckpt["a"].numpy().tobytes() == bytes(range(24))),
    opens("npz-case-matters", npz({"a.npy": HONEST, "A.npy": HONEST}), lambda ckpt: list(ckpt) == ["a", "A"]),
    opens("npz-objects-stay-closed", npz({"a.npy": HONEST, "o.npy": OBJECTS}), lambda ckpt: list(ckpt) == ["a"]),
    opens("npz-something-else-inside", npz({"a.npy": HONEST, "README": b"text"}), lambda ckpt: list(ckpt) == ["a"]),
    opens("npz-empty", b"PK\5\6" + bytes(18), lambda ckpt: len(ckpt) == 0),
    refused("npz-name-twice", npz({"a.npy": HONEST, "a": HONEST}), ZipError),
    refused("npz-record-twice", build([Item("a.npy", HONEST), Item("a.npy", HONEST)]), ZipError),
    refused("npz-leads-away", npz({"a.npy": HONEST, "../b.npy": HONEST}), ZipError),
    refused("npz-and-a-pickle-of-torch", npz({"a.npy": HONEST, "a/data.pkl": stream(b"}")}), FormatError),
    refused("npz-and-a-pickle-in-capitals", npz({"x/a.npy": HONEST, "x/DATA.PKL": stream(b"}")}), FormatError),
    refused("npz-member-lies", npz({"a.npy": npy(shape="(2, 4)")}), Truncated),
    refused("npz-member-lies-deflated", npz({"a.npy": npy(shape="(2, 4)")}, method=8), Truncated),
    refused("npz-member-cut", npz({"a.npy": HONEST[:-4]}), Truncated),
    refused("npz-member-damaged", DAMAGED, Corrupted),
    refused("npz-header-damaged", npz({"a.npy": HONEST}).replace(b"'<f4', 'f", b"'<i4', 'f"), Corrupted),
    deflated("does-not-inflate", b"\xff" * 60),
    deflated("inflates-to-less", Item("", HONEST[:-1], method=8).stored),
    deflated("inflates-to-more", Item("", HONEST + b"more", method=8).stored),
    deflated("bytes-behind-the-stream", Item("", HONEST, method=8).stored + b"more"),
    deflated("stream-cut", Item("", HONEST, method=8).stored[:-3]),
    refused("npz-bomb", bomb(), LimitExceeded),
    refused("npz-bomb-that-claims-more", bomb(CONTENT_NBYTES + (1 << 30)), FormatError, LimitExceeded),
    opens("npz-is-a-torch-file", torch_zip(state()), lambda ckpt: ckpt.format == "torch-zip"),
    refused("npz-first-is-text", npz({"README": b"text", "a.npy": HONEST}), FormatError),
]  # fmt: skip
