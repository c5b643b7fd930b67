"""One rank's side of `save_sharded`: a save in which every rank has a state of its own.

`engine/targets/joint_save` has the protocol. Its steps are here:

    describe   names, dtypes, shapes and boxes of this rank's state. No data moves.
    plan       The first rank drops replicas, spreads them over the ranks, and checks that the
               boxes cover each tensor. Every rank receives the boxes that it writes.
    write      Every rank writes its files. The first rank writes the index, opens what several
               ranks have written as a reader would, and publishes.

A save in the background copies tensors before it writes (`stage`), so that the caller may change
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.group import Ranks
from holdfast.core.notebook import NotebookResult
from holdfast.core.protocols import State
from holdfast.core.runtime import gc_paused
from holdfast.core.sharing import find_ties
from holdfast.core.strict_json import is_unicode
from holdfast.core.table import Table
from holdfast.core.value import Value, replace
from holdfast.engine.targets.joint_save import JointSave
from holdfast.engine.targets.target import Target, join_target
from holdfast.engine.threads import default_threads
from holdfast.engine.write import Progress
from holdfast.errors import CannotHold
from holdfast.formats import chosen, rank_formats
from holdfast.formats.dcp.flatten import FlatState, flatten, root_problems
from holdfast.formats.native.boxes import Boxes
from holdfast.formats.native.manifest import as_bytes, as_column
from holdfast.formats.sharded import RankOutput, Receipt, common_problems, spread
from holdfast.formats.tree_json.encode import encode_state
from holdfast.ranks.per_rank import mark, rank_key
from holdfast.ranks.state import RankState
from holdfast.ranks.together import (
    Description,
    Proposal,
    Together,
    put_together,
    read_proposal,
    write_proposal,
)
from holdfast.ranks.write import AsStep, check_value, open_together, publish, write_files
from holdfast.stores.place import place_at
from holdfast.torch.ranks.dcp import archive, digests
from holdfast.torch.ranks.replica_sums import replica_sums
from holdfast.torch.ranks.staging import Staged, little_in_common
from holdfast.verbs.shared.base import open_base
from holdfast.verbs.shared.state import tabulate_tree

BACKGROUND_THREADS = 4
"""Threads that write while the caller goes on. For one file four are as fast as sixteen."""

BACKGROUND_BLOCK_NBYTES = 16 << 20
"""What a thread writes at a time while the caller goes on.

Every block takes the interpreter lock a few times, which the caller's own thread needs to feed its
GPU.
"""

THREADS_A_FILE, BACKGROUND_THREADS_A_FILE = 4, 2
"""Threads for which a rank writes one more file at once, now and behind the caller.

The kernel lets one thread at a time write to a file: beside it others can sum, and no more.
"""

FILE_NBYTES = 256 << 20
"""The least bytes in a file if a rank writes several at once."""

Copy = Callable[[Table, Sequence[object]], Staged]
"""Copies the tensors of a table into memory of our own.

The second argument has the caller's own tensors, one for each row, where they are known.
"""


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


@dataclass(frozen=True, slots=True)
class SavedShards(NotebookResult):
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
    """What a rank writes."""

    boxes: bytes
    """The numbers of boxes in the columns of its own `RankState`, 64-bit integers."""
    values: list[str]
    notes: list[str]
    base: str | None
    """For a step of a run: the name of the step whose files it may share. The first rank knows which are sound."""


TASK = message_type("boxes of a rank", RankTask)
RECEIPTS = message_type("list of receipts of a rank", list[Receipt])


class ShardedSave(JointSave):
    """One rank's side of a save of the states of all ranks.

    Call `describe` and then `finish`. A save in the background calls `stage` between the two.
    """

    _state: State
    _description: Description
    _proposal: Proposal
    _together: Together
    """On the first rank: the plan of all ranks."""
    _task: RankTask
    """On the first rank: its own task, which is not sent."""
    _base_name: str | None = None
    """On the first rank, for a step of a run: the name of the step whose files may be shared."""

    def __init__(self, request: SaveRequest, ranks: Ranks) -> None:
        self.ranks = ranks
        format = chosen(request.format, rank_formats())
        assert format is not None  # the argument was checked
        self.format = format
        self.request = request
        # Absolute: the program may change its working directory while the save goes on.
        self.place = place_at(request.path).absolute
        self.staged: Staged | None = None
        self.error: Exception | None = None
        """Why this rank cannot go on. The others receive it in place of its next document."""
        self._flat = FlatState()
        self._digests: Mapping[str, bytes] = {}
        """DCP: a hash of each value that is not a tensor."""
        self._aliases: Sequence[tuple[str, str]] = ()
        """Names of the same memory, each with the first of them."""
        self._archives: dict[str, bytes] = {}
        """DCP: the archives of values. In the background those of all values, before they change."""
        self._notes: list[str] = []
        self._is_planned = False
        self._output: RankOutput | None = None
        """The boxes and values that this rank writes, once all have planned."""
        self._numbers: Ints = np.zeros(0, np.int64)
        """The positions of these boxes among all boxes of this rank."""
        self._base = request.base
        self._receipts: list[Receipt] = []

    def describe(self, state: Callable[[], object]) -> None:
        """Describe the state that `state` returns, in usual containers.

        An error of this and of later steps is kept for the next one, in which the others learn of it.
        """
        request, format = self.request, self.format
        try:
            taken_state, used_patterns = state(), list[str]()
            if request.per_rank:
                key = rank_key(self.ranks.rank, self.ranks.size)
                taken_state, used_patterns = mark(taken_state, request.per_rank, key)
            with gc_paused():
                full = tabulate_tree(taken_state, metadata=request.metadata, arrays="tensors")
                self._state = full
                if format.keeps != "state":
                    self._flat = flatten(full)
                    self._state = replace(full, tensors=self._flat.kept(full.tensors))
                table = self._state.tensors
                if format.keeps == "items":
                    self._digests = digests(self._flat)
                self._description = self._make_description(used_patterns)
                shared = {} if format.keeps == "tensors" else find_ties(table)
                self._aliases = [
                    (table.names[row], table.names[first])
                    for row, first in shared.items()
                    if 0 not in table.row_kind(row).shape
                ]
                self._notes += [*full.notes, *format.sharded.unkept(self._state)]
        except Exception as error:
            self.error = error

    def _make_description(self, used_patterns: list[str]) -> Description:
        """Describe what is not a tensor. Raises `CannotHold` with all problems of the state."""
        state, flat, keeps = self._state, self._flat, self.format.keeps
        table = state.tensors
        tree = None
        problems = list(flat.problems)
        if keeps == "items":
            problems += root_problems(state)
        if keeps == "state" and not state.leaves.is_flat:
            encoded = encode_state(state)
            problems += encoded.problems
            tree = msgspec.json.encode(encoded.value)
        if keeps == "tensors":
            problems += [
                f"{name}: a {type(value.raw).__name__}; {self.format.title} files hold tensors alone"
                for name, value in flat.values.items()
            ]
        problems += [
            f"metadata {key!r}: no Unicode text"
            for key, text in state.metadata.items()
            if not is_unicode(key + text)
        ]
        problems += common_problems(table, flat.paths)
        if problems:
            raise CannotHold("this state cannot be saved so", problems)

        grad_kinds = {
            number for number, kind in enumerate(table.kinds) if kind.traits.requires_grad
        }
        grads: list[str] = []
        if grad_kinds:
            kinds = zip(table.names, table.kind_indices, strict=True)
            grads = [name for name, number in kinds if number in grad_kinds]
        return Description(
            tree, dict(state.metadata), flat.paths, list(flat.values), grads, used_patterns
        )

    def stage(self, copy: Copy) -> None:
        """Copy what this rank writes, so that the caller may change its tensors.

        Where ranks have little in common, each copies all that it has, and the caller does not wait
        for the others. Otherwise each would copy what one of them writes, so the ranks plan first.
        """
        is_alone = self.ranks.size == 1
        if self.error is not None or is_alone or little_in_common(self._state.tensors):
            self._stage_state(copy)
            if self.error is not None:
                self._plan()  # raises it on this rank now, and on the others when they plan
            return

        self._plan()
        if self.error is not None:
            return  # the others receive it in place of a receipt
        output = self._output
        assert output is not None  # or there is an error
        try:
            tensors = self._callers_tensors()
            rows = self._proposal.state.tensors[self._numbers].tolist()
            own_tensors = [tensors[row] for row in rows] if tensors else []
            self.staged = copy(output.boxes.table, own_tensors)
            boxes = replace(output.boxes, table=self.staged.table)
            self._output = replace(output, boxes=boxes)
        except Exception as error:
            self.error = error

    def _stage_state(self, copy: Copy) -> None:
        if self.error is not None:
            return
        try:
            # Before any copy is under way: a value may refuse to be pickled.
            self._archives = {name: archive(value) for name, value in self._flat.values.items()}
            with gc_paused():
                self.staged = copy(self._state.tensors, self._callers_tensors())
            self._state = replace(self._state, tensors=self.staged.table)
        except Exception as error:
            self.error = error

    def _callers_tensors(self) -> Sequence[object]:
        """The caller's own tensors, one for each row of the table, where they are known."""
        return () if self._flat.pickled else self._state.leaves.values

    def finish(self) -> SavedShards:
        """Take the steps that are left, with all ranks."""
        if not self._is_planned:
            self._plan()
        self.write_and_publish(self._write_files)
        copy_notes = () if self.staged is None else self.staged.copies.notes()
        files = tuple((receipt.key, receipt.nbytes) for receipt in self._receipts)
        return SavedShards(
            self.request.path,
            self.request.format,
            nbytes=sum(nbytes for _, nbytes in files),
            files=files,
            notes=(*self._notes, *copy_notes),
            shared_nbytes=sum(receipt.nbytes for receipt in self._receipts if receipt.linked),
        )

    def _plan(self) -> None:
        """Plan with all ranks, and prepare what this rank writes."""
        answer = self.assign_work(self._propose())
        self._is_planned = True
        try:
            task = self._task if self.ranks.is_first else read_document(TASK, answer)
            columns, table = self._proposal.state, self._state.tensors
            self._numbers = as_column(task.boxes)
            values = {
                name: self._archives.get(name) or archive(self._flat.values[name])
                for name in task.values
            }
            for name, content in values.items():
                check_value(name, content)
            step = self.request.step
            if step is not None and task.base is not None:
                self._base = step.named(task.base)
            self._notes += task.notes

            rows, starts, sizes = (
                column.take(self._numbers, axis=-1)
                for column in (columns.tensors, columns.offsets, columns.sizes)
            )
            # A tensor without elements is written as a whole.
            extents = columns.catalogue.extents.take(rows, axis=1)
            if np.count_nonzero(extents) < extents.size:
                is_empty = np.logical_or.reduce(extents == 0)
                starts, sizes = np.where(is_empty, 0, starts), np.where(is_empty, extents, sizes)
            boxes = Boxes.cut(table, rows.tolist(), starts, sizes)
            ranks = self.ranks
            self._output = RankOutput(ranks.rank, ranks.size, boxes, self._state.metadata, values)
        except Exception as error:
            self.error = error

    def _propose(self) -> bytes | Exception:
        """Return the proposal of this rank, or the error that it has instead.

        The first rank keeps its proposal and sends nothing.
        """
        if self.error is not None:
            return self.error
        try:
            table, sums = self._state.tensors, b""
            with gc_paused():
                columns = RankState.of_table(table, values=self._digests, aliases=self._aliases)
            if self.request.check_replicas and self.ranks.size > 1:
                if self.staged is not None:
                    self.staged.copies.wait()  # the checksums are those of the copies
                threads = self.request.threads or default_threads(self.ranks.count_local_ranks())
                sums = replica_sums(table, threads=threads)
            self._proposal = Proposal(self._description, columns, sums)
            return b"" if self.ranks.is_first else write_proposal(self._proposal)
        except Exception as error:
            return error

    def divide_work(self, proposals: list[bytes]) -> list[bytes]:
        """Make one checkpoint of the states of all ranks, and assign the boxes."""
        request, first = self.request, self._proposal
        with gc_paused():
            others: list[Proposal] = []
            if self.ranks.size > 1:
                # Most ranks have the tensors of the first one.
                known = {first.state.catalogue.digest: first.state.catalogue}
                others = [read_proposal(message, known) for message in proposals[1:]]
            self._together = put_together(
                [first, *others], values=request.values, per_rank=request.per_rank
            )
        overwrite = request.overwrite
        if request.step is not None:
            overwrite, self._base_name = request.step.begin(self._together.nbytes)
        self.target = open_together(
            self.place, self.format, durable=request.durable, overwrite=overwrite
        )
        together = self._together
        tasks = [
            RankTask(
                as_bytes(writes.boxes), list(writes.values), [*together.notes], self._base_name
            )
            for writes in together.writes
        ]
        self._task = tasks[0]
        return [b"", *(write_document(TASK, task) for task in tasks[1:])]

    def join_target(self, name: str) -> Target:
        return join_target(name, self.place, durable=self.request.durable)

    def _write_files(self, target: Target) -> bytes:
        """Write the files of this rank. The first rank keeps its receipts and sends none."""
        if self.error is not None:
            raise self.error
        request, output = self.request, self._output
        threads = request.threads or default_threads(self.ranks.count_local_ranks())
        assert output is not None  # or there is an error
        threads_a_file, block_nbytes = THREADS_A_FILE, None
        if self.staged is not None:
            self.staged.copies.wait()
            threads = request.threads or min(threads, BACKGROUND_THREADS)
            threads_a_file, block_nbytes = BACKGROUND_THREADS_A_FILE, BACKGROUND_BLOCK_NBYTES

        if self._base is not None or request.hashes:
            base = open_base(self._base, self.place, threads=threads, block=block_nbytes)
            with closing(base):
                reuse = base.take_over_boxes(output.boxes)
            output = replace(output, is_hashed=True, reuse=reuse)
            self._notes += reuse.notes

        # One file for every few threads, each with enough in it. Of an object several parts are on
        # their way at once, and each takes memory.
        table = output.boxes.table
        output_nbytes = int(table.row_nbytes(range(len(table.names))).sum())
        file_count = max(1, min(threads // threads_a_file, output_nbytes // FILE_NBYTES))
        shares = spread(output, 1 if target.save_id else file_count)
        files = self.format.sharded.files(output, shares, target.save_id)
        self._receipts = write_files(
            files, target, threads=threads, progress=request.progress, block=block_nbytes, reuse=output.reuse
        )  # fmt: skip
        copied_count = len(output.reuse.linked) - sum(receipt.linked for receipt in self._receipts)
        if copied_count:
            self._notes.append(
                f"the file system cannot link {copied_count:,} files of the base, so they were copied"
            )
        return b"" if self.ranks.is_first else write_document(RECEIPTS, self._receipts)

    def publish(self, receipts: list[bytes]) -> list[bytes]:
        assert self.target is not None  # the first rank has opened it
        others = [read_document(RECEIPTS, message) for message in receipts[1:]]
        delivered = [*zip(self._together.writes, [self._receipts, *others], strict=True)]
        with gc_paused():
            publish(
                self.target, self.format, self._together.contents, delivered, path=self.request.path, step=self.request.step
            )  # fmt: skip
        return [b""] * self.ranks.size
