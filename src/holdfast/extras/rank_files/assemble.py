"""From the files of ranks to one checkpoint: each file read by itself, their parts put together into tensors.

    rank 0   │ w[0:2] │ b │        w   two chunks, one in each file          `Assembly.tensor` from parts
    rank 1   │ w[2:4] │ b │        b   one, if both are equal                `replicas`

A part is a box of the whole tensor, with the lazy tensor of a rank. Parts with the same box are replicas. The distinct boxes must
cover the tensor exactly once. All tensors have one source, over the store of the folder.

**Replicas must be equal.** Opening reads no tensors, and every replica is compared nevertheless:

1. Where each copy is all of its record, the checksums of the archives are compared. If they are equal, the first copy is read.
   `verify` compares every record with its checksum.
2. If the checksums differ, the tensor is listed, and reading it is refused.
3. Without checksums (views of a larger storage, a file without them), a read reads all copies and compares them. Such a tensor lies
   in a store of its own (`Assembly`) over the files, so that every reader goes through it.

Bits are compared, so 0.0 is not -0.0, and a NaN is equal to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides, is_c_ordered
from holdfast.core.dtype import DType
from holdfast.core.leaves import name_tensors
from holdfast.core.opaque import Global
from holdfast.core.protocols import Description, Foreign, Request, Source, Stamp
from holdfast.core.tensor import PLAIN_TRAITS, LazyTensor, Traits
from holdfast.core.text import list_names
from holdfast.core.tiling import find_overlap, is_tiled_by
from holdfast.core.tree import (
    LinkedPath,
    copy_dict_with_items,
    expand_path,
    make_plain_container,
    rebuild,
)
from holdfast.core.value import Value, replace
from holdfast.engine.files import ViewTable
from holdfast.errors import LimitExceeded, MetadataError, ReplicasDiffer, Unsupported, error_context
from holdfast.formats.torch.zip import PickleReader, saved_archive
from holdfast.stores.virtual import Virtual, VirtualFile, tensor_stamp

STEP_NBYTES = 1 << 20


class ReplicaStorage(Storage, kw_only=True, eq=False):
    """Elements that several ranks have, under a key that is no file; `ranges` are those of the first rank."""

    originals: tuple[LazyTensor, ...]

    @property
    def ranges(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(found for storage in self.originals[0].storages for found in storage.ranges)

    @property
    def copies(self) -> int:
        return len(self.originals)


class Assembly(Virtual):
    """Makes tensors out of the parts of ranks.

    It is a store: the files of a folder, and entries that are read from all copies and compared.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(over=source.store)
        self.source: Source = source.with_store(self)
        """The source of all tensors."""
        self._known: dict[tuple[object, ...], Storage] = {}
        self.unequal: dict[str, str] = {}
        """Tensors whose copies are known to differ, with the message. Reading one raises it."""

    def _chunks(self, name: str, copies: Sequence[RankBox]) -> tuple[Chunk, ...]:
        """Chunks for the elements of equal copies, in the coordinates of the copies. There is at least one copy."""
        first = copies[0].tensor
        if len(copies) == 1 or not first.size:
            return tuple(
                chunk.with_storage(chunk.storage.with_home(self)) for chunk in first.chunks
            )
        sums = [_checksum(copy.tensor) for copy in copies]
        if None in sums:
            return (self._entry(name, copies, partial(_read, name, tuple(copies))),)
        other = next((i for i, checksum in enumerate(sums) if checksum != sums[0]), None)
        if other is None:
            return tuple(
                chunk.with_storage(chunk.storage.with_home(self)) for chunk in first.chunks
            )
        self.unequal[name] = _message(copies[0].rank, copies[other].rank)
        return (self._entry(name, copies, partial(_refuse, name, self.unequal[name])),)

    def _entry(self, name: str, copies: Sequence[RankBox], read: partial[None]) -> Chunk:
        originals = tuple(copy.tensor for copy in copies)
        first = originals[0]
        # What other names share, they share here: equal chunks of equal ranks are one entry.
        place = (first.dtype, first.shape, *((copy.rank, copy.tensor.chunks) for copy in copies))
        storage = self._known.get(place)
        if storage is None:

            def stamp() -> Stamp:
                return tuple(map(tensor_stamp, originals))

            entry = VirtualFile(first.nbytes, read, stamp, first.nbytes * len(copies))
            key = self.put(entry, f"replicas/{len(self._entries)}: {name}")
            label = f"{len(copies)} replicas of {name}"
            storage = self._known[place] = ReplicaStorage(
                key, 0, first.nbytes, label=label, home=self, originals=originals
            )
        return Chunk(Box.whole(first.shape), storage, 0, c_strides(first.shape, first.dtype.bits))

    def tensor(
        self,
        name: str,
        dtype: DType,
        shape: tuple[int, ...],
        *,
        parts: Sequence[RankBox],
        traits: Traits = PLAIN_TRAITS,
    ) -> LazyTensor:
        """The tensor of these parts. Raises `MetadataError`, with its name, where they do not cover it exactly once."""
        by_box: dict[Box, list[RankBox]] = {}
        for part in parts:
            if part.tensor.dtype is not dtype:
                message = (
                    f"rank {part.rank} has a part of {part.tensor.dtype}, and the tensor is {dtype}"
                )
                raise MetadataError(
                    message, tensor=name, expected=dtype.name, found=part.tensor.dtype.name
                )
            if part.tensor.shape != part.box.shape:
                raise MetadataError(
                    f"rank {part.rank} has a part of {list(part.tensor.shape)} where the placement says {list(part.box.shape)}",
                    tensor=name, expected=part.box.shape, found=part.tensor.shape,
                )  # fmt: skip
            if (
                part.tensor.traits.conj is not traits.conj
                or part.tensor.traits.neg is not traits.neg
            ):
                raise MetadataError(
                    "parts of one tensor of which some are conjugated or negated", tensor=name
                )
            if part.tensor.traits.meta:
                raise Unsupported(
                    "a part that was saved on the meta device: it has a shape and no data",
                    tensor=name,
                )
            if part.box.count or not by_box:
                by_box.setdefault(part.box, []).append(part)
        filled = {box: copies for box, copies in by_box.items() if box.count} or by_box
        whole = Box.whole(shape)
        if not is_tiled_by(whole, filled):
            raise MetadataError(_uncovered(whole, filled), tensor=name, expected=shape)
        chunks: list[Chunk] = []
        for box, copies in filled.items():
            found = self._chunks(name, copies)
            for chunk in found:
                start = [a + origin for a, origin in zip(chunk.box.start, box.start, strict=True)]
                chunks.append(
                    Chunk(
                        Box.from_offsets(start, chunk.box.shape),
                        chunk.storage,
                        chunk.offset,
                        chunk.strides,
                    )
                )
        return LazyTensor("", dtype, shape, tuple(chunks), self.source, traits)

    def replica(self, name: str, copies: Sequence[tuple[int, LazyTensor]]) -> LazyTensor:
        rank, first = copies[0]
        for other, tensor in copies[1:]:
            if tensor.dtype is not first.dtype or tensor.shape != first.shape:
                message = (
                    f"a plain tensor is {first.dtype} {list(first.shape)} on rank {rank} and {tensor.dtype} {list(tensor.shape)} "
                    f"on rank {other}: it is no replica, and nothing says how its parts go together"
                )
                raise MetadataError(message, tensor=name, expected=first.shape, found=tensor.shape)
        if first.traits.meta:
            return first
        parts = [RankBox(rank, Box.whole(tensor.shape), tensor) for rank, tensor in copies]
        return self.tensor(name, first.dtype, first.shape, parts=parts, traits=first.traits)


def _message(first: int, other: int) -> str:
    return (
        f"ranks {first} and {other} have different values for the same elements, so they are no replicas, and nobody can say which "
        "one is meant; leave the tensor out (drop=), or take it from one rank's file"
    )


def _checksum(tensor: LazyTensor) -> tuple[object, ...] | None:
    """A key that tensors with equal bits share; None where the archive has no checksum of exactly these elements."""
    if len(tensor.chunks) != 1:
        return None
    (chunk,) = tensor.chunks
    storage = chunk.storage
    fills_storage = chunk.box.count * tensor.dtype.bits == storage.nbytes * 8 and chunk.byte_range(
        tensor.dtype
    ) == (0, storage.nbytes)
    if (
        storage.crc32 is None
        or not fills_storage
        or not is_c_ordered(chunk.shape, chunk.strides, tensor.dtype.bits)
    ):
        return None
    return storage.crc32, storage.nbytes, storage.byteorder


def _refuse(name: str, message: str, start: int, out: memoryview) -> None:
    raise ReplicasDiffer(message, tensor=name)


def _read(name: str, copies: Sequence[RankBox], start: int, out: memoryview) -> None:
    target = np.frombuffer(out, np.uint8)
    for at in range(0, len(target), STEP_NBYTES):
        part = target[at : at + STEP_NBYTES]
        part[:] = _bytes_of(copies[0].tensor, start + at, len(part))
        for copy in copies[1:]:
            if not np.array_equal(part, _bytes_of(copy.tensor, start + at, len(part))):
                raise ReplicasDiffer(_message(copies[0].rank, copy.rank), tensor=name)


def _bytes_of(tensor: LazyTensor, start: int, nbytes: int) -> np.ndarray:
    chunk = tensor.chunks[0]
    plain = (
        len(tensor.chunks) == 1 and chunk.storage.byteorder == "little" and chunk.offset % 8 == 0
    )
    if plain and is_c_ordered(chunk.shape, chunk.strides, tensor.dtype.bits):
        out = np.empty(nbytes, np.uint8)
        tensor.source.store.read(
            chunk.storage.key, chunk.storage.start + chunk.offset // 8 + start, out.data
        )
        return out
    rows = tensor if tensor.shape else tensor[None]
    row_nbytes = rows.nbytes // rows.shape[0]
    first = start // row_nbytes
    wanted = rows[first : -(-(start + nbytes) // row_nbytes)]
    array = np.empty(wanted.shape, wanted.dtype.numpy)
    # As it is stored: whether the elements stand for their conjugates is said of the whole.
    wanted.source.read([Request(replace(wanted, traits=PLAIN_TRAITS), array)])
    content = array.reshape(-1).view(np.uint8)
    return content[start - first * row_nbytes :][:nbytes]


EXPLAINED = 1024
"""The most parts among which two overlapping ones are searched, in quadratic time."""


class RankFile(Value):
    """The content of one file. Nothing was executed, and no tensor was read."""

    rank: int
    key: str
    tree: object
    nbytes: int
    foreign: tuple[Foreign, ...] = ()


def read_rank(source: Source, rank: int, key: str) -> RankFile:
    """Read the pickle of one rank's file. Its tensors lie in the store of the folder, under the key of the file."""
    with error_context(file=key):
        archive = saved_archive(source, key)
        if archive.get("constants.pkl") is not None:
            raise Unsupported("a TorchScript archive is no rank's file")
        reader = PickleReader(source, key, archive)
        tree, nbytes = reader.read("data.pkl", "data/")
    foreign = tuple(replace(found, stream=f"{key}: {found.stream}") for found in reader.foreign)
    return RankFile(rank, key, tree, nbytes, foreign)


class RankBox(Value):
    """A box of a tensor that a rank has, and the elements in the shape of the box."""

    rank: int
    box: Box
    tensor: LazyTensor


def _uncovered(whole: Box, boxes: Mapping[Box, Sequence[RankBox]]) -> str:
    outside = next((box for box in boxes if not whole.contains(box)), None)
    if outside is not None:
        return f"the part of rank {boxes[outside][0].rank} lies outside of the tensor"
    ordered = list(boxes)
    pair = find_overlap(ordered) if len(ordered) <= EXPLAINED else None
    if pair is not None:
        first, second = (boxes[ordered[at]][0].rank for at in pair)
        return f"the parts of ranks {first} and {second} overlap and are not the same, so nobody can say which one is true"
    return "the parts of all ranks do not cover the tensor exactly once"


Leaf = Mapping[int, object]
"""The value of each rank at one place; ranks without a value are left out."""

FREE_STEPS = 10_000
"""Steps that are allowed for files of any size."""

CHARACTERS_A_STEP = 16
"""Characters of a name for one step: a key is stored once, and stands in the names of everything below it."""


class Allowance:
    """The most steps of a walk through the files: as many as they have bytes.

    A container or a mesh that many places refer to is stored once, and visited at each of them.
    """

    def __init__(self, files: Sequence[RankFile]) -> None:
        self._left = FREE_STEPS + sum(file.nbytes for file in files)

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise LimitExceeded("the files refer to the same things too often to be put together")


def in_step(
    files: Sequence[RankFile],
    join: Callable[[str, Leaf], object],
    allowance: Allowance,
    *,
    depth: int,
) -> object:
    """One tree out of the trees of all ranks: containers of the first rank, leaves by `join` from a dotted name and the values.

    A key that some ranks lack is a place, too. A value is a leaf unless all ranks have a dict, a list or a tuple there.
    """

    def inside(values: Leaf) -> Iterable[tuple[str, Leaf]] | None:
        allowance.spend(len(values))
        if all(isinstance(value, dict) for value in values.values()):
            allowance.spend(sum(map(len, cast("Collection[Collection[object]]", values.values()))))
        keys = _keys(values)
        return None if keys is None else ((_step(key), _at(values, key)) for key in keys)

    def made(values: Leaf, children: list[object], _: LinkedPath) -> object:
        first = next(iter(values.values()))
        if isinstance(first, dict):
            return copy_dict_with_items(
                first, dict(zip(_keys(values) or (), children, strict=True))
            )
        return children if isinstance(first, list) else tuple(children)

    def leaf(values: Leaf, way: LinkedPath) -> object:
        path = cast("tuple[str, ...]", expand_path(way))
        allowance.spend(sum(map(len, path)) // CHARACTERS_A_STEP)
        return join(".".join(path), values)

    return rebuild(
        {file.rank: file.tree for file in files},
        leaf,
        get_children=inside,
        make_container=made,
        max_depth=depth,
    )


def _keys(values: Leaf) -> Collection[object] | None:
    first, inside = (
        next(iter(values.values())),
        cast("Collection[Collection[object]]", values.values()),
    )
    if isinstance(first, dict) and all(isinstance(value, dict) for value in inside):
        return dict.fromkeys(chain.from_iterable(inside))
    if type(first) in (list, tuple) and all(type(value) is type(first) for value in inside):
        return range(max(map(len, inside)))
    return None


def _step(key: object) -> str:
    return (
        key if isinstance(key, str) else str(key) if type(key) is int else f"<{type(key).__name__}>"
    )


def _at(values: Leaf, key: Any) -> Leaf:  # noqa: ANN401  # of a dict
    inside = cast("Mapping[int, Any]", values)
    return {
        rank: one[key]
        for rank, one in inside.items()
        if (key in one if isinstance(one, dict) else key < len(one))
    }


def described(
    format: str, tree: object, files: Sequence[RankFile], *, source: Source, understood: Iterable[Global] = (),
    notes: Sequence[str] = (), metadata: Mapping[str, str] | None = None, unequal: Iterable[str] = (),
) -> Description:  # fmt: skip
    """The description of a folder. Globals in `understood` are not foreign."""
    named = name_tensors(tree, source.limits, sum(file.nbytes for file in files))
    known = set(understood)
    foreign: dict[Global, Foreign] = {}
    for one in chain.from_iterable(file.foreign for file in files):
        # All ranks mention the same globals: each is listed once.
        if one.what not in known:
            foreign.setdefault(one.what, one)
    differ = [repr(name[:80]) for name in unequal]
    refused = [
        f"the ranks have different values for {list_names(differ)}; reading {'it' if len(differ) == 1 else 'them'} is refused"
    ]
    archives = tuple(file.key for file in files)
    notes = (*notes, *(refused if differ else []), *named.notes)
    return Description(
        format,
        ViewTable(named.tensors),
        tree,
        tuple(foreign.values()),
        notes,
        metadata or {},
        archives=archives,
    )


def moved(value: object, assembly: Assembly) -> object:
    """A copy of a value in plain dicts, whose tensors have the source of the assembly. Shared values are copied once."""
    return rebuild(
        value,
        lambda one, _: assembly.replica("", [(0, one)]) if isinstance(one, LazyTensor) else one,
        make_container=make_plain_container,
    )


def free_key(wanted: str, names: Mapping[str, object]) -> str:
    """The key `wanted`, with `#2` appended while a tensor has it or a name below it."""
    while any(name == wanted or name.startswith(f"{wanted}.") for name in names):
        wanted += "#2"
    return wanted
