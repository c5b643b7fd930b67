"""From the files of ranks to one checkpoint: each file read by itself, their parts put together into tensors.

    rank 0   │ w[0:2] │ b │        w   two chunks, one in each file          `Assembly.tensor` from parts
    rank 1   │ w[2:4] │ b │        b   one, if both are equal                `replicas`

A part is a box of the whole tensor, and the lazy tensor of a rank that has its elements. Parts with the same box are replicas. The
boxes that are left must cover the tensor exactly once. All tensors have one source, over the one store of the folder, so that
slices, conversions and sharded loads read exact ranges of several files, as they do for any tensor in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.dtype import DType
from holdfast.core.opaque import Global
from holdfast.core.protocols import Description, Foreign, Source
from holdfast.core.tensor import PLAIN, LazyTensor, Traits
from holdfast.core.tiling import first_overlap, tiles
from holdfast.core.tree import name_tensors, refilled
from holdfast.core.value import Value, replace
from holdfast.errors import LimitExceeded, MetadataError, Unsupported, located
from holdfast.formats.rank_files.recognise import some
from holdfast.formats.rank_files.replicas import Copy, Replicas
from holdfast.formats.torch.zip import PickleReader, saved_archive
from holdfast.plan.files import ViewTable

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
    return _JoinWalk(join, allowance, depth).joined({file.rank: file.tree for file in files}, ())


class _JoinWalk(Value, frozen=True):
    join: Join
    allowance: Allowance
    most_depth: int

    def joined(self, values: Leaf, path: tuple[str, ...]) -> object:
        self.allowance.spend(len(values))
        if len(path) > self.most_depth:
            raise LimitExceeded(f"the state nests deeper than Limits(depth={self.most_depth})", expected=self.most_depth)
        first = next(iter(values.values()))
        if isinstance(first, dict) and all(isinstance(value, dict) for value in values.values()):
            keys: dict[object, None] = {}
            for value in values.values():
                self.allowance.spend(len(value) if isinstance(value, dict) else 0)
                keys.update(dict.fromkeys(value if isinstance(value, dict) else ()))
            return refilled(first, {key: self.joined(_at(values, key), (*path, _step(key))) for key in keys})
        kind = type(first)
        if kind in (list, tuple) and isinstance(first, list | tuple) and all(type(value) is kind for value in values.values()):
            rows = {rank: value for rank, value in values.items() if isinstance(value, list | tuple)}
            made = [
                self.joined({rank: row[at] for rank, row in rows.items() if at < len(row)}, (*path, str(at)))
                for at in range(max(map(len, rows.values())))
            ]
            return made if kind is list else tuple(made)
        self.allowance.spend(sum(map(len, path)) // CHARACTERS_A_STEP)
        return self.join(".".join(path), values)


def _at(values: Leaf, key: object) -> Leaf:
    return {rank: value[key] for rank, value in values.items() if isinstance(value, dict) and key in value}


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
