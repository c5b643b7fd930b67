"""`report`: a checkpoint, the difference of two, or a run, as one page to look at.

    document    what the page shows, as values that JSON has (`Report.document`)
    page        the one HTML file that shows it (`Report.html`, `Report.save`)

`prepared` opens what is to be looked at and says how much would be read; `Prepared.make` reads it. A command draws a bar meanwhile.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.group import ALONE, AnyGroup, Ranks, compare_marks, divide_work, joined_ranks
from holdfast.core.limits import Limits
from holdfast.core.notebook import render_card
from holdfast.core.options import validate_arguments
from holdfast.core.patterns import make_matcher
from holdfast.core.quantities import Size, parse_nbytes
from holdfast.core.registry import find_hook
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import format_iso_time, list_names, pluralize, round_significant
from holdfast.core.value import Value
from holdfast.core.version import VERSION
from holdfast.engine.checksums import Progress
from holdfast.engine.commit.target import not_committed_on_error
from holdfast.engine.commit.transactions import FileTransaction
from holdfast.engine.computed import describe_undecoded
from holdfast.engine.threads import count_reading_threads
from holdfast.errors import NoSuchTensor, NotCommitted, UnknownFormat
from holdfast.extras.reports import change
from holdfast.extras.reports.document import SCHEMA, Document, dumps
from holdfast.extras.reports.measures import (
    BUDGET_NBYTES,
    NonfiniteRow,
    measure,
    measured_columns,
    nonfinite_columns,
    nonfinite_rows,
    reading_nbytes,
    singular_values,
    spectrum_nbytes,
)
from holdfast.extras.reports.page import BEGINNING, page
from holdfast.extras.reports.shards import shards
from holdfast.extras.reports.structure import (
    columns,
    facts,
    look,
    made_at,
    name_of,
    scanned,
    sentence,
    storage_columns,
)
from holdfast.stores.paths import local_path
from holdfast.verbs.nonfinite import describe_nonfinite
from holdfast.verbs.open import Openable, check_ranks_opened_same, opened_checkpoint
from holdfast.verbs.stats import measure as measure_stats

if TYPE_CHECKING:
    from holdfast.extras.maps.find import AnyMap
    from holdfast.extras.runs.steps import Step
    from holdfast.extras.runs.table import RunTable

NOTES = 50
"""Notes of a checkpoint that are shown."""


@dataclass(frozen=True, slots=True)
class Report:
    """The document of `report`, and the page of it."""

    document: Document
    """The data behind the page; docs/report.md has the schema."""

    @property
    def title(self) -> str:
        return str(self.document["title"])

    def json(self) -> str:
        """The document as text, ASCII."""
        return dumps(self.document)

    def html(self) -> str:
        """The page: one HTML file that needs nothing else."""
        return page(self.document)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> str:
        """Write the page to a file of this machine, which appears when it is complete. Its path.

        An earlier page is replaced; anything else that is there only with `overwrite`.
        """
        where = page_target(path, overwrite=overwrite)
        with FileTransaction(where, overwrite=True, durable=False) as transaction:
            transaction.file.write(0, self.html().encode("utf-8"))
            transaction.commit()
        return where

    def _repr_html_(self) -> str:
        """The card of a notebook: the facts; `save` writes the page."""
        given = self.document["facts"]
        facts = (
            [(str(label), str(fact)) for label, fact in given] if isinstance(given, list) else []
        )
        return render_card(str(self.document["sentence"]), facts)

    def __repr__(self) -> str:
        return f"<Report {str(self.document['sentence'])!r}>"


def page_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> str:
    """The path of a page to be written. Raises `NotCommitted` where something else than a page of ours would be replaced."""
    where = local_path(path)
    with not_committed_on_error("look at", where):
        try:
            found = os.stat(where)
        except FileNotFoundError:
            return where
        # Not opened unless it is a file: a pipe would wait for a writer.
        if not stat.S_ISREG(found.st_mode):
            raise NotCommitted(
                "there is a folder or a device with this name; write the page to a file",
                file=where,
                errno=errno.EISDIR,
            )
        if not overwrite:
            with open(where, "rb") as file:
                if file.read(len(BEGINNING)) != BEGINNING:
                    raise NotCommitted(
                        "the file is no page of holdfast; pass overwrite=True to replace it",
                        file=where,
                        errno=errno.EEXIST,
                    )
    return where


class ReportRequest(Value):
    stats: bool = False
    sample: float | None = None
    svd: bool = False
    filter: str | None = None
    mesh: Mapping[str, int] | str | None = None
    max_memory: Size | None = None
    limits: Limits | None = None
    threads: int | None = None
    ranks: Ranks = ALONE
    """The ranks that read together."""
    map: AnyMap | None = None

    @property
    def workers(self) -> int:
        return count_reading_threads(self.max_memory, self.threads, self.ranks.count_local_ranks())

    @property
    def budget(self) -> int:
        return BUDGET_NBYTES if self.max_memory is None else parse_nbytes(self.max_memory) // 2


class Made(Value):
    document: Document
    tensors: Sequence[LazyTensor] = ()
    counterparts: Sequence[LazyTensor | None] = ()
    """Of a difference, the tensor of the other side for each of them."""


class Prepared(Value):
    """Something that is open, and how much of it would be read."""

    nbytes: int
    make: Callable[[Progress | None], Made]


@validate_arguments
def report(
    src: Openable | Checkpoint,
    other: Openable | Checkpoint | None = None,
    *,
    stats: bool = False,
    sample: float | str | None = None,
    svd: bool = False,
    filter: str | None = None,
    mesh: Mapping[str, int] | str | None = None,
    max_memory: Size | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    group: AnyGroup | None = None,
    map: AnyMap | None = None,
) -> Report:
    """Look at a checkpoint as a page: what is in it, how it is stored, and what is odd. `src` may be the directory of a run, too.

    Without `stats` no tensor data is read. With it every tensor is read once: sizes, zeros, NaN, histograms, quantiles, norms of
    rows and columns; `sample` ("1%", 0.01) reads evenly spaced blocks instead, and the page says so; `svd` adds singular values.
    With an `other` checkpoint the page shows what differs. `filter` is a glob, or a name that stands for all below it: only those
    tensors are shown. `mesh` adds which files each rank of another mesh would read: "4" cuts the first dimension of every tensor
    for four ranks, "2x2" the first two. `map` shows `src` in the layout of another framework. Of the ranks of a `group` each
    reads some of the tensors, and all get the page. `progress` is called with the number of bytes that were read since its last
    call, from any thread.
    """
    with joined_ranks(group, "report") as ranks, ranks.joint_progress(progress) as counted:
        asked = ReportRequest(
            stats or sample is not None or svd, sample if isinstance(sample, float) else None, svd,
            filter, mesh, max_memory=max_memory, limits=limits, threads=threads, ranks=ranks, map=map,
        )  # fmt: skip
        with prepared(src, other, asked) as ready:
            return Report(ready.make(counted).document)


@contextmanager
def prepared(
    src: Openable | Checkpoint, other: Openable | Checkpoint | None, asked: ReportRequest
) -> Iterator[Prepared]:
    """Open what is to be looked at, for a block."""
    with ExitStack() as stack:
        if other is not None:
            both = ((src, asked.map), (other, None))
            first, second = (
                stack.enter_context(opened_checkpoint(one, limits=asked.limits, map=map))
                for one, map in both
            )
            check_ranks_opened_same(asked.ranks, first, second)
            yield _difference(_Looked(src, first, asked), _Looked(other, second, asked))
            return
        history = find_hook("run_history")
        table = history.run_at(src) if history.is_run(src) else None
        if table is None:
            try:
                checkpoint = stack.enter_context(
                    opened_checkpoint(src, limits=asked.limits, map=asked.map)
                )
            except UnknownFormat:
                table = history.run_at(src)
                if table is None:
                    raise
            else:
                check_ranks_opened_same(asked.ranks, checkpoint)
                yield _checkpoint(_Looked(src, checkpoint, asked))
                return
        yield _run(table, asked, stack)


class _Looked:
    def __init__(
        self, src: Openable | Checkpoint, checkpoint: Checkpoint, asked: ReportRequest
    ) -> None:
        self.checkpoint, self.asked = checkpoint, asked
        self.found = look(checkpoint, None if asked.filter is None else make_matcher(asked.filter))
        if asked.filter is not None and not self.found.tensors:
            raise NoSuchTensor(
                f"no tensor in the checkpoint is called {asked.filter!r}",
                file=checkpoint.path,
                found=asked.filter,
            )
        self.scan = scanned(checkpoint.path if isinstance(src, Checkpoint) else src, asked.limits)

    @property
    def verdict(self) -> str:
        return str(self.scan["verdict"])

    def frame(self, kind: str) -> Document:
        return {
            **_nothing(),
            "kind": kind,
            "title": name_of(self.checkpoint),
            "path": self.checkpoint.path,
            "made": made_at(self.checkpoint),
            "sentence": sentence(self.found, self.verdict),
            "facts": facts(self.found, self.verdict),
            "scan": self.scan,
            "notes": list(self.checkpoint.notes[:NOTES]),
            "shards": shards(self.found, self.asked.mesh),
        }


def _checkpoint(looked: _Looked) -> Prepared:
    asked, found = looked.asked, looked.found
    tensors = list(found.tensors.values())

    def make(progress: Progress | None) -> Made:
        document = {**looked.frame("checkpoint"), "tensors": columns(found)}
        return _with_numbers(document, tensors, asked, progress=progress)

    return Prepared(_reading(tensors, asked), make)


def _reading(tensors: Iterable[LazyTensor], asked: ReportRequest) -> int:
    if not asked.stats:
        return 0
    tensors = list(tensors)
    spectra = sum(spectrum_nbytes(tensor, asked.budget) for tensor in tensors) if asked.svd else 0
    return reading_nbytes(tensors, asked.sample) + spectra


def _with_numbers(
    document: Document,
    tensors: Sequence[LazyTensor],
    asked: ReportRequest,
    *,
    progress: Progress | None,
) -> Made:
    """The document with the numbers of the tensors, if these are wanted."""
    if not asked.stats:
        return Made(document, tensors)
    numbers = _numbers(tensors, asked, progress)
    text = describe_nonfinite(numbers.nonfinite, numbers.share_text)
    notes = document["notes"]
    assert isinstance(notes, list)
    document = {**document, "notes": [*notes, *describe_undecoded(tensors)]}
    return Made(_add_numbers(document, numbers, text, [["NaN and Inf", text]]), tensors)


def _add_numbers(
    document: Document, numbers: _Numbers, nonfinite_text: str, nonfinite_facts: list[list[str]]
) -> Document:
    """Return the document with the numbers of its tensors, and with what is said of NaN and infinities."""
    known, facts = document["measures"], document["facts"]
    assert isinstance(known, list)  # every document begins with both
    assert isinstance(facts, list)
    more: Document = {
        "stats": True,
        "sampled": None,
        "facts": [*nonfinite_facts, *facts],
        "nonfinite": {"text": nonfinite_text, **nonfinite_columns(numbers.nonfinite)},
        "measures": [*known, *numbers.colours],
        "details": numbers.details,
    }
    if (share := numbers.share) is not None:
        text = f"{100 * share:.3g}% of each large tensor was read, in blocks that lie evenly in it; small ones were read whole"
        more["sampled"] = {"share": share, "text": text}
    return {**document, **more}


class _Numbers(Value):
    """What `--stats` shows of some tensors."""

    share: float | None
    """The share of a sample; None if everything was read."""
    nonfinite: list[NonfiniteRow]
    colours: list[Document]
    details: Document

    @property
    def share_text(self) -> str:
        """What was read, for a line about all tensors; empty if everything was."""
        return "" if self.share is None else "of what was read"


def _numbers(
    tensors: Sequence[LazyTensor], asked: ReportRequest, progress: Progress | None
) -> _Numbers:
    """Read the tensors and return their numbers."""
    threads, ranks = asked.workers, asked.ranks
    measured = measure(tensors, asked.sample, threads=threads, progress=progress, ranks=ranks)
    colours, details = measured_columns(measured)
    if asked.svd:
        spectra = cast("type[tuple[float, ...] | None]", tuple[float, ...] | None)
        found = divide_work(
            asked.ranks, [spectrum_nbytes(tensor, asked.budget) for tensor in tensors],
            lambda numbers: [singular_values(tensors[number], budget=asked.budget, progress=progress) for number in numbers],
            spectra,
        )  # fmt: skip
        details["singular"] = [
            None if values is None else [round_significant(value, 3) for value in values]
            for values in found
        ]
    return _Numbers(asked.sample, nonfinite_rows(tensors, measured), colours, details)


def _difference(a: _Looked, b: _Looked) -> Prepared:
    asked = a.asked
    both, comparison = change.compare(a.found, b.found, threads=asked.workers, ranks=asked.ranks)
    reading_nbytes = comparison.nbytes + _reading(both.tensors.values(), asked)
    if asked.stats:
        # Tensors that differ are measured on both sides. At most those that are compared differ.
        reading_nbytes += comparison.nbytes // 2

    def make(progress: Progress | None) -> Made:
        found = comparison.run(progress)
        rows = change.rows_of(both, found)
        more, colours = change.columns(rows, found)
        tensors = list(rows.tensors.values())
        states = cast("list[int]", more["state"])
        others = change.find_counterparts(a.found, b.found, states, rows.tensors, found)
        document = {
            **a.frame("diff"),
            "title": f"{name_of(a.checkpoint)} → {name_of(b.checkpoint)}",
            "other": b.checkpoint.path,
            "sentence": change.sentence(name_of(a.checkpoint), name_of(b.checkpoint), found),
            "facts": [*change.facts(found), *facts(a.found, a.verdict)],
            "notes": [*found.notes, *a.checkpoint.notes[:NOTES]],
            "tensors": {**columns(rows), **more},
            "measures": colours,
        }
        document["counterparts"] = {"at": others.rows, **storage_columns(others.tensors)}
        if asked.stats:
            document = _with_numbers_of_both(
                document, tensors, states, others=others, asked=asked, progress=progress
            )
        return Made(document, tensors, others.by_row(len(tensors)))

    return Prepared(reading_nbytes, make)


def _with_numbers_of_both(
    document: Document,
    tensors: Sequence[LazyTensor],
    states: Sequence[int],
    *,
    others: change.Counterparts,
    asked: ReportRequest,
    progress: Progress | None,
) -> Document:
    """Return the document of a difference with the numbers of both sides.

    A counterpart with the same numbers as its row is not read: `counterparts.read` has the
    positions of those that are, and the columns beside it have an entry for each of these.
    """
    positions = [at for at, is_different in enumerate(others.is_different) if is_different]
    numbers = _numbers(tensors, asked, progress)
    other_numbers = _numbers([others.tensors[at] for at in positions], asked, progress)

    first = [row for row in numbers.nonfinite if states[row.row] != change.ADDED]
    on_second = (change.SAME, change.MOVED, change.ADDED)
    second = [row for row in numbers.nonfinite if states[row.row] in on_second]
    texts = [
        describe_nonfinite(first, numbers.share_text),
        describe_nonfinite([*second, *other_numbers.nonfinite], numbers.share_text),
    ]
    facts = [["NaN and Inf, first", texts[0]], ["NaN and Inf, second", texts[1]]]

    counterparts = document["counterparts"]
    assert isinstance(counterparts, dict)
    counterparts |= {
        "read": positions,
        "measures": {str(column["key"]): column["values"] for column in other_numbers.colours},
        "details": other_numbers.details,
        "nonfinite": nonfinite_columns(other_numbers.nonfinite),
    }
    return _add_numbers(document, numbers, f"first: {texts[0]}; second: {texts[1]}", facts)


def _run(table: RunTable, asked: ReportRequest, stack: ExitStack) -> Prepared:
    history = find_hook("run_history")
    steps = [row.step for row in table.rows if row.step is not None]
    newest = steps[-1] if steps else None
    compare_marks(asked.ranks, repr([step.step for step in steps]).encode())
    looked = None
    if newest is not None:
        checkpoint = stack.enter_context(newest.open())
        check_ranks_opened_same(asked.ranks, checkpoint)
        looked = _Looked(newest.path, checkpoint, asked)
    tensors = [] if looked is None else list(looked.found.tensors.values())
    sick: list[int] = []

    def make(progress: Progress | None) -> Made:
        document = (
            _nothing()
            if looked is None
            else {**looked.frame("run"), "tensors": columns(looked.found)}
        )
        notes = (
            []
            if newest is None
            else [f"The tensors are those of step {newest.step}, the newest that is whole."]
        )
        over_time = history.history(table, norm)
        if sick:
            numbers = list_names([*map(str, sick)])
            text = f"NaN or Inf is in the tensors of {pluralize(len(sick), 'step')}, which have no norm: {numbers}."
            notes.insert(0, text)
        document = {
            **document,
            "kind": "run",
            "title": table.path.rstrip("/").rpartition("/")[2] or table.path,
            "path": table.path,
            "made": None if newest is None else format_iso_time(newest.saved),
            "sentence": history.sentence(table),
            "facts": [
                *history.facts(table),
                *([] if looked is None else facts(looked.found, looked.verdict)),
            ],
            "notes": [*notes, *([] if looked is None else looked.checkpoint.notes[:NOTES])],
            "run": over_time,
        }
        return _with_numbers(document, tensors, asked, progress=progress)

    def norm_of(step: Step) -> float | None:
        with step.open() as checkpoint:
            check_ranks_opened_same(asked.ranks, checkpoint)
            rows = measure_stats(
                checkpoint.values(), bins=0, threads=asked.workers, ranks=asked.ranks
            )
        # A step with a NaN in it has no norm, and the line over the steps a gap.
        if any(row.nans or row.infinities for row in rows):
            sick.append(step.step)
            return None
        return math.sqrt(sum(row.norm**2 for row in rows if row.norm is not None))

    norm = norm_of if asked.stats and asked.sample is None else None
    return Prepared(_reading(tensors, asked), make)


def _nothing() -> Document:
    """The document of a run without a step, with which every other begins."""
    empty: list[object] = []
    labels: Document = {"labels": empty, "at": empty}
    return {
        **dict.fromkeys(
            [
                "other",
                "made",
                "sampled",
                "details",
                "nonfinite",
                "counterparts",
                "shards",
                "run",
                "live",
            ]
        ),
        "schema": SCHEMA,
        "version": VERSION,
        "scan": {"verdict": "nothing scanned", "findings": empty},
        "stats": False,
        "measures": empty,
        "tensors": {
            "count": 0,
            "names": {"shared": empty, "rest": empty},
            "strides": {"at": empty, "values": empty},
            **dict.fromkeys(["dtype", "shape", "file", "role"], labels),
            **dict.fromkeys(["nbytes", "start", "end", "tie", "layer", "expert"], empty),
        },
    }
