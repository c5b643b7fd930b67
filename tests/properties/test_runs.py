"""The byte ranges of chunks, compared with an oracle that looks at every byte."""

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
"""Joins ranges that touch or overlap, and no others."""


def find_byte_runs(chunk, dtype):
    """Return the longest ranges without gaps that have a chunk's elements: their starts and stops."""
    if chunk.box.count == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    ranges = find_strided_ranges(chunk, dtype)
    first_bits = np.sort(ranges.find_first_bits())
    starts = first_bits // 8
    stops = (first_bits + ranges.bit_count + 7) // 8
    first_ranges = coalesce(starts, stops, TOUCHING)
    return starts[first_ranges], np.maximum.reduceat(stops, first_ranges)


@settings(max_examples=examples(400))
@given(chunks())
def test_runs_are_exactly_the_bytes_of_the_elements(drawn):
    chunk, dtype = drawn
    starts, stops = find_byte_runs(chunk, dtype)
    covered = set()
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        covered.update(range(start, stop))
    assert covered == bytes_touched(chunk, dtype)


@settings(max_examples=examples(400))
@given(chunks())
def test_runs_are_sorted_and_do_not_touch(drawn):
    starts, stops = find_byte_runs(*drawn)
    assert (starts < stops).all()
    assert (stops[:-1] < starts[1:]).all()


def test_a_billion_contiguous_elements_are_one_run():
    storage = Storage("f", 0, 1 << 32, home=None)
    chunk = Chunk(Box.whole((1 << 15, 1 << 15)), storage, 0, (32 << 15, 32))
    starts, stops = find_byte_runs(chunk, DTYPES.name("float32"))
    assert starts.tolist() == [0]
    assert stops.tolist() == [1 << 32]
