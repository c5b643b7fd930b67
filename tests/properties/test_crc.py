"""The CRC-32 of a message that is computed from its blocks, against zlib on the whole message."""

import itertools
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.crc import BlockCrcs, combine_crcs, compute_second_crc, crc32
from tests.sampling import examples


@settings(max_examples=examples(200), deadline=None)
@given(
    st.binary(max_size=300),
    st.lists(st.integers(0, 300), max_size=6),
    st.randoms(use_true_random=False),
)
def test_blocks_in_any_order_give_the_crc_of_the_message(message, cuts, rng):
    # No block is empty: it would take the place of the block that starts at the same offset.
    edges = sorted({0, len(message), *(min(position, len(message)) for position in cuts)})
    blocks = list(itertools.pairwise(edges))
    rng.shuffle(blocks)
    from_data = BlockCrcs()
    from_crcs = BlockCrcs()

    for start, stop in blocks:
        assert not from_data.is_complete(len(message))
        block_crc = zlib.crc32(message[start:stop])
        assert from_data.add(start, memoryview(message)[start:stop]) == block_crc
        from_crcs.add_crc(start, stop - start, block_crc)

    for block_crcs in (from_data, from_crcs):
        assert block_crcs.crc32() == zlib.crc32(message)
        assert block_crcs.is_complete(len(message))
        assert not block_crcs.is_complete(len(message) + 1)
        assert bool(block_crcs) is bool(message)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_rows_of_column_shards_give_the_crc_of_the_matrix(row_count, left_count, right_count):
    shape = (row_count, left_count + right_count)
    matrix = np.random.default_rng(row_count).integers(0, 256, shape, dtype=np.uint8)
    block_crcs = BlockCrcs()

    for columns in (slice(left_count, None), slice(0, left_count)):
        for row in range(row_count):
            row_start = row * shape[1] + columns.start
            block_crcs.add(row_start, matrix[row, columns].tobytes())

    assert block_crcs.crc32() == zlib.crc32(matrix.tobytes())


@given(st.binary(min_size=3, max_size=50), st.data())
def test_blocks_with_a_gap_are_not_complete(message, data):
    position = data.draw(st.integers(1, len(message) - 2))
    block_crcs = BlockCrcs()

    block_crcs.add(0, message[:position])
    block_crcs.add(position + 1, message[position + 1 :])

    assert not block_crcs.is_complete(len(message))
    assert not block_crcs.is_complete(len(message) - 1)


@given(st.binary(min_size=3, max_size=50), st.data())
def test_blocks_that_overlap_are_not_complete(message, data):
    position = data.draw(st.integers(1, len(message) - 2))
    block_crcs = BlockCrcs()

    block_crcs.add(0, message[: position + 1])
    block_crcs.add(position, message[position:])

    assert not block_crcs.is_complete(len(message))
    assert not block_crcs.is_complete(len(message) + 1)


def test_a_block_replaces_the_one_that_was_added_at_the_same_offset():
    block_crcs = BlockCrcs()

    block_crcs.add(0, b"other")
    block_crcs.add(0, b"hold")
    block_crcs.add(4, b"fast")

    assert block_crcs.crc32() == zlib.crc32(b"holdfast")


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_crcs_of_two_messages_combine_to_that_of_both(first, second):
    whole_crc = zlib.crc32(first + second)

    assert combine_crcs(crc32(first), crc32(second), len(second)) == whole_crc
    assert crc32(second, crc32(first)) == whole_crc
    assert compute_second_crc(whole_crc, crc32(first), len(second)) == zlib.crc32(second)
