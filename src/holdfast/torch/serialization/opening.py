"""The argument of `load` as a source: a path, an open file, or anything that can be read and sought."""

from __future__ import annotations

import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from msgspec import Struct

from holdfast.core.protocols import Store
from holdfast.engine.source import OpenSource
from holdfast.errors import HoldfastError
from holdfast.stores import platform
from holdfast.stores.local import DescriptorStore
from holdfast.stores.memory import FileObjectStore, MemoryStore

KEY = "file"

SHORT_NBYTES = 32 << 10
"""A file up to this size is read as a whole when it is opened."""

SEEKABLE = (
    "You can only torch.load from a file that is seekable. Please pre-load the data into a buffer like io.BytesIO and try to load "
    "from it instead."
)


class OpenedFile(Struct, eq=False):
    """A file that is being loaded."""

    source: OpenSource
    nbytes: int
    """The size of the file from `start` on."""
    start: int = 0
    """The position of the caller's object, where the file begins."""
    path: str | None = None
    verify: bool = True
    raw: io.FileIO | None = None
    """The file of a path."""
    given: BinaryIO | None = None
    """The caller's object."""

    @property
    def file(self) -> BinaryIO:
        """The file as an object that can be read from."""
        if self.given is None and self.raw is not None:
            self.given = io.BufferedReader(self.raw)
        return cast(BinaryIO, self.given)


@contextmanager
def opened(f: object, *, verify: bool = True) -> Iterator[OpenedFile]:
    """Open a path, or take an open file from its position. A path is closed again; a file object keeps its position.

    Errors name the file as the caller does, and not by its key here.
    """
    if isinstance(f, str | os.PathLike):
        file = _open_path(os.fsdecode(f), verify=verify)
        views: tuple[memoryview, ...] = ()
    else:
        file, views = _take_object(f, verify=verify)
    try:
        yield file
    except HoldfastError as error:
        if error.file in (None, KEY):
            error.file = file.path
        raise
    finally:
        # A buffer cannot grow while there is a view of it.
        for view in views:
            view.release()
        if file.raw is not None:
            file.raw.close()


def _open_path(path: str, *, verify: bool) -> OpenedFile:
    """Open a path. A short file is read at once: each later read would cost more than all of its bytes."""
    try:
        raw = open(path, "rb", buffering=0)  # noqa: SIM115  # closed by the block that it is for
    except IsADirectoryError as error:
        message = f"{error.strerror}; holdfast.torch.load_full and load_sharded load checkpoints that are folders"
        raise IsADirectoryError(error.errno, message, path) from None
    try:
        descriptor = raw.fileno()
        nbytes = os.fstat(descriptor).st_size
        content = b""
        if 0 < nbytes <= SHORT_NBYTES:
            content = platform.read_block(descriptor, SHORT_NBYTES + 1, 0)
        store: Store
        if content and len(content) == nbytes:
            store = MemoryStore({KEY: content}, name=path)
        else:
            store = DescriptorStore(descriptor, name=path)
            nbytes = store.size(KEY)
        source = OpenSource(store, verify=verify)
        return OpenedFile(source, nbytes, path=path, verify=verify, raw=raw)
    except BaseException:
        raw.close()
        raise


def _take_object(f: object, *, verify: bool) -> tuple[OpenedFile, tuple[memoryview, ...]]:
    """Take a file object from its position, and return views of its buffer that must be released in the end."""
    start = _position(f)
    given = cast(BinaryIO, f)
    views: tuple[memoryview, ...] = ()
    store: Store
    if type(given) is io.BytesIO:
        view = given.getbuffer()
        content = view.cast("B")
        views = (content, view)
        store = MemoryStore.from_view(KEY, content, name="<BytesIO>")
    elif isinstance(given.read(0), str):
        raise TypeError(
            f"a file to load from must be opened in binary mode, and this {type(f).__name__} gives text"
        )
    else:
        store = _store(given)
    source = OpenSource(store, verify=verify)
    nbytes = store.size(KEY) - start
    return OpenedFile(source, nbytes, start, verify=verify, given=given), views


def _position(f: object) -> int:
    """The position of a file object. Raises in torch's words where it has none."""
    for name in ("seek", "tell", "read"):
        if not callable(getattr(f, name, None)):
            raise AttributeError(
                f"'{type(f).__name__}' object has no attribute '{name}'. {SEEKABLE}"
            )
    try:
        start = f.tell()  # type: ignore[attr-defined]  # asked for above
        f.seek(start)  # type: ignore[attr-defined]
    except (io.UnsupportedOperation, AttributeError) as error:
        raise type(error)(f"{error}. {SEEKABLE}") from error
    return int(start)


def _store(file: BinaryIO) -> Store:
    # No other wrapper is opened up: what it reads need not be what its file holds.
    raw = file.file if isinstance(file, tempfile._TemporaryFileWrapper) else file
    if type(raw) in (io.BufferedReader, io.BufferedRandom, io.FileIO) and not (
        isinstance(raw, io.BufferedRandom) and _dirty(raw)
    ):
        try:
            descriptor = raw.fileno()
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return DescriptorStore(descriptor, name=str(getattr(raw, "name", "<open file>")))
        except (OSError, ValueError):
            pass
    return FileObjectStore(file)


def _dirty(file: io.BufferedRandom) -> bool:
    """Whether written bytes may still be in a buffer after a flush."""
    try:
        file.flush()
    except (OSError, ValueError):
        return True
    return False
