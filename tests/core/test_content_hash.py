"""`ContentHasher` against a slow implementation of the definition in `core/content_hash.py`."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.support import run_in_threads

from holdfast.core import content_hash
from holdfast.core.content_hash import ContentHasher, HashAndHead, hash_bytes, hash_head

BLOCK_NBYTES = 64
HEAD_NBYTES = 24
"""Sizes that take the place of the real ones, so that short data has many blocks."""


def expected_hash(data: bytes, block_nbytes: int, head_nbytes: int) -> HashAndHead:
    """Hash data as the definition says. It needs all data at once, so no order can go wrong."""
    if len(data) <= block_nbytes:
        hex_digits = xxhash.xxh3_128(data).hexdigest()
    else:
        content = len(data).to_bytes(8, "little")
        for start in range(0, len(data), block_nbytes):
            content += xxhash.xxh3_128(data[start : start + block_nbytes]).digest()
        hex_digits = xxhash.xxh3_128(content).hexdigest()
    head = None
    if len(data) > head_nbytes:
        head = zlib.crc32(data[:head_nbytes])
    return HashAndHead(int(hex_digits, 16), head)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(content_hash, "HASH_BLOCK_NBYTES", BLOCK_NBYTES)
    monkeypatch.setattr(content_hash, "HEAD_NBYTES", HEAD_NBYTES)


def cut(data: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
    """Cut data at these positions, modulo its length. Return the start and the bytes of pieces."""
    edges = sorted({0, len(data), *(position % (len(data) + 1) for position in cuts)})
    return [(start, data[start:stop]) for start, stop in pairwise(edges)]


@pytest.mark.usefixtures("small_blocks")
@given(
    st.binary(max_size=5 * BLOCK_NBYTES + 3),
    st.lists(st.integers(0, 400), max_size=12),
    st.randoms(use_true_random=False),
)
def test_pieces_of_any_size_in_any_order_have_the_hash_of_the_whole(
    data: bytes, cuts: list[int], rng: random.Random
):
    pieces = cut(data, cuts)
    rng.shuffle(pieces)
    hasher = ContentHasher(len(data))

    for start, piece in pieces:
        # The caller may use the memory again after `add`.
        scratch = bytearray(piece)
        hasher.add(start, memoryview(scratch))
        scratch[:] = bytes(len(scratch))

    assert hasher.result() == expected_hash(data, BLOCK_NBYTES, HEAD_NBYTES)
    assert hash_bytes(data) == hasher.result()


@pytest.mark.parametrize("nbytes", [0, 1, 65536, 65537, 1 << 20, (1 << 20) + 1, (3 << 20) - 5])
def test_hash_bytes_uses_blocks_of_a_mebibyte_and_a_head_of_64_kib(nbytes: int):
    data = random.Random(nbytes).randbytes(nbytes)

    assert hash_bytes(data) == expected_hash(data, 1 << 20, 64 << 10)


@pytest.mark.usefixtures("small_blocks")
def test_several_threads_can_add_pieces_at_the_same_time():
    rng = random.Random(3)
    data = rng.randbytes(500 * BLOCK_NBYTES + 7)
    pieces = cut(data, [rng.randrange(len(data)) for _ in range(900)])
    hasher = ContentHasher(len(data))

    def add_every_fourth_piece(first: int) -> None:
        for start, piece in pieces[first::4]:
            hasher.add(start, piece)

    run_in_threads(add_every_fourth_piece, range(4))

    assert hasher.result() == expected_hash(data, BLOCK_NBYTES, HEAD_NBYTES)


@pytest.mark.usefixtures("small_blocks")
@given(
    st.binary(min_size=HEAD_NBYTES + 1, max_size=3 * BLOCK_NBYTES),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_a_hasher_that_needs_no_hash_computes_only_the_head(data: bytes, cuts: list[int]):
    hasher = ContentHasher(len(data), needs_hash=False)

    for start, piece in reversed(cut(data, cuts)):
        hasher.add(start, piece)

    expected_head = zlib.crc32(data[:HEAD_NBYTES])
    assert hasher.result() == HashAndHead(None, expected_head)
    assert hash_head(data) == hasher.result()


@pytest.mark.usefixtures("small_blocks")
def test_the_result_is_refused_before_all_bytes_were_added():
    hasher = ContentHasher(200)
    hasher.add(0, bytes(70))

    with pytest.raises(ValueError, match="when all bytes were added"):
        hasher.result()


@pytest.mark.usefixtures("small_blocks")
def test_zeros_of_different_lengths_have_different_hashes():
    """The length is hashed as well: all blocks of the shorter data are blocks of the longer."""
    lengths = range(4 * BLOCK_NBYTES)

    hashes = {hash_bytes(bytes(length)).hash for length in lengths}

    assert len(hashes) == len(lengths)
