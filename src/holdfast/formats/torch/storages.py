"""Persistent ids, by which torch's pickles point at storages, and the storages behind them.

A storage is a 1-D `LazyTensor`, so that a bare storage in a checkpoint is readable like anything else. In an archive every record
is a storage of one set of columns (`RecordStorages`). A tensor is a row over one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Global
from holdfast.core.protocols import Source
from holdfast.core.table import StoredFile
from holdfast.core.tensor import PLAIN_TRAITS, LazyTensor
from holdfast.core.value import Value
from holdfast.engine.files import FileStorages
from holdfast.errors import MetadataError, PickleError, ZipError
from holdfast.formats.torch.tensors import MAX_ELEMENTS, brief, strided_kind
from holdfast.formats.zip.layout import STORED, Archive


def storage_dtype(what: object) -> DType | None:
    """The dtype of a storage class; uint8 for an untyped one; None when it is no storage class."""
    if isinstance(what, DType):
        # Files between torch 1.13 and 2.0 may tag a storage with the dtype itself.
        return what
    if not isinstance(what, Global):
        return None
    if what.module in ("torch", "torch.cuda", "torch.storage") and what.name in (
        "UntypedStorage",
        "_UntypedStorage",
    ):
        return DTYPES.name("uint8")
    if what.module in ("torch", "torch.cuda"):
        return DTYPES.storage(what.name)
    return None


class StorageId(Value, frozen=True):
    """A parsed persistent id."""

    dtype: DType
    key: str
    location: str
    count: int
    nbytes: int
    """The size of the whole storage."""
    view: tuple[str, int, int] | None = None


def not_a_storage(pid: object) -> str:
    """The message for a persistent id that names no storage, in torch's words."""
    if not isinstance(pid, tuple):
        return f"persistent_load id must be tuple (saved_id must be a tuple), but got {type(pid)}"
    if not pid or type(pid[0]) is not str:
        return f"Only persistent_load of storage is allowed, but got {type(pid[0]) if pid else 'an empty tuple'}"
    if pid[0] != "storage":
        return f"Unknown typename for persistent_load, expected 'storage' but got {pid[0][:64]!r}"
    return (
        "Only persistent_load of storage is allowed: its class, key, location and count of elements"
    )


def parse_storage_id(
    pid: object,
    lengths: tuple[int, ...],
    dtype_of: Callable[[object], DType | None] = storage_dtype,
) -> StorageId:
    """Check the shape and types of a persistent id. `dtype_of` knows the classes of storages.

        ('storage', storage class, key, location, element count)              zip, since 1.6
        ('storage', storage class, key, location, element count, view)        stream; view = None or (key, offset, count)

    Every reference to one key must agree in dtype and length, and the length must be that of the record, to the byte.
    """
    if (
        not isinstance(pid, tuple)
        or len(pid) not in lengths
        or type(pid[0]) is not str
        or pid[0] != "storage"
    ):
        raise PickleError(not_a_storage(pid), found=type(pid).__name__)
    kind, key, location, count = pid[1:5]
    dtype = dtype_of(kind)
    if dtype is None:
        raise PickleError("a storage of an unknown class", found=brief(kind))
    if not isinstance(key, str) or not isinstance(location, str):
        raise PickleError("a storage's key and location must be text", found=type(key).__name__)
    if type(count) is not int or not 0 <= count < MAX_ELEMENTS:
        raise MetadataError(
            "a storage's element count must be a non-negative integer", found=brief(count)
        )
    view = pid[5] if len(pid) > 5 else None
    if view is not None:
        if not isinstance(view, tuple) or len(view) != 3 or not isinstance(view[0], str):
            raise PickleError(
                "a storage view must be a key, an offset and a count", found=type(view).__name__
            )
        if (
            any(type(v) is not int or not 0 <= v < MAX_ELEMENTS for v in view[1:])
            or view[1] + view[2] > count
        ):
            raise MetadataError("a storage view that reaches past its storage", found=brief(view))
    # An element of a packed quantised type is a byte already.
    nbytes = count * max(dtype.bits // 8, 1)
    return StorageId(dtype, key, location, count, nbytes, view)


W = TypeVar("W")


class Storages(Generic[W]):
    """The storages of one pickle, each made once: `persistent` is what the interpreter calls."""

    dtype_of = staticmethod(storage_dtype)

    def __init__(self, lengths: tuple[int, ...] = (5,)) -> None:
        self.lengths = lengths
        self._known: dict[str, tuple[DType, int, W]] = {}
        """By key, the storage, with the dtype and the number of elements that its first id says."""
        self._empty: dict[tuple[str, str], W] = {}
        """By key and dtype, storages without elements that have further dtypes."""

    def persistent(self, pid: object) -> W:
        """The storage behind a persistent id."""
        storage_id = parse_storage_id(pid, self.lengths, self.dtype_of)
        known = self._known.get(storage_id.key)
        if known is None:
            whole = self.whole(storage_id)
            self._known[storage_id.key] = storage_id.dtype, storage_id.count, whole
        else:
            dtype, count, whole = known
            if dtype is not storage_id.dtype or count != storage_id.count:
                whole = self._find_empty(dtype, count, storage_id)
        return whole if storage_id.view is None else self.part(whole, *storage_id.view)

    def _find_empty(self, dtype: DType, count: int, storage_id: StorageId) -> W:
        """Return an empty storage, which torch saves under as many dtypes as it was used with.

        Args:
            dtype: The dtype that the first id of this key says.
            count: The number of elements that it says.
            storage_id: Another id of this key.

        Raises:
            MetadataError: One of the two ids of this key says that it has elements.
        """
        if count or storage_id.count:
            one = f"{count:,} × {dtype}"
            other = f"{storage_id.count:,} × {storage_id.dtype}"
            raise MetadataError(
                f"storage {storage_id.key!r} is {one} in one place and {other} in another",
                expected=(dtype.name, count),
                found=(storage_id.dtype.name, storage_id.count),
            )
        place = storage_id.key, storage_id.dtype.name
        if place not in self._empty:
            self._empty[place] = self.whole(storage_id)
        return self._empty[place]

    def whole(self, storage_id: StorageId) -> W:
        """Make a storage that was not used before. Raises where it is not what the id says."""
        raise NotImplementedError

    def part(self, whole: W, key: str, start: int, count: int) -> W:
        """Some elements of a storage, which torch before 0.4 knew as an object of its own, with a key."""
        raise NotImplementedError


def wrong_size(storage_id: StorageId, nbytes: int) -> MetadataError:
    """Return the error for a storage whose size is not the one that its id claims."""
    message = f"storage {storage_id.key!r} claims {storage_id.nbytes:,} bytes and its record has {nbytes:,}"
    return MetadataError(message, expected=nbytes, found=storage_id.nbytes)


class FoundStorages(Storages[LazyTensor]):
    """Storages that a function finds, one by one, as 1-D lazy tensors."""

    def __init__(
        self, source: Source, find: Callable[[StorageId], Storage], lengths: tuple[int, ...] = (5,)
    ) -> None:
        super().__init__(lengths)
        self._source, self._find = source, find

    def whole(self, storage_id: StorageId) -> LazyTensor:
        storage = self._find(storage_id)
        if storage.nbytes != storage_id.nbytes:
            raise wrong_size(storage_id, storage.nbytes)
        return LazyTensor.contiguous(
            "", storage_id.dtype, (storage_id.count,), storage, self._source
        )

    def part(self, whole: LazyTensor, key: str, start: int, count: int) -> LazyTensor:
        return whole[start : start + count]


class RecordStorages(FileStorages):
    """The records of an archive as storages: the number of one is the row of its record."""

    def __init__(self, source: Source, key: str, archive: Archive) -> None:
        self.archive = archive
        starts, packed, crcs, *_ = archive.records.columns
        self.files = [StoredFile(source, key, source.store)]
        self.file_indices, self.starts = np.zeros(len(starts), np.int64), np.array(starts, np.int64)
        self.nbytes, self.crcs = np.array(packed, np.int64), np.array(crcs, np.int64)

    @cached_property
    def _labels(self) -> Sequence[str]:  # type: ignore[override]  # made when first used
        labels, cut = [""] * len(self), len(self.archive.root)
        for name, row in self.archive.records.rows.items():
            labels[row] = name[cut:]
        return labels

    @cached_property
    def names(self) -> Sequence[str]:  # type: ignore[override]  # the same
        return self._labels


class ArchiveStorages(Storages[LazyTensor]):
    """The storages of a pickle in an archive. Each is a record of one folder, and every tensor is a row over one."""

    def __init__(self, storages: RecordStorages, folder: str, byteorder: str) -> None:
        super().__init__()
        archive = storages.archive
        self._storages, self._folder, self._byteorder = storages, folder, byteorder
        self._prefix = archive.root + folder
        """What the name of a record in the folder begins with."""
        self._rows = archive.records.rows
        _, self._packed, _, self._methods, *_ = archive.records.columns

    def whole(self, storage_id: StorageId) -> LazyTensor:
        name, dtype = self._prefix + storage_id.key, storage_id.dtype
        row = self._rows.get(name)
        if row is None:
            raise MetadataError(
                f"the pickle points at {self._folder}{storage_id.key}, which is not in the archive"
            )
        if self._methods[row] != STORED:
            raise ZipError(
                f"the storage {name!r} is compressed",
                offset=self._storages.archive.records[name].header,
            )
        nbytes = self._packed[row]
        if nbytes != storage_id.nbytes:
            raise wrong_size(storage_id, nbytes)
        kind = strided_kind(
            dtype,
            (storage_id.count,),
            (dtype.bits,),
            nbytes,
            PLAIN_TRAITS,
            self._byteorder,
            storage_id.location,
        )
        return self._storages.lazy_tensor(row, kind, "")

    def part(self, whole: LazyTensor, key: str, start: int, count: int) -> LazyTensor:
        return whole[start : start + count]
