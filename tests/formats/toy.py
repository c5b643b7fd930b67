"""A format that exists in tests alone: what somebody writes who adds one, in a module and an entry of `FORMATS`.

TOY: │ {"w": ["float32", [2, 3]], …} │ newline │ the elements of each tensor, one behind the other
"""

from __future__ import annotations

import json
import math

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import Description, Source, State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.files import ViewTable
from holdfast.engine.saves import Data, FilePlan, Literal, SavePlan
from holdfast.errors import CannotHold, HeaderError
from holdfast.formats import Format

MAGIC = b"TOY:"

TOY = Format(
    "toy",
    f"{__name__}:describe",
    MAGIC,
    suffixes=(".toy",),
    choices=("toy",),
    written_by=f"{__name__}:lay_out",
    keeps="tensors",
    code="none",
)


def describe(source: Source) -> Description:
    (key,) = source.store.list()
    head = source.bytes(key, 0, source.store.size(key)).partition(b"\n")[0]
    try:
        entries = json.loads(head[len(MAGIC) :])
    except ValueError:
        raise HeaderError("the header is no JSON", file=key) from None
    at, tensors = len(head) + 1, {}
    for name, (called, shape) in entries.items():
        dtype = DTYPES.name(called)
        assert dtype is not None
        storage = Storage(key, at, dtype.nbytes(math.prod(shape)), label=name, home=source.store)
        tensors[name] = LazyTensor.contiguous(name, dtype, tuple(shape), storage, source)
        at += storage.nbytes
    table = ViewTable(tensors)
    return Description(TOY.name, table, table)


def lay_out(state: State) -> SavePlan:
    if not state.leaves.flat:
        raise CannotHold("a toy holds tensors by their names", ["this state is nested"])
    tensors = dict(state.tensors)
    head = json.dumps({name: [tensor.dtype.name, tensor.shape] for name, tensor in tensors.items()})
    data = (Data(tensor, name) for name, tensor in tensors.items() if tensor.nbytes)
    return SavePlan(TOY.name, (FilePlan("", (Literal(MAGIC + head.encode() + b"\n"), *data)),))
