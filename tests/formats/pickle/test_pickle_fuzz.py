"""Damaged streams: whatever the bytes, only Holdfast errors come out, and nothing hangs."""

from __future__ import annotations

import collections
import contextlib
import fractions
import pathlib
import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.core.limits import Limits
from holdfast.errors import HoldfastError
from holdfast.formats.pickle.machine import interpret, interpret_whole
from holdfast.formats.pickle.plain import PlainTable
from holdfast.formats.pickle.rare import RARE

VALUE = {
    "weights": collections.OrderedDict(
        a=np.arange(6, dtype=">f4").reshape(2, 3), b=np.float64(2.5)
    ),
    "structured": np.zeros(2, [("x", "i4"), ("y", "f8")]),
    "when": np.datetime64("2024-01-01"),
    "counts": collections.Counter("aab"),
    "groups": collections.defaultdict(list, {1: [2]}),
    "path": pathlib.PurePosixPath("/a/b"),
    "sets": [{1, 2}, frozenset({(3, "x")}), b"bytes", bytearray(b"array")],
    "numbers": [1, -1, 70000, 2**70, 1.5, 1j, True, None, range(3), slice(1, 2)],
    "opaque": fractions.Fraction(1, 3),
    "text": ["é\ud800", ""],
}
STREAMS = [pickle.dumps(VALUE, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
PIECES = [
    bytes([op])
    for op in (*RARE, *b"rKh(XtRQ)NjqMJbue.", 0x94, 0x8C, 0x81, 0x85, 0x86, 0x89, 0x88, 0x95)
]
PIECES += [
    b"cnumpy\ndtype\n",
    b"cnumpy.core.multiarray\nscalar\n",
    b"cnumpy.core.multiarray\n_reconstruct\n",
    b"cnumpy\nndarray\n",
]
PIECES += [
    b"cbuiltins\nset\n",
    b"ccollections\nOrderedDict\n",
    b"ccollections\ndefaultdict\n",
    b"ca\nB\n",
    b"ccopyreg\n_reconstructor\n",
]
PIECES += [
    b"X\x02\x00\x00\x00f4",
    b"X\x01\x00\x00\x00<",
    b"C\x04abcd",
    b"K\x01",
    b"h\x00",
    b"q\x00",
    b"h\x01",
    b"q\x01",
    b"cnumpy.core.numeric\n_frombuffer\n",
]


TABLE, LIMITS = PlainTable(), Limits()


def survives(stream: bytes) -> None:
    """Any outcome but an error of another kind."""
    with contextlib.suppress(HoldfastError):
        interpret(stream, TABLE, limits=LIMITS)


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: f"protocol {STREAMS.index(s)}")
def test_every_truncation_is_refused(stream):
    for stop in range(len(stream)):
        with pytest.raises(HoldfastError):
            interpret_whole(stream[:stop], TABLE, limits=LIMITS)


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: f"protocol {STREAMS.index(s)}")
def test_changed_bytes(stream):
    rng = random.Random(len(stream))
    for _ in range(1200):
        changed = bytearray(stream)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at = rng.randrange(len(changed))
            match rng.randrange(4):
                case 0:
                    changed[at] = rng.randrange(256)
                case 1:
                    changed[at] ^= 1 << rng.randrange(8)
                case 2:
                    del changed[at : at + rng.randrange(1, 9)]
                case _:
                    changed[at:at] = rng.choice(PIECES)
        survives(bytes(changed))


@settings(max_examples=examples(800), deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_random_opcodes(pieces):
    survives(b"".join(pieces) + b".")


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes(stream):
    survives(stream)
