"""The archives of tensors in the data file of a rank: filled in for each tensor, they are those that are laid out one by one."""

import io
import struct

import numpy as np
import pytest

from holdfast.core.dtype import DTYPES
from holdfast.engine.saves import FilePlan, Memory
from holdfast.engine.stream import write_stream
from holdfast.formats.dcp.write import lay_out_items, tensor_pickle
from holdfast.formats.torch.write import lay_out_container
from holdfast.verbs.shared.state import tabulate_state

DESCRIPTOR = np.frombuffer(struct.pack("<4sIII", b"PK\7\x08", 0x12345678, 5, 5), np.uint8)
"""Elements that begin as the descriptor of a zip does: torch's writer takes what follows for a checksum."""

ARRAYS = {
    "floats": np.arange(12, dtype=np.float32).reshape(3, 4),
    "again": np.ones((3, 4), np.float32),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 3), np.int16),
    "strided": np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
    "descriptor": DESCRIPTOR,
    "short": DESCRIPTOR[:6],
    "long": np.arange(40_000, dtype=np.float64),
    "long descriptor": np.tile(DESCRIPTOR, 8192),
}


def written(plan: FilePlan) -> bytes:
    out = io.BytesIO()
    write_stream(plan, out)
    return out.getvalue()


def alone(array: np.ndarray) -> bytes:
    """The archive of one array."""
    dtype = DTYPES.numpy(array.dtype)
    assert dtype is not None
    content = np.ascontiguousarray(array).reshape(array.shape)
    payload = Memory(memoryview(content.reshape(-1).view(np.uint8)), "x") if array.size else b""
    return written(
        FilePlan(
            "",
            lay_out_container("archive", tensor_pickle(dtype, array.shape), [("data/0", payload)]),
        )
    )


@pytest.mark.parametrize("names", [[*ARRAYS], ["floats"], ["empty"]])
def test_each_archive_is_the_one_of_its_tensor(names):
    table = tabulate_state(ARRAYS).tensors
    plan, lengths = lay_out_items(
        "file", [b"a value", b"another"], table, [table.row_indices[name] for name in names]
    )
    expected = [b"a value", b"another", *(alone(ARRAYS[name]) for name in names)]
    assert lengths.tolist() == [*map(len, expected)]
    assert written(plan) == b"".join(expected)
