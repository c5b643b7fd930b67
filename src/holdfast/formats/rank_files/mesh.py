"""The mesh of a pickled DTensor: which ranks it has, in which order. An inert record, read and checked.

    up to torch 2.9     mesh          a tensor of rank numbers, in the shape of the mesh
    2.10 on             _rank_map     a row of all ranks, later also as plain numbers (`_flatten_rank_map`), and
                        _layout       lengths and strides of the dimensions in it

A part of a mesh (`mesh["fsdp"]`) has the layout of its own dimensions over the row of all ranks. It is as many meshes as there are
such parts, and means the one that the writing rank was in, at `_coordinate_on_dim`. That coordinate also tells who wrote a file,
whatever it is called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.core.opaque import Opaque
from holdfast.core.tensor import LazyTensor
from holdfast.errors import MetadataError, Unsupported
from holdfast.formats.rank_files.placements import Mesh
from holdfast.formats.torch.tensors import brief, checked_ints

MOST_AXES = 64
"""Dimensions of a mesh, and what one may be made of."""

Axis = tuple[tuple[int, ...], tuple[int, ...]]
"""Lengths and strides of one dimension; several where it was made of several."""


def read_mesh(record: Opaque, rank: int, world: int) -> Mesh:
    """The mesh that a rank of so many wrote. Costs what the ranks cost, whatever the record says."""
    ranks = record.attribute("mesh")
    mesh = Mesh(ranks.shape, _numbers(ranks, world)) if isinstance(ranks, LazyTensor) else _laid_out(record, rank, world)
    said, coordinate = record.attribute("_coordinate_on_dim"), mesh.coordinate(rank)
    if coordinate is not None and isinstance(said, tuple | list) and (len(said) != len(coordinate) or tuple(said) != coordinate):
        raise MetadataError(
            f"this file was written by the rank at {brief(said)} of its mesh, and its name says rank {rank}, which is at "
            f"{coordinate}: it was renamed, or files of two runs lie in one folder",
            expected=coordinate,
            found=brief(said),
        )
    return mesh


def _laid_out(record: Opaque, rank: int, world: int) -> Mesh:
    axes = _axes(record.attribute("_layout"), world)
    everyone, row = record.attribute("_rank_map"), record.attribute("_flatten_rank_map")
    if isinstance(row, tuple) and len(row) <= world:
        # The same, without a read.
        known = checked_ints(row, "mesh")
    else:
        known = _numbers(everyone, world) if isinstance(everyone, LazyTensor) else ()
    offsets = [0]
    for lengths, strides in axes:
        for n, stride in zip(lengths, strides, strict=True):
            offsets = [offset + i * stride for offset in offsets for i in range(n)]
    shape = tuple(math.prod(lengths) for lengths, _ in axes)
    # A part of a larger mesh begins where the writing rank is, less its coordinate in it.
    base = 0 if len(offsets) == len(known) else _base(record, rank, known, shape=shape, offsets=offsets)
    if base < 0 or base + max(offsets) >= len(known):
        raise MetadataError("a mesh with a layout that reaches past its ranks", found=len(known))
    return Mesh(shape, tuple(known[base + offset] for offset in offsets))


def _base(record: Opaque, rank: int, known: Sequence[int], *, shape: Sequence[int], offsets: Sequence[int]) -> int:
    coordinate = record.attribute("_coordinate_on_dim")
    if rank not in known or not isinstance(coordinate, tuple | list) or len(coordinate) != len(shape):
        raise Unsupported(f"a mesh that is a part of another, and does not say where rank {rank} is in it", found=rank)
    at = 0
    for here, n in zip(coordinate, shape, strict=True):
        if type(here) is not int or not 0 <= here < n:
            raise MetadataError("a coordinate outside of its mesh", found=brief(here))
        at = at * n + here
    return known.index(rank) - offsets[at]


def _axes(layout: object, world: int) -> list[Axis]:
    """The dimensions of a mesh."""
    if not isinstance(layout, Opaque):
        raise MetadataError("a mesh without its ranks", found=brief(layout))
    axes = layout.attribute("axes")
    if isinstance(axes, tuple) and len(axes) <= MOST_AXES:
        pairs = [(a.attribute("shape"), a.attribute("stride")) for a in axes if isinstance(a, Opaque)]
    else:
        # torch 2.10 to 2.12 have the lengths and strides of all dimensions in two tuples.
        shape, stride = layout.attribute("shape"), layout.attribute("stride")
        shapes, strides = (x if isinstance(x, tuple) else (x,) for x in (shape, stride))
        if len(shapes) != len(strides) or len(shapes) > MOST_AXES:
            raise MetadataError("a layout with lengths and strides that do not fit each other", found=brief(shape))
        pairs = list(zip(shapes, strides, strict=True))
    found: list[Axis] = []
    count = 1
    for shape, stride in pairs:
        inner, steps = (x if isinstance(x, tuple) else (x,) for x in (shape, stride))
        if len(inner) != len(steps) or len(inner) > MOST_AXES:
            raise MetadataError("a layout with lengths and strides that do not fit each other", found=brief(shape))
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
    """A tensor of rank numbers. It is read: it says where elements are, and is none of the state's."""
    if tensor.size > world:
        raise _too_many(tensor.size, world)
    if tensor.dtype.kind not in ("int", "uint"):
        raise MetadataError(f"a mesh of ranks as {tensor.dtype}", found=tensor.shape[:8])
    return tuple(int(rank) for rank in tensor.read().reshape(-1))
