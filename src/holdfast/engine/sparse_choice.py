"""Which tensors are worth packing, and how: by counting, in parallel, in bounded memory.

1. Every tensor is counted: how many elements have a bit, and how many of every m along the last axis at the most. A tensor with too
   few zeros is done: nothing that follows could pay.
2. The rest is looked at in blocks of some shapes, from bits: eight elements a byte, and larger blocks from smaller ones.
3. Of all encodings the smallest is taken, if it saves enough. Its groups are counted and summed, for the plan and the checksum.

What is packed is packed when it is written. Marks, values and starts are lazy tensors over storages that exist nowhere (`Packed`),
as in `computed.py`: to read a range of one reads the groups behind it and packs them, in little memory. How many values each
group has is known before, because a plan knows every length; a group that is not what it was when it was counted is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from msgspec import Struct, field

from holdfast.core.chunk import Storage
from holdfast.core.crc import Sums, crc32
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.core.sparse.elements import Elements, are_set, count_set, element_type, set_bits
from holdfast.core.sparse.encoding import (
    BAND_ELEMENTS,
    LARGEST_M,
    Encoding,
    encoding_of,
    group_count,
    group_rows,
    matrix_shape,
    most_set,
    position_bits,
    spread,
    where_total,
)
from holdfast.core.sparse.storage import SparseParts
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.blocks import contiguous_bytes, mapped_bytes
from holdfast.engine.computed import read_flat
from holdfast.engine.digest import recorded_crc
from holdfast.engine.source import Sourced
from holdfast.engine.threads import computing, run_all
from holdfast.errors import Corrupted, StoreError, Unsupported, located
from holdfast.stores.virtual import VirtualFile, tensor_stamp

SMALLEST_NBYTES = 4096
"""Dense bytes below which nothing is packed: the entries of the parts in the header would take what is saved."""

LARGEST_SHARE = 0.95
"""The part of the dense bytes that a packed tensor may take at the most."""

PATTERNS = (2, 4, 8, 16)
"""The `m` that are looked for."""

SQUARES = (4, 8, 16, 32, 64)
LINES = (8, 16, 32, 64)
"""Sides of square blocks that are looked for, and lengths of blocks of one row or one column."""

TILE_ELEMENTS = 1 << 18
"""Elements that are counted at once: a multiple of every m, and little enough for a cache."""

SAMPLED_TILES = 8
"""Tiles of a tensor in which blocks are looked for first."""

TASK_NBYTES = 8 << 20
"""Work that one thread takes at a time."""


class AllowedEncodings(Value, frozen=True):
    """Which encodings may be used."""

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


class BitCounts(Struct):
    """What is known of one tensor while it is counted."""

    tensor: LazyTensor
    filled: dict[int, int] = field(default_factory=dict)
    """Number of a tile → elements of it that have a bit."""
    most: dict[int, list[int]] = field(default_factory=dict)
    """`m` → how many of a group have a bit at the most, a number a tile."""
    blocks: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    """Number of a tile of rows → by shape, blocks of it that have a bit."""


def choose(
    tensors: Mapping[str, LazyTensor],
    wanted: AllowedEncodings,
    *,
    smallest: int = SMALLEST_NBYTES,
    worth: float = LARGEST_SHARE,
    threads: int | None = None,
) -> dict[str, SparseParts]:
    """The tensors that are better packed, each with its parts. Reads every tensor at least once.

    Raises `Corrupted` where a tensor is packed that has not the checksum that its source records.
    """
    workers = threads or os.cpu_count() or 1
    counted = {name: BitCounts(t) for name, t in tensors.items() if _possible(t, smallest)}
    _run([task for found in counted.values() for task in _count_tasks(found, wanted)], workers)
    promising = {name: found for name, found in counted.items() if sum(found.filled.values()) < worth * found.tensor.size}
    if "block" in wanted.kinds and wanted.block is None:
        _run([task for found in promising.values() for task in _block_tasks(found, SAMPLED_TILES)], workers)
        blocky = [found for found in promising.values() if _has_blocks(found, worth)]
        _run([task for found in blocky for task in _block_tasks(found, None)], workers)
    packed = Packed()
    chosen: dict[str, SparseParts] = {}
    for name, found in promising.items():
        tensor = found.tensor
        pays = [each for each in _candidates(found, wanted) if _pays(each[0], tensor, worth)]
        if wanted.block is not None:
            pays = [(0, encoding) for encoding in _given_blocks(tensor, wanted.block)]
        if pays:
            _, encoding = min(pays, key=lambda each: each[0])
            ready = _tallied(tensor, encoding, workers)
            # Of a block shape that was asked for, the size is known only now.
            if _pays(_nbytes(encoding, int(ready.starts[-1]), tensor), tensor, worth):
                chosen[name] = packed.parts(ready)
    return chosen


def _pays(nbytes: int, tensor: LazyTensor, worth: float) -> bool:
    """Whether a packed tensor is small enough, and not so small that a reader would have to believe too much."""
    return nbytes < worth * tensor.nbytes <= worth * Limits().sparse_expansion * nbytes


def _possible(tensor: LazyTensor, smallest: int) -> bool:
    traits = tensor.traits
    return not tensor.dtype.packed and not traits.meta and tensor.size > 0 and tensor.nbytes >= smallest


def _run(work: Sequence[TileTask], workers: int) -> None:
    """Run pieces of work; a few small ones at once, which takes less time than to start threads."""
    if workers > 1 and sum(task.nbytes for task in work) > TASK_NBYTES // 8:
        run_all(work, workers)
        return
    for task in work:
        task()


class TileTask(Value, frozen=True):
    """Looks at some tiles of a tensor."""

    tensor: LazyTensor
    look: Callable[[int], None]
    numbers: range
    nbytes: int

    def __call__(self) -> None:
        with located(tensor=self.tensor.name):
            for number in self.numbers:
                self.look(number)


def _tasks(count: int, nbytes: int, look: Callable[[int], None], tensor: LazyTensor) -> list[TileTask]:
    """Calls of `look` with 0 to `count`, each of which reads `nbytes`, as pieces of work that are worth a hand-over."""
    step = max(TASK_NBYTES // nbytes, 1)
    ranges = [range(first, min(first + step, count)) for first in range(0, count, step)]
    return [TileTask(tensor, look, numbers, min(len(numbers) * nbytes, tensor.nbytes)) for numbers in ranges]


def _count_tasks(found: BitCounts, wanted: AllowedEncodings) -> list[TileTask]:
    tensor = found.tensor
    patterns = [wanted.pattern[1]] if wanted.pattern else list(PATTERNS)
    found.most = {m: [1] for m in patterns if "nm" in wanted.kinds and tensor.shape and tensor.shape[-1] % m == 0}
    size = TILE_ELEMENTS // LARGEST_M * patterns[0] if wanted.pattern else TILE_ELEMENTS
    # Positions that take more than a bit an element are not smaller than a bitmap.
    useful = {m: m // position_bits(m) if "bitmap" in wanted.kinds else m - 1 for m in found.most}

    def look(tile: int) -> None:
        values = read_elements(tensor, tile * size, min((tile + 1) * size, tensor.size))
        found.filled[tile] = count_set(values)
        # What other threads have found out by now is a bonus.
        alive = [m for m, most in found.most.items() if max(most) <= useful[m]]
        if alive:
            marked = are_set(values)
            octets = np.packbits(marked, bitorder="little")
            for m in alive:
                found.most[m].append(most_set(marked, octets, m))

    return _tasks(-(-tensor.size // size), tensor.dtype.nbytes(size), look, tensor)


def _block_tasks(found: BitCounts, most: int | None) -> list[TileTask]:
    """Look at the tiles of a tensor that were not looked at; at no more than `most`, from all over it."""
    tensor = found.tensor
    rows, columns = matrix_shape(tensor.shape)
    high = group_rows(columns)
    tiles = -(-rows // high) if high else 0
    wanted = [tile for tile in range(0, tiles, max(tiles // (most or tiles), 1) if tiles else 1) if tile not in found.blocks]

    def look(number: int) -> None:
        tile = wanted[number]
        top, bottom = tile * high, min((tile + 1) * high, rows)
        marked = are_set(read_elements(tensor, top * columns, bottom * columns)).reshape(-1, columns)
        found.blocks[tile] = count_blocks(marked, (min(high, rows), columns))

    return _tasks(len(wanted), max(tensor.dtype.nbytes(high * columns), 1), look, tensor)


def _has_blocks(found: BitCounts, worth: float) -> bool:
    """Whether blocks of any shape would pay in the tiles that were looked at. If not, no more are."""
    rows, columns = matrix_shape(found.tensor.shape)
    elements = sum(min(group_rows(columns), rows - tile * group_rows(columns)) * columns for tile in found.blocks)
    counts: dict[tuple[int, int], int] = {}
    for tile in found.blocks.values():
        for shape, count in tile.items():
            counts[shape] = counts.get(shape, 0) + count
    if any(height * width * count < worth * elements for (height, width), count in counts.items()):
        return True
    found.blocks.clear()
    return False


def count_blocks(marked: np.ndarray, most: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Blocks with anything in them, by their shape, of all shapes that are looked for and not larger than `most`.

    The booleans become bits, a row of a block of eight a byte; taller and wider blocks are unions of those.
    """
    padded = np.zeros((-(-marked.shape[0] // 64) * 64, -(-marked.shape[1] // 64) * 64), np.bool_)
    padded[: marked.shape[0], : marked.shape[1]] = marked
    octets = np.packbits(padded, axis=1, bitorder="little")
    counts: dict[tuple[int, int], int] = {}
    by_height = {1: octets}
    for height in (2, 4, 8, 16, 32, 64):
        below = by_height[height // 2]
        by_height[height] = below[::2] | below[1::2]
    for length in LINES:
        counts[1, length] = int(np.count_nonzero(octets.view(f"u{length // 8}")))
        counts[length, 1] = set_bits(by_height[length])
    for side in SQUARES:
        joined = by_height[side]
        if side == 4:
            counts[4, 4] = int(np.count_nonzero(joined & 0x0F)) + int(np.count_nonzero(joined & 0xF0))
        else:
            counts[side, side] = int(np.count_nonzero(joined.view(f"u{side // 8}")))
    return {shape: count for shape, count in counts.items() if shape[0] <= most[0] and shape[1] <= most[1]}


def _candidates(found: BitCounts, wanted: AllowedEncodings) -> Iterable[tuple[int, Encoding]]:
    """Encodings with the bytes that they would take."""
    tensor = found.tensor
    filled = sum(found.filled.values())
    if "bitmap" in wanted.kinds:
        yield _sized(encoding_of("bitmap", (), tensor.shape), filled, tensor)
    for m, most in found.most.items():
        n = max(most)
        if wanted.pattern:
            n = wanted.pattern[0] if n <= wanted.pattern[0] else m
        if n < m:
            encoding = encoding_of("nm", (n, m), tensor.shape)
            yield _sized(encoding, encoding.most(tensor.size), tensor)
    for shape in next(iter(found.blocks.values())) if found.blocks else ():
        count = sum(each[shape] for each in found.blocks.values())
        encoding = encoding_of("block", shape, tensor.shape)
        yield _sized(encoding, count * encoding.unit, tensor)


def _given_blocks(tensor: LazyTensor, shape: tuple[int, int]) -> list[Encoding]:
    """The encoding by blocks of a given shape, where they fit."""
    rows, columns = matrix_shape(tensor.shape)
    fits = shape[0] <= rows and shape[1] <= columns and shape[0] * columns <= BAND_ELEMENTS
    return [encoding_of("block", shape, tensor.shape)] if fits else []


def _sized(encoding: Encoding, values: int, tensor: LazyTensor) -> tuple[int, Encoding]:
    return _nbytes(encoding, values, tensor), encoding


def _nbytes(encoding: Encoding, values: int, tensor: LazyTensor) -> int:
    starts = (group_count(encoding) + 1) * 8 if encoding.counted else 0
    return tensor.dtype.nbytes(values) + where_total(encoding) + starts


def _tallied(tensor: LazyTensor, encoding: Encoding, workers: int) -> Counted:
    """Count and sum every group, and compare with what the source records."""
    groups = group_count(encoding)
    counts, crcs = np.zeros(groups + 1, np.uint64), np.zeros(groups, np.uint32)

    run = run_length(tensor, encoding)

    def look(number: int) -> None:
        for group, dense in groups_of(tensor, encoding, number * run, min((number + 1) * run, groups)):
            counts[group + 1], crcs[group] = encoding.count_values(dense), crc32(dense.view(np.uint8).data)

    _run(_tasks(-(-groups // run), tensor.dtype.nbytes(run * encoding.group), look, tensor), workers)
    made = Counted(tensor, encoding, np.cumsum(counts, dtype=np.uint64), crcs)
    recorded, found = recorded_crc(tensor), made.crc32()
    if recorded is not None and recorded != found:
        chunk = tensor.chunks[0]
        raise Corrupted(
            "the source does not have the checksum that it records; nothing was written",
            file=chunk.storage.key, tensor=tensor.name, offset=chunk.storage.start, expected=recorded, found=found,
        )  # fmt: skip
    return made


RUN_NBYTES = 1 << 19
"""Dense bytes that are read and packed at once, where groups are smaller than that: what a core's cache holds, in calls long enough
that threads do not wait for each other's turn at the interpreter."""


class Counted(Value, frozen=True):
    """What is known of a tensor that is to be packed."""

    tensor: LazyTensor
    encoding: Encoding
    starts: np.ndarray
    """Values before each group, and in all."""
    crcs: np.ndarray
    """CRC-32 of the dense bytes of each group."""

    @property
    def width(self) -> int:
        return self.tensor.dtype.bits // 8

    def crc32(self) -> int:
        """Of all dense bytes."""
        sums = Sums()
        for group, crc in enumerate(self.crcs.tolist()):
            sums.note(group * self.encoding.group * self.width, spread(self.encoding, group) * self.width, crc)
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


def groups_of(tensor: LazyTensor, encoding: Encoding, first: int, last: int) -> Iterator[tuple[int, Elements]]:
    """The dense elements of groups [first, last), several read at once."""
    for begin, dense in _runs(tensor, encoding, first, last=last):
        for at, start in enumerate(range(0, len(dense), encoding.group)):
            yield begin + at, dense[start : start + encoding.group]


def _runs(tensor: LazyTensor, encoding: Encoding, first: int, *, last: int) -> Iterator[tuple[int, Elements]]:
    """The same, in runs of groups: the first of each, and their elements."""
    run = run_length(tensor, encoding)
    for begin in range(first, last, run):
        end = min((begin + run) * encoding.group, last * encoding.group, encoding.count)
        yield begin, read_elements(tensor, begin * encoding.group, end)


def run_length(tensor: LazyTensor, encoding: Encoding) -> int:
    """Groups that are read at once."""
    return max(RUN_NBYTES // tensor.dtype.nbytes(encoding.group), 1)


ReadPart = Callable[[Counted, int, memoryview], None]


class Packed(Sourced):
    """A store of packed parts, and the source that reads them."""

    def __init__(self) -> None:
        super().__init__("<packed>")
        self._count = 0

    def parts(self, counted: Counted) -> SparseParts:
        """What is written in the place of a tensor."""
        encoding, count, crc = counted.encoding, int(counted.starts[-1]), counted.crc32()
        # With the checksum, so that a conversion that is resumed does not take a part of other elements for its own.
        number, self._count = f"{self._count} {crc:08x}", self._count + 1
        values = self._part(f"{number} values", counted, counted.tensor.dtype, count, self._read_values)
        where = self._part(f"{number} where", counted, _plain("uint8"), where_total(encoding), self._read_where)
        starts = self._part(f"{number} starts", counted, _plain("uint64"), len(counted.starts), _read_starts)
        return SparseParts(encoding, crc, values, where, starts if encoding.counted else None)

    def _part(self, key: str, counted: Counted, dtype: DType, count: int, read: ReadPart) -> LazyTensor:
        nbytes = dtype.nbytes(count)
        self.put(VirtualFile(nbytes, partial(read, counted), stamp=partial(tensor_stamp, counted.tensor)), key)
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
                _overlap(counted.encoding.take(dense).view(np.uint8), int(bounds[group]), start, out)

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
    """Whether the elements of groups, from `first` on, are those that were counted."""
    size = counted.encoding.group
    for group, at in enumerate(range(0, len(dense), size), first):
        if crc32(dense[at : at + size].view(np.uint8).data) != int(counted.crcs[group]):
            raise StoreError(
                "the tensor changed while it was saved: it is not what it was when its zeros were counted; save when nobody writes "
                "to it",
                tensor=counted.tensor.name,
            )


def _plain(name: str) -> DType:
    dtype = DTYPES.name(name)
    if dtype is None:
        raise Unsupported(f"the table of dtypes has no {name}")
    return dtype
