"""`holdfast stats`: least, largest, mean, deviation, norm and a histogram of each tensor.

layers.0.weight  bfloat16 [4096, 4096]  min -0.21  max 0.2  mean 1.2e-05  std 0.031  norm 127  zeros 12
                 ▁▁▁▂▃▅▇█▇▅▃▂▁▁▁
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.text import (
    LINES,
    Line,
    fields_of,
    guides,
    note_lines,
    padded,
    print_json,
    print_lines,
    width,
)
from holdfast.core.text import clip, escape, pluralize

if TYPE_CHECKING:
    from holdfast.verbs.stats import TensorStats

DESCRIPTION = """\
Compute minimum, maximum, mean, standard deviation, norm and a histogram of each tensor, and count
NaN, Inf and zeros. Tensors with NaN or Inf come first, with the index of the first such element.
NaN and Inf are excluded from the other statistics. Reads every tensor, with bounded memory."""

EXAMPLES = """\
exit codes:
  0  done
  1  a tensor contains a value that --fail-on selects
  2  an error

examples:
  holdfast stats model.safetensors

  # Only the attention weights, with a finer histogram.
  holdfast stats model.pt --filter '*.attn.*' --bins 64

  # Fail if a checkpoint contains NaN.
  holdfast stats step-1000/ --fail-on nan

  # List the tensors that contain NaN.
  holdfast stats model.pt --json \\
      | jq -r '.tensors[] | select(.nans > 0).name'
"""

BARS = " ▁▂▃▄▅▆▇█"
PLAIN_BARS = " .:-=+*#@"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH", type=values.path, help=values.PATH_HELP)
    verb.add_argument("-f", "--filter", metavar="GLOB", help="read only tensors whose names match")
    verb.add_argument(
        "--bins",
        metavar="N",
        type=_bins,
        default=32,
        help="number of bars of each histogram (default: 32); 0 for no histograms",
    )
    verb.add_argument(
        "--threads",
        metavar="N",
        type=values.positive,
        help="number of threads (default: chosen for this machine)",
    )
    verb.add_argument(
        "--fail-on",
        choices=("nan", "inf"),
        action="append",
        default=[],
        help="exit with 1 if a tensor contains NaN, or Inf; repeatable",
    )
    verb.add_argument("-a", "--all", action="store_true", help="show all tensors (default: 200)")
    verb.add_argument("-q", "--quiet", action="store_true", help=values.QUIET_HELP)
    verb.add_argument(
        "--json",
        action="store_true",
        help=values.JSON_HELP,
    )


def _bins(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 4096")
    return int(text)


def run(options: argparse.Namespace) -> int:
    from holdfast.cli.progress import bar
    from holdfast.core.group import joined_ranks
    from holdfast.engine.computed import describe_undecoded
    from holdfast.engine.threads import count_reading_threads
    from holdfast.verbs.open import check_ranks_opened_same
    from holdfast.verbs.open import open as open_checkpoint
    from holdfast.verbs.stats import chosen, measure, reading_nbytes

    with (
        joined_ranks(options.group, "measure tensors") as ranks,
        open_checkpoint(options.path, threads=1) as checkpoint,
    ):
        check_ranks_opened_same(ranks, checkpoint)
        tensors = chosen(checkpoint, options.filter)
        total = reading_nbytes(tensors, bins=options.bins)
        workers = count_reading_threads(None, options.threads, ranks.count_local_ranks())
        with (
            bar("Reading", total, quiet=options.quiet or options.json) as progress,
            ranks.joint_progress(progress) as counted,
        ):
            found = measure(
                tensors, bins=options.bins, threads=workers, progress=counted, ranks=ranks
            )
        if options.json:
            print_json(stats_document(checkpoint.path, found, describe_undecoded(tensors)))
        else:
            most = None if options.all else LINES
            bars = BARS if guides()[0].startswith("├") else PLAIN_BARS
            notes = describe_undecoded(tensors)
            print_lines(lines(checkpoint.path, found, most, bars=bars, notes=notes))
    has_nan = any(row.nans for row in found)
    has_infinity = any(row.infinities for row in found)
    failed = ("nan" in options.fail_on and has_nan) or ("inf" in options.fail_on and has_infinity)
    return 1 if failed else 0


def stats_document(
    path: str, found: Sequence[TensorStats], notes: Sequence[str]
) -> dict[str, object]:
    """Return the document that `--json` prints. Tensors stay in the order of the checkpoint."""
    from holdfast.verbs.nonfinite import describe_nonfinite

    names = "name dtype shape size mean std norm nans infinities zeros histogram first_nan first_infinity"
    rows: list[dict[str, object]] = []
    for row in found:
        fields = fields_of(row, names)
        rows.append(fields | {"min": row.minimum, "max": row.maximum})
    nonfinite = {
        "text": describe_nonfinite(found),
        "nan_tensors": sum(row.nans > 0 for row in found),
        "inf_tensors": sum(row.infinities > 0 for row in found),
    }
    document = {"schema": 1, "path": path, "nonfinite": nonfinite}
    return document | {"notes": list(notes), "tensors": rows}


def lines(
    path: str,
    found: Sequence[TensorStats],
    most: int | None,
    *,
    bars: str,
    notes: Sequence[str] = (),
) -> Iterator[Line]:
    from holdfast.verbs.nonfinite import describe_nonfinite
    from holdfast.verbs.stats import is_nonfinite, listed

    yield [(escape(clip(path, 200)), "title"), (f"  {pluralize(len(found), 'tensor')}", "dim")]
    shown = listed(found)[:most]
    for name, row in zip(padded([row.name for row in shown]), shown, strict=True):
        line: Line = [(name, "name"), (f"  {row.dtype} {list(row.shape)}", "dim")]
        for label, value in (
            ("min", row.minimum),
            ("max", row.maximum),
            ("mean", row.mean),
            ("std", row.std),
            ("norm", row.norm),
        ):
            line += [(f"  {label} ", "dim"), ("-" if value is None else f"{value:.4g}", "")]
        if row.zeros:
            line.append((f"  zeros {row.zeros:,}", "dim"))
        counts = ("NaN", row.nans, row.first_nan), ("inf", row.infinities, row.first_infinity)
        for label, number, first in counts:
            if number:
                place = f", first at {list(first)}" if first else ""
                line.append((f"  {label} {number:,}{place}", "error"))
        yield line
        if row.histogram:
            yield [(" " * (width(name) + 2), ""), (draw(row.histogram, bars), "size")]
    if len(shown) < len(found):
        yield [(f"… {len(found) - len(shown):,} more: use --filter or --all", "dim")]
    yield from note_lines(notes)
    style = "error" if any(map(is_nonfinite, found)) else "clean"
    yield [(describe_nonfinite(found), style)]


def draw(counts: Sequence[int], bars: str = BARS) -> str:
    """A bar for each count; what is not zero is never drawn as nothing.

    >>> draw([0, 1, 50, 100])
    ' ▁▄█'
    """
    top = max(counts, default=0)
    return "".join(bars[0] if not n else bars[max(1, n * (len(bars) - 1) // top)] for n in counts)
