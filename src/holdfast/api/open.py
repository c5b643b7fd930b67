"""`open` and `read`: from a path to a checkpoint, from lazy tensors to arrays."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.collector import resting_collector
from holdfast.core.limits import Limits
from holdfast.core.protocols import Request, Source, Store
from holdfast.core.tensor import LazyTensor
from holdfast.engine.source import OpenSource
from holdfast.errors import StoreError, UnknownFormat, ZipError, located
from holdfast.formats.detect import detect
from holdfast.stores.local import LocalStore
from holdfast.stores.memory import FileObjectStore, MemoryStore
from holdfast.stores.paths import local_path

__all__ = ["open", "read"]

Openable = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO


def open(
    path: Openable,
    *,
    mmap: bool = False,
    verify: bool = True,
    limits: Limits | None = None,
    threads: int | None = None,
) -> Checkpoint:
    """Open a checkpoint of any known format without running anything in it, and without reading tensor data.

    `path` is a file, a directory, the bytes themselves, or a seekable binary file object. With `mmap=True` arrays are
    views of the mapped file (copied on write) where their layout allows, and checksums are not looked at. Otherwise, where the
    file records a checksum and the whole of what it covers is read, it is compared (`verify=False` opts out). `limits` raises
    what a file may cost; `threads` bounds the parallel reads.
    """
    store = store_of(path, limits or Limits())
    try:
        with located(file=store.name), resting_collector():
            source = OpenSource(store, limits=limits, threads=threads, mapped=mmap, verify=verify)
            return Checkpoint(source, detect(source).describe(source))
    except ZipError as error:
        store.close()
        if store.name.endswith(".distcp"):
            # Several archives, one behind the other, of which the index beside them knows the places.
            raise UnknownFormat("one of the data files of a distributed checkpoint; open the folder that it is in") from error
        raise
    except BaseException:
        store.close()
        raise


def store_of(path: Openable, limits: Limits) -> Store:
    """The store behind anything that `open` takes."""
    if isinstance(path, bytes | bytearray | memoryview):
        return MemoryStore({"bytes": path}, name="<bytes>")
    if isinstance(path, str | os.PathLike):
        path = local_path(path)
        try:
            return LocalStore(path, max_files=limits.files)
        except StoreError as error:
            from holdfast.engine.commit import recover

            # A save that replaced a directory in two steps and was cut off between them: what it replaced is beside it.
            kept = recover(path) if error.errno == errno.ENOENT else None
            if kept is None:
                raise
            return LocalStore(kept, max_files=limits.files)
    if isinstance(path, io.IOBase) or all(hasattr(path, name) for name in ("read", "seek", "tell")):
        return FileObjectStore(path)
    raise TypeError(f"expected a path, bytes or a seekable binary file, not {type(path).__name__}")


def read(tensors: Iterable[LazyTensor]) -> list[np.ndarray]:
    """Read many lazy tensors (slices, too) at once: in parallel, with neighbouring reads joined."""
    wanted = list(tensors)
    outs = [t.empty() for t in wanted]
    by_source: dict[int, tuple[Source, list[Request]]] = {}
    for tensor, out in zip(wanted, outs, strict=True):
        by_source.setdefault(id(tensor.source), (tensor.source, []))[1].append(Request(tensor, out))
    for source, requests in by_source.values():
        source.read(requests)
    return outs
