"""`holdfast report`: a checkpoint, the difference of two or a run as one HTML file to look at; `holdfast view` serves it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.text import print_json, print_lines

if TYPE_CHECKING:
    from holdfast.core.group import Ranks
    from holdfast.extras.reports.report import ReportRequest

DESCRIPTION = """\
Write a page to look at: what is in a checkpoint, how large, where in which file, and what is odd about it; with OTHER, what
differs; of a run's directory, its steps over time. It is one HTML file that needs nothing else and loads nothing. No tensor data
is read without --stats, which reads every tensor once; a difference is read where checksums do not say it."""

EXAMPLES = """\
examples:
  holdfast report model.safetensors -o model.html
  holdfast report model.safetensors -o model.html --stats
  holdfast report huge/ -o huge.html --sample 1%
  holdfast report base.safetensors tuned.safetensors -o change.html
  holdfast report runs/llama -o run.html
  holdfast report checkpoints/step-1000 -o step.html --mesh 8
  holdfast report model.pt --json | jq -r .sentence
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_report_arguments(verb)
    verb.add_argument(
        "-o", "--output", metavar="FILE", type=values.file, help="where to write the page"
    )
    verb.add_argument(
        "--overwrite", action="store_true", help="replace what is there, also where it is no page"
    )
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    verb.add_argument(
        "--json",
        action="store_true",
        help="print the data behind the page (its schema is in docs/report.md)",
    )


def add_report_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "path",
        metavar="PATH",
        type=values.target,
        help="a checkpoint of any format, or a run's directory",
    )
    verb.add_argument(
        "other",
        metavar="OTHER",
        type=values.target,
        nargs="?",
        help="a second one: show what differs",
    )
    verb.add_argument(
        "--stats",
        action="store_true",
        help="read every tensor: sizes, zeros, NaN, histograms, quantiles, norms",
    )
    verb.add_argument(
        "--sample", metavar="SHARE", type=_share, help="read only so much of each large tensor: 1%%"
    )
    verb.add_argument(
        "--svd",
        action="store_true",
        help="singular values as well; reads matrices three times more",
    )
    verb.add_argument("-f", "--filter", metavar="GLOB", help="only names that match")
    verb.add_argument(
        "--map", metavar="MAP", help="see PATH in another layout: qwen3:hf:megatron; auto"
    )
    verb.add_argument(
        "--mesh", metavar="N", help="which files each of N ranks would read; 2x2 for a grid"
    )
    verb.add_argument(
        "--max-memory", metavar="SIZE", type=values.size, help="use no more than this"
    )
    verb.add_argument("--threads", metavar="N", type=values.positive, help="how many threads")


def _share(text: str) -> float:
    from holdfast.core.quantities import share
    from holdfast.errors import BadArgument

    try:
        return share(text)
    except BadArgument as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write 1%, or 0.01") from error


def report_request_of(options: argparse.Namespace, ranks: Ranks) -> ReportRequest:
    from holdfast.extras.reports.report import ReportRequest

    return ReportRequest(
        options.stats or options.svd or options.sample is not None, options.sample, options.svd, options.filter, options.mesh,
        max_memory=options.max_memory, threads=options.threads, ranks=ranks, map=options.map,
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from holdfast.cli.progress import bar
    from holdfast.core.group import acting
    from holdfast.core.text import clip, escape, nbytes
    from holdfast.errors import BadArgument
    from holdfast.extras.reports.report import Report, page_target, prepared

    if options.output is None and not options.json:
        raise BadArgument(
            "say where the page shall be: -o page.html; or --json prints the data behind it"
        )
    if options.output is not None:
        # Before minutes of reading.
        page_target(options.output, overwrite=options.overwrite)
    quiet = options.quiet or options.json
    with (
        acting(options.group, "report") as ranks,
        prepared(options.path, options.other, report_request_of(options, ranks)) as ready,
        bar("Reading", ready.nbytes, quiet=quiet or not ready.nbytes) as progress,
        ranks.counting(progress) as counted,
    ):
        made = Report(ready.make(counted).document)
        where = None
        if ranks.first and options.output is not None:
            where = Path(made.save(options.output, overwrite=options.overwrite))
    if options.json:
        print_json(made.document)
    elif where is not None and not options.quiet:
        size = f"  {nbytes(os.path.getsize(where))}"
        print_lines(
            [[("wrote ", "clean"), (escape(clip(str(where), 400)), "title"), (size, "size")]]
        )
        print_lines([[(escape(clip(str(made.document["sentence"]), 2000)), "dim")]])
        if isinstance(nonfinite := made.document["nonfinite"], dict):
            style = "error" if nonfinite["at"] else "clean"
            print_lines([[(escape(clip(str(nonfinite["text"]), 1000)), style)]])
    return 0
