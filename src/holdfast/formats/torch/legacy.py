"""What torch wrote before the zip: the stream of `torch.save` before 1.6 (and today on request), and the tar of torch 0.1
(`read_torch_tar`).

    pickle 1   the magic number                     pickle 4   the object
    pickle 2   the protocol, 1001                   pickle 5   the list of storage keys
    pickle 3   sizes of the writer's C types        then for each key: int64 element count, raw elements, little-endian

There is no index, so the object comes before anything says where its storages lie. It is interpreted twice by the same machine:
first to collect the storage ids, from which with pickle 5 every position follows; then to build.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from holdfast.core.chunk import Storage
from holdfast.core.opaque import Global
from holdfast.core.protocols import Description, Source
from holdfast.core.value import Value
from holdfast.errors import (
    FormatError,
    LimitExceeded,
    MetadataError,
    PickleError,
    Refused,
    Truncated,
)
from holdfast.formats.detect import (
    BLOCK_NBYTES,
    MAGIC,
    MEMBERS,
    OCTAL,
    begins_like_tar,
    has_tar_checksum,
    tar_error,
)
from holdfast.formats.pickle.machine import Interpreted, interpret, interpret_whole
from holdfast.formats.pickle.table import ReducerTable
from holdfast.formats.torch.reducers import Builder
from holdfast.formats.torch.storages import (
    FoundStorages,
    StorageId,
    Storages,
    parse_storage_id,
    storage_dtype,
)
from holdfast.formats.torch.table import LazyBuilder, TorchTable
from holdfast.formats.torch.tensors import MAX_ELEMENTS, brief
from holdfast.formats.torch.zip import SavedFile, describe_saved

PROTOCOL = 1001

WINDOW_NBYTES = 1 << 20
"""Bytes read at first; most objects pickle to less. It grows fourfold while a stream asks for more."""


def describe_legacy(source: Source) -> Description:
    return describe_saved(source, read_legacy)


def read_legacy(source: Source, key: str) -> SavedFile:
    if begins_like_tar(source.read_head(key, BLOCK_NBYTES)):
        raise tar_error(key, "torch-legacy")
    stream = read_stream(source, key)
    if stream.end != source.store.size(key):
        raise FormatError(
            f"{source.store.size(key) - stream.end:,} bytes after the last storage",
            offset=stream.end,
        )
    built = build_object(source, stream)
    notes = (
        (f"the file carries the source text of {stream.modules} classes",) if stream.modules else ()
    )
    return SavedFile("torch-legacy", built.value, stream.stop - stream.begin, built.foreign, notes)


def build_object(source: Source, stream: LegacyStream) -> Interpreted:
    """Interpret the object of a stream, with lazy tensors over the storages behind it."""
    storages = FoundStorages(source, lambda storage_id: stream.places[storage_id.key], lengths=(6,))

    def persistent(pid: object) -> object:
        return pid[1] if _is_module(pid) else storages.persistent(pid)  # type: ignore[index]  # _is_module checked it

    built, _ = stream.window.stream(stream.begin, TorchTable(source, persistent), OBJECT)
    return built


OBJECT = "pickle 4"


class NotTorch(PickleError, Refused):
    """The pickles at the head are not those that torch writes; a RuntimeError as well, which torch raises there."""


class CutShort(Truncated, Refused):
    """The file ends inside of a storage; a RuntimeError as well, which torch raises there."""


class LegacyStream(Value, frozen=True):
    """A stream whose storages are found, and whose object is not built yet."""

    window: Window
    begin: int
    stop: int
    """Where the object begins in the window, and ends."""
    places: Mapping[str, Storage]
    modules: int
    """The number of classes whose source text is in the stream."""
    end: int
    """Where the last storage ends in the file."""


def read_stream(
    source: Source, key: str, start: int = 0, *, window_nbytes: int = WINDOW_NBYTES
) -> LegacyStream:
    """Read the pickles around the object, and find its storages.

    The stream begins at byte `start` of its file, of which `window_nbytes` are read at first.
    """
    window = Window(source, key, begin=start, nbytes=window_nbytes)
    magic, at = window.stream(0, ReducerTable(), "pickle 1")
    if magic.value != MAGIC:
        raise NotTorch("Invalid magic number; corrupt file? It is not torch's")
    protocol, at = window.stream(at, ReducerTable(), "pickle 2")
    if protocol.value != PROTOCOL:
        raise NotTorch(
            f"Invalid protocol version: {brief(protocol.value)}; torch only ever wrote {PROTOCOL}"
        )
    _, begin = window.stream(at, ReducerTable(), "pickle 3")
    ids = StorageIds()
    _, stop = window.stream(begin, ids, OBJECT)
    keys, at = window.stream(stop, ReducerTable(), "pickle 5")
    places, end = locate_storages(source, key, ids.storages, keys.value, start + at)
    return LegacyStream(window, begin, stop, places, len(ids.modules), end)


class Window:
    """The head of a file, read as far as its pickles reach."""

    def __init__(
        self, source: Source, key: str, *, begin: int = 0, nbytes: int = WINDOW_NBYTES
    ) -> None:
        self._source, self._key, self._begin = source, key, begin
        self._size = source.store.size(key) - begin
        self.data = source.bytes(key, begin, begin + min(self._size, nbytes))

    def stream(self, start: int, table: ReducerTable, name: str) -> tuple[Interpreted, int]:
        """Interpret the stream at `start`, counted from `begin`; give also where the next one begins.

        The window grows while it ends too early.
        """
        limit = self._source.limits.pickle_nbytes
        while True:
            try:
                done = interpret(
                    self.data,
                    table,
                    limits=self._source.limits,
                    stream=name,
                    start=start,
                    max_nbytes=len(self.data),
                )
            except Truncated as error:
                have = len(self.data)
                if have == self._size:
                    raise
                if have - start > limit:
                    raise LimitExceeded(
                        f"{name} is longer than Limits(pickle_nbytes={limit:,})", found=have
                    ) from error
                # Tables keep nothing from a pass that broke off but ids that the next pass meets again.
                self.data = self._source.bytes(
                    self._key, self._begin, self._begin + min(self._size, have * 4)
                )
            else:
                return done, done.stop


class StorageIds(ReducerTable):
    """The table of the first pass: it builds nothing and collects the persistent ids of pickle 4."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[str, StorageId] = {}
        self.modules: set[str] = set()

    def persistent(self, pid: object) -> object:
        if _is_module(pid):
            what = pid[1]  # type: ignore[index]  # _is_module checked it
            self.modules.add(str(what))
            return what
        storage_id = parse_storage_id(pid, (6,))
        self.storages.setdefault(storage_id.key, storage_id)
        return storage_id


def _is_module(pid: object) -> bool:
    """('module', class, file name, source text): the first mention of every nn.Module class."""
    return (
        isinstance(pid, tuple)
        and len(pid) == 4
        and type(pid[0]) is str
        and pid[0] == "module"
        and isinstance(pid[1], Global)
    )


def locate_storages(
    source: Source, key: str, ids: Mapping[str, StorageId], listed: object, start: int
) -> tuple[dict[str, Storage], int]:
    """The places of all storages, with the file's own counts checked against the ids; and where the last one ends."""
    if not isinstance(listed, list) or not all(isinstance(k, str) for k in listed):
        raise PickleError("the list of storage keys is no list of text")
    if len(set(listed)) != len(listed) or set(listed) != set(ids):
        message = "the list of storage keys is not the set of storages that the object uses"
        raise MetadataError(message, expected=len(ids), found=len(listed))
    home = source.store
    size = home.size(key)
    places = {}
    for name in listed:
        storage_id = ids[name]
        if start + 8 + storage_id.nbytes > size:
            missing = (
                f"expected {start + 8 + storage_id.nbytes - size} more bytes of storage {name!r}"
            )
            raise CutShort(f"unexpected EOF, {missing}. The file might be corrupted", offset=size)
        count = int.from_bytes(source.bytes(key, start, start + 8), "little")
        if count != storage_id.count:
            message = f"storage {name!r} has {count:,} elements where it lies and {storage_id.count:,} where it is used"
            raise MetadataError(message, offset=start, expected=storage_id.count, found=count)
        places[name] = Storage(
            key,
            start + 8,
            storage_id.nbytes,
            "little",
            None,
            storage_id.location,
            f"storage {name}",
            home=home,
        )
        start += 8 + storage_id.nbytes
    return places, start


SMALL_PICKLE_NBYTES = 4096
"""The pickles between the numbers hold a count or three short texts."""


def describe_tar(source: Source) -> Description:
    return describe_saved(source, read_torch_tar)


def read_torch_tar(source: Source, key: str) -> SavedFile:
    """The objects in a tar.

        storages   pickle(count); for each: pickle((key, location, storage class)), int64 element count, elements;
                   at the end pickle(list of (view key, root key, element offset, element count))
        tensors    pickle(count); for each: pickle((key, storage key, tensor class)),
                   int32 rank, 4 unused bytes, rank × int64 sizes, rank × int64 strides, int64 storage offset
        pickle     the object; a persistent id is a key, of a tensor or a storage, or (class, file, source text)

    All numbers are little-endian. The tar itself is read by a few lines of our own that know plain members only: links, devices,
    extended headers (which can rename or resize what follows) and paths are refused.
    """
    places: dict[str, Storage] = {}
    storages = FoundStorages(source, lambda storage_id: places[storage_id.key])
    known, (start, stop) = read_tar(
        source, key, places, storages=storages, builder=LazyBuilder(source)
    )

    def persistent(pid: object) -> object:
        if isinstance(pid, tuple) and len(pid) == 3:
            return pid[0]
        number = (
            int(pid)
            if isinstance(pid, str) and pid.isascii() and pid.isdecimal() and len(pid) < 40
            else pid
        )
        if type(number) is not int or number not in known:
            raise PickleError(
                "a persistent id that names no tensor and no storage", found=brief(pid)
            )
        return known[number]

    limit = source.limits.pickle_nbytes
    if stop - start > limit:
        raise LimitExceeded(
            f"the pickle is {stop - start:,} bytes, above Limits(pickle_nbytes={limit:,})",
            found=stop - start,
        )
    done = interpret_whole(
        source.bytes(key, start, stop),
        TorchTable(source, persistent),
        limits=source.limits,
        stream="pickle",
    )
    return SavedFile("torch-tar", done.value, stop - start, done.foreign)


W = TypeVar("W")


def read_tar(
    source: Source,
    key: str,
    places: dict[str, Storage],
    *,
    storages: Storages[W],
    builder: Builder,
    begin: int = 0,
) -> tuple[dict[int, object], tuple[int, int]]:
    """The storages and tensors of a tar by their keys, and where its pickle begins and ends. Fills `places` for the storages."""
    members = read_members(source, key, begin)
    missing = [name for name in MEMBERS if name not in members]
    if missing:
        raise FormatError(f"a tar without {', '.join(missing)}: not a checkpoint that torch wrote")
    made = _storages(Cursor(source, key, *members["storages"]), places, storages)
    return made | _tensors(Cursor(source, key, *members["tensors"]), made, builder), members[
        "pickle"
    ]


def read_members(source: Source, key: str, at: int = 0) -> dict[str, tuple[int, int]]:
    """First byte and the byte after the last one of each member."""
    size = source.store.size(key)
    members: dict[str, tuple[int, int]] = {}
    while True:
        if at + BLOCK_NBYTES > size:
            raise Truncated("the tar ends without its closing blocks", offset=size)
        head = source.bytes(key, at, at + BLOCK_NBYTES)
        if head == bytes(BLOCK_NBYTES):
            break
        if not has_tar_checksum(head):
            raise FormatError("a tar header whose checksum is wrong", offset=at)
        name = head[:100].split(b"\0", 1)[0].decode("latin-1")
        # '0' and NUL are plain files. Everything else can redirect, rename or resize.
        if head[156:157] not in (b"0", b"\0") or name not in MEMBERS or head[345:346] != b"\0":
            message = f"a tar member {name!r} of type {head[156:157]!r}: torch wrote plain storages, tensors and pickle"
            raise FormatError(message, offset=at)
        if name in members:
            raise FormatError(f"the tar has two members called {name!r}", offset=at)
        octal = head[124:136].strip(b" \0")
        if not octal or octal.strip(OCTAL):
            raise FormatError("a tar header whose size is no octal number", offset=at)
        nbytes = int(octal, 8)
        start = at + BLOCK_NBYTES
        if start + nbytes > size:
            raise Truncated(f"the file ends inside {name!r}", offset=size)
        members[name] = (start, start + nbytes)
        at = start + -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
    if source.bytes(key, at, size).strip(b"\0") if size - at <= 1 << 20 else True:
        raise FormatError("bytes after the end of the tar", offset=at)
    return members


class Cursor:
    """Reads small pickles and numbers one after the other inside a member."""

    def __init__(self, source: Source, key: str, start: int, stop: int) -> None:
        self.source, self.key, self.at, self.stop = source, key, start, stop

    def pickle(self) -> object:
        limits = self.source.limits
        size = SMALL_PICKLE_NBYTES
        while True:
            data = self.source.bytes(self.key, self.at, min(self.at + size, self.stop))
            try:
                done = interpret(data, ReducerTable(), limits=limits, stream="tar")
            except Truncated as error:
                if self.at + size >= self.stop:
                    raise
                if size > limits.pickle_nbytes:
                    raise LimitExceeded(
                        "a pickle inside the tar is too long", found=size, offset=self.at
                    ) from error
                size *= 4
            else:
                self.at += done.stop
                return done.value

    def ints(self, count: int, width: int = 8) -> tuple[int, ...]:
        data = self.skip(count * width)
        raw = self.source.bytes(self.key, data, data + count * width)
        return tuple(
            int.from_bytes(raw[i : i + width], "little", signed=True)
            for i in range(0, len(raw), width)
        )

    def skip(self, nbytes: int) -> int:
        """Move past some bytes; gives where they began."""
        start = self.at
        if nbytes < 0 or start + nbytes > self.stop:
            raise Truncated("a member of the tar ends too early", offset=self.stop)
        self.at += nbytes
        return start

    def finish(self) -> None:
        if self.at != self.stop:
            raise FormatError("a member of the tar is longer than its content", offset=self.at)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < MAX_ELEMENTS:
        raise PickleError("a count was expected", found=type(value).__name__)
    return value


def _triple(value: object) -> tuple[int, object, object]:
    if not isinstance(value, tuple) or len(value) != 3 or type(value[0]) is not int:
        raise PickleError("a key, a place and a class were expected", found=type(value).__name__)
    return value[0], value[1], value[2]


def _storages(
    cursor: Cursor, places: dict[str, Storage], storages: Storages[W]
) -> dict[int, object]:
    found: dict[int, tuple[W, int]] = {}
    for _ in range(_count(cursor.pickle())):
        name, location, kind = _triple(cursor.pickle())
        dtype = storage_dtype(kind)
        if dtype is None or name in found:
            raise PickleError("a storage of an unknown class, or listed twice", found=brief(kind))
        (count,) = cursor.ints(1)
        if not 0 <= count < MAX_ELEMENTS:
            raise MetadataError(
                "a storage with a negative number of elements", found=count, offset=cursor.at
            )
        device = location if isinstance(location, str) else ""
        nbytes = count * max(dtype.bits // 8, 1)
        storage_id = StorageId(dtype, str(name), device, count, nbytes)
        at, home = cursor.skip(nbytes), cursor.source.store
        places[storage_id.key] = Storage(
            cursor.key, at, nbytes, "little", None, device, f"storage {name}", home=home
        )
        found[name] = storages.whole(storage_id), count
    views = cursor.pickle()
    if not isinstance(views, list):
        raise PickleError("the list of storage views is no list", found=type(views).__name__)
    for view in views:
        if not isinstance(view, tuple) or len(view) != 4 or any(type(v) is not int for v in view):
            raise PickleError("a storage view must be four integers")
        target, root, offset, count = view
        if (
            root not in found
            or target in found
            or offset < 0
            or count < 0
            or offset + count > found[root][1]
        ):
            raise MetadataError("a storage view that does not fit its root", found=brief(view))
        found[target] = storages.part(found[root][0], str(target), offset, count), count
    cursor.finish()
    return {name: storage for name, (storage, _) in found.items()}


def _tensors(cursor: Cursor, storages: Mapping[int, object], builder: Builder) -> dict[int, object]:
    found: dict[int, object] = {}
    limits = cursor.source.limits
    for _ in range(_count(cursor.pickle())):
        name, owner, _ = _triple(cursor.pickle())
        (rank,) = cursor.ints(1, 4)
        cursor.skip(4)
        if type(owner) is not int or owner not in storages or name in storages or name in found:
            raise MetadataError(
                "a tensor that names no storage, or a key that is used twice", found=brief(owner)
            )
        if not 0 <= rank <= limits.rank:
            raise LimitExceeded(
                f"a tensor with {rank} dimensions, above Limits(rank={limits.rank})", found=rank
            )
        size, stride, (offset,) = cursor.ints(rank), cursor.ints(rank), cursor.ints(1)
        found[name] = builder.view(storages[owner], None, (offset, size, stride))
    cursor.finish()
    return found
