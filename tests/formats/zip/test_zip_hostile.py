"""Archives that two readers would see differently: one named case for each rule, then random damage."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
import zlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
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
from tests.formats.zip.sources import BytesSource
from tests.formats.zip.test_zip_reader import assert_like_zipfile
from tests.sampling import examples
from tests.support import torch_bytes

from holdfast.errors import LimitExceeded, Truncated, ZipError
from holdfast.formats.zip.layout import Archive
from holdfast.formats.zip.reader import read_archive

MAX32 = 0xFFFFFFFF
A, B = Item("m/a", b"first"), Item("m/b", b"second")
PLAIN = Item("m/p", b"plain", flags=0)
PACKED = Item("m/code", b"text " * 50, method=8)


def wide(*values: int) -> bytes:
    return block(1, struct.pack(f"<{len(values)}Q", *values))


def lie(item: Item = A, **lies: object) -> bytes:
    """An honest archive but for one record."""
    return build([Item(**{**item.__dict__, **lies}), B])


def plain(**lies: object) -> bytes:
    return build([Item(**{**PLAIN.__dict__, **lies}), B], alignment=0, wide=False)


def names(*given: str | bytes, flags: int | None = None) -> bytes:
    return build([Item(name, b"1", flags=flags) for name in given])


def shared_payload() -> bytes:
    """Two entries for one record: the same header under two names would need two local names."""
    raw = build([A])
    place = raw.index(b"PK\1\2")
    directory = central_entry(A, 0) + central_entry(Item("m/z", A.content), 0)
    return raw[:place] + directory + tail(place, len(directory), 2)


def quoted() -> bytes:
    """Records that overlap: the header of the second is the payload of the first."""
    inner = build([B])[: build([B]).index(b"PK\1\2")]
    outer = Item("m/a", inner)
    raw = build([outer])
    place, within = raw.index(b"PK\1\2"), raw.index(inner)
    directory = central_entry(outer, 0) + central_entry(B, within)
    return raw[:place] + directory + tail(place, len(directory), 2)


def swapped() -> bytes:
    """Each of two records under the other's name."""
    raw = build([A, B])
    place, second = raw.index(b"PK\1\2"), raw.index(b"PK\3\4", 4)
    directory = central_entry(A, second) + central_entry(B, 0)
    return raw[:place] + directory + tail(place, len(directory), 2)


def locator_in_a_name() -> bytes:
    """A name whose end CPython takes for a zip64 locator, in an archive without one."""
    fake = b"m/" + b"PK\6\7" + b"\1" * 16
    return build([A, Item(fake, b"1")], wide=False)


HOSTILE = {
    # the tail
    "comment": build([A, B], comment=b"hello"),
    "comment with a fake end record": build([A, B], comment=tail(0, 0, 0, wide=False)),
    "end record claims a comment": build([A, B], end={"comment_nbytes": 1}),
    "bytes after the end": build([A, B], after=b"\0"),
    "second archive after the end, with true offsets": build([A]) + build([B]),
    "bytes before the start": b"MZ" + build([A, B]),
    "bytes before the start, no zip64": b"MZ" + build([A, B], wide=False),
    "bytes before the start, offsets adjusted": b"#!"
    + build([Item("m/a", b"1", before=b"#!")], wide=False)[2:],
    "disk number": build([A, B], end={"disk": 1}),
    "directory on another disk": build([A, B], end={"first_disk": 1}),
    "count on this disk": build([A, B], end={"here": 1}, wide=False),
    "count too small": build([A, B], end={"here": 1, "count": 1}, wide=False),
    "count too large": build([A, B], end={"here": 3, "count": 3}, wide=False),
    "count absurd": build([A, B], end={"here": 65535, "count": 65535}, wide=False),
    "directory nbytes": build([A, B], end={"nbytes": 10}, wide=False),
    "directory offset": build([A, B], end={"directory": 1}, wide=False),
    "directory offset and nbytes shifted": build(
        [A, B], end={"directory": 20, "nbytes": 10**6}, wide=False
    ),
    "saturated without zip64": build([A, B], end={"directory": MAX32}, wide=False),
    "bytes after the directory": build([A, B], after_directory=b"\0"),
    "no room for zip64": (b"PK\6\7" + bytes(16) + tail(0, 0, 0, wide=False)),
    "locator in a name": locator_in_a_name(),
    # zip64 records
    "zip64 count": build([A, B], end64={"count": 3, "here": 3}),
    "zip64 count on this disk": build([A, B], end64={"here": 1}, end={"here": 0xFFFF}),
    "zip64 count absurd": build(
        [A, B], end64={"count": 2**63, "here": 2**63}, end={"count": 0xFFFF, "here": 0xFFFF}
    ),
    "zip64 directory": build([A, B], end64={"directory": 7}),
    "zip64 directory, end saturated": build(
        [A, B], end64={"directory": 7}, end={"directory": MAX32}
    ),
    "zip64 nbytes": build([A, B], end64={"nbytes": 46}),
    "zip64 nbytes huge": build([A, B], end64={"nbytes": 2**64 - 1}, end={"nbytes": MAX32}),
    "zip64 and end disagree": build([A, B], end={"directory": 7}),
    "zip64 and end counts disagree": build([A, B], end={"count": 1}),
    "zip64 disk": build([A, B], end64={"disk": 1}),
    "zip64 first disk": build([A, B], end64={"first_disk": 1}),
    "zip64 signature": build([A, B], end64={"signature": b"PK\6\5"}),
    "zip64 length": build([A, B], end64={"rest": 45}),
    "zip64 length huge": build([A, B], end64={"rest": 2**63}),
    "locator disk": build([A, B], locator={"disk": 1}),
    "locator disks": build([A, B], locator={"disks": 2}),
    "locator no disks": build([A, B], locator={"disks": 0}),
    "locator pointer": build([A, B], locator={"pointer": 3}),
    "locator pointer huge": build([A, B], locator={"pointer": 2**64 - 1}),
    "locator signature": build([A, B], locator={"signature": b"PK\6\0"}),
    # names
    "duplicate": names("m/a", "m/a"),
    "differ in case": names("m/data.pkl", "m/DATA.pkl"),
    "differ in case beyond ASCII": names("m/stra\u00dfe", "m/STRASSE"),
    "Kelvin sign": names("m/k", "m/\u212a"),
    "folder and file": build([Item("m/x"), Item("m/x/")]),
    "NUL": names("m/a\0b"),
    "NUL at the end": names("m/a\0"),
    "NUL that looks like two names": names("m/a\0m/b"),
    "backslash": names("m\\a"),
    "absolute": names("/etc/passwd"),
    "drive": names("C:evil", "m/x"),
    "dot dot": names("m/../../x"),
    "dot dot alone": names(".."),
    "dot": names("./m"),
    "dot at the end": names("m/."),
    "empty part": names("m//a"),
    "empty name": names(""),
    "only a slash": build([Item("/")]),
    "two slashes at the end": build([Item("m//")]),
    "not UTF-8": names(b"m/\xff\xfe"),
    "overlong UTF-8": names(b"m/\xc0\xaf"),
    "lone surrogate": names(b"m/\xed\xa0\x80"),
    "not ASCII without the flag": names("m/\u00e4", flags=DESCRIBED),
    "folder with content": build([Item("m/x/", b"1"), B]),
    "deflated folder": build([Item("m/x/", method=8)]),
    # fields of the directory
    "entry signature": lie(central={"signature": b"PK\1\3"}),
    "entry disk": lie(central={"disk": 1}),
    "entry disk saturated": lie(central={"disk": 0xFFFF}),
    "entry comment": lie(central={"comment": b"PK\5\6"}),
    "needed version": lie(central={"needed": 64}),
    "symbolic link": lie(central={"attributes": 0o120777 << 16, "made_by": 0x0314}),
    "symbolic link by another system": lie(central={"attributes": 0o120777 << 16}),
    "device": lie(central={"attributes": 0o060666 << 16}),
    "pipe": lie(central={"attributes": 0o010666 << 16}),
    "file with a folder's mode": lie(central={"attributes": 0o040755 << 16}),
    "file with a folder's DOS attribute": lie(central={"attributes": 0x10}),
    "folder with a file's mode": build([Item("m/x/", central={"attributes": 0o100644 << 16})]),
    "encrypted": lie(flags=DESCRIBED | UTF8 | 1),
    "strong encryption": lie(flags=DESCRIBED | UTF8 | 1 << 6),
    "patched data": lie(flags=DESCRIBED | UTF8 | 1 << 5),
    "masked headers": lie(flags=DESCRIBED | UTF8 | 1 << 13),
    "deflate options on a stored record": lie(flags=DESCRIBED | UTF8 | 1 << 1),
    "method bzip2": lie(method=12),
    "method implode": lie(method=6),
    "stored with two sizes": plain(central={"size": 4}, local={"size": 4}),
    "stored with a smaller packed size": plain(central={"packed": 4}, local={"packed": 4}),
    "deflated to nothing": build([Item("m/x", b"1", method=8, flags=0, payload=b"")]),
    "deflate bomb beyond deflate": build(
        [Item("m/x", b"1", method=8, flags=0, central={"size": 10**9})]
    ),
    "deflate bomb of 2^64": build(
        [Item("m/x", b"1", method=8, central={"size": MAX32, "extra": wide(2**64 - 1)})]
    ),
    "empty with a checksum": build([Item("m/x", central={"crc": 1}, local={"crc": 1})]),
    "record outside": lie(central={"offset": 10**6}),
    "record larger than the archive": lie(central={"size": 10**6, "packed": 10**6}),
    "zip64 block without saturated fields": lie(central={"extra": wide(5)}),
    "zip64 block empty": lie(central={"extra": wide()}),
    "zip64 block missing": lie(central={"offset": MAX32}),
    "zip64 block too short": lie(central={"size": MAX32, "packed": MAX32, "extra": wide(5)}),
    "zip64 block too long": lie(central={"offset": MAX32, "extra": wide(0, 0)}),
    "zip64 block twice": lie(central={"offset": MAX32, "extra": wide(0) + wide(1)}),
    "zip64 offset of 2^64": lie(central={"offset": MAX32, "extra": wide(2**64 - 1)}),
    "zip64 size of 2^63": lie(
        central={"size": MAX32, "packed": MAX32, "extra": wide(2**63, 2**63)}
    ),
    "central extra cut": lie(central={"extra": b"\1\0\0"}),
    "central extra block too long": lie(central={"extra": b"UT\x09\0\3"}),
    "central extra renames": lie(central={"extra": block(0x7075, b"\1" + bytes(4) + b"m/evil")}),
    "central extra unknown": lie(central={"extra": block(0xBEEF, b"")}),
    "central extra of many blocks": lie(central={"extra": block(0x5455, b"") * 9}),
    # local headers
    "local signature": lie(local={"signature": b"PK\3\5"}),
    "local name": lie(local={"name": b"m/z"}),
    "local name longer": lie(local={"name": b"m/a."}),
    "local name shorter": lie(local={"name": b"m/"}),
    "local name length": lie(local={"name_nbytes": 2}),
    "local flags": lie(local={"flags": DESCRIBED}),
    "local flags without descriptor": lie(local={"flags": UTF8}),
    "local method": lie(local={"method": 8}),
    "local crc": plain(local={"crc": 1}),
    "local crc beside a descriptor": lie(local={"crc": 1}),
    "local size": plain(local={"size": 4, "packed": 4}),
    "local size 0": plain(local={"size": 0, "packed": 0}),
    "local size beside a descriptor": lie(local={"size": 4, "packed": 4}),
    "local packed only": lie(local={"packed": 5}),
    "local extra length too large": lie(local={"extra_nbytes": 0xFFFF}),
    "local extra length hides payload": lie(local={"extra_nbytes": 64}),
    "local extra cut": lie(local={"extra": b"FB"}),
    "local extra block too long": lie(local={"extra": b"FB\x09\0Z"}),
    "local extra renames": lie(local={"extra": block(0x7075, b"\1" + bytes(4) + b"m/evil")}),
    "local extra of many blocks": lie(local={"extra": block(0x4246, b"") * 9}),
    "local zip64 disagrees": plain(local={"size": MAX32, "packed": MAX32, "extra": wide(6, 6)}),
    "local zip64 beside true sizes, another size": plain(local={"extra": wide(6, 5)}),
    "local zip64 beside true sizes, another packed size": plain(local={"extra": wide(5, 6)}),
    "local zip64 beside true sizes, zeros": plain(local={"extra": wide(0, 0)}),
    "local zip64 beside true sizes, with an offset": plain(local={"extra": wide(5, 5, 0)}),
    "local zip64 beside true sizes, one value": plain(local={"extra": wide(5)}),
    "local zip64 beside true sizes, swapped": build(
        [
            Item(
                "m/code",
                PACKED.content,
                method=8,
                flags=0,
                local={"extra": wide(len(PACKED.stored), len(PACKED.content))},
            ),
            B,
        ],
        alignment=0,
        wide=False,
    ),
    "local zip64 beside another size": plain(local={"size": 4, "extra": wide(5, 5)}),
    "local zip64 beside sizes 0, without a descriptor": plain(
        local={"size": 0, "packed": 0, "extra": wide(5, 5)}
    ),
    "local zip64 of zeros, without a descriptor": plain(
        local={"size": 0, "packed": 0, "extra": wide(0, 0)}
    ),
    "local zip64 of sizes beside zeros and a descriptor": lie(
        local={"extra": wide(5, 5)}, descriptor=descriptor(A, wide=True)
    ),
    "local zip64 of zeros beside true sizes and a descriptor": lie(
        local={"size": 5, "packed": 5, "extra": wide(0, 0)}, descriptor=descriptor(A, wide=True)
    ),
    "local zip64 of zeros with a narrow descriptor": lie(local={"extra": wide(0, 0)}),
    "local zip64 of zeros with a wide descriptor that lies": lie(
        local={"extra": wide(0, 0)}, descriptor=descriptor(A, wide=True, size=6)
    ),
    "local zip64 of other length": plain(
        local={"size": MAX32, "packed": MAX32, "extra": wide(5, 5, 0)}
    ),
    "local zip64 twice": plain(local={"size": MAX32, "packed": MAX32, "extra": wide(5, 5) * 2}),
    "local zip64 empty": lie(local={"extra": wide()}),
    "local zip64 with needless offset": lie(
        local={"extra": wide(0)}, descriptor=descriptor(A, wide=True)
    ),
    "local saturated without zip64": plain(local={"size": MAX32, "packed": MAX32}),
    # data descriptors
    "descriptor missing": lie(descriptor=b""),
    "descriptor without signature": lie(descriptor=descriptor(A)[4:]),
    "descriptor signature": lie(descriptor=b"PK\7\7" + descriptor(A)[4:]),
    "descriptor crc": lie(descriptor=descriptor(A, crc=1)),
    "descriptor packed": lie(descriptor=descriptor(A, packed=1)),
    "descriptor size": lie(descriptor=descriptor(A, size=1)),
    "descriptor wide without zip64": lie(descriptor=descriptor(A, wide=True)),
    "descriptor narrow with zip64": build(
        [Item("m/a", b"x", local={"size": MAX32, "packed": MAX32, "extra": wide(0, 0)})],
        alignment=0,
    ),
    "descriptor of the last record": build([A, Item("m/z", b"1", descriptor=descriptor(A))]),
    "descriptor after an empty record": build([Item("m/x", descriptor=descriptor(Item("m/x"))), B]),
    "descriptor promised after an empty record": build(
        [Item("m/x", flags=DESCRIBED, descriptor=b""), B]
    ),
    # layout
    "gap before the first": build([Item("m/a", b"1", before=b"\0"), B]),
    "gap between records": build([A, Item("m/b", b"1", before=b"\0")]),
    "large gap between records": build([A, Item("m/b", b"1", before=bytes(70_000))]),
    "gap after the last": build([A, B], before_directory=b"\0"),
    "gap that looks like a descriptor": build([PLAIN, Item("m/b", b"1", before=descriptor(PLAIN))]),
    "archive extra data record": build([A, B], before_directory=b"PK\6\10" + bytes(4)),
    "hidden first record": build([Item("m/h", b"evil", hidden=True), B]),
    "hidden record between": build([A, Item("m/h", b"evil", hidden=True), B]),
    "hidden last record": build([A, Item("m/h", b"evil", hidden=True)]),
    "all hidden": build([Item("m/h", b"evil", hidden=True)]),
    "two names for one record": shared_payload(),
    "record inside a payload": quoted(),
    "swapped offsets": swapped(),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_refused(raw):
    with pytest.raises(ZipError) as caught:
        read_archive(BytesSource(raw), "file.pt")
    error = caught.value
    assert 0 <= error.offset <= len(raw)
    assert error.file == "file.pt"
    assert "tampered" in error.message
    assert error.message.isprintable()


def test_the_crafted_base_is_honest():
    """Each case above is refused for its lie and not for something that they have in common."""
    folder = build([Item("m/x/"), B])
    for raw in (
        lie(),
        plain(),
        names("m/a", "m/b"),
        build([PACKED, B]),
        build([A, B], wide=False),
        folder,
    ):
        assert_like_zipfile(read_archive(BytesSource(raw), "f"), raw)
    deflate_options = Item("m/c", b"text " * 50, method=8, flags=UTF8 | DESCRIBED | 1 << 1)
    assert read_archive(BytesSource(build([deflate_options])), "f").records["m/c"].method == 8


@pytest.mark.parametrize("length", [0, 1, 21, 22, 100, -1, -22, -23, -98, -99])
def test_cut_short(length):
    raw = build([A, B])
    with pytest.raises((Truncated, ZipError)):
        read_archive(BytesSource(raw[:length]), "f")


def test_cut_short_says_so():
    raw = build([A, B])
    for length in (0, 10, 100, raw.index(b"PK\1\2")):
        with pytest.raises(Truncated) as caught:
            read_archive(BytesSource(raw[:length]), "f")
        assert caught.value.offset == length


def test_hostile_names_do_not_reach_the_terminal():
    with pytest.raises(ZipError) as caught:
        read_archive(BytesSource(names("m/\x1b[2J\u202e", "m/\x1b[2J\u202e")), "f")
    assert str(caught.value).isprintable()
    with pytest.raises(ZipError) as caught:
        read_archive(BytesSource(names("m/" + "a" * 60_000 + "/..")), "f")
    assert len(str(caught.value)) < 1000


BASES = {
    "torch": torch_bytes({"a": torch.arange(3), "b": torch.empty(0)}),
    "craft": build([A, Item("m/empty"), PACKED, PLAIN, B], alignment=1),
    "plain": build(
        [PLAIN, Item("m/\u00e4", b"1", flags=UTF8), Item("m/d/", flags=0)], alignment=0, wide=False
    ),
    "zip64": build(
        [
            Item("m/w", b"x", flags=0, local={"size": MAX32, "packed": MAX32, "extra": wide(1, 1)}),
            B,
        ],
        alignment=0,
    ),
    "old CPython": build(
        [
            make_old_cpython_item("m/a", b"stored"),
            make_old_cpython_item("m/b", b"text " * 9, method=8),
        ],
        alignment=0,
        wide=False,
    ),
    "old CPython to a pipe": build(
        [
            make_old_cpython_item("m/a", b"stored", to_pipe=True),
            make_old_cpython_item("m/b", b"text " * 9, method=8, to_pipe=True),
        ],
        alignment=0,
        wide=False,
    ),
}


def view(raw: bytes) -> Archive | None:
    try:
        return read_archive(BytesSource(raw), "f")
    except (ZipError, Truncated, LimitExceeded):
        return None


def assert_same_for_all(raw: bytes) -> None:
    """Refused, or seen alike by this reader, by zipfile and by torch."""
    found = view(raw)
    if found is None:
        return
    assert_like_zipfile(found, raw)
    try:
        theirs = torch._C.PyTorchFileReader(io.BytesIO(raw))
    except (
        RuntimeError,
        UnicodeDecodeError,
    ):  # the latter from a message about a damaged version record
        return
    if found.prefix:
        for name, record in zip(found.names, found.records.values(), strict=True):
            if record.stored and record.nbytes:
                assert theirs.get_record(name) == raw[record.start : record.stop]


@given(base=st.sampled_from(sorted(BASES)), data=st.data())
@settings(max_examples=examples(400))
def test_random_bytes(base, data):
    raw = bytearray(BASES[base])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    assert_same_for_all(bytes(raw))


@pytest.mark.parametrize(
    "base", ["craft", "plain", "zip64", "old CPython", "old CPython to a pipe"]
)
def test_every_single_byte(base):
    """No byte of a header can change without being noticed or meaning nothing to anyone."""
    raw = BASES[base]
    for position in range(len(raw)):
        for change in (0x01, 0x80, 0xFF):
            assert_same_for_all(
                raw[:position] + bytes([raw[position] ^ change]) + raw[position + 1 :]
            )


@given(
    base=st.sampled_from(sorted(BASES)),
    start=st.integers(0, 400),
    nbytes=st.integers(0, 60),
    patch=st.binary(max_size=60),
)
@settings(max_examples=examples(200))
@example(base="craft", start=0, nbytes=0, patch=b"PK\5\6")
def test_random_splices(base, start, nbytes, patch):
    raw = BASES[base]
    at = len(raw) - start if start % 2 else start
    at = max(0, min(at, len(raw)))
    assert_same_for_all(raw[:at] + patch + raw[at + nbytes :])


def test_the_oracle_would_notice():
    """zipfile accepts what we refuse, so that the comparison above compares something."""
    accepted = 0
    for raw in HOSTILE.values():
        with (
            contextlib.suppress(
                zipfile.BadZipFile, zlib.error, struct.error, ArithmeticError, EOFError
            ),
            contextlib.suppress(OSError, RuntimeError, ValueError),
            zipfile.ZipFile(io.BytesIO(raw)) as archive,
        ):
            accepted += archive.testzip() is None
    assert accepted > 30
