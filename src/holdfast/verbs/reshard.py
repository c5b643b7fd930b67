"""`reshard`: write a checkpoint as a given mesh of ranks would have saved it, so that each of them reads one file.

    mesh   dp=2,tp=4          the ranks are the points of a grid, counted with the last name fastest
    rules  *.q_proj.weight: tp=0          shard dimension 0 over tp, replicate over dp
           *.o_proj.weight: tp=1, dp=0    both; where two names shard one dimension, the first one of the mesh cuts first
           *: replicate                   whole (which is also what happens to what no rule matches)

The first rule that matches a name decides. Without any rule, axes cut by their names: dp and fsdp dimension 0, tp the matrices of a
transformer (`core/placement_rules`). Cuts are torch's: pieces of ceil(length / ranks), the last ones shorter or empty. A box
that several ranks have is written once, by the first.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

from holdfast.core.arguments import make_rules_check
from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.options import ReshardOptions, validate_arguments
from holdfast.core.patterns import make_matcher
from holdfast.core.placement_rules import PlacementRule, default_axes, parse_rule
from holdfast.core.protocols import State
from holdfast.core.value import replace
from holdfast.engine.saves import SavePlan
from holdfast.errors import BadPlacement
from holdfast.formats.native.write import lay_out_split
from holdfast.verbs.open import Openable
from holdfast.verbs.shared.formats import choose_save_id
from holdfast.verbs.shared.planned import (
    Destination,
    Planned,
    Saved,
    make_report_fields,
    plan_derived_checkpoint,
)
from holdfast.verbs.shared.state import tabulate_state


def parse_mesh(text: str) -> dict[str, int]:
    """A mesh from text.

    >>> parse_mesh("dp=2, tp=4")
    {'dp': 2, 'tp': 4}
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        name = name.strip()
        if not equals or not name or not size.strip().isdecimal() or int(size) < 1 or name in mesh:
            raise BadPlacement(
                f"a mesh is written like 'dp=2,tp=4', with each name once and at least one rank; not {text!r}"
            )
        mesh[name] = int(size)
    return mesh


def lay_out_reshard(
    state: State, mesh: Mapping[str, int], rules: Sequence[PlacementRule], *, save: str = ""
) -> SavePlan:
    """The plan of a native directory with a file for each rank of the mesh; `save` as for `data_name`."""
    known = ", ".join(mesh)
    problems = [
        f"rule {r.pattern!r}: the mesh has no axis {a!r}, only {known}"
        for r in rules
        for a in r.axes
        if a not in mesh
    ]
    meant = [make_matcher(rule.pattern) for rule in rules]
    used: set[int] = set()
    placed: dict[str, Mapping[str, int]] = {}
    table = state.tensors
    shapes = dict(
        zip(table.names, [table.kinds[kind].shape for kind in table.kind_indices], strict=True)
    )
    for name, shape in shapes.items():
        number = next((i for i, means in enumerate(meant) if means(name)), None)
        if number is None:
            placed[name] = {}
            continue
        used.add(number)
        axes = rules[number].axes
        bad = [d for d in axes.values() if not -len(shape) <= d < len(shape)]
        problems += [
            f"{name}: no dimension {d} in a tensor of {list(shape)} (rule {rules[number].pattern!r})"
            for d in bad
        ]
        placed[name] = {} if bad else {axis: d % len(shape) for axis, d in axes.items()}
    if not rules:
        placed = {name: default_axes(name, shape, mesh) for name, shape in shapes.items()}
        if math.prod(mesh.values()) > 1 and not any(placed.values()):
            problems.append(
                f"without rules nothing is cut over {known}: dp and fsdp cut dimension 0 of what has a row for each rank, "
                "tp the matrices of a transformer, by their names; give rules, like '*.weight: tp=0' ('*: replicate': as it is)"
            )
    problems += [
        f"rule {rule.pattern!r} matches no tensor" for i, rule in enumerate(rules) if i not in used
    ]
    if problems:
        raise BadPlacement(
            "; ".join(problems[:20])
            + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        )
    parts: list[dict[str, Box]] = []
    written: dict[str, set[Box]] = {name: set() for name in shapes}
    for place in itertools.product(*(range(size) for size in mesh.values())):
        at = dict(zip(mesh, place, strict=True))
        own: dict[str, Box] = {}
        for name, shape in shapes.items():
            box = local_box(shape, mesh, at, axes=placed[name])
            if (box.count or not math.prod(shape)) and box not in written[name]:
                written[name].add(box)
                own[name] = box
        parts.append(own)
    plan = lay_out_split(state, parts, save=save)
    return replace(plan, notes=(*plan.notes, *_cuts(placed, mesh, default=not rules)))


def _cuts(
    placed: Mapping[str, Mapping[str, int]], mesh: Mapping[str, int], *, default: bool
) -> Iterator[str]:
    """Notes: how many tensors are cut, and how, and how many are whole."""
    counts = Counter(
        tuple((axis, axes[axis]) for axis in mesh if axis in axes) for axes in placed.values()
    )
    for axes, count in counts.items():
        cut = " and ".join(
            f"along dimension {dimension} over {axis}={mesh[axis]}" for axis, dimension in axes
        )
        many = f"{count:,} tensor{'s' * (count > 1)}"
        why = (
            ": too small, not divisible, or without a default rule for their names"
            if default
            else ""
        )
        yield f"{many} split {cut}" if cut else f"{many} not split{why}"
    for axis, size in mesh.items():
        if size > 1 and not any(axis in axes for axes in placed.values()):
            how = f"; add a rule such as '*.weight: {axis}=0'" if default else ""
            yield f"no tensor is split over {axis}={size}: its {size:,} ranks have equal tensors{how}"


def local_box(
    shape: tuple[int, ...],
    mesh: Mapping[str, int],
    at: Mapping[str, int],
    *,
    axes: Mapping[str, int],
) -> Box:
    """The part of a tensor that the rank at a point of the mesh has."""
    start, stop = [0] * len(shape), list(shape)
    for axis, size in mesh.items():
        d = axes.get(axis)
        if d is not None:
            length = stop[d] - start[d]
            step = -(-length // size)
            first = start[d] + min(at[axis] * step, length)
            start[d], stop[d] = first, min(first + step, stop[d])
    return Box(tuple(start), tuple(stop))


@validate_arguments(rules=make_rules_check(PlacementRule))
def reshard(
    src: Openable | Checkpoint, dst: str | os.PathLike[str], *, rules: Sequence[str | PlacementRule] = (),
    **options: Unpack[ReshardOptions],
) -> Saved:  # fmt: skip
    """Write a checkpoint as a native directory with one data file for each rank of a mesh; streams, in bounded memory.

    `mesh` is `{"dp": 2, "tp": 4}` or "dp=2,tp=4", a rule is text like "*.weight: tp=0" (`PlacementRule`). Without rules, the axes
    dp and fsdp cut dimension 0, and tp the matrices of a transformer by the names that Hugging Face gives
    them. The notes say how many tensors are cut, and how.

    Raises `BadPlacement` for a mesh or a rule that makes no sense, with all that is wrong, and where nothing would be cut without
    rules, before anything is written.
    """
    return plan_reshard(src, dst, rules, options).carry_out(options["progress"])


def plan_reshard(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str],
    rules: Sequence[PlacementRule | str],
    options: ReshardOptions,
) -> Planned[Saved]:
    mesh = options["mesh"]
    grid = parse_mesh(mesh) if isinstance(mesh, str) else dict(mesh)
    parsed = [parse_rule(rule) if isinstance(rule, str) else rule for rule in rules]

    def lay_out(source: Checkpoint, where: Destination) -> Planned[Saved]:
        state = tabulate_state(source, limits=options["limits"])
        plan = replace(
            lay_out_reshard(
                state, grid, parsed, save=choose_save_id(where.path, where.writing.save)
            ),
            expected_table=state.tensors,
        )
        return Planned(
            plan,
            Saved(**make_report_fields(plan, where.path)),
            where.writing,
            reads=state.tensors.stores,
        )

    return plan_derived_checkpoint(src, dst, lay_out, options, directory=True)
