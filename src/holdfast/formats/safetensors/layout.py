"""What the numbers in a header must satisfy: dtypes that exist, shapes whose bytes are there, no hole and no overlap.

All arithmetic is on Python's integers, which do not overflow. One pass checks every entry; it is written for the
honest file, where the tensors lie in the order of the header, and leaves saying what is wrong to a second look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.errors import HeaderError, LimitExceeded, Truncated
from holdfast.formats.safetensors.header import PREFIX_NBYTES, Entry
from holdfast.formats.safetensors.strict_json import pointer, quoted

__all__ = ["addressable", "check_layout"]

BITS = {row.safetensors: row.bits for row in DTYPES.rows if row.safetensors is not None}
"""Bits of an element, by the code in the header."""

ADDRESSABLE = (1 << 63) - 1
"""The most bits in one tensor, and the last place in a file. numpy and the safetensors library stop near here, even for
tensors that are empty because another of their dimensions is 0."""


def addressable(shape: Sequence[int], bits: int) -> bool:
    """Whether 64-bit readers can hold a shape: the product of its dimensions, with 1 in place of 0, must not overflow.

    >>> addressable((1 << 62, 4, 0), 8)
    False
    """
    for n in shape:
        bits *= n or 1
        if bits > ADDRESSABLE:
            return False
    return True


def check_layout(entries: Mapping[str, Entry], data_nbytes: int, limits: Limits, *, file: str | None = None) -> None:
    """Check every entry, and that together they tile the data section of `data_nbytes` bytes exactly.

    Raises `HeaderError`, `LimitExceeded` for the rank, or `Truncated` where the data section is shorter than they say.
    """
    position = 0
    in_order = True
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        shape = entry.shape
        bits = BITS.get(entry.dtype, 0)
        # The rank before the product: that of a million long dimensions would take hours.
        if not bits or len(shape) > limits.rank or begin < 0 or end > ADDRESSABLE:
            _explain(name, entry, limits, file)
        count = bits
        for n in shape:
            if n < 0:
                _explain(name, entry, limits, file)
            count *= n
        # Equality also says that the elements fill whole bytes and that begin <= end.
        if count != (end - begin) * 8 or (not count and not addressable(shape, bits)):
            _explain(name, entry, limits, file)
        in_order = in_order and begin == position
        position = end
    if not in_order:
        position = _check_sorted(entries, file)
    if position > data_nbytes:
        raise Truncated(
            f"the header describes {position:,} bytes of tensors, the file has {data_nbytes:,}",
            file=file,
            expected=position,
            found=data_nbytes,
        )
    if position < data_nbytes:
        raise HeaderError(
            f"{data_nbytes - position:,} bytes follow the last tensor", file=file, expected=position, found=data_nbytes
        )


def _check_sorted(entries: Mapping[str, Entry], file: str | None) -> int:
    """The end of the last tensor, where the header has another order than the data; raises for holes and overlaps."""
    position = 0
    before = ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position:
            if begin < position:
                found = f"overlaps tensor {quoted(before)}, which ends at {position:,}"
            else:
                found = f"leaves a hole after byte {position:,} of the data"
            raise HeaderError(
                f"at {pointer(name, 'data_offsets', 0)}: {begin:,} {found}",
                file=file,
                tensor=name,
                offset=PREFIX_NBYTES,
                expected=position,
                found=begin,
            )
        position, before = end, name
    return position


def _explain(name: str, entry: Entry, limits: Limits, file: str | None) -> NoReturn:
    """Raise for an entry that cannot be true, naming the first field that shows it."""
    begin, end = entry.data_offsets
    bits = BITS.get(entry.dtype)
    if bits is None:
        _refuse(name, ("dtype",), f"there is no dtype {quoted(entry.dtype)}", file)
    if len(entry.shape) > limits.rank:
        raise LimitExceeded(
            f"at {pointer(name, 'shape')}: {len(entry.shape):,} dimensions are more than Limits(rank={limits.rank})",
            file=file,
            tensor=name,
            offset=PREFIX_NBYTES,
            expected=limits.rank,
            found=len(entry.shape),
        )
    for i, n in enumerate(entry.shape):
        if not 0 <= n <= ADDRESSABLE:
            _refuse(name, ("shape", i), f"{_shown(n)} is no length", file)
    for i, place in enumerate((begin, end)):
        if not 0 <= place <= ADDRESSABLE:
            _refuse(name, ("data_offsets", i), f"{_shown(place)} is no place in a file", file)
    if end < begin:
        _refuse(name, ("data_offsets", 1), f"the end {end:,} lies before the begin {begin:,}", file)
    if not addressable(entry.shape, bits):
        _refuse(name, ("shape",), f"{list(entry.shape)} of {entry.dtype} is more than any file can hold", file)
    count = bits
    for n in entry.shape:
        count *= n
    if count % 8:
        _refuse(name, ("shape",), f"{count:,} bits of {entry.dtype} do not fill whole bytes", file)
    _refuse(
        name,
        ("data_offsets",),
        f"{end - begin:,} bytes, but {list(entry.shape)} of {entry.dtype} takes {count // 8:,}",
        file,
    )


def _shown(number: int) -> str:
    return f"{number:,}" if abs(number) < 1 << 70 else f"a number of {number.bit_length():,} bits"


def _refuse(name: str, steps: tuple[str | int, ...], found: str, file: str | None) -> NoReturn:
    message = f"at {pointer(name, *steps)}: {found}"
    raise HeaderError(message, file=file, tensor=name, offset=PREFIX_NBYTES)
