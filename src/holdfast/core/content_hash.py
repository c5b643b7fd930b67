"""`ContentHasher`: what identifies the bytes of a chunk, in 128 bits, from blocks that come in any order and from any thread.

CRC-32 says that bytes are damaged. It cannot say that they are the same: among 100,000 tensors two have one CRC by chance. So a
manifest also records (docs/design/021):

    hash    "xxh3-128/1MiB"     up to 1 MiB: XXH3-128 of the bytes
                                more: XXH3-128 of the length (8 bytes, little-endian) and the XXH3-128 of each MiB, in order;
                                each as 16 bytes, the highest first
    head    CRC-32              of the first 64 KiB, where there are more than that

Blocks have a fixed size, so several threads can hash the bytes of one tensor. The head answers the common case, everything
changed, after 64 KiB. It only ever says *different*. A tensor that changed has a head and no hash; it gets one when its head
stays the same.

XXH3 is no cryptographic hash: it finds changes, not forgeries. Whoever can choose the weights of a run can write its files, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct, field
from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_intdigest

from holdfast.core.crc import BlockCrcs, crc32

HASH = "xxh3-128/1MiB"
HASH_BLOCK_NBYTES = (
    1 << 20
)  # A cache full, which a thread holds when it writes; smaller blocks would be more calls.
HEAD_NBYTES = (
    64 << 10
)  # Enough that a step of an optimizer shows in it, and a fraction of a percent of a large tensor.
Bytes = bytes | bytearray | memoryview


class HashAndHead(NamedTuple):
    """The hash of some bytes, and their head. A tuple, since a hundred thousand of them are made several times in a save."""

    hash: int | None  # None where only the head is known.
    head: int | None  # None where they are not more than a head.


def hash_head(data: Bytes) -> HashAndHead:
    """The head alone of bytes that are all here, and more than a head."""
    return HashAndHead(None, crc32(memoryview(data)[:HEAD_NBYTES]))


def hash_bytes(data: Bytes) -> HashAndHead:
    """The hash of bytes that are all here.

    >>> f"{hash_bytes(b'holdfast').hash:032x}"
    'd725ef720e130d9fdf1a3c122ca59e45'
    """
    view = memoryview(data)
    if (
        view.nbytes <= HASH_BLOCK_NBYTES
    ):  # nearly all tensors are small, and most of their time goes to calls
        return HashAndHead(
            xxh3_128_intdigest(view),
            crc32(view[:HEAD_NBYTES]) if view.nbytes > HEAD_NBYTES else None,
        )
    whole = ContentHasher(view.nbytes)
    whole.add(0, view)
    return whole.result()


def hash_small_pieces(pieces: Iterable[Bytes]) -> list[int]:
    """The hashes of pieces that are no longer than a head: one call each, since that is what small tensors cost."""
    return [xxh3_128_intdigest(piece) for piece in pieces]


class _OpenBlock(Struct):
    seen: xxh3_128 = field(default_factory=xxh3_128)
    nbytes: int = 0
    """How many of its first bytes are in the hash."""
    later: dict[int, bytes] = field(default_factory=dict)
    """What came before its turn, by its place in the block: copies, since the memory is lent."""


class ContentHasher:
    """The hash of `nbytes` bytes. `add` every byte once, in blocks of any length and order, from any thread; then it is `done`. Not
    `whole`: the head alone."""

    __slots__ = ("_digests", "_head", "_lock", "_nbytes", "_open", "_whole")

    def __init__(self, nbytes: int, *, whole: bool = True) -> None:
        self._nbytes = nbytes
        self._whole = whole
        self._digests: list[bytes | None] = [None] * max(-(-nbytes // HASH_BLOCK_NBYTES), 1)
        self._open: dict[int, _OpenBlock] = {}
        self._head = BlockCrcs()
        self._lock = threading.Lock()

    def add(self, start: int, data: Bytes) -> None:
        view = memoryview(data)
        stop = start + view.nbytes
        if start < HEAD_NBYTES < self._nbytes:
            self._head.add(start, view[: HEAD_NBYTES - start])
        at = start if self._whole else stop
        while at < stop:
            number, inside = divmod(at, HASH_BLOCK_NBYTES)
            end = min((number + 1) * HASH_BLOCK_NBYTES, self._nbytes)
            block = view[at - start : min(end, stop) - start]
            if not inside and stop >= end:
                self._digests[number] = xxh3_128_digest(block)
            else:
                with self._lock:
                    self._add_to_open_block(number, inside, block)
            at += block.nbytes

    def _add_to_open_block(self, number: int, inside: int, block: memoryview) -> None:
        open_block = self._open.setdefault(number, _OpenBlock())
        if inside != open_block.nbytes:
            open_block.later[inside] = bytes(block)
            return
        while True:
            open_block.seen.update(block)
            open_block.nbytes += len(block)
            if open_block.nbytes not in open_block.later:
                break
            block = memoryview(open_block.later.pop(open_block.nbytes))
        if open_block.nbytes == min(HASH_BLOCK_NBYTES, self._nbytes - number * HASH_BLOCK_NBYTES):
            self._digests[number] = open_block.seen.digest()
            del self._open[number]

    def result(self) -> HashAndHead:
        """The hash, when all bytes have come. Raises `ValueError` where some have not."""
        if not self._whole:
            return HashAndHead(None, self._head.crc32())
        digests = (
            [xxh3_128_digest(b"")]
            if not self._nbytes
            else [digest for digest in self._digests if digest is not None]
        )
        if len(digests) != len(self._digests):
            raise ValueError("a hash was asked for before all bytes had come")
        head = self._head.crc32() if self._nbytes > HEAD_NBYTES else None
        if len(digests) == 1:
            return HashAndHead(int.from_bytes(digests[0], "big"), head)
        return HashAndHead(
            xxh3_128_intdigest(self._nbytes.to_bytes(8, "little") + b"".join(digests)), head
        )
