"""What `load` is given, as a source to read from: a path, an open file, or anything that can be read and sought."""

from __future__ import annotations

import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from holdfast.core.protocols import Source, Store
from holdfast.core.value import Value
from holdfast.engine.source import OpenSource
from holdfast.errors import HoldfastError
from holdfast.stores.local import DescriptorStore
from holdfast.stores.memory import FileObjectStore, MemoryStore

__all__ = ["Opened", "opened"]

KEY = "file"
SEEKABLE = (
    "You can only torch.load from a file that is seekable. Please pre-load the data into a buffer like io.BytesIO and try to load "
    "from it instead."
)


class Opened(Value, frozen=True):
    """A file that is being loaded."""

    source: Source
    key: str
    start: int
    """Where the caller's object stood: the file begins here."""
    file: BinaryIO
    """For readers that want a file object."""
    path: str | None
    verify: bool = True
    """Whether recorded checksums are compared."""

    @property
    def nbytes(self) -> int:
        return self.source.store.size(self.key) - self.start

    def head(self, nbytes: int) -> bytes:
        return self.source.bytes(self.key, self.start, self.start + min(nbytes, self.nbytes))


@contextmanager
def opened(f: object, *, verify: bool = True) -> Iterator[Opened]:
    """Open a path, or look at an open file where it stands. A path is closed again; a file object keeps its position."""
    if isinstance(f, str | os.PathLike):
        path = os.fsdecode(f)
        with _file(path) as own, _called(path):
            yield Opened(_source(DescriptorStore(own.fileno(), name=path), verify), KEY, 0, own, path, verify)
        return
    start = _position(f)
    file = cast(BinaryIO, f)
    if type(file) is io.BytesIO:
        # Released at the end whatever holds on to it: a buffer cannot grow while somebody has a view of it.
        with file.getbuffer() as view, view.cast("B") as content, _called(None):
            store = MemoryStore({}, name="<BytesIO>")
            store.add(KEY, content)
            yield Opened(_source(store, verify), KEY, start, file, None, verify)
        return
    if isinstance(file.read(0), str):
        raise TypeError(f"a file to load from must be opened in binary mode, and this {type(f).__name__} gives text")
    with _called(None):
        yield Opened(_source(_store(file), verify), KEY, start, file, None, verify)


def _file(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except IsADirectoryError as error:
        said = f"{error.strerror}; holdfast.torch.load_full and load_sharded load checkpoints that are folders"
        raise IsADirectoryError(error.errno, said, path) from None


@contextmanager
def _called(path: str | None) -> Iterator[None]:
    """Errors that pass by name the file as the caller does, and not by its key here."""
    try:
        yield
    except HoldfastError as error:
        if error.file in (None, KEY):
            error.file = path
        raise


def _source(store: Store, verify: bool) -> OpenSource:
    return OpenSource(store, verify=verify)


def _position(f: object) -> int:
    """Where a file object stands; torch's words for one that cannot be asked."""
    for name in ("seek", "tell", "read"):
        if not callable(getattr(f, name, None)):
            raise AttributeError(f"'{type(f).__name__}' object has no attribute '{name}'. {SEEKABLE}")
    try:
        start = f.tell()  # type: ignore[attr-defined]  # asked for above
        f.seek(start)  # type: ignore[attr-defined]
    except (io.UnsupportedOperation, AttributeError) as error:
        raise type(error)(f"{error}. {SEEKABLE}") from error
    return int(start)


def _store(file: BinaryIO) -> Store:
    """The fastest way to the bytes of a file object."""
    # No other wrapper is looked into: what it reads need not be what its file holds.
    raw = file.file if isinstance(file, tempfile._TemporaryFileWrapper) else file
    if type(raw) in (io.BufferedReader, io.BufferedRandom, io.FileIO) and not (isinstance(raw, io.BufferedRandom) and _dirty(raw)):
        try:
            descriptor = raw.fileno()
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return DescriptorStore(descriptor, name=str(getattr(raw, "name", "<open file>")))
        except (OSError, ValueError):
            pass
    return FileObjectStore(file)


def _dirty(file: io.BufferedRandom) -> bool:
    """Whether what was written could still be on its way; flushing settles it."""
    try:
        file.flush()
    except (OSError, ValueError):
        return True
    return False
