"""The hash of a chunk against a slow one, whatever blocks it comes in; and what is recorded against what is stored."""

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

PIECE, HEAD = 64, 24


def oracle(data: bytes, piece: int, head: int) -> HashAndHead:
    """What the module's docstring says, in so many words."""
    pieces = [xxhash.xxh3_128(data[at : at + piece]).digest() for at in range(0, len(data), piece)]
    if len(data) <= piece:
        number = int(xxhash.xxh3_128(data).hexdigest(), 16)
    else:
        number = int(
            xxhash.xxh3_128(len(data).to_bytes(8, "little") + b"".join(pieces)).hexdigest(), 16
        )
    return HashAndHead(number, zlib.crc32(data[:head]) if len(data) > head else None)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(content_hash, "HASH_BLOCK_NBYTES", PIECE)
    monkeypatch.setattr(content_hash, "HEAD_NBYTES", HEAD)


def blocks_of(data: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [(a, data[a:b]) for a, b in pairwise(places)]


@pytest.mark.usefixtures("short")
@given(
    st.binary(max_size=5 * PIECE + 3),
    st.lists(st.integers(0, 400), max_size=12),
    st.randoms(use_true_random=False),
)
def test_any_blocks_in_any_order_have_the_hash_of_the_whole(
    data: bytes, cuts: list[int], order: random.Random
):
    blocks = blocks_of(data, cuts)
    order.shuffle(blocks)
    found = ContentHasher(len(data))
    for start, block in blocks:
        scratch = bytearray(block)  # memory that is lent, and holds something else afterwards
        found.add(start, memoryview(scratch))
        scratch[:] = bytes(len(scratch))
    assert found.result() == oracle(data, PIECE, HEAD) == hash_bytes(data)


@pytest.mark.parametrize("nbytes", [0, 1, 65536, 65537, (1 << 20), (1 << 20) + 1, (3 << 20) - 5])
def test_the_real_sizes(nbytes: int):
    data = random.Random(nbytes).randbytes(nbytes)
    assert hash_bytes(data) == oracle(data, 1 << 20, 64 << 10)


@pytest.mark.usefixtures("short")
def test_many_threads_at_once():
    data = random.Random(3).randbytes(500 * PIECE + 7)
    blocks = blocks_of(data, [random.Random(7).randrange(len(data)) for _ in range(900)])
    found = ContentHasher(len(data))

    def run(number: int) -> None:
        for start, block in blocks[number::4]:
            found.add(start, block)

    run_in_threads(run, range(4))
    assert found.result() == oracle(data, PIECE, HEAD)


@pytest.mark.usefixtures("short")
@given(st.binary(min_size=HEAD + 1, max_size=3 * PIECE), st.lists(st.integers(0, 400), max_size=6))
def test_the_head_alone(data: bytes, cuts: list[int]):
    found = ContentHasher(len(data), needs_hash=False)
    for start, block in reversed(blocks_of(data, cuts)):
        found.add(start, block)
    assert found.result() == HashAndHead(None, oracle(data, PIECE, HEAD).head) == hash_head(data)


@pytest.mark.usefixtures("short")
def test_a_hash_that_is_not_complete_is_none():
    found = ContentHasher(200)
    found.add(0, bytes(70))
    with pytest.raises(ValueError, match="when all bytes were added"):
        found.result()


@pytest.mark.usefixtures("short")
def test_two_lengths_of_zeros_differ():
    """The pieces of one may be the first pieces of the other."""
    hashes = {hash_bytes(bytes(n)).hash for n in range(4 * PIECE)}
    assert len(hashes) == 4 * PIECE
