"""A format in one file. Once this package is installed, Holdfast reads and writes `.toy`.

    TOY: │ nbytes of the header (8, little-endian) │ header │ elements of each tensor │ checksums

The header is JSON: `{"w": ["float32", [2, 3]], …}`. The elements follow in the order of the header,
in C order and little-endian. A CRC-32 of each tensor follows them (4 bytes, little-endian).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Description, Source, State
from holdfast.core.strict_json import parse
from holdfast.core.tensor import LazyTensor
from holdfast.engine.files import ViewTable
from holdfast.engine.saves import Data, FilePlan, Late, Literal, SavePlan
from holdfast.errors import CannotHold, HeaderError, Truncated
from holdfast.formats import Format
from holdfast.formats.safetensors.schema import is_addressable

MAGIC = b"TOY:"
HEADER_START = len(MAGIC) + 8
CRC_NBYTES = 4

TOY = Format(
    "toy",
    f"{__name__}:describe",
    begins=MAGIC,
    suffixes=(".toy",),
    choices=("toy",),
    written_by=f"{__name__}:lay_out",
    keeps="tensors",
    code="none",
)


def describe(source: Source) -> Description:
    """Read the header and the checksums, and return where each tensor lies."""
    (key,) = source.store.list()
    file_nbytes = source.store.size(key)
    data_start = HEADER_START + int.from_bytes(
        source.bytes(key, len(MAGIC), HEADER_START), "little"
    )
    if data_start > file_nbytes:
        raise Truncated("the header is longer than the file", file=key, found=data_start)
    header = parse(source.bytes(key, HEADER_START, data_start), source.limits, file=key)
    if not isinstance(header, dict):
        raise HeaderError("the header must be a JSON object", file=key)

    outlines = {name: read_outline(key, name, entry, source) for name, entry in header.items()}
    data_nbytes = sum(dtype.nbytes(math.prod(shape)) for dtype, shape in outlines.values())
    crcs_start = data_start + data_nbytes
    expected_nbytes = crcs_start + CRC_NBYTES * len(outlines)
    if file_nbytes != expected_nbytes:
        problem = f"the header describes {expected_nbytes:,} bytes, the file has {file_nbytes:,}"
        raise Truncated(problem, file=key, expected=expected_nbytes, found=file_nbytes)
    crcs = source.bytes(key, crcs_start, file_nbytes)

    tensors: dict[str, LazyTensor] = {}
    start = data_start
    for index, (name, (dtype, shape)) in enumerate(outlines.items()):
        crc = int.from_bytes(crcs[CRC_NBYTES * index : CRC_NBYTES * (index + 1)], "little")
        nbytes = dtype.nbytes(math.prod(shape))
        storage = Storage(key, start, nbytes, crc32=crc, label=name, home=source.store)
        tensors[name] = LazyTensor.contiguous(name, dtype, shape, storage, source)
        start += nbytes
    table = ViewTable(tensors)
    return Description(TOY.name, table, table)


def read_outline(
    key: str, name: str, entry: object, source: Source
) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and the shape of an entry of the header. Raises `HeaderError`."""
    match entry:
        case [str(dtype_name), list(lengths)]:
            dtype = DTYPES.name(dtype_name)
        case _:
            raise HeaderError("an entry must be [dtype, shape]", file=key, tensor=name)
    if dtype is None:
        raise HeaderError(f"there is no dtype {dtype_name[:80]!r}", file=key, tensor=name)
    shape = tuple(length for length in lengths if type(length) is int and length >= 0)
    is_shape = len(shape) == len(lengths) <= source.limits.rank
    if not is_shape or not is_addressable(shape, dtype.bits):
        raise HeaderError("the shape must be a list of small lengths", file=key, tensor=name)
    return dtype, shape


def lay_out(state: State) -> SavePlan:
    """Lay out a state. Raises `CannotHold` if it is nested."""
    if not state.leaves.is_flat:
        raise CannotHold("a toy holds tensors by their names", ["this state is nested"])
    tensors = dict(state.tensors)
    entries = {name: [tensor.dtype.name, tensor.shape] for name, tensor in tensors.items()}
    header = json.dumps(entries).encode()

    def make_checksums(crcs: Mapping[str, int]) -> bytes:
        # An empty tensor has no data, and 0 is the CRC-32 of nothing.
        return b"".join([crcs.get(name, 0).to_bytes(CRC_NBYTES, "little") for name in tensors])

    head = Literal(MAGIC + len(header).to_bytes(8, "little") + header)
    data = [Data(tensor, name) for name, tensor in tensors.items() if tensor.nbytes]
    checksums = Late(CRC_NBYTES * len(tensors), make_checksums)
    return SavePlan(TOY.name, (FilePlan("", (head, *data, checksums)),))
