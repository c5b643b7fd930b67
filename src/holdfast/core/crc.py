"""CRC-32 checksums, also of data whose blocks arrive in any order.

The CRC of a message follows from the CRCs and lengths of its blocks (CRC folding: appending n bytes
multiplies a CRC by x^(8n), modulo the polynomial of CRC-32). So several threads can compute the CRC
of one tensor, and the result does not depend on how the tensor is cut. `BlockCrcs` collects the
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from isal import isal_zlib

LOCK_KEPT_NBYTES = 5 << 10
"""Up to this size, `crc32` keeps the interpreter lock (isal_zlibmodule.c, as in CPython's zlib)."""

SHORT_NBYTES = 64 << 10
"""The bytes for which `crc32` takes about as long as handing the interpreter lock to a thread."""

crc32 = isal_zlib.crc32
"""The CRC-32 of bytes, as in zip files. A second argument is the CRC of the bytes before them."""

combine_crcs = isal_zlib.crc32_combine
"""The CRC of a message that consists of two: from the CRC of each and the length of the second."""


def crc32_each(pieces: Sequence[bytes | memoryview]) -> list[int]:
    """Return the CRC-32 of each piece.

    Only for long pieces is the interpreter lock released: for short ones, waiting for the lock
    again would take longer than computing the checksum.

    >>> crc32_each([b"hold", b"fast" * 5000]) == [crc32(b"hold"), crc32(b"fast" * 5000)]
    True
    """
    if max(map(len, pieces), default=0) <= LOCK_KEPT_NBYTES:
        return list(map(isal_zlib.crc32, pieces))

    crcs = []
    for piece in pieces:
        if LOCK_KEPT_NBYTES < len(piece) <= SHORT_NBYTES:
            crcs.append(_crc32_with_lock(piece))
        else:
            crcs.append(crc32(piece))
    return crcs


def _crc32_with_lock(piece: bytes | memoryview) -> int:
    """Return the CRC of a piece without releasing the interpreter lock.

    `crc32` releases it for more than `LOCK_KEPT_NBYTES`, so it is called with less at a time.
    """
    crc = 0
    for start in range(0, len(piece), LOCK_KEPT_NBYTES):
        crc = crc32(piece[start : start + LOCK_KEPT_NBYTES], crc)
    return crc


def compute_second_crc(whole_crc: int, first_crc: int, second_nbytes: int) -> int:
    """Return the CRC of the second of two messages that form a whole.

    Args:
        whole_crc: The CRC of both messages together.
        first_crc: The CRC of the first message.
        second_nbytes: The length of the second message.

    >>> compute_second_crc(crc32(b"holdfast"), crc32(b"hold"), 4) == crc32(b"fast")
    True
    """
    # The CRC of the whole is that of the first message, moved by the length of the second one,
    # XOR the CRC of the second message.
    return whole_crc ^ combine_crcs(first_crc, 0, second_nbytes)


def has_crcs(
    data: memoryview,
    starts: Sequence[int],
    stops: Sequence[int],
    crcs: Sequence[int],
) -> bool:
    """Return whether pieces of a buffer have these checksums.

    Everything from the first piece to the last is summed in one call, which releases the
    interpreter lock. The result is compared with the combination of the expected checksums of the
    pieces and the checksums of the gaps between them. A change is missed with the same probability
    as with the checksum of one piece.

    Args:
        data: The buffer.
        starts: The offset of each piece, in ascending order. Pieces do not overlap.
        stops: The offset after each piece.
        crcs: The expected checksum of each piece.

    >>> has_crcs(memoryview(b"holdfast"), [0, 4], [4, 8], [crc32(b"hold"), crc32(b"fast")])
    True
    """
    if not starts:
        return True
    if stops[-1] - starts[0] <= LOCK_KEPT_NBYTES * len(starts):
        # For pieces this small, summing takes less time than combining.
        pieces = [data[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return crc32_each(pieces) == list(crcs)

    expected_crc = 0
    position = starts[0]
    for start, stop, crc in zip(starts, stops, crcs, strict=True):
        if start > position:
            gap_crc = crc32(data[position:start])
            expected_crc = combine_crcs(expected_crc, gap_crc, start - position)
        expected_crc = combine_crcs(expected_crc, crc, stop - start)
        position = stop
    return expected_crc == crc32(data[starts[0] : position])


class BlockCrcs:
    """The checksums of the blocks of a message, which arrive in any order and from any thread.

    >>> block_crcs = BlockCrcs()
    >>> block_crcs.add(4, memoryview(b"fast")) == crc32(b"fast"), block_crcs.is_complete(8)
    (True, False)
    >>> _ = block_crcs.add(0, memoryview(b"hold"))
    >>> block_crcs.is_complete(8), block_crcs.crc32() == crc32(b"holdfast")
    (True, True)
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        # From the start of a block to its size and CRC. Threads need no lock: setting an item of a
        # dict is atomic.
        self._blocks: dict[int, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        """Return whether any block was added."""
        return bool(self._blocks)

    def add(self, start: int, data: bytes | bytearray | memoryview) -> int:
        """Compute the CRC of a block, add it, and return it.

        Args:
            start: The offset of the block in the message. A block that was added earlier at the
                same offset is replaced.
            data: The bytes of the block.
        """
        crc = crc32(data)
        self._blocks[start] = memoryview(data).nbytes, crc
        return crc

    def add_crc(self, start: int, nbytes: int, crc: int) -> None:
        """Add a block whose CRC is known."""
        self._blocks[start] = nbytes, crc

    def blocks(self) -> list[tuple[int, int, int]]:
        """Return the start, the size and the CRC of each block that was added."""
        return [(start, nbytes, crc) for start, (nbytes, crc) in self._blocks.items()]

    def is_complete(self, nbytes: int) -> bool:
        """Return whether the blocks cover a message of this size, without gaps or overlaps."""
        stop = 0
        for start, (block_nbytes, _) in sorted(self._blocks.items()):
            if start != stop:
                return False
            stop += block_nbytes
        return stop == nbytes

    def crc32(self) -> int:
        """Return the CRC of the message that the blocks form, in the order of their starts."""
        crc = 0
        for _, (nbytes, block_crc) in sorted(self._blocks.items()):
            crc = combine_crcs(crc, block_crc, nbytes)
        return crc
