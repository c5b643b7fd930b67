"""`model_world_size_N_rank_R.pt`: a state dict of each rank, as verl, SkyRL and oumi save one with FSDP.

    model_world_size_8_rank_0.pt         {"model.embed_tokens.weight": DTensor, …, "rotary.inv_freq": a plain tensor}
    optim_world_size_8_rank_0.pt         the optimizer's state dict, of DTensors as well
    extra_state_world_size_8_rank_0.pt   random number states, a scheduler: every rank's own
    fsdp_config.json, huggingface/       passed over

The folder opens as its model. The other sets open by a star: `actor/optim_world_size_8_rank_*.pt`. Extra states of ranks
differ, and stand under `rank_0`, `rank_1`, ….

A pickled DTensor has its mesh, its placements, the shape of the whole, and the local tensor, which the interpreter gives as inert
records. They must agree on all ranks of a mesh, with the names of the files and with the shapes of the local tensors, and the parts
must cover the whole exactly once. A plain tensor is a replica.

A mesh has its ranks in an order:

    up to torch 2.9     mesh          a tensor of rank numbers, in the shape of the mesh
    2.10 on             _rank_map     a row of all ranks, later also as plain numbers (`_flatten_rank_map`), and
                        _layout       lengths and strides of the dimensions in it

A part of a mesh (`mesh["fsdp"]`) has the layout of its own dimensions over the row of all ranks. It means the part with the writing
rank, at `_coordinate_on_dim`. That coordinate also tells which rank wrote a file, if the file was renamed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import cast

from holdfast.core.dtype import DType
from holdfast.core.opaque import Opaque
from holdfast.core.protocols import Description, Source
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.core.text import list_names
from holdfast.core.tree import ContainerContents, list_contents, walk
from holdfast.core.value import Value, replace
from holdfast.errors import MetadataError, Unsupported, error_context
from holdfast.extras.rank_files.assemble import (
    Allowance,
    Assembly,
    Leaf,
    RankBox,
    described,
    in_step,
    read_rank,
)
from holdfast.extras.rank_files.placements import Cut, Mesh, local_boxes
from holdfast.extras.rank_files.recognise import (
    EXTRA,
    PATTERN,
    RankSet,
    by_what,
    check_complete,
    main_set,
    rank_sets,
)
from holdfast.formats.torch.tensors import brief, checked_ints, checked_shape

MOST_AXES = 64
"""The most dimensions of a mesh, and parts of a dimension."""

Axis = tuple[tuple[int, ...], tuple[int, ...]]
"""Lengths and strides of the parts of one dimension."""


def read_mesh(record: Opaque, rank: int, world: int) -> Mesh:
    """The mesh of a record that one of `world` ranks wrote. The cost depends on `world` alone."""
    ranks = record.attribute("mesh")
    mesh = (
        Mesh(ranks.shape, _numbers(ranks, world))
        if isinstance(ranks, LazyTensor)
        else _laid_out(record, rank, world)
    )
    said, coordinate = record.attribute("_coordinate_on_dim"), mesh.coordinate(rank)
    if (
        coordinate is not None
        and isinstance(said, tuple | list)
        and (len(said) != len(coordinate) or tuple(said) != coordinate)
    ):
        message = (
            f"this file was written by the rank at {brief(said)} of its mesh, and its name says rank {rank}, which is at "
            f"{coordinate}: it was renamed, or files of two runs lie in one folder"
        )
        raise MetadataError(message, expected=coordinate, found=brief(said))
    return mesh


def _laid_out(record: Opaque, rank: int, world: int) -> Mesh:
    axes = _axes(record.attribute("_layout"), world)
    everyone, row = record.attribute("_rank_map"), record.attribute("_flatten_rank_map")
    if isinstance(row, tuple) and len(row) <= world:
        known = checked_ints(row, "mesh")
    else:
        known = _numbers(everyone, world) if isinstance(everyone, LazyTensor) else ()
    offsets = [0]
    for lengths, strides in axes:
        for n, stride in zip(lengths, strides, strict=True):
            offsets = [offset + i * stride for offset in offsets for i in range(n)]
    shape = tuple(math.prod(lengths) for lengths, _ in axes)
    # A part of a larger mesh begins where the writing rank is, less its coordinate in it.
    base = (
        0
        if len(offsets) == len(known)
        else _base(record, rank, known, shape=shape, offsets=offsets)
    )
    if base < 0 or base + max(offsets) >= len(known):
        raise MetadataError("a mesh with a layout that reaches past its ranks", found=len(known))
    return Mesh(shape, tuple(known[base + offset] for offset in offsets))


def _base(
    record: Opaque, rank: int, known: Sequence[int], *, shape: Sequence[int], offsets: Sequence[int]
) -> int:
    coordinate = record.attribute("_coordinate_on_dim")
    if (
        rank not in known
        or not isinstance(coordinate, tuple | list)
        or len(coordinate) != len(shape)
    ):
        raise Unsupported(
            f"a mesh that is a part of another, and does not say where rank {rank} is in it",
            found=rank,
        )
    at = 0
    for here, n in zip(coordinate, shape, strict=True):
        if type(here) is not int or not 0 <= here < n:
            raise MetadataError("a coordinate outside of its mesh", found=brief(here))
        at = at * n + here
    return known.index(rank) - offsets[at]


def _axes(layout: object, world: int) -> list[Axis]:
    if not isinstance(layout, Opaque):
        raise MetadataError("a mesh without its ranks", found=brief(layout))
    axes = layout.attribute("axes")
    if isinstance(axes, tuple) and len(axes) <= MOST_AXES:
        pairs = [
            (a.attribute("shape"), a.attribute("stride")) for a in axes if isinstance(a, Opaque)
        ]
    else:
        # torch 2.10 to 2.12 have the lengths and strides of all dimensions in two tuples.
        shape, stride = layout.attribute("shape"), layout.attribute("stride")
        shapes, strides = (x if isinstance(x, tuple) else (x,) for x in (shape, stride))
        if len(shapes) != len(strides) or len(shapes) > MOST_AXES:
            raise MetadataError(
                "a layout with lengths and strides that do not fit each other", found=brief(shape)
            )
        pairs = list(zip(shapes, strides, strict=True))
    found: list[Axis] = []
    count = 1
    for shape, stride in pairs:
        inner, steps = (x if isinstance(x, tuple) else (x,) for x in (shape, stride))
        if len(inner) != len(steps) or len(inner) > MOST_AXES:
            raise MetadataError(
                "a layout with lengths and strides that do not fit each other", found=brief(shape)
            )
        lengths, steps = checked_ints(inner, "mesh layout"), checked_ints(steps, "mesh layout")
        count *= math.prod(lengths)
        if not 0 < count <= world:
            raise _too_many(count, world)
        found.append((lengths, steps))
    if isinstance(axes, tuple) and len(found) != len(axes):
        raise MetadataError("a layout with something in it that is no dimension", found=len(axes))
    return found


def _too_many(count: int, world: int) -> MetadataError:
    message = f"a mesh of {count:,} ranks, and the names of the files say {world:,}: the files are of two runs, or were renamed"
    return MetadataError(message, expected=world, found=count)


def _numbers(tensor: LazyTensor, world: int) -> tuple[int, ...]:
    if tensor.size > world:
        raise _too_many(tensor.size, world)
    if tensor.dtype.kind not in ("int", "uint"):
        raise MetadataError(f"a mesh of ranks as {tensor.dtype}", found=tensor.shape[:8])
    return tuple(int(rank) for rank in tensor.read().reshape(-1))


PIECE_STEPS = 32
"""Steps for one piece of a tensor. A DTensor takes some 500 bytes, and has one piece or a few."""

UNDERSTOOD = frozenset({
    "DTensor", "DTensorSpec", "TensorMeta", "ShardOrderEntry", "DeviceMesh", "_MeshLayout", "_FlatLayout", "Shard", "_StridedShard",
    "Replicate", "Partial", "_Partial",
})  # fmt: skip
"""Classes of `torch.distributed` that are read here, and so are not foreign."""


def describe(source: Source) -> Description:
    sets = by_what(rank_sets(source.store.list(), PATTERN))
    chosen = main_set(sets.values())
    check_complete(chosen)
    files = [read_rank(source, rank, chosen.files[rank]) for rank in chosen.ranks]
    beside = [
        f"{what}_world_size_{found.world}_rank_*.pt"
        for what, found in sets.items()
        if what != chosen.what
    ]
    notes = [
        f"the {chosen.what} files of {chosen.world:,} rank{'s' if chosen.world > 1 else ''}, put together"
    ]
    if beside:
        notes.append(
            f"beside them lie {list_names(sorted(beside))}, which open under these names with the star"
        )
    metadata = {"world_size": str(chosen.world), "what": chosen.what}
    if chosen.what == EXTRA:
        tree: object = {f"rank_{file.rank}": file.tree for file in files}
        return described("rank-files", tree, files, source=source, notes=notes, metadata=metadata)
    allowance = Allowance(files)
    joined = _Joined(source, chosen, allowance)
    tree = in_step(files, joined.leaf, allowance, depth=source.limits.depth)
    if joined.differing:
        names = list_names([repr(name[:80]) for name in joined.differing])
        notes.append(
            f"values that are no tensors differ between ranks, and those of the first rank are shown: {names}"
        )
    mentioned = {foreign.what for file in files for foreign in file.foreign}
    understood = {
        what
        for what in mentioned
        if what.module.startswith("torch.distributed.") and what.name in UNDERSTOOD
    }
    return described(
        "rank-files", tree, files, source=source, understood=understood, notes=notes, metadata=metadata,
        unequal=joined.assembly.unequal,
    )  # fmt: skip


class DTensorSpec(Value):
    shape: tuple[int, ...]
    dtype: DType
    mesh: Mesh
    cuts: tuple[Cut, ...]
    local: LazyTensor
    traits: Traits


class _Joined:
    """Joins what the ranks have at one place of their trees."""

    def __init__(self, source: Source, ranks: RankSet, allowance: Allowance) -> None:
        self._source, self._ranks, self._allowance = source, ranks, allowance
        self._meshes: dict[Mesh, Mesh] = {}
        self._read: dict[int, Mesh] = {}
        """Meshes by the id of their records, which live as long as the trees."""
        self.assembly = Assembly(source)
        self.differing: list[str] = []

    def leaf(self, name: str, values: Leaf) -> object:
        found = {rank: _unwrapped(value) for rank, value in values.items()}
        first = next(iter(found.values()))
        kinds = {rank: _kind(value) for rank, value in found.items()}
        if len(set(kinds.values())) > 1:
            other = next(rank for rank, kind in kinds.items() if kind != _kind(first))
            message = f"{_kind(first)} on rank {next(iter(found))}, and {kinds[other]} on rank {other}: the files are of two runs"
            raise MetadataError(message, tensor=name)
        # All values are of the kind of the first one.
        if isinstance(first, Opaque) and _is_dtensor(first):
            return self._dtensor(name, cast("dict[int, Opaque]", found))
        if isinstance(first, LazyTensor | Composite):
            self._everywhere(name, found)
        if isinstance(first, LazyTensor):
            return self.assembly.replica(name, [*cast("dict[int, LazyTensor]", found).items()])
        if isinstance(first, Composite):
            return self._composite(name, cast("dict[int, Composite]", found))
        if isinstance(first, Opaque) and len(self._ranks.files) > 1 and self._has_tensors(first):
            message = f"{_kind(first)} with tensors in it: nothing says how the parts that ranks have of it go together"
            raise Unsupported(message, tensor=name)
        if len(found) < self._ranks.world or any(_differ(first, value) for value in found.values()):
            self.differing.append(name)
        return first

    def _has_tensors(self, value: Opaque) -> bool:
        seen: set[int] = set()

        def inside(value: object) -> Iterator[tuple[str | int, object]] | None:
            parts = list_contents(value)
            return None if parts is None else children(parts)

        def children(parts: ContainerContents) -> Iterator[tuple[str | int, object]]:
            # What an object holds may be another's as well.
            fresh = [part for owner, part in parts if id(owner) not in seen]
            seen.update(id(owner) for owner, _ in parts)
            for pair in chain.from_iterable(fresh):
                self._allowance.spend(1)
                yield pair

        return any(isinstance(one, LazyTensor) for _, one in walk(value, inside))

    def _everywhere(self, name: str, found: Mapping[int, object]) -> None:
        if len(found) < self._ranks.world:
            absent = next(rank for rank in self._ranks.ranks if rank not in found)
            raise MetadataError(
                f"a plain tensor is on rank {next(iter(found))} and not on rank {absent}: it is no replica, or the files are of "
                "two runs",
                tensor=name,
            )

    def _composite(self, name: str, found: Mapping[int, Composite]) -> Composite:
        first = next(iter(found.values()))
        form = first.kind, first.shape, set(first.parts)
        for rank, other in found.items():
            problem = None
            if (other.kind, other.shape, set(other.parts)) != form:
                problem = "is another one"
            for key, value in first.attributes.items():
                if _differ(value, other.attributes.get(key)):
                    problem = problem or "has other attributes"
            if problem is not None:
                raise MetadataError(f"a {first.kind} tensor {problem} on rank {rank}", tensor=name)
        parts = {
            part: self.assembly.replica(
                f"{name}.{part}", [(rank, other.parts[part]) for rank, other in found.items()]
            )
            for part in first.parts
        }
        return replace(first, parts=parts)

    def _dtensor(self, name: str, found: Mapping[int, Opaque]) -> LazyTensor:
        with error_context(tensor=name):
            claims = {rank: self._claim(value, rank) for rank, value in found.items()}
            self._check_meshes(claims)
            first = next(iter(claims.values()))
            parts: list[RankBox] = []
            for rank, claim in claims.items():
                if (claim.shape, claim.dtype) != (first.shape, first.dtype):
                    message = (
                        f"the tensor is {first.dtype} {list(first.shape)} by rank {next(iter(claims))} and {claim.dtype} "
                        f"{list(claim.shape)} by rank {rank}: the files are of two runs"
                    )
                    raise MetadataError(message, expected=first.shape, found=claim.shape)
                parts += self._parts(rank, claim)
            return self.assembly.tensor(
                name, first.dtype, first.shape, parts=parts, traits=first.traits
            )

    def _parts(self, rank: int, claim: DTensorSpec) -> Sequence[RankBox]:
        at = claim.mesh.coordinate(rank)
        if at is None:
            if claim.local.size:
                raise MetadataError(
                    f"rank {rank} is not in the mesh, and has a part of the tensor nevertheless",
                    found=rank,
                )
            return []
        boxes = local_boxes(claim.shape, claim.mesh.shape, at, claim.cuts)
        self._allowance.spend(PIECE_STEPS * len(boxes))
        sizes = tuple(max(own.stop[d] for _, own in boxes) for d in range(len(claim.shape)))
        if claim.local.shape != sizes:
            message = (
                f"rank {rank} has a part of {list(claim.local.shape)}, and by mesh and placements it has {list(sizes)} of "
                f"{list(claim.shape)}"
            )
            raise MetadataError(message, expected=sizes, found=claim.local.shape)
        if len(boxes) == 1:
            return [RankBox(rank, boxes[0][0], claim.local)]
        return [RankBox(rank, whole, claim.local[own.slices]) for whole, own in boxes]

    def _check_meshes(self, claims: Mapping[int, DTensorSpec]) -> None:
        by_mesh: dict[int, dict[int, DTensorSpec]] = {}
        for rank, claim in claims.items():
            by_mesh.setdefault(id(claim.mesh), {})[rank] = claim
        for members in by_mesh.values():
            rank, first = next(iter(members.items()))
            absent = next((r for r in first.mesh.ranks if r not in members), None)
            if absent is not None:
                lacking = "does not have it" if absent in self._ranks.files else "has no file"
                has = "has another mesh" if absent in claims else lacking
                raise MetadataError(
                    f"its mesh on rank {rank} has {len(first.mesh.ranks):,} ranks, and rank {absent} of these {has}: files of two "
                    "runs lie in one folder, or are not all here",
                    found=absent,
                )
            for other, claim in members.items():
                if claim.cuts != first.cuts:
                    raise MetadataError(
                        f"it is placed in one way on rank {rank} and in another on rank {other}"
                    )

    def _claim(self, value: Opaque, rank: int) -> DTensorSpec:
        spec, local = value.attribute("_spec"), _unwrapped(value.attribute("_local_tensor"))
        if not isinstance(spec, Opaque) or spec.name != "DTensorSpec":
            raise MetadataError("a DTensor without its spec", found=brief(spec))
        if not isinstance(local, LazyTensor):
            kind = (
                f"{local.module}.{local.name}"
                if isinstance(local, Opaque)
                else type(local).__name__
            )
            raise Unsupported(
                f"the local part of this DTensor is a {kind[:128]}, and not a plain tensor",
                found=rank,
            )
        shape, dtype, grad = self._outline(value, spec)
        mesh = self._mesh(spec.attribute("mesh"), rank)
        cuts = _cuts(spec, len(shape), len(mesh.shape))
        parameter = any(state.get("_is_param") is True for state in value.state_dicts())
        traits = Traits(
            requires_grad=grad, parameter=parameter, conj=local.traits.conj, neg=local.traits.neg
        )
        return DTensorSpec(shape, dtype, mesh, cuts, local, traits)

    def _outline(self, value: Opaque, spec: Opaque) -> tuple[tuple[int, ...], DType, bool]:
        match value.args:
            case (_, DType() as dtype, size, stride, _, _, _, bool(grad)):
                shape = self._shape(size)
                if not isinstance(stride, tuple) or len(stride) != len(shape):
                    raise MetadataError(
                        "a DTensor whose strides do not fit its shape", found=brief(stride)
                    )
                checked_ints(stride, "stride")
            case _:
                raise MetadataError(
                    "a DTensor that was pickled in a way that torch does not", found=len(value.args)
                )
        meta = spec.attribute("tensor_meta")
        said = meta.args[:1] if isinstance(meta, Opaque) and meta.args else (shape,)
        if self._shape(said[0]) != shape:
            raise MetadataError(
                "a DTensor whose spec has another shape", expected=shape, found=brief(said[0])
            )
        return shape, dtype, grad

    def _shape(self, size: object) -> tuple[int, ...]:
        # Its length first: one long tuple may be the shape of many.
        if not isinstance(size, tuple) or len(size) > self._source.limits.rank:
            raise MetadataError("the shape of a DTensor is none", found=brief(size))
        return checked_shape(size, self._source.limits)

    def _mesh(self, record: object, rank: int) -> Mesh:
        if not isinstance(record, Opaque) or record.name != "DeviceMesh":
            raise MetadataError("a DTensor without a mesh", found=brief(record))
        known = self._read.get(id(record))
        if known is None:
            self._allowance.spend(self._ranks.world)
            made = read_mesh(record, rank, self._ranks.world)
            if max(made.ranks) >= self._ranks.world:
                message = (
                    f"a mesh with rank {max(made.ranks):,}, and the names of the files say {self._ranks.world:,} ranks: the files "
                    "are of two runs, or were renamed"
                )
                raise MetadataError(message, expected=self._ranks.world, found=max(made.ranks))
            # One object for equal meshes: they are compared for every tensor of every rank.
            known = self._read[id(record)] = self._meshes.setdefault(made, made)
        return known


def _unwrapped(value: object) -> object:
    if (
        isinstance(value, Opaque)
        and value.module == "torch._utils"
        and value.name.startswith("_rebuild_parameter")
        and value.args
    ):
        return value.args[0]
    return value


def _is_dtensor(value: Opaque) -> bool:
    return value.name == "DTensor" and value.module.startswith("torch.distributed.")


def _kind(value: object) -> str:
    if isinstance(value, Opaque):
        return (
            "a DTensor"
            if _is_dtensor(value)
            else f"an object of {value.module[:64]}.{value.name[:64]}"
        )
    match value:
        case LazyTensor():
            return "a plain tensor"
        case Composite():
            return "a tensor of several parts"
        case dict() | list() | tuple():
            return f"a {type(value).__name__}"
        case _:
            return "a value"


PLAIN_VALUES = (bool, int, float, str, bytes, type(None), DType)


def _differ(first: object, other: object) -> bool:
    if type(first) is not type(other):
        return True
    # NaN is no other value than NaN.
    return (
        isinstance(first, PLAIN_VALUES)
        and first != other
        and not (first != first and other != other)
    )


def _cuts(spec: Opaque, rank: int, axes: int) -> tuple[Cut, ...]:
    placements = spec.attribute("placements")
    if not isinstance(placements, tuple) or len(placements) != axes:
        raise MetadataError(
            f"a mesh of {axes} dimensions needs as many placements", found=brief(placements)
        )
    cuts: list[Cut] = []
    for axis, placement in enumerate(placements):
        kind = placement.name if isinstance(placement, Opaque) else type(placement).__name__
        if kind in ("Partial", "_Partial", "_MaskPartial", "_NormPartial"):
            raise Unsupported(
                f"its placement is {kind}: every rank has a summand of the sum; redistribute it before the save"
            )
        if not isinstance(placement, Opaque) or kind not in ("Shard", "_StridedShard", "Replicate"):
            raise Unsupported(f"a placement {kind[:64]!r} that is not known")
        if kind == "Replicate":
            continue
        dim, split = (
            placement.attribute("dim"),
            placement.attribute("split_factor") if kind == "_StridedShard" else 1,
        )
        if type(dim) is not int or not 0 <= dim < rank:
            raise MetadataError(
                f"a placement cuts dimension {brief(dim)} of a tensor that has {rank}",
                found=brief(dim),
            )
        if type(split) is not int or split < 1:
            raise MetadataError("a strided placement without a split factor", found=brief(split))
        cuts.append(Cut(dim, axis, split))
    return _ordered(cuts, spec.attribute("shard_order"))


def _ordered(cuts: Sequence[Cut], order: object) -> tuple[Cut, ...]:
    if not isinstance(order, tuple):
        return tuple(cuts)
    if len(order) > len(cuts):
        raise MetadataError(
            "an order of shards that is not that of the placements", found=brief(order)
        )
    wanted: list[tuple[int, int]] = []
    for entry in order:
        match entry.args if isinstance(entry, Opaque) else entry:
            case (int(dim), tuple() as axes) if len(axes) <= len(cuts):
                wanted += [(dim, axis) for axis in axes if type(axis) is int]
            case _:
                raise MetadataError(
                    "an order of shards that torch does not write", found=brief(entry)
                )
    known = {(cut.dim, cut.axis): cut for cut in cuts}
    if sorted(wanted) != sorted(known):
        raise MetadataError(
            "an order of shards that is not that of the placements", found=brief(order)
        )
    return tuple(known[pair] for pair in wanted)
