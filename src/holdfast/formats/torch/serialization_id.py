"""`.data/serialization_id`: the 40 digits that torch's zip writer computes over what it wrote.

    │ 20 digits: a fold over the names of the records │ 20 digits: a fold over their CRC-32s │

Both fold with seed ← seed xor (value + 0x9E3779B9 + (seed << 6) + (seed >> 2)), modulo 2^64, from 0.

The checksums are folded as they were written. The names come in the order in which a libstdc++ `unordered_set` gives them back,
each as libstdc++'s hash of the text (MurmurHash2, 64 bits, variant A). Hence the work:

1. Hash all names. Names of one length are the rows of a matrix, and one column of 8 bytes is mixed into all of them at once.
2. Find the order. The set is one linked list: an element goes to the front of its bucket, which is a stretch of the list, or to the
   front of the whole list where its bucket is empty. So, for a fixed number of buckets, the list is: buckets in reverse order of
   their first element, and elements in reverse order inside each. When the set grows it puts its elements, in the order of the
   list, into more buckets by the same rule, and goes on with new ones: each growth is one stable sort.

torch on another C++ library orders its set differently. No reader compares the id; it is reported and kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["NBYTES", "mistaken_crc", "serialization_id"]

Words = npt.NDArray[np.uint64]

NBYTES = 40
"""Two numbers of 64 bits, 20 digits each."""

BUCKETS = (
    13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933, 351061, 712697, 1447153, 2938679, 5967347,
    12117689,
)  # fmt: skip
"""How many buckets a libstdc++ set has as it grows, one element at a time (seen with GCC 13); it holds at most one element a
bucket."""

MASK = (1 << 64) - 1
MULTIPLIER = np.uint64(0xC6A4A7935BD1E995)
SEED = np.uint64(0xC70F6907)
SHIFT = np.uint64(47)


def serialization_id(names: Sequence[str], crcs: Iterable[int]) -> bytes:
    """The 40 digits, for all records but the id's own.

    `names` are those of all records in the order of writing, without the archive's prefix; `crcs` the checksums of those that are
    not empty (0 where checksums are off), with a `mistaken_crc` before the record's own.
    """
    if len(names) < BUCKETS[0]:
        few = [_hash_text(name) for name in names]
        return b"%020d%020d" % (fold(few_in_order(few)), fold(crcs))
    hashes = hash_texts([name.encode("utf-8") for name in names])
    return b"%020d%020d" % (fold(hashes[set_order(hashes)].tolist()), fold(crcs))


def mistaken_crc(head: bytes) -> int | None:
    """What torch's writer takes for a checksum in the first 8 bytes of a payload.

    It finds the checksums in its own output, behind the signature of a data descriptor, and looks at payloads as well.

    >>> mistaken_crc(b"PK\\7\\x08\\1\\0\\0\\0..."), mistaken_crc(b"PK\\7\\x08\\1\\0\\0"), mistaken_crc(bytes(8))
    (1, None, None)
    """
    return int.from_bytes(head[4:8], "little") if len(head) >= 8 and head.startswith(b"PK\x07\x08") else None


def fold(values: Iterable[int]) -> int:
    seed = 0
    for value in values:
        seed ^= (value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & MASK
    return seed


def hash_texts(texts: Sequence[bytes]) -> Words:
    """libstdc++'s hash of each text."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    hashes = np.zeros(len(texts), np.uint64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        # Zeros behind the text, so that its last bytes are a word as well; the sum of a text without a rest has no such word.
        padded = np.zeros((len(rows), -(-length // 8) * 8), np.uint8)
        joined = b"".join(texts[row] for row in rows.tolist())
        padded[:, :length] = np.frombuffer(joined, np.uint8).reshape(len(rows), length)
        hashes[rows] = _hash_rows(padded.view("<u8").astype(np.uint64), length)
    return hashes


@lru_cache(256)
def _hash_text(text: str) -> int:
    """One at a time: the names in a small file are the same ones every time."""
    return int(hash_texts([text.encode("utf-8")])[0])


def few_in_order(hashes: Sequence[int]) -> list[int]:
    """As `set_order`, for fewer elements than the first number of buckets: nothing is ever moved."""
    rows: list[list[int]] = []
    for value in hashes:
        for row in rows:
            if row[0] % BUCKETS[0] == value % BUCKETS[0]:
                row.insert(0, value)
                break
        else:
            rows.insert(0, [value])
    return [value for row in rows for value in row]


def _hash_rows(words: Words, length: int) -> Words:
    hashes = np.full(len(words), SEED ^ np.uint64(length * int(MULTIPLIER) & MASK))
    for column in range(length // 8):
        hashes = (hashes ^ _mix(words[:, column] * MULTIPLIER) * MULTIPLIER) * MULTIPLIER
    if length % 8:
        hashes = (hashes ^ words[:, -1]) * MULTIPLIER
    return _mix(_mix(hashes) * MULTIPLIER)


def _mix(words: Words) -> Words:
    return words ^ (words >> SHIFT)


def set_order(hashes: Words) -> npt.NDArray[np.int64]:
    """The positions of elements in the order in which a libstdc++ set that was filled with them gives them back."""
    order = np.zeros(0, np.int64)
    for buckets in BUCKETS:
        entered = np.concatenate([order, np.arange(len(order), min(buckets, len(hashes)))])
        _, firsts, which = np.unique(hashes[entered] % np.uint64(buckets), return_index=True, return_inverse=True)
        order = entered[np.lexsort((-np.arange(len(entered)), -firsts[which]))]
        if len(order) == len(hashes):
            break
    return order
