"""`dequantize`: the numbers that quantised blocks stand for, as a tensor that decodes them when it is read.

As in `computed.py`, an ordinary lazy tensor over a storage that exists nowhere: reading a range of it reads the blocks behind that
range, and no others. So it slices, casts, compares and converts like any tensor, under any memory budget.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from holdfast.core.arguments import understood
from holdfast.core.blocks import BLOCKS, BlockType
from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.quantities import shown
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.computed import read_flat
from holdfast.engine.source import Sourced
from holdfast.errors import BadArgumentType, Unsupported
from holdfast.stores.virtual import VirtualFile, tensor_stamp

RUN_ELEMENTS = 1 << 18
"""Elements that are decoded at a time: what lies between the steps stays in the cache."""


@understood
def dequantize(tensor: LazyTensor) -> LazyTensor:
    """A tensor of quantised blocks (`tensor.traits.blocks`, as GGUF has them) as float32, decoded when it is read.

    One that is not quantised comes back as it is. Slice the result: of the blocks themselves, only a whole tensor can be decoded.
    """
    if not isinstance(tensor, LazyTensor):
        raise BadArgumentType(f"dequantize takes a lazy tensor, not {shown(tensor)}", found=tensor)
    return Dequantized().tensor(tensor)


class Dequantized(Sourced):
    """A store of decoded tensors, and the source that reads them."""

    def __init__(self) -> None:
        super().__init__("<dequantized>")

    def tensor(self, stored: LazyTensor) -> LazyTensor:
        """What a tensor stands for; itself, where it is in no blocks."""
        if stored.traits.blocks is None:
            return stored
        blocks = _known(stored)
        shape, dtype = blocks.shape(stored.shape), DTYPES.name("float32")
        if shape is None or dtype is None:
            message = (
                f"the last axis of {list(stored.shape)} is no row of {blocks.name} blocks: dequantize first, and slice the result"
            )
            raise Unsupported(message, tensor=stored.name)
        traits = replace(stored.traits, blocks=None, alias=None)
        if stored.traits.meta:
            return replace(stored, dtype=dtype, shape=shape, traits=traits)
        nbytes = stored.size // blocks.nbytes * blocks.elements * 4
        entry = VirtualFile(nbytes, Decoding(stored, blocks).read, stamp=partial(tensor_stamp, stored), read_nbytes=stored.nbytes)
        storage = Storage(self.put(entry), 0, nbytes, label=stored.name, home=self)
        return replace(LazyTensor.contiguous(stored.name, dtype, shape, storage, self.source), traits=traits)


class Decoding(Value, frozen=True, eq=False):
    """What makes one decoded tensor."""

    stored: LazyTensor
    blocks: BlockType

    def read(self, start: int, out: memoryview) -> None:
        """The bytes of the result from `start` on."""
        width, blocks = 4 * self.blocks.elements, self.blocks
        first, last = start // width, -(-(start + out.nbytes) // width)
        raw = read_flat(self.stored, first * blocks.nbytes, last * blocks.nbytes).reshape(-1, blocks.nbytes)
        run = max(RUN_ELEMENTS // blocks.elements, 1)
        for at in range(0, last - first, run):
            made = self.decoded(raw[at : at + run])
            begin = (first + at) * width - start
            low, high = max(begin, 0), min(begin + made.nbytes, out.nbytes)
            out[low:high] = made.data[low - begin : high - begin]

    def decoded(self, raw: np.ndarray) -> np.ndarray:
        if self.blocks.decode is None:
            raise _unknown(self.blocks, self.stored)
        with np.errstate(all="ignore"):  # a scale may be infinite, or no number
            return self.blocks.decode(raw).astype("<f4", copy=False).reshape(-1).view(np.uint8)


def _known(stored: LazyTensor) -> BlockType:
    """The type of a tensor's blocks, which can be decoded."""
    blocks = BLOCKS.get(stored.traits.blocks or "")
    if blocks is None or blocks.decode is None:
        raise _unknown(blocks, stored)
    if any(storage.byteorder == "big" for storage in stored.storages):
        raise Unsupported("quantised blocks in the byte order of a big-endian machine are read as they are, and not decoded",
                          tensor=stored.name)  # fmt: skip
    return blocks


def _unknown(blocks: BlockType | None, stored: LazyTensor) -> Unsupported:
    can = ", ".join(name for name, row in BLOCKS.items() if row.decode is not None)
    name = stored.traits.blocks if blocks is None else blocks.name
    return Unsupported(f"blocks of {name} are read as they are, and not decoded; {can} are", tensor=stored.name, found=name)
