"""How a tensor with zeros is best packed: what each encoding would take, by what was counted of it (`numeric/zeros.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32
from holdfast.core.limits import Limits
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import Unsupported
from holdfast.numeric.pack import (
    BAND_ELEMENTS,
    LARGEST_M,
    Encoding,
    as_bits,
    encoding_of,
    group_count,
    group_rows,
    matrix_shape,
    position_bits,
    where_total,
)
from holdfast.numeric.zeros import PATTERNS, BitCounts, BlockCounts, whole_patterns


class AllowedEncodings(Value, frozen=True):
    kinds: frozenset[str]
    pattern: tuple[int, int] | None = None
    """N:M that is asked for, instead of those that are found."""
    block: tuple[int, int] | None = None


def parse_wanted(sparse: str) -> AllowedEncodings | None:
    """What a caller asks for: `never`, `auto`, `bitmap`, `nm`, `block`, a pattern (`2:4`) or a block shape (`16x16`).

    >>> parse_wanted("2:4").pattern, parse_wanted("never")
    ((2, 4), None)
    """
    if sparse == "never":
        return None
    found = re.fullmatch(r"(\d{1,4})([:x])(\d{1,4})", sparse) if isinstance(sparse, str) else None
    if found is not None:
        pair = int(found[1]), int(found[3])
        if found[2] == "x" and min(pair) > 0:
            return AllowedEncodings(frozenset({"block"}), block=pair)
        if found[2] == ":" and 1 <= pair[0] < pair[1] <= LARGEST_M:
            return AllowedEncodings(frozenset({"nm"}), pattern=pair)
    match sparse:
        case "auto":
            return AllowedEncodings(frozenset({"bitmap", "nm", "block"}))
        case "bitmap" | "nm" | "block":
            return AllowedEncodings(frozenset({sparse}))
    known = "never, auto, bitmap, nm, block, a pattern of at most 16 such as 2:4, or a block shape such as 16x16"
    raise Unsupported(f"sparse={sparse!r} is none of {known}", found=sparse)


def useful_patterns(tensor: LazyTensor, wanted: AllowedEncodings) -> dict[int, int]:
    """The `m` that are looked for in a tensor, and how many of a group may have a bit that it pays.

    Positions that take more than a bit an element are not smaller than a bitmap.
    """
    if "nm" not in wanted.kinds:
        return {}
    found = whole_patterns(tensor.shape, [wanted.pattern[1]] if wanted.pattern else PATTERNS)
    return {m: m // position_bits(m) if "bitmap" in wanted.kinds else m - 1 for m in found}


def row_groups(tensor: LazyTensor) -> list[tuple[int, int]]:
    """Ranges of whole rows in which blocks are counted; none where rows are too long for them."""
    columns = matrix_shape(tensor.shape)[1]
    step = group_rows(columns) * columns
    return [(start, min(start + step, tensor.size)) for start in range(0, tensor.size, step)] if step else []


def have_blocks(found: BlockCounts, worth: float) -> bool:
    """Whether blocks of any shape would pay among the elements that were looked at."""
    return any(height * width * count < worth * found.elements for (height, width), count in found.counts.items())


def smallest_encoding(
    tensor: LazyTensor, wanted: AllowedEncodings, worth: float, *, bits: BitCounts, blocks: BlockCounts | None
) -> Encoding | None:
    """The encoding that takes the fewest bytes, or None where none is worth it. That of given blocks is not counted, and may be."""
    if wanted.block is not None:
        rows, columns = matrix_shape(tensor.shape)
        height, width = wanted.block
        fits = height <= rows and width <= columns and height * columns <= BAND_ELEMENTS
        return encoding_of("block", wanted.block, tensor.shape) if fits else None
    found = [(packed_nbytes(encoding, values, tensor), encoding) for encoding, values in _candidates(tensor, wanted, bits, blocks)]
    return min((each for each in found if pays(each[0], tensor, worth)), key=lambda each: each[0], default=(0, None))[1]


def _candidates(
    tensor: LazyTensor, wanted: AllowedEncodings, bits: BitCounts, blocks: BlockCounts | None
) -> Iterator[tuple[Encoding, int]]:
    """Encodings, and how many values each would have."""
    if "bitmap" in wanted.kinds:
        yield encoding_of("bitmap", (), tensor.shape), bits.filled
    for m, useful in useful_patterns(tensor, wanted).items():
        n = bits.most[m]
        if wanted.pattern:
            n = wanted.pattern[0] if n <= wanted.pattern[0] else m
        # With more than is useful, nobody looked on: there may be groups with even more.
        if n <= min(useful, m - 1):
            encoding = encoding_of("nm", (n, m), tensor.shape)
            yield encoding, encoding.most(tensor.size)
    for shape, count in blocks.counts.items() if blocks is not None else ():
        encoding = encoding_of("block", shape, tensor.shape)
        yield encoding, count * encoding.unit


def packed_nbytes(encoding: Encoding, values: int, tensor: LazyTensor) -> int:
    starts = (group_count(encoding) + 1) * 8 if encoding.counted else 0
    return tensor.dtype.nbytes(values) + where_total(encoding) + starts


def pays(nbytes: int, tensor: LazyTensor, worth: float) -> bool:
    """Whether a packed tensor is small enough, and not so small that a reader would have to believe too much."""
    return nbytes < worth * tensor.nbytes <= worth * Limits().sparse_expansion * nbytes


class GroupSums:
    """How many values each group of an encoding has, and the CRC-32 of its dense bytes. Blocks are whole groups."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._counts, self._crcs = np.zeros((2, group_count(encoding)), np.int64)

    def add(self, start: int, values: np.ndarray) -> None:
        bits, size = as_bits(values), self._encoding.group
        for group, at in enumerate(range(0, len(bits), size), start // size):
            dense = bits[at : at + size]
            self._counts[group], self._crcs[group] = self._encoding.count_values(dense), crc32(dense.view(np.uint8).data)

    def result(self) -> tuple[Ints, Ints]:
        return self._counts, self._crcs
