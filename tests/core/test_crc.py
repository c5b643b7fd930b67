"""Checksums of many pieces, with and without the interpreter lock."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import crc
from holdfast.core.crc import LOCK_KEPT_NBYTES, SHORT_NBYTES, crc32_each, has_crcs

LENGTHS = [
    0,
    1,
    LOCK_KEPT_NBYTES - 1,
    LOCK_KEPT_NBYTES,
    LOCK_KEPT_NBYTES + 1,
    3 * LOCK_KEPT_NBYTES,
    16 << 10,
    SHORT_NBYTES,
    SHORT_NBYTES + 1,
    1 << 20,
]


def pieces(lengths: list[int]) -> list[memoryview]:
    data = (
        np.random.default_rng(0)
        .integers(0, 256, max(lengths, default=0) + len(lengths), np.uint8)
        .data
    )
    return [data[at : at + length] for at, length in enumerate(lengths)]


@pytest.mark.parametrize("lengths", [[], LENGTHS[:4], LENGTHS])
def test_as_of_each(lengths):
    assert crc32_each(pieces(lengths)) == [zlib.crc32(piece) for piece in pieces(lengths)]


def test_the_lock_is_kept_for_short_pieces(monkeypatch):
    """What isal is given at a time does not have it give the lock away; but for what is long."""
    seen: list[int] = []
    before = crc.crc32

    def noted(data, start=0):
        seen.append(len(data))
        return before(data, start)

    monkeypatch.setattr(crc, "crc32", noted)
    crc32_each(pieces(LENGTHS))
    assert [nbytes for nbytes in seen if nbytes > LOCK_KEPT_NBYTES] == [SHORT_NBYTES + 1, 1 << 20]


@given(st.data())
def test_pieces_of_a_buffer(data):
    """Short and long ones, with and without something between them; whatever bit changes inside of one is found, and no other."""
    sizes = st.one_of(st.integers(0, 40), st.integers(5000, 20_000))
    spans = data.draw(st.lists(st.tuples(st.one_of(st.just(0), sizes), sizes), max_size=8))
    edges = np.cumsum([length for span in spans for length in span]).tolist()
    begins, ends = edges[::2], edges[1::2]
    memory = np.random.default_rng(1).integers(0, 256, (edges[-1] if edges else 0) + 10, np.uint8)
    crcs = [zlib.crc32(memory[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    assert has_crcs(memory.data, begins, ends, crcs)
    at = data.draw(st.integers(0, len(memory) - 1))
    memory[at] ^= 1 << data.draw(st.integers(0, 7))
    inside = any(begin <= at < end for begin, end in zip(begins, ends, strict=True))
    assert has_crcs(memory.data, begins, ends, crcs) != inside
