"""The argument of `load` as a source: a path, an open file, or anything that can be read and sought."""

from __future__ import annotations

import io
import os
import stat
import tempfile
from types import TracebackType
from typing import BinaryIO, Self, cast

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


class OpenedFile:
    """A file that is being loaded, as a context manager. Errors name the file as the caller does, and not by its key here."""

    __slots__ = ("_file", "_own", "_views", "nbytes", "path", "source", "start", "verify")

    key = KEY

    def __init__(
        self,
        store: Store,
        *,
        verify: bool,
        start: int = 0,
        file: BinaryIO | None = None,
        own: io.FileIO | None = None,
        path: str | None = None,
        views: tuple[memoryview, ...] = (),
    ) -> None:
        self.source = OpenSource(store, verify=verify)
        self.start = start
        """The position of the caller's object, where the file begins."""
        self.nbytes = store.size(KEY) - start
        self.path = path
        self.verify = verify
        self._own = own
        self._file = file
        self._views = views
        """Released at the end: a buffer cannot grow while there is a view of it."""

    @property
    def file(self) -> BinaryIO:
        if self._file is None and self._own is not None:
            self._file = io.BufferedReader(self._own)
        return cast(BinaryIO, self._file)

    def head(self, nbytes: int) -> bytes:
        return self.source.bytes(KEY, self.start, self.start + min(nbytes, self.nbytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for view in self._views:
            view.release()
        if self._own is not None:
            self._own.close()
        if isinstance(error, HoldfastError) and error.file in (None, KEY):
            error.file = self.path


def opened(f: object, *, verify: bool = True) -> OpenedFile:
    """Open a path, or take an open file from its position. A path is closed again; a file object keeps its position."""
    if isinstance(f, str | os.PathLike):
        return _at_path(os.fsdecode(f), verify=verify)
    start = _position(f)
    file = cast(BinaryIO, f)
    if type(file) is io.BytesIO:
        view = file.getbuffer()
        content = view.cast("B")
        store = MemoryStore.of(KEY, content, name="<BytesIO>")
        return OpenedFile(store, file=file, start=start, verify=verify, views=(content, view))
    if isinstance(file.read(0), str):
        raise TypeError(
            f"a file to load from must be opened in binary mode, and this {type(f).__name__} gives text"
        )
    return OpenedFile(_store(file), file=file, start=start, verify=verify)


def _at_path(path: str, *, verify: bool) -> OpenedFile:
    """Open a path. A short file is read at once: each later read would cost more than all of its bytes."""
    try:
        own = open(path, "rb", buffering=0)  # noqa: SIM115  # closed by the block that it is for
    except IsADirectoryError as error:
        message = f"{error.strerror}; holdfast.torch.load_full and load_sharded load checkpoints that are folders"
        raise IsADirectoryError(error.errno, message, path) from None
    try:
        found = os.fstat(own.fileno())
        content = (
            platform.read_block(own.fileno(), SHORT_NBYTES + 1, 0)
            if 0 < found.st_size <= SHORT_NBYTES
            else b""
        )
        if content and len(content) == found.st_size:
            return OpenedFile(
                MemoryStore.of(KEY, memoryview(content), name=path),
                verify=verify,
                own=own,
                path=path,
            )
        return OpenedFile(
            DescriptorStore(own.fileno(), name=path), verify=verify, own=own, path=path
        )
    except BaseException:
        own.close()
        raise


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
