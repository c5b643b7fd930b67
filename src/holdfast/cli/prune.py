"""`holdfast prune`: a checkpoint with some of its weights set to zero by rules."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.cli import places
from holdfast.cli.planned import add_sparse

if TYPE_CHECKING:
    from holdfast.cli.lines import Line
    from holdfast.pruning.prune import Pruned

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]

DESCRIPTION = """\
Set weights to zero by rules and write the result, in any format, streamed. The first rule that matches a name decides; what no
rule matches stays as it is. All that is wrong with the rules is said before anything is written."""

EXAMPLES = """\
rules:
  PATTERN: 2:4                 the two largest of every four along the last axis stay
  PATTERN: 0.5                 the half of the smallest magnitudes of each tensor goes
  PATTERN: block 4x4 0.9       blocks, by their mean square
  PATTERN: random 0.3 seed=1   whatever the values
  PATTERN: global 0.8          one threshold over all tensors of all global rules
  PATTERN: keep

examples:
  holdfast prune model.safetensors -o out.safetensors --rule '*.mlp.*.weight: 2:4' --rule 'lm_head.*: keep'
  holdfast prune model.pt -o sparse --rule '*.weight: global 0.8' --dry-run
  holdfast prune model.pt -o sparse --rule '*.weight: 2:4' --sparse auto
  holdfast prune model.pt -o out.pt --rule '*.weight: 0.5' --masks beside
  holdfast show --sparsity out.pt
"""

ROWS = 200
"""Tensors that are shown unless --all is given."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("src", metavar="SRC", type=places.path, help="a checkpoint of any format")
    where = "where to write; the suffix says the format"
    verb.add_argument("-o", "--output", metavar="OUT", type=places.target, required=True, help=where)
    verb.add_argument("--rule", metavar="RULE", action="append", default=[], help="'*.weight: 2:4'; the first that matches decides")
    verb.add_argument("--rules", metavar="FILE", type=places.path, help="a file of rules, one a line; # begins a comment")
    verb.add_argument("--format", choices=("torch", "safetensors", "native"), help="the format, whatever the suffix")
    verb.add_argument("--masks", choices=("beside", "only"), help="write the masks too, beside OUT; or only them, to OUT")
    add_sparse(verb)
    verb.add_argument("--overwrite", action="store_true", help="replace what is there")
    verb.add_argument("--no-durable", action="store_true", help="do not wait for the disk (no fsync)")
    verb.add_argument("--threads", metavar="N", type=int, help="how many threads")
    verb.add_argument("-n", "--dry-run", action="store_true", help="say what would be pruned, and write nothing")
    verb.add_argument("-a", "--all", action="store_true", help="every tensor")
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    verb.add_argument("--json", action="store_true", help="print one JSON document (its schema is in docs/pruning.md)")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.cli.lines import print_lines
    from holdfast.cli.progress import bar
    from holdfast.inspect.open import open as open_checkpoint
    from holdfast.pruning.prune import plan_prune

    lines = options.rules.read_text("utf-8").splitlines() if options.rules else []
    rules = [*options.rule, *(line for line in (text.partition("#")[0].strip() for text in lines) if line)]
    quiet = options.quiet or options.json
    begin = time.perf_counter()
    with open_checkpoint(options.src, threads=1) as source:
        planned = plan_prune(source, options.output, rules, format=options.format, masks=options.masks, sparse=options.sparse)
        with bar("Measuring", quiet=quiet) as progress:
            planned.measure(threads=options.threads, progress=progress)
        if options.dry_run:
            with bar("Weighing", quiet=quiet) as progress:
                done = planned.report(threads=options.threads, progress=progress)
        else:
            with bar("Writing", planned.nbytes, quiet=quiet) as progress:
                done = planned.run(
                    overwrite=options.overwrite, durable=not options.no_durable, threads=options.threads, progress=progress
                )
    seconds = time.perf_counter() - begin
    if options.json:
        from holdfast.cli.document import print_json

        print_json(prune_document(done, seconds))
    elif not options.quiet:
        print_lines(report_lines(done, seconds, None if options.all else ROWS))
    return 0


def report_lines(done: Pruned, seconds: float, most: int | None) -> Iterator[Line]:
    """What is printed: a line a tensor, and what was written."""
    from holdfast.cli.text import clip, count, escape, nbytes, plural, width

    shown = done.tensors[:most]
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
    if done.saved is None:
        size = f"  {done.format}  {nbytes(done.write_nbytes)}"
        yield [("would write ", "dim"), (escape(clip(done.target, 400)), "title"), (size, "dim")]
    else:
        saved = done.saved
        size = f"  {nbytes(saved.nbytes)} in {plural(saved.files, 'file')}  {seconds:.1f} s"
        yield [("wrote ", "clean"), (escape(clip(saved.path, 400)), "title"), (f"  {saved.format}{size}", "dim")]
        if done.masks is not None and done.masks != saved.path:
            yield [("wrote ", "clean"), (escape(clip(done.masks, 400)), "title"), ("  masks", "dim")]
        for note in saved.notes:
            yield [("  note  ", "note"), (escape(clip(note, 600)), "")]


def _percent(part: float) -> str:
    return f"{100 * part:6.2f}%" if math.isfinite(part) else "     ?%"


def prune_document(done: Pruned, seconds: float) -> dict[str, object]:
    """The report as values that JSON has."""
    return {
        "schema": 1,
        "source": done.source,
        "target": done.target,
        "done": done.saved is not None,
        "format": done.format,
        "write_nbytes": done.saved.nbytes if done.saved is not None else done.write_nbytes,
        "notes": list(done.saved.notes) if done.saved is not None else [],
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
        "seconds": round(seconds, 6) if done.saved is not None else None,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
