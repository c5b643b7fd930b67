"""The flat groups of a DeepSpeed step, checked, and the place of each parameter in them.

Stages 1 and 2 keep a group of parameters as one row, cut into as many parts as there are ranks, with padding at the end:

    rank 0  │ a a a a a b b │        a: elements [0, 5) of the row of all ranks, b: [5, 9)
    rank 1  │ b b c c c · · │

Stage 3 cuts every parameter into parts of ceil(elements / ranks). A rank has its parts one after the other:

    rank 0  │ a a a b b c c │        a: [0, 3) of the row of rank 0, then [0, 2) of that of rank 1, whose third is padding
    rank 1  │ a a · b b c · │

Sub-groups (`sub_group_size`) are several such rows, with whole parameters in each. `param_shapes` has names and shapes in the order
in which they lie; newer versions say as well how much padding follows a parameter, and which elements each rank has.

Written by `deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py` and `runtime/engine.py`, read here as of 0.19.8; older files have
fewer fields, and plain numbers where newer ones have an enum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from holdfast.core.box import run_boxes
from holdfast.core.chunk import Chunk, Storage, c_strides, is_c_ordered
from holdfast.core.dtype import DType
from holdfast.core.limits import Limits
from holdfast.core.opaque import Opaque
from holdfast.core.protocols import Source, Store
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import FormatError, MetadataError, Unsupported, error_context
from holdfast.extras.rank_files.assemble import RankFile
from holdfast.formats.torch.tensors import brief, checked_shape


class FlatRow:
    """Elements in parts that follow each other: 1-D tensors of one dtype, each contiguous.

        parts      │ a a a a b b │ b b b c · · │      files of two ranks
        tensors      a = [0, 4)   b = [4, 9)   c = [9, 10)

    Every tensor that is cut from a row gets storages of its own, so that it shares nothing with its neighbours.
    """

    def __init__(self, parts: Sequence[LazyTensor]) -> None:
        for part in parts:
            _check_flat(part)
            if part.dtype is not parts[0].dtype:
                raise MetadataError(
                    "the parts of a row have several dtypes",
                    expected=parts[0].dtype.name,
                    found=part.dtype.name,
                )
        self._parts = parts
        self._starts = [0, *accumulate(part.size for part in parts)]

    @property
    def dtype(self) -> DType:
        return self._parts[0].dtype

    def storages(self, start: int, stop: int, home: Store) -> Iterator[tuple[Storage, int]]:
        """The elements [start, stop): storages that hold nothing else, each with its number of elements."""
        at = bisect_right(self._starts, start) - 1
        width = self.dtype.bits // 8
        while start < stop:
            part, until = self._parts[at], min(stop, self._starts[at + 1])
            if until > start:
                chunk, count = part.chunks[0], until - start
                storage, first = (
                    chunk.storage,
                    chunk.offset // 8 + (start - self._starts[at]) * width,
                )
                crc = storage.crc32 if first == 0 and count * width == storage.nbytes else None
                place = storage.key, storage.start + first, count * width
                # Not `replace`: with many ranks these are 100,000.
                yield (
                    Storage(
                        *place, storage.byteorder, crc, storage.location, storage.label, home=home
                    ),
                    count,
                )
            start, at = until, at + 1


def cut(
    shape: tuple[int, ...],
    slices: Iterable[tuple[FlatRow, int, int]],
    dtype: DType,
    *,
    source: Source,
) -> LazyTensor:
    """The tensor without a name whose elements, in C order, are these slices of rows one after the other: row, start, stop."""
    chunks: list[Chunk] = []
    strides, at = c_strides(shape, dtype.bits), 0
    for row, start, stop in slices:
        for storage, count in row.storages(start, stop, source.store):
            for box in run_boxes(shape, at, at + count):
                begin = sum(n * stride for n, stride in zip(box.start, strides, strict=True))
                chunks.append(Chunk(box, storage, begin - at * dtype.bits, strides))
            at += count
    if at != math.prod(shape):
        raise ValueError(f"{at} elements do not make a tensor of {shape}")
    return LazyTensor("", dtype, shape, tuple(chunks), source)


def _check_flat(part: LazyTensor) -> None:
    traits = part.traits
    plain = (
        part.ndim == 1
        and not part.dtype.packed
        and part.dtype.bits % 8 == 0
        and not (traits.conj or traits.neg or traits.meta)
    )
    if plain and part.size:
        chunk = part.chunks[0]
        plain = (
            len(part.chunks) == 1
            and is_c_ordered(chunk.shape, chunk.strides, part.dtype.bits)
            and chunk.offset % 8 == 0
        )
    if not plain:
        raise MetadataError(
            "a part of a row is not one plain row of elements", found=(part.dtype.name, part.shape)
        )


Shapes = Mapping[str, tuple[int, ...]]

ALIGNMENT = 2
"""Parts are padded to a multiple of this (`nccl_start_alignment_factor`), so a row to a multiple of this times the ranks."""


class Optimizer(Value):
    rank: int
    key: str
    stage: int
    partitions: int
    masters: Sequence[LazyTensor]
    """The rank's part of each flat group, in full precision."""
    states: Sequence[Mapping[object, object]]
    content: Mapping[object, object]


class ParameterRange(Value):
    """The place of a parameter: its first element in the row, or in the row of each rank."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def optimizer_of(file: RankFile) -> Optimizer:
    with error_context(file=file.key):
        content = file.tree.get("optimizer_state_dict") if isinstance(file.tree, dict) else None
        if not isinstance(content, dict) or "zero_stage" not in content:
            raise FormatError(
                "not an optimizer file of DeepSpeed's ZeRO: it has no optimizer_state_dict with a zero_stage"
            )
        stage = _number(content["zero_stage"], "zero_stage")
        if stage not in (1, 2, 3):
            raise Unsupported(f"stage {stage} of ZeRO; 1, 2 and 3 are known", found=stage)
        count = content.get("partition_count")
        counts = {
            _number(one, "partition_count")
            for one in (count if isinstance(count, list | tuple) else [count])
        }
        if len(counts) != 1:
            raise Unsupported(
                "groups of parameters are split over different numbers of ranks, as those of experts are, which this does not "
                "put together",
                found=tuple(sorted(counts)),
            )
        masters = content.get(
            "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        )
        if not isinstance(masters, list | tuple) or not all(
            isinstance(one, LazyTensor) for one in masters
        ):
            raise MetadataError(
                "the flat groups of full precision are no list of tensors", found=brief(masters)
            )
        own = [one for one in masters if isinstance(one, LazyTensor)]
        return Optimizer(
            file.rank,
            file.key,
            stage,
            counts.pop(),
            own,
            _states(content, stage, len(own)),
            content,
        )


def _number(value: object, what: str) -> int:
    """An int, or the value of an enum: newer versions pickle their stages as one."""
    if isinstance(value, Opaque) and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not int or value < 0:
        raise MetadataError(f"{what} is no number", found=brief(value))
    return value


def _states(
    content: Mapping[object, object], stage: int, groups: int
) -> list[Mapping[object, object]]:
    base = content.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if isinstance(base, dict):
        base = base.get("state")
    numbered: Mapping[object, object] = (
        dict(enumerate(base)) if isinstance(base, list) else base if isinstance(base, dict) else {}
    )
    found = [numbered.get(at) for at in range(groups)]
    return [state if isinstance(state, dict) else {} for state in found]


def shapes_of(value: object, what: str, limits: Limits) -> list[Shapes]:
    """Names and shapes by group, each name once, from `param_shapes` or a field like it."""
    groups = value if isinstance(value, list | tuple) else [value]
    seen: set[str] = set()
    found: list[Shapes] = []
    for group in groups:
        if not isinstance(group, dict):
            raise MetadataError(
                f"{what} has something else than names and shapes in it", found=brief(group)
            )
        shapes: dict[str, tuple[int, ...]] = {}
        for name, size in group.items():
            if not isinstance(name, str) or name in seen:
                raise MetadataError(
                    f"{what} has a name twice, or one that is no text", found=brief(name)
                )
            seen.add(name)
            with error_context(tensor=name):
                shapes[name] = checked_shape(size, limits)
        found.append(shapes)
    return found


class FlatGroups:
    """The flat groups of all ranks, and the places of parameters in them."""

    def __init__(
        self, optimizers: Sequence[Optimizer], places: Sequence[Sequence[ParameterRange]]
    ) -> None:
        self._optimizers = optimizers
        self.places = places
        self.split = optimizers[0].stage == 3
        """Whether each parameter is cut by itself, and not the row of all of them."""

    def tensors(
        self, group: int, parts: Sequence[LazyTensor], *, source: Source
    ) -> dict[str, LazyTensor]:
        """The parameters of a group, cut from the weights in full precision or from a moment that lies like them."""
        world = len(parts)
        if not self.split:
            row = FlatRow(parts)
            return {
                at.name: cut(
                    at.shape, [(row, at.start, at.start + at.size)], row.dtype, source=source
                )
                for at in self.places[group]
            }
        rows = [FlatRow([part]) for part in parts]
        if any(row.dtype is not rows[0].dtype for row in rows):
            raise MetadataError(
                "the ranks have parts of several dtypes",
                found=tuple(sorted({row.dtype.name for row in rows})),
            )
        made = {}
        for at in self.places[group]:
            step = -(-at.size // world)
            counts = [min(step, max(0, at.size - rank * step)) for rank in range(world)]
            slices = [
                (row, at.start, at.start + count) for row, count in zip(rows, counts, strict=True)
            ]
            made[at.name] = cut(at.shape, slices, rows[0].dtype, source=source)
        return made

    def lie_alike(self, group: int, parts: Sequence[LazyTensor]) -> bool:
        """Whether parts have each element at the place that it has in full precision. Padding may be missing."""
        masters = [optimizer.masters[group].size for optimizer in self._optimizers]
        if self.split:
            return [part.size for part in parts] == masters
        whole = max((at.start + at.size for at in self.places[group]), default=0)
        at = own = 0
        for part, master in zip(parts, masters, strict=True):
            at, own = at + part.size, own + master
            if min(at, whole) != min(own, whole):
                return False
        return True


def flat_groups(optimizers: Sequence[Optimizer], shapes: Sequence[Shapes]) -> FlatGroups:
    """The places of all parameters. Raises where the files contradict each other or the shapes."""
    first = optimizers[0]
    for other in optimizers:
        with error_context(file=other.key):
            if (other.stage, other.partitions) != (first.stage, first.partitions):
                raise FormatError(
                    f"it is of stage {other.stage} with {other.partitions} ranks, and the file of rank {first.rank} of stage "
                    f"{first.stage} with {first.partitions}: they are of two runs",
                    expected=(first.stage, first.partitions), found=(other.stage, other.partitions),
                )  # fmt: skip
            if len(other.masters) != len(first.masters):
                raise FormatError(
                    f"it has {len(other.masters)} flat groups, and the file of rank {first.rank} {len(first.masters)}: they are of "
                    "two runs",
                    expected=len(first.masters), found=len(other.masters),
                )  # fmt: skip
    if first.stage == 3:
        return FlatGroups(optimizers, _places_by_rank(optimizers, shapes))
    groups = FlatGroups(optimizers, _places_by_group(optimizers, shapes))
    _check_mappings(groups.places, optimizers)
    return groups


def _places_by_group(
    optimizers: Sequence[Optimizer], shapes: Sequence[Shapes]
) -> list[list[ParameterRange]]:
    first, world = optimizers[0], len(optimizers)
    if len(shapes) != len(first.masters):
        message = f"there are {len(first.masters)} flat groups and shapes for {len(shapes)}"
        raise MetadataError(message, file=first.key, expected=len(shapes))
    found = []
    paddings = first.content.get("param_alignment_paddings")
    for group, own in enumerate(shapes):
        after = _paddings(paddings, group, len(own))
        places, at = [], 0
        for (name, shape), padding in zip(own.items(), after, strict=True):
            places.append(ParameterRange(name, shape, at))
            at += math.prod(shape) + padding
        room = sum(optimizer.masters[group].size for optimizer in optimizers)
        # Padding is kept or not, so that the end of a row is known only up to its alignment.
        step = ALIGNMENT * world
        if max((place.start + place.size for place in places), default=0) > room or -(
            -at // step
        ) != -(-room // step):
            raise MetadataError(
                f"the parameters of flat group {group} take {at:,} elements, and {world} ranks have {room:,}: shapes and parts are "
                "not of one save",
                file=first.key, expected=at, found=room,
            )  # fmt: skip
        found.append(places)
    return found


def _paddings(content: object, group: int, count: int) -> Sequence[int]:
    if content is None:
        return (0,) * count
    own = content[group] if isinstance(content, list | tuple) and group < len(content) else None
    if not isinstance(own, list | tuple) or len(own) != count:
        raise MetadataError(
            f"param_alignment_paddings does not fit the {count} parameters of group {group}",
            found=brief(own),
        )
    return [_number(padding, "param_alignment_paddings") for padding in own]


def _places_by_rank(
    optimizers: Sequence[Optimizer], shapes: Sequence[Shapes]
) -> list[list[ParameterRange]]:
    first, world = optimizers[0], len(optimizers)
    rooms = [master.size for master in first.masters]
    for other in optimizers:
        if [master.size for master in other.masters] != rooms:
            raise FormatError(
                f"its flat groups are of other lengths than those of rank {first.rank}: they are of two runs", file=other.key,
                expected=tuple(rooms[:5]), found=tuple(master.size for master in other.masters[:5]),
            )  # fmt: skip
    found: list[list[ParameterRange]] = [[] for _ in rooms]
    group = at = 0
    for name, shape in (pair for own in shapes for pair in own.items()):
        step = -(-math.prod(shape) // world)
        while group < len(rooms) - 1 and at == rooms[group]:
            group, at = group + 1, 0
        if not rooms or at + step > rooms[group]:
            room = rooms[group] if rooms else 0
            raise MetadataError(
                f"a rank's part of it ends at element {at + step:,} of flat group {group}, which has {room:,}: shapes and parts "
                "are not of one save",
                file=first.key, tensor=name, expected=room, found=at + step,
            )  # fmt: skip
        found[group].append(ParameterRange(name, shape, at))
        at += step
    if rooms and (at != rooms[group] or any(rooms[group + 1 :])):
        raise MetadataError(
            f"the parameters end at element {at:,} of flat group {group}, and there are {rooms[group]:,}: shapes and parts are not "
            "of one save",
            file=first.key, expected=rooms[group], found=at,
        )  # fmt: skip
    return found


def _check_mappings(
    places: Sequence[Sequence[ParameterRange]], optimizers: Sequence[Optimizer]
) -> None:
    for group, own in enumerate(places):
        starts = [0]
        for optimizer in optimizers:
            starts.append(starts[-1] + optimizer.masters[group].size)
        for optimizer, start, stop in zip(optimizers, starts, starts[1:], strict=False):
            content = optimizer.content.get("param_slice_mappings")
            mapping = (
                content[group]
                if isinstance(content, list | tuple) and group < len(content)
                else None
            )
            if not isinstance(mapping, dict):
                continue
            expected = {
                at.name: (
                    max(at.start, start) - start,
                    min(at.start + at.size, stop) - max(at.start, start),
                )
                for at in own
                if at.start < stop and at.start + at.size > start
            }
            found = {name: _fragment(value) for name, value in mapping.items()}
            differing = [
                name
                for name in {**expected, **found}
                if expected.get(str(name)) != found.get(name) and found.get(name)
            ]
            if differing:
                raise MetadataError(
                    "the rank says that it has other elements of this parameter than its shape and place make: shapes and parts "
                    "are not of one save",
                    file=optimizer.key, tensor=brief(differing[0]), expected=expected.get(str(differing[0])),
                    found=found.get(differing[0]),
                )  # fmt: skip


def _fragment(value: object) -> tuple[int, int] | None:
    if not isinstance(value, Opaque):
        return None
    start, count = value.attribute("start"), value.attribute("numel")
    return (start, count) if type(start) is int and type(count) is int else None
