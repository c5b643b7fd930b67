"""The coalescer under the policy of each medium, against an oracle that looks at every byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.engine import coalesce as module
from holdfast.engine.coalesce import (
    HEADERS,
    MEMORY,
    PAGE_LOCKED,
    RECORDS,
    REMOTE,
    SUMS,
    Policy,
    Ranges,
    coalesce,
    join_files,
    join_parts,
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
"""Policies speak of kilobytes and megabytes; the oracle counts bytes, so everything is made smaller by this."""


def test_every_policy_of_the_module_is_tried():
    assert {id(value) for value in vars(module).values() if isinstance(value, Policy)} == {
        id(p) for p in POLICIES.values()
    }


def scaled(policy: Policy) -> Policy:
    return Policy(
        free_gap=policy.free_gap // SCALE,
        max_gap=policy.max_gap // SCALE,
        over_read=policy.over_read,
        separate_nbytes=policy.separate_nbytes // SCALE,
        block=policy.block // SCALE,
    )


@st.composite
def ranges(draw, policy: Policy):
    """Rows of ranges, with gaps and lengths on both sides of every threshold, which sometimes overlap."""
    edges = {n for n in (policy.free_gap, policy.max_gap) if n < 1 << 14}
    gaps = st.sampled_from(sorted({0, 1, 2, 3, 70, *edges, *(n + 1 for n in edges)})) | st.integers(
        -60, 90
    )
    lengths = st.sampled_from(
        sorted(
            {
                1,
                5,
                *(
                    policy.separate_nbytes + d
                    for d in (-1, 0, 1)
                    if policy.separate_nbytes < 1 << 14
                ),
            }
        )
    ) | st.integers(1, 200)
    at, found = draw(st.integers(0, 40)), []
    for gap, length in draw(st.lists(st.tuples(gaps, lengths), min_size=1, max_size=25)):
        start = max(at + gap, 0)
        found.append((start, start + length))
        at = start + length
    return found


def missing(start: int, stop: int, wanted: set[int]) -> list[int]:
    """Lengths of the runs of bytes in a read that nobody wants."""
    gaps = sorted(set(range(start, stop)) - wanted)
    return [
        len(list(run))
        for _, run in itertools.groupby(enumerate(gaps), lambda pair: pair[1] - pair[0])
    ]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_every_wanted_range_is_in_one_read_and_the_rest_is_within_the_promise(name, data):
    policy = scaled(POLICIES[name])
    drawn = sorted(data.draw(ranges(policy)))
    starts, stops = (np.array(side, np.int64) for side in zip(*drawn, strict=True))
    heads = coalesce(starts, stops, policy).tolist()
    assert heads[0] == 0
    assert heads == sorted(set(heads))
    wanted = set().union(*(range(a, z) for a, z in drawn))
    paid = 0
    for first, last in itertools.pairwise([*heads, len(drawn)]):
        members = drawn[first:last]
        start, stop = members[0][0], max(z for _, z in members)
        vain = missing(start, stop, wanted)
        assert all(gap <= max(policy.free_gap, policy.max_gap) for gap in vain)
        paid += sum(gap for gap in vain if gap > policy.free_gap)
        assert len({a // policy.block for a, _ in members}) == 1
        if len(members) > 1:
            # One that is long enough to be alone was joined with nothing but what overlaps it.
            for (a, z), (b, _) in itertools.pairwise(members):
                assert z - a < policy.separate_nbytes or b < z
    assert paid <= sum(z - a for a, z in drawn) * policy.over_read


@pytest.mark.parametrize("name", ["records", "sums"])
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_parts_have_every_byte_once_and_no_read_is_longer_than_a_block(name, data):
    policy = scaled(POLICIES[name])
    block = data.draw(st.sampled_from([policy.block, 64, 7]))
    policy = Policy(
        policy.free_gap, policy.max_gap, policy.over_read, policy.separate_nbytes, block
    )
    drawn = data.draw(st.permutations([*data.draw(ranges(policy)), (5, 5)]))
    starts, stops = (np.array(side, np.int64) for side in zip(*drawn, strict=True))
    parts = join_parts("f", starts, stops, policy)
    seen: list[list[int]] = [[] for _ in drawn]
    wanted = set().union(*(range(a, z) for a, z in drawn))
    for number, (start, stop) in enumerate(
        zip(parts.starts.tolist(), parts.stops.tolist(), strict=True)
    ):
        assert 0 < stop - start <= block
        assert all(gap <= policy.free_gap for gap in missing(start, stop, wanted))
        for owner, begin, end in parts.of(number):
            assert start <= begin < end <= stop
            seen[owner] += range(begin, end)
    assert [sorted(bytes_of) for bytes_of in seen] == [list(range(a, z)) for a, z in drawn]
    assert parts.nbytes == int((parts.stops - parts.starts).sum())


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 20)), max_size=12)
)
def test_ranges_of_several_files_keep_their_numbers(places):
    wanted = [(key, start, start + length) for key, start, length in places]
    joined = join_files(Ranges.of(places), SUMS)
    found = [
        (parts.key, *part)
        for parts in joined
        for n in range(len(parts.starts))
        for part in parts.of(n)
    ]
    assert sorted(found, key=lambda part: part[1]) == [
        (k, n, a, z) for n, (k, a, z) in enumerate(wanted) if a < z
    ]


def test_nothing_is_no_read():
    nothing = np.zeros(0, np.int64)
    assert len(coalesce(nothing, nothing, MEMORY)) == 0
    assert join_parts("f", nothing, nothing, SUMS).nbytes == 0
