"""`prune`: a checkpoint with some of its weights set to zero by rules, streamed from any format to any format.

1. Rules are laid over the names. What does not fit is collected, and all of it refused, before anything is read or written.
2. Passes over the tensors find what goes: a threshold for each tensor, one for all global rules together, a bit for each block
   (`engine/prune_masks.py`). N:M needs none.
3. One pass measures what is lost.
4. The checkpoint is written as in `save`, each block pruned while it is read.

Memory is a few blocks a thread, and a bit for each block of block rules. Of equal magnitudes the one with the lowest index goes
first, and over several tensors those of the tensor whose name sorts first. NaN counts as the largest of all: it goes last, and is
counted in the report. What goes becomes +0.0; what stays keeps its bits, -0.0 and NaN included. Names of one and the same tensor
(tied weights) are pruned as one, counted once, and stay tied.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.api.open import Openable
from holdfast.api.open import open as open_checkpoint
from holdfast.api.prune_rules import Block, Global, Groups, Keep, Magnitude, Random, Rule, parse_rule, tensor_seed
from holdfast.api.save import Saved, unchanged, write_plan
from holdfast.api.state import describe_state, map_tensors
from holdfast.api.targets import Options, format_for, plan_save
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.composite import Composite
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import name_tensors
from holdfast.engine.execute import default_threads, run_all
from holdfast.engine.masked import Loss, Masked, measure_tasks
from holdfast.engine.prune_masks import (
    PIECE,
    GroupMask,
    Magnitudes,
    Mask,
    RandomOrder,
    block_mask,
    common_order,
    threshold_masks,
)
from holdfast.engine.write import Progress
from holdfast.errors import CannotHold, HoldfastError

__all__ = ["MASKS", "Pruned", "PrunedTensor", "Pruning", "plan_prune", "prune"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""What can be pruned. Narrower floats are quantised weights: their zeros mean something else beside their scales."""

MASKS = "holdfast.masks"
"""The metadata of a file of masks: JSON, from the name of each tensor to its shape and rule."""

MOST_VISITS = 100_000


@dataclass(frozen=True, slots=True)
class PrunedTensor:
    """What was done to one tensor."""

    name: str
    rule: str
    """The pattern and the method that decided."""
    dtype: str
    shape: tuple[int, ...]
    pruned: int
    """Elements that the mask sets to zero, those included that were zero before."""
    zeros: int
    """Zeros afterwards."""
    nonfinite: int
    """NaN and infinities that were there."""
    norm_lost: float
    """The L2 norm of what went over that of the whole, 0 to 1; over what is finite."""
    also: tuple[str, ...] = ()
    """Other names of the same tensor."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def sparsity(self) -> float:
        """The part that is zero afterwards."""
        return self.zeros / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a pruning did, or would do; `saved` says which."""

    source: str
    target: str
    tensors: tuple[PrunedTensor, ...]
    kept: int
    """Tensors that no rule changed."""
    norm_lost: float
    """Over all pruned tensors together."""
    saved: Saved | None = None
    masks: str | None = None
    """Where the masks were written."""

    @property
    def size(self) -> int:
        """Elements of all tensors that rules apply to."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def sparsity(self) -> float:
        """The part of them that is zero afterwards."""
        return sum(tensor.zeros for tensor in self.tensors) / self.size if self.size else 0.0


def prune(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str],
    rules: Sequence[str | Rule],
    *,
    format: str | None = None,
    masks: str | None = None,
    overwrite: bool | None = None,
    durable: bool = True,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Pruned:
    """Write a checkpoint with weights set to zero by rules (`api/prune_rules.py`), the first that matches a name deciding.

    `masks="beside"` writes the masks too, to a safetensors file beside the target, `NAME.mask` a tensor, of packed bits;
    `masks="only"` writes that file to `dst` and no weights. With `dry_run` everything is found out and nothing is written.

    Raises `CannotHold` with every problem where the rules do not fit the checkpoint, before anything is read or written.
    """
    target = os.fspath(dst)
    source = src if isinstance(src, Checkpoint) else open_checkpoint(src, threads=1)
    try:
        planned = plan_prune(source, target, rules, format=format, masks=masks)
        planned.measure(threads=threads, progress=progress)
        if dry_run:
            return planned.report()
        return planned.run(overwrite=overwrite, durable=durable, threads=threads, progress=progress)
    finally:
        if source is not src:
            source.close()


def plan_prune(
    source: Checkpoint, target: str, rules: Sequence[str | Rule], *, format: str | None = None, masks: str | None = None
) -> Pruning:
    """Lay the rules over an open checkpoint. Nothing is read."""
    problems: list[str] = []
    parsed: list[Rule] = []
    for rule in rules:
        try:
            parsed.append(parse_rule(rule) if isinstance(rule, str) else rule)
        except ValueError as error:
            problems.append(str(error))
    if not rules:
        problems.append("there is no rule")
    if masks not in (None, "beside", "only"):
        problems.append(f"masks are written 'beside' or 'only' they are; found {masks!r}")
    if os.path.exists(target) and os.path.exists(source.path) and os.path.samefile(target, source.path):
        problems.append(f"the target {target!r} is the source; write beside it")
    problems += _conflicts(parsed)
    state = describe_state(source)
    jobs = _assign(state, parsed, problems)
    if problems:
        raise CannotHold("these rules do not fit the checkpoint", problems, file=source.path)
    # The format is asked now: a target that cannot hold the state is refused before anything is read.
    chosen = "safetensors" if masks == "only" else format_for(target, format, Options(keep_tree=True))
    if masks != "only":
        plan_save(target, state, chosen, Options(keep_tree=True))
    return Pruning(source.path, target, state, jobs, chosen, masks)


@dataclass(slots=True)
class Job:
    """One tensor to be pruned."""

    tensor: LazyTensor
    names: list[str]
    rule: Rule
    mask: Mask | None = None
    loss: Loss = field(default_factory=Loss)


class Pruning:
    """A pruning that is laid out: `measure` finds the masks, `report` says what they do, `run` writes."""

    def __init__(self, source: str, target: str, state: State, jobs: list[Job], format: str, masks: str | None) -> None:
        self._source, self._target, self._state, self._jobs, self._format, self._masks = source, target, state, jobs, format, masks
        self.nbytes = sum(tensor.nbytes for tensor in state.tensors.values())
        """What is written, about."""

    def measure(self, *, threads: int | None = None, progress: Progress | None = None) -> None:
        """Find what goes, and what is lost with it. Reads every tensor that a rule applies to, some of them several times."""
        workers = threads or default_threads()
        tell = progress or _nothing
        small = [job for job in self._jobs if job.tensor.size <= PIECE]
        run_all([_finding(job, 1, tell) for job in small], workers)
        for job in self._jobs:
            if job.tensor.size > PIECE:
                _finding(job, workers, tell)()
        together = [job for job in self._jobs if isinstance(job.rule.method, Global)]
        if together:
            order = common_order([job.tensor.dtype.name for job in together])
            level = max(job.rule.method.level for job in together if isinstance(job.rule.method, Global))
            keys = [Magnitudes(job.tensor, order) for job in together]
            width = together[0].tensor.dtype.bits // 8
            masks = threshold_masks(keys, level, threads=workers, progress=lambda n: tell(n * width))
            for job, mask in zip(together, masks, strict=True):
                job.mask = mask
        self._weigh(workers, tell)

    def _weigh(self, workers: int, tell: Progress) -> None:
        lock = threading.Lock()
        found: list[dict[int, Loss]] = [{} for _ in self._jobs]

        def done(at: int, job: Job) -> Callable[[int, int, Loss], None]:
            def add(number: int, count: int, loss: Loss) -> None:
                with lock:
                    found[at][number] = loss
                tell(job.tensor.dtype.nbytes(count))

            return add

        run_all([t for at, job in enumerate(self._jobs) for t in measure_tasks(job.tensor, _mask(job), done(at, job))], workers)
        for job, parts in zip(self._jobs, found, strict=True):
            # In order, so that sums do not depend on which thread was quicker.
            job.loss = sum((parts[number] for number in sorted(parts)), Loss())

    def report(self) -> Pruned:
        """What goes; after `measure`."""
        rows = [
            PrunedTensor(
                job.names[0], f"{job.rule.pattern}: {job.rule.text or job.rule.method}", job.tensor.dtype.name, job.tensor.shape,
                job.loss.pruned, job.loss.zeros, job.loss.nonfinite, job.loss.norm_lost, tuple(job.names[1:]),
            )
            for job in self._jobs
        ]  # fmt: skip
        place = {name: at for at, name in enumerate(self._state.tensors)}
        rows.sort(key=lambda row: place[row.name])
        names = sum(len(job.names) for job in self._jobs)
        total = sum((job.loss for job in self._jobs), Loss())
        return Pruned(self._source, self._target, tuple(rows), len(self._state.tensors) - names, total.norm_lost)

    def run(
        self, *, overwrite: bool | None = None, durable: bool = True, threads: int | None = None, progress: Progress | None = None
    ) -> Pruned:
        """Write what was measured, wholly or not at all."""
        masked = Masked()
        beside = self._target if self._masks == "only" else masks_path(self._target)

        def write_masks() -> Saved:
            plan = plan_save(beside, self._bits(masked), "safetensors", Options())
            return write_plan(plan, beside, overwrite=overwrite, durable=durable, threads=threads, progress=progress)

        def before_commit() -> None:
            unchanged(self._state, self._target)
            if self._masks == "beside":
                # Last of all: when the weights only wait for their rename.
                write_masks()

        if self._masks == "only":
            return replace(self.report(), saved=write_masks(), masks=beside)
        if self._masks == "beside" and overwrite is False and os.path.lexists(beside):
            raise CannotHold("the masks have no place", [f"{beside!r} exists"], file=self._target)
        options = Options(keep_tree=True)
        saved = write_plan(
            plan_save(self._target, self._pruned(masked), self._format, options), self._target, overwrite=overwrite,
            durable=durable, threads=threads, progress=progress, before_commit=before_commit,
        )  # fmt: skip
        return replace(self.report(), saved=saved, masks=beside if self._masks else None)

    def _pruned(self, masked: Masked) -> State:
        made: dict[object, LazyTensor] = {}
        for job in self._jobs:
            made[_identity(job.tensor)] = masked.tensor(job.tensor, _mask(job))
        same: dict[int, LazyTensor] = {}

        def change(tensor: LazyTensor) -> LazyTensor:
            new = made.get(_identity(tensor))
            if new is None:
                return tensor
            if id(tensor) not in same:
                traits = replace(tensor.traits, conj=False, neg=False, alias=None)
                same[id(tensor)] = replace(new, name=tensor.name, traits=traits)
            return same[id(tensor)]

        tree = map_tensors(self._state.tree, change)
        named = name_tensors(tree, Limits(), MOST_VISITS)
        return State(tree, named.tensors, named.paths, self._state.metadata)

    def _bits(self, masked: Masked) -> State:
        notes: dict[str, object] = {}
        tensors: dict[str, LazyTensor] = {}
        for job in self._jobs:
            for name in job.names:
                tensors[f"{name}.mask"] = masked.bits(f"{name}.mask", job.tensor, _mask(job))
                notes[name] = {"shape": list(job.tensor.shape), "rule": job.rule.text}
        return State(dict(tensors), tensors, {name: (name,) for name in tensors}, {MASKS: json.dumps(notes)})


def masks_path(target: str) -> str:
    """Where the masks of a target go.

    >>> masks_path("out/model.safetensors"), masks_path("step-1/")
    ('out/model.masks.safetensors', 'step-1.masks.safetensors')
    """
    stem, suffix = os.path.splitext(target.rstrip("/"))
    return f"{stem if suffix in ('.safetensors', '.pt', '.pth', '.bin', '.ckpt') else stem + suffix}.masks.safetensors"


def _nothing(nbytes: int) -> None:
    """Nobody asked."""


def _mask(job: Job) -> Mask:
    if job.mask is None:
        raise ValueError("a pruning is measured before it is run")
    return job.mask


def _finding(job: Job, threads: int, tell: Progress) -> Callable[[], None]:
    """Finds the mask of one tensor; that of a global rule is found elsewhere."""
    tensor, width = job.tensor, job.tensor.dtype.bits // 8

    def read(count: int) -> None:
        tell(count * width)

    def run() -> None:
        match job.rule.method:
            case Magnitude(level):
                job.mask = threshold_masks([Magnitudes(tensor, tensor.dtype.name)], level, threads=threads, progress=read)[0]
            case Groups(n, m):
                job.mask = GroupMask(n, m, tensor.dtype.name)
            case Block(height, width, level):
                job.mask = block_mask(tensor, (height, width), level, threads=threads, progress=read)
            case Random(level, seed):
                job.mask = threshold_masks([RandomOrder(tensor.size, tensor_seed(seed, job.names[0]))], level, threads=threads)[0]

    return run


# Which rule applies to which tensor.


def _conflicts(rules: Sequence[Rule]) -> list[str]:
    """What contradicts itself, whatever the checkpoint."""
    seen: dict[str, str] = {}
    problems = []
    for rule in rules:
        if rule.pattern in seen:
            problems.append(f"rule {rule.pattern!r} is there twice: {seen[rule.pattern]!r} and {rule.text!r}")
        seen.setdefault(rule.pattern, rule.text)
    levels = dict.fromkeys(rule.method.level for rule in rules if isinstance(rule.method, Global))
    if len(levels) > 1:
        problems.append(f"global rules share one threshold and so one level; found {', '.join(f'{x:g}' for x in levels)}")
    return problems


def _assign(state: State, rules: Sequence[Rule], problems: list[str]) -> list[Job]:
    """The tensors that rules apply to, in the order of names."""
    whole = _parts(state.tree)
    matched = [0] * len(rules)
    decided = [0] * len(rules)
    jobs: dict[object, Job] = {}
    left: dict[object, str] = {}
    for name in sorted(state.tensors):
        tensor = state.tensors[name]
        numbers = [i for i, rule in enumerate(rules) if fnmatch.fnmatchcase(name, rule.pattern)]
        for i in numbers:
            matched[i] += 1
        rule = rules[numbers[0]] if numbers else None
        if rule is not None:
            decided[numbers[0]] += 1
        identity = _identity(tensor)
        if rule is None or isinstance(rule.method, Keep):
            left.setdefault(identity, name)
            continue
        problem = _unfit(tensor, rule, whole.get(identity))
        if problem:
            problems.append(f"{name}: {problem} (rule '{rule.pattern}: {rule.text}')")
            continue
        job = jobs.setdefault(identity, Job(tensor, [], rule))
        if job.rule.method != rule.method:
            problems.append(f"{job.names[0]} and {name} are one tensor, and rules {job.rule.text!r} and {rule.text!r} apply to it")
        job.names.append(name)
    problems += [
        f"{job.names[0]} and {left[identity]} are one tensor, and nothing prunes it under the second name; prune both or keep both"
        for identity, job in jobs.items()
        if identity in left
    ]
    for i, rule in enumerate(rules):
        if not matched[i]:
            near = difflib.get_close_matches(rule.pattern, list(state.tensors)[:10_000], n=2, cutoff=0.4)
            problems.append(f"rule {rule.pattern!r} matches no tensor" + (f"; near: {', '.join(near)}" if near else ""))
        elif not decided[i] and not isinstance(rule.method, Keep) and [r.pattern for r in rules].count(rule.pattern) < 2:
            problems.append(f"rule {rule.pattern!r} decides nothing: rules before it match all of its names")
    problems += _overlaps(state, jobs)
    return list(jobs.values())


def _parts(tree: object) -> dict[object, str]:
    """The tensors that are parts of others, with the kind of the whole."""
    found: dict[object, str] = {}

    def note(whole: Composite) -> bool:
        found.update((_identity(part), whole.kind) for part in whole.parts.values())
        return True

    map_tensors(tree, lambda tensor: tensor, skip=note)
    return found


def _unfit(tensor: LazyTensor, rule: Rule, part_of: str | None) -> str:
    """Why a tensor cannot be pruned by a rule."""
    shape = list(tensor.shape)
    if part_of is not None:
        what = "quantised" if part_of == "quantized" else part_of.replace("_", " ")
        return f"a part of a {what} tensor; put a rule that keeps it first"
    if tensor.dtype.name not in FLOATS:
        return f"{tensor.dtype.name} is not one of {', '.join(FLOATS)}; put a rule that keeps it first"
    if tensor.traits.meta:
        return "it has no data (meta device)"
    if tensor.ndim == 0:
        return "a single number, with no dimension; put a rule that keeps it first"
    if isinstance(rule.method, Groups) and shape[-1] % rule.method.m:
        n, m = rule.method.n, rule.method.m
        return f"{n}:{m} needs a last axis of a multiple of {m} elements; {shape} has {shape[-1]}"
    try:
        tensor.check_expansion()
    except HoldfastError as error:
        return error.message
    return ""


def _identity(tensor: LazyTensor) -> object:
    """What two names of one and the same tensor have in common."""
    view = tensor.traits.alias
    place: object = tensor.chunks if view is None else (view.group, view.offset, view.strides)
    return id(tensor.source), tensor.dtype, tensor.shape, place


def _overlaps(state: State, jobs: Mapping[object, Job]) -> Iterable[str]:
    """Pruned tensors that share elements with other tensors, which would be pruned with them or lose the tie."""
    spans: dict[object, dict[tuple[int, int, object], str]] = {}
    for name, tensor in state.tensors.items():
        view = tensor.traits.alias
        width = tensor.dtype.bits
        if not tensor.size or tensor.traits.meta:
            continue
        if view is not None:
            places = [((id(tensor.source), view.group), view.offset, view.strides, tensor.shape)]
        else:
            places = [((id(tensor.source), c.storage), c.offset, c.strides, c.shape) for c in tensor.chunks]  # type: ignore[misc]
        for place, offset, strides, shape in places:
            reach = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
            start = offset + sum(x for x in reach if x < 0)
            stop = offset + sum(x for x in reach if x > 0) + width
            spans.setdefault(place, {}).setdefault((start, stop, _identity(tensor)), name)
    for held in spans.values():
        reached: dict[bool, tuple[int, object, str]] = {}
        """The furthest stop so far, among pruned ones and among others."""
        for (start, stop, own), name in sorted(held.items(), key=lambda item: item[0][:2]):
            pruned = own in jobs
            for kind, (end, other, before) in reached.items():
                if start < end and other != own and (pruned or kind):
                    yield f"{before} and {name} share elements of one storage; only whole tensors can be tied and pruned"
            if pruned not in reached or stop > reached[pruned][0]:
                reached[pruned] = (stop, own, name)
