"""A sharded save is a chain of values: every rank writes a part, and all of it becomes a checkpoint in one step, or none of it.

    Job ── describe ──► Described ── plan ──► Planned ── write ──► SavedShards

    describe   every rank   names, dtypes, shapes, boxes. No data moves                              ──► gather
    plan       rank 0       replicas dropped and spread, boxes checked to tile; a target (engine/targets)  ──► each rank its part
    write      every rank   its files to that target, checksums on the way, fsync                    ──► receipts
               rank 0       compare receipts with the plan, make the index, publish             ──► done, or what went wrong

In the background the tensors of a value are copied on the way (`stage_described` or `stage_planned`), so that the caller may change
its own; the rest runs on another thread. An error on any rank at any step reaches every rank as the same `RanksFailed`. Before the
checkpoint is published nothing at the target has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from msgspec import field

from holdfast.core.arrays import Ints
from holdfast.core.documents import message_kind, read_document, write_document
from holdfast.core.notebook import Shown
from holdfast.core.protocols import State
from holdfast.core.runtime import gc_paused
from holdfast.core.sharing import tied
from holdfast.core.table import Table
from holdfast.core.value import Value, replace
from holdfast.engine.table import NO_TENSORS, value_state
from holdfast.engine.targets.target import Target, join_target
from holdfast.engine.write import Progress
from holdfast.errors import CannotHold, RankLost, RanksFailed
from holdfast.formats import Format
from holdfast.formats.dcp.flatten import FlatState, common_problems, flatten, root_problems
from holdfast.formats.native.boxes import Boxes
from holdfast.formats.native.manifest import as_bytes, as_column
from holdfast.formats.sharded import NOTHING, RankOutput, Receipt, Storing, spread
from holdfast.formats.tree_json.encode import encode_state
from holdfast.formats.tree_json.scalars import is_unicode
from holdfast.ranks.per_rank import mark, rank_key
from holdfast.ranks.state import RankState
from holdfast.ranks.together import Description, message, put_together
from holdfast.ranks.write import (
    AsStep,
    Publishing,
    check_containers,
    check_contents_open,
    check_value,
    open_publishing,
    publish,
    write_files,
)
from holdfast.torch.cuda.stage import Copies
from holdfast.torch.ranks.dcp import archive, digests
from holdfast.torch.ranks.group import StoreRanks
from holdfast.torch.ranks.replica_sums import replica_sums
from holdfast.torch.ranks.staging import Staged, little_in_common
from holdfast.verbs.shared.base import open_base
from holdfast.verbs.shared.state import tabulate_tree

BACKGROUND_THREADS, BACKGROUND_BLOCK = 4, 16 << 20
"""Threads that write while the caller goes on, and what each writes at a time. For one file four are as fast as sixteen; and every
block takes the interpreter lock a few times, which the caller's own thread needs to feed its GPU."""

THREADS_A_FILE, BACKGROUND_THREADS_A_FILE, FILE_NBYTES = 4, 2, 256 << 20
"""Threads for which a rank writes one more file at once, now and behind the caller, and what a file should have at least. The
kernel lets one thread at a time write to a file: beside it others can sum, and no more."""

NO_COLUMNS = RankState.of_table(NO_TENSORS)
NO_BOXES = Boxes(NO_TENSORS, np.zeros((0, 0), np.int64), ())

Copy = Callable[[Table, Sequence[object]], Staged]
"""Copies the tensors of a table into memory of our own; the caller's own tensors, a row each, where they are known."""


class SaveRequest(Value, frozen=True, kw_only=True):
    """The arguments of one save."""

    path: str
    format: str
    overwrite: bool
    durable: bool
    metadata: Mapping[str, str] | None
    values: Literal["agree", "first"]
    per_rank: Sequence[str]
    check_replicas: bool
    threads: int | None
    progress: Progress | None
    base: str | None = None
    """An older checkpoint, of which unchanged files are taken over."""
    hashes: bool = False
    """Whether hashes are recorded, so that this may be a base; with a base they are."""
    step: AsStep | None = None
    """Set for a step of a run."""


class Job(Value, frozen=True):
    """The arguments of a save, and the ranks that take part."""

    request: SaveRequest
    ranks: StoreRanks
    format: Format
    place: str
    """A URL, or an absolute path: while it is written, the program may go to another folder."""
    open: ExitStack
    """Closed when the save is over, however it ends: the ranks, a folder that was not published."""

    def count_threads(self) -> int:
        return self.request.threads or self.ranks.threads()


class Described(Value, frozen=True):
    """The state of this rank."""

    job: Job
    description: Description | Exception
    """The description for the first rank; or what went wrong."""
    state: State = field(default_factory=lambda: value_state({}))
    digests: Mapping[str, bytes] = field(default_factory=dict)
    """DCP: a hash of each value that is no tensor."""
    aliases: Sequence[tuple[str, str]] = ()
    """Names of one and the same memory, each with the first of them."""
    flat: FlatState = field(default_factory=FlatState)
    notes: tuple[str, ...] = ()
    archives: Mapping[str, bytes] = field(default_factory=dict)
    """DCP: the archives of all values, where the caller goes on and may change them."""
    staged: Staged | None = None

    @property
    def values(self) -> Sequence[object]:
        """The caller's own tensors, a row of the table each, where they are known."""
        return () if self.flat.pickled else self.state.leaves.values

    @property
    def stages_first(self) -> bool:
        """Whether to copy before the plan: where ranks have little in common, of which each would copy all."""
        return self.job.ranks.size == 1 or little_in_common(self.state.tensors)


class Planned(Value, frozen=True):
    """The files that this rank writes, and where."""

    job: Job
    part: RankOutput
    publishing: Publishing | None
    notes: tuple[str, ...]
    target: Target | None = None
    """Where this rank's files go, once it is known."""
    failed: Exception | None = None
    """A failure here since the plan; the others get it instead of a receipt."""
    staged: Staged | None = None
    values: Sequence[object] = ()
    """The caller's own tensors, a box each, where they are known."""


@dataclass(frozen=True, slots=True)
class SavedShards(Shown):
    """What a sharded save did, as one rank saw it."""

    path: str
    format: str
    nbytes: int
    """Bytes of the files of this rank."""
    files: tuple[tuple[str, int], ...]
    """Each of its files and its length."""
    notes: tuple[str, ...] = ()
    """What a person should know."""
    shared_nbytes: int = 0
    """How many of the bytes are those of files that the base has, too: they were not written, and take no room."""

    @property
    def new_nbytes(self) -> int:
        """Bytes that this rank wrote."""
        return self.nbytes - self.shared_nbytes


class RankTask(msgspec.Struct):
    """The first rank's answer: what a rank writes."""

    target_name: str
    boxes: bytes
    """The numbers of boxes in the columns of its own `RankState`, 64-bit integers."""
    values: list[str]
    notes: list[str]
    base: str | None
    """For a step of a run: the name of the step whose files it may share. The first rank knows which are sound."""


TASK, RECEIPTS = (
    message_kind("task of a rank", RankTask),
    message_kind("list of receipts of a rank", list[Receipt]),
)


# Described.


def describe(job: Job, state: Callable[[], object]) -> Described:
    """Describe the state that `state` gives, in usual containers. A failure is shared when the ranks plan."""
    try:
        raw, matched = mark(state(), job.request.per_rank, rank_key(job.ranks.rank, job.ranks.size))
        with gc_paused():
            found = tabulate_tree(raw, metadata=job.request.metadata, arrays="tensors")
            format = job.format
            flat = FlatState() if format.keeps == "state" else flatten(found)
            table = flat.kept(found.tensors)
            found = replace(found, tensors=table)
            hashed = digests(flat) if format.keeps == "items" else {}
            description = _description(found, table, flat, matched, format=format)
            # Names of one and the same memory, each with the first of them.
            full = [0 not in kind.shape for kind in table.kinds]
            shared = {} if format.keeps == "tensors" else tied(table)
            aliases = [
                (table.names[row], table.names[first])
                for row, first in shared.items()
                if full[table.kind[row]]
            ]
            notes = (*found.notes, *format.sharded.unkept(found))
            return Described(job, description, found, hashed, aliases, flat, notes)
    except Exception as error:
        return Described(job, error)


def _description(
    state: State, table: Table, flat: FlatState, matched: list[str], *, format: Format
) -> Description:
    """The description of a state beside its tensors. Raises `CannotHold` with everything that stands in the way."""
    tree = None
    problems = list(flat.problems)
    if format.keeps == "items":
        problems += root_problems(state)
    if format.keeps == "state" and not state.leaves.flat:
        encoded = encode_state(state)
        problems += encoded.problems
        tree = msgspec.json.encode(encoded.value)
        if not problems:
            check_containers(state)
    if format.keeps == "tensors":
        kinds = ((name, type(value.raw).__name__) for name, value in flat.values.items())
        problems += [
            f"{name}: a {kind}; {format.title} files hold tensors alone" for name, kind in kinds
        ]
    problems += [
        f"metadata {key!r}: no Unicode text"
        for key, text in state.metadata.items()
        if not is_unicode(key + text)
    ]
    problems += common_problems(table, flat)
    if problems:
        raise CannotHold("this state cannot be saved so", problems)
    wanted = [kind.traits.requires_grad for kind in table.kinds]
    grads = (
        [name for name, kind in zip(table.names, table.kind, strict=True) if wanted[kind]]
        if any(wanted)
        else []
    )
    return Description(tree, dict(state.metadata), flat.paths, list(flat.values), grads, matched)


def stage_described(described: Described, copy: Copy) -> Described:
    """Replace the tensors by copies, so that the caller may change its own. A failure is shared when the ranks plan."""
    if isinstance(described.description, Exception):
        return described
    try:
        # Before any copy is under way: a value may refuse to be pickled.
        archives = {name: archive(value) for name, value in described.flat.values.items()}
        with gc_paused():
            table = described.state.tensors
            staged = copy(table, described.values)
        return replace(
            described,
            state=replace(described.state, tensors=staged.table),
            archives=archives,
            staged=staged,
        )
    except Exception as error:
        return replace(described, description=error)


# Planned.


def plan(described: Described) -> Planned:
    """Plan together with all ranks."""
    job, request = described.job, described.job.request
    publishing: list[Publishing] = []
    columns, local = _columns(described)

    def decide(messages: list[bytes]) -> list[bytes]:
        with gc_paused():
            together = put_together(
                messages, values=request.values, per_rank=request.per_rank, own=columns
            )
            check_contents_open(job.format, together.contents, request.path)
        opened = open_publishing(
            job.place,
            job.format,
            together,
            durable=request.durable,
            overwrite=request.overwrite,
            step=request.step,
        )
        job.open.callback(opened.target.give_up)
        publishing.append(opened)
        name, notes = opened.target.join_name if len(messages) > 1 else "", list(together.notes)
        tasks = (
            RankTask(name, as_bytes(writes.boxes), list(writes.values), notes, opened.base)
            for writes in together.writes
        )
        return [write_document(TASK, task) for task in tasks]

    answer = job.ranks.agree(local, decide)
    part = RankOutput(job.ranks.rank, job.ranks.size, NO_BOXES, described.state.metadata)
    planned = Planned(
        job, part, publishing[0] if publishing else None, described.notes, staged=described.staged
    )
    try:
        task = read_document(TASK, answer)
        numbers = as_column(task.boxes)
        boxes = _boxes(described.state.tensors, columns, numbers)
        given = described.values
        own = [given[row] for row in columns.tensors[numbers].tolist()] if given else []
        values = {
            name: described.archives.get(name) or archive(described.flat.values[name])
            for name in task.values
        }
        for name, content in values.items():
            check_value(name, content)
        part = replace(part, boxes=boxes, values=values)
        into = (
            publishing[0].target
            if publishing
            else join_target(task.target_name, job.place, durable=request.durable)
        )
        if request.step is not None and task.base is not None:
            job = replace(job, request=replace(request, base=request.step.named(task.base)))
        return replace(
            planned,
            job=job,
            part=part,
            target=into,
            notes=(*planned.notes, *task.notes),
            values=own,
        )
    except Exception as error:
        return replace(planned, failed=error)


def _boxes(table: Table, columns: RankState, numbers: Ints) -> Boxes:
    """The boxes of this rank that have these numbers. A tensor without elements is written as a whole."""
    tensors, starts, sizes = (
        one.take(numbers, axis=-1) for one in (columns.tensors, columns.offsets, columns.sizes)
    )
    extents = columns.catalogue.extents.take(tensors, axis=1)
    if np.count_nonzero(extents) < extents.size:
        empty = np.logical_or.reduce(extents == 0)
        starts, sizes = np.where(empty, 0, starts), np.where(empty, extents, sizes)
    return Boxes.cut(table, tensors.tolist(), starts, sizes)


def _columns(described: Described) -> tuple[RankState, bytes | Exception]:
    job, sums, columns = described.job, b"", NO_COLUMNS
    if isinstance(described.description, Exception):
        return columns, described.description
    try:
        with gc_paused():
            table = described.state.tensors
            columns = RankState.of_table(table, values=described.digests, aliases=described.aliases)
        if job.request.check_replicas and job.ranks.size > 1:
            if described.staged is not None:
                described.staged.copies.wait()  # sums are those of the copies
            sums = replica_sums(table, threads=job.count_threads())
        return columns, message(described.description, None if job.ranks.first else columns, sums)
    except Exception as error:
        return columns, error


def stage_planned(planned: Planned, copy: Copy) -> Planned:
    """Replace the boxes that this rank writes by copies. A failure is shared when the ranks come with their receipts."""
    if planned.failed is not None:
        return planned
    try:
        boxes = planned.part.boxes
        staged = copy(boxes.table, planned.values)
        return replace(
            planned,
            part=replace(planned.part, boxes=replace(boxes, table=staged.table)),
            staged=staged,
        )
    except Exception as error:
        return replace(planned, failed=error)


# Written.


def write(planned: Planned) -> SavedShards:
    """Write this rank's part and, together, publish."""
    job, copies = planned.job, None if planned.staged is None else planned.staged.copies
    receipts: list[Receipt] = []
    more: list[str] = []
    local: bytes | Exception
    try:
        if planned.failed is not None:
            raise planned.failed
        receipts = _written(planned, copies, more)
        local = write_document(RECEIPTS, receipts)
    except Exception as error:
        local = error

    def decide(messages: list[bytes]) -> list[bytes]:
        assert planned.publishing is not None  # it is the first rank that decides
        delivered = [read_document(RECEIPTS, message) for message in messages]
        with gc_paused():
            publish(planned.publishing, delivered, path=job.request.path)
        return [b""] * len(messages)

    try:
        job.ranks.agree(local, decide)
    except (RanksFailed, RankLost) as error:
        # Not where the first rank is lost, and has what it needs from here: it may have published, or do so yet.
        known = isinstance(error, RanksFailed) or isinstance(local, Exception)
        if known and planned.target is not None and not job.ranks.first:
            planned.target.give_up()
        raise
    notes = (*planned.notes, *more, *(() if copies is None else copies.notes()))
    files = tuple((receipt.key, receipt.nbytes) for receipt in receipts)
    shared = sum(receipt.nbytes for receipt in receipts if receipt.linked)
    return SavedShards(
        job.request.path,
        job.request.format,
        sum(nbytes for _, nbytes in files),
        files,
        notes,
        shared,
    )


def _written(planned: Planned, copies: Copies | None, notes: list[str]) -> list[Receipt]:
    """Write this rank's files; notes for a person go to `notes`."""
    request, threads = planned.job.request, planned.job.count_threads()
    if copies is not None:
        copies.wait()
        threads = request.threads or min(threads, BACKGROUND_THREADS)
    block = None if copies is None else BACKGROUND_BLOCK
    reuse = NOTHING
    into = planned.target
    assert into is not None  # or it has failed
    hashed = request.base is not None or request.hashes
    if hashed:
        with closing(
            open_base(request.base, planned.job.place, threads=threads, block=block)
        ) as base:
            reuse = base.take_over_boxes(planned.part.boxes)
    notes += reuse.notes
    # One file for every few threads, each with enough in it.
    # Of an object several parts are on their way at once, and each takes memory.
    each = THREADS_A_FILE if copies is None else BACKGROUND_THREADS_A_FILE
    count = 1 if into.save else max(1, min(threads // each, planned.part.nbytes // FILE_NBYTES))
    shares, how = spread(planned.part.boxes, count, reuse), Storing(hashed, reuse)
    files = planned.job.format.sharded.files(planned.part, shares, how, into.save)
    receipts = write_files(
        files, into, threads=threads, progress=request.progress, block=block, reuse=reuse
    )
    copied = len(reuse.linked) - sum(receipt.linked for receipt in receipts)
    if copied:
        notes.append(
            f"the file system gave no second name to {copied:,} files of the base: they were copied"
        )
    return receipts
