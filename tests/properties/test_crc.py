"""CRC-32 of a message from its parts, against zlib on the whole message."""

import itertools
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core import crc
from tests.sampling import examples


@settings(max_examples=examples(200), deadline=None)
@given(
    st.binary(max_size=300),
    st.lists(st.integers(0, 300), max_size=6),
    st.randoms(use_true_random=False),
)
def test_blocks_in_any_order_give_the_whole(message, cuts, random):
    # A block without bytes would take the place of the one that begins there.
    edges = sorted({0, *(min(c, len(message)) for c in cuts), len(message)})
    blocks = list(itertools.pairwise(edges))
    random.shuffle(blocks)
    added, noted = crc.BlockCrcs(), crc.BlockCrcs()
    for start, stop in blocks:
        assert not added.is_complete(len(message))
        assert added.add(start, memoryview(message)[start:stop]) == zlib.crc32(message[start:stop])
        noted.add_crc(start, stop - start, zlib.crc32(message[start:stop]))
    for sums in (added, noted):
        assert sums.crc32() == zlib.crc32(message)
        assert sums.is_complete(len(message))
        assert not sums.is_complete(len(message) + 1)
        assert bool(sums) is bool(message)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_column_shards(rows, left, right):
    matrix = np.random.default_rng(rows).integers(0, 256, (rows, left + right), dtype=np.uint8)
    sums = crc.BlockCrcs()
    for columns in (slice(left, None), slice(0, left)):
        for r in range(rows):
            sums.add(r * (left + right) + columns.start, matrix[r, columns].tobytes())
    assert sums.crc32() == zlib.crc32(matrix.tobytes())


@given(st.binary(min_size=3, max_size=50), st.data())
def test_a_gap_and_an_overlap_are_no_whole(message, data):
    at = data.draw(st.integers(1, len(message) - 2))
    gap, overlap = crc.BlockCrcs(), crc.BlockCrcs()
    gap.add(0, message[:at])
    gap.add(at + 1, message[at + 1 :])
    overlap.add(0, message[: at + 1])
    overlap.add(at, message[at:])
    assert not gap.is_complete(len(message))
    assert not gap.is_complete(len(message) - 1)
    assert not overlap.is_complete(len(message))
    assert not overlap.is_complete(len(message) + 1)


def test_a_block_that_came_again_counts_once():
    sums = crc.BlockCrcs()
    sums.add(0, b"other")
    sums.add(0, b"hold")
    sums.add(4, b"fast")
    assert sums.crc32() == zlib.crc32(b"holdfast")


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_combine(a, b):
    assert (
        crc.combine_crcs(crc.crc32(a), crc.crc32(b), len(b))
        == zlib.crc32(a + b)
        == crc.crc32(b, crc.crc32(a))
    )
