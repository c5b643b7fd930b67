"""Checkpoints whose tensors are holes: files of any size that take no room on disk.

The layout is the writers' own; only the data segments are left out. A hole reads as zeros, so the checksums are those of zeros.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from holdfast.core.chunk import Storage
from holdfast.core.crc import combine_crcs, crc32
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.saves import Data, FilePlan, Gathered, Late, Literal
from holdfast.engine.source import OpenSource
from holdfast.stores.virtual import Virtual, VirtualFile
from holdfast.verbs.shared.formats import LayoutOptions, plan_save
from holdfast.verbs.shared.state import tabulate_tree


def zeros_crc(nbytes: int) -> int:
    """The CRC-32 of so many zeros."""
    total, piece, length = 0, crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            total = combine_crcs(total, piece, length)
        nbytes >>= 1
        piece, length = combine_crcs(piece, piece, length), 2 * length
    return total


def fill_with_zeros(start: int, out: memoryview) -> None:
    out[:] = bytes(len(out))


def described(shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> State:
    """Describe tensors of zeros that take no memory."""
    source = OpenSource(Virtual("<zeros>"))
    row = DTYPES.name(dtype)
    assert row is not None
    tensors = {}
    for name, shape in shapes.items():
        nbytes = row.nbytes(math.prod(shape))
        source.store.put(VirtualFile(nbytes, fill_with_zeros), name)
        storage = Storage(name, 0, nbytes, home=source.store)
        tensors[name] = LazyTensor.contiguous(name, row, shape, storage, source)
    return tabulate_tree(tensors)


def write_holes(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> int:
    """A checkpoint of these tensors at `path`, all of them zeros; gives its length. The suffix says the format."""
    form = "torch-zip" if path.suffix == ".pt" else "safetensors"
    (file,) = plan_save(str(path), described(shapes, dtype), form, options=LayoutOptions()).files
    return write_around(path, file)


def write_around(path: Path, file: FilePlan) -> int:
    """Everything of a file but its data."""
    crcs = {s.label: zeros_crc(s.nbytes) for s in file.segments if isinstance(s, Data)}
    gathered: dict[int, bytes] = {}
    for segment, offset in zip(file.segments, file.offsets(), strict=True):
        if isinstance(segment, Gathered):
            gathered[offset], gathered_crcs = segment.make()
            crcs |= gathered_crcs
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.ftruncate(descriptor, file.nbytes)
        for segment, offset in zip(file.segments, file.offsets(), strict=True):
            match segment:
                case Literal(data):
                    os.pwrite(descriptor, data, offset)
                case Gathered():
                    os.pwrite(descriptor, gathered[offset], offset)
                case Late():
                    os.pwrite(descriptor, segment.make(crcs), offset)
    finally:
        os.close(descriptor)
    return file.nbytes
