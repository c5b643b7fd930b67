"""`ContentHasher`: a 128-bit hash of bytes that arrive in any order and from any thread.

A CRC-32 detects damage, but it does not identify content: of 100,000 tensors, two are likely to
have the same CRC by chance. A manifest therefore also records (docs/design/021):

    hash    "xxh3-128/1MiB"   of up to 1 MiB: the XXH3-128 of the bytes
                              of more: the XXH3-128 of the size (8 bytes, little-endian), followed
                              by the XXH3-128 of each MiB in order, as 16 bytes, big-endian
    head    CRC-32            of the first 64 KiB, if there are more bytes than that

Because blocks have a fixed size, several threads can hash one tensor. The head is for the most
common case, that everything has changed: it shows a difference after 64 KiB, but never proves that
two tensors are equal. A tensor whose head changed is saved without computing its hash. It gets one
when a later save finds its head unchanged.

XXH3 is not a cryptographic hash. It detects changes, not forgeries: whoever can choose the weights
of a run can also write its files.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct, field
from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_intdigest

from holdfast.core.crc import BlockCrcs, crc32

HASH = "xxh3-128/1MiB"
"""The name of the hash in manifests."""

HASH_BLOCK_NBYTES = 1 << 20
"""The block of the hash. It fits into a core's cache, and a writing thread has that much at once.
Smaller blocks would need more calls."""

HEAD_NBYTES = 64 << 10
"""The size of the head. A step of an optimizer changes it almost certainly, and it is less than a
percent of a large tensor."""

Bytes = bytes | bytearray | memoryview


class HashAndHead(NamedTuple):
    """The hash and the head of some bytes, as the module's docstring defines them.

    A named tuple, because a save makes several for each of 100,000 tensors.
    """

    hash: int | None
    """None if only the head is known."""
    head: int | None
    """None if there are not more bytes than a head has."""


def hash_head(data: Bytes) -> HashAndHead:
    """Return only the head of bytes, of which there are more than `HEAD_NBYTES`."""
    return HashAndHead(None, crc32(memoryview(data)[:HEAD_NBYTES]))


def hash_bytes(data: Bytes) -> HashAndHead:
    """Return the hash and the head of bytes that are all in memory.

    >>> f"{hash_bytes(b'holdfast').hash:032x}"
    'd725ef720e130d9fdf1a3c122ca59e45'
    """
    view = memoryview(data)
    if view.nbytes > HASH_BLOCK_NBYTES:
        hasher = ContentHasher(view.nbytes)
        hasher.add(0, view)
        return hasher.result()

    # Nearly all tensors are this small, and spend most of their time on calls.
    head = None
    if view.nbytes > HEAD_NBYTES:
        head = crc32(view[:HEAD_NBYTES])
    return HashAndHead(xxh3_128_intdigest(view), head)


def hash_small_pieces(pieces: Iterable[Bytes]) -> list[int]:
    """Return the hash of each piece. Pieces are not larger than a head, so they have none."""
    return [xxh3_128_intdigest(piece) for piece in pieces]


class _OpenBlock(Struct):
    """A block of which some bytes were added, but not yet all."""

    hasher: xxh3_128 = field(default_factory=xxh3_128)
    hashed_nbytes: int = 0
    """How many bytes from the start of the block were hashed."""
    waiting: dict[int, bytes] = field(default_factory=dict)
    """Bytes behind a gap, by their offset in the block. These are copies, because the memory of
    the caller may change after `add`."""


class ContentHasher:
    """Computes the hash of bytes that are added in pieces of any size and order, from any thread.

    Args:
        nbytes: How many bytes there are in total. Each must be added exactly once.
        needs_hash: Whether to compute the hash. Otherwise only the head is computed.
    """

    __slots__ = ("_block_digests", "_head_crcs", "_lock", "_nbytes", "_needs_hash", "_open_blocks")

    def __init__(self, nbytes: int, *, needs_hash: bool = True) -> None:
        """Prepare to receive this many bytes, and to compute their hash if it is needed."""
        self._nbytes = nbytes
        self._needs_hash = needs_hash
        block_count = max(-(-nbytes // HASH_BLOCK_NBYTES), 1)
        self._block_digests: list[bytes | None] = [None] * block_count
        self._open_blocks: dict[int, _OpenBlock] = {}
        self._head_crcs = BlockCrcs()
        self._lock = threading.Lock()
        # Without bytes, `add` is never called.
        if not nbytes:
            self._block_digests[0] = xxh3_128_digest(b"")

    def add(self, start: int, data: Bytes) -> None:
        """Add a piece of the bytes, and hash the blocks that it completes.

        Args:
            start: The offset of the piece in the bytes.
            data: The bytes of the piece. The memory may be used again after the call.
        """
        view = memoryview(data)
        stop = start + view.nbytes
        if start < HEAD_NBYTES < self._nbytes:
            self._head_crcs.add(start, view[: HEAD_NBYTES - start])
        if not self._needs_hash:
            return

        position = start
        while position < stop:
            block_index, block_offset = divmod(position, HASH_BLOCK_NBYTES)
            block_stop = min((block_index + 1) * HASH_BLOCK_NBYTES, self._nbytes)
            next_position = min(block_stop, stop)
            block_bytes = view[position - start : next_position - start]
            if block_offset == 0 and next_position == block_stop:
                # The piece contains the whole block. Threads hash such blocks in parallel.
                self._block_digests[block_index] = xxh3_128_digest(block_bytes)
            else:
                with self._lock:
                    self._add_to_open_block(block_index, block_offset, block_bytes)
            position = next_position

    def _add_to_open_block(self, block_index: int, block_offset: int, data: memoryview) -> None:
        """Add some bytes of a block, of which other bytes are added separately.

        They are hashed if all bytes before them were hashed, and otherwise copied until then.
        """
        open_block = self._open_blocks.setdefault(block_index, _OpenBlock())
        if block_offset != open_block.hashed_nbytes:
            open_block.waiting[block_offset] = bytes(data)
            return

        open_block.hasher.update(data)
        open_block.hashed_nbytes += len(data)
        while open_block.hashed_nbytes in open_block.waiting:
            next_bytes = open_block.waiting.pop(open_block.hashed_nbytes)
            open_block.hasher.update(next_bytes)
            open_block.hashed_nbytes += len(next_bytes)

        block_nbytes = min(HASH_BLOCK_NBYTES, self._nbytes - block_index * HASH_BLOCK_NBYTES)
        if open_block.hashed_nbytes == block_nbytes:
            self._block_digests[block_index] = open_block.hasher.digest()
            del self._open_blocks[block_index]

    def result(self) -> HashAndHead:
        """Return the hash and the head of all bytes.

        Raises:
            ValueError: Some bytes were not added.
        """
        head = None
        if self._nbytes > HEAD_NBYTES:
            head = self._head_crcs.crc32()
        if not self._needs_hash:
            return HashAndHead(None, head)

        block_digests = [digest for digest in self._block_digests if digest is not None]
        if len(block_digests) != len(self._block_digests):
            raise ValueError("a content hash is only known when all bytes were added")
        # The hash of a single block is the hash of the bytes. Otherwise it is a hash of hashes.
        if len(block_digests) == 1:
            return HashAndHead(int.from_bytes(block_digests[0], "big"), head)
        nbytes_and_digests = self._nbytes.to_bytes(8, "little") + b"".join(block_digests)
        return HashAndHead(xxh3_128_intdigest(nbytes_and_digests), head)
