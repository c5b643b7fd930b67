"""`Digest`: what identifies the content of a tensor, in a few bytes.

The digest does not depend on the file, the sharding, the strides or the byte order in which a
tensor is stored. Its checksum is the CRC-32 of the elements in C order and little-endian. Packed
types are packed, and the conjugation and negation of torch's lazy views are carried out first.

Different digests prove that tensors differ. Equal digests prove nothing against a file that was
made to deceive. Without an attacker, two different tensors have the same CRC with a probability of
one in four billion.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.value import Value

NO_DATA = "meta"
"""Stands in place of the checksum of a tensor that has no data."""


class Digest(Value, frozen=True):
    """The dtype, the shape and the CRC-32 of the elements of a tensor.

    >>> str(Digest.from_crc32(DTYPES.name("float32"), (4096, 4096), 0x1A2B3C4D))
    'float32[4096,4096]:1a2b3c4d'
    """

    dtype: DType
    shape: tuple[int, ...]
    crc32: int | None
    """None for a tensor on the meta device, which has no elements."""

    @classmethod
    def from_crc32(cls, dtype: DType, shape: tuple[int, ...], crc32: int | None) -> Digest:
        """Return the digest of a tensor, which is the same for equal content in every format.

        Args:
            dtype: The dtype as the format calls it.
            shape: The shape in units of that dtype.
            crc32: The CRC-32 of the elements, or None if there is no data.
        """
        return cls(*canonicalize(dtype, shape), crc32)

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.shape))
        return f"{self.dtype}[{lengths}]:{self.checksum}"

    @property
    def checksum(self) -> str:
        """The CRC-32 as eight hexadecimal digits, or `meta` for a tensor without data."""
        if self.crc32 is None:
            return NO_DATA
        return f"{self.crc32:08x}"


def canonicalize(dtype: DType, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    """Return one dtype and shape for tensors that formats describe in different ways.

    torch has a dtype for pairs of 4-bit floats. safetensors has one for the 4-bit floats
    themselves, so the same bytes have twice as many elements there.
    """
    float4 = DTYPES.name("float4_e2m1fn")
    if dtype.name != "float4_e2m1fn_x2" or float4 is None:
        return dtype, shape
    if not shape:
        return float4, (2,)
    return float4, (*shape[:-1], 2 * shape[-1])


def combine_digests(digests: Mapping[str, Digest]) -> str:
    """Return one digest of many named tensors, whatever their order.

    Returns:
        The blake2b hash of a sorted list with a line for each tensor, as 32 hexadecimal digits.
    """
    # Imported here, because only a few calls need them, and `import holdfast` must stay fast.
    import hashlib
    import json

    lines = []
    for name, digest in digests.items():
        # A JSON array escapes line breaks, so that no name can imitate another line.
        fields = [name, digest.dtype.name, list(digest.shape), digest.checksum]
        lines.append(json.dumps(fields))
    text = "\n".join(sorted(lines))
    return hashlib.blake2b(text.encode("ascii"), digest_size=16).hexdigest()
