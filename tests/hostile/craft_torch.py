"""torch's containers around any pickle: zip, legacy stream, 0.1 tar. Honest unless told otherwise."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from tests.formats.zip.craft import Item, build

from .craft_pickle import (
    EMPTY_DICT,
    FALSE,
    NONE,
    PERSID,
    REDUCE,
    call,
    dict_of,
    integer,
    list_of,
    named,
    stream,
    text,
    tuple_of,
)

__all__ = [
    "DATA", "MAGIC", "SYSTEM_INFO", "TENSORS", "legacy", "legacy_parts", "member", "records", "state", "storage", "tar",
    "tar_of", "tensor", "torch_zip", "torchscript", "weight",
]  # fmt: skip

DATA = struct.pack("<4f", 1, 2, 3, 4)
"""The storage of `weight()`."""

MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
PROTOCOL = stream(b"M\xe9\x03")
SYSTEM_INFO = stream(
    dict_of(text("protocol_version"), b"M\xe9\x03", text("little_endian"), b"\x88")
)


def storage(
    key: bytes | str = "0",
    count: bytes | int = 4,
    kind: bytes | str = "FloatStorage",
    *,
    location: bytes | str = "cpu",
    tag: bytes | str = "storage",
    view: bytes | None = None,
) -> bytes:
    """A persistent id and BINPERSID. Arguments are values, or pickle bytes that push something else."""
    parts = [
        text(tag) if isinstance(tag, str) else tag,
        named("torch", kind) if isinstance(kind, str) else kind,
        text(key) if isinstance(key, str) else key,
        text(location) if isinstance(location, str) else location,
        integer(count) if isinstance(count, int) else count,
    ]
    return tuple_of(*parts, *([] if view is None else [view])) + PERSID


def tensor(
    source: bytes,
    size: Sequence[int] | bytes = (2, 2),
    stride: Sequence[int] | bytes = (2, 1),
    *,
    offset: int | bytes = 0,
    more: bytes = FALSE + call("collections", "OrderedDict"),
    function: str = "_rebuild_tensor_v2",
) -> bytes:
    """A call of a rebuild function; sizes, strides and offset may be pickle bytes that push anything."""

    def ints(values: Sequence[int] | bytes) -> bytes:
        return values if isinstance(values, bytes) else tuple_of(*map(integer, values))

    begin = offset if isinstance(offset, bytes) else integer(offset)
    return (
        named("torch._utils", function)
        + tuple_of(source, begin, ints(size), ints(stride), more)
        + REDUCE
    )


def weight(view: bytes | None = None) -> bytes:
    """An honest 2 × 2 tensor over storage 0."""
    return tensor(storage(view=view))


def state(*payload: bytes, protocol: int = 2, legacy_ids: bool = False) -> bytes:
    """A state dict with an honest weight, and each payload under a key of its own."""
    pairs = [text("weight"), weight(NONE if legacy_ids else None)]
    for i, part in enumerate(payload):
        pairs += [text(f"extra{i}"), part]
    return stream(dict_of(*pairs), protocol=protocol)


def records(
    pickle: bytes,
    storages: Mapping[str, bytes] | None = None,
    *,
    byteorder: bytes = b"little",
    version: bytes = b"3\n",
) -> list[Item]:
    """The records that torch writes, in its order."""
    datas = {"0": DATA} if storages is None else storages
    return [
        Item("archive/data.pkl", pickle),
        Item("archive/byteorder", byteorder),
        *(Item(f"archive/data/{key}", content) for key, content in datas.items()),
        Item("archive/version", version),
    ]


def torch_zip(pickle: bytes, storages: Mapping[str, bytes] | None = None, **more: bytes) -> bytes:
    """A torch zip around a pickle."""
    return build(records(pickle, storages, **more))


def torchscript(pickle: bytes, constants: bytes) -> bytes:
    """A TorchScript archive; the code record is never read."""
    items = [
        *records(pickle, {}),
        Item("archive/constants.pkl", constants),
        Item("archive/code/m.py", b"evil()"),
    ]
    return build(items)


def legacy_parts(
    pickle: bytes,
    keys: bytes | None = None,
    blocks: bytes | None = None,
    *,
    protocol: bytes = PROTOCOL,
) -> list[bytes]:
    """The five pickles and the storages of a legacy stream."""
    listed = stream(list_of(text("0"))) if keys is None else keys
    data = struct.pack("<q", 4) + DATA if blocks is None else blocks
    return [MAGIC, protocol, SYSTEM_INFO, pickle, listed, data]


def legacy(
    pickle: bytes, keys: bytes | None = None, blocks: bytes | None = None, **more: bytes
) -> bytes:
    """A legacy stream; by default with the one storage of `state(legacy_ids=True)`."""
    return b"".join(legacy_parts(pickle, keys, blocks, **more))


def member(
    name: str | bytes,
    content: bytes,
    *,
    kind: bytes = b"0",
    size: bytes | None = None,
    link: bytes = b"",
    prefix: bytes = b"",
) -> bytes:
    """One tar member: header with a true checksum, content, padding."""
    raw = name.encode() if isinstance(name, str) else name
    head = bytearray(512)
    head[: len(raw)] = raw
    head[100:124] = b"0000644\0" + b"0000000\0" * 2
    octal = b"%011o\0" % len(content) if size is None else size
    head[124 : 124 + len(octal)] = octal
    head[136:148] = b"00000000000\0"
    head[148:156] = b" " * 8
    head[156:157] = kind
    head[157 : 157 + len(link)] = link
    head[257:265] = b"ustar\x0000"
    head[345 : 345 + len(prefix)] = prefix
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + content + bytes(-len(content) % 512)


def _storages(
    count: int = 1, views: bytes = stream(b"]"), nbytes: int = 4, data: bytes = DATA
) -> bytes:
    one = (
        stream(tuple_of(integer(1), text("cpu"), named("torch", "FloatStorage")))
        + struct.pack("<q", nbytes)
        + data
    )
    return stream(integer(count)) + one + views


STORAGES = _storages()


def _tensors(
    count: int = 1,
    rank: int = 2,
    numbers: Sequence[int] = (2, 2, 2, 1, 0),
    owner: bytes = integer(1),
) -> bytes:
    row = stream(tuple_of(integer(7), owner, named("torch", "FloatTensor")))
    return stream(integer(count)) + row + struct.pack(f"<i4x{len(numbers)}q", rank, *numbers)


TENSORS = _tensors()


def tar_of(*members: bytes, end: bytes = bytes(1024)) -> bytes:
    return b"".join(members) + end


def tar(
    pickle: bytes = stream(EMPTY_DICT),
    *,
    storages: bytes | Mapping[str, object] = STORAGES,
    tensors: bytes | Mapping[str, object] = TENSORS,
) -> bytes:
    """A 0.1 tar with one storage (1) and one 2 × 2 tensor (7); mappings are arguments for other parts."""
    first = storages if isinstance(storages, bytes) else _storages(**storages)  # type: ignore[arg-type]
    second = tensors if isinstance(tensors, bytes) else _tensors(**tensors)  # type: ignore[arg-type]
    return tar_of(member("storages", first), member("tensors", second), member("pickle", pickle))
