"""The digest of a whole file, as it stands in a seal: `xxh3-128:…` or `sha256:…`, its bytes read once and in order.
`git-sha1:…` is the id that git gives to the content of a file.

Both algorithms release the interpreter lock, so several files are digested at once. Here XXH3 takes 10 GB/s, SHA-256 1.1 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.engine.checksums import Progress

BLOCK = (
    1 << 20
)  # Bytes at a time: they stay in the second-level cache between the reading and the digest.

GIT_SHA1 = "git-sha1"
"""SHA-1 of `blob`, the length, a zero byte and the content."""


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def digest_file(
    algorithm: str,
    read: Callable[[int, int], bytes],
    progress: Progress | None = None,
    *,
    nbytes: int = 0,
) -> tuple[str, int]:
    """The digest, under its name, of all that `read(nbytes, offset)` gives until it gives nothing; and how many bytes that were.

    `git-sha1` needs the length of the file in advance, as `nbytes`.
    """
    state, done = _new(algorithm), 0
    if algorithm == GIT_SHA1:
        state.update(b"blob %d\0" % nbytes)
    while block := read(BLOCK, done):
        state.update(block)
        done += len(block)
        if progress is not None:
            progress(len(block))
    return f"{algorithm}:{state.hexdigest()}", done


def _new(algorithm: str) -> Hash:
    if algorithm == "sha256":
        from hashlib import sha256

        return sha256()
    if algorithm == GIT_SHA1:
        from hashlib import sha1

        return sha1(usedforsecurity=False)
    from xxhash import xxh3_128

    return xxh3_128()
