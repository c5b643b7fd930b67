"""`split_payloads`: what is left out of the opcodes of a pickle, held against `pickletools` and against `pickle` itself."""

from __future__ import annotations

import pickle
import pickletools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.core.limits import Limits
from holdfast.errors import LimitExceeded, PickleError
from holdfast.formats.pickle import payloads
from holdfast.formats.pickle.payloads import PAYLOAD_NBYTES, split_payloads

LARGE = bytes(range(256)) * (PAYLOAD_NBYTES // 256)

WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def split(stream: bytes, limits: Limits = Limits()) -> payloads.Payloads:  # noqa: B008  # frozen
    return split_payloads(lambda start, stop: stream[start:stop], len(stream), limits)


def join(stream: bytes) -> bytes:
    """The opcodes of a stream with what was left out put back, up to the end of the stream."""
    found = split(stream)
    joined = bytearray()
    position = 0
    for payload in found._payloads:
        joined += found.opcodes[position : payload.position]
        joined += stream[payload.start : payload.start + payload.nbytes]
        position = payload.position
    return bytes(joined + found.opcodes[position:])


def test_every_opcode_has_the_argument_that_pickletools_says():
    for opcode in pickletools.opcodes:
        code = ord(opcode.code)
        if opcode.name == "STOP":
            continue
        argument = opcode.arg
        if argument is None:
            assert payloads.FIXED[code] == 0
        elif argument.n >= 0:
            assert payloads.FIXED[code] == argument.n
        elif argument.n == pickletools.UP_TO_NEWLINE:
            lines = 2 if argument is pickletools.stringnl_noescape_pair else 1
            assert payloads.LINES[code] == lines
        else:
            assert payloads.COUNTED[code] == WIDTHS[argument.n]
    known = {*payloads.FIXED, *payloads.LINES, *payloads.COUNTED}
    assert known | {payloads.STOP} == {ord(opcode.code) for opcode in pickletools.opcodes}


values = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([LARGE, LARGE[:-1], bytearray(LARGE), "x" * PAYLOAD_NBYTES, b"small"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=examples(60))
@given(values, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_the_parts_make_the_stream_again(value, protocol):
    stream = pickle.dumps(value, protocol)
    assert join(stream) == stream


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_large_bytes_are_left_out_and_the_rest_is_not(protocol):
    stream = pickle.dumps({"a": LARGE, "b": b"small", "c": 3}, protocol)
    found = split(stream)
    assert len(found.opcodes) == len(stream) - len(LARGE)
    (payload,) = found._payloads
    assert stream[payload.start : payload.start + payload.nbytes] == LARGE
    assert found.file_offset(payload.position) == payload.start + payload.nbytes
    assert found.file_offset(payload.position - 1) == payload.start - 1


def test_bytes_inside_of_a_frame_are_not_left_out():
    inside = b"B" + len(LARGE).to_bytes(4, "little") + LARGE + b"."
    stream = b"\x80\x04\x95" + len(inside).to_bytes(8, "little") + inside
    assert split(stream).opcodes == stream


def test_the_limit_is_about_the_opcodes_alone():
    stream = pickle.dumps([LARGE, LARGE + b"x"])
    assert len(split(stream, Limits(pickle_nbytes=1000)).opcodes) < 1000
    with pytest.raises(LimitExceeded, match="without its arrays"):
        split(pickle.dumps(["x" * 100_000]), Limits(pickle_nbytes=1000))


def test_an_interpreter_that_runs_past_a_payload_is_refused():
    found = split(pickle.dumps([LARGE]))
    with pytest.raises(PickleError):
        found.check_all_met()
    (payload,) = found._payloads
    assert found.meet(payload.position + 1, payload.nbytes) is None
    with pytest.raises(PickleError):
        found.meet(payload.position, payload.nbytes - 1)
    assert found.meet(payload.position, payload.nbytes).start == payload.start
    found.check_all_met()
    found.begin()
    with pytest.raises(PickleError):
        found.check_all_met()
