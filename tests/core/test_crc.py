"""Checksums of many pieces, with and without releasing the interpreter lock, against zlib."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import crc
from holdfast.core.crc import LOCK_KEPT_NBYTES, SHORT_NBYTES, crc32_each, has_crcs

SHORT_LENGTHS = [0, 1, LOCK_KEPT_NBYTES - 1, LOCK_KEPT_NBYTES]

LENGTHS = [
    *SHORT_LENGTHS,
    LOCK_KEPT_NBYTES + 1,
    3 * LOCK_KEPT_NBYTES,
    16 << 10,
    SHORT_NBYTES,
    SHORT_NBYTES + 1,
    1 << 20,
]


def make_pieces(lengths: list[int]) -> list[memoryview]:
    """Return pieces of random bytes with these lengths, each with another content."""
    nbytes = max(lengths, default=0) + len(lengths)
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).data
    return [data[start : start + length] for start, length in enumerate(lengths)]


@pytest.mark.parametrize("lengths", [[], SHORT_LENGTHS, LENGTHS])
def test_crc32_each_returns_the_crc_of_each_piece(lengths):
    pieces = make_pieces(lengths)

    assert crc32_each(pieces) == [zlib.crc32(piece) for piece in pieces]


def test_only_for_long_pieces_is_the_interpreter_lock_released(monkeypatch):
    """isal releases the lock if it receives more than `LOCK_KEPT_NBYTES` in one call."""
    call_nbytes: list[int] = []
    original_crc32 = crc.crc32

    def recording_crc32(data, start=0):
        call_nbytes.append(len(data))
        return original_crc32(data, start)

    monkeypatch.setattr(crc, "crc32", recording_crc32)

    crc32_each(make_pieces(LENGTHS))

    releasing_calls = [nbytes for nbytes in call_nbytes if nbytes > LOCK_KEPT_NBYTES]
    assert releasing_calls == [SHORT_NBYTES + 1, 1 << 20]


@given(st.data())
def test_has_crcs_notices_a_changed_bit_inside_of_a_piece_and_no_other(data):
    lengths = st.one_of(st.integers(0, 40), st.integers(5000, 20_000))
    gap_lengths = st.one_of(st.just(0), lengths)
    gaps_and_lengths = data.draw(st.lists(st.tuples(gap_lengths, lengths), max_size=8))
    edges = np.array(gaps_and_lengths, np.int64).reshape(-1).cumsum().tolist()
    starts = edges[::2]
    stops = edges[1::2]
    nbytes = max(edges, default=0) + 10
    memory = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    crcs = [zlib.crc32(memory[start:stop]) for start, stop in zip(starts, stops, strict=True)]
    assert has_crcs(memory.data, starts, stops, crcs)

    position = data.draw(st.integers(0, nbytes - 1))
    memory[position] ^= 1 << data.draw(st.integers(0, 7))

    is_inside = any(start <= position < stop for start, stop in zip(starts, stops, strict=True))
    assert has_crcs(memory.data, starts, stops, crcs) != is_inside
