"""Zips that two readers would see differently, around a pickle that is honest; one base, one lie each.

tests/formats/zip/test_zip_hostile.py has a case for every field; here are the ways in which they reach `open`.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.errors import (
    Corrupted,
    FormatError,
    HeaderError,
    LimitExceeded,
    Truncated,
    UnknownFormat,
    ZipError,
)
from tests.formats.zip.craft import (
    DESCRIBED,
    UTF8,
    Item,
    block,
    build,
    central_entry,
    descriptor,
    make_old_cpython_item,
    tail,
)

from .case import Case, opens, refused
from .craft_pickle import EMPTY_DICT, call, stream, text
from .craft_torch import DATA, records, state, torch_zip

__all__ = ["CASES"]

HONEST = records(state())
EVIL = stream(call("os", "system", text("true")))
MAX32 = 0xFFFFFFFF


def lie(name: str, index: int = 0, /, *errors: type[Exception], **lies: object) -> Case:
    """The honest archive with one record changed; 0 is data.pkl, 2 the storage, 3 the version."""
    items = list(HONEST)
    items[index] = replace(items[index], **lies)
    return refused(f"zip-{name}", build(items), *(errors or (ZipError,)))


def whole(
    name: str, *errors: type[Exception], items: list[Item] | None = None, **lies: object
) -> Case:
    return refused(f"zip-{name}", build(items or HONEST, **lies), *(errors or (ZipError,)))  # type: ignore[arg-type]


def with_also(*more: Item, first: bool = False) -> list[Item]:
    return [*more, *HONEST] if first else [*HONEST, *more]


def overlapping() -> bytes:
    """Two directory entries for one record."""
    raw = build(HONEST)
    at = raw.index(b"PK\1\2")
    body = raw[:at]
    offset = body.rindex(b"PK\3\4")
    entries = raw[at : raw.index(b"PK\6\6")] + central_entry(
        replace(HONEST[3], name="archive/other"), offset
    )
    return body + entries + tail(at, len(entries), len(HONEST) + 1)


def polyglot(prefix: bytes) -> bytes:
    """Something else in front; offsets still count from the archive's own start, as self-extracting files have them."""
    return prefix + build(HONEST)


def many(count: int) -> bytes:
    return build([*HONEST, *(Item(f"archive/e/{i}") for i in range(count))], alignment=0)


def repacked_by_old_python(*, to_pipe: bool) -> list[Item]:
    """The records of a checkpoint that zipfile of Python 3.6 to 3.11.3 packed again."""
    return [make_old_cpython_item(item.name, item.content, to_pipe=to_pipe) for item in HONEST]


BOMB = b"\0" * 8_000_000

CASES = [
    opens(
        "zip-honest",
        build(HONEST),
        lambda ckpt: ckpt["weight"].numpy().tolist() == [[1, 2], [3, 4]],
    ),
    opens(
        "zip-repacked-by-old-python",
        build(repacked_by_old_python(to_pipe=False), wide=False, alignment=0),
        lambda ckpt: ckpt["weight"].numpy().tolist() == [[1, 2], [3, 4]],
    ),
    opens(
        "zip-repacked-by-old-python-to-a-pipe",
        build(repacked_by_old_python(to_pipe=True), wide=False, alignment=0),
        lambda ckpt: ckpt["weight"].numpy().tolist() == [[1, 2], [3, 4]],
    ),
    whole("duplicate-name", items=with_also(Item("archive/data.pkl", EVIL))),
    whole("duplicate-name-first", items=with_also(Item("archive/data.pkl", EVIL), first=True)),
    whole("duplicate-storage", items=with_also(Item("archive/data/0", bytes(16)))),
    whole("name-differs-in-case", items=with_also(Item("archive/DATA.pkl", EVIL))),
    whole("prefix-differs-in-case", items=with_also(Item("Archive/data.pkl", EVIL))),
    whole(
        "name-differs-in-unicode-case",
        items=with_also(Item("archive/\u212a", b"1"), Item("archive/k", b"1")),
    ),
    whole("name-absolute", items=with_also(Item("/etc/passwd", b"x"))),
    whole("name-climbs", items=with_also(Item("archive/../../x", b"x"))),
    whole("name-backslash", items=with_also(Item("archive\\data.pkl", EVIL))),
    whole("name-nul", items=with_also(Item("archive/data.pkl\0.txt", EVIL))),
    whole("name-not-utf8", items=with_also(Item(b"archive/\xff", b"x"))),
    whole("name-empty", items=with_also(Item("", b"x"))),
    whole("name-drive-letter", items=with_also(Item("C:x", b"x"))),
    whole(
        "two-top-folders",
        FormatError,
        items=with_also(Item("other/data.pkl", EVIL), Item("other/version", b"3\n")),
    ),
    whole(
        "two-top-folders-first",
        FormatError,
        items=with_also(Item("evil/data.pkl", EVIL), Item("evil/version", b"3\n"), first=True),
    ),
    whole(
        "root-pickle-beside-a-folder",
        FormatError,
        items=[
            Item("evil/data.pkl", EVIL),
            Item("evil/version", b"3\n"),
            Item("data.pkl", stream(EMPTY_DICT)),
            Item("version", b"3\n"),
        ],
    ),
    whole(
        "no-top-folder",
        FormatError,
        items=[Item("data.pkl", state()), Item("data/0", DATA), Item("version", b"3\n")],
    ),
    lie("local-name-differs", local={"name": b"archive/data.pkx"}),
    lie("local-name-longer", local={"name": b"archive/data.pkl2"}),
    lie("local-flags-differ", local={"flags": DESCRIBED}),
    lie("local-method-differs", local={"method": 8}),
    lie("local-size-differs", local={"size": 1, "packed": 1}),
    lie("local-crc-differs", local={"crc": 1}),
    lie("local-extra-hides-payload", local={"extra_nbytes": 200}),
    lie("local-extra-renames", local={"extra": block(0x7075, b"\1" + bytes(4) + b"archive/evil")}),
    lie("local-signature", 0, FormatError, local={"signature": b"PK\3\5"}),
    lie(
        "central-extra-renames",
        central={"extra": block(0x7075, b"\1" + bytes(4) + b"archive/evil")},
    ),
    lie("central-size-too-large", central={"size": 10**6, "packed": 10**6}),
    lie("central-size-too-small", central={"size": 3, "packed": 3}),
    lie("central-offset-past-the-end", central={"offset": 10**6}),
    lie("central-offset-saturated", central={"offset": MAX32}),
    lie("central-zip64-offset-2^64", central={"offset": MAX32, "extra": block(1, b"\xff" * 8)}),
    lie("central-comment", central={"comment": b"PK\5\6"}),
    lie("central-symlink", central={"attributes": 0o120777 << 16, "made_by": 0x031E}),
    lie("central-device", central={"attributes": 0o060666 << 16}),
    lie("central-folder-attribute", central={"attributes": 0x10}),
    lie("encrypted", flags=UTF8 | DESCRIBED | 1),
    lie("strong-encryption", flags=UTF8 | DESCRIBED | 1 << 6),
    lie("other-disk", central={"disk": 1}),
    lie("descriptor-lies-about-crc", descriptor=descriptor(HONEST[0], crc=1)),
    lie("descriptor-lies-about-size", descriptor=descriptor(HONEST[0], size=1, packed=1)),
    lie("descriptor-missing", descriptor=b""),
    lie(
        "wrong-crc-of-the-pickle",
        0,
        Corrupted,
        content=HONEST[0].content,
        payload=HONEST[0].content.replace(b"weight", b"weighs"),
    ),
    lie("wrong-crc-of-the-version", 3, Corrupted, HeaderError, content=b"3\n", payload=b"4\n"),
    lie("compressed-pickle", method=8),
    lie("compressed-storage", 2, method=8),
    lie("compressed-version", 3, method=8),
    lie("deflate-bomb-as-pickle", method=8, content=BOMB),
    lie("deflate-bomb-as-storage", 2, method=8, content=BOMB),
    lie("deflate-claims-too-much", 2, method=8, central={"size": 10**9}),
    lie("method-unknown", method=99),
    lie("bzip2", method=12),
    lie("hidden-record", 1, hidden=True),
    lie("bytes-before-the-first", 0, FormatError, before=b"\0"),
    lie("bytes-between-records", 2, before=b"\0\0"),
    lie("pickle-between-records", 2, before=EVIL),
    whole("bytes-before-the-directory", before_directory=b"\0"),
    whole("bytes-after-the-directory", after_directory=b"\0"),
    whole("bytes-after-the-end", after=b"\0"),
    whole("comment", comment=b"hello"),
    whole("fake-end-in-comment", comment=tail(0, 0, 0, wide=False)),
    whole("whole-archive-in-comment", comment=build([Item("archive/data.pkl", EVIL)])[:60_000]),
    whole("second-archive-behind", FormatError, after=build([Item("archive/data.pkl", EVIL)])),
    whole("end-on-another-disk", end={"disk": 1}),
    whole("end-count-lies", end={"count": 1, "here": 1}),
    whole("end64-disagrees", end64={"count": 1, "here": 1}),
    whole("end64-directory-disagrees", end64={"directory": 0}),
    whole(
        "end64-2^63-records",
        end64={"count": 1 << 63, "here": 1 << 63},
        end={"count": 0xFFFF, "here": 0xFFFF},
    ),
    whole("locator-points-elsewhere", locator={"pointer": 0}),
    refused("zip-overlapping-records", overlapping(), ZipError),
    refused("zip-polyglot-elf", polyglot(b"\x7fELF" + bytes(60)), UnknownFormat),
    refused("zip-polyglot-pickle", polyglot(EVIL), FormatError),
    refused("zip-polyglot-zip", polyglot(b"PK\3\4" + bytes(60)), ZipError),
    refused("zip-polyglot-safetensors", b"\x02\0\0\0\0\0\0\0{}" + build(HONEST), FormatError),
    refused("zip-polyglot-tar", build(HONEST)[:257] + b"ustar" + build(HONEST)[262:], FormatError),
    refused("zip-only-a-signature", b"PK\3\4", Truncated),
    refused("zip-empty-archive", tail(0, 0, 0), FormatError),
    refused("zip-no-records", b"PK\3\4" + tail(0, 0, 0), FormatError),
    refused("zip-without-pickle", build(HONEST[1:]), FormatError),
    refused("zip-without-version", build(HONEST[:3]), FormatError),
    refused("zip-pickle-is-a-folder", build([Item("archive/data.pkl/"), *HONEST[1:]]), FormatError),
    refused(
        "zip-pickle-above-the-limit", lambda _: torch_zip(b"\0" * ((64 << 20) + 1)), LimitExceeded
    ),
    opens("zip-fifty-thousand-empty-records", lambda _: many(50_000)),
    opens("zip-empty-top-record", build(with_also(Item("archive/empty")))),
    opens(
        "zip-crc-not-recorded",
        build([replace(i, central={"crc": 0}, descriptor=descriptor(i, crc=0)) for i in HONEST]),
    ),
]
