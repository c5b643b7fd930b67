"""`prune`: a checkpoint with some of its weights set to zero by rules, streamed from any format to any format.

1. Rules are laid over the names. What does not fit is collected, and all of it refused, before anything is read or written.
2. Passes over the tensors find what goes: a threshold for each tensor, one for all global rules together, a bit for each block
   (`pruning/select.py`). N:M needs none.
3. The checkpoint is written as in `save`, each block pruned while it is read, and losses are measured on the way. A dry run
   measures them in a pass of its own.

Memory is a few blocks a thread, and a bit for each block of block rules. Of equal magnitudes the one with the lowest index goes
first, and over several tensors those of the tensor whose name sorts first. NaN counts as the largest of all: it goes last, and is
counted in the report. What goes becomes +0.0; what stays keeps its bits, -0.0 and NaN included. Names of one and the same tensor
(tied weights) are pruned as one, counted once, and stay tied.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Unpack

from holdfast.core.arguments import make_rules_check
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.group import divide_work, exchange
from holdfast.core.options import Progress, PruneOptions, validate_arguments
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import pluralize
from holdfast.core.value import replace
from holdfast.engine.saves import SavePlan
from holdfast.engine.scan import scan
from holdfast.engine.table import make_lazy_table
from holdfast.engine.targets.plan_save import Findings
from holdfast.errors import CannotHold
from holdfast.extras.pruning.masked import Loss, Masked, TallyPart, Weighed
from holdfast.extras.pruning.masks import (
    GroupMask,
    ThresholdMask,
    block_masks,
)
from holdfast.extras.pruning.rules import (
    Block,
    Global,
    Groups,
    Job,
    Magnitude,
    PruningRule,
    Random,
    assign,
    conflicts,
    parse_rule,
    tensor_seed,
)
from holdfast.extras.pruning.select import (
    BlockScores,
    KeySearch,
    Magnitudes,
    RandomKeys,
    pieces,
    select_together,
)
from holdfast.numeric.threshold import common_order, pruned_count
from holdfast.verbs.open import Openable
from holdfast.verbs.shared.formats import LayoutOptions, plan_save, resolve_format
from holdfast.verbs.shared.planned import (
    Destination,
    Planned,
    Saved,
    make_report_fields,
    plan_derived_checkpoint,
)
from holdfast.verbs.shared.state import make_flat_state, replace_rows, replace_table, tabulate_state

MASKS, MASKS_FILE = "holdfast.masks", "masks.safetensors"
"""The metadata of a file of masks (JSON, from the name of each tensor to its shape and rule), and the name of that file."""


@dataclass(frozen=True, slots=True)
class PrunedTensor:
    name: str
    rule: str
    """The pattern and the method of the rule that decided."""
    dtype: str
    shape: tuple[int, ...]
    pruned: int
    """Elements that the mask sets to zero, those included that were zero before."""
    zeros: int
    nonfinite: int
    norm_lost: float
    """The L2 norm of what went over that of the whole, 0 to 1; over what is finite, and NaN where nothing else is there."""
    also: tuple[str, ...] = ()
    """Other names of the same tensor."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def sparsity(self) -> float:
        """The part that is zero afterwards."""
        return self.zeros / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned(Saved):
    """The outcome of a pruning."""

    source: str
    tensors: tuple[PrunedTensor, ...] = ()
    kept: int = 0
    """Tensors that no rule changed."""
    norm_lost: float = 0.0
    """The part of the L2 norm of all pruned tensors that went."""
    masks: str | None = None

    @property
    def size(self) -> int:
        """Elements of all tensors that rules apply to."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def sparsity(self) -> float:
        """The part of them that is zero afterwards."""
        return sum(tensor.zeros for tensor in self.tensors) / self.size if self.size else 0.0


@validate_arguments(rules=make_rules_check(PruningRule))
def prune(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str],
    rules: Sequence[str | PruningRule],
    **options: Unpack[PruneOptions],
) -> Pruned:
    """Write a checkpoint with weights set to zero by rules (`pruning/rules.py`), the first that matches a name deciding.

    `masks="beside"` writes the masks too: `masks.safetensors` in the directory that `dst` then has to be, `NAME.mask` a tensor, of
    packed bits, published with the weights by one rename. `masks="only"` writes that file to `dst` and no weights.
    `max_shard_size` and `copy_config` are as for `convert`. With `dry_run` everything is found out and nothing is written.

    Raises `CannotHold` with every problem where the rules do not fit the checkpoint, before anything is read or written.
    """
    return plan_prune(src, dst, rules, options).carry_out(options["progress"])


def plan_prune(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str],
    rules: Sequence[str | PruningRule],
    asked: PruneOptions,
) -> Planned[Pruned]:
    """Lay the rules over a checkpoint, find what goes, which reads, and lay out what stays."""
    masks, progress = asked["masks"], asked["progress"]

    def lay_out(source: Checkpoint, where: Destination) -> Planned[Pruned]:
        target, options = where.path, where.layout
        state = tabulate_state(source, limits=asked["limits"])
        notes: list[str] = []
        jobs = _jobs(source, state, rules, masks=masks, notes=notes)
        chosen = "safetensors" if masks == "only" else resolve_format(target, where.format, options)
        if masks != "only":
            # The state is laid out now: a target that cannot hold it is refused before anything is read.
            directory = plan_save(target, state, chosen, options=options).directory
            if masks == "beside" and not directory:
                problem = f"{target!r} is one file, and two files cannot be published in one step: give a directory"
                raise CannotHold(
                    "the masks have no place",
                    [f"{problem}, or write them by themselves (masks='only')"],
                    file=target,
                )
        pruning = Pruning(state, jobs, masks, options=options)
        with options.ranks.joint_progress(progress) as counted:
            pruning.measure(where.writing.reading_threads, counted)
        plan = pruning.plan(target, chosen)
        plan = replace(plan, notes=(*notes, *plan.notes))
        beside = (
            os.path.join(target, MASKS_FILE)
            if masks == "beside"
            else target
            if masks == "only"
            else None
        )
        report = Pruned(**make_report_fields(plan, target), source=source.path, masks=beside)

        def finish(report: Pruned, progress: Progress | None) -> Pruned:
            return pruning.report(report, where.writing.reading_threads, progress)

        findings = TallyFindings(jobs)
        return Planned(
            plan,
            report,
            where.writing,
            reads=state.tensors.stores,
            finish=finish,
            findings=findings,
        )

    directory = False if masks == "only" else None
    return plan_derived_checkpoint(src, dst, lay_out, asked, elsewhere=True, directory=directory)


def _jobs(
    source: Checkpoint,
    state: State,
    rules: Sequence[str | PruningRule],
    *,
    masks: str | None,
    notes: list[str],
) -> list[Job]:
    """The tensors that rules apply to; notes say what a rule leaves alone. Raises `CannotHold` with all that does not fit."""
    problems: list[str] = []
    parsed: list[PruningRule] = []
    for rule in rules:
        try:
            parsed.append(parse_rule(rule) if isinstance(rule, str) else rule)
        except ValueError as error:
            problems.append(str(error))
    if not rules:
        problems.append("there is no rule")
    if masks not in (None, "beside", "only"):
        problems.append(f"masks are written 'beside' or 'only' they are; found {masks!r}")
    problems += conflicts(parsed)
    jobs = assign(state, parsed, problems, notes)
    if problems:
        raise CannotHold("these rules do not fit the checkpoint", problems, file=source.path)
    return jobs


TALLIES = message_type("list of losses", list[list[TallyPart]])


class TallyFindings(Findings):
    """The losses of all jobs on all ranks."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def encode(self) -> bytes:
        return write_document(TALLIES, [job.tally.parts() for job in self._jobs])

    def merge(self, found: Sequence[bytes]) -> None:
        for job, *parts in zip(
            self._jobs, *(read_document(TALLIES, one) for one in found), strict=True
        ):
            job.tally.clear()
            for own in parts:
                job.tally.put(own)


class Pruning:
    """The tensors that are pruned: `measure` finds the masks, `plan` lays out what they leave, `report` gives the losses."""

    def __init__(
        self, state: State, jobs: list[Job], masks: str | None, *, options: LayoutOptions
    ) -> None:
        self._state, self._jobs, self._masks, self._options = state, jobs, masks, options

    def measure(self, workers: int, progress: Progress | None) -> None:
        """Find the masks. Reads every tensor that a rule applies to, some of them several times; N:M reads nothing. Of several
        ranks each reads some."""
        ranks = self._options.ranks
        # Each search, and the jobs whose tensors are searched together.
        searches: list[tuple[KeySearch, list[Job]]] = []
        together: list[Job] = []
        global_level = 0.0
        for job in self._jobs:
            tensor = job.tensor
            match job.rule.method:
                case Magnitude(level):
                    keys = Magnitudes(tensor, tensor.dtype.name)
                    searches.append((KeySearch([keys], pruned_count(level, keys.count)), [job]))
                case Global(level):
                    together.append(job)
                    global_level = level
                case Groups(n, m):
                    job.mask = GroupMask(n, m, tensor.dtype.name)
                case Block(height, width, level):
                    scores = BlockScores(tensor, height, width)
                    searches.append((KeySearch([scores], pruned_count(level, scores.count)), [job]))
                case Random(level, seed):
                    order = RandomKeys(tensor, tensor_seed(seed, job.names[0]))
                    searches.append((KeySearch([order], pruned_count(level, order.count)), [job]))

        if together:
            order_name = common_order([job.tensor.dtype.name for job in together])
            every = [Magnitudes(job.tensor, order_name) for job in together]
            gone = pruned_count(global_level, sum(keys.count for keys in every))
            searches.append((KeySearch(every, gone), together))
        select_together(
            [search for search, _ in searches], ranks, threads=workers, progress=progress
        )
        block_jobs: list[Job] = []
        searched: list[tuple[BlockScores, KeySearch]] = []
        for search, jobs in searches:
            for job, source, cut in zip(jobs, search.sources, search.before, strict=True):
                if isinstance(source, BlockScores):
                    block_jobs.append(job)
                    searched.append((source, search))
                else:
                    job.mask = ThresholdMask(source, search.key, cut)
        masks = block_masks(searched, threads=workers, progress=progress, ranks=ranks)
        for job, mask in zip(block_jobs, masks, strict=True):
            job.mask = mask

    def _weigh(self, workers: int, progress: Progress | None) -> None:
        """Measure the losses of all tensors that were not read as a whole while they were written."""
        left = [job for job in self._jobs if job.tally.whole() is None]
        for job in left:
            job.tally.clear()

        def weigh(numbers: list[int]) -> list[None]:
            own = [left[number] for number in numbers]
            return scan(
                [job.tensor for job in own],
                lambda i: Weighed(own[i].mask, own[i].tally),
                lambda i: pieces(own[i].tensor.size, own[i].mask.align),
                threads=workers,
                progress=progress,
            )

        if left:
            ranks = self._options.ranks
            divide_work(ranks, [job.tensor.nbytes for job in left], weigh, NoneType)
            if ranks.size > 1:
                # Tell all ranks what each of them has measured.
                findings = TallyFindings(self._jobs)
                findings.merge(exchange(ranks, findings.encode(), common=b""))

    def report(self, report: Pruned, workers: int, progress: Progress | None) -> Pruned:
        """The report with the losses; after `measure`. Reads tensors that were not read as a whole while they were written."""
        self._weigh(workers, progress)
        losses = [job.loss for job in self._jobs]
        rows = [
            PrunedTensor(
                job.names[0], f"{job.rule.pattern}: {job.rule.text or job.rule.method}", job.tensor.dtype.name, job.tensor.shape,
                loss.pruned, loss.zeros, loss.nonfinite, loss.norm_lost, tuple(job.names[1:]),
            )
            for job, loss in zip(self._jobs, losses, strict=True)
        ]  # fmt: skip
        place = {name: at for at, name in enumerate(self._state.tensors)}
        rows.sort(key=lambda row: place[row.name])
        names = sum(len(job.names) for job in self._jobs)
        total = sum(losses, Loss())
        kept = len(self._state.tensors) - names
        sick = sum(1 for row in rows if row.nonfinite)
        elements = pluralize(total.nonfinite, "element")
        note = f"{elements} of {pluralize(sick, 'tensor')} are NaN or infinite: norms are of the others"
        notes = (*report.notes, note) if sick else report.notes
        return replace(
            report, tensors=tuple(rows), kept=kept, norm_lost=total.norm_lost, notes=notes
        )

    def plan(self, target: str, format: str) -> SavePlan:
        """All that is written: weights, masks, or both in one directory."""
        masked = Masked()
        if self._masks == "only":
            return plan_save(target, self._bits(masked), format, options=LayoutOptions())
        plan = plan_save(
            target,
            self._pruned(masked),
            format,
            options=replace(self._options, index=self._masks is not None),
        )
        if self._masks is None:
            return plan
        (bits,) = plan_save(
            target, self._bits(masked), "safetensors", options=LayoutOptions()
        ).files
        return replace(plan, files=(*plan.files, replace(bits, key=MASKS_FILE)))

    def _pruned(self, masked: Masked) -> State:
        table, made = self._state.tensors, dict[int, LazyTensor]()
        for job in self._jobs:
            new = masked.tensor(job.tensor, job.mask, job.tally)
            for name in job.names:
                row = table.row_indices[name]
                traits = replace(table.row_kind(row).traits, conj=False, neg=False, alias=None)
                made[row] = replace(new, name=name, traits=traits)
        return replace_table(self._state, replace_rows(table, made))

    def _bits(self, masked: Masked) -> State:
        notes: dict[str, object] = {}
        tensors: dict[str, LazyTensor] = {}
        for job in self._jobs:
            for name in job.names:
                tally = job.tally if self._masks == "only" else None
                tensors[f"{name}.mask"] = masked.bits(
                    f"{name}.mask", job.tensor, job.mask, tally=tally
                )
                notes[name] = {"shape": list(job.tensor.shape), "rule": job.rule.text}
        return make_flat_state(
            make_lazy_table([*tensors], [*tensors.values()]), {MASKS: json.dumps(notes)}
        )
