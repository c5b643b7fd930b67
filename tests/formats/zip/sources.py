"""The smallest sources that satisfy the protocol, and that count what was read."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core.limits import Limits
from holdfast.errors import Truncated

__all__ = ["BytesSource", "FileSource"]


class BytesSource:
    """One file of any key, in memory. It is its own store."""

    def __init__(self, content: bytes, limits: Limits | None = None) -> None:
        self.content = content
        self.limits = limits or Limits()
        self.calls = 0
        self.nbytes = 0

    @property
    def store(self) -> BytesSource:
        return self

    def size(self, key: str) -> int:
        return len(self.content)

    def read_head(self, key: str, nbytes: int) -> bytes:
        return self.bytes(key, 0, min(nbytes, self.store.size(key)))

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        assert 0 <= start <= stop
        if stop > self.size(key):
            raise Truncated("too short", offset=self.size(key))
        self.calls += 1
        self.nbytes += stop - start
        return self.fetch(start, stop)

    def fetch(self, start: int, stop: int) -> bytes:
        return self.content[start:stop]


class FileSource(BytesSource):
    """One file on disk, which may be mostly a hole."""

    def __init__(self, path: Path) -> None:
        super().__init__(b"")
        self.path = path

    def size(self, key: str) -> int:
        return self.path.stat().st_size

    def fetch(self, start: int, stop: int) -> bytes:
        with open(self.path, "rb") as file:
            return os.pread(file.fileno(), stop - start, start)
