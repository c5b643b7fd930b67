"""`LocalShardsWrapper`: the several shards that one rank holds of one tensor, as one tensor.

It has the methods of the class of that name in torch 2.13 (`torch.distributed.tensor._shards_wrapper`) and works in its place: in
torch's own distributed checkpoint, as the local part of a `DTensor`, and in Holdfast's. `docs/local-shards.md` lists the
differences.

1. Each shard is a plain tensor, with the offset in the whole tensor at which it begins. The wrapper has no elements of its own.
2. Its shape is that of the block which the shards make (`core/tiling.py`); its dtype, device and `requires_grad` are theirs.
   Shards that overlap, or differ in these, are refused.
3. Few operators are defined, each shard by shard. Every other one is a `NotImplementedError` with its name. None is in place.
4. A rank may hold nothing. Such a wrapper is 0 × 0, of the default dtype and on the CPU, or like a tensor without elements
   that it is given.

It pickles as a call of this class with its shards and offsets. A `weights_only` load has to allow it, like every class that is not
torch's own: `with holdfast.torch.serialization.safe_globals([LocalShardsWrapper]): …`.

The offset of a shard in another shape (`viewed_offsets`). The offset belongs to the whole tensor, whose shape is not known here, so
it is known in four cases only:

1. The shape is the same.
2. The shard begins at the origin, and does so in every shape.
3. Dimensions of length 1 at offset 0 come or go, as in `unsqueeze`: 2 × 3 at (4, 6) is 2 × 1 × 3 at (4, 0, 6).
4. The shard consists of whole rows (its offset is 0 in every dimension but the first): then it begins after a number of
   elements, and that number is whole rows of the new shape too. 2 × 6 at (4, 0) is 12 at (24), or 4 × 3 at (8, 0). Only the offset
   says that the rows are whole: row-wise sharding alone gives such offsets, but for the first of several column blocks.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from holdfast.core.box import Box
from holdfast.core.tiling import (
    find_bounding_box,
    find_differing_axis,
    find_overlap,
    is_tiled_by,
    joined_shape,
)
from holdfast.errors import Refused, Unsupported
from holdfast.metadata import ChunkLookup, IndexLike
from holdfast.torch import versions

Args = tuple[object, ...]
Kwargs = Mapping[str, object]

_aten = torch.ops.aten
_collectives = torch.ops._c10d_functional


class LocalShardsWrapper(torch.Tensor):
    """The shards that a rank holds of one tensor. See the module's docstring."""

    _local_shards: list[torch.Tensor]
    _storage_meta: TensorStorageMetadata
    _like: torch.Tensor
    """A tensor without elements: what an empty wrapper is like."""
    _lookup: ChunkLookup

    __slots__ = ("_like", "_local_shards", "_lookup", "_storage_meta")

    # Operators are met below, after autograd; functions of torch need no word of ours.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's stubs disagree on what it is

    @staticmethod
    def __new__(
        cls: type[LocalShardsWrapper],
        local_shards: list[torch.Tensor],
        local_offsets: list[tuple[int, ...]],
        like: torch.Tensor | None = None,
    ) -> LocalShardsWrapper:
        """Wrap shards, each with the offset at which it begins. `like` says what a wrapper without shards is like.

        Raises ValueError for shards and offsets that do not go together, and for shards that do not.
        """
        shards = list(local_shards)
        boxes = _checked(shards, list(local_offsets))
        if like is not None and (shards or like.numel()):
            given = f"{len(shards)} shards and a tensor of shape {list(like.shape)}"
            raise ValueError(
                f"like= is for a wrapper without shards, and has no elements; got {given}"
            )
        if shards:
            shape, like = (
                joined_shape(boxes),
                torch.empty(0, dtype=shards[0].dtype, device=shards[0].device),
            )
        else:
            like = torch.empty((0, 0)) if like is None else like.detach()
            shape, boxes = tuple(like.shape), [Box.whole(like.shape)]
        grad = any(shard.requires_grad for shard in shards)
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=grad
        )
        made._local_shards = shards
        made._like = like
        made._lookup = ChunkLookup()
        layout = shards[0].layout if shards else like.layout
        made._storage_meta = TensorStorageMetadata(
            TensorProperties(
                like.dtype,
                layout,
                grad,
                torch.contiguous_format,
                made.is_pinned(),
                **({"strides": tuple(shards[0].stride())} if shards and versions.STRIDES else {}),
            ),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box in boxes],
        )
        return made

    # What torch's class has.

    def local_shards(self) -> list[torch.Tensor]:
        """The shards, in the order in which they were given; empty where the rank holds nothing."""
        return self._local_shards

    def local_sizes(self) -> list[torch.Size]:
        """The size of each shard; of an empty wrapper, its own."""
        return [chunk.sizes for chunk in self._storage_meta.chunks]

    def local_offsets(self) -> list[torch.Size]:
        """Where each shard begins in the whole tensor; of an empty wrapper, the origin."""
        return [chunk.offsets for chunk in self._storage_meta.chunks]

    @property
    def local_chunks(self) -> list[ChunkStorageMetadata]:
        """The box of each shard; of an empty wrapper, the one box without elements."""
        return self._storage_meta.chunks

    def storage_metadata(self) -> TensorStorageMetadata:
        """Properties, size and boxes together."""
        return self._storage_meta

    def is_empty_shard(self) -> bool:
        """Whether there is no element in it: no shards, or none with elements."""
        return not any(shard.numel() for shard in self._local_shards)

    def is_pinned(self, device: torch.device | str | int | None = None) -> bool:
        """Whether every shard is in pinned memory. The device is not asked for: torch deprecates it."""
        return bool(self._local_shards) and all(shard.is_pinned() for shard in self._local_shards)

    def requires_grad_(self, requires_grad: bool = True) -> LocalShardsWrapper:
        """Set it for the wrapper and for every shard."""
        super().requires_grad_(requires_grad)
        for shard in self._local_shards:
            shard.requires_grad_(requires_grad)
        self._storage_meta.properties.requires_grad = requires_grad
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether the shards require gradients."""
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    @property
    def data(self) -> torch.Tensor:
        """The wrapper outside of autograd. Assigning another one replaces the shards; `nn.Module.to` does that to parameters."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, LocalShardsWrapper):
            raise TypeError(
                f"the data of a LocalShardsWrapper is another one, not a {type(other).__name__}"
            )
        cast(property, torch.Tensor.data).__set__(self, other)
        taken = cast(LocalShardsWrapper, other.detach())
        self._local_shards, self._like, self._storage_meta = (
            taken._local_shards,
            taken._like,
            taken._storage_meta,
        )
        self.requires_grad_(self.requires_grad)

    def _get_tensor_size_bytes(self) -> int:
        return sum(shard.numel() * shard.element_size() for shard in self._local_shards)

    # What a distributed checkpoint asks for.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes to be read."""
        return self._storage_meta.chunks

    def __create_write_items__(self, fqn: str, object: torch.Tensor) -> list[WriteItem]:
        """What is to be written under a name. `object` is what stands there: this, or the DTensor around it.

        A shard without elements is left out: its offset is that of some other shard, perhaps of another rank, and a checkpoint
        keeps one item for each offset. It is written where the whole tensor has no elements.
        """
        size, properties = object.size(), self._storage_meta.properties
        # An empty wrapper has one chunk and no shard.
        held = zip(self._storage_meta.chunks, self._local_shards, strict=False)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk, shard in held
            if shard.numel() or not size.numel()
        ]

    def __get_tensor_shard__(self, index: IndexLike) -> torch.Tensor:
        """The shard at an offset; of an empty wrapper, a tensor without elements at the origin. ValueError for any other."""
        position = self._lookup.find(self._storage_meta.chunks, index)
        if position is None:
            raise ValueError(
                f"Could not find shard at '{index.offset}' for FQN: '{getattr(index, 'fqn', None)}'"
            )
        return self._local_shards[position] if self._local_shards else self._like.clone()

    # Operators.

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the one that is switched off
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        row = _OPERATORS.get(func)
        if row is None:
            raise NotImplementedError(f"{func} is not supported for LocalShardsWrapper!")
        return row(args, kwargs or {})

    @staticmethod
    def handle_all_gather_into_tensor(args: Args, kwargs: Kwargs) -> torch.Tensor:
        """The blocks of all ranks below each other. A DTensor takes them apart again by its own placements."""
        gather = cast(Callable[..., torch.Tensor], _collectives.all_gather_into_tensor.default)
        return gather(_block(_this(args)), *args[1:], **kwargs)

    @staticmethod
    def handle_wait_tensor(args: Args, kwargs: Kwargs) -> LocalShardsWrapper:
        """Wait for every shard."""
        wait = cast(Callable[[torch.Tensor], torch.Tensor], _collectives.wait_tensor.default)
        return _this(args)._each(wait)

    @staticmethod
    def handle_to_copy(args: Args, kwargs: Kwargs) -> LocalShardsWrapper:
        """Copy every shard, to another dtype or device where one is given."""
        to_copy = cast(Callable[..., torch.Tensor], _aten._to_copy.default)
        return _this(args)._each(lambda shard: to_copy(shard, **kwargs))

    @staticmethod
    def handle_view(args: Args, kwargs: Kwargs) -> LocalShardsWrapper:
        """The elements in another shape: any for one shard, its own for several."""
        this, wanted = _this(args), cast(Sequence[int], args[1])
        shape = resolved_shape(this.shape, wanted)
        if not this._local_shards:
            return LocalShardsWrapper([], [], this._like.view(shape))
        if len(this._local_shards) == 1:
            offsets = viewed_offsets(
                tuple(this._storage_meta.chunks[0].offsets), tuple(this.shape), shape
            )
            return LocalShardsWrapper([this._local_shards[0].view(shape)], [offsets])
        if shape != tuple(this.shape):
            raise Unsupported(
                f"aten.view of {len(this._local_shards)} shards in another shape is not supported for LocalShardsWrapper: "
                "a shard need not be a box of the new shape",
                expected=tuple(this.shape),
                found=shape,
            )
        return this._each(lambda shard: shard.view(shard.shape))

    @staticmethod
    def handle_equal(args: Args, kwargs: Kwargs) -> bool:
        """Whether both are wrappers with the same description and the same elements, shard by shard in order."""
        a, b = args[:2]
        if not isinstance(a, LocalShardsWrapper) or not isinstance(b, LocalShardsWrapper):
            return False
        one, other = (
            # The first five: strides, which torch 2.15 adds, say how equal elements lie in memory.
            (
                each._storage_meta.size,
                each._storage_meta.chunks,
                each._storage_meta.properties.__getstate__()[:5],
            )
            for each in (a, b)
        )
        if one != other or a.device != b.device or len(a._local_shards) != len(b._local_shards):
            return False
        return all(torch.equal(x, y) for x, y in zip(a._local_shards, b._local_shards, strict=True))

    @staticmethod
    def handle_detach(args: Args, kwargs: Kwargs) -> LocalShardsWrapper:
        """Make a wrapper around the same memory, outside of autograd."""
        return _this(args)._each(torch.Tensor.detach)

    @staticmethod
    def handle_clone(args: Args, kwargs: Kwargs) -> LocalShardsWrapper:
        """Copy every shard, strides kept."""
        wanted = kwargs.get("memory_format")
        if wanted is not None and wanted is not torch.preserve_format:
            raise NotImplementedError(f"{wanted} is not supported for LocalShardsWrapper!")
        return _this(args)._each(
            lambda shard: torch.clone(shard, memory_format=torch.preserve_format)
        )

    @staticmethod
    def handle_new_empty(args: Args, kwargs: Kwargs) -> LocalShardsWrapper:
        """Shards like these, not filled, where the size is this one's; otherwise one shard of that size at the origin."""
        this, size = _this(args), torch.Size(cast(Sequence[int], args[1]))
        new_empty = cast(Callable[..., torch.Tensor], _aten.new_empty.default)
        if size == this.shape:
            return this._each(lambda shard: new_empty(shard, shard.shape, **kwargs))
        return LocalShardsWrapper([new_empty(this._like, size, **kwargs)], [(0,) * len(size)])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LocalShardsWrapper:
        if not self._local_shards:
            return LocalShardsWrapper([], [], change(self._like))
        return LocalShardsWrapper(
            [change(shard) for shard in self._local_shards],
            [tuple(o) for o in self.local_offsets()],
        )

    # Copies and files.

    def _made_of(self) -> Args:
        if not self._local_shards:
            return ([], [], self._like)
        return (list(self._local_shards), [tuple(offset) for offset in self.local_offsets()])

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        state = (dict(self.__dict__),) if self.__dict__ else ()
        return (type(self), self._made_of(), *state)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, object]) -> LocalShardsWrapper:
        if id(self) in memo:
            return cast(LocalShardsWrapper, memo[id(self)])
        make = cast(Callable[..., LocalShardsWrapper], type(self))
        copied = memo[id(self)] = make(*copy.deepcopy(self._made_of(), memo))
        copied.__setstate__(copy.deepcopy(dict(self.__dict__), memo))
        return copied

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:  # type: ignore[override]  # as torch's class, which takes nothing
        return f"LocalShardsWrapper:{self._local_shards} {self._storage_meta}"

    __str__ = __repr__


def _checked(shards: list[torch.Tensor], offsets: list[tuple[int, ...]]) -> list[Box]:
    """The box of each shard; raises where they cannot be one tensor's."""
    if len(shards) != len(offsets):
        raise ValueError(
            f"every shard needs an offset: got {len(shards)} shards and {len(offsets)} offsets"
        )
    for kind in ("dtype", "device"):
        found = dict.fromkeys(getattr(shard, kind) for shard in shards)
        if len(found) > 1:
            raise ValueError(
                f"the shards of one tensor have one {kind}; got {', '.join(map(str, found))}"
            )
    boxes = [
        Box.from_offsets(tuple(map(operator.index, o)), tuple(shard.shape))
        for shard, o in zip(shards, offsets, strict=True)
    ]
    if len({box.rank for box in boxes}) > 1:
        raise ValueError(
            f"the shards of one tensor have one number of dimensions; got {[list(box.shape) for box in boxes]}"
        )
    overlap = find_overlap(boxes)
    if overlap is not None:
        one, other = (boxes[i] for i in overlap)
        raise ValueError(f"shards {overlap[0]} and {overlap[1]} overlap: {one} and {other}")
    return boxes


def _this(args: Args) -> LocalShardsWrapper:
    if not isinstance(args[0], LocalShardsWrapper):
        raise NotImplementedError(
            f"a {type(args[0]).__name__} first and a LocalShardsWrapper later is not supported"
        )
    return args[0]


def _block(this: LocalShardsWrapper) -> torch.Tensor:
    """The shards put together as the wrapper's shape says, in a tensor of its own memory."""
    shards, boxes = (
        this._local_shards,
        [Box.from_offsets(chunk.offsets, chunk.sizes) for chunk in this._storage_meta.chunks],
    )
    if len(shards) <= 1:
        return (shards[0] if shards else this._like).contiguous()
    axis = find_differing_axis(boxes)
    if axis is not None:
        order = sorted(
            (i for i, box in enumerate(boxes) if box.count), key=lambda i: boxes[i].start[axis]
        )
        return torch.cat([shards[i] for i in order], dim=axis)
    whole = find_bounding_box(boxes)
    if not is_tiled_by(whole, boxes):
        raise Unsupported(
            f"{len(shards)} shards that leave holes in the box around them make no block to gather",
            expected=whole,
            found=boxes,
        )
    block = shards[0].new_empty(whole.shape)
    for shard, box in zip(shards, boxes, strict=True):
        if box.count:
            block[box.relative_to(whole.start).slices] = shard
    return block


_OPERATORS: dict[object, Callable[[Args, Kwargs], object]] = {
    _collectives.all_gather_into_tensor.default: LocalShardsWrapper.handle_all_gather_into_tensor,
    _collectives.wait_tensor.default: LocalShardsWrapper.handle_wait_tensor,
    _aten._to_copy.default: LocalShardsWrapper.handle_to_copy,
    _aten.view.default: LocalShardsWrapper.handle_view,
    _aten.equal.default: LocalShardsWrapper.handle_equal,
    _aten.detach.default: LocalShardsWrapper.handle_detach,
    _aten.clone.default: LocalShardsWrapper.handle_clone,
    _aten.new_empty.default: LocalShardsWrapper.handle_new_empty,
}


Shape = tuple[int, ...]


def resolved_shape(old: Sequence[int], wanted: Sequence[int]) -> Shape:
    """A wanted shape with its -1, if there is one, replaced; RuntimeError where the number of elements differs, as torch says it.

    >>> resolved_shape((2, 6), (-1, 3))
    (4, 3)
    """
    count, shape = math.prod(old), [int(n) for n in wanted]
    open_lookup = [i for i, n in enumerate(shape) if n == -1]
    if len(open_lookup) > 1:
        raise Refused("only one dimension can be inferred")
    if open_lookup:
        known = math.prod(n for n in shape if n != -1)
        if known <= 0 or count % known:
            raise Refused(
                f"shape '{list(wanted)}' is invalid for input of size {count}",
                expected=count,
                found=tuple(shape),
            )
        shape[open_lookup[0]] = count // known
    if min(shape, default=0) < 0 or math.prod(shape) != count:
        raise Refused(
            f"shape '{list(wanted)}' is invalid for input of size {count}",
            expected=count,
            found=tuple(shape),
        )
    return tuple(shape)


def viewed_offsets(offsets: Shape, old: Shape, new: Shape) -> Shape:
    """The offset of a shard that is seen in another shape; `Unsupported` where it cannot be known."""
    if new == old:
        return offsets
    if not any(offsets):
        return (0,) * len(new)
    kept = [(n, o) for n, o in zip(old, offsets, strict=True) if n != 1 or o]
    if [n for n, _ in kept if n != 1] == [n for n in new if n != 1] and all(
        n != 1 for n, _ in kept
    ):
        places = iter(o for _, o in kept)
        return tuple(0 if n == 1 else next(places) for n in new)
    if not any(offsets[1:]) and new:
        elements, row = offsets[0] * math.prod(old[1:]), math.prod(new[1:])
        if row and elements % row == 0:
            return (elements // row, *(0 for _ in new[1:]))
    raise Unsupported(
        f"a shard of shape {list(old)} at offset {list(offsets)} has no known offset as {list(new)}; "
        "view the shards themselves, and wrap them with the offsets that they have then",
        expected=old,
        found=new,
    )
