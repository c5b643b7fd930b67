"""Persistent ids: how a torch pickle points at its storages.

    ('storage', storage class, key, location, element count)              zip, since 1.6
    ('storage', storage class, key, location, element count, view)        stream; view = None or (key, offset, count)

Every reference to one key must agree in dtype and length, and the length must be that of the record, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DType
from holdfast.core.protocols import Source
from holdfast.core.tensor import LazyTensor
from holdfast.errors import MetadataError, PickleError
from holdfast.formats.torch.geometry import MAX_ELEMENTS, brief
from holdfast.formats.torch.table import storage_dtype

__all__ = ["StorageId", "Storages", "parse_storage_id"]


@dataclass(frozen=True, slots=True)
class StorageId:
    """One parsed persistent id."""

    dtype: DType
    key: str
    location: str
    count: int
    view: tuple[str, int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage. Packed quantised types count bytes already."""
        return self.count * max(self.dtype.bits // 8, 1)


def parse_storage_id(pid: object, lengths: tuple[int, ...]) -> StorageId:
    """Check the shape and types of a persistent id."""
    if not isinstance(pid, tuple) or len(pid) not in lengths or type(pid[0]) is not str or pid[0] != "storage":
        raise PickleError("a persistent id that is no storage", found=type(pid).__name__)
    _, kind, key, location, count, *rest = pid
    dtype = storage_dtype(kind)
    if dtype is None:
        raise PickleError("a storage of an unknown class", found=brief(kind))
    if not isinstance(key, str) or not isinstance(location, str):
        raise PickleError("a storage's key and location must be text", found=type(key).__name__)
    if type(count) is not int or not 0 <= count < MAX_ELEMENTS:
        raise MetadataError("a storage's element count must be a non-negative integer", found=brief(count))
    view = rest[0] if rest else None
    if view is not None:
        if not isinstance(view, tuple) or len(view) != 3 or not isinstance(view[0], str):
            raise PickleError("a storage view must be a key, an offset and a count", found=type(view).__name__)
        if any(type(v) is not int or not 0 <= v < MAX_ELEMENTS for v in view[1:]) or view[1] + view[2] > count:
            raise MetadataError("a storage view that reaches past its storage", found=brief(view))
    return StorageId(dtype, key, location, count, view)


class Storages:
    """The storages of one pickle, each made once: `persistent` is what the interpreter calls."""

    def __init__(self, source: Source, find: Callable[[StorageId], Storage], lengths: tuple[int, ...] = (5,)) -> None:
        self._source = source
        self._find = find
        self._lengths = lengths
        self._known: dict[str, tuple[StorageId, LazyTensor]] = {}

    def persistent(self, pid: object) -> LazyTensor:
        """The storage behind a persistent id, as a 1-D tensor."""
        asked = parse_storage_id(pid, self._lengths)
        known = self._known.get(asked.key)
        if known is None:
            storage = self._find(asked)
            if storage.nbytes != asked.nbytes:
                raise MetadataError(
                    f"storage {asked.key!r} claims {asked.nbytes:,} bytes and its record has {storage.nbytes:,}",
                    expected=storage.nbytes,
                    found=asked.nbytes,
                )
            whole = LazyTensor.contiguous("", asked.dtype, (asked.count,), storage, self._source)
            self._known[asked.key] = (asked, whole)
        else:
            first, whole = known
            if not first.count and not asked.count:
                # torch saves an empty storage under as many dtypes as it was used with.
                return replace(whole, dtype=asked.dtype)
            if first.dtype is not asked.dtype or first.count != asked.count:
                raise MetadataError(
                    f"storage {asked.key!r} is {first.count:,} × {first.dtype} in one place and "
                    f"{asked.count:,} × {asked.dtype} in another",
                    expected=(first.dtype.name, first.count),
                    found=(asked.dtype.name, asked.count),
                )
        if asked.view is None:
            return whole
        _, start, count = asked.view
        return whole[start : start + count]
