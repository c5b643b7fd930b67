"""Load what torch wrote before 1.6: the stream of five pickles with raw storages behind, and the tar of 0.1.

The storages' bytes come after the object that uses them, so every storage is allocated when its id is met, put on its device, and
filled at the end. A storage that goes to another device is filled through the CPU one that it was made from. What a file claims
is compared with what is left of it before anything is allocated.
"""

from __future__ import annotations

import difflib
import inspect
import pickle
import struct
import sys
import tarfile
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import BinaryIO, cast

import torch
from torch.serialization import SourceChangeWarning

from holdfast.engine.memory_sink import UNKNOWN, Place, read_to_memory
from holdfast.engine.threads import default_threads
from holdfast.errors import FormatError, HoldfastError, MetadataError, PickleError, Refused, Truncated
from holdfast.formats.pickle.table import ReducerTable
from holdfast.formats.torch.legacy import StorageIds, Window, begins_like_tar, locate_storages
from holdfast.formats.torch.tensors import brief
from holdfast.torch.serialization.opening import OpenedFile
from holdfast.torch.serialization.pickling import unpickler
from holdfast.torch.serialization.refusals import refusal
from holdfast.torch.serialization.settings import MAGIC_NUMBER, PROTOCOL_VERSION
from holdfast.torch.serialization.storages import (
    LazyStorages,
    Placement,
    StorageBytes,
    StorageName,
    memory_ranges,
    parse_name,
    pretended,
    swap_bytes,
    typed,
    view_of,
)
from holdfast.torch.serialization.weights import WeightsTable

COUNT = struct.Struct("<q")
TAR_MAGIC = (257, b"ustar")
"""Where a tar says what it is."""


class NotTorch(FormatError, pickle.UnpicklingError, RuntimeError):
    """The bytes are no stream that torch wrote; a RuntimeError as well, which torch raises for a wrong magic number."""


class CutShort(Truncated, Refused):
    """The file ends inside a storage; a RuntimeError as well, which torch raises there."""


def load_legacy(
    file: OpenedFile, place: Placement, *, pickle_module: ModuleType, arguments: Mapping[str, object], weights_only: bool
) -> object:
    """The object of a legacy stream. The caller's file object stands behind the last storage afterwards."""
    if not file.nbytes:
        raise Truncated("Ran out of input: there is nothing to load here (was the buffer rewound?)", file=file.path)
    if weights_only:
        with file.source.store.reading():
            result, end = _interpret(file, place, str(arguments["encoding"]))
    else:
        result, end = _unpickle(file, place, pickle_module=pickle_module, arguments=arguments)
    if file.path is None:
        file.file.seek(end)
    return result


def _interpret(file: OpenedFile, place: Placement, encoding: str) -> tuple[object, int]:
    """By the closed interpreter, in two passes: which storages there are, and with their places known, the object."""
    window = Window(file.source, file.key, begin=file.start)
    table: WeightsTable | None = None
    try:
        magic, at = window.stream(0, ReducerTable(), "magic number")
        if magic.value != MAGIC_NUMBER:
            raise NotTorch("Invalid magic number; corrupt file?", file=file.path)
        version, at = window.stream(at, ReducerTable(), "protocol version")
        if version.value != PROTOCOL_VERSION:
            raise NotTorch(f"Invalid protocol version: {brief(version.value)}", file=file.path)
        _, begin = window.stream(at, ReducerTable(), "system")
        ids = StorageIds()
        _, at = window.stream(begin, ids, "object")
        keys, at = window.stream(at, ReducerTable(), "storage keys")
        try:
            places, end = locate_storages(file.source, file.key, ids.storages, keys.value, file.start + at)
        except Truncated as error:
            raise CutShort(error.message, file=file.path, offset=error.offset) from None

        def find(name: StorageName) -> StorageBytes:
            stored = places[name.key]
            return StorageBytes(stored.start, stored.nbytes, None, f"storage {name.key}")

        swap = sys.byteorder != "little"
        storages = LazyStorages(file.source, file.key, find, place=place, swap=swap, threads=default_threads())
        table = WeightsTable(storages, encoding=encoding)
        found, _ = window.stream(begin, table, "object")
    except (NotTorch, CutShort):
        raise
    except (HoldfastError, pickle.UnpicklingError) as error:
        raise refusal(error, protocol=2 if table is None else table.protocol) from None
    storages.fill()
    return found.value, end


def _unpickle(
    file: OpenedFile, place: Placement, *, pickle_module: ModuleType, arguments: Mapping[str, object]
) -> tuple[object, int]:
    """By an unpickler that runs what the pickles say."""
    storages = LegacyStorages(file, place)
    stream: BinaryIO = file.file
    stream.seek(file.start)
    if pickle_module.load(stream, **arguments) != MAGIC_NUMBER:
        raise NotTorch("Invalid magic number; corrupt file?", file=file.path)
    version = pickle_module.load(stream, **arguments)
    if version != PROTOCOL_VERSION:
        raise NotTorch(f"Invalid protocol version: {version}", file=file.path)
    pickle_module.load(stream, **arguments)
    result = unpickler(pickle_module, stream, storages.persistent, arguments=arguments).load()
    keys = pickle_module.load(stream, **arguments)
    with file.source.store.reading():
        end = storages.fill_from(keys, stream.tell())
    torch._utils._validate_loaded_sparse_tensors()
    return result, end


class LegacyStorages:
    """The storages of a stream that is unpickled as it comes: made when they are named, filled when the stream gets to them."""

    def __init__(self, file: OpenedFile, place: Placement) -> None:
        self._file = file
        self._place = place
        self._names: dict[str, StorageName] = {}
        self._plain: dict[str, torch.UntypedStorage] = {}
        self._placed: dict[str, torch.UntypedStorage] = {}
        self._views: dict[str, torch.UntypedStorage] = {}
        self._claimed = 0

    def persistent(self, pid: object) -> object:
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], type):
            _compare_source(*pid[1:])
            return pid[1]
        name = parse_name(pid, (5, 6))
        placed = self._placed.get(name.key)
        if placed is None:
            placed = self._make(name)
        elif name.dtype != self._names[name.key].dtype and placed.nbytes():
            raise MetadataError(f"storage {name.key} is used under two dtypes", found=str(name.dtype))
        return typed(placed if name.view is None else view_of(name, placed, self._views), name.dtype)

    def fill_from(self, keys: object, at: int) -> int:
        """Read the storages that lie from `at` on, in the order of `keys`; where they end."""
        if isinstance(keys, list):
            keys = [each.decode("latin-1") if isinstance(each, bytes) else each for each in keys]
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise PickleError("the list of storage keys is no list of text")
        if len(set(keys)) != len(keys) or not set(keys) <= set(self._names):
            raise MetadataError("the list of storage keys names others than those that the object uses", found=len(keys))
        source, key = self._file.source, self._file.key
        size = source.store.size(key)
        pieces: list[Place] = []
        for each in keys:
            name = self._names[each]
            if at + COUNT.size + name.nbytes > size:
                missing = at + COUNT.size + name.nbytes - size
                raise CutShort(
                    f"unexpected EOF, expected {missing} more bytes of storage {each!r}. The file might be corrupted",
                    file=self._file.path,
                    offset=size,
                )
            (count,) = COUNT.unpack(source.bytes(key, at, at + COUNT.size))
            if count != name.count:
                raise MetadataError(
                    f"storage {each} has {count:,} elements where it lies and {name.count:,} where it is used",
                    offset=at,
                    expected=name.count,
                    found=count,
                )
            at += COUNT.size
            address = self._plain[each].data_ptr() if each in self._plain else 0
            pieces.append((at, name.nbytes, address, UNKNOWN))
            at += name.nbytes
        if not (self._place.meta or self._place.fake or self._place.skip):
            wanted = memory_ranges(key, pieces, [f"storage {each}" for each in keys])
            read_to_memory(source.store, wanted, threads=default_threads())
            for each in keys:
                self._deliver(each)
        return at

    def _make(self, name: StorageName) -> torch.UntypedStorage:
        self._claimed += name.nbytes
        if self._claimed > self._file.nbytes:
            raise Truncated(
                f"the storages that the file speaks of have {self._claimed:,} bytes, and the file has {self._file.nbytes:,}",
                file=self._file.path,
            )
        self._names[name.key] = name
        place = self._place
        if place.meta or place.fake:
            placed = pretended(name, place, None)
        else:
            plain = self._plain[name.key] = torch.UntypedStorage(name.nbytes)
            placed = place.restore(plain, name.location)
        self._placed[name.key] = placed
        return placed

    def _deliver(self, key: str) -> None:
        plain, placed = self._plain[key], self._placed[key]
        if sys.byteorder != "little":
            swap_bytes(plain, self._names[key].dtype)
        if placed is not plain and placed.nbytes() and placed.data_ptr() != plain.data_ptr() and placed.device.type != "meta":
            placed.copy_(plain)


def _compare_source(kind: type, path: object, text: object) -> None:
    """Warn where the class's source is not what it was when the file was written."""
    if not isinstance(text, str) or not isinstance(path, str):
        return
    try:
        lines, _ = inspect.getsourcelines(kind)
        found = "".join(lines)
    except Exception:
        # As when it was saved: whatever keeps Python from finding the source, the object is good without.
        warnings.warn(f"Couldn't retrieve source code for container of type {kind.__name__}.", SourceChangeWarning, stacklevel=2)
        return
    if found == text:
        return
    changed = sum(line[:1] in "+-" for line in difflib.unified_diff(text.splitlines(), found.splitlines(), lineterm="", n=0))
    warnings.warn(
        f"source code of class '{torch.typename(kind)}' has changed: {changed} lines differ from those of {path} when the model "
        "was saved. If it does not behave as it did, look at the difference, or save state_dict() instead of the model.",
        SourceChangeWarning,
        stacklevel=2,
    )


def looks_like_tar(file: OpenedFile) -> bool:
    """Whether this is a tar, which only torch 0.1 wrote. torch looks for one in paths and real files only."""
    at, magic = TAR_MAGIC
    head = file.head(512)
    return head[at : at + len(magic)] == magic or begins_like_tar(head)


def load_tar(file: OpenedFile, place: Placement, *, pickle_module: ModuleType, arguments: Mapping[str, object]) -> object:
    """The object of a tar of torch 0.1: members `storages`, `tensors` and `pickle`, read in memory."""
    made: dict[str, torch.storage.TypedStorage] = {}
    tensors: dict[str, torch.Tensor] = {}
    with tarfile.open(fileobj=file.file, mode="r:", format=tarfile.PAX_FORMAT) as tar:

        def member(name: str) -> BinaryIO:
            try:
                found = tar.extractfile(name)
            except KeyError as error:
                raise Refused(f"the tar has no member {name!r}: torch 0.1 did not write it", file=file.path) from error
            if found is None:
                raise Refused(f"the tar's member {name!r} is no plain file", file=file.path)
            return cast(BinaryIO, found)

        def whole(stream: BinaryIO, layout: str) -> tuple[int, ...]:
            return struct.unpack(layout, stream.read(struct.calcsize(layout)))

        def triple(stream: BinaryIO) -> tuple[object, str, object]:
            return cast("tuple[object, str, object]", unpickler(pickle_module, stream, lambda pid: pid, arguments=arguments).load())

        stream = member("storages")
        for _ in range(pickle_module.load(stream, **arguments)):
            key, location, kind = triple(stream)
            dtype = parse_name(("storage", kind, "0", "cpu", 0), (5,)).dtype
            (count,) = whole(stream, "<q")
            raw = stream.read(count * dtype.itemsize)
            storage = torch.UntypedStorage(len(raw))
            if raw:
                torch.empty(0, dtype=torch.uint8).set_(storage).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
            made[str(key)] = typed(place.restore(storage, location), dtype)
        for target, root, offset, count in pickle_module.load(stream, **arguments):
            base = made[str(root)]
            width = base.dtype.itemsize
            made[str(target)] = typed(base._untyped_storage[offset * width : (offset + count) * width], base.dtype)
        stream = member("tensors")
        for _ in range(pickle_module.load(stream, **arguments)):
            key, storage_key, _ = triple(stream)
            rank, _ = whole(stream, "<ii")
            size, stride, (offset,) = whole(stream, f"<{rank}q"), whole(stream, f"<{rank}q"), whole(stream, "<q")
            base = made[str(storage_key)]
            untyped = base._untyped_storage
            tensors[str(key)] = torch.empty(0, dtype=base.dtype, device=untyped.device).set_(untyped, offset, size, stride)

        def persistent(pid: object) -> object:
            if isinstance(pid, tuple):
                _compare_source(*pid)
                return pid[0]
            return tensors[str(pid)] if str(pid) in tensors else made[str(pid)]

        return unpickler(pickle_module, member("pickle"), persistent, arguments=arguments).load()
