"""`diff`: what is different between two checkpoints, of whatever formats.

1. Names that both have. Where both files record the checksum of a tensor's bytes and dtype and shape agree, equal checksums mean
   the same content and nothing is read (`exact=True` compares the bytes all the same). Everything else of one shape is read, both
   sides block by block, and counted. Of another shape it is changed, and nothing is read.
2. Names that only one has. A tensor of the same digest under another name was renamed; digests are needed, and read where they are
   not recorded, only of tensors whose dtype and shape occur on both sides. Of several candidates the nearest name wins.
3. Everything that is no tensor: plain values and containers, by their places in the tree.

Names are for people, and two places may have one name (`None` and "None" as keys, `a.b` and `b` in `a`). So tensors that stand at
one place in both trees are compared whatever they are called, and a tensor that both name alike at two places is a difference: but
not for a file that knows names and nothing else, which a nested state is often compared with.

A part of both may be compared, and `a` under other names (`inspect/side.py`): `filter`, `tensors_only`, `rename`.

Of most tensors that two checkpoints have, the bytes in both files are those of an array (`DensePairs`). These are compared by
columns, a million at a time, without making a tensor. All others are compared as pairs of tensors.
"""

from __future__ import annotations

import difflib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.arguments import check_renames, make_choice_check
from holdfast.core.arrays import Bools, Ints
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.digest import Digest, canonicalize
from holdfast.core.group import ALONE, AnyGroup, Ranks, divide_work, joined_ranks
from holdfast.core.limits import Limits
from holdfast.core.notebook import NotebookResult
from holdfast.core.options import validate_arguments
from holdfast.core.order import sort_naturally
from holdfast.core.patterns import Renames
from holdfast.core.protocols import Store
from holdfast.core.quantities import Size
from holdfast.core.table import Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.text import pluralize
from holdfast.core.value import Value, replace
from holdfast.engine.checksums import Progress
from holdfast.engine.coalesce import Ranges
from holdfast.engine.computed import DequantizedTensors
from holdfast.engine.digest import compute_crcs, find_recorded_crc
from holdfast.engine.equal import StoreRanges, compare_bytes, compare_ranges
from holdfast.engine.scan import compare_block, cut_elements
from holdfast.engine.threads import DEFAULT_THREADS, count_reading_threads, run_reads
from holdfast.errors import error_context
from holdfast.formats import format_of
from holdfast.numeric.compare import ContentDifference, Tally
from holdfast.numeric.dequantize import number_shape
from holdfast.verbs.compare_values import (
    ABSENT,
    ContainerKind,
    ValueChange,
    compare_metadata,
    compare_trees,
)
from holdfast.verbs.nonfinite import described_place, element_index
from holdfast.verbs.open import Openable, open_on_all_ranks
from holdfast.verbs.side import Side, chosen_sides, same_view

if TYPE_CHECKING:
    from holdfast.extras.maps.find import AnyMap

Pair = tuple[LazyTensor, LazyTensor]


def compare_tensors(
    pairs: Sequence[Pair],
    stored: Sequence[Pair],
    progress: Progress | None,
    *,
    threads: int | None = None,
) -> list[ContentDifference]:
    """Return the difference of each pair, in bounded memory: at most a few blocks of each side a thread.

    Most tensors of most pairs are the same, so their bytes are compared first, where that can be
    done without looking at elements. Only what differs is looked at element by element. `stored`
    are the pairs as the files have them, whose bytes count for the progress.
    """
    report = progress or (lambda nbytes: None)
    tallies = [Tally() for _ in pairs]
    lock = threading.Lock()

    def compare(number: int, start: int, stop: int, element_count: int) -> None:
        a, b = pairs[number]
        with error_context(tensor=a.name):
            tally = compare_block(a, b, start, stop)
        with lock:
            tallies[number] += tally
        nbytes = nbytes_of(stored[number])
        report(nbytes * stop // element_count - nbytes * start // element_count)

    work: list[Callable[[], None]] = []
    for number, is_equal in enumerate(compare_bytes(pairs, threads=threads)):
        if is_equal:
            report(nbytes_of(stored[number]))
            continue
        for tensor in pairs[number]:
            with error_context(file=tensor.source.store.name, tensor=tensor.name):
                tensor.check_expansion()
        first = pairs[number][0]
        # The elements of a paired dtype count as two.
        is_paired = canonicalize(first.dtype, first.shape)[0] is not first.dtype
        count = first.size * (2 if is_paired else 1)
        work += [
            partial(compare, number, start, stop, count) for start, stop in cut_elements(count)
        ]
    if work:
        stores = [tensor.source.store for pair in pairs for tensor in pair]
        run_reads(work, threads or DEFAULT_THREADS, stores=stores)
    return [tally.difference() for tally in tallies]


def nbytes_of(pair: Pair) -> int:
    return pair[0].nbytes + pair[1].nbytes


class DensePairs(Value, frozen=True, eq=False):
    """Pairs of tensors of one dtype and shape, in one piece in C order on both sides; those of two sources."""

    names: Sequence[str]
    """All names that both sides have."""
    numbers: Ints
    """The positions of these pairs among them, ascending."""
    a: Ranges
    b: Ranges
    stores: tuple[Store, Store]
    crcs: tuple[Ints, Ints]

    def __len__(self) -> int:
        return len(self.numbers)

    def some(self, wanted: Bools) -> DensePairs:
        return replace(
            self,
            numbers=self.numbers[wanted],
            a=self.a.select(wanted),
            b=self.b.select(wanted),
            crcs=(self.crcs[0][wanted], self.crcs[1][wanted]),
        )


def contiguous_pairs(
    a: Table, b: Table, rows: tuple[Sequence[int], Sequence[int]], names: Sequence[str]
) -> list[DensePairs]:
    """The pairs of these rows that are contiguous on both sides, grouped by their sources; `names` of all pairs, for messages."""
    kinds = [
        np.asarray(side.kind_indices, np.int64)[np.asarray(own, np.int64)]
        for side, own in zip((a, b), rows, strict=True)
    ]
    # Each pair of kinds is judged once.
    codes, where = np.unique(kinds[0] * max(len(b.kinds), 1) + kinds[1], return_inverse=True)
    judgements = []
    for code in codes.tolist():
        one, other = a.kinds[code // len(b.kinds)], b.kinds[code % len(b.kinds)]
        # The bytes of two types of blocks may have one length, and stand for different numbers.
        blocks_agree = one.traits.blocks == other.traits.blocks
        judgements.append(one.dtype is other.dtype and one.shape == other.shape and blocks_agree)
    is_alike = np.array(judgements, np.bool_)[where]

    pairs = []
    for source, left in a.find_contiguous_rows(rows[0]):
        for other_source, right in b.find_contiguous_rows(rows[1]):
            numbers, first, second = np.intersect1d(
                np.asarray(left.request_indices, np.int64),
                np.asarray(right.request_indices, np.int64),
                assume_unique=True,
                return_indices=True,
            )
            wanted = is_alike[numbers]
            one_side, other_side = (
                Ranges(side.keys, side.file_indices[at], side.starts[at], side.nbytes[at])
                for side, at in ((left, first[wanted]), (right, second[wanted]))
            )
            crcs = left.crcs[first[wanted]], right.crcs[second[wanted]]
            stores = source.store, other_source.store
            pairs.append(DensePairs(names, numbers[wanted], one_side, other_side, stores, crcs))
    return pairs


def comparable(tensor: LazyTensor) -> tuple[str, tuple[int, ...]]:
    """Return the dtype, or the type of blocks, and the shape by which tensors are compared."""
    blocks = tensor.traits.blocks
    if blocks is not None:
        return blocks, number_shape(tensor.shape, blocks)
    dtype, shape = canonicalize(tensor.dtype, tensor.shape)
    return dtype.name, shape


BATCH = 4096
"""Tensors that are made at a time of those that are not the same."""

COMPARISONS, NAME_LIMIT = 20_000, 160
"""Pairs of names that are compared as text, in all (about a second), and characters of each: its end, which says most."""


@dataclass(frozen=True, slots=True)
class Rename:
    """One content under two names."""

    a: str
    b: str


def match_names(before: Mapping[str, Digest], after: Mapping[str, Digest]) -> list[Rename]:
    """Pair the names of equal digests; a name that has no counterpart left is in no pair.

    One name on each side is unambiguous. Where several tensors hold the same (tied weights, biases of zeros), the nearest names go
    together: by similarity of their text as long as a budget of comparisons lasts, and by the longest common ending of dotted parts
    beyond that, which takes time in proportion to the names.
    """
    groups: dict[Digest, tuple[list[str], list[str]]] = {}
    for side, names in enumerate((before, after)):
        for name, digest in names.items():
            groups.setdefault(digest, ([], []))[side].append(name)
    pairs: list[Rename] = []
    budget = COMPARISONS
    for old, new in groups.values():
        cost = len(old) * len(new)
        if cost == 1:
            pairs.append(Rename(old[0], new[0]))
        elif cost <= budget:
            budget -= cost
            pairs += _by_likeness(old, new)
        else:
            pairs += _by_ending(old, new)
    return pairs


def _by_likeness(old: Sequence[str], new: Sequence[str]) -> Iterator[Rename]:
    scored = []
    for i, b in enumerate(new):
        matcher = difflib.SequenceMatcher(None, "", b[-NAME_LIMIT:], autojunk=False)
        for j, a in enumerate(old):
            matcher.set_seq1(a[-NAME_LIMIT:])
            scored.append((-matcher.ratio(), j, i))
    left, right = set(range(len(old))), set(range(len(new)))
    for _, j, i in sorted(scored):
        if j in left and i in right:
            left.remove(j)
            right.remove(i)
            yield Rename(old[j], new[i])


def _by_ending(old: Sequence[str], new: Sequence[str]) -> Iterator[Rename]:
    """Pairs with the most dotted parts at their ends in common first; then the rest, in order."""
    left, right = dict.fromkeys(old), dict.fromkeys(new)
    parts = {name: name.rsplit(".", 16) for name in (*old, *new)}
    for depth in range(max(map(len, parts.values())), 0, -1):
        waiting: dict[tuple[str, ...], list[str]] = {}
        for name in right:
            if len(parts[name]) >= depth:
                waiting.setdefault(tuple(parts[name][-depth:]), []).append(name)
        for name in list(left):
            found = waiting.get(tuple(parts[name][-depth:])) if len(parts[name]) >= depth else None
            if found:
                counterpart = found.pop(0)
                del left[name], right[counterpart]
                yield Rename(name, counterpart)
    for a, b in zip(left, right, strict=False):
        yield Rename(a, b)


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that both checkpoints have under one name and that is not the same."""

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    content: ContentDifference | None
    """How the elements differ; None where the shapes do, where one of the two is on the meta device and has no elements, or where
    quantised blocks cannot be decoded. Of other blocks these are the numbers that they stand for."""

    @property
    def appeared(self) -> int:
        """Elements that became NaN or infinite."""
        return 0 if self.content is None else self.content.appeared

    @property
    def first_nan(self) -> tuple[int, ...] | None:
        """The index of the first element that became NaN."""
        return (
            None if self.content is None else element_index(self.content.first_nan, self.shapes[1])
        )

    @property
    def first_infinity(self) -> tuple[int, ...] | None:
        """The index of the first element that became infinite."""
        return (
            None if self.content is None else element_index(self.content.first_inf, self.shapes[1])
        )

    @property
    def first_appeared(self) -> tuple[int, ...] | None:
        """The index of the first element that became NaN or infinite."""
        indices = [index for index in (self.first_nan, self.first_infinity) if index is not None]
        return min(indices, default=None)

    @property
    def size(self) -> float:
        """How large the change is: ‖a − b‖ / ‖a‖, and infinite where there is no such number."""
        return math.inf if self.content is None else self.content.size


@dataclass(frozen=True, slots=True)
class Diff(NotebookResult):
    """The differences of `b`, seen from `a`."""

    a: str
    b: str
    added: tuple[str, ...]
    """Tensors that only `b` has, in its order."""
    removed: tuple[str, ...]
    """Tensors that only `a` has, in its order."""
    renamed: tuple[Rename, ...]
    changed: tuple[TensorChange, ...]
    """In the order of `a`; `ranked` has them by their size."""
    values: tuple[ValueChange, ...]
    """Changes of what is no tensor."""
    same: int
    """Tensors that are the same under the same name."""
    same_by_checksum: int
    """Tensors among them that were not read, because both files record the same checksum."""
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.added or self.removed or self.renamed or self.changed or self.values)

    @property
    def nonfinite(self) -> tuple[TensorChange, ...]:
        """The changed tensors in which NaN or infinities appeared: what to look at first. Most of them first."""
        sick = [change for change in self.changed if change.appeared]
        return tuple(
            sorted(sort_naturally(sick, attrgetter("name")), key=lambda change: -change.appeared)
        )

    @property
    def nonfinite_summary(self) -> str:
        """In how many tensors NaN or infinities appeared, and where the first is; empty if there are none."""
        sick = sort_naturally(self.nonfinite, attrgetter("name"))
        if not sick:
            return ""
        first = described_place(sick[0].name, sick[0].first_appeared)
        return f"NaN or Inf appeared in {pluralize(len(sick), 'tensor')}, first {first}"

    def _list_headline_facts(self) -> Iterator[tuple[str, str]]:
        yield from NotebookResult._list_headline_facts(self)
        if self.nonfinite:
            yield "attention", self.nonfinite_summary

    def ranked(self, by: str = "change") -> tuple[TensorChange, ...]:
        """The changed tensors by "change": those in which NaN or infinities appeared, then the others, each the largest first; by
        "name": as people count, layer 2 before layer 10; or as the "file" has them."""
        if make_choice_check(*ORDERS)(by, "by=") == "file":
            return self.changed
        named = sort_naturally(self.changed, attrgetter("name"))
        return tuple(
            named
            if by == "name"
            else sorted(named, key=lambda change: (-change.appeared, -change.size))
        )

    def _arrange_field(self, field: str, value: object) -> object:
        if field == "renamed":
            return tuple(sort_naturally(self.renamed, attrgetter("a")))
        return (
            self.ranked()
            if field == "changed"
            else NotebookResult._arrange_field(self, field, value)
        )


ORDERS = ("change", "name", "file")


@validate_arguments(
    rename=lambda value, name: value if isinstance(value, bool) else check_renames(value, name)
)
def diff(
    a: Openable | Checkpoint,
    b: Openable | Checkpoint,
    *,
    rename: Renames | Mapping[str, str] = (),
    filter: str | None = None,
    tensors_only: bool = False,
    find_renamed: bool = True,
    exact: bool = False,
    max_memory: Size | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    group: AnyGroup | None = None,
    map: AnyMap | None = None,
) -> Diff:
    """Compare two checkpoints: paths (or anything else that `open` takes), or open ones, which stay open.

    `map` shows `a` in the layout of another framework. `rename` changes names of `a` before they are compared, by pairs of
    globs as in `convert` (`[("model.*", "*")]`). `filter` is a glob, or a name that stands for all below it: only what is
    called so then, on both sides, is compared. `tensors_only` leaves out everything that is no tensor. With
    `find_renamed=False` a tensor that moved to another name counts as removed and added. With `exact=True` no checksum is taken
    at its word. Of the ranks of a `group` each reads some of the tensors, and all get all differences. `progress` is called
    with the number of bytes that were read since its last call, from any thread.
    """
    with (
        joined_ranks(group, "compare") as ranks,
        ranks.joint_progress(progress) as counted,
        ExitStack() as stack,
    ):
        sides = ((a, map), (b, None))
        checkpoints = open_on_all_ranks(ranks, stack, sides, limits=limits)
        chosen = chosen_sides(checkpoints, rename=rename, filter=filter, tensors_only=tensors_only)
        threads = count_reading_threads(max_memory, threads, ranks.count_local_ranks())
        return Comparison(
            *chosen, find_renamed=find_renamed, exact=exact, threads=threads, ranks=ranks
        ).run(counted)


class Comparison:
    """A diff that is planned and not done: `nbytes` says how much would be read, `run` reads it."""

    def __init__(
        self,
        a: Side,
        b: Side,
        *,
        find_renamed: bool = True,
        exact: bool = False,
        threads: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        flat = a.flat and b.flat
        a, b = (side if flat else side.made() for side in (a, b))
        self._a, self._b, self._exact, self._threads = a, b, exact, threads
        self._decoded = DequantizedTensors()
        left, right = a.tensors, b.tensors
        self._changes: dict[str, TensorChange] = {}
        self._pairs: dict[str, Pair] = {}
        self._same = self._by_checksum = self._differing = 0
        # Two checkpoints of the same names in one order, as most are, need no position by name.
        alike = left.names == right.names
        rows: Sequence[int] = (
            range(len(left)) if alike else [row for row, name in enumerate(left) if name in right]
        )
        names = left.names if alike else [left.names[row] for row in rows]
        others = rows if alike else [right.row_indices[name] for name in names]
        self._dense: list[DensePairs] = []
        is_dense = np.zeros(len(names), np.bool_)
        for contiguous in contiguous_pairs(left, right, (rows, others), names):
            is_dense[contiguous.numbers] = True
            # What has no bytes has the checksum of nothing.
            crcs, others_crcs = contiguous.crcs
            is_same = ((crcs == others_crcs) & (crcs != NO_CRC)) | (contiguous.a.nbytes == 0)
            is_same &= not exact
            self._same += int(is_same.sum())
            self._dense.append(contiguous.some(~is_same))
        self._by_checksum = self._same
        for number in np.flatnonzero(~is_dense).tolist():
            name = names[number]
            self._plan_pair(name, (left[name], right[name]))
        self._trees = compare_trees(
            a.tree, b.tree, settled=lambda one, other: self._are(one.name, one, other)
        )
        self._plan_places()
        if flat and a.ordered and b.ordered and (np.diff(np.asarray(others, np.int64)) < 0).any():
            self._trees.reordered.insert(0, ())
        self._removed = (
            {name: left[name] for name in left if name not in right}
            if len(rows) < len(left)
            else {}
        )
        self._added = (
            {name: right[name] for name in right if name not in left}
            if len(others) < len(right)
            else {}
        )
        self._candidates = (
            _candidates(self._removed.values(), self._added.values()) if find_renamed else ([], [])
        )
        lone = [
            t for side in self._candidates for t in side if exact or find_recorded_crc(t) is None
        ]
        self.nbytes = sum(map(nbytes_of, self._pairs.values())) + sum(t.nbytes for t in lone)
        self.nbytes += sum(2 * int(contiguous.a.nbytes.sum()) for contiguous in self._dense)

    def run(self, progress: Progress | None = None) -> Diff:
        changes, same = dict(self._changes), self._same
        for name, pair, content in self._contents(progress):
            if content.changed or pair_dtypes(pair)[0] != pair_dtypes(pair)[1]:
                # Of blocks that cannot be decoded, bytes were compared, and these are no numbers.
                is_known = not any(tensor.traits.blocks for tensor in self._numbers(pair))
                changes[name] = _change(name, pair, content if is_known else None)
            elif name in self._a.tensors:
                same += 1
        same += sum(map(len, self._dense)) - self._differing
        renamed = self._renames(progress)
        gone, come = {r.a for r in renamed}, {r.b for r in renamed}
        moved, notes = self._moved()
        values = (*self._trees.changes, *moved)
        texts = self._a.metadata, self._b.metadata
        # What other formats say about themselves comes from the programs that wrote them.
        both = all(
            one.metadata and one.weights_by
            for one in map(format_of, (self._a.format, self._b.format))
        )
        if both and texts[0] is not None and texts[1] is not None:
            values += compare_metadata(texts[0], texts[1])
        order = self._a.tensors.row_indices if changes else {}
        return Diff(
            self._a.path, self._b.path, tuple(name for name in self._added if name not in come),
            tuple(name for name in self._removed if name not in gone), renamed,
            tuple(changes[name] for name in sorted(changes, key=lambda name: order.get(name, len(order)))), values, same,
            self._by_checksum, (*self._trees.notes(), *notes),
        )  # fmt: skip

    def _contents(self, progress: Progress | None) -> Iterator[tuple[str, Pair, ContentDifference]]:
        """The difference of each pair that has to be read; not of contiguous pairs that turn out to be the same."""
        differing = [
            name for contiguous in self._dense for name in self._different(contiguous, progress)
        ]
        self._differing = len(differing)
        found = self._compare(list(self._pairs.values()), progress)
        yield from (
            (name, pair, content)
            for (name, pair), content in zip(self._pairs.items(), found, strict=True)
        )
        for at in range(0, len(differing), BATCH):
            names = differing[at : at + BATCH]
            pairs = [(self._a.tensors[name], self._b.tensors[name]) for name in names]
            yield from zip(names, pairs, self._compare(pairs, progress), strict=True)

    def _different(self, contiguous: DensePairs, progress: Progress | None) -> list[str]:
        """The names of contiguous pairs that are not the same byte for byte. Of several ranks each reads some."""

        def look(numbers: list[int]) -> list[bool]:
            wanted = np.zeros(len(contiguous), np.bool_)
            wanted[numbers] = True
            some = contiguous.some(wanted)
            a, b = (
                StoreRanges(store, ranges, lambda number: some.names[some.numbers.item(number)])
                for store, ranges in zip(some.stores, (some.a, some.b), strict=True)
            )
            is_different: list[bool] = (
                ~compare_ranges(a, b, progress, threads=self._threads)
            ).tolist()
            return is_different

        found = divide_work(self._ranks, contiguous.a.nbytes, look, bool)
        return [
            contiguous.names[number]
            for number, other in zip(contiguous.numbers.tolist(), found, strict=True)
            if other
        ]

    def _compare(self, pairs: Sequence[Pair], progress: Progress | None) -> list[ContentDifference]:
        """The differences of some pairs, of the numbers that quantised blocks stand for."""

        def look(numbers: list[int]) -> list[ContentDifference]:
            own = [pairs[number] for number in numbers]
            decoded = [self._numbers(pair) for pair in own]
            return compare_tensors(decoded, own, progress, threads=self._threads)

        return divide_work(self._ranks, [*map(nbytes_of, pairs)], look, ContentDifference)

    def _numbers(self, pair: Pair) -> Pair:
        """What a pair stands for; itself if it is in no blocks, or in blocks that cannot be decoded."""
        return self._decoded.decode_if_known(pair[0]), self._decoded.decode_if_known(pair[1])

    def _are(self, name: str, a: LazyTensor, b: LazyTensor) -> bool:
        return same_view(self._a.tensors.get(name), a) and same_view(self._b.tensors.get(name), b)

    def _plan_places(self) -> None:
        """Plan to compare tensors at one place that are not compared by one name: they have none, or that of another."""
        for one, other in self._trees.pairs:
            a, b = one.tensor, other.tensor
            # In the tree of a torch file, a tied tensor has the name of the first of its places.
            if self._are(a.name, a, b) or self._are(one.name, a, b):
                continue
            if not same_view(a, b):
                known, by_checksum = self._same, self._by_checksum
                name = f"{one.name} at {one.path!r}"
                while name in self._a.tensors or name in self._pairs or name in self._changes:
                    name += "'"
                self._plan_pair(name, (a, b))
                self._same, self._by_checksum = (
                    known,
                    by_checksum,
                )  # counted under its name, if it has one

    def _moved(self) -> tuple[list[ValueChange], list[str]]:
        """Tensors that both have under one name at two places: as differences, or as a note where one side has names only."""
        names = [{found.name for found in side} for side in self._trees.alone]
        both = {
            name
            for name in names[0] & names[1]
            if name in self._a.tensors and name in self._b.tensors
        }
        if both and (_names_only(self._a) or _names_only(self._b)):
            return [], [
                f"{len(both):,} tensors are nested on one side and have dotted names on the other"
            ]
        sides = [[found for found in side if found.name in both] for side in self._trees.alone]
        return [
            *(ValueChange(found.path, _kind(found.tensor), ABSENT) for found in sides[0]),
            *(ValueChange(found.path, ABSENT, _kind(found.tensor)) for found in sides[1]),
        ], []

    def _plan_pair(self, name: str, pair: Pair) -> None:
        a, b = pair
        alike = comparable(a) == comparable(b)
        decoded = self._numbers(pair)
        # Bytes of blocks that cannot be decoded can be compared with those of the same type alone.
        is_opaque = not alike and any(tensor.traits.blocks for tensor in decoded)
        if a.traits.meta or b.traits.meta or is_opaque or comparable(a)[1] != comparable(b)[1]:
            if alike and a.traits.meta and b.traits.meta:
                self._same += 1
            else:
                self._changes[name] = _change(name, pair, None)
            return
        if alike and not self._exact:
            known = find_recorded_crc(a)
            if known is not None and known == find_recorded_crc(b):
                self._same += 1
                self._by_checksum += 1
                return
        self._pairs[name] = pair

    def _renames(self, progress: Progress | None) -> tuple[Rename, ...]:
        old, new = self._candidates
        both = [*old, *new]

        def sums(numbers: list[int]) -> list[int]:
            own = [both[number] for number in numbers]
            return compute_crcs(
                own, use_recorded=not self._exact, threads=self._threads, progress=progress
            )

        crcs = divide_work(self._ranks, [tensor.nbytes for tensor in both], sums, int)
        digests = [
            Digest.from_crc32(t.dtype, t.shape, crc) for t, crc in zip(both, crcs, strict=True)
        ]
        before = {t.name: d for t, d in zip(old, digests[: len(old)], strict=True)}
        after = {t.name: d for t, d in zip(new, digests[len(old) :], strict=True)}
        renames = match_names(before, after)
        if self._exact:
            found = self._compare([(self._removed[r.a], self._added[r.b]) for r in renames], None)
            renames = [r for r, content in zip(renames, found, strict=True) if not content.changed]
        order = {name: i for i, name in enumerate(self._removed)}
        return tuple(sorted(renames, key=lambda r: order[r.a]))


def _names_only(side: Side) -> bool:
    """Whether this is a file of tensors and names, without a state around them."""
    tree = side.tree
    flat = isinstance(tree, dict) and all(
        type(key) is str and isinstance(value, LazyTensor) for key, value in tree.items()
    )
    return (side.flat or flat) and format_of(side.format).keeps != "state"


def _kind(tensor: LazyTensor) -> ContainerKind:
    dtype, shape = comparable(tensor)
    return ContainerKind(f"tensor {dtype} {list(shape)}")


def _candidates(
    old: Iterable[LazyTensor], new: Iterable[LazyTensor]
) -> tuple[list[LazyTensor], list[LazyTensor]]:
    """The tensors on both sides whose dtype and shape the other side has too; not those without data, which all look alike."""
    sides = [[t for t in side if not t.traits.meta] for side in (old, new)]
    kinds = [set(map(comparable, side)) for side in sides]
    both = kinds[0] & kinds[1]
    first, second = ([t for t in side if comparable(t) in both] for side in sides)
    return first, second


def pair_dtypes(pair: Pair) -> tuple[str, str]:
    """The dtypes of a pair; of quantised blocks, their type."""
    return comparable(pair[0])[0], comparable(pair[1])[0]


def _change(name: str, pair: Pair, content: ContentDifference | None) -> TensorChange:
    shapes = comparable(pair[0])[1], comparable(pair[1])[1]
    return TensorChange(name, pair_dtypes(pair), shapes, content)
