"""The proof of a map, before a byte is read: a checkpoint's names and shapes against the source layout of a family.

1. Every name is one tensor of one part of an array, or left out on purpose. Another one is left over.
2. Sizes come from config.json, from whoever asks, and from the shapes (`Sizes`). Each shape is that of its part.
3. The parts of both layouts tile each array: no element is missing, none is there twice (`core/tiling.py`). A tensor of a layer or
   an expert that is missing is known by its name.
4. So every element of every target comes from one element of a source, and each source element goes to one place.

All problems are found before anything is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain

from holdfast.core.order import sort_naturally
from holdfast.core.table import Table
from holdfast.core.text import list_names
from holdfast.core.tiling import is_shape_tiled
from holdfast.core.value import Value
from holdfast.errors import BadMap, DoesNotFit
from holdfast.extras.maps.family import Array, Family
from holdfast.extras.maps.parts import (
    DIGITS,
    AxisRange,
    LayoutPart,
    NamePattern,
    evaluate,
    every_place,
)
from holdfast.extras.maps.pieces import AxisSpan, Placed

SCALE = "_scale_inv"  # Of a block of fp8 weights, which are other numbers without it.
SCALED = "the scale of fp8 weights: there is no place for it, so make bf16 of them first"
TIED = "tie_word_embeddings"  # Of config.json: whether arrays that may be twins of others are.

MOST_TENSORS = 1 << 18  # That a map makes, or misses.

Places = tuple[int, ...]


class FoundTensors(Value, eq=False):
    """What a checkpoint has of an array, as weights or as one state of an optimizer: rows by part and by places."""

    array: Array
    state: str
    rows: dict[tuple[int, Places], int]


class Problems(Value, eq=False):
    missing: list[str]
    left_over: list[str]
    wrong: dict[str, str]
    """By the name of a tensor, or of a size, what is wrong with it."""

    def refuse(self, what: str, file: str) -> None:
        """Raise `DoesNotFit` with everything, if there is anything."""
        lines = [f"{name}: {why}" for name, why in self.wrong.items()]
        lines += [f"{name}: missing" for name in self.missing]
        lines += [
            f"{name}: left over, {SCALED if name.endswith(SCALE) else 'no part is called so'}"
            for name in self.left_over
        ]
        if not lines:
            return
        raise DoesNotFit(
            f"the map {what} does not fit; nothing was read", missing=self.missing, unexpected=self.left_over,
            mismatched=self.wrong, problems=lines, file=file,
        )  # fmt: skip


class MappedTensor(Value, eq=False):
    """A tensor that the map makes."""

    name: str
    shape: tuple[int, ...]
    found: FoundTensors
    part: int
    places: Mapping[str, int]


class Sizes:
    """Sizes of axes, by name: given, from the config, from what a file says of itself, or from shapes."""

    def __init__(
        self,
        family: Family,
        given: Mapping[str, int],
        config: Mapping[str, object],
        metadata: Mapping[str, str],
    ) -> None:
        self._family, self._config, self._metadata = family, config, metadata
        self.known: dict[str, int] = dict(given)
        self.origin = dict.fromkeys(given, "given")
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of arrays that the source has in one part, by id: an expression may ask for `qkv.1`."""

    def lookup(self, name: str) -> int | None:
        if name in self.known:
            return self.known[name]
        head, _, rest = name.partition(".")
        if head == "config":
            value: object = self._config
            for key in rest.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            return value if type(value) is int and 0 <= value < 1 << 40 else None
        if head == "metadata":
            text = self._metadata.get(rest, "")
            return int(text) if text.isdecimal() and len(text) < 12 else None
        if head in self.shapes and rest.isdecimal() and int(rest) < len(self.shapes[head]):
            return self.shapes[head][int(rest)]
        return None

    def of(self, span: AxisRange) -> tuple[int, int] | None:
        """The places of a range; None while they are not known."""
        start = evaluate(span.start, self.lookup)
        stop = evaluate(span.stop or span.axis, self.lookup)
        return None if start is None or stop is None or not 0 <= start <= stop else (start, stop)

    def settle(self) -> bool:
        """Find sizes of the family's expressions; whether there was one."""
        count = len(self.known)
        for name, expressions in self._family.sizes.items():
            for one in expressions:
                if name not in self.known and (value := evaluate(one, self.lookup)) is not None:
                    self.known[name], self.origin[name] = value, one
        return len(self.known) > count

    def solve(self, dims: Sequence[Sequence[AxisRange]], shape: tuple[int, ...]) -> bool:
        """Find the one size of a dimension that is not known yet; whether there was one."""
        count = len(self.known)
        for dim, length in zip(dims, shape, strict=False):
            spans = [(one, self.of(one)) for one in dim]
            open_ = [one for one, span in spans if span is None]
            rows = 1
            for _, span in spans:
                rows *= span[1] - span[0] if span is not None else 1
            if len(open_) != 1 or open_[0].start != "0":
                continue
            name = open_[0].stop or open_[0].axis
            if name.isidentifier() and name not in self.known and rows and length % rows == 0:
                self.known[name], self.origin[name] = length // rows, "shapes"
        return len(self.known) > count


class Bound:
    """A family that was compared with a checkpoint. Raises `DoesNotFit` with every problem where it does not fit."""

    def __init__(
        self, family: Family, source: str, target: str, table: Table, *, config: Mapping[str, object],
        given: Mapping[str, int], metadata: Mapping[str, str] | None = None, prefix: str = "", file: str = "",
    ) -> None:  # fmt: skip
        self.family, self.table = family, table
        self.source, self.target = family.layout(source), family.layout(target)
        self.problems = Problems([], [], {})
        self.dropped: list[str] = []
        """Names that are left out on purpose."""
        self.notes: list[str] = []
        self.what = f"{family.name}:{source}:{target}"
        self._prefix = prefix
        tied = config.get(TIED)
        self._tied = tied if isinstance(tied, bool) else None
        try:
            self.found = self._find()
            self.sizes = self._size(Sizes(family, given, config, metadata or {}))
            self._check()
            self.targets = (
                []
                if any((self.problems.missing, self.problems.left_over, self.problems.wrong))
                else self._targets()
            )
        except BadMap as error:
            error.file = file
            raise
        self.problems.refuse(self.what, file)

    # The source: which tensor is what.

    def _find(self) -> list[FoundTensors]:
        own = self.source.name
        parts: dict[str, list[tuple[int, int]]] = {}
        for number, array in enumerate(self.family.arrays):
            for place, one in enumerate(array.parts[own]):
                parts.setdefault(one.name.plain, []).append((number, place))
        found: dict[tuple[str, int], FoundTensors] = {}
        for row, name in enumerate(self.table.names):
            known = self._part_of(name, parts)
            if known is None:
                self.problems.left_over.append(name)
                continue
            state, number, part, places = known
            if state and not self.target.states:
                self.dropped.append(name)
                continue
            tensors = found.setdefault(
                (state, number), FoundTensors(self.family.arrays[number], state, {})
            )
            before = tensors.rows.setdefault((part, places), row)
            if before != row:
                self.problems.wrong[name] = (
                    f"is there twice: {self.table.names[before]!r} is the same"
                )
        return [*found.values()]

    def _part_of(
        self, name: str, parts: Mapping[str, list[tuple[int, int]]]
    ) -> tuple[str, int, int, Places] | None:
        for state, short in (
            ("", name.removeprefix(self._prefix)),
            self.source.state_of(name) or ("", ""),
        ):
            digits = tuple(DIGITS.findall(short))
            for number, part in parts.get(DIGITS.sub("#", short), ()):
                places = (
                    self.family.arrays[number].parts[self.source.name][part].name.places(digits)
                )
                if places is not None:
                    return state, number, part, places
        return None

    # Sizes.

    def _size(self, sizes: Sizes) -> Sizes:
        samples: list[tuple[LayoutPart, tuple[int, ...]]] = []
        for found in self.found:
            parts = found.array.parts[self.source.name]
            first: dict[int, int] = {}
            for (part, _), row in found.rows.items():
                if self.table.row_kind(row).traits.blocks is None:
                    first.setdefault(part, row)
            samples += [
                (parts[part], self.table.row_kind(row).shape) for part, row in first.items()
            ]
            if len(parts) == 1 and first:
                sizes.shapes.setdefault(found.array.id, samples[-1][1])
        sizes.settle()
        for found in self.found:
            for part, places in found.rows:
                spans = found.array.parts[self.source.name][part].name.spans
                for span, place in zip(spans, places, strict=True):
                    name = self._ranged(found.array, span).stop or span.axis
                    if name.isidentifier() and sizes.origin.get(name, "names") == "names":
                        sizes.known[name] = max(place + 1, sizes.known.get(name, 0))
                        sizes.origin[name] = "names"
        while any([sizes.settle(), *(sizes.solve(part.dims, shape) for part, shape in samples)]):
            pass
        return sizes

    # The proof.

    def _check(self) -> None:
        there = {found.array.id for found in self.found if not found.state}
        for array in self.family.arrays:
            wanted = array.parts[self.source.name] and array.parts[self.target.name]
            if (
                array.id not in there
                and wanted
                and not array.optional
                and not (array.tied and self._tied is not False)
            ):
                self.found.append(FoundTensors(array, "", {}))
        for found in [*self.found, *self._ties()]:
            for layout in (self.source.name, self.target.name):
                self._check_tiles(found.array, layout)
        for found in self.found:
            if found.array.parts[self.source.name]:
                self._check_tensors(found)
        self._leave_out()

    def _leave_out(self) -> None:
        """What is left over, and the layout has on purpose without a place elsewhere, is left out."""
        left = [*self.problems.left_over]
        self.problems.left_over.clear()
        for name in left:
            short = name.removeprefix(self._prefix)
            plain, digits = DIGITS.sub("#", short), tuple(DIGITS.findall(short))
            dropped = any(
                drop.plain == plain and self._is_place(drop, digits) for drop in self.source.drops
            )
            (self.dropped if dropped else self.problems.left_over).append(name)

    def _is_place(self, pattern: NamePattern, digits: tuple[str, ...]) -> bool:
        """Whether numbers in a name are places of a pattern: any, where it says no range of them."""
        places = pattern.places(digits)
        if places is None:
            return False
        for span, place in zip(pattern.spans, places, strict=True):
            if span != AxisRange(span.axis) and place not in range(*(self.sizes.of(span) or (0,))):
                return False
        return True

    def _check_tiles(self, array: Array, layout: str) -> None:
        """Add a problem unless the parts of a layout cover an array, each element once."""
        parts = [part for part in self.placed(array, layout) if part is not None]
        if not parts or len(parts) < len(array.parts[layout]):
            return
        layouts = self.source.name, self.target.name
        all_parts = [part for name in layouts for part in array.parts[name]]
        axes = dict.fromkeys(axis for part in all_parts for axis in part.axes)
        whole = {axis: self.places(array, axis) for axis in axes}
        is_inside = True
        boxes = []
        for part in parts:
            starts, sizes = [], []
            for axis, places in whole.items():
                reach = part.reach(axis)
                if reach is None and not places:
                    is_inside = False
                start, stop = reach or (places.start, places.stop)
                if start < places.start or stop > places.stop:
                    is_inside = False
                starts.append(start - places.start)
                sizes.append(stop - start)
            if all(sizes):
                boxes.append((tuple(starts), tuple(sizes)))
        if not is_inside or not is_shape_tiled(tuple(map(len, whole.values())), boxes):
            said = " ".join(f"{axis}={len(span)}" for axis, span in whole.items())
            self.problems.wrong[f"array {array.id}"] = (
                f"its parts in the layout {layout!r} do not make the whole of {said}"
            )

    def places(self, array: Array, axis: str) -> range:
        """All places of an axis that an array has."""
        span = self.sizes.of(array.ranges.get(axis, AxisRange(axis)))
        return range(0) if span is None else range(*span)

    def placed(self, array: Array, layout: str) -> list[Placed | None]:
        """Return the parts of a layout with their sizes; None for one whose sizes are a problem."""
        most = 4 * len(self.table) + 4096 if layout == self.source.name else MOST_TENSORS
        made: list[Placed | None] = []
        for part in array.parts[layout]:
            spans: dict[str, tuple[int, int]] = {}
            for axis_range in (*part.name.spans, *chain.from_iterable(part.dims)):
                axis = axis_range.axis
                span = self.sizes.of(self._ranged(array, axis_range))
                if span is None:
                    why = f"its size is neither in config.json nor in the shapes; give it behind the map: '?{axis}=…'"
                    self.problems.wrong[f"size {axis}"] = why
                else:
                    spans[axis] = span
            if len(spans) < len(part.axes):
                made.append(None)
                continue
            places = {axis: range(*spans[axis]) for axis in part.name.axes}
            count = math.prod(map(len, places.values()))
            if count > most:
                self.problems.wrong[part.name.text] = (
                    f"would be {count:,} tensors, which no checkpoint has"
                )
                made.append(None)
                continue
            dims = [
                tuple([AxisSpan(one.axis, *spans[one.axis]) for one in dim]) for dim in part.dims
            ]
            made.append(Placed(tuple(dims), places))
        return made

    def _ranged(self, array: Array, span: AxisRange) -> AxisRange:
        return array.ranges.get(span.axis, span) if not span.stop else span

    def _check_tensors(self, found: FoundTensors) -> None:
        table, problems, prefix = self.table, self.problems, self._prefix
        optional = found.array.optional or bool(found.state)
        for number, (part, placed) in enumerate(
            zip(
                found.array.parts[self.source.name],
                self.placed(found.array, self.source.name),
                strict=True,
            )
        ):
            if placed is None or len(problems.missing) > MOST_TENSORS:
                continue
            expected = {
                tuple(places.values()): places
                for places in every_place(part.name.axes, placed.places)
            }
            rows = {places: row for (own, places), row in found.rows.items() if own == number}
            shape = placed.shape
            for places, row in rows.items():
                kind = table.row_kind(row)
                if places not in expected:
                    problems.left_over.append(table.names[row])
                    del found.rows[number, places]
                elif (blocks := kind.traits.blocks) is not None:
                    problems.wrong[table.names[row]] = (
                        f"is in blocks of {blocks}, which cannot be decoded"
                    )
                elif kind.shape != shape:
                    used = [span.axis for dim in placed.dims for span in dim]
                    sizes = ", ".join(map(self._said, dict.fromkeys(used)))
                    problems.wrong[table.names[row]] = (
                        f"{list(kind.shape)}, and '{part.pattern}' is {list(shape)}, with {sizes}"
                    )
            if not rows and optional and not found.rows:
                continue
            named = (
                self.source.name_of(found.state, part.name.name(places))
                for key, places in expected.items()
                if key not in rows
            )
            problems.missing.extend((name if found.state else prefix + name) for name in named)

    def _said(self, axis: str) -> str:
        origin = self.sizes.origin.get(axis, "")
        text = f"{axis} {self.sizes.known.get(axis)}"
        return f"{text} ({origin})" if origin.startswith(("config", "given")) else text

    # The target.

    def _targets(self) -> list[MappedTensor]:
        made: dict[str, MappedTensor] = {}
        for found in [*self.found, *self._ties()]:
            if not found.rows:
                continue
            twin = found.array.tied and self._tied and self.target.name not in found.array.copies
            parts = () if twin else found.array.parts[self.target.name]
            if not parts:
                names = [self.table.names[row] for row in found.rows.values()]
                (self.problems.left_over if names[0].endswith(SCALE) else self.dropped).extend(
                    names
                )
            for number, (part, placed) in enumerate(
                zip(parts, self.placed(found.array, self.target.name), strict=False)
            ):
                assert placed is not None  # else there were problems
                for places in every_place(part.name.axes, placed.places):
                    name = self.target.name_of(found.state, part.name.name(places))
                    if name in made:
                        self.problems.wrong[name] = "would be made twice"
                    made[name] = MappedTensor(name, placed.shape, found, number, places)
                if len(made) > MOST_TENSORS:
                    raise BadMap(f"the map would make more than {MOST_TENSORS:,} tensors")
        for array in self.family.arrays:
            lacking = array.parts[self.target.name] and not array.parts[self.source.name]
            if lacking:
                names = [part.name.text for part in array.parts[self.target.name]]
                self.notes.append(
                    f"not in the layout {self.source.name!r}, and so not made: {', '.join(names)}"
                )
        return [*made.values()]

    def _ties(self) -> Iterator[FoundTensors]:
        """Arrays that a checkpoint does not have by itself: their parts in the source are those of the ones they are tied to."""
        there = {found.array.id: found for found in self.found if not found.state}
        for array in self.family.arrays:
            if array.tied in there and self.target.name in array.copies and array.id not in there:
                origin = there[array.tied]
                parts = {**array.parts, self.source.name: origin.array.parts[self.source.name]}
                yield FoundTensors(Array(array.id, parts, array.ranges), "", origin.rows)

    @cached_property
    def used(self) -> int:
        return len({row for target in self.targets for row in target.found.rows.values()})

    def left_out(self) -> Iterator[str]:
        """Notes on what goes nowhere."""
        yield from self.notes
        if self.dropped:
            names = list_names(sort_naturally(self.dropped), 3)
            yield f"left out, because the layout {self.target.name!r} has no place for it: {names}"
