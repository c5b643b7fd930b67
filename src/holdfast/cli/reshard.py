"""`holdfast reshard`: a checkpoint written as a mesh of ranks would have saved it."""

from __future__ import annotations

import argparse
import time

from holdfast.cli import places

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]

DESCRIPTION = """\
Write a checkpoint as a native directory with one data file for each rank of a mesh, cut by rules. Streams; any format in.

A rule is a glob, a colon, and the dimension that each axis of the mesh shards; 'replicate' shards none. The first rule that
matches a name decides; names that no rule matches are replicated."""

EXAMPLES = """\
examples:
  holdfast reshard model.safetensors model-tp4 --mesh tp=4 --rule '*.q_proj.weight: tp=0' --rule '*.o_proj.weight: tp=1'
  holdfast reshard step-1000 step-1000-on-8 --mesh dp=2,tp=4 --plan rules.txt
  holdfast show --ranks model-tp4
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("src", metavar="SRC", type=places.path, help="a checkpoint of any format")
    verb.add_argument("dst", metavar="DST", type=places.target, help="the directory to write")
    verb.add_argument("--mesh", metavar="NAME=N,…", required=True, help="the ranks: 'dp=2,tp=4'")
    verb.add_argument("--rule", metavar="RULE", action="append", default=[], help="how names are cut: '*.weight: tp=0'")
    verb.add_argument("--plan", metavar="FILE", type=places.path, help="a file of rules, one a line; # begins a comment")
    verb.add_argument("--overwrite", action="store_true", help="replace what is there")
    verb.add_argument("--no-durable", action="store_true", help="do not wait until the disk has it")
    verb.add_argument("--dry-run", action="store_true", help="say what would be written")
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    verb.add_argument("--threads", metavar="N", type=int, help="threads that read and write")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.cli.lines import print_lines
    from holdfast.cli.progress import bar
    from holdfast.cli.text import clip, escape, nbytes, plural
    from holdfast.inspect.open import open as open_checkpoint
    from holdfast.rewrite.reshard import parse_mesh, parse_rule, plan_reshard, reshard

    mesh = parse_mesh(options.mesh)
    lines = options.plan.read_text("utf-8").splitlines() if options.plan else []
    texts = [*options.rule, *(line.partition("#")[0].strip() for line in lines)]
    rules = [parse_rule(text) for text in texts if text]
    with open_checkpoint(options.src, threads=options.threads) as source:
        plan = plan_reshard(source, mesh, rules)
        if options.dry_run:
            print_lines([(escape(clip(line, 2000)), "")] for line in plan.explain().split("\n"))
            return 0
        begin = time.perf_counter()
        with bar("Resharding", plan.nbytes, quiet=options.quiet) as progress:
            saved = reshard(
                source, options.dst, mesh=mesh, rules=rules, overwrite=options.overwrite, durable=not options.no_durable,
                threads=options.threads, progress=progress,
            )  # fmt: skip
        seconds = time.perf_counter() - begin
    if not options.quiet:
        print_lines(
            [
                [
                    ("wrote ", "clean"),
                    (escape(clip(saved.path, 400)), "title"),
                    (f"  {saved.format}", "dim"),
                    (f"  {nbytes(saved.nbytes)}", "size"),
                    (f" in {plural(saved.files, 'file')} for {plural(len(plan.files), 'rank')}  {seconds:.1f} s", "dim"),
                ]
            ]
        )
    return 0
