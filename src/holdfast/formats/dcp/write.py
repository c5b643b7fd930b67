"""Lay out the data file of one rank of a torch distributed checkpoint: archive after archive, each a `torch.save` of a tensor.

    │ archive: a value │ archive: a value │ … │ archive: a tensor's box │ archive: a tensor's box │ …

Values come first, as torch's writer puts them. Every archive is what torch 2.13 writes for the tensor as a whole on the CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DType
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.errors import Unsupported
from holdfast.formats.torch.write import lay_out_container
from holdfast.plan.saves import Data, FilePlan, Literal, Segment


def lay_out_items(key: str, values: Sequence[bytes], table: Table, rows: Sequence[int]) -> tuple[FilePlan, Ints]:
    """The file of a rank, with the archives of values and those of rows of a table; and the length of each, in that order.

    The label of a row's elements is its number.
    """
    archives: list[tuple[Segment, ...]] = [(Literal(archive),) for archive in values]
    archives += [_archive(table.view(row), f"{row}") for row in rows]
    nbytes = np.array([sum(segment.nbytes for segment in archive) for archive in archives], np.int64)
    return FilePlan(key, tuple(segment for archive in archives for segment in archive)), nbytes


def _archive(tensor: LazyTensor, label: str) -> tuple[Segment, ...]:
    content = tensor_pickle(tensor.dtype, tensor.shape)
    return lay_out_container("archive", content, [("data/0", Data(tensor, label) if tensor.nbytes else b"")])


def tensor_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The `data.pkl` of a contiguous CPU tensor that fills its storage, as torch 2.13 pickles it with protocol 2."""
    if dtype.torch is None:
        raise Unsupported(f"torch has no dtype for {dtype}")
    count = 1
    for n in shape:
        count *= n
    typed = dtype.storage is not None
    puts = _Puts()
    kind = b"ctorch\n%s\n" % dtype.storage.encode() if dtype.storage else b"ctorch.storage\nUntypedStorage\n"
    out = [
        b"\x80\x02", puts(b"ctorch._utils\n_rebuild_tensor_%s\n" % (b"v2" if typed else b"v3")), b"((",
        puts(_text("storage")), puts(kind),
        puts(_text("0")), puts(_text("cpu")), _integer(count if typed else dtype.nbytes(count)), puts(b"t"), b"Q", b"K\x00",
        _tuple(shape, puts), _tuple(tuple(s // dtype.bits for s in _strides(shape, dtype.bits)), puts), b"\x89",
        puts(b"ccollections\nOrderedDict\n"), b")", puts(b"R"),
    ]  # fmt: skip
    if not typed:
        out.append(puts(b"ctorch\n%s\n" % dtype.torch.encode()))
    return b"".join((*out, puts(b"t"), puts(b"R"), b"."))


class _Puts:
    """An opcode with a BINPUT behind it, numbered on."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, code: bytes) -> bytes:
        self._next += 1
        return code + b"q" + bytes([self._next - 1])


def _strides(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """torch's strides of a fresh tensor: a dimension of length 0 counts as one of length 1."""
    return tuple(c_strides(tuple(max(n, 1) for n in shape), bits))


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _tuple(values: tuple[int, ...], puts: _Puts) -> bytes:
    if not values:
        return b")"
    inside = b"".join(map(_integer, values))
    if len(values) <= 3:
        return inside + puts(bytes([0x84 + len(values)]))
    return b"(" + inside + puts(b"t")
