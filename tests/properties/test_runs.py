"""Byte runs against a byte-by-byte oracle."""

import numpy as np
from hypothesis import given, settings

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES
from holdfast.engine.boxes import find_strided_ranges
from holdfast.engine.coalesce import JoinPolicy, coalesce
from tests.properties.strategies import bytes_touched, chunks
from tests.sampling import examples

TOUCHING = JoinPolicy(
    free_gap=0, max_gap=0, over_read=0.0, separate_nbytes=1 << 62, block_nbytes=1 << 62
)
"""Joins what touches, and nothing else."""


def byte_runs(chunk, dtype):
    """Starts and stops, relative to the storage, of the maximal byte ranges that hold a chunk's elements."""
    if chunk.box.count == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    ranges = find_strided_ranges(chunk, dtype)
    bits = np.sort(ranges.find_first_bits())
    starts, stops = bits // 8, (bits + ranges.bit_count + 7) // 8
    heads = coalesce(starts, stops, TOUCHING)
    return starts[heads], np.maximum.reduceat(stops, heads)


@settings(max_examples=examples(400))
@given(chunks())
def test_runs_are_exactly_the_bytes_touched(drawn):
    chunk, dtype = drawn
    starts, stops = byte_runs(chunk, dtype)
    covered = {b for a, z in zip(starts.tolist(), stops.tolist(), strict=True) for b in range(a, z)}
    assert covered == bytes_touched(chunk, dtype)


@settings(max_examples=examples(400))
@given(chunks())
def test_runs_are_sorted_disjoint_and_maximal(drawn):
    starts, stops = byte_runs(*drawn)
    assert all(a < z for a, z in zip(starts, stops, strict=True))
    # A gap of at least one byte between neighbours: touching runs would not be maximal.
    assert all(z < a for z, a in zip(stops[:-1], starts[1:], strict=True))


def test_a_billion_contiguous_elements_are_one_run():
    chunk = Chunk(
        Box.whole((1 << 15, 1 << 15)), Storage("f", 0, 1 << 32, home=None), 0, (32 << 15, 32)
    )
    starts, stops = byte_runs(chunk, DTYPES.name("float32"))
    assert (starts.tolist(), stops.tolist()) == ([0], [1 << 32])
