"""The stream that `torch.save` wrote before 1.6 (and writes today on request).

    pickle 1   the magic number                     pickle 4   the object
    pickle 2   the protocol, 1001                   pickle 5   the list of storage keys
    pickle 3   sizes of the writer's C types        then for each key: int64 element count, raw elements, little-endian

There is no index, so the object comes before anything says where its storages lie. It is interpreted twice by the same machine:
first to collect the storage ids, from which with pickle 5 every position follows; then to build.
"""

from __future__ import annotations

from holdfast.core.chunk import Storage
from holdfast.core.opaque import Global
from holdfast.core.protocols import Description, Source
from holdfast.core.tree import name_tensors
from holdfast.errors import FormatError, LimitExceeded, MetadataError, PickleError, Truncated
from holdfast.formats.pickle.machine import Interpreted, interpret
from holdfast.formats.pickle.table import Table
from holdfast.formats.torch.geometry import brief
from holdfast.formats.torch.storages import StorageId, Storages, parse_storage_id
from holdfast.formats.torch.table import TorchTable

__all__ = ["MAGIC", "TorchLegacy"]

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
MAGIC_BYTES = MAGIC.to_bytes(10, "little")
WINDOW_NBYTES = 1 << 20
"""Bytes read at first; most objects pickle to less. It grows fourfold while a stream asks for more."""


class TorchLegacy:
    """The stream container."""

    name = "torch-legacy"

    def matches(self, source: Source) -> bool:
        """The magic number, whatever protocol wrote it, is among the first bytes."""
        keys = source.store.list()
        if len(keys) != 1:
            return False
        head = source.bytes(keys[0], 0, min(64, source.store.size(keys[0])))
        return MAGIC_BYTES in head or str(MAGIC).encode() in head

    def describe(self, source: Source) -> Description:
        (key,) = source.store.list()
        window = Window(source, key)
        magic, at = window.stream(0, Table(), "pickle 1")
        if magic.value != MAGIC:
            raise FormatError("the stream does not begin with torch's magic number")
        protocol, at = window.stream(at, Table(), "pickle 2")
        if protocol.value != PROTOCOL:
            raise FormatError(f"protocol {PROTOCOL} is the only one that torch ever wrote", found=brief(protocol.value))
        _, begin = window.stream(at, Table(), "pickle 3")

        ids = StorageIds()
        _, at = window.stream(begin, ids, "pickle 4")
        keys, at = window.stream(at, Table(), "pickle 5")
        places, end = locate_storages(source, key, ids.storages, keys.value, at)
        if end != source.store.size(key):
            raise FormatError(f"{source.store.size(key) - end:,} bytes after the last storage", offset=end)

        def find(asked: StorageId) -> Storage:
            return places[asked.key]

        storages = Storages(source, find, lengths=(6,))

        def persistent(pid: object) -> object:
            return pid[1] if _is_module(pid) else storages.persistent(pid)  # type: ignore[index]  # _is_module checked it

        built, stop = window.stream(begin, TorchTable(source, persistent), "pickle 4")
        named = name_tensors(built.value, source.limits, stop - begin)
        notes = [f"the file carries the source text of {len(ids.modules)} classes"] if ids.modules else []
        return Description(self.name, named.tensors, built.value, built.foreign, (*notes, *named.notes))


class Window:
    """The head of a file, read as far as its pickles reach."""

    def __init__(self, source: Source, key: str, *, begin: int = 0) -> None:
        self._source = source
        self._key = key
        self._begin = begin
        self._size = source.store.size(key) - begin
        self._data = source.bytes(key, begin, begin + min(self._size, WINDOW_NBYTES))

    def stream(self, start: int, table: Table, name: str) -> tuple[Interpreted, int]:
        """Interpret the stream at `start`, counted from `begin`; grow the window while it ends too early.

        Also where the next one begins.
        """
        limit = self._source.limits.pickle_nbytes
        while True:
            try:
                done = interpret(
                    self._data, table, limits=self._source.limits, stream=name, start=start, max_nbytes=len(self._data)
                )
            except Truncated as error:
                have = len(self._data)
                if have == self._size:
                    raise
                if have - start > limit:
                    raise LimitExceeded(f"{name} is longer than Limits(pickle_nbytes={limit:,})", found=have) from error
                # Tables keep nothing from a pass that broke off but ids that the next pass meets again.
                self._data = self._source.bytes(self._key, self._begin, self._begin + min(self._size, have * 4))
            else:
                return done, done.stop


class StorageIds(Table):
    """Builds nothing and collects the persistent ids of pickle 4: the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[str, StorageId] = {}
        self.modules: set[str] = set()

    def persistent(self, pid: object) -> object:
        if _is_module(pid):
            what = pid[1]  # type: ignore[index]  # _is_module checked it
            self.modules.add(str(what))
            return what
        asked = parse_storage_id(pid, (6,))
        self.storages.setdefault(asked.key, asked)
        return asked


def _is_module(pid: object) -> bool:
    """('module', class, file name, source text): the first mention of every nn.Module class."""
    return isinstance(pid, tuple) and len(pid) == 4 and type(pid[0]) is str and pid[0] == "module" and isinstance(pid[1], Global)


def locate_storages(
    source: Source, key: str, ids: dict[str, StorageId], listed: object, start: int
) -> tuple[dict[str, Storage], int]:
    """Where each storage lies, with the file's own counts checked against the ids; and where the last one ends."""
    if not isinstance(listed, list) or not all(isinstance(k, str) for k in listed):
        raise PickleError("the list of storage keys is no list of text")
    if len(set(listed)) != len(listed) or set(listed) != set(ids):
        raise MetadataError(
            "the list of storage keys is not the set of storages that the object uses", expected=len(ids), found=len(listed)
        )
    home = source.store
    size = home.size(key)
    places = {}
    for name in listed:
        asked = ids[name]
        if start + 8 + asked.nbytes > size:
            raise Truncated(f"the file ends inside storage {name!r}", offset=size)
        count = int.from_bytes(source.bytes(key, start, start + 8), "little")
        if count != asked.count:
            raise MetadataError(
                f"storage {name!r} has {count:,} elements where it lies and {asked.count:,} where it is used",
                offset=start,
                expected=asked.count,
                found=count,
            )
        places[name] = Storage(key, start + 8, asked.nbytes, "little", None, asked.location, f"storage {name}", home=home)
        start += 8 + asked.nbytes
    return places, start
