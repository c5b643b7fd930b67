"""Which tensors are worth packing, and how: by counting, in parallel, in bounded memory.

1. Every tensor is counted: how many elements have a bit, and how many of every m along the last axis at the most. A tensor with too
   few zeros is done.
2. The rest is looked at in blocks of some shapes: in some groups of rows, and in all of them where some would pay.
3. Of all encodings the smallest is taken, if it saves enough (`smallest_encoding`). Its groups are counted and summed.

A tensor is packed when it is written. Marks, values and starts are lazy tensors over storages that exist nowhere (`Packed`), as in
`computed.py`: reading a range reads the groups behind it and packs them. A plan knows every length, so the values of each group are
counted before; a group that changed since then is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
from msgspec import Struct

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Storage
from holdfast.core.crc import Sums, crc32
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.group import ALONE, Ranks, share_out
from holdfast.core.limits import Limits
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.blocks import contiguous_bytes, mapped_bytes
from holdfast.engine.computed import read_flat
from holdfast.engine.digest import recorded_crc
from holdfast.engine.scan import BLOCK_ELEMENTS, blocks, scan
from holdfast.engine.source import Sourced
from holdfast.engine.threads import computing
from holdfast.errors import Corrupted, StoreError, Unsupported
from holdfast.numeric.pack import (
    BAND_ELEMENTS,
    LARGEST_M,
    Elements,
    Encoding,
    SparseParts,
    as_bits,
    element_type,
    encoding_of,
    group_count,
    group_rows,
    matrix_shape,
    position_bits,
    spread,
    where_total,
)
from holdfast.numeric.zeros import PATTERNS, BitCounts, BlockCounts, whole_patterns
from holdfast.stores.virtual import VirtualFile, tensor_stamp

SMALLEST_NBYTES = (
    4096  # Smaller tensors are not packed: the entries in the header would take what is saved.
)
LARGEST_SHARE = 0.95  # The part of the dense bytes that a packed tensor may take at the most.
SAMPLED_GROUPS = 8  # Groups of rows of a tensor in which blocks are looked for first.


def choose(
    tensors: Mapping[str, LazyTensor], wanted: AllowedEncodings, *, smallest: int = SMALLEST_NBYTES, worth: float = LARGEST_SHARE,
    threads: int | None = None, ranks: Ranks = ALONE,
) -> dict[str, SparseParts]:  # fmt: skip
    """The tensors that are better packed, each with its parts. Reads every tensor at least once; of several ranks each reads some.
    Raises `Corrupted` where a tensor is packed that has not the checksum that its source records."""
    workers = threads or max((os.cpu_count() or 1) // ranks.neighbours(), 1)
    every = {name: tensor for name, tensor in tensors.items() if _possible(tensor, smallest)}
    names, whole = [*every], [*every.values()]

    def count(numbers: list[int]) -> list[CountedGroups | None]:
        return _chosen([whole[number] for number in numbers], wanted, worth, workers=workers)

    counted = share_out(
        ranks,
        [tensor.nbytes for tensor in whole],
        count,
        cast("type[CountedGroups | None]", CountedGroups | None),
    )
    packed, made = Packed(), dict[str, SparseParts]()
    for name, tensor, found in zip(names, whole, counted, strict=True):
        if found is not None:
            encoding = encoding_of(found.encoding, found.sizes, tensor.shape)
            starts, crcs = (
                np.frombuffer(found.starts, np.uint64),
                np.frombuffer(found.crcs, np.uint32),
            )
            made[name] = packed.parts(Counted(tensor, encoding, starts, crcs))
    return made


class CountedGroups(Struct):
    """The encoding that was chosen for a tensor, and what was counted of its groups, as it is sent."""

    encoding: str
    sizes: tuple[int, ...]
    starts: bytes
    crcs: bytes


def _chosen(
    every: Sequence[LazyTensor], wanted: AllowedEncodings, worth: float, *, workers: int
) -> list[CountedGroups | None]:
    # A multiple of every m.
    step = BLOCK_ELEMENTS // LARGEST_M * (wanted.pattern[1] if wanted.pattern else LARGEST_M)
    bits = scan(
        every,
        lambda at: BitCounts(useful_patterns(every[at], wanted)),
        lambda at: blocks(every[at].size, step),
        threads=workers,
    )
    promising = [at for at, found in enumerate(bits) if found.filled < worth * every[at].size]
    look_for_blocks = "block" in wanted.kinds and wanted.block is None
    filled = _count_blocks(every, promising if look_for_blocks else (), worth, threads=workers)
    shares = {
        at: smallest_encoding(every[at], wanted, worth, bits=bits[at], blocks=filled.get(at))
        for at in promising
    }
    chosen = [(at, encoding) for at, encoding in shares.items() if encoding is not None]
    made: list[CountedGroups | None] = [None] * len(every)
    for (at, _), ready in zip(
        chosen, _counted([(every[at], encoding) for at, encoding in chosen], workers), strict=True
    ):
        # Of a block shape that was asked for, the size is known only now.
        if pays(
            packed_nbytes(ready.encoding, int(ready.starts[-1]), ready.tensor), ready.tensor, worth
        ):
            own = ready.encoding
            made[at] = CountedGroups(
                own.name, own.sizes, ready.starts.tobytes(), ready.crcs.tobytes()
            )
    return made


def _possible(tensor: LazyTensor, smallest: int) -> bool:
    return (
        not tensor.dtype.packed
        and not tensor.traits.meta
        and tensor.size > 0
        and tensor.nbytes >= smallest
    )


def _count_blocks(
    every: Sequence[LazyTensor], numbers: Sequence[int], worth: float, *, threads: int
) -> dict[int, BlockCounts]:
    """The blocks of tensors, by their numbers, in which some groups of rows from all over them have blocks that would pay."""
    groups = {number: row_groups(every[number]) for number in numbers}
    sampled = {number: own[:: max(len(own) // SAMPLED_GROUPS, 1)] for number, own in groups.items()}
    found = {number: BlockCounts(every[number]) for number in numbers}

    def count(wanted: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        own, cuts = [*wanted], [*wanted.values()]
        scan(
            [every[number] for number in own],
            lambda at: found[own[at]],
            cuts.__getitem__,
            threads=threads,
        )

    count(sampled)
    blocky = [number for number in numbers if have_blocks(found[number], worth)]
    count({number: sorted({*groups[number]} - {*sampled[number]}) for number in blocky})
    return {number: found[number] for number in blocky}


def _counted(chosen: Sequence[tuple[LazyTensor, Encoding]], workers: int) -> list[Counted]:
    cuts = [
        blocks(tensor.size, run_length(tensor, encoding) * encoding.group)
        for tensor, encoding in chosen
    ]
    found = scan(
        [tensor for tensor, _ in chosen],
        lambda at: GroupSums(chosen[at][1]),
        cuts.__getitem__,
        threads=workers,
    )
    made = []
    for (tensor, encoding), (counts, crcs) in zip(chosen, found, strict=True):
        starts = np.concatenate(([0], counts)).cumsum(dtype=np.uint64)
        made.append(Counted(tensor, encoding, starts, crcs.astype(np.uint32)))
        recorded, crc = recorded_crc(tensor), made[-1].crc32()
        if recorded is not None and recorded != crc:
            chunk = tensor.chunks[0]
            raise Corrupted(
                "the source does not have the checksum that it records; nothing was written",
                file=chunk.storage.key, tensor=tensor.name, offset=chunk.storage.start, expected=recorded, found=crc,
            )  # fmt: skip
    return made


RUN_NBYTES = 1 << 19
"""Dense bytes that are read and packed at once, where groups are smaller than that: what a core's cache holds, in calls long enough
that threads do not wait for each other's turn at the interpreter."""


class Counted(Value, frozen=True):
    tensor: LazyTensor
    encoding: Encoding
    starts: np.ndarray  # Values before each group, and in all.
    crcs: np.ndarray  # CRC-32 of the dense bytes of each group.

    @property
    def width(self) -> int:
        return self.tensor.dtype.bits // 8

    def crc32(self) -> int:
        sums = Sums()
        for group, crc in enumerate(self.crcs.tolist()):
            sums.note(
                group * self.encoding.group * self.width,
                spread(self.encoding, group) * self.width,
                crc,
            )
        return sums.crc32()


def read_elements(tensor: LazyTensor, start: int, stop: int) -> Elements:
    """The elements [start, stop) of a tensor in C order as patterns of bits; over its own memory where it is in this process."""
    width = tensor.dtype.bits // 8
    memory = mapped_bytes(tensor)
    if memory is not None:
        return np.frombuffer(memory[start * width : stop * width], element_type(width))
    place = contiguous_bytes(tensor)
    if place is None:
        return read_flat(tensor, start, stop).view(element_type(width))
    out = np.empty(stop - start, element_type(width))
    tensor.source.store.read(place[0], place[1] + start * width, out.view(np.uint8).data)
    return out


def _runs(
    tensor: LazyTensor, encoding: Encoding, first: int, *, last: int
) -> Iterator[tuple[int, Elements]]:
    """The dense elements of groups [first, last), in runs of groups: the first of each, and their elements."""
    run = run_length(tensor, encoding)
    for begin in range(first, last, run):
        end = min((begin + run) * encoding.group, last * encoding.group, encoding.count)
        yield begin, read_elements(tensor, begin * encoding.group, end)


def run_length(tensor: LazyTensor, encoding: Encoding) -> int:
    return max(RUN_NBYTES // tensor.dtype.nbytes(encoding.group), 1)


ReadPart = Callable[[Counted, int, memoryview], None]


class Packed(Sourced):
    """A store of packed parts, and the source that reads them."""

    def __init__(self) -> None:
        super().__init__("<packed>")
        self._count = 0

    def parts(self, counted: Counted) -> SparseParts:
        encoding, count, crc = counted.encoding, int(counted.starts[-1]), counted.crc32()
        # With the checksum, so that a conversion that is resumed does not take a part of other elements for its own.
        number, self._count = f"{self._count} {crc:08x}", self._count + 1
        values = self._part(
            f"{number} values", counted, counted.tensor.dtype, count, self._read_values
        )
        where = self._part(
            f"{number} where", counted, _plain("uint8"), where_total(encoding), self._read_where
        )
        starts = self._part(
            f"{number} starts", counted, _plain("uint64"), len(counted.starts), _read_starts
        )
        return SparseParts(encoding, crc, values, where, starts if encoding.counted else None)

    def _part(
        self, key: str, counted: Counted, dtype: DType, count: int, read: ReadPart
    ) -> LazyTensor:
        nbytes = dtype.nbytes(count)
        self.put(
            VirtualFile(
                nbytes, partial(read, counted), stamp=partial(tensor_stamp, counted.tensor)
            ),
            key,
        )
        storage = Storage(key, 0, nbytes, label=counted.tensor.name, home=self)
        return LazyTensor.contiguous(counted.tensor.name, dtype, (count,), storage, self.source)

    def _read_values(self, counted: Counted, start: int, out: memoryview) -> None:
        stop, width = start + out.nbytes, counted.width
        bounds = counted.starts * np.uint64(width)
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, stop, side="left"))
        for group, dense in _runs(counted.tensor, counted.encoding, first, last=last):
            with computing():
                _check(counted, group, dense)
                _overlap(
                    counted.encoding.take(dense).view(np.uint8), int(bounds[group]), start, out
                )

    def _read_where(self, counted: Counted, start: int, out: memoryview) -> None:
        encoding = counted.encoding
        each = encoding.where_nbytes(encoding.group)
        first, last = start // each, -(-(start + out.nbytes) // each)
        # Where the marks of a group fill bytes, those of several are made at once.
        filled = encoding.where_nbytes(8 * encoding.group) == 8 * each
        for group, dense in _runs(counted.tensor, encoding, first, last=last):
            unit = len(dense) if filled else encoding.group
            with computing():
                _check(counted, group, dense)
                for at, begin in enumerate(range(0, len(dense), unit), group):
                    _overlap(encoding.mark(dense[begin : begin + unit]), at * each, start, out)


def _read_starts(counted: Counted, start: int, out: memoryview) -> None:
    out[:] = counted.starts.view(np.uint8).data[start : start + out.nbytes]


def _overlap(made: np.ndarray, at: int, start: int, out: memoryview) -> None:
    """Copy what `made`, which begins at byte `at` of a part, has of the range that `out` is from `start` on."""
    low, high = max(at, start), min(at + made.nbytes, start + out.nbytes)
    if low < high:
        out[low - start : high - start] = made[low - at : high - at].data


def _check(counted: Counted, first: int, dense: Elements) -> None:
    size = counted.encoding.group
    for group, at in enumerate(range(0, len(dense), size), first):
        if crc32(dense[at : at + size].view(np.uint8).data) != int(counted.crcs[group]):
            advice = (
                "it is not what it was when its zeros were counted; save when nobody writes to it"
            )
            raise StoreError(
                f"the tensor changed while it was saved: {advice}", tensor=counted.tensor.name
            )


def _plain(name: str) -> DType:
    dtype = DTYPES.name(name)
    if dtype is None:
        raise Unsupported(f"the table of dtypes has no {name}")
    return dtype


class AllowedEncodings(Value, frozen=True):
    kinds: frozenset[str]
    pattern: tuple[int, int] | None = (
        None  # N:M that is asked for, instead of those that are found.
    )
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
    """The `m` that are looked for in a tensor, and how many of a group may have a bit that it pays. Positions that take more than a
    bit an element are not smaller than a bitmap."""
    if "nm" not in wanted.kinds:
        return {}
    found = whole_patterns(tensor.shape, [wanted.pattern[1]] if wanted.pattern else PATTERNS)
    return {m: m // position_bits(m) if "bitmap" in wanted.kinds else m - 1 for m in found}


def row_groups(tensor: LazyTensor) -> list[tuple[int, int]]:
    """Ranges of whole rows in which blocks are counted; none where rows are too long for them."""
    columns = matrix_shape(tensor.shape)[1]
    step = group_rows(columns) * columns
    return (
        [(start, min(start + step, tensor.size)) for start in range(0, tensor.size, step)]
        if step
        else []
    )


def have_blocks(found: BlockCounts, worth: float) -> bool:
    """Whether blocks of any shape would pay among the elements that were looked at."""
    return any(
        height * width * count < worth * found.elements
        for (height, width), count in found.counts.items()
    )


def smallest_encoding(
    tensor: LazyTensor,
    wanted: AllowedEncodings,
    worth: float,
    *,
    bits: BitCounts,
    blocks: BlockCounts | None,
) -> Encoding | None:
    """The encoding that takes the fewest bytes, or None where none is worth it. That of given blocks is not counted, and may be."""
    if wanted.block is not None:
        rows, columns = matrix_shape(tensor.shape)
        height, width = wanted.block
        fits = height <= rows and width <= columns and height * columns <= BAND_ELEMENTS
        return encoding_of("block", wanted.block, tensor.shape) if fits else None
    found = [
        (packed_nbytes(encoding, values, tensor), encoding)
        for encoding, values in _candidates(tensor, wanted, bits, blocks)
    ]
    return min(
        (each for each in found if pays(each[0], tensor, worth)),
        key=lambda each: each[0],
        default=(0, None),
    )[1]


def _candidates(
    tensor: LazyTensor, wanted: AllowedEncodings, bits: BitCounts, blocks: BlockCounts | None
) -> Iterator[tuple[Encoding, int]]:
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
            self._counts[group], self._crcs[group] = (
                self._encoding.count_values(dense),
                crc32(dense.view(np.uint8).data),
            )

    def result(self) -> tuple[Ints, Ints]:
        return self._counts, self._crcs
