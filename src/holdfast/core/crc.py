"""CRC-32: of a buffer, of two messages in a row, and of a message whose blocks come in any order.

The CRC of a whole follows from those of its blocks and their lengths. So the blocks may be summed by any number of threads, and the
digest of a tensor does not depend on how it is cut: `BlockCrcs` is that fold, wherever bytes are summed as they pass by.
"""

from __future__ import annotations

from collections.abc import Sequence

from isal import isal_zlib

LOCK_KEPT_NBYTES = (
    5 << 10
)  # What is longer is summed without the interpreter lock (isal_zlibmodule.c, as CPython's zlib does it).
SHORT_NBYTES = 64 << 10  # What takes about as long as a hand-over of that lock between threads.


crc32 = (
    isal_zlib.crc32
)  # CRC-32 as in zip, continued from a second argument. Releases the interpreter lock.


def crc32_each(pieces: Sequence[bytes | memoryview]) -> list[int]:
    """The CRC-32 of each of many pieces. For short ones the interpreter lock is kept: to take it again would last longer.

    >>> crc32_each([b"hold", b"fast" * 5000]) == [crc32(b"hold"), crc32(b"fast" * 5000)]
    True
    """
    if max(map(len, pieces), default=0) <= LOCK_KEPT_NBYTES:
        return list(map(isal_zlib.crc32, pieces))
    return [
        _kept(piece) if LOCK_KEPT_NBYTES < len(piece) <= SHORT_NBYTES else crc32(piece)
        for piece in pieces
    ]


def _kept(piece: bytes | memoryview) -> int:
    found = 0
    for start in range(0, len(piece), LOCK_KEPT_NBYTES):
        found = crc32(piece[start : start + LOCK_KEPT_NBYTES], found)
    return found


combine_crcs = (
    isal_zlib.crc32_combine
)  # The CRC of two messages in a row, from their CRCs and the length of the second.


def compute_second_crc(whole: int, first: int, nbytes: int) -> int:
    """The CRC of the second of two messages in a row, from those of both together and of the first, and the length of the second.

    >>> compute_second_crc(crc32(b"holdfast"), crc32(b"hold"), 4) == crc32(b"fast")
    True
    """
    return whole ^ combine_crcs(first, 0, nbytes)


def has_crcs(
    data: memoryview, begins: Sequence[int], ends: Sequence[int], crcs: Sequence[int]
) -> bool:
    """Whether pieces of a buffer, one behind the other, have these checksums.

    All from the first to the last is summed by one call, without the interpreter lock, and compared with what the checksums of the
    pieces and of what lies between them combine to. So a change is missed as rarely as by the checksum of one of them.

    >>> has_crcs(memoryview(b"holdfast"), [0, 4], [4, 8], [crc32(b"hold"), crc32(b"fast")])
    True
    """
    if not begins:
        return True
    if ends[-1] - begins[0] <= LOCK_KEPT_NBYTES * len(begins):
        # To sum such a piece takes less time than to combine it.
        return crc32_each(
            [data[begin:end] for begin, end in zip(begins, ends, strict=True)]
        ) == list(crcs)
    total, at = 0, begins[0]
    for begin, end, crc in zip(begins, ends, crcs, strict=True):
        if begin > at:
            total = combine_crcs(total, crc32(data[at:begin]), begin - at)
        total, at = combine_crcs(total, crc, end - begin), end
    return total == crc32(data[begins[0] : at])


class BlockCrcs:
    """The checksum of a message whose blocks come in any order, from any thread: recorded by their places, folded at the end.

    >>> sums = BlockCrcs()
    >>> sums.add(4, memoryview(b"fast")) == crc32(b"fast"), sums.is_complete(8)
    (True, False)
    >>> _ = sums.add(0, memoryview(b"hold"))
    >>> sums.is_complete(8), sums.crc32() == crc32(b"holdfast")
    (True, True)
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, start: int, data: bytes | bytearray | memoryview) -> int:
        """Sum up a block that begins at byte `start` of the message; its own CRC. What came before for that place is forgotten."""
        crc = crc32(data)
        # One operation on a dict: safe under the interpreter lock.
        self._blocks[start] = memoryview(data).nbytes, crc
        return crc

    def add_crc(self, start: int, nbytes: int, crc: int) -> None:
        """Take note of a block whose CRC is known."""
        self._blocks[start] = nbytes, crc

    def blocks(self) -> list[tuple[int, int, int]]:
        """The blocks that came so far: where each begins, its length, and its CRC."""
        return [(start, nbytes, crc) for start, (nbytes, crc) in self._blocks.items()]

    def is_complete(self, nbytes: int) -> bool:
        """Whether the blocks are a message of so many bytes, each exactly once."""
        at = 0
        for start, (length, _) in sorted(self._blocks.items()):
            if start != at:
                return False
            at += length
        return at == nbytes

    def crc32(self) -> int:
        """The CRC of all blocks in the order of their places."""
        total = 0
        for _, (nbytes, crc) in sorted(self._blocks.items()):
            total = combine_crcs(total, crc, nbytes)
        return total
