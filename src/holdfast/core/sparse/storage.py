"""A storage whose bytes are made from packed parts when they are read."""

from __future__ import annotations

from holdfast.core.chunk import Storage
from holdfast.core.sparse.encoding import Encoding
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value


class SparseStorage(Storage, frozen=True, kw_only=True, eq=False):
    """The dense bytes of one chunk, under a key that is no file and no other chunk's; `crc32` and `nbytes` are theirs."""

    encoding: Encoding
    width: int
    """Bytes of an element."""
    values: Storage
    where: Storage
    starts: Storage | None = None

    @property
    def parts(self) -> tuple[Storage, ...]:
        """What is in the file."""
        return tuple(part for part in (self.values, self.where, self.starts) if part is not None)

    @property
    def ranges(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(found for part in self.parts for found in part.ranges)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that the parts take."""
        return sum(part.nbytes for part in self.parts)


class SparseParts(Value, frozen=True):
    """A tensor that is to be stored packed: what is written in its place."""

    encoding: Encoding
    crc32: int
    """Of the dense elements."""
    values: LazyTensor
    where: LazyTensor
    starts: LazyTensor | None


class Packing(Value, frozen=True):
    """How a tensor is stored, for people."""

    text: str
    """`bitmap`, `2:4`, `16x16`; several where its chunks differ."""
    stored_nbytes: int
    """What it takes, chunks that are not packed included."""


def packing_of(tensor: LazyTensor) -> Packing | None:
    """How a tensor is packed, or None where it lies as it is."""
    if tensor.file_range() is not None:
        return None
    texts: dict[str, None] = {}
    stored = 0
    for storage in tensor.storages:
        if isinstance(storage, SparseStorage):
            texts[_named(storage.encoding)] = None
            stored += storage.stored_nbytes
        else:
            stored += storage.nbytes
    return Packing("/".join(texts), stored) if texts else None


def _named(encoding: Encoding) -> str:
    return {"nm": ":", "block": "x"}.get(encoding.name, "").join(map(str, encoding.sizes)) or encoding.name
