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
Write an HTML report about a checkpoint: its tensors, sizes, files and problems. With OTHER, the
report shows the differences between two checkpoints. For the directory of a run, it shows the steps
over time. The page is a single file that loads nothing from the network.
Reads no tensor data without --stats. A comparison reads the tensors whose checksums differ or are
missing."""

EXAMPLES = """\
examples:
  holdfast report model.safetensors -o model.html

  # Include histograms, norms and NaN counts.
  holdfast report model.safetensors -o model.html --stats

  # Estimate them from 1% of each large tensor.
  holdfast report huge/ -o huge.html --sample 1%

  # Compare two checkpoints.
  holdfast report base.safetensors tuned.safetensors -o change.html

  # Show a training run over time.
  holdfast report runs/llama -o run.html

  # Show which files each of eight ranks would read.
  holdfast report checkpoints/step-1000 -o step.html --mesh 8
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_report_arguments(verb)
    verb.add_argument("-o", "--output", metavar="FILE", type=values.file, help="HTML file to write")
    verb.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing file, even if it is not a report",
    )
    verb.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    verb.add_argument(
        "--json",
        action="store_true",
        help="print the data of the report as JSON",
    )


def add_report_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "path",
        metavar="PATH",
        type=values.target,
        help="checkpoint of any format, or the directory of a run",
    )
    verb.add_argument(
        "other",
        metavar="OTHER",
        type=values.target,
        nargs="?",
        help="second checkpoint: report the differences",
    )
    verb.add_argument(
        "--stats",
        action="store_true",
        help="read every tensor for its histogram, quantiles, norm, zeros and NaN",
    )
    verb.add_argument(
        "--sample",
        metavar="SHARE",
        type=_share,
        help="like --stats, but read only this share of each large tensor, such as 1%%",
    )
    verb.add_argument(
        "--svd",
        action="store_true",
        help="like --stats, with singular values; reads matrices three more times",
    )
    verb.add_argument("-f", "--filter", metavar="GLOB", help="include only names that match")
    verb.add_argument(
        "--map",
        metavar="MAP",
        help="convert PATH to another layout first, such as qwen3:hf:megatron",
    )
    verb.add_argument(
        "--mesh",
        metavar="N",
        help="show the files that each of N ranks would read; 2x2 for a grid of ranks",
    )
    verb.add_argument(
        "--max-memory",
        metavar="SIZE",
        type=values.size,
        help="memory limit for buffers (default: none)",
    )
    verb.add_argument(
        "--threads",
        metavar="N",
        type=values.positive,
        help="number of threads (default: chosen for this machine)",
    )


def _share(text: str) -> float:
    from holdfast.core.quantities import parse_fraction
    from holdfast.errors import BadArgument

    try:
        return parse_fraction(text)
    except BadArgument as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write 1% or 0.01") from error


def report_request_of(options: argparse.Namespace, ranks: Ranks) -> ReportRequest:
    from holdfast.extras.reports.report import ReportRequest

    return ReportRequest(
        options.stats or options.svd or options.sample is not None, options.sample, options.svd, options.filter, options.mesh,
        max_memory=options.max_memory, threads=options.threads, ranks=ranks, map=options.map,
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from holdfast.cli.progress import bar
    from holdfast.core.group import joined_ranks
    from holdfast.core.text import clip, escape, format_nbytes
    from holdfast.errors import BadArgument
    from holdfast.extras.reports.report import Report, page_target, prepared

    if options.output is None and not options.json:
        raise BadArgument("no output file; pass -o page.html, or --json to print the data")
    if options.output is not None:
        # Before minutes of reading.
        page_target(options.output, overwrite=options.overwrite)
    quiet = options.quiet or options.json
    with (
        joined_ranks(options.group, "report") as ranks,
        prepared(options.path, options.other, report_request_of(options, ranks)) as ready,
        bar("Reading", ready.nbytes, quiet=quiet or not ready.nbytes) as progress,
        ranks.joint_progress(progress) as counted,
    ):
        made = Report(ready.make(counted).document)
        where = None
        if ranks.is_first and options.output is not None:
            where = Path(made.save(options.output, overwrite=options.overwrite))
    if options.json:
        print_json(made.document)
    elif where is not None and not options.quiet:
        size = f"  {format_nbytes(os.path.getsize(where))}"
        print_lines(
            [[("wrote ", "clean"), (escape(clip(str(where), 400)), "title"), (size, "size")]]
        )
        print_lines([[(escape(clip(str(made.document["sentence"]), 2000)), "dim")]])
        if isinstance(nonfinite := made.document["nonfinite"], dict):
            style = "error" if nonfinite["at"] else "clean"
            print_lines([[(escape(clip(str(nonfinite["text"]), 1000)), style)]])
    return 0
