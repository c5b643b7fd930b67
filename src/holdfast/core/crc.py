"""CRC-32 as the linear map it is: the checksum of a whole from the checksums of its pieces, wherever they lie.

For messages of one length, CRC(a xor b) = CRC(a) xor CRC(b) xor CRC(zeros). So a message cut into runs is the xor of messages that
are zero except in one run, and with Z(n) = CRC of n zero bytes:

    CRC(whole) = Z(total)  xor  Σ over runs  shift(CRC(run) xor Z(len(run)), bytes behind the run)

`shift(c, n)` appends n zero bytes to the linear part, that is, multiplies by x^(8n) modulo the polynomial. The runs may come in
any order and from any number of writers: the digest of a tensor does not depend on how it is sharded.

`shift` works on arrays: for each bit k of n, a fixed linear map (a table of 4 × 256 words) is applied where that bit is set.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

__all__ = ["combine", "crc32", "of_runs", "of_zeros", "placed", "shift"]

Words = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]

POLYNOMIAL = 0xEDB88320
"""The CRC-32 of zip, gzip and PNG, lowest bit first."""

ONES = np.uint32(0xFFFFFFFF)


def crc32(data: bytes | memoryview | bytearray, start: int = 0) -> int:
    """The CRC-32 of a buffer, continued from `start`. Releases the interpreter lock."""
    return isal_zlib.crc32(data, start)


def combine(first: int, second: int, nbytes: int) -> int:
    """The CRC of two messages in a row, from their CRCs and the length of the second."""
    return isal_zlib.crc32_combine(first, second, nbytes)


@lru_cache(maxsize=64)
def _table(k: int) -> Words:
    """The map "append 2^k zero bytes" as four tables, one for each byte of a word."""
    if k == 0:
        columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
        for _ in range(8):
            columns = np.where(columns & np.uint32(1), (columns >> np.uint32(1)) ^ np.uint32(POLYNOMIAL), columns >> np.uint32(1))
    else:
        half = _table(k - 1)
        one_bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        columns = _apply(half, _apply(half, one_bits))
    table = np.zeros((4, 256), np.uint32)
    values = np.arange(256, dtype=np.uint32)
    for byte in range(4):
        for bit in range(8):
            chosen = (values >> np.uint32(bit)) & np.uint32(1) != 0
            table[byte, chosen] ^= columns[byte * 8 + bit]
    return table


def _apply(table: Words, words: Words) -> Words:
    result: Words = (
        table[0][words & np.uint32(255)]
        ^ table[1][(words >> np.uint32(8)) & np.uint32(255)]
        ^ table[2][(words >> np.uint32(16)) & np.uint32(255)]
        ^ table[3][words >> np.uint32(24)]
    )
    return result


def shift(words: npt.ArrayLike, nbytes: npt.ArrayLike) -> Words:
    """Append `nbytes` zero bytes to each linear part; arrays of one shape, or that broadcast."""
    counts = np.asarray(nbytes, np.int64)
    result, counts = np.broadcast_arrays(np.asarray(words, np.uint32), counts)
    most = int(counts.max()) if counts.size else 0
    for k in range(most.bit_length()):
        result = np.where((counts >> k) & 1 != 0, _apply(_table(k), result), result)
    return result


def of_zeros(nbytes: npt.ArrayLike) -> Words:
    """The CRC of runs of zero bytes."""
    result: Words = shift(np.full(np.shape(nbytes), ONES), nbytes) ^ ONES
    return result


def placed(crcs: npt.ArrayLike, nbytes: npt.ArrayLike, behind: npt.ArrayLike) -> Words:
    """What runs contribute to the whole: their CRCs, their lengths, and how many bytes of the whole lie behind each."""
    return shift(np.asarray(crcs, np.uint32) ^ of_zeros(nbytes), behind)


def of_runs(crcs: npt.ArrayLike, nbytes: npt.ArrayLike, starts: npt.ArrayLike, total: int) -> int:
    """The CRC of a message of `total` bytes from the runs that tile it, in any order.

    >>> whole = b"holdfast"
    >>> of_runs([crc32(whole[4:]), crc32(whole[:4])], [4, 4], [4, 0], 8) == crc32(whole)
    True
    """
    lengths, begins = np.asarray(nbytes, np.int64), np.asarray(starts, np.int64)
    parts = placed(crcs, lengths, total - begins - lengths)
    return int(np.bitwise_xor.reduce(parts, initial=np.uint32(0))) ^ int(of_zeros(np.int64(total)))
