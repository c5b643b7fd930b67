"""The rules of `prune`, as text and as values, and the tensors that each applies to.

    *.mlp.*.weight: 2:4              keep the two largest of every four along the last axis
    *.attn.*.weight: 0.5             the half of the smallest magnitudes of each tensor goes
    *.fc*.weight: block 4x4 0.9      blocks, by their mean square; a tensor is seen as its first axis by all others
    *.proj: random 0.3 seed=1        each tensor gets a pattern of its own from the seed and its name
    *.weight: global 0.8             one threshold over all tensors of all global rules
    lm_head.*: keep                  nothing

The pattern is a glob on dotted names (`core/patterns.py`). The first rule that matches a name decides.

N:M is for matrices that are multiplied with. So a pattern with a wildcard means these where its method is N:M: norms, biases and
embeddings that it matches are left alone, and a note says which. A name in full is taken as it is, and so is a pattern that
names embeddings.

`assign` makes a job of each tensor that a rule applies to, from names, dtypes and shapes: nothing is read. Names of one and the
same tensor are one job. Problems are collected, so that all of them are reported at once.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.chunk import Storage
from holdfast.core.patterns import make_matcher
from holdfast.core.protocols import State
from holdfast.core.sharing import ViewIdentity, identify_view
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import list_names
from holdfast.core.value import Value
from holdfast.errors import HoldfastError
from holdfast.extras.pruning.masked import Loss, Tally
from holdfast.extras.pruning.masks import Mask


class Keep(Value):
    """The tensor stays as it is."""


class Magnitude(Value):
    """The smallest of each tensor go."""

    level: float


class Groups(Value):
    """`n` of every `m` along the last axis stay."""

    n: int
    m: int


class Block(Value):
    """The blocks of the lowest mean square go."""

    height: int
    width: int
    level: float


class Random(Value):
    level: float
    seed: int


class Global(Value):
    """The smallest of all tensors together go."""

    level: float


Method = Keep | Magnitude | Groups | Block | Random | Global


class PruningRule(Value):
    """A pattern of names, and the method for tensors of these names."""

    pattern: str
    method: Method
    text: str = ""
    """The text of the method."""

    def __post_init__(self) -> None:
        problem = _problem(self.method)
        if problem:
            raise ValueError(f"rule {self.pattern!r}: {problem}")


NUMBER = r"[-+]?[\w.%]+"
FORM = re.compile(
    rf"(?P<pattern>.+?)\s*:\s*(?P<text>(?P<keep>keep)|(?P<n>\d+)\s*:\s*(?P<m>\d+)|global\s+(?P<all>{NUMBER})"
    rf"|block\s+(?P<height>\d+)\s*[x×]\s*(?P<width>\d+)\s+(?P<blocks>{NUMBER})"
    rf"|random\s+(?P<part>{NUMBER})(?:\s+seed\s*=\s*(?P<seed>-?\d+))?|(?P<level>[-+]?[\d.][\w.%]*|[-+]?(?:nan|inf)))",
    re.DOTALL,
)
"""The shortest pattern that leaves something with a meaning: `a: 2:4` is not the name `a: 2` at level 4."""


def parse_rule(text: str) -> PruningRule:
    """A rule from text. Raises `ValueError` with what is wrong.

    >>> parse_rule("*.weight: 2:4").method, parse_rule("a:b: block 4x4 0.9")
    (Groups(n=2, m=4), PruningRule(pattern='a:b', method=Block(height=4, width=4, level=0.9), text='block 4x4 0.9'))
    """
    found = FORM.fullmatch(text.strip())
    if found is None:
        forms = "'2:4', '0.5', 'block 4x4 0.9', 'random 0.3 seed=1', 'global 0.8' or 'keep'"
        raise ValueError(f"{text!r} is no rule: write PATTERN: and one of {forms}")
    method: Method
    if found["keep"]:
        method = Keep()
    elif found["n"]:
        method = Groups(int(found["n"]), int(found["m"]))
    elif found["all"]:
        method = Global(_number(found["all"], text))
    elif found["blocks"]:
        method = Block(int(found["height"]), int(found["width"]), _number(found["blocks"], text))
    elif found["part"]:
        method = Random(_number(found["part"], text), int(found["seed"] or 0))
    else:
        method = Magnitude(_number(found["level"], text))
    return PruningRule(found["pattern"], method, " ".join(found["text"].split()))


def _number(text: str, rule: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"rule {rule!r}: {text!r} is no number from 0 to 1") from None


def _problem(method: Method) -> str:
    match method:
        case Groups(n, m) if not (0 <= n <= m and m >= 1):
            return f"{n}:{m} keeps n of every m, with n at most m and m at least 1"
        case Block(height, width, _) if min(height, width) < 1:
            return f"a block of {height} x {width} has no elements"
        case Magnitude(level) | Block(_, _, level) | Random(level, _) | Global(level) if (
            not 0 <= level <= 1
        ):  # NaN as well
            hint = f"; for {level:g} percent write {level / 100:g}" if 1 < level <= 100 else ""
            return f"a level is the part that is pruned, from 0 to 1; found {level:g}{hint}"
    return ""


def tensor_seed(seed: int, name: str) -> int:
    """The seed of one tensor's random order: tensors of one shape do not get one pattern.

    >>> tensor_seed(1, "a") == tensor_seed(1, "a") != tensor_seed(1, "b")
    True
    """
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + seed * 0x9E37_79B9_7F4A_7C15) % (1 << 64)


FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that can be pruned. Narrower floats are quantised weights: their zeros mean something else beside their scales."""


@dataclass(slots=True)
class Job:
    tensor: LazyTensor
    names: list[str]
    rule: PruningRule
    mask: Mask = field(init=False)
    """What stays of the tensor. It is known when the pruning has been measured."""
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally(self.tensor.size)

    @property
    def loss(self) -> Loss:
        return self.tally.whole() or Loss()


def conflicts(rules: Sequence[PruningRule]) -> list[str]:
    seen: dict[str, str] = {}
    problems = []
    for rule in rules:
        if rule.pattern in seen:
            problems.append(
                f"rule {rule.pattern!r} is there twice: {seen[rule.pattern]!r} and {rule.text!r}"
            )
        seen.setdefault(rule.pattern, rule.text)
    levels = dict.fromkeys(rule.method.level for rule in rules if isinstance(rule.method, Global))
    if len(levels) > 1:
        problems.append(
            f"global rules share one threshold and so one level; found {', '.join(f'{x:g}' for x in levels)}"
        )
    return problems


NO_MATRIX, NO_FLOAT, LOOKED_UP = "of one dimension or none", "of integers or flags", "embeddings"
"""Reasons why N:M leaves a tensor alone."""

TABLES = ("wte", "wpe", "shared")
"""Modules that are tables to look up, beside those with "embed" in their names: of GPT-2 and of T5."""


def _left_alone(name: str, tensor: LazyTensor, rule: PruningRule) -> str:
    """The reason why a rule leaves a tensor alone that it matches; empty where it does not."""
    if not isinstance(rule.method, Groups) or name == rule.pattern:
        return ""
    if tensor.dtype.kind != "float":
        return NO_FLOAT
    if tensor.ndim < 2:
        return NO_MATRIX
    modules = name.lower().split(".")[:-1]
    words = [
        word
        for module in modules
        for word in ("embed", *TABLES)
        if module == word or (word == "embed" and word in module)
    ]
    return LOOKED_UP if words and not any(word in rule.pattern.lower() for word in words) else ""


def assign(
    state: State, rules: Sequence[PruningRule], problems: list[str], notes: list[str]
) -> list[Job]:
    """The tensors that rules apply to, in the order of names. Notes say what N:M leaves alone."""
    wholes = state.leaves.composites()
    whole = {
        identify_view(part, stored_alias=True): one.kind
        for one in wholes
        for part in one.parts.values()
    }
    meant = [make_matcher(rule.pattern) for rule in rules]
    matched = [0] * len(rules)
    decided = [0] * len(rules)
    jobs: dict[ViewIdentity, Job] = {}
    left: dict[ViewIdentity, str] = {}
    aside: dict[ViewIdentity, list[tuple[str, PruningRule, str]]] = {}
    for name in sorted(state.tensors):
        tensor = state.tensors[name]
        numbers = [i for i, means in enumerate(meant) if means(name)]
        for i in numbers:
            matched[i] += 1
        rule = rules[numbers[0]] if numbers else None
        if rule is not None:
            decided[numbers[0]] += 1
        own = identify_view(tensor, stored_alias=True)
        if rule is None or isinstance(rule.method, Keep):
            left.setdefault(own, name)
            continue
        alone = _left_alone(name, tensor, rule)
        if alone:
            aside.setdefault(own, []).append((name, rule, alone))
            continue
        problem = _unfit(tensor, rule, whole.get(own))
        if problem:
            problems.append(f"{name}: {problem} (rule '{rule.pattern}: {rule.text}')")
            continue
        job = jobs.setdefault(own, Job(tensor, [], rule))
        if job.rule.method != rule.method:
            problems.append(
                f"{job.names[0]} and {name} are one tensor, and rules {job.rule.text!r} and {rule.text!r} apply to it"
            )
        job.names.append(name)
    for own, held in aside.items():
        # A head that is tied to the embedding is left with it, unless it was named in full.
        tied = jobs.get(own)
        if (
            tied is not None
            and tied.rule.pattern not in tied.names
            and _left_alone(held[0][0], tied.tensor, tied.rule)
        ):
            held += [(name, tied.rule, held[0][2]) for name in jobs.pop(own).names]
        elif tied is not None:
            left.setdefault(own, held[0][0])
    every = [one for held in aside.values() for one in held]
    notes += _asides(every)
    problems += [
        f"{job.names[0]} and {left[own]} are one tensor, and nothing prunes it under the second name; prune both or keep both"
        for own, job in jobs.items()
        if own in left
    ]
    for i, rule in enumerate(rules):
        if not matched[i]:
            near = difflib.get_close_matches(
                rule.pattern, list(state.tensors)[:10_000], n=2, cutoff=0.4
            )
            problems.append(
                f"rule {rule.pattern!r} matches no tensor"
                + (f"; near: {', '.join(near)}" if near else "")
            )
        elif (
            decided[i]
            and not any(job.rule is rule for job in jobs.values())
            and any(one is rule for _, one, _ in every)
        ):
            problem = "finds no matrix: N:M is for weights of two dimensions or more that are no embeddings"
            problems.append(
                f"rule '{rule.pattern}: {rule.text}' {problem}; name a tensor in full to prune it all the same"
            )
        elif (
            not decided[i]
            and not isinstance(rule.method, Keep)
            and [r.pattern for r in rules].count(rule.pattern) < 2
        ):
            problems.append(
                f"rule {rule.pattern!r} decides nothing: rules before it match all of its names"
            )
    problems += _overlaps(state, jobs)
    return list(jobs.values())


def _asides(alone: Sequence[tuple[str, PruningRule, str]]) -> list[str]:
    """A sentence for each rule that left something alone."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, rule, why in alone:
        found.setdefault(f"{rule.pattern}: {rule.text}", {}).setdefault(why, []).append(name)
    notes = []
    for rule_text, reasons in found.items():
        parts = []
        for why, names in reasons.items():
            parts.append(f"{len(names):,} {why} ({list_names([*map(repr, names)], 3)})")
        notes.append(
            f"'{rule_text}' is for matrices and leaves other tensors alone: {'; '.join(parts)}"
        )
    return notes


def _unfit(tensor: LazyTensor, rule: PruningRule, part_of: str | None) -> str:
    """The reason why a tensor cannot be pruned by a rule; empty where it can."""
    shape = list(tensor.shape)
    if part_of is not None:
        what = "quantised" if part_of == "quantized" else part_of.replace("_", " ")
        return f"a part of a {what} tensor; put a rule that keeps it first"
    if tensor.dtype.name not in FLOATS:
        return (
            f"{tensor.dtype.name} is not one of {', '.join(FLOATS)}; put a rule that keeps it first"
        )
    if tensor.traits.meta:
        return "it has no data (meta device)"
    if tensor.ndim == 0:
        return "a single number, with no dimension; put a rule that keeps it first"
    if isinstance(rule.method, Groups) and shape[-1] % rule.method.m:
        pattern, m = f"{rule.method.n}:{rule.method.m}", rule.method.m
        need = f"{pattern} needs a last axis of a multiple of {m} elements"
        return f"{need}, and {shape} has {shape[-1]}; put a rule that keeps it first"
    try:
        tensor.check_expansion()
    except HoldfastError as error:
        return error.message
    return ""


def _overlaps(state: State, jobs: Mapping[ViewIdentity, Job]) -> Iterable[str]:
    """Pruned tensors that share elements with other tensors, which would be pruned with them or lose the tie."""
    spans: dict[Storage, dict[tuple[int, int, ViewIdentity], str]] = {}
    for name, tensor in state.tensors.items():
        if not tensor.size or tensor.traits.meta:
            continue
        for chunk in tensor.shared_chunks:
            spans.setdefault(chunk.storage, {}).setdefault(
                (*chunk.byte_range(tensor.dtype), identify_view(tensor, stored_alias=True)), name
            )
    for held in spans.values():
        reached: dict[
            bool, tuple[int, ViewIdentity, str]
        ] = {}  # the furthest stop so far, among pruned ones and among others
        for (start, stop, own), name in sorted(held.items(), key=lambda item: item[0][:2]):
            pruned = own in jobs
            for kind, (end, other, before) in reached.items():
                if start < end and other != own and (pruned or kind):
                    yield f"{before} and {name} share elements of one storage; only whole tensors can be tied and pruned"
            if pruned not in reached or stop > reached[pruned][0]:
                reached[pruned] = (stop, own, name)
