"""`Digest`: what a tensor holds, in a few bytes, whatever file, sharding, strides or byte order it is stored in.

The checksum is the CRC-32 of the elements in C order and little-endian, packed types packed, conjugation and negation resolved.
It answers "certainly different?" and "damaged?"; two tensors with one digest are the same but for one chance in four billion, and
for a file that was made to deceive.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.value import Value

NO_DATA = "meta"


class Digest(Value, frozen=True):
    """The dtype, the shape and the CRC-32 of a tensor's elements. Make one with `Digest.from_crc32`.

    A tensor on the meta device has no elements, and no checksum: it equals any such tensor of its dtype and shape.
    """

    dtype: DType
    shape: tuple[int, ...]
    crc32: int | None

    @classmethod
    def from_crc32(cls, dtype: DType, shape: tuple[int, ...], crc32: int | None) -> Digest:
        """The digest under the one name that equal content has in every format."""
        return cls(*canonicalize(dtype, shape), crc32)

    def __str__(self) -> str:
        """
        >>> str(Digest.from_crc32(DTYPES.name("float32"), (4096, 4096), 0x1A2B3C4D))
        'float32[4096,4096]:1a2b3c4d'
        """
        return f"{self.dtype}[{','.join(map(str, self.shape))}]:{self.checksum}"

    @property
    def checksum(self) -> str:
        return NO_DATA if self.crc32 is None else f"{self.crc32:08x}"


def canonicalize(dtype: DType, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    """The dtype and shape that stand for all ways of saying the same. torch has pairs of 4-bit floats where safetensors has the
    4-bit floats themselves: twice as many, in the same bytes."""
    single = DTYPES.name("float4_e2m1fn")
    if dtype.name == "float4_e2m1fn_x2" and single is not None:
        return single, ((*shape[:-1], 2 * shape[-1]) if shape else (2,))
    return dtype, shape


def combine_digests(digests: Mapping[str, Digest]) -> str:
    """One digest of many named tensors, whatever their order: 32 hexadecimal digits. blake2b over one line a name, sorted. Each
    line is a JSON array, so that no name can pose as another line."""
    import hashlib
    import json

    lines = sorted(
        json.dumps([name, d.dtype.name, list(d.shape), d.checksum]) for name, d in digests.items()
    )
    return hashlib.blake2b("\n".join(lines).encode("ascii"), digest_size=16).hexdigest()
