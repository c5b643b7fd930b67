"""Put the elements of one tooth where they belong: out of fetched bytes, into a part of the target array."""

from __future__ import annotations

import numpy as np

from holdfast.core.chunk import Chunk
from holdfast.core.dtype import DType

__all__ = ["place"]


def place(chunk: Chunk, dtype: DType, fetched: memoryview, start: int, target: np.ndarray) -> None:
    """Copy the chunk's elements from `fetched`, which begins at byte `start` of the file, into `target` (same shape)."""
    offset = (chunk.storage.start - start) * 8 + chunk.offset
    if dtype.packed:
        target[...] = unpack(chunk, dtype, fetched, offset)
        return
    shape, strides = chunk.shape, tuple(s // 8 for s in chunk.strides)
    unit = dtype.swap_nbytes
    if chunk.storage.byteorder == "little" or unit == 1:
        target[...] = np.ndarray(shape, dtype.numpy, fetched, offset // 8, strides)
        return
    # Reverse the bytes of each unit. Arrays of bytes, since numpy cannot byte-swap the types of ml_dtypes.
    units = dtype.bits // 8 // unit
    # Without the dimensions of length 1: two more are added here, and numpy stops at 64.
    lengths = tuple(n for n in shape if n != 1)
    steps = tuple(s for n, s in zip(shape, strides, strict=True) if n != 1)
    swapped = np.ndarray((*lengths, units, unit), np.uint8, fetched, offset // 8, (*steps, unit, 1))[..., ::-1]
    target[...] = np.ascontiguousarray(swapped).reshape(-1).view(dtype.numpy).reshape(shape)


def unpack(chunk: Chunk, dtype: DType, fetched: memoryview, offset: int) -> np.ndarray:
    """Elements narrower than a byte, one byte each; the lowest bits of a byte are its first element."""
    positions = np.full(chunk.shape, offset, np.int64)
    for d, (n, s) in enumerate(zip(chunk.shape, chunk.strides, strict=True)):
        steps = np.arange(n, dtype=np.int64) * s
        positions += steps.reshape([-1 if i == d else 1 for i in range(len(chunk.shape))])
    content = np.frombuffer(fetched, np.uint8)
    low = content[positions >> 3].astype(np.uint16)
    following = np.minimum((positions >> 3) + 1, len(content) - 1)
    wide = low | (content[following].astype(np.uint16) << 8)
    values = (wide >> (positions & 7).astype(np.uint16)) & np.uint16((1 << dtype.bits) - 1)
    return np.asarray(values).astype(np.uint8).view(dtype.numpy)
