"""The linear algebra of CRC-32 against zlib on the whole message."""

import itertools
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core import crc


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6), st.randoms(use_true_random=False))
def test_runs_in_any_order_give_the_whole(message, cuts, random):
    edges = [0, *sorted(min(c, len(message)) for c in cuts), len(message)]
    runs = [(a, b) for a, b in itertools.pairwise(edges)]
    random.shuffle(runs)
    crcs = [zlib.crc32(message[a:b]) for a, b in runs]
    assert crc.of_runs(crcs, [b - a for a, b in runs], [a for a, _ in runs], len(message)) == zlib.crc32(message)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_column_shards(rows, left, right):
    matrix = np.random.default_rng(rows).integers(0, 256, (rows, left + right), dtype=np.uint8)
    runs = []
    for r in range(rows):
        runs.append((r * (left + right), matrix[r, :left].tobytes()))
        runs.append((r * (left + right) + left, matrix[r, left:].tobytes()))
    got = crc.of_runs([zlib.crc32(b) for _, b in runs], [len(b) for _, b in runs], [a for a, _ in runs], matrix.size)
    assert got == zlib.crc32(matrix.tobytes())


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_combine(a, b):
    assert crc.combine(crc.crc32(a), crc.crc32(b), len(b)) == zlib.crc32(a + b) == crc.crc32(b, crc.crc32(a))


@settings(deadline=None)
@given(st.integers(0, 1 << 40))
def test_zeros_of_any_length(n):
    """Against combine, which shifts by its own arithmetic."""
    assert int(crc.of_zeros(np.int64(n))) == crc.combine(0, int(crc.of_zeros(np.int64(n))), n)
    if n < 10_000:
        assert int(crc.of_zeros(np.int64(n))) == zlib.crc32(bytes(n))
