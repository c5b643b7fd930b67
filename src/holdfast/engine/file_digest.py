"""The digest of a whole file, as it stands in a seal: `xxh3-128:…` or `sha256:…`, its bytes read once and in order.

Both algorithms release the interpreter lock, so several files are digested at once. Here XXH3 takes 10 GB/s, SHA-256 1.1 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from holdfast.engine.checksums import Progress

if TYPE_CHECKING:
    from holdfast.engine.stream import (
        Writer,
    )  # and not for `show`, which reads a seal and writes nothing

BLOCK = (
    1 << 20
)  # Bytes at a time: they stay in the second-level cache between the reading and the digest.


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def digest_of(
    algorithm: str, read: Callable[[int, int], bytes], progress: Progress | None = None
) -> tuple[str, int]:
    """The digest, under its name, of all that `read(nbytes, offset)` gives until it gives nothing; and how many bytes that were."""
    state, done = _new(algorithm), 0
    while block := read(BLOCK, done):
        state.update(block)
        done += len(block)
        if progress is not None:
            progress(len(block))
    return f"{algorithm}:{state.hexdigest()}", done


class Digesting:
    def __init__(self, file: Writer, algorithms: Iterable[str]) -> None:
        self._file, self._states = file, {algorithm: _new(algorithm) for algorithm in algorithms}

    def write(self, data: bytes | memoryview, /) -> object:
        done = self._file.write(data)
        for state in self._states.values():
            state.update(memoryview(data)[:done] if type(done) is int else data)
        return done

    @property
    def digests(self) -> dict[str, str]:
        return {
            algorithm: f"{algorithm}:{state.hexdigest()}"
            for algorithm, state in self._states.items()
        }


def _new(algorithm: str) -> Hash:
    if algorithm == "sha256":
        from hashlib import sha256

        return sha256()
    from xxhash import xxh3_128

    return xxh3_128()
