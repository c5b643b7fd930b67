"""What the C unpickler takes from a file whose opcodes do not stay inside their frames: compared with CPython."""

from __future__ import annotations

import io
import pickle
import random

import pytest
from tests.hostile.craft_pickle import NONE, POP, STOP, binbytes, frame, integer, proto, text
from tests.support import drops_rest_of_frames

from holdfast.core.limits import DEFAULTS
from holdfast.formats.pickle.recording import record, record_from_file

OPCODES = [
    NONE + POP,
    integer(7) + POP,
    integer(70_000) + POP,
    b"I12\n0",
    b"S'line'\n0",
    b"\x8a\x03abc0",
    text("N0N0") + POP,
    text("K\x01") + POP,
    text("a text that reaches far") + POP,
    binbytes(b"N0N0N0N0N0") + POP,
    b"C\x04N0N00",
]


def misframed_stream(source: random.Random) -> bytes:
    """Return a pickle in which frames begin between any opcodes and end anywhere."""
    opcodes = [source.choice(OPCODES) for _ in range(12)]
    for _ in range(source.randint(1, 3)):
        opcodes.insert(source.randrange(len(opcodes)), frame(b"", source.randint(1, 24)))
    values = integer(1) + text("N0N0N0") + b"\x86"
    return proto(4) + b"".join(opcodes) + values + STOP + NONE * 30 + STOP


@pytest.mark.skipif(not drops_rest_of_frames(), reason="this Python keeps to frames")
def test_the_c_unpickler_reads_the_same_from_a_file() -> None:
    source = random.Random(0)
    agreed = different = 0
    for _ in range(3000):
        data = misframed_stream(source)
        file = io.BytesIO(data)
        try:
            expected = pickle.load(file)
        except Exception:
            continue
        recorded = record_from_file(data, limits=DEFAULTS)
        assert (recorded.value, recorded.stop) == (expected, file.tell()), data
        agreed += 1
        different += record(data, limits=DEFAULTS).stop != file.tell()
    assert agreed > 500
    assert different >= 10


def test_all_unpicklers_agree_on_a_stream_whose_frames_are_not_misleading() -> None:
    source = random.Random(1)
    alike = misleading = 0
    for _ in range(3000):
        data = misframed_stream(source)
        recorded = record(data, limits=DEFAULTS)
        if recorded.table.misframed:
            misleading += 1
            continue
        for unpickler in (pickle.Unpickler, pickle._Unpickler):  # type: ignore[attr-defined]
            file = io.BytesIO(data)
            assert (unpickler(file).load(), file.tell()) == (recorded.value, recorded.stop), data
        assert pickle.loads(data) == recorded.value
        alike += 1
    assert alike > 50
    assert misleading > 500


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", [list(range(5000)), "x" * 200_000, [b"y" * 70_000] * 3, {}])
def test_frames_that_python_writes_are_not_misleading(value: object, protocol: int) -> None:
    recorded = record(pickle.dumps(value, protocol), limits=DEFAULTS)
    assert recorded.stop is not None
    assert not recorded.table.misframed
