"""Which rule of a pruning applies to which tensor, and what of that cannot be.

Everything is found from names, dtypes and shapes: nothing is read. Names of one and the same tensor are one job. Problems are
collected, so that all of them are told at once.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.chunk import Storage
from holdfast.core.protocols import State
from holdfast.core.sharing import View, identity
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import values_inside
from holdfast.errors import HoldfastError
from holdfast.pruning.loss import Loss, Tally
from holdfast.pruning.rules import Global, Groups, Keep, Rule
from holdfast.pruning.select_masks import Mask

__all__ = ["Job", "assign", "conflicts"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""What can be pruned. Narrower floats are quantised weights: their zeros mean something else beside their scales."""


@dataclass(slots=True)
class Job:
    """One tensor to be pruned."""

    tensor: LazyTensor
    names: list[str]
    rule: Rule
    mask: Mask | None = None
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally(self.tensor.size)

    @property
    def told(self) -> Tally | None:
        """The tally, if it is to be told what is lost; the search for a threshold may have known."""
        return None if self.tally.whole() else self.tally

    @property
    def loss(self) -> Loss:
        """What was lost; none before it is weighed."""
        return self.tally.whole() or Loss()


def conflicts(rules: Sequence[Rule]) -> list[str]:
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


def assign(state: State, rules: Sequence[Rule], problems: list[str]) -> list[Job]:
    """The tensors that rules apply to, in the order of names."""
    whole = _parts(state.tree)
    matched = [0] * len(rules)
    decided = [0] * len(rules)
    jobs: dict[View, Job] = {}
    left: dict[View, str] = {}
    for name in sorted(state.tensors):
        tensor = state.tensors[name]
        numbers = [i for i, rule in enumerate(rules) if fnmatch.fnmatchcase(name, rule.pattern)]
        for i in numbers:
            matched[i] += 1
        rule = rules[numbers[0]] if numbers else None
        if rule is not None:
            decided[numbers[0]] += 1
        own = identity(tensor, noted=True)
        if rule is None or isinstance(rule.method, Keep):
            left.setdefault(own, name)
            continue
        problem = _unfit(tensor, rule, whole.get(own))
        if problem:
            problems.append(f"{name}: {problem} (rule '{rule.pattern}: {rule.text}')")
            continue
        job = jobs.setdefault(own, Job(tensor, [], rule))
        if job.rule.method != rule.method:
            problems.append(f"{job.names[0]} and {name} are one tensor, and rules {job.rule.text!r} and {rule.text!r} apply to it")
        job.names.append(name)
    problems += [
        f"{job.names[0]} and {left[own]} are one tensor, and nothing prunes it under the second name; prune both or keep both"
        for own, job in jobs.items()
        if own in left
    ]
    for i, rule in enumerate(rules):
        if not matched[i]:
            near = difflib.get_close_matches(rule.pattern, list(state.tensors)[:10_000], n=2, cutoff=0.4)
            problems.append(f"rule {rule.pattern!r} matches no tensor" + (f"; near: {', '.join(near)}" if near else ""))
        elif not decided[i] and not isinstance(rule.method, Keep) and [r.pattern for r in rules].count(rule.pattern) < 2:
            problems.append(f"rule {rule.pattern!r} decides nothing: rules before it match all of its names")
    problems += _overlaps(state, jobs)
    return list(jobs.values())


def _parts(tree: object) -> dict[View, str]:
    """The tensors that are parts of others, with the kind of the whole."""
    wholes = (value for value in values_inside(tree) if isinstance(value, Composite))
    return {identity(part, noted=True): whole.kind for whole in wholes for part in whole.parts.values()}


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


def _overlaps(state: State, jobs: Mapping[View, Job]) -> Iterable[str]:
    """Pruned tensors that share elements with other tensors, which would be pruned with them or lose the tie."""
    spans: dict[Storage, dict[tuple[int, int, View], str]] = {}
    for name, tensor in state.tensors.items():
        if not tensor.size or tensor.traits.meta:
            continue
        for chunk in tensor.shared_chunks:
            spans.setdefault(chunk.storage, {}).setdefault((*chunk.extent(tensor.dtype), identity(tensor, noted=True)), name)
    for held in spans.values():
        reached: dict[bool, tuple[int, View, str]] = {}
        """The furthest stop so far, among pruned ones and among others."""
        for (start, stop, own), name in sorted(held.items(), key=lambda item: item[0][:2]):
            pruned = own in jobs
            for kind, (end, other, before) in reached.items():
                if start < end and other != own and (pruned or kind):
                    yield f"{before} and {name} share elements of one storage; only whole tensors can be tied and pruned"
            if pruned not in reached or stop > reached[pruned][0]:
                reached[pruned] = (stop, own, name)
