"""Legacy streams and the tar of torch 0.1: no checksum, no index, and torch's own holes in both."""

from __future__ import annotations

import struct

from holdfast.errors import (
    FormatError,
    LimitExceeded,
    MetadataError,
    PickleError,
    Truncated,
)

from .case import Case, opens, refused
from .craft_pickle import (
    EMPTY_DICT,
    EMPTY_LIST,
    NONE,
    PERSID,
    TUPLE2,
    call,
    dict_of,
    integer,
    list_of,
    named,
    stream,
    text,
    tuple_of,
)
from .craft_torch import (
    DATA,
    MAGIC,
    legacy,
    legacy_parts,
    member,
    state,
    storage,
    tar,
    tar_of,
    tensor,
    weight,
)

__all__ = ["CASES"]

STATE = state(legacy_ids=True)
SYSTEM = call("os", "system", text("true"))


def keys(*names: str) -> bytes:
    return stream(list_of(*map(text, names)))


def block(count: int, data: bytes = DATA) -> bytes:
    return struct.pack("<Q", count) + data


def old(
    name: str,
    *errors: type[Exception],
    pickle: bytes = STATE,
    listed: bytes | None = None,
    blocks: bytes | None = None,
) -> Case:
    return refused(f"legacy-{name}", legacy(pickle, listed, blocks), *errors)


def swapped(index: int, part: bytes) -> bytes:
    parts = legacy_parts(STATE)
    parts[index] = part
    return b"".join(parts)


LEGACY = [
    opens(
        "legacy-honest",
        legacy(STATE),
        lambda ckpt: ckpt["weight"].numpy().tolist() == [[1, 2], [3, 4]],
    ),
    refused("legacy-magic-changed", swapped(0, MAGIC.replace(b"\x19", b"\x18")), FormatError),
    refused("legacy-magic-late", b"\x80\x02" + b"K\x01" * 10 + MAGIC[2:], FormatError),
    refused(
        "legacy-magic-inside-text", stream(text(MAGIC[4:14])) + legacy(STATE)[15:], FormatError
    ),
    refused("legacy-magic-only", MAGIC, Truncated),
    refused(
        "legacy-magic-is-a-call",
        stream(call("operator", "itemgetter", MAGIC[2:14])) + legacy(STATE)[15:],
        FormatError,
    ),
    opens("legacy-magic-as-decimal", b"L119547037146038801333356L\n." + legacy(STATE)[15:]),
    refused("legacy-protocol-1000", swapped(1, stream(b"M\xe8\x03")), FormatError),
    refused("legacy-protocol-is-text", swapped(1, stream(text("1001"))), FormatError),
    refused("legacy-protocol-is-a-call", swapped(1, stream(SYSTEM)), FormatError),
    opens("legacy-system-info-is-a-call", swapped(2, stream(SYSTEM))),
    refused("legacy-system-info-unfinished", swapped(2, b"\x80\x02}("), FormatError, LimitExceeded),
    old("keys-missing", MetadataError, listed=keys()),
    old("keys-too-many", MetadataError, listed=keys("0", "1")),
    old("keys-twice", MetadataError, listed=keys("0", "0")),
    old("keys-others", MetadataError, listed=keys("1")),
    old("keys-are-a-call", PickleError, listed=stream(SYSTEM)),
    old("keys-are-a-tuple", PickleError, listed=stream(tuple_of(text("0")))),
    old("keys-are-ints", PickleError, listed=stream(list_of(integer(0)))),
    old("keys-unfinished", FormatError, listed=b"\x80\x02]"),
    old("count-too-large", MetadataError, blocks=block(5)),
    old("count-too-small", MetadataError, blocks=block(3)),
    old("count-2^63", MetadataError, blocks=block(1 << 63)),
    old("count-2^64-1", MetadataError, blocks=block((1 << 64) - 1)),
    old("blocks-missing", Truncated, blocks=b""),
    old("blocks-cut", Truncated, blocks=block(4, DATA[:-1])),
    old("blocks-with-tail", FormatError, blocks=block(4) + b"\0"),
    old("blocks-with-a-pickle-behind", FormatError, blocks=block(4) + stream(SYSTEM)),
    old(
        "storage-of-2^61",
        Truncated,
        MetadataError,
        pickle=stream(tensor(storage(count=1 << 61, view=NONE))),
    ),
    old("storage-never-filled", MetadataError, pickle=stream(tensor(storage(key="7", view=NONE)))),
    old("storage-five-tuple", PickleError, pickle=stream(tensor(storage()))),
    old(
        "storage-two-dtypes",
        MetadataError,
        pickle=stream(weight(NONE), storage(kind="IntStorage", view=NONE), TUPLE2),
    ),
    old(
        "storage-two-counts",
        MetadataError,
        pickle=stream(weight(NONE), storage(count=2, view=NONE), TUPLE2),
    ),
    old(
        "tensor-past-the-end",
        MetadataError,
        pickle=stream(tensor(storage(view=NONE), (4, 4), (4, 1))),
    ),
    opens(
        "legacy-view",
        legacy(
            stream(tensor(storage(view=tuple_of(text("v"), integer(1), integer(2))), (2,), (1,)))
        ),
        lambda ckpt: ckpt["tensor"].numpy().tolist() == [2, 3],
    ),
    old(
        "view-past-the-end",
        MetadataError,
        pickle=stream(storage(view=tuple_of(text("v"), integer(1), integer(4)))),
    ),
    old(
        "view-negative",
        MetadataError,
        pickle=stream(storage(view=tuple_of(text("v"), integer(-1), integer(2)))),
    ),
    old(
        "view-2^62",
        MetadataError,
        pickle=stream(storage(view=tuple_of(text("v"), integer(1 << 62), integer(2)))),
    ),
    old("view-of-two", PickleError, pickle=stream(storage(view=tuple_of(text("v"), integer(1))))),
    old("view-is-a-call", PickleError, pickle=stream(storage(view=SYSTEM))),
    old(
        "tensor-past-its-view",
        MetadataError,
        pickle=stream(
            tensor(storage(view=tuple_of(text("v"), integer(1), integer(2))), (3,), (1,))
        ),
    ),
    opens(
        "legacy-module-source",
        legacy(
            stream(
                tuple_of(
                    text("module"),
                    named("m", "M"),
                    text("/etc/passwd"),
                    text("import os; os.system('true')"),
                ),
                PERSID,
            ),
            keys(),
            b"",
        ),
    ),
    old(
        "module-source-of-wrong-shape",
        PickleError,
        pickle=stream(tuple_of(text("module"), text("m"), NONE, NONE), PERSID),
    ),
    old("persid-text", FormatError, pickle=b"Pevil\n."),
    old("two-objects", FormatError, pickle=STATE + STATE),
    old("object-unfinished", FormatError, LimitExceeded, pickle=STATE[:-1]),
]


HONEST_TAR = stream(dict_of(text("w"), text("7"), PERSID))
FIRST, SECOND, THIRD = (
    member("storages", stream(integer(0)) + stream(EMPTY_LIST)),
    member("tensors", stream(integer(0))),
    member("pickle", stream(EMPTY_DICT)),
)


def taped(name: str, *members: bytes, end: bytes = bytes(1024)) -> Case:
    return refused(f"tar-{name}", tar_of(*members, end=end), FormatError)


TAR = [
    opens(
        "tar-honest", tar(HONEST_TAR), lambda ckpt: ckpt["w"].numpy().tolist() == [[1, 2], [3, 4]]
    ),
    opens("tar-of-nothing", tar_of(FIRST, SECOND, THIRD)),
    taped("symlink", FIRST, SECOND, THIRD, member("x", b"", kind=b"2", link=b"/etc/passwd")),
    taped(
        "symlink-as-pickle", FIRST, SECOND, member("pickle", b"", kind=b"2", link=b"/etc/passwd")
    ),
    taped("hardlink-as-pickle", FIRST, SECOND, member("pickle", b"", kind=b"1", link=b"storages")),
    taped("character-device", FIRST, SECOND, member("pickle", b"", kind=b"3")),
    taped("fifo", FIRST, SECOND, member("pickle", b"", kind=b"6")),
    taped("folder", member("evil/", b"", kind=b"5"), FIRST, SECOND, THIRD),
    taped("sparse-file", FIRST, SECOND, member("pickle", stream(EMPTY_DICT), kind=b"S")),
    taped("pax-renames", member("x", b"17 path=pickle\n..", kind=b"x"), FIRST, SECOND, THIRD),
    taped("pax-resizes", FIRST, SECOND, member("x", b"14 size=99999\n", kind=b"x"), THIRD),
    taped("pax-global", member("x", b"17 path=pickle\n..", kind=b"g"), FIRST, SECOND, THIRD),
    taped("gnu-long-name", member("././@LongLink", b"pickle\0", kind=b"L"), FIRST, SECOND, THIRD),
    taped("traversal", member("../../etc/cron.d/x", b"x"), FIRST, SECOND, THIRD),
    taped("absolute", member("/etc/passwd", b"x"), FIRST, SECOND, THIRD),
    taped("dot-slash-name", FIRST, SECOND, member("./pickle", stream(EMPTY_DICT))),
    taped("prefix-field", FIRST, SECOND, member("pickle", stream(EMPTY_DICT), prefix=b"evil")),
    taped("extra-member", FIRST, SECOND, THIRD, member("more", b"x")),
    taped("member-twice", FIRST, SECOND, THIRD, member("pickle", stream(SYSTEM))),
    taped("member-missing", FIRST, SECOND),
    taped("size-not-octal", member("storages", b"", size=b"99999999999\0"), SECOND, THIRD),
    taped(
        "size-base-256", member("storages", b"", size=b"\x80" + bytes(10) + b"\x01"), SECOND, THIRD
    ),
    taped("size-negative-base-256", member("storages", b"", size=b"\xff" * 12), SECOND, THIRD),
    taped("size-past-the-end", member("storages", b"", size=b"77777777777\0"), SECOND, THIRD),
    taped("size-empty", member("storages", b"", size=b" " * 12), SECOND, THIRD),
    taped("checksum-wrong", FIRST, SECOND.replace(b"tensors", b"tensort", 1), THIRD),
    taped("no-end", FIRST, SECOND, THIRD, end=b""),
    taped("bytes-behind-the-end", FIRST, SECOND, THIRD, end=bytes(1024) + b"x"),
    taped(
        "second-archive-behind-the-end", FIRST, SECOND, THIRD, end=bytes(1024) + tar(stream(SYSTEM))
    ),
    refused("tar-storages-count-2^62", tar(storages={"count": 1 << 61}), FormatError),
    refused("tar-storages-count-negative", tar(storages={"count": -1}), FormatError),
    refused("tar-storages-count-too-large", tar(storages={"count": 2}), FormatError),
    refused("tar-storages-count-too-small", tar(storages={"count": 0}), FormatError),
    refused("tar-storage-elements-2^62", tar(storages={"nbytes": 1 << 62}), FormatError),
    refused("tar-storage-elements-negative", tar(storages={"nbytes": -1}), FormatError),
    refused("tar-storage-elements-too-many", tar(storages={"nbytes": 5}), FormatError),
    refused("tar-views-are-a-call", tar(storages={"views": stream(SYSTEM)}), FormatError),
    refused(
        "tar-view-of-nothing",
        tar(storages={"views": stream(list_of(tuple_of(*map(integer, (2, 9, 0, 1)))))}),
        MetadataError,
    ),
    refused(
        "tar-view-past-the-end",
        tar(storages={"views": stream(list_of(tuple_of(*map(integer, (2, 1, 2, 3)))))}),
        MetadataError,
    ),
    refused(
        "tar-view-negative",
        tar(storages={"views": stream(list_of(tuple_of(*map(integer, (2, 1, -1, 1)))))}),
        MetadataError,
    ),
    refused(
        "tar-view-of-itself",
        tar(storages={"views": stream(list_of(tuple_of(*map(integer, (1, 1, 0, 1)))))}),
        MetadataError,
    ),
    refused("tar-tensors-count-2^61", tar(tensors={"count": 1 << 61}), FormatError),
    refused("tar-tensor-rank-10000", tar(tensors={"rank": 10_000}), LimitExceeded, FormatError),
    refused("tar-tensor-rank-negative", tar(tensors={"rank": -1}), LimitExceeded, FormatError),
    refused(
        "tar-tensor-rank-2^31-1", tar(tensors={"rank": (1 << 31) - 1}), LimitExceeded, FormatError
    ),
    refused("tar-tensor-size-negative", tar(tensors={"numbers": (-2, 2, 2, 1, 0)}), MetadataError),
    refused("tar-tensor-too-large", tar(tensors={"numbers": (3, 2, 2, 1, 0)}), MetadataError),
    refused(
        "tar-tensor-stride-2^62", tar(tensors={"numbers": (2, 2, 1 << 62, 1, 0)}), MetadataError
    ),
    refused(
        "tar-tensor-offset-negative", tar(tensors={"numbers": (2, 2, 2, 1, -1)}), MetadataError
    ),
    refused("tar-tensor-of-no-storage", tar(tensors={"owner": integer(9)}), MetadataError),
    refused("tar-tensor-owner-is-a-call", tar(tensors={"owner": SYSTEM}), MetadataError),
    refused("tar-tensor-owner-is-text", tar(tensors={"owner": text("1")}), MetadataError),
    refused("tar-persid-unknown", tar(stream(text("8"), PERSID)), PickleError),
    refused("tar-persid-not-a-number", tar(stream(text("\u0667"), PERSID)), PickleError),
    refused("tar-persid-of-1000-digits", tar(stream(text("7" * 1000), PERSID)), PickleError),
    refused("tar-persid-bool", tar(stream(b"\x88", PERSID)), PickleError),
    refused("tar-persid-a-call", tar(stream(SYSTEM, PERSID)), PickleError),
    refused("tar-pickle-of-two-streams", tar(stream(EMPTY_DICT) + stream(SYSTEM)), PickleError),
    refused("tar-pickle-empty", tar(b""), Truncated),
]

CASES = [*LEGACY, *TAR]
