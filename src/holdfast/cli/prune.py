"""`holdfast prune`: a checkpoint with some of its weights set to zero by rules."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.planned import (
    FORMATS,
    add_folder,
    add_sparse,
    add_writing,
    carry_out,
    copy_config,
    note_lines,
    writing,
    written_lines,
)

if TYPE_CHECKING:
    from holdfast.cli.text import Line
    from holdfast.pruning.prune import Pruned

DESCRIPTION = """\
Set weights to zero by rules and write the result, in any format, streamed. The first rule that matches a name decides; what no
rule matches stays as it is. All that is wrong with the rules is said before anything is written."""

EXAMPLES = """\
rules:
  PATTERN: 2:4                 the two largest of every four along the last axis stay; '*: 2:4' means matrices,
                               and leaves norms, biases and embeddings alone
  PATTERN: 0.5                 the half of the smallest magnitudes of each tensor goes
  PATTERN: block 4x4 0.9       blocks, by their mean square
  PATTERN: random 0.3 seed=1   whatever the values
  PATTERN: global 0.8          one threshold over all tensors of all global rules
  PATTERN: keep

examples:
  holdfast prune model.safetensors out.safetensors --rule '*.mlp.*.weight: 2:4' --rule 'lm_head.*: keep'
  holdfast prune model.pt sparse --rule '*.weight: global 0.8' --dry-run
  holdfast prune model.pt sparse --rule '*.weight: 2:4' --sparse auto
  holdfast prune model.pt out/ --rule '*.weight: 0.5' --masks beside
  holdfast show --sparsity out/
"""

ROWS = 200
"""Tensors that are shown unless --all is given."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("src", metavar="SRC", type=values.path, help="a checkpoint of any format")
    verb.add_argument("dst", metavar="DST", type=values.target, help="where to write; the suffix says the format")
    verb.add_argument("--rule", metavar="RULE", action="append", default=[], help="'*.weight: 2:4'; the first that matches decides")
    verb.add_argument("--rules", metavar="FILE", type=values.path, help="a file of rules, one a line; # begins a comment")
    verb.add_argument("--format", choices=FORMATS, help="the format, whatever the suffix")
    masks = "write the masks too, into the directory DST; or only them, to DST"
    verb.add_argument("--masks", choices=("beside", "only"), help=masks)
    verb.add_argument("-a", "--all", action="store_true", help="every tensor")
    add_folder(verb)
    add_sparse(verb)
    add_writing(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.cli.progress import bar
    from holdfast.pruning.prune import plan_prune
    from holdfast.rewrite.formats import Options

    lines = options.rules.read_text("utf-8").splitlines() if options.rules else []
    rules = [*options.rule, *(line for line in (text.partition("#")[0].strip() for text in lines) if line)]
    begin = time.perf_counter()
    with bar("Measuring", quiet=options.quiet or options.json) as progress:
        planned = plan_prune(
            options.src, options.dst, rules, format=options.format, masks=options.masks, copy_config=copy_config(options),
            options=Options(options.max_shard_size, keep_tree=True, sparse=options.sparse),
            writing=writing(options), progress=progress,
        )  # fmt: skip
    most = None if options.all else ROWS
    return carry_out(
        planned, "Weighing" if options.dry_run else "Writing", options, fields=pruned_fields, begin=begin,
        told=lambda done, seconds: report_lines(done, seconds, most),
    )  # fmt: skip


def report_lines(done: Pruned, seconds: float, most: int | None) -> Iterator[Line]:
    """What is printed: a line a tensor, and what was written."""
    from holdfast.cli.text import width
    from holdfast.core.order import in_order
    from holdfast.core.text import clip, count, escape, nbytes, plural

    shown = in_order(done.tensors, lambda row: row.name)[:most]
    names = [escape(clip(row.name, 70)) for row in shown]
    rules = [escape(clip(row.rule, 60)) for row in shown]
    wide = max((width(name) for name in names), default=0)
    for name, rule, row in zip(names, rules, shown, strict=True):
        line: Line = [
            (name + " " * (wide - width(name)), "name"),
            (f"  {_percent(row.sparsity)} zero", "size"),
            (f"  {count(row.pruned):>8} pruned", ""),
            (f"  {_percent(row.norm_lost)} of the norm lost", "value"),
            (f"  {rule}", "dim"),
        ]
        if row.also:
            line.append((f"  = {escape(clip(', '.join(row.also), 60))}", "tie"))
        if row.nonfinite:
            line.append((f"  {row.nonfinite:,} NaN or infinite", "note"))
        yield line
    if len(shown) < len(done.tensors):
        yield [(f"… {plural(len(done.tensors) - len(shown), 'more tensor')}: use --all", "dim")]
    yield [
        (plural(len(done.tensors), "tensor"), "title"),
        (f"  {_percent(done.sparsity).strip()} zero, {_percent(done.norm_lost).strip()} of the norm lost", ""),
        (f"  ({plural(done.kept, 'other')} unchanged)", "dim"),
    ]
    if not done.done:
        size = f"  {done.format}  {nbytes(done.nbytes)}"
        yield [("would write ", "dim"), (escape(clip(done.path, 400)), "title"), (size, "dim")]
        yield from note_lines(done)
    else:
        yield from written_lines(done, f"{seconds:.1f} s")
        if done.masks is not None and done.masks != done.path:
            yield [("wrote ", "clean"), (escape(clip(done.masks, 400)), "title"), ("  masks", "dim")]


def _percent(part: float) -> str:
    return f"{100 * part:6.2f}%" if math.isfinite(part) else "     ?%"


def pruned_fields(done: Pruned) -> dict[str, object]:
    """The report as values that JSON has."""
    return {
        "source": done.source,
        "masks": done.masks,
        "sparsity": done.sparsity,
        "norm_lost": _number(done.norm_lost),
        "kept": done.kept,
        "tensors": [
            {
                "name": row.name,
                "also": list(row.also),
                "rule": row.rule,
                "dtype": row.dtype,
                "shape": list(row.shape),
                "pruned": row.pruned,
                "zeros": row.zeros,
                "sparsity": row.sparsity,
                "nonfinite": row.nonfinite,
                "norm_lost": _number(row.norm_lost),
            }
            for row in done.tensors
        ],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
