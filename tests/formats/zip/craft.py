"""A zip writer in which every field can be made to lie, for tests of readers.

    build([Item("archive/data.pkl", b"…"), Item("archive/data/0", b"…")])                    as torch would write it
    build([Item("x", b"…", flags=0)], wide=False, alignment=0)                               as CPython would
    build([Item("x", b"…", central={"crc": 7})])                                             a lie in one field
    build(items, end={"count": 3}, before_directory=b"junk", comment=b"…")                   lies about the whole

An `Item` has true values by default; `local`, `central` and `descriptor` replace what is written at these places.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "Item",
    "block",
    "build",
    "central_entry",
    "descriptor",
    "local_header",
    "make_old_cpython_item",
    "tail",
]

MAX32 = 0xFFFFFFFF
DESCRIBED, UTF8 = 1 << 3, 1 << 11

LOCAL_FIELDS = ("needed", "flags", "method", "time", "date", "crc", "packed", "size")
CENTRAL_FIELDS = ("made_by", *LOCAL_FIELDS)

Lies = Mapping[str, object]


@dataclass(frozen=True)
class Item:
    """One record, honest unless told otherwise."""

    name: str | bytes
    content: bytes = b""
    method: int = 0
    flags: int | None = None
    """As torch by default: UTF-8, and a descriptor unless the record is empty."""
    payload: bytes | None = None
    """The bytes in the file; by default the content, deflated for method 8."""
    local: Lies = field(default_factory=dict)
    """Fields of the local header, and `signature`, `name`, `extra` as bytes."""
    central: Lies = field(default_factory=dict)
    """Fields of the directory's entry, and `signature`, `name`, `extra`, `comment` as bytes."""
    descriptor: bytes | None = None
    """What stands after the payload, instead of a true data descriptor."""
    before: bytes = b""
    """Bytes before the local header that belong to nothing."""
    hidden: bool = False
    """Whether the directory leaves it out."""

    @property
    def raw_name(self) -> bytes:
        return self.name if isinstance(self.name, bytes) else self.name.encode()

    @property
    def stored(self) -> bytes:
        if self.payload is not None:
            return self.payload
        if self.method != 8:
            return self.content
        packer = zlib.compressobj(wbits=-15)
        return packer.compress(self.content) + packer.flush()

    @property
    def true_flags(self) -> int:
        return self.flags if self.flags is not None else UTF8 | (DESCRIBED if self.content else 0)

    @property
    def crc(self) -> int:
        return zlib.crc32(self.content)


def block(kind: int, body: bytes) -> bytes:
    """One block of an extra field."""
    return struct.pack("<HH", kind, len(body)) + body


def local_header(item: Item, *, offset: int = 0, alignment: int = 0) -> bytes:
    """Header, name and extra field; padded as torch does it to an alignment that is not 0."""
    described = item.true_flags & DESCRIBED
    fields = {
        "signature": b"PK\3\4",
        "needed": 20 if item.method else 0,
        "flags": item.true_flags,
        "method": item.method,
        "time": 0,
        "date": 0,
        "crc": 0 if described else item.crc,
        "packed": 0 if described else len(item.stored),
        "size": 0 if described else len(item.content),
        "name": item.raw_name,
        "extra": b"",
    }
    if alignment:
        fields["extra"] = block(
            0x4246, b"Z" * (-(offset + 30 + len(item.raw_name) + 4) % alignment)
        )
    fields |= item.local
    name, extra = fields["name"], fields["extra"]
    lengths = (fields.get("name_nbytes", len(name)), fields.get("extra_nbytes", len(extra)))
    return (
        fields["signature"]
        + struct.pack("<5H3I2H", *(fields[f] for f in LOCAL_FIELDS), *lengths)
        + name
        + extra
    )


def descriptor(item: Item, *, wide: bool = False, **lies: int) -> bytes:
    """A data descriptor with its signature."""
    fields = {"crc": item.crc, "packed": len(item.stored), "size": len(item.content)} | lies
    return b"PK\7\10" + struct.pack(
        "<IQQ" if wide else "<III", fields["crc"], fields["packed"], fields["size"]
    )


def make_old_cpython_item(
    name: str, content: bytes, *, method: int = 0, to_pipe: bool = False
) -> Item:
    """Make a record as CPython 3.6 to 3.11.3 writes it for `ZipFile.open(…, force_zip64=True)`.

    The sizes stand in the local header and again in a zip64 block. numpy's savez writes its arrays
    this way. In a pipe the sizes are 0 in both places, and a wide data descriptor follows.
    """
    flags = DESCRIBED if to_pipe else 0
    item = Item(name, content, method=method, flags=flags)
    sizes = (0, 0) if to_pipe else (len(content), len(item.stored))
    local = {"extra": block(1, struct.pack("<2Q", *sizes))}
    wide_descriptor = descriptor(item, wide=True) if to_pipe else None
    return Item(name, content, method=method, flags=flags, local=local, descriptor=wide_descriptor)


def central_entry(item: Item, offset: int) -> bytes:
    """An entry of the central directory."""
    fields = {
        "signature": b"PK\1\2",
        "made_by": 0,
        "needed": 20 if item.method else 0,
        "flags": item.true_flags,
        "method": item.method,
        "time": 0,
        "date": 0,
        "crc": item.crc,
        "packed": len(item.stored),
        "size": len(item.content),
        "name": item.raw_name,
        "extra": b"",
        "comment": b"",
        "disk": 0,
        "internal": 0,
        "attributes": 0,
        "offset": offset,
    } | item.central
    texts = [fields[f] for f in ("name", "extra", "comment")]
    rest = (
        *map(len, texts),
        fields["disk"],
        fields["internal"],
        fields["attributes"],
        fields["offset"],
    )
    numbers = struct.pack("<6H3I5H2I", *(fields[f] for f in CENTRAL_FIELDS), *rest)
    return fields["signature"] + numbers + b"".join(texts)


def tail(
    directory: int,
    nbytes: int,
    count: int,
    *,
    wide: bool = True,
    end: Lies = {},  # noqa: B006 -- read only
    end64: Lies = {},  # noqa: B006 -- read only
    locator: Lies = {},  # noqa: B006 -- read only
    comment: bytes = b"",
) -> bytes:
    """What follows the directory; with the two zip64 records if `wide`."""
    e64 = {
        "signature": b"PK\6\6",
        "rest": 44,
        "disk": 0,
        "first_disk": 0,
        "here": count,
        "count": count,
    }
    e64 |= {"nbytes": nbytes, "directory": directory} | end64
    loc = {"signature": b"PK\6\7", "disk": 0, "pointer": directory + nbytes, "disks": 1} | locator
    last = {
        "signature": b"PK\5\6",
        "disk": 0,
        "first_disk": 0,
        "here": min(count, 0xFFFF),
        "count": min(count, 0xFFFF),
    }
    last |= {
        "nbytes": min(nbytes, MAX32),
        "directory": min(directory, MAX32),
        "comment_nbytes": len(comment),
    } | end
    out = b""
    if wide:
        numbers = [e64[f] for f in ("disk", "first_disk", "here", "count", "nbytes", "directory")]
        out += e64["signature"] + struct.pack("<Q2H2I4Q", e64["rest"], 0x031E, 45, *numbers)
        out += loc["signature"] + struct.pack("<IQI", loc["disk"], loc["pointer"], loc["disks"])
    numbers = [
        last[f]
        for f in ("disk", "first_disk", "here", "count", "nbytes", "directory", "comment_nbytes")
    ]
    return out + last["signature"] + struct.pack("<4H2IH", *numbers) + comment


def build(
    items: Sequence[Item],
    *,
    order: Sequence[int] | None = None,
    alignment: int = 64,
    wide: bool = True,
    before_directory: bytes = b"",
    after_directory: bytes = b"",
    after: bytes = b"",
    end: Lies = {},  # noqa: B006 -- read only
    end64: Lies = {},  # noqa: B006 -- read only
    locator: Lies = {},  # noqa: B006 -- read only
    comment: bytes = b"",
) -> bytes:
    """A whole archive. `order` is the order of the directory, where it is not that of the file."""
    out = bytearray()
    offsets = []
    for item in items:
        out += item.before
        offsets.append(len(out))
        out += local_header(item, offset=len(out), alignment=alignment)
        out += item.stored
        if item.descriptor is not None:
            out += item.descriptor
        elif item.true_flags & DESCRIBED:
            out += descriptor(item)
    out += before_directory
    rows = [
        row for row in (order if order is not None else range(len(items))) if not items[row].hidden
    ]
    directory = b"".join(central_entry(items[row], offsets[row]) for row in rows)
    position = len(out)
    out += directory + after_directory
    out += tail(
        position,
        len(directory),
        len(rows),
        wide=wide,
        end=end,
        end64=end64,
        locator=locator,
        comment=comment,
    )
    return bytes(out + after)
