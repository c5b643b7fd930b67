"""What part of a tensor this rank has: the boxes of DTensors, ShardedTensors and of everything that speaks the DCP protocol.

A plain tensor is whole on every rank. Anything else is a global shape and some boxes of it, each with a local tensor:

    DTensor            its placements on its mesh: Shard, Replicate, uneven, strided (FSDP over tensor parallel), any mesh
    ShardedTensor      what its own metadata says
    checkpointable     anything with `__create_chunk_list__` and `__get_tensor_shard__`, also as the local part of a DTensor
    marked             a plain tensor with `global_shape`, `global_offsets`, `local_offsets` and `local_sizes`: for each box of it
                       a box of the whole (`CheckpointableTensor`, which torch knows since 2.14)

A Partial placement is a sum that has not been made: nobody has the tensor, and it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch

from holdfast.core.box import Box
from holdfast.core.value import Value
from holdfast.errors import BadPlacement, Unsupported

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Compared by exact class."""


class LocalPart(Value, frozen=True, eq=False):
    """A box of the whole, and the local tensor that has its elements."""

    box: Box
    tensor: torch.Tensor


class Shards(Value, frozen=True, eq=False):
    """A tensor of which this rank has parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[LocalPart, ...]


MARKS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Attributes of a marked tensor. The last three have one entry for each part that it holds."""


@cache
def _classes() -> tuple[type, type]:
    class Never:
        pass

    if not torch.distributed.is_available():
        return Never, Never
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor

    return DTensor, ShardedTensor


def is_sharded(value: object) -> bool:
    if type(value) in PLAIN:
        # Nearly all are, and there may be very many: a mark is an attribute.
        return bool(object.__getstate__(value)) and _is_marked(value)
    return isinstance(value, _classes()) or _speaks(value) or _is_marked(value)


def shards_of(value: object, name: str) -> Shards:
    """The parts of a sharded tensor that this rank has. `name` is that of the tensor in the state: the protocol asks for it."""
    dtensor, sharded = _classes()
    if isinstance(value, dtensor):
        return _of_dtensor(cast(torch.Tensor, value), name)
    if isinstance(value, sharded):
        return _of_sharded_tensor(cast(torch.Tensor, value))
    if _speaks(value):
        return _of_protocol(value, name)
    return _of_marked(value)


def _is_marked(value: object) -> bool:
    return isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in MARKS)


def _speaks(value: object) -> bool:
    kind = type(value)
    return hasattr(kind, "__create_chunk_list__") and hasattr(kind, "__get_tensor_shard__")


def _of_dtensor(value: torch.Tensor, name: str) -> Shards:
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    tensor: Any = value  # a DTensor, whose class cannot be named where torch has no `distributed`
    local: torch.Tensor = tensor._local_tensor
    placements, mesh = tensor.placements, tensor.device_mesh
    shape = tuple(tensor.shape)
    if any(isinstance(p, Partial) for p in placements):
        raise Unsupported(
            f"a DTensor with placements {tuple(placements)}: its sum has not been made; redistribute it first"
        )
    if _speaks(local):
        inner = _of_protocol(local, name)
        return Shards(shape, inner.dtype, inner.parts)
    if mesh.get_coordinate() is None:
        return Shards(shape, tensor.dtype, ())
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    if tuple(sizes) != tuple(local.shape):
        raise Unsupported(
            f"a DTensor of {list(shape)} with placements {tuple(placements)} has a local part of {list(local.shape)} where "
            f"{list(sizes)} was expected; its elements do not form one box"
        )
    return Shards(shape, tensor.dtype, (_part(offsets, local),))


def _of_sharded_tensor(value: torch.Tensor) -> Shards:
    tensor: Any = value  # a ShardedTensor, as above
    parts = tuple(
        _part(shard.metadata.shard_offsets, shard.tensor) for shard in tensor.local_shards()
    )
    whole = tensor.metadata()
    return Shards(tuple(whole.size), whole.tensor_properties.dtype, parts)


def _of_protocol(value: Any, name: str) -> Shards:  # noqa: ANN401  # whatever has the two methods
    from torch.distributed.checkpoint.metadata import MetadataIndex

    parts = []
    for number, chunk in enumerate(value.__create_chunk_list__()):
        offsets, sizes = chunk.offsets, chunk.sizes
        if 0 in sizes:
            continue
        parts.append(
            _part(offsets, value.__get_tensor_shard__(MetadataIndex(name, offsets, number)))
        )
    shape = tuple(getattr(value, "shape", ()))
    dtype = parts[0].tensor.dtype if parts else getattr(value, "dtype", torch.float32)
    return Shards(shape, dtype, tuple(parts))


def _of_marked(tensor: Any) -> Shards:  # noqa: ANN401  # a tensor with the attributes of `MARKS`
    shape, counts = (
        tuple(tensor.global_shape),
        [len(tensor.global_offsets), len(tensor.local_offsets), len(tensor.local_sizes)],
    )
    if len(set(counts)) > 1:
        raise BadPlacement(
            "global_offsets, local_offsets and local_sizes of a tensor have one entry for each part, and so the same length",
            found=counts,
        )
    parts, local = [], tensor.detach()
    for start, own, sizes in zip(
        tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True
    ):
        for what, offsets, whole in (("global", start, shape), ("local", own, tuple(tensor.shape))):
            ranks = {len(offsets), len(sizes), len(whole)}
            if len(ranks) > 1 or any(
                a < 0 or n < 0 or a + n > m for a, n, m in zip(offsets, sizes, whole, strict=True)
            ):
                found = f"{what}_offsets {list(offsets)} and local_sizes {list(sizes)}"
                raise BadPlacement(
                    f"a part of a tensor with {found} does not lie in {list(whole)}",
                    found=(*offsets, *sizes),
                )
        if 0 not in sizes:
            parts.append(
                _part(start, local[tuple(slice(a, a + n) for a, n in zip(own, sizes, strict=True))])
            )
    return Shards(shape, tensor.dtype, tuple(parts))


def _part(offsets: Sequence[int], local: torch.Tensor) -> LocalPart:
    start = tuple(int(o) for o in offsets)
    return LocalPart(
        Box(start, tuple(o + n for o, n in zip(start, local.shape, strict=True))), local
    )
