"""From the files of ranks to one checkpoint: each file read by itself, their parts put together into tensors.

    rank 0   │ w[0:2] │ b │        w   two chunks, one in each file          `Assembly.tensor` from parts
    rank 1   │ w[2:4] │ b │        b   one, if both are equal                `replicas`

A part is a box of the whole tensor, and the lazy tensor of a rank that has its elements. Parts with the same box are replicas. The
boxes that are left must cover the tensor exactly once. All tensors have one source, over the one store of the folder, so that
slices, conversions and sharded loads read exact ranges of several files, as they do for any tensor in pieces.

**What several ranks have in common** must be equal, or nobody could say which one is true. Nothing is read when a folder is
opened, and every replica is compared nevertheless:

1. Where each copy is all of its record, the archives know: records with the same checksum hold the same, and the first copy stands
   for all of them. `verify` holds every record against its checksum.
2. Where the checksums differ, the copies do. The tensor is listed, and reading any of it is refused, by its name.
3. Where they say nothing (views of a larger storage, a file without checksums), bytes that are read are read from every copy, and
   compared. Such a tensor lies in a store of its own (`Replicas`), over the files, so that every reader goes through it.

Bits are compared, so 0.0 is not -0.0, and a NaN is equal to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides, in_c_order
from holdfast.core.dtype import DType
from holdfast.core.leaves import name_tensors
from holdfast.core.opaque import Global
from holdfast.core.protocols import Description, Foreign, Request, Source, Stamp
from holdfast.core.tensor import PLAIN, LazyTensor, Traits
from holdfast.core.tiling import first_overlap, tiles
from holdfast.core.tree import Way, path_to, rebuild, refilled
from holdfast.core.value import Value, replace
from holdfast.engine.files import ViewTable
from holdfast.errors import LimitExceeded, MetadataError, ReplicasDiffer, Unsupported, located
from holdfast.formats.rank_files.recognise import some
from holdfast.formats.torch.zip import PickleReader, saved_archive
from holdfast.stores.virtual import Virtual, VirtualFile, tensor_stamp

STEP_NBYTES = 1 << 20
"""Bytes that are compared at a time: what is read for that is thrown away."""


class Copy(Value, frozen=True):
    rank: int
    tensor: LazyTensor


class ReplicaStorage(Storage, frozen=True, kw_only=True, eq=False):
    """What several ranks have, under a key that is no file; `ranges` are those of the first."""

    originals: tuple[LazyTensor, ...]

    @property
    def ranges(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(found for storage in self.originals[0].storages for found in storage.ranges)

    @property
    def copies(self) -> int:
        return len(self.originals)


class Replicas(Virtual):
    """The files of a folder; and entries that are read from all copies at once."""

    def __init__(self, source: Source) -> None:
        super().__init__(over=source.store)
        self.source: Source = source.over(self)
        """Reads both; what is assembled has this one."""
        self._known: dict[tuple[object, ...], Storage] = {}
        self.unequal: dict[str, str] = {}
        """Tensors whose copies are known to differ, with what is known."""

    def chunks(self, name: str, copies: Sequence[Copy]) -> tuple[Chunk, ...]:
        """Where the elements of equal copies are read from, in the coordinates of the copies. There is at least one copy."""
        first = copies[0].tensor
        if len(copies) == 1 or not first.size:
            return tuple(chunk.over(chunk.storage.moved(self)) for chunk in first.chunks)
        sums = [_checksum(copy.tensor) for copy in copies]
        if None not in sums:
            other = next((copy for copy, summed in zip(copies, sums, strict=True) if summed != sums[0]), None)
            if other is None:
                return tuple(chunk.over(chunk.storage.moved(self)) for chunk in first.chunks)
            self.unequal[name] = _message(copies[0].rank, other.rank)
            return (self._entry(name, copies, partial(_refuse, name, self.unequal[name])),)
        return (self._entry(name, copies, partial(_read, name, tuple(copies))),)

    def _entry(self, name: str, copies: Sequence[Copy], read: partial[None]) -> Chunk:
        """All elements in C order, little-endian, as content that is made when it is read. Tied names have one."""
        first = copies[0].tensor
        # What other names share, they share here: equal chunks of equal ranks are one entry.
        place = (first.dtype, first.shape, *((copy.rank, copy.tensor.chunks) for copy in copies))
        storage = self._known.get(place)
        if storage is None:
            stamp = partial(_stamp, tuple(copies))
            key = self.put(
                VirtualFile(first.nbytes, read, stamp, first.nbytes * len(copies)), f"replicas/{len(self._entries)}: {name}"
            )
            label, originals = f"{len(copies)} replicas of {name}", tuple(copy.tensor for copy in copies)
            storage = self._known[place] = ReplicaStorage(key, 0, first.nbytes, label=label, home=self, originals=originals)
        return Chunk(Box.whole(first.shape), storage, 0, c_strides(first.shape, first.dtype.bits))


def _message(first: int, other: int) -> str:
    return (
        f"ranks {first} and {other} have different values for the same elements, so they are no replicas, and nobody can say which "
        "one is meant; leave the tensor out (drop=), or take it from one rank's file"
    )


def _checksum(tensor: LazyTensor) -> tuple[object, ...] | None:
    """What is equal for two tensors with equal bits that lie alike; None where it cannot be known without reading."""
    if len(tensor.chunks) != 1:
        return None
    (chunk,) = tensor.chunks
    storage = chunk.storage
    dense = chunk.box.count * tensor.dtype.bits == storage.nbytes * 8 and chunk.extent(tensor.dtype) == (0, storage.nbytes)
    if storage.crc32 is None or not dense or not in_c_order(chunk.shape, chunk.strides, tensor.dtype.bits):
        return None
    return storage.crc32, storage.nbytes, storage.byteorder


def _refuse(name: str, message: str, start: int, out: memoryview) -> None:
    raise ReplicasDiffer(message, tensor=name)


def _read(name: str, copies: Sequence[Copy], start: int, out: memoryview) -> None:
    """Fill memory from the first copy, and compare with all others."""
    target = np.frombuffer(out, np.uint8)
    for at in range(0, len(target), STEP_NBYTES):
        part = target[at : at + STEP_NBYTES]
        part[:] = _bytes_of(copies[0].tensor, start + at, len(part))
        for copy in copies[1:]:
            if not np.array_equal(part, _bytes_of(copy.tensor, start + at, len(part))):
                raise ReplicasDiffer(_message(copies[0].rank, copy.rank), tensor=name)


def _bytes_of(tensor: LazyTensor, start: int, nbytes: int) -> np.ndarray:
    """Bytes of a tensor as it would lie in C order, little-endian."""
    chunk = tensor.chunks[0]
    plain = len(tensor.chunks) == 1 and chunk.storage.byteorder == "little" and chunk.offset % 8 == 0
    if plain and in_c_order(chunk.shape, chunk.strides, tensor.dtype.bits):
        out = np.empty(nbytes, np.uint8)
        tensor.source.store.read(chunk.storage.key, chunk.storage.start + chunk.offset // 8 + start, out.data)
        return out
    rows = tensor if tensor.shape else tensor[None]
    row_nbytes = rows.nbytes // rows.shape[0]
    first = start // row_nbytes
    wanted = rows[first : -(-(start + nbytes) // row_nbytes)]
    array = np.empty(wanted.shape, wanted.dtype.numpy)
    # As it is stored: whether the elements stand for their conjugates is said of the whole.
    wanted.source.read([Request(replace(wanted, traits=PLAIN), array)])
    content = array.reshape(-1).view(np.uint8)
    return content[start - first * row_nbytes :][:nbytes]


def _stamp(copies: Sequence[Copy]) -> Stamp:
    return tuple(tensor_stamp(copy.tensor) for copy in copies)


EXPLAINED = 1024
"""Parts of which two are looked for that overlap; the search is quadratic where all of them do."""


class RankFile(Value, frozen=True):
    """What one file holds; nothing of it was executed, and no tensor read."""

    rank: int
    key: str
    tree: object
    nbytes: int
    """Bytes of its pickle."""
    foreign: tuple[Foreign, ...] = ()


def read_rank(source: Source, rank: int, key: str) -> RankFile:
    """Read the pickle of one rank's file. Its tensors lie in the store of the folder, under the key of the file."""
    with located(file=key):
        archive = saved_archive(source, key)
        if archive.get("constants.pkl") is not None:
            raise Unsupported("a TorchScript archive is no rank's file")
        reader = PickleReader(source, key, archive)
        tree, nbytes = reader.read("data.pkl", "data/")
    foreign = tuple(replace(found, stream=f"{key}: {found.stream}") for found in reader.foreign())
    return RankFile(rank, key, tree, nbytes, foreign)


class RankBox(Value, frozen=True):
    """Elements of a tensor that a rank has."""

    rank: int
    box: Box
    """Where in the whole they are."""
    tensor: LazyTensor
    """They themselves, in the shape of the box."""


class Assembly:
    """Makes tensors out of the parts of ranks. What it makes has `source`."""

    def __init__(self, source: Source) -> None:
        self._replicas = Replicas(source)
        self.source = self._replicas.source
        self.replicated = 0
        """Tensors of which several ranks have copies."""

    @property
    def unequal(self) -> Mapping[str, str]:
        """Tensors whose replicas are known to differ without reading them; reading one raises `ReplicasDiffer`."""
        return self._replicas.unequal

    def tensor(
        self, name: str, dtype: DType, shape: tuple[int, ...], *, parts: Sequence[RankBox], traits: Traits = PLAIN
    ) -> LazyTensor:
        """The tensor that these are parts of. Raises `MetadataError`, by its name, where they do not cover it exactly once."""
        by_box: dict[Box, list[RankBox]] = {}
        for part in parts:
            if part.tensor.dtype is not dtype:
                raise MetadataError(
                    f"rank {part.rank} has a part of {part.tensor.dtype}, and the tensor is {dtype}", tensor=name,
                    expected=dtype.name, found=part.tensor.dtype.name,
                )  # fmt: skip
            if part.tensor.shape != part.box.shape:
                raise MetadataError(
                    f"rank {part.rank} has a part of {list(part.tensor.shape)} where the placement says {list(part.box.shape)}",
                    tensor=name, expected=part.box.shape, found=part.tensor.shape,
                )  # fmt: skip
            if part.tensor.traits.conj is not traits.conj or part.tensor.traits.neg is not traits.neg:
                raise MetadataError("parts of one tensor of which some are conjugated or negated", tensor=name)
            if part.tensor.traits.meta:
                raise Unsupported("a part that was saved on the meta device: it has a shape and no data", tensor=name)
            if part.box.count or not by_box:
                by_box.setdefault(part.box, []).append(part)
        filled = {box: copies for box, copies in by_box.items() if box.count} or by_box
        whole = Box.whole(shape)
        if not tiles(whole, filled):
            raise MetadataError(_uncovered(whole, filled), tensor=name, expected=shape)
        self.replicated += any(len(copies) > 1 for copies in filled.values())
        chunks: list[Chunk] = []
        for box, copies in filled.items():
            found = self._replicas.chunks(name, [Copy(part.rank, part.tensor) for part in copies])
            chunks += (Chunk(_moved(chunk.box, box.start), chunk.storage, chunk.offset, chunk.strides) for chunk in found)
        return LazyTensor("", dtype, shape, tuple(chunks), self.source, traits)

    def replica(self, name: str, copies: Sequence[tuple[int, LazyTensor]]) -> LazyTensor:
        """A tensor that every one of these ranks has whole."""
        rank, first = copies[0]
        for other, tensor in copies[1:]:
            if tensor.dtype is not first.dtype or tensor.shape != first.shape:
                raise MetadataError(
                    f"a plain tensor is {first.dtype} {list(first.shape)} on rank {rank} and {tensor.dtype} {list(tensor.shape)} "
                    f"on rank {other}: it is no replica, and nothing says how its parts go together",
                    tensor=name,
                    expected=first.shape,
                    found=tensor.shape,
                )
        if first.traits.meta:
            return first
        parts = [RankBox(rank, Box.whole(tensor.shape), tensor) for rank, tensor in copies]
        return self.tensor(name, first.dtype, first.shape, parts=parts, traits=first.traits)


def _moved(box: Box, origin: tuple[int, ...]) -> Box:
    return Box(
        tuple(a + o for a, o in zip(box.start, origin, strict=True)), tuple(b + o for b, o in zip(box.stop, origin, strict=True))
    )


def _uncovered(whole: Box, boxes: Mapping[Box, Sequence[RankBox]]) -> str:
    """Why boxes do not tile."""
    outside = next((box for box in boxes if not whole.contains(box)), None)
    if outside is not None:
        return f"the part of rank {boxes[outside][0].rank} lies outside of the tensor"
    ordered = list(boxes)
    pair = first_overlap(ordered) if len(ordered) <= EXPLAINED else None
    if pair is not None:
        first, second = (boxes[ordered[at]][0].rank for at in pair)
        return f"the parts of ranks {first} and {second} overlap and are not the same, so nobody can say which one is true"
    return "the parts of all ranks do not cover the tensor exactly once"


Leaf = Mapping[int, object]
"""What each rank has at one place; ranks that have nothing there are left out."""

Join = Callable[[str, Leaf], object]
"""What becomes of one place, by its dotted name and what each rank has there."""


FREE_STEPS = 10_000
"""Steps that are allowed however small the files."""

CHARACTERS_A_STEP = 16
"""Of a name: a key is stored once and stands in the name of everything below it."""


class Allowance:
    """Steps that going through the files may take: as many as they have bytes.

    Whatever many places refer to (a container, a mesh, a way of cutting) is stored once and gone through wherever it stands.
    """

    def __init__(self, files: Sequence[RankFile]) -> None:
        self._left = FREE_STEPS + sum(file.nbytes for file in files)

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise LimitExceeded("the files refer to the same things too often to be put together")


def in_step(files: Sequence[RankFile], join: Join, allowance: Allowance, *, depth: int) -> object:
    """One tree out of the trees of all ranks: containers as the first rank has them, leaves by `join`.

    A key that some ranks lack is a place, too. What is no dict, list or tuple on all of them is a leaf.
    """

    def inside(values: Leaf) -> Iterable[tuple[str, Leaf]] | None:
        allowance.spend(len(values))
        if all(isinstance(value, dict) for value in values.values()):
            allowance.spend(sum(map(len, cast("Collection[Collection[object]]", values.values()))))
        keys = _keys(values)
        return None if keys is None else ((_step(key), _at(values, key)) for key in keys)

    def made(values: Leaf, children: list[object], _: Way) -> object:
        first = next(iter(values.values()))
        if isinstance(first, dict):
            return refilled(first, dict(zip(_keys(values) or (), children, strict=True)))
        return children if isinstance(first, list) else tuple(children)

    def leaf(values: Leaf, way: Way) -> object:
        path = cast("tuple[str, ...]", path_to(way))
        allowance.spend(sum(map(len, path)) // CHARACTERS_A_STEP)
        return join(".".join(path), values)

    return rebuild({file.rank: file.tree for file in files}, leaf, inside=inside, make=made, depth=depth)


def _keys(values: Leaf) -> Collection[object] | None:
    """What leads on where all ranks have a dict, a list or a tuple; None for a leaf."""
    first, inside = next(iter(values.values())), cast("Collection[Collection[object]]", values.values())
    if isinstance(first, dict) and all(isinstance(value, dict) for value in inside):
        return dict.fromkeys(chain.from_iterable(inside))
    if type(first) in (list, tuple) and all(type(value) is type(first) for value in inside):
        return range(max(map(len, inside)))
    return None


def _at(values: Leaf, key: Any) -> Leaf:  # noqa: ANN401  # of a dict
    """What the ranks have under a key, those that have it."""
    inside = cast("Mapping[int, Any]", values)
    return {rank: one[key] for rank, one in inside.items() if (key in one if isinstance(one, dict) else key < len(one))}


def _step(key: object) -> str:
    return key if isinstance(key, str) else str(key) if type(key) is int else f"<{type(key).__name__}>"


def described(
    format: str, tree: object, files: Sequence[RankFile], *, source: Source, understood: Iterable[Global] = (),
    notes: Sequence[str] = (), metadata: Mapping[str, str] | None = None, unequal: Iterable[str] = (),
) -> Description:  # fmt: skip
    """The description of a folder. Globals that were `understood` are no longer foreign."""
    named = name_tensors(tree, source.limits, sum(file.nbytes for file in files))
    known = set(understood)
    foreign = tuple(_once(found for file in files for found in file.foreign if found.what not in known))
    differ = [repr(name[:80]) for name in unequal]
    refused = [f"the ranks have different values for {some(differ)}; reading {'it' if len(differ) == 1 else 'them'} is refused"]
    archives = tuple(file.key for file in files)
    told = (*notes, *(refused if differ else []), *named.notes)
    return Description(format, ViewTable(named.tensors), tree, foreign, told, metadata or {}, archives=archives)


def _once(found: Iterable[Foreign]) -> Iterator[Foreign]:
    """Each global once: all ranks mention the same."""
    seen: set[Global] = set()
    for one in found:
        if one.what not in seen:
            seen.add(one.what)
            yield one
