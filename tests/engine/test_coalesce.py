"""The coalescer under each policy, against an oracle that looks at every byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.core.value import replace
from holdfast.engine import coalesce as coalesce_module
from holdfast.engine.coalesce import (
    HEADERS,
    MEMORY,
    PAGE_LOCKED,
    RECORDS,
    REMOTE,
    SUMS,
    JoinPolicy,
    Ranges,
    coalesce,
    find_gaps,
    join_file_ranges,
    join_ranges,
)

POLICIES = {
    "memory": MEMORY,
    "remote": REMOTE,
    "records": RECORDS,
    "headers": HEADERS,
    "sums": SUMS,
    "page-locked": PAGE_LOCKED,
}

SCALE = 256
"""The oracle looks at single bytes, so the kilobytes and megabytes of policies are divided by this."""

MAX_TESTED_THRESHOLD = 1 << 14
"""Scaled thresholds above this are those of policies that never apply them."""


def test_every_policy_of_the_module_is_tested():
    policies = [value for value in vars(coalesce_module).values() if isinstance(value, JoinPolicy)]
    assert {id(policy) for policy in policies} == {id(policy) for policy in POLICIES.values()}


def scale_down(policy: JoinPolicy) -> JoinPolicy:
    return JoinPolicy(
        free_gap=policy.free_gap // SCALE,
        max_gap=policy.max_gap // SCALE,
        over_read=policy.over_read,
        separate_nbytes=policy.separate_nbytes // SCALE,
        block_nbytes=policy.block_nbytes // SCALE,
    )


@st.composite
def ranges(draw, policy: JoinPolicy):
    """Draw ranges with gaps and sizes on both sides of every threshold. Negative gaps are overlaps."""
    gap_sizes = {0, 1, 2, 3, 70}
    for threshold in (policy.free_gap, policy.max_gap):
        if threshold < MAX_TESTED_THRESHOLD:
            gap_sizes |= {threshold, threshold + 1}
    sizes = {1, 5}
    if policy.separate_nbytes < MAX_TESTED_THRESHOLD:
        sizes |= {policy.separate_nbytes + offset for offset in (-1, 0, 1)}
    gaps = st.sampled_from(sorted(gap_sizes)) | st.integers(-60, 90)
    lengths = st.sampled_from(sorted(sizes)) | st.integers(1, 200)

    previous_stop = draw(st.integers(0, 40))
    drawn_ranges = []
    for gap, length in draw(st.lists(st.tuples(gaps, lengths), min_size=1, max_size=25)):
        start = max(previous_stop + gap, 0)
        previous_stop = start + length
        drawn_ranges.append((start, previous_stop))
    return drawn_ranges


def bytes_of(drawn_ranges) -> set[int]:
    return set().union(*(range(start, stop) for start, stop in drawn_ranges))


def columns_of(drawn_ranges) -> tuple[np.ndarray, np.ndarray]:
    columns = np.array(drawn_ranges, np.int64)
    return columns[:, 0], columns[:, 1]


def gap_sizes_in(start: int, stop: int, wanted_bytes: set[int]) -> list[int]:
    """Return the lengths of the runs of bytes of a read that no range wants."""
    unwanted_bytes = sorted(set(range(start, stop)) - wanted_bytes)
    runs = itertools.groupby(enumerate(unwanted_bytes), lambda pair: pair[1] - pair[0])
    return [len(list(run)) for _, run in runs]


random_policies = st.builds(
    JoinPolicy,
    free_gap=st.integers(0, 9),
    max_gap=st.integers(0, 64),
    over_read=st.sampled_from([0.0, 0.1, 2.0]),
    separate_nbytes=st.integers(1, 250),
    block_nbytes=st.integers(1, 64),
)


@pytest.mark.parametrize("name", [*POLICIES, "random"])
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_every_range_is_in_one_read_and_unwanted_bytes_are_within_the_budget(name, data):
    if name == "random":
        policy = data.draw(random_policies)
    else:
        policy = scale_down(POLICIES[name])
    drawn_ranges = sorted(data.draw(ranges(policy)))

    first_ranges = coalesce(*columns_of(drawn_ranges), policy).tolist()

    assert first_ranges[0] == 0
    assert first_ranges == sorted(set(first_ranges))
    wanted_bytes = bytes_of(drawn_ranges)
    paid_nbytes = 0
    for first, stop_index in itertools.pairwise([*first_ranges, len(drawn_ranges)]):
        members = drawn_ranges[first:stop_index]
        gap_sizes = gap_sizes_in(members[0][0], max(stop for _, stop in members), wanted_bytes)
        assert all(gap <= max(policy.free_gap, policy.max_gap) for gap in gap_sizes)
        paid_nbytes += sum(gap for gap in gap_sizes if gap > policy.free_gap)
        assert len({start // policy.block_nbytes for start, _ in members}) == 1
        for (start, stop), (next_start, _) in itertools.pairwise(members):
            is_overlap = next_start < stop
            assert stop - start < policy.separate_nbytes or is_overlap
    wanted_nbytes = sum(stop - start for start, stop in drawn_ranges)
    assert paid_nbytes <= wanted_nbytes * policy.over_read


@pytest.mark.parametrize("name", ["records", "sums"])
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_pieces_have_every_byte_once_and_no_read_is_longer_than_a_block(name, data):
    policy = scale_down(POLICIES[name])
    block_nbytes = data.draw(st.sampled_from([policy.block_nbytes, 64, 7]))
    policy = replace(policy, block_nbytes=block_nbytes)
    empty_range = (5, 5)
    drawn_ranges = data.draw(st.permutations([*data.draw(ranges(policy)), empty_range]))

    reads = join_file_ranges("file", *columns_of(drawn_ranges), policy)

    wanted_bytes = bytes_of(drawn_ranges)
    bytes_by_range: list[list[int]] = [[] for _ in drawn_ranges]
    bounds = zip(reads.starts.tolist(), reads.stops.tolist(), strict=True)
    for read_index, (start, stop) in enumerate(bounds):
        assert 0 < stop - start <= block_nbytes
        assert all(gap <= policy.free_gap for gap in gap_sizes_in(start, stop, wanted_bytes))
        for range_index, piece_start, piece_stop in reads.select_pieces(read_index).rows():
            assert start <= piece_start < piece_stop <= stop
            bytes_by_range[range_index] += range(piece_start, piece_stop)
    assert [sorted(seen) for seen in bytes_by_range] == [
        list(range(start, stop)) for start, stop in drawn_ranges
    ]
    assert reads.nbytes == int((reads.stops - reads.starts).sum())


small_ranges = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 20)), max_size=12
)


@given(small_ranges)
def test_pieces_have_the_indices_of_ranges_in_several_files(drawn_ranges):
    reads_by_file = join_ranges(Ranges.from_tuples(drawn_ranges), SUMS)

    pieces = []
    for reads in reads_by_file:
        pieces += [(reads.key, *row) for row in reads.pieces.rows()]
    expected_pieces = []
    for range_index, (key, start, nbytes) in enumerate(drawn_ranges):
        if nbytes:
            expected_pieces.append((key, range_index, start, start + nbytes))
    assert sorted(pieces, key=lambda piece: piece[1]) == expected_pieces


@given(small_ranges)
def test_ranges_and_gaps_together_are_every_byte_of_the_files(drawn_ranges):
    file_nbytes = {"a": 80, "b": 100, "d": 3}
    drawn_ranges = [row for row in drawn_ranges if row[0] in file_nbytes]

    gaps = find_gaps(Ranges.from_tuples(drawn_ranges), file_nbytes)

    uncovered = {(key, offset) for key, nbytes in file_nbytes.items() for offset in range(nbytes)}
    for key, start, nbytes in drawn_ranges:
        uncovered -= {(key, offset) for offset in range(start, start + nbytes)}
    gap_bytes = []
    for gap_index in range(len(gaps)):
        key, start, nbytes = gaps.locate(gap_index)
        gap_bytes += [(key, offset) for offset in range(start, start + nbytes)]
    assert sorted(gap_bytes) == sorted(uncovered)


def test_no_ranges_need_no_read():
    no_ranges = np.zeros(0, np.int64)
    assert len(coalesce(no_ranges, no_ranges, MEMORY)) == 0
    assert join_file_ranges("file", no_ranges, no_ranges, SUMS).nbytes == 0
