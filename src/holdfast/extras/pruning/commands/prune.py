"""`holdfast prune`: a checkpoint with some of its weights set to zero by rules."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.options import given
from holdfast.cli.planned import add_places, carry_out, written_lines
from holdfast.cli.text import LINES, Line, duration, fields_of, note_lines, padded
from holdfast.core.options import PruneOptions

if TYPE_CHECKING:
    from holdfast.extras.pruning.prune import Pruned

DESCRIPTION = """\
Set weights to zero, by magnitude or at random, and write the result in any format. A rule says which tensors
to prune and how. For each tensor, the first rule whose PATTERN matches its name applies. Tensors
without a rule stay unchanged. The command checks all rules before it writes anything."""

EXAMPLES = """\
rules (PATTERN is a glob such as '*.mlp.*.weight'):
  PATTERN: 2:4                keep the 2 largest of 4 neighbors, by magnitude
  PATTERN: 0.5                set the smaller half of each tensor to zero
  PATTERN: block 4x4 0.9      set 90% of the 4x4 blocks to zero
  PATTERN: random 0.3 seed=1  set 30% to zero, at random
  PATTERN: global 0.8         set 80% to zero, by one threshold for all tensors
                              with such a rule
  PATTERN: keep               change nothing
  With N:M, a pattern that contains * matches matrices only, not norms,
  biases and embeddings.

examples:
  holdfast prune model.safetensors out.safetensors \\
      --rule 'lm_head.*: keep' --rule '*.mlp.*.weight: 2:4'

  # See how much of the norm each tensor would lose.
  holdfast prune model.pt sparse --rule '*.weight: global 0.8' --dry-run

  # Write the masks into the same directory.
  holdfast prune model.pt out/ --rule '*.weight: 0.5' --masks beside

  # Look at the result.
  holdfast show --sparsity out/
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_places(verb, PruneOptions)
    decides = "rule such as '*.weight: 2:4'; repeatable, the first that matches applies"
    verb.add_argument(
        "--rule", metavar="RULE", dest="rules", action="append", default=[], help=decides
    )
    file = "file with one rule per line; # starts a comment"
    verb.add_argument("--rules", metavar="FILE", dest="plan", type=values.path, help=file)
    verb.add_argument("-a", "--all", action="store_true", help="show all tensors (default: 200)")


def run(options: argparse.Namespace) -> int:
    from holdfast.cli.progress import bar
    from holdfast.extras.pruning.prune import plan_prune

    lines = options.plan.read_text("utf-8").splitlines() if options.plan else []
    rules = [
        *options.rules,
        *(line for line in (text.partition("#")[0].strip() for text in lines) if line),
    ]
    begin = time.perf_counter()
    with bar("Measuring", quiet=options.quiet or options.json) as progress:
        planned = plan_prune(
            options.src, options.dst, rules, given(options, PruneOptions, progress=progress)
        )
    most = None if options.all else LINES
    return carry_out(
        planned, "Weighing" if planned.writing.dry_run else "Writing", options, fields=pruned_fields, begin=begin,
        lines=lambda done, seconds: report_lines(done, seconds, most),
    )  # fmt: skip


def report_lines(done: Pruned, seconds: float, most: int | None) -> Iterator[Line]:
    from holdfast.core.order import sort_naturally
    from holdfast.core.text import clip, escape, format_count, format_nbytes, pluralize

    shown = sort_naturally(done.tensors, lambda row: row.name)[:most]
    names = padded([row.name for row in shown])
    rules = [escape(clip(row.rule, 60)) for row in shown]
    for name, rule, row in zip(names, rules, shown, strict=True):
        line: Line = [
            (name, "name"),
            (f"  {_percent(row.sparsity)} zero", "size"),
            (f"  {format_count(row.pruned):>8} pruned", ""),
            (f"  {_percent(row.norm_lost)} of the norm lost", "value"),
            (f"  {rule}", "dim"),
        ]
        if row.also:
            line.append((f"  = {escape(clip(', '.join(row.also), 60))}", "tie"))
        if row.nonfinite:
            line.append((f"  {row.nonfinite:,} NaN or infinite", "note"))
        yield line
    if len(shown) < len(done.tensors):
        yield [(f"… {pluralize(len(done.tensors) - len(shown), 'more tensor')}: use --all", "dim")]
    yield [
        (pluralize(len(done.tensors), "tensor"), "title"),
        (
            f"  {_percent(done.sparsity).strip()} zero, {_percent(done.norm_lost).strip()} of the norm lost",
            "",
        ),
        (f"  ({pluralize(done.kept, 'other')} unchanged)", "dim"),
    ]
    if not done.done:
        size = f"  {done.format}  {format_nbytes(done.nbytes)}"
        yield [("would write ", "dim"), (escape(clip(done.path, 400)), "title"), (size, "dim")]
        yield from note_lines(done.notes)
    else:
        yield from written_lines(done, duration(seconds))
        if done.masks is not None and done.masks != done.path:
            yield [
                ("wrote ", "clean"),
                (escape(clip(done.masks, 400)), "title"),
                ("  masks", "dim"),
            ]


def _percent(part: float) -> str:
    return f"{100 * part:6.2f}%" if math.isfinite(part) else "     ?%"


def pruned_fields(done: Pruned) -> dict[str, object]:
    rows = "name also rule dtype shape pruned zeros sparsity nonfinite norm_lost"
    head = fields_of(done, "source masks sparsity norm_lost kept")
    return head | {"tensors": [fields_of(row, rows) for row in done.tensors]}
